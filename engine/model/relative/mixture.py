"""Experts of Inkling's layers, of which some are every token's and weighed by the same router, and routers and gates of
Inkling 2's. Numbers are float32, and sums have a fixed order."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.mixers.sums import halved_sum

__all__ = ["BoundedGate", "NormalizingRouter", "RelativeMixture"]


class SharedMLP(nn.Module):
    """The experts that all tokens have, as one gated MLP whose inner numbers are weighed expert by expert."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        gate, up, down = (each.detach() for each in (experts.gate_proj, experts.up_proj, experts.down_proj))
        self.shared_gate_up = _linear_of(torch.cat((gate.flatten(0, 1), up.flatten(0, 1))))
        self.shared_down = _linear_of(down.transpose(0, 1).flatten(1))  # [H, experts * inner]
        self.act_fn = experts.act_fn

    def forward(self, rows: Tensor, weights: Tensor) -> Tensor:  # [T, H], [T, experts] -> [T, H]
        gate, up = self.shared_gate_up(rows).chunk(2, dim=-1)
        inner = (self.act_fn(gate) * up).unflatten(-1, (weights.shape[1], -1)) * weights[..., None]
        return cast(Tensor, self.shared_down(inner.flatten(1)))


class SharedRouter(nn.Module):
    """Weighs the chosen experts and those of all tokens together, in float32; sums have a fixed order."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight, self.global_scale = router.weight, router.global_scale
        self.e_score_correction_bias = router.e_score_correction_bias
        self._num_shared, self._num_chosen = int(router.n_shared_experts), int(router.top_k)
        self._factor = float(router.route_scale)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """rows [T, H] -> which experts are chosen [T, chosen], their weights, and those of the others [T, shared]."""
        logits = functional.linear(rows.float(), self.weight.float())
        scores = torch.sigmoid(logits)
        routed = scores[:, : -self._num_shared]
        chosen = _best(routed, self.e_score_correction_bias, self._num_chosen)
        weights = torch.cat((routed.gather(1, chosen), scores[:, -self._num_shared :]), dim=-1)
        weights = weights / halved_sum(weights, 1)[:, None] * self._factor * self.global_scale.float()
        of_chosen, of_shared = weights.to(rows.dtype).split((self._num_chosen, self._num_shared), dim=-1)
        return chosen, of_chosen.contiguous(), of_shared


class NormalizingRouter(nn.Module):
    """Weighs the chosen experts by their share of what their sigmoids sum to, in float32."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(router.weight.detach().float(), requires_grad=False)
        self.e_score_correction_bias = router.e_score_correction_bias
        self._num_chosen, self._factor = int(router.top_k), float(router.routed_scaling_factor)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """rows [T, H] -> logits of all experts, weights of the chosen ones [T, chosen], and which these are."""
        logits = functional.linear(rows.float(), self.weight)
        scores = torch.sigmoid(logits)
        chosen = _best(scores, self.e_score_correction_bias, self._num_chosen)
        weights = scores.gather(1, chosen)
        shares = weights / (halved_sum(weights, 1)[:, None] + 1e-20)
        return logits, shares * self._factor, chosen


class BoundedGate(nn.Module):
    """A gate whose two factors are bounded by a tanh each, and whose sigmoid is not."""

    def __init__(self, gate: Any) -> None:
        super().__init__()
        self._bounds = float(gate.gate_softcap.softcap), float(gate.up_softcap.softcap)

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        wide, factor = gate.float(), up.float()
        of_gate, of_up = self._bounds
        bounded = torch.tanh(wide / of_gate) * of_gate * torch.sigmoid(wide) * (torch.tanh(factor / of_up) * of_up)
        return bounded.to(gate.dtype)


class RelativeMixture(nn.Module):
    """Chosen experts, and those that all tokens have."""

    def __init__(self, mixture: Any) -> None:
        super().__init__()
        self.gate, self.experts = SharedRouter(mixture.gate), mixture.experts
        self.shared_experts = SharedMLP(mixture.shared_experts)

    def forward(self, hidden_states: Tensor) -> Tensor:  # [1, T, H]
        rows = hidden_states[0]
        chosen, weights, of_shared = self.gate(rows)
        return cast(Tensor, self.experts(rows, chosen, weights) + self.shared_experts(rows, of_shared))[None]


def _best(scores: Tensor, bias: Tensor, count: int) -> Tensor:
    """Returns which experts [T, count] score best, with a bias: of equal ones the first; in torch's `topk` any."""
    return (scores + bias.float()).sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _linear_of(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
