"""Fields that requests have beside those an endpoint defines: some have no effect on generation, some are refused, and
some are typos."""

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from itertools import chain
from typing import Any

from server.protocol.foreign_fields import FOREIGN_FIELDS, FOREIGN_NEUTRAL

MAX_LOOKED_AT, MAX_NAME_LENGTH = 8, 64  # names compared to find typos: a fraction of a millisecond each
_MIN_SLIP_LENGTH = 4  # letters: shorter names that vendors define are too often one letter off

# Bookkeeping of OpenAI, Anthropic, Ollama and their clients: no effect on the tokens.
WITHOUT_EFFECT = frozenset(
    {
        *("user", "metadata", "client_metadata", "store", "service_tier", "safety_identifier"),
        *("cache_control", "speed", "inference_geo", "keep_alive"),
        "background_options",  # of answers in the background, which are refused
    }
)

# These would change the answer, so ignoring them would be a lie.
_NOT_SUPPORTED = "is not supported by this server"
_OTHER_SAMPLER = "is not supported: use temperature, top_k, top_p and min_p"
REFUSED_EVERYWHERE: Mapping[str, str] = {
    **FOREIGN_FIELDS,
    "guided_json": "is not supported: use structured_outputs.json",
    "guided_regex": "is not supported: use structured_outputs.regex",
    "guided_choice": "is not supported: use structured_outputs.choice",
    "guided_grammar": "is not supported: use structured_outputs.grammar",
    "grammar": "is not supported: use structured_outputs.grammar",
    "guided_whitespace_pattern": _NOT_SUPPORTED,
    "regex": "is not supported: use structured_outputs.regex",
    "ebnf": "is not supported: use structured_outputs.grammar",
    "json_schema": "is not supported: use structured_outputs.json",
    "use_beam_search": _NOT_SUPPORTED,
    "length_penalty": _NOT_SUPPORTED,
    "num_beams": _NOT_SUPPORTED,
    "early_stopping": _NOT_SUPPORTED,
    "do_sample": "is not supported: use temperature, which is 0 for the likeliest tokens",
    "no_repeat_ngram_size": "is not supported: use repetition_penalty",
    "logits_processors": _NOT_SUPPORTED,
    "prompt_embeds": "is not supported: send the prompt as text or token ids",
    "include_reasoning": "is not supported: thinking comes in a field of its own, which may be ignored",
    "spaces_between_special_tokens": _NOT_SUPPORTED,
    "max_new_tokens": "is not supported: use max_tokens",
    "n_predict": "is not supported: use max_tokens",
    "num_predict": "is not supported: use max_tokens",
    "min_new_tokens": "is not supported: use min_tokens",
    "repeat_penalty": "is not supported: use repetition_penalty",
    "typical_p": _OTHER_SAMPLER,
    "tfs_z": _OTHER_SAMPLER,
    "top_a": _OTHER_SAMPLER,
    "mirostat": _OTHER_SAMPLER,
    "dynatemp_range": _OTHER_SAMPLER,
    "dry_multiplier": _OTHER_SAMPLER,
    "xtc_probability": _OTHER_SAMPLER,
    "lora": "is not supported: one model is served as it is",
    "lora_request": "is not supported: one model is served as it is",
}
COMPLETION_REFUSALS: Mapping[str, str] = {
    **REFUSED_EVERYWHERE,
    "suffix": "is not supported: the model completes to the right only",
    "max_completion_tokens": "belongs to chat completions; use max_tokens",
    "top_logprobs": "belongs to chat completions; use logprobs",
}
CHAT_REFUSALS: Mapping[str, str] = {
    **REFUSED_EVERYWHERE,
    "functions": "is not supported: it is the older form of tools; use tools",
    "function_call": "is not supported: it is the older form of tool_choice; use that",
    "modalities": "is not supported: the model writes text only",
    "audio": "is not supported: the model writes text only",
    "verbosity": _NOT_SUPPORTED,
    "web_search_options": _NOT_SUPPORTED,
    "moderation": _NOT_SUPPORTED,
    "prompt": "belongs to /v1/completions; use messages",
    "suffix": "belongs to /v1/completions",
    "best_of": "belongs to /v1/completions; use n",
}
_STORES_NOTHING = "is not supported: nothing is stored; send the whole conversation as input"
RESPONSES_REFUSALS: Mapping[str, str] = {
    **REFUSED_EVERYWHERE,
    "previous_response_id": _STORES_NOTHING,
    "conversation": _STORES_NOTHING,
    "prompt": "is not supported: there are no stored prompts; use instructions and input",
    "max_tool_calls": "is not supported: it bounds built-in tools, of which there are none",
    "context_management": _NOT_SUPPORTED,
    "moderation": _NOT_SUPPORTED,
    "messages": "belongs to chat completions; use input",
    "max_tokens": "belongs to chat completions; use max_output_tokens",
    "max_completion_tokens": "belongs to chat completions; use max_output_tokens",
    "response_format": "belongs to chat completions; use text.format",
    "structured_outputs": "belongs to chat completions; use text.format",
    "n": "belongs to chat completions: there is one answer",
    "logprobs": 'belongs to chat completions; use include: ["message.output_text.logprobs"]',
}
ANTHROPIC_REFUSALS: Mapping[str, str] = {
    **REFUSED_EVERYWHERE,
    "stop": "belongs to chat completions; use stop_sequences",
    "max_completion_tokens": "belongs to chat completions; use max_tokens",
    "response_format": "belongs to chat completions; use output_config.format",
    "structured_outputs": "belongs to chat completions; use output_config.format",
    "output_format": "is an older name; use output_config.format",
    "thinking_token_budget": "belongs to chat completions; use thinking.budget_tokens",
    "n": "belongs to chat completions: there is one answer",
    "container": _NOT_SUPPORTED,
    "mcp_servers": _NOT_SUPPORTED,
    "compaction": _NOT_SUPPORTED,
    "fallbacks": _NOT_SUPPORTED,
    "thread": "is not supported: nothing is stored; send the whole conversation as messages",
}
EMBEDDING_REFUSALS: Mapping[str, str] = {
    "normalize": "is not supported: vectors have length one",
    "embed_dtype": "is not supported: numbers are float32",
    "endianness": "is not supported: base64 is of little-endian numbers",
}

# Values that ask for nothing, which some clients always send; `elsewhere` adds neutral defaults of all endpoints.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **FOREIGN_NEUTRAL,
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "truncation": ("disabled",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"], []),
    "verbosity": ("medium",),
    "normalize": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("little", "native"),
    "mcp_servers": ([],),
    "context_management": ([], {}),
    "do_sample": (True,),
    "early_stopping": (False,),
    "no_repeat_ngram_size": (0,),
    "logits_processors": ([],),
    "include_reasoning": (True,),
    "spaces_between_special_tokens": (True,),
    "dynatemp_range": (0,),
    "best_of": (1,),
    "n": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "num_beams": (1,),
    "repeat_penalty": (1,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "lora": ([],),
}


def find_unknown(extra: Collection[str], refusals: Mapping[str, str]) -> list[str]:
    """Returns the fields that are neither refused nor known to have no effect."""
    return [name for name in extra if name not in refusals and name not in WITHOUT_EFFECT]


def find_typo(unknown: Sequence[str], known: Collection[str]) -> tuple[str, str] | None:
    """Returns the first unknown field whose name is nearly a known one, and the known one. Only a few fields are looked
    at: those that vendors define are few, and not alike."""
    for name in unknown[:MAX_LOOKED_AT]:
        if len(name) <= MAX_NAME_LENGTH and (meant := _closest_name(name, known)):
            return name, meant
    return None


def _closest_name(name: str, known: Collection[str]) -> str | None:
    """Returns the known name that differs by how words are joined, by a slip, or, if it is long, by little."""
    alike = (each for each in known if _joined(name) == _joined(each) or _is_slip(name, each))
    return next(chain(alike, get_close_matches(name, known, n=1, cutoff=0.85)), None)


def _joined(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _is_slip(name: str, known: str) -> bool:
    """Whether the names differ by one substituted letter or two transposed neighbours."""
    if len(name) != len(known) or len(name) < _MIN_SLIP_LENGTH:
        return False
    wrong = [index for index, (one, other) in enumerate(zip(name, known, strict=True)) if one != other]
    if len(wrong) == 1:
        return True
    first, last = wrong[0], wrong[-1]
    return len(wrong) == 2 and last == first + 1 and name[first] == known[last] and name[last] == known[first]
