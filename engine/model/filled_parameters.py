"""Gives a module of this program the tensors of a file."""

from collections.abc import Mapping

from torch import Tensor, nn

from engine.checkpoint.stored_tensor import dense
from engine.core.errors import ModelError

__all__ = ["fill_parameters"]


def fill_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies the tensors into the module's parameters. Raises ModelError unless they are the module's own."""
    own = dict(module.named_parameters())
    if differing := sorted(own.keys() ^ tensors.keys()):
        raise ModelError(f"its {differing[0]} lacks, or is none that is known.")
    for name, parameter in own.items():
        if parameter.shape != tensors[name].shape:
            raise ModelError(f"its {name} has the shape {list(tensors[name].shape)}, not {list(parameter.shape)}.")
        parameter.requires_grad_(False).copy_(dense(tensors[name]))
