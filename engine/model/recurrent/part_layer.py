"""Layers of hybrids that are one part behind a norm: a recurrent mixer, an attention, an MLP or experts."""

from typing import Any, cast

from torch import Tensor, nn

from engine.model.fused_modules import FusedNorm
from engine.model.fused_recurrent import FusedRecurrent
from engine.model.known.same_code import is_of

__all__ = ["FusedPartLayer", "fused_part_layer"]

_NAMES = {
    "nemotron_h.NemotronHBlock": ("norm", "mixer"),
    "zamba2.Zamba2MambaDecoderLayer": ("input_layernorm", "mamba"),
}
"""Layers of one part, by family and class: the names of their norm and of the part."""
_MIXING = "linear_attention", "full_attention"


class FusedPartLayer(nn.Module):
    """A layer of one part, whose names in the checkpoint its children have."""

    def __init__(self, layer: Any, norm_name: str, part_name: str) -> None:
        super().__init__()
        self.norm_name, self.part_name = norm_name, part_name
        for name in (norm_name, part_name):
            setattr(self, name, getattr(layer, name))
        self.block_type = str(getattr(layer, "block_type", _MIXING[0]))
        """The type of the layer, by which a model chooses its mask."""

    @property
    def norm_before(self) -> Any:
        return getattr(self, self.norm_name)

    @property
    def part(self) -> Any:
        return getattr(self, self.part_name)

    @property
    def mixes_tokens(self) -> bool:
        return self.block_type in _MIXING

    def read_of(self, hidden_states: Tensor, transformer_hidden_states: Tensor | None = None, **_: Any) -> Tensor:
        """Returns what the norm reads: rows, or in some layers their sum with other ones."""
        return hidden_states if transformer_hidden_states is None else hidden_states + transformer_hidden_states

    def forward(self, hidden_states: Tensor, *_: Any, **kwargs: Any) -> Tensor:  # [1, T, H] -> [1, T, H]
        normed = self.norm_before(self.read_of(hidden_states, **kwargs))
        made = self.part(hidden_states=normed, **kwargs) if self.mixes_tokens else self.part(normed)
        return cast(Tensor, hidden_states + (made[0] if type(made) is tuple else made))


def fused_part_layer(layer: nn.Module) -> FusedPartLayer | None:
    """Returns the layer in this form if it is a known one, behind a fused norm."""
    names = next((names for kind, names in _NAMES.items() if is_of(layer, kind)), None)
    if names is None:
        return None
    norm, part = (getattr(layer, name) for name in names)
    is_known = hasattr(layer, "block_type") or isinstance(part, FusedRecurrent)
    return FusedPartLayer(layer, *names) if is_known and isinstance(norm, FusedNorm) else None
