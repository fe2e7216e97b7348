"""The simulator: a function of its seed, in which no request is lost, whatever dies."""

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.routing.policies import NAMES
from server.routing.policy import PrefixAwarePolicy, RandomPolicy
from server.routing.replica_loads import ReplicaLoad
from tools.simulate.__main__ import main
from tools.simulate.cluster import Cluster, ClusterSettings
from tools.simulate.replica import ReplicaSettings, SimulatedReplica
from tools.simulate.results import Histogram, Results
from tools.simulate.summaries import simulate
from tools.simulate.trace import TraceSettings, sessions

ROOT = Path(__file__).resolve().parents[2]
TRACE = TraceSettings(
    60, 40.0, num_agents=4, agent_tokens=64, turns=4.0, first_tokens=30, turn_tokens=20, output_tokens=5, pause_s=0.2
)
REPLICA = ReplicaSettings(num_blocks=256, block_size=16, max_num_seqs=8, max_num_batched_tokens=64)
CLUSTER = ClusterSettings(3, REPLICA)
DEADLY = replace(CLUSTER, num_deaths=6, deaths_until_s=2.0, restart_s=0.5)


def run(
    cluster: ClusterSettings = CLUSTER, trace: TraceSettings = TRACE, name: str = "prefix-aware", seed: int = 0
) -> Results:
    return simulate(name, trace, cluster, seed)


def test_the_seed_decides_everything() -> None:
    rows = [run(DEADLY, seed=seed).row() for seed in (1, 1, 2)]
    assert rows[0] == rows[1] != rows[2]


@pytest.mark.parametrize("name", NAMES)
def test_every_answer_is_whole_though_replicas_die(name: str) -> None:
    results = run(DEADLY, name=name)
    assert (results.num_requests, results.num_wrong) == (60, 0)
    assert results.num_moved > 0
    assert results.num_sampled == results.num_output_tokens, "a request that moves takes its tokens along"


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 99),
    num_replicas=st.integers(1, 3),
    num_deaths=st.integers(0, 5),
    num_blocks=st.integers(24, 60),
    max_num_seqs=st.integers(1, 4),
)
def test_every_answer_is_whole_whatever_the_size(
    seed: int, num_replicas: int, num_deaths: int, num_blocks: int, max_num_seqs: int
) -> None:
    """Also where blocks are few, so that requests are preempted, and where for a while there is no replica at all."""
    replica = replace(REPLICA, num_blocks=num_blocks, max_num_seqs=max_num_seqs)
    cluster = ClusterSettings(num_replicas, replica, num_deaths=num_deaths, deaths_until_s=2.0, restart_s=0.3)
    results = run(cluster, replace(TRACE, num_requests=20, max_model_len=300), seed=seed)
    assert (results.num_requests, results.num_wrong) == (20, 0)


def test_requests_wait_for_a_replica_where_there_is_none() -> None:
    cluster = ClusterSettings(1, REPLICA, num_deaths=3, deaths_until_s=1.0, restart_s=5.0)
    results = run(cluster)
    assert results.num_wrong == 0 and results.end_s > 5.0
    assert results.ttft.percentile(100) > 3.0


def test_replicas_hold_nothing_at_the_end() -> None:
    cluster = Cluster(DEADLY, PrefixAwarePolicy(), sessions(TRACE, 0), 0)
    cluster.run()
    assert len(cluster._replicas) > 0
    for each in cluster._replicas.values():
        assert each.stats.pool.held == 0 and not each.requests and each.load.num_tokens == 0


def test_a_session_finds_what_was_computed_for_it_only_where_it_was() -> None:
    many = replace(CLUSTER, num_replicas=10), replace(TRACE, num_requests=200, first_tokens=200.0, turn_tokens=100.0)
    assert run(*many).hit_rate > 1.5 * run(*many, name="random").hit_rate > 0


def test_the_router_hears_of_a_replica_again_and_again_but_not_at_every_step() -> None:
    heard: dict[str, list[float]] = {}

    class Listening(PrefixAwarePolicy):
        def report(self, replica: str, load: ReplicaLoad) -> None:
            heard.setdefault(replica, []).append(cluster._now_s)

    cluster = Cluster(CLUSTER, Listening(), sessions(TRACE, 0), 0)
    cluster.run()
    gaps = [later - earlier for times in heard.values() for earlier, later in pairwise(times)]
    assert len(heard) == 3 and len(gaps) > 3
    assert min(gaps) >= CLUSTER.report_s


def test_few_blocks_preempt_and_change_no_answer() -> None:
    results = run(
        replace(CLUSTER, num_replicas=1, replica=replace(REPLICA, num_blocks=30)),
        replace(TRACE, output_tokens=40.0, max_model_len=300),
    )
    assert results.num_preemptions > 0 and results.num_wrong == 0


def test_a_replica_reports_what_waits_and_what_runs() -> None:
    replica = SimulatedReplica("r", REPLICA)
    cluster = Cluster(replace(CLUSTER, num_replicas=0), RandomPolicy(), iter(()), 0)
    session = next(sessions(TRACE, 0))
    cluster._hashes[0] = []
    request = cluster._request("0/0", session, 0, [])
    num_tokens = request.num_tokens
    replica.add(request)
    assert replica.load.waiting_tokens == num_tokens and replica.load.num_running == 0
    while not request.output_token_ids:
        assert replica.begin_step(0.0) is not None
        replica.end_step()
    assert replica.load.waiting_tokens == 0 and replica.load.num_running == 1


def test_a_turn_sends_the_whole_conversation_so_far() -> None:
    for session in sessions(replace(TRACE, num_requests=30), 3):
        for turn in range(1, len(session.turns)):
            before = session.prompt(turn - 1) + session.answer(turn - 1)
            assert session.prompt(turn)[: len(before)] == before
            assert len(session.prompt(turn)) == len(before) + session.turns[turn].num_new


def test_sessions_share_their_agents_beginning_and_nothing_else() -> None:
    several = list(sessions(TRACE, 0))
    assert sum(len(each.turns) for each in several) == 60
    assert all(one.start_s <= other.start_s for one, other in pairwise(several))
    assert {len(set(one.prompt(0)) & set(other.prompt(0))) for one, other in pairwise(several)} == {0, 64}


def test_contexts_stay_within_the_models() -> None:
    for session in sessions(replace(TRACE, turns=50.0, max_model_len=300), 0):
        last = len(session.turns) - 1
        assert len(session.prompt(last) + session.answer(last)) <= 300


def test_percentiles_are_right_to_a_percent() -> None:
    histogram = Histogram()
    assert histogram.percentile(50) == 0.0
    for number in range(1, 101):
        histogram.add(number / 1e3)
    for percent in (1, 50, 99, 100):
        assert histogram.percentile(percent) == pytest.approx(percent / 1e3, rel=0.01)


def test_the_program_prints_a_row_for_each_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replicas", "2", "--requests", "8", "--policy", "random", "--policy", "prefix-aware"]) == 0
    with pytest.raises(SystemExit, match="2"):
        main(["--blocks", "100"])
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert "hit rate" in header
    assert [row.split()[1] for row in rows] == ["random", "prefix-aware"] and all("8 of 8" in row for row in rows)


def test_policies_that_are_simulated_at_once_have_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--replicas 2 --requests 30 --deaths 1 --policy random --policy least-loaded".split()
    assert main(arguments) == 0
    command = [sys.executable, "-m", "tools.simulate", *arguments, "--jobs", "2"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert printed == capsys.readouterr().out and printed.count("30 of 30") == 2
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--jobs", "0"])
