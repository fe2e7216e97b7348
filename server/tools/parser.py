"""The message parser of models that call tools or think: the text of one message, fed as it is generated -> parts."""

from collections.abc import Callable, Mapping, Sequence

from server.tools.incremental_text import IncrementalText, Schema
from server.tools.message_parts import Part, Thought, ToolCall
from server.tools.readers import Reader


class ReadingParser:
    """Runs a format's reader. Parts are returned once they are certain; text that may yet be part of a call or of a
    mark is held back."""

    def __init__(
        self,
        reader: Reader,
        functions: Mapping[str, Schema],
        call_id: Callable[[int], str],
        is_one_call: bool = False,
    ) -> None:
        """`functions` are those that may be called, with the schemas of their arguments; `call_id` makes an id for the
        call of this index. With `is_one_call` those after the first are left out."""
        self._is_one_call = is_one_call
        self._text = IncrementalText(functions, call_id)
        self._reading = reader(self._text)

    @property
    def is_cut(self) -> bool:
        return self._text.is_cut and not (self._is_one_call and self._text.num_calls > 1)

    @property
    def thoughts(self) -> Sequence[Thought]:
        return self._text.thoughts

    def feed(self, text: str) -> list[Part]:
        self._text.feed(text)
        return self._read()

    def finish(self) -> list[Part]:
        self._text.end()
        return self._read()

    def _read(self) -> list[Part]:
        next(self._reading, None)
        return [part for part in self._text.take_parts() if not self._is_surplus(part)]

    def _is_surplus(self, part: Part) -> bool:
        return self._is_one_call and isinstance(part, ToolCall) and part.index > 0
