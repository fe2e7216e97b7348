"""A forward pass that all ranks of a model run: the first tells the others, and then runs its own part."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from engine.core.errors import DeviceFailedError, reason_of
from engine.ranks.messages import ForwardPass, Settlement, forward_pass_of
from engine.runner.forward import Forward, ForwardOutput, HiddenOf
from engine.runner.model_inputs import ModelInputs

__all__ = ["LeadingForward"]


class LeadingForward:
    """The first rank's forward pass, of which the others hear before."""

    def __init__(self, own: Forward, index: int, tell: Callable[[ForwardPass | Settlement], None]) -> None:
        """`tell` sends a message to all other ranks, whose forward pass of this `index` it is."""
        self.name = own.name
        self._own = own
        self._index = index
        self._tell = tell

    def __call__(self, inputs: ModelInputs, kept: Sequence[int] | None, hidden_of: HiddenOf = None) -> ForwardOutput:
        """Raises DeviceFailedError if any rank fails: others may be within the pass then, and keep step no more."""
        with _together():
            self._tell(forward_pass_of(self._index, inputs, kept))
            return self._own(inputs, kept, hidden_of)

    def settle(self, num_kept: Sequence[int]) -> None:
        """Raises DeviceFailedError as a forward pass does."""
        with _together():
            self._tell(Settlement(self._index, [*num_kept]))
            self._own.settle(num_kept)


@contextmanager
def _together() -> Iterator[None]:
    """Raises DeviceFailedError if a rank fails."""
    try:
        yield
    except Exception as error:
        raise DeviceFailedError(f"The ranks of the model failed: {reason_of(error)}") from error
