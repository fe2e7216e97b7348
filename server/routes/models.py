"""GET /v1/models and GET /v1/models/{id}."""

from fastapi import APIRouter
from starlette.requests import Request

from server.core.paths import plain_path
from server.protocol.listing import ModelCard, ModelList
from server.routes.documented import error_responses
from server.runtime.context import AppContext, context_of

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models", responses=error_responses(401, 503))
async def list_models(request: Request) -> ModelList:
    """All names of the one model that is loaded."""
    context = context_of(request)
    return ModelList(data=[_card(context, name) for name in context.settings.model_names])


@router.get("/v1/models/{name:path}", responses=error_responses(401, 404, 503))
async def show_model(name: str, request: Request) -> ModelCard:
    """One name of the model that is loaded; it may contain slashes."""
    context = context_of(request)
    by_path = {plain_path(each): each for each in context.settings.model_names}
    return _card(context, context.check_model(by_path.get(plain_path(name), name)))


def _card(context: AppContext, name: str) -> ModelCard:
    backend = context.backend
    return ModelCard(
        id=name,
        created=backend.loaded_at,
        root=context.settings.model,
        max_model_len=backend.engine.info.max_model_len,
    )
