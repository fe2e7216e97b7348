"""How far `twostep plan --measure` is from what clients see: its predictions beside a load test of the same bursts."""

import argparse
import statistics
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.command import exit_with
from engine.model.planning.estimate import estimate
from loadtest.numbers import positive
from server.settings.settings import EMBEDDED_MODEL, EMBEDDED_MODEL_DIR
from twostep.commands.burst import Burst, BurstTimes
from twostep.commands.endpoint import Endpoint, open_endpoint
from twostep.commands.measured_burst import WITHOUT_DRAFTS, send
from twostep.commands.plan import CLIENTS, predictions


class Comparison(NamedTuple):
    """What was predicted of a burst, and what its clients saw."""

    clients: int
    predicted: BurstTimes
    measured: BurstTimes


def comparisons(model: str, quantization: str, each: Burst, rounds: int) -> Iterator[Comparison]:
    """Predicts and measures bursts of requests like this one, by turns, so that a machine's moods change both; medians
    count. A server of random weights takes the model's place where it is not the embedded one: their values cost
    nothing."""
    is_embedded = model == EMBEDDED_MODEL
    path = str(EMBEDDED_MODEL_DIR) if is_embedded else model
    weights = () if is_embedded else ("--load-format", "dummy")
    found, bursts = estimate(path), [each._replace(clients=clients) for clients in CLIENTS]
    predicted, seen = [], []
    with open_endpoint(model, ("--quantization", quantization, *weights, *WITHOUT_DRAFTS)) as endpoint:
        for _ in range(rounds):
            predicted.append(predictions(path, None, found, each)(quantization))
            seen.append([_seen(burst, endpoint) for burst in bursts])
    for clients, told, saw in zip(CLIENTS, zip(*predicted, strict=True), zip(*seen, strict=True), strict=True):
        yield Comparison(clients, _medians(told), _medians(saw))


def _seen(burst: Burst, endpoint: Endpoint) -> BurstTimes:
    seen = send(burst, endpoint)
    return BurstTimes(
        seen["ttft_ms"]["max"] / 1e3, seen["tpot_ms"]["mean"] / 1e3, seen["throughput"]["output_tokens_per_s"]
    )


def _medians(times: Iterable[BurstTimes]) -> BurstTimes:
    return BurstTimes(*map(statistics.median, zip(*times, strict=True)))


def row(model: str, found: Comparison) -> tuple[str, ...]:
    """Returns the cells of a comparison: what was predicted, what was measured, and the first over the second."""
    scales = (1.0, 1e3, 1.0)
    pairs = zip(found.predicted, found.measured, scales, strict=True)
    cells = ((f"{scale * told:,.2f}", f"{scale * seen:,.2f}", _ratio(told, seen)) for told, seen, scale in pairs)
    return (model, str(found.clients), *(cell for times in cells for cell in times))


def _ratio(told: float, seen: float) -> str:
    """Returns a dash where nothing was measured, as of gaps between tokens that all come at once."""
    return f"{told / seen:.2f}" if seen else "-"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans", description=__doc__)
    parser.add_argument(
        "--models", nargs="+", default=[EMBEDDED_MODEL], help="checkpoints (default: the embedded model)"
    )
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4"))
    parser.add_argument("--prompt-tokens", type=positive, default=128)
    parser.add_argument("--output-tokens", type=positive, default=64)
    parser.add_argument("--rounds", type=positive, default=3, help="of predictions and bursts (default: 3)")
    options = parser.parse_args(arguments)
    quantities = ("last TTFT (s)", "mean ITL (ms)", "tokens/s")
    heads = [head for name in quantities for head in (f"{name}: told", "seen", "ratio")]
    table = Table("model", "clients", *heads, title="twostep plan --measure beside a load test")
    each = Burst(1, options.prompt_tokens, options.output_tokens)
    for model in options.models:
        for found in comparisons(model, options.quantization, each, options.rounds):
            table.add_row(*row(model, found))
    Console(width=160).print(table)
    return 0


if __name__ == "__main__":
    exit_with(main)
