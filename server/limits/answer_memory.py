"""Memory for answers that are not streamed: what one may take is reserved before it is generated, until it is written.
So all of them together are bounded, whatever clients ask for and however slowly they read."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.client.tenant_quotas import fits, max_tenant_tokens
from engine.core.errors import OverloadedError
from engine.core.generation_request import Tenant
from server.core.errors import BadRequestError

RETRY_AFTER_S = 5.0
_FLAG = "--answer-memory-bytes"


@dataclass(slots=True)
class _Holding:
    share: float
    num_bytes: int = 0


class AnswerMemory:
    """The bytes that are reserved. Half of all is kept for the tenants, for each its part by its share. One per app,
    used on its event loop only."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._holdings: dict[str, _Holding] = {}  # by tenant; none without bytes

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self._holdings.values())

    @contextmanager
    def reserved(self, tenant: Tenant, num_bytes: int) -> Generator[None, None, None]:
        """Reserves memory for an answer while the context lasts. Raises BadRequestError for more than the tenant ever
        gets, and OverloadedError for more than it gets now."""
        if not num_bytes:
            yield
            return
        self._check(tenant, num_bytes)
        holding = self._holdings.setdefault(tenant.name, _Holding(tenant.share))
        holding.share = tenant.share
        holding.num_bytes += num_bytes
        try:
            yield
        finally:
            holding.num_bytes -= num_bytes
            if not holding.num_bytes:
                del self._holdings[tenant.name]

    def _check(self, tenant: Tenant, num_bytes: int) -> None:
        if num_bytes > (most := max_tenant_tokens(tenant.share, self._max_bytes)):
            raise BadRequestError(
                f"This answer may take {num_bytes} bytes of memory, more than the {most} that there are for it "
                f"({_FLAG}): ask for fewer log-probabilities, choices, tokens (max_tokens) or inputs, or for a stream."
            )
        kept = self._max_bytes // 2
        own = self._holdings.get(tenant.name, _Holding(tenant.share)).num_bytes
        others = [(each.num_bytes, each.share) for name, each in self._holdings.items() if name != tenant.name]
        if not fits(own + num_bytes, tenant.share, others, kept, self._max_bytes - kept):
            raise OverloadedError(
                f"Answers that are not streamed have taken the memory that there is for them ({_FLAG}): try again "
                "later, or ask for a stream.",
                RETRY_AFTER_S,
            )
