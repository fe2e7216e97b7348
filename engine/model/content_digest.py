"""Digests of tensors' contents in the time of reading their memory: a cryptographic hash takes a second for a gigabyte.

They are no defence against somebody who makes contents with the same digest on purpose.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["add_content"]

_WORDS_PER_SUM = 1 << 13


class Digest(Protocol):
    """A hash of `hashlib`."""

    def update(self, data: bytes, /) -> None: ...


def add_content(digest: Digest, tensor: Tensor) -> None:
    """Adds every number of a tensor to a digest: any one that changes, changes it."""
    for sums in _sums(tensor):
        digest.update(sums.numpy().tobytes())


def _sums(tensor: Tensor) -> Iterator[Tensor]:
    """Yields int64 sums of the tensor's words, each word times an odd number: a word that changes, changes one."""
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    num_whole = content.numel() // 8 * 8
    yield content[num_whole:]
    factors = torch.randint(1 << 62, (_WORDS_PER_SUM,), generator=torch.Generator().manual_seed(0)) * 2 + 1
    words = content[:num_whole].view(torch.int64)
    num_rows = len(words) // _WORDS_PER_SUM
    rows, rest = words.tensor_split((num_rows * _WORDS_PER_SUM,))
    yield rows.view(num_rows, _WORDS_PER_SUM) @ factors
    yield (rest @ factors[: len(rest)])[None]
