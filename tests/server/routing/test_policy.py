"""Routing: prefixes and loads weighed in one unit, deterministic, and never a replica that is not there."""

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.routing.policy import (
    STICKY_TOKENS,
    LeastLoadedPolicy,
    PrefixAwarePolicy,
    RandomPolicy,
    RoundRobinPolicy,
    RoutedPrompt,
    RoutingPolicy,
)
from server.routing.replica_loads import STREAM_TOKENS, ReplicaLoad

POLICIES: list[Callable[[], RoutingPolicy]] = [RandomPolicy, RoundRobinPolicy, LeastLoadedPolicy, PrefixAwarePolicy]
PIECE = 100

prompts = st.builds(
    lambda path, extra, key: prompt(path, PIECE * len(path) + extra, key),
    st.lists(st.integers(0, 1), max_size=4),
    st.integers(1, 300),
    st.sampled_from(["", "", "x", "y"]),
)
replicas = st.sampled_from(list("abcde"))
calls = st.lists(
    st.one_of(
        st.tuples(st.just("add"), replicas),
        st.tuples(st.just("remove"), replicas),
        st.tuples(st.just("report"), replicas, st.integers(0, 900), st.integers(0, 5)),
        st.tuples(st.just("route"), prompts),
        st.tuples(st.just("route without"), prompts, st.sets(replicas)),
    ),
    max_size=60,
)


def prompt(path: Sequence[int], num_tokens: int, key: str = "") -> RoutedPrompt:
    """A prompt whose digests are the beginnings of `path`."""
    return RoutedPrompt([bytes(path[: end + 1]) for end in range(len(path))], num_tokens, PIECE, key)


def route(policy: RoutingPolicy, routed: RoutedPrompt, excluded: Sequence[str] = ()) -> str | None:
    chosen = policy.choose(routed, excluded)
    if chosen is not None:
        policy.sent(routed, chosen)
    return chosen


def policy_of(names: str = "abc") -> PrefixAwarePolicy:
    policy = PrefixAwarePolicy()
    for name in names:
        policy.add(name)
    return policy


def idle(policy: RoutingPolicy, names: str = "abc") -> None:
    for name in names:
        policy.report(name, ReplicaLoad())


def play(policy: RoutingPolicy, script: Sequence[tuple]) -> list[str | None]:
    """Makes the calls; checks that only replicas that are there are chosen, and one whenever there is one."""
    there: set[str] = set()
    chosen = []
    for kind, *rest in script:
        if kind == "add":
            policy.add(*rest)
            there.add(*rest)
        elif kind == "remove":
            policy.remove(*rest)
            there.discard(*rest)
        elif kind == "report":
            policy.report(rest[0], ReplicaLoad(*rest[1:]))
        else:
            left = there - set().union(*rest[1:])
            chosen.append(route(policy, *rest))
            assert (chosen[-1] in left) if left else chosen[-1] is None
    return chosen


@given(script=calls)
@pytest.mark.parametrize("new_policy", POLICIES)
def test_choices_are_there_and_a_function_of_the_calls(new_policy: Callable[[], RoutingPolicy], script: list) -> None:
    assert play(new_policy(), script) == play(new_policy(), script)


@given(script=calls, routed=prompts)
def test_the_cheapest_replica_of_all_is_chosen(script: list, routed: RoutedPrompt) -> None:
    """Shortcuts change no choice: it is the minimum over all replicas."""
    policy = PrefixAwarePolicy()
    play(policy, script)
    there = [name for name in "abcde" if name in policy._loads]
    keyless = RoutedPrompt(routed.digests, routed.num_tokens, PIECE)
    expected = min(there, key=lambda name: policy._price(keyless, name), default=None)
    assert policy.choose(keyless) == expected


@given(script=calls)
def test_the_index_has_what_is_before_a_digest_and_nothing_of_replicas_that_left(script: list) -> None:
    policy = PrefixAwarePolicy(max_digests=3)
    play(policy, script)
    index = policy._index
    for name, digests in index._digests_of.items():
        assert len(digests) <= 3
        assert all(index.has(name, digest[:end]) for digest in digests for end in range(1, len(digest)))
    of_replicas = {(name, digest) for name, digests in index._digests_of.items() for digest in digests}
    assert of_replicas == {(name, digest) for digest, names in index._replicas_of.items() for name in names}
    for name in "abcde":
        policy.remove(name)
    assert len(index) == 0 and len(policy._loads) == 0


def test_a_prompt_goes_where_its_beginning_was_computed() -> None:
    policy = policy_of()
    first = route(policy, prompt([1, 2, 3], 350))
    idle(policy)
    others = [route(policy, prompt([number], 150)) for number in range(4, 9)]
    idle(policy)
    assert first in others  # each replica has something
    assert route(policy, prompt([1, 2, 3, 4], 450)) == first


def test_the_longest_prefix_wins_among_equal_loads() -> None:
    policy = policy_of("ab")
    policy.sent(prompt([1], 150), "a")
    policy.sent(prompt([1, 2], 250), "b")
    idle(policy, "ab")
    assert policy.choose(prompt([1, 2, 3], 350)) == "b"
    assert policy.choose(prompt([1, 3], 250)) == "a"  # both have one digest: in turn


def test_a_prefix_outweighs_load_as_far_as_it_saves_tokens_and_no_further() -> None:
    policy = policy_of("ab")
    policy.sent(prompt([1, 2, 3, 4], 450), "a")
    policy.report("b", ReplicaLoad())
    policy.report("a", ReplicaLoad(waiting_tokens=399))
    assert policy.choose(prompt([1, 2, 3, 4], 450)) == "a"
    policy.report("a", ReplicaLoad(waiting_tokens=401))
    assert policy.choose(prompt([1, 2, 3, 4], 450)) == "b"


def test_what_all_prompts_begin_with_spreads_as_they_come() -> None:
    policy = policy_of()
    counts = Counter(route(policy, prompt([1], 500)) for _ in range(30))
    assert sorted(counts.values()) == [10, 10, 10]


def test_streams_count_as_load_beside_tokens() -> None:
    policy = LeastLoadedPolicy()
    policy.add("a")
    policy.add("b")
    policy.report("a", ReplicaLoad(num_running=2))
    policy.report("b", ReplicaLoad(waiting_tokens=2 * STREAM_TOKENS - 1))
    assert policy.choose(prompt([], 1)) == "b"
    policy.report("b", ReplicaLoad(waiting_tokens=2 * STREAM_TOKENS + 1))
    assert policy.choose(prompt([], 1)) == "a"


def test_what_was_sent_counts_until_the_next_report() -> None:
    policy = LeastLoadedPolicy()
    policy.add("a")
    policy.add("b")
    assert [route(policy, prompt([], 10)) for _ in range(4)] == ["a", "b", "a", "b"]
    policy.report("b", ReplicaLoad())
    assert [policy.choose(prompt([], 10))] == ["b"]


def test_a_cached_prompt_counts_what_is_left_to_compute() -> None:
    policy = policy_of("a")
    policy.sent(prompt([1, 2], 250), "a")
    idle(policy, "a")
    policy.sent(prompt([1, 2], 250), "a")
    assert policy._loads["a"][0] == 50 + STREAM_TOKENS


def test_a_key_goes_back_to_its_replica_unless_that_has_much_more_to_do() -> None:
    policy = policy_of()
    first = route(policy, prompt([], 10, "session"))
    assert first is not None
    policy.report(first, ReplicaLoad(waiting_tokens=STICKY_TOKENS))
    assert policy.choose(prompt([], 10, "session")) == first
    assert policy.choose(prompt([], 10, "other")) != first
    policy.report(first, ReplicaLoad(waiting_tokens=STICKY_TOKENS + 1))
    assert policy.choose(prompt([], 10, "session")) != first


def test_a_key_whose_replica_left_goes_on_elsewhere() -> None:
    policy = policy_of()
    first = route(policy, prompt([1], 150, "session"))
    assert first is not None
    policy.remove(first)
    second = route(policy, prompt([1], 150, "session"))
    policy.add(first)
    idle(policy)
    assert second != first and route(policy, prompt([1], 150, "session")) == second


def test_a_replica_that_comes_back_has_nothing_cached() -> None:
    policy = policy_of("ab")
    policy.sent(prompt([1, 2], 250), "a")
    policy.remove("a")
    policy.add("a")
    policy.report("a", ReplicaLoad(waiting_tokens=1))
    policy.report("b", ReplicaLoad())
    assert policy.choose(prompt([1, 2], 250)) == "b"


def test_what_many_replicas_have_costs_a_bounded_number_of_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = PrefixAwarePolicy()
    for number in range(500):
        policy.add(f"{number:03}")
        policy.sent(prompt([1], 150), f"{number:03}")
    looks = []
    price = policy._price
    monkeypatch.setattr(policy, "_price", lambda *given: looks.append(given) or price(*given))
    assert policy.choose(prompt([1, 2], 250)) is not None
    assert len(looks) < 40


def test_replicas_of_equal_load_take_turns_also_when_all_is_done_in_between() -> None:
    policy = LeastLoadedPolicy()
    policy.add("a")
    policy.add("b")
    chosen = []
    for _ in range(4):
        chosen.append(route(policy, prompt([], 10)))
        policy.report("a", ReplicaLoad())
        policy.report("b", ReplicaLoad())
    assert chosen == ["a", "b", "a", "b"]


def test_the_longest_prefix_is_found_where_more_replicas_have_its_beginning_than_are_compared() -> None:
    policy = PrefixAwarePolicy()
    for number in range(100):
        policy.add(f"{number:03}")
        policy.sent(prompt([1], 150), f"{number:03}")
        policy.report(f"{number:03}", ReplicaLoad())
    policy.sent(prompt([1, 2, 3], 350), "099")
    policy.report("099", ReplicaLoad())
    assert policy.choose(prompt([1, 2, 3], 350)) == "099"
