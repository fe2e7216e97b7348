"""Routes that generate: an overloaded server refuses before it reads the body, which costs more than the refusal."""

from starlette.requests import Request

from server.context import context_of
from server.routes.json_route import JsonRoute


class GenerationRoute(JsonRoute):
    def check(self, request: Request) -> None:
        """Raises OverloadedError. What depends on the prompt is looked at again when it is known."""
        context_of(request).backend.engine.check_room()
