"""All chosen experts of a layer in one call into C++ (`engine/kernels/moe`), where that computes the same bits.

A gate is recognized by what it computes: numbers of every magnitude tell the kernels' gates apart, and one that
computes something else is left to the module.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from engine.weights.expert_stack import PackedStack, has_output_norm
from engine.weights.gathered_weight import GatheredWeight, own_part
from engine.weights.packed_weight import KernelWeight
from engine.weights.partition import Cut, even_cut, starts_of
from engine.weights.quantized_weight import KernelQuantizedWeight
from engine.weights.rank_group import Gather, RankGroup

__all__ = ["ExpertParts", "KernelExperts", "expert_cuts", "kernel_experts", "take_experts_read"]


class KernelExperts(Protocol):
    """All experts of a layer, as the C++ operators take them."""

    def run(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Runs the chosen experts [T, S] with their weights [T, S] on hidden_states [T, H]; returns [T, H]."""
        ...


class ExpertStack(NamedTuple):
    """One matrix of each expert, all of one shape, packed for the kernels."""

    packed: tuple[Tensor, ...]
    biases: Tensor | None  # [E, out_features]
    out_features: int
    bits: int
    """Bits of quantized codes; none of dense weights."""

    def bound(self) -> Any:
        return torch.classes.twostep.ExpertStack([*self.packed], self.biases, self.out_features, self.bits)


class ExpertGate(NamedTuple):
    """What is computed between an expert's two matrices: a gate, or an activation without one."""

    name: str
    limit: float
    alpha: float
    is_in_turn: bool
    """Whether columns of gate and up alternate."""

    @property
    def is_gated(self) -> bool:
        return self.name != _PLAIN

    def bound(self) -> Any:
        return torch.classes.twostep.ExpertGate(*self)


class ExpertParts(NamedTuple):
    """All experts of a layer: tensors and plain numbers."""

    up: ExpertStack
    down: ExpertStack
    gate: ExpertGate
    before_down: Gather | None = None
    """What gathers all ranks' columns of the gated rows, where these are one rank's parts of the experts."""
    after_down: Gather | None = None
    """What gathers those of the result."""

    def bound(self) -> KernelExperts:
        """Returns the experts as the C++ operators take them."""
        parts = (self.up.bound(), self.down.bound(), self.gate.bound())
        return cast(KernelExperts, torch.classes.twostep.Experts(*parts, self.before_down, self.after_down))


_GATES = ("silu", "gelu_tanh", "swiglu")
_PLAIN = "square_relu"  # without a gate
_LIMITS, _ALPHAS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")  # names of a module's numbers
_NEARLY_ZERO = 1e-30  # what is subnormal on the way may become zero in the kernels


def kernel_experts(experts: nn.Module, up: PackedStack, down: PackedStack) -> ExpertParts | None:
    """Returns the experts for C++, or None where the weights' format or the module's formula is not the kernels'."""
    if any(isinstance(weight, GatheredWeight) for weight in up.weights):
        return None
    if not all(map(_has_kernel_weights, (up, down))):
        return None
    gate = _find_gate(experts, up.weights[0].dtype)
    if gate is None:
        return None
    last = down.weights[0]
    gathers = (last.before, last.after) if isinstance(last, GatheredWeight) else (None, None)
    return ExpertParts(_parts_of(up), _parts_of(down), gate, *gathers)


def expert_cuts(
    experts: nn.Module, first: Tensor, num_up: int, num_out: int, group: RankGroup
) -> tuple[Cut | None, Cut | None]:
    """Returns a rank's part of each expert's `first` matrix, with `num_up` output columns, and of its last, with
    `num_out`.

    Where the kernels know the gate, a rank has the same columns of gate and up, and what it makes of them is gathered.
    Else all ranks compute the gate of whole rows.
    """
    if group.size == 1:
        return None, None
    gate = _find_gate(experts, first.dtype) if first.device.type == "cpu" else None
    num_inner = num_up if gate is not None and not gate.is_gated else num_up // 2
    if gate is None or num_inner < group.size:
        return even_cut(num_up, group), even_cut(num_out, group)
    starts = starts_of(num_inner, group.size)
    start, end = starts[group.rank], starts[group.rank + 1]
    halves = slice(start, end), slice(num_inner + start, num_inner + end)
    rows = (slice(2 * start, 2 * end),) if gate.is_in_turn else halves
    return Cut(rows if gate.is_gated else halves[:1], num_up), even_cut(num_out, group, starts)


def take_experts_read() -> float | None:
    """Returns the share of the experts that C++ calls of this thread have read since the last time, over the layers
    that ran; None if none did."""
    num_read, num_experts = torch.ops.twostep.take_experts_read()
    return num_read / num_experts if num_experts else None


def _has_kernel_weights(stack: PackedStack) -> bool:
    return all(
        isinstance(weight, KernelWeight) or (isinstance(weight, KernelQuantizedWeight) and weight.row_bits == 8)
        for weight in map(own_part, stack.weights)
    )


def _parts_of(stack: PackedStack) -> ExpertStack:
    weights = cast("list[KernelWeight | KernelQuantizedWeight]", [*map(own_part, stack.weights)])
    packed = tuple(weight.packed for weight in weights)
    return ExpertStack(packed, stack.own_biases, weights[0].shape[0], weights[0].bits)


def _find_gate(experts: Any, dtype: torch.dtype) -> ExpertGate | None:
    """Returns the kernels' gate that computes what the module's own does; None if there is none."""
    if has_output_norm(experts):
        return None
    numbers = _numbers_of_every_magnitude(dtype)
    expected = _without_tiny(experts._apply_gate(numbers) if experts.has_gate else experts.act_fn(numbers))
    gates = _gates_with(experts, dtype) if experts.has_gate else (ExpertGate(_PLAIN, math.inf, 1.0, False),)
    return next((gate for gate in gates if torch.equal(_without_tiny(gate.bound().run(numbers)), expected)), None)


def _gates_with(experts: nn.Module, dtype: torch.dtype) -> Iterator[ExpertGate]:
    """Yields the kernels' gates, with the module's own numbers and without; columns of gate and up in both orders."""
    limits = [math.inf, *(float(torch.tensor(limit, dtype=dtype)) for limit in _attributes(experts, _LIMITS))]
    alpha = next(_attributes(experts, _ALPHAS), 1.0)
    for name, limit, is_in_turn in product(_GATES, limits, (False, True)):
        yield ExpertGate(name, limit, alpha, is_in_turn)


def _attributes(module: nn.Module, names: Sequence[str]) -> Iterator[float]:
    return (float(value) for name in names if isinstance(value := getattr(module, name, None), float | int))


def _numbers_of_every_magnitude(dtype: torch.dtype) -> Tensor:  # [512, 128]
    generator = torch.Generator().manual_seed(0)
    exponents = torch.rand(512, 128, generator=generator) * 10 - 6
    return (10**exponents * (torch.rand(512, 128, generator=generator) - 0.5).sign()).to(dtype)


def _without_tiny(x: Tensor) -> Tensor:
    return torch.where(x.abs() < _NEARLY_ZERO, torch.zeros_like(x), x)
