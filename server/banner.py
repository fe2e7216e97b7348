"""What a person reads when the server starts."""

import json
import logging
import os
import sys
from ipaddress import ip_address

from engine.core.config import EngineInfo
from engine.scheduling.cost.roofline import Roofline
from server.core.version import VERSION
from server.settings.settings import Settings

logger = logging.getLogger("twostep.server")

_TOY = (
    "No model was named: serving the embedded model, a toy whose answers are often wrong.\n"
    "For a real one name a checkpoint directory or a hub id: twostep serve Qwen/Qwen2.5-0.5B-Instruct"
)


def say(text: str) -> None:
    """On standard output. A reader that has gone, or a full disk, ends no server: nothing goes there from then on."""
    try:
        print(text, flush=True)
    except OSError as error:
        logger.warning("standard output cannot be written: %s", error.strerror)
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # for what is left in the buffer, which is tried again


def loading_banner(settings: Settings, url: str, address: str) -> str:
    """`address` is the one that it listens on."""
    lines = [f"twostep {VERSION}: loading {settings.model}; {url} answers 503 until it is loaded."]
    if settings.is_embedded_model:
        lines.insert(0, _TOY)
    if not (settings.api_key or settings.api_keys_file or ip_address(address).is_loopback):
        lines.append(f"{address} without a key: anyone who can reach it may use this server; --api-key asks for one.")
    return "\n".join(lines)


def ready_banner(settings: Settings, info: EngineInfo, url: str) -> str:
    kv_mib = info.kv_cache_bytes / 2**20
    rows = {
        "model": f"{', '.join(settings.model_names)} ({info.architecture}, {info.weight_bytes / 2**20:,.0f} MiB)",
        "engine": f"{info.dtype} on {info.device}; attention: {info.attention}; linear: {info.linear}",
        "memory": f"{info.num_blocks:,} KV blocks of {info.block_size} tokens = {info.kv_capacity_tokens:,} tokens "
        f"({kv_mib:,.0f} MiB); context {info.max_model_len:,}",
        "guesses": _guesses(settings, info),
        "machine": _machine(info),
        "listens": f"{url} (a live page; routes: {url}/docs, metrics: {url}/metrics)",
    }
    table = "\n".join(f"  {name:8}{text}" for name, text in rows.items())
    return (
        f"Ready. The model was loaded in {info.load_s:.1f} s. Ctrl-C ends it.\n{table}\nTry it:\n{_curl(settings, url)}"
    )


def _guesses(settings: Settings, info: EngineInfo) -> str:
    most, size = settings.num_speculative_tokens, info.draft_size
    weights = f", {settings.draft_quantization} weights ({size.weight_bytes / 2**20:,.0f} MiB)" if size else ""
    return f"at most {most} tokens ahead, from texts, grammars{weights}" if most else "none"


def _machine(info: EngineInfo) -> str:
    """Each step of a stream reads all weights."""
    ceilings, floor = info.ceilings, Roofline(info.size, info.ceilings).floor_of_first_token()
    return (
        f"reads {ceilings.read_bytes_per_s / 1e9:,.1f} GB/s, multiplies {ceilings.flops_per_s / 1e9:,.0f} GFLOP/s "
        f"({ceilings.dtype}); one stream: at most {1 / floor.seconds:,.0f} steps/s"
    )


def url_of(host: str, port: int) -> str:
    """Where a browser on this machine finds the server."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def _curl(settings: Settings, url: str) -> str:
    body = {"model": settings.model_names[0], "prompt": "A list is", "max_tokens": 32, "stream": True}
    secret = "$TWOSTEP_API_KEY" if settings.api_key == (os.environ.get("TWOSTEP_API_KEY"),) else "YOUR_KEY"
    key = f' -H "Authorization: Bearer {secret}"' if settings.api_key or settings.api_keys_file else ""
    data = json.dumps(body).replace("'", "'\\''")
    return f"  curl -N {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{data}'"
