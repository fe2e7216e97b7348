"""Recurrent layers that are replaced as a whole compute what those of transformers do, and refuse other weights."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.core.errors import UnsupportedModelError
from engine.model.recurrent.lightning_attention import LightningAttention
from engine.model.recurrent.real_gated_block import RealGatedBlock
from engine.model.recurrent.replacement import replace_recurrent_layers
from tests.engine.tiny_architectures import tiny_model

REPLACED: dict[str, type[Any]] = {"minimax": LightningAttention, "recurrent_gemma": RealGatedBlock}


def layers_of(model: PreTrainedModel, kind: type[Any]) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kind)]


@pytest.mark.parametrize("model_type", REPLACED)
def test_recurrent_layers_are_replaced_and_no_others(model_type: str) -> None:
    model = tiny_model(model_type)
    num_recurrent = list(model.config.layer_types).count("linear_attention")
    replace_recurrent_layers(model)
    assert len(layers_of(model, REPLACED[model_type])) == num_recurrent < model.config.num_hidden_layers
    once = dict(model.named_modules())
    replace_recurrent_layers(model)
    assert dict(model.named_modules()) == once
    llama = tiny_model("llama")
    before = dict(llama.named_modules())
    replace_recurrent_layers(llama)
    assert dict(llama.named_modules()) == before


def test_rates_of_bfloat16_are_made_exact() -> None:
    layers = layers_of(tiny_model("minimax"), type(tiny_model("minimax").model.layers[1].self_attn))
    exact = [LightningAttention(layer).decay for layer in layers]
    rounded = [LightningAttention(layer.bfloat16()).decay for layer in layers]
    assert exact and all(torch.equal(one, other) for one, other in zip(exact, rounded, strict=True))


def test_other_rates_than_the_formulas_are_refused() -> None:
    model = tiny_model("minimax")
    index = list(model.config.layer_types).index("linear_attention")
    model.model.layers[index].self_attn.slope_rate[-1] *= 1.05
    with pytest.raises(UnsupportedModelError, match=rf"layer {index} decay at other rates \(slope_rate\)"):
        replace_recurrent_layers(model)


def test_gates_of_a_head_see_its_channels_alone() -> None:
    (block, *_) = layers_of(
        tiny_model("recurrent_gemma"), type(tiny_model("recurrent_gemma").model.layers[0].temporal_block)
    )
    unit, gates = block.rg_lru, RealGatedBlock(block).gates
    rows = torch.randn(5, len(gates), gates[0].in_features)
    for head, gate in enumerate(gates):
        opened, decaying = gate(rows[:, head]).chunk(2, dim=-1)
        expected = rows[:, head] @ unit.input_gate_weight[head] + unit.input_gate_bias[head]
        torch.testing.assert_close(opened, expected)
        expected = rows[:, head] @ unit.recurrent_gate_weight[head] + unit.recurrent_gate_bias[head]
        torch.testing.assert_close(decaying, expected)
