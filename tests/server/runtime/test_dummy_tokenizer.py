"""Random weights find a tokenizer: their own, else the embedded model's, if it has no tokens that they lack."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.core.config import EngineConfig
from engine.core.errors import ModelError
from server.runtime.dummy_tokenizer import with_tokenizer
from server.settings.settings import EMBEDDED_MODEL_DIR

NUM_TOKENS = json.loads((EMBEDDED_MODEL_DIR / "config.json").read_text())["vocab_size"]


def make_folder(path: Path, **config: Any) -> EngineConfig:
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return EngineConfig(model=str(path), load_format="dummy")


@pytest.mark.parametrize("fields", [{"vocab_size": NUM_TOKENS}, {"text_config": {"vocab_size": 10**5}}, {}])
def test_the_embedded_tokenizer_stands_in(fields: dict[str, Any], tmp_path: Path) -> None:
    assert with_tokenizer(make_folder(tmp_path, **fields)).tokenizer == str(EMBEDDED_MODEL_DIR)


def test_a_tokenizer_of_its_own_serves(tmp_path: Path) -> None:
    config = make_folder(tmp_path, vocab_size=5)
    shutil.copy(str(EMBEDDED_MODEL_DIR / "tokenizer.json"), tmp_path)
    assert with_tokenizer(config).tokenizer is None


def test_one_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"too small for that of the embedded model .*: copy a tokenizer.json beside"):
        with_tokenizer(make_folder(tmp_path, vocab_size=NUM_TOKENS - 1))


def test_real_weights_and_hub_ids_have_their_own(tmp_path: Path) -> None:
    make_folder(tmp_path)
    for config in (EngineConfig(model=str(tmp_path)), EngineConfig(model="org/model", load_format="dummy")):
        assert with_tokenizer(config) is config
