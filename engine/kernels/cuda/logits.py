"""What requests' options change in logits before a token is sampled, on the device: masks, then biases and penalties.

`engine.runner.logits_processors` has the same for one row in torch; the numbers are equal bit for bit. A row with a
forced token allows that one alone, unless its logit is -inf.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_biases", "masked", "penalize"]

_CHUNK = 4096  # tokens that one program looks at
_ENTRIES = 512  # biases or penalties that one program applies
_NUM_WARPS = 4


def masked(logits: Tensor, masks: Tensor, mask_of_row: Tensor, forced: Tensor) -> Tensor:
    """Returns the logits [num_rows, vocab] as float32, -inf where a row's mask has no bit or another token is forced.

    `logits` are of any float, with tokens side by side. Bit i % 8 of byte i // 8 of `masks` [num_masks, num_bytes]
    uint8 tells whether token i is allowed, and `mask_of_row` [num_rows] int32 which mask a row has; -1 is none.
    `forced` [num_rows] int32 has the row's forced token, or -1; its logit becomes 0.
    """
    num_rows, vocab_size = logits.shape
    result = logits.new_empty(num_rows, vocab_size, dtype=torch.float32)
    _mask_kernel[num_rows, triton.cdiv(vocab_size, _CHUNK)](
        logits,
        logits.stride(0),
        masks,
        masks.stride(0),
        mask_of_row,
        forced,
        result,
        vocab_size,
        CHUNK=_CHUNK,
        num_warps=_NUM_WARPS,
    )
    return result


def add_biases(logits: Tensor, numbers: Tensor, forced: Tensor, rows: Tensor, ids: Tensor, biases: Tensor) -> None:
    """Adds to `logits` [num_rows, vocab], which `masked` returned, the `biases` [num_biases] float32 of tokens.

    `rows` and `ids` [num_biases] int32 say of which; no two are the same. A bias of -inf forbids a token, whatever its
    logit. `numbers` and `forced` are the first and the last argument of `masked`: rows with a forced token are left.
    """
    if num_biases := len(rows):
        _bias_kernel[(triton.cdiv(num_biases, _ENTRIES),)](
            logits,
            logits.stride(0),
            numbers,
            numbers.stride(0),
            forced,
            rows,
            ids,
            biases,
            num_biases,
            ENTRIES=_ENTRIES,
        )


def penalize(
    logits: Tensor, numbers: Tensor, forced: Tensor, rows: Tensor, ids: Tensor, factors: Tensor, amounts: Tensor
) -> None:
    """Makes tokens less likely, as `add_biases` does in place: by `factors` [num_penalties] float32, which divide
    positive logits and multiply others, then by `amounts` [num_penalties] float32, which are taken off."""
    if num_penalties := len(rows):
        _penalty_kernel[(triton.cdiv(num_penalties, _ENTRIES),)](
            logits,
            logits.stride(0),
            numbers,
            numbers.stride(0),
            forced,
            rows,
            ids,
            factors,
            amounts,
            num_penalties,
            ENTRIES=_ENTRIES,
            enable_fp_fusion=False,  # rounds each operation, as torch does
        )


@triton.jit
def _mask_kernel(logits, stride, masks, num_bytes, mask_of_row, forced, result, vocab_size, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    is_token = tokens < vocab_size
    numbers = tl.load(logits + row * stride + tokens, is_token).to(tl.float32)
    mask = tl.load(mask_of_row + row).to(tl.int64)
    if mask >= 0:
        bits = tl.load(masks + mask * num_bytes + tokens // 8, is_token, 0).to(tl.int32) >> (tokens % 8)
        numbers = tl.where((bits & 1) == 0, -float("inf"), numbers)
    if _is_forced(logits, stride, forced, row):
        numbers = tl.where(tokens == tl.load(forced + row), 0.0, -float("inf"))
    tl.store(result + row * vocab_size + tokens, numbers, is_token)


@triton.jit
def _is_forced(logits, stride, forced, rows):
    """Whether each of the rows has a forced token whose logit is not -inf."""
    tokens = tl.load(forced + rows)
    numbers = tl.load(logits + rows * stride + tl.maximum(tokens, 0)).to(tl.float32)
    return (tokens >= 0) & (numbers != -float("inf"))


@triton.jit(do_not_specialize=["num_biases"])
def _bias_kernel(logits, stride, numbers, numbers_stride, forced, rows, ids, biases, num_biases, ENTRIES: tl.constexpr):
    entries = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    is_entry = entries < num_biases
    row = tl.load(rows + entries, is_entry, 0).to(tl.int64)
    place = logits + row * stride + tl.load(ids + entries, is_entry, 0)
    is_entry &= _is_forced(numbers, numbers_stride, forced, row) == 0
    bias = tl.load(biases + entries, is_entry, 0.0)
    value = tl.load(place, is_entry, 0.0)
    is_ban = bias == -float("inf")
    tl.store(place, tl.where(is_ban, bias, value + tl.where(is_ban, 0.0, bias)), is_entry)


@triton.jit(do_not_specialize=["num_penalties"])
def _penalty_kernel(
    logits, stride, numbers, numbers_stride, forced, rows, ids, factors, amounts, num_penalties, ENTRIES: tl.constexpr
):
    entries = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    is_entry = entries < num_penalties
    row = tl.load(rows + entries, is_entry, 0).to(tl.int64)
    place = logits + row * stride + tl.load(ids + entries, is_entry, 0)
    is_entry &= _is_forced(numbers, numbers_stride, forced, row) == 0
    factor = tl.load(factors + entries, is_entry, 1.0)
    value = tl.load(place, is_entry, 0.0)
    value = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
    tl.store(place, value - tl.load(amounts + entries, is_entry, 0.0), is_entry)
