"""A server in a process of its own, asked over a real socket and looked into from outside."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parent.parent
SETTLE_S = 30.0  # generous: the machine may be busy; what is tested is that it settles at all
MINE: dict[str, Any] = {"prompt": "Return the absolute", "max_tokens": 24, "logprobs": 3, "ignore_eos": True}


def start(*flags: str) -> tuple[subprocess.Popen[str], str]:
    """A server on a free port, once it is ready."""
    command = [sys.executable, "-m", "server", "serve", "--port", "0", "--log-level", "warning", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("  listens "):
            return process, line.split()[1]
    raise AssertionError("the server never got ready")


def complete(url: str, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/completions", json=fields, timeout=300)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def metrics(url: str) -> dict[str, float]:
    """Every sample without labels, and the block states."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    plain = {sample.name: sample.value for sample in samples if not sample.labels}
    blocks = {f"blocks_{s.labels['state']}": s.value for s in samples if s.name == "twostep_kv_blocks"}
    return plain | blocks


def is_idle(url: str) -> bool:
    now = metrics(url)
    busy = ("twostep_requests_running", "twostep_requests_waiting", "blocks_held")
    return all(now[name] == 0 for name in busy)


def settles(url: str) -> bool:
    deadline_s = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline_s:
        if is_idle(url):
            return True
        time.sleep(0.05)
    return False


def engine_pids(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if "engine.process" in Path(f"/proc/{pid}/cmdline").read_text()]


def stop(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    return process.returncode
