"""Text that arrives in pieces, for readers that are written as if all of it were there.

    [------ held ------)[------ unread ------)
    _start       _position            len(_text)

A reader is a generator. It is suspended where it needs text that has not arrived, so its state is where it stands in
its own code. What it has read is held until it decides what that text is: content, arguments, or a mark to discard.
"""

from collections.abc import Callable, Collection, Generator
from typing import TypeVar

from server.tools.message_parts import Content, Part, Reasoning, ToolCall

T = TypeVar("T")
Reading = Generator[None, None, T]

MAX_HELD = 64 * 1024
"""Maximum number of characters that are held back until the reader decides what they are."""
SPACES = " \t\r\n"


class NotACall(Exception):
    """What is held looked like a call and is not one."""


class IncrementalText:
    """A text and the message parts read from it. However the text is cut into pieces, the joined parts are the same."""

    def __init__(self, names: Collection[str], call_id: Callable[[int], str]) -> None:
        """`names` are the functions that may be called; `call_id` makes an id for the call of this index."""
        self._names = names
        self._call_id = call_id
        self.num_calls = 0
        """Calls that have begun."""
        self._parts: list[Part] = []
        self._text = ""
        self._start = 0
        self._position = 0
        self._is_ended = False
        self.is_cut = False
        """Whether the arguments of a call have begun and are not complete."""

    def feed(self, text: str) -> None:
        self._text = self._text[self._start :] + text
        self._position -= self._start
        self._start = 0

    def end(self) -> None:
        self._is_ended = True

    def take_parts(self) -> list[Part]:
        """Returns the parts emitted since the last call."""
        parts, self._parts = self._parts, []
        return parts

    # Reading: these wait for text.

    def arrived(self, count: int = 1) -> Reading[bool]:
        """Wait until `count` characters are unread. False if the text ends before."""
        while len(self._text) - self._position < count:
            if self._is_ended:
                return False
            yield
        return True

    def next_is(self, characters: str) -> Reading[bool]:
        """Whether the next character is one of `characters`. Waits for it."""
        return (yield from self.arrived()) and self._text[self._position] in characters

    def read_run(self, characters: str) -> Reading[str]:
        """Read and return the run of `characters` that comes next."""
        begin = self.num_held
        while (yield from self.next_is(characters)):
            self.hold(1)
        return self.held(begin)

    def read_spaces(self) -> Reading[None]:
        yield from self.read_run(SPACES)

    def skip_spaces(self) -> Reading[None]:
        """Read and discard spaces that only separate, which need not be held."""
        while (yield from self.next_is(SPACES)):
            self._position += 1
            self.discard()

    def expect(self, characters: str) -> Reading[str]:
        """Read spaces and one of `characters`, which is returned. Raises NotACall if another one follows."""
        yield from self.read_spaces()
        if not (yield from self.next_is(characters)):
            raise NotACall
        self.hold(1)
        return self._text[self._position - 1]

    def accept(self, mark: str) -> Reading[bool]:
        """Read `mark` if it comes next, else nothing; whether it did. Waits for no more characters than that takes."""
        for count, character in enumerate(mark):
            if not (yield from self.arrived(count + 1)) or self._text[self._position + count] != character:
                return False
        self.hold(len(mark))
        return True

    def read_until(self, mark: str, kind: type[Content] | type[Reasoning] = Content) -> Reading[bool]:
        """Emit the text before `mark`, and read the mark. False if the text ends without one."""
        while True:
            found = self._text.find(mark, self._position)
            num_waiting = 0 if self._is_ended else _overlap(self._text, mark, self._position)
            self._position = found if found >= 0 else len(self._text) - num_waiting
            self.emit(kind)
            if found >= 0:
                self.hold(len(mark))
                return True
            if not (yield from self.arrived(num_waiting + 1)) and not num_waiting:
                return False

    # Deciding: these do not wait.

    @property
    def num_held(self) -> int:
        return self._position - self._start

    def unread(self) -> tuple[str, int]:
        """Returns the text so far, and the index at which its unread part begins."""
        return self._text, self._position

    def held(self, begin: int = 0) -> str:
        """Returns what was read since `num_held` was `begin`."""
        return self._text[self._start + begin : self._position]

    def hold(self, count: int) -> None:
        """Read `count` characters that have arrived. Raises NotACall when more than MAX_HELD are held, always at the
        same character, however the text was cut."""
        self._position += count
        if self.num_held > MAX_HELD:
            self._position = self._start + MAX_HELD
            raise NotACall

    def discard(self) -> None:
        """Discard what is held: it was a mark or punctuation."""
        self._start = self._position

    def emit(self, kind: type[Content] | type[Reasoning]) -> None:
        """Emit what is held as text of this kind."""
        if text := self._take():
            self._parts.append(kind(text))

    def emit_all(self, kind: type[Content] | type[Reasoning]) -> None:
        """Emit all that has arrived as text of this kind."""
        self._position = len(self._text)
        self.emit(kind)

    def start_call(self, name: str) -> None:
        """Begin a call: what is held was its beginning. Raises NotACall if the function was not offered."""
        if name not in self._names:
            raise NotACall
        self.discard()
        self._parts.append(ToolCall(self.num_calls, "", self._call_id(self.num_calls), name))
        self.num_calls += 1

    def emit_arguments(self, count: int) -> None:
        """Emit the next `count` characters as arguments of the call that was started last."""
        self._position += count
        self.add_arguments(self._take())

    def add_arguments(self, text: str) -> None:
        if text:
            self._parts.append(ToolCall(self.num_calls - 1, text))

    def _take(self) -> str:
        text = self._text[self._start : self._position]
        self.discard()
        return text


def _overlap(text: str, mark: str, begin: int) -> int:
    """Returns how many characters at the end of `text[begin:]` may be the beginning of `mark`."""
    longest = min(len(text) - begin, len(mark) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(mark[:count])), 0)
