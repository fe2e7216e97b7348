"""Errors of APIs that are translated to chat: they name the parameters of the API that the client uses."""

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from pydantic import ValidationError
from starlette.exceptions import HTTPException

from engine.core.errors import RequestError
from server.core.errors import BadRequestError
from server.core.validation import problem_of

_FOREIGN_TEXT = re.compile(r":|(?<!\w)['\"]")
"""Where a message continues with text that is not the server's own: quotes, and errors of templates and grammars."""

NewName = str | Callable[[re.Match[str]], str]


class ErrorRenaming:
    def __init__(self, *names: tuple[str, NewName]) -> None:
        """`names` are patterns of the chat API's parameters, and their names in this API. In these, text behind a colon
        is for the message only."""
        self._names: Sequence[tuple[re.Pattern[str], NewName]] = [
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
        """Returns the same error, whose class decides the status, with its parameter and message renamed."""
        if error.param is not None:
            error.param, _, _ = self._rename(error.param).partition(":")
        if isinstance(error, HTTPException):
            error.detail = self._rename_own(error.detail)
        else:
            error.args = (self._rename_own(str(error)),)
        return error

    def _rename_own(self, message: str) -> str:
        own = _FOREIGN_TEXT.split(message, maxsplit=1)[0]
        return self._rename(own) + message[len(own) :]

    def _rename(self, text: str) -> str:
        for old, new in self._names:
            text = old.sub(new, text)
        return text
