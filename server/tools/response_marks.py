"""Marks around the answer behind a thought, which are no part of it: `<think>Hm.</think><response>Yes.</response>`."""

from collections.abc import Iterator, Sequence

from server.tools.incremental_text import num_overlapping
from server.tools.message_parts import Content, MessageParser, Part, Reasoning, Thought

RESPONSE_MARKS = ("<response>", "</response>")


class WithoutResponseMarks:
    """Takes the marks out of the content that another parser finds. An answer without a thought before it has none."""

    def __init__(self, parser: MessageParser, opening: str, closing: str) -> None:
        self._parser = parser
        self._opening, self._closing = opening, closing
        self._may_open = False
        """Whether the opening mark may come next."""
        self._is_open = self._is_at_start = False
        self._held = ""

    @property
    def is_cut(self) -> bool:
        return self._parser.is_cut

    @property
    def thoughts(self) -> Sequence[Thought]:
        return self._parser.thoughts

    def feed(self, text: str) -> list[Part]:
        return self._without_marks(self._parser.feed(text))

    def finish(self) -> list[Part]:
        parts = self._without_marks(self._parser.finish())
        return [*parts, *self._release()]

    def _without_marks(self, parts: Sequence[Part]) -> list[Part]:
        found: list[Part] = []
        for part in parts:
            if isinstance(part, Content):
                found += self._content(self._held + part.text)
                continue
            found += [*self._release(), part]
            self._may_open |= isinstance(part, Reasoning)
        return found

    def _content(self, text: str) -> Iterator[Content]:
        """Yields what is certain of the content, and holds the rest."""
        if self._may_open:
            stripped = text.lstrip()
            if stripped != self._opening and self._opening.startswith(stripped):
                self._held = text
                return
            self._may_open = False
            if stripped.startswith(self._opening):
                self._is_open = self._is_at_start = True
                text = stripped.removeprefix(self._opening)
        if self._is_at_start:
            text = text.lstrip()
            self._is_at_start = not text
        end = self._end_of_answer(text) if self._is_open else len(text)
        self._held = text[end:]
        if end:
            yield Content(text[:end])

    def _end_of_answer(self, text: str) -> int:
        """Returns where what may be the closing mark begins, or spaces before it."""
        stripped = text.rstrip()
        if stripped.endswith(self._closing):
            return len(stripped.removesuffix(self._closing).rstrip())
        return len(text[: len(text) - num_overlapping(text, self._closing)].rstrip())

    def _release(self) -> Iterator[Content]:
        """Yields what is held, now that it is followed by no content, unless it is the closing mark."""
        held, self._held = self._held, ""
        if self._is_open and held.strip() == self._closing:
            self._is_open, held = False, ""
        self._may_open = self._is_at_start = False
        if held:
            yield Content(held)
