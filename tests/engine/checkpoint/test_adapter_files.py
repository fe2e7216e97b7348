"""Adapters' files are read as PEFT means them, or refused by a sentence: whatever is in them."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint.adapters.files import AdapterFiles, read_adapter
from engine.checkpoint.adapters.settings import read_settings
from engine.core.errors import AdapterError

MODULES = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(2) for name in "qkv"]


def settings_of(**changes: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj"], **changes}


def tensors_of(rank: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for module in MODULES:
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, 16, generator=generator)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(24, rank, generator=generator)
    return tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings_of()))
    save_file(tensors_of(), tmp_path / "adapter_model.safetensors")
    return tmp_path


def configure(folder: Path, **changes: Any) -> None:
    (folder / "adapter_config.json").write_text(json.dumps(settings_of(**changes)))


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def read(folder: Path) -> AdapterFiles:
    return read_adapter(str(folder), max_rank=64, max_bytes=1 << 20)


A, B = (f"base_model.model.{MODULES[0]}.lora_{matrix}.weight" for matrix in "AB")


def test_matrices_come_by_module_with_their_scale(folder: Path) -> None:
    files = read(folder)
    assert [*files.factors] == sorted(MODULES) and files.rank == 4
    assert torch.equal(files.factors[MODULES[0]].down, tensors_of()[A])
    assert torch.equal(files.factors[MODULES[0]].up, tensors_of()[B])
    assert {each.scale for each in files.factors.values()} == {2.0}


@pytest.mark.parametrize(
    ("changes", "module", "rank", "scale"),
    [
        ({}, "a.q_proj", 4, 2.0),
        ({"use_rslora": True}, "a.q_proj", 4, 4.0),
        ({"rank_pattern": {"q_proj": 16}}, "a.q_proj", 16, 0.5),
        ({"rank_pattern": {"q_proj": 16}}, "a.my_q_proj", 4, 2.0),
        ({"rank_pattern": {"^a.q_proj": 16}}, "a.q_proj", 16, 0.5),
        ({"rank_pattern": {"^q_proj": 16}}, "a.q_proj", 4, 2.0),
        ({"alpha_pattern": {"1.q_proj": 1}}, "layers.1.q_proj", 4, 0.25),
        ({"alpha_pattern": {"1.q_proj": 1}}, "layers.11.q_proj", 4, 2.0),
        ({"rank_pattern": {"q_proj": 16}, "alpha_pattern": {"q_proj": 1}, "use_rslora": True}, "q_proj", 16, 0.25),
        ({"alpha_pattern": {"q_proj": 0}}, "q_proj", 4, 0.0),
    ],
)
def test_rank_and_scale_follow_the_settings(
    folder: Path, changes: dict[str, Any], module: str, rank: int, scale: float
) -> None:
    configure(folder, **changes)
    settings = read_settings(folder)
    assert (settings.rank_of(module), settings.scale_of(module)) == (rank, scale)


@pytest.mark.parametrize(
    ("changes", "meant"),
    [
        ({}, ["layers.0.q_proj", "layers.1.q_proj"]),
        ({"layers_to_transform": 1}, ["layers.1.q_proj"]),
        ({"layers_to_transform": [0]}, ["layers.0.q_proj"]),
        ({"target_modules": ["layers.0.q_proj"]}, ["layers.0.q_proj"]),
        ({"target_modules": ".*_proj"}, []),
        ({"exclude_modules": ["layers.0.q_proj"]}, []),
    ],
)
def test_settings_tell_which_modules_must_be_there(folder: Path, changes: dict[str, Any], meant: list[str]) -> None:
    configure(folder, **changes)
    settings = read_settings(folder)
    names = ["layers.0.q_proj", "layers.1.q_proj", "layers.1.xq_proj", "layers.1.q_proj.x"]
    assert [name for name in names if settings.means(name)] == meant


REFUSED_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "LOHA"}, "type 'LOHA': only LORA"),
    "DoRA": ({"use_dora": True}, "it is a DoRA"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "whole modules"),
    "biases": ({"bias": "lora_only"}, "trains biases"),
    "own biases": ({"lora_bias": True}, "biases of its own"),
    "token embeddings": ({"trainable_token_indices": [1]}, "embeddings of tokens"),
    "parameters": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "no linear layers"),
    "layers twice": ({"layer_replication": [[0, 2], [1, 3]]}, "replicates layers"),
    "activated": ({"alora_invocation_tokens": [1, 2]}, "activated LoRA"),
    "pooled": ({"use_qalora": True}, "QALoRA"),
    "PiSSA": ({"init_lora_weights": "pissa_niter_16"}, "changed the model's own weights"),
    "what nobody knows": ({"use_time_travel": True}, "'use_time_travel', which is not known"),
    "no rank": ({"r": None}, "damaged"),
    "rank 0": ({"r": 0}, "at least 1"),
    "a rank in words": ({"r": "four"}, "damaged"),
    "an infinite scale": ({"lora_alpha": float("inf")}, "finite"),
    "a regular expression": ({"rank_pattern": {"(a+)+$": 8}}, "only names of modules"),
    "targets of numbers": ({"target_modules": [1, 2]}, "damaged"),
    "a rank of another kind": ({"rank_pattern": {"q_proj": "x"}}, "damaged"),
    "patterns in a list": ({"alpha_pattern": ["q_proj"]}, "damaged"),
    "layers in words": ({"layers_to_transform": "all"}, "damaged"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED_SETTINGS.values(), ids=REFUSED_SETTINGS)
def test_settings_that_mean_something_else_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    configure(folder, **changes)
    with pytest.raises(AdapterError, match=message):
        read(folder)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"[" * 100_000, b'{"a": ' * 50_000, b" " * (2 << 20), b"\xff\xfe"])
def test_settings_that_are_no_json_object_are_refused(folder: Path, text: bytes) -> None:
    (folder / "adapter_config.json").write_bytes(text)
    with pytest.raises(AdapterError):
        read(folder)


def test_settings_without_effect_are_no_reason_to_refuse(folder: Path) -> None:
    configure(folder, lora_dropout=0.1, peft_version="0.99", qalora_group_size=16, use_dora=False, modules_to_save=[])
    assert len(read(folder).factors) == len(MODULES)


REFUSED_TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "half a pair": (lambda tensors: tensors.pop(A), "one of two matrices"),
    "no pairs": (lambda tensors: tensors.clear(), "no matrices"),
    "another rank": (lambda tensors: tensors.update({A: torch.ones(5, 16)}), "not of rank 4"),
    "ranks that differ": (lambda tensors: tensors.update({B: torch.ones(24, 3)}), "not of rank 4"),
    "a vector": (lambda tensors: tensors.update({A: torch.ones(4)}), "not of rank 4"),
    "NaN": (lambda tensors: tensors[A].view(-1)[7].fill_(torch.nan), "NaN or infinity"),
    "infinity": (lambda tensors: tensors[B].view(-1)[0].fill_(-torch.inf), "NaN or infinity"),
    "integers": (lambda tensors: tensors.update({A: torch.ones(4, 16, dtype=torch.int32)}), "type torch.int32"),
    "an embedding": (
        lambda tensors: tensors.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 9)}),
        "no matrix of a LoRA",
    ),
    "a magnitude": (
        lambda tensors: tensors.update({A.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(24)}),
        "no matrix of a LoRA",
    ),
    "a whole module": (lambda tensors: tensors.update({"base_model.model.lm_head.weight": torch.ones(9, 9)}), "matrix"),
    "a name with a path": (lambda tensors: tensors.update({"../../etc.lora_A.weight": torch.ones(4, 16)}), "matrix"),
}


@pytest.mark.parametrize(("edit", "message"), REFUSED_TENSORS.values(), ids=REFUSED_TENSORS)
def test_matrices_that_are_none_are_refused(
    folder: Path, edit: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    change(folder, edit)
    with pytest.raises(AdapterError, match=message):
        read(folder)


def test_a_rank_above_the_limit_is_refused(folder: Path) -> None:
    configure(folder, r=65)
    with pytest.raises(AdapterError, match="--max-lora-rank allows 64"):
        read(folder)


def test_a_file_larger_than_memory_allows_is_refused_before_it_is_read(folder: Path) -> None:
    with pytest.raises(AdapterError, match="more than the 100 that may be read"):
        read_adapter(str(folder), max_rank=64, max_bytes=100)


def test_pickled_matrices_are_refused(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match="may run code"):
        read(folder)


@pytest.mark.parametrize("path", ["/nowhere/at/all", "org/some-adapter", ""])
def test_what_is_no_directory_is_refused(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AdapterError, match=r"no directory|no adapter"):
        read_adapter(path, 64, 1 << 20)


def header(value: object, data: bytes = b"") -> bytes:
    text = json.dumps(value).encode()
    return len(text).to_bytes(8, "little") + text + data


BOMBS: dict[str, bytes] = {
    "nothing": b"",
    "less than a length": b"\x01\x02",
    "a header longer than the file": (1 << 40).to_bytes(8, "little") + b"{}",
    "a header of all that can be said": b"\xff" * 8 + b"{}",
    "a header that is said to be 99 MB": (99 << 20).to_bytes(8, "little") + b"{}",
    "no JSON": (4).to_bytes(8, "little") + b"{[[[",
    "deep JSON": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "data beyond the end": header({A: {"dtype": "F32", "shape": [4, 1 << 40], "data_offsets": [0, 1 << 44]}}),
    "a shape without data": header({A: {"dtype": "F32", "shape": [1 << 31, 1 << 31, 4], "data_offsets": [0, 0]}}),
    "data of two": header(
        {name: {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]} for name in (A, B)}, bytes(64)
    ),
    "an unknown type": header({A: {"dtype": "Q4", "shape": [4, 4], "data_offsets": [0, 8]}}, bytes(8)),
}


@pytest.mark.parametrize("content", BOMBS.values(), ids=BOMBS)
def test_hostile_headers_are_refused(folder: Path, content: bytes) -> None:
    (folder / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(AdapterError):
        read(folder)


def test_any_damage_of_the_file_is_refused_or_harmless(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    whole, rng = file.read_bytes(), random.Random(5)
    for _ in range(300):
        damaged = bytearray(whole[: rng.choice([len(whole), rng.randrange(len(whole))])])
        for _ in range(rng.randrange(4)):
            if damaged:
                damaged[rng.randrange(min(len(damaged), 2_000))] = rng.randrange(256)
        file.write_bytes(damaged)
        try:
            files = read(folder)
        except AdapterError as error:
            assert str(error).endswith((".", ")."))
        else:
            assert all(each.down.isfinite().all() for each in files.factors.values())


def test_the_digest_is_of_the_content_alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    digest = read(folder).digest
    copy = tmp_path_factory.mktemp("elsewhere")
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    change(copy, lambda tensors: tensors.update(dict(reversed([*tensors.items()]))))
    configure(copy, lora_dropout=0.5, base_model_name_or_path="x")
    assert read(copy).digest == digest and len(digest) == 64


@pytest.mark.parametrize(
    "edit",
    [
        lambda folder: change(folder, lambda tensors: tensors[A].view(-1)[3].add_(1e-6)),
        lambda folder: change(folder, lambda tensors: tensors.update({B: tensors[B].roll(1, 0)})),
        lambda folder: change(folder, lambda tensors: tensors.update({A: tensors[A].bfloat16()})),
        lambda folder: change(
            folder,
            lambda tensors: tensors.update({each.replace("q_proj", "o_proj"): tensors.pop(each) for each in (A, B)}),
        ),
        lambda folder: configure(folder, lora_alpha=9),
        lambda folder: configure(folder, use_rslora=True),
    ],
    ids=["a number", "an order", "a type", "a module", "a scale", "a kind of scale"],
)
def test_whatever_changes_results_changes_the_digest(folder: Path, edit: Callable[[Path], object]) -> None:
    digest = read(folder).digest
    edit(folder)
    assert read(folder).digest != digest
