"""Whether a module runs the same code as a class of transformers: instruction for instruction, whatever its name."""

import dis
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, cast

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from engine.weights.module_replacement import has_hooks

__all__ = ["Rotate", "class_named", "family_of", "global_of", "is_like", "is_of", "is_same", "module_name", "rotate_of"]

Rotate = Callable[..., tuple[Tensor, Tensor]]
"""Rotates queries and keys by tables of cosines and sines."""


def is_of(module: nn.Module, *names: str) -> bool:
    """Whether nothing but the code of one of these classes, `family.class`, runs when the module is called.

    A class is that of the module's own family, whose code was loaded: no other family's is, to be known.
    """
    family = family_of(module)
    kinds = [kind for own, kind in (name.split(".") for name in names) if own == family]
    return bool(kinds) and is_like(module, *(getattr(loaded_code(family), kind) for kind in kinds))


def family_of(module: nn.Module) -> str:
    """Returns the family of transformers' models in which the module's code was written, or an empty text."""
    package, *family = type(module).forward.__module__.removeprefix("transformers.models.").split(".")
    return package if family == [f"modeling_{package}"] else ""


def module_name(family: str) -> str:
    return f"transformers.models.{family}.modeling_{family}"


def loaded_code(family: str) -> Any:
    """Returns the module with a family's code, which its models have loaded."""
    return sys.modules[module_name(family)]


def class_named(name: str) -> Any:
    """Returns a class of transformers, `family.class`, whose module is imported for it."""
    family, kind = name.split(".")
    return getattr(importlib.import_module(module_name(family)), kind)


def is_like(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether nothing but the code of one of these kinds runs when the module is called."""
    is_overridden = "forward" in vars(module) or type(module).__call__ not in (
        nn.Module.__call__,
        GradientCheckpointingLayer.__call__,
    )
    if is_overridden or has_hooks(module):
        return False
    return any(is_same(type(module).forward, kind.forward) for kind in kinds)


def global_of(function: object, name: str) -> object:
    """Returns what a name of the module stands for in which the function was written, whatever is wrapped around it."""
    written = inspect.unwrap(function) if isinstance(function, FunctionType) else function
    return written.__globals__.get(name) if isinstance(written, FunctionType) else None


def rotate_of(attention: nn.Module) -> Rotate:
    """Returns the function that an attention of transformers rotates queries and keys with."""
    return cast(Rotate, global_of(type(attention).forward, "apply_rotary_pos_emb"))


def is_same(one: object, other: object) -> bool:
    return (
        isinstance(one, FunctionType) and isinstance(other, FunctionType) and _fingerprint(one) == _fingerprint(other)
    )


def _fingerprint(function: FunctionType) -> tuple[object, ...]:
    """Returns all that decides what a function does, with what it wraps; not name, file, docstring and type hints."""
    wrapped = getattr(function, "__wrapped__", None)
    return (
        _code_fingerprint(function.__code__),
        function.__defaults__,
        function.__kwdefaults__,
        _fingerprint(wrapped) if isinstance(wrapped, FunctionType) else wrapped,
    )


@functools.cache
def _code_fingerprint(code: CodeType) -> tuple[object, ...]:
    """Returns each instruction with its operand. No instruction reads the docstring, though that is a constant."""
    operands = ((each.opcode, each.argval) for each in dis.get_instructions(code))
    instructions = ((opcode, _code_fingerprint(it) if isinstance(it, CodeType) else it) for opcode, it in operands)
    return (code.co_varnames, *instructions)
