"""Fingerprint of a model's weights and settings by their content, not by their files' names and times.

A restart of the engine may find another file where the first start found one: streams go on only if this is the same.
It is no defence against somebody who makes weights with the same fingerprint on purpose.
"""

import hashlib

from transformers import PreTrainedModel

from engine.checkpoint.stored_tensor import StoredTensor
from engine.model.content_digest import add_content


def weights_fingerprint(module: PreTrainedModel) -> str:
    """Returns a hash, in hexadecimal digits, of the configuration and of every number of the parameters and buffers."""
    digest = hashlib.sha256(module.config.to_json_string().encode())
    for name, tensor in module.state_dict().items():
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        for part in tensor.parts if isinstance(tensor, StoredTensor) else (tensor,):
            add_content(digest, part)
    return digest.hexdigest()[:32]
