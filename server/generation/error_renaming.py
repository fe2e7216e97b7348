"""For APIs that are translated to chat: errors name the parameters that the client knows."""

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from pydantic import ValidationError
from starlette.exceptions import HTTPException

from engine.core.errors import RequestError
from server.core.errors import BadRequestError
from server.core.validation import problem_of

_OTHERS_WORDS = re.compile(r":|(?<!\w)['\"]")
"""Where a message goes on with what is not the server's own: quotes, and complaints of templates and grammars."""


class ErrorRenaming:
    def __init__(self, *names: tuple[str, str]) -> None:
        """Patterns of the chat API's names -> how this API calls them. What follows a colon is for people: no name."""
        self._names: Sequence[tuple[re.Pattern[str], str]] = [
            (re.compile(rf"\b(?:{old})\b"), new) for old, new in names
        ]

    @contextmanager
    def __call__(self) -> Generator[None, None, None]:
        try:
            yield
        except ValidationError as error:
            problem = problem_of(error.errors())
            raise self._renamed(problem) from error
        except (RequestError, BadRequestError) as error:
            self._renamed(error)
            raise

    def _renamed(self, error: RequestError | BadRequestError) -> RequestError | BadRequestError:
        """The same error: its class decides the status."""
        if error.param is not None:
            error.param, _, _ = self._rename(error.param).partition(":")
        if isinstance(error, HTTPException):
            error.detail = self._rename_own(error.detail)
        else:
            error.args = (self._rename_own(str(error)),)
        return error

    def _rename_own(self, message: str) -> str:
        own = _OTHERS_WORDS.split(message, maxsplit=1)[0]
        return self._rename(own) + message[len(own) :]

    def _rename(self, text: str) -> str:
        for old, new in self._names:
            text = old.sub(new, text)
        return text
