"""A record of a policy's decisions, replayed, decides the same."""

import io
import json
from pathlib import Path

import pytest

from server.routing.policies import NAMES
from server.routing.recording import RecordingPolicy, Replayed, replay
from tools.simulate.__main__ import main
from tools.simulate.cluster import Cluster, ClusterSettings
from tools.simulate.replica import ReplicaSettings
from tools.simulate.trace import TraceSettings, sessions

TRACE = TraceSettings(40, 40.0, num_agents=4, agent_tokens=64, first_tokens=30, turn_tokens=20, output_tokens=5)
CLUSTER = ClusterSettings(3, ReplicaSettings(num_blocks=256, block_size=16), num_deaths=4, deaths_until_s=2.0)


def record(name: str) -> list[str]:
    """Returns the record of a policy that routed a trace, in which replicas come, report and die."""
    file = io.StringIO()
    Cluster(CLUSTER, RecordingPolicy(name, file, seed=3, max_digests=50), sessions(TRACE, 0), 0).run()
    return file.getvalue().splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_a_record_replayed_decides_the_same(name: str) -> None:
    lines = record(name)
    calls = [json.loads(line)["call"] for line in lines]
    assert {"policy", "add", "remove", "report", "choose", "sent"} == set(calls)
    replayed = replay(lines)
    assert replayed == Replayed(calls.count("choose"), 0) and replayed.num_decisions >= 40


@pytest.mark.parametrize("call", ["add", "remove", "report", "sent"])
def test_each_call_counts(call: str) -> None:
    """Without the reports, say, decisions differ: so they are part of the record."""
    lines = [line for line in record("prefix-aware") if json.loads(line)["call"] != call]
    assert replay(lines).num_different > 0


def test_another_policy_decides_otherwise() -> None:
    assert replay(record("prefix-aware"), "round-robin").num_different > 5


def test_what_is_no_record_is_refused() -> None:
    for lines in ([], ["{}"], [record("random")[0], '{"call": "what"}']):
        with pytest.raises((KeyError, ValueError)):
            replay(lines)


def test_a_full_disk_ends_the_record_and_not_the_routing(caplog: pytest.LogCaptureFixture) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as file:
        Cluster(CLUSTER, RecordingPolicy("prefix-aware", file), sessions(TRACE, 0), 0).run()
        assert file.closed
    assert caplog.text.count("recorded no further") == 1


def test_the_simulator_says_what_is_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none.jsonl").write_text("{}")
    for name in ("none.jsonl", "absent.jsonl"):
        with pytest.raises(SystemExit, match="2"):
            main(["--replay", str(tmp_path / name)])
        assert f"--replay: {tmp_path / name} is no record" in capsys.readouterr().err


def test_the_simulator_replays_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.jsonl"
    lines = record("prefix-aware")
    path.write_text("\n".join(lines))
    assert main(["--replay", str(path), "--policy", "random"]) == 0
    assert "of which 0 come out otherwise" in capsys.readouterr().out
    index = next(index for index, line in enumerate(lines) if '"call": "choose"' in line)
    lines[index] = json.dumps(json.loads(lines[index]) | {"chosen": "nobody"})
    path.write_text("\n".join(lines))
    assert main(["--replay", str(path)]) == 1
