"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them: adapters come and go while others run."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from server.core.errors import BadRequestError, ModelNotFoundError
from server.core.request_record import record_of
from server.protocol.adapters import LoadAdapterRequest, UnloadAdapterRequest
from server.routes.documented import error_responses
from server.routes.json_route import JsonRoute
from server.runtime.context import AppContext, context_of

router = APIRouter(route_class=JsonRoute, tags=["Operations"], default_response_class=PlainTextResponse)


@router.post("/v1/load_lora_adapter", responses=error_responses(400, 401, 413, 415, 503))
async def load_lora_adapter(body: LoadAdapterRequest, request: Request) -> PlainTextResponse:
    """Load an adapter (LoRA) from a directory of the server; from then on requests may name it as their model, also
    after a restart of the engine. Needs --allow-runtime-lora-updating."""
    context = _allowed(request)
    adapters, settings = context.backend.engine.adapters, context.settings
    if body.lora_name in settings.model_names:
        raise BadRequestError(f"{body.lora_name!r} is the model's own name: choose another one.", "lora_name")
    if len(adapters.loaded) >= settings.max_loras:
        raise BadRequestError(f"There are as many adapters as --max-loras allows, {settings.max_loras}: unload one.")
    await adapters.load(body.lora_name, body.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", responses=error_responses(400, 401, 404, 413, 415, 503))
async def unload_lora_adapter(body: UnloadAdapterRequest, request: Request) -> PlainTextResponse:
    """Take no more requests for an adapter. Those that run with it go on; its memory is freed when they have ended.
    Needs --allow-runtime-lora-updating."""
    context = _allowed(request)
    adapters = context.backend.engine.adapters
    if body.lora_name not in adapters.loaded:
        raise ModelNotFoundError(f"No adapter {body.lora_name[:100]!r} is loaded.", "lora_name")
    adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _allowed(request: Request) -> AppContext:
    """Returns the app's context. Raises BadRequestError unless this client may load and unload adapters."""
    context = context_of(request)
    if not context.settings.allow_runtime_lora_updating:
        raise BadRequestError(
            "Adapters are loaded and unloaded at run time only by a server with --allow-runtime-lora-updating."
        )
    if context.keys.share_of(record_of(request.scope).key) < 1:
        raise BadRequestError("Adapters are shared by all API keys, so none of several may load or unload them.")
    return context
