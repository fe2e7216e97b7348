"""Keeps torch's compiler and torch.distributed out of the engine process, which uses neither, but for what that has in
C++ for ranks on GPUs, and its kernels for meta tensors until a model is built.

transformers' models import the former two, for a few decorators and one helper. On a 2-core Zen 3 that took 1.3 of 4.0
seconds of imports (5 of 10 where Python may keep no bytecode) and 41 MB for as long as the engine lived. torch itself
imports the kernels for meta tensors, which are written in Python: a third of what importing it takes. A model that is
read packed is never built.

Tried and left: to avoid importing sympy, too, another 41 MB and a second. torch imports it to compute the shapes of
meta tensors while models are built, and uses too many of its names to provide stand-ins.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

__all__ = ["make_torch_lean", "make_torch_whole"]

_META_KERNELS = "torch._meta_registrations"
_COMPILER = "torch._dynamo"
_TRACING = "torch._dynamo._trace_wrapped_higher_order_op"
# Functions of the compiler whose effect on a function or a tensor matters to the compiler alone.
_NO_OPS = ("allow_in_graph", "assume_constant_result", "disable", "mark_static_address")


class _Deferred(ModuleType):
    """Stand-in for a module of the compiler that imports it when an attribute other than those `present` is used, such
    as by a model's own code."""

    def __init__(self, name: str, present: dict[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(present)

    def __getattr__(self, name: str) -> Any:
        wants_submodule = name == "__path__" and self.__name__ == _COMPILER
        if name.startswith("__") and not wants_submodule:  # looked up in every module, as by inspect
            raise AttributeError(f"{self.__name__} is not loaded, so it has no {name}")
        return getattr(_load(self.__name__), name)


class _Absent(ModuleType):
    """Stand-in for the module that registers kernels for meta tensors."""


def make_torch_lean() -> None:
    """Imports torch without kernels for meta tensors, makes torch.distributed unavailable and defers importing the
    compiler until it is used. Call before transformers is imported. What of torch is imported already stays."""
    if "torch" not in sys.modules:
        sys.modules[_META_KERNELS] = _Absent(_META_KERNELS)
    import torch
    import torch._prims.rng_prims  # among what those kernels import: it lets torch.Generator be made

    torch.distributed.is_available = lambda: False
    if _COMPILER not in sys.modules:
        sys.modules[_COMPILER] = _Deferred(_COMPILER, dict.fromkeys(_NO_OPS, _no_op))
        sys.modules[_TRACING] = _Deferred(_TRACING, {"TransformGetItemToIndex": _transform_get_item_to_index})


def make_torch_whole() -> None:
    """Imports the kernels for meta tensors if they are absent. Call before a model is built."""
    if isinstance(sys.modules.get(_META_KERNELS), _Absent):
        del sys.modules[_META_KERNELS]
        import torch._meta_registrations  # noqa: F401


def _load(name: str) -> ModuleType:
    for deferred in (_COMPILER, _TRACING):
        if isinstance(sys.modules.get(deferred), _Deferred):
            del sys.modules[deferred]
    return importlib.import_module(name)


def _no_op(function: Any = None, *_: Any, **__: Any) -> Any:
    """Returns the function unchanged; works as a decorator with and without arguments."""
    return function if function is not None else lambda decorated: decorated


def _transform_get_item_to_index() -> Any:
    return _load(_TRACING).TransformGetItemToIndex()
