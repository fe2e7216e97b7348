"""What lies between the matmuls of a decoder layer and its attention, each as one launch.

Numbers are rounded wherever the modules of transformers round. All but the order of a norm's sum is theirs; that order
depends on the size of a row alone: one program sums a row whole, in a layout that no address and no stride changes.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["GATE_BLOCK", "add_rms_norm", "add_segments_rms_norm", "gate", "rms_norm", "rotary_tables", "rotate_heads"]

GATE_BLOCK = 16  # columns of gate and of up in turn, as in engine/kernels/base/operators.h

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LAUNCH = {"enable_fp_fusion": False}  # no product is added unrounded, which a compiler would do here and not there


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H], weight [H] -> [..., H]: x / sqrt(mean(x**2) + eps), rounded, times weight. The weight has the dtype
    of x, or float32: then only the product is rounded."""
    _check_norm(x, weight, x.shape[-1])
    rows, out = _Rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch = _rms_norm_kernel[(rows.count,)]
    launch(rows.tensor, _aligned(weight), out, rows.units, eps, **rows.constants, **_LAUNCH)
    return out


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual and x [..., H] of one dtype, weight [H] -> residual + x, and that sum's norm, as `rms_norm` has it."""
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise RuntimeError("residual and x differ in shape or dtype")
    _check_norm(x, weight, x.shape[-1])
    left, right = _Rows(residual), _Rows(x)
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    launch = _add_rms_norm_kernel[(right.count,)]
    tensors = (left.tensor, right.tensor, _aligned(weight), total, out)
    launch(*tensors, left.units, right.units, eps, **right.constants, **_LAUNCH)
    return total, out


def add_segments_rms_norm(
    residual: Tensor, segments: Tensor, bias: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Computes `add_rms_norm`, bit for bit, with the rounded sum of segments [S, T, H], in float32 and in their order,
    and of bias [H] in the place of x; residual is [..., H] with T rows."""
    size = residual.shape[-1]
    _check_norm(residual, weight, size)
    left = _Rows(residual)
    if segments.dtype != torch.float32 or segments.shape[1:] != (left.count, size):
        raise RuntimeError("segments and residual differ in shape, or segments are not in float32")
    total, out = (torch.empty(residual.shape, dtype=residual.dtype, device=residual.device) for _ in range(2))
    launch = _add_segments_rms_norm_kernel[(left.count,)]
    bias = None if bias is None else _aligned(bias)
    tensors = (left.tensor, _aligned(segments.contiguous()), bias, _aligned(weight), total, out)
    launch(*tensors, left.units, left.count, eps, SEGMENTS=len(segments), **left.constants, **_LAUNCH)
    return total, out


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """Blocks of GATE_BLOCK columns, gate and up in turn (the last two may be narrower) [T, 2 * F] -> activation(gate),
    rounded, times up [T, F]. The activation is silu or gelu_tanh."""
    if activation not in ("silu", "gelu_tanh"):
        raise RuntimeError(f"the activation {activation} is not known")
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise RuntimeError("a row has as many columns of gate as of up")
    _check_dtype(gate_up)
    rows = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    size, block = rows.shape[1] // 2, 1024
    out = rows.new_empty(len(rows), size)
    launch = _gate_kernel[(len(rows), triton.cdiv(size, block))]
    launch(rows, out, rows.stride(0), ACTIVATION=activation, SIZE=size, GATE=GATE_BLOCK, BLOCK=block, **_LAUNCH)
    return out


def rotate_heads(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    in_pairs: bool = False,
    norms_last: bool = False,
    query_scales: Tensor | None = None,
) -> None:
    """Norms the heads of queries and keys, where a weight [head_size] is given, and rotates them, both in place.

    qkv is [T, (num_heads + 2 * num_kv_heads) * head_size], cos and sin are [..., T, head_size], all of one dtype;
    weights are as in `rms_norm`.
    """
    if in_pairs or norms_last or query_scales is not None:
        raise NotImplementedError("rotations of neighbours, before norms and of scaled queries are not there on CUDA")
    if qkv.dim() != 2 or qkv.stride(1) != 1:
        raise RuntimeError("heads lie in the columns of a matrix")
    if num_heads <= 0 or num_kv_heads <= 0:
        raise RuntimeError("there must be heads")
    (rows, width), all_heads = qkv.shape, num_heads + 2 * num_kv_heads
    size = width // all_heads
    if size * all_heads != width or size % 2:
        raise RuntimeError(f"rows of {width} are not {all_heads} even heads")
    if any(each.dtype != qkv.dtype or each.shape[-1] != size or each.numel() != rows * size for each in (cos, sin)):
        raise RuntimeError(f"cos and sin must be of the rows' dtype, and every row has its angles, {size} of them")
    for norm in (query_norm, key_norm):
        if norm is not None:
            _check_norm(qkv, norm, size)
    launch = _rotate_heads_kernel[(rows, num_heads + num_kv_heads)]
    tensors = (qkv, cos.contiguous(), sin.contiguous(), query_norm, key_norm)
    block = triton.next_power_of_2(size // 2)
    launch(*tensors, qkv.stride(0), eps, NUM_HEADS=num_heads, HALF=size // 2, BLOCK=block, num_warps=1, **_LAUNCH)


def rotary_tables(positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """positions [...], inverse frequencies [head_size / 2] in float32 -> cosines and sines [..., head_size] of their
    products, in float32, times `scaling`; each half of a row is the same."""
    half = len(inv_freq)
    cos, sin = (torch.empty(*positions.shape, 2 * half, dtype=dtype, device=positions.device) for _ in range(2))
    launch = _rotary_tables_kernel[(positions.numel(),)]
    block = triton.next_power_of_2(half)
    tensors = (positions.contiguous(), inv_freq.contiguous(), cos, sin)
    launch(*tensors, scaling, HALF=half, BLOCK=block, num_warps=1, **_LAUNCH)
    return cos, sin


class _Rows:
    """A tensor's rows [T, H], each of which begins where a load of several numbers at once may begin.

    How many one load takes decides the order of a row's sum. So it follows from H alone: `unit` numbers divide H and
    the distance of rows, and rows that lie in another way are copied.
    """

    def __init__(self, x: Tensor) -> None:
        size = x.shape[-1]
        unit = math.gcd(size, 16)
        rows = x.reshape(-1, size)
        if rows.stride(1) != 1 or (len(rows) > 1 and rows.stride(0) % unit):
            rows = rows.contiguous()
        self.tensor, self.count = _aligned(rows), len(rows)
        self.units = self.tensor.stride(0) // unit if self.count > 1 else 0
        block = triton.next_power_of_2(size)
        self.constants = {"SIZE": size, "UNIT": unit, "BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


def _aligned(tensor: Tensor) -> Tensor:
    """Returns the tensor, which begins at a multiple of 16 bytes, or a copy that does."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _check_norm(x: Tensor, weight: Tensor, size: int) -> None:
    _check_dtype(x)
    if weight.dtype not in (x.dtype, torch.float32) or not weight.is_contiguous() or weight.numel() != size:
        raise RuntimeError(f"a norm's weight must be contiguous, of the rows' dtype or float32, with {size} elements")
    if size == 0:
        raise RuntimeError("rows of a norm must not be empty")


def _check_dtype(x: Tensor) -> None:
    if x.dtype not in _DTYPES:
        raise NotImplementedError(f"fused layers of {x.dtype} are not implemented")


@triton.jit(do_not_specialize=["x_units"])
def _rms_norm_kernel(
    x, weight, out, x_units, eps, SIZE: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr
):  # one row
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    numbers = tl.load(x + row * x_units * UNIT + column, mask=column < SIZE, other=0.0)
    _store_norm(numbers, weight, out + row * SIZE, eps, SIZE, BLOCK)


@triton.jit(do_not_specialize=["residual_units", "x_units"])
def _add_rms_norm_kernel(
    residual,
    x,
    weight,
    total,
    out,
    residual_units,
    x_units,
    eps,
    SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # one row
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    left = tl.load(residual + row * residual_units * UNIT + column, mask=inside, other=0.0)
    right = tl.load(x + row * x_units * UNIT + column, mask=inside, other=0.0)
    numbers = (left.to(tl.float32) + right.to(tl.float32)).to(left.dtype)
    tl.store(total + row * SIZE + column, numbers, mask=inside)
    _store_norm(numbers, weight, out + row * SIZE, eps, SIZE, BLOCK)


@triton.jit(do_not_specialize=["residual_units", "num_rows"])
def _add_segments_rms_norm_kernel(
    residual,
    segments,
    bias,
    weight,
    total,
    out,
    residual_units,
    num_rows,
    eps,
    SEGMENTS: tl.constexpr,
    SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # one row
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    left = tl.load(residual + row * residual_units * UNIT + column, mask=inside, other=0.0)
    right = tl.load(segments + row * SIZE + column, mask=inside, other=0.0)
    for segment in tl.static_range(1, SEGMENTS):
        right += tl.load(segments + (segment * num_rows + row) * SIZE + column, mask=inside, other=0.0)
    if bias is not None:
        right += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    numbers = (left.to(tl.float32) + right.to(left.dtype).to(tl.float32)).to(left.dtype)
    tl.store(total + row * SIZE + column, numbers, mask=inside)
    _store_norm(numbers, weight, out + row * SIZE, eps, SIZE, BLOCK)


@triton.jit
def _store_norm(numbers, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    scale = tl.load(weight + column, mask=inside, other=0.0)
    wide = numbers.to(tl.float32)
    normed = wide * _norm_factor(tl.sum(wide * wide, axis=0), eps, SIZE)
    tl.store(out + column, _scaled(normed, scale, numbers).to(numbers.dtype), mask=inside)


@triton.jit
def _scaled(normed, scale, rows):
    """The product of what was normed, in float32, and its weight; one of the rows' dtype multiplies what is rounded."""
    if scale.dtype == rows.dtype:
        normed = normed.to(rows.dtype).to(tl.float32)
    return normed * scale.to(tl.float32)


@triton.jit
def _norm_factor(squares, eps, SIZE: tl.constexpr):
    """The sum of a row's squares -> what the row is multiplied by; no approximations, so the same on every GPU."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, SIZE * 1.0) + eps))


@triton.jit
def _gate_kernel(
    gate_up,
    out,
    row_stride,
    ACTIVATION: tl.constexpr,
    SIZE: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # BLOCK columns of a row
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    at = gate_up + row * row_stride + column // GATE * (2 * GATE) + column % GATE
    width = GATE if SIZE % GATE == 0 else tl.minimum(GATE, SIZE - column // GATE * GATE)
    gates = tl.load(at, mask=inside, other=0.0)
    ups = tl.load(at + width, mask=inside, other=0.0)
    activated = _activated(gates.to(tl.float32), ACTIVATION).to(gates.dtype)
    tl.store(out + row * SIZE + column, (activated.to(tl.float32) * ups.to(tl.float32)).to(gates.dtype), mask=inside)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    """The function of numbers in float32; gelu_tanh is x times the sigmoid of twice what its tanh is of."""
    u = x if ACTIVATION == "silu" else 1.5957691216057308 * (x + 0.044715 * x * x * x)
    decay = tl.exp(-tl.abs(u))  # which cannot overflow
    return x * tl.div_rn(tl.where(u < 0, decay, 1.0), 1.0 + decay)


@triton.jit(
    do_not_specialize=["row_stride"], do_not_specialize_on_alignment=["qkv", "cos", "sin", "query_norm", "key_norm"]
)
def _rotate_heads_kernel(
    qkv,
    cos,
    sin,
    query_norm,
    key_norm,
    row_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):  # one head of a row
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    at = qkv + row * row_stride + head * (2 * HALF) + column
    low, high = tl.load(at, mask=inside, other=0.0), tl.load(at + HALF, mask=inside, other=0.0)
    if query_norm is not None:  # noqa: SIM102 (known when it is compiled)
        if head < NUM_HEADS:
            low, high = _normed_head(low, high, query_norm + column, inside, eps, HALF)
    if key_norm is not None:  # noqa: SIM102
        if head >= NUM_HEADS:
            low, high = _normed_head(low, high, key_norm + column, inside, eps, HALF)
    angle = row * (2 * HALF) + column
    from_low = _product(high, tl.load(cos + angle + HALF, mask=inside, other=0.0))
    to_low = _product(low, tl.load(cos + angle, mask=inside, other=0.0))
    new_low = to_low - _product(high, tl.load(sin + angle, mask=inside, other=0.0))
    new_high = from_low + _product(low, tl.load(sin + angle + HALF, mask=inside, other=0.0))
    tl.store(at, new_low.to(low.dtype), mask=inside)
    tl.store(at + HALF, new_high.to(low.dtype), mask=inside)


@triton.jit
def _rotary_tables_kernel(positions, inv_freq, cos, sin, scaling, HALF: tl.constexpr, BLOCK: tl.constexpr):  # one token
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    angle = tl.load(positions + row).to(tl.float32) * tl.load(inv_freq + column, mask=inside, other=0.0)
    at = row * (2 * HALF) + column
    cosine, sine = (
        (tl.cos(angle) * scaling).to(cos.dtype.element_ty),
        (tl.sin(angle) * scaling).to(sin.dtype.element_ty),
    )
    tl.store(cos + at, cosine, mask=inside)
    tl.store(cos + at + HALF, cosine, mask=inside)
    tl.store(sin + at, sine, mask=inside)
    tl.store(sin + at + HALF, sine, mask=inside)


@triton.jit
def _normed_head(low, high, weight, inside, eps, HALF: tl.constexpr):
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    squares = tl.sum(wide_low * wide_low + wide_high * wide_high, axis=0)
    factor = _norm_factor(squares, eps, 2 * HALF)
    new_low = _scaled(wide_low * factor, tl.load(weight, mask=inside, other=0.0), low)
    new_high = _scaled(wide_high * factor, tl.load(weight + HALF, mask=inside, other=0.0), high)
    return new_low.to(low.dtype), new_high.to(low.dtype)


@triton.jit
def _product(a, b):
    """The product of two numbers, rounded to their dtype, as float32."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype).to(tl.float32)
