"""The server's Prometheus metrics that can be compared with what the client saw."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import isfinite

import httpx

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(\{.*\})?[ \t]+([^ \t]+)", re.ASCII)
_PREFIXES = ("twostep_", "vllm:")  # the first that has both counters is read
# An abort takes effect after the current step, which may take seconds.
_SETTLE_WAITS_S = (0.05, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


@dataclass(frozen=True)
class Snapshot:
    """Counters and gauges at one moment; None for a gauge that the server does not export."""

    prompt_tokens: float
    generation_tokens: float
    num_running: float | None = None
    num_waiting: float | None = None
    num_held_blocks: float | None = None

    @property
    def leftovers(self) -> dict[str, float]:
        """The gauges, by name, that are not 0 although they should be on a server without requests."""
        gauges = {"running": self.num_running, "waiting": self.num_waiting, "held blocks": self.num_held_blocks}
        return {name: value for name, value in gauges.items() if value}


def parse_snapshot(text: str) -> Snapshot | None:
    """Returns the snapshot in a /metrics text, summed over label sets; None if it has no token counters."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        name, labels, value = match[1], match[2] or "", _float(match[3])
        sums[name] = sums.get(name, 0.0) + value
        if 'state="held"' in labels:
            sums[f"{name}/held"] = sums.get(f"{name}/held", 0.0) + value
    for prefix in _PREFIXES:
        prompt, generation = sums.get(f"{prefix}prompt_tokens_total"), sums.get(f"{prefix}generation_tokens_total")
        if prompt is not None and generation is not None:
            running, waiting = (
                sums.get(f"{prefix}requests_{state}", sums.get(f"{prefix}num_requests_{state}"))
                for state in ("running", "waiting")
            )
            return Snapshot(prompt, generation, running, waiting, sums.get(f"{prefix}kv_blocks/held"))
    return None


def _float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if isfinite(value) else 0.0


async def read_snapshot(client: httpx.AsyncClient) -> Snapshot | None:
    """Reads /metrics; None if the server has no token counters there."""
    try:
        response = await client.get("/metrics")
    except httpx.HTTPError:
        return None
    return parse_snapshot(response.text) if response.is_success else None


async def settled_snapshot(read: Callable[[], Awaitable[Snapshot | None]]) -> Snapshot | None:
    """Returns the first snapshot that equals the one before it and shows an idle server, or the last one taken.

    Counters may trail the last answer by a step; a server with other clients never settles.
    """
    previous = await read()
    for wait_s in _SETTLE_WAITS_S:
        if previous is None:
            return None
        await asyncio.sleep(wait_s)
        snapshot = await read()
        if snapshot == previous and not previous.leftovers:
            return snapshot
        previous = snapshot
    return previous
