"""Which prefill server is asked for a prompt, what it is told, and what comes of each way to fail."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from engine.client.prefill_servers import Prefix
from engine.core.errors import RemotePrefillError
from engine.core.generation_request import GenerationRequest
from engine.core.sampling_params import SamplingParams
from server.runtime.prefill_servers import HttpPrefillServers

A, B = "http://a:1", "http://b:2"
Answer = Callable[[httpx.Request], httpx.Response]


def stored(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"stored_tokens": len(json.loads(request.content)["token_ids"]) - 1})


def refused(_: httpx.Request) -> httpx.Response:
    return httpx.Response(400, text="another model")


def broken(_: httpx.Request) -> httpx.Response:
    return httpx.Response(503)


def dead(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("nobody is there", request=request)


def silent(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("nothing comes", request=request)


def garbled(_: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"stored_tokens": "all"})


def prefix(first: int = 1, num_tokens: int = 513, **fields: Any) -> Prefix:
    asked: dict[str, Any] = {"prompt_token_ids": [], "params": SamplingParams(), "arrival_s": 0.0}
    request = GenerationRequest(**asked | fields)
    return Prefix(request, [first] * num_tokens, num_stored_tokens=16, kv_fingerprint="f")


class Servers:
    """Two servers, which answer as `how` says."""

    def __init__(self, how: dict[str, Answer], api_key: str | None = None) -> None:
        self.how = how
        self.asked: list[httpx.Request] = []
        transport = httpx.MockTransport(self._answer)
        self.client = HttpPrefillServers([f"{A}/", B], api_key, 10, 5.0, transport)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        return self.how[f"http://{request.url.host}:{request.url.port}"](request)

    def compute(self, *prefixes: Prefix) -> list[int | str]:
        async def run() -> list[int | str]:
            answers: list[int | str] = []
            for each in prefixes:
                try:
                    answers.append(await self.client.compute(each))
                except RemotePrefillError as error:
                    answers.append(str(error))
            return answers

        return asyncio.run(run())

    def hosts(self) -> str:
        hosts = "".join(request.url.host for request in self.asked)
        self.asked.clear()
        return hosts


def test_a_server_is_told_all_that_blocks_depend_on_and_whose_they_are() -> None:
    servers = Servers({A: stored, B: stored}, api_key="secret")
    whose = {"tenant": "t", "weight": 2.0, "share": 0.5, "priority": 3}
    depends = {"cache_salt": "t\0s", "adapter": "d"}
    limits = {"max_queue_s": 0.25, "deadline_s": 9.0, "arrival_s": time.monotonic()}
    assert servers.compute(prefix(**whose, **depends, **limits)) == [512]
    [request] = servers.asked
    body = json.loads(request.content)
    assert request.headers["authorization"] == "Bearer secret" and request.url.path == "/v1/prefill"
    assert body | whose | depends == body and body["token_ids"] == [1] * 513
    assert (body["stored_tokens"], body["kv_fingerprint"], body["max_queue_ms"]) == (16, "f", 250)
    assert 8000 < body["deadline_ms"] <= 9000


def test_a_server_is_told_the_trace_and_nothing_in_place_of_what_it_must_know() -> None:
    servers = Servers({A: stored, B: stored})
    assert servers.compute(prefix(trace_headers={"traceparent": "00-a-b-01", "Content-Type": "text/plain"})) == [512]
    [request] = servers.asked
    assert (request.headers["traceparent"], request.headers["content-type"]) == ("00-a-b-01", "application/json")


def test_a_server_is_told_when_the_first_token_is_due() -> None:
    servers = Servers({A: stored, B: stored})
    since = {"arrival_s": time.monotonic()}
    assert servers.compute(prefix(**since, ttft_limit_s=9.0), prefix(**since), prefix(ttft_limit_s=1e-9)) == [512] * 3
    soon, whenever, late = (request.headers.get("x-slo-ttft-ms") for request in servers.asked)
    assert soon and 8000 < int(soon) <= 9000 and whenever is None and late == "1"


def test_prompts_go_where_their_beginning_went_and_others_elsewhere() -> None:
    servers = Servers({A: stored, B: stored})
    servers.compute(*(prefix(first) for first in (1, 2, 1, 2, 1)))
    assert servers.hosts() == "ababa"


def test_what_shares_no_blocks_shares_no_beginning() -> None:
    servers = Servers({A: stored, B: stored})
    servers.compute(prefix(), prefix(cache_salt="x"))
    assert servers.hosts() == "ab"


@pytest.mark.parametrize("how", [refused, broken, dead, silent, garbled])
def test_where_one_fails_the_other_is_asked(how: Answer) -> None:
    servers = Servers({A: how, B: stored})
    assert servers.compute(prefix()) == [512]
    assert servers.hosts() == "ab"


@pytest.mark.parametrize(
    ("how", "why"),
    [(refused, "answers 400: another model"), (broken, "answers 503"), (dead, "nobody is there"), (silent, "ReadTime")],
)
def test_where_all_fail_it_is_said_why(how: Answer, why: str) -> None:
    servers = Servers({A: how, B: how})
    [problem] = servers.compute(prefix())
    assert why in str(problem) and B in str(problem)


def test_who_fails_is_left_alone_for_a_while() -> None:
    servers = Servers({A: dead, B: stored})
    servers.compute(prefix(), prefix(), prefix(2))
    assert servers.hosts() == "abbb"


def test_the_while_doubles_until_the_server_answers() -> None:
    servers = Servers({A: dead, B: dead})
    pauses_s = []
    for how in (dead, dead, broken, stored, dead):
        servers.how[A], servers.client._again_s[A] = how, 0.0
        servers.compute(prefix())
        pauses_s.append(servers.client._pause_s[A])
    assert pauses_s == [1.0, 2.0, 4.0, 0.0, 1.0]


def test_prompts_that_one_failure_cuts_short_count_as_one() -> None:
    servers = Servers({A: dead, B: dead})

    async def ask_at_once() -> None:
        await asyncio.gather(*(servers.client.compute(prefix()) for _ in range(7)), return_exceptions=True)

    asyncio.run(ask_at_once())
    assert servers.client._pause_s == {A: 1.0, B: 1.0}


def test_who_refuses_a_prompt_may_take_the_next() -> None:
    servers = Servers({A: refused, B: dead})
    servers.compute(prefix(), prefix())
    assert servers.hosts() == "aba"


def test_no_more_is_taken_as_stored_than_was_asked_for() -> None:
    servers = Servers({A: lambda _: httpx.Response(200, json={"stored_tokens": 10**9}), B: dead})
    assert servers.compute(prefix()) == [513]
