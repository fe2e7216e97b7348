"""Times of steps, predicted: the first layers of a model run here with random weights, and stand for all.

Where the whole model is small, it runs whole. Of a larger one, two depths run, and each further layer takes what those
between the two take. Both hold more bytes than caches do, and one of each kind of layer.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from engine.core.batch import Batch, Phase, ScheduledRequest
from engine.core.config import EngineConfig
from engine.core.errors import ModelError, TwostepError, reason_of
from engine.core.sampling_params import SamplingParams
from engine.model.first_layers import keep_layers
from engine.model.loader import read_hf_config
from engine.model.planning.estimate import Estimate
from engine.model.setup import load_model_runner
from engine.runner.model_runner import ModelRunner

__all__ = ["StepSeconds", "depths_of", "predict_steps"]

_MAX_LAYER_BYTES = 1 << 29  # of weights in 16 bits
_MAX_RUNS, _BUDGET_S = 9, 0.5


class StepSeconds(NamedTuple):
    """What steps take."""

    prompt_s: float
    """Of one prompt."""
    prompts_s: float
    """Of each of as many prompts as a step takes."""
    decode_s: tuple[float, ...]
    """Of a token of each request, for each number of requests."""


def predict_steps(config: EngineConfig, found: Estimate, prompt_tokens: int, clients: Sequence[int]) -> StepSeconds:
    """Returns what steps of prompts of this length take, and of tokens after them, for each number of clients. Takes
    memory and time for a few layers and the head. Raises ModelError or ConfigError."""
    depths = depths_of(found)
    try:
        measured = [_measure(config, depth, prompt_tokens, clients) for depth in depths]
    except TwostepError:
        raise
    except Exception as error:  # of transformers' code, which builds the model
        raise ModelError(f"A part of {config.model} cannot be tried: {reason_of(error)}") from error
    few, many = measured[0], measured[-1]
    share = (found.num_layers - depths[0]) / (depths[1] - depths[0]) if len(depths) == 2 else 0.0

    def whole(one: float, other: float) -> float:
        return one + share * max(other - one, 0.0)

    return StepSeconds(
        whole(few.prompt_s, many.prompt_s),
        whole(few.prompts_s, many.prompts_s),
        tuple(map(whole, few.decode_s, many.decode_s)),
    )


def depths_of(found: Estimate) -> tuple[int, ...]:
    """Returns the number of layers of the model or models that are tried, in multiples of those that hold one of each
    kind."""
    period, total = found.num_distinct_layers, found.num_layers
    layer_bytes = (found.size.layer_bytes + found.size.expert_bytes) / total
    many = max(2, int(_MAX_LAYER_BYTES / layer_bytes) // period) * period
    return (total,) if many >= total else (max(many // 2 // period, 1) * period, many)


def _measure(config: EngineConfig, num_layers: int, prompt_tokens: int, clients: Sequence[int]) -> StepSeconds:
    """Returns what steps of a model of so many layers take."""
    num_prompts = max(1, config.limits_on("cpu").max_num_batched_tokens // prompt_tokens)
    blocks_each = -(-(prompt_tokens + 1) // config.block_size)
    runner, num_slots = _load(config, num_layers, prompt_tokens + 1, max(*clients, num_prompts) * blocks_each)

    def batch(phase: Phase, count: int) -> Batch:
        requests = (_request(index, phase, prompt_tokens, blocks_each, num_slots) for index in range(count))
        return Batch(phase, tuple(requests))

    one, many = (_seconds(runner.prefill, batch(Phase.PREFILL, count)) for count in (1, num_prompts))
    return StepSeconds(
        one, many / num_prompts, tuple(_seconds(runner.decode, batch(Phase.DECODE, count)) for count in clients)
    )


def _load(config: EngineConfig, num_layers: int, length: int, num_blocks: int) -> tuple[ModelRunner, int]:
    """Returns the runner of a model of so many layers, for texts of this length, and its number of slots of states."""
    hf_config, _ = read_hf_config(config, {"revision": config.revision, "trust_remote_code": False})
    keep_layers(hf_config.get_text_config(decoder=True), num_layers)
    with tempfile.TemporaryDirectory(prefix="twostep-") as folder:
        hf_config.save_pretrained(folder)
        runner, info = load_model_runner(
            msgspec.structs.replace(
                config,
                model=folder,
                revision=None,
                load_format="dummy",
                device="cpu",
                packed_cache=None,
                max_model_len=length,
                num_blocks=num_blocks,
            )
        )
    return runner, info.num_state_slots or 0


def _request(index: int, phase: Phase, prompt_tokens: int, blocks_each: int, num_slots: int) -> ScheduledRequest:
    """Returns a request's share of a step. What the cache holds changes nothing of its time."""
    prompt, table = [index] * prompt_tokens, tuple(range(index * blocks_each, (index + 1) * blocks_each))
    start, output = (0, []) if phase is Phase.PREFILL else (prompt_tokens, [index])
    slot = index % num_slots if num_slots else None
    return ScheduledRequest(
        str(index), output or prompt, start, table, SamplingParams(), prompt, output, samples=True, state_slot=slot
    )


def _seconds(run: Callable[[Batch], object], batch: Batch) -> float:
    """Returns the median time of a step that runs once or a few times, after a first one."""
    run(batch)
    runs: list[float] = []
    while not runs or (len(runs) < _MAX_RUNS and sum(runs) < _BUDGET_S):
        started_s = time.perf_counter()
        run(batch)
        runs.append(time.perf_counter() - started_s)
    return statistics.median(runs)
