"""Request validation that all generating endpoints share: the model, the request id, and fields that must be
refused."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import Request

from engine.core.cache_steering import CacheSteering
from engine.core.errors import DeadlineError
from engine.core.generation_request import GenerationRequest, Tenant
from engine.core.sampling_params import SamplingParams
from server.auth.api_keys import ApiKey
from server.core.errors import BadRequestError
from server.core.promises import NO_PROMISES, Promises
from server.core.request_record import caller_of, is_sane_request_id, record_of
from server.core.trace_context import trace_headers
from server.generation.promises import promises_of
from server.protocol.other_endpoints import find_refused
from server.protocol.refusals import find_typo, find_unknown
from server.protocol.request import RequestFields
from server.runtime.context import context_of, tenant_of

logger = logging.getLogger("twostep.server")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A validated request: what its endpoint needs to know of it and of its client."""

    model: str
    """The model's name in the response."""
    request_id: str
    arrival_s: float
    caller: str
    """Identifies the client (`record.caller_of`), for limits per client."""
    key: ApiKey
    tenant: Tenant
    """Whom it is counted for: its API key or its address."""
    cache_salt: str
    """The prefix cache's salt, of the API key and of the request."""
    fields: RequestFields
    promises: Promises = NO_PROMISES
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    """Headers that name its trace, for other servers."""
    adapter: str = ""
    """Digest of the adapter that the model's name stands for; empty for the model as it is."""

    async def within_deadline(self, planning: Awaitable[T]) -> T:
        """Returns the result of `planning`. Raises DeadlineError when the request's deadline passes before it is
        there."""
        deadline_s = _seconds(self.fields.deadline_ms)
        left_s = None if deadline_s is None else max(self.arrival_s + deadline_s - time.monotonic(), 0.0)
        try:
            async with asyncio.timeout(left_s) as limit:
                return await planning
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineError("The deadline passed before the request was read.") from error

    def generation(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        repeats_prompt: bool = False,
        given_token_ids: Sequence[int] = (),
    ) -> GenerationRequest:
        """Returns the engine's request for one sequence, with the options of the whole request."""
        fields = self.fields
        return GenerationRequest(
            prompt_token_ids=prompt_token_ids,
            params=params,
            arrival_s=self.arrival_s,
            client_request_id=self.request_id,
            repeats_prompt=repeats_prompt,
            priority=fields.priority,
            tenant=self.tenant.name,
            weight=self.key.weight,
            share=self.tenant.share,
            cache_salt=self.cache_salt,
            adapter=self.adapter,
            steering=_steering(fields),
            given_token_ids=tuple(given_token_ids),
            max_queue_s=_seconds(fields.max_queue_ms),
            ttft_limit_s=self.promises.ttft_s,
            deadline_s=_seconds(fields.deadline_ms),
            trace_headers=self.trace_headers,
        )


def validate_request(body: RequestFields, refusals: Mapping[str, str], request: Request) -> Arrival:
    """Validates what all endpoints share. Raises ModelNotFoundError, or BadRequestError for a field that this endpoint
    refuses."""
    context, record = context_of(request), record_of(request.scope)
    record.model = model = context.check_model(body.model)
    if body.request_id is not None:
        _check_request_id(body.request_id)
    _check_extra_fields(body, refusals, record.request_id)
    cache_salt = body.cache_salt if context.settings.share_prefix_cache else record.key.salt(body.cache_salt)
    record.promises = promises_of(
        request.headers, context.backend.engine.info, 1 + context.settings.num_speculative_tokens
    )
    adapter = context.backend.engine.adapters.loaded.get(model)
    return Arrival(
        model=model,
        request_id=record.request_id,
        arrival_s=record.arrival_s,
        caller=caller_of(request.scope),
        key=record.key,
        tenant=tenant_of(request),
        cache_salt=cache_salt,
        fields=body,
        promises=record.promises,
        trace_headers=trace_headers(request.headers),
        adapter="" if adapter is None else adapter.digest,
    )


def _steering(fields: RequestFields) -> CacheSteering:
    stays_in_memory = fields.prompt_cache_retention in ("in_memory", "in-memory")
    return CacheSteering(fields.prompt_cache_key or "", fields.retain_s, stays_in_memory)


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _check_extra_fields(body: RequestFields, refusals: Mapping[str, str], request_id: str) -> None:
    extra = body.model_extra or {}
    if refused := find_refused(type(body), extra, refusals):
        param, message = refused
        raise BadRequestError(message, param)
    if unknown := find_unknown(extra, refusals):
        if typo := find_typo(unknown, type(body).model_fields):
            name, meant = typo
            raise BadRequestError(f"{name} is no parameter; did you mean {meant}?", name)
        names = ", ".join(ascii(name)[:40] for name in unknown[:10])
        logger.info("request %s: ignored fields that nobody defines: %s", request_id, names)


def _check_request_id(request_id: str) -> None:
    """Refuses an invalid id of the body; the request's record never has one: see `routes.json_route`."""
    if not is_sane_request_id(request_id):
        message = "request_id must be printable ASCII without spaces, at most 128 characters."
        raise BadRequestError(message, "request_id")
