"""Compiled grammars for a vocabulary of single characters, and helpers that read their masks."""

from collections.abc import Sequence

import numpy as np

from engine.core.request import Constraint
from engine.grammar.compiler import GrammarCompiler, make_tokenizer
from engine.grammar.jump_forward import Alphabet
from engine.grammar.lark import Regex, to_lark

EOS = 0
TEXTS = [b"", *(bytes([byte]) for byte in range(32, 80)), b""]  # 50 tokens, as many as the fakes have
DIGITS = to_lark(Regex("[0-9]{3}"))
ALPHABET = Alphabet.of(make_tokenizer(TEXTS, [EOS]))


def ids(text: str) -> list[int]:
    return [TEXTS.index(bytes([byte])) for byte in text.encode()]


def text_of(token_ids: Sequence[int]) -> str:
    return b"".join(TEXTS[token_id] for token_id in token_ids).decode()


def compiler(texts: Sequence[bytes] = TEXTS) -> GrammarCompiler:
    """Returns a compiler whose matchers take no time."""
    return GrammarCompiler(make_tokenizer(texts, [EOS]), clock=lambda: 0.0)


def allowed(matcher: Constraint, output: Sequence[int]) -> list[int]:
    (mask,) = matcher.allowed_tokens(output, ())
    return tokens_in(mask)


def tokens_in(mask: bytes) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()
