"""CPUs of ranks on machines that these files describe."""

from pathlib import Path

import pytest

from engine.host.numa import cpus_of_ranks, numa_nodes


def machine(directory: Path, *cpu_lists: str) -> list[frozenset[int]]:
    """Returns the nodes of a machine whose sysfs has these lists of CPUs."""
    for index, cpus in enumerate(cpu_lists):
        (directory / f"node{index}").mkdir()
        (directory / f"node{index}" / "cpulist").write_text(f"{cpus}\n")
    (directory / "online").write_text("0-9\n")
    return numa_nodes(directory)


def cpus(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


def test_nodes_are_read_in_order_of_their_numbers(tmp_path: Path) -> None:
    lists = [str(number) for number in range(11)]
    assert machine(tmp_path, *lists) == [cpus(number) for number in range(11)]


def test_a_node_without_cpus_is_none(tmp_path: Path) -> None:
    assert machine(tmp_path, "0-2,8", "", "4,6-7") == [cpus(0, 1, 2, 8), cpus(4, 6, 7)]


def test_a_system_that_does_not_tell_has_no_nodes(tmp_path: Path) -> None:
    assert numa_nodes(tmp_path / "missing") == []
    assert machine(tmp_path, "what?") == []


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, [cpus(*range(8))]),
        (2, [cpus(0, 1, 2, 3), cpus(4, 5, 6, 7)]),
        (3, [cpus(0, 1, 2, 3), cpus(4, 5), cpus(6, 7)]),
        (4, [cpus(0, 1), cpus(2, 3), cpus(4, 5), cpus(6, 7)]),
    ],
)
def test_ranks_keep_to_their_nodes(size: int, expected: list[frozenset[int]], tmp_path: Path) -> None:
    assert cpus_of_ranks(size, set(range(8)), machine(tmp_path, "0-3", "4-7")) == expected


def test_few_ranks_share_out_many_nodes(tmp_path: Path) -> None:
    nodes = machine(tmp_path, "0-1", "2-3", "4-5", "6-7")
    assert cpus_of_ranks(2, set(range(8)), nodes) == [cpus(0, 1, 2, 3), cpus(4, 5, 6, 7)]


def test_only_allowed_cpus_count(tmp_path: Path) -> None:
    nodes = machine(tmp_path, "0-3", "4-7")
    assert cpus_of_ranks(2, {1, 2, 5}, nodes) == [cpus(1, 2), cpus(5)]
    assert cpus_of_ranks(2, {1, 2}, nodes) == [cpus(1, 2), cpus(1, 2)]  # both on one node


def test_nobody_is_bound_without_need(tmp_path: Path) -> None:
    assert cpus_of_ranks(2, {0, 1}, machine(tmp_path, "0-1")) == [cpus(0, 1)] * 2
    assert cpus_of_ranks(2, {0, 1}, []) == [cpus(0, 1)] * 2
    assert cpus_of_ranks(5, {0, 1, 2, 3}, [cpus(0, 1), cpus(2, 3)]) == [cpus(0, 1, 2, 3)] * 5  # fewer CPUs than ranks
