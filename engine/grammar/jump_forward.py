"""Jump-forward decoding: finds the text that a grammar forces next, character by character, to be drafted."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llguidance import LLMatcher, LLTokenizer

# Forced text may be long: for half a million characters llguidance's `compute_ff_bytes` took 0.6 s and 160 MB.
_MAX_LENGTH = 64
_SPACE = ord(" ")


@dataclass(frozen=True, slots=True)
class Alphabet:
    """The tokens with which a vocabulary spells ASCII text."""

    characters: dict[int, int]
    """Token id -> its character, for tokens of one ASCII character; one token per character."""
    character_bits: int
    """The tokens of `characters`, as bits of a mask."""
    other_bits: int
    """EOS and tokens that begin with a non-ASCII byte, as bits of a mask: where one is allowed, no character is
    forced."""
    spell: Callable[[str], list[int]]
    """Returns the tokens of an ASCII text, always taking the longest token that fits."""
    text_of: Callable[[list[int]], bytes]
    """Returns the bytes of the tokens' text."""

    @classmethod
    def of(cls, tokenizer: LLTokenizer) -> "Alphabet":
        ids = range(tokenizer.vocab_size)
        texts = [b"" if tokenizer.is_special_token(i) else tokenizer.decode_bytes([i]) for i in ids]
        # Of two tokens for a character the later: in SentencePiece, tokens of bytes, hardly used, precede those of
        # text.
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
    """Returns the token ids as bits of a mask."""
    mask = bytearray(max(token_ids, default=0) // 8 + 1)
    for token_id in token_ids:
        mask[token_id // 8] |= 1 << token_id % 8
    return int.from_bytes(mask, "little")


class _Expected(NamedTuple):
    """A character expected next."""

    character: int
    after: int | None
    """If the grammar allows a choice between a space and one other character: the character before that place, under
    which the choice is remembered. None if the character is forced."""


class JumpForward:
    """Predicts the text that one request's grammar forces next.

    Where the grammar's only choice is whether a space comes, as in JSON after a colon or a comma, it is expected as in
    the request's text before; the first time it is expected to come.
    """

    def __init__(self, alphabet: Alphabet) -> None:
        self._alphabet = alphabet
        self._expected: deque[_Expected] = deque()
        self._last = 0  # character of the output
        self._has_space: dict[int, bool] = {}  # by the character before it

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes the tokens generated since the last call. Drops the expected text that they spell, and all of it after
        the first character that differs."""
        text = self._alphabet.text_of(list(token_ids))
        for character in text:
            if not self._expected:
                break
            expected = self._expected.popleft()
            if character != expected.character:
                self._expected.clear()
                if expected.after is not None:
                    self._has_space[expected.after] = character == _SPACE
        self._last = text[-1] if text else self._last

    def look_ahead(self, mask: bytes, copy_matcher: Callable[[], LLMatcher], has_time: Callable[[], bool]) -> None:
        """Extends the expected text while the grammar forces it and there is time, from the `mask` after the last
        token.

        `copy_matcher` gives a copy of the matcher in the state of the mask. Call only while no text is expected.
        """
        matcher: LLMatcher | None = None
        while len(self._expected) < _MAX_LENGTH and (found := self._next_expected(int.from_bytes(mask, "little"))):
            token_id, expected = found
            self._expected.append(expected)
            if not has_time():
                return
            matcher = matcher or copy_matcher()
            matcher.consume_token(token_id)
            mask = matcher.compute_bitmask()

    def __bool__(self) -> bool:
        return bool(self._expected)

    def tokens(self) -> list[int]:
        """Returns the expected text in tokens. The model may spell it with others."""
        return self._alphabet.spell("".join(chr(expected.character) for expected in self._expected))

    def _next_expected(self, bits: int) -> tuple[int, _Expected] | None:
        options = bits & self._alphabet.character_bits
        if bits & self._alphabet.other_bits or options.bit_count() > 2:
            return None
        tokens = {self._alphabet.characters[token_id]: token_id for token_id in _set_bits(options)}
        others = [character for character in tokens if character != _SPACE]
        if len(tokens) == 2 and len(others) == 1:
            last = self._expected[-1].character if self._expected else self._last
            character = _SPACE if self._has_space.get(last, True) else others[0]
            return tokens[character], _Expected(character, after=last)
        if len(tokens) == 1:
            (character,) = tokens
            return tokens[character], _Expected(character, after=None)
        return None


def _set_bits(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
