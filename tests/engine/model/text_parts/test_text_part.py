"""Of a multimodal checkpoint, the text model is served, and computes what the whole model computes of a text."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from engine.core.config import EngineConfig
from engine.core.errors import UnsupportedModelError
from engine.model import plain_type
from engine.model.loader import load_model
from engine.model.small_copy import randomize
from engine.model.text_part import has_text_part
from tests.engine.model.text_parts.whole_models import change_tensors, save_whole_model
from tests.engine.served_answers import documented_types, generate, make_prompts, serve
from tests.engine.tiny_architectures import tiny_config

FEW = ("llava", "mistral3", "qwen3_5", "qwen2_5_vl", "qwen3_vl_moe", "step3p7")
ALL = (
    *("aria", "aya_vision", "cohere2_vision", "deepseek_vl", "deepseek_vl_hybrid", "exaone4_5", "fast_vlm"),
    *("fun_asr_nano", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "glm46v", "glm4v", "glm4v_moe", "glm_ocr"),
    *("glmasr", "glmga", "granite_docling", "granite_speech", "granite_speech_plus", "hunyuan_vl"),
    *("hyperclovax_vision_v2", "idefics2", "idefics3", "internvl", "janus", "kimi_k25", "lfm2_vl", "lfm3_vl"),
    *("lighton_ocr", "llama4", "llava_next", "llava_next_video", "llava_onevision", "minicpm_ocr", "minicpmv4_6"),
    *(
        "minicpmv4_7",
        "mistral4",
        "nemotron_h_omni",
        "ovis2",
        "paddleocr_vl",
        "perception_lm",
        "pp_chart2table",
        "qianfan_ocr",
    ),
    *("qwen2_5_omni_thinker", "qwen2_audio", "qwen2_vl", "qwen3_5_moe", "qwen3_asr", "qwen3_omni_moe_thinker"),
    *("qwen3_vl", "shieldgemma2", "smolvlm", "video_llama_3", "video_llava", "vipllava", "voxtral"),
    *(
        "deepseek_ocr2",
        "ernie4_5_vl_moe",
        "glm5_next",
        "inkling2",
        "inkling_mm_model",
        "minimax_m3_vl",
        "mistral_large4",
        "molmo2",
        "muse_glimmer",
        "muse_spark",
        "qwen4_exp",
    ),
)
OMNI = {"qwen2_5_omni": "qwen2_5_omni_thinker", "qwen3_omni_moe": "qwen3_omni_moe_thinker"}
"""Models that think and talk -> the part that thinks."""
REFUSED = ("paligemma",)

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' own code, about its default configurations


@pytest.mark.parametrize("kind", [*FEW, *(pytest.param(kind, marks=pytest.mark.slow) for kind in ALL)])
def test_the_text_part_answers_as_the_whole_model_does(kind: str, tmp_path: Path) -> None:
    whole = save_whole_model(kind, tmp_path)
    assert has_text_part(whole.config)
    prompts = make_prompts()
    assert serve(tmp_path, prompts) == [generate(whole, prompt) for prompt in prompts]


@pytest.mark.parametrize("kind", ["qwen3_omni_moe", pytest.param("qwen2_5_omni", marks=pytest.mark.slow)])
def test_of_an_omni_model_the_part_that_thinks_answers(kind: str, tmp_path: Path) -> None:
    thinker = save_whole_model(OMNI[kind], tmp_path)
    change_tensors(tmp_path, lambda name, tensor: (f"thinker.{name}", tensor))
    CONFIG_MAPPING[kind](thinker_config=thinker.config.to_dict()).save_pretrained(tmp_path)
    prompts = make_prompts()
    assert serve(tmp_path, prompts) == [generate(thinker, prompt) for prompt in prompts]


@pytest.mark.slow
def test_a_language_model_that_transformers_does_not_list_as_such_is_a_text_part_too(tmp_path: Path) -> None:
    language_model = tiny_config("mistral4")
    config = CONFIG_MAPPING["mistral3"](text_config=language_model, vision_config=tiny_config("mistral3").vision_config)
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomize(whole.requires_grad_(False))
    whole.save_pretrained(tmp_path)
    prompts = make_prompts()
    assert serve(tmp_path, prompts) == [generate(whole, prompt) for prompt in prompts]


def test_the_documentation_lists_these_kinds() -> None:
    assert documented_types("text parts") == {*FEW, *ALL, *OMNI}


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
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "blip-2"}))
    with pytest.raises(UnsupportedModelError, match=r"blip-2 is a multimodal model .* docs/models\.md"):
        load_model(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32"))


def test_a_quantized_part_is_refused(tmp_path: Path) -> None:
    save_whole_model("llava", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["quantization_config"] = {"quant_method": "hqq"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"quantized \(hqq\)"):
        load_model(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32"))


def test_experts_with_rows_and_columns_exchanged_are_read_as_what_they_are(tmp_path: Path) -> None:
    whole = save_whole_model("qwen3_vl_moe", tmp_path, {"moe_intermediate_size": 24})
    exchanged = []

    def exchange(name: str, tensor: Tensor) -> tuple[str, Tensor]:
        if "experts" not in name:
            return name, tensor
        exchanged.append(name)
        return name, tensor.transpose(1, 2).contiguous()

    change_tensors(tmp_path, exchange)
    assert exchanged
    prompts = make_prompts()
    assert serve(tmp_path, prompts) == [generate(whole, prompt) for prompt in prompts]


def test_a_text_part_that_is_not_its_plain_type_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_whole_model("qwen3_vl_moe", tmp_path)
    monkeypatch.setitem(plain_type._PLAIN_TYPES, "qwen3_vl_moe_text", plain_type._PlainType("qwen3_moe"))
    with pytest.raises(UnsupportedModelError, match="computes something else than qwen3_moe"):
        load_model(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32"))
    monkeypatch.setitem(plain_type._PLAIN_TYPES, "qwen3_vl_moe_text", plain_type._PlainType("qwen3"))
    with pytest.raises(UnsupportedModelError, match="cannot be served as qwen3: RuntimeError"):
        load_model(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32"))
