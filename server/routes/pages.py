"""The pages for people: GET /, a live view of the server and a playground, and GET /docs. Each is one file that loads
no other, joined from those of `server/page` when the server starts."""

import base64
import hashlib
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse

router = APIRouter(default_response_class=HTMLResponse, include_in_schema=False)

_SOURCES = Path(__file__).parents[1] / "page"
_LIVE = ("core", "plot", "chart", "lanes", "history", "requests", "live", "answer", "playground", "main")


class Page:
    """A page of one file, and the headers that keep everything else out of it."""

    def __init__(self, skeleton: str, *scripts: str) -> None:
        """`skeleton` is the HTML with an empty style and script, `scripts` are what the latter is joined from."""
        style = _source("style.css")
        script = '"use strict";\n' + "".join(_source(f"{name}.js") for name in scripts)
        html = _source(skeleton)
        html = html.replace("<style></style>", f"<style>{style}</style>", 1)
        self.body = html.replace("<script></script>", f"<script>{script}</script>", 1).encode()
        self.headers = {
            "Content-Security-Policy": "; ".join(
                [
                    "default-src 'none'",
                    f"style-src {_digest(style)}",
                    f"script-src {_digest(script)}",
                    "connect-src 'self'",
                    "base-uri 'none'",
                    "form-action 'none'",
                    "frame-ancestors 'none'",
                    "require-trusted-types-for 'script'",
                ]
            ),
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }

    def response(self, root_path: str) -> HTMLResponse:
        """Returns the page, whose links begin with `root_path` if there is one: its own address may end without a
        slash there, and links would be relative to what comes before."""
        if not root_path:
            return HTMLResponse(self.body, headers=self.headers)
        policy = self.headers["Content-Security-Policy"].replace("base-uri 'none'", "base-uri 'self'")
        base = f'<head>\n<base href="{root_path}/">'.encode()
        return HTMLResponse(
            self.body.replace(b"<head>", base, 1), headers={**self.headers, "Content-Security-Policy": policy}
        )


def _source(name: str) -> str:
    return (_SOURCES / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """Returns the source expression of a Content-Security-Policy that allows this inline text and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_PAGE = Page("index.html", *_LIVE)
_DOCS = Page("docs.html", "core", "schema", "docs")


@router.get("/")
async def page(request: Request) -> HTMLResponse:
    """Show what `/load`, `/stats` and `/v1/requests` report, and talk to the model. The page itself needs no API key,
    and asks for the one that these need."""
    return _PAGE.response(request.scope["root_path"])


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    """Show every operation of `/openapi.json`, and try it. The page itself needs no API key, as that of `/`."""
    return _DOCS.response(request.scope["root_path"])
