"""Of a multimodal checkpoint, the text model is served, and computes what the whole model computes of a text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from engine.core.config import EngineConfig
from engine.core.errors import UnsupportedModelError
from engine.model.loader import load_model
from engine.model.paging_proof import randomize
from engine.model.text_part import has_text_part
from tests.engine.served_answers import documented_types, generate, make_prompts, serve
from tests.engine.tiny_architectures import tiny_config

FEW = ("llava", "mistral3", "qwen3_5")
ALL = (
    *("aria", "deepseek_vl", "deepseek_vl_hybrid", "exaone4_5", "hyperclovax_vision_v2", "idefics2", "idefics3"),
    *("internvl", "janus", "lighton_ocr", "llava_next", "llava_next_video", "llava_onevision", "ovis2", "lfm2_vl"),
    *("lfm3_vl", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "nemotron_h_omni"),
    *("pp_chart2table", "qwen3_5_moe", "shieldgemma2", "smolvlm", "video_llama_3", "video_llava", "vipllava"),
)
REFUSED = ("paligemma",)

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' own code, about its default configurations


def save_whole_model(kind: str, path: Path, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = tiny_config(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomize(model.requires_grad_(False))
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("kind", [*FEW, *(pytest.param(kind, marks=pytest.mark.slow) for kind in ALL)])
def test_the_text_part_answers_as_the_whole_model_does(kind: str, tmp_path: Path) -> None:
    whole = save_whole_model(kind, tmp_path)
    assert has_text_part(whole.config)
    prompts = make_prompts()
    assert serve(tmp_path, prompts) == [generate(whole, prompt) for prompt in prompts]


def test_the_documentation_lists_these_kinds() -> None:
    assert documented_types("text parts") == {*FEW, *ALL}


def test_the_part_has_a_head_of_its_own_if_the_whole_model_says_so(tmp_path: Path) -> None:
    whole = save_whole_model("llava", tmp_path, tie_word_embeddings=True)
    assert whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
    prompts = make_prompts()[:1]
    assert serve(tmp_path, prompts) == [generate(whole, prompt) for prompt in prompts]


def test_parts_for_images_are_not_in_memory_nor_listed_as_if_they_lacked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_whole_model("llava", tmp_path)
    with caplog.at_level("INFO"):
        loaded = load_model(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32"))
    assert "of this multimodal checkpoint, the text model is served" in caplog.text
    assert "UNEXPECTED" not in caplog.text
    assert loaded.architecture == "LlamaForCausalLM"
    assert not [name for name, _ in loaded.module.named_modules() if "vision" in name]


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED)
def test_a_part_that_cannot_be_served_is_refused_for_its_own_reason(kind: str, tmp_path: Path) -> None:
    save_whole_model(kind, tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"recurrent state|attention registry|paged|mask of its own"):
        load_model(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32"))


def test_a_multimodal_type_without_a_known_text_part_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    with pytest.raises(UnsupportedModelError, match=r"qwen2_5_vl is a multimodal model .* docs/models\.md"):
        load_model(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32"))


def test_a_quantized_part_is_refused(tmp_path: Path) -> None:
    save_whole_model("llava", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["quantization_config"] = {"quant_method": "quark"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"quantized \(quark\)"):
        load_model(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32"))
