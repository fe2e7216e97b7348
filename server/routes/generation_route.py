"""Routes that generate: an overloaded server refuses before it reads the body, which costs more than the refusal."""

from starlette.requests import Request

from server.core.errors import BadRequestError
from server.routes.json_route import JsonRoute
from server.runtime.context import context_of, tenant_of


class GenerationRoute(JsonRoute):
    def check(self, request: Request) -> None:
        """Raises as `check_admission` does. Limits that depend on the prompt are checked again when it is known."""
        if context_of(request).settings.role == "prefill":
            raise BadRequestError(
                "This server computes prompts for others (--role prefill): send the request to the server with "
                "--role decode that asks it for them."
            )
        context_of(request).backend.engine.check_admission(tenant_of(request))
