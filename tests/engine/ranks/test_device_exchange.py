"""Ranks that exchange columns by torch.distributed, here by Gloo, get what `torch.cat` makes of them, or an error."""

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from engine.ranks.device_exchange import new_meeting_place, open_device_group
from engine.runner.host_transfers import NoHostTransfers
from engine.weights.rank_group import RankGroup
from tests.engine.ranks.rank_threads import together

CPU = torch.device("cpu")


def device_groups(size: int) -> list[RankGroup]:
    """Returns the group of each rank, which meet as threads of this process."""
    file = new_meeting_place()
    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(lambda rank: open_device_group(file, rank, size, CPU), range(size)))
    finally:
        os.close(file)


@pytest.fixture(scope="module")
def three() -> Iterator[list[RankGroup]]:
    groups = device_groups(3)
    yield groups
    for group in groups:
        group.exchange.abort()


@hypothesis_settings(max_examples=30)
@given(
    widths=st.lists(st.integers(0, 70), min_size=3, max_size=3).filter(any),
    row_counts=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.float8_e4m3fn]),
)
def test_every_rank_gets_the_columns_of_all(
    widths: list[int], row_counts: list[int], dtype: torch.dtype, three: list[RankGroup]
) -> None:
    starts = [sum(widths[:rank]) for rank in range(len(widths) + 1)]
    parts = [[torch.randint(-99, 99, (rows, width)).to(dtype) for width in widths] for rows in row_counts]

    def run(group: RankGroup) -> list[Tensor]:
        gather = group.gather(starts)
        with NoHostTransfers():  # type: ignore[no-untyped-call]  # so a graph can hold it
            return [gather.run(part[group.rank]) for part in parts]

    expected = [torch.cat(part, dim=1) for part in parts]
    for gathered in together(three, run):
        assert [(each.dtype, each.tolist()) for each in gathered] == [(each.dtype, each.tolist()) for each in expected]


def test_rows_need_not_be_contiguous(three: list[RankGroup]) -> None:
    whole = torch.arange(36.0).view(9, 4).t()
    gathered = together(three, lambda group: group.gather([0, 3, 6, 9]).run(whole[:, 3 * group.rank :][:, :3]))
    assert all(torch.equal(each, whole) for each in gathered)


def test_numbers_are_exchanged_as_well(three: list[RankGroup]) -> None:
    number = 2**53 - 1
    found = together(three, lambda group: (group.sum(group.rank, 2), group.of_first(number - group.rank)))
    assert found == [([3.0, 6.0], number)] * 3
    assert together(three, lambda group: group.have_all(7 if group.rank < 2 else None)) == [False] * 3


def test_what_does_not_fit_is_an_error_before_any_rank_waits(three: list[RankGroup]) -> None:
    with pytest.raises(RuntimeError, match="do not have this rank's 2 columns"):
        three[0].gather([0, 2, 4, 6]).run(torch.zeros(1, 3))
    for starts in ([0, 2, 4], [0, 4, 2, 6], [1, 2, 3, 4]):
        with pytest.raises(RuntimeError, match="begin where"):
            three[0].gather(starts)


def test_ranks_that_are_given_up_gather_nothing() -> None:
    first, _ = device_groups(2)
    first.exchange.abort()
    with pytest.raises(RuntimeError, match="given up"):
        first.wait_for_all()


def test_only_those_that_inherit_it_have_the_file_by_which_ranks_meet() -> None:
    file = new_meeting_place()
    assert os.fstat(file).st_nlink == 0 and stat.S_ISREG(os.fstat(file).st_mode) and not os.get_inheritable(file)
    os.close(file)


PROCESS = """
import json, os, sys, threading
from engine.host.lean_torch import make_torch_lean
make_torch_lean()
import torch
from engine.ranks.device_exchange import open_device_group
before = {*sys.modules}
file, rank = map(int, sys.argv[1:])
group = open_device_group(file, rank, 2, torch.device("cpu"))
gathered = group.gather([0, 5, 7]).run(torch.full((2, 5 - 3 * rank), rank, dtype=torch.bfloat16))
sockets = {f"socket:[{line.split()[9]}]": line.split()[1] for name in ("tcp", "tcp6")
           for line in open(f"/proc/net/{name}").readlines()[1:] if line.split()[3] == "0A"}
own = [os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd") if int(each) > 2 and
       os.path.lexists(f"/proc/self/fd/{each}")]
print(json.dumps([gathered.tolist(), [sockets[each] for each in own if each in sockets],
                  sorted({*sys.modules} - before)]), flush=True)
group.wait_for_all()
os._exit(0)
"""


def two_processes(program: str) -> "list[subprocess.Popen[bytes]]":
    """Starts a program for each of two ranks, which gets the file by which they meet, and its number."""
    file, pipe = new_meeting_place(), subprocess.PIPE
    commands = [[sys.executable, "-c", program, str(file), str(rank)] for rank in range(2)]
    root = Path(__file__).resolve().parents[3]
    try:
        return [subprocess.Popen(each, pass_fds=(file,), stdin=pipe, stdout=pipe, cwd=root) for each in commands]
    finally:
        os.close(file)


def test_two_processes_talk_over_the_loopback_interface_alone_and_import_nothing_for_it() -> None:
    for rank in two_processes(PROCESS):
        gathered, listening, imported = json.loads(rank.communicate(timeout=120)[0])
        assert gathered == [[0.0] * 5 + [1.0] * 2] * 2 and imported == []
        assert listening and all(address.startswith("0100007F:") for address in listening)
        assert rank.returncode == 0


WAITING = """
import sys, threading, time
import torch
from engine.ranks.__main__ import end_after_parent
from engine.ranks.device_exchange import open_device_group
threading.Thread(target=end_after_parent, args=(sys.stdin.fileno(),), daemon=True).start()
group = open_device_group(int(sys.argv[1]), int(sys.argv[2]), 2, torch.device("cpu"))
print("met", flush=True)
if group.is_first:
    time.sleep(600)
group.wait_for_all()
"""


def test_a_rank_that_waits_for_another_ends_with_its_parent() -> None:
    first, second = two_processes(WAITING)
    with first, second:
        assert all(rank.stdout and rank.stdout.readline() == b"met\n" for rank in (first, second))
        time.sleep(0.1)  # it waits now
        assert second.poll() is None and second.stdin
        second.stdin.close()
        assert second.wait(60) == 1 and first.poll() is None
        first.kill()
