"""The forward pass, from a batch's inputs to the logits of its positions, through the model code of transformers."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from engine.attention import (
    AttentionBackend,
    AttentionMetadata,
    chosen_blocks,
    sparse,
    sparse_blocks,
    sparse_pools,
)
from engine.attention.compressed import CompressedAttention
from engine.attention.distance_bias import BiasedAttention
from engine.attention.kv_cache import KVCache, LayerCache
from engine.attention.metadata import AnyIndexCall, BlockIndexCall, IndexCall, PoolIndexCall
from engine.attention.registry import AttentionCall, attention_handler
from engine.core.errors import UnsupportedModelError
from engine.mixers.draft_step import DraftStep
from engine.mixers.metadata import StateMetadata
from engine.mixers.registry import JointMixer, Mixer, state_handler
from engine.mixers.state import StateCache, StateShape, clear, copy_slots
from engine.runner.model_inputs import ModelInputs
from engine.weights.adapters import rows_with_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "Forward",
    "ForwardOutput",
    "HeadForward",
    "HeadInput",
    "HiddenOf",
    "TransformersForward",
    "TransformersHeadForward",
    "kept_rows",
]

HiddenOf = tuple[int, ...] | None
"""Which hidden states a pass gives at all positions: the inputs of these layers; an empty one stands for those of the
last layer after the final norm, and None for none."""


class ForwardOutput(NamedTuple):
    """What a forward pass computes at the positions that are kept. The next pass may overwrite it."""

    logits: Tensor  # [num_kept, vocab]
    hidden: Tensor  # [num_kept, hidden_size]
    """Hidden states of the last layer after the final norm, the input of the language-model head."""
    all_hidden: Tensor | None = None  # [num_tokens, hidden_size], or of several layers beside each other
    """The hidden states at all positions that were asked for."""


class Forward(Protocol):
    @property
    def name(self) -> str:
        """What computes the step, as `EngineInfo.forward` has it."""

    def __call__(self, inputs: ModelInputs, kept: Sequence[int] | None, hidden_of: HiddenOf = None) -> ForwardOutput:
        """Computes the batch, with results at the `kept` positions of the flat batch, None keeps all, and with the
        hidden states `hidden_of` at all of them.

        Also writes the batch's keys and values to the KV cache, and the states after its tokens to their slots: where
        there are draft tokens among these, once `settle` is called.
        """

    def settle(self, num_kept: Sequence[int]) -> None:
        """Ends a step with draft tokens, before the next begins: the states of each sequence of the batch go on from
        its first `num_kept` tokens."""


class TransformersForward:
    """Runs any model by its own code, with attention over the paged KV cache and states in slots."""

    name = "transformers"

    def __init__(
        self, module: "PreTrainedModel", cache: KVCache, backend: AttentionBackend, states: StateCache | None = None
    ) -> None:
        self._module = module
        self._head = cast(nn.Module, module.get_output_embeddings())
        self._cache = cache
        self._backend = backend
        self._states = states
        self._draft_step: DraftStep | None = None

    def __call__(self, inputs: ModelInputs, kept: Sequence[int] | None, hidden_of: HiddenOf = None) -> ForwardOutput:
        return self._run({"input_ids": inputs.token_ids[None]}, inputs, kept, hidden_of)

    def of_embeddings(self, embeddings: Tensor, inputs: ModelInputs, kept: Sequence[int]) -> ForwardOutput:
        """Computes the batch from `embeddings` [num_tokens, ...] in place of those of its tokens."""
        return self._run({"inputs_embeds": embeddings[None]}, inputs, kept)

    def settle(self, num_kept: Sequence[int]) -> None:
        if self._draft_step is not None:
            self._draft_step.settle(num_kept)

    def _run(
        self, arguments: dict[str, Tensor], inputs: ModelInputs, kept: Sequence[int] | None, hidden_of: HiddenOf = None
    ) -> ForwardOutput:
        """Runs the model on the tokens or embeddings among `arguments`, one long sequence to it."""
        rows = None if kept is None else kept_rows(kept, inputs)
        handler = _PagedAttention(self._backend, self._cache, inputs.groups)
        self._draft_step = DraftStep(inputs.states) if inputs.states and inputs.states.has_drafts else None
        states = _SlottedStates(self._states, inputs.states, self._draft_step)
        if rows is not None:
            arguments["logits_to_keep"] = rows
        with (
            attention_handler(handler),
            state_handler(states),
            rows_with_adapters(inputs.adapters),
            _recorded_input(self._head) as hidden,
            _recorded_states(self._module.base_model, hidden_of) as all_states,
        ):
            output = self._module(**arguments, position_ids=inputs.positions[None], use_cache=False)
        logits, hidden_states = output.logits[0], hidden[0].flatten(0, -2)
        if rows is not None and len(logits) != len(rows):  # some models compute all positions whatever is asked for
            logits, hidden_states = logits[rows], hidden_states[rows]
        return ForwardOutput(logits, hidden_states, torch.cat(all_states, dim=-1) if all_states else None)


class HeadInput(nn.Module):
    """Makes the input of a head."""

    hidden_of: tuple[int, ...] = ()
    """The hidden states that it reads."""
    fingerprint: str = ""
    """Hash of what makes of them what is kept."""

    def forward(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """embeddings of tokens, and what is kept of the hidden states before them, [T, H] each -> the head's input."""
        raise NotImplementedError

    def kept_of(self, hidden: Tensor) -> Tensor:
        """hidden states [T, ...] of the model -> what is kept of them [T, H]."""
        return hidden


class HeadForward(ABC):
    """Runs an MTP or EAGLE-3 head, a model of one layer, on what `join` makes of each token's embedding and of the
    hidden state of the token before it."""

    def __init__(self, join: HeadInput) -> None:
        self.hidden_of = join.hidden_of
        self._join = join

    @abstractmethod
    def __call__(self, inputs: ModelInputs, hidden: Tensor, kept: Sequence[int]) -> ForwardOutput:
        """Computes the batch from `hidden` [num_tokens, hidden_size], with results at the `kept` positions."""

    def kept_of(self, hidden: Tensor) -> Tensor:
        """Returns what is kept [num_tokens, hidden_size] of the model's hidden states `hidden_of`."""
        return self._join.kept_of(hidden)


class TransformersHeadForward(HeadForward):
    """Runs any head by the code of its module."""

    def __init__(self, module: "PreTrainedModel", join: HeadInput, cache: KVCache, backend: AttentionBackend) -> None:
        super().__init__(join)
        self._forward = TransformersForward(module, cache, backend)
        self._embedding = cast(nn.Module, module.get_input_embeddings())

    def __call__(self, inputs: ModelInputs, hidden: Tensor, kept: Sequence[int]) -> ForwardOutput:
        return self._forward.of_embeddings(self._join(self._embedding(inputs.token_ids), hidden), inputs, kept)


@contextmanager
def _recorded_input(module: nn.Module) -> Iterator[list[Tensor]]:
    """Yields a list that gets the input of each call of the module."""
    inputs: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        yield inputs
    finally:
        hook.remove()


@contextmanager
def _recorded_states(decoder: nn.Module, hidden_of: HiddenOf) -> Iterator[list[Tensor]]:
    """Yields a list that gets the hidden states [num_tokens, hidden_size] of a call of the decoder, layer by layer."""
    states: list[Tensor] = []
    if hidden_of is None:
        hooks = []
    elif hidden_of:
        layers = cast(nn.ModuleList, decoder.layers)
        hooks = [
            layers[layer].register_forward_pre_hook(lambda _, args: states.append(args[0][0])) for layer in hidden_of
        ]
    else:
        hooks = [decoder.register_forward_hook(lambda _, args, output: states.append(output[0][0]))]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


def kept_rows(kept: Sequence[int], inputs: ModelInputs) -> Tensor:
    """Returns the kept positions as a tensor; at least one, since models read an empty choice as all positions."""
    return torch.tensor(kept or [0], device=inputs.token_ids.device)


class _PagedAttention:
    """Writes each layer's keys and values to the cache, then attends over it, or over what is chosen of it."""

    def __init__(self, backend: AttentionBackend, cache: KVCache, groups: Sequence[AttentionMetadata]) -> None:
        self._backend = backend
        self._cache = cache
        self._groups = groups
        self._compressed = [CompressedAttention(backend, metadata, cache.block_size) for metadata in groups]
        self._biased = [BiasedAttention(backend, metadata) for metadata in groups]
        self._chosen: AttentionMetadata | None = None  # where the last layer that chose positions has each token attend

    def attend(self, call: AttentionCall) -> Tensor:
        if call.compressed is not None:
            step = self._compressed[self._cache.group_of(call.layer)]
            return step.attend(call, call.compressed, self._cache.compressed_of(call.layer))
        cache, metadata = self._cache.of_layer(call.layer), self._groups[self._cache.group_of(call.layer)]
        window = self._cache.window_of(call.layer)
        if window is not None and call.params.sliding_window != window:  # what is before it may be given back
            raise UnsupportedModelError(
                f"Layer {call.layer} sees a window of {call.params.sliding_window} tokens, and saw one of {window}."
            )
        self._backend.write_kv(call.key, call.value, cache, metadata.slot_mapping)
        if call.bias is not None:
            return self._biased[self._cache.group_of(call.layer)].attend(call, call.bias, cache)
        if isinstance(call.sparse, BlockIndexCall):
            return self._attend_to_blocks(call, call.sparse, cache, metadata)
        if isinstance(call.sparse, PoolIndexCall):
            return self._attend_to_pools(call, call.sparse, cache, metadata)
        if call.sparse is not None:
            if call.sparse.layer == call.layer:
                self._chosen = self._choose(call.sparse, metadata)
            if self._chosen is not None:
                cache, metadata = sparse.as_single_positions(cache), self._chosen
        return self._backend.paged_attention(call.query, cache, metadata, call.params)

    def _choose(self, index: IndexCall, metadata: AttentionMetadata) -> AttentionMetadata | None:
        """Writes index keys; returns None if every token attends to all that it sees, which is the same bits."""
        keys = self._write_index_keys(index, metadata)
        if metadata.max_context_len <= index.num_chosen:
            return None
        return sparse.attending_to(self._backend.choose_slots(index, keys, metadata), metadata)

    def _choose_pools(
        self, index: PoolIndexCall, cache: LayerCache, metadata: AttentionMetadata
    ) -> AttentionMetadata | None:
        """Writes what is kept of tokens, and keys of pools; returns None if every token attends to all that it sees,
        which is the same bits."""
        keys = self._write_index_keys(index, metadata)
        sparse_pools.write_pool_keys(index, keys, metadata)
        if sparse_pools.sees_all_pools(index, metadata):
            return None
        return sparse_pools.attending_to_pools(index, self._backend.choose_slots, keys, metadata, cache)

    def _write_index_keys(self, index: AnyIndexCall, metadata: AttentionMetadata) -> Tensor:
        """Returns the index keys of the layer."""
        keys = self._cache.index_keys_of(index.layer)
        sparse.write_index_keys(index.key, keys, metadata.slot_mapping)
        return keys

    def _attend_to_pools(
        self, call: AttentionCall, index: PoolIndexCall, cache: LayerCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Attends to the pools that the layer chooses, or an earlier one has chosen, where these are not all."""
        if index.layer == call.layer:
            self._chosen = self._choose_pools(index, cache, metadata)
        attend, query, params = self._backend.paged_attention, call.query, call.params
        if self._chosen is None:
            return attend(query, cache, metadata, params)
        groups = sparse_pools.groups_of(index, cache)
        return chosen_blocks.attend_in_groups(attend, query, groups, cache, self._chosen, params)

    def _attend_to_blocks(
        self, call: AttentionCall, index: BlockIndexCall, cache: LayerCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Writes index keys, then attends to the blocks that they choose, group of heads by group of heads, where these
        are not all that there are."""
        keys = self._write_index_keys(index, metadata)
        if metadata.max_context_len <= index.num_chosen:
            return self._backend.paged_attention(call.query, cache, metadata, call.params)
        chosen = sparse_blocks.attending_to_blocks(index, keys, metadata, cache)
        attend, groups = self._backend.paged_attention, sparse_blocks.groups_of(index, cache)
        return chosen_blocks.attend_in_groups(attend, call.query, groups, cache, chosen, call.params)


class _SlottedStates:
    """Advances each mixer's states, in the order in which the forward pass calls the mixers."""

    def __init__(
        self, cache: StateCache | None, metadata: StateMetadata | None, draft_step: DraftStep | None = None
    ) -> None:
        """`draft_step` is the step, if it verifies draft tokens."""
        self._states = iter(cache.states if cache else ())
        self._metadata = metadata
        self._draft_step = draft_step

    def advance(self, mixer: Mixer) -> Tensor:
        states, metadata = self._begun(mixer.state_shape), self._known_metadata
        if self._draft_step is not None:
            output = self._draft_step.advance(mixer, states)
        else:
            output = mixer.advance(states, metadata)
        copy_slots(states, metadata.saved)
        return output

    def advance_jointly(self, mixer: JointMixer) -> Tensor:
        states, metadata = tuple(map(self._begun, mixer.state_shapes)), self._known_metadata
        if self._draft_step is not None:
            output = self._draft_step.advance_jointly(mixer, states)
        else:
            output = mixer.advance(states, metadata)
        for each in states:
            copy_slots(each, metadata.saved)
        return output

    @property
    def _known_metadata(self) -> StateMetadata:
        assert self._metadata is not None, "a model with states is told where they are"
        return self._metadata

    def _begun(self, shape: StateShape) -> Tensor:
        """Returns the next states, as they are before the step's tokens."""
        states, metadata = next(self._states), self._known_metadata
        assert states.shape[1:] == shape.sizes
        clear(states, metadata.fresh_slots)
        copy_slots(states, metadata.restored)
        return states
