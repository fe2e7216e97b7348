"""A burst of requests, measured: the load test sends it to a server, and its times are the clients'.

One to the embedded model, whose steps are short, shows what serving adds to a model's steps.
"""

import json
import os
import subprocess
from typing import Any

from engine.core.step_seconds import StepSeconds, seconds_at
from engine.host.python_module import module_command
from twostep.commands.burst import Burst, ServingSeconds
from twostep.commands.endpoint import Endpoint, EndpointError, open_endpoint

__all__ = ["EMBEDDED_PROMPT_TOKENS", "WITHOUT_DRAFTS", "send", "serving_seconds"]

WITHOUT_DRAFTS = ("--num-speculative-tokens", "0")
"""Flags of a server whose steps yield one token of each request."""
EMBEDDED_PROMPT_TOKENS, _OUTPUT_TOKENS = 32, 64
_MANY = 32
_MAX_WARMUPS = 4


def serving_seconds(steps: StepSeconds) -> ServingSeconds:
    """Returns what serving adds on this machine. `steps` are those of the embedded model, for prompts of
    EMBEDDED_PROMPT_TOKENS. Takes a few seconds. Raises EndpointError."""
    with open_endpoint("embedded", WITHOUT_DRAFTS) as endpoint:
        one, many = (send(Burst(count, EMBEDDED_PROMPT_TOKENS, _OUTPUT_TOKENS), endpoint) for count in (1, _MANY))
    one_s, many_s = (
        max(_median_s(seen, "itl_ms") - seconds_at(steps.decode, count), 0.0)
        for seen, count in ((one, 1), (many, _MANY))
    )
    token_s = max(many_s - one_s, 0.0) / (_MANY - 1)
    step_s = max(one_s - token_s, 0.0)
    request_s = _median_s(one, "ttft_ms") - seconds_at(steps.prefill, EMBEDDED_PROMPT_TOKENS) - step_s - token_s
    return ServingSeconds(step_s, token_s, max(request_s, 0.0))


def _median_s(summary: dict[str, Any], name: str) -> float:
    return float(summary[name]["p50"]) / 1e3


def send(burst: Burst, endpoint: Endpoint) -> dict[str, Any]:
    """Returns the load test's summary of a burst of requests, after a few like it. Raises EndpointError."""
    flags = {
        "--concurrency": burst.clients,
        "--requests": burst.clients,
        "--warmup": min(burst.clients, _MAX_WARMUPS),
        "--prompt-len": burst.prompt_tokens,
        "--max-tokens": burst.output_tokens,
        "--json": "-",
    }
    command = [*module_command("loadtest"), endpoint.url, "--quiet"]
    command += [str(part) for flag in flags.items() for part in flag]
    environment = {**os.environ, "TWOSTEP_API_KEY": endpoint.api_key or ""}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ended.returncode and not ended.stdout:
        raise EndpointError(f"The load test failed: {ended.stderr.strip()}")
    [summary] = json.loads(ended.stdout.splitlines()[-1])["urls"][0]["groups"].values()
    if summary["failures"]:
        raise EndpointError(f"Requests of the load test failed: {next(iter(summary['failures'].values()))}")
    return dict(summary)
