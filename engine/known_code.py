"""Tells whether a module of transformers computes what is known here, by comparing its code.

transformers copies code from model to model: `Qwen3MLP.forward` is, instruction for instruction, `LlamaMLP.forward`. A
model that is not known by name may so be made of parts that are, and one that changes a line is not mistaken.
"""

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

__all__ = ["is_attention", "is_decoder_layer", "is_gated_mlp", "is_rms_norm"]

Function = Callable[..., Any]

_ATTENTIONS = (
    modeling_llama.LlamaAttention,
    modeling_qwen2.Qwen2Attention,  # with a sliding window
    modeling_mistral.MistralAttention,  # that too, by another way
    modeling_qwen3.Qwen3Attention,  # and with norms of queries and keys
)
_HELPERS = ("apply_rotary_pos_emb", "rotate_half")  # what an attention's code calls by name


def is_rms_norm(module: nn.Module) -> bool:
    return _is_like(module, modeling_llama.LlamaRMSNorm)


def is_gated_mlp(module: nn.Module) -> bool:
    return _is_like(module, modeling_llama.LlamaMLP)


def is_decoder_layer(module: nn.Module) -> bool:
    return _is_like(module, modeling_llama.LlamaDecoderLayer)


def is_attention(module: nn.Module) -> bool:
    return any(_is_like(module, kind) for kind in _ATTENTIONS) and all(
        _same_code(_global(type(module).forward, name), getattr(modeling_llama, name)) for name in _HELPERS
    )


def _is_like(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether nothing but the code of `kind` runs when the module is called."""
    is_watched = module._forward_hooks or module._forward_pre_hooks
    return not is_watched and _same_code(type(module).forward, kind.forward)


def _global(function: Function, name: str) -> Function | None:
    """What the function finds under a global name."""
    found = inspect.unwrap(function).__globals__.get(name)
    return found if callable(found) else None


def _same_code(one: Function | None, other: Function) -> bool:
    if one is None:
        return False
    codes = [getattr(inspect.unwrap(function), "__code__", None) for function in (one, other)]
    return codes[0] is not None and codes[1] is not None and _essence(codes[0]) == _essence(codes[1])


def _essence(code: CodeType) -> tuple[object, ...]:
    """All that a function's code does; not its name, its file, its documentation and its type hints."""
    constants = tuple(_essence(c) if isinstance(c, CodeType) else c for c in code.co_consts if not isinstance(c, str))
    return (code.co_code, constants, code.co_names, code.co_varnames)
