"""Optimizers on float32 copies of bf16 weights, and the threads that compute them and the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

NUM_PARTS = 2  # pieces of Muon's work, for any number of threads: a run may be resumed with another one
Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers:
    """Threads that compute on one core each and synchronize once per step.

    Operators that spread their work over cores synchronize hundreds of times per step, and on a machine with other work
    each of these waits for the slowest core.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._pool = ThreadPoolExecutor(size, initializer=lambda: torch.set_num_threads(1))

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        return list(self._pool.map(function, items))


class MasterWeights:
    """float32 copies of a bf16 model's parameters: Muon updates the matrices, AdamW the embedding and the norms.

    Muon's update is orthogonal and scaled to AdamW's, hence one learning rate for both. It is reported to need fewer
    tokens than AdamW (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), and tokens are what a CPU lacks.
    """

    def __init__(self, model: nn.Module, learning_rate: float, workers: Workers) -> None:
        self._model = model
        self._workers = workers
        self._learning_rate = learning_rate
        self._masters = {name: p.detach().float().requires_grad_() for name, p in model.named_parameters()}
        matrices = [p for name, p in self._masters.items() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in self._masters.items() if p.ndim != 2 or "embed" in name]
        self._optimizers: list[torch.optim.Optimizer] = [
            *(
                torch.optim.Muon(part, lr=learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
                for part in (matrices[start::NUM_PARTS] for start in range(NUM_PARTS))
            ),
            torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]

    def step(self, gradients: list[Tensor], factor: float) -> None:
        """Updates the masters by the gradients, in the order of the model's parameters; writes them back rounded."""
        for master, gradient in zip(self._masters.values(), gradients, strict=True):
            master.grad = gradient
        torch.nn.utils.clip_grad_norm_(self._masters.values(), 1.0)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._learning_rate * factor
        self._workers.map(lambda optimizer: optimizer.step(), self._optimizers)
        self.write_back()

    @torch.no_grad()
    def write_back(self) -> None:
        for name, parameter in self._model.named_parameters():
            parameter.copy_(self._masters[name])

    def state(self) -> dict[str, Any]:
        masters = {name: p.detach() for name, p in self._masters.items()}
        return {"masters": masters, "optimizers": [optimizer.state_dict() for optimizer in self._optimizers]}

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        for name, value in state["masters"].items():
            self._masters[name].copy_(value)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.write_back()
