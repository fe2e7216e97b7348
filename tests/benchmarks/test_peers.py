"""Whole comparisons: real processes, real HTTP, through the program's main."""

import os
import re
import signal
from pathlib import Path

import pytest

from loadtest.benchmark import Benchmark
from tests.benchmarks.comparisons import ALL, QUICK, Bench, Capture, has_ended, when

pytestmark = pytest.mark.slow  # servers are started, and waited for


def test_each_round_starts_each_server_anew_and_measures_all_scenarios(tmp_path: Path, capsys: Capture) -> None:
    bench = Bench(tmp_path, capsys, a="", b="")
    assert bench.run("--rounds", "2") == 0
    for name in ALL:
        assert list(bench.runs(name)) == [(1, "S1"), (1, "S2"), (2, "S1"), (2, "S2")]
        assert len(set(bench.pids(name))) == 2
        assert all(map(has_ended, bench.pids(name)))
        assert {run["loadtest"]["urls"][0]["groups"]["all"]["requests"]["ok"] for run in bench.runs(name).values()} == {
            4
        }
    assert bench.document["is_complete"]
    (first, _) = bench.document["comparison"]
    assert [len(first["servers"][name]["output tok/s"]["per_round"]) for name in ALL] == [2, 2]
    assert len(first["servers"]["b"]["output tok/s"]["ratio"]["per_round"]) == 2
    assert first["servers"]["a"]["output tok/s"]["ratio"]["per_round"] == [1.0, 1.0]
    assert "S1, all" in bench.out and "S2, all" in bench.out


def test_every_second_round_is_backwards(tmp_path: Path, capsys: Capture) -> None:
    bench = Bench(tmp_path, capsys, a="", b="")
    bench.run("--rounds", "2", "--scenario", "S1")
    assert re.findall(r"(\w) *: starting", bench.err) == ["a", "b", "b", "a"]


def test_servers_of_a_round_get_the_same_prompts_and_no_run_those_of_another(tmp_path: Path, capsys: Capture) -> None:
    bench = Bench(tmp_path, capsys, a="", b="")
    bench.run("--rounds", "2")
    ours, theirs = (re.findall(r"prompt (.*)", bench.notes(name)) for name in ALL)
    assert sorted(ours) == sorted(theirs)
    assert len(set(ours)) == len(ours) == 2 * 2 * 5


def test_a_server_that_does_not_start_says_why_and_the_others_go_on(tmp_path: Path, capsys: Capture) -> None:
    bench = Bench(tmp_path, capsys, a="")
    bench.add('[[server]]\nname = "broken"\ncommand = "sh -c \'echo no model; exit 3\'"\n')
    bench.add('[[server]]\nname = "nowhere"\ncommand = "/nowhere/at-all"\n')
    assert bench.run("--rounds", "1") == 1
    assert {run["problem"] for run in bench.runs("broken").values()} == {"did not start: exit code 3"}
    assert "No such file" in bench.runs("nowhere")[1, "S2"]["problem"]
    assert bench.runs("broken")[1, "S1"]["last_words"] == "no model"
    assert bench.runs("a")[1, "S2"]["problem"] == ""
    assert "no model" in bench.out and "exit code 3" in bench.out


def test_a_server_that_is_never_ready_is_given_up_and_ended(tmp_path: Path, capsys: Capture) -> None:
    bench = Bench(tmp_path, capsys, a="")
    bench.add(
        f'[[server]]\nname = "deaf"\ncommand = "sh -c \'echo started $$$$ > {tmp_path}/deaf; sleep 60\'"\n'
        "start_timeout_s = 1\n"
    )
    assert bench.run("--rounds", "1", "--scenario", "S1") == 1
    assert "is not ready after 1 s: cannot connect" in bench.runs("deaf")[1, "S1"]["problem"]
    assert all(map(has_ended, bench.pids("deaf"))) and bench.pids("deaf")


def test_a_server_that_crashes_loses_what_is_left_of_its_turn_only(tmp_path: Path, capsys: Capture) -> None:
    bench = Bench(tmp_path, capsys, a="", b="dies")
    assert bench.run("--rounds", "2") == 1
    problems = {at: run["problem"] for at, run in bench.runs("b").items()}
    assert problems[1, "S1"] == problems[2, "S1"] == ""
    assert problems[1, "S2"] == problems[2, "S2"] == "the server ended: killed by SIGKILL"
    assert {run["problem"] for run in bench.runs("a").values()} == {""}
    assert [sorted(section["servers"]) for section in bench.document["comparison"]] == [["a", "b"], ["a"]]
    assert bench.runs("b")[1, "S2"]["foreign_cpu_share"] is None
    assert bench.runs("b")[1, "S1"]["foreign_cpu_share"] is not None


def test_what_comes_after_a_crash_in_the_same_turn_says_so(tmp_path: Path, capsys: Capture) -> None:
    bench = Bench(tmp_path, capsys, a="dies")
    bench.run("--rounds", "1", "--scenario", "S1", "S2", "S3")
    assert bench.runs("a")[1, "S3"]["problem"] == "the server had ended: killed by SIGKILL"


def test_a_scenario_that_takes_too_long_is_in_no_comparison(tmp_path: Path, capsys: Capture) -> None:
    bench = Bench(tmp_path, capsys, a="", b="hangs")
    assert bench.run("--rounds", "1", "--scenario", "S1", "--limit", "1", load=(*QUICK[:-1], "0")) == 1
    assert bench.runs("b")[1, "S1"]["problem"] == "not finished in 1 s"
    assert list(bench.document["comparison"][0]["servers"]) == ["a"]


def test_after_a_scenario_that_was_given_up_the_server_is_started_anew(tmp_path: Path, capsys: Capture) -> None:
    bench = Bench(tmp_path, capsys, a="", b="hangs")
    bench.run("--rounds", "1", "--limit", "1", "--logs", str(tmp_path / "logs"), load=(*QUICK[:-1], "0"))
    assert {run["problem"] for run in bench.runs("b").values()} == {"not finished in 1 s"}
    assert [len(set(bench.pids(name))) for name in ALL] == [1, 2]
    assert all(map(has_ended, bench.pids("b")))
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"a-1-S1.log", "b-1-S1.log", "b-1-S2.log"}


def test_a_signal_that_comes_with_the_limit_ends_the_comparison(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, stop = Bench(tmp_path, capsys, a="hangs"), Benchmark.stop

    def both(benchmark: Benchmark) -> None:
        stop(benchmark)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Benchmark, "stop", both)
    assert bench.run("--rounds", "1", "--limit", "1", load=(*QUICK[:-1], "0")) == 130
    assert len(bench.pids("a")) == 1


def test_refused_requests_and_short_answers_are_warned_of(tmp_path: Path, capsys: Capture) -> None:
    bench = Bench(tmp_path, capsys, a="", b="refuses stops_early")
    assert bench.run("--rounds", "1", "--scenario", "S1", load=(*QUICK, "--no-ignore-eos")) == 0
    assert "b, S1, round 1: 2 of 4 requests of all were refused" in bench.document["warnings"]
    assert "b, S1, round 1: 2 answers of all are not of the length asked for" in bench.document["warnings"]
    assert "2/4" in bench.out and "4/4" in bench.out
    assert "(2/4 ok)" in bench.err


def test_a_server_whose_variables_are_not_set_is_left_out(tmp_path: Path, capsys: Capture) -> None:
    bench = Bench(tmp_path, capsys, a="")
    bench.add('[[server]]\nname = "absent"\ncommand = "${NO_SUCH_PLACE}/bin/server"\n')
    assert bench.run("--rounds", "1", "--scenario", "S1") == 0
    assert bench.runs("absent") == {}
    assert "absent was left out: NO_SUCH_PLACE is not set" in bench.document["warnings"]


def test_where_every_server_is_left_out_nothing_is_measured(tmp_path: Path, capsys: Capture) -> None:
    bench = Bench(tmp_path, capsys)
    bench.add('[[server]]\nname = "absent"\ncommand = "${NO_SUCH_PLACE}/bin/server"\n')
    assert bench.run() == 2


def test_the_document_is_written_after_each_turn(tmp_path: Path, capsys: Capture) -> None:
    bench = Bench(tmp_path, capsys, a="", b="hangs")
    seen: list[bool] = []

    def look() -> None:
        seen.append(bench.document["is_complete"] is False and len(bench.runs("a")) == 1)
        os.kill(os.getpid(), signal.SIGINT)

    when(lambda: "prompt" in bench.notes("b"), look)
    bench.run("--rounds", "1", "--scenario", "S1")
    assert seen == [True]


def test_keys_are_not_in_the_document(tmp_path: Path, capsys: Capture) -> None:
    bench = Bench(tmp_path, capsys, a="")
    bench.run("--rounds", "1", "--scenario", "S1", load=(*QUICK, "--api-key", "s3cret"))
    assert "s3cret" not in (tmp_path / "document.json").read_text() + bench.out + bench.err


def test_a_version_is_what_its_command_prints(tmp_path: Path, capsys: Capture) -> None:
    bench = Bench(tmp_path, capsys, a="")
    bench.add('version = "echo one point two"\n')
    bench.run("--rounds", "1", "--scenario", "S1")
    assert bench.document["servers"][0]["version"] == "one point two"
    assert "one point two" in bench.out


def test_a_command_of_a_version_reads_nothing_from_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    bench = Bench(tmp_path, capsys, a="")
    bench.add('version = "cat"\n')
    (tmp_path / "typed").write_text("typed")
    kept = os.dup(0)
    with (tmp_path / "typed").open() as file:
        os.dup2(file.fileno(), 0)
    try:
        bench.run("--rounds", "1", "--scenario", "S1")
    finally:
        os.dup2(kept, 0)
        os.close(kept)
    assert bench.document["servers"][0]["version"] == ""


def test_logs_are_kept_where_asked(tmp_path: Path, capsys: Capture) -> None:
    bench = Bench(tmp_path, capsys)
    bench.add('[[server]]\nname = "a b"\ncommand = "sh -c \'echo no model; exit 3\'"\n')
    bench.run("--rounds", "2", "--logs", str(tmp_path / "logs"))
    assert [path.read_text() for path in sorted((tmp_path / "logs").iterdir())] == ["no model\n"] * 2
    assert (tmp_path / "logs" / "a_b-2-S1.log").exists()


def test_a_dry_run_starts_nothing(tmp_path: Path, capsys: Capture) -> None:
    bench = Bench(tmp_path, capsys, a="")
    assert bench.run("--dry-run") == 0
    assert bench.notes("a") == ""
    assert "tests.benchmarks.peer" in bench.err


def test_where_no_logs_can_be_kept_nothing_is_started(tmp_path: Path, capsys: Capture) -> None:
    bench = Bench(tmp_path, capsys, a="")
    assert bench.run("--logs", str(bench.file)) == 2
    assert f"--logs: cannot make {bench.file}: File exists" in bench.err
    assert bench.notes("a") == ""


@pytest.mark.parametrize(
    ("name", "words"), [("", "is a directory"), ("no/x.json", "No such file or directory"), ("x" * 252, "too long")]
)
def test_a_document_that_cannot_be_written_is_an_error_before_anything_is_started(
    name: str, words: str, tmp_path: Path, capsys: Capture
) -> None:
    bench = Bench(tmp_path, capsys, a="")
    assert bench.run("--json", str(tmp_path / name)) == 2
    assert bench.err.startswith("peers: --json: ") and words in bench.err
    assert not bench.notes("a")
