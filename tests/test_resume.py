"""An answer goes on behind tokens that it is given exactly as it would have gone on without an interruption."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.soak.server import ServerProcess, running_server

PROMPT = "def main("
HOW = [
    {"temperature": 0},
    {"temperature": 1.1, "top_p": 0.9, "seed": 3, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0.8, "seed": 4, "structured_outputs": {"regex": "[a-z ]{30,60}"}},
    {"temperature": 0.9, "seed": 5, "stop": ["e "], "min_tokens": 8},
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server("--num-threads", "2") as server:  # more than tests have where they do not ask
        yield server


def whole(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    """Returns the first choice of an answer, without its times."""
    body = server.complete(prompt=PROMPT, max_tokens=24, return_token_ids=True, **fields)
    choice = dict(body["choices"][0])
    assert body["usage"]["completion_tokens"] == len(choice["token_ids"])
    return choice


@pytest.mark.parametrize("how", HOW)
def test_any_beginning_leads_to_the_same_answer(server: ServerProcess, how: dict[str, Any]) -> None:
    expected = whole(server, **how)
    token_ids = expected["token_ids"]
    for count in {0, 1, len(token_ids) // 2, len(token_ids) - 1, len(token_ids)}:
        assert whole(server, **how, resume_token_ids=[token_ids[:count]]) == expected, count


def test_an_answer_that_ended_is_not_gone_on_with(server: ServerProcess) -> None:
    how = {"temperature": 0, "stop_token_ids": whole(server, temperature=0)["token_ids"][5:6]}
    expected = whole(server, **how)
    assert expected["finish_reason"] == "stop"
    assert whole(server, **how, resume_token_ids=[expected["token_ids"]]) == expected


def test_what_was_given_is_prefilled_and_not_decoded_again(server: ServerProcess) -> None:
    token_ids = whole(server, temperature=0)["token_ids"]
    before = server.metrics()["twostep_step_duration_seconds_count{phase=decode}"]
    whole(server, temperature=0, resume_token_ids=[token_ids[:-1]])
    assert server.metrics()["twostep_step_duration_seconds_count{phase=decode}"] == before


def test_each_choice_has_a_beginning_of_its_own(server: ServerProcess) -> None:
    how = {"prompt": [PROMPT, "import"], "n": 2, "max_tokens": 9, "seed": 1, "return_token_ids": True}
    expected = [choice["token_ids"] for choice in server.complete(**how)["choices"]]
    given = [each[:count] for each, count in zip(expected, (2, 0, 5), strict=False)]
    assert [choice["token_ids"] for choice in server.complete(**how, resume_token_ids=given)["choices"]] == expected


def events(server: ServerProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.stream("POST", server.url + path, json=body | {"stream": True}, timeout=60) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert response.status_code == 200 and lines[-1] == "[DONE]", lines
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_stream_sends_what_it_was_given_first(server: ServerProcess, count: int) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "seed": 2, "return_token_ids": True}
    plain = [event["choices"][0] for event in events(server, "/v1/chat/completions", body)]
    token_ids = [token_id for choice in plain for token_id in choice.get("token_ids", ())]
    resumed = events(server, "/v1/chat/completions", body | {"resume_token_ids": [token_ids[:count]]})
    choices = [event["choices"][0] for event in resumed]
    assert [token_id for choice in choices for token_id in choice.get("token_ids", ())] == token_ids
    assert "".join(each["delta"].get("content", "") for each in choices) == "".join(
        each["delta"].get("content", "") for each in plain
    )
    assert resumed[-1]["timings"]["generated_tokens"] == len(token_ids)


@pytest.mark.parametrize(
    "fields",
    [
        {"resume_token_ids": [[10**6]]},
        {"resume_token_ids": [[1], [1]]},
        {"resume_token_ids": [[1] * 25]},
        {"resume_token_ids": [[1]], "logprobs": 1},
        {"resume_token_ids": [[1]], "prompt_logprobs": 1},
        {"resume_token_ids": [1]},
    ],
)
def test_what_no_answer_can_begin_with_is_refused(server: ServerProcess, fields: dict[str, Any]) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 24, **fields})
    assert answer.status_code == 400 and "resume_token_ids" in answer.text


def test_a_restart_of_the_engine_changes_nothing(server: ServerProcess) -> None:
    """Neither before its first own token, nor behind it."""
    body = {"prompt": PROMPT, "max_tokens": 300, "seed": 7, "ignore_eos": True, "return_token_ids": True}
    expected = server.complete(**body)["choices"][0]["token_ids"]
    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json=body | {"stream": True, "resume_token_ids": [expected[:20]]},
        timeout=120,
    ) as response:
        token_ids: list[int] = []
        for line in response.iter_lines():
            if line.startswith("data: {"):
                token_ids += json.loads(line[6:])["choices"][0]["token_ids"]
                if len(token_ids) == 40 and server.engine_pid is not None:
                    os.kill(server.engine_pid, signal.SIGKILL)
    assert token_ids == expected


@pytest.mark.parametrize(
    "how",
    [
        {"structured_outputs": {"regex": "[0-9]{3}"}},
        {"structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}},
        {"min_tokens": 20},
        {"bad_words": ["e"], "stop": ["e"]},
        {},
    ],
)
def test_a_beginning_that_no_server_generated_ends_no_engine(server: ServerProcess, how: dict[str, Any]) -> None:
    before = server.metrics()["twostep_engine_restarts_total"]
    for given in ([5, 6, 7], [0, 0, 0], [400, 401] * 12):
        body = {"prompt": PROMPT, "max_tokens": 24, "resume_token_ids": [given], **how}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code in (200, 400)
    assert server.metrics()["twostep_engine_restarts_total"] == before
    assert server.complete(prompt=PROMPT, max_tokens=1)["usage"]["completion_tokens"] == 1
