"""Usage of a chat request: that of any request, and the reasoning tokens."""

from collections.abc import Sequence

from server.chat.output_reader import OutputReader
from server.chat.plan import ChatPlan
from server.core.request_record import RequestRecord
from server.generation.usage import UsageCounter


class ChatUsageCounter(UsageCounter):
    def __init__(self, plan: ChatPlan, readers: Sequence[OutputReader], record: RequestRecord) -> None:
        super().__init__(plan, record)
        self._readers = readers

    def _completion_details(self) -> dict[str, int]:
        reasoning = sum(reader.num_reasoning_tokens for reader in self._readers)
        return {"reasoning_tokens": reasoning, **super()._completion_details()}
