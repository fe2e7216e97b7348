"""Embeddings between the validated request and the response: one generation without tokens per input."""

import base64
import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request

from engine.client.interface import EngineClient
from engine.core.errors import ContextLengthError, EngineFailedError, InvalidParameterError
from engine.core.generation_request import GenerationRequest
from engine.core.outputs import RequestOutput
from engine.core.sampling_params import SamplingParams
from server.core.errors import BadRequestError
from server.core.prompts import PromptCut, encode_prompts
from server.core.request_record import record_of
from server.core.timings import PhaseReport, TokenCounts
from server.generation.entry import Arrival
from server.generation.fan_out import generate_all
from server.generation.whole_answer import reserve_memory
from server.protocol.embeddings import EmbeddingRequest
from server.runtime.backend import Backend
from server.runtime.context import context_of

# Inputs given to the engine at once, and their tokens: about one step's. A request of a thousand inputs must not fill
# the admission queue, and no input may be refused because others of its request wait.
GROUP = 32
GROUP_TOKENS = 2048

_OUTPUT_BYTES = 1024
"""Memory that an output takes without its vector."""

_PARAMS = SamplingParams(max_tokens=0, returns_embedding=True)


async def plan_embeddings(request: EmbeddingRequest, backend: Backend, arrival: Arrival) -> list[GenerationRequest]:
    """Returns one request per input. Raises RequestError or BadRequestError for what the engine cannot be asked; the
    rest it refuses itself."""
    if request.dimensions not in (None, backend.engine.info.hidden_size):
        message = f"dimensions must be {backend.engine.info.hidden_size}: vectors have the model's hidden size."
        raise BadRequestError(message, "dimensions")
    max_model_len = backend.engine.info.max_model_len
    cut = PromptCut.of(request, max_model_len)
    prompts = await encode_prompts(request.input, backend.tokenizer, request.add_special_tokens, cut)
    if (longest := max(len(prompt.token_ids) for prompt in prompts)) > max_model_len:
        message = f"An input has {longest} tokens; the maximum context length is {max_model_len}."
        raise ContextLengthError(f"{message} Shorten it, or set truncate_prompt_tokens.", "input")
    return [arrival.generation(prompt.token_ids, _PARAMS) for prompt in prompts]


async def outputs_of(asked: EmbeddingRequest, arrival: Arrival, request: Request) -> list[RequestOutput]:
    """Returns the one output of each input. Memory is reserved for their vectors until the answer is written, and the
    request's record tells of them. Raises as `plan_embeddings`, `reserve_memory` and `embed` do."""
    backend = context_of(request).backend
    generations = await arrival.within_deadline(plan_embeddings(asked, backend, arrival))
    reserve_memory(request, answer_bytes(len(generations), backend.engine.info.hidden_size))
    size, share = backend.admission_size, arrival.tenant.share
    outputs = await embed(backend.engine, generations, size.max_live(share), size.max_tokens(share))
    record = record_of(request.scope)
    record.report = lambda: report(outputs)
    for index, output in enumerate(outputs):
        record.note_end(index, output)
    return outputs


def answer_bytes(num_inputs: int, hidden_size: int) -> int:
    """Returns the memory that the vectors take until they are written, beyond that of one, which is never missing."""
    return (num_inputs - 1) * (4 * hidden_size + _OUTPUT_BYTES)


async def embed(
    engine: EngineClient, generations: Sequence[GenerationRequest], max_live: int, max_tokens: int
) -> list[RequestOutput]:
    """Returns the one output of each generation, in their order. The engine accepts `max_live` of them with
    `max_tokens` prompt tokens at once. Raises EngineFailedError for numbers that JSON does not have."""
    outputs: dict[int, RequestOutput] = {}
    try:
        for group in _groups(generations, min(GROUP, max_live), min(GROUP_TOKENS, max_tokens)):
            async with aclosing(generate_all(engine, [generations[index] for index in group])) as indexed_outputs:
                async for index, output in indexed_outputs:
                    _check_finite(output.embedding)
                    outputs[group[index]] = output
    except InvalidParameterError as error:
        param = "input" if error.param == "prompt" else str(error.param)
        raise InvalidParameterError(param, str(error).replace("prompt", param, 1)) from error
    return [outputs[index] for index in range(len(generations))]


def _groups(generations: Sequence[GenerationRequest], max_size: int, max_tokens: int) -> Iterator[range]:
    """Yields runs of at most `max_size` inputs and `max_tokens` tokens; a longer input is alone."""
    start, num_tokens = 0, 0
    for index, generation in enumerate(generations):
        num_tokens += len(generation.prompt_token_ids)
        if index > start and (index - start == max_size or num_tokens > max_tokens):
            yield range(start, index)
            start, num_tokens = index, len(generation.prompt_token_ids)
    yield range(start, len(generations))


def report(outputs: Sequence[RequestOutput]) -> PhaseReport:
    counts = TokenCounts(
        prompt=sum(output.num_prompt_tokens for output in outputs),
        cached=sum(output.num_cached_tokens for output in outputs),
        output=0,
    )
    return PhaseReport.of([output.timings for output in outputs if output.timings is not None], counts)


def body(request: EmbeddingRequest, model: str, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Returns the response's body, whose vectors are made when they are written."""
    timings = report(outputs).body()
    data = (
        {"object": "embedding", "index": index, "embedding": _vector(output.embedding, request)}
        for index, output in enumerate(outputs)
    )
    return {
        "object": "list",
        "data": data,
        "model": model,
        "usage": {
            "prompt_tokens": timings["prompt_tokens"],
            "total_tokens": timings["prompt_tokens"],
            "prompt_tokens_details": {"cached_tokens": timings["cached_tokens"]},
        },
        "timings": timings,
    }


def _vector(data: bytes, request: EmbeddingRequest) -> list[float] | str:
    """Returns the embedding in the requested format."""
    return base64.b64encode(data).decode("ascii") if request.encoding_format == "base64" else numbers(data)


def _check_finite(data: bytes) -> None:
    if not math.isfinite(sum(numbers(data))):  # finite numbers of four bytes have a finite sum
        raise EngineFailedError("An embedding is not finite.")


def numbers(data: bytes) -> list[float]:
    """Returns the numbers of an output's embedding."""
    return list(struct.unpack(f"<{len(data) // 4}f", data))
