"""The response of /v1/responses that is not streamed."""

from typing import Any

import msgspec
from starlette.responses import Response

from server.core.chunked_json import json_of
from server.core.timings import complete_headers
from server.generation.logprobs import encode_iterators


async def whole_response(body: dict[str, Any]) -> Response:
    body["output"] = [await _json_of(item) for item in body["output"]]
    return Response(msgspec.json.encode(body), media_type="application/json", headers=complete_headers(body["timings"]))


async def _json_of(item: dict[str, Any]) -> msgspec.Raw:
    for part in item.get("content", ()):
        await encode_iterators(part)
    return await json_of(item)
