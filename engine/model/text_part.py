"""The text model inside a multimodal checkpoint, loaded by itself: parts for images are neither loaded nor served.

Of each kind that is listed here, the text model was found to compute what the whole model computes of a text.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["TEXT_PART_NAMES", "has_text_part", "text_part_of"]

_WHOLE_MODELS = frozenset(
    (
        *("aria", "aya_vision", "cohere2_vision", "deepseek_ocr2", "deepseek_vl", "deepseek_vl_hybrid"),
        *("ernie4_5_vl_moe", "exaone4_5", "fast_vlm", "fun_asr_nano", "gemma3", "gemma3n", "gemma4", "gemma4_unified"),
        *("glm46v", "glm4v", "glm4v_moe", "glm5_next", "glm_ocr", "glmasr", "glmga", "granite_docling"),
        *("granite_speech", "granite_speech_plus", "hunyuan_vl", "hyperclovax_vision_v2", "idefics2", "idefics3"),
        *(
            "inkling2",
            "inkling_mm_model",
            "internvl",
            "janus",
            "kimi_k25",
            "lfm2_vl",
            "lfm3_vl",
            "lighton_ocr",
            "llama4",
            "llava",
            "llava_next",
        ),
        *("llava_next_video", "llava_onevision", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "minimax_m3_vl"),
        *("mistral3", "mistral4", "mistral_large4", "molmo2", "muse_glimmer", "muse_spark", "nemotron_h_omni", "ovis2"),
        *("paddleocr_vl", "paligemma", "perception_lm", "pp_chart2table", "qianfan_ocr", "qwen2_5_omni"),
        *("qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_asr"),
        *(
            "qwen3_omni_moe",
            "qwen3_omni_moe_thinker",
            "qwen3_vl",
            "qwen3_vl_moe",
            "qwen4_exp",
            "shieldgemma2",
            "smolvlm",
        ),
        *("step3p7", "video_llama_3", "video_llava", "vipllava", "voxtral"),
    )
)
TEXT_PART_NAMES = {
    r"^thinker\.model\.": "model.",
    r"^thinker\.lm_head\.": "lm_head.",
    r"^(?:model\.)?language_model\.model\.": "model.",
    r"^(?:model\.)?language_model\.lm_head\.": "lm_head.",
    r"^model\.(?:language_model|text_model)\.": "model.",
    r"^language_model\.": "model.",
}
"""Pattern of a tensor's name in a multimodal checkpoint -> what takes its place in that of a text model."""


_UNLISTED = {"mistral4": "mistral4.Mistral4ForCausalLM"}
"""Types of language models that transformers knows, but not as such -> family and class."""


def has_text_part(config: "PreTrainedConfig") -> bool:
    """Whether the configuration is that of a multimodal model whose text part is known to be a model of its own."""
    return config.model_type in _WHOLE_MODELS


def text_part_of(config: "PreTrainedConfig") -> "PreTrainedConfig":
    """Returns the text model's configuration; whether it has a head of its own is said by the whole one."""
    text_config = config.get_text_config(decoder=True)
    own = getattr(text_config, "tie_word_embeddings", True)
    text_config.tie_word_embeddings = getattr(config, "tie_word_embeddings", own)
    if text_config.model_type in _UNLISTED:
        from transformers import AutoModelForCausalLM  # not at the top: a kept model needs none of it

        from engine.model.known.same_code import class_named

        AutoModelForCausalLM.register(type(text_config), class_named(_UNLISTED[text_config.model_type]), exist_ok=True)
    return text_config
