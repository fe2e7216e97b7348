"""Sets up the model runner from settings: loads the model, sizes the KV cache, chooses the attention backend."""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from engine.attention import AttentionBackend, select_backend
from engine.attention.kv_cache import KVCache, bytes_per_block
from engine.core.adapters import AdapterInfo, Adapters
from engine.core.config import EngineConfig, EngineInfo
from engine.core.errors import ConfigError
from engine.core.machine import Ceilings
from engine.host.computing_libraries import computing_libraries
from engine.host.lean_torch import make_torch_whole
from engine.host.memory_trim import give_back_freed_memory
from engine.host.nvidia import cuda_build_advice
from engine.kernels import load_kernels
from engine.mixers.state import StateCache
from engine.model.adapters import ModelAdapters, load_adapters
from engine.model.caches import Caches, new_caches
from engine.model.decoder_parts import DecoderParts
from engine.model.drafting.kernel_head import KernelHeadForward
from engine.model.drafting.proposal import draft_forward, proposer_of
from engine.model.kernel_forward import KernelForward
from engine.model.machine_ceilings import measure_ceilings
from engine.model.packed_cache import PackedCache
from engine.model.rank_totals import Totals, ceilings_of_all, totals_of
from engine.runner.forward import Forward
from engine.runner.graphs import StaticInputs, graph_sizes, in_cuda_graphs
from engine.runner.head_passes import HeadPasses, HeadRunner
from engine.runner.loaded_model import LoadedModel
from engine.runner.model_runner import ModelRunner
from engine.weights.rank_group import ALONE, RankGroup

logger = logging.getLogger(__name__)


class Lead(Protocol):
    """Makes what the first rank does something that the other ranks of the model do, too."""

    def forwards(self, own: Sequence[Forward]) -> Sequence[Forward]: ...

    def head(self, own: HeadRunner) -> HeadRunner: ...

    def adapters(self, own: Adapters) -> Adapters: ...


class LeadNone:
    """Leaves everything as it is: there are no other ranks."""

    def forwards(self, own: Sequence[Forward]) -> Sequence[Forward]:
        return own

    def head(self, own: HeadRunner) -> HeadRunner:
        return own

    def adapters(self, own: Adapters) -> Adapters:
        return own


@dataclass(frozen=True)
class ReadyModel:
    """A model with its caches and forward passes; of one of several ranks, its part of these."""

    model: LoadedModel
    caches: Caches
    ceilings: Ceilings
    totals: Totals
    attention: str
    """Name of the attention backend."""
    forward: Forward
    """The forward pass of the model."""
    drafting: Forward | HeadPasses | None
    """The forward pass of its draft model, if any. One of weights of its own is the first rank's, which runs it alone;
    a head is on all ranks, whole, as it reads the model's embedding and language-model head."""
    adapters: ModelAdapters

    @property
    def shared(self) -> tuple[Forward, ...]:
        """The forward passes that all ranks run together: the model's, and that of a draft model made of it."""
        drafting = self.drafting
        if drafting is None or isinstance(drafting, HeadPasses) or self.model.kv_layers != self.model.layers:
            return (self.forward,)
        return self.forward, drafting

    @property
    def head(self) -> HeadPasses | None:
        """The passes of a head, which all ranks run together."""
        return self.drafting if isinstance(self.drafting, HeadPasses) else None


def load_model_runner(
    config: EngineConfig,
    group: RankGroup = ALONE,
    lead: Lead | None = None,
    kv_memory_fd: int | None = None,
) -> tuple[ModelRunner, EngineInfo]:
    """Loads the model and its adapters, and sets up its runner, which uses what `lead` makes of them. The KV cache lies
    in the memory of the file `kv_memory_fd`, if there is one and another process could go on with what it holds. Raises
    ConfigError or ModelError."""
    started_s = time.monotonic()
    ready = load_ready_model(config, group, kv_memory_fd)
    lead = lead or LeadNone()
    adapters = lead.adapters(ready.adapters)
    loaded = load_adapters(adapters, config.adapters)
    info = _info_of(config, ready, loaded, started_s)
    forward, *drafting = lead.forwards(ready.shared)
    head = None if ready.head is None else lead.head(ready.head)
    proposer = proposer_of(ready.model, ready.caches.kv, head or (drafting[0] if drafting else ready.drafting))
    return ModelRunner(ready.model, ready.caches.kv, forward, proposer, adapters, ready.caches.states), info


def load_ready_model(config: EngineConfig, group: RankGroup, kv_memory_fd: int | None = None) -> ReadyModel:
    """Loads the model, or a rank's part of it, and its caches. Raises ConfigError or ModelError."""
    _set_threads(config.num_threads)
    packed_cache = PackedCache(config)
    model = packed_cache.find() or _load(config, group)
    if group.is_first and not model.eos_token_ids:
        logger.warning("%s names no token that ends a text: answers go on to their maximum of tokens", config.model)
    if group.is_first and config.device == "auto" and model.device.type == "cpu" and (advice := cuda_build_advice()):
        logger.warning("%s Until then the CPU computes.", advice)
    group.wait_for_all()
    ceilings = _ceilings(config, model, group)
    give_back_freed_memory()
    max_model_len = _max_model_len(config, model)
    backend = select_backend(model.device, load_kernels() if model.has_kernels else None)
    step_bytes = _step_bytes(config, model, max_model_len, backend)
    model = _with_draft_model(config, model, max_model_len, group)
    caches = new_caches(config, model, max_model_len, step_bytes, group, kv_memory_fd)
    forward = _forward(model.module, caches.kv, backend, caches.states)
    drafting = draft_forward(model, caches.kv, backend)
    forward = _recorded(config, forward, caches, group)
    if isinstance(forward, KernelForward) and not isinstance(model.module, DecoderParts):
        head = drafting.forward if isinstance(drafting, HeadPasses) else None
        packed_cache.keep(model, forward.parts, head.parts if isinstance(head, KernelHeadForward) else None)
    totals = totals_of(model, caches.kv, caches.states, group)
    name = backend.__name__.rpartition(".")[2]
    adapters = ModelAdapters(model, forward, config.max_adapters, config.max_adapter_rank, group)
    return ReadyModel(model, caches, ceilings, totals, name, forward, drafting, adapters)


def _info_of(config: EngineConfig, ready: ReadyModel, adapters: dict[str, AdapterInfo], started_s: float) -> EngineInfo:
    """Returns the facts about all ranks together."""
    model, caches, totals = ready.model, ready.caches, ready.totals
    return EngineInfo(
        model=config.model,
        architecture=model.architecture,
        load_format=config.load_format,
        device=str(model.device),
        dtype=_name_of(model.dtype),
        kv_cache_dtype=config.kv_cache_dtype if model.kv_dtype != model.dtype else _name_of(model.dtype),
        attention=ready.attention,
        adapters=adapters,
        linear=model.linear,
        forward=ready.forward.name,
        computing_libraries=computing_libraries(model.device, ready.forward.name, model.has_kernels),
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        max_model_len=caches.max_model_len,
        block_size=config.block_size,
        num_blocks=caches.kv.num_blocks,
        eos_token_ids=model.eos_token_ids,
        weights_fingerprint=model.weights_fingerprint,
        tensor_parallel_size=config.tensor_parallel_size,
        weight_bytes=totals.weight_bytes,
        kv_cache_bytes=totals.kv_cache_bytes,
        kv_bytes_per_token=totals.kv_bytes_per_token,
        kv_groups=caches.groups,
        max_kv_bytes_per_context=_bytes_per_context(config, ready),
        **_state_facts(config, ready),
        **_draft_facts(config, ready),
        load_s=time.monotonic() - started_s,
        size=totals.size,
        ceilings=ready.ceilings,
    )


def _load(config: EngineConfig, group: RankGroup) -> LoadedModel:
    make_torch_whole()
    from engine.model.loader import load_model  # imports transformers' models, for seconds

    return load_model(config, group)


def _step_bytes(config: EngineConfig, model: LoadedModel, max_model_len: int, backend: AttentionBackend) -> int:
    """Returns what a step takes beside weights and KV where a KV cache of a share of the memory would leave none."""
    if model.device.type != "cuda":
        return 0
    from engine.model.trial_step import bytes_of_a_step

    return bytes_of_a_step(config, model, max_model_len, backend)


def _forward(module: Any, cache: KVCache, backend: AttentionBackend, states: StateCache | None = None) -> Forward:
    if isinstance(module, DecoderParts):
        return KernelForward(module, cache)
    from engine.model.forward_choice import choose_forward

    return choose_forward(module, cache, backend, states)


def _recorded(config: EngineConfig, forward: Forward, caches: Caches, group: RankGroup) -> Forward:
    """Returns the forward pass with its decode steps in CUDA graphs where there may be some, on all ranks or on none:
    a recorded step fills its batch up, and ranks gather as many rows."""
    device = caches.kv.layers[0].keys.device if caches.kv.layers else torch.device("cpu")
    if device.type != "cuda" or config.enforce_eager:
        return forward
    sizes = graph_sizes(config.limits_on(device.type).max_num_seqs)
    started_s = time.monotonic()
    recorded = in_cuda_graphs(
        forward, StaticInputs(sizes[-1], caches.max_model_len, caches.kv.block_size, device), sizes
    )
    logger.info("decode steps of %d sizes recorded in %.1f s", len(sizes), time.monotonic() - started_s)
    return recorded if group.have_all(None if recorded is forward else 1) else forward


def _with_draft_model(config: EngineConfig, model: LoadedModel, max_model_len: int, group: RankGroup) -> LoadedModel:
    """Returns the model with what drafts for it: rounded weights, another model, or a head. All ranks have a head, if
    all could load it, and the first one another model."""
    if config.draft_model is not None:
        make_torch_whole()
        from engine.model.drafting.draft_model import is_head_for, load_draft_model

        if not group.is_first and not is_head_for(config):
            return model
        return replace(model, draft=load_draft_model(config, model, max_model_len))
    if model.draft is not None or isinstance(model.module, DecoderParts):
        return model
    from engine.model.drafting.mtp_head import load_mtp_head

    head = load_mtp_head(config, model)
    return replace(model, draft=head) if group.have_all(None if head is None else 1) else model


def _draft_facts(config: EngineConfig, ready: ReadyModel) -> dict[str, Any]:
    """Returns the fields of `EngineInfo` about a draft model, none without one."""
    model, num_blocks = ready.model, ready.caches.kv.num_blocks
    if model.draft is None:
        return {}
    own = model.bytes_per_block(config.block_size) - bytes_per_block(model.layers, config.block_size, model.kv_dtype)
    num_ranks = config.tensor_parallel_size if model.has_head else 1  # those that keep KV for it
    sizes = {"draft_size": ready.totals.draft_size, "draft_kv_bytes": num_ranks * num_blocks * own}
    return sizes | {
        "has_head": model.has_head,
        "hidden_fingerprint": model.draft.join.fingerprint if model.draft.join else "",
    }


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes_per_context(config: EngineConfig, ready: ReadyModel) -> int:
    """Returns the most bytes of KV that a context of the longest length holds, on all ranks."""
    max_chunk = config.limits_on(ready.model.device.type).max_num_batched_tokens
    caches = ready.caches
    num_blocks = caches.groups.num_blocks(caches.max_model_len, config.block_size, max_chunk)
    return num_blocks * (ready.totals.kv_cache_bytes // max(1, caches.kv.num_blocks))


def _state_facts(config: EngineConfig, ready: ReadyModel) -> dict[str, Any]:
    """Returns the fields of `EngineInfo` about recurrent states, none for a model without any."""
    if not ready.model.states:
        return {}
    return {
        "num_state_slots": ready.caches.states.num_slots,
        "state_bytes_per_request": ready.totals.state_bytes_per_request,
        "num_state_checkpoints": ready.caches.states.num_copies,
        "state_checkpoint_tokens": config.checkpoint_tokens if ready.caches.states.num_copies else 0,
    }


def _ceilings(config: EngineConfig, model: LoadedModel, group: RankGroup) -> Ceilings:
    quantization = config.quantization if config.gguf_activations == "float32" else config.gguf_activations
    quantization = quantization if model.has_kernels else "none"  # torch multiplies dequantized weights
    own = measure_ceilings(model.device, model.dtype, model.weight_bytes, quantization)
    return ceilings_of_all(own, group)


def _set_threads(num_threads: int | None) -> None:
    if num_threads is None:
        return
    torch.set_num_threads(num_threads)
    if num_threads > (num_cpus := len(os.sched_getaffinity(0))):
        logger.warning("--num-threads %d is more than the %d CPUs there are: steps take longer", num_threads, num_cpus)


def _max_model_len(config: EngineConfig, model: LoadedModel) -> int:
    if config.max_model_len is None:
        return model.max_model_len
    if config.max_model_len > model.max_model_len:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is over the model's own limit of {model.max_model_len} tokens."
        )
    return config.max_model_len
