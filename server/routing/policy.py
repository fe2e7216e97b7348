"""The routing policies: which replica takes a request. Deterministic: equal calls in equal order give equal choices."""

import random
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from server.routing.prefix_index import PrefixIndex
from server.routing.replica_loads import ReplicaLoad, ReplicaLoads

MAX_DIGESTS = 1 << 16  # of one replica
MAX_KEYS = 1 << 16
_MAX_COMPARED = 32  # replicas that have the same digest
STICKY_TOKENS = 512
"""How much more load, in prompt tokens, a replica may have that had the key's last request."""


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """What a policy knows of a request."""

    digests: Sequence[bytes]
    """Chained digests of the prompt's first full pieces, of equally many tokens each."""
    num_tokens: int
    """Tokens of the prompt, at least about."""
    piece_tokens: int
    """Tokens that one digest stands for."""
    key: str = ""
    """Requests with one key belong together; "" has no meaning."""

    def uncached(self, depth: int) -> int:
        """Returns how many tokens a replica computes that has the first `depth` digests cached: at least one."""
        return max(self.num_tokens - depth * self.piece_tokens, 1)


class RoutingPolicy(Protocol):
    """Chooses replicas by what it is told. One owner calls every method."""

    def add(self, replica: str) -> None:
        """Adds a replica, which has nothing cached and nothing to do. A known one is left as it is."""

    def remove(self, replica: str) -> None:
        """Forgets a replica; an unknown one is ignored."""

    def report(self, replica: str, load: ReplicaLoad) -> None:
        """Takes a replica's newest report; that of an unknown one is ignored."""

    def choose(self, prompt: RoutedPrompt, excluded: Collection[str] = ()) -> str | None:
        """Returns the replica that is to take the request, beside `excluded`; None if there is none. Changes nothing
        that later choices depend on, beside the state of a policy that takes turns or draws."""

    def sent(self, prompt: RoutedPrompt, replica: str) -> None:
        """Records that the replica got the request; that of an unknown one is ignored."""


class _BlindPolicy:
    """Chooses by no load: it knows the replicas alone."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[str, None] = OrderedDict()  # in the order of their turns

    def add(self, replica: str) -> None:
        self._replicas[replica] = None

    def remove(self, replica: str) -> None:
        self._replicas.pop(replica, None)

    def report(self, replica: str, load: ReplicaLoad) -> None:
        pass


class RandomPolicy(_BlindPolicy):
    """Draws a replica, all with equal chances."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def choose(self, prompt: RoutedPrompt, excluded: Collection[str] = ()) -> str | None:
        left = [replica for replica in self._replicas if replica not in excluded] if excluded else [*self._replicas]
        return self._random.choice(left) if left else None

    def sent(self, prompt: RoutedPrompt, replica: str) -> None:
        pass


class RoundRobinPolicy(_BlindPolicy):
    """Takes replicas in turn."""

    def choose(self, prompt: RoutedPrompt, excluded: Collection[str] = ()) -> str | None:
        return next((replica for replica in self._replicas if replica not in excluded), None)

    def sent(self, prompt: RoutedPrompt, replica: str) -> None:
        if replica in self._replicas:
            self._replicas.move_to_end(replica)


class LeastLoadedPolicy:
    """Takes the replica with the least load."""

    def __init__(self) -> None:
        self._loads = ReplicaLoads()

    def add(self, replica: str) -> None:
        if replica not in self._loads:
            self._loads.add(replica)

    def remove(self, replica: str) -> None:
        if replica in self._loads:
            self._loads.remove(replica)

    def report(self, replica: str, load: ReplicaLoad) -> None:
        if replica in self._loads:
            self._loads.report(replica, load)

    def choose(self, prompt: RoutedPrompt, excluded: Collection[str] = ()) -> str | None:
        return self._loads.least(excluded)

    def sent(self, prompt: RoutedPrompt, replica: str) -> None:
        if replica in self._loads:
            self._loads.send(replica, prompt.num_tokens)


class PrefixAwarePolicy(LeastLoadedPolicy):
    """Takes the replica that will have the first token soonest: by its load, plus what it has to compute of the prompt.

    A long cached prefix thus outweighs some load and no more: what many prompts begin with spreads as they come. A key
    goes back to the replica that had it last, unless that has `STICKY_TOKENS` more to do than the best one.
    """

    def __init__(self, max_digests: int = MAX_DIGESTS) -> None:
        """`max_digests` of one replica are remembered: as many as its cache has room for."""
        super().__init__()
        self._index = PrefixIndex(max_digests)
        self._replica_of: OrderedDict[str, str] = OrderedDict()  # by key, longest ago first

    def remove(self, replica: str) -> None:
        super().remove(replica)
        self._index.remove(replica)

    def choose(self, prompt: RoutedPrompt, excluded: Collection[str] = ()) -> str | None:
        idlest = self._loads.least(excluded)
        if idlest is None:
            return None
        best = self._best(prompt, idlest, excluded)
        last = self._replica_of.get(prompt.key, "") if prompt.key else ""
        if last in self._loads and last not in excluded:
            surplus = self._price(prompt, last)[0] - self._price(prompt, best)[0]
            return last if surplus <= STICKY_TOKENS else best
        return best

    def sent(self, prompt: RoutedPrompt, replica: str) -> None:
        if replica not in self._loads:
            return
        self._loads.send(replica, prompt.uncached(self._index.depth(replica, prompt.digests)))
        self._index.put(replica, prompt.digests)
        if prompt.key:
            self._replica_of[prompt.key] = replica
            self._replica_of.move_to_end(prompt.key)
            if len(self._replica_of) > MAX_KEYS:
                self._replica_of.popitem(last=False)

    def _price(self, prompt: RoutedPrompt, replica: str) -> tuple[int, int]:
        """Returns the tokens that are computed before the prompt's first one comes, and the replica's turn."""
        tokens, turn = self._loads[replica]
        return tokens + prompt.uncached(self._index.depth(replica, prompt.digests)), turn

    def _best(self, prompt: RoutedPrompt, idlest: str, excluded: Collection[str]) -> str:
        """Returns the cheapest replica. Those with the longest prefixes are looked at first, until those that are left
        could not be cheaper even without any load: of each digest, the `_MAX_COMPARED` replicas to which it was sent
        longest ago, and always the one with the least load of all."""
        best, price = idlest, self._price(prompt, idlest)
        least = self._loads[idlest][0]
        seen = {idlest}
        for depth in range(self._index.deepest(prompt.digests), 0, -1):
            if least + prompt.uncached(depth) > price[0]:
                break
            for replica in islice(self._index.replicas(prompt.digests[depth - 1]), _MAX_COMPARED):
                if replica in seen or replica in excluded or replica not in self._loads:
                    continue
                seen.add(replica)
                if (other := self._price(prompt, replica)) < price:
                    best, price = replica, other
        return best
