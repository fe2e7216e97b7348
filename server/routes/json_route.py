"""Reading JSON bodies strictly: the media type must say so, and what cannot be parsed is told in one sentence."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from server.errors import BadRequestError, MediaTypeError

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRequest(Request):
    async def json(self) -> Any:
        try:
            return json.loads(await self.body())
        except ValueError as error:
            raise BadRequestError(f"The body is not valid JSON: {error}.") from error
        except RecursionError:
            raise BadRequestError("The body's JSON is nested too deeply.") from None


class JsonRoute(APIRoute):
    """A route whose requests have a JSON body. The parsed body is validated by FastAPI as for any route."""

    def check(self, request: Request) -> None:
        """Raise what can be told before the body is read."""

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            self.check(request)
            media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if request.method == "POST" and media_type != "application/json":
                raise MediaTypeError("The body must be JSON; send the header Content-Type: application/json.")
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json
