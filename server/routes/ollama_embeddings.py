"""Ollama's API: /api/embed and its older form, /api/embeddings."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.core.timings import complete_headers
from server.generation.embeddings import numbers, outputs_of, report
from server.generation.entry import Arrival, validate_request
from server.generation.error_renaming import ErrorRenaming
from server.generation.whole_answer import answer_of
from server.ollama.writer import durations
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.ollama import OLLAMA_REFUSALS
from server.protocol.ollama_embeddings import (
    EmbedAnswer,
    EmbedRequest,
    OlderEmbedAnswer,
    OlderEmbedRequest,
    OllamaEmbedding,
)
from server.protocol.prompts import Prompt
from server.routes.documented import ollama_error_responses
from server.routes.ollama import OllamaGenerationRoute, without_latest
from server.runtime.context import context_of

router = APIRouter(route_class=OllamaGenerationRoute, tags=["Ollama"])

_ERRORS = ollama_error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503)
_NAMES = ErrorRenaming(("truncate_prompt_tokens", "truncate"))
_OLDER_NAMES = ErrorRenaming(("input", "prompt"))


@router.post("/api/embed", response_model=EmbedAnswer, responses=_ERRORS)
async def embed(body: EmbedRequest, request: Request) -> Response:
    """The served model's last hidden state at each input's last token, as a vector of length one."""
    arrival = _arrival(body, request)
    if not body.input:
        return JSONResponse({"model": arrival.model, "embeddings": []})
    with _NAMES():
        outputs = await outputs_of(_asked(body, body.input, body.truncate, body.dimensions), arrival, request)
    timings = report(outputs).body()
    vectors = (numbers(output.embedding) for output in outputs)
    answer = {"model": arrival.model, "embeddings": vectors, **durations(timings), "timings": timings}
    return await answer_of(answer, complete_headers(timings), context_of(request).settings.stall_timeout, slice_size=1)


@router.post("/api/embeddings", response_model=OlderEmbedAnswer, responses=_ERRORS)
async def older_embed(body: OlderEmbedRequest, request: Request) -> Response:
    """The older form of /api/embed, of one prompt."""
    arrival = _arrival(body, request)
    if not body.prompt:
        return JSONResponse({"embedding": []})
    with _OLDER_NAMES():
        [output] = await outputs_of(_asked(body, [body.prompt], truncates=True), arrival, request)
    return JSONResponse({"embedding": numbers(output.embedding)}, headers=complete_headers(report([output]).body()))


def _arrival(body: OllamaEmbedding, request: Request) -> Arrival:
    return validate_request(without_latest(body, context_of(request)), OLLAMA_REFUSALS, request)


def _asked(
    body: OllamaEmbedding, inputs: list[Prompt], truncates: bool, dimensions: int | None = None
) -> EmbeddingRequest:
    """Returns the request of /v1/embeddings for the same. Of what is too long the beginning stays, as in Ollama, unless
    the request has the server's own parameters for that."""
    limit, side = body.truncate_prompt_tokens, body.truncation_side
    if limit is None and truncates:
        limit, side = -1, "right"
    return EmbeddingRequest.model_construct(
        input=inputs, dimensions=dimensions, truncate_prompt_tokens=limit, truncation_side=side
    )
