"""Checkpoints that cannot be served are refused with the reason, most of them before transformers is imported."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from engine.checkpoint.local import check_checkpoint, is_head
from engine.core.config import EngineConfig
from engine.core.errors import ModelError, UnsupportedModelError
from engine.model.loader import load_model
from engine.text.tokenizer import Tokenizer

METHODS = {
    "gptq": {"quant_method": "gptq", "bits": 3},
    "awq": {"quant_method": "awq", "version": "gemv"},
    "hqq": {"quant_method": "hqq"},
    "bitsandbytes": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf3"},
}


def write_config(folder: Path, **fields: Any) -> str:
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


@pytest.mark.parametrize(
    ("content", "reason"), [("{", "is not JSON: .*line 1"), ("[]", "no JSON object"), ("[" * 10**5, "is not JSON")]
)
def test_a_config_that_is_no_json_is_refused_as_that(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=rf"config\.json .*{reason}"):
        check_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("adapter_config.json", "an adapter"), ("model.Q4_0.gguf", "name one of them"), ("x.txt", r"no config\.json")],
)
def test_what_else_a_directory_may_hold_is_named(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=reason):
        check_checkpoint(str(tmp_path))


def test_a_head_is_known_by_its_names_and_what_is_no_list_of_them_has_none() -> None:
    assert is_head({"architectures": ["LlamaForCausalLMEagle3"]}) and is_head({"draft_vocab_size": 8})
    for content in (True, 3, None, "eagle3", {}, ["LlamaForCausalLM"]):
        assert not is_head({"architectures": content})


@pytest.mark.parametrize("method", METHODS)
def test_weights_in_precisions_that_are_not_known_are_refused_by_name(tmp_path: Path, method: str) -> None:
    model = write_config(tmp_path, quantization_config=METHODS[method])
    with pytest.raises(UnsupportedModelError, match=rf"quantized \({method}\).*--quantization int4"):
        check_checkpoint(model)


def test_quantized_weights_of_the_hub_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config.json of a hub model is read only after it was downloaded."""
    monkeypatch.setattr("engine.model.loader.check_checkpoint", lambda _: None)
    model = write_config(tmp_path, model_type="llama", quantization_config=METHODS["gptq"])
    with pytest.raises(UnsupportedModelError, match="gptq"):
        load_model(EngineConfig(model=model, device="cpu"))


@pytest.mark.parametrize(("kind", "shown"), [("foobar", "'foobar'"), (None, "'None'"), (["llama"], "llama")])
def test_a_model_type_that_transformers_does_not_know_is_named(tmp_path: Path, kind: Any, shown: str) -> None:
    model = write_config(tmp_path, model_type=kind)
    message = f"model_type .*{shown}.* is not known to transformers {transformers.__version__}; a newer"
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(EngineConfig(model=model, device="cpu"))


def test_an_unknown_model_type_is_not_blamed_on_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_text("x")
    with pytest.raises(UnsupportedModelError, match="'foobar' is not known"):
        Tokenizer.from_pretrained(write_config(tmp_path, model_type="foobar"))


def test_trust_remote_code_is_suggested_where_the_checkpoint_has_code(tmp_path: Path) -> None:
    model = write_config(tmp_path, model_type="custom", auto_map={"AutoConfig": "custom.Custom"})
    with pytest.raises(UnsupportedModelError, match="--trust-remote-code"):
        load_model(EngineConfig(model=model, device="cpu"))
    (tmp_path / "custom.py").write_text("raise ZeroDivisionError")
    with pytest.raises(ModelError, match="ZeroDivisionError"):
        load_model(EngineConfig(model=model, device="cpu", trust_remote_code=True))


@pytest.mark.parametrize(
    "config",
    [{"speculators_model_type": "eagle3"}, {"draft_vocab_size": 5}, {"architectures": ["LlamaForCausalLMEagle3"]}],
)
def test_a_head_drafts_for_a_model_and_is_none(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    check_checkpoint(str(tmp_path), is_draft=True)
    with pytest.raises(UnsupportedModelError, match=r"is a head that drafts .*: serve that, with --draft-model"):
        check_checkpoint(str(tmp_path))


def test_a_model_whose_name_has_an_eagle_in_it_is_no_head(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Eagle2_5_VLForConditionalGeneration"]}))
    check_checkpoint(str(tmp_path))
