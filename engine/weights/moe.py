"""Mixture-of-experts layers and their routers, batch invariant.

In transformers neither is made of linear modules: the weights of all experts are one 3-D parameter, and a router
passes a parameter of its own to `F.linear`. So do hyper-connections, which count as routers.
"""

import functools
import inspect
import re
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from engine.weights.expert_stack import PackedStack, has_output_norm
from engine.weights.kernel_experts import expert_cuts, kernel_experts
from engine.weights.packed_weight import WeightHandle
from engine.weights.packing_policy import Pack
from engine.weights.partition import even_cut
from engine.weights.rank_group import ALONE, RankGroup

if TYPE_CHECKING:
    from engine.weights.triton_experts import TritonExperts

__all__ = [
    "PackedExperts",
    "PackedLlama4Experts",
    "RouterWeight",
    "is_experts",
    "is_router",
    "loops_over_experts",
    "pack_experts",
    "pack_router",
]

_PLAIN_EXPERTS = ("Step3p7Experts",)
"""Classes of experts with a gate of their own that are not described by transformers' `use_experts_implementation`."""


def pack_experts(module: nn.Module, pack: Pack, group: RankGroup = ALONE) -> "PackedExperts | PackedLlama4Experts":
    """Returns the packed replacement of a module for which `is_experts` holds, with a rank's part of every expert."""
    if loops_over_experts(module):
        vars(module).update(has_gate=True, has_bias=False, is_transposed=False)
    kind = PackedExperts if _has_experts_interface(module) else PackedLlama4Experts
    return kind(module, pack, group)


def loops_over_experts(module: nn.Module) -> bool:
    """Whether the module is a layer of experts whose own code reads which of them are chosen."""
    return type(module).__name__ in _PLAIN_EXPERTS


def is_experts(module: nn.Module) -> bool:
    """Whether the module is a layer of experts whose formula is known."""
    is_described = _has_experts_interface(module)
    return is_described or loops_over_experts(module) or type(module).__name__ == "Llama4TextExperts"


def _has_experts_interface(module: nn.Module) -> bool:
    """Whether the module has the attributes by which transformers' `use_experts_implementation` describes experts."""
    attributes = ("has_gate", "has_bias", "is_transposed", "num_experts", "_apply_gate")
    return all(hasattr(module, name) for name in attributes)


class _ExpertStacks(nn.Module):
    up: PackedStack
    down: PackedStack

    @property
    def nbytes(self) -> int:
        return self.up.nbytes + self.down.nbytes

    @property
    def num_weights(self) -> int:
        return self.up.num_weights + self.down.num_weights


class PackedExperts(_ExpertStacks):
    """Replaces a layer's experts. Each expert multiplies the rows routed to it; a row sums its slots in their order.

    All experts are one call into C++ where that has their weights' format and their gate, and on a GPU a few launches.
    Their bits are those of the experts one by one.
    """

    def __init__(self, experts: nn.Module, pack: Pack, group: RankGroup = ALONE) -> None:
        """Takes the weights out of `experts`, which is kept for its gate function and norm."""
        super().__init__()
        self.experts = experts
        name = "gate_up_proj" if experts.has_gate else "up_proj"
        is_transposed = bool(experts.is_transposed)
        num_up, num_out = (_num_columns(experts, each, is_transposed) for each in (name, "down_proj"))
        cuts = expert_cuts(experts, cast(Tensor, experts._parameters[name]), num_up, num_out, group)
        pack_stack = functools.partial(PackedStack, experts, is_transposed, pack, group=group)
        self.up, self.down = pack_stack(name, cut=cuts[0]), pack_stack("down_proj", cut=cuts[1])
        self.parts = kernel_experts(experts, self.up, self.down)
        self.kernel = None if self.parts is None else self.parts.bound()
        whole = self._in_triton() if self.kernel is None else self.kernel
        self._run = self.run_one_by_one if whole is None else whole.run

    def _in_triton(self) -> "TritonExperts | None":
        if self.up.weights[0].device.type != "cuda":
            return None
        from engine.weights.triton_experts import triton_experts  # CPU builds of torch bring no Triton

        return triton_experts(self.experts, self.up, self.down)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Runs the chosen experts [T, S] with their weights [T, S] on hidden_states [T, H]; returns [T, H]."""
        return self._run(hidden_states, top_k_index, top_k_weights)

    def run_one_by_one(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Runs the experts as `forward` does: the plain path, for any weights and any gate."""
        num_rows, num_slots = top_k_index.shape
        slots = top_k_index.reshape(-1)  # [T * S], slot s of row t at t * S + s
        weights = top_k_weights.reshape(-1, 1)
        outputs = torch.zeros(num_rows * num_slots, hidden_states.shape[-1], device=hidden_states.device)
        by_expert = torch.argsort(slots, stable=True)
        ends = torch.bincount(slots, minlength=len(self.up)).cumsum(0).tolist()
        start = 0
        for expert in range(len(self.up)):
            # by_expert[start:end) are this expert's slots
            chosen, start = by_expert[start : ends[expert]], ends[expert]
            if len(chosen):
                output = self._run_expert(expert, hidden_states[chosen // num_slots])
                outputs[chosen] = (output * weights[chosen]).float()
        by_slot = outputs.view(num_rows, num_slots, -1).unbind(1)
        return sum(by_slot[1:], start=by_slot[0]).to(hidden_states.dtype)

    def _run_expert(self, expert: int, x: Tensor) -> Tensor:  # [rows, H] -> [rows, H]
        inner = self.up.multiply(expert, x)
        experts: Any = self.experts
        output = self.down.multiply(expert, experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner))
        return cast(Tensor, experts.post_expert_norm(output)) if has_output_norm(experts) else output


class _Llama4Gate(nn.Module):
    """The gate of Llama 4's experts, as transformers' `use_experts_implementation` describes gates."""

    has_gate = True

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self._act_fn = cast(Any, experts).act_fn

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return cast(Tensor, up * self._act_fn(gate))


class PackedLlama4Experts(_ExpertStacks):
    """Replaces Llama 4's experts. Every expert gets as many rows as there are tokens, most of them zeros."""

    def __init__(self, experts: nn.Module, pack: Pack, group: RankGroup = ALONE) -> None:
        """Takes the weights out of `experts`, which is kept for its activation."""
        super().__init__()
        self.experts = experts
        self.up, self.down = (
            PackedStack(experts, True, pack, name, even_cut(_num_columns(experts, name, True), group), group)
            for name in ("gate_up_proj", "down_proj")
        )
        self.parts = kernel_experts(_Llama4Gate(experts), self.up, self.down)
        """What computes the same of the rows that are not zeros, in C++."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # [E * T, H], expert by expert -> [E * T, H]
        chunks = hidden_states.view(len(self.up), -1, hidden_states.shape[-1])
        return torch.cat([self._run_expert(expert, rows) for expert, rows in enumerate(chunks)])

    def _run_expert(self, expert: int, x: Tensor) -> Tensor:  # [T, H] -> [T, H]
        gate, up = self.up.multiply(expert, x).chunk(2, dim=-1)
        return self.down.multiply(expert, up * cast(Any, self.experts).act_fn(gate))


def _num_columns(experts: nn.Module, name: str, is_transposed: bool) -> int:
    """Returns how many output columns each expert has."""
    return cast(Tensor, experts._parameters[name]).shape[2 if is_transposed else 1]


class RouterWeight(WeightHandle):
    """A router's packed weight. Some routers cast it to float32 at every step, so the plain numbers are kept, too."""

    def __init__(self, weight: Tensor, pack: Pack) -> None:
        super().__init__(pack(weight))
        self._weight, self._pack = weight, pack
        self._by_dtype: dict[torch.dtype, RouterWeight] = {weight.dtype: self}

    def type(self, dtype: torch.dtype) -> "RouterWeight":
        if dtype not in self._by_dtype:
            self._by_dtype[dtype] = RouterWeight(self._weight.to(dtype), self._pack)
        return self._by_dtype[dtype]

    to = type

    def float(self) -> "RouterWeight":
        return self.type(torch.float32)


def is_router(module: nn.Module) -> bool:
    """Whether the module multiplies by 2-D parameters of its own, as routers and hyper-connections do."""
    return bool(_multiplied_parameters(module))


def _multiplied_parameters(module: nn.Module) -> list[str]:
    """Returns the names of the module's own 2-D parameters that its forward uses in `F.linear` and, but for their
    types, nowhere else."""
    names = [name for name, parameter in module._parameters.items() if parameter is not None and parameter.dim() == 2]
    try:
        source = inspect.getsource(type(module).forward) if names else ""
    except (OSError, TypeError):
        return []
    return [name for name in names if _is_multiplied(name, source) or _is_handed_on(module, name, source)]


def _is_multiplied(name: str, source: str) -> bool:
    use = rf"self\.{name}\b(?!\.dtype)"
    num_uses = len(re.findall(use, source))
    return 0 < num_uses == len(re.findall(rf"linear\([^\n]*{use}", source))


def _is_handed_on(module: nn.Module, name: str, source: str) -> bool:
    """Whether a linear layer's forward calls that of `nn.Linear`, and leaves the weight to it."""
    uses = re.search(rf"self\.{name}\b(?!\.dtype)", source)
    return name == "weight" and uses is None and isinstance(module, nn.Linear) and "super().forward(" in source


def pack_router(router: nn.Module, pack: Pack) -> int:
    """Replaces the router's weights by packed ones; returns the bytes that they hold."""
    num_bytes = 0
    for name in _multiplied_parameters(router):
        weight = cast(Tensor, router._parameters.pop(name)).detach().clone()  # off the mapped checkpoint file
        handle = RouterWeight(weight, pack)
        setattr(router, name, handle)
        num_bytes += weight.nbytes + handle.packed.nbytes
    return num_bytes
