"""Requests for tests, as the client asks for them and as the engine keeps them."""

from collections.abc import Sequence
from typing import Any

from engine.core.generation_request import GenerationRequest
from engine.core.messages import AddRequest
from engine.core.request import Request
from engine.core.sampling_params import SamplingParams


def asking(prompt: Sequence[int], params: SamplingParams | None = None, **fields: Any) -> GenerationRequest:
    fields = {"arrival_s": 0.0, **fields}
    return GenerationRequest(prompt_token_ids=list(prompt), params=params or SamplingParams(), **fields)


def queued(name: str, prompt: Sequence[int], params: SamplingParams | None = None, **fields: Any) -> Request:
    """Returns the engine's record of a request; fields may be those of either."""
    wanted = {field: fields.pop(field) for field in GenerationRequest.__struct_fields__ if field in fields}
    return Request(name, asking(prompt, params, **wanted), **fields)


def adding(name: str, prompt: Sequence[int], params: SamplingParams | None = None, **fields: Any) -> AddRequest:
    """Returns the message that gives a request to the engine; fields may be those of either."""
    progress = {field: fields.pop(field) for field in AddRequest.__struct_fields__ if field in fields}
    return AddRequest(request_id=name, asked=asking(prompt, params, **fields), **progress)
