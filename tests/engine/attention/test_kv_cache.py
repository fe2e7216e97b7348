"""A copied block has all that the other one has, in all layers, whatever these keep."""

from typing import Any

import pytest
import torch

from engine.attention.kv_cache import KVCache, LayerShape, VectorShape
from engine.attention.kv_format import KV_DTYPES

INDEX = VectorShape(8, torch.bfloat16)
CACHES: dict[str, tuple[list[LayerShape], dict[str, Any]]] = {
    "keys and values": ([LayerShape(2, 32, 16), LayerShape(1, 64, 64)], {}),
    "latents and index keys": ([LayerShape(1, 64, 32, is_latent=True, index=INDEX)] * 2, {}),
    "hidden states": ([LayerShape(2, 32, 32)], {"hidden": VectorShape(24, torch.float32)}),
    "groups": ([LayerShape(2, 32, 32)] * 4, {"groups": (0, 1, 0, 1)}),
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("kv_format", KV_DTYPES)
def test_a_copied_block_is_equal(kind: str, kv_format: str) -> None:
    layers, options = CACHES[kind]
    cache = KVCache(layers, 6, 4, KV_DTYPES[kv_format], torch.device("cpu"), **options)
    before = []
    for block in range(6):
        for at, part in enumerate(cache.block_bytes(block)):
            part[:] = 16 * at + block + 1
        before.append([part.tobytes() for part in cache.block_bytes(block)])
    cache.copy_blocks([(1, 4), (3, 0)])
    after = [[part.tobytes() for part in cache.block_bytes(block)] for block in range(6)]
    assert after == [before[block] for block in (3, 1, 2, 3, 1, 5)]
