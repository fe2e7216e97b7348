"""The EOS token ids of a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.eos_tokens import find_eos_token_ids
from engine.core.config import EngineConfig
from engine.core.errors import ModelError
from engine.model.loader import load_model


def eos_ids(path: Path) -> tuple[int, ...]:
    return load_model(EngineConfig(model=str(path), device="cpu")).eos_token_ids


def write(path: Path, name: str, **fields: Any) -> None:
    (path / name).write_text(json.dumps(fields))


def in_config(path: Path, **fields: Any) -> None:
    write(path, "config.json", **json.loads((path / "config.json").read_text()) | fields)


def test_eos_ids_are_all_that_any_file_names(llama: Path) -> None:
    in_config(llama, eos_token_id=3)
    (llama / "generation_config.json").unlink(missing_ok=True)
    assert eos_ids(llama) == (3,)
    write(llama, "generation_config.json", max_length=9)
    assert eos_ids(llama) == (3,)
    write(llama, "generation_config.json", eos_token_id=[5, 6])
    assert eos_ids(llama) == (5, 6, 3)
    write(llama, "tokenizer_config.json", eos_token="<|im_end|>")
    write(llama, "tokenizer.json", added_tokens=[{"id": 7, "content": "<|im_end|>"}, {"id": 8, "content": "<s>"}])
    assert eos_ids(llama) == (5, 6, 3, 7)


def find(path: Path, default: Any = None) -> tuple[int, ...]:
    return find_eos_token_ids(str(path), None, 10, default)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("token", ["</s>", {"content": "</s>", "lstrip": False}])
@pytest.mark.parametrize(
    "tokenizer",
    [
        {"added_tokens": [{"id": 4, "content": "</s>", "special": True}], "model": {"vocab": [["a", -1.5]]}},
        {"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0, "</s>": 4}, "merges": []}},
    ],
)
def test_the_tokenizers_own_eos_is_found(tmp_path: Path, file: str, token: Any, tokenizer: dict[str, Any]) -> None:
    write(tmp_path, file, eos_token=token)
    write(tmp_path, "tokenizer.json", **tokenizer)
    assert find(tmp_path) == (4,)


def test_the_part_about_text_counts_too(tmp_path: Path) -> None:
    write(tmp_path, "config.json", eos_token_id=None, text_config={"eos_token_id": [1, 2]})
    assert find(tmp_path) == (1, 2)


def test_the_kinds_usual_token_counts_where_no_file_names_one(tmp_path: Path) -> None:
    """A config's class has one of its own, which need not be this model's."""
    assert find(tmp_path, 2) == (2,)
    write(tmp_path, "generation_config.json", eos_token_id=5)
    assert find(tmp_path, 2) == (5,)


def test_a_model_may_have_none(tmp_path: Path) -> None:
    assert find(tmp_path) == ()


@pytest.mark.parametrize("value", ["</s>", "5", [5, "6"], {"id": 5}, True, 5.5])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_what_is_no_id_is_refused_by_its_place(tmp_path: Path, file: str, value: Any) -> None:
    write(tmp_path, file, eos_token_id=value)
    with pytest.raises(ModelError, match=f"^eos_token_id in {file} of .* is .*: it must be a token id or a list"):
        find(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"added_tokens": 3}'])
def test_a_damaged_tokenizer_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str) -> None:
    write(tmp_path, "generation_config.json", eos_token_id=5)
    write(tmp_path, "tokenizer_config.json", eos_token="</s>")
    (tmp_path / "tokenizer.json").write_text(content)
    assert find(tmp_path) == (5,)
    assert "tokenizer.json cannot be read" in caplog.text


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
