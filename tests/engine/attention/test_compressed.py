"""Compressed attention over the paged cache is that over a sequence's tokens and entries, however it is computed."""

from collections.abc import Sequence
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from engine.attention import AttentionBackend, cpu, reference
from engine.attention.compressed import CompressedAttention
from engine.attention.kv_cache import CompressedShape, KVCache, LayerShape, VectorShape
from engine.attention.metadata import AttentionParams, CompressedCall, IndexCall
from engine.attention.registry import AttentionCall
from tests.engine.attention.paged_sequences import by_sequence, steps_of

SIZE, RAW, KEY, HEADS, WINDOW, CHOSEN = 16, 24, 16, 4, 5, 2
CPU, FLOAT = torch.device("cpu"), torch.float32
LENGTHS = (29, 17)
STEPS = ((1, 17), (5, 0), (0, 0), (22, 0), (1, 0)), ((29, 17),), tuple((1, int(at < 17)) for at in range(29))
"""How many tokens of each sequence a step computes."""


class Tokens:
    """Numbers of a sequence's tokens."""

    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.query, self.key, self.raw = (
            torch.randn(length, *shape, generator=generator) for shape in ((HEADS, SIZE), (1, SIZE), (RAW,))
        )
        self.index_query = torch.randn(length, 3, KEY, generator=generator)
        self.weights = torch.randn(length, 3, generator=generator)


SEQUENCES = [Tokens(length, seed) for seed, length in enumerate(LENGTHS)]
SINKS = torch.tensor([0.3, -1.0, 0.0, 2.0])
PARAMS = AttentionParams(SIZE**-0.5, sinks=SINKS)


def pool(raw: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Sums raw vectors in order; those before the first token count nothing."""
    places = torch.arange(-raw.shape[1], 0) + raw.shape[1] // 2 if raw.shape[1] > 4 else torch.zeros(raw.shape[1])
    counts = ~((positions == 0)[:, None] & (places < 0))
    total = torch.zeros(len(raw), RAW)
    for at in range(raw.shape[1]):
        total += (raw[:, at] * (at + 1.0)).where(counts[:, at, None], 0.0)
    total = total + positions[:, None] * 0.01
    return total[:, :SIZE].contiguous(), total[:, -KEY:].contiguous()


def call_of(parts: Sequence[tuple[Tokens, slice]], ratio: int, num_pooled: int, chooses: bool) -> AttentionCall:
    query, key, raw, index_query, weights = (
        torch.cat([getattr(sequence, name)[part] for sequence, part in parts])
        for name in ("query", "key", "raw", "index_query", "weights")
    )
    index = IndexCall(index_query, index_query.new_empty(0, KEY), weights, 0, CHOSEN) if chooses else None
    compressed = CompressedCall(raw, pool if chooses else _without_keys, ratio, num_pooled, WINDOW, index)
    return AttentionCall(query, key, key, 0, PARAMS, False, True, True, compressed=compressed)


def _without_keys(raw: Tensor, positions: Tensor) -> tuple[Tensor, None]:
    return pool(raw, positions)[0], None


def paged(
    backend: AttentionBackend, steps: Sequence[tuple[int, int]], block_size: int, form: tuple[int, int, bool]
) -> list[Tensor]:
    """Returns what is attended to by the tokens of each sequence, computed step by step."""
    ratio, _, chooses = form
    index = VectorShape(KEY, FLOAT) if chooses else None
    shape = LayerShape(1, SIZE, SIZE, 0, None, True, None, CompressedShape(ratio, VectorShape(RAW, FLOAT), index))
    num_blocks = [-(-length // block_size) for length in LENGTHS]
    cache = KVCache([shape], sum(num_blocks) + 1, block_size, FLOAT, CPU)
    for tensor in cache._tensors():
        tensor.fill_(torch.nan)  # what was not written must not be read
    order = torch.randperm(sum(num_blocks) + 1, generator=torch.Generator().manual_seed(3)).tolist()
    tables = order[: num_blocks[0]], order[num_blocks[0] : sum(num_blocks)]
    outputs = []
    for parts, metadata in steps_of(steps, tables, block_size):
        call = call_of([(SEQUENCES[i], part) for i, part in parts], *form)
        assert call.compressed is not None
        step = CompressedAttention(backend, metadata, block_size)
        outputs.append((parts, step.attend(call, call.compressed, cache.compressed_of(0))))
    return by_sequence(len(LENGTHS), outputs)


def in_one_piece(sequence: Tokens, ratio: int, num_pooled: int, chooses: bool) -> Tensor:
    """Attends by the definition, token by token, in float64."""
    num_entries = len(sequence.key) // ratio
    positions = torch.arange(num_entries) * ratio
    places = (positions[:, None] + ratio - num_pooled + torch.arange(num_pooled)).clamp(min=0)
    entries, keys = pool(sequence.raw[places], positions)
    outputs = []
    for token in range(len(sequence.key)):
        seen = torch.arange((token + 1) // ratio)
        if chooses and len(seen) > CHOSEN:
            scores = (sequence.index_query[token] @ keys[seen].T).relu() * sequence.weights[token, :, None]
            seen = scores.sum(0).sort(descending=True, stable=True).indices[:CHOSEN]
        rows = torch.cat((sequence.key[max(0, token + 1 - WINDOW) : token + 1, 0], entries[seen])).double()
        scores = sequence.query[token].double() @ rows.T * PARAMS.scaling
        weights = torch.cat((scores, SINKS[:, None]), 1).softmax(1)[:, :-1]
        outputs.append(weights @ rows)
    return torch.stack(outputs)


FORMS = [(4, 8, True), (4, 8, False), (3, 3, False), (6, 12, True)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block_size", [1, 4, 5, 16])
def test_it_is_attention_to_a_window_and_to_entries(block_size: int, form: tuple[int, int, bool]) -> None:
    for outputs, sequence in zip(paged(reference, STEPS[0], block_size, form), SEQUENCES, strict=True):
        torch.testing.assert_close(outputs.double(), in_one_piece(sequence, *form), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("form", FORMS)
def test_neither_steps_nor_blocks_change_a_bit(form: tuple[int, int, bool]) -> None:
    for backend in (reference, cpu):
        answers = [paged(backend, steps, size, form) for steps, size in product(STEPS, (1, 4, 16))]
        for one, other in pairwise(answers):
            assert all(map(torch.equal, one, other))


@pytest.mark.usefixtures("ops")
def test_tables_are_made_for_as_many_tokens_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = paged(cpu, STEPS[1], 4, FORMS[0])
    monkeypatch.setattr("engine.attention.compressed._TABLE_NUMBERS", 20)
    assert all(map(torch.equal, paged(cpu, STEPS[1], 4, FORMS[0]), expected))


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_cache_has_the_bytes_that_its_shape_tells(block_size: int) -> None:
    shape = LayerShape(
        1, SIZE, SIZE, 0, None, True, None, CompressedShape(6, VectorShape(RAW, FLOAT), VectorShape(KEY, FLOAT))
    )
    cache = KVCache([shape], 7, block_size, FLOAT, CPU)
    assert cache.num_bytes == 7 * shape.bytes_per_block(block_size, FLOAT)
    assert sum(part.nbytes for part in cache.block_bytes(3)) == shape.bytes_per_block(block_size, FLOAT)
    num_entries = -(-block_size // 6)
    assert cache.num_bytes == 7 * 4 * (block_size * (SIZE + RAW) + num_entries * (SIZE + KEY))
