"""Samples on a CUDA device: each step's numbers go there in one copy, and its tokens come back in one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.core.batch import ScheduledRequest
from engine.kernels.cuda.sampling import argmax, draw, weigh
from engine.runner.logits_processors import adjusts_logits
from engine.runner.sampler import Sampler
from engine.runner.token_draw import controls_of
from engine.runner.upload import upload

__all__ = ["CudaSampler"]


class CudaSampler(Sampler):
    """Samples rows as `Sampler` does, with Triton's kernels, and without a sort.

    A row's token is a function of that row alone: the one that `draw_weighed` draws by the weights that the device
    computes. Those may differ from the CPU's, whose e**x has other last bits.
    """

    def __init__(self, device: torch.device, eos_token_ids: tuple[int, ...]) -> None:
        super().__init__(device, False, eos_token_ids)

    def sample(self, logits: Tensor, requests: Sequence[ScheduledRequest]) -> list[int | None]:
        if not requests:
            return []
        controls = controls_of(requests).numpy()
        drawn = controls[controls[:, 0] > 0]
        on_device = upload({"controls": controls}, logits.device)
        logits = self._processed(logits, requests)
        likeliest = sampled = argmax(logits)
        if len(drawn):
            rows = (likeliest, on_device["controls"])
            has_top_k, has_top_p = bool((drawn[:, 2] > 0).any()), bool((drawn[:, 3] < 1).any())
            sampled = draw(weigh(logits, *rows), *rows, has_top_k=has_top_k, has_top_p=has_top_p)
        return [None if token_id < 0 else token_id for token_id in sampled.tolist()]

    def _processed(self, logits: Tensor, requests: Sequence[ScheduledRequest]) -> Tensor:
        """Returns the logits, in float32 if there is any to be changed. That changes no token of the other rows."""
        if not any(request.allowed_tokens or adjusts_logits(request) for request in requests):
            return logits
        return self._process(logits, requests)
