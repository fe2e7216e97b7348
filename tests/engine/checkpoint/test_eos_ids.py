"""The EOS token ids of a checkpoint."""

import json
from pathlib import Path

import pytest

from engine.core.config import EngineConfig
from engine.core.errors import ModelError
from engine.model.loader import load_model
from tests.engine.tiny_models import make_checkpoint


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_checkpoint("llama", tmp_path)


def eos_ids(path: Path) -> tuple[int, ...]:
    return load_model(EngineConfig(model=str(path), device="cpu")).eos_token_ids


def test_eos_ids_come_from_the_generation_config_first(llama: Path) -> None:
    config = llama / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": 3}))
    (llama / "generation_config.json").unlink(missing_ok=True)
    assert eos_ids(llama) == (3,)
    (llama / "generation_config.json").write_text(json.dumps({"max_length": 9}))
    assert eos_ids(llama) == (3,)
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert eos_ids(llama) == (5, 6)


def test_eos_ids_outside_the_vocabulary_are_left_out(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 99999, -1]}))
    assert eos_ids(llama) == (5,)
    assert "99999" in caplog.text


def test_a_damaged_generation_config_is_logged(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = llama / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": 3}))
    (llama / "generation_config.json").write_text("{")
    assert eos_ids(llama) == (3,)
    assert "generation_config.json" in caplog.text


def test_a_hub_that_does_not_answer_may_have_a_generation_config(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (llama / "generation_config.json").unlink(missing_ok=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshots = tmp_path / "cache" / "models--org--model" / "snapshots"
    snapshots.mkdir(parents=True)
    (snapshots / ("1" * 40)).symlink_to(llama)
    with pytest.raises(ModelError, match="of org/model cannot be fetched"):
        load_model(EngineConfig(model="org/model", revision="1" * 40, device="cpu"))
