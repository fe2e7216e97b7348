"""Layers that are two calls into C++ compute, bit for bit, what their fused modules do, over a cache and states."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention import cpu
from engine.attention.kv_cache import KVCache
from engine.mixers.state import StateCache
from engine.model.kernel_layer import KernelLayer
from engine.runner.forward import TransformersForward
from engine.runner.loaded_model import LoadedModel
from engine.runner.model_inputs import build_inputs
from tests.crossed import crossed
from tests.engine.further_configs import HYBRIDS
from tests.engine.model.steps import BLOCK_SIZE, STEPS, request
from tests.engine.tiny_models import load_tiny, make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread", "kernels")

NAMES = ("qwen3_5", "lfm2", "granite4", *HYBRIDS)
SLOTS = {0: 2, 7: 0, 4: 1}
"""The slot of each request, by its first block."""


@torch.inference_mode()
def run(model: LoadedModel) -> list[Tensor]:
    """Returns the logits of all steps, and what the cache and the states have then."""
    cache = KVCache(model.layers, 12, BLOCK_SIZE, model.dtype, model.device)
    states = StateCache(model.states, 3, model.device)
    kept = [*(each for layer in cache.layers for each in layer), *states.states]
    for each in kept:
        each.zero_()
    forward = TransformersForward(model.module, cache, cpu, states)
    batches = [[replace(request(*each), state_slot=SLOTS[each[2][0]]) for each in step] for step in STEPS]
    logits = [forward(build_inputs(batch, BLOCK_SIZE, model.device), None).logits.clone() for batch in batches]
    return [*logits, *kept]


def unwrap(layers: Any) -> None:
    """Puts the fused modules in the place of the layers that were made from them."""
    for index, layer in enumerate(layers):
        assert isinstance(layer, KernelLayer)
        layers[index] = layer.layer


@pytest.mark.parametrize(
    ("name", "dtype", "quantization"), crossed(NAMES, ("float32", "bfloat16"), ("none", "int8", "int4"))
)
def test_whole_layers_change_no_bit_of_logits_cache_and_states(
    name: str, dtype: str, quantization: str, tmp_path: Path
) -> None:
    model = load_tiny(make_checkpoint(name, tmp_path), dtype, quantization)
    results = run(model)
    unwrap(model.module.base_model.layers)
    assert all(map(torch.equal, results, run(model)))
