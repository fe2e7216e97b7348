"""Proof, before a model is served, that over the paged cache it computes what it computes in one piece.

A model whose layers mix tokens by anything but the registered attention and the known recurrent functions (another
scan, a window of their own) would answer, and answer wrongly. So a copy that is cut to a few narrow layers, with random
weights, runs both ways: transformers' own dense forward without a cache is the reference; the other computes the same
tokens in uneven chunks, two sequences in one batch, and then one by one, before draft tokens that are wrong.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.attention import approximate
from engine.attention.kv_cache import KVCache
from engine.attention.registry import ATTENTION_NAME
from engine.core.batch import ScheduledRequest
from engine.core.errors import UnsupportedModelError
from engine.core.sampling_params import SamplingParams
from engine.mixers.state import StateCache
from engine.model.latent_attention import has_latents, keep_latents
from engine.model.loading.known_layers import replace_known_layers
from engine.model.probe import layer_shape, probe
from engine.model.recurrent.replacement import replace_recurrent_layers
from engine.model.refusals import refused_if_it_fails
from engine.model.small_copy import cut_config, num_distinct_layers, randomize
from engine.runner.forward import TransformersForward
from engine.runner.model_inputs import build_inputs

__all__ = ["prove_paging"]

BLOCK_SIZE = 8
STEPS = ((1, 20), (5, 0), (24, 1), (0, 11), (17, 2), *((1, 1),) * 3)
"""How many tokens of each of the two sequences a step computes."""
NUM_DRAFTS = 2
"""Draft tokens of each sequence in a step of a single token, as far as its tokens reach."""
TOLERANCE = 1e-3
"""Share of the largest logit by which others may differ. Sums in another order differ by 1e-6, what a layer leaves out
by 1e-2 and more."""
TEXT_ENDS = slice(2, None, 9)
"""Positions of EOS tokens, where layers read ids of tokens and begin anew behind these."""
MAX_OUTLIERS = 0.02
"""Share of the positions that may differ by more, and always one: a router whose scores are nearly equal chooses
another expert."""


def prove_paging(module: PreTrainedModel, context_limit: int) -> None:
    """Raises UnsupportedModelError unless the model's code computes the same over pages as in one piece."""
    name = type(module).__name__
    with refused_if_it_fails(f"{name} cannot run over a paged KV cache"), torch.inference_mode():
        _compare(name, _small_copy(module), context_limit, has_latents(module))


def _compare(name: str, module: PreTrainedModel, context_limit: int, with_latents: bool) -> None:
    steps = [*_limited(STEPS, context_limit)]
    sequences = [*_sequences(module, [*map(sum, zip(*steps, strict=True))])]
    module.set_attn_implementation("eager")
    expected = [_dense(module, token_ids) for token_ids in sequences]
    module.set_attn_implementation(ATTENTION_NAME)
    replace_recurrent_layers(module)
    replace_known_layers(module)
    if with_latents:
        keep_latents(module, torch.float32)
    computed = _paged(module, sequences, steps)
    for one, other in zip(expected, computed, strict=True):
        differs = ~((one - other).abs().amax(-1) <= TOLERANCE * one.abs().max())  # so does NaN
        if int(differs.sum()) > max(1, MAX_OUTLIERS * len(differs)):
            first = int(differs.nonzero()[0])
            raise UnsupportedModelError(
                f"{name} computes something else over a paged KV cache than in one piece, from position {first} on: "
                "one of its layers mixes tokens in a way that is not known here."
            )


def _sequences(module: PreTrainedModel, lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yields random token ids of a sequence of each length."""
    config = module.config.get_text_config(decoder=True)
    generator = torch.Generator().manual_seed(0)
    for length in lengths:
        token_ids = torch.randint(config.vocab_size, (length,), generator=generator)
        if getattr(config, "ple_layer_ids", None):
            token_ids[TEXT_ENDS] = config.eos_token_id
        yield token_ids.tolist()


def _limited(steps: Sequence[tuple[int, int]], limit: int) -> Iterator[tuple[int, int]]:
    """Yields the steps as far as no sequence gets longer than `limit`."""
    totals = [0, 0]
    for step in steps:
        counts = [min(count, limit - total) for count, total in zip(step, totals, strict=True)]
        totals = [total + count for count, total in zip(counts, totals, strict=True)]
        if any(counts):
            yield counts[0], counts[1]


def _dense(module: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """Returns the logits [T, vocab] that transformers computes, with a mask, for all tokens at once."""
    return cast(Tensor, module(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0])


def _paged(module: PreTrainedModel, sequences: Sequence[list[int]], steps: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Returns each sequence's logits [T, vocab], computed step by step over a paged cache."""
    num_blocks = [-(-len(token_ids) // BLOCK_SIZE) for token_ids in sequences]
    tables = [tuple(range(num_blocks[0])), tuple(reversed(range(num_blocks[0], sum(num_blocks))))]
    calls, shapes = probe(module, torch.device("cpu"))
    layers = [layer_shape(call) for call in calls]
    cache = KVCache(layers, sum(num_blocks), BLOCK_SIZE, torch.float32, torch.device("cpu"))
    states = StateCache(shapes, len(sequences), torch.device("cpu"))
    forward = TransformersForward(module, cache, approximate, states)
    logits: list[list[Tensor]] = [[], []]
    starts = [0, 0]
    for counts in steps:
        chunks = [
            (index, token_ids[start : start + count], start)
            for index, (token_ids, start, count) in enumerate(zip(sequences, starts, counts, strict=True))
            if count
        ]
        slots = [len(sequences) - 1 - index if states.states else None for index, _, _ in chunks]
        requests = [
            _request(tokens, start, tables[index], slot, _wrong_drafts(sequences[index], start + len(tokens)))
            for (index, tokens, start), slot in zip(chunks, slots, strict=True)
        ]
        logits_of_step = forward(build_inputs(requests, BLOCK_SIZE, torch.device("cpu")), None).logits
        forward.settle([len(tokens) for _, tokens, _ in chunks])
        parts = logits_of_step.split_with_sizes([len(request.token_ids) for request in requests])
        for (index, tokens, _), part in zip(chunks, parts, strict=True):
            logits[index].append(part[: len(tokens)])
            starts[index] += len(tokens)
    return [torch.cat(parts) for parts in logits]


def _wrong_drafts(token_ids: Sequence[int], start: int) -> list[int]:
    """Returns draft tokens from position `start` on, none of them right, and none of them behind the sequence."""
    return [abs(token_id - 1) for token_id in token_ids[start : start + NUM_DRAFTS]]


def _request(
    token_ids: list[int], start: int, table: tuple[int, ...], slot: int | None, drafts: list[int]
) -> ScheduledRequest:
    """Returns a share of a step; only steps of one token of a sequence that has begun verify drafts."""
    drafts = drafts if start and len(token_ids) == 1 else []
    tokens, params = [*token_ids, *drafts], SamplingParams()
    return ScheduledRequest("", tokens, start, table, params, [], [], True, state_slot=slot, num_drafts=len(drafts))


def _small_copy(module: PreTrainedModel) -> PreTrainedModel:
    """Returns a model of the same code on the CPU, with few layers, small vocabulary and random weights in float32."""
    num_layers = num_distinct_layers(module)
    try:
        small = _build(module, num_layers)
    except Exception:  # some have a setting that does not allow for fewer layers
        small = _build(module, module.config.get_text_config(decoder=True).num_hidden_layers)
    randomize(small.float())
    return small.eval()


def _build(module: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    config = copy.deepcopy(module.config)
    cut_config(config.get_text_config(decoder=True), num_layers)
    with torch.device("cpu"):
        return type(module)(config)
