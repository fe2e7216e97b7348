"""Whole multimodal models of small sizes, saved as checkpoints."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForImageTextToText, AutoModelForMultimodalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_TEXT_TYPES

from engine.model.small_copy import randomize
from tests.engine.tiny_architectures import tiny_config

_WRITTEN_OTHERWISE = {"kimi_k25": (".blocks.", ".layers."), "qianfan_ocr": (".encoder.layers.", ".layers.")}
"""Types of which transformers writes other names than it reads."""
_TIMM = {"gemma3n_vision", "timm_wrapper"}
"""Types of towers for images that need another library."""


def save_whole_model(
    kind: str, path: Path, text_changes: Mapping[str, Any] | None = None, **changes: Any
) -> PreTrainedModel:
    torch.manual_seed(0)
    config = tiny_config(kind, text_changes)
    for name, value in changes.items():
        setattr(config, name, value)
    auto = AutoModelForImageTextToText if kind in IMAGE_TEXT_TYPES else AutoModelForMultimodalLM
    with _towers_of_timm_left_out():
        model: PreTrainedModel = auto.from_config(config, dtype=torch.float32).eval()
    randomize(model.requires_grad_(False))
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "rotary_emb.alpha")):
            buffer.normal_(std=0.1)
    model.save_pretrained(path)
    if kind in _WRITTEN_OTHERWISE:
        change_tensors(path, lambda name, tensor: (name.replace(*_WRITTEN_OTHERWISE[kind]), tensor))
    return model


@contextmanager
def _towers_of_timm_left_out() -> Iterator[None]:
    """Has these towers be modules without weights; no text goes through them."""
    make = AutoModel.from_config

    def make_but_towers(config: Any, **kwargs: Any) -> Any:
        return nn.Identity() if config.model_type in _TIMM else make(config, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoModel, "from_config", make_but_towers)
        yield


def change_tensors(path: Path, change: Callable[[str, Tensor], tuple[str, Tensor]]) -> None:
    """Replaces names and tensors of the checkpoint in `path`."""
    file = path / "model.safetensors"
    tensors = dict(change(name, tensor) for name, tensor in load_file(file).items())
    save_file(tensors, file, metadata={"format": "pt"})
