"""GET /v1/models and GET /v1/models/{id}."""

from datetime import UTC, datetime

from fastapi import APIRouter
from starlette.requests import Request

from server.core.paths import plain_path
from server.protocol.listing import ModelCard, ModelList
from server.routes.documented import error_responses
from server.runtime.context import AppContext, context_of

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models", responses=error_responses(401, 503))
async def list_models(request: Request) -> ModelList:
    """All names of the one model that is loaded, and of the adapters over it."""
    context = context_of(request)
    names = [*context.settings.model_names, *context.backend.engine.adapters.loaded]
    return ModelList(data=[_card(context, name) for name in names], first_id=names[0], last_id=names[-1])


@router.get("/v1/models/{name:path}", responses=error_responses(401, 404, 503))
async def show_model(name: str, request: Request) -> ModelCard:
    """One name of the model that is loaded, or of an adapter; it may contain slashes."""
    context = context_of(request)
    names = [*context.settings.model_names, *context.backend.engine.adapters.loaded]
    by_path = {plain_path(each): each for each in names}
    return _card(context, context.check_model(by_path.get(plain_path(name), name)))


def _card(context: AppContext, name: str) -> ModelCard:
    backend = context.backend
    adapter = backend.engine.adapters.loaded.get(name)
    return ModelCard(
        id=name,
        display_name=name,
        created=backend.loaded_at,
        created_at=datetime.fromtimestamp(backend.loaded_at, UTC),
        root=context.settings.model if adapter is None else adapter.path,
        parent=None if adapter is None else context.settings.model_names[0],
        max_model_len=backend.engine.info.max_model_len,
    )
