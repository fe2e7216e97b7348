"""The text that a grammar leaves no choice about, looked for character by character."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llguidance import LLMatcher, LLTokenizer

# What must come may be long: for half a million characters `compute_ff_bytes` took 0.6 s and 160 MB.
_MAX_LENGTH = 64
_SPACE = ord(" ")


@dataclass(frozen=True, slots=True)
class Alphabet:
    """How a vocabulary spells ASCII."""

    characters: dict[int, int]
    """Token id -> its only character."""
    character_bits: int
    """These tokens in a mask."""
    other_bits: int
    """EOS and tokens that begin with other characters: where one may come there is a choice."""
    spell: Callable[[str], list[int]]
    """With the longest token each time."""
    text_of: Callable[[list[int]], bytes]

    @classmethod
    def of(cls, tokenizer: LLTokenizer) -> "Alphabet":
        ids = range(tokenizer.vocab_size)
        texts = [b"" if tokenizer.is_special_token(i) else tokenizer.decode_bytes([i]) for i in ids]
        # Of two tokens the later: SentencePiece puts those of bytes, which models hardly use, before those of text.
        tokens = {text[0]: token_id for token_id, text in enumerate(texts) if len(text) == 1 and text.isascii()}
        usual = {tokenizer.greedy_tokenize(chr(character))[0]: token_id for character, token_id in tokens.items()}
        return cls(
            characters={token_id: character for character, token_id in tokens.items()},
            character_bits=_bits(tokens.values()),
            other_bits=_bits([*tokenizer.eos_tokens, *(i for i, text in enumerate(texts) if text[:1] >= b"\x80")]),
            spell=lambda text: [usual.get(token_id, token_id) for token_id in tokenizer.greedy_tokenize(text)],
            text_of=tokenizer.decode_bytes,
        )


def _bits(token_ids: Collection[int]) -> int:
    """As in a mask."""
    mask = bytearray(max(token_ids, default=0) // 8 + 1)
    for token_id in token_ids:
        mask[token_id // 8] |= 1 << token_id % 8
    return int.from_bytes(mask, "little")


class _Ahead(NamedTuple):
    character: int
    after: int | None
    """Where only "a space or not" was open: the character before that place, under which the choice is remembered. None
    if this character had to come."""


class JumpForward:
    """How one request's text goes on. Where a space is all there is to choose, as in JSON after a colon or a comma, it
    comes or not as it did before; at first it comes."""

    def __init__(self, alphabet: Alphabet) -> None:
        self._alphabet = alphabet
        self._ahead: deque[_Ahead] = deque()
        self._last = 0  # character that was said
        self._has_space: dict[int, bool] = {}  # after a character

    def hear(self, token_ids: Sequence[int]) -> None:
        """What was said since the last call."""
        text = self._alphabet.text_of(list(token_ids))
        for character in text:
            if not self._ahead:
                break
            ahead = self._ahead.popleft()
            if character != ahead.character:
                self._ahead.clear()
                if ahead.after is not None:
                    self._has_space[ahead.after] = character == _SPACE
        self._last = text[-1] if text else self._last

    def look(self, mask: bytes, copy_matcher: Callable[[], LLMatcher], has_time: Callable[[], bool]) -> None:
        """Where it is not known: on from `mask`, with a copy of its matcher."""
        scout: LLMatcher | None = None
        while len(self._ahead) < _MAX_LENGTH and (certain := self._certain(int.from_bytes(mask, "little"))):
            token_id, ahead = certain
            self._ahead.append(ahead)
            if not has_time():
                return
            scout = scout or copy_matcher()
            scout.consume_token(token_id)
            mask = scout.compute_bitmask()

    def __bool__(self) -> bool:
        return bool(self._ahead)

    def spelt(self) -> list[int]:
        """What is known, in tokens. Others may spell it, too."""
        return self._alphabet.spell("".join(chr(ahead.character) for ahead in self._ahead))

    def _certain(self, bits: int) -> tuple[int, _Ahead] | None:
        options = bits & self._alphabet.character_bits
        if bits & self._alphabet.other_bits or options.bit_count() > 2:
            return None
        tokens = {self._alphabet.characters[token_id]: token_id for token_id in _set_bits(options)}
        others = [character for character in tokens if character != _SPACE]
        if len(tokens) == 2 and len(others) == 1:
            last = self._ahead[-1].character if self._ahead else self._last
            character = _SPACE if self._has_space.get(last, True) else others[0]
            return tokens[character], _Ahead(character, after=last)
        if len(tokens) == 1:
            (character,) = tokens
            return tokens[character], _Ahead(character, after=None)
        return None


def _set_bits(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
