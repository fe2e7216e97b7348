"""Ollama's API: /api/chat and /api/generate, and what tells of the model. Models are neither fetched nor made here."""

from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.chat.answer import AnswerFormat, thinking_marks
from server.chat.output_reader import OutputReader
from server.chat.plan import plan_chat
from server.completions.plan import plan_completion
from server.core.errors import BadRequestError
from server.core.request_record import record_of
from server.core.timings import complete_headers
from server.generation.entry import Arrival, validate_request
from server.generation.plan import GenerationPlan
from server.generation.respond import all_outputs, open_stream
from server.generation.resume_points import resume_points
from server.generation.usage import UsageCounter
from server.ollama.listing import description, listed_model, loaded_model, rfc3339
from server.ollama.translate import RENAMING, chat_of, no_thinking, raw_prompt
from server.ollama.writer import LineStream, LineWriter, line, message_body, response_body, resume_point
from server.protocol.generation import GenerationParams
from server.protocol.ollama import (
    OLLAMA_REFUSALS,
    LoadedModels,
    ModelDescription,
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    OllamaGeneration,
    OllamaModels,
    OllamaVersion,
    ShowRequest,
)
from server.protocol.request import RequestFields
from server.routes.documented import ollama_error_responses
from server.routes.generation_route import GenerationRoute
from server.routes.json_route import JsonRoute
from server.runtime.backend import Backend
from server.runtime.context import AppContext, context_of

API_VERSION = "0.12.0"
"""The version of Ollama whose API this is: clients ask for one at least."""
LINES = "application/x-ndjson"
LATEST = ":latest"


class OllamaGenerationRoute(GenerationRoute):
    takes_form_type = True  # Ollama reads any, and so its users call curl


class OllamaRoute(JsonRoute):
    takes_form_type = True


router = APIRouter(route_class=OllamaGenerationRoute, tags=["Ollama"])
about = APIRouter(route_class=OllamaRoute, tags=["Ollama"])

_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {LINES: {}}, "description": "Unless stream is false: lines, each such an object."},
    **ollama_error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503),
}

RequestT = TypeVar("RequestT", bound=RequestFields)


@router.post("/api/chat", response_model=OllamaChatAnswer, responses=_ANSWERS)
async def chat(body: OllamaChatRequest, request: Request) -> Response:
    """Answer a conversation. One that ends with the assistant's text is continued there."""
    return await _answer(body, request, is_chat=True, has_prompt=bool(body.messages))


@router.post("/api/generate", response_model=OllamaGenerateAnswer, responses=_ANSWERS)
async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
    """Answer a prompt as the one message of a user, or with raw continue it."""
    return await _answer(body, request, is_chat=False, has_prompt=bool(body.prompt))


async def _answer(body: OllamaGeneration, request: Request, is_chat: bool, has_prompt: bool) -> Response:
    context, record = context_of(request), record_of(request.scope)
    arrival = validate_request(without_latest(body, context), OLLAMA_REFUSALS, request)
    if not has_prompt:
        loaded = {"done": True, "done_reason": "load"}
        head = _head(arrival.model, context.backend.loaded_at)
        whole = head | (message_body if is_chat else response_body)({}) | loaded
        return Response(line(whole), media_type="application/json")
    with RENAMING():
        plan, answer = await arrival.within_deadline(_plan(body, context.backend, arrival))
        reader, counter = OutputReader(answer, arrival.request_id, 0), UsageCounter(plan, record)
        writer = LineWriter(_head(arrival.model, int(plan.head["created"])), is_chat, reader, counter)
        if body.stream:
            points = resume_points(plan, counter, body.resume_points, resume_point)
            return await open_stream(plan, LineStream(writer, counter, record, points), request, b"", LINES)
        [outputs] = await all_outputs(plan, counter, request)
    for output in outputs:
        writer.add(output)
    whole = writer.whole()
    return Response(line(whole), media_type="application/json", headers=complete_headers(whole["timings"]))


async def _plan(
    body: OllamaGeneration, backend: Backend, arrival: Arrival
) -> tuple[GenerationPlan[GenerationParams], AnswerFormat]:
    """Returns the plan of a request, whose answer may end with the context, and how the answer is parsed."""
    if isinstance(body, OllamaGenerateRequest) and body.raw:
        plain = AnswerFormat(backend.tokenizer, {}, is_one_call=False, calls=None, thinking=None, begins_inside=False)
        return await plan_completion(raw_prompt(body), backend, arrival), plain
    chat = chat_of(body, ends_thinking=False)
    marks = backend.chat.dialect_for(chat).thinking
    if body.think and marks is None:
        raise no_thinking(body)
    if body.think is False and marks is not None and thinking_marks(backend.tokenizer, marks):
        chat = chat_of(body, ends_thinking=True)
    return await plan_chat(chat, backend, arrival, shortens=body.truncate_prompt_tokens != -1)


def without_latest(body: RequestT, context: AppContext) -> RequestT:
    """Returns the request for the name that is served where it asks for that with the tag of clients."""
    return body.model_copy(update={"model": _served_name(body.model, context)})


def _served_name(name: str | None, context: AppContext) -> str | None:
    """Returns the name without the tag that clients add to one that has none, unless it is served with that."""
    names = _names(context)
    if name is None or name in names or not name.endswith(LATEST):
        return name
    return name.removesuffix(LATEST)


def _names(context: AppContext) -> list[str]:
    return [*context.settings.model_names, *context.backend.engine.adapters.loaded]


def _head(model: str, created_s: int) -> dict[str, str]:
    return {"model": model, "created_at": rfc3339(created_s)}


@about.get("/api/tags", responses=ollama_error_responses(401, 503))
async def tags(request: Request) -> OllamaModels:
    """All names of the one model that is loaded, and of the adapters over it."""
    context = context_of(request)
    model = context.settings.model_names[0]
    return OllamaModels(models=[listed_model(name, model, context.backend) for name in _names(context)])


@about.get("/api/ps", responses=ollama_error_responses(401, 503))
async def loaded_models(request: Request) -> LoadedModels:
    """Names of the loaded model, with the memory that it has with its KV cache."""
    context = context_of(request)
    model = context.settings.model_names[0]
    return LoadedModels(models=[loaded_model(name, model, context.backend) for name in _names(context)])


@about.post("/api/show", responses=ollama_error_responses(400, 401, 404, 413, 415, 503))
async def show(body: ShowRequest, request: Request) -> ModelDescription:
    """What the model of a name can do, how long its context is, and the defaults of its parameters."""
    context = context_of(request)
    name = context.check_model(_served_name(body.model or body.name, context))
    return description(name, context.settings.model_names[0], context.backend)


@about.get("/api/version", responses=ollama_error_responses(401))
async def version() -> OllamaVersion:
    """The version of Ollama's API that this follows. The server's own is at /version."""
    return OllamaVersion(version=API_VERSION)


_NO_STORE = "is not supported: this server has the one model that it was started with"
_REFUSED: Mapping[str, str] = {
    "/api/pull": "POST",
    "/api/push": "POST",
    "/api/create": "POST",
    "/api/copy": "POST",
    "/api/delete": "DELETE",
}


async def refuse(request: Request) -> Response:
    path = request.scope["route"].path
    raise BadRequestError(f"{path} {_NO_STORE}.")


for _path, _method in _REFUSED.items():
    about.add_api_route(_path, refuse, methods=[_method], include_in_schema=False)
router.include_router(about)
