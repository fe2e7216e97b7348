"""The keys in force: finds the one that a request sent, and counts the requests under way of each."""

import logging
import secrets
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from engine.core.errors import ConfigError, OverloadedError
from server.auth.api_keys import ApiKey, digest_of, plain_keys, read_keys

logger = logging.getLogger("twostep.server")

# Nobody can know when a request of the same key will end.
_RETRY_AFTER_S = 1.0


class KeyRing:
    """One per app. Without keys everybody is let in, as NOBODY."""

    def __init__(self, plain: tuple[str, ...] = (), path: Path | None = None) -> None:
        """Raises ConfigError for a file that is wrong, or has a name twice."""
        self._plain = plain_keys(plain)
        self._path = path
        self._keys = self._read()
        self._num_under_way: Counter[str] = Counter()
        self._warn_if_closed()

    @property
    def is_open(self) -> bool:
        return not self._plain and self._path is None

    def find(self, secret: bytes) -> ApiKey | None:
        """Every key is compared, in constant time each: how long it takes says nothing about any of them."""
        given = digest_of(secret)
        found = [key for key in self._keys if secrets.compare_digest(given, key.digest)]
        return found[0] if found else None

    def share_of(self, key: ApiKey) -> float:
        """The key's part of all weights; all of them where there are no keys."""
        total = sum(each.weight for each in self._keys)
        return min(1.0, key.weight / total) if total else 1.0

    @contextmanager
    def under_way(self, key: ApiKey) -> Generator[None, None, None]:
        """Around each request that is work. Raises OverloadedError if its key has as many as it may."""
        if key.max_concurrent is not None and self._num_under_way[key.name] >= key.max_concurrent:
            limit = f"{key.max_concurrent} requests at once (max-concurrent)"
            raise OverloadedError(f"The API key {key.name!r} may have {limit}; try again later.", _RETRY_AFTER_S)
        self._num_under_way[key.name] += 1
        try:
            yield
        finally:
            self._num_under_way[key.name] -= 1

    def reload(self) -> None:
        """Read the file again. One that is wrong changes nothing."""
        try:
            self._keys = self._read()
            logger.info("%d API keys are in force", len(self._keys))
            self._warn_if_closed()
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)

    def _warn_if_closed(self) -> None:
        if not self._keys and self._path is not None:
            logger.warning("%s has no API key: nobody is let in; twostep key NAME makes one", self._path)

    def _read(self) -> list[ApiKey]:
        keys = self._plain + ([] if self._path is None else read_keys(self._path))
        for name, count in Counter(key.name for key in keys).items():
            if count > 1:
                raise ConfigError(f"--api-keys-file: the name {name} is one that a key of --api-key has.")
        return keys
