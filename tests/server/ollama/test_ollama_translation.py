"""/api/chat and /api/generate: the prompt and the parameters that the engine gets, and what is refused."""

import json
from typing import Any

import pytest

from server.chat.translated import chat_call
from server.core.errors import BadRequestError
from tests.server.live_server import FakeBackend, LiveServer, live_server
from tests.server.model_talk import WEATHER, prompt_of, turns_of
from tests.server.tools.tool_chats import MARKS, THINKING

USER = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": WEATHER}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_messages_become_those_of_a_chat(agent: LiveServer) -> None:
    call = {"function": {"name": "f", "arguments": {"city": "Oslo"}}}
    history = [
        {"role": "system", "content": "Be brief."},
        *USER,
        {"role": "assistant", "content": "Well.", "thinking": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_name": "f", "content": "sunny"},
    ]
    assert agent.ollama(history, tools=[TOOL]).status_code == 200
    told = '<tool_call>{"name": "f", "arguments": {"city": "Oslo"}}</tool_call>'
    expected = ["system]Be brief.", "user]Hi", f"assistant](Hm.)Well.{told}", "tool]sunny", "assistant]"]
    assert turns_of(agent)[-5:] == expected


@pytest.mark.parametrize(
    ("results", "ids"),
    [
        ([{"tool_name": "g"}, {"tool_name": "f"}], ["second", "call_1_0"]),
        ([{}, {}], ["call_1_0", "second"]),
        ([{"tool_call_id": "second"}, {}], ["second", "call_1_0"]),
    ],
)
def test_results_belong_to_the_calls_before_them(results: list[dict[str, str]], ids: list[str]) -> None:
    template = "{{ tools }}{% for m in messages %}[{{ m.tool_calls }}{{ m.tool_call_id }}{{ m.name }}]{% endfor %}"
    calls = [{"function": {"name": "f"}}, {"id": "second", "function": {"name": "g"}}]
    history = [*USER, {"role": "assistant", "tool_calls": calls}]
    history += [{"role": "tool", "content": "x", **each} for each in results]
    with live_server(FakeBackend(chat_templates={"default": template})) as server:
        assert server.ollama(history).status_code == 200
        names = [each.get("tool_name", "") for each in results]
        assert turns_of(server)[-2:] == [f"{call}{name}]" for call, name in zip(ids, names, strict=True)]


@pytest.mark.parametrize("named", [{}, {"tool_name": "g"}])
def test_a_result_without_a_call_is_refused(server: LiveServer, named: dict[str, str]) -> None:
    calls = [{"function": {"name": "f"}}] if named else []
    history = [*USER, {"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", **named}]
    refused = server.ollama(history)
    assert refused.status_code == 400 and refused.json()["error"].startswith("messages.2: There is no call")


def test_a_conversation_that_ends_with_the_assistant_is_continued(server: LiveServer) -> None:
    server.ollama([*USER, {"role": "assistant", "content": "Once"}])
    assert prompt_of(server).endswith("Once")


def test_generate_is_a_message_of_a_user_behind_the_system_prompt(agent: LiveServer) -> None:
    agent.ollama("Hi", system="Be brief.")
    assert turns_of(agent) == ["system]Be brief.", "user]Hi", "assistant]"]


def test_raw_is_the_prompt_alone(agent: LiveServer) -> None:
    agent.ollama("[user]Hi", raw=True)
    assert prompt_of(agent) == "<s>[user]Hi"


@pytest.mark.parametrize("raw", [False, True])
def test_options_reach_the_engine(server: LiveServer, raw: bool) -> None:
    options = {"temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.25, "seed": 3, "num_predict": 4}
    penalties = {"repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    server.ollama("Hi", raw=raw, options={**options, **penalties, "stop": "zz"})
    params = server.engine.requests[-1].params
    expected = {**options, **penalties, "stop": ("zz",)}
    for theirs, ours in (("num_predict", "max_tokens"), ("repeat_penalty", "repetition_penalty")):
        expected[ours] = expected.pop(theirs)
    assert {name: getattr(params, name) for name in expected} == expected


def test_what_changes_no_answer_is_accepted(server: LiveServer) -> None:
    load = {"num_ctx": 4096, "num_thread": 8, "num_gpu": 1, "use_mmap": True, "num_keep": 4, "num_batch": 2}
    neutral = {"mirostat": 0, "mirostat_tau": 5.0, "typical_p": 1.0, "tfs_z": 1, "repeat_last_n": -1}
    asked: dict[str, Any] = {"options": {"seed": 1, "num_predict": 5}}
    plain = server.ollama("Hi", **asked).json()["response"]
    older = {"logits_all": False, "vocab_only": False, "embedding_only": False, "low_vram": False, "f16_kv": True}
    asked["options"] |= load | older | neutral | {"penalize_newline": True, "numa": False}
    rest: dict[str, Any] = {
        "images": [],
        "template": "",
        "suffix": "",
        "context": [],
        "system": "",
        "format": "",
        "keep_alive": "5m",
        "truncate": True,
        "shift": False,
    }
    answer = server.ollama("Hi", **asked, **rest, raw=False, logprobs=False)
    assert answer.json()["response"] == plain


def test_arguments_that_are_nested_too_deeply_are_refused_by_the_name_of_their_function() -> None:
    arguments: dict[str, Any] = {}
    for _ in range(2000):
        arguments = {"a": arguments}
    with pytest.raises(BadRequestError, match="of 'f' are nested too deeply"):
        chat_call("1", "f", arguments)


def test_arguments_with_half_a_character_are_refused_by_their_place(server: LiveServer) -> None:
    call = {"function": {"name": "f", "arguments": {"a": "\ud800"}}}
    body = json.dumps({"messages": [*USER, {"role": "assistant", "tool_calls": [call]}]})
    refused = server.client.post("/api/chat", content=body, headers={"Content-Type": "application/json"})
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("messages.1.tool_calls.0.function.arguments: ")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({"options": {name: value}}, f"options.{name}") for name, value in (
            ("mirostat", 1), ("typical_p", 0.5), ("tfs_z", 0.5), ("repeat_last_n", 64), ("penalize_newline", False),
            ("num_predict", -3), ("temperature", 2.5), ("top_p", 2.0), ("top_k", -7),
            ("repeat_penalty", 0), ("presence_penalty", 9.0), ("min_p", 2.0), ("unknown", 1), ("stop", [""]),
        )),
        *(({name: value}, f"{name} ") for name, value in (
            ("suffix", "x"), ("images", ["x"]), ("template", "x"), ("context", [1]), ("temperature", 0.5),
            ("logprobs", True), ("top_logprobs", 2), ("n", 2), ("max_tokens", 3), ("response_format", {"type": "json"}),
        )),
        ({"options": {"mirostat": 1}}, "options.mirostat is not supported: use temperature"),
        ({"options": {"unknown": 1}}, "options.unknown is no parameter."),
        ({"options": {"num_predict": 0}}, "options.num_predict must be at least 1, or -1"),
        ({"format": "xml"}, 'format: Input should be "json" or a JSON schema.'),
        ({"format": ["json"]}, 'format: Input should be "json" or a JSON schema.'),
        ({"format": {"type": "object", "not": {}}}, "format: "),
        ({"think": True}, "think: "),
        ({"think": "high"}, "think: "),
        ({"think": "much"}, "think: "),
        ({"raw": True, "system": "x"}, "system cannot"),
        ({"raw": True, "think": False}, "think cannot"),
        ({"stream": "no"}, "stream: "),
        ({"promt": "x"}, "promt is no parameter; did you mean prompt?"),
    ],
)  # fmt: skip
def test_what_would_change_an_answer_is_refused_by_name(
    server: LiveServer, fields: dict[str, Any], message: str
) -> None:
    refused = server.ollama("Hi", **fields)
    assert refused.status_code == 400 and set(refused.json()) == {"error"}
    assert refused.json()["error"].startswith(message), refused.json()
    assert server.engine.requests == []


def test_images_of_messages_are_refused(server: LiveServer) -> None:
    refused = server.ollama([{"role": "user", "content": "Hi", "images": ["iVBO"]}])
    assert refused.json()["error"] == "messages.0.images is not supported: the model reads text only."


def test_other_endpoints_refuse_what_is_ollamas(server: LiveServer) -> None:
    assert server.chat(options={"top_k": 1}).status_code == server.chat(format="json").status_code == 400
    assert server.chat(keep_alive="5m").status_code == 200


@pytest.mark.parametrize(("form", "grammar"), [("json", True), (SCHEMA, True), ("", False), (None, False)])
@pytest.mark.parametrize("raw", [False, True])
def test_a_format_is_kept_by_a_grammar(server: LiveServer, form: Any, grammar: bool, raw: bool) -> None:
    server.ollama("Hi", format=form, raw=raw)
    assert (server.engine.requests[-1].params.grammar is not None) is grammar


def test_thinking_is_asked_of_the_template() -> None:
    template = "{{ enable_thinking }}{{ reasoning_effort }}[{{ messages[0].content }}]<think></think>"
    with live_server(FakeBackend(chat_templates={"default": template}, special_tokens=MARKS)) as server:
        for think, told in ((True, "True"), (False, "False"), ("high", "Truehigh"), (None, "")):
            assert server.ollama("Hi", think=think).status_code == 200
            assert prompt_of(server).startswith(f"{told}[Hi]")


def test_thinking_that_is_off_ends_at_once_all_the_same() -> None:
    with live_server(FakeBackend(chat_templates={"default": THINKING}, special_tokens=MARKS)) as server:
        server.ollama("Hi", think=False)
        budget = server.engine.requests[-1].params.thinking
        assert budget is not None and budget.max_tokens == 0
        server.ollama("Hi")
        assert server.engine.requests[-1].params.thinking is None
