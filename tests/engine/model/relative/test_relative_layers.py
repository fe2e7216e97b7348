"""Models with a bias by distance: their layers are replaced, and the proof sees what is wrong or left out."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.attention import registry
from engine.attention.distance_bias import BiasedAttention
from engine.core.errors import UnsupportedModelError
from engine.kernels import load_kernels
from engine.mixers.dynamic_convolution import DynamicConvolution
from engine.mixers.functions import route_recurrent_functions
from engine.model.paging_proof import prove_paging
from engine.model.relative.attention import RelativeAttention
from engine.model.relative.block_residual import BlockResidual
from engine.model.relative.clip import Clip
from engine.model.relative.gated_attention import DynamicShortConvolution, GatedRelativeAttention
from engine.model.relative.mixture import BoundedGate, NormalizingRouter, RelativeMixture, SharedRouter
from engine.model.relative.replacement import replace_relative_layers
from engine.weights.linear import prepare_linears
from tests.engine.fakes import add, run_to_end
from tests.engine.tiny_architectures import tiny_model
from tests.engine.tiny_models import load_reference, load_tiny, make_checkpoint, make_config, tiny_engine

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # of transformers' code

KINDS = {
    "inkling_text": {RelativeAttention, RelativeMixture, SharedRouter},
    "inkling2_text": {
        *(GatedRelativeAttention, DynamicShortConvolution, BlockResidual),
        *(Clip, BoundedGate, NormalizingRouter),
    },
}
DIFFERS = "computes something else over a paged KV cache"


def replaced(kind: str) -> PreTrainedModel:
    model = tiny_model(kind)
    replace_relative_layers(model)
    return model


def proved(kind: str) -> None:
    """Proves a model, as it is loaded."""
    registry.register()
    model = tiny_model(kind)
    route_recurrent_functions(model)
    prove_paging(model, 512)


@pytest.mark.parametrize("kind", KINDS)
def test_all_layers_are_replaced(kind: str) -> None:
    assert KINDS[kind] <= {type(each) for each in replaced(kind).modules()}


@pytest.mark.parametrize("kind", KINDS)
def test_no_product_is_left_to_torch(kind: str) -> None:
    assert prepare_linears(replaced(kind), load_kernels() is not None).unconverted == ()


@pytest.mark.parametrize("kind", KINDS)
def test_the_proof_passes_what_is_right(kind: str) -> None:
    proved(kind)


def without(field: str) -> Callable[[Any], Any]:
    """Returns attention without a part of the bias."""
    attend = BiasedAttention.attend

    def attend_without(self: Any, call: Any, bias: Any, cache: Any) -> Any:
        part = getattr(bias, field)
        left = torch.zeros_like(part) if field in ("weights", "profiles") else None
        return attend(self, call, bias._replace(**{field: left}), cache)

    return attend_without


@pytest.mark.parametrize(
    ("kind", "part"), [*product(KINDS, ("weights", "profiles", "log_scaling")), ("inkling2_text", "sinks")]
)
def test_the_proof_sees_a_part_of_the_bias_that_is_left_out(
    kind: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BiasedAttention, "attend", without(part))
    with pytest.raises(UnsupportedModelError, match=DIFFERS):
        proved(kind)


def unclipped(_: Any, vectors: Any) -> Any:
    return vectors


def first_block(self: Any, blocks: Any, partial: Any) -> Any:
    return [partial.float() for _ in self.query]


def static(mixer: Any) -> Any:
    return mixer._replace(weights=torch.zeros_like(mixer.weights))


advance, choose, chosen_and_shared = DynamicConvolution.advance, NormalizingRouter.forward, SharedRouter.forward
WRONG: dict[str, tuple[str, type[Any], str, Any]] = {
    "clips": ("inkling2_text", Clip, "forward", unclipped),
    "residuals": ("inkling2_text", BlockResidual, "_read", first_block),
    "weights of convolutions": (
        "inkling2_text",
        DynamicConvolution,
        "advance",
        lambda self, *args: advance(static(self), *args),
    ),
    "states of convolutions": (
        "inkling2_text",
        DynamicConvolution,
        "advance",
        lambda self, states, metadata: advance(self, torch.zeros_like(states), metadata),
    ),
    "bounds of gates": ("inkling2_text", BoundedGate, "forward", lambda _, gate, up: gate * gate.sigmoid() * up),
    "weights of experts": (
        "inkling2_text",
        NormalizingRouter,
        "forward",
        lambda self, rows: (lambda logits, weights, chosen: (logits, weights * 1.1, chosen))(*choose(self, rows)),
    ),
    "weights of shared experts": (
        "inkling_text",
        SharedRouter,
        "forward",
        lambda self, rows: (lambda chosen, weights, shared: (chosen, weights, shared * 0.5))(
            *chosen_and_shared(self, rows)
        ),
    ),
}


@pytest.mark.parametrize("part", WRONG)
def test_the_proof_sees_a_part_that_is_wrong(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, owner, name, wrong = WRONG[part]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(UnsupportedModelError, match=DIFFERS):
        proved(kind)


@pytest.mark.parametrize("name", ["inkling", "inkling2"])
def test_rows_of_the_head_that_are_of_no_token_have_no_logit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(name)
    config.unpadded_vocab_size = config.vocab_size - 50
    monkeypatch.setattr("tests.engine.tiny_models.make_config", lambda _: config)
    path = make_checkpoint(name, tmp_path)
    model = load_tiny(path)
    assert model.vocab_size == config.unpadded_vocab_size
    engine = tiny_engine(model)
    add(engine, "a", [1, 2, 3], max_tokens=12, temperature=0.0)
    answer = [token for update in run_to_end(engine)["a"] for token in update.token_ids]
    assert answer == load_reference(path).generate([1, 2, 3], 12)


def test_layers_of_other_code_stay_as_they_are() -> None:
    model = tiny_model("deepseek_v3")
    before = {*model.modules()}
    replace_relative_layers(model)
    assert {*model.modules()} == before
