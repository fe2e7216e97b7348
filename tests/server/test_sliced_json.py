"""A list is encoded as a whole, while others have their turns."""

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.generation import logprobs
from server.sliced_json import json_list
from tests.server.events import chunks_of
from tests.server.live_server import LiveServer

VALUES = st.recursive(
    st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(), st.lists
)


@given(st.lists(VALUES, max_size=20), st.integers(1, 7))
def test_slices_make_the_whole(values: list[object], slice_size: int) -> None:
    encoded = msgspec.json.encode({"list": asyncio.run(json_list(values, slice_size))})
    assert json.loads(encoded) == {"list": values}


def test_others_run_between_two_slices() -> None:
    made = 0
    seen = []

    def items() -> Iterator[int]:
        nonlocal made
        for number in range(1, 11):
            made = number
            yield number

    async def watch() -> None:
        while made < 10:
            seen.append(made)
            await asyncio.sleep(0)

    async def check() -> None:
        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        await json_list(items(), 3)
        await watching

    asyncio.run(check())
    assert seen == [0, 3, 6, 9]


def test_long_answers_are_complete(server: LiveServer) -> None:
    text = "ab" * 5000
    body = server.post_json(
        "/tokenize", {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
    ).json()
    assert body == {"count": 10_000, "max_model_len": 512, "tokens": [*text.encode()], "token_strs": [*text]}


PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x" * 94},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}


def scores_of(body: dict[str, Any]) -> list[Any]:
    scores: list[Any] = (body | body["choices"][0])["prompt_logprobs"]
    return scores


@pytest.mark.parametrize("path", PROMPTS)
def test_others_run_between_two_choices(server: LiveServer, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded, turns = 0, list[int]()

    def encode(part: Any) -> bytes:
        nonlocal encoded
        encoded += 1
        server.loop.call_soon(lambda: turns.append(encoded))
        return msgspec.json.encode(part)

    monkeypatch.setattr(
        "server.sliced_json.msgspec", SimpleNamespace(Raw=msgspec.Raw, json=SimpleNamespace(encode=encode))
    )
    answer = server.post_json(path, PROMPTS[path] | {"max_tokens": 2, "n": 5}).json()
    assert len(answer["choices"]) == 5
    assert turns == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("path", PROMPTS)
def test_the_scores_of_a_prompt_are_the_same_in_a_stream(server: LiveServer, path: str) -> None:
    body = PROMPTS[path] | {"prompt_logprobs": 2, "max_tokens": 1}
    streamed = chunks_of(server.post_json(path, body | {"stream": True}))[0]
    assert scores_of(streamed) == scores_of(server.post_json(path, body).json())


@pytest.mark.parametrize("path", PROMPTS)
def test_the_scores_of_a_prompt_hold_up_nobody(server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    made, seen, plain = [0], set[int](), logprobs._by_id

    def counted(*arguments: Any) -> dict[str, Any]:
        made[0] += 1
        return plain(*arguments)

    async def watch() -> None:
        while True:
            seen.add(made[0])
            await asyncio.sleep(0)

    monkeypatch.setattr(logprobs, "_by_id", counted)
    watching = asyncio.run_coroutine_threadsafe(watch(), server.loop)
    body = server.post_json(path, PROMPTS[path] | {"prompt_logprobs": 2, "max_tokens": 1}).json()
    watching.cancel()
    assert len(scores_of(body)) == made[0] + 1 and seen >= {*range(9, made[0], 10)}
