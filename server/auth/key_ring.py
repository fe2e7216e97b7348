"""The API keys in force: finds the one that a request carries, and counts each key's requests under way."""

import logging
import secrets
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from engine.core.errors import ConfigError, OverloadedError
from server.auth.api_keys import ApiKey, digest_of, plain_keys, read_keys

logger = logging.getLogger("twostep.server")

# A fixed time: when a request of the same key will end cannot be predicted.
_RETRY_AFTER_S = 1.0


class KeyRing:
    """The API keys of one app. Without any, every request is accepted, as from NOBODY."""

    def __init__(self, plain: tuple[str, ...] = (), path: Path | None = None) -> None:
        """Takes the keys of --api-key and those in the file of --api-keys-file. Raises ConfigError for a file that is
        wrong, and for two keys with one name."""
        self._plain = plain_keys(plain)
        self._path = path
        self._keys = self._read()
        self._num_under_way: Counter[str] = Counter()
        self._warn_if_closed()

    @property
    def is_open(self) -> bool:
        """Whether requests need no API key."""
        return not self._plain and self._path is None

    def find(self, secret: bytes) -> ApiKey | None:
        """Returns the API key with this secret. Every key is compared, each in constant time, so that the duration
        tells nothing about any of them."""
        given = digest_of(secret)
        found = [key for key in self._keys if secrets.compare_digest(given, key.digest)]
        return found[0] if found else None

    def share_of(self, key: ApiKey) -> float:
        """Returns the key's weight as a fraction of all keys' weights; 1 where there are no keys."""
        total = sum(each.weight for each in self._keys)
        return min(1.0, key.weight / total) if total else 1.0

    @contextmanager
    def under_way(self, key: ApiKey) -> Generator[None, None, None]:
        """Counts a POST request of the key for as long as the context lasts. Raises OverloadedError if the key already
        has as many as its `max_concurrent`."""
        if key.max_concurrent is not None and self._num_under_way[key.name] >= key.max_concurrent:
            limit = f"{key.max_concurrent} requests at once (max-concurrent)"
            raise OverloadedError(f"The API key {key.name!r} may have {limit}; try again later.", _RETRY_AFTER_S)
        self._num_under_way[key.name] += 1
        try:
            yield
        finally:
            self._num_under_way[key.name] -= 1

    def reload(self) -> None:
        """Reads the file of API keys again. A file that is wrong is logged, and the keys stay as they were."""
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
