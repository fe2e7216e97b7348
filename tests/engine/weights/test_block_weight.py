"""Weights in the blocks of GGUF files and in NVFP4: exactly the products, and the rows, of their numbers in float32."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from engine.checkpoint.gguf.block_types import BLOCK_TYPES
from engine.checkpoint.gguf.blocks import BlockCodec
from engine.checkpoint.stored_tensor import StoredRows, StoredTensor
from engine.weights.block_weight import BlockEmbedding, BlockWeight, keep_blocks
from engine.weights.linear import PackedLinear, prepare_linears
from engine.weights.moe import PackedExperts
from engine.weights.packed_weight import KernelWeight
from engine.weights.packing_policy import packing_for
from tests.engine.weights.stored_weights import GGUF_KINDS, KINDS, MOST_COLUMNS, Kind, name_of, nvfp4, weight_of

pytestmark = pytest.mark.usefixtures("ops", "two_threads")

ROWS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 33, 64, 97, 193, 400)


def packed(weight: Tensor) -> BlockWeight:
    blocks = keep_blocks(weight)
    assert blocks is not None
    return blocks


def assert_exact(weight: StoredTensor, rows: Sequence[int] = ROWS) -> None:
    """Asserts that the weight stays in blocks, and is multiplied and looked up as its numbers are."""
    numbers, blocks = weight.expanded(), packed(weight)
    plain = KernelWeight(numbers)
    x, bias = torch.randn(max(rows), weight.shape[1]), torch.randn(weight.shape[0])
    for count in rows:
        assert torch.equal(blocks.multiply(x[:count], bias), plain.multiply(x[:count], bias)), count
    assert torch.equal(blocks.rows(torch.arange(weight.shape[0])), numbers)
    assert torch.equal(by_kernels(weight).expanded(), numbers)


def by_kernels(weight: StoredTensor) -> StoredTensor:
    """Returns the weight with blocks of GGUF that the kernels expand."""
    pieces = [
        replace(piece, codec=replace(piece.codec, expander=torch.ops.twostep.expand_blocks))
        if isinstance(piece.codec, BlockCodec)
        else piece
        for piece in weight.pieces
    ]
    return StoredTensor(pieces, weight.rows_shape, weight.dtype, weight.is_transposed)


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_products_are_those_of_the_numbers(kind: Kind) -> None:
    for n, k in ((1, 256), (100, 512), (131, 2304)):
        assert_exact(weight_of(kind, n, k))


@pytest.mark.parametrize("kind", GGUF_KINDS, ids=name_of)
def test_every_number_comes_back_with_its_sign(kind: Type) -> None:
    """Of random bytes, with factors of both signs, zeros and infinities among them."""
    shape, kind_of = (70, 512), BLOCK_TYPES[kind.value]
    raw = torch.from_numpy(
        np.random.default_rng(1).integers(0, 256, (70, 512 // kind_of.num_numbers * kind_of.num_bytes), dtype=np.uint8)
    )
    raw[:40] &= 0xBB  # no exponent of 16 bits is the largest one: what is infinite or NaN is in other rows
    weight = StoredTensor([StoredRows(BlockCodec(kind_of), (raw,))], shape, torch.float32)
    numbers, rows = weight.expanded(), packed(weight).rows(torch.arange(70))
    assert torch.equal(rows[:40].view(torch.int32), numbers[:40].view(torch.int32))
    assert torch.equal(by_kernels(weight).expanded().view(torch.int32), rows.view(torch.int32))
    assert torch.equal(rows.nan_to_num(7.0), numbers.nan_to_num(7.0))
    assert numbers[:40].isfinite().all()


def test_every_scale_of_8_bits_comes_back_with_every_code() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(3, 254)
    scales = torch.tensor([byte for byte in range(256) if byte & 127 < 127], dtype=torch.uint8).repeat(3, 1)
    weight = nvfp4(codes, scales.view(torch.float8_e4m3fn), torch.tensor([1.0, 1 / 3, -2.7e-6]))
    assert torch.equal(packed(weight).rows(torch.arange(3)), weight.expanded())


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    n=st.integers(1, 3 * MOST_COLUMNS),
    num_blocks=st.integers(1, 9),
    rows=st.integers(1, 50),
    seed=st.integers(0, 1 << 20),
)
def test_any_size_is_exact(kind: Kind, n: int, num_blocks: int, rows: int, seed: int) -> None:
    torch.manual_seed(seed)
    size = 16 if kind == "NVFP4" else BLOCK_TYPES[kind.value].num_numbers
    assert_exact(weight_of(kind, n, num_blocks * size, seed=seed), (rows,))


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_K, "NVFP4"], ids=name_of)
def test_a_row_has_the_same_bits_in_any_batch(kind: Kind) -> None:
    blocks, x = packed(weight_of(kind, 200, 1024)), torch.randn(100, 1024)
    alone = torch.cat([blocks.multiply(row[None], None) for row in x])
    assert torch.equal(blocks.multiply(x, None), alone)
    for first in (1, 17, 60):
        assert torch.equal(blocks.multiply(x[first:], None), alone[first:])


def test_columns_of_several_types_are_joined_panel_by_panel() -> None:
    parts = [weight_of(Type.Q4_K, 2 * MOST_COLUMNS, 512), weight_of(Type.Q6_K, MOST_COLUMNS, 512)]
    parts += [weight_of("NVFP4", MOST_COLUMNS, 512), weight_of(Type.Q8_0, 5, 512)]
    joined = torch.cat(parts)
    assert isinstance(joined, StoredTensor)
    assert_exact(joined)


def test_columns_of_several_types_in_one_panel_are_dense() -> None:
    joined = torch.cat([weight_of(Type.Q4_K, 3, 512), weight_of(Type.Q6_K, 5, 512)])
    assert keep_blocks(joined) is None
    weight = packing_for("none", True).layers(joined)
    x = torch.randn(3, 512)
    assert torch.equal(weight.multiply(x, None), KernelWeight(joined + 0).multiply(x, None))


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16], ids=lambda kind: kind.name)
def test_plain_numbers_are_no_blocks(kind: Type) -> None:
    assert keep_blocks(weight_of(kind, 8, 64)) is None


def test_numbers_of_16_bits_are_rounded_as_asked() -> None:
    assert keep_blocks(weight_of(Type.Q8_0, 8, 64).to(torch.bfloat16)) is None


@pytest.mark.parametrize(
    ("kind", "bits"),
    [(Type.Q8_0, 8.5), (Type.Q4_0, 4.5), (Type.Q4_K, 4.75), (Type.Q6_K, 6.57), ("NVFP4", 4.5)],
    ids=str,
)
def test_blocks_take_about_the_bytes_of_the_file(kind: Kind, bits: float) -> None:
    assert packed(weight_of(kind, 256, 2048)).nbytes * 8 / (256 * 2048) <= bits + 0.05


def test_other_rows_are_refused() -> None:
    blocks = packed(weight_of(Type.Q8_0, 8, 64))
    with pytest.raises(RuntimeError, match="do not fit"):
        blocks.multiply(torch.randn(2, 32), None)
    with pytest.raises(RuntimeError, match="differ in size or dtype"):
        torch.ops.twostep.linear(torch.randn(2, 64).bfloat16(), blocks.packed, None, 8)
    with pytest.raises(RuntimeError, match="out of range"):
        blocks.rows(torch.tensor([8]))
    with pytest.raises(RuntimeError, match="whole blocks"):
        torch.ops.twostep.pack_blocks([torch.zeros(2, 33, dtype=torch.uint8)], [8])
    with pytest.raises(RuntimeError, match="whole blocks"):
        torch.ops.twostep.expand_blocks(torch.zeros(2, 34, dtype=torch.uint8), 5)
    with pytest.raises(RuntimeError, match="not packed in blocks"):
        torch.ops.twostep.take_block_rows(torch.zeros(640, dtype=torch.uint8), torch.tensor([0]))


@pytest.mark.parametrize("kinds", [(Type.Q4_0, Type.Q5_0), ("NVFP4", "NVFP4")], ids=str)
def test_experts_stay_in_blocks(kinds: tuple[Kind, Kind]) -> None:
    def experts_of(up: Tensor, down: Tensor) -> PackedExperts:
        config = Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
        experts = Qwen3MoeExperts(config)
        experts.gate_up_proj = nn.Parameter(up, requires_grad=False)
        experts.down_proj = nn.Parameter(down, requires_grad=False)
        return PackedExperts(experts, packing_for("none", True).layers)

    up, down = weight_of(kinds[0], 4, 64, 64), weight_of(kinds[1], 4, 64, 32)
    blocks, plain = experts_of(up, down), experts_of(up.expanded(), down.expanded())
    assert blocks.kernel is not None and all(isinstance(each, BlockWeight) for each in blocks.up.weights)
    for rows in (1, 3, 20):
        inputs = torch.randn(rows, 64), torch.rand(rows, 4).topk(2).indices, torch.rand(rows, 2)
        assert torch.equal(blocks(*inputs), plain(*inputs))
        assert torch.equal(blocks(*inputs), blocks.run_one_by_one(*inputs))


def model_of(embedding: Tensor, head: Tensor) -> nn.Module:
    model = nn.Module()
    model.embedding, model.head = nn.Embedding(*embedding.shape), nn.Linear(1, 1, bias=False)
    model.embedding.weight = nn.Parameter(embedding, requires_grad=False)
    model.head.weight = nn.Parameter(head, requires_grad=False)
    return model


def test_an_embedding_is_looked_up_in_blocks() -> None:
    weight = weight_of(Type.Q6_K, 90, 256)
    model = model_of(weight, weight_of(Type.Q8_0, 90, 256))
    report = prepare_linears(model, kernels_available=True)
    numbers = torch.tensor([[3, 89], [0, 3]])
    assert torch.equal(model.embedding(numbers), weight.expanded()[numbers])
    assert isinstance(model.embedding.weight, BlockEmbedding)
    assert report.packed_bytes == model.embedding.weight.packed.nbytes + model.head.nbytes


@pytest.mark.parametrize("is_kept", [True, False])
def test_an_embedding_without_kernels_is_dense(is_kept: bool) -> None:
    weight = weight_of(Type.Q6_K if is_kept else Type.F16, 90, 256)
    model = model_of(weight, torch.randn(90, 256))
    prepare_linears(model, kernels_available=not is_kept)
    assert isinstance(model.embedding.weight, nn.Parameter) and type(model.embedding.weight.data) is Tensor
    assert torch.equal(model.embedding(torch.arange(90)), weight.expanded())


def test_weights_of_experts_without_rows_are_not_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, rows = weight_of(Type.Q8_0, 4, 64, 256), torch.randn(5, 256)
    expected = [rows[:3] @ weights.expanded()[1].T, rows[3:] @ weights.expanded()[3].T]
    expand, found = StoredTensor.expanded, list[tuple[int, ...]]()
    monkeypatch.setattr(StoredTensor, "expanded", lambda self: (found.append(tuple(self.shape)), expand(self))[1])
    ends = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    product = torch.nn.functional.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    torch.testing.assert_close(product, torch.cat(expected))
    assert found == [(256, 64), (256, 64)]
    no_rows = torch.nn.functional.grouped_mm(rows[:0], weights.transpose(1, 2), offs=ends * 0)
    assert no_rows.shape == (0, 64)


def test_rows_of_a_stored_embedding_are_expanded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of(Type.Q4_K, 90, 256)
    expected = weight.expanded()
    monkeypatch.setattr(StoredTensor, "expanded", lambda self: pytest.fail("all rows were expanded"))
    numbers = torch.tensor([[5, 0], [89, 5]])
    assert torch.equal(nn.functional.embedding(numbers, weight), expected[numbers])
    assert nn.functional.embedding(numbers[:0], weight).shape == (0, 2, 256)


def test_linear_layers_stay_in_blocks() -> None:
    model = model_of(torch.randn(4, 4), weight_of(Type.Q5_K, 90, 256))
    prepare_linears(model, kernels_available=True)
    assert isinstance(model.head, PackedLinear) and isinstance(model.head.packed, BlockWeight)
