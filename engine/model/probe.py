"""A tiny forward pass that records the attention calls and states of all layers, and refuses what cannot run paged."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from engine.attention.kv_cache import CompressedShape, LayerShape, VectorShape
from engine.attention.metadata import CompressedCall
from engine.attention.registry import AttentionCall, attention_handler
from engine.core.errors import UnsupportedModelError
from engine.mixers.metadata import StateMetadata
from engine.mixers.registry import JointMixer, Mixer, state_handler
from engine.mixers.state import StateShape
from engine.model.refusals import refused_if_it_fails

_NUM_TOKENS = 2


class _Recorder:
    """A handler that records every attention call, which returns zeros, and the shape of every mixer's state."""

    def __init__(self, device: torch.device) -> None:
        self.calls: dict[int, AttentionCall] = {}
        self.states: list[StateShape] = []
        self._metadata = StateMetadata([0], [_NUM_TOKENS], [True], device)

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls[call.layer] = call
        num_tokens, num_heads, _ = call.query.shape
        return call.query.new_zeros(num_tokens, num_heads, call.value.shape[-1])

    def advance(self, mixer: Mixer) -> Tensor:
        return mixer.advance(self._new_states(mixer.state_shape), self._metadata)

    def advance_jointly(self, mixer: JointMixer) -> Tensor:
        states = tuple(map(self._new_states, mixer.state_shapes))
        return mixer.advance(states, self._metadata)

    def _new_states(self, shape: StateShape) -> Tensor:
        self.states.append(shape)
        return torch.zeros(1, *shape.sizes, dtype=shape.dtype, device=self._metadata.slots.device)


class ProbedLayers(NamedTuple):
    """What a forward pass showed."""

    calls: tuple[AttentionCall, ...]
    """The attention call of each layer that has attention."""
    states: tuple[StateShape, ...]
    """The shape of each state, in the order in which its mixers run."""


def probe(module: PreTrainedModel, device: torch.device) -> ProbedLayers:
    """Runs the model once, which reads all weights of one that is not packed yet.

    Raises UnsupportedModelError, with the model's name and the reason; a lack of memory is raised as it is.
    """
    recorder = _record(module, device)
    _check_layers(type(module).__name__, module.config.get_text_config(decoder=True), recorder)
    return ProbedLayers(tuple(recorder.calls[layer] for layer in sorted(recorder.calls)), tuple(recorder.states))


def probe_layers(module: PreTrainedModel, device: torch.device) -> tuple[AttentionCall, ...]:
    """Runs the model once; returns the attention call of each layer that has attention. Raises as `probe` does."""
    return probe(module, device).calls


def _record(module: PreTrainedModel, device: torch.device) -> _Recorder:
    name = type(module).__name__
    recorder = _Recorder(device)
    token_ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.long, device=device)
    positions = torch.arange(_NUM_TOKENS, device=device)[None]
    with (
        refused_if_it_fails(f"{name} cannot run over a paged KV cache"),
        torch.inference_mode(),
        attention_handler(recorder),
        state_handler(recorder),
    ):
        module(input_ids=token_ids, position_ids=positions, use_cache=False)
    return recorder


def layer_shape(call: AttentionCall) -> LayerShape:
    """Returns what the layer caches per token."""
    sizes = call.key.shape[1], call.key.shape[2], call.value.shape[2]
    index = None
    if call.sparse is not None and call.sparse.layer == call.layer:
        index = VectorShape(call.sparse.key.shape[1], call.sparse.key.dtype)
    compressed = _compressed_shape(call.compressed) if call.compressed is not None else None
    return LayerShape(*sizes, call.layer, call.params.sliding_window, call.is_latent, index, compressed)


def _compressed_shape(call: CompressedCall) -> CompressedShape:
    raw, key = call.raw, None if call.choice is None else call.choice.key
    index = None if key is None else VectorShape(key.shape[1], key.dtype)
    return CompressedShape(call.ratio, VectorShape(raw.shape[1], raw.dtype), index)


def _check_layers(name: str, text_config: PreTrainedConfig, recorder: _Recorder) -> None:
    """Refuses what is known to be wrong; that layers without attention mix tokens by the recorded states alone is for
    `engine.model.paging_proof` to show."""
    calls, num_layers = recorder.calls, text_config.num_hidden_layers
    if not calls and not recorder.states:
        raise UnsupportedModelError(f"{name} does not use transformers' attention registry, so it cannot run paged.")
    if sorted(calls) != list(range(num_layers)) and not recorder.states:
        raise UnsupportedModelError(
            f"{name} uses attention in {len(calls)} of its {num_layers} layers; the others keep a recurrent state of a "
            "kind that is not known here."
        )
    kinds = getattr(text_config, "layer_types", None) or ()
    for layer, call in calls.items():
        if call.has_mask or not call.is_causal:
            raise UnsupportedModelError(f"{name} needs an attention mask of its own in layer {layer}.")
        if layer < len(kinds) and "sliding" in kinds[layer] and call.params.sliding_window is None:
            raise UnsupportedModelError(f"{name} does not tell its sliding window to its attention (layer {layer}).")


def check_same(name: str, before: Sequence[AttentionCall], after: Sequence[AttentionCall]) -> None:
    """Raises UnsupportedModelError unless every layer attends to the same, but for rounding."""
    for call, other in zip(before, after, strict=True):
        numbers, others = ((each.layer, *each.params._replace(sinks=None)) for each in (call, other))
        if numbers != others or not all(map(_is_close, _tensors_of(call), _tensors_of(other))):
            raise UnsupportedModelError(
                f"{name} computes something else in layer {call.layer} once its layers are fused: this version of "
                "transformers is not known well enough. Set TWOSTEP_KERNELS=off, which is slower, or install another."
            )


def _tensors_of(call: AttentionCall) -> tuple[Tensor, ...]:
    return (*call[:3], *(call.sparse.tensors if call.sparse else ()), *(call.bias.tensors if call.bias else ()))


def _is_close(one: Tensor, other: Tensor) -> bool:
    scale = float(one.nan_to_num().abs().max())
    return torch.allclose(other.float(), one.float(), rtol=0.1, atol=0.1 * scale, equal_nan=True)
