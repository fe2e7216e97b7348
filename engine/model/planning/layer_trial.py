"""Times of steps, predicted: the first layers of a model run here with random weights, and stand for all.

Where the whole model is small, it runs whole. Of a larger one, two depths run in turns, one of each kind of layer and
a multiple of these, and each further layer takes what those between the two take.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from engine.core.batch import Batch, Phase, ScheduledRequest
from engine.core.config import EngineConfig
from engine.core.errors import ModelError, TwostepError, reason_of
from engine.core.sampling_params import SamplingParams
from engine.core.step_seconds import StepSeconds
from engine.model.loading.hf_config import read_hf_config
from engine.model.planning.estimate import Estimate
from engine.model.setup import load_model_runner
from engine.model.small_copy import keep_layers
from engine.runner.model_runner import ModelRunner

__all__ = ["depths_of", "predict_steps"]

_MAX_LAYER_BYTES = 1 << 30  # of weights in 16 bits
_MAX_RUNS, _BUDGET_S = 21, 1.5
_MIN_CHUNK = 16
_STRIDE = 7919  # a prime: neighbours are different tokens
_PARAMS = SamplingParams()


def predict_steps(config: EngineConfig, found: Estimate, prompt_tokens: int, max_clients: int) -> StepSeconds:
    """Returns what steps of prompts of this length take, and of tokens after them, for up to so many clients. Takes
    memory and time for a few layers and the head. Raises ModelError or ConfigError."""
    depths, shape = depths_of(found), _Shape(prompt_tokens, -(-(prompt_tokens + 1) // config.block_size))
    prefill = _prefill_sizes(prompt_tokens, config.limits_on("cpu").max_num_batched_tokens)
    decode = [*_powers(2, max_clients), max_clients]
    try:
        trials = [_load(config, depth, shape, max(max_clients, prefill[-1] // prompt_tokens)) for depth in depths]
        return StepSeconds(
            tuple((size, _predicted(found, trials, Phase.PREFILL, size)) for size in prefill),
            tuple((size, _predicted(found, trials, Phase.DECODE, size)) for size in decode),
        )
    except TwostepError:
        raise
    except Exception as error:  # of transformers' code, which builds the model
        raise ModelError(f"A part of {config.model} cannot be tried: {reason_of(error)}") from error


def _prefill_sizes(prompt_tokens: int, max_tokens: int) -> list[int]:
    """Returns the tokens of steps: of a prompt in parts and whole, and of as many whole ones as fit."""
    largest = min(prompt_tokens, max_tokens)
    whole = max_tokens // prompt_tokens * prompt_tokens
    return [*_powers(4, largest), largest] + ([whole] if whole > largest else [])


def _powers(base: int, limit: int) -> list[int]:
    """Returns the powers of a base that are less than a limit, for prompts those of so many tokens as a part has."""
    powers = [base**exponent for exponent in range(limit.bit_length())]
    return [each for each in powers if each < limit and (base == 2 or each >= _MIN_CHUNK)]


def depths_of(found: Estimate) -> tuple[int, ...]:
    """Returns the number of layers of the model or models that are tried, in multiples of those that hold one of each
    kind."""
    period, total = found.num_distinct_layers, found.num_layers
    layer_bytes = (found.size.layer_bytes + found.size.expert_bytes) / total
    many = max(2, int(_MAX_LAYER_BYTES / layer_bytes) // period) * period
    return (total,) if many >= total else (period, many)


class _Shape(NamedTuple):
    """What each request of a trial step has."""

    prompt_tokens: int
    num_blocks: int


class _Trial(NamedTuple):
    """A model of the first layers, ready to run."""

    num_layers: int
    runner: ModelRunner
    shape: _Shape
    vocab_size: int
    num_slots: int
    """Slots of recurrent states; 0 without any."""

    def run(self, phase: Phase, size: int, number: int) -> float:
        """Runs a step of so many tokens of prompts, or of so many requests that decode, and returns its seconds. What
        the cache holds changes nothing of these. Runs of different numbers have different tokens, which choose other
        experts."""
        requests = self._prompts(size, number) if phase is Phase.PREFILL else self._decoding(size, number)
        batch = Batch(phase, tuple(requests))
        run = self.runner.prefill if phase is Phase.PREFILL else self.runner.decode
        started_s = time.perf_counter()
        run(batch)
        return time.perf_counter() - started_s

    def _prompts(self, num_tokens: int, number: int) -> Iterator[ScheduledRequest]:
        """Yields whole prompts, or a part of one from its middle, which attends to as many tokens as its parts do on
        average."""
        length = min(num_tokens, self.shape.prompt_tokens)
        for index in range(num_tokens // length):
            yield self._request(
                index, self._tokens(index + number, length), (self.shape.prompt_tokens - length) // 2, []
            )

    def _decoding(self, num_requests: int, number: int) -> Iterator[ScheduledRequest]:
        for index in range(num_requests):
            token = self._tokens(index + number * num_requests, 1)
            yield self._request(index, token, self.shape.prompt_tokens, token)

    def _tokens(self, first: int, count: int) -> list[int]:
        return [position * _STRIDE % self.vocab_size for position in range(first, first + count)]

    def _request(self, index: int, tokens: list[int], start: int, output: list[int]) -> ScheduledRequest:
        table = tuple(range(index * self.shape.num_blocks, (index + 1) * self.shape.num_blocks))
        slot = index % self.num_slots if self.num_slots else None
        prompt = self._tokens(index, self.shape.prompt_tokens)
        return ScheduledRequest(
            str(index), tokens, start, table, _PARAMS, prompt, output, samples=True, state_slot=slot
        )


def _load(config: EngineConfig, num_layers: int, shape: _Shape, num_requests: int) -> _Trial:
    """Returns a model of so many layers, for requests of this shape."""
    hf_config = read_hf_config(config).hf_config
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
    return _Trial(num_layers, runner, shape, info.vocab_size, info.num_state_slots or 0)


def _predicted(found: Estimate, trials: Sequence[_Trial], phase: Phase, size: int) -> float:
    """Returns what such a step of all layers takes. The depths run in turns: what else the machine does meanwhile slows
    both."""
    for trial in trials:
        trial.run(phase, size, _MAX_RUNS)
    runs: list[list[float]] = []
    while not runs or (len(runs) < _MAX_RUNS and sum(map(sum, runs)) < _BUDGET_S):
        runs.append([trial.run(phase, size, len(runs)) for trial in trials])
    seconds: list[float] = [statistics.median(column) for column in zip(*runs, strict=True)]
    few, many = trials[0].num_layers, trials[-1].num_layers
    each = max(seconds[-1] - seconds[0], 0.0) / max(many - few, 1)
    return seconds[0] + (found.num_layers - few) * each
