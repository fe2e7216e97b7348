"""Low-rank adapters of weights (LoRA: Hu et al., 2021): rows of requests with an adapter get scale * B(Ax) added.

Both products are batch invariant, each adapter's by itself, and a row without an adapter is left alone: so a row's bits
do not depend on the adapters of others. The weight itself may be of any kind. `engine/kernels/layers/adapters.h` does
the same in the kernels, for all adapters at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from engine.weights.packed_weight import PackedWeight

__all__ = ["AdaptedWeight", "are_rows_adapted", "rows_with_adapters"]


@contextmanager
def rows_with_adapters(numbers: Tensor | None) -> Iterator[None]:
    """Has every adapted weight within this context add, to each of its rows, what the row's adapter adds: `numbers` [T]
    has the adapters' numbers, -1 for none; None if no row has any."""
    token = _numbers.set(numbers)
    try:
        yield
    finally:
        _numbers.reset(token)


def are_rows_adapted() -> bool:
    """Whether any row of the step at hand has an adapter."""
    return _numbers.get() is not None


_numbers: ContextVar[Tensor | None] = ContextVar("adapter_numbers", default=None)


class AdaptedWeight:
    """A weight with the low-rank factors of adapters; a `PackedWeight` itself."""

    def __init__(self, weight: PackedWeight) -> None:
        self.weight = weight
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self._factors: dict[int, list[tuple[Tensor, PackedWeight, PackedWeight]]] = {}

    def adapt(self, number: int, columns: Tensor, down: PackedWeight, up: PackedWeight) -> None:
        """Has the adapter of this number add up(down(x)) to these columns; `down` is [rank, K], `up` [columns, rank]
        with the scale in it."""
        self._factors.setdefault(number, []).append((columns, down, up))

    def release(self, number: int) -> None:
        """Forgets the adapter's factors."""
        self._factors.pop(number, None)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out, numbers = self.weight.multiply(x, bias), _numbers.get()
        if numbers is None or not self._factors:
            return out
        if len(numbers) != len(x):
            raise RuntimeError(f"adapters are known of {len(numbers)} rows, and {len(x)} are multiplied")
        for number, factors in self._factors.items():
            rows = (numbers == number).nonzero()[:, 0]
            for columns, down, up in factors if len(rows) else ():
                out[rows[:, None], columns] += up.multiply(down.multiply(x[rows], None), None)
        return out

    @property
    def nbytes(self) -> int:
        parts = [part for each in self._factors.values() for _, *pair in each for part in pair]
        return self.weight.nbytes + sum(part.nbytes for part in parts)
