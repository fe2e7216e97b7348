"""A program that fuses tiny models with the operators in Triton, and prints what that changes in their logits.

It has a process of its own, since where there is no GPU the operators are those of the CPU here.
"""

import copy
import json
import sys
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels.cuda.operators import register
from engine.model.fused_modules import FusedDecoderLayer
from engine.model.fusion import fuse_between_layers
from engine.model.placement import replace_parts
from engine.model.probe import probe_layers
from tests.engine.model.fused_models import PlainAttention, fuse, model_of


class Errors(NamedTuple):
    """Differences from the logits of the plain model in float32, as a part of the largest of these."""

    fused: float
    plain: float
    is_same_apart: bool
    """Whether norms that are computed along with the sum before them give the same bits alone."""
    parts: dict[str, int]


def main(names: list[str]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        from tests.gpu.interpreter import make_exact

        make_exact()
        register("CPU")
    for name in names:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            print(json.dumps([name, str(dtype), errors(name, dtype, device)]), flush=True)


def errors(name: str, dtype: torch.dtype, device: torch.device) -> Errors:
    model = model_of(name).to(device, dtype)
    exact, plain = logits(copy.deepcopy(model).float()), logits(model)
    if device.type == "cpu":
        fuse(model)
        fuse_between_layers(model)
    else:
        replace_parts(model, probe_layers(model, model.config, device), device, has_kernels=False)
    parts = Counter(type(module).__name__ for module in model.modules() if type(module).__name__.startswith("Fused"))
    fused, scale = logits(model), float(exact.abs().max())
    for module in model.modules():
        if isinstance(module, FusedDecoderLayer):
            module.next_norm = None
    fused_error, plain_error = (float((each.float() - exact).abs().max()) / scale for each in (fused, plain))
    return Errors(fused_error, plain_error, torch.equal(logits(model), fused), parts)


@torch.inference_mode()
def logits(model: Any) -> Tensor:
    from engine.attention.registry import attention_handler

    with attention_handler(PlainAttention()):
        ids = (torch.arange(7, device=model.device) * 7 % 190)[None]
        positions = torch.arange(7, device=model.device)[None]
        result: Tensor = model(ids, position_ids=positions, use_cache=False).logits
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
