"""Chooses what samples and scores tokens on a device."""

import torch

from engine.runner.cuda_scorer import CudaScorer
from engine.runner.logprobs import Scorer
from engine.runner.sampler import Sampler

__all__ = ["choose_sampler", "choose_scorer"]


def choose_sampler(device: torch.device, has_kernels: bool, eos_token_ids: tuple[int, ...]) -> Sampler:
    """Returns the sampler for this device."""
    if device.type != "cuda":
        return Sampler(device, has_kernels, eos_token_ids)
    from engine.runner.cuda_sampler import CudaSampler  # imports Triton, which only CUDA builds of torch bring

    return CudaSampler(device, eos_token_ids)


def choose_scorer(device: torch.device, has_kernels: bool) -> Scorer:
    """Returns the scorer for this device."""
    return CudaScorer() if device.type == "cuda" else Scorer(has_kernels)
