"""torch without what engines never use: they run layers as they are, in one process, without compiler or distribution.

transformers' models import both, for a few marks on functions and one helper. On a 2-core Zen 3 that took 1.3 of 4.0
seconds of imports (5 of 10 where Python may keep no bytecode) and 41 MB for as long as the engine lived.

Tried and left: to spare sympy, too, another 41 MB and a second. torch imports it where it computes shapes of tensors
without memory, as models are made, and asks for too many names there to stand in for.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

__all__ = ["make_torch_lean"]

_COMPILER = "torch._dynamo"
_TRACING = "torch._dynamo._trace_wrapped_higher_order_op"
# What they do to a function or a tensor matters to the compiler alone.
_MARKS = ("allow_in_graph", "assume_constant_result", "disable", "mark_static_address")


class _Deferred(ModuleType):
    """Stands for a module of the compiler until somebody, such as a model's own code, wants more than is `present`."""

    def __init__(self, name: str, present: dict[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(present)

    def __getattr__(self, name: str) -> Any:
        wants_submodule = name == "__path__" and self.__name__ == _COMPILER
        if name.startswith("__") and not wants_submodule:  # asked of every module, as by inspect
            raise AttributeError(f"{self.__name__} is not loaded, so it has no {name}")
        return getattr(_load(self.__name__), name)


def make_torch_lean() -> None:
    """Call before transformers is imported. What asks for torch.distributed is told, from now on, that it is not there;
    what asks for the compiler gets it then. A compiler that is already there stays."""
    torch.distributed.is_available = lambda: False
    if _COMPILER not in sys.modules:
        sys.modules[_COMPILER] = _Deferred(_COMPILER, dict.fromkeys(_MARKS, _unmarked))
        sys.modules[_TRACING] = _Deferred(_TRACING, {"TransformGetItemToIndex": _transform_get_item_to_index})


def _load(name: str) -> ModuleType:
    for deferred in (_COMPILER, _TRACING):
        if isinstance(sys.modules.get(deferred), _Deferred):
            del sys.modules[deferred]
    return importlib.import_module(name)


def _unmarked(function: Any = None, *_: Any, **__: Any) -> Any:
    """As a decorator, with and without arguments."""
    return function if function is not None else lambda decorated: decorated


def _transform_get_item_to_index() -> Any:
    return _load(_TRACING).TransformGetItemToIndex()
