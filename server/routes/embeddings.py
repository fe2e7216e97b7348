"""POST /v1/embeddings."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.core.timings import complete_headers
from server.generation.embeddings import body as body_of
from server.generation.embeddings import outputs_of
from server.generation.entry import validate_request
from server.generation.whole_answer import answer_of
from server.protocol.embeddings import EmbeddingRequest, EmbeddingResponse
from server.protocol.refusals import EMBEDDING_REFUSALS
from server.routes.documented import error_responses
from server.routes.generation_route import GenerationRoute
from server.runtime.context import context_of

router = APIRouter(route_class=GenerationRoute, tags=["OpenAI"])


@router.post(
    "/v1/embeddings",
    response_model=EmbeddingResponse,
    responses=error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503),
)
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """The served model's last hidden state at each input's last token, as a vector of length one.

    Whether such vectors are good for search depends on the model: use one that was trained to embed.
    """
    arrival = validate_request(body, EMBEDDING_REFUSALS, request)
    answer = body_of(body, arrival.model, await outputs_of(body, arrival, request))
    headers = complete_headers(answer["timings"])
    return await answer_of(answer, headers, context_of(request).settings.stall_timeout, slice_size=1)
