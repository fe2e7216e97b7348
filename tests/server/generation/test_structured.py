"""response_format and structured_outputs: which grammar reaches the engine, and what is refused with which words."""

import json
from functools import reduce
from typing import Any

import httpx
import pytest

from engine.grammar.lark import MAX_GRAMMAR_BYTES
from tests.engine.grammar.grammars import accepted, accepts
from tests.server.events import error_of
from tests.server.fake_engine import saying
from tests.server.live_server import FakeBackend, LiveServer, live_server

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TEXTS = ['{"a": 1}', '{"b": 1}', "[]", "yes", "no", "1"]
MESSAGES = [{"role": "user", "content": "Hi"}]


def named(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, **fields}}


def grammar(server: LiveServer, **parameters: Any) -> str:
    """Returns the grammar that the engine is given."""
    response = server.complete("Hi", **parameters)
    assert response.status_code == 200, response.text
    (request,) = server.engine.requests
    assert request.params.grammar is not None
    return request.params.grammar


@pytest.mark.parametrize(
    ("parameters", "texts"),
    [
        ({"response_format": {"type": "json_object"}}, TEXTS[:2]),
        ({"response_format": named(SCHEMA)}, TEXTS[:1]),
        ({"response_format": named(SCHEMA, strict=True, description="d")}, TEXTS[:1]),
        ({"response_format": named(SCHEMA, strict=False)}, TEXTS[:1]),
        ({"response_format": named({})}, [*TEXTS[:3], "1"]),
        ({"structured_outputs": {"json": SCHEMA}}, TEXTS[:1]),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, TEXTS[:1]),
        ({"structured_outputs": {"regex": "[a-z]+|1"}}, TEXTS[3:]),
        ({"structured_outputs": {"choice": ["yes", "no", "[]"], "regex": None}}, TEXTS[2:5]),
        ({"structured_outputs": {"grammar": 'start: "y" rest\nrest: "es"'}}, ["yes"]),
        ({"structured_outputs": {"regex": "1"}, "response_format": {"type": "text"}}, ["1"]),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_is_asked_for_reaches_the_engine(server: LiveServer, parameters: dict[str, Any], texts: list[str]) -> None:
    assert accepted(grammar(server, **parameters), *TEXTS) == texts


OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_objects_are_closed_unless_the_request_opens_them(server: LiveServer) -> None:
    texts = ['{"a": 1}', '{"a": 1, "b": 2}', '{"a": 1, "a": 2}']
    for parameters in (
        {"response_format": named(OPEN)},
        {"response_format": named(OPEN, strict=True)},
        {"structured_outputs": {"json": OPEN}},
    ):
        assert accepted(grammar(server, **parameters), *texts) == texts[:1]
        server.engine.requests.clear()
    opened = {"json": OPEN, "disable_additional_properties": False}
    assert accepted(grammar(server, structured_outputs=opened), *texts) == texts[:2]
    explicit = {**OPEN, "additionalProperties": True}
    server.engine.requests.clear()
    assert accepted(grammar(server, response_format=named(explicit)), *texts) == texts[:2]


@pytest.mark.parametrize("number", ["9007199254740993", "1234567890123456789", "18446744073709551617", "-0.0"])
def test_numbers_of_a_request_are_generated_as_they_were_sent(server: LiveServer, number: str) -> None:
    schema = f'{{"type": "object", "properties": {{"id": {{"const": {number}}}}}, "required": ["id"]}}'
    response = server.post("/v1/completions", f'{{"prompt": "Hi", "structured_outputs": {{"json": {schema}}}}}')
    assert response.status_code == 200, response.text
    texts = [f'{{"id": {each}}}' for each in (number, int(float(number)), float(number) + 1)]
    assert accepted(server.engine.requests[0].params.grammar or "", *texts) == texts[:1]


def test_chats_have_them_too(server: LiveServer) -> None:
    body = json.dumps({"messages": MESSAGES, "response_format": named(SCHEMA)})
    assert server.post("/v1/chat/completions", body).status_code == 200
    assert accepted(server.engine.requests[0].params.grammar or "", *TEXTS) == TEXTS[:1]


def test_every_choice_of_every_prompt_follows(server: LiveServer) -> None:
    server.complete(["Hi", "Yo"], n=2, response_format={"type": "json_object"})
    grammars = {request.params.grammar for request in server.engine.requests}
    assert len(server.engine.requests) == 4 and len(grammars) == 1 and None not in grammars


def test_text_asks_for_nothing(server: LiveServer) -> None:
    server.complete("Hi", response_format={"type": "text"})
    assert server.engine.requests[0].params.grammar is None


def test_streams_and_echoes_are_as_ever(server: LiveServer) -> None:
    server.engine.rule = saying('{"a": 1}')
    body = server.complete("Hi", echo=True, logprobs=1, response_format=named(SCHEMA)).json()
    assert body["choices"][0]["text"] == 'Hi{"a": 1}'


deep = reduce(lambda inner, _: {"items": inner}, range(150), {"type": "null"})
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown type": ({"response_format": {"type": "xml"}}, "text"),
    "no type": ({"response_format": {}}, "type"),
    "no object": ({"response_format": "json_object"}, "response_format"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "json_schema must be given"),
    "a needless schema": ({"response_format": {**named({}), "type": "json_object"}}, "only then"),
    "no name": ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "json_schema.name"),
    "a bad name": ({"response_format": named({}, name="a b")}, "json_schema.name"),
    "a list for a schema": ({"response_format": named([])}, "json_schema.schema"),
    "strictness in words": ({"response_format": named({}, strict="yes")}, "json_schema.strict"),
    "nothing": ({"structured_outputs": {}}, "Exactly one"),
    "two": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "Exactly one"),
    "something else": ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "whitespace_pattern"),
    "no choice": ({"structured_outputs": {"choice": []}}, "choice"),
    "choices that are no texts": ({"structured_outputs": {"choice": [1]}}, "choice"),
    "a lone surrogate": ({"structured_outputs": {"choice": ["\ud800"]}}, "surrogates"),
    "no JSON": ({"structured_outputs": {"json": "{"}}, "json"),
    "JSON of no object": ({"structured_outputs": {"json": "[]"}}, "json"),
    "JSON without a bottom": ({"structured_outputs": {"json": "[" * 50_000}}, "json"),
    "a schema in another place": ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "schema"),
    "an unknown word beside the schema": ({"response_format": named(SCHEMA, strickt=True)}, "strickt"),
    "both": ({"structured_outputs": {"regex": "a"}, "response_format": named({})}, "cannot be combined"),
    "an unsupported keyword": ({"response_format": named({"items": {"not": {}}})}, "/items/not is not supported"),
    "a format that is not enforced": ({"response_format": named({"format": "regex"})}, "/format is 'regex'"),
    "a format that is no text": ({"response_format": named({"format": ["date"] * 300})}, "/format is ['date', 'date'"),
    "an option beside no schema": (
        {"structured_outputs": {"regex": "a", "disable_additional_properties": False}},
        "disable_additional_properties",
    ),
    "contradictions": ({"response_format": named({"type": "integer", "minimum": 2, "maximum": 1})}, "minimum"),
    "endless recursion": ({"response_format": named({"$ref": "#"})}, "no text satisfies it"),
    "depth": ({"response_format": named(deep)}, "levels deep"),
    "size": ({"structured_outputs": {"choice": ["x" * MAX_GRAMMAR_BYTES]}}, "bytes"),
    "no regex": ({"structured_outputs": {"regex": "("}}, "unclosed group"),
    "look-ahead": ({"structured_outputs": {"regex": "(?=a)a"}}, "look-around"),
    "no grammar": ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs"),
    "a directive": ({"structured_outputs": {"grammar": "start: %json {}"}}, "%json"),
    "a crash": (
        {
            "structured_outputs": {
                "grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(8000)) + '\nr8000: "a"'
            }
        },
        "too complex",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_by_name(server: LiveServer, name: str) -> None:
    parameters, words = REFUSED[name]
    response = server.complete("Hi", **parameters)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, next(iter(parameters))), error
    assert words in error["message"] and len(error["message"]) < 500
    assert server.engine.requests == []
    assert server.complete("Hi", response_format=named(SCHEMA)).status_code == 200


def test_a_grammar_cannot_be_made_endless(server: LiveServer) -> None:
    response = server.complete("Hi", ignore_eos=True, response_format={"type": "json_object"})
    assert (response.status_code, error_of(response)["param"]) == (400, "ignore_eos")


THINKING = "{{ messages[0].content }}{% if deep %}<think>\n{% endif %}"
CALLING = "{{ messages[0].content }}{# <tool_call> tool_calls #}{{ tools }}"
TOOL = {"type": "function", "function": {"name": "f"}}


def chat(backend: FakeBackend, **parameters: Any) -> tuple[httpx.Response, str]:
    """Returns the answer to a chat, and the grammar that the engine was given."""
    with live_server(backend) as server:
        response = server.post("/v1/chat/completions", json.dumps({"messages": MESSAGES, **parameters}))
        return response, "".join(request.params.grammar or "" for request in server.engine.requests)


@pytest.mark.parametrize(
    ("deep", "texts"),
    [
        (False, ['{"a":1}', '<think>{"b"</think>{"a":1}', '\n<think>\n</think>\n\n{"a":1}']),
        (True, ['hm\n</think>\n\n{"a":1}', '{"a":1}</think>{"a":1}']),
    ],
)
def test_thoughts_are_free_and_the_answer_is_not(deep: bool, texts: list[str]) -> None:
    backend = FakeBackend(chat_templates={"default": THINKING})
    response, lark = chat(backend, response_format=named(SCHEMA), chat_template_kwargs={"deep": deep})
    assert response.status_code == 200
    wrong = ["hm", "</think>", 'hm</think>{"b":1}', "<think>hm", '<think>hm</think>\n\n\n{"a":1}']
    assert accepted(lark, *texts, *wrong) == texts
    assert deep != accepts(lark, '{"a":1}')


@pytest.mark.parametrize(
    ("backend", "parameters"),
    [
        (FakeBackend(chat_templates={"default": THINKING}), {"structured_outputs": {"grammar": 'start: "a"'}}),
        (FakeBackend(chat_templates={"default": CALLING.replace("<tool_call>", "<|python_tag|>")}), {"tools": [TOOL]}),
        (
            FakeBackend(chat_templates={"default": CALLING}),
            {"structured_outputs": {"regex": "a"}, "tools": [TOOL]},
        ),
    ],
    ids=[
        "a whole grammar after thinking",
        "calls without a mark",
        "a regex and calls",
    ],
)
def test_what_cannot_be_combined_is_refused(backend: FakeBackend, parameters: dict[str, Any]) -> None:
    constraint = {"response_format": {"type": "json_object"}} if "structured_outputs" not in parameters else {}
    response, _ = chat(backend, **constraint, **parameters)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, next(iter(constraint or parameters)))
    assert "cannot be combined" in error["message"]


@pytest.mark.parametrize(
    ("template", "special_tokens", "parameters"),
    [
        (THINKING, {"<think>": 0xFA, "</think>": 0xFB}, {}),
        (CALLING, {"<tool_call>": 0xFA}, {"tools": [TOOL]}),
    ],
    ids=["thinking", "calls"],
)
def test_marks_that_are_tokens_are_tokens_of_the_grammar(
    template: str, special_tokens: dict[str, int], parameters: dict[str, Any]
) -> None:
    backend = FakeBackend(chat_templates={"default": template}, special_tokens=special_tokens)
    response, lark = chat(backend, response_format={"type": "json_object"}, **parameters)
    assert response.status_code == 200 and all(f"<[{token_id}]>" in lark for token_id in special_tokens.values())


def test_tools_that_may_not_be_called_are_no_hindrance() -> None:
    backend = FakeBackend(chat_templates={"default": CALLING})
    response, lark = chat(backend, tools=[TOOL], tool_choice="none", response_format=named(SCHEMA))
    assert response.status_code == 200 and accepts(lark, '{"a":1}')
