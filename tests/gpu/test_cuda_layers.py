"""What lies between the matmuls of a layer, on CUDA: as the modules of transformers compute it, for every row alone."""

import itertools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.weights import merged_rows
from engine.weights.segment_sums import SegmentSums
from tests.gpu.cross_compile import Usage, assert_fit, compiled

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 40, 130, 896)
BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}


@pytest.fixture
def layers(triton_device: torch.device) -> Any:
    from engine.kernels.cuda import layers

    return layers


@pytest.fixture
def random(triton_device: torch.device) -> Callable[..., Tensor]:
    def make(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
        numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3
        return numbers.to(triton_device, dtype)

    return make


def assert_near(result: Tensor, expected: Tensor, steps: float = 2.0, floor: float = 1e-6) -> None:
    """Asserts that numbers differ by at most so many steps of their dtype: one by a sum's order, one by a rounding
    after it."""
    assert result.dtype == expected.dtype and result.shape == expected.shape
    allowed = steps * 2.0 ** -BITS[result.dtype] * expected.double().abs() + floor
    assert bool(((result.double() - expected.double()).abs() <= allowed).all())


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes LlamaRMSNorm; with weights in float32 only the product is rounded."""
    norm = LlamaRMSNorm(x.shape[-1], eps)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    return norm(x.to(weight.dtype)).to(x.dtype)


@pytest.mark.parametrize(("dtype", "size"), [*itertools.product(DTYPES, SIZES)])
def test_a_norm_is_the_plain_one(layers: Any, random: Callable[..., Tensor], dtype: torch.dtype, size: int) -> None:
    x, weight = random(1, 3, size, dtype=dtype), random(size, dtype=dtype, seed=2)
    assert_near(layers.rms_norm(x, weight, 1e-5), plain_norm(x, weight, 1e-5))
    in_float32 = random(size, dtype=torch.float32, seed=2)
    assert_near(layers.rms_norm(x, in_float32, 1e-5), plain_norm(x, in_float32, 1e-5))
    assert torch.equal(
        layers.add_rms_norm(torch.zeros_like(x), x, in_float32, 1e-5)[1], layers.rms_norm(x, in_float32, 1e-5)
    )


@pytest.mark.parametrize(("dtype", "size"), [*itertools.product(DTYPES, SIZES)])
def test_a_sum_and_its_norm_are_those_of_two_steps(
    layers: Any, random: Callable[..., Tensor], dtype: torch.dtype, size: int
) -> None:
    residual, x = (random(1, 3, size, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = random(size, dtype=dtype, seed=3)
    added, normed = layers.add_rms_norm(residual, x, weight, 1e-5)
    assert torch.equal(added, residual + x)
    assert torch.equal(normed, layers.rms_norm(residual + x, weight, 1e-5))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "size"), [*itertools.product(DTYPES, SIZES)])
def test_segments_are_added_as_before_a_sum_and_its_norm(
    layers: Any, random: Callable[..., Tensor], dtype: torch.dtype, size: int, has_bias: bool
) -> None:
    residual, segments = random(1, 3, size, dtype=dtype), random(3, 3, size, dtype=torch.float32, seed=2)
    bias, weight = (random(size, dtype=dtype, seed=seed) for seed in (3, 4))
    x = segments[0] + segments[1] + segments[2] + (bias.float() if has_bias else 0.0)
    expected = layers.add_rms_norm(residual, x.to(dtype)[None], weight, 1e-5)
    result = layers.add_segments_rms_norm(residual, segments, bias if has_bias else None, weight, 1e-5)
    assert all(map(torch.equal, result, expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_in_segments_is_added_to_the_product(
    layers: Any, random: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    from engine.weights.triton_weight import TritonWeight

    weight = TritonWeight(random(40, 1024, dtype=dtype))
    x, bias, residual = (
        random(3, 1024, dtype=dtype, seed=2),
        random(40, dtype=dtype),
        random(3, 40, dtype=dtype, seed=3),
    )
    sums = weight.multiply_in_segments(x, bias)
    assert isinstance(sums, SegmentSums) and len(sums.segments) > 1
    expected = layers.add_rms_norm(residual, weight.multiply(x, bias), bias, 1e-5)
    assert all(map(torch.equal, layers.add_segments_rms_norm(residual, *sums, bias, 1e-5), expected))


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates heads [T, H, D] by transformers' code."""
    return apply_rotary_pos_emb(heads[None], heads[None], cos, sin, unsqueeze_dim=2)[0][0]


@pytest.mark.parametrize(("dtype", "head_size"), [*itertools.product(DTYPES, (2, 12, 80))])
def test_heads_are_rotated_as_by_the_plain_layers(
    layers: Any, random: Callable[..., Tensor], dtype: torch.dtype, head_size: int
) -> None:
    heads = random(3, 4 + 2 * 2, head_size, dtype=dtype)
    cos, sin = (random(1, 3, head_size, dtype=dtype, seed=seed) for seed in (5, 6))
    qkv = heads.flatten(1).clone()
    layers.rotate_heads(qkv, cos, sin, 4, 2, None, None, 0.0)
    expected = torch.cat([rotated(heads[:, :6], cos, sin), heads[:, 6:]], dim=1)
    assert torch.equal(qkv.view_as(heads), expected)


@pytest.mark.parametrize(("dtype", "head_size"), [*itertools.product(DTYPES, (2, 12, 80))])
@pytest.mark.parametrize("normed", ["query", "key", "both", "both in float32"])
def test_heads_are_normed_before_they_are_rotated(
    layers: Any, random: Callable[..., Tensor], dtype: torch.dtype, head_size: int, normed: str
) -> None:
    heads = random(3, 4 + 2 * 2, head_size, dtype=dtype)
    cos, sin = (random(1, 3, head_size, dtype=dtype, seed=seed) for seed in (5, 6))
    norms = [
        random(head_size, dtype=torch.float32 if "float32" in normed else dtype, seed=seed)
        if name in normed or "both" in normed
        else None
        for seed, name in ((7, "query"), (8, "key"))
    ]
    parts = [*heads.split([4, 2, 2], dim=1)]
    for i, norm in enumerate(norms):
        parts[i] = rotated(parts[i] if norm is None else plain_norm(parts[i], norm, 1e-5), cos, sin)
    qkv = heads.flatten(1).clone()
    layers.rotate_heads(qkv, cos, sin, 4, 2, *norms, 1e-5)
    scale = float(heads.abs().max()) ** 2
    assert_near(qkv.view_as(heads), torch.cat(parts, dim=1), steps=4, floor=4 * scale * 2.0 ** -BITS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [6, 64])
def test_rotary_tables_are_those_of_the_plain_module(
    layers: Any, triton_device: torch.device, dtype: torch.dtype, head_size: int
) -> None:
    embedding = LlamaRotaryEmbedding(LlamaConfig(head_dim=head_size)).to(triton_device)
    positions = torch.tensor([[0, 1, 77, 4096, 131071]], device=triton_device)
    tables = layers.rotary_tables(positions, embedding.inv_freq, 0.7, dtype)
    embedding.attention_scaling = 0.7
    expected = embedding(torch.zeros(1, dtype=dtype, device=triton_device), positions)
    assert [table.dtype for table in tables] == [dtype] * 2
    torch.testing.assert_close(tables, expected, rtol=2.0 ** -BITS[dtype], atol=2e-7)


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    return merged_rows.interleaved((gate.t(), up.t())).t()


@pytest.mark.parametrize(("dtype", "size"), [*itertools.product(DTYPES, (*SIZES, 1100))])
@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_gating_is_activating_and_multiplying(
    layers: Any, random: Callable[..., Tensor], name: str, dtype: torch.dtype, size: int
) -> None:
    gate, up = (random(5, size, dtype=dtype, seed=seed) for seed in (1, 2))
    wide = gate.float()  # as torch computes 16 bits; the CPU's kernels, where they are loaded, have none for float16
    activated = functional.silu(wide) if name == "silu" else functional.gelu(wide, approximate="tanh")
    floor = 2e-6 * float(up.abs().max())  # where 1 + tanh cancels
    result = layers.gate(interleaved(gate, up), name)
    assert_near(result, activated.to(dtype) * up, floor=floor)


def test_large_numbers_are_gated_without_overflow(layers: Any, triton_device: torch.device) -> None:
    gate = torch.tensor([[-3e38, -1e4, -89.0, 0.0, 89.0, 1e4, 3e38, float("nan")]], device=triton_device)
    result = layers.gate(interleaved(gate, torch.ones_like(gate)), "silu")
    torch.testing.assert_close(result, functional.silu(gate), equal_nan=True, rtol=1e-6, atol=1e-30)


def row_wise(layers: Any, random: Callable[..., Tensor], name: str, width: int) -> Callable[[Tensor], Tensor]:
    """Returns the operator as a function of rows [T, width]."""

    def norm(x: Tensor) -> Tensor:
        return layers.rms_norm(x, random(width, dtype=x.dtype, seed=3), 1e-6)

    def sum_and_norm(x: Tensor) -> Tensor:
        return torch.cat(layers.add_rms_norm(x, x, random(width, dtype=x.dtype, seed=3), 1e-6), dim=1)

    def rotate(x: Tensor) -> Tensor:
        size, rows = width // 5, x.clone() if x.is_contiguous() else x
        weight, angles = (random(size, dtype=x.dtype, seed=seed) for seed in (3, 4))
        layers.rotate_heads(rows, *[angles.expand(len(x), size)] * 2, 3, 1, weight, weight, 1e-6)
        return rows

    def gate(x: Tensor) -> Tensor:
        return layers.gate(x, "silu")

    return {"rms_norm": norm, "add_rms_norm": sum_and_norm, "rotate_heads": rotate, "gate": gate}[name]


OPERATORS = ("rms_norm", "add_rms_norm", "rotate_heads", "gate")


@pytest.mark.parametrize("width", [130, 160])
@pytest.mark.parametrize(("name", "dtype"), [*itertools.product(OPERATORS, DTYPES)])
def test_a_row_is_the_same_alone_and_in_every_batch(
    layers: Any, random: Callable[..., Tensor], name: str, dtype: torch.dtype, width: int
) -> None:
    run = row_wise(layers, random, name, width)
    rows = random(8, width, dtype=dtype)
    together = run(rows)
    for start, end in ((0, 1), (3, 6), (7, 8)):
        assert torch.equal(run(rows[start:end]), together[start:end])


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize(("name", "dtype"), [*itertools.product(OPERATORS, DTYPES[:2])])
def test_a_row_is_the_same_wherever_it_lies(
    layers: Any, random: Callable[..., Tensor], name: str, dtype: torch.dtype, offset: int
) -> None:
    run = row_wise(layers, random, name, 160)
    rows = random(3, 160, dtype=dtype)
    expected = run(rows)
    apart = random(3, 171, dtype=dtype, seed=9)
    apart[:, offset : offset + 160] = rows
    assert torch.equal(run(apart[:, offset : offset + 160]), expected)


def test_no_rows_give_no_rows(layers: Any, triton_device: torch.device) -> None:
    empty, weight = torch.empty(0, 32, device=triton_device), torch.ones(32, device=triton_device)
    assert layers.rms_norm(empty, weight, 1e-6).shape == (0, 32)
    assert layers.add_rms_norm(empty, empty, weight, 1e-6)[1].shape == (0, 32)
    assert layers.gate(empty, "silu").shape == (0, 16)
    layers.rotate_heads(empty, empty[:, :8], empty[:, :8], 2, 1, None, None, 0.0)


def test_what_does_not_fit_is_refused(layers: Any, triton_device: torch.device) -> None:
    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=triton_device)

    with pytest.raises(RuntimeError, match="weight must be"):
        layers.rms_norm(zeros(2, 32), zeros(31), 1e-6)
    with pytest.raises(RuntimeError, match="weight must be"):
        layers.rms_norm(zeros(2, 32), zeros(32, dtype=torch.bfloat16), 1e-6)
    with pytest.raises(RuntimeError, match="not be empty"):
        layers.rms_norm(zeros(2, 0), zeros(0), 1e-6)
    with pytest.raises(RuntimeError, match="must be heads"):
        layers.rotate_heads(zeros(2, 0), zeros(2, 0), zeros(2, 0), 0, 0, None, None, 0.0)
    with pytest.raises(RuntimeError, match="differ in shape"):
        layers.add_rms_norm(zeros(2, 32), zeros(1, 32), zeros(32), 1e-6)
    with pytest.raises(RuntimeError, match="differ in shape"):
        layers.add_segments_rms_norm(zeros(2, 32), zeros(3, 1, 32), None, zeros(32), 1e-6)
    with pytest.raises(RuntimeError, match="even heads"):
        layers.rotate_heads(zeros(2, 30), zeros(2, 6), zeros(2, 6), 2, 1, None, None, 0.0)
    with pytest.raises(RuntimeError, match="has its angles"):
        layers.rotate_heads(zeros(2, 32), zeros(1, 8), zeros(1, 8), 2, 1, None, None, 0.0)
    with pytest.raises(RuntimeError, match="not known"):
        layers.gate(zeros(2, 32), "relu")
    with pytest.raises(NotImplementedError, match="float64"):
        layers.gate(zeros(2, 32, dtype=torch.float64), "silu")


def test_gate_and_up_alternate_as_in_merged_weights(layers: Any) -> None:
    assert layers.GATE_BLOCK == merged_rows.GATE_BLOCK


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton's compiler")
def test_kernels_fit_into_every_gpu() -> None:
    usages = compiled("tests.gpu.layer_launches:launch_all")
    # Sines of large angles have an array in local memory, whatever registers are left: once a step, for each token.
    assert_fit([usage for usage in usages if usage.kernel != "_rotary_tables_kernel"])
    assert max(usage.registers for usage in usages) <= 128
    for norms in norms_of_one_model(usages):
        assert len(norms) == 4 and len({(*usage.layouts_of_sums,) for usage in norms}) == 1, norms


def norms_of_one_model(usages: list[Usage]) -> list[list[Usage]]:
    """Returns the kernels of norms, those of one size, number format and GPU together: all must sum alike, since how
    many rows there are decides which of them runs."""
    found: dict[object, list[Usage]] = {}
    for usage in usages:
        if usage.kernel.endswith("rms_norm_kernel"):
            found.setdefault((usage.capability, usage.constants["SIZE"], usage.types[0]), []).append(usage)
    assert found
    return [*found.values()]
