"""The fingerprint of weights changes with any number of theirs, and with nothing else."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.model.weights_fingerprint import weights_fingerprint
from tests.engine.tiny_architectures import tiny_model


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama").requires_grad_(False)


def test_equal_models_have_equal_fingerprints_wherever_they_are(model: PreTrainedModel, tmp_path: Path) -> None:
    for name in "ab":
        model.save_pretrained(tmp_path / name)
    one, other = (type(model).from_pretrained(tmp_path / name) for name in "ab")
    assert weights_fingerprint(one) == weights_fingerprint(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at", [0, 17, -1])
def test_one_bit_of_one_number_changes_it(model: PreTrainedModel, dtype: torch.dtype, at: int) -> None:
    model.to(dtype)
    fingerprints = {weights_fingerprint(model)}
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        number = model.get_parameter(name).flatten()[at : at + 1 or None].view(torch.uint8)
        number[0] ^= 1
        fingerprints.add(weights_fingerprint(model))
    assert len(fingerprints) == 3


def test_numbers_that_change_places_change_it(model: PreTrainedModel) -> None:
    before = weights_fingerprint(model)
    weight = model.get_parameter("model.embed_tokens.weight")
    weight[:2] = weight[:2].flip(0)
    assert weights_fingerprint(model) != before


def test_large_tensors_are_read_whole(model: PreTrainedModel) -> None:
    large = torch.nn.Parameter(torch.zeros((1 << 16) + 12345), requires_grad=False)
    model.register_parameter("large", large)
    fingerprints = {weights_fingerprint(model)}
    for at in (0, 1 << 15, (1 << 16) - 1, (1 << 16) + 12344):
        large[at] = 1.0
        fingerprints.add(weights_fingerprint(model))
    assert len(fingerprints) == 5


def test_the_configuration_counts(model: PreTrainedModel) -> None:
    before = weights_fingerprint(model)
    model.config.rms_norm_eps *= 2
    assert weights_fingerprint(model) != before
