"""Makes an engine: from settings and a model, or from settings alone, which loads the model."""

import os
import time
from collections.abc import Callable

import msgspec

from engine.core.adapters import Adapters, NoAdapters
from engine.core.block_records import BlockRecords
from engine.core.config import EngineConfig, EngineInfo
from engine.core.crash_marker import Marker
from engine.core.draft import Drafter
from engine.core.machine import Measure
from engine.core.request import Request
from engine.core.stored_blocks import StoredBlocks
from engine.engine import Engine, Runner
from engine.grammar.compiler import Grammars, NoGrammars, load_grammars
from engine.host.openmp import shorten_spinning
from engine.kv_store.interface import KVStore, NullKVStore
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.block_tokens import NoBlockTokens, SortedBlockTokens
from engine.scheduling.cost.roofline import Roofline
from engine.scheduling.cost.step_accounting import StepAccounting
from engine.scheduling.cost.step_cost import StepCosts
from engine.scheduling.cost.step_trace import NullTracer, Tracer, open_tracer
from engine.scheduling.draft_kv import NoDraftKV, OwnDraftKV
from engine.scheduling.kv_allocator import KVAllocator
from engine.scheduling.kv_tiers import TieredKVAllocator
from engine.scheduling.prefill_budget import PrefillPace
from engine.scheduling.prefix_cache import BlockCache, NullPrefixCache, PrefixCache
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.speculation.draft_length import FastestDraftLength
from engine.scheduling.speculation.grammar_drafter import GrammarDrafter
from engine.scheduling.speculation.likeliest_drafter import LikeliestDrafter
from engine.scheduling.speculation.planner import SpeculationPlanner
from engine.scheduling.speculation.predicted_output import PredictedOutput
from engine.scheduling.speculation.prompt_lookup import PromptLookup
from engine.scheduling.state_checkpoints import NoStateCheckpoints, StateCheckpoints
from engine.scheduling.state_slots import NoStateSlots, StateSlots
from engine.scheduling.state_tiers import NoTieredCheckpoints, TieredCheckpoints

_MAX_LOGITS = 1 << 26  # of the prompts that a step scores: 256 MB in float32


def import_libraries() -> None:
    """Imports what every model needs, for seconds. Torch enters the process only here."""
    shorten_spinning()
    cpus = os.sched_getaffinity(0)
    import engine.kv_store.opening
    import engine.ranks.leading  # noqa: F401

    # With OMP_PROC_BIND its library has bound this thread to one CPU, where the kernels' threads would follow it.
    if os.sched_getaffinity(0) != cpus:  # some sandboxes forbid the call
        os.sched_setaffinity(0, cpus)


def load_engine(config: EngineConfig, marker: Marker | None = None, kv_memory_fd: int | None = None) -> Engine:
    """Loads the model and sizes the KV cache. Blocks that an earlier engine left in the file `kv_memory_fd` are found
    again, and those of this engine will be. Raises ConfigError or ModelError."""
    import_libraries()
    from engine.kv_store.block_records import open_records
    from engine.kv_store.fingerprint import kv_fingerprint
    from engine.kv_store.opening import open_store
    from engine.ranks.leading import load_on_ranks, measurement_of

    runner, info, end_ranks = load_on_ranks(config, kv_memory_fd)
    tracer = open_tracer(config.trace)
    store = open_store(config, info, runner.cache, runner.states)
    if store is not None:
        fingerprint = kv_fingerprint(config, info, runner.cache, runner.states)
        info = msgspec.structs.replace(info, kv_fingerprint=fingerprint)
    records = open_records(config, info, runner.cache)
    grammars = load_grammars(config, info)
    return assemble(
        config,
        info,
        runner,
        tracer=tracer,
        marker=marker,
        grammars=grammars,
        store=store,
        records=records,
        adapters=runner.adapters,
        on_close=end_ranks,
        measure=measurement_of(info, config.tensor_parallel_size),
    )


def assemble(
    config: EngineConfig,
    info: EngineInfo,
    runner: Runner,
    *,
    tracer: Tracer | None = None,
    marker: Marker | None = None,
    clock: Callable[[], float] = time.monotonic,
    grammars: Grammars | None = None,
    new_drafter: Callable[[], Drafter] = PromptLookup,
    store: KVStore | None = None,
    records: BlockRecords | None = None,
    on_close: Callable[[], None] = lambda: None,
    adapters: Adapters | None = None,
    measure: Measure | None = None,
) -> Engine:
    """Makes an engine over a model that is loaded, or over a fake of one. `new_drafter` makes the drafter of one
    request's text; `on_close` ends what the runner needs; `measure` measures the machine's peaks again."""
    config = _for_states(config, info)
    costs = StepCosts(info.size.experts_read)
    return Engine(
        info,
        _scheduler(config, info, costs, _kv_allocator(config, info, costs, store, records)),
        runner,
        NoGrammars() if grammars is None else grammars,
        StepAccounting(costs, Roofline(info.size, info.ceilings, info.draft_size), tracer or NullTracer(), measure),
        store=store or NullKVStore(),
        adapters=adapters or NoAdapters(),
        new_drafter=_drafter_of(new_drafter) if config.num_speculative_tokens else None,
        marker=marker,
        clock=clock,
        on_close=on_close,
    )


def _for_states(config: EngineConfig, info: EngineInfo) -> EngineConfig:
    """Returns the settings without a prefix cache if there are recurrent states and no copies of them: then there is
    nothing to go on from behind a cached prefix."""
    if info.num_state_slots is None:
        return config
    caching = config.enable_prefix_caching and info.can_cache_prefixes
    return msgspec.structs.replace(config, enable_prefix_caching=caching)


def _scheduler(config: EngineConfig, info: EngineInfo, costs: StepCosts, kv: KVAllocator) -> Scheduler:
    limits = config.limits_on(info.device)
    pace = PrefillPace(
        costs,
        target_gap_s=limits.target_itl_ms / 1000,
        max_tokens=limits.max_num_batched_tokens,
        max_tokens_per_gap=config.max_prefill_tokens_per_gap,
        max_scored_tokens=_MAX_LOGITS // info.vocab_size,
        interval=config.checkpoint_tokens if info.num_state_checkpoints and config.enable_prefix_caching else None,
    )
    return Scheduler(
        kv,
        pace,
        _planner(config, info, costs),
        max_num_seqs=limits.max_num_seqs,
        eos_token_ids=frozenset(info.eos_token_ids),
    )


def _kv_allocator(
    config: EngineConfig, info: EngineInfo, costs: StepCosts, store: KVStore | None, records: BlockRecords | None
) -> KVAllocator:
    draft_kv = OwnDraftKV(config.block_size, is_of_head=info.has_head) if info.draft_kv_bytes else NoDraftKV()
    tables = BlockTables(config.block_size, info.kv_groups, config.limits_on(info.device).max_num_batched_tokens)
    size = info.num_blocks, config.block_size
    if not config.enable_prefix_caching:
        return KVAllocator(*size, NullPrefixCache(), _slots(info), draft_kv=draft_kv, tables=tables)
    tokens = SortedBlockTokens() if info.num_state_slots is None else NoBlockTokens()
    cache = PrefixCache(config.block_size, records, info.kv_groups.num_groups, tokens)
    slots, max_retained = _slots(info), int(info.num_blocks * config.prefix_retention_share)
    if store is None:
        states = _checkpoints(config, info, cache)
        return KVAllocator(*size, cache, slots, states, draft_kv, max_retained, tables)
    tiered = _tiered_checkpoints(config, info, cache, store.blocks)
    return TieredKVAllocator(
        *size, cache, slots, tiered, draft_kv, max_retained, tables, stored=store.blocks, costs=costs
    )


def _slots(info: EngineInfo) -> StateSlots | NoStateSlots:
    return NoStateSlots() if info.num_state_slots is None else StateSlots(info.num_state_slots)


def _checkpoints(config: EngineConfig, info: EngineInfo, cache: BlockCache) -> StateCheckpoints | NoStateCheckpoints:
    if info.num_state_slots is None:
        return NoStateCheckpoints()
    return StateCheckpoints(_copy_slots(info), config.checkpoint_tokens, config.block_size, cache)


def _tiered_checkpoints(
    config: EngineConfig, info: EngineInfo, cache: BlockCache, stored: StoredBlocks
) -> TieredCheckpoints | NoTieredCheckpoints:
    if info.num_state_slots is None:
        return NoTieredCheckpoints()
    return TieredCheckpoints(_copy_slots(info), config.checkpoint_tokens, config.block_size, cache, stored)


def _copy_slots(info: EngineInfo) -> range:
    """Returns the slots behind those of running requests."""
    assert info.num_state_slots is not None
    return range(info.num_state_slots, info.num_state_slots + info.num_state_checkpoints)


def _planner(config: EngineConfig, info: EngineInfo, costs: StepCosts) -> SpeculationPlanner:
    limits = config.num_speculative_tokens, config.limits_on(info.device).target_itl_ms / 1000
    return SpeculationPlanner(costs, *limits, None if info.draft_size is None else FastestDraftLength(costs, *limits))


def _drafter_of(new_drafter: Callable[[], Drafter]) -> Callable[[Request], Drafter]:
    """Returns what makes a request's drafter: of its text, of its grammar, and of the output predicted for it."""

    def drafter_of(request: Request) -> Drafter:
        drafters: list[Drafter] = []
        if request.asked.params.predicted_token_ids:
            drafters.append(PredictedOutput(request.asked.params.predicted_token_ids))
        if request.constraint:
            drafters.append(GrammarDrafter(request.constraint.forced_tokens))
        return LikeliestDrafter([*drafters, new_drafter()])

    return drafter_of
