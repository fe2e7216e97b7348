"""The product when something fails: answers go on over dead engines, and what cannot go on or start says why."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.soak.server import ROOT, ServerProcess, eventually, running_server

MANY: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.2, "top_p": 0.9, "seed": 3, "logprobs": 2},
    {"temperature": 0.9, "presence_penalty": 1.5, "repetition_penalty": 1.3, "seed": 4},
    {"temperature": 0, "echo": True, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.0, "min_tokens": 150, "stop": ["return", " a"], "include_stop_str_in_output": True, "seed": 6},
]


@pytest.mark.slow
def test_answers_do_not_depend_on_the_engines_deaths(tmp_path: Path) -> None:
    common = {"prompt": "The list of", "max_tokens": 1200, "ignore_eos": True, "return_token_ids": True}
    bodies = [{**common, **how} for how in MANY]
    with running_server("--trace", str(tmp_path / "trace")) as server, ThreadPoolExecutor(len(bodies)) as pool:
        undisturbed = list(pool.map(lambda body: server.complete(**body), bodies))
        disturbed = [pool.submit(server.complete, **body) for body in bodies]
        for num_restarts in range(1, 3):
            tokens = server.metrics()["twostep_generation_tokens_total"]
            assert becomes(server, "twostep_generation_tokens_total", lambda now, then=tokens: now > then + 60)
            server.kill_engine()
            assert becomes(server, "twostep_engine_restarts_total", lambda now, n=num_restarts: now == n)
        answers = [answer.result() for answer in disturbed]
        assert [answer["choices"] for answer in answers] == [answer["choices"] for answer in undisturbed]
        counts = [answer["usage"]["completion_tokens"] for answer in answers]
        assert counts == [answer["usage"]["completion_tokens"] for answer in undisturbed]
        assert eventually(server.is_idle, within_s=30)
        assert server.metrics()["twostep_generation_tokens_total"] == 2 * sum(counts)
        ready = f"{server.url}/ready"
        assert eventually(lambda: httpx.get(ready).json() == {"status": "ok"})  # after the second restart
        assert server.stop() == 0
    assert (tmp_path / "trace").read_text().startswith('{"end_unix_s":')


def becomes(server: ServerProcess, name: str, condition: Callable[[float], bool]) -> bool:
    return eventually(lambda: condition(server.metrics()[name]), within_s=120)


@pytest.mark.slow
def test_an_engine_that_is_given_up_is_reported() -> None:
    body = {"prompt": "Return the absolute", "max_tokens": 1500, "logprobs": 3, "ignore_eos": True, "stream": True}
    with running_server("--max-engine-restarts", "0") as server:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.kill_engine()
            *_, error, _, done, _ = lines
            assert '"error"' in error and done == "data: [DONE]"
        for path in ("/health", "/ready"):
            assert httpx.get(f"{server.url}{path}").status_code == 503
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}).status_code == 503
        assert server.stop() == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["/no/such/model"], "no such directory"),
        pytest.param(["--max-model-len", "100000"], "limit", marks=pytest.mark.slow),
        pytest.param(["--kv-cache-memory-bytes", "1KiB"], "KV cache", marks=pytest.mark.slow),
        (["--trace", "/no/such/dir/trace"], "trace"),
    ],
)
def test_what_cannot_start_says_why_in_one_sentence_and_exits_with_2(flags: list[str], words: str) -> None:
    command = [sys.executable, "-m", "server", "serve", *flags, "--port", "0"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert words in result.stderr and "Traceback" not in result.stderr
