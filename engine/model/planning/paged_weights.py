"""Weights that memory has no room for: they stay in the file of the packed cache, whose pages steps read from disk.

Experts that rows choose again and again stay in memory. Where so much is missing that a stream would crawl, the start
is refused; and so is one without such a file, since the operating system would kill the process amidst it.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.checkpoint.weight_files import bytes_of_weights
from engine.core.config import EngineConfig
from engine.core.errors import ModelMemoryError
from engine.core.machine import ModelSize
from engine.host.available_memory import available_bytes
from engine.model.cache_sizes import memory_for_caches

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["are_too_large", "check_packing_fits", "check_paging_speed"]

logger = logging.getLogger(__name__)

_MIN_TOKENS_PER_S = 0.5
_OTHER_BYTES = 256 << 20
"""What a step takes beside weights and KV, and the process for its libraries."""
_LEAST_SHARE = {"none": 11 / 16, "int8": 1 / 2, "int4": 1 / 4}
"""Packed bytes of a checkpoint's with numbers of 16 bits, at least."""


def are_too_large(num_bytes: int, config: EngineConfig) -> bool:
    """Whether memory has no room for so many bytes of weights beside the KV cache that is asked for."""
    return num_bytes + _OTHER_BYTES + (config.kv_cache_bytes or 0) > available_bytes(torch.device("cpu"))


def check_packing_fits(config: EngineConfig, hf_config: "PreTrainedConfig") -> None:
    """Raises ModelMemoryError if the weights of a checkpoint cannot fit into memory in any form that packing may give
    them."""
    num_bytes = _least_packed_bytes(config, hf_config)
    if num_bytes and are_too_large(num_bytes, config):
        raise ModelMemoryError(
            f"The weights of {config.model} take at least {num_bytes / 2**30:.1f} GiB once they are packed, and memory "
            f"has {available_bytes(torch.device('cpu')) / 2**30:.1f} GiB for them and the KV cache. Take fewer bits "
            "with --quantization, or more memory."
        )


def _least_packed_bytes(config: EngineConfig, hf_config: "PreTrainedConfig") -> int:
    """Returns the fewest bytes that the packed weights of a directory may take; 0 for other checkpoints, and for those
    with more than a text model, of which not all is loaded."""
    if hf_config.get_text_config(decoder=True) is not hf_config:
        return 0
    num_halves = 1 if hf_config.dtype in (torch.float16, torch.bfloat16) else 2
    return int((bytes_of_weights(config.model) or 0) * _LEAST_SHARE.get(config.quantization, 0) / num_halves)


def check_paging_speed(folder: Path, bytes_per_s: float, size: ModelSize, config: EngineConfig) -> None:
    """Warns that weights are paged from this folder, whose disk reads so fast, and how fast one stream can be at most.
    Raises ModelMemoryError if that is too slow to be of use."""
    free_bytes = available_bytes(torch.device("cpu"))
    kept_bytes = free_bytes - _OTHER_BYTES - memory_for_caches(config, "cpu", free_bytes)
    rate = bytes_per_s / max(1.0, _missing_bytes(size, kept_bytes))
    facts = (
        f"weights of {size.weight_bytes / 2**30:.1f} GiB are larger than the {max(0, kept_bytes) / 2**30:.1f} GiB that "
        f"memory has for them: they are paged from {folder} (disk at {bytes_per_s / 1e6:,.0f} MB/s measured)"
    )
    if rate < _MIN_TOKENS_PER_S:
        raise ModelMemoryError(
            f"The {facts}, which allows {rate:.2f} tokens per second, less than {_MIN_TOKENS_PER_S}. Take fewer bits "
            "with --quantization, a smaller KV cache with --kv-cache-memory-bytes, or more memory."
        )
    logger.warning("%s; expect at most %.1f tokens/s of one stream", facts, rate)


def _missing_bytes(size: ModelSize, kept_bytes: int) -> float:
    """Returns how many bytes of weights a token reads from the disk if memory keeps so many.

    What every token reads is kept first. Where not even that has room, nothing is: pages go before they are read again.
    """
    read_by_all = size.layer_bytes + size.head_bytes
    if kept_bytes < read_by_all:
        return read_by_all + size.expert_share * size.expert_bytes
    return size.expert_share * max(0, size.expert_bytes - (kept_bytes - read_by_all))
