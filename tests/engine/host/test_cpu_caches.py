"""The size of the largest cache is read as Linux writes it."""

import sys
from pathlib import Path

import pytest

from engine.host.cpu_caches import all_caches_bytes, largest_cache_bytes


def write_caches(path: Path, *sizes: str) -> None:
    for index, size in enumerate(sizes):
        (path / f"index{index}").mkdir()
        (path / f"index{index}" / "size").write_text(size)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (("32K\n", "32K\n", "1024K\n", "32768K\n"), 32 << 20),
        (("32K\n", "2M\n"), 2 << 20),
        (("32K\n", "many\n", "\n", "K\n"), 32 << 10),
        ((), 0),
    ],
)
def test_the_largest_one_counts(sizes: tuple[str, ...], expected: int, tmp_path: Path) -> None:
    write_caches(tmp_path, *sizes)
    assert largest_cache_bytes(tmp_path) == expected


def test_a_system_that_tells_of_none_has_none(tmp_path: Path) -> None:
    assert largest_cache_bytes(tmp_path / "nowhere") == all_caches_bytes(tmp_path / "nowhere") == 0


def test_a_cache_that_several_share_is_counted_once(tmp_path: Path) -> None:
    for cpu, shared in enumerate(("0-1", "0-1", "2-3", "2-3")):
        caches = tmp_path / f"cpu{cpu}" / "cache"
        caches.mkdir(parents=True)
        write_caches(caches, "32K\n", "32M\n")
        (caches / "index1" / "shared_cpu_list").write_text(f"{shared}\n")
    assert all_caches_bytes(tmp_path) == 2 * (32 << 20)


def test_caches_of_which_nobody_tells_who_shares_them_are_each_cpus_own(tmp_path: Path) -> None:
    for cpu in range(2):
        (tmp_path / f"cpu{cpu}" / "cache").mkdir(parents=True)
        write_caches(tmp_path / f"cpu{cpu}" / "cache", "2M\n")
    assert all_caches_bytes(tmp_path) == 4 << 20


@pytest.mark.skipif(
    sys.platform != "linux" or not Path("/sys/devices/system/cpu/cpu0/cache/index0/size").exists(),
    reason="this system does not tell of its caches",
)
def test_this_machines_own_is_found() -> None:
    assert 16 << 10 <= largest_cache_bytes() <= all_caches_bytes() < 1 << 40
