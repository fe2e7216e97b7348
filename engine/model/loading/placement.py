"""Where a model runs and how: on which device, in which numbers, with which kernels, on which of several ranks."""

import logging
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from engine.checkpoint.weight_source import needs_float32
from engine.core.config import EngineConfig
from engine.core.errors import ConfigError
from engine.host.nvidia import cuda_build_advice
from engine.kernels import KernelInfo, load_kernels
from engine.kernels.cpu_features import has_native_bf16
from engine.weights.packing_policy import check_quantization
from engine.weights.rank_group import RankGroup

__all__ = ["Placement", "place_model"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model runs and how, as `place_model` chose it."""

    device: torch.device
    dtype: torch.dtype
    """Type of the weights."""
    kernels: KernelInfo | None
    """The CPU kernels; None on a GPU, and where torch computes in their place."""
    group: RankGroup
    """The ranks that compute the model together, of which this is one."""

    @property
    def has_kernels(self) -> bool:
        return self.kernels is not None


def place_model(config: EngineConfig, hf_config: PreTrainedConfig, group: RankGroup) -> Placement:
    """Chooses where the model of `hf_config` runs and how. Raises ConfigError where that is not possible here."""
    device = _device(config.device)
    config.check_device(device.type)
    check_quantization(config.quantization, device)
    kernels = _load_kernels(config) if device.type == "cpu" else None
    return Placement(device, _dtype(config, hf_config, device, kernels), kernels, group)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        cure = cuda_build_advice() or "Look whether nvidia-smi finds one, or use --device cpu."
        raise ConfigError(f"--device cuda: torch sees no CUDA device. {cure}")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def _load_kernels(config: EngineConfig) -> KernelInfo | None:
    kernels = load_kernels()
    if kernels is None and config.require_kernels:
        raise ConfigError("--require-kernels: there are no CPU kernels here; the log says why.")
    return kernels


def _dtype(
    config: EngineConfig, hf_config: PreTrainedConfig, device: torch.device, kernels: KernelInfo | None
) -> torch.dtype:
    if config.dtype != "auto":
        chosen: torch.dtype = getattr(torch, config.dtype)
        if chosen is torch.float32 and device.type == "cuda":
            logger.warning("--dtype float32 on a GPU: no tensor cores, steps are several times slower than in 16 bits")
        return chosen
    if config.load_format == "auto" and needs_float32(config.model, config.revision):
        return torch.float32
    if device.type == "cpu":
        widens = kernels is not None and kernels.isa != "generic"  # to float32, in the time that reading less saves
        return torch.bfloat16 if widens or has_native_bf16() else torch.float32
    own = hf_config.get_text_config(decoder=True).dtype
    return own if own in (torch.float16, torch.bfloat16) else torch.bfloat16
