"""Recognizes modules of transformers by the fingerprint of their code, so that fused ones can replace them.

transformers copies code from model to model: `Qwen3MLP.forward` is, instruction for instruction, `LlamaMLP.forward`.
So a model that is not known by name may consist of parts that are, and one that changes a line is not mistaken. If
transformers changes Llama itself, `engine.model.probe.check_same` detects it.
"""

import dis
import functools
import inspect
import sys
from types import CodeType, FunctionType
from typing import Any, cast

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.mixtral import modeling_mixtral
from transformers.models.olmoe import modeling_olmoe
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

from engine.weights.module_replacement import has_hooks

__all__ = [
    "caps_logits",
    "is_attention",
    "is_attention_with_norms",
    "is_causal_lm",
    "is_decoder",
    "is_decoder_layer",
    "is_embedding",
    "is_gated_mlp",
    "is_half_rotary_embedding",
    "is_late_router",
    "is_mixture",
    "is_normalizing_router",
    "is_rms_norm",
    "is_rotary_embedding",
    "is_rotary_embedding_by_type",
    "is_rounding_router",
    "is_sandwich_layer",
    "is_scaled_embedding",
    "is_unrounded_rms_norm",
    "is_zero_centered_rms_norm",
]

_ATTENTIONS = (
    modeling_llama.LlamaAttention,
    modeling_qwen2.Qwen2Attention,  # with a sliding window
    modeling_mistral.MistralAttention,  # with a sliding window, configured in another way
    modeling_gemma2.Gemma2Attention,  # with a softcap
)

_DECODERS = (
    modeling_llama.LlamaModel,
    modeling_qwen2.Qwen2Model,  # with masks, which are not used here
    modeling_mistral.MistralModel,
    modeling_mixtral.MixtralModel,
    modeling_qwen3_moe.Qwen3MoeModel,
    modeling_gemma2.Gemma2Model,
    modeling_gpt_oss.GptOssModel,
)
_DECODER_LAYERS = (
    modeling_llama.LlamaDecoderLayer,
    modeling_mixtral.MixtralDecoderLayer,
    modeling_gpt_oss.GptOssDecoderLayer,
)
_MIXTURES = (
    modeling_mixtral.MixtralSparseMoeBlock,  # with noise, in training
    modeling_olmoe.OlmoeSparseMoeBlock,
    modeling_qwen3_moe.Qwen3MoeSparseMoeBlock,
    modeling_gpt_oss.GptOssMLP,  # whose router has another name, and which returns its scores, too
)
_MIXTURES_FOR_CAUSAL_LM = (
    modeling_mixtral.MixtralForCausalLM,
    modeling_qwen3_moe.Qwen3MoeForCausalLM,
    modeling_gpt_oss.GptOssForCausalLM,
)
_FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # their frequencies are the same in every batch


def is_rms_norm(module: nn.Module) -> bool:
    """Whether the module is an RMSNorm that rounds before it multiplies by its weight."""
    return _is_like(module, modeling_llama.LlamaRMSNorm)


def is_unrounded_rms_norm(module: nn.Module) -> bool:
    """Whether the module is an RMSNorm that rounds once, at the end."""
    return _is_like(module, modeling_gpt_oss.GptOssRMSNorm)


def is_zero_centered_rms_norm(module: nn.Module) -> bool:
    """Whether the module is an RMSNorm that multiplies by one more than its weight, and rounds once, at the end."""
    kind = modeling_gemma2.Gemma2RMSNorm
    return _is_like(module, kind) and _is_same(getattr(type(module), "_norm", None), kind._norm)


def is_gated_mlp(module: nn.Module) -> bool:
    return _is_like(module, modeling_llama.LlamaMLP)


def is_decoder_layer(module: nn.Module) -> bool:
    """Whether the module norms what its attention and its MLP read."""
    return any(_is_like(module, kind) for kind in _DECODER_LAYERS)


def is_sandwich_layer(module: nn.Module) -> bool:
    """Whether the module norms what its attention and its MLP read, and what they add."""
    return any(_is_like(module, kind) for kind in (modeling_gemma2.Gemma2DecoderLayer, *_gemma3("Gemma3DecoderLayer")))


def is_embedding(module: nn.Module) -> bool:
    return _is_like(module, nn.Embedding) and module.max_norm is None


def is_scaled_embedding(module: nn.Module) -> bool:
    """Whether the module is an embedding whose rows are multiplied by `embed_scale`."""
    is_like = _is_like(module, modeling_gemma2.Gemma2TextScaledWordEmbedding)
    return is_like and type(module).__mro__[1] is nn.Embedding and module.max_norm is None


def is_rotary_embedding(module: nn.Module) -> bool:
    """Whether the module is a rotary embedding whose `inv_freq` never changes."""
    return _is_like(module, modeling_llama.LlamaRotaryEmbedding) and module.rope_type in _FIXED_ROPE_TYPES


def is_half_rotary_embedding(module: nn.Module) -> bool:
    """Whether it is such a one, and returns only one of the two equal halves of its tables."""
    return _is_like(module, modeling_gpt_oss.GptOssRotaryEmbedding) and module.rope_type in _FIXED_ROPE_TYPES


def is_rotary_embedding_by_type(module: nn.Module) -> bool:
    """Whether the module is a rotary embedding with frequencies for each type of layers, which never change."""
    is_like = any(_is_like(module, kind) for kind in _gemma3("Gemma3RotaryEmbedding"))
    return is_like and {*cast("dict[str, str]", module.rope_type).values()} <= {*_FIXED_ROPE_TYPES}


def is_decoder(module: nn.Module) -> bool:
    """Whether the module is a decoder: an embedding, layers one after the other, a final norm."""
    return any(_is_like(module, kind) for kind in (*_DECODERS, *_gemma3("Gemma3TextModel")))


def is_causal_lm(module: nn.Module) -> bool:
    """Whether the module is a decoder with a language-model head, and returns nothing of its routers."""
    is_mixture = any(_is_like(module, kind) for kind in _MIXTURES_FOR_CAUSAL_LM)
    return (
        _is_like(module, modeling_llama.LlamaForCausalLM)
        or caps_logits(module)
        or (is_mixture and not cast(Any, module).config.output_router_logits)
    )


def caps_logits(module: nn.Module) -> bool:
    """Whether the module is such a one, and its logits are capped by `final_logit_softcapping` if its config has it."""
    return any(_is_like(module, kind) for kind in (modeling_gemma2.Gemma2ForCausalLM, *_gemma3("Gemma3ForCausalLM")))


def is_mixture(module: nn.Module) -> bool:
    """Whether the module routes rows to `experts` by `gate` or `router`, and does nothing else."""
    return any(_is_like(module, kind) for kind in _MIXTURES) and not module.training


def is_normalizing_router(module: nn.Module) -> bool:
    """Whether the module chooses the likeliest of all experts, by a softmax; their weights add up to one."""
    return _is_like(module, modeling_mixtral.MixtralTopKRouter)


def is_rounding_router(module: nn.Module) -> bool:
    """Whether the module does so with weights of the rows' dtype, which add up to one if `norm_topk_prob`."""
    return _is_like(module, modeling_qwen3_moe.Qwen3MoeTopKRouter)


def is_late_router(module: nn.Module) -> bool:
    """Whether the module chooses the likeliest experts, whose weights are a softmax over the chosen alone."""
    return _is_like(module, modeling_gpt_oss.GptOssTopKRouter)


def is_attention(module: nn.Module) -> bool:
    if _is_like(module, modeling_gpt_oss.GptOssAttention):
        return _rotates_as_gpt_oss(module)
    return any(_is_like(module, kind) for kind in _ATTENTIONS) and _rotates_as_llama(module)


def is_attention_with_norms(module: nn.Module) -> bool:
    """Whether the module is an attention that norms the heads of queries and keys, by `q_norm` and `k_norm`."""
    kinds = (modeling_qwen3.Qwen3Attention, *_gemma3("Gemma3Attention"))
    return any(_is_like(module, kind) for kind in kinds) and _rotates_as_llama(module)


def _gemma3(name: str) -> tuple[type[nn.Module], ...]:
    """Returns a class of Gemma 3's if its code was loaded: it takes that of images with it."""
    module = sys.modules.get("transformers.models.gemma3.modeling_gemma3")
    return () if module is None else (getattr(module, name),)


def _is_like(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether nothing but the code of `kind` runs when the module is called."""
    is_overridden = "forward" in vars(module) or type(module).__call__ not in (
        nn.Module.__call__,
        GradientCheckpointingLayer.__call__,
    )
    return not is_overridden and not has_hooks(module) and _is_same(type(module).forward, kind.forward)


def _rotates_as_llama(attention: nn.Module) -> bool:
    """Whether the rotary functions that the attention calls are Llama's.

    Its code calls one by name, and that another one: each is looked up in the globals of its caller.
    """
    rotate = _global(type(attention).forward, "apply_rotary_pos_emb")
    return _is_same(rotate, modeling_llama.apply_rotary_pos_emb) and _is_same(
        _global(rotate, "rotate_half"), modeling_llama.rotate_half
    )


def _rotates_as_gpt_oss(attention: nn.Module) -> bool:
    """Whether they are gpt-oss's, which compute the same of tables with one of two equal halves."""
    rotate = _global(type(attention).forward, "apply_rotary_pos_emb")
    return _is_same(rotate, modeling_gpt_oss.apply_rotary_pos_emb) and _is_same(
        _global(rotate, "_apply_rotary_emb"), modeling_gpt_oss._apply_rotary_emb
    )


def _global(function: object, name: str) -> object:
    """Returns what a name of the module stands for in which the function was written, whatever is wrapped around it."""
    written = inspect.unwrap(function) if isinstance(function, FunctionType) else function
    return written.__globals__.get(name) if isinstance(written, FunctionType) else None


def _is_same(one: object, other: object) -> bool:
    return (
        isinstance(one, FunctionType) and isinstance(other, FunctionType) and _fingerprint(one) == _fingerprint(other)
    )


def _fingerprint(function: FunctionType) -> tuple[object, ...]:
    """Returns all that decides what a function does, with what it wraps; not name, file, docstring and type hints."""
    wrapped = getattr(function, "__wrapped__", None)
    return (
        _code_fingerprint(function.__code__),
        function.__defaults__,
        function.__kwdefaults__,
        _fingerprint(wrapped) if isinstance(wrapped, FunctionType) else wrapped,
    )


@functools.cache
def _code_fingerprint(code: CodeType) -> tuple[object, ...]:
    """Returns each instruction with its operand. No instruction reads the docstring, though that is a constant."""
    operands = ((each.opcode, each.argval) for each in dis.get_instructions(code))
    instructions = ((opcode, _code_fingerprint(it) if isinstance(it, CodeType) else it) for opcode, it in operands)
    return (code.co_varnames, *instructions)
