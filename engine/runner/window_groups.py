"""Whether the layers of a model that see a window of the context give back the blocks before it.

They do where every part of the engine knows how: on the CPU, in one process. What needs all of a token's KV in one
block keeps all blocks as yet: draft models with KV of their own, and recurrent states.
"""

import logging
from collections.abc import Sequence

from engine.attention.kv_cache import LayerShape
from engine.core.config import EngineConfig
from engine.core.kv_groups import ONE_GROUP, KVGroups, groups_of
from engine.runner.loaded_model import LoadedModel

logger = logging.getLogger(__name__)


def window_groups(config: EngineConfig, model: LoadedModel) -> KVGroups:
    """Returns the groups of the model's attention layers, one group where no blocks are given back. A window as long as
    the model's longest context counts as none. All engine processes of a server find the same groups."""
    windows = [_window_within(each, model.max_model_len) for each in model.layers]
    if not config.free_window_blocks or not any(windows):
        return ONE_GROUP
    groups = groups_of_layers(model.layers, model.max_model_len)
    reason = _reason_to_keep(config, model, groups)
    if reason is None:
        return groups
    logger.info("layers keep the blocks before their windows of %d tokens: %s", max(filter(None, windows)), reason)
    return ONE_GROUP


def groups_of_layers(layers: Sequence[LayerShape], max_model_len: int) -> KVGroups:
    """Returns the groups of attention layers, if nothing in the engine needs all blocks."""
    groups = groups_of([_window_within(each, max_model_len) for each in layers])
    return ONE_GROUP if groups.num_groups > 1 and _differ_in_shape(layers) else groups


def _differ_in_shape(layers: Sequence[LayerShape]) -> bool:
    return len({(each.num_kv_heads, each.head_size, each.head_size_v, each.compressed) for each in layers}) > 1


def _window_within(layer: LayerShape, max_model_len: int) -> int | None:
    return layer.window if layer.window is not None and layer.window < max_model_len else None


def _reason_to_keep(config: EngineConfig, model: LoadedModel, groups: KVGroups) -> str | None:
    """Returns why all blocks are kept; None if those before windows are given back."""
    reasons = {
        "so far they are given back on the CPU only": model.device.type != "cpu",
        "several ranks compute the model": config.tensor_parallel_size > 1,
        "a draft model has KV of its own there": model.draft is not None and bool(model.draft.layers),
        "the model has recurrent states": bool(model.states),
        "the layers differ in shape": groups == ONE_GROUP and _differ_in_shape(model.layers),
        "too few layers have windows, or too many for the others": groups == ONE_GROUP,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
