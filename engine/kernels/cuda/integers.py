"""Weights of integers as a tile of a product reads and expands them.

They come in words of 32 bits. A step's columns are cut into as many parts as half a word has integers: each half has
one of each part, and a word's two are those of neighbours.
"""

import triton
import triton.language as tl

__all__ = ["WORD_ROWS", "numbers_of_words", "part_scales", "row_offsets"]

WORD_ROWS = 64
"""Rows of a weight whose words of one step lie side by side, as a tile reads them."""
_WORD_ROWS = tl.constexpr(WORD_ROWS)


@triton.jit
def row_offsets(row, stride, BLOCK_K: tl.constexpr, BITS: tl.constexpr):
    """Where rows of a weight begin: of words of integers, those of some rows and one step lie side by side."""
    WORDS: tl.constexpr = BLOCK_K * BITS // 32
    return row // _WORD_ROWS * stride + row % _WORD_ROWS * WORDS if BITS else row * stride


@triton.jit
def part_scales(scale_rows, at, num_out, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """The scales [BLOCK_N] of each part of a step's columns: those of four groups, or of one that goes on."""
    if GROUP >= BLOCK_K:
        scales = tl.load(scale_rows + at // GROUP * num_out)
        return scales, scales, scales, scales
    else:
        tl.static_assert(BLOCK_K == 4 * GROUP)
        pointers = scale_rows[:, None] + (at // BLOCK_K * num_out * 4 + tl.arange(0, 4))[None, :]
        even, odd = tl.split(tl.load(pointers).reshape(BLOCK_N, 2, 2))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth


@triton.jit
def numbers_of_words(
    words, PART: tl.constexpr, scales, NUMBER: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """The numbers of a part of a step's columns [BLOCK_N, 2 * WORDS], two of a word, with one scale a row."""
    if NUMBER.is_bf16():
        scale = ((scales & -65536) | (scales >> 16 & 0xFFFF))[:, None].broadcast_to(BLOCK_N, WORDS)
        minimum = ((scales << 16) | (scales & 0xFFFF))[:, None].broadcast_to(BLOCK_N, WORDS)
        pairs = _multiplied_and_added(_integer_pairs(words, PART, BLOCK_N, WORDS, BITS), scale, minimum)
        low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        return tl.join(low, high).reshape(BLOCK_N, 2 * WORDS)
    integers = tl.join(_integers(words, PART, BITS), _integers(words >> 16, PART, BITS)).reshape(BLOCK_N, 2 * WORDS)
    scale = (scales & -65536).to(tl.float32, bitcast=True)[:, None].broadcast_to(BLOCK_N, 2 * WORDS)
    minimum = (scales << 16).to(tl.float32, bitcast=True)[:, None].broadcast_to(BLOCK_N, 2 * WORDS)
    return tl.fma(integers, scale, minimum).to(NUMBER)


@triton.jit
def _integers(words, PART: tl.constexpr, BITS: tl.constexpr):
    """The integers of words' lower halves in float32; those of 8 bits divided by 64, as the pairs below."""
    if BITS == 4:
        return (words >> (4 * PART) & 15).to(tl.float32)
    return ((words >> (7 * PART) & 127) + (128 - (words >> (14 + PART) & 1) * 128)).to(tl.float32) / 64


@triton.jit
def _integer_pairs(words, PART: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr):
    """The integers of words in bfloat16, two in each; those of 8 bits divided by 64.

    A power of two whose lowest bits are replaced is so much more than they are, in far fewer cycles than a conversion
    takes: 128 for 4 bits. Of 8 bits, 2 is 2 more than the lowest 7 over 64; the highest one is kept inverted, in the
    place where it makes that 2, which is subtracted where it is set.
    """
    if BITS == 4:
        one = tl.full((BLOCK_N, WORDS), 0x3F803F80, tl.int32)
        less = tl.full((BLOCK_N, WORDS), 0x4300C300 - (1 << 31), tl.int32)  # -128
        return _multiplied_and_added(_with_bits(words >> (4 * PART), 0x000F000F, 0x43004300), one, less)
    minus_one = tl.full((BLOCK_N, WORDS), 0x3F80BF80 - (1 << 31), tl.int32)
    more = _with_bits(words >> (7 * PART), 0x007F007F, 0x40004000)
    return _multiplied_and_added(words >> PART & 0x40004000, minus_one, more)


@triton.jit
def _with_bits(words, MASK: tl.constexpr, BITS: tl.constexpr):
    """words & MASK | BITS in one instruction, where a compiler takes two."""
    bits = tl.full(words.shape, BITS, tl.int32)
    mask = tl.full(words.shape, MASK, tl.int32)
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [words, mask, bits], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _multiplied_and_added(a, b, c):
    """a * b + c of two numbers in bfloat16 at once, each rounded once; a compiler would take such pairs apart."""
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
    )
