"""Sets up the model runner from settings: loads the model, sizes the KV cache, chooses the attention backend."""

import logging
import os
import time
from dataclasses import replace
from typing import Any

import torch

from engine.attention import AttentionBackend, select_backend
from engine.attention.kv_cache import KVCache, bytes_per_block
from engine.core.config import EngineConfig, EngineInfo
from engine.core.errors import ConfigError, ModelMemoryError
from engine.core.machine import Ceilings
from engine.host.available_memory import available_bytes, is_memory_shortage
from engine.host.memory_trim import give_back_freed_memory
from engine.kernels import load_kernels
from engine.mixers.state import StateCache, bytes_per_slot
from engine.model.decoder_parts import DecoderParts
from engine.model.kernel_forward import KernelForward
from engine.model.machine_ceilings import measure_ceilings
from engine.model.packed_cache import PackedCache
from engine.model.proposal import choose_proposer
from engine.runner.forward import Forward
from engine.runner.loaded_model import LoadedModel
from engine.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

MAX_DEFAULT_KV_BYTES = 4 << 30  # on the CPU, where the KV cache shares memory with everything else
SHARE_OF_AVAILABLE = {"cpu": 0.5, "cuda": 0.9}


def load_model_runner(config: EngineConfig) -> tuple[ModelRunner, EngineInfo]:
    """Loads the model and sets up its runner. Raises ConfigError or ModelError."""
    started_s = time.monotonic()
    _set_threads(config.num_threads)
    packed_cache = PackedCache(config)
    model = packed_cache.find() or _load(config)
    if not model.eos_token_ids:
        logger.warning("%s names no token that ends a text: answers go on to their maximum of tokens", config.model)
    ceilings = _ceilings(config, model)
    give_back_freed_memory()
    max_model_len = _max_model_len(config, model)
    backend = select_backend(model.device, load_kernels() if model.has_kernels else None)
    step_bytes = _step_bytes(config, model, max_model_len, backend)
    model = _with_draft_model(config, model, max_model_len)
    cache, states, max_model_len = _new_caches(config, model, max_model_len, step_bytes)
    forward = _forward(model.module, cache, backend, states)
    if isinstance(forward, KernelForward) and not isinstance(model.module, DecoderParts):
        packed_cache.keep(model, forward.parts)
    facts = {"max_model_len": max_model_len, "attention": backend.__name__.rpartition(".")[2], "forward": forward.name}
    facts |= {"ceilings": ceilings, "load_s": time.monotonic() - started_s, **_state_facts(model, states)}
    return ModelRunner(model, cache, forward, choose_proposer(model, cache, backend)), _info(
        config, model, cache, facts
    )


def _info(config: EngineConfig, model: LoadedModel, cache: KVCache, facts: dict[str, Any]) -> EngineInfo:
    return EngineInfo(
        model=config.model,
        architecture=model.architecture,
        device=str(model.device),
        dtype=_name_of(model.dtype),
        kv_cache_dtype=config.kv_cache_dtype if model.kv_dtype != model.dtype else _name_of(model.dtype),
        linear=model.linear,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        block_size=config.block_size,
        num_blocks=cache.num_blocks,
        eos_token_ids=model.eos_token_ids,
        weights_fingerprint=model.weights_fingerprint,
        weight_bytes=model.weight_bytes,
        kv_cache_bytes=cache.num_bytes,
        kv_bytes_per_token=bytes_per_block(model.layers, 1, model.kv_dtype),
        size=model.size,
        **_draft_facts(config, model, cache),
        **facts,
    )


def _load(config: EngineConfig) -> LoadedModel:
    from engine.model.loader import load_model  # imports transformers' models, for seconds

    return load_model(config)


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


def _with_draft_model(config: EngineConfig, model: LoadedModel, max_model_len: int) -> LoadedModel:
    """Returns the model with what drafts for it: rounded weights, another model, or the head of its checkpoint."""
    if config.draft_model is not None:
        from engine.model.draft_model import load_draft_model

        return replace(model, draft=load_draft_model(config, model, max_model_len))
    if model.draft is not None or isinstance(model.module, DecoderParts):
        return model
    from engine.model.mtp_head import load_mtp_head

    return replace(model, draft=load_mtp_head(config, model))


def _draft_facts(config: EngineConfig, model: LoadedModel, cache: KVCache) -> dict[str, Any]:
    """Returns the fields of `EngineInfo` about a draft model, none without one."""
    if model.draft is None:
        return {}
    own = model.bytes_per_block(config.block_size) - bytes_per_block(model.layers, config.block_size, model.kv_dtype)
    return {"draft_size": model.draft.size, "draft_kv_bytes": cache.num_blocks * own, "has_head": model.has_head}


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _new_caches(
    config: EngineConfig, model: LoadedModel, max_model_len: int, step_bytes: int
) -> tuple[KVCache, StateCache, int]:
    """Returns the caches of KV and states, and the context length that they allow."""
    cache_bytes = _cache_bytes(config, model, step_bytes)
    num_slots = _num_state_slots(config, model, cache_bytes)
    num_copies = _num_state_checkpoints(config, model, cache_bytes)
    kv_bytes = cache_bytes - num_slots * bytes_per_slot(model.states)
    num_blocks, max_model_len = _size_pool(config, model, max_model_len, kv_bytes)
    states = StateCache(model.states, num_slots, model.device, num_copies)
    return _new_cache(config, model, num_blocks), states, max_model_len


def _state_facts(model: LoadedModel, states: StateCache) -> dict[str, Any]:
    """Returns the fields of `EngineInfo` about recurrent states, none for a model without any."""
    if not model.states:
        return {}
    return {
        "num_state_slots": states.num_slots,
        "state_bytes_per_request": bytes_per_slot(model.states),
        "num_state_checkpoints": states.num_copies,
    }


def _ceilings(config: EngineConfig, model: LoadedModel) -> Ceilings:
    quantization = config.quantization if model.has_kernels else "none"  # torch multiplies dequantized weights
    return measure_ceilings(model.device, model.dtype, model.weight_bytes, quantization)


def _set_threads(num_threads: int | None) -> None:
    if num_threads is None:
        return
    torch.set_num_threads(num_threads)
    if num_threads > (num_cpus := len(os.sched_getaffinity(0))):
        logger.warning("--num-threads %d is more than the %d CPUs there are: steps take longer", num_threads, num_cpus)


def _new_cache(config: EngineConfig, model: LoadedModel, num_blocks: int) -> KVCache:
    """Allocates the KV cache; raises ModelMemoryError where memory is short.

    On the CPU that is checked before: the operating system grants more memory than there is, and kills the process once
    it is used.
    """
    num_bytes = num_blocks * model.bytes_per_block(config.block_size)
    available = available_bytes(model.device)
    shortage = ModelMemoryError(
        f"There is not enough memory for a KV cache of {num_blocks:,} blocks of {config.block_size} tokens: it takes "
        f"{num_bytes / 2**20:,.0f} MiB, and {available / 2**20:,.0f} MiB are available. "
        "Free some, or give it less with --kv-cache-memory-bytes or --num-gpu-blocks-override."
    )
    if model.device.type == "cpu" and num_bytes > available:
        raise shortage
    try:
        shape = model.kv_layers, num_blocks, config.block_size
        return KVCache(*shape, model.kv_dtype, model.device, model.kept_hidden)
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_memory_shortage(error):
            raise
        raise shortage from error


def _max_model_len(config: EngineConfig, model: LoadedModel) -> int:
    if config.max_model_len is None:
        return model.max_model_len
    if config.max_model_len > model.max_model_len:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is over the model's own limit of {model.max_model_len} tokens."
        )
    return config.max_model_len


def _cache_bytes(config: EngineConfig, model: LoadedModel, step_bytes: int) -> int:
    """Returns the memory for KV and states: as configured, else a share of what is free and what no step needs."""
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    share = int((available_bytes(model.device) - step_bytes) * SHARE_OF_AVAILABLE[model.device.type])
    return min(share, MAX_DEFAULT_KV_BYTES) if model.device.type == "cpu" else share


def _num_state_slots(config: EngineConfig, model: LoadedModel, cache_bytes: int) -> int:
    """Returns how many requests get a slot for their states: as many as may run, if these take at most half of the
    memory for KV and states, else as many as do, and one at least."""
    num_bytes = bytes_per_slot(model.states)
    if not num_bytes:
        return 0
    num_slots = min(config.max_num_seqs, max(1, cache_bytes // 2 // num_bytes))
    if num_slots < config.max_num_seqs:
        logger.warning(
            "the recurrent states of a request take %.1f MiB: %d requests run at once, not %d",
            num_bytes / 2**20,
            num_slots,
            config.max_num_seqs,
        )
    return num_slots


def _num_state_checkpoints(config: EngineConfig, model: LoadedModel, cache_bytes: int) -> int:
    """Returns how many copies of a request's states are kept, beside what takes `cache_bytes`."""
    if not model.states or not config.enable_prefix_caching:
        return 0
    num_bytes = cache_bytes // 8 if config.state_cache_bytes is None else config.state_cache_bytes
    return max(0, num_bytes) // bytes_per_slot(model.states)


def _size_pool(config: EngineConfig, model: LoadedModel, max_model_len: int, kv_bytes: int) -> tuple[int, int]:
    """Returns the number of blocks, which take at most `kv_bytes`, and the context length that they allow.

    A configured context length must fit; the model's own limit is lowered to what fits.
    """
    num_blocks = config.num_blocks or _num_blocks(config, model, max_model_len, kv_bytes)
    capacity = num_blocks * config.block_size
    if capacity >= max_model_len:
        return num_blocks, max_model_len
    if config.max_model_len is not None or capacity < 1:
        setting = "--kv-cache-memory-bytes" if config.num_blocks is None else "--num-gpu-blocks-override"
        raise ConfigError(
            f"The KV cache has room for {capacity} tokens, less than a context of {max_model_len}: "
            f"give it more with {setting}, or lower --max-model-len."
        )
    logger.warning("the KV cache holds %d tokens: contexts are limited to that, not %d", capacity, max_model_len)
    return num_blocks, capacity


def _num_blocks(config: EngineConfig, model: LoadedModel, max_model_len: int, kv_bytes: int) -> int:
    """Returns how many blocks fit; by default no more than all sequences together can use."""
    usable = config.max_num_seqs * -(-max_model_len // config.block_size)
    per_block = model.bytes_per_block(config.block_size)
    if per_block == 0:  # a model without attention: its blocks only count tokens
        return usable
    num_blocks = max(0, kv_bytes) // per_block
    return num_blocks if config.kv_cache_bytes is not None else min(num_blocks, usable)
