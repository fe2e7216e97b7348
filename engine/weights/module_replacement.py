"""Puts modules in the place of others, anywhere in a model."""

from collections.abc import Callable

from torch import nn

__all__ = ["is_watched", "replace_modules"]


def replace_modules(model: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> None:
    """Each module of `model` for which there is a `replacement`, in place; a module used twice stays one."""
    made: dict[nn.Module, nn.Module] = {}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child not in made and (new := replacement(child)) is not None:
                made[child] = new
            if child in made:
                setattr(parent, name, made[child])


def is_watched(module: nn.Module) -> bool:
    """Whether hooks run with it, which a replacement would not call."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
