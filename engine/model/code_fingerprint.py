"""Tells whether a module of transformers computes what is known here, by comparing its code.

transformers copies code from model to model: `Qwen3MLP.forward` is, instruction for instruction, `LlamaMLP.forward`. A
model that is not known by name may so be made of parts that are, and one that changes a line is not mistaken. Should
transformers change Llama itself, `engine.model.probe.check_same` finds out.
"""

import dis
import functools
from types import CodeType, FunctionType

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from engine.weights.module_replacement import has_hooks

__all__ = [
    "is_attention",
    "is_attention_with_norms",
    "is_causal_lm",
    "is_decoder",
    "is_decoder_layer",
    "is_embedding",
    "is_gated_mlp",
    "is_rms_norm",
    "is_rotary_embedding",
]

_ATTENTIONS = (
    modeling_llama.LlamaAttention,
    modeling_qwen2.Qwen2Attention,  # with a sliding window
    modeling_mistral.MistralAttention,  # that too, by another way
)

_DECODERS = (
    modeling_llama.LlamaModel,
    modeling_qwen2.Qwen2Model,  # with masks, which are not used here
    modeling_mistral.MistralModel,
)
_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")  # their frequencies are the same in every batch


def is_rms_norm(module: nn.Module) -> bool:
    return _is_like(module, modeling_llama.LlamaRMSNorm)


def is_gated_mlp(module: nn.Module) -> bool:
    return _is_like(module, modeling_llama.LlamaMLP)


def is_decoder_layer(module: nn.Module) -> bool:
    return _is_like(module, modeling_llama.LlamaDecoderLayer)


def is_embedding(module: nn.Module) -> bool:
    return _is_like(module, nn.Embedding) and module.max_norm is None


def is_rotary_embedding(module: nn.Module) -> bool:
    """One whose `inv_freq` never changes."""
    return _is_like(module, modeling_llama.LlamaRotaryEmbedding) and module.rope_type in _FIXED_ROTATIONS


def is_decoder(module: nn.Module) -> bool:
    """Embedding, layers one after the other, norm."""
    return any(_is_like(module, kind) for kind in _DECODERS)


def is_causal_lm(module: nn.Module) -> bool:
    """A decoder and a head."""
    return _is_like(module, modeling_llama.LlamaForCausalLM)


def is_attention(module: nn.Module) -> bool:
    return any(_is_like(module, kind) for kind in _ATTENTIONS) and _rotates_as_llama(module)


def is_attention_with_norms(module: nn.Module) -> bool:
    """With norms of the queries' and keys' heads, `q_norm` and `k_norm`."""
    return _is_like(module, modeling_qwen3.Qwen3Attention) and _rotates_as_llama(module)


def _is_like(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether nothing but the code of `kind` runs when the module is called."""
    is_overridden = "forward" in vars(module) or type(module).__call__ not in (
        nn.Module.__call__,
        GradientCheckpointingLayer.__call__,
    )
    return not is_overridden and not has_hooks(module) and _is_same(type(module).forward, kind.forward)


def _rotates_as_llama(attention: nn.Module) -> bool:
    """Its code calls a function by name, and that another: each is looked up where its caller finds it."""
    rotate = _global(type(attention).forward, "apply_rotary_pos_emb")
    return _is_same(rotate, modeling_llama.apply_rotary_pos_emb) and _is_same(
        _global(rotate, "rotate_half"), modeling_llama.rotate_half
    )


def _global(function: object, name: str) -> object:
    return function.__globals__.get(name) if isinstance(function, FunctionType) else None


def _is_same(one: object, other: object) -> bool:
    return isinstance(one, FunctionType) and isinstance(other, FunctionType) and _essence(one) == _essence(other)


def _essence(function: FunctionType) -> tuple[object, ...]:
    """All that a function does, its wrappers too; not its name, its file, its documentation and its type hints."""
    wrapped = getattr(function, "__wrapped__", None)
    return (
        _code_essence(function.__code__),
        function.__defaults__,
        function.__kwdefaults__,
        _essence(wrapped) if isinstance(wrapped, FunctionType) else wrapped,
    )


@functools.cache
def _code_essence(code: CodeType) -> tuple[object, ...]:
    """Each instruction with what it reads. None reads the documentation, though it is one of the constants."""
    operands = ((each.opcode, each.argval) for each in dis.get_instructions(code))
    instructions = ((opcode, _code_essence(it) if isinstance(it, CodeType) else it) for opcode, it in operands)
    return (code.co_varnames, *instructions)
