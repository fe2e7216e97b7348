"""The text on standard output when the server starts and when the model is loaded."""

import json
import logging
import os
import shlex
import sys
from ipaddress import ip_address

from engine.core.config import EngineInfo, StepLimits
from engine.scheduling.cost.roofline import Roofline
from server.core.version import VERSION
from server.settings.settings import Settings

logger = logging.getLogger("twostep.server")

UDS_URL = "http://localhost"
"""The URL under which a client asks over a Unix socket; the host does not count."""
_TOY = (
    "No model was named: serving the embedded model, a toy whose answers are often wrong.\n"
    "For a real one name a checkpoint directory or a hub id: twostep serve Qwen/Qwen2.5-0.5B-Instruct"
)


def say(text: str) -> None:
    """Prints a text on standard output. If that fails (a closed pipe, a full disk), the server goes on, and later texts
    are discarded."""
    try:
        print(text, flush=True)
    except OSError as error:
        logger.warning("standard output cannot be written: %s", error.strerror)
        with open(os.devnull, "wb") as devnull:
            os.dup2(devnull.fileno(), sys.stdout.fileno())  # the rest of the buffer is flushed again, at exit at last


def loading_banner(settings: Settings, url: str, address: str | None) -> str:
    """Returns the text for the time while the model loads. `address` is the IP address that the server listens on; None
    for a Unix socket."""
    lines = [f"twostep {VERSION}: loading {settings.model}; {url} answers 503 until it is loaded."]
    if settings.is_embedded_model:
        lines.insert(0, _TOY)
    has_keys = settings.api_key or settings.api_keys_file
    if not has_keys and address is not None and not ip_address(address).is_loopback:
        lines.append(f"{address} without a key: anyone who can reach it may use this server; --api-key asks for one.")
    return "\n".join(lines)


def ready_banner(settings: Settings, info: EngineInfo, url: str) -> str:
    """Returns the text for when the model is loaded."""
    rows = {
        "model": f"{', '.join(settings.model_names)} ({info.architecture}, {_weights(info)})",
        "engine": f"{info.dtype} on {_devices(info)}; forward pass: {info.forward}; "
        f"attention: {info.attention}; linear: {info.linear}",
        "memory": _memory(info),
        "steps": _steps(settings.engine_config().limits_on(info.device)),
        "drafts": _drafts(settings, info),
        "machine": _machine(info),
        "listens": f"{settings.uds or url} (a live page; routes: {url}/docs, metrics: {url}/metrics)",
    }
    table = "\n".join(f"  {name:8}{text}" for name, text in rows.items())
    return (
        f"Ready. The model was loaded in {info.load_s:.1f} s. Ctrl-C ends it.\n{table}\nTry it:\n{_curl(settings, url)}"
    )


def _weights(info: EngineInfo) -> str:
    """Returns how large the weights are, and that they are random if they are."""
    size = f"{info.weight_bytes / 2**20:,.0f} MiB"
    return f"{size} of dummy weights: random, answers mean nothing" if info.load_format == "dummy" else size


def _steps(limits: StepLimits) -> str:
    """Returns what is computed at once."""
    return (
        f"at most {limits.max_num_seqs:,} requests at once, {limits.max_num_batched_tokens:,} tokens of prompts; "
        f"prompts of others make gaps of {limits.target_itl_ms:g} ms"
    )


def _devices(info: EngineInfo) -> str:
    """Returns where the model runs, and in how many processes."""
    return info.device if info.tensor_parallel_size == 1 else f"{info.device}, {info.tensor_parallel_size} ranks"


def _memory(info: EngineInfo) -> str:
    """Returns what the KV cache and the recurrent states hold and take."""
    kv = f"{info.num_blocks:,} KV blocks of {info.block_size} tokens = {info.kv_capacity_tokens:,} tokens"
    kv_mib = info.kv_cache_bytes / 2**20
    text = (
        f"{kv} ({kv_mib:,.0f} MiB of {info.kv_cache_dtype}, {info.kv_bytes_per_token:,} bytes a token); "
        f"context {info.max_model_len:,}{_windows(info)}"
    )
    if info.num_state_slots is None:
        return text
    states_mib, num_copies = info.state_bytes_per_request / 2**20, info.num_state_checkpoints
    copies = f"{num_copies:,} copies for the prefix cache" if num_copies else "no prefix cache"
    return f"{text}; states of {info.num_state_slots} requests, {states_mib:,.1f} MiB each; {copies}"


def _windows(info: EngineInfo) -> str:
    """Returns what the longest context takes where layers see a window of it; nothing for other models."""
    if not any(each.window is not None for each in info.size.attention):
        return ""
    if info.kv_groups.window is None:
        return ", no blocks before windows given back"
    most_mib = info.max_kv_bytes_per_context / 2**20
    return f" in at most {most_mib:,.0f} MiB: blocks before windows of {info.kv_groups.window:,} are given back"


def _drafts(settings: Settings, info: EngineInfo) -> str:
    """Returns what speculative decoding uses."""
    most, size = settings.num_speculative_tokens, info.draft_size
    text = f"at most {most} tokens, from texts, predictions, grammars" if most else "none"
    if size is None:
        return text
    weights_mib, kv_mib = size.weight_bytes / 2**20, info.draft_kv_bytes / 2**20
    if info.has_head and settings.draft_model is None:  # its embeddings and language-model head are the model's
        own_mib = weights_mib - size.head_bytes / 2**20
        return f"{text}, the checkpoint's MTP head ({own_mib:,.0f} MiB, and {kv_mib:,.0f} MiB of the KV blocks)"
    if settings.draft_model is None:
        return f"{text}, {settings.draft_quantization} weights ({weights_mib:,.0f} MiB)"
    return f"{text}, {settings.draft_model} ({weights_mib:,.0f} MiB, and {kv_mib:,.0f} MiB of the KV blocks)"


def _machine(info: EngineInfo) -> str:
    """Returns the measured peaks, and the decode steps per second that they allow one stream, which reads all weights
    in each step."""
    if info.ceilings.is_in_doubt:
        return "was busy when it was measured: what steps take at best is not known until the engine rests"
    ceilings, floor = info.ceilings, Roofline(info.size, info.ceilings).floor_of_first_token()
    return (
        f"reads {ceilings.read_bytes_per_s / 1e9:,.1f} GB/s from {ceilings.read_from}, "
        f"multiplies {ceilings.flops_per_s / 1e9:,.0f} GFLOP/s ({ceilings.dtype}); "
        f"one stream: at most {1 / floor.seconds:,.0f} steps/s"
    )


def url_of(host: str, port: int) -> str:
    """Returns the URL at which a browser on this machine finds the server."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def _curl(settings: Settings, url: str) -> str:
    body = {"model": settings.model_names[0], "prompt": "A list is", "max_tokens": 32, "stream": True}
    secret = "$TWOSTEP_API_KEY" if settings.api_key == (os.environ.get("TWOSTEP_API_KEY"),) else "YOUR_KEY"
    key = f' -H "Authorization: Bearer {secret}"' if settings.api_key or settings.api_keys_file else ""
    data = json.dumps(body).replace("'", "'\\''")
    file = f"--unix-socket {shlex.quote(str(settings.uds))} " if settings.uds else ""
    return f"  curl -N {file}{url}/v1/completions{key} -H 'Content-Type: application/json' -d '{data}'"
