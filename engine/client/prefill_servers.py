"""What the engine's client asks of prefill servers: interface, and the state without any."""

import sys
from dataclasses import dataclass
from typing import Protocol

from engine.core.errors import RemotePrefillError
from engine.core.generation_request import GenerationRequest


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of a request that another server is to compute: full blocks, and one token."""

    request: GenerationRequest
    """The first of the requests that begin with it."""
    token_ids: list[int]
    num_stored_tokens: int
    """Its first tokens that the KV store has."""
    kv_fingerprint: str
    """What both engines' blocks must have in common: see `EngineInfo`."""


class PrefillServers(Protocol):
    """Servers that compute prompts into the KV store that this server's engine reads."""

    min_tokens: int
    """Prompts with fewer tokens to compute are not worth asking for."""

    async def compute(self, prefix: Prefix) -> int:
        """Returns how many of the prefix's tokens the KV store has now. Raises RemotePrefillError. Cancelling it ends
        the work there, too."""

    async def close(self) -> None:
        """Close what it holds open."""


class NoPrefillServers:
    """There are none: the engine computes all prompts."""

    min_tokens = sys.maxsize

    async def compute(self, prefix: Prefix) -> int:
        raise RemotePrefillError("There is no prefill server.")

    async def close(self) -> None:
        pass


NO_SERVERS = NoPrefillServers()
