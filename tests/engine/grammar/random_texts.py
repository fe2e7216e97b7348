"""Random texts of a grammar, token by token out of its masks."""

from random import Random

from engine.grammar.compiler import compile_grammar
from engine.grammar.lark import Part, to_lark
from tests.engine.grammar.grammars import TOKENIZER
from tests.engine.grammar.matchers import tokens_in

_MAX_CHARACTERS = 600
_CLOSING = {ord(character) for character in '"]},'}


def random_text(part: Part, rng: Random) -> str | None:
    """Returns a text that the grammar accepts, or None if the choices led nowhere for long. Ends are taken early."""
    matcher = compile_grammar(TOKENIZER, to_lark(part))
    assert not matcher.is_error(), matcher.get_error()
    text = list[int]()
    while len(text) < _MAX_CHARACTERS:
        allowed = [token for token in tokens_in(matcher.compute_bitmask()) if token < 256]
        if not allowed or (matcher.is_accepting() and rng.random() < 0.1):
            assert matcher.is_accepting()
            return bytes(text).decode(errors="replace")
        closing = [token for token in allowed if token in _CLOSING]
        text.append(rng.choice(closing if closing and rng.random() < 0.4 else allowed))
        assert matcher.consume_token(text[-1])
    return None
