"""How the program ends: exit codes, messages, and where its JSON document is written."""

import asyncio
import json
import os
import signal
from itertools import count
from pathlib import Path

import pytest

from loadtest import benchmark
from loadtest.cli import main
from tests.loadtest.fake_server import FakeServer, running
from tests.loadtest.program import QUICK, Capture, Run, after_requests


def test_no_server_at_the_url_is_one_sentence_and_exit_code_2(capsys: Capture) -> None:
    with running(FakeServer()) as fake:
        pass
    run = Run(capsys, fake.url, *QUICK)
    assert run.code == 2
    assert run.out == ""
    assert run.err.startswith(f"loadtest: cannot connect to {fake.url}: connection refused")
    assert run.err.count("\n") == 1


def test_flags_that_do_not_go_together_are_exit_code_2(capsys: Capture) -> None:
    assert Run(capsys, "http://a", "--prefix-len", "5").code == 2
    assert Run(capsys, "nonsense").code == 2


def test_an_interrupt_keeps_what_was_measured(capsys: Capture) -> None:
    with running(FakeServer(gap_s=0.01)) as fake:
        after_requests(fake, 8, lambda: os.kill(os.getpid(), signal.SIGINT))
        run = Run(capsys, fake.url, *QUICK[:4], "--duration", "60", "--concurrency", "2", "--quiet")
    assert run.code == 130
    assert run.document["is_interrupted"]
    assert run.group["requests"]["ok"] >= 1
    assert "Interrupted" in run.out
    assert run.document["urls"][0]["num_interrupted"] == 2


def test_an_interrupt_while_the_counters_settle_keeps_the_round(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = count()

    async def settle(_: object) -> None:
        if next(waits):  # the second is after the round
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)

    monkeypatch.setattr(benchmark, "settled_snapshot", settle)
    with running(FakeServer()) as fake:
        run = Run(capsys, fake.url, *QUICK)
    assert run.code == 130
    assert run.group["requests"]["ok"] == 6
    assert run.document["urls"][0]["num_interrupted"] == 0


def test_a_server_that_goes_away_ends_the_run_with_what_was_measured(capsys: Capture) -> None:
    with running(FakeServer(gap_s=0.01)) as fake:
        after_requests(fake, 8, fake.stop)
        run = Run(capsys, fake.url, *QUICK[:4], "--duration", "60", "--concurrency", "2", "--quiet")
    assert run.code == 2
    assert "went away: connection refused" in run.err
    assert run.document["error"] in run.err
    assert run.group["requests"]["ok"] >= 1


def test_the_document_goes_where_it_is_asked_for_and_nowhere_else(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with running(FakeServer()) as fake:
        assert main([fake.url, *QUICK]) == 0
        assert "{" not in capsys.readouterr().out
        run = Run(capsys, fake.url, *QUICK, "--json", str(path))
    assert "{" not in run.out
    assert json.loads(path.read_text())["urls"][0]["url"] == fake.url


def test_a_file_that_cannot_be_written_is_reported_before_anything_is_measured(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "no" / "x.json"
    with running(FakeServer()) as fake:
        run = Run(capsys, fake.url, *QUICK, "--json", str(path))
    assert (run.code, run.out, fake.bodies) == (2, "", [])
    assert run.err == f"loadtest: --json: cannot write {path}: No such file or directory\n"


def test_a_run_that_fails_leaves_the_file_of_an_earlier_one(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("earlier")
    assert Run(capsys, "nonsense", "--json", str(path)).code == 2
    assert path.read_text() == "earlier"


def test_a_run_that_fails_leaves_no_file_where_none_was(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert Run(capsys, "http://127.0.0.1:1", *QUICK, "--json", str(path)).code == 2
    assert not path.exists()


def test_a_document_whose_file_cannot_be_written_any_more_is_on_stdout(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "x.json"

    def put_a_directory_there() -> None:
        path.mkdir()

    with running(FakeServer(gap_s=0.05)) as fake:
        after_requests(fake, 1, put_a_directory_there)
        run = Run(capsys, fake.url, *QUICK, "--json", str(path))
    assert run.code == 2
    assert run.group["requests"]["ok"] == 6
    assert "cannot write" in run.err
