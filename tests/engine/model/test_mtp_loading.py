"""An MTP head is read from a checkpoint as other weights are; its memory is told, and one that does not fit is left out
with a sentence."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core.config import EngineConfig
from engine.model.setup import load_model_runner
from tests.engine.model.always_drafting import answers
from tests.engine.model.mtp_checkpoints import (
    HIDDEN_SIZE,
    Tensors,
    always_drafting,
    load_with_head,
    make_checkpoint_with_head,
)
from tests.engine.tiny_models import tiny_engine

pytestmark = pytest.mark.usefixtures("one_thread")


def load(path: Path, **settings: Any) -> Any:
    given = {"num_blocks": 8, "max_model_len": 128, "device": "cpu", "dtype": "bfloat16", **settings}
    return load_model_runner(EngineConfig(model=str(path), **given))[1]


def test_it_drafts_unless_something_else_shall_and_its_memory_is_told(tmp_path: Path) -> None:
    path = make_checkpoint_with_head("llama", tmp_path)
    info, plain = load(path), load(path, mtp=False)
    assert info.has_head and info.draft_size is not None
    assert info.draft_kv_bytes == 8 * 16 * (2 * 2 * 8 + HIDDEN_SIZE) * 2  # keys and values of two heads, hidden states
    assert info.kv_cache_bytes == plain.kv_cache_bytes + info.draft_kv_bytes
    assert info.draft_size.layer_bytes > 2 * HIDDEN_SIZE**2 * 2 and info.draft_size.head_bytes == info.size.head_bytes
    assert info.weights_fingerprint == plain.weights_fingerprint
    for other in (plain, load(path, num_speculative_tokens=0)):
        assert other.draft_size is None and not other.has_head and other.draft_kv_bytes == 0
    for settings in ({"draft_quantization": "int4"}, {"draft_model": str(path)}):
        if "draft_model" not in settings:  # which needs a tokenizer
            assert not load(path, **settings).has_head
        assert not EngineConfig(model="x", **settings).may_load_head


def shard(path: Path) -> None:
    """Cuts the checkpoint's file in two, with an index."""
    tensors = load_file(path / "model.safetensors")
    files = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for file in {*files.values()}:
        own = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        save_file(own, path / file, metadata={"format": "pt"})
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def test_it_is_found_in_several_files(tmp_path: Path) -> None:
    path = make_checkpoint_with_head("glm4_moe", tmp_path)
    whole = load_with_head(path)
    shard(path)
    sharded = load_with_head(path)
    assert answers(always_drafting(whole)) == answers(always_drafting(sharded))
    assert whole.draft is not None and sharded.draft is not None
    for one, other in zip(whole.draft.module.parameters(), sharded.draft.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_it_is_read_from_published_precisions(tmp_path: Path) -> None:
    def round_to_fp8(tensors: Tensors, names: dict[str, str]) -> None:
        for name in [f"{names['']}{names['projection']}.weight", f"{names['']}self_attn.o_proj.weight"]:
            scales = torch.full((-(-len(tensors[name]) // 16), tensors[name].shape[1] // 16), 0.01)
            tensors[name] = (tensors[name] * 100).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales

    path = make_checkpoint_with_head("llama", tmp_path, round_to_fp8)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (path / "config.json").write_text(json.dumps(config))
    model = load_with_head(path)
    assert model.draft is not None and model.draft.join is not None
    assert answers(always_drafting(model)) == answers(tiny_engine(model, num_speculative_tokens=0))


def lacking(part: str) -> Callable[[Tensors, dict[str, str]], None]:
    def edit(tensors: Tensors, names: dict[str, str]) -> None:
        del tensors[f"{names['']}{part}.weight"]

    return edit


def of_another_shape(part: str) -> Callable[[Tensors, dict[str, str]], None]:
    def edit(tensors: Tensors, names: dict[str, str]) -> None:
        name = f"{names['']}{part}.weight"
        tensors[name] = tensors[name][:5].clone()

    return edit


def with_more(tensors: Tensors, names: dict[str, str]) -> None:
    tensors[f"{names['']}self_attn.other.weight"] = torch.ones(3)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lacking("enorm"), "embedding_norm.weight lacks"),
        (lacking("shared_head.norm"), "1 of its tensors, such as model.norm.weight, lack."),
        (lacking("self_attn.k_proj"), "1 of its tensors, such as model.layers.0.self_attn.k_proj.weight, lack."),
        (of_another_shape("eh_proj"), r"its projection.weight has the shape [5, 64], not [32, 64]."),
        (of_another_shape("self_attn.k_proj"), "k_proj.weight has the shape [5, 32], not [16, 32]."),
        (with_more, "1 of its tensors, such as model.layers.0.self_attn.other.weight, have no place"),
    ],
)
def test_one_that_does_not_fit_is_left_out_with_a_sentence(
    edit: Callable[[Tensors, dict[str, str]], None], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint_with_head("llama", tmp_path, edit)
    with caplog.at_level(logging.WARNING, "engine.model.drafting.mtp_head"):
        info = load(path)
    [message] = [record.getMessage() for record in caplog.records if record.name == "engine.model.drafting.mtp_head"]
    assert reason in message and message.startswith(f"{path} drafts without its MTP head, which cannot be loaded: ")
    assert not info.has_head and info.draft_size is None


def test_a_checkpoint_without_one_is_served_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint_with_head("llama", tmp_path, lacking("eh_proj"))
    assert not load(path).has_head
    assert not [record for record in caplog.records if record.name == "engine.model.drafting.mtp_head"]
