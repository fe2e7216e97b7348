"""Rows of 8 bits times weights in the blocks of GGUF files: the kernels' bits are those of the plain path."""

import math

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
from engine.checkpoint.stored_tensor import StoredTensor
from engine.weights.block_weight import BlockWeight, keep_blocks, rounded_product
from engine.weights.linear import prepare_linears
from engine.weights.moe import PackedExperts
from engine.weights.packing_policy import packing_for
from tests.engine.weights.rounding import relative_error
from tests.engine.weights.stored_weights import GGUF_KINDS, MOST_COLUMNS, name_of, random_bytes, weight_of

pytestmark = pytest.mark.usefixtures("ops", "two_threads")

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 33, 48, 193, 400)


def packed(weight: Tensor) -> BlockWeight:
    blocks = keep_blocks(weight, rounds_rows=True)
    assert blocks is not None and blocks.rounds_rows
    return blocks


def product(x: Tensor, weight: StoredTensor) -> Tensor:
    """The plain path, piece by piece."""
    parts = []
    for piece in weight.pieces:
        assert isinstance(piece.codec, BlockCodec)
        parts.append(rounded_product(x, piece.codec.read(*piece.parts)))
    return torch.cat(parts, dim=1)


def assert_equal_products(weight: StoredTensor, rows: tuple[int, ...] = ROWS) -> None:
    blocks, (n, k) = packed(weight), weight.shape
    x, bias = torch.randn(max(rows), k) * torch.rand(k) * 10, torch.randn(n)
    expected = product(x, weight)
    for count in rows:
        assert torch.equal(blocks.multiply(x[:count], None), expected[:count]), count
    assert torch.equal(blocks.multiply(x, bias), expected + bias)
    assert torch.equal(blocks.rows(torch.arange(n)), weight.expanded())


@pytest.mark.parametrize("kind", GGUF_KINDS, ids=name_of)
def test_products_are_those_of_integers(kind: Type) -> None:
    for n, k in ((1, 256), (100, 512), (131, 2304)):
        assert_equal_products(weight_of(kind, n, k))


@pytest.mark.parametrize("k", [32, 96, 288, 416, 608])
def test_groups_need_not_come_in_fours(k: int) -> None:
    for kind in (Type.Q8_0, Type.Q4_1, Type.Q5_0):
        assert_equal_products(weight_of(kind, 70, k))


@pytest.mark.parametrize("kind", GGUF_KINDS, ids=name_of)
def test_every_code_and_level_is_multiplied(kind: Type) -> None:
    assert_equal_products(random_bytes(kind, 70, 8), (1, 4, 70))


def test_the_largest_integers_fit() -> None:
    weight = weight_of(Type.Q8_0, 3, 256)
    weight.pieces[0].parts[0].view(3, 8, 34)[:, :, 2:] = torch.tensor([0x80, 0x7F, 0x80], dtype=torch.uint8)[
        :, None, None
    ]
    x = torch.ones(3, 256)
    x[1] = -1
    x[2, ::2] = -1
    assert torch.equal(packed(weight).multiply(x, None), product(x, weight))


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(GGUF_KINDS),
    n=st.integers(1, 3 * MOST_COLUMNS),
    num_blocks=st.integers(1, 9),
    rows=st.integers(1, 50),
    seed=st.integers(0, 1 << 20),
)
def test_any_size_is_that_of_integers(kind: Type, n: int, num_blocks: int, rows: int, seed: int) -> None:
    torch.manual_seed(seed)
    assert_equal_products(weight_of(kind, n, num_blocks * BLOCK_TYPES[kind.value].num_numbers, seed=seed), (rows,))


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_K, Type.Q6_K], ids=name_of)
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads(kind: Type) -> None:
    blocks, x = packed(weight_of(kind, 200, 1024)), torch.randn(100, 1024)
    alone = torch.cat([blocks.multiply(row[None], None) for row in x])
    assert torch.equal(blocks.multiply(x, None), alone)
    for first in (1, 17, 60):
        assert torch.equal(blocks.multiply(x[first:], None), alone[first:])
    torch.set_num_threads(1)
    assert torch.equal(blocks.multiply(x, None), alone)


def test_columns_of_several_types_are_joined_panel_by_panel() -> None:
    parts = [weight_of(Type.Q4_K, 2 * MOST_COLUMNS, 512), weight_of(Type.Q6_K, MOST_COLUMNS, 512)]
    joined = torch.cat([*parts, weight_of(Type.Q8_0, 5, 512)])
    assert isinstance(joined, StoredTensor)
    assert_equal_products(joined)


def test_nvfp4_does_not_round_rows() -> None:
    for weight in (weight_of("NVFP4", 70, 64), torch.cat([weight_of("NVFP4", 64, 64), weight_of(Type.Q8_0, 5, 64)])):
        blocks, exact = keep_blocks(weight, rounds_rows=True), keep_blocks(weight)
        assert blocks is not None and exact is not None and not blocks.rounds_rows
        assert torch.equal(blocks.packed, exact.packed)


def test_the_error_is_that_of_8_bits() -> None:
    weight, x = weight_of(Type.Q4_K, 200, 1024), torch.randn(50, 1024)
    assert relative_error(packed(weight).multiply(x, None), x @ weight.expanded().T) < 0.007


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("rows", [1, 20])
def test_what_is_not_finite_stays_so(rows: int, value: float) -> None:
    x = torch.randn(rows, 256)
    x[0, 70] = value
    result = packed(weight_of(Type.Q6_K, 5, 256)).multiply(x, None)
    assert not result[0].isfinite().any() and result[1:].isfinite().all()


def test_rows_of_zeros_and_of_tiny_numbers_are_no_division_by_zero() -> None:
    blocks = packed(weight_of(Type.Q4_K, 5, 256))
    for factor in (0.0, 1e-40, 1e-37):
        assert blocks.multiply(torch.randn(3, 256) * factor, None).abs().max() <= factor * 200


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q8_0], ids=name_of)
def test_experts_round_rows(kind: Type) -> None:
    config = Qwen3MoeConfig(hidden_size=256, moe_intermediate_size=256, num_experts=4, num_experts_per_tok=2)
    experts = Qwen3MoeExperts(config)
    up, down = weight_of(kind, 4, 512, 256), weight_of(kind, 4, 256, 256)
    experts.gate_up_proj = nn.Parameter(up, requires_grad=False)
    experts.down_proj = nn.Parameter(down, requires_grad=False)
    model = nn.Sequential(experts)
    assert prepare_linears(model, kernels_available=True, rounds_rows=True).has_rounded_rows
    (packed_experts,) = model
    assert isinstance(packed_experts, PackedExperts) and packed_experts.kernel is not None
    inner = packed_experts.up.multiply(1, x := torch.randn(3, 256))
    assert torch.equal(inner, product(x, up[1]))
    for rows in (1, 3, 20):
        inputs = torch.randn(rows, 256), torch.rand(rows, 4).topk(2).indices, torch.rand(rows, 2)
        assert torch.equal(packed_experts(*inputs), packed_experts.run_one_by_one(*inputs))


def test_routers_and_plain_numbers_do_not_round_rows() -> None:
    packing = packing_for("none", True, rounds_rows=True)
    weight = weight_of(Type.Q8_0, 8, 64)
    layers, routers = packing.layers(weight), packing.routers(weight)
    assert isinstance(layers, BlockWeight) and layers.rounds_rows
    assert isinstance(routers, BlockWeight) and not routers.rounds_rows
    model = nn.Sequential(nn.Linear(64, 8))
    assert not prepare_linears(model, kernels_available=True, rounds_rows=True).has_rounded_rows
