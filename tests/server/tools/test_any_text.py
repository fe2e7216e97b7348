"""Whatever a model writes, in whatever format: a stream is the whole message, no text is lost or told twice, and
nothing fails.
"""

import json
from random import Random

import pytest

from server.tools.formats import BY_NAME, HARMONY, MISTRAL_NAMED, CallFormat
from server.tools.json_beginning import begins_json
from server.tools.message_parts import Content, Part, Reasoning, ToolCall
from server.tools.parser import ReadingParser
from server.tools.readers import Reader
from server.tools.spelling import JsonArguments
from server.tools.thinking import HARMONY_ANALYSIS, THINK, after_thinking
from tests.fuzz import num_examples
from tests.server.tools.call_templates import LEARNED
from tests.server.tools.call_texts import joined
from tests.server.tools.random_messages import MARKERS, SCHEMAS, random_cuts, random_message

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(3600)]

FORMATS = {**BY_NAME, "mistral_named": MISTRAL_NAMED, **{f"learned_{name}": form for name, form in LEARNED.items()}}
NUM_TEXTS = num_examples(200)


def reader_of(form: CallFormat, starts_inside: bool) -> Reader:
    if form is HARMONY:
        return form.read
    return after_thinking(form.read, starts_inside)


def read(form: CallFormat, starts_inside: bool, *pieces: str) -> list[Part]:
    parser = ReadingParser(reader_of(form, starts_inside), SCHEMAS, "call_{}".format)
    return joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish())


def text_of(part: Part) -> str:
    return part.arguments if isinstance(part, ToolCall) else part.text


def is_in_order(said: str, text: str) -> bool:
    rest = iter(text)
    return all(character in rest for character in said)


@pytest.mark.parametrize("name", FORMATS)
def test_any_text_is_read_alike_however_it_comes_and_adds_up(name: str) -> None:
    form = FORMATS[name]
    for seed in range(NUM_TEXTS):
        rng = Random(f"{name}{seed}")
        text, starts_inside = (
            random_message(rng, form, HARMONY_ANALYSIS if form is HARMONY else THINK),
            rng.random() < 0.2,
        )
        whole = read(form, starts_inside, text)
        assert read(form, starts_inside, *text) == whole, (seed, text)
        assert read(form, starts_inside, *random_cuts(rng, text)) == whole, (seed, text)
        assert is_in_order("".join(text_of(part) for part in whole if isinstance(part, Content | Reasoning)), text), (
            text
        )
        check_markers(form, whole, text)


def may_lose(form: CallFormat, parts: list[Part]) -> bool:
    """Whether there is a call with members beside its name and arguments, of which nobody is told."""
    is_object = isinstance(form.spelling.arguments, JsonArguments) and form.spelling.before_arguments.startswith('"')
    return is_object and any(isinstance(part, ToolCall) for part in parts)


def check_markers(form: CallFormat, parts: list[Part], text: str) -> None:
    """Fails if a letter comes out more often than it was written, or less often."""
    told = "".join(map(text_of, parts))
    for marker in MARKERS:
        is_right = told.count(marker) == text.count(marker)
        assert is_right or (may_lose(form, parts) and told.count(marker) < text.count(marker)), (text, parts)


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.spelling.arguments != JsonArguments()])
def test_arguments_that_are_not_json_become_json(name: str) -> None:
    """Or begin like JSON, if they are cut off."""
    form = FORMATS[name]
    for seed in range(NUM_TEXTS):
        text = random_message(Random(f"{name}{seed}"), form, THINK)
        parser = ReadingParser(reader_of(form, False), SCHEMAS, "call_{}".format)
        calls = [part for part in joined([*parser.feed(text), *parser.finish()]) if isinstance(part, ToolCall)]
        complete = calls[:-1] if parser.is_cut else calls
        assert all(isinstance(json.loads(call.arguments), dict) for call in complete), (seed, text, calls)
        assert not parser.is_cut or begins_json(calls[-1].arguments or "{"), (seed, text, calls)
