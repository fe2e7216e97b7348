"""Small models of random weights whose KV is not kept block by block, and what the KV store must have of a prefix."""

import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.batch import name_of_states
from engine.core.kv_groups import ONE_GROUP, KVGroups, groups_of
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.prefix_cache import PrefixCache

__all__ = ["BLOCK_SIZE", "EMBEDDED", "MODELS", "ServedModel"]

BLOCK_SIZE = 16
INTERVAL = 64  # tokens from one copy of states to the next
WINDOW = 64
SIZES = {
    **{"vocab_size": 6144, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 4096},
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
}
GATED_DELTA_NETS = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
WINDOWS = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 16,
}


@dataclass(frozen=True)
class ServedModel:
    """What a server is started with, and what it keeps."""

    config: Mapping[str, Any] | None = None
    """Its configuration; None for the embedded model."""
    flags: tuple[str, ...] = ()
    keeps_states: bool = False
    groups: KVGroups = ONE_GROUP

    def flags_in(self, directory: Path) -> list[str]:
        """Returns the flags of a server of the model, which is made in the directory."""
        if self.config is None:
            return []
        (directory / "config.json").write_text(json.dumps({**SIZES, **self.config}))
        return [str(directory), "--load-format", "dummy", *self.flags]

    def num_stored_blocks(self, hashes: Sequence[bytes], names: Container[str]) -> int:
        """Returns behind how many of a text's first blocks, which have these hashes, a server could go on by the files
        of these names."""
        cache, tables = PrefixCache(BLOCK_SIZE, num_groups=self.groups.num_groups), BlockTables(BLOCK_SIZE, self.groups)

        def is_there(index: int, group: int) -> bool:
            return cache.keys(hashes[index])[group].hex() in names

        most = _leading(lambda index: is_there(index, 0), len(hashes)) if tables.has_full_group else len(hashes)
        deepest = tables.deepest(most, is_there)
        if not self.keeps_states:
            return deepest
        step = INTERVAL // BLOCK_SIZE
        ends = range(deepest // step * step, 0, -step)
        return next((end for end in ends if name_of_states(hashes[end - 1]).hex() in names), 0)


def _leading(holds: Callable[[int], bool], number: int) -> int:
    return next((index for index in range(number) if not holds(index)), number)


EMBEDDED = ServedModel()
MODELS = {
    "embedded": EMBEDDED,
    "recurrent": ServedModel(
        GATED_DELTA_NETS,
        ("--state-checkpoint-interval", str(INTERVAL), "--state-cache-memory-bytes", "1MiB"),  # of a few conversations
        keeps_states=True,
    ),
    "windowed": ServedModel(WINDOWS, groups=groups_of([WINDOW, WINDOW, None, WINDOW])),
}
