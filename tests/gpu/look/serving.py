"""Stage: the whole server. Texts alone and under load, its speed under load, the engine killed, a CUDA error in it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.gpu.look.report import Look
from tests.soak.server import ROOT, ServerProcess, running_server

_KV_CACHE = ("--kv-cache-memory-bytes", "1GiB")  # enough for a small model, and other stages may run beside it
_TRIGGER = "TWOSTEP_TEST_POISON"
_POISON = '''"""Put on the path of a server under test: the process makes a CUDA error whose id a file has."""
import os, sys, threading, time

def poison():
    path = os.environ["TWOSTEP_TEST_POISON"]
    while not os.path.exists(path) or open(path).read() != str(os.getpid()):
        time.sleep(0.02)
    import torch
    print("an error is made on the device", file=sys.stderr, flush=True)
    torch._assert_async(torch.zeros(1, device="cuda"))

if any("engine.process" in word for word in sys.orig_argv):
    threading.Thread(target=poison, daemon=True).start()
'''
_HOW: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.9, "seed": 1},
    {"temperature": 1.1, "seed": 2, "presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"9": 1.5}},
    {"temperature": 0.8, "seed": 3, "structured_outputs": {"regex": "[a-z ]{20,60}"}},
    {"temperature": 0.7, "seed": 4, "top_k": 12, "min_p": 0.02},
)
_PROMPTS = ("A list is", "def main(", "The quick brown fox", "import os\n", "In the beginning")


def run(look: Look) -> None:
    with tempfile.TemporaryDirectory() as folder, _poisonable(Path(folder)) as trigger:
        started_s = time.perf_counter()
        with running_server("--device", look.device.type, *_KV_CACHE) as server:
            look.report("ready after", time.perf_counter() - started_s, "s")
            info = httpx.get(f"{server.url}/server_info", timeout=30).json()
            look.report(
                "engine", " ".join(str(info["engine"][name]) for name in ("device", "dtype", "forward", "attention"))
            )
            _look_at_load(look, server)
            _look_at_death(look, server, "killed", lambda: os.kill(server.engine_pid or 0, signal.SIGKILL))
            if not look.is_small:
                _look_at_death(look, server, "CUDA error", lambda: trigger.write_text(str(server.engine_pid)))
            look.check("idle afterwards", server.is_idle())


@contextmanager
def _poisonable(folder: Path) -> Iterator[Path]:
    """Yields the path of a file: the engine whose process id is written there makes an error on its device."""
    (folder / "sitecustomize.py").write_text(_POISON)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), before)))
    os.environ[_TRIGGER] = str(folder / "now")
    try:
        yield folder / "now"
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _requests(look: Look) -> list[dict[str, Any]]:
    num_tokens = 16 if look.is_small else 64
    return [
        {
            "prompt": prompt,
            "max_tokens": num_tokens,
            "logprobs": 2,
            **how,
            "ignore_eos": "structured_outputs" not in how,
        }
        for prompt in _PROMPTS[: 2 if look.is_small else None]
        for how in _HOW
    ]


def _choices(server: ServerProcess, requests: list[dict[str, Any]], at_once: int) -> list[Any]:
    """Returns the answers, with their log-probabilities, to requests of which several run at once."""

    def ask(request: dict[str, Any]) -> Any:
        return server.complete(**request)["choices"]

    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(ask, requests))


def _look_at_load(look: Look, server: ServerProcess) -> None:
    requests = _requests(look)
    alone = _choices(server, requests, 1)
    for clients in (2, 4) if look.is_small else (1, 16, 64):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "load.json"
            process = _start_load(server, clients, path, look)
            time.sleep(1)
            beside = _choices(server, requests, 8)
            process.wait()
            differing = sum(one != other for one, other in zip(alone, beside, strict=True))
            look.check(f"answers beside {clients} clients", differing == 0, f"{differing} of {len(alone)} differ")
            _report_load(look, clients, json.loads(path.read_text()))


def _start_load(server: ServerProcess, clients: int, path: Path, look: Look) -> "subprocess.Popen[bytes]":
    command = [
        sys.executable,
        "-m",
        "loadtest",
        server.url,
        "--concurrency",
        str(clients),
        "--json",
        str(path),
        "--quiet",
    ]
    sizes = {"--prompt-len": 512, "--output-len": 128, "--duration": 10} if not look.is_small else {"--requests": 6}
    command += [str(word) for pair in sizes.items() for word in pair]
    with (look.out / f"loadtest_{clients}.log").open("w") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


def _report_load(look: Look, clients: int, document: dict[str, Any]) -> None:
    group = document["urls"][0]["groups"]["all"]
    ends = group["requests"]
    look.check(f"{clients} clients: all were answered", ends["total"] == ends["ok"], f"{ends['ok']} of {ends['total']}")
    look.report(f"{clients} clients: throughput", json.dumps(group["throughput"]))
    for name in ("ttft_ms", "itl_ms"):
        times = group[name] or {}
        look.report(f"{clients} clients: {name} p50, p99", f"{times.get('p50', 0):.2f}, {times.get('p99', 0):.2f}")


def _look_at_death(look: Look, server: ServerProcess, name: str, kill: Any) -> None:
    """Checks that streams go on, with the same tokens, when the engine dies amidst them."""
    num_tokens = 400 if look.is_small else 900
    bodies = [
        {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "return_token_ids": True, "seed": 7, **how}
        for prompt in _PROMPTS[:2]
        for how in _HOW[:3]
    ]
    expected = [each[0]["token_ids"] for each in _choices(server, bodies, 1)]
    with ThreadPoolExecutor(len(bodies)) as threads:
        streams = [threads.submit(_streamed, server, body) for body in bodies]
        time.sleep(0.3)
        started_s, before = time.perf_counter(), server.engine_pid
        kill()
        found = [stream.result() for stream in streams]
    seconds = time.perf_counter() - started_s
    differing = sum(one != other for one, other in zip(expected, found, strict=True))
    look.check(f"{name}: another engine took over", server.engine_pid not in (None, before))
    look.check(
        f"{name}: streams went on", differing == 0, f"{differing} of {len(found)} differ, ended after {seconds:.1f} s"
    )


def _streamed(server: ServerProcess, body: dict[str, Any]) -> list[int]:
    token_ids: list[int] = []
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                token_ids += (json.loads(line[6:]).get("choices") or [{}])[0].get("token_ids") or []
    return token_ids
