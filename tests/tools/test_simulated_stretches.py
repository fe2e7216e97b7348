"""Decode steps that the simulator runs at once: nothing differs from one step after the other, to the last bit."""

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import Mock, patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.request import Request
from server.routing.policies import new_policy
from tests.fuzz import num_examples
from tools.simulate.cluster import Cluster, ClusterSettings
from tools.simulate.replica import ReplicaSettings, SimulatedReplica
from tools.simulate.stretches import Stretch, StretchingScheduler
from tools.simulate.trace import TraceSettings, sessions

TRACE = TraceSettings(
    40, 40.0, num_agents=4, agent_tokens=64, turns=4.0, first_tokens=60, turn_tokens=40, output_tokens=20, pause_s=0.2
)
REPLICA = ReplicaSettings(num_blocks=256, block_size=16, max_num_seqs=8, max_num_batched_tokens=64)


def outcome(cluster: ClusterSettings, trace: TraceSettings, name: str, seed: int) -> tuple[object, ...]:
    """Returns all that a simulation tells: decisions with their times, counts, every gap, and each replica's end."""
    policies = [new_policy(name, seed=seed) for _ in range(2)]
    simulated = Cluster(cluster, policies[0], sessions(trace, seed), seed, policies[1])
    results = simulated.run()
    stats = {name: each.stats for name, each in simulated._replicas.items()}
    times = results.ttft._counts, results.itl._counts, results.end_s
    return results.row(), times, results.num_sampled, results.num_output_tokens, stats


@pytest.mark.fuzz
@settings(max_examples=num_examples(16), deadline=None)
@given(
    seed=st.integers(0, 99),
    num_prefill=st.integers(0, 2),
    num_decode=st.integers(1, 3),
    num_deaths=st.integers(0, 6),
    num_blocks=st.integers(24, 60),
    has_store=st.booleans(),
    name=st.sampled_from(["random", "round-robin", "least-loaded", "prefix-aware"]),
)
def test_steps_at_once_are_those_that_come_one_by_one(
    seed: int, num_prefill: int, num_decode: int, num_deaths: int, num_blocks: int, has_store: bool, name: str
) -> None:
    cluster = ClusterSettings(
        num_prefill + num_decode,
        replace(REPLICA, num_blocks=num_blocks),
        num_deaths=num_deaths,
        deaths_until_s=2.0,
        restart_s=0.3,
        num_prefill=num_prefill,
        has_store=has_store,
        prefill_min_tokens=32,
    )
    trace = replace(TRACE, max_model_len=300)
    at_once, one_by_one = (outcome(replace(cluster, step_by_step=each), trace, name, seed) for each in (False, True))
    assert at_once == one_by_one


def test_most_steps_are_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for is_single in (True, False):
        begin_step = Mock(wraps=SimulatedReplica.begin_step)
        with monkeypatch.context() as patch:
            patch.setattr(SimulatedReplica, "begin_step", lambda *args, call=begin_step: call(*args))
            outcome(ClusterSettings(3, REPLICA, step_by_step=is_single), TRACE, "random", 0)
        counts.append(begin_step.call_count)
    assert 0 < counts[1] < counts[0] / 2


def test_decode_steps_behind_prefill_steps_are_run_at_once_though_others_wait() -> None:
    cluster = Cluster(ClusterSettings(1, REPLICA), new_policy("random"), sessions(TRACE, 0), 0)
    seen: list[tuple[int, int]] = []
    begin = StretchingScheduler.alike

    def alike(scheduler: StretchingScheduler, block_size: int) -> tuple[Sequence[Request], int]:
        requests, num_steps = begin(scheduler, block_size)
        if num_steps and len(requests) < scheduler.stats.num_running + scheduler.stats.num_waiting:
            seen.append((num_steps, scheduler.stats.num_waiting))
        return requests, num_steps

    with patch.object(StretchingScheduler, "alike", alike):
        cluster.run()
    assert {num_steps for num_steps, _ in seen} == {1} and any(num_waiting for _, num_waiting in seen)


def test_a_scheduler_that_records_keys_decides_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = []
    for _ in range(2):
        outcomes.append(outcome(ClusterSettings(3, REPLICA, has_store=True), TRACE, "prefix-aware", 0))
        monkeypatch.setattr("tools.simulate.replica.NoPrefixSteering", lambda: None)
    assert outcomes[0] == outcomes[1]


def test_a_stretch_that_is_cut_ends_with_the_step_under_way() -> None:
    stretch = Stretch(0.0, (), (1.0, 2.0, 3.0))
    assert [len(stretch.under_way(now_s)) for now_s in (0.5, 1.0, 1.5, 3.0)] == [1, 1, 2, 3]
    assert [len(each) if (each := stretch.before(now_s)) else 0 for now_s in (0.5, 1.0, 1.5, 3.5)] == [0, 0, 1, 3]
    assert (stretch.last_start_s, stretch.under_way(0.5).last_start_s) == (2.0, 0.0)
