"""The operators of fused layers compute, bit for bit, what transformers' layers do, but for the order of norm sums."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import NewGELUActivation, XIELUActivation
from transformers.models.glm import modeling_glm as glm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.phi3 import modeling_phi3 as phi3

from engine.model.fusion import xielu_numbers

pytestmark = pytest.mark.usefixtures("ops")

DTYPES = (torch.float32, torch.bfloat16)
SIZES = (1, 12, 16, 40, 896)


def random(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes LlamaRMSNorm, with squares summed in sixteen lanes, which are folded at the end; with weights in float32
    only the product is rounded, as in GptOssRMSNorm."""
    factor = torch.rsqrt(lane_sum(x.float() * x.float()) / x.shape[-1] + eps)
    return (weight * (x.float() * factor).to(weight.dtype)).to(x.dtype)


def lane_sum(wide: Tensor) -> Tensor:
    """Adds up rows in sixteen lanes, which are folded at the end."""
    parts = functional.pad(wide, (0, -wide.shape[-1] % 16)).split(16, dim=-1)
    lanes = sum(parts, start=torch.zeros(*wide.shape[:-1], 16))
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
    return lanes


@pytest.mark.parametrize(("dtype", "size"), [*itertools.product(DTYPES, SIZES)])
def test_a_norm_is_the_plain_one(dtype: torch.dtype, size: int) -> None:
    x, weight = random(1, 70, size, dtype=dtype), random(size, dtype=dtype, seed=2)
    normed = torch.ops.twostep.rms_norm(x, weight, 1e-5)
    assert torch.equal(normed, plain_norm(x, weight, 1e-5))
    in_float32 = random(size, dtype=torch.float32, seed=2)
    assert torch.equal(torch.ops.twostep.rms_norm(x, in_float32, 1e-5), plain_norm(x, in_float32, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_is_close_to_its_definition(dtype: torch.dtype) -> None:
    x, weight = random(9, 896, dtype=dtype), random(896, dtype=dtype, seed=2)
    exact = functional.rms_norm(x.double(), (896,), weight.double(), 1e-6)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(
        torch.ops.twostep.rms_norm(x, weight, 1e-6).double(), exact, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("weight_dtype", ["rows", "float32"])
@pytest.mark.parametrize(("dtype", "size"), [*itertools.product(DTYPES, SIZES)])
def test_a_sum_and_its_norm_are_those_of_two_steps(dtype: torch.dtype, size: int, weight_dtype: str) -> None:
    residual, x = (random(1, 33, size, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = random(size, dtype=dtype if weight_dtype == "rows" else torch.float32, seed=3)
    added, normed = torch.ops.twostep.add_rms_norm(residual, x, weight, 1e-5)
    assert torch.equal(added, residual + x)
    assert torch.equal(normed, torch.ops.twostep.rms_norm(residual + x, weight, 1e-5))


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates heads [T, H, D] by transformers' code."""
    return apply_rotary_pos_emb(heads[None], heads[None], cos, sin, unsqueeze_dim=2)[0][0]


@pytest.mark.parametrize(("dtype", "head_size"), [*itertools.product(DTYPES, (2, 12, 64, 80, 128))])
@pytest.mark.parametrize("norms_in", ["nothing", "rows' dtype", "float32"])
def test_heads_are_normed_and_rotated_as_by_the_plain_layers(dtype: torch.dtype, head_size: int, norms_in: str) -> None:
    heads = random(21, 4 + 2 * 2, head_size, dtype=dtype)
    cos, sin = (random(1, 21, head_size, dtype=dtype, seed=seed) for seed in (5, 6))
    norm_dtype = torch.float32 if norms_in == "float32" else dtype
    norms: list[Tensor | None] = [random(head_size, dtype=norm_dtype, seed=seed) for seed in (7, 8)]
    norms = [None, None] if norms_in == "nothing" else norms
    query, key, value = heads.split([4, 2, 2], dim=1)
    expected = []
    for part, norm in zip((query, key), norms, strict=True):
        expected.append(rotated(part if norm is None else plain_norm(part, norm, 1e-5), cos, sin))
    qkv = heads.flatten(1).clone()
    torch.ops.twostep.rotate_heads(qkv, cos, sin, 4, 2, *norms, 1e-5)
    assert torch.equal(qkv.view_as(heads), torch.cat([*expected, value], dim=1))


@pytest.mark.parametrize(("dtype", "norm_dtype"), [*itertools.product(DTYPES, DTYPES[:1]), DTYPES[1:] * 2])
def test_heads_may_be_normed_after_they_are_rotated(dtype: torch.dtype, norm_dtype: torch.dtype) -> None:
    heads = random(21, 4 + 2 * 2, 12, dtype=dtype)
    cos, sin = (random(1, 21, 12, dtype=dtype, seed=seed) for seed in (5, 6))
    norms = [random(12, dtype=norm_dtype, seed=seed) for seed in (7, 8)]
    query, key, value = heads.split([4, 2, 2], dim=1)
    expected = [plain_norm(rotated(part, cos, sin), norm, 1e-5) for part, norm in zip((query, key), norms, strict=True)]
    qkv = heads.flatten(1).clone()
    torch.ops.twostep.rotate_heads(qkv, cos, sin, 4, 2, *norms, 1e-5, norms_last=True)
    assert torch.equal(qkv.view_as(heads), torch.cat([*expected, value], dim=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotated_queries_are_multiplied_by_the_number_of_their_row(dtype: torch.dtype) -> None:
    heads = random(21, 4 + 2 * 2, 12, dtype=dtype)
    cos, sin = (random(1, 21, 12, dtype=dtype, seed=seed) for seed in (5, 6))
    scales = random(21, dtype=dtype, seed=7)
    turned, value = heads.split([6, 2], dim=1)
    query, key = rotated(turned, cos, sin).split([4, 2], dim=1)
    qkv = heads.flatten(1).clone()
    torch.ops.twostep.rotate_heads(qkv, cos, sin, 4, 2, None, None, 0.0, query_scales=scales.float())
    assert torch.equal(qkv.view_as(heads), torch.cat([query * scales.view(21, 1, 1), key, value], dim=1))


@pytest.mark.parametrize(("dtype", "size"), [*itertools.product(DTYPES, SIZES)])
def test_what_is_positive_is_squared(dtype: torch.dtype, size: int) -> None:
    x = random(33, size, dtype=dtype)
    squared = x.clone()
    torch.ops.twostep.square_relu(squared)
    assert torch.equal(squared, torch.square(functional.relu(x)))


@pytest.mark.parametrize(("dtype", "size"), [*itertools.product(DTYPES, SIZES)])
def test_columns_are_multiplied_by_their_factors(dtype: torch.dtype, size: int) -> None:
    x, factors = random(33, size, dtype=dtype), random(size, dtype=torch.float32, seed=2)
    scaled = x.clone()
    torch.ops.twostep.scale_columns(scaled, factors)
    assert torch.equal(scaled, (x.float() * factors).to(dtype))
    by_one_number = x.clone()
    torch.ops.twostep.scale_columns(by_one_number, torch.full((size,), 0.23570226039551587))
    assert torch.equal(by_one_number, x * 0.23570226039551587)


def test_factors_that_are_not_those_of_the_columns_are_refused() -> None:
    x = torch.ones(3, 7)
    for rows, factors in ((x, torch.ones(6)), (x, torch.ones(7).double()), (x.t(), torch.ones(3))):
        with pytest.raises(RuntimeError, match=r"a factor in float32|must be contiguous"):
            torch.ops.twostep.scale_columns(rows, factors)


@pytest.mark.parametrize(("dtype", "size"), [*itertools.product(DTYPES, SIZES)])
def test_xielu_is_that_of_transformers(dtype: torch.dtype, size: int) -> None:
    """Differences of nearly equal numbers err by units in the last place of these."""
    activation = XIELUActivation(dtype=dtype).requires_grad_(False)
    x = 3 * random(33, size, dtype=dtype)
    x[0] *= 1e-4
    expected, own = activation(x), x.clone()
    torch.ops.twostep.xielu(own, *xielu_numbers(activation))
    torch.testing.assert_close(own, expected, rtol=3 * torch.finfo(dtype).eps, atol=1e-6)


def test_xielu_of_what_is_no_number_is_none() -> None:
    x = torch.tensor([torch.nan, -torch.inf, torch.inf, 0.0])
    torch.ops.twostep.xielu(x, 0.8, 0.7, 0.5, -1e-6)
    assert x[0].isnan() and x[2] == torch.inf and abs(x[3]) < 1e-6


@pytest.mark.parametrize(("dtype", "size"), [*itertools.product(DTYPES, SIZES)])
def test_gelu_new_is_that_of_transformers(dtype: torch.dtype, size: int) -> None:
    x = 3 * random(33, size, dtype=dtype)
    x[0] *= 1e-4
    expected, own = NewGELUActivation()(x), x.clone()
    torch.ops.twostep.gelu_new(own)
    torch.testing.assert_close(own, expected, rtol=3 * torch.finfo(dtype).eps, atol=1e-6)
    assert dtype is torch.float32 or (own != expected).float().mean() < 0.01


def test_gelu_new_of_what_is_large_is_that_or_nothing() -> None:
    x = torch.tensor([-torch.inf, -200.0, 0.0, 200.0, torch.nan])
    torch.ops.twostep.gelu_new(x)
    assert x[3] == 200.0 and x[4].isnan() and not x[1:3].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("of_each", [False, True])
def test_heads_are_normed_where_they_lie(dtype: torch.dtype, size: int, of_each: bool) -> None:
    rows = random(33, 5, size, dtype=dtype)
    weight, bias = (random(3, size, dtype=torch.float32, seed=seed) for seed in (5, 6))
    weight, bias = (each if of_each else each[0] for each in (weight, bias))
    expected = rows.clone()
    for head in range(3):
        own = (weight[head], bias[head]) if of_each else (weight, bias)
        expected[:, 1 + head] = torch.ops.twostep.layer_norm(rows[:, 1 + head], *own, 1e-5)
    torch.ops.twostep.norm_heads(rows[:, 1:4], weight, bias, 1e-5)
    assert torch.equal(rows, expected)


def rotated_pairs(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates neighbours of heads [T, H, D] by transformers' code."""
    return glm.apply_rotary_pos_emb(heads[None], heads[None], cos, sin, unsqueeze_dim=2)[0][0]


def rotated_first(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first columns of heads [T, H, D] by transformers' code."""
    return phi3.apply_rotary_pos_emb(heads[None], heads[None], cos, sin, unsqueeze_dim=2)[0][0]


@pytest.mark.parametrize("is_wide", [False, True], ids=["rounded products", "rounded sums"])
@pytest.mark.parametrize(("dtype", "columns"), [*itertools.product(DTYPES, (0, 2, 12, 40, 80))])
@pytest.mark.parametrize("in_pairs", [False, True], ids=["halves", "pairs"])
def test_the_first_columns_of_heads_are_rotated(
    in_pairs: bool, dtype: torch.dtype, columns: int, is_wide: bool
) -> None:
    heads = random(21, 4 + 2 * 2, 80, dtype=dtype)
    cos, sin = (random(1, 21, columns // 2, dtype=dtype, seed=seed).repeat(1, 1, 2) for seed in (5, 6))
    cos, sin = (cos.float(), sin.float()) if is_wide else (cos, sin)
    turned, value = heads.split([6, 2], dim=1)
    turn = rotated_pairs if in_pairs else rotated_first
    expected = turn(turned, cos, sin).to(dtype)
    qkv = heads.flatten(1).clone()
    torch.ops.twostep.rotate_heads(qkv, cos, sin, 4, 2, None, None, 0.0, in_pairs)
    assert torch.equal(qkv.view_as(heads), torch.cat([expected, value], dim=1))


@pytest.mark.parametrize(("dtype", "norm_dtype"), [*itertools.product(DTYPES, DTYPES[:1]), DTYPES[1:] * 2])
def test_all_heads_of_a_row_are_normed_together(dtype: torch.dtype, norm_dtype: torch.dtype) -> None:
    rows = random(21, (4 + 2 * 2) * 12, dtype=dtype)
    norms = [random(size, dtype=norm_dtype, seed=size) for size in (48, 24)]
    query, key, value = rows.split([48, 24, 24], dim=1)
    none = torch.empty(21, 0, dtype=dtype)
    qkv = rows.clone()
    torch.ops.twostep.rotate_heads(qkv, none, none, 4, 2, *norms, 1e-5)
    expected = [plain_norm(part, norm, 1e-5) for part, norm in zip((query, key), norms, strict=True)]
    assert torch.equal(qkv, torch.cat([*expected, value], dim=1))


def plain_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Computes Cohere2LayerNorm, with sums in sixteen lanes, and adds the bias."""
    centered = x.float() - lane_sum(x.float()) / x.shape[-1]
    normed = centered * torch.rsqrt(lane_sum(centered * centered) / x.shape[-1] + eps) * weight
    return (normed if bias is None else normed + bias).to(x.dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "size"), [*itertools.product(DTYPES, SIZES)])
def test_a_layer_norm_is_the_plain_one(dtype: torch.dtype, size: int, has_bias: bool) -> None:
    x, weight, bias = random(1, 70, size, dtype=dtype) + 2, *(random(size, dtype=torch.float32, seed=n) for n in (2, 3))
    normed = torch.ops.twostep.layer_norm(x, weight, bias if has_bias else None, 1e-5)
    assert torch.equal(normed, plain_layer_norm(x, weight, bias if has_bias else None, 1e-5))
    exact = functional.layer_norm(x.double(), (size,), weight.double(), bias.double() if has_bias else None, 1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(normed.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "size"), [*itertools.product(DTYPES, SIZES)])
@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_gating_is_activating_and_multiplying(name: str, dtype: torch.dtype, size: int) -> None:
    gate, up = (random(19, size, dtype=dtype, seed=seed) for seed in (1, 2))
    activated = functional.silu(gate) if name == "silu" else functional.gelu(gate, approximate="tanh")
    blocks = [part for pair in zip(gate.split(16, dim=1), up.split(16, dim=1), strict=True) for part in pair]
    assert torch.equal(torch.ops.twostep.gate(torch.cat(blocks, dim=1), name), activated * up)


ROW_WISE: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: torch.ops.twostep.rms_norm(x, torch.ones(x.shape[1], dtype=x.dtype), 1e-6),
    "add_rms_norm": lambda x: torch.cat(
        torch.ops.twostep.add_rms_norm(x, x, torch.ones(x.shape[1], dtype=x.dtype), 1e-6)
    ).view(2, *x.shape)[1],
    "layer_norm": lambda x: torch.ops.twostep.layer_norm(x, torch.ones(x.shape[1]), None, 1e-6),
    "gate": lambda x: torch.ops.twostep.gate(x, "silu"),
}


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("name", "dtype"), [*itertools.product(ROW_WISE, DTYPES)])
def test_a_row_is_the_same_alone_and_in_every_batch(name: str, dtype: torch.dtype) -> None:
    rows = random(301, 130, dtype=dtype)
    together = ROW_WISE[name](rows)
    for start, end in ((0, 1), (7, 9), (100, 301), (300, 301)):
        assert torch.equal(ROW_WISE[name](rows[start:end]), together[start:end])


def test_no_rows_give_no_rows() -> None:
    empty = torch.empty(0, 32)
    assert torch.ops.twostep.rms_norm(empty, torch.ones(32), 1e-6).shape == (0, 32)
    assert torch.ops.twostep.gate(empty, "silu").shape == (0, 16)


def test_what_does_not_fit_is_refused() -> None:
    ops = torch.ops.twostep
    with pytest.raises(RuntimeError, match="weight must be"):
        ops.rms_norm(torch.zeros(2, 32), torch.ones(31), 1e-6)
    with pytest.raises(RuntimeError, match="weight must be"):
        ops.rms_norm(torch.zeros(2, 32), torch.ones(32, dtype=torch.bfloat16), 1e-6)
    with pytest.raises(RuntimeError, match="weight must be"):
        ops.rms_norm(torch.zeros(2, 32), torch.ones(2, 32), 1e-6)
    with pytest.raises(RuntimeError, match="not be empty"):
        ops.rms_norm(torch.zeros(2, 0), torch.ones(0), 1e-6)
    with pytest.raises(RuntimeError, match="must be heads"):
        ops.rotate_heads(torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(2, 0), 0, 0, None, None, 0.0)
    with pytest.raises(RuntimeError, match="of one dtype"):
        rows, tables = torch.zeros(2, 32, dtype=torch.bfloat16), torch.zeros(2, 8, dtype=torch.bfloat16)
        ops.rotate_heads(rows, tables, tables, 2, 1, torch.ones(8), torch.ones(8, dtype=torch.bfloat16), 1e-6)
    with pytest.raises(RuntimeError, match="in float32"):
        ops.layer_norm(torch.zeros(2, 32).bfloat16(), torch.ones(32).bfloat16(), None, 1e-6)
    with pytest.raises(RuntimeError, match="weight must be"):
        ops.layer_norm(torch.zeros(2, 32), torch.ones(32), torch.ones(31), 1e-6)
    with pytest.raises(RuntimeError, match="weight must be"):
        ops.rotate_heads(torch.zeros(2, 32), *[torch.zeros(2, 8)] * 2, 2, 1, torch.ones(24), torch.ones(8), 1e-6)
    with pytest.raises(RuntimeError, match="8 columns at most"):
        ops.rotate_heads(torch.zeros(2, 32), *[torch.zeros(2, 10)] * 2, 2, 1, None, None, 0.0)
    with pytest.raises(RuntimeError, match="cos and sin differ"):
        ops.rotate_heads(torch.zeros(2, 32), torch.zeros(2, 8), torch.zeros(2, 6), 2, 1, None, None, 0.0)
    with pytest.raises(RuntimeError, match="differ in shape"):
        ops.add_rms_norm(torch.zeros(2, 32), torch.zeros(1, 32), torch.ones(32), 1e-6)
    with pytest.raises(RuntimeError, match="even heads"):
        ops.rotate_heads(torch.zeros(2, 30), torch.zeros(2, 6), torch.zeros(2, 6), 2, 1, None, None, 0.0)
    with pytest.raises(RuntimeError, match="has its angles"):
        ops.rotate_heads(torch.zeros(2, 32), torch.zeros(1, 8), torch.zeros(1, 8), 2, 1, None, None, 0.0)
    with pytest.raises(RuntimeError, match="not known"):
        ops.gate(torch.zeros(2, 32), "relu")
    with pytest.raises(NotImplementedError, match="Double"):
        ops.gate(torch.zeros(2, 32).double(), "silu")
