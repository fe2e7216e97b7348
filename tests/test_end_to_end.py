"""The product as its users meet it: real processes, real sockets, the embedded model."""

import asyncio
import contextlib
import json
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest
import torch
from openai import OpenAI

from tests.resident_memory import resident_bytes
from tests.soak.server import ROOT, ServerProcess, eventually, running_server

MINE: dict[str, Any] = {"prompt": "Return the absolute", "max_tokens": 24, "logprobs": 3, "ignore_eos": True}
WEIGHT_BYTES = (ROOT / "engine" / "embedded_model" / "model.safetensors").stat().st_size


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server("--max-num-seqs", "16") as process:
        yield process
        assert process.stop(signal.SIGINT) == 0


def generated(answer: dict[str, Any]) -> Any:
    return answer["choices"][0]["text"], answer["choices"][0]["logprobs"]


@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 1.1, "top_p": 0.95, "seed": 5}])
def test_the_same_request_gets_the_same_answer_under_load(server: ServerProcess, how: dict[str, Any]) -> None:
    alone = generated(server.complete(**MINE, **how))
    others = [{"prompt": f"{index} is" * (index + 1), "max_tokens": 20, "seed": index} for index in range(24)]
    with ThreadPoolExecutor(26) as pool:
        busy = [pool.submit(server.complete, **other) for other in others]
        mine = [pool.submit(server.complete, **MINE, **how) for _ in range(2)]
        assert [generated(answer.result()) for answer in mine] == [alone, alone]
        assert all(answer.result()["usage"]["completion_tokens"] for answer in busy)


def test_sixty_four_streams_complete_and_counters_advance_by_exactly_their_tokens(server: ServerProcess) -> None:
    before = server.metrics()
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)

    def stream(index: int) -> tuple[int, int]:
        chunks = client.completions.create(
            model="embedded",
            prompt=[index, index + 1, index + 2],
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        usage = [chunk.usage for chunk in chunks if chunk.usage is not None][-1]
        return usage.prompt_tokens, usage.completion_tokens

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(stream, range(10, 74))) == [(3, 8)] * 64
    assert eventually(server.is_idle, within_s=30)
    after = server.metrics()
    for name, tokens in (("prompt", 3 * 64), ("generation", 8 * 64)):
        counter = f"twostep_{name}_tokens_total"
        assert after[counter] - before[counter] == tokens


def test_clients_that_hang_up_leave_nothing_behind(server: ServerProcess) -> None:
    asyncio.run(hang_up_everywhere(server.url))
    assert eventually(server.is_idle, within_s=30)
    assert server.complete(prompt="def", max_tokens=2)["usage"]["completion_tokens"] > 0


async def hang_up_everywhere(url: str) -> None:
    """Sends requests and hangs up: before the first token, after a few, and with a client that does not read; half of
    the requests are queued."""
    body = {"prompt": "The", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def leave_early(delay_s: float) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await client.post("/v1/completions", json={**body, "stream": False})

        async def leave_after_some(num_lines: int) -> None:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.aiter_lines()
                for _ in range(num_lines):
                    await anext(lines)
                await asyncio.sleep(0.5)  # reads no more for a while

        leavers = [leave_early(0.02 * index) for index in range(16)]
        await asyncio.gather(*leavers, *(leave_after_some(index % 5) for index in range(16)))


def test_phases_add_up_over_the_wire(server: ServerProcess) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json=MINE, timeout=300)
    timings = answer.json()["timings"]
    parts = timings["queue_ms"] + timings["prefill_ms"] + timings["decode_ms"]
    assert parts == pytest.approx(timings["e2e_ms"], abs=0.01)
    assert float(answer.headers["x-ttft-ms"]) == pytest.approx(timings["ttft_ms"], abs=0.01)


def test_a_text_far_too_long_is_refused_before_all_of_it_is_read(server: ServerProcess) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a lot of " * 500_000}, timeout=300)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "far beyond" in answer.text


def test_the_prompt_can_be_scored(server: ServerProcess) -> None:
    answer = server.complete(prompt=[50, 60, 70, 80], max_tokens=1, echo=True, logprobs=2, temperature=0)
    scores = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert len(scores) == 5 and scores[0] is None and all(score < 0 for score in scores[1:])


def test_a_chat_is_the_completion_of_its_rendered_prompt(server: ServerProcess) -> None:
    chat = {"messages": [{"role": "user", "content": "What is os.path?"}], "max_tokens": 24, "seed": 3}
    rendered = httpx.post(f"{server.url}/v1/chat/completions/render", json=chat, timeout=300).json()
    completed = server.complete(prompt=rendered["prompt_token_ids"], max_tokens=24, seed=3)
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(model="embedded", **chat)
        stream = client.chat.completions.create(model="embedded", stream=True, **chat)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert answer.choices[0].message.content == streamed == completed["choices"][0]["text"] != ""
    assert rendered["prompt"] == "<|im_start|>user\nWhat is os.path?<|im_end|>\n<|im_start|>assistant\n"


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Returns a schema whose values have an end, since a model may not end them itself."""
    kinds = ["string", "integer", "boolean", "enum", *(["array", "object"] if depth < 2 else [])]
    match "object" if depth == 0 else rng.choice(kinds):
        case "string":
            return {"type": "string", "maxLength": rng.randrange(8)}
        case "integer":
            return {"type": "integer", "minimum": -rng.randrange(99), "maximum": rng.randrange(99)}
        case "enum":
            return {"enum": rng.sample(["}", "</tool_call>", 1, None, "é", '"'], 2)}
        case "array":
            return {"type": "array", "items": random_schema(rng, depth + 1), "maxItems": 2}
        case "object":
            names = rng.sample(["a", "b b", "name", "arguments", "ü"], rng.randrange(4))
            properties = {name: random_schema(rng, depth + 1) for name in names}
            return {"type": "object", "properties": properties, "required": names[1:], "additionalProperties": False}
        case kind:
            return {"type": kind}


@pytest.mark.parametrize("seed", range(6))
def test_required_calls_are_valid_whatever_the_model(server: ServerProcess, seed: int) -> None:
    rng = random.Random(seed)
    schemas = {name: random_schema(rng) for name in ("find", "get-it")}
    tools: Any = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in schemas.items()]
    fields: dict[str, Any] = {"tools": tools, "parallel_tool_calls": False, "seed": seed, "temperature": 1.5}
    messages: Any = [{"role": "user", "content": "Go."}]
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        choose: Any = rng.choice(["required", {"type": "function", "function": {"name": "find"}}])
        asked = {"model": "embedded", "messages": messages, "tool_choice": choose, **fields}
        (whole,) = client.chat.completions.create(**asked).choices
        with client.chat.completions.stream(**asked) as stream:
            (streamed,) = stream.get_final_completion().choices
    made = []
    for choice in (whole, streamed):
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
        made.append((call.function.name, call.function.arguments))
    assert made[0] == made[1]


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch with CUDA is several times as large")
def test_the_engine_takes_little_more_than_weights_and_cache() -> None:
    with running_server("--dtype", "bfloat16", "--kv-cache-memory-bytes", "16MiB") as server:
        for how in ({"temperature": 0}, {"structured_outputs": {"regex": "[a-z ]*"}}):
            server.complete(prompt="Return the " * 500, max_tokens=20, **how)
        engine_pid = server.engine_pid
        assert engine_pid is not None and resident_bytes(engine_pid) <= WEIGHT_BYTES + (16 << 20) + 400e6
        assert server.stop() == 0
