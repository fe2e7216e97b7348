"""Adapters for engines of several ranks."""

from pathlib import Path

from tests.engine.tiny_adapters import linear_layers, make_adapter
from tests.engine.tiny_models import load_reference

_NOT_ADAPTED = {"lm_head", "gate", "router", "kv_b_proj"}


def adapters_of(path: Path, directory: Path | None = None) -> dict[str, Path]:
    """Writes two adapters of all linear layers, of different ranks, into a directory or beside the model."""
    reference = load_reference(path)
    targets = sorted({name.rpartition(".")[2] for name in linear_layers(reference)} - _NOT_ADAPTED)
    return {
        name: make_adapter((directory or path.parent) / name, reference, rank, 0.2, rank=rank, target_modules=targets)
        for name, rank in (("a", 4), ("b", 9))
    }
