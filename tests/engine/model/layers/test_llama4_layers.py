"""Llama 4's layers in the kernels: queries that are scaled by their position, rows that are weighed before experts."""

import copy
import inspect
import json
from itertools import chain
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from engine.attention import cpu, registry
from engine.attention.kv_cache import KVCache
from engine.model.forward_choice import decoder_parts
from engine.model.fusion import fuse_norms
from engine.model.kernel_forward import KernelForward
from engine.model.kernel_layer import KernelDecoderLayer, move_layers_to_kernels
from engine.runner.forward import TransformersForward
from engine.runner.model_inputs import build_inputs
from engine.weights.linear import prepare_linears
from tests.engine.model.fused_models import fuse, run
from tests.engine.model.steps import BLOCK_SIZE, STEPS, request
from tests.engine.tiny_models import load_tiny, make_checkpoint, make_config

pytestmark = pytest.mark.usefixtures("one_thread", "ops")

SCALE = {"floor_scale": 5, "attn_scale": 0.7}
"""So that queries at 5 positions one after the other have one number, the first 4 of all the number 1."""


def llama4(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    registry.register()
    torch.manual_seed(5)
    config = make_config("llama4")
    for name, value in changes.items():
        setattr(config, name, value)
    settings = {"attn_implementation": registry.ATTENTION_NAME, "dtype": dtype}
    model = transformers.AutoModelForCausalLM.from_config(config, **settings).eval().requires_grad_(False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def are_moved(model: Any) -> list[bool]:
    fuse(model)
    prepare_linears(model, True)
    move_layers_to_kernels(model)
    return [isinstance(layer, KernelDecoderLayer) for layer in model.model.layers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_without_rotations_are_scaled_by_their_position(dtype: torch.dtype) -> None:
    """Heads fill vectors: torch multiplies complex numbers behind the last one with other last bits."""
    fused, unscaled = llama4(dtype, head_dim=32, **SCALE), llama4(dtype, head_dim=32)
    plain = copy.deepcopy(fused)
    fuse_norms(plain)
    fuse(fused)
    for model in (plain, fused):
        prepare_linears(model, True)
    expected, _ = run(plain)
    assert torch.equal(run(fused)[0], expected)
    assert not torch.allclose(run(unscaled)[0], expected)
    move_layers_to_kernels(fused)
    assert torch.equal(run(fused)[0], expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_scales_are_those_of_positions_in_every_step(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own code counts the rows of a step: with so small a scale it is not proved to be right."""
    path = make_checkpoint("llama4", tmp_path)
    settings = path / "config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **SCALE}))
    monkeypatch.setattr("engine.model.loading.layers.prove_paging", lambda *_: None)
    model = load_tiny(path, dtype)
    caches = [KVCache(model.layers, 12, BLOCK_SIZE, model.dtype, model.device) for _ in range(2)]
    for tensor in chain.from_iterable(layer for cache in caches for layer in cache.layers):
        tensor.zero_()
    fast, plain = (
        KernelForward(decoder_parts(model.module), caches[0]),
        TransformersForward(model.module, caches[1], cpu),
    )
    for step in STEPS:
        inputs = build_inputs([request(*each) for each in step], BLOCK_SIZE, torch.device("cpu"))
        for kept in (None, [20, 3]):
            assert torch.equal(fast(inputs, kept).logits, plain(inputs, kept).logits)
    for one, other in zip(*([*chain.from_iterable(cache.layers)] for cache in caches), strict=True):
        assert torch.equal(one, other)


def test_layers_whose_rows_several_experts_read_stay() -> None:
    assert are_moved(llama4()) == [True, True, True]
    assert are_moved(llama4(num_experts_per_tok=2)) == [False, False, True]


def test_an_attention_that_rotates_in_another_way_stays() -> None:
    model = llama4()
    attention = model.model.layers[1].self_attn
    forward = inspect.unwrap(type(attention).forward)
    names = {**forward.__globals__, "apply_rotary_emb": lambda query, key, _: (query, key)}
    other = FunctionType(forward.__code__, names, "forward", forward.__defaults__)
    attention.__class__ = type("Other", (type(attention),), {"forward": other, "__module__": forward.__module__})
    assert are_moved(model) == [True, False, True]


def test_heads_without_norms_are_known_too() -> None:
    model = llama4(use_qk_norm=False)
    assert are_moved(model) == [True, True, True]
    assert all(layer.layer.self_attn.q_norm is None for layer in model.model.layers)
