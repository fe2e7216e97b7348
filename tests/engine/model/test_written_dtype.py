"""The number format in config.json: understood however it is spelled, or refused in a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.core.config import EngineConfig
from engine.core.errors import ModelError
from engine.model.loader import load_model
from engine.model.written_dtype import dtype_override
from tests.engine.tiny_models import make_checkpoint

SPELLINGS = {
    "bf16": torch.bfloat16,
    "BF16": torch.bfloat16,
    "torch.bfloat16": torch.bfloat16,
    "auto": torch.bfloat16,
    "fp16": torch.float16,
    "torch.float16": torch.float16,
    "torch.half": torch.float16,
    "fp32": torch.float32,
    "Float32": torch.float32,
    "torch.float": torch.float32,
}


def write(folder: Path, **fields: Any) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **fields}))
    return str(folder)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(("spelling", "dtype"), SPELLINGS.items())
def test_every_spelling_is_understood(tmp_path: Path, key: str, spelling: str, dtype: torch.dtype) -> None:
    override = dtype_override(write(tmp_path, **{key: spelling}), None)
    assert override == {"dtype": dtype}
    assert transformers.AutoConfig.from_pretrained(tmp_path, **override).dtype is dtype


@pytest.mark.parametrize("fields", [{}, {"dtype": None}, {"dtype": "bfloat16"}, {"torch_dtype": "float"}])
def test_what_transformers_knows_is_left_to_it(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert dtype_override(write(tmp_path, **fields), None) == {}


@pytest.mark.parametrize("value", ["int4", "torch.nothing", "nn", "", 16, {"": "bfloat16"}, "int8 "])
def test_what_is_no_format_is_refused_in_a_sentence(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ModelError, match=r"^config.json: dtype is .*, which is no number format of weights: write "):
        dtype_override(write(tmp_path, dtype=value), None)


def test_a_part_is_refused_with_what_to_write(tmp_path: Path) -> None:
    model = write(tmp_path, text_config={"dtype": "bf16"}, vision_config={"dtype": "float32"})
    with pytest.raises(ModelError, match=r"^config.json: text_config.dtype is 'bf16': write it as 'bfloat16'.$"):
        dtype_override(model, None)


@pytest.mark.parametrize("spelling", ["bf16", "auto"])
def test_a_model_that_is_spelled_so_is_loaded(tmp_path: Path, spelling: str) -> None:
    llama = make_checkpoint("llama", tmp_path)
    fields = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**fields, "dtype": spelling}))
    assert load_model(EngineConfig(model=str(llama), device="cpu", dtype="float32")).dtype is torch.float32
