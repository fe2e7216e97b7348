"""Models with differential attention: their layers are replaced, and the proof sees what is wrong or left out."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention import registry
from engine.core.errors import UnsupportedModelError
from engine.model.differential.attention import DifferentialAttention
from engine.model.differential.replacement import replace_differential_attention
from engine.model.paging_proof import prove_paging
from engine.model.small_copy import num_distinct_layers
from tests.engine.tiny_architectures import tiny_model

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # of transformers' code


def proved() -> None:
    """Proves a model, as it is loaded."""
    registry.register()
    prove_paging(tiny_model("diffllama"), 512)


def test_the_proof_passes_what_is_right() -> None:
    proved()


def test_attention_is_replaced_and_all_layers_stay_of_one_kind() -> None:
    model = tiny_model("diffllama")
    assert num_distinct_layers(model) == 1
    replace_differential_attention(model)
    assert sum(isinstance(each, DifferentialAttention) for each in model.modules()) == len(model.model.layers)
    assert num_distinct_layers(model) == 1


difference = DifferentialAttention._difference


def without_share(self: Any, attended: Tensor) -> Tensor:
    one, other = attended.chunk(2, dim=1)
    return difference(self, torch.cat((one, torch.zeros_like(other)), dim=1))


def without_norm(self: Any, attended: Tensor) -> Tensor:
    one, other = attended.chunk(2, dim=1)
    return (one - self.share * other) * self.factor


def with_values_exchanged(self: Any, attended: Tensor) -> Tensor:
    return difference(self, torch.cat(attended.chunk(2, dim=-1)[::-1], dim=-1))


@pytest.mark.parametrize("wrong", [without_share, without_norm, with_values_exchanged])
def test_the_proof_sees_a_part_that_is_wrong(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DifferentialAttention, "_difference", wrong)
    with pytest.raises(UnsupportedModelError, match="computes something else over a paged KV cache"):
        proved()


def test_layers_of_other_code_stay_as_they_are() -> None:
    model = tiny_model("llama")
    before = {*model.modules()}
    replace_differential_attention(model)
    assert {*model.modules()} == before
