"""Prints a digest of what every operator of the kernels computes, and whole decoders, to compare ISA levels by.

A process of its own (`TWOSTEP_ISA=avx2 python -m tests.engine.kernels.operator_bits`), since a process has one level.
Its inputs are the same every time. Packed weights have no digest: a level lays them out as it multiplies them.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from engine.kernels import load_kernels
from tests.engine.fakes import add, run_to_end
from tests.engine.kernels.fenced_operators import DTYPES, cases
from tests.engine.tiny_models import load_tiny, make_checkpoint, tiny_engine

DECODERS = {"none": "16 or 32 bits", "int8": "8 bits", "int4": "4 bits"}


def main() -> None:
    kernels = load_kernels()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digests: dict[str, Any] = {}
    for family, result in (*_operators(), *_activations(), *_decoders()):
        digests.setdefault(family, hashlib.sha256()).update(result)
    bits = {family: digest.hexdigest() for family, digest in digests.items()}
    print(json.dumps({"isa": kernels.isa if kernels else None, "bits": bits}))


def _operators() -> Iterator[tuple[str, bytes]]:
    for name, op, inputs in cases():
        if not name.startswith(("pack_weight", "pack_blocks")):
            result = op(*inputs)
            yield _family(name), _bytes(inputs if result is None else result)  # what has no result changes its inputs


def _family(case: str) -> str:
    """`linear, not coded of [1, 1] and 3 rows, torch.float32` is of `linear, float32`."""
    operator = re.split(r",| of (?!rounded)", case)[0]
    dtype = re.search(r"torch\.(\w+)$", case)
    return f"{operator}, {dtype[1]}" if dtype else operator


def _activations() -> Iterator[tuple[str, bytes]]:
    torch.ops.twostep.replace_activations()
    functions = (torch.nn.functional.silu, torch.sigmoid, torch.nn.functional.gelu, torch.nn.functional.softplus)
    for dtype in DTYPES:
        x = torch.linspace(-20, 20, 5001).to(dtype)
        for function in functions:
            yield f"activations, {str(dtype).removeprefix('torch.')}", _bytes(function(x))


def _decoders() -> Iterator[tuple[str, bytes]]:
    with tempfile.TemporaryDirectory() as directory:
        path = make_checkpoint("llama", Path(directory))
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")
            for quantization, weights in DECODERS.items():
                engine = tiny_engine(load_tiny(path, name, quantization))
                for i in range(3):
                    add(engine, str(i), range(3, 40 + 7 * i), max_tokens=12, logprobs=5, temperature=i / 2, seed=i)
                answers = [
                    item for updates in run_to_end(engine).values() for each in updates for item in each.logprobs
                ]
                seen = [(item.token_id, item.logprob, item.top) for item in answers]
                yield f"decoder of {weights}, {name}", repr(seen).encode()


def _bytes(results: Any) -> bytes:
    tensors = (leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor))
    return b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors if tensor.numel())


if __name__ == "__main__":
    main()
