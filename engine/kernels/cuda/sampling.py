"""Which token comes next, on the device: the likeliest, or one drawn by temperature, top_k, top_p and min_p.

`engine.runner.token_draw` explains the draw. Here as there a token's weight is a whole number, so a sum of weights is
the same in any order, and a filter is a cut: of a row's weights in descending order, among equals by their ids, it
keeps the first ones. The cut's weight is found ten bits at a time, from how many weights have which digit, without a
sort. Rows are in chunks of a fixed size; nothing here waits for the host.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["argmax", "draw", "weigh"]

_CHUNK = 4096  # tokens that one program looks at
_NUM_WARPS = 8
_DIGITS = tl.constexpr(1024)  # values of ten bits
_TOP_SHIFT = tl.constexpr(20)  # of the highest ten of thirty bits
_NO_LIMIT = tl.constexpr(1 << 62)

# Columns of controls [num_rows, 5] float64.
_NUM_CONTROLS = tl.constexpr(5)
_NUMBER = tl.constexpr(1)
_TOP_K = tl.constexpr(2)
_TOP_P = tl.constexpr(3)
_MIN_P = tl.constexpr(4)

# Columns of cuts [num_rows, 3] int64: all weights above CUT_WEIGHT are kept, and the first NUM_EQUAL of those like it.
# While it is looked for, these are the digits so far, the limit that is left to reach, and the sum of what is above.
_NUM_CUTS = tl.constexpr(3)
_CUT_WEIGHT = tl.constexpr(0)
_NUM_EQUAL = tl.constexpr(1)
_KEPT_SUM = tl.constexpr(2)


def argmax(logits: Tensor) -> Tensor:
    """Returns each row's likeliest token, the lowest id of equals; -1 where the largest logit is not finite.

    `logits` are [num_rows, vocab] of any float, with tokens side by side. Returns [num_rows] int64.
    """
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    largest = logits.new_empty(num_rows, num_chunks, dtype=torch.float32)
    ids = logits.new_empty(num_rows, num_chunks, dtype=torch.int64)
    likeliest = logits.new_empty(num_rows, dtype=torch.int64)
    if num_rows:
        grid, padded = (num_rows, num_chunks), triton.next_power_of_2(num_chunks)
        _chunk_argmax_kernel[grid](
            logits, logits.stride(0), largest, ids, vocab_size, CHUNK=_CHUNK, num_warps=_NUM_WARPS
        )
        _argmax_kernel[(num_rows,)](largest, ids, likeliest, num_chunks, CHUNKS=padded, num_warps=1)
    return likeliest


def weigh(logits: Tensor, likeliest: Tensor, controls: Tensor) -> Tensor:
    """Returns the weights [num_rows, vocab] int32 of the tokens of the rows that are drawn; others are undefined.

    `logits` are those of `argmax`, and `likeliest` [num_rows] is what it returned. `controls` [num_rows, 5] float64 are
    temperature, uniform random number, top_k, top_p and min_p. A row is drawn if its temperature is not 0 and it has
    a likeliest token.
    """
    num_rows, vocab_size = logits.shape
    weights = logits.new_empty(num_rows, vocab_size, dtype=torch.int32)
    if num_rows:
        grid = (num_rows, triton.cdiv(vocab_size, _CHUNK))
        _weigh_kernel[grid](
            logits, logits.stride(0), likeliest, controls, weights, vocab_size, CHUNK=_CHUNK, num_warps=_NUM_WARPS
        )
    return weights


def draw(weights: Tensor, likeliest: Tensor, controls: Tensor, *, has_top_k: bool, has_top_p: bool) -> Tensor:
    """Returns a token per row [num_rows] int64: drawn by its weights, or else its likeliest one.

    The arguments are those of `weigh`, and its weights. `has_top_k` and `has_top_p` tell whether any row that is drawn
    has a top_k other than 0, or a top_p other than 1.
    """
    num_rows, vocab_size = weights.shape
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    cuts = weights.new_empty(num_rows, _NUM_CUTS.value, dtype=torch.int64)
    above = weights.new_empty(num_rows, num_chunks, dtype=torch.int64)
    equal = weights.new_empty(num_rows, num_chunks, dtype=torch.int64)
    drawn = weights.new_empty(num_rows, dtype=torch.int64)
    if not num_rows:
        return drawn
    rows = (likeliest, controls)
    has_cuts = int(has_top_k or has_top_p)
    if has_cuts:
        _find_cuts(weights, rows, cuts, has_top_k, has_top_p)
    _sum_kernel[(num_rows, num_chunks)](
        weights, *rows, cuts, above, equal, has_cuts, vocab_size, CHUNK=_CHUNK, num_warps=_NUM_WARPS
    )
    _find_kernel[(num_rows,)](
        weights,
        *rows,
        cuts,
        above,
        equal,
        drawn,
        has_cuts,
        vocab_size,
        num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks),
        CHUNK=_CHUNK,
        num_warps=_NUM_WARPS,
    )
    return drawn


def _find_cuts(weights: Tensor, rows: tuple[Tensor, Tensor], cuts: Tensor, has_top_k: bool, has_top_p: bool) -> None:
    """Writes the cuts of top_k, then those of top_p among what top_k keeps.

    Both begin with the same digits of all weights, which are counted once.
    """
    num_rows, vocab_size = weights.shape
    grid = (num_rows, triton.cdiv(vocab_size, _CHUNK))
    tables = torch.zeros(5, num_rows, 2, _DIGITS.value, dtype=torch.int64, device=weights.device)
    passes = [(False, (0, 1, 2))] * has_top_k + [(True, (0, 3, 4))] * has_top_p
    counted: set[int] = set()
    for by_sum, numbers in passes:
        for number, shift in zip(numbers, (20, 10, 0), strict=True):
            if number not in counted:
                _count_kernel[grid](
                    weights, *rows, cuts, tables[number], vocab_size, SHIFT=shift, CHUNK=_CHUNK, num_warps=_NUM_WARPS
                )
                counted.add(number)
            is_among_kept = int(has_top_k and by_sum and number == 0)
            _narrow_kernel[(num_rows,)](
                *rows,
                cuts,
                tables[number],
                is_among_kept,
                SHIFT=shift,
                BY_SUM=by_sum,
                num_warps=_NUM_WARPS,
            )


@triton.jit
def _chunk_argmax_kernel(logits, stride, largest, ids, vocab_size, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    numbers = tl.load(logits + row * stride + tokens, tokens < vocab_size, -float("inf")).to(tl.float32)
    numbers = tl.where(numbers == numbers, numbers, float("inf"))  # a row with NaN has no token either
    most = tl.max(numbers, 0)
    place = row * tl.num_programs(1) + chunk
    tl.store(largest + place, most)
    tl.store(ids + place, tl.min(tl.where(numbers == most, tokens, vocab_size), 0).to(tl.int64))


@triton.jit
def _argmax_kernel(largest, ids, likeliest, num_chunks, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    numbers = tl.load(largest + row * num_chunks + chunks, chunks < num_chunks, -float("inf"))
    tokens = tl.load(ids + row * num_chunks + chunks, chunks < num_chunks, _NO_LIMIT)
    most = tl.max(numbers, 0)
    token = tl.min(tl.where(numbers == most, tokens, _NO_LIMIT), 0)
    is_finite = (most < float("inf")) & (most > -float("inf"))
    tl.store(likeliest + row, tl.where(is_finite, token, -1))


@triton.jit
def _is_drawn(likeliest, controls, row):
    return (tl.load(likeliest + row) >= 0) & (tl.load(controls + row * _NUM_CONTROLS) > 0)


@triton.jit
def _load_weights(weights, row, chunk, vocab_size, CHUNK: tl.constexpr):
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    return tl.load(weights + row * vocab_size + tokens, tokens < vocab_size, 0)


@triton.jit
def _weigh_kernel(logits, stride, likeliest, controls, weights, vocab_size, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if not _is_drawn(likeliest, controls, row):
        return
    largest = tl.load(logits + row * stride + tl.load(likeliest + row)).to(tl.float32)
    temperature = tl.load(controls + row * _NUM_CONTROLS).to(tl.float32)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    numbers = tl.load(logits + row * stride + tokens, tokens < vocab_size, -float("inf")).to(tl.float32)
    ratios = tl.minimum(tl.exp((numbers - largest) / temperature), 1.0)
    tl.store(weights + row * vocab_size + tokens, (ratios * 2.0**30 + 0.5).to(tl.int32), tokens < vocab_size)


@triton.jit
def _is_cut(likeliest, controls, row):
    filters = controls + row * _NUM_CONTROLS
    has_filter = (tl.load(filters + _TOP_K) > 0) | (tl.load(filters + _TOP_P) < 1)
    return has_filter & _is_drawn(likeliest, controls, row)


@triton.jit
def _count_kernel(weights, likeliest, controls, cuts, table, vocab_size, SHIFT: tl.constexpr, CHUNK: tl.constexpr):
    """Adds to `table` [num_rows, 2, 1024] number and sum of the weights that have each digit behind those of the cut.

    A weight's digits are those of the weight less one, and 0 has none: it is never drawn.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if not _is_cut(likeliest, controls, row):
        return
    numbers = _load_weights(weights, row, chunk, vocab_size, CHUNK)
    matches = numbers > 0
    if SHIFT < _TOP_SHIFT:
        found = tl.load(cuts + row * _NUM_CUTS + _CUT_WEIGHT)
        matches &= ((numbers - 1) >> (SHIFT + 10)) == (found >> (SHIFT + 10))
    digits = ((numbers - 1) >> SHIFT) & (_DIGITS - 1)
    numbers = numbers.to(tl.int64)
    counts = table + row * 2 * _DIGITS
    sums = counts + _DIGITS
    # Most weights are small: they are added up before, as all would wait for one another.
    is_zero = matches & (digits == 0)
    tl.atomic_add(counts, tl.sum(is_zero.to(tl.int64), 0), sem="relaxed")
    tl.atomic_add(sums, tl.sum(tl.where(is_zero, numbers, 0), 0), sem="relaxed")
    is_other = matches & (digits > 0)
    tl.atomic_add(counts + digits, is_other.to(tl.int64), is_other, sem="relaxed")
    tl.atomic_add(sums + digits, numbers, is_other, sem="relaxed")


@triton.jit(do_not_specialize=["is_among_kept"])
def _narrow_kernel(likeliest, controls, cuts, table, is_among_kept, SHIFT: tl.constexpr, BY_SUM: tl.constexpr):
    """Finds the cut's next digit: the largest at which all weights from it up reach the limit; 0 if none does."""
    row = tl.program_id(0).to(tl.int64)
    cut = cuts + row * _NUM_CUTS
    if not _is_cut(likeliest, controls, row):
        tl.store(cut + _CUT_WEIGHT, 1)
        tl.store(cut + _NUM_EQUAL, _NO_LIMIT)
        return
    digits = tl.arange(0, _DIGITS)
    counts = tl.load(table + row * 2 * _DIGITS + digits)
    sums = tl.load(table + (row * 2 + 1) * _DIGITS + digits)
    measures = sums if BY_SUM else counts
    if SHIFT == _TOP_SHIFT:
        found, total = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
        if BY_SUM:
            kept = tl.sum(sums, 0)
            if is_among_kept > 0:
                kept = tl.load(cut + _KEPT_SUM)
            top_p = tl.load(controls + row * _NUM_CONTROLS + _TOP_P)
            left = tl.ceil(top_p * kept.to(tl.float64)).to(tl.int64)
        else:
            top_k = tl.load(controls + row * _NUM_CONTROLS + _TOP_K).to(tl.int64)
            left = tl.where(top_k > 0, top_k, _NO_LIMIT)
    else:
        found, left, total = tl.load(cut + _CUT_WEIGHT), tl.load(cut + _NUM_EQUAL), tl.load(cut + _KEPT_SUM)
    reached = tl.cumsum(measures, 0, reverse=True) >= left
    digit = tl.max(tl.where(reached, digits, 0), 0)
    is_above = digits > digit
    found += digit << SHIFT
    left -= tl.sum(tl.where(is_above, measures, 0), 0)
    total += tl.sum(tl.where(is_above, sums, 0), 0)
    if SHIFT == 0:
        found += 1
        left = (left + found - 1) // found if BY_SUM else left
        total += found * tl.minimum(left, tl.sum(tl.where(digits == digit, counts, 0), 0))
    tl.store(cut + _CUT_WEIGHT, found)
    tl.store(cut + _NUM_EQUAL, left)
    tl.store(cut + _KEPT_SUM, total)


@triton.jit
def _cut_with_min_p(controls, cuts, row, has_cuts):
    """Returns the weight of a row's cut, and how many of those like it are kept. Without cuts it is the smallest."""
    cut = tl.load(cuts + row * _NUM_CUTS + _CUT_WEIGHT, has_cuts > 0, 1)
    num_equal = tl.load(cuts + row * _NUM_CUTS + _NUM_EQUAL, has_cuts > 0, _NO_LIMIT)
    least = tl.ceil(tl.load(controls + row * _NUM_CONTROLS + _MIN_P) * 2.0**30).to(tl.int64)
    return tl.maximum(cut, least), tl.where(least > cut, _NO_LIMIT, num_equal)


@triton.jit(do_not_specialize=["has_cuts"])
def _sum_kernel(weights, likeliest, controls, cuts, above, equal, has_cuts, vocab_size, CHUNK: tl.constexpr):
    """Sums each chunk's weights above the cut, and counts those like it."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if not _is_drawn(likeliest, controls, row):
        return
    numbers = _load_weights(weights, row, chunk, vocab_size, CHUNK).to(tl.int64)
    cut, _ = _cut_with_min_p(controls, cuts, row, has_cuts)
    place = row * tl.num_programs(1) + chunk
    tl.store(above + place, tl.sum(tl.where(numbers > cut, numbers, 0), 0))
    tl.store(equal + place, tl.sum((numbers == cut).to(tl.int64), 0))


@triton.jit(do_not_specialize=["has_cuts"])
def _find_kernel(
    weights,
    likeliest,
    controls,
    cuts,
    above,
    equal,
    drawn,
    has_cuts,
    vocab_size,
    num_chunks,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Finds the token at which the running sum of kept weights exceeds the random number times their total."""
    row = tl.program_id(0).to(tl.int64)
    if not _is_drawn(likeliest, controls, row):
        tl.store(drawn + row, tl.load(likeliest + row))
        return
    cut, num_equal = _cut_with_min_p(controls, cuts, row, has_cuts)
    chunks = tl.arange(0, CHUNKS)
    num_like_it = tl.load(equal + row * num_chunks + chunks, chunks < num_chunks, 0)
    before = tl.cumsum(num_like_it, 0) - num_like_it
    num_kept = tl.minimum(tl.maximum(num_equal - before, 0), num_like_it)
    sums = tl.load(above + row * num_chunks + chunks, chunks < num_chunks, 0) + num_kept * cut
    total = tl.sum(sums, 0)
    number = tl.load(controls + row * _NUM_CONTROLS + _NUMBER)
    target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
    chunk = tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0)
    target -= tl.sum(tl.where(chunks < chunk, sums, 0), 0)
    num_equal = tl.sum(tl.where(chunks == chunk, num_kept, 0), 0)
    numbers = _load_weights(weights, row, chunk, vocab_size, CHUNK).to(tl.int64)
    is_like_it = (numbers == cut).to(tl.int32)
    is_kept = (numbers > cut) | ((is_like_it > 0) & (tl.cumsum(is_like_it, 0) <= num_equal))
    place = tl.sum((tl.cumsum(tl.where(is_kept, numbers, 0), 0) <= target).to(tl.int32), 0)
    tl.store(drawn + row, (chunk * CHUNK + place).to(tl.int64))
