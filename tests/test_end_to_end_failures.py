"""The product when something fails: answers go on over dead engines, and what cannot go on or start says why."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.real_server import MINE, ROOT, SETTLE_S, complete, engine_pids, metrics, settles, start, stop
from tests.soak.server import eventually


def kill_engine(process: subprocess.Popen[str]) -> None:
    for pid in engine_pids(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


MANY: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.2, "top_p": 0.9, "seed": 3, "logprobs": 2},
    {"temperature": 0.9, "presence_penalty": 1.5, "repetition_penalty": 1.3, "seed": 4},
    {"temperature": 0, "echo": True, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.0, "min_tokens": 150, "stop": ["return", " a"], "include_stop_str_in_output": True, "seed": 6},
]


def test_answers_do_not_depend_on_the_engines_deaths(tmp_path: Path) -> None:
    process, url = start("--trace", str(tmp_path / "trace"))
    common = {"prompt": "The list of", "max_tokens": 1200, "ignore_eos": True, "return_token_ids": True}
    bodies = [{**common, **how} for how in MANY]
    try:
        with ThreadPoolExecutor(len(bodies)) as pool:
            undisturbed = list(pool.map(lambda body: complete(url, **body), bodies))
            disturbed = [pool.submit(complete, url, **body) for body in bodies]
            for num_restarts in range(1, 3):
                tokens = metrics(url)["twostep_generation_tokens_total"]
                assert becomes(url, "twostep_generation_tokens_total", lambda now, then=tokens: now > then + 60)
                kill_engine(process)
                assert becomes(url, "twostep_engine_restarts_total", lambda now, n=num_restarts: now == n)
            answers = [answer.result() for answer in disturbed]
        assert [answer["choices"] for answer in answers] == [answer["choices"] for answer in undisturbed]
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [
            answer["usage"]["completion_tokens"] for answer in undisturbed
        ]
        assert settles(url)
        assert metrics(url)["twostep_generation_tokens_total"] == 2 * sum(
            answer["usage"]["completion_tokens"] for answer in answers
        )
        assert eventually(lambda: httpx.get(f"{url}/ready").json() == {"status": "ok"})  # after the second restart
    finally:
        assert stop(process) == 0
    assert (tmp_path / "trace").read_text().startswith('{"end_s":')


def becomes(url: str, name: str, condition: Any) -> bool:
    deadline_s = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline_s:
        if condition(metrics(url)[name]):
            return True
        time.sleep(0.02)
    return False


def test_an_engine_that_is_given_up_is_said_and_not_hidden() -> None:
    process, url = start("--max-engine-restarts", "0")
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json={**MINE, "max_tokens": 1500, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            kill_engine(process)
            *_, error, _, done, _ = lines
            assert '"error"' in error and done == "data: [DONE]"
        for path in ("/health", "/ready"):
            assert httpx.get(f"{url}{path}").status_code == 503
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 503
    finally:
        assert stop(process) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["/no/such/model"], "no such directory"),
        (["--max-model-len", "100000"], "limit"),
        (["--kv-cache-memory-bytes", "1KiB"], "KV cache"),
        (["--trace", "/no/such/dir/trace"], "trace"),
    ],
)
def test_what_cannot_start_says_why_in_one_sentence_and_exits_with_2(flags: list[str], words: str) -> None:
    command = [sys.executable, "-m", "server", "serve", *flags, "--port", "0"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert words in result.stderr and "Traceback" not in result.stderr
