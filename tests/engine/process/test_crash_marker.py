"""The crash marker: which requests were being computed can be read after a death."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.assembly import assemble
from engine.core.config import EngineConfig
from engine.process.crash_marker import CrashMarker
from tests.engine.fakes import FakeRunner, add, fake_info


@given(st.lists(st.lists(st.text(st.characters(codec="utf-8")))))
def test_the_newest_mark_is_read(marks: list[list[str]]) -> None:
    marker = CrashMarker.create()
    assert marker.read() == []
    for ids in marks:
        marker.mark(ids)
        assert CrashMarker(marker.fd).read() == ids
    marker.close()


def test_a_mark_outlives_its_writer() -> None:
    marker = CrashMarker.create()
    script = (
        "import os, sys; from engine.process.crash_marker import CrashMarker\n"
        "marker = CrashMarker(int(sys.argv[1])); marker.mark(['a'] * 1000); marker.mark(['b', 'c'])\n"
        "os.kill(os.getpid(), 9)"
    )
    result = subprocess.run([sys.executable, "-c", script, str(marker.fd)], pass_fds=(marker.fd,), check=False)
    assert (result.returncode, marker.read()) == (-signal.SIGKILL, ["b", "c"])
    marker.close()


def test_a_torn_mark_reads_as_empty() -> None:
    marker = CrashMarker.create()
    os.pwrite(marker.fd, (5).to_bytes(4) + b"\x95", 0)
    assert marker.read() == []
    marker.close()


def test_the_same_requests_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    marker, num_writes = CrashMarker.create(), 0

    def pwrite(*_: object) -> int:
        nonlocal num_writes
        num_writes += 1
        return 0

    monkeypatch.setattr(os, "pwrite", pwrite)
    for ids in (["a"], ["a"], ["a", "b"], ["a", "b"]):
        marker.mark(ids)
    assert num_writes == 2
    marker.close()


def test_each_step_marks_the_requests_it_computes() -> None:
    marks: list[list[str]] = []

    class Marker:
        def mark(self, request_ids: Sequence[str]) -> None:
            marks.append(list(request_ids))

    engine = assemble(EngineConfig(model="fake", block_size=4), fake_info(64, 4), FakeRunner(4), marker=Marker())
    for name in "ab":
        add(engine, name, max_tokens=2)
    while engine.has_work:
        engine.step()
    assert marks == [["a", "b"], ["a", "b"], ["a", "b"]]  # before it is planned, too, if any are running
