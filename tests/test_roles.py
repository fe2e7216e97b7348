"""A prefill and a decode server answer as one server does, to the last bit, and leave nothing behind, whoever leaves or
dies."""

import json
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from threading import Thread
from typing import Any

import httpx
import pytest

from tests.crossed import slow_but
from tests.soak.kv_store_models import MODELS
from tests.soak.server import ServerProcess, eventually, running_server

HOW: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.1, "top_p": 0.9, "seed": 3, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "grammar": {"temperature": 0.8, "seed": 4, "structured_outputs": {"regex": "[a-z ]{20,30}"}},
    "three": {"temperature": 1.0, "seed": 5, "n": 3},
    "scored": {"temperature": 0, "prompt_logprobs": 1},
    "in memory": {"temperature": 0, "prompt_cache_retention": "in_memory"},
}
ABORTED = "twostep_requests_total{finish_reason=abort}"


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode server over one store."""

    prefill: ServerProcess
    decode: ServerProcess
    store: Path

    def handed_over(self) -> float:
        return self.prefill.metrics()["twostep_handed_over_tokens_total"]

    def is_prefilling(self) -> bool:
        return bool(httpx.get(f"{self.prefill.url}/load").json()["waiting_tokens"])

    def assert_nothing_is_left(self) -> None:
        assert eventually(self.decode.is_idle)
        assert eventually(self.prefill.is_idle)
        assert eventually(lambda: not [*self.store.rglob(".writing-*")])


@contextmanager
def pair(store: Path, *flags: str) -> Iterator[Pair]:
    with ExitStack() as stack:
        shared = (*flags, "--kv-store", str(store))
        prefill = stack.enter_context(running_server("--role", "prefill", *shared))
        decode = ("--role", "decode", "--prefill-url", prefill.url, "--prefill-min-tokens", "64")
        yield Pair(prefill, stack.enter_context(running_server(*decode, *shared)), store)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair(tmp_path_factory.mktemp("store")) as servers:
        yield servers


@pytest.fixture(scope="module")
def one() -> Iterator[ServerProcess]:
    with running_server() as server:
        yield server


def prompt_of(number: int, num_tokens: int) -> list[int]:
    chance = random.Random(number)
    return [chance.randrange(10, 2000) for _ in range(num_tokens)]


def answer(server: ServerProcess, prompt: list[int], **how: Any) -> Any:
    """Returns all of an answer that may not depend on who computed it."""
    how = {"max_tokens": 20, "logprobs": 2, "return_token_ids": True, **how}
    return server.complete(prompt=prompt, **how)["choices"]


@pytest.mark.parametrize("how", slow_but(HOW, "sampled", "three", "scored", "in memory"))
def test_answers_are_those_of_one_server(servers: Pair, one: ServerProcess, how: str) -> None:
    prompt, before = prompt_of(1, 333), servers.handed_over()
    salt = {"cache_salt": how}  # so that nothing is cached yet
    for number, each in enumerate((prompt, prompt, [*prompt, *prompt_of(2, 90)])):
        assert answer(servers.decode, each, **HOW[how], **salt) == answer(one, each, **HOW[how], **salt), number
    is_handed_over = how not in ("scored", "in memory")
    assert servers.handed_over() - before == (320 + 416 if is_handed_over else 0)
    servers.assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize(("model", "num_handed_over"), [("recurrent", 320 + 384), ("windowed", 320 + 416)])
def test_a_prompt_is_handed_over_as_far_as_all_that_it_needs_is_stored(
    model: str, num_handed_over: int, tmp_path: Path
) -> None:
    """With states that is up to the last copy of these, with windows in all groups of layers."""
    flags = MODELS[model].flags_in(tmp_path)
    with running_server(*flags) as one, pair(tmp_path / "store", *flags) as servers:
        prompt = prompt_of(1, 333)
        for each in (prompt, prompt, [*prompt, *prompt_of(2, 90)]):
            assert answer(servers.decode, each, seed=3) == answer(one, each, seed=3)
        assert servers.handed_over() == num_handed_over
        assert servers.decode.metrics()["twostep_remote_prefill_lost_tokens_total"] == 0
        servers.assert_nothing_is_left()


def test_a_long_prompt_and_a_chat_are_answered_as_by_one_server(servers: Pair, one: ServerProcess) -> None:
    prompt = prompt_of(3, 1500)
    assert answer(servers.decode, prompt, ignore_eos=True) == answer(one, prompt, ignore_eos=True)
    chat = {"messages": [{"role": "user", "content": "What is a list? " * 40}], "seed": 1, "max_tokens": 9}
    told, expected = (httpx.post(f"{each.url}/v1/chat/completions", json=chat) for each in (servers.decode, one))
    assert told.json()["choices"] == expected.json()["choices"]


def test_the_time_is_told_and_adds_up(servers: Pair) -> None:
    body = {"prompt": prompt_of(4, 200), "max_tokens": 3}
    first, again = (httpx.post(f"{servers.decode.url}/v1/completions", json=body, timeout=60) for _ in range(2))
    timings = first.json()["timings"]
    remote_ms = timings["remote_prefill_ms"]
    assert remote_ms > 0 and float(first.headers["x-remote-prefill-ms"]) == remote_ms
    assert f"remote_prefill;dur={remote_ms}" in first.headers["server-timing"]
    assert timings["ttft_ms"] == round(timings["queue_ms"] + remote_ms + timings["prefill_ms"], 3)
    assert timings["cached_tokens"] == 192 and "remote_prefill_ms" not in again.json()["timings"]


def test_the_next_turn_of_a_conversation_hands_over_its_new_part_alone(servers: Pair) -> None:
    prompt = prompt_of(5, 200)
    said = answer(servers.decode, prompt, max_tokens=100, ignore_eos=True)[0]["token_ids"]
    longer = [*prompt, *said, *prompt_of(6, 100)]
    before = servers.prefill.metrics()
    answer(servers.decode, longer)
    after = servers.prefill.metrics()
    cached = after["twostep_prefix_cache_hits_total"] - before["twostep_prefix_cache_hits_total"]
    assert cached >= 192
    assert after["twostep_prefix_cache_hits_by_tier_total{tier=disk}"] > 0, "what the decode server wrote is read"


def test_a_prefill_server_answers_nobody_else(servers: Pair) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/messages", "/v1/responses"):
        refused = httpx.post(f"{servers.prefill.url}{path}", json={})
        assert refused.status_code == 400 and "--role decode" in refused.text
    assert httpx.post(f"{servers.decode.url}/v1/prefill", json={}).status_code == 404


def leave(server: ServerProcess, prompt: list[int], when: Callable[[socket.socket], bool]) -> None:
    """Asks for a stream, and leaves when that holds of the connection."""
    body = json.dumps({"prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        assert eventually(lambda: when(connection))


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_who_leaves_leaves_nothing_behind(servers: Pair, stage: str) -> None:
    before = servers.prefill.metrics()[ABORTED]
    if stage == "prefill":
        leave(servers.decode, prompt_of(7, 1800), lambda _: servers.is_prefilling())
        assert eventually(lambda: servers.prefill.metrics()[ABORTED] == before + 1)
    else:
        leave(servers.decode, prompt_of(8, 200), lambda connection: b"data:" in connection.recv(4096))
        assert servers.prefill.metrics()[ABORTED] == before
    servers.assert_nothing_is_left()


def test_crowds_that_leave_at_any_moment_leave_nothing_behind(servers: Pair, one: ServerProcess) -> None:
    chance = random.Random(9)

    def ask_and_leave(number: int) -> None:
        body = {"prompt": prompt_of(100 + number, 400), "max_tokens": 40, "ignore_eos": True}
        with suppress(httpx.TimeoutException):
            httpx.post(f"{servers.decode.url}/v1/completions", json=body, timeout=chance.uniform(0.01, 0.3))

    threads = [Thread(target=ask_and_leave, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    servers.assert_nothing_is_left()
    for number in (100, 110, 123):  # of which blocks may be stored, or being so when they were left
        prompt = prompt_of(number, 400)
        assert answer(servers.decode, prompt) == answer(one, prompt)


@pytest.mark.slow
def test_answers_are_whole_when_an_engine_or_the_prefill_server_dies(one: ServerProcess, tmp_path: Path) -> None:
    with pair(tmp_path) as servers:
        answers: dict[str, Any] = {}

        def ask(name: str, number: int) -> Thread:
            prompt = prompt_of(number, 1800)
            thread = Thread(target=lambda: answers.__setitem__(name, answer(servers.decode, prompt)))
            thread.start()
            assert eventually(servers.is_prefilling)
            return thread

        thread = ask("prefill engine", 10)
        servers.prefill.kill_engine()
        thread.join()
        thread = ask("decode engine", 11)
        servers.decode.kill_engine()
        thread.join()
        servers.assert_nothing_is_left()
        thread = ask("prefill server", 12)
        servers.prefill.signal_all(SIGKILL)
        thread.join()
        answers["no prefill server"] = answer(servers.decode, prompt_of(13, 300))
        assert eventually(servers.decode.is_idle)
        assert servers.decode.metrics()["twostep_remote_prefills_total{result=failed}"] >= 1
    lengths = {10: 1800, 11: 1800, 12: 1800, 13: 300}
    assert list(answers.values()) == [answer(one, prompt_of(*each)) for each in lengths.items()]
