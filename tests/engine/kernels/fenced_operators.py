"""Calls the kernels' operators with inputs that begin or end at an inaccessible guard page, and compares results.

It covers all operators but whole layers, which consist of these. It runs as a process of its own
(`python -m tests.engine.kernels.fenced_operators`), which crashes where an operator reads out of bounds, and prints
each case before it begins.
"""

import ctypes
import math
import mmap
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from engine.attention.kv_format import quantize
from engine.checkpoint.gguf.block_types import BLOCK_TYPES, BlockType
from engine.kernels import load_kernels
from engine.weights.affine_quantization import BITS, NUM_REFITS
from engine.weights.packing_policy import packing_for
from engine.weights.quantized_weight import KernelQuantizedWeight
from tests.engine.attention.attention_cases import LENGTHS, QUANTIZABLE, QUANTIZED, SHAPES

Case = tuple[str, Callable[..., Any], tuple[Any, ...]]

DTYPES = (torch.float32, torch.bfloat16)
LINEARS = ((1, 1), (3, 17), (33, 64), (100, 130), (64, 1), (70, 2100))  # N, K
ROWS = (1, 2, 3, 7, 16, 33)
PROT_NONE = 0


def main() -> None:
    load_kernels()
    torch.manual_seed(0)
    for name, op, inputs in cases():
        print(name, flush=True)
        check(op, inputs)


def check(op: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    """Asserts that results, and inputs that the operator changes, do not depend on where inputs lie in memory."""
    expected = _run(op, inputs, torch.clone)
    for place in (_behind_a_fence, _before_a_fence):
        for one, other in zip(expected, _run(op, inputs, place), strict=True):
            assert torch.equal(one, other), place.__name__


def _run(op: Callable[..., Any], inputs: tuple[Any, ...], place: Callable[[Tensor], Tensor]) -> list[Any]:
    placed = tree_map_only(Tensor, place, inputs)
    return [leaf for leaf in tree_leaves((op(*placed), placed)) if isinstance(leaf, Tensor)]


def _behind_a_fence(tensor: Tensor) -> Tensor:
    return _fenced(tensor, at_end=False)


def _before_a_fence(tensor: Tensor) -> Tensor:
    return _fenced(tensor, at_end=True)


def _fenced(tensor: Tensor, *, at_end: bool) -> Tensor:
    """Returns a copy in pages of its own, with an inaccessible page before and one after them."""
    if tensor.numel() == 0:
        return tensor
    size = tensor.numel() * tensor.element_size()
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + 2 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for fence in (address, address + mmap.PAGESIZE + room):
        if ctypes.CDLL(None).mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(mmap.PAGESIZE), PROT_NONE) != 0:
            raise OSError("mprotect failed")
    start = mmap.PAGESIZE + (room - size if at_end else 0)
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
    return copy.view(tensor.shape).copy_(tensor)


def cases() -> Iterator[Case]:
    yield from _quantized_attention()
    yield from _recurrent()
    yield from _blocks()
    for dtype in DTYPES:
        yield from _fused(dtype)
        yield from _attention(dtype)
        yield from _packing(dtype)
        yield from _products(dtype)
        yield from _experts(dtype)
        yield from _logits(dtype)


def _fused(dtype: torch.dtype) -> Iterator[Case]:
    ops, rows = torch.ops.twostep, 3
    for size in (1, 7, 16, 40, 900):
        x, weight = torch.randn(rows, size).to(dtype), torch.randn(size).to(dtype)
        yield f"rms_norm of {size}, {dtype}", ops.rms_norm, (x, weight, 1e-6)
        yield f"add_rms_norm of {size}, {dtype}", ops.add_rms_norm, (x, x + 1, weight, 1e-6)
        yield f"layer_norm of {size}, {dtype}", ops.layer_norm, (x, weight.float(), weight.float() + 1, 1e-6)
        yield f"square_relu of {size}, {dtype}", ops.square_relu, (x.clone(),)
        yield f"xielu of {size}, {dtype}", ops.xielu, (x.clone(), 0.8, 0.7, 0.5, -1e-6)
        yield f"gelu_new of {size}, {dtype}", ops.gelu_new, (x.clone(),)
        yield f"scale_columns of {size}, {dtype}", ops.scale_columns, (x.clone(), torch.randn(size))
        heads = torch.randn(rows, 3, size).to(dtype)[:, :2], torch.randn(2, size), torch.randn(2, size)
        yield f"norm_heads of {size}, {dtype}", ops.norm_heads, (*heads, 1e-6)
        yield f"gate of {size}, {dtype}", ops.gate, (torch.randn(rows, 2 * size).to(dtype), "silu")
    for size in (2, 14, 32, 72):
        heads, angles = torch.randn(rows, 4 * size).to(dtype), torch.randn(rows, size).to(dtype)
        norm = torch.randn(size).to(dtype)
        yield f"rotate_heads of {size}, {dtype}", ops.rotate_heads, (heads, angles, angles, 2, 1, norm, norm, 1e-6)
        first, norms = angles[:, : size // 4 * 2].float().contiguous(), (torch.randn(2 * size).to(dtype), norm)
        in_pairs = (heads.clone(), first, first, 2, 1, *norms, 1e-6, True)
        yield f"rotate_heads of {size} in pairs, {dtype}", ops.rotate_heads, in_pairs
        then = (heads.clone(), angles, angles, 2, 1, norm, norm, 1e-6, False, True, torch.randn(rows))
        yield f"rotate_heads of {size}, then norms and scales, {dtype}", ops.rotate_heads, then


def _attention(dtype: torch.dtype) -> Iterator[Case]:
    block_size = 16
    for name, shape in SHAPES.items():
        for queries, context in LENGTHS:
            blocks = -(-context // block_size)
            keys = torch.randn(blocks, shape.kv_heads, block_size, shape.size).to(dtype)
            values = torch.randn(blocks, shape.kv_heads, block_size, shape.value_size).to(dtype)
            query = torch.randn(queries, shape.heads, shape.size).to(dtype)
            table = torch.randperm(blocks).int().view(1, -1)
            starts, lens = torch.tensor([0, queries]).int(), torch.tensor([context]).int()
            inputs = (query, keys, values, table, starts, lens, shape.scaling, None, None, torch.randn(shape.heads))
            yield f"paged_attention, {name}, {queries} of {context}, {dtype}", torch.ops.twostep.paged_attention, inputs
        new = torch.randn(5, shape.kv_heads, shape.size).to(dtype), torch.randn(5, shape.kv_heads, shape.value_size)
        caches = keys[:1], values[:1]
        slots = torch.tensor([0, 3, 4, 14, 15])
        yield f"write_kv, {name}, {dtype}", torch.ops.twostep.write_kv, (new[0], new[1].to(dtype), *caches, slots)


def _quantized_attention() -> Iterator[Case]:
    for (name, shape), (kv, kv_dtype) in product(QUANTIZABLE.items(), QUANTIZED.items()):
        for queries, context in LENGTHS:
            keys = quantize(torch.randn(context, shape.kv_heads, 1, shape.size), kv_dtype)
            values = quantize(torch.randn(context, shape.kv_heads, 1, shape.value_size), kv_dtype)
            query, table = torch.randn(queries, shape.heads, shape.size), torch.randperm(context).int().view(1, -1)
            starts, lens = torch.tensor([0, queries]).int(), torch.tensor([context]).int()
            inputs = (query, keys, values, table, starts, lens, shape.scaling, None, None, None)
            case = f"paged_attention over {kv}, {name}, {queries} of {context}"
            yield case, torch.ops.twostep.paged_attention, inputs


def _recurrent() -> Iterator[Case]:
    num_tokens, groups, heads = 5, 2, 4
    for key_size, value_size in ((1, 1), (7, 16), (12, 40)):
        query, key = torch.randn(2, num_tokens, groups, key_size)
        value, rate = torch.randn(num_tokens, heads, value_size), torch.rand(num_tokens, heads)
        states = torch.randn(3, heads, -(-value_size // 16), key_size, 16)
        for num_decays, one in ((1, rate), (key_size, None)):
            inputs = (query, key, value, torch.rand(num_tokens, heads, num_decays), one, states)
            places = torch.tensor([2, 0]), torch.tensor([0, 4, 5])
            name = f"linear_attention of {key_size} by {value_size} and {num_decays} decays"
            yield name, torch.ops.twostep.linear_attention, (*inputs, *places)
        for dtype in DTYPES:
            qkv = torch.randn(num_tokens, 2 * groups * key_size + heads * value_size).to(dtype)
            gates = torch.randn(2, num_tokens, heads).to(dtype)
            numbers = -torch.rand(heads), torch.randn(heads)
            yield f"delta_gates of {key_size}, {dtype}", torch.ops.twostep.delta_gates, (*gates, *numbers)
            inputs = (qkv, *gates, *numbers, groups, states.clone(), *places)
            yield f"gated_delta_rule of {key_size} by {value_size}, {dtype}", torch.ops.twostep.gated_delta_rule, inputs
            yield from _mamba2(dtype, groups, heads, key_size, value_size, places)
    for channels in (1, 40, 300):
        for dtype in DTYPES:
            x, gates = torch.randn(2, num_tokens, channels).to(dtype)
            for taps, is_gated in ((1, False), (4, False), (3, True)):
                weight, bias, earlier = (
                    torch.randn(taps, channels),
                    torch.randn(channels),
                    torch.randn(3, taps - 1, channels),
                )
                inputs = (x, weight, bias, is_gated, earlier.to(dtype), *places)
                name = f"{'gated' if is_gated else 'causal'}_convolution of {channels} by {taps}, {dtype}"
                yield name, torch.ops.twostep.causal_convolution, inputs
                rows = torch.randn(num_tokens, 3 * channels).to(dtype)
                inputs = (rows, weight, bias, earlier.to(dtype), *places)
                yield f"short_convolution of {channels} by {taps}, {dtype}", torch.ops.twostep.short_convolution, inputs
            for activation in ("none", "sigmoid", "silu"):
                inputs = x.clone(), gates, activation
                yield f"multiply_by_gates of {activation}, {dtype}", torch.ops.twostep.multiply_by_gates, inputs
            firsts, states = torch.arange(num_tokens) == 0, torch.randn(3, channels)
            heads = torch.randn(num_tokens, 1, 2, channels).to(dtype)
            inputs = x, heads, -torch.rand(channels), firsts, states, *places
            yield f"real_gated_recurrence of {channels}, {dtype}", torch.ops.twostep.real_gated_recurrence, inputs
        for size in (1, 16, 21):
            x, times = torch.randn(num_tokens, channels), torch.rand(num_tokens, channels)
            write, read = torch.randn(2, num_tokens, size)
            inputs = (x, times, -torch.rand(channels, size), write, read, torch.randn(3, channels, size), *places)
            yield f"selective_scan of {channels} by {size}", torch.ops.twostep.selective_scan, inputs


def _mamba2(
    dtype: torch.dtype, groups: int, heads: int, state_size: int, head_size: int, places: tuple[Tensor, Tensor]
) -> Iterator[Case]:
    num_tokens, width = 5, heads * head_size
    rows, steps = torch.randn(num_tokens, width + 2 * groups * state_size).to(dtype), torch.randn(num_tokens, heads)
    numbers = steps.to(dtype), -torch.rand(heads), torch.randn(heads)
    states = torch.randn(3, heads, -(-head_size // 16), state_size, 16)
    inputs = (rows, *numbers, torch.randn(heads), 0.1, 2.0, groups, states, *places)
    yield f"mamba2_gates of {heads}, {dtype}", torch.ops.twostep.mamba2_gates, (*numbers, 0.1, 2.0)
    yield f"mamba2_scan of {state_size} by {head_size}, {dtype}", torch.ops.twostep.mamba2_scan, inputs
    gates = torch.randn(num_tokens, width).to(dtype)
    inputs = torch.randn(num_tokens, width), gates, gates[0].clone(), 1e-5, groups
    yield f"gated_group_norm of {width}, {dtype}", torch.ops.twostep.gated_group_norm, inputs
    for norm in (gates[0].clone(), None):
        layer = torch.randn(num_tokens, width + rows.shape[1] + heads).to(dtype), torch.randn(3, rows.shape[1]), None
        window, numbers_of_norm = torch.randn(3, 2, rows.shape[1]).to(dtype), (norm, 1e-5)
        scan = *numbers[1:], torch.randn(heads), 0.1, 2.0, groups
        inputs = *layer, *scan, *numbers_of_norm, window, states.clone(), *places
        name = f"mamba2_layer of {state_size} by {head_size}, {'' if norm is None else 'normed, '}{dtype}"
        yield name, torch.ops.twostep.mamba2_layer, inputs
    yield f"gated_reads of {width}, {dtype}", torch.ops.twostep.gated_reads, (torch.randn(num_tokens, width), gates)


def _blocks() -> Iterator[Case]:
    ops, n, num_blocks = torch.ops.twostep, 70, 3
    for number, kind in {**BLOCK_TYPES, 256: BlockType("NVFP4", 16, 9)}.items():
        if kind.num_numbers > 1:
            k, name = num_blocks * kind.num_numbers, f"of {kind.name}"
            # No byte is as large as those that would make a number of 16 bits infinite.
            num_bytes = num_blocks * kind.num_bytes + (4 if kind.name == "NVFP4" else 0)
            rows = torch.randint(60, (n, num_bytes), dtype=torch.uint8)
            yield f"pack_blocks {name}", lambda rows, kind: ops.pack_blocks([rows], [kind]), (rows, number)
            yield f"expand_blocks {name}", ops.expand_blocks, (rows, number)
            packed = ops.pack_blocks([rows], [number])
            yield f"take_block_rows {name}", ops.take_block_rows, (packed, torch.tensor([0, n - 1, 7]))
            for count in ROWS:
                inputs = torch.randn(count, k), packed, torch.randn(n), n
                yield f"linear in blocks {name} and {count} rows", ops.linear, inputs
                rounded = inputs[0], ops.pack_blocks([rows], [number], True), *inputs[2:]
                yield f"linear of rounded rows in blocks {name} and {count} rows", ops.linear, rounded


def _packing(dtype: torch.dtype) -> Iterator[Case]:
    ops = torch.ops.twostep
    for n, k in LINEARS:
        weight, size = torch.randn(n, k).to(dtype), f"[{n}, {k}], {dtype}"
        yield f"pack_weight of {size}", ops.pack_weight, (weight,)
        yield f"pack_weight, not coded, of {size}", ops.pack_weight, (weight, False)
        yield f"inverse_hadamard of {size}", ops.inverse_hadamard, (weight,)
        for bits in NUM_REFITS:
            yield f"quantize to {bits} bits of {size}", ops.quantize, (weight, bits, NUM_REFITS[bits])
        yield f"pack_int8 of {size}", ops.pack_int8, ops.quantize(weight, 8, NUM_REFITS[8])
        _, scales, minimums = ops.quantize(weight, 4, NUM_REFITS[4])
        yield f"to_levels of {size}", ops.to_levels, (weight, scales, minimums)
        yield f"pack_int4 of {size}", ops.pack_int4, ops.to_levels(weight, scales, minimums)
        for bits, row_bits in ((8, 8), (8, 16), (4, 8)):
            inputs = (weight, bits, row_bits, NUM_REFITS[bits])
            yield f"quantize_and_pack of {bits} bits for rows of {row_bits}, {size}", ops.quantize_and_pack, inputs


def _products(dtype: torch.dtype) -> Iterator[Case]:
    ops = torch.ops.twostep
    for n, k in LINEARS:
        weight, bias = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
        packed = {
            "linear": ops.pack_weight(weight),
            "linear, not coded": ops.pack_weight(weight, False),
            "linear_int8": KernelQuantizedWeight(weight, 8).packed,
            "linear_int8_wide_rows": KernelQuantizedWeight(weight, 8, row_bits=16).packed,
            "linear_int4": KernelQuantizedWeight(weight, 4).packed,
        }
        for rows in ROWS:
            x = torch.randn(rows, k).to(dtype)
            for name, one in packed.items():
                op = getattr(ops, name.split(",")[0])
                yield f"{name} of [{n}, {k}] and {rows} rows, {dtype}", op, (x, one, bias, n)


def _experts(dtype: torch.dtype) -> Iterator[Case]:
    classes, (hidden, inner, num_experts) = torch.classes.twostep, (70, 24, 5)
    gates = ("silu", ""), ("square_relu", " without a gate")
    for (quantization, bits), (name, form) in product((("none", 0), *BITS.items()), gates):
        pack, gate = packing_for(quantization, True).layers, classes.ExpertGate(name, math.inf, 1.0, False)
        stacks = []
        for n, k in ((inner if form else 2 * inner, hidden), (hidden, inner)):
            packed: list[Any] = [pack(torch.randn(n, k).to(dtype)) for _ in range(num_experts)]
            biases = torch.randn(num_experts, n).to(dtype)
            stacks.append(classes.ExpertStack([weight.packed for weight in packed], biases, n, bits))
        for rows in ROWS:
            chosen, weights = torch.rand(rows, num_experts).topk(2).indices, torch.rand(rows, 2)
            inputs = (torch.randn(rows, hidden).to(dtype), chosen, weights)
            yield (
                f"experts of {bits} bits{form} and {rows} rows, {dtype}",
                classes.Experts(*stacks, gate, None, None).run,
                inputs,
            )


def _logits(dtype: torch.dtype) -> Iterator[Case]:
    ops, rows = torch.ops.twostep, 3
    for size in (1, 15, 77, 1000):
        logits, tokens = torch.randn(rows, size).to(dtype), torch.full((rows,), size - 1)
        yield f"argmax of {size}, {dtype}", ops.argmax, (logits,)
        yield f"score_tokens of {size}, {dtype}", ops.score_tokens, (logits, tokens, 1)
        controls = torch.tensor([[0.8, 0.3, 0, 1, 0], [0.8, 0.6, 3, 1, 0], [0.8, 0.9, 0, 0.7, 0.1]]).double()
        yield f"draw_tokens of {size}, {dtype}", ops.draw_tokens, (logits, logits.argmax(dim=1), controls)
        yield f"token_weights of {size}", ops.token_weights, (logits[0].float(), 5.0, 0.8)


if __name__ == "__main__":
    main()
