"""Code is recognized by its instructions, its constants and the functions behind the names that it looks up."""

import functools
from types import FunctionType
from typing import Any

import pytest
from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from engine.model.known import code_fingerprint, same_code
from tests.engine.tiny_models import make_config


class Doubling(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj + down_proj


class Wrapped(LlamaMLP):
    @functools.wraps(LlamaMLP.forward)
    def forward(self, *args: Any) -> Tensor:
        return 2 * LlamaMLP.forward(self, *args)


class Called(LlamaMLP):
    def __call__(self, *args: Any) -> Any:
        return 2 * super().__call__(*args)


@pytest.mark.parametrize("kind", [Doubling, Wrapped, Called])
def test_a_class_that_computes_something_else_is_not_known(kind: type[LlamaMLP]) -> None:
    assert code_fingerprint.is_gated_mlp(LlamaMLP(make_config("llama")))
    assert not code_fingerprint.is_gated_mlp(kind(make_config("llama")))


def test_a_module_whose_forward_was_replaced_is_not_known() -> None:
    mlp = LlamaMLP(make_config("llama"))
    mlp.forward = lambda x: x
    assert not code_fingerprint.is_gated_mlp(mlp)


def copy_of(function: FunctionType, *defaults: object, **names: object) -> FunctionType:
    """Returns a copy of the function with other defaults, and with other globals under `names`."""
    return FunctionType(function.__code__, {**function.__globals__, **names}, "copy", defaults or None)


def attention_that_rotates_by(rotate: FunctionType) -> nn.Module:
    class Attention(LlamaAttention):
        forward = copy_of(LlamaAttention.forward, None, None, None, apply_rotary_pos_emb=rotate)

    return Attention(make_config("llama"), 0)


def test_an_attention_in_a_decorator_of_transformers_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names that its code looks up are those of its own module, not of the decorator's."""
    attention = LlamaAttention(make_config("llama"), 0)
    written = LlamaAttention.forward
    elsewhere: dict[str, Any] = {}
    exec("def wrapper(*args, **kwargs):\n    return wrapper.__wrapped__(*args, **kwargs)", elsewhere)
    monkeypatch.setattr(LlamaAttention, "forward", functools.update_wrapper(elsewhere["wrapper"], written))
    assert code_fingerprint.is_attention(attention)


def test_an_attention_that_rotates_in_another_way_is_not_known() -> None:
    rotate = modeling_llama.apply_rotary_pos_emb
    turned = copy_of(rotate, 1, rotate_half=lambda x: x)
    assert code_fingerprint.is_attention(attention_that_rotates_by(copy_of(rotate, 1)))
    assert not code_fingerprint.is_attention(attention_that_rotates_by(copy_of(rotate, 2)))
    assert not code_fingerprint.is_attention(attention_that_rotates_by(turned))


ROTATE_HALF = """
import torch
def rotate_half(x):
    "In other words."
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)
"""


def is_rotate_half(source: str) -> bool:
    names: dict[str, Any] = {}
    exec(source, names)
    return same_code.is_same(names["rotate_half"], modeling_llama.rotate_half)


def test_documentation_makes_no_difference() -> None:
    assert is_rotate_half(ROTATE_HALF)
    assert is_rotate_half(ROTATE_HALF.replace('"In other words."', ""))


def test_constants_make_a_difference() -> None:
    assert not is_rotate_half(ROTATE_HALF.replace("dim=-1", "dim=-2"))
    assert not is_rotate_half(ROTATE_HALF.replace('"In other words."', "...").replace("x.shape[-1] // 2 :", "2 :"))
