"""A directory without its weights is refused by what is missing, before anything is loaded."""

import json
from pathlib import Path

import pytest

from engine.checkpoint.weight_files import check_weights
from engine.core.errors import ModelError


def write_index(folder: Path, *files: str) -> None:
    weight_map = {f"tensor.{number}": file for number, file in enumerate(files)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_directory_without_weights(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(ModelError, match=r"has no weights: there is no model\.safetensors"):
        check_weights(str(tmp_path))


def test_an_interrupted_download(tmp_path: Path) -> None:
    write_index(tmp_path, "model-1.safetensors", "model-2.safetensors", "model-2.safetensors")
    (tmp_path / "model-1.safetensors").write_bytes(b"\0")
    with pytest.raises(ModelError, match=r"1 of 2 files of weights are missing, model-2\.safetensors for one"):
        check_weights(str(tmp_path))
    (tmp_path / "model-2.safetensors").write_bytes(b"\0")
    check_weights(str(tmp_path))


def test_a_clone_without_its_large_files(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ModelError, match=r"model\.safetensors is a pointer of Git LFS"):
        check_weights(str(tmp_path))


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_loadings_affair(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    (tmp_path / "model.safetensors").write_bytes(b"\0")
    check_weights(str(tmp_path))


@pytest.mark.parametrize("model", ["owner/name", "name", "./model.gguf"])
def test_hub_ids_and_gguf_files_are_not_looked_into(model: str) -> None:
    check_weights(model)
