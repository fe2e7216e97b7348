"""The routing policies by their names."""

from collections.abc import Callable, Mapping

from server.routing.policy import (
    MAX_DIGESTS,
    LeastLoadedPolicy,
    PrefixAwarePolicy,
    RandomPolicy,
    RoundRobinPolicy,
    RoutingPolicy,
)

_NEW: Mapping[str, Callable[[int, int], RoutingPolicy]] = {
    "random": lambda seed, _: RandomPolicy(seed),
    "round-robin": lambda *_: RoundRobinPolicy(),
    "least-loaded": lambda *_: LeastLoadedPolicy(),
    "prefix-aware": lambda _, max_digests: PrefixAwarePolicy(max_digests),
}
NAMES = tuple(_NEW)


def new_policy(name: str, *, seed: int = 0, max_digests: int = MAX_DIGESTS) -> RoutingPolicy:
    """Returns a policy that knows of no replica yet. `seed` is for what it draws, if anything, and `max_digests` what
    it remembers of one replica's cache, if anything. Raises KeyError for an unknown name."""
    return _NEW[name](seed, max_digests)
