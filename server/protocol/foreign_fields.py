"""Fields of other servers that change the answer there and are not defined here: ignoring them would mislead."""

from collections.abc import Mapping
from typing import Any

_NOT_SUPPORTED = "is not supported by this server"
_OTHER_SAMPLER = "is not supported: use temperature, top_k, top_p and min_p"
_BANS = "is not supported: use bad_words, or logit_bias"
_ONE_MODEL = "is not supported: one model is served as it is"
_TEMPLATE = "is not supported: use chat_template_kwargs for what the chat template reads"
_TEXT_ONLY = "is not supported: the model reads text only"

FOREIGN_FIELDS: Mapping[str, str] = {
    # llama.cpp, and front ends for it
    "samplers": "is not supported: filters apply in one order",
    "top_n_sigma": _OTHER_SAMPLER,
    "min_keep": _OTHER_SAMPLER,
    "smoothing_factor": _OTHER_SAMPLER,
    "temperature_last": "is not supported: filters apply in one order",
    "repeat_last_n": "is not supported: penalties count all tokens",
    "banned_tokens": _BANS,
    "banned_strings": _BANS,
    "ban_eos_token": "is not supported: use ignore_eos",
    "grammar_string": "is not supported: use structured_outputs.grammar",
    "image_data": _TEXT_ONLY,
    "parse_tool_calls": _NOT_SUPPORTED,
    # transformers, and text-generation-inference
    "penalty_alpha": _OTHER_SAMPLER,
    "epsilon_cutoff": _OTHER_SAMPLER,
    "eta_cutoff": _OTHER_SAMPLER,
    "guidance_scale": _NOT_SUPPORTED,
    "negative_prompt": _NOT_SUPPORTED,
    "suppress_tokens": _BANS,
    "begin_suppress_tokens": _BANS,
    "sequence_bias": _BANS,
    "bad_words_ids": _BANS,
    "forced_bos_token_id": _NOT_SUPPORTED,
    "forced_eos_token_id": _NOT_SUPPORTED,
    "exponential_decay_length_penalty": _NOT_SUPPORTED,
    "max_length": "is not supported: use max_tokens, which does not count the prompt",
    "min_length": "is not supported: use min_tokens, which does not count the prompt",
    "max_time": "is not supported: use deadline_ms",
    "num_return_sequences": "is not supported: use n",
    "stop_strings": "is not supported: use stop",
    "return_full_text": "is not supported: use echo",
    "truncate": "is not supported: use truncate_prompt_tokens",
    "watermark": _NOT_SUPPORTED,
    "adapter_id": _ONE_MODEL,
    "guideline": _NOT_SUPPORTED,
    "tool_prompt": _NOT_SUPPORTED,
    # vLLM and SGLang
    "vllm_xargs": _NOT_SUPPORTED,
    "mm_processor_kwargs": _TEXT_ONLY,
    "repetition_detection": _NOT_SUPPORTED,
    "lora_path": _ONE_MODEL,
    "custom_logit_processor": _NOT_SUPPORTED,
    "stop_regex": "is not supported: use stop",
    "no_stop_trim": "is not supported: use include_stop_str_in_output",
    "separate_reasoning": "is not supported: thinking comes in a field of its own",
    # Ollama
    "options": "is not supported: give the parameters themselves",
    "format": "is not supported: use response_format",
    "think": _TEMPLATE,
    "raw": "is not supported: use /v1/completions",
    "template": "is not supported: use chat_template",
    "context": "is not supported: send the whole prompt",
    "images": _TEXT_ONLY,
    # hosted models
    "enable_thinking": _TEMPLATE,
    "random_seed": "is not supported: use seed",
    "safe_prompt": _NOT_SUPPORTED,
    "plugins": _NOT_SUPPORTED,
    "transforms": "is not supported: use truncate_prompt_tokens",
}

FOREIGN_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "samplers": ([],),
    "top_n_sigma": (-1, 0),
    "min_keep": (0,),
    "smoothing_factor": (0,),
    "temperature_last": (False,),
    "repeat_last_n": (-1,),
    "banned_tokens": ([],),
    "banned_strings": ([],),
    "ban_eos_token": (False,),
    "grammar_string": ("",),
    "image_data": ([],),
    "parse_tool_calls": (True,),
    "penalty_alpha": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "negative_prompt": ("",),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "bad_words_ids": ([],),
    "min_length": (0,),
    "num_return_sequences": (1,),
    "stop_strings": ([],),
    "return_full_text": (False,),
    "truncate": ("NONE",),
    "watermark": (False,),
    "vllm_xargs": ({},),
    "mm_processor_kwargs": ({},),
    "no_stop_trim": (False,),
    "separate_reasoning": (True,),
    "options": ({},),
    "raw": (False,),
    "images": ([],),
    "template": ("",),
    "context": ([],),
    "safe_prompt": (False,),
    "plugins": ([],),
    "transforms": ([],),
}
"""Values that ask for nothing."""
