"""How the program ends, and where its document goes."""

import asyncio
import json
import os
import signal
from itertools import count
from pathlib import Path

import pytest

from loadtest import benchmark
from tests.loadtest.fake_server import FakeServer, running
from tests.loadtest.program import QUICK, Capture, Run, after_requests


def test_nobody_at_the_url_is_one_sentence_and_exit_code_2(capsys: Capture) -> None:
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


def test_the_document_also_goes_to_a_file(capsys: Capture, tmp_path: Path) -> None:
    with running(FakeServer()) as fake:
        run = Run(capsys, fake.url, *QUICK, "--json", str(tmp_path / "x.json"))
        assert Run(capsys, fake.url, *QUICK, "--json", str(tmp_path / "no" / "x.json")).code == 2
    assert json.loads((tmp_path / "x.json").read_text()) == run.document
