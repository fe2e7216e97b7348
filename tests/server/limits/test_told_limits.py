"""The numbers that docs/operations.md and the table of guards tell of limits are those of the code."""

import re
from pathlib import Path

import pytest

from engine.core.sampling_params import MAX_LOGPROBS
from engine.grammar.json_schema import MAX_DEPTH
from engine.grammar.lark import MAX_GRAMMAR_BYTES
from server import limits
from server.generation import plan
from server.generation.whole_answer import WHOLE_BYTES
from server.http.connection import MAX_PIPELINED
from server.limits import error_rate_limit, large_bodies, retry_throttle
from server.protocol import messages, structured, tools, wire
from server.protocol.cache_steering import MAX_CACHE_KEY
from server.protocol.chat import MAX_TOP_LOGPROBS
from server.protocol.generation import MAX_CHOICES
from server.protocol.responses import MAX_METADATA
from server.routes import cache, json_route

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
GUARDS = limits.__doc__ or ""
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20}

# How a row of the page begins, the guard of the table, and the numbers that both tell.
LIMITS = [
    ("bodies of 64 KiB", "large bodies", (large_bodies.LARGE_BYTES, large_bodies.BYTES_PER_S)),
    ("bodies of 64 KiB", "large bodies", (large_bodies.MAX_HELD, large_bodies.MAX_HELD_PER_CALLER)),
    ("requests that are refused", "error rate limit", (error_rate_limit.NUM_AT_ONCE, error_rate_limit.NUM_PER_S)),
    ("requests that are refused", "error rate limit", (error_rate_limit.MAX_WAITING,)),
    ("requests on a connection", "retry throttle", (retry_throttle.NUM_PER_S, int(1000 * retry_throttle.MIN_GAP_S))),
    ("pipelined requests", "pipelining", (MAX_PIPELINED,)),
    ("JSON of 64 KiB", "JSON", (json_route.MAX_CONTAINERS, json_route.MAX_NAMES)),
    ("JSON |", "objects", (wire.MAX_FIELDS,)),
    ("values in a schema", "objects", (wire.MAX_VALUES,)),
    ("prompts |", "prompts", (wire.MAX_STRINGS,)),
    ("messages,", "messages", (messages.MAX_MESSAGES, messages.MAX_PARTS, messages.MAX_PARTS_TOGETHER)),
    ("tools |", "messages", (messages.MAX_TOOL_CALLS,)),
    ("tools |", "tools", (tools.MAX_TOOLS, tools.MAX_TOOLS_CHARS)),
    ("schemas and grammars", "grammar size", (MAX_DEPTH, MAX_GRAMMAR_BYTES)),
    ("schemas and grammars", "structured output", (structured.MAX_ALTERNATIVES, structured.MAX_SCHEMA_CHARS)),
    ("schemas and grammars", "objects", (wire.MAX_SCHEMA_DEPTH,)),
    ("`n`, `best_of`", "choices", (MAX_CHOICES,)),
    ("`stop` |", "stop strings", (wire.MAX_STOP_STRINGS, wire.MAX_STOP_LENGTH, wire.MAX_STOPS_LENGTH)),
    ("`stop_token_ids`", "token ids", (wire.MAX_STOP_TOKEN_IDS, wire.MAX_LOGIT_BIASES)),
    ("`allowed_token_ids` |", "token ids", (wire.MAX_ALLOWED_TOKEN_IDS,)),
    ("`bad_words`", "bad words", (wire.MAX_BAD_WORDS, wire.MAX_BAD_WORD_LENGTH, wire.MAX_BAD_WORDS_LENGTH)),
    ("`allowed_token_ids`, and", "fan-out", (plan.MAX_SENT_IDS,)),
    ("log-probabilities of all", "fan-out", (plan.MAX_SCORES,)),
    ("`logprobs` as a number", "logprobs", (MAX_LOGPROBS,)),
    ("`top_logprobs`", "logprobs", (MAX_TOP_LOGPROBS,)),
    ("`cache_salt`", "salts and ids", (MAX_CACHE_KEY,)),
    ("`cache_salt`", "metadata", (MAX_METADATA,)),
    ("keys in an answer", "cache keys", (cache.MAX_KEYS,)),
    ("a client that reads", "answers in pieces", (WHOLE_BYTES,)),
]


def numbers(text: str) -> set[int]:
    """Returns the numbers of a text, as in 1024, 1,024, 2**10 and 1 KiB."""
    text = re.sub(r"2\*\*(\d+)", lambda match: str(2 ** int(match[1])), text)
    found = re.findall(r"(?<![\w.])(\d[\d,]*)(?: (KiB|MiB))?", text)
    return {int(digits.replace(",", "")) * UNITS[unit] for digits, unit in found}


@pytest.mark.parametrize(("row", "guard", "expected"), LIMITS)
def test_the_page_and_the_table_tell_the_codes_numbers(row: str, guard: str, expected: tuple[int, ...]) -> None:
    (line,) = re.findall(rf"^\| {re.escape(row)}.*", PAGE, re.MULTILINE)
    assert set(expected) <= numbers(line)
    (entry,) = re.findall(rf"^  {guard} (?:.|\n   )*", GUARDS, re.MULTILINE)
    assert set(expected) <= numbers(entry)
