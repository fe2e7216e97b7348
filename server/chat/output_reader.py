"""One choice's outputs -> message parts, and the count of reasoning tokens."""

from engine.core.outputs import RequestOutput
from server.chat.answer import AnswerFormat
from server.tools.message_parts import Part, ToolCall


class OutputReader:
    """Parses all outputs of one generation, in their order."""

    def __init__(self, answer: AnswerFormat, response_id: str, choice: int) -> None:
        self._parser = answer.parser(response_id, choice)
        self._thinking = answer.thinking_counter()
        self.has_called = False
        """Whether there was a call so far."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Reasoning tokens so far."""
        return self._thinking.num_tokens(self._parser.thoughts)

    @property
    def is_cut(self) -> bool:
        """Whether the answer ends inside the arguments of a call. To be asked after the last output."""
        return self._parser.is_cut

    def read(self, output: RequestOutput) -> list[Part]:
        """Returns the parts that are certain now; with the last output, all the rest."""
        parts = self._parser.feed(output.text)
        self._thinking.add(output.token_ids)
        if output.is_finished:
            parts += self._parser.finish()
        self.has_called |= any(isinstance(part, ToolCall) for part in parts)
        return parts
