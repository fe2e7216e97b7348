"""The first rank as the one that leads: what it runs, all others run, too."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from engine.core.adapters import AdapterInfo, Adapters
from engine.core.errors import AdapterError, DeviceFailedError, reason_of
from engine.core.messages import LoadAdapter, UnloadAdapter
from engine.ranks.messages import RankMessage, ReleaseAdapter, Settlement, forward_pass_of, head_pass_of
from engine.runner.forward import Forward, ForwardOutput, HiddenOf
from engine.runner.head_passes import HeadRunner, HiddenBefore
from engine.runner.model_inputs import ModelInputs

__all__ = ["Leader"]


class Leader:
    """Implements `engine.model.setup.Lead`."""

    def __init__(self, tell: Callable[[RankMessage], None]) -> None:
        """`tell` sends a message to all other ranks."""
        self._tell = tell

    def forwards(self, own: Sequence[Forward]) -> Sequence[Forward]:
        return [_LeadingForward(forward, index, self._tell) for index, forward in enumerate(own)]

    def head(self, own: HeadRunner) -> HeadRunner:
        return _LeadingHead(own, self._tell)

    def adapters(self, own: Adapters) -> Adapters:
        return _LeadingAdapters(own, self._tell)


class _LeadingForward:
    """The first rank's forward pass, of which the others hear before."""

    def __init__(self, own: Forward, index: int, tell: Callable[[RankMessage], None]) -> None:
        """The others' forward pass of this `index` is the same."""
        self.name = own.name
        self._own = own
        self._index = index
        self._tell = tell

    def __call__(self, inputs: ModelInputs, kept: Sequence[int] | None, hidden_of: HiddenOf = None) -> ForwardOutput:
        """Raises DeviceFailedError if any rank fails: others may be within the pass then, and keep step no more."""
        with _together():
            self._tell(forward_pass_of(self._index, inputs, kept, hidden_of))
            return self._own(inputs, kept, hidden_of)

    def settle(self, num_kept: Sequence[int]) -> None:
        """Raises DeviceFailedError as a forward pass does."""
        with _together():
            self._tell(Settlement(self._index, [*num_kept]))
            self._own.settle(num_kept)


class _LeadingHead:
    """The first rank's head, of whose passes the others hear before. They keep hidden states when the model's forward
    pass gives them."""

    def __init__(self, own: HeadRunner, tell: Callable[[RankMessage], None]) -> None:
        self.hidden_of = own.hidden_of
        self._own = own
        self._tell = tell

    def keep(self, slots: Tensor, hidden: Tensor) -> None:
        self._own.keep(slots, hidden)

    def __call__(self, inputs: ModelInputs, before: HiddenBefore, kept: Sequence[int]) -> ForwardOutput:
        """Raises DeviceFailedError as a forward pass does."""
        with _together():
            self._tell(head_pass_of(inputs, before, kept))
            return self._own(inputs, before, kept)


class _LeadingAdapters:
    """The first rank's adapters, of whose changes the others hear before."""

    def __init__(self, own: Adapters, tell: Callable[[RankMessage], None]) -> None:
        self._own = own
        self._tell = tell

    def load(self, path: str) -> AdapterInfo:
        """Raises AdapterError if any rank cannot load it, DeviceFailedError if one fails."""
        with _together():
            self._tell(LoadAdapter(path))
            return self._own.load(path)

    def number_of(self, digest: str) -> int | None:
        return self._own.number_of(digest)

    def unload(self, digest: str) -> None:
        """Raises DeviceFailedError if a rank fails."""
        with _together():
            self._tell(UnloadAdapter(digest))
            self._own.unload(digest)

    @property
    def unloaded(self) -> Sequence[int]:
        return self._own.unloaded

    def release(self, number: int) -> None:
        """Raises DeviceFailedError if a rank fails."""
        with _together():
            self._tell(ReleaseAdapter(number))
            self._own.release(number)


@contextmanager
def _together() -> Iterator[None]:
    """Raises DeviceFailedError if a rank fails."""
    try:
        yield
    except AdapterError:
        raise
    except Exception as error:
        raise DeviceFailedError(f"The ranks of the model failed: {reason_of(error)}") from error
