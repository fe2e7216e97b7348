"""One replica: the engine's scheduler, block pool and prefix cache, over a model that has prices instead of weights."""

from dataclasses import dataclass, field

from engine.core.batch import Batch, Phase, RequestStepOutput, ScheduledRequest, StepOutput
from engine.core.messages import RequestUpdate
from engine.core.request import Request
from engine.core.stats import SchedulerStats
from engine.scheduling.cost.step_cost import StepCosts
from engine.scheduling.draft_kv import NoDraftKV
from engine.scheduling.hand_overs import HandOvers
from engine.scheduling.kv_allocator import KVAllocator
from engine.scheduling.kv_tiers import TieredKVAllocator
from engine.scheduling.prefill_budget import PrefillPace
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.prefix_steering import NoPrefixSteering
from engine.scheduling.speculation.planner import SpeculationPlanner
from engine.scheduling.state_slots import NoStateSlots
from engine.scheduling.state_tiers import NoTieredCheckpoints
from server.routing.replica_loads import ReplicaLoad
from tools.simulate.kv_store import Copies, SharedStore
from tools.simulate.stretches import Stretch, StretchingScheduler

_LEARNT = 0.01  # relative error of a decode step's prediction up to which nothing is learnt: prices do not change


@dataclass(frozen=True, slots=True)
class StepPrices:
    """What a step takes, in seconds: by default about what a model of 8 billion parameters takes on one accelerator."""

    step_s: float = 8e-3
    """To read the weights."""
    prefill_token_s: float = 4e-5
    decode_row_s: float = 3e-5
    context_token_s: float = 6e-8
    """For each token of the context of each request that decodes, and of each chunk's request."""
    copied_block_s: float = 1.5e-3
    """To copy a block to the KV store, or from it: 16 MiB at some 11 GB/s."""

    def seconds(self, batch: Batch) -> float:
        contexts = sum([request.end for request in batch.requests])
        if batch.phase is Phase.DECODE:
            return self.decode_s(batch.num_tokens, contexts)
        return self.step_s + self.prefill_token_s * batch.num_tokens + self.context_token_s * contexts

    def decode_s(self, num_rows: int, num_context_tokens: int) -> float:
        return self.step_s + self.decode_row_s * num_rows + self.context_token_s * num_context_tokens


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """A replica's size, and its settings, as flags of the server call them."""

    num_blocks: int = 1280
    block_size: int = 128
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 4096
    target_itl_ms: float = 50.0
    prices: StepPrices = field(default_factory=StepPrices)


class SimulatedReplica:
    """Runs one step after the other; whoever owns it says when each begins, and takes its end in time."""

    def __init__(self, name: str, settings: ReplicaSettings, store: SharedStore | None = None) -> None:
        self.name = name
        self.requests: dict[str, Request] = {}
        """Requests that have not ended."""
        self._prices = settings.prices
        self._block_size = settings.block_size
        self._costs = StepCosts()
        self._copies = Copies(store or SharedStore(), settings.prices.copied_block_s)
        self._kv = _allocator(settings, self._costs, store)
        self._scheduler = _scheduler(settings, self._costs, self._kv)
        self._hand_overs = HandOvers(self._kv)
        self._batch: Batch | None = None
        self._stretch: Stretch | None = None
        self.step_end_s: float | None = None
        """When the step, or the stretch of steps, ends that is under way; None if none is."""
        self._unbegun: dict[str, int] = {}  # prompt tokens of requests without a token of this replica

    @property
    def is_stepping(self) -> bool:
        return self.step_end_s is not None

    @property
    def load(self) -> ReplicaLoad:
        """What the server's `/load` says."""
        return ReplicaLoad(sum(self._unbegun.values()), len(self._scheduler.running_ids))

    @property
    def stats(self) -> SchedulerStats:
        return self._scheduler.stats

    @property
    def next_copy_s(self) -> float | None:
        """When the next copy from or to the KV store ends; None if there is none."""
        return self._copies.next_end_s

    def num_found(self, request: Request) -> int:
        """Returns how many tokens of a request that has not begun need not be computed."""
        return self._kv.found(request).num_cached_tokens

    def add(self, request: Request) -> None:
        self.hold(request)
        self.release(request)

    def hold(self, request: Request) -> None:
        """Takes a request that is to wait for `release`."""
        self.requests[request.request_id] = request
        self._unbegun[request.request_id] = request.num_tokens

    def release(self, request: Request) -> None:
        self._hand_overs.add(request)
        self._scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Ends a request, between steps or during one that is no stretch."""
        assert self._stretch is None, f"request {request_id} is a part of a stretch"
        del self.requests[request_id]
        self._unbegun.pop(request_id, None)
        self._scheduler.abort([request_id])
        self._hand_overs.abort([request_id])

    def end_copies(self, now_s: float) -> list[RequestUpdate]:
        """Ends the copies whose time has come, between steps, and returns what can be told now."""
        if ended := self._copies.take_ended(now_s):
            self._kv.end_transfers(ended)
        return self._told(self._hand_overs.settle([]))

    def begin_step(self, now_s: float) -> float | None:
        """Begins a step, and returns when it ends; None if there is none to begin."""
        batch = self._scheduler.schedule(now_s)
        if batch is not None:
            self._copies.begin(batch.transfers, now_s)
        if batch is None or not batch.requests:
            return None
        self._batch = batch
        seconds = self._prices.seconds(batch)
        if batch.phase is Phase.PREFILL or self._surprises(batch, seconds):
            self._costs.observe(batch, seconds)
        self.step_end_s = now_s + seconds
        return self.step_end_s

    def _surprises(self, batch: Batch, seconds: float) -> bool:
        return abs((self._costs.predict(batch) or 0.0) - seconds) > _LEARNT * seconds

    def try_begin_stretch(self, now_s: float, until_s: float) -> float | None:
        """Begins as many decode steps as can be foreseen, up to the first that ends at `until_s` or later, and returns
        when they end; None, and begins nothing, if a step has to be begun by itself."""
        if self.next_copy_s is not None:
            return None
        requests, num_steps = self._scheduler.alike(self._block_size)
        if not num_steps:
            return None
        num_rows, contexts = len(requests), sum([request.num_tokens for request in requests])
        if not all(self._is_known(num_rows, contexts + num_rows * step) for step in {0, num_steps - 1}):
            return None
        ends_s, end_s, decode_s = list[float](), now_s, self._prices.decode_s
        for step in range(num_steps):
            end_s = end_s + decode_s(num_rows, contexts + num_rows * step)
            ends_s.append(end_s)
            if end_s >= until_s:
                break
        self._stretch = Stretch(now_s, requests, ends_s)
        self.step_end_s = end_s
        return end_s

    def _is_known(self, num_rows: int, num_context_tokens: int) -> bool:
        """Whether nothing is learnt from a decode step. Price and prediction are linear in the context, so what holds
        for two steps holds for those between them; a little less than the limit makes up for rounding."""
        seconds = self._prices.decode_s(num_rows, num_context_tokens)
        predicted_s = self._costs.predict_decode(num_rows, num_context_tokens) or 0.0
        return abs(predicted_s - seconds) < 0.999 * _LEARNT * seconds

    def cut_stretch(self, now_s: float) -> float | None:
        """Has a stretch end with the step that is under way, because something comes that later steps have to see.
        Returns when that is, if it was to end later."""
        if self._stretch is None or len(cut := self._stretch.under_way(now_s)) == len(self._stretch):
            return None
        self._stretch, self.step_end_s = cut, cut.ends_s[-1]
        return self.step_end_s

    def end_stretch(self, now_s: float | None = None) -> Stretch | None:
        """Ends the stretch under way, if there is one, and returns its steps: those that ended before `now_s`, where it
        does not come to its end."""
        stretch, self._stretch = self._stretch, None
        if stretch is not None and now_s is not None:
            stretch = stretch.before(now_s)
        if stretch is not None:
            self.step_end_s = None
            self._scheduler.run(stretch)
        return stretch

    def end_step(self) -> list[RequestUpdate]:
        """Ends the step that began, and returns what came of it."""
        assert self._batch is not None
        batch, self._batch, self.step_end_s = self._batch, None, None
        output = StepOutput(tuple([_output(request) for request in batch.requests]))
        return self._told(self._hand_overs.settle(self._scheduler.update(batch, output)))

    def _told(self, updates: list[RequestUpdate]) -> list[RequestUpdate]:
        for update in updates:
            self._unbegun.pop(update.request_id, None)
            if update.finish_reason is not None:
                del self.requests[update.request_id]
        return updates


def _output(request: ScheduledRequest) -> RequestStepOutput:
    """The model counts: each token is the one before it plus one."""
    return RequestStepOutput(request.request_id, (request.token_ids[-1] + 1,) if request.samples else ())


def _allocator(settings: ReplicaSettings, costs: StepCosts, store: SharedStore | None) -> KVAllocator:
    cache = PrefixCache(settings.block_size)
    num_blocks, block_size, steering = settings.num_blocks, settings.block_size, NoPrefixSteering()
    if store is None:
        return KVAllocator(num_blocks, block_size, cache, steering=steering)
    without = NoStateSlots(), NoTieredCheckpoints(), NoDraftKV(), 0, None
    return TieredKVAllocator(num_blocks, block_size, cache, *without, steering, stored=store, costs=costs)


def _scheduler(settings: ReplicaSettings, costs: StepCosts, kv: KVAllocator) -> StretchingScheduler:
    target_gap_s = settings.target_itl_ms / 1e3
    pace = PrefillPace(
        costs,
        target_gap_s=target_gap_s,
        max_tokens=settings.max_num_batched_tokens,
        max_tokens_per_gap=settings.max_num_batched_tokens,
        max_scored_tokens=1,
    )
    planner = SpeculationPlanner(costs, 0, target_gap_s)
    return StretchingScheduler(kv, pace, planner, max_num_seqs=settings.max_num_seqs, eos_token_ids=frozenset())
