"""Functions that take the place of those by which transformers' layers mix tokens recurrently: they hand the layer's
tensors to a handler, which has the states.

Layers of all families call functions of the same few names, each in its own module of code. They are replaced there;
outside a handler's context they are transformers' own. A forward pass calls them in the same order every time, so the
n-th call of a pass has the n-th state.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, Self

from torch import Tensor, nn

from engine.mixers.metadata import StateMetadata
from engine.mixers.state import StateShape

__all__ = [
    "Function",
    "JointMixer",
    "Mixer",
    "StateHandler",
    "advance",
    "advance_jointly",
    "replace_functions",
    "state_handler",
]


class Mixer(Protocol):
    """One call of a recurrent function, with the tensors of the step's tokens."""

    @property
    def state_shape(self) -> StateShape:
        """Shape of the state that it keeps of a request."""

    def take(self, rows: Tensor) -> Self:
        """Returns the call with the tokens at these indices alone."""

    def advance(self, states: Tensor, metadata: StateMetadata) -> Tensor:
        """Computes the step's tokens from the states in the sequences' slots, [num_slots, *sizes], and leaves there
        what the next token starts from. The arithmetic of a token depends on the tokens before it in its sequence
        alone."""


class JointMixer(Protocol):
    """Several calls one after the other, each with a state of its own, as one."""

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """Shapes of the states that it keeps of a request."""

    def take(self, rows: Tensor) -> Self:
        """Returns the call with the tokens at these indices alone."""

    def advance(self, states: tuple[Tensor, ...], metadata: StateMetadata) -> Tensor:
        """Computes as a `Mixer` does, from several states."""


class StateHandler(Protocol):
    def advance(self, mixer: Mixer) -> Tensor:
        """Runs the mixer with its states."""

    def advance_jointly(self, mixer: JointMixer) -> Tensor:
        """Runs the mixer with its states, as many as it has."""


_handler: ContextVar[StateHandler | None] = ContextVar("state_handler", default=None)


@contextmanager
def state_handler(handler: StateHandler) -> Iterator[None]:
    """Routes every recurrent function that is called inside this context to `handler`."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def advance(mixer: Mixer) -> Tensor:
    """Runs the mixer with its states, inside a handler's context."""
    handler = _handler.get()
    assert handler is not None, "there is no handler that has the states"
    return handler.advance(mixer)


def advance_jointly(mixer: JointMixer) -> Tensor:
    """Runs a mixer of several states, inside a handler's context."""
    handler = _handler.get()
    assert handler is not None, "there is no handler that has the states"
    return handler.advance_jointly(mixer)


Function = Callable[..., Any]


def replace_functions(model: nn.Module, functions: Mapping[str, Function]) -> None:
    """Replaces functions of these names in the modules of code that the model's layers are from. Idempotent.

    Those that take their place get the handler as their first argument.
    """
    for name in {type(module).__module__ for module in model.modules()}:
        code = sys.modules[name]
        for function, ours in functions.items():
            theirs = getattr(code, function, None)
            if theirs is not None and not hasattr(theirs, "is_routed"):
                setattr(code, function, _routed(theirs, ours))


def _routed(theirs: Function, ours: Function) -> Function:
    """Returns a function that calls `ours` inside a handler's context, else `theirs`."""

    @functools.wraps(theirs)
    def function(*args: Any, **kwargs: Any) -> Any:
        handler = _handler.get()
        return theirs(*args, **kwargs) if handler is None else ours(handler, *args, **kwargs)

    function.is_routed = True  # type: ignore[attr-defined]
    return function
