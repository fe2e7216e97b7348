"""A program that fuses tiny models with the operators in Triton, and prints what that changes in their logits.

It has a process of its own, since where there is no GPU the operators are those of the CPU here.
"""

import copy
import json
import sys
from collections import Counter
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from engine.kernels.cuda import linear
from engine.kernels.cuda.operators import register
from engine.model.fused_layer import FusedDecoderLayer
from engine.model.fused_modules import FusedAttention, FusedMLP
from engine.model.fusion import fuse_between_layers, fuse_modules
from engine.model.loading.preparation import replace_parts
from engine.model.probe import probe_layers
from engine.weights.linear import PackedLinear, is_linear
from engine.weights.module_replacement import replace_modules
from engine.weights.triton_weight import TritonWeight
from tests.engine.model.fused_models import PlainAttention, model_of
from tests.engine.tiny_models import COMMON


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
        if name == "segments":
            print(json.dumps(are_segments_added_alike(device)))
            continue
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            print(json.dumps([name, str(dtype), errors(name, dtype, device)]), flush=True)


@mock.patch.object(linear, "_MIN_SEGMENT", 16)
def are_segments_added_alike(device: torch.device) -> bool:
    """Whether products whose segments are added along with a norm give the same bits as those that are added alone."""
    with mock.patch.dict(COMMON, {"intermediate_size": 256, "head_dim": 64}):
        model = model_of("llama").to(device)
    register(device.type.upper())
    _fuse(model, device)
    replace_modules(model, lambda each: PackedLinear(TritonWeight(each.weight), None) if is_linear(each) else None)
    with mock.patch.object(torch.ops.twostep, "add_rms_norm", side_effect=AssertionError):
        together = logits(model)
    for module in model.modules():
        if isinstance(module, FusedAttention | FusedMLP):
            module.leaves_sum = False
    return torch.equal(together, logits(model))


def errors(name: str, dtype: torch.dtype, device: torch.device) -> Errors:
    model = model_of(name).to(device, dtype)
    exact, plain = logits(copy.deepcopy(model).float()), logits(model)
    if device.type == "cpu":
        _fuse(model, device)
    else:
        replace_parts(model, probe_layers(model, device), device, has_kernels=False)
    parts = Counter(type(module).__name__ for module in model.modules() if type(module).__name__.startswith("Fused"))
    fused, scale = logits(model), float(exact.abs().max())
    for module in model.modules():
        if isinstance(module, FusedDecoderLayer):
            module.next_norm = None
    fused_error, plain_error = (float((each.float() - exact).abs().max()) / scale for each in (fused, plain))
    return Errors(fused_error, plain_error, torch.equal(logits(model), fused), parts)


def _fuse(model: Any, device: torch.device) -> None:
    fuse_modules(model, probe_layers(model, device))
    fuse_between_layers(model)


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
