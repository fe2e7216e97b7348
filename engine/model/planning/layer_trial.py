"""Times of steps, predicted: the first layers of a model run here with random weights, and stand for all.

Where the whole model is small, it runs whole. Of a larger one, two depths run in turns, one of each kind of layer and
a multiple of these, and each further layer takes what those between the two take.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
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

_MAX_LAYER_BYTES = 1 << 30  # of weights in 16 bits
_MAX_RUNS, _BUDGET_S = 21, 2.0


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
    num_prompts = max(1, config.limits_on("cpu").max_num_batched_tokens // prompt_tokens)
    shape = _Shape(prompt_tokens, -(-(prompt_tokens + 1) // config.block_size))
    try:
        trials = [_load(config, depth, shape, max(*clients, num_prompts)) for depth in depths]
        one, many = (_predicted(found, trials, Phase.PREFILL, count) for count in (1, num_prompts))
        decode = tuple(_predicted(found, trials, Phase.DECODE, count) for count in clients)
    except TwostepError:
        raise
    except Exception as error:  # of transformers' code, which builds the model
        raise ModelError(f"A part of {config.model} cannot be tried: {reason_of(error)}") from error
    return StepSeconds(one, many / num_prompts, decode)


def depths_of(found: Estimate) -> tuple[int, ...]:
    """Returns the number of layers of the model or models that are tried, in multiples of those that hold one of each
    kind."""
    period, total = found.num_distinct_layers, found.num_layers
    layer_bytes = (found.size.layer_bytes + found.size.expert_bytes) / total
    many = max(2, int(_MAX_LAYER_BYTES / layer_bytes) // period) * period
    return (total,) if many >= total else (period, many)


class _Shape(NamedTuple):
    """Of each request."""

    prompt_tokens: int
    num_blocks: int


class _Trial(NamedTuple):
    """A model of the first layers, ready to run."""

    num_layers: int
    runner: ModelRunner
    shape: _Shape
    num_slots: int
    """Of recurrent states; 0 without any."""

    def run(self, phase: Phase, count: int) -> float:
        """Runs a step of so many requests, and returns its seconds. What the cache holds changes nothing of these."""
        batch = Batch(phase, tuple(self._request(index, phase) for index in range(count)))
        run = self.runner.prefill if phase is Phase.PREFILL else self.runner.decode
        started_s = time.perf_counter()
        run(batch)
        return time.perf_counter() - started_s

    def _request(self, index: int, phase: Phase) -> ScheduledRequest:
        prompt = [index] * self.shape.prompt_tokens
        table = tuple(range(index * self.shape.num_blocks, (index + 1) * self.shape.num_blocks))
        start, output = (0, []) if phase is Phase.PREFILL else (len(prompt), [index])
        slot = index % self.num_slots if self.num_slots else None
        return ScheduledRequest(
            str(index), output or prompt, start, table, SamplingParams(), prompt, output, samples=True, state_slot=slot
        )


def _load(config: EngineConfig, num_layers: int, shape: _Shape, num_requests: int) -> _Trial:
    """Returns a model of so many layers, for requests of this shape."""
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
                max_model_len=shape.prompt_tokens + 1,
                num_blocks=num_requests * shape.num_blocks,
            )
        )
    return _Trial(num_layers, runner, shape, info.num_state_slots or 0)


def _predicted(found: Estimate, trials: Sequence[_Trial], phase: Phase, count: int) -> float:
    """Returns what such a step of all layers takes. The depths run in turns: what else the machine does meanwhile slows
    both."""
    for trial in trials:
        trial.run(phase, count)
    runs: list[list[float]] = []
    while not runs or (len(runs) < _MAX_RUNS and sum(map(sum, runs)) < _BUDGET_S):
        runs.append([trial.run(phase, count) for trial in trials])
    seconds: list[float] = [statistics.median(column) for column in zip(*runs, strict=True)]
    few, many = trials[0].num_layers, trials[-1].num_layers
    each = max(seconds[-1] - seconds[0], 0.0) / max(many - few, 1)
    return seconds[0] + (found.num_layers - few) * each
