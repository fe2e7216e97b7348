"""Fingerprint of a model's weights and settings by their content, not by their files' names and times.

A restart of the engine may find another file where the first start found one: streams go on only if this is the same.
It is no defence against somebody who makes weights with the same fingerprint on purpose.
"""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.checkpoint.stored_tensor import StoredTensor

_WORDS_PER_SUM = 1 << 13


def weights_fingerprint(module: PreTrainedModel) -> str:
    """Returns a hash, in hexadecimal digits, of the configuration and of every number of the parameters and buffers."""
    digest = hashlib.sha256(module.config.to_json_string().encode())
    for name, tensor in module.state_dict().items():
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        for part in _stored(tensor):
            for sums in _sums(part):
                digest.update(sums.numpy().tobytes())
    return digest.hexdigest()[:32]


def _stored(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the tensors that the content consists of."""
    if isinstance(tensor, StoredTensor):
        yield from (part for piece in tensor.pieces for part in piece.parts)
    else:
        yield tensor


def _sums(tensor: Tensor) -> Iterator[Tensor]:
    """Yields int64 sums of the tensor's words, each word times an odd number: any one word that changes, changes one.

    That takes the time of reading the memory, where a cryptographic hash would take a second for a gigabyte.
    """
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    num_whole = content.numel() // 8 * 8
    yield content[num_whole:]
    factors = torch.randint(1 << 62, (_WORDS_PER_SUM,), generator=torch.Generator().manual_seed(0)) * 2 + 1
    words = content[:num_whole].view(torch.int64)
    num_rows = len(words) // _WORDS_PER_SUM
    rows, rest = words.tensor_split((num_rows * _WORDS_PER_SUM,))
    yield rows.view(num_rows, _WORDS_PER_SUM) @ factors
    yield (rest @ factors[: len(rest)])[None]
