"""Random weights as files store them in blocks, and what they are made of."""

from typing import Literal

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from engine.checkpoint.gguf.block_types import BLOCK_TYPES
from engine.checkpoint.gguf.blocks import BlockCodec
from engine.checkpoint.published.codecs import NvFp4
from engine.checkpoint.stored_tensor import StoredRows, StoredTensor
from tests.engine.checkpoint.gguf_files import stored

Kind = Type | Literal["NVFP4"]
GGUF_KINDS = [Type(number) for number, kind in BLOCK_TYPES.items() if kind.num_numbers > 1]
KINDS: list[Kind] = [*GGUF_KINDS, "NVFP4"]
MOST_COLUMNS = 64  # of a panel


def name_of(kind: Kind) -> str:
    return "NVFP4" if kind == "NVFP4" else kind.name


def nvfp4(codes: Tensor, scales: Tensor, factors: Tensor) -> StoredTensor:
    """Codes [..., K] as they are stored, with scales [..., K / 16] in 8 bits, and factors [...]."""
    rows = (codes[..., ::2] | codes[..., 1::2] << 4).flatten(0, -2), scales.flatten(0, -2), factors.reshape(-1, 1)
    return StoredTensor([StoredRows(NvFp4(), rows)], codes.shape, torch.float32)


def random_nvfp4(shape: tuple[int, ...], seed: int) -> StoredTensor:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(16, shape, dtype=torch.uint8, generator=generator)
    scales = torch.rand(*shape[:-1], shape[-1] // 16, generator=generator) * 448
    factors = torch.rand(shape[:-1], generator=generator) * 1e-3  # each row's its own, as where projections are joined
    return nvfp4(codes, scales.to(torch.float8_e4m3fn), factors)


def weight_of(kind: Kind, *shape: int, seed: int = 0) -> StoredTensor:
    if kind == "NVFP4":
        return random_nvfp4(shape, seed)
    numbers = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    raw = torch.from_numpy(stored(numbers, kind)).view(-1, stored(numbers[..., :1, :], kind).shape[-1])
    return StoredTensor([StoredRows(BlockCodec(BLOCK_TYPES[kind.value]), (raw,))], shape, torch.float32)


def random_bytes(kind: Type, n: int, num_blocks: int) -> StoredTensor:
    """Any codes and levels, with factors of both signs; no exponent of 16 bits is the largest one."""
    kind_of = BLOCK_TYPES[kind.value]
    size = (n, num_blocks * kind_of.num_bytes)
    raw = torch.from_numpy(np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)) & 0xBB
    shape = (n, num_blocks * kind_of.num_numbers)
    return StoredTensor([StoredRows(BlockCodec(kind_of), (raw,))], shape, torch.float32)
