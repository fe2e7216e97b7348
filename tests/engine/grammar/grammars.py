"""Helpers that tell which texts a grammar accepts, with a vocabulary of one token per byte."""

from engine.grammar.checker_process import byte_tokenizer
from engine.grammar.compiler import compile_grammar
from engine.grammar.lark import Part, to_lark

TOKENIZER = byte_tokenizer()


def accepts(part: Part | str, text: str) -> bool:
    """Whether the text may be generated, and the generation may end there."""
    matcher = compile_grammar(TOKENIZER, part if isinstance(part, str) else to_lark(part))
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def accepted(part: Part | str, *texts: str) -> list[str]:
    return [text for text in texts if accepts(part, text)]
