"""Whatever the model: a text that ends by itself parses, and satisfies its schema. The model here is random."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

import jsonschema
import pytest

from engine.core.request import FinishReason
from engine.engine import Engine
from engine.grammar.checker_process import find_fault
from engine.grammar.compiler import GrammarCompiler, GrammarQueue, make_tokenizer
from engine.grammar.lark import JSON_OBJECT, JsonSchema, Part, to_lark
from engine.runner.loaded_model import LoadedModel
from tests.engine.fakes import add, run_to_end, tokens_of
from tests.engine.grammar.grammars import TOKENIZER
from tests.engine.grammar.random_schemas import random_schema
from tests.engine.tiny_models import VOCAB_SIZE, tiny_engine

pytestmark = pytest.mark.usefixtures("one_thread")

EOS = VOCAB_SIZE - 1
PIECES = '", ": {" "} [] ]} null true fal se -1 00 0. é ï 😀 ab cd \\n \\" \\u00 leaf more text ","'.split(" ")
SINGLE_BYTES = [bytes([byte]) for byte in (*range(32, 127), *range(128, 256))]
TOKENS = [*[*(piece.encode() for piece in PIECES), *SINGLE_BYTES][:EOS], b""]
ENDS = {TOKENS.index(end): 4.0 for end in (b'"', b"}", b"]", b",", b'"}', b"]}")} | {EOS: 4.0}
"""Logit biases that make ends likelier: strings of random characters would be long."""


def json_engine(model: LoadedModel) -> Engine:
    """Its clock stands still: on a busy machine a grammar could take more time than one request may have."""
    grammars = GrammarQueue(GrammarCompiler(make_tokenizer(TOKENS, [EOS]), clock=lambda: 0.0))
    return tiny_engine(model, num_blocks=2048, grammars=grammars, eos_token_ids=(EOS,))


def texts_of(engine: Engine, parts: dict[str, Part], max_tokens: int = 250) -> dict[str, str]:
    """Returns the texts that ended by themselves."""
    for number, (name, part) in enumerate(parts.items()):
        params: dict[str, Any] = {"ignore_eos": False, "logit_bias": ENDS, "seed": number, "temperature": 1.5}
        add(engine, name, [number % VOCAB_SIZE], grammar=to_lark(part), max_tokens=max_tokens, **params)
    ended = {}
    for name, updates in run_to_end(engine).items():
        assert updates[-1].finish_reason in (FinishReason.STOP, FinishReason.LENGTH), updates[-1].error
        if updates[-1].finish_reason is FinishReason.STOP:
            ended[name] = b"".join(TOKENS[token_id] for token_id in tokens_of(updates)).decode()
    return ended


def parse(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def violations(schema: dict[str, Any], text: str) -> list[str]:
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    value = parse(text.replace('"0000-', '"2000-'))  # dates have a year 0 in RFC 3339, but not in Python
    return [error.message for error in validator.iter_errors(value)]


def num_ended(model: LoadedModel, seeds: range) -> int:
    """Returns how many texts of random schemas ended by themselves; asserts that each of them satisfies its schema."""
    schemas = {str(seed): random_schema(Random(seed)) for seed in seeds}
    parts: dict[str, Part] = {name: JsonSchema(schema) for name, schema in schemas.items()}
    assert {find_fault(TOKENIZER, to_lark(part)) for part in parts.values()} == {None}
    ended = texts_of(json_engine(model), parts)
    for name, text in ended.items():
        assert violations(schemas[name], text) == [], (name, schemas[name], text)
    return len(ended)


def test_texts_satisfy_their_schemas(tiny_model: Callable[..., LoadedModel]) -> None:
    assert num_ended(tiny_model("llama"), range(40)) > 30


@pytest.mark.slow
def test_texts_satisfy_a_thousand_schemas(tiny_model: Callable[..., LoadedModel]) -> None:
    assert num_ended(tiny_model("llama"), range(1000, 2000)) > 900


def test_any_json_object_is_one(tiny_model: Callable[..., LoadedModel]) -> None:
    ended = texts_of(json_engine(tiny_model("llama")), {str(number): JSON_OBJECT for number in range(20)})
    assert ended and all(isinstance(parse(text), dict) for text in ended.values())
