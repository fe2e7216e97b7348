"""Launches of experts in Triton, for few rows and many; they are compiled, not run."""

import torch

from engine.kernels.cuda.experts import Experts, add_slots, multiply_by_experts, sort_slots
from engine.kernels.cuda.linear import Rows, sum_order


def launch_all() -> None:
    """Launches experts in all their tiles."""
    num_experts, num_out, num_in = 128, 1536, 2048
    for dtype in (torch.bfloat16, torch.float32):
        order = sum_order(num_out, num_in, dtype)
        addresses, biases = torch.zeros(num_experts, dtype=torch.int64), torch.zeros(num_experts, num_out, dtype=dtype)
        experts = Experts(addresses, biases, num_out, num_in, num_in, order, dtype, None)
        for rows, is_sorted in ((1, True), (512, False), (4096, False)):
            chosen = torch.zeros(rows, 8, dtype=torch.int64)
            x = torch.zeros(8 * rows if is_sorted else rows, num_in, dtype=dtype)
            y = multiply_by_experts(Rows(x, dtype), experts, sort_slots(chosen, num_experts), is_sorted)
            add_slots(y, chosen, torch.zeros(rows, 8, dtype=dtype), num_experts)
