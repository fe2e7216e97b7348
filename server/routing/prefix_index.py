"""Which replicas probably have which beginnings of prompts in their prefix caches."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence


class PrefixIndex:
    """The digests of prompts that were sent to each replica, at most `max_digests` of each, the newest.

    Digests are chained: each stands for a piece of a prompt and for all before it. A replica that is known to have a
    digest is known to have those before it, too: they are renewed together, and forgotten later.
    """

    def __init__(self, max_digests: int) -> None:
        self._max_digests = max_digests
        self._replicas_of: dict[bytes, dict[str, None]] = {}  # of each digest, longest ago first
        self._digests_of: dict[str, OrderedDict[bytes, None]] = {}  # of each replica, longest ago first

    def __len__(self) -> int:
        """Number of digests that any replica has."""
        return len(self._replicas_of)

    def has(self, replica: str, digest: bytes) -> bool:
        return digest in self._digests_of.get(replica, ())

    def depth(self, replica: str, digests: Sequence[bytes]) -> int:
        """Returns how many of a prompt's first digests the replica has."""
        own = self._digests_of.get(replica)
        return bisect_left(digests, True, key=lambda digest: digest not in own) if own else 0

    def deepest(self, digests: Sequence[bytes]) -> int:
        """Returns how many of a prompt's first digests any replica has."""
        return bisect_left(digests, True, key=lambda digest: digest not in self._replicas_of)

    def replicas(self, digest: bytes) -> Iterator[str]:
        """Yields the replicas that have a digest, first those to which it was sent longest ago."""
        yield from self._replicas_of.get(digest, ())

    def put(self, replica: str, digests: Sequence[bytes]) -> None:
        """Records that a prompt was sent to the replica."""
        own = self._digests_of.setdefault(replica, OrderedDict())
        for digest in reversed(digests):
            own[digest] = None
            own.move_to_end(digest)
            replicas = self._replicas_of.get(digest)
            if replicas is None:
                self._replicas_of[digest] = {replica: None}
            elif len(replicas) > 1 or replica not in replicas:
                replicas.pop(replica, None)
                replicas[replica] = None
        while len(own) > self._max_digests:
            self._forget(replica, own.popitem(last=False)[0])

    def remove(self, replica: str) -> None:
        """Forgets a replica: it is gone, or its cache is."""
        for digest in self._digests_of.pop(replica, ()):
            self._forget(replica, digest)

    def _forget(self, replica: str, digest: bytes) -> None:
        replicas = self._replicas_of[digest]
        del replicas[replica]
        if not replicas:
            del self._replicas_of[digest]
