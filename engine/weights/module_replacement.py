"""Replaces modules anywhere in a model, in place."""

from collections.abc import Callable

from torch import nn

__all__ = ["has_hooks", "replace_modules"]


def replace_modules(model: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replaces each module of `model` for which `replacement` returns another one; a module used twice stays one."""
    replaced: dict[nn.Module, nn.Module] = {}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child not in replaced and (new := replacement(child)) is not None:
                replaced[child] = new
            if child in replaced:
                setattr(parent, name, replaced[child])


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has forward hooks, which a replacement would not call."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
