"""Attention with a bias by distance over the paged cache is that of its definition, however it is computed."""

from collections.abc import Sequence
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from engine.attention import AttentionBackend, cpu, reference
from engine.attention.distance_bias import BiasedAttention
from engine.attention.kv_cache import KVCache, LayerShape
from engine.attention.metadata import AttentionParams, DistanceBias, LogScaling
from engine.attention.registry import AttentionCall
from tests.engine.attention.paged_sequences import by_sequence, steps_of

SIZE, VALUES, HEADS, KV_HEADS, DISTANCES, PROFILES = 32, 64, 4, 2, 11, 3
SCALING, WINDOW, SCALED = 0.3, 7, LogScaling(5, 0.7)
CPU, FLOAT = torch.device("cpu"), torch.float32
LENGTHS = (29, 17)
STEPS = ((1, 17), (5, 0), (22, 0), (1, 0)), ((29, 17),), tuple((1, int(at < 17)) for at in range(29))
"""How many tokens of each sequence a step computes."""
Form = tuple[int | None, bool, LogScaling | None]
FORMS: list[Form] = [(None, False, None), (None, True, SCALED), (WINDOW, False, None), (WINDOW, True, None)]
"""A window, whether tokens have sinks, and what scales scores."""


class Tokens:
    """Numbers of a sequence's tokens."""

    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = (HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, VALUES), (HEADS, PROFILES), (HEADS,)
        self.query, self.key, self.value, self.weights, self.sinks = (
            torch.randn(length, *shape, generator=generator) for shape in shapes
        )


SEQUENCES = [Tokens(length, seed) for seed, length in enumerate(LENGTHS)]
PROFILE = torch.randn(DISTANCES, PROFILES, generator=torch.Generator().manual_seed(9))


def call_of(parts: Sequence[tuple[Tokens, slice]], form: Form, dtype: torch.dtype) -> AttentionCall:
    window, has_sinks, scaling = form
    query, key, value, weights, sinks = (
        torch.cat([getattr(sequence, name)[part] for sequence, part in parts]).to(dtype)
        for name in ("query", "key", "value", "weights", "sinks")
    )
    bias = DistanceBias(weights, PROFILE.to(dtype), scaling, sinks if has_sinks else None)
    return AttentionCall(query, key, value, 0, AttentionParams(SCALING, window), False, True, bias=bias)


def paged(
    backend: AttentionBackend,
    steps: Sequence[tuple[int, int]],
    block_size: int,
    form: Form,
    dtype: torch.dtype = FLOAT,
    kv_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Returns what the tokens of each sequence attend to, computed step by step."""
    num_blocks = [-(-length // block_size) for length in LENGTHS]
    shape = LayerShape(KV_HEADS, SIZE, VALUES, 0, form[0])
    cache = KVCache([shape], sum(num_blocks) + 1, block_size, kv_dtype or dtype, CPU)
    order = torch.randperm(sum(num_blocks) + 1, generator=torch.Generator().manual_seed(3)).tolist()
    tables = order[: num_blocks[0]], order[num_blocks[0] : sum(num_blocks)]
    if kv_dtype is None:
        for tensor in cache.of_layer(0):
            tensor.fill_(torch.nan)  # what was not written must not be read
    outputs = []
    for parts, metadata in steps_of(steps, tables, block_size):
        call = call_of([(SEQUENCES[i], part) for i, part in parts], form, dtype)
        backend.write_kv(call.key, call.value, cache.of_layer(0), metadata.slot_mapping)
        assert call.bias is not None
        output = BiasedAttention(backend, metadata).attend(call, call.bias, cache.of_layer(0))
        outputs.append((parts, output))
        for i, part in parts:
            if form[0] is not None and kv_dtype is None:  # what no later token sees may be another's, whatever it is
                unseen = torch.arange(max(0, part.stop + 1 - form[0]))
                slots = torch.tensor(tables[i])[unseen // block_size] * block_size + unseen % block_size
                for tensor in cache.of_layer(0):
                    tensor[slots // block_size, :, slots % block_size] = torch.nan
    return by_sequence(len(LENGTHS), outputs)


def by_definition(sequence: Tokens, form: Form) -> Tensor:
    """Attends token by token, in float64."""
    window, has_sinks, scaling = form
    outputs = []
    for token in range(len(sequence.key)):
        first = 0 if window is None else max(0, token + 1 - window)
        keys, values = (
            each[first : token + 1].double().repeat_interleave(HEADS // KV_HEADS, dim=1)
            for each in (sequence.key, sequence.value)
        )
        distances = token - torch.arange(first, token + 1)
        profiles = torch.cat([PROFILE, torch.zeros(1, PROFILES)])[distances.clamp(max=DISTANCES)].double()
        scores = torch.einsum("hd,phd->hp", sequence.query[token].double(), keys) * SCALING
        scores = scores + sequence.weights[token].double() @ profiles.T
        if scaling is not None:
            scores = scores * (1 + scaling.alpha * torch.log(torch.tensor(max(1.0, (token + 1) / scaling.first))))
        sinks = sequence.sinks[token, :, None].double() if has_sinks else torch.full((HEADS, 1), -torch.inf).double()
        weights = torch.cat((scores, sinks), 1).softmax(1)[:, :-1]
        outputs.append(torch.einsum("hp,phd->hd", weights, values))
    return torch.stack(outputs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_it_is_attention_with_a_bias_of_each_distance(block_size: int, form: Form) -> None:
    for outputs, sequence in zip(paged(reference, STEPS[0], block_size, form), SEQUENCES, strict=True):
        torch.testing.assert_close(outputs.double(), by_definition(sequence, form), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_steps_nor_blocks_change_a_bit(form: Form, dtype: torch.dtype) -> None:
    for backend in (reference, cpu):
        answers = [paged(backend, steps, size, form, dtype) for steps, size in product(STEPS, (1, 4, 16))]
        for one, other in pairwise(answers):
            assert all(map(torch.equal, one, other))


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("form", FORMS)
def test_as_much_is_gathered_at_once_as_memory_allows(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = paged(cpu, STEPS[1], 4, form)
    monkeypatch.setattr("engine.attention.distance_bias._NUMBERS", 1)
    assert all(map(torch.equal, paged(cpu, STEPS[1], 4, form), expected))


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize(("kv_dtype", "error"), [(torch.int8, 0.03), (torch.bfloat16, 0.02)])
def test_a_cache_of_fewer_bits_is_read(kv_dtype: torch.dtype, error: float) -> None:
    form = WINDOW, True, None
    for outputs, sequence in zip(paged(cpu, STEPS[0], 4, form, kv_dtype=kv_dtype), SEQUENCES, strict=True):
        expected = by_definition(sequence, form)
        assert float((outputs - expected).pow(2).mean().sqrt()) <= error * float(expected.pow(2).mean().sqrt())
    assert all(map(torch.equal, *(paged(cpu, steps, 4, form, kv_dtype=kv_dtype) for steps in STEPS[:2])))
