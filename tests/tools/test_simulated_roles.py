"""Prefill and decode replicas in the simulator: what one computes the other finds, and no request is lost, whatever
dies."""

import heapq
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from server.routing.policies import NAMES
from server.routing.policy import PrefixAwarePolicy
from tools.simulate.__main__ import main
from tools.simulate.cluster import Cluster, ClusterSettings
from tools.simulate.kv_store import SharedStore
from tools.simulate.replica import ReplicaSettings, SimulatedReplica, StepPrices
from tools.simulate.results import Results
from tools.simulate.summaries import simulate
from tools.simulate.trace import TraceSettings, sessions

TRACE = TraceSettings(
    60, 40.0, num_agents=4, agent_tokens=64, turns=4.0, first_tokens=60, turn_tokens=40, output_tokens=5, pause_s=0.2
)
REPLICA = ReplicaSettings(num_blocks=256, block_size=16, max_num_seqs=8, max_num_batched_tokens=64)
APART = ClusterSettings(5, REPLICA, num_prefill=2, prefill_min_tokens=32)
DEADLY = replace(APART, num_deaths=12, deaths_until_s=2.0, restart_s=0.3)


def cluster_of(cluster: ClusterSettings, trace: TraceSettings = TRACE, seed: int = 0) -> Cluster:
    return Cluster(cluster, PrefixAwarePolicy(), sessions(trace, seed), seed, PrefixAwarePolicy())


def run(cluster: ClusterSettings, trace: TraceSettings = TRACE, seed: int = 0) -> Results:
    return cluster_of(cluster, trace, seed).run()


def drain(replica: SimulatedReplica) -> None:
    """Ends the copies that are under way."""
    while (next_s := replica.next_copy_s) is not None:
        replica.end_copies(next_s)
        assert replica.begin_step(next_s) is None


@pytest.mark.parametrize("name", NAMES)
def test_every_answer_is_whole_though_replicas_of_both_roles_die(name: str) -> None:
    results = simulate(name, TRACE, DEADLY, 0)
    assert (results.num_requests, results.num_wrong) == (60, 0)
    assert results.num_moved > 0 and results.num_handed_over > 0
    assert results.num_sampled == results.num_output_tokens


def test_an_answer_that_comes_too_late_begins_nothing() -> None:
    """That of a prefill replica, when the request has moved on."""
    results = run(replace(DEADLY, num_replicas=4, num_prefill=1, num_deaths=20, hop_s=0.15, restart_s=0.05))
    assert results.num_moved > 3 and results.num_wrong == 0
    assert results.num_sampled == results.num_output_tokens


def test_the_seed_decides_everything() -> None:
    rows = [run(DEADLY, seed=seed).row() for seed in (1, 1, 2)]
    assert rows[0] == rows[1] != rows[2]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 99),
    num_prefill=st.integers(1, 2),
    num_decode=st.integers(1, 2),
    num_deaths=st.integers(0, 8),
    num_blocks=st.integers(24, 60),
    copied_block_s=st.sampled_from([1e-4, 1e-2, 0.2]),
)
@example(seed=2, num_prefill=1, num_decode=1, num_deaths=4, num_blocks=24, copied_block_s=0.2)  # both roles die
def test_every_answer_is_whole_whatever_the_size(
    seed: int, num_prefill: int, num_decode: int, num_deaths: int, num_blocks: int, copied_block_s: float
) -> None:
    """Also where for a while there is no replica of a role, and where copies take longer than computing."""
    replica = replace(REPLICA, num_blocks=num_blocks, prices=StepPrices(copied_block_s=copied_block_s))
    cluster = replace(
        DEADLY,
        num_replicas=num_prefill + num_decode,
        num_prefill=num_prefill,
        num_deaths=num_deaths,
        replica=replica,
    )
    results = run(cluster, replace(TRACE, num_requests=20, max_model_len=300), seed)
    assert (results.num_requests, results.num_wrong) == (20, 0)
    assert results.num_sampled == results.num_output_tokens


def test_neither_side_holds_anything_at_the_end() -> None:
    cluster = cluster_of(DEADLY)
    cluster.run()
    assert {name[0] for name in cluster._replicas} == {"p", "r"}
    for each in cluster._replicas.values():
        drain(each)
        assert each.stats.pool.held == 0 and not each.requests and each.load.num_tokens == 0


def test_what_was_handed_over_is_not_computed_again() -> None:
    cluster = cluster_of(replace(APART, prefill_min_tokens=1))
    results = cluster.run()
    stats = {name: each.stats for name, each in cluster._replicas.items()}
    computed = {name: each.prefix_queries - each.prefix_hits for name, each in stats.items()}
    by_decode = sum(num for name, num in computed.items() if name[0] == "r")
    assert by_decode <= results.num_requests * REPLICA.block_size < results.prefix_queries / 3
    assert results.prefix_queries - results.prefix_hits == sum(computed.values()) > 2 * by_decode
    assert sum(each.prefix_disk_hits for name, each in stats.items() if name[0] == "r") > 0


def test_what_is_short_or_cached_is_not_asked_for() -> None:
    few, many = (run(replace(APART, prefill_min_tokens=each)).num_handed_over for each in (100, 1))
    assert 0 < few < many <= 60
    assert run(replace(APART, prefill_min_tokens=10**6)).num_handed_over == 0


def test_without_a_prefill_replica_the_others_compute() -> None:
    cluster = cluster_of(replace(APART, num_prefill=1, restart_s=1e9))
    cluster._kill(0.0)
    results = cluster.run()
    assert not cluster._prefill_names and results.num_handed_over == 0 and results.num_wrong == 0


def test_a_hand_over_takes_what_its_copies_and_the_way_take() -> None:
    def ttft(**fields: float) -> float:
        replica = replace(REPLICA, prices=StepPrices(copied_block_s=fields.pop("copied_block_s", 1e-6)))
        return run(replace(APART, replica=replica, **fields)).ttft.percentile(50)  # type: ignore[arg-type]

    assert ttft(copied_block_s=0.05) > ttft(hop_s=0.0) + 0.05
    assert ttft(hop_s=0.5) > ttft(hop_s=0.0) + 0.3


def test_a_request_that_moves_ends_the_work_on_its_prompt() -> None:
    cluster = cluster_of(replace(APART, num_replicas=2, num_prefill=1, num_deaths=0))
    cluster._await_next_session()
    while not any(live.asked for live in cluster._live.values()):
        cluster._now_s, *_, event = heapq.heappop(cluster._events)
        event()
    prefill, decode = cluster._replicas.values()
    assert prefill.requests and decode.requests
    cluster._kill(0.9)
    assert not prefill.requests and list(cluster._replicas.values()) == [prefill]


def test_a_store_alone_is_shared() -> None:
    alone, shared = (run(replace(APART, num_prefill=0, has_store=each)) for each in (False, True))
    assert shared.hit_rate > alone.hit_rate and shared.num_handed_over == 0


def test_stored_blocks_are_counted_up_to_the_first_gap() -> None:
    store = SharedStore()
    for name in (b"a", b"b", b"d"):
        store.put(name)
    assert store.num_stored([b"a", b"b", b"c", b"d"]) == 2 and store.num_stored([b"a"]) == 1


def test_the_program_takes_roles(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--replicas", "2", "--requests", "8", "--policy", "prefix-aware", "--prefill-replicas"]
    assert main([*arguments, "1"]) == 0
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "2"])
    header, _, row = capsys.readouterr().out.splitlines()
    column = [cell.strip() for cell in header.split("|")].index("handed over")
    assert int(row.split("|")[column]) > 0
