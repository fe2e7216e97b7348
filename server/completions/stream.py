"""The streamed completion: one event per token."""

from collections.abc import AsyncGenerator
from typing import Any

from server.completions.choice import ChoiceFormatter
from server.completions.plan import CompletionPlan
from server.completions.tally import Tally
from server.errors import describe, log_failure
from server.fanout import IndexedOutput
from server.record import RequestRecord
from server.sse import DONE, EventHead, event
from server.text import Tokenizer
from server.timings import usage_metrics


class CompletionStream:
    """Turns the outputs of one plan into events."""

    def __init__(self, plan: CompletionPlan, tally: Tally, record: RequestRecord, tokenizer: Tokenizer) -> None:
        options = plan.request.stream_options
        self._plan = plan
        self._tally = tally
        self._record = record
        self._head = EventHead(plan.head())
        self._include_usage = options is not None and options.include_usage
        self._continuous_usage = options is not None and options.continuous_usage_stats
        self._formatters = [
            ChoiceFormatter(plan.request, plan.prompt_of(index), tokenizer) for index in range(len(plan.generations))
        ]

    async def events(
        self, first: IndexedOutput, outputs: AsyncGenerator[IndexedOutput, None]
    ) -> AsyncGenerator[bytes, None]:
        """All events from the first token to `[DONE]`. An error from here on is an event, for the status is sent."""
        try:
            yield self._chunk(first)
            async for news in outputs:
                yield self._chunk(news)
            if self._include_usage:
                usage = self._tally.usage()
                yield self._head.event([], usage=usage, metrics=usage_metrics(self._tally.timings()))
        except Exception as error:
            kind, body = describe(error, self._record.request_id)
            self._record.error_code = kind.code
            log_failure(error, self._record.request_id)
            yield event(body)
        yield DONE

    def _chunk(self, news: IndexedOutput) -> bytes:
        index, output = news
        self._tally.add(index, output)
        extra: dict[str, Any] = {}
        if self._continuous_usage:
            extra["usage"] = self._tally.usage()
        elif self._include_usage:
            extra["usage"] = None
        if output.is_finished and output.timings is not None:
            extra["timings"] = self._tally.timings_of(index)
        return self._head.event([self._formatters[index].format(index, output)], **extra)
