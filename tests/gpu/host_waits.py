"""Notes which of a code's calls into torch copy between host and device, or let one wait for the other."""

from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Self
from unittest import mock

from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

_COPIES = {"to", "cpu", "cuda", "copy_", "tolist", "item", "tensor", "as_tensor"}
_READS = {"__bool__", "__int__", "__float__", "__index__", "__contains__"}
# Operators that read numbers, for which the host waits: results have sizes that depend on them.
_WAITS = {"nonzero", "_unique", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "_local_scalar_dense"}


class HostWaits:
    """What happened within a `with`, in order, by its names in torch. What kernels do themselves does not count: where
    there is no GPU, their interpreter is a program that uses torch."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._is_in_kernel = False
        self._open: list[Any] = [_Calls(self._note), _Operators(self._note)]

    def __enter__(self) -> Self:
        if find_spec("triton") is not None:
            from triton.runtime.interpreter import GridExecutor

            self._open.insert(0, mock.patch.object(GridExecutor, "__call__", self._in_kernel(GridExecutor.__call__)))
        for each in self._open:
            each.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in reversed(self._open):
            each.__exit__(kind, error, trace)

    def _note(self, name: str) -> None:
        if not self._is_in_kernel:
            self.seen.append(name)

    def _in_kernel(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            self._is_in_kernel = True
            try:
                return run(*args, **options)
            finally:
                self._is_in_kernel = False

        return launch


class _Calls(TorchFunctionMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = (resolve_name(func) or getattr(func, "__name__", "")).rpartition(".")[2]
        if name in _COPIES | _READS:
            self._note(name)
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket.__name__ in _WAITS:
            self._note(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
