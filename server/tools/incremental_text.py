"""Text that arrives in pieces, for readers that are written as if all of it were there.

    [------ held ------)[------ unread ------)
    _start       _position            len(_text)

A reader is a generator. It is suspended where it needs text that has not arrived, so its state is where it stands in
its own code. What it has read is held until it decides what that text is: content, arguments, or a mark to discard.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from server.tools.message_parts import Content, Part, Reasoning, Thought, ToolCall
from server.tools.spelling import HOLE

T = TypeVar("T")
Reading = Generator[None, None, T]
Schema = Mapping[str, Any]

MAX_HELD = 64 * 1024
"""Maximum number of characters that are held back until the reader decides what they are."""
SPACES = " \t\r\n"
NAME_CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-."


class NotACall(Exception):
    """What is held looked like a call and is not one."""


class IncrementalText:
    """A text and the message parts read from it. However the text is cut into pieces, the joined parts are the same."""

    def __init__(self, functions: Mapping[str, Schema], call_id: Callable[[int], str]) -> None:
        """`functions` are those that may be called, with the schemas of their arguments; `call_id` makes an id for the
        call of this index."""
        self._functions = functions
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
        self.thought_marks: tuple[str, str] | None = None
        """The marks of thoughts that may stand behind calls; None if there are none."""
        self.thoughts: list[Thought] = []
        """Where thoughts were found so far."""
        self._num_forgotten = 0
        """Characters before those of `_text`."""

    def feed(self, text: str) -> None:
        self._num_forgotten += self._start
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

    def is_over(self) -> Reading[bool]:
        """Whether all of the text is read. Waits for more."""
        return not (yield from self.arrived())

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

    def accept_words(self, words: str) -> Reading[bool]:
        """Reads these words if they come next, whatever spaces are before and between them, else nothing; returns
        whether they came. A HOLE in them matches any number or id."""
        begin = self._position - self._start
        for word in words.split():
            yield from self.read_spaces()
            for index, piece in enumerate(word.split(HOLE)):
                if index:
                    yield from self.read_run(NAME_CHARACTERS)
                if not (yield from self.accept(piece)):
                    self._position = self._start + begin
                    return False
        return True

    def may_follow(self, words: str) -> Reading[bool]:
        """Whether these words come next, or the text ends where they might. Reads nothing."""
        begin = self._position - self._start
        follows = (yield from self.accept_words(words)) or (yield from self.breaks_off(words))
        self._position = self._start + begin
        return follows

    def breaks_off(self, words: str) -> Reading[bool]:
        """Whether the text ends before all of these words came, with a beginning of them or nothing."""
        begin = self._position - self._start
        is_whole = yield from self.accept_words(words)
        self._position = self._start + begin
        return not is_whole and self._is_beginning(words)

    def _is_beginning(self, words: str) -> bool:
        rest = "".join(self._text[self._position :].split())
        return self._is_ended and "".join(words.split()).startswith(rest)

    def read_value(self, mark: str, on_text: Callable[[], None]) -> Reading[bool]:
        """Reads up to where `mark` begins, or may begin where the text ends, and returns whether it does. Calls
        `on_text` after each step; what it leaves is held, without bound."""
        while True:
            found = self._text.find(mark, self._position)
            num_waiting = num_overlapping(self._text, mark, self._position)
            self._position = found if found >= 0 else len(self._text) - num_waiting
            on_text()
            if found >= 0:
                return True
            if not (yield from self.arrived(num_waiting + 1)):
                return False

    def read_until(self, mark: str, kind: type[Content] | type[Reasoning] = Content) -> Reading[bool]:
        """Emit the text before `mark`, and read the mark. False if the text ends without one."""
        return (yield from self.read_until_any((mark,), kind))

    def read_thought(self) -> Reading[None]:
        """Emits the rest of a thought, whose opening mark is held, and skips the spaces behind it."""
        assert self.thought_marks is not None
        yield from self.read_thought_until((self.thought_marks[1],))
        yield from self.skip_spaces()

    def read_thought_until(self, marks: Sequence[str]) -> Reading[None]:
        """Emits a thought up to the first of its closing `marks`, which is discarded, as is the mark that is held."""
        begin = self._num_forgotten + self._start
        self.thoughts.append((begin, None))
        self.discard()
        if (yield from self.read_until_any(marks, Reasoning)):
            self.thoughts[-1] = begin, self._num_forgotten + self._position
        self.discard()

    def skip_after_call(self) -> Reading[None]:
        """Skips the spaces behind a call, and emits a thought that stands there."""
        yield from self.skip_spaces()
        if self.thought_marks is not None and (yield from self.accept(self.thought_marks[0])):
            yield from self.read_thought()

    def read_until_any(self, marks: Sequence[str], kind: type[Content] | type[Reasoning] = Content) -> Reading[bool]:
        """Emit the text before the first of `marks` that comes, and read that mark. False if the text ends before."""
        while True:
            found, mark = min(((_place(self._text, mark, self._position), mark) for mark in marks), key=_first)
            num_waiting = (
                0 if self._is_ended else max(num_overlapping(self._text, mark, self._position) for mark in marks)
            )
            end = len(self._text)
            self._position = found if found < end else end - num_waiting
            self.emit(kind)
            if found < end:
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
        same character, however the text was cut; within arguments there is no bound."""
        self._position += count
        if self.num_held > MAX_HELD and not self.is_cut:
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

    def is_offered(self, name: str) -> bool:
        return name in self._functions

    def start_call(self, name: str) -> None:
        """Begin a call: what is held was its beginning. Raises NotACall if the function was not offered."""
        if name not in self._functions:
            raise NotACall
        self.discard()
        self._parts.append(ToolCall(self.num_calls, "", self._call_id(self.num_calls), name))
        self.num_calls += 1

    def schema_of(self, name: str) -> Schema:
        """Returns the schema of the arguments of an offered function."""
        return self._functions[name]

    def emit_arguments(self, count: int) -> None:
        """Emit the next `count` characters as arguments of the call that was started last."""
        self._position += count
        self.add_arguments(self._take())

    def unread_to(self, count: int) -> None:
        """Takes back what was read but the first `count` characters that are held."""
        self._position = self._start + count

    def take_held(self, leave: int = 0) -> str:
        """Returns what is held, but the last `leave` characters, and forgets it."""
        end = max(self._start, self._position - leave)
        text, self._start = self._text[self._start : end], end
        return text

    def add_arguments(self, text: str) -> None:
        """Emit this text as arguments of the call that was started last."""
        if text:
            self._parts.append(ToolCall(self.num_calls - 1, text))

    def _take(self) -> str:
        text = self._text[self._start : self._position]
        self.discard()
        return text


def attempt(text: IncrementalText, reader: Callable[[IncrementalText], Reading[None]]) -> Reading[bool]:
    """Runs `reader`, and returns whether it found what it reads. If not, what it has read is content."""
    try:
        yield from reader(text)
    except NotACall:
        text.emit(Content)
        return False
    return True


def _place(text: str, mark: str, begin: int) -> int:
    """Returns the index of the mark; the text's length if it is not in `text[begin:]`."""
    found = text.find(mark, begin)
    return len(text) if found < 0 else found


def _first(found: tuple[int, str]) -> tuple[int, int]:
    """Orders marks by their place; of those at one place the longest is first."""
    return found[0], -len(found[1])


def num_overlapping(text: str, mark: str, begin: int = 0) -> int:
    """Returns how many characters at the end of `text[begin:]` may be the beginning of `mark`."""
    longest = min(len(text) - begin, len(mark) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(mark[:count])), 0)
