"""Text that arrives in pieces, for readers that are written as if it were all there.

    [------ held ------)[------ unread ------)
    _start       _position            len(_text)

A reader is a generator. It is suspended where it needs text that has not arrived, so its state is where it stands in
its own code. What it has read is held until it says what that text was: content, arguments, or nothing to be told.
"""

from collections.abc import Callable, Collection, Generator
from typing import TypeVar

from server.tools.message_parts import Content, Part, Reasoning, ToolCall

T = TypeVar("T")
Reading = Generator[None, None, T]

MAX_HELD = 64 * 1024
"""Characters that may wait for the decision what they are."""
SPACES = " \t\r\n"


class NotACall(Exception):
    """What is held looked like a call and is none."""


class IncrementalText:
    """A text and the parts that were made of it. Cutting the text in another way gives the same parts, joined."""

    def __init__(self, names: Collection[str], call_id: Callable[[int], str]) -> None:
        """`names` are the functions that may be called; `call_id` makes an id for the call of this index."""
        self._names = names
        self._call_id = call_id
        self.num_calls = 0
        """That have begun."""
        self._parts: list[Part] = []
        self._text = ""
        self._start = 0
        self._position = 0
        self._is_ended = False
        self.is_cut = False
        """The arguments of a call have begun and are not complete."""

    def feed(self, text: str) -> None:
        self._text = self._text[self._start :] + text
        self._position -= self._start
        self._start = 0

    def end(self) -> None:
        self._is_ended = True

    def take_parts(self) -> list[Part]:
        """The parts since the last time."""
        parts, self._parts = self._parts, []
        return parts

    # Reading: these wait for text.

    def arrived(self, count: int = 1) -> Reading[bool]:
        """Wait until so many characters are unread. False if the text ends before."""
        while len(self._text) - self._position < count:
            if self._is_ended:
                return False
            yield
        return True

    def next_is(self, characters: str) -> Reading[bool]:
        """Whether the next character is one of these."""
        return (yield from self.arrived()) and self._text[self._position] in characters

    def word(self, characters: str) -> Reading[str]:
        """Read as many of these characters as come next."""
        begin = self.num_held
        while (yield from self.next_is(characters)):
            self.hold(1)
        return self.held(begin)

    def spaces(self) -> Reading[None]:
        yield from self.word(SPACES)

    def drop_spaces(self) -> Reading[None]:
        """Spaces that are nothing but a separator: they need not be held."""
        while (yield from self.next_is(SPACES)):
            self._position += 1
            self.drop()

    def one_of(self, characters: str) -> Reading[str]:
        """Read spaces and one of these characters. Raises NotACall."""
        yield from self.spaces()
        if not (yield from self.next_is(characters)):
            raise NotACall
        self.hold(1)
        return self._text[self._position - 1]

    def mark(self, mark: str) -> Reading[bool]:
        """Read `mark` if it comes next, else nothing. Waits for no more than it takes to know."""
        for count, character in enumerate(mark):
            if not (yield from self.arrived(count + 1)) or self._text[self._position + count] != character:
                return False
        self.hold(len(mark))
        return True

    def text_until(self, mark: str, kind: type[Content] | type[Reasoning] = Content) -> Reading[bool]:
        """Give the text before `mark`, and read the mark. False if the text ends without one."""
        while True:
            found = self._text.find(mark, self._position)
            num_waiting = 0 if self._is_ended else _overlap(self._text, mark, self._position)
            self._position = found if found >= 0 else len(self._text) - num_waiting
            self.give(kind)
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
        """The text so far, and where in it the unread part begins."""
        return self._text, self._position

    def held(self, begin: int = 0) -> str:
        """What was read since `num_held` was `begin`."""
        return self._text[self._start + begin : self._position]

    def hold(self, count: int) -> None:
        """Read so many characters that have arrived. Raises NotACall when too many are held, at a certain character."""
        self._position += count
        if self.num_held > MAX_HELD:
            self._position = self._start + MAX_HELD
            raise NotACall

    def drop(self) -> None:
        """What is held was a sign."""
        self._start = self._position

    def give(self, kind: type[Content] | type[Reasoning]) -> None:
        """What is held was text."""
        if text := self._take():
            self._parts.append(kind(text))

    def give_all(self, kind: type[Content] | type[Reasoning]) -> None:
        """All that has arrived is text."""
        self._position = len(self._text)
        self.give(kind)

    def start_call(self, name: str) -> None:
        """What is held was a call's beginning. Raises NotACall if nobody offered the function."""
        if name not in self._names:
            raise NotACall
        self.drop()
        self._parts.append(ToolCall(self.num_calls, "", self._call_id(self.num_calls), name))
        self.num_calls += 1

    def give_arguments(self, count: int) -> None:
        """The next characters belong to the arguments of the call that was started last."""
        self._position += count
        self.add_arguments(self._take())

    def add_arguments(self, text: str) -> None:
        if text:
            self._parts.append(ToolCall(self.num_calls - 1, text))

    def _take(self) -> str:
        text = self._text[self._start : self._position]
        self.drop()
        return text


def _overlap(text: str, mark: str, begin: int) -> int:
    """How many characters at the end of `text[begin:]` may be the beginning of `mark`."""
    longest = min(len(text) - begin, len(mark) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(mark[:count])), 0)
