"""Counts of a chat request: those of any request, and the reasoning among the tokens."""

from collections.abc import Sequence
from typing import Any

from server.chat.choice import ChatChoice
from server.chat.plan import ChatPlan
from server.generation.tally import Tally
from server.record import RequestRecord


class ChatTally(Tally):
    def __init__(self, plan: ChatPlan, choices: Sequence[ChatChoice], record: RequestRecord) -> None:
        super().__init__(plan, record)
        self._choices = choices

    def usage(self) -> dict[str, Any]:
        reasoning = sum(choice.num_reasoning_tokens for choice in self._choices)
        return super().usage() | {"completion_tokens_details": {"reasoning_tokens": reasoning}}
