"""Tenants share by tokens and weight; no request starves; a tenant's own requests go by priority and when due."""

import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.request import Request
from engine.core.sampling_params import SamplingParams
from engine.engine import Engine
from engine.scheduling.fair_queue import FairQueue
from tests.engine.fakes import add, fake_engine, run_to_end
from tests.engine.requests import queued

Costs = Sequence[tuple[int, int]]  # of each request: prompt tokens, generated tokens

costs = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5)
weights = st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=4)


class Backlog:
    """Tenants that always have a request waiting, over the real engine."""

    def __init__(self, demands: Sequence[Costs], weights: Sequence[float], max_num_seqs: int = 1) -> None:
        self.engine = fake_engine(num_blocks=4096, max_num_seqs=max_num_seqs, enable_prefix_caching=False)
        self.tokens: Counter[str] = Counter()
        self.starts: list[str] = []
        self._demands = dict(zip("abcd", demands, strict=False))
        self._weights = dict(zip("abcd", weights, strict=False))
        self._prompts: dict[str, int] = {}
        self._sent: dict[str, int] = {}
        for tenant in self._demands:
            for _ in range(max_num_seqs + 1):
                self._send(tenant)

    def _send(self, tenant: str) -> None:
        number = self._sent[tenant] = self._sent.get(tenant, -1) + 1
        demand = self._demands[tenant]
        num_prompt, num_output = demand[number % len(demand)]
        name = f"{tenant}{number}"
        self._prompts[name] = num_prompt
        add(self.engine, name, [1] * num_prompt, max_tokens=num_output, tenant=tenant, weight=self._weights[tenant])

    def step(self) -> None:
        for update in self.engine.step().updates:
            tenant = update.request_id[0]
            if update.first is not None:
                self.starts.append(update.request_id)
                self.tokens[tenant] += self._prompts[update.request_id]
                self._send(tenant)
            self.tokens[tenant] += len(update.token_ids)

    def shares(self) -> list[float]:
        return [self.tokens[tenant] / self._weights[tenant] for tenant in self._demands]

    def largest(self) -> float:
        """Returns the largest cost of one request in its tenant's count."""
        return max(sum(cost) / self._weights[tenant] for tenant, demand in self._demands.items() for cost in demand)


@settings(max_examples=40, deadline=None)
@given(weights=weights, data=st.data(), max_num_seqs=st.integers(1, 4))
def test_shares_follow_the_weights_within_what_runs_at_once(
    weights: list[float], data: st.DataObject, max_num_seqs: int
) -> None:
    demands = data.draw(st.lists(costs, min_size=len(weights), max_size=len(weights)))
    backlog = Backlog(demands, weights, max_num_seqs)
    for _ in range(300):
        backlog.step()
        shares = backlog.shares()
        assert max(shares) - min(shares) <= backlog.largest() * max_num_seqs


def test_tokens_count_not_requests() -> None:
    backlog = Backlog([[(1, 1)], [(30, 10)]], [1.0, 1.0])
    for _ in range(800):
        backlog.step()
    requests = Counter(name[0] for name in backlog.starts)
    assert requests["a"] == pytest.approx(20 * requests["b"], abs=21)


def test_the_double_weight_gets_the_double_share() -> None:
    backlog = Backlog([[(3, 3)], [(3, 3)]], [1.0, 2.0])
    for _ in range(300):
        backlog.step()
    assert backlog.tokens["b"] == pytest.approx(2 * backlog.tokens["a"], abs=12)


@settings(max_examples=50, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(-1, 1), st.sampled_from([1.0, 2.0, math.inf]), st.integers(1, 8)),
        max_size=25,
    ),
    max_num_seqs=st.integers(1, 3),
)
def test_every_request_is_served_in_the_order_of_its_tenant(
    arrivals: list[tuple[str, int, float, int]], max_num_seqs: int
) -> None:
    engine = fake_engine(max_num_seqs=max_num_seqs, max_num_batched_tokens=4)
    for number, (tenant, priority, due_s, cost) in enumerate(arrivals):
        add(
            engine,
            f"{tenant}{number}",
            [1] * cost,
            tenant=tenant,
            priority=priority,
            ttft_limit_s=due_s,
            max_tokens=cost,
        )
    firsts = [name for name, updates in run_to_end(engine).items() if updates[0].first is not None]
    expected = sorted(range(len(arrivals)), key=lambda number: (*arrivals[number][1:3], number))
    for tenant in "abc":
        own = [f"{tenant}{number}" for number in expected if arrivals[number][0] == tenant]
        assert [name for name in firsts if name[0] == tenant] == own


@settings(max_examples=50, deadline=None)
@given(tenants=st.lists(st.sampled_from("abc"), min_size=1, max_size=12), max_num_seqs=st.integers(1, 4))
def test_no_slot_stays_free_while_a_request_waits(tenants: list[str], max_num_seqs: int) -> None:
    engine = fake_engine(num_blocks=1000, max_num_seqs=max_num_seqs, max_num_batched_tokens=1000)
    for number, tenant in enumerate(tenants):
        add(engine, str(number), tenant=tenant)
    stats = engine.step().stats
    assert (stats.num_running, stats.num_waiting) == (
        min(max_num_seqs, len(tenants)),
        max(0, len(tenants) - max_num_seqs),
    )


@settings(max_examples=50, deadline=None)
@given(dues_s=st.lists(st.floats(0.0, 20.0), min_size=30, max_size=30), patience_s=st.floats(0.0, 9.0))
def test_none_waits_for_those_that_are_due_later(dues_s: list[float], patience_s: float) -> None:
    """One request a second is computed, and another comes that is due some time later."""
    engine = fake_engine(max_num_seqs=1)
    add(engine, "running", max_tokens=2)
    engine.step()
    add(engine, "patient", max_tokens=1, ttft_limit_s=patience_s)
    started: list[str] = []
    for now_s, due_s in enumerate(dues_s):
        add(engine, str(now_s), max_tokens=1, ttft_limit_s=now_s + due_s)
        started += [update.request_id for update in engine.step().updates if update.first is not None]
    before = started[: started.index("patient")]
    assert all(int(name) + dues_s[int(name)] <= patience_s for name in before)


def test_a_stream_that_has_begun_goes_on_before_others_begin() -> None:
    """It was preempted, or began on another engine, and is in no hurry: its first token was there in time."""
    engine = fake_engine(num_blocks=6, block_size=2, max_num_seqs=2, enable_prefix_caching=False)
    add(engine, "first", [1, 2], max_tokens=8)
    add(engine, "preempted", [1, 2, 3], max_tokens=5)
    preempted = False
    while not preempted:
        preempted = engine.step().stats.num_preemptions > 0
    add(engine, "urgent", [1], max_tokens=1, ttft_limit_s=0.0)
    add(engine, "resumed", [1], max_tokens=3, output_token_ids=[7])
    ends = [name for name, updates in run_to_end(engine).items() if updates[-1].finish_reason]
    assert ends.index("preempted") < ends.index("urgent") and ends.index("resumed") < ends.index("urgent")


def starts_of(engine: Engine) -> list[str]:
    return list(run_to_end(engine))


def test_one_tenants_backlog_does_not_hold_up_anothers_first_request() -> None:
    engine = fake_engine(max_num_seqs=1)
    for number in range(10):
        add(engine, f"many{number}", tenant="many")
    engine.step()
    add(engine, "few", tenant="few")
    assert starts_of(engine).index("few") == 1


def test_priority_orders_only_the_own_tenants_requests() -> None:
    engine = fake_engine(max_num_seqs=1)
    for name, tenant, priority in (("a0", "a", 0), ("a1", "a", -1), ("b0", "b", -9), ("b1", "b", -9)):
        add(engine, name, tenant=tenant, priority=priority, cache_salt=name)
    assert starts_of(engine) == ["a1", "b0", "a0", "b1"]


def test_an_idle_time_saves_nothing_up() -> None:
    engine = fake_engine(max_num_seqs=1)
    add(engine, "b0", tenant="b", max_tokens=1)
    for number in range(5):
        add(engine, f"a{number}", tenant="a", max_tokens=40)
    for _ in range(150):
        engine.step()
    for number in range(1, 4):
        add(engine, f"b{number}", tenant="b", max_tokens=40)
    later = starts_of(engine)
    assert [name for name in later if name in ("b1", "a4", "b2", "b3")] == ["b1", "a4", "b2", "b3"]


def test_cached_tokens_cost_nothing() -> None:
    engine = fake_engine(block_size=4, max_num_seqs=1)
    served = engine._scheduler._waiting._served
    for name in ("a", "b"):
        add(engine, name, range(1, 10), max_tokens=1, tenant=name)
        run_to_end(engine)
    assert (served["a"], served["b"]) == (10, 2)


def test_a_stream_that_was_preempted_goes_before_other_tenants_new_requests() -> None:
    engine = fake_engine(num_blocks=6, block_size=2, enable_prefix_caching=False)
    for name in "ab":
        add(engine, name, [ord(name) % 50] * 3, max_tokens=8, tenant=name)
    requests = engine._scheduler._requests
    preempted: list[Request] = []
    while not preempted:
        engine.step()
        preempted = [request for request in requests.values() if request.num_preemptions]
    add(engine, "new", [1], max_tokens=2, tenant="new")
    names = [update.request_id for _ in range(60) if engine.has_work for update in engine.step().updates]
    assert names.index(preempted[0].request_id, 1) < names.index("new")


def test_a_stream_that_paused_waits_for_who_asks_for_little_only_where_others_of_its_tenant_run() -> None:
    params = SamplingParams(max_tokens=2)
    running, paused, new = (queued(name, [1], params, tenant=name[0]) for name in ("a1", "a2", "b1"))
    queue = FairQueue()
    queue.start(running, 10.0)
    paused.num_preemptions = 1
    queue.add(paused)
    queue.charge(new, 9.0)
    queue.add(new)
    assert (queue.next([running]), queue.next([])) == (new, paused)
    queue.charge(new, 1.0)
    assert queue.next([running]) is paused


@pytest.mark.parametrize(("greedy", "preempted"), [("a", "a1"), ("b", "b1")])
def test_blocks_are_taken_from_the_tenant_that_had_most(greedy: str, preempted: str) -> None:
    engine = fake_engine(num_blocks=9, block_size=2, enable_prefix_caching=False)
    add(engine, "x", [1, 2], max_tokens=6, tenant=greedy)
    run_to_end(engine)
    for name in ("a0", "b0"):
        add(engine, name, [1, 2], max_tokens=1, tenant=name[0])
    run_to_end(engine)
    for name in ("b1", "a1") if greedy == "b" else ("a1", "b1"):
        add(engine, name, [3] * 5, max_tokens=7, tenant=name[0])
    updates = run_to_end(engine)
    assert [name for name in updates if updates[name][-1].num_preemptions] == [preempted]


def test_counts_of_very_many_tenants_are_bounded_and_those_that_had_most_are_remembered() -> None:
    queue = FairQueue()
    for number in range(20_000):
        request = queued(f"{number}", [1], tenant=f"peer {number}")
        queue.add(request)
        queue.remove(request)
        queue.charge(request, 1000.0 if number == 5 else 1.0)
    assert queue.served(queued("5", [1], tenant="peer 5")) == 1000
    assert len(queue._served) <= 4097
