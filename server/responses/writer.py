"""Writes a response: as a stream of events, or whole at its end."""

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.core.batch import TokenLogprobs
from engine.core.outputs import RequestOutput
from engine.core.request import FinishReason
from server.chat.blocks import Blocks, Event
from server.chat.logprobs import ChatLogprobsFormatter
from server.chat.output_reader import OutputReader
from server.chat.usage import ChatUsageCounter
from server.core.errors import ErrorKind
from server.responses.function_tools import OfferedTools
from server.responses.item_state import PendingLogprobs
from server.responses.items import Item, item_maker
from server.tools.message_parts import Content


class ResponseWriter:
    """Writes the response of one generation, given its outputs in their order."""

    def __init__(
        self,
        head: Mapping[str, Any],
        offered: OfferedTools,
        reader: OutputReader,
        counter: ChatUsageCounter,
        logprobs: ChatLogprobsFormatter | None,
    ) -> None:
        """`head` has the fields that are known from the response's beginning on."""
        self._head = head
        self._reader = reader
        self._counter = counter
        self._logprobs = logprobs
        self._pending = PendingLogprobs()
        self._items: Blocks[Item] = Blocks(item_maker(str(head["id"]).removeprefix("resp_"), offered, self._pending))
        self._last: RequestOutput | None = None
        self._numbers = itertools.count()

    def begin(self) -> list[Event]:
        response = self._body("in_progress")
        return self._numbered(
            [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]
        )

    def add(self, output: RequestOutput) -> list[Event]:
        self._last = output
        if self._logprobs is not None:
            self._pending.add(self._logprobs.format(_text_logprobs(output))["content"])
        return self._numbered([event for part in self._reader.read(output) for event in self._items.add(part)])

    def end(self) -> list[Event]:
        """Returns the last events. An answer without anything is an empty message."""
        events = [] if self._items.whole() else self._items.add(Content(""))
        events += self._items.end(self._is_complete and not self._reader.is_cut)
        body = self.whole()
        return self._numbered([*events, {"type": f"response.{body['status']}", "response": body}])

    def fail(self, kind: ErrorKind, message: str) -> list[Event]:
        error = {"code": "server_error", "message": message}
        return self._numbered([{"type": "response.failed", "response": self._body("failed") | {"error": error}}])

    def whole(self) -> dict[str, Any]:
        """Returns the whole response. To be called after `end`."""
        assert self._last is not None
        ended = {"completed_at": int(time.time())} if self._is_complete else {"incomplete_details": _CUT}
        return {
            **self._body("completed" if self._is_complete else "incomplete"),
            **ended,
            "stop_reason": self._last.stop_reason,
            "usage": self._usage(),
            "timings": self._counter.timings(),
        }

    @property
    def _is_complete(self) -> bool:
        assert self._last is not None
        return self._last.finish_reason is not FinishReason.LENGTH

    def _body(self, status: str) -> dict[str, Any]:
        return {**self._head, "status": status, "output": self._items.whole()}

    def _usage(self) -> dict[str, Any]:
        usage = self._counter.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": self._counter.prompt_details(),
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }

    def _numbered(self, events: Iterable[Event]) -> list[Event]:
        return [{**event, "sequence_number": next(self._numbers)} for event in events]


_CUT = {"reason": "max_output_tokens"}


def _text_logprobs(output: RequestOutput) -> Sequence[TokenLogprobs]:
    """Returns the logprobs without that of a stop token, which has no text, even if text held back comes with it."""
    is_stop_token = output.finish_reason is FinishReason.STOP and not isinstance(output.stop_reason, str)
    return output.logprobs[:-1] if is_stop_token else output.logprobs
