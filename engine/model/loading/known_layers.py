"""Layers that transformers' own code cannot run over pages, and whose code is known, are replaced here."""

from torch import nn

from engine.model.compressed.replacement import replace_compressed_layers
from engine.model.convolved.replacement import replace_convolved_projections
from engine.model.differential.replacement import replace_differential_attention
from engine.model.gated_streams.replacement import replace_gated_streams
from engine.model.relative.replacement import replace_relative_layers
from engine.model.sparse_attention import replace_indexers

__all__ = ["replace_known_layers"]


def replace_known_layers(model: nn.Module) -> None:
    """Replaces layers of `model` in place. Raises UnsupportedModelError for indexers whose code is not known."""
    replace_indexers(model)
    replace_compressed_layers(model)
    replace_relative_layers(model)
    replace_gated_streams(model)
    replace_differential_attention(model)
    replace_convolved_projections(model)
