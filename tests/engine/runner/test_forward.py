"""The forward by a model's own code: results stand at the kept positions, whatever the code takes into account."""

from typing import Any

import pytest
import torch

from engine.attention import reference, registry
from engine.attention.kv_cache import KVCache
from engine.core.batch import ScheduledRequest
from engine.core.sampling_params import SamplingParams
from engine.model.probe import layer_shape, probe_layers
from engine.runner.forward import TransformersForward
from engine.runner.model_inputs import build_inputs
from tests.engine.tiny_architectures import tiny_model

CPU = torch.device("cpu")


def whole_and_kept(module: Any, kept: list[int]) -> list[torch.Tensor]:
    """Returns logits and hidden states of all positions, then those of the kept ones."""
    calls = probe_layers(module, CPU)
    cache = KVCache([layer_shape(call) for call in calls], 2, 8, torch.float32, CPU)
    requests = [ScheduledRequest("", range(3, 12), 0, (0, 1), SamplingParams(), [], [], True)]
    forward = TransformersForward(module, cache, reference)
    inputs = build_inputs(requests, 8, CPU)
    return [part for rows in (None, kept) for part in forward(inputs, rows)[:2]]


@pytest.mark.parametrize("reads_the_choice", [True, False])
@torch.inference_mode()
def test_results_stand_at_the_kept_positions(reads_the_choice: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny_model("llama").eval()
    registry.register()
    module.set_attn_implementation(registry.ATTENTION_NAME)
    own_forward = type(module).forward

    def forward(self: Any, logits_to_keep: Any = None, **arguments: Any) -> Any:
        return own_forward(self, **arguments)

    if not reads_the_choice:
        monkeypatch.setattr(type(module), "forward", forward)
    logits, hidden, kept_logits, kept_hidden = whole_and_kept(module, [2, 8])
    assert torch.equal(kept_hidden, hidden[[2, 8]])
    assert torch.allclose(kept_logits, logits[[2, 8]], rtol=1e-4, atol=1e-5)
    assert len(logits) == len(hidden) == 9
