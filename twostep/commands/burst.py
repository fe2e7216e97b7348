"""A burst of requests, simulated: the engine's own scheduler over steps that have prices instead of a model."""

import statistics
from typing import NamedTuple

from engine.core.batch import Batch, Phase, RequestStepOutput, StepOutput
from engine.core.config import EngineConfig
from engine.core.generation_request import GenerationRequest
from engine.core.request import Request
from engine.core.sampling_params import SamplingParams
from engine.core.step_seconds import StepSeconds, seconds_at
from engine.scheduling.cost.step_cost import StepCosts
from engine.scheduling.kv_allocator import KVAllocator
from engine.scheduling.prefill_budget import PrefillPace
from engine.scheduling.prefix_cache import NullPrefixCache
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.speculation.planner import SpeculationPlanner

__all__ = ["Burst", "BurstTimes", "ServingSeconds", "simulated"]


class ServingSeconds(NamedTuple):
    """What serving adds to the model's steps, on the CPUs that both share: scheduling, text, and HTTP."""

    step_s: float = 0.0
    """To each step."""
    token_s: float = 0.0
    """For each token that a step generates."""
    request_s: float = 0.0
    """To the time to a first token."""


class Burst(NamedTuple):
    """Requests that arrive at once."""

    clients: int
    prompt_tokens: int
    output_tokens: int


class BurstTimes(NamedTuple):
    """What the clients see."""

    last_ttft_s: float
    """Time to the first token of the request that waits longest for it."""
    itl_s: float
    """Mean time between two tokens of a request, prompts of others in between included."""
    tokens_per_s: float
    """Tokens a second of all requests, from their arrival to their last token."""


def simulated(burst: Burst, steps: StepSeconds, serving: ServingSeconds, config: EngineConfig) -> BurstTimes:
    """Returns the times of a burst in a server that has served one like it before, and so knows what steps take."""
    simulation = _Simulation(burst, steps, serving, config)
    simulation.run()
    return simulation.run()


class _Simulation:
    def __init__(self, burst: Burst, steps: StepSeconds, serving: ServingSeconds, config: EngineConfig) -> None:
        self._burst = burst
        self._steps = steps
        self._serving = serving
        self._costs = StepCosts()
        self._scheduler = _scheduler(burst, config, self._costs)

    def run(self) -> BurstTimes:
        """Runs the burst to its end. The server accepts one request after the other."""
        tokens_s = {str(index): list[float]() for index in range(self._burst.clients)}
        coming = [_request(index, self._burst) for index in range(self._burst.clients)]
        now_s = self._serving.request_s
        while coming or self._scheduler.has_unfinished:
            num_accepted = self._burst.clients - len(coming)
            if not self._scheduler.has_unfinished:
                now_s = max(now_s, (num_accepted + 1) * self._serving.request_s)
            while coming and (num_accepted + 1) * self._serving.request_s <= now_s:
                self._scheduler.add(coming.pop(0))
                num_accepted += 1
            now_s += self._step(now_s, tokens_s)
        gaps_s = [(each[-1] - each[0]) / max(len(each) - 1, 1) for each in tokens_s.values()]
        last_ttft_s = max(each[0] for each in tokens_s.values())
        num_tokens = self._burst.clients * self._burst.output_tokens
        return BurstTimes(last_ttft_s, statistics.fmean(gaps_s), num_tokens / now_s)

    def _step(self, now_s: float, tokens_s: dict[str, list[float]]) -> float:
        """Runs a step, and returns its seconds after adding the time of each of its tokens."""
        batch = self._scheduler.schedule(now_s)
        assert batch is not None, "memory for all of the burst"
        seconds = self._seconds(batch)
        self._costs.observe(batch, seconds)
        outputs = (RequestStepOutput(each.request_id, (0,) if each.samples else ()) for each in batch.requests)
        updates = self._scheduler.update(batch, StepOutput(tuple(outputs)))
        seconds += self._serving.step_s + self._serving.token_s * len(updates)
        for update in updates:
            tokens_s[update.request_id].append(now_s + seconds)
        return seconds

    def _seconds(self, batch: Batch) -> float:
        """Returns what the model takes for a step."""
        curve = self._steps.prefill if batch.phase is Phase.PREFILL else self._steps.decode
        return seconds_at(curve, batch.num_tokens)


def _request(index: int, burst: Burst) -> Request:
    params = SamplingParams(max_tokens=burst.output_tokens, ignore_eos=True)
    return Request(
        str(index), GenerationRequest(prompt_token_ids=[0] * burst.prompt_tokens, params=params, arrival_s=0.0)
    )


def _scheduler(burst: Burst, config: EngineConfig, costs: StepCosts) -> Scheduler:
    """Returns the scheduler of an engine with memory for the whole burst, and without drafts."""
    limits = config.limits_on("cpu")
    target_gap_s, max_tokens = limits.target_itl_ms / 1e3, limits.max_num_batched_tokens
    pace = PrefillPace(
        costs,
        target_gap_s=target_gap_s,
        max_tokens=max_tokens,
        max_tokens_per_gap=config.max_prefill_tokens_per_gap,
        max_scored_tokens=1,
    )
    num_blocks = 2 * burst.clients * -(-(burst.prompt_tokens + burst.output_tokens) // config.block_size)
    kv = KVAllocator(num_blocks, config.block_size, NullPrefixCache())
    planner = SpeculationPlanner(costs, 0, target_gap_s)
    return Scheduler(kv, pace, planner, max_num_seqs=limits.max_num_seqs, eos_token_ids=frozenset())
