"""JSON files of a checkpoint that are no text, or nested without end, are refused or passed over in a sentence."""

import shutil
from pathlib import Path

import pytest

from engine.checkpoint.eos_tokens import find_eos_token_ids
from engine.checkpoint.weight_files import check_weights
from engine.core.errors import ModelError
from engine.text.tokenizer import Tokenizer
from server.runtime.generation_defaults import load_generation_defaults

DAMAGED = [b'{"a\x98": 1}', b'{"a": "\x98"}', b'{"a": ' + b"[" * 100_000, b'{"a": 1', b"\xff\xfe"]
EMBEDDED = Path(__file__).resolve().parents[3] / "engine" / "embedded_model"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED, tmp_path / "model"))


@pytest.mark.parametrize("content", DAMAGED)
def test_configurations_are_refused(folder: Path, content: bytes) -> None:
    (folder / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is damaged"):
        Tokenizer.from_pretrained(str(folder))
    (folder / "generation_config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"generation_config\.json is damaged"):
        load_generation_defaults("auto", str(folder), None)


@pytest.mark.parametrize("content", DAMAGED)
def test_what_only_helps_is_passed_over(folder: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "model.safetensors.index.json").write_bytes(content)
    check_weights(str(folder))
    (folder / "special_tokens_map.json").write_bytes(content)
    (folder / "tokenizer_config.json").write_text("{}")
    assert find_eos_token_ids(str(folder), None, 6144, None) == (0, 2)
    assert "special_tokens_map.json cannot be read" in caplog.text
