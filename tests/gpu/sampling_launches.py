"""Launches of every kernel that samples; they are compiled, not run."""

import torch

from engine.kernels.cuda import logits, sampling


def launch_all() -> None:
    """Launches each kernel in each of its configurations, for vocabularies that are multiples of 16 or not."""
    for vocab_size, dtype in ((151_936, torch.bfloat16), (50_257, torch.float16), (262_144, torch.float32)):
        numbers = torch.zeros(2, vocab_size, dtype=dtype)
        _launch_adjustments(numbers)
        rows = (sampling.argmax(numbers), torch.zeros(2, 5, dtype=torch.float64))
        weights = sampling.weigh(numbers, *rows)
        for has_top_k, has_top_p in ((False, False), (False, True), (True, True)):
            sampling.draw(weights, *rows, has_top_k=has_top_k, has_top_p=has_top_p)


def _launch_adjustments(numbers: torch.Tensor) -> None:
    masks = torch.zeros(2, -(-numbers.shape[1] // 8), dtype=torch.uint8)
    of_rows, ids = torch.zeros(2, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    adjusted, amounts = logits.masked(numbers, masks, of_rows, of_rows), torch.zeros(5)
    logits.add_biases(adjusted, numbers, of_rows, ids, ids, amounts)
    logits.penalize(adjusted, numbers, of_rows, ids, ids, amounts, amounts)
