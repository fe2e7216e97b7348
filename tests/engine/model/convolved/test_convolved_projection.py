"""Models with convolved queries and keys: their layers are replaced, and the proof sees what is wrong or left out."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention import registry
from engine.core.errors import UnsupportedModelError
from engine.kernels import load_kernels
from engine.mixers.row_window import RowWindow
from engine.model.convolved.projection import ConvolvedProjection, HeadConvolution, LengthNorm
from engine.model.convolved.replacement import replace_convolved_projections
from engine.model.paging_proof import prove_paging
from engine.weights.linear import prepare_linears
from tests.engine.tiny_architectures import tiny_model

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # of transformers' code

DIFFERS = "computes something else over a paged KV cache"


def proved(**changes: Any) -> None:
    """Proves a model, as it is loaded."""
    registry.register()
    prove_paging(tiny_model("zaya", changes), 512)


def test_all_layers_are_replaced_and_no_product_is_left_to_torch() -> None:
    model = tiny_model("zaya")
    replace_convolved_projections(model)
    assert {ConvolvedProjection, LengthNorm} <= {type(each) for each in model.modules()}
    assert prepare_linears(model, load_kernels() is not None).unconverted == ()


@pytest.mark.parametrize("taps", [(2, 2), (1, 3), (3, 1), (4, 3)])
def test_the_proof_passes_what_is_right(taps: tuple[int, int]) -> None:
    proved(cca_time0=taps[0], cca_time1=taps[1])


advance, means, values = RowWindow.advance, ConvolvedProjection._means, ConvolvedProjection._values
convolve, normed = HeadConvolution.forward, LengthNorm._normed


def own_values(self: Any, hidden_states: Tensor) -> Tensor:
    parts = self.v_proj_current(hidden_states)[0], self.v_proj_delayed(hidden_states)[0]
    values(self, hidden_states)  # which has a state
    return self._heads(torch.cat(parts, dim=-1))


WRONG: dict[str, tuple[type[Any], str, Any]] = {
    "states": (RowWindow, "advance", lambda self, states, metadata: advance(self, torch.zeros_like(states), metadata)),
    "values": (ConvolvedProjection, "_values", own_values),
    "means": (ConvolvedProjection, "_means", lambda self, query, key: (query, key)),
    "taps": (ConvolvedProjection, "_smoothed", lambda self, windows: windows[:, -self._num_taps :]),
    "biases": (HeadConvolution, "forward", lambda self, windows: convolve(self, windows) - self.bias),
    "lengths": (LengthNorm, "_normed", lambda self, heads: heads),
    "scales": (LengthNorm, "forward", lambda self, query, key: (normed(self, query), normed(self, key))),
}


@pytest.mark.parametrize("part", WRONG)
def test_the_proof_sees_a_part_that_is_wrong(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong = WRONG[part]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(UnsupportedModelError, match=DIFFERS):
        proved()


def test_a_model_whose_first_token_has_half_a_value_of_none_before_it_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=DIFFERS):
        proved(attention_bias=True)


def test_layers_of_other_code_stay_as_they_are() -> None:
    model = tiny_model("llama")
    before = {*model.modules()}
    replace_convolved_projections(model)
    assert {*model.modules()} == before
