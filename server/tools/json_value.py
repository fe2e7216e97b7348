"""Where a JSON value ends, in text that arrives in pieces."""

import re

_OUTSIDE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_SCALAR_END = re.compile(r'[\s,"{}\[\]]')


class ValueEnd:
    """Finds the end of one value. Only brackets and strings are tracked: constant memory, no recursion.

    Whether the value is valid JSON is not checked.
    """

    def __init__(self) -> None:
        self._is_scalar: bool | None = None  # until the first character was seen
        self._depth = 0
        self._in_string = False
        self._skips_next = False  # the text seen last ended with a backslash

    def find(self, text: str, begin: int) -> int | None:
        """Returns the index behind the value, which goes on at `text[begin]`; None if it goes on behind `text`."""
        if self._is_scalar is None:
            self._is_scalar = text[begin] not in '{["'
        if self._is_scalar:
            end = _SCALAR_END.search(text, begin)
            return None if end is None else end.start()
        return self._find_closing(text, begin + self._skips_next)

    def _find_closing(self, text: str, position: int) -> int | None:
        self._skips_next = False
        while match := (_IN_STRING if self._in_string else _OUTSIDE).search(text, position):
            position = match.end()
            match match.group():
                case "\\":
                    position += 1
                    self._skips_next = position > len(text)
                case '"':
                    self._in_string = not self._in_string
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
            if self._depth == 0 and not self._in_string:
                return position
        return None
