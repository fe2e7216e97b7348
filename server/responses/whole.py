"""The response of /v1/responses that is not streamed."""

from typing import Any

from starlette.responses import Response

from server.core.timings import complete_headers
from server.generation.whole_answer import answer_of


async def whole_response(body: dict[str, Any], stall_timeout_s: float) -> Response:
    return await answer_of(body, complete_headers(body["timings"]), stall_timeout_s)
