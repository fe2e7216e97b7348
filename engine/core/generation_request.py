"""What is asked for one sequence: the client of the engine makes it, and the engine process gets it as it is."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from engine.core.cache_steering import CacheSteering
from engine.core.sampling_params import SamplingParams

_PATIENCE_S = 60.0  # as long as a request may wait unless an operator says otherwise


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant as admission control counts it."""

    name: str = ""
    share: float = 1.0
    """Its share of the places and tokens that admission control keeps for tenants; all shares add up to 1."""


SOLE_TENANT = Tenant()


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is asked for one sequence. It never changes."""

    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_s: float
    """When the server received the request, on `time.monotonic()`."""
    client_request_id: str = ""
    """Id of the request that this sequence is a part of. Clients choose them: several requests may have the same."""
    is_sibling: bool = False
    """Whether a sequence of the same request was admitted just before. Then this one is neither refused for a long wait
    nor ended by it: the request as such did not wait too long."""
    repeats_prompt: bool = False
    """Whether this is a further answer to a prompt of the same request, whose tokens are counted once."""
    priority: int = 0
    """Its order among the tenant's own requests: lower runs first."""
    tenant: str = ""
    """Name of the tenant. Tenants share the engine by their tokens, in proportion to their weights."""
    weight: float = 1.0
    share: float = 1.0
    """The tenant's share in admission control: see `Tenant`."""
    cache_salt: str = ""
    adapter: str = ""
    """Digest of the adapter that it runs with; empty for the model as it is."""
    steering: CacheSteering = CacheSteering()
    until_stored: bool = False
    """Whether its last output comes only when its full blocks are in the KV store, or cannot be."""
    num_announced_tokens: int = 0
    """Its first tokens of which another server says that it stored their blocks."""
    given_token_ids: tuple[int, ...] = ()
    """Tokens that the answer begins with, which another server generated for the same request."""
    max_queue_s: float | None = None
    """Longest wait to be scheduled: a request that would wait longer is refused, and one that does ends. The engine has
    a limit of its own."""
    ttft_limit_s: float | None = None
    """Longest time from its arrival to its first token with which it is worth its while: a request that would wait
    longer to be scheduled is refused, but one that does goes on."""
    deadline_s: float | None = None
    """Seconds after its arrival when it ends, with the tokens it has, or with RequestTimeoutError if it has none."""
    trace_headers: Mapping[str, str] = {}
    """Headers that name its trace, for other servers that work for it."""

    @property
    def quota_tenant(self) -> Tenant:
        """The tenant whose quota the request counts against."""
        return Tenant(self.tenant, self.share)

    @property
    def due_s(self) -> float:
        """When its first token is wanted. Where the client asks for no time it is one all the same, so that those that
        ask do not keep it waiting for ever."""
        return self.arrival_s + (_PATIENCE_S if self.ttft_limit_s is None else self.ttft_limit_s)

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return self._left_of(self.deadline_s)

    @property
    def ttft_left_s(self) -> float | None:
        """Seconds until its first token is due; None if the client asks for no time."""
        return self._left_of(self.ttft_limit_s)

    @property
    def patience_s(self) -> float | None:
        """The longest predicted wait with which admission makes sense; None if there is no limit."""
        limits = (self.max_queue_s, self.left_s, self.ttft_left_s)
        return min((limit_s for limit_s in limits if limit_s is not None), default=None)

    def _left_of(self, limit_s: float | None) -> float | None:
        """Returns the seconds that are left of a time that began with the arrival."""
        return None if limit_s is None else max(self.arrival_s + limit_s - time.monotonic(), 0.0)
