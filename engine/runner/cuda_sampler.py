"""Samples on a CUDA device: each step's numbers go there in one copy, and its tokens come back in one."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.core.batch import ScheduledRequest
from engine.kernels.cuda.logits import add_biases, masked, penalize
from engine.kernels.cuda.sampling import argmax, draw, weigh
from engine.runner.adjustments import Adjustments
from engine.runner.sampler import Sampler
from engine.runner.token_draw import controls_of
from engine.runner.upload import upload

__all__ = ["CudaSampler"]


class CudaSampler(Sampler):
    """Samples rows as `Sampler` does, with Triton's kernels, and without a sort.

    A row's token is a function of that row alone: the one that `draw_weighed` draws by the weights that the device
    computes. Those may differ from the CPU's, whose e**x has other last bits. Its state is a cache: counts of the
    tokens of requests that have penalties.
    """

    def __init__(self, device: torch.device, eos_token_ids: tuple[int, ...]) -> None:
        super().__init__(device, False, eos_token_ids)
        self._adjustments = Adjustments(eos_token_ids)

    def sample(self, logits: Tensor, requests: Sequence[ScheduledRequest]) -> list[int | None]:
        if not requests:
            return []
        controls = controls_of(requests).numpy()
        drawn = controls[controls[:, 0] > 0]
        adjustments = self._adjustments.of(requests, logits.shape[1])
        step = upload({"controls": controls, **adjustments}, logits.device)
        logits = adjusted(logits, step) if adjustments else logits
        likeliest = sampled = argmax(logits)
        if len(drawn):
            rows = (likeliest, step["controls"])
            has_top_k, has_top_p = bool((drawn[:, 2] > 0).any()), bool((drawn[:, 3] < 1).any())
            sampled = draw(weigh(logits, *rows), *rows, has_top_k=has_top_k, has_top_p=has_top_p)
        return [None if token_id < 0 else token_id for token_id in sampled.tolist()]


def adjusted(logits: Tensor, step: Mapping[str, Tensor]) -> Tensor:
    """Returns the logits [num_rows, vocab] in float32 with the step's adjustments, which `Adjustments` made. Rows
    without any have the same numbers as before."""
    result = masked(logits, step["masks"], step["mask_of_row"], step["forced"])
    add_biases(result, logits, step["forced"], *(step[name] for name in ("biased_rows", "biased_ids", "biases")))
    names = ("penalized_rows", "penalized_ids", "factors", "amounts")
    penalize(result, logits, step["forced"], *(step[name] for name in names))
    return result
