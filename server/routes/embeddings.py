"""POST /v1/embeddings."""

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.core.request_record import record_of
from server.core.timings import complete_headers
from server.generation.embeddings import body as body_of
from server.generation.embeddings import embed, plan_embeddings, report
from server.generation.entry import validate_request
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
    backend = context_of(request).backend
    generations = await arrival.within_deadline(plan_embeddings(body, backend, arrival))
    size, share = backend.admission_size, arrival.tenant.share
    outputs = await embed(backend.engine, generations, size.max_live(share), size.max_tokens(share))
    record = record_of(request.scope)
    record.report = lambda: report(outputs)
    for index, output in enumerate(outputs):
        record.note_end(index, output)
    answer = await body_of(body, arrival.model, outputs)
    headers = complete_headers(answer["timings"])
    return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")
