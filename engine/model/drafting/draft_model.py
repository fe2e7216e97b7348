"""A draft model from a checkpoint of its own: a smaller model of the same vocabulary, with keys and values of its own
in the same blocks (speculative decoding: Leviathan et al. 2023), or a head, which reads the model's hidden states."""

import msgspec

from engine.core.config import EngineConfig
from engine.core.errors import ConfigError
from engine.model.drafting.eagle_head import find_head_config, load_eagle_head
from engine.model.loader import load_model
from engine.runner.loaded_model import DraftModel, LoadedModel
from engine.text.tokenizer import Tokenizer

_SAMPLE = (
    'def f(x):\n\treturn {"key": [1, 23, 456.789e-10]}  # comment\r\n\n    if a != b: "Don\'t", she\'d said... '
    "HTML &amp; <b>über</b> naïve œuvre, Ελληνικά, русский, العربية, हिन्दी, 中文字符, 日本語, 한국어 \U0001f600\u200d "
)


def is_head_for(config: EngineConfig) -> bool:
    """Whether the draft model is a head."""
    return config.draft_model is not None and find_head_config(config.draft_model) is not None


def load_draft_model(config: EngineConfig, target: LoadedModel, max_model_len: int) -> DraftModel:
    """Loads `config.draft_model` to draft for `target`, whose contexts have at most `max_model_len` tokens.

    Raises ConfigError if it cannot draft for that model, and what `load_model` raises.
    """
    assert config.draft_model is not None
    if (head_config := find_head_config(config.draft_model)) is not None:
        return load_eagle_head(config, target, head_config)
    settings = {"model": config.draft_model, "revision": None, "draft_model": None, "draft_quantization": "none"}
    settings |= {"gguf_activations": "float32"}  # of the model's own weights
    own = {"quantization": config.draft_quantization, "dtype": str(target.dtype).removeprefix("torch.")}
    model = load_model(msgspec.structs.replace(config, **settings, **own, device=target.device.type))
    if model.states:
        raise _unfit(config, "has recurrent states, which cannot go back to before a draft token that was wrong")
    if model.vocab_size != target.vocab_size:
        raise _unfit(config, f"has a vocabulary of {model.vocab_size:,} tokens, not the model's {target.vocab_size:,}")
    if model.max_model_len < max_model_len:
        reason = f"reads contexts of {model.max_model_len:,} tokens, fewer than {max_model_len:,}"
        raise _unfit(config, reason, f"Lower --max-model-len to {model.max_model_len}, or take another one.")
    _check_tokenizer(config)
    return DraftModel(model.module, model.size, model.layers)


def _check_tokenizer(config: EngineConfig) -> None:
    """Raises ConfigError unless both tokenizers have the same tokens, and make the same of a text."""
    assert config.draft_model is not None
    trust = config.trust_remote_code
    own = Tokenizer.from_pretrained(config.model, revision=config.revision, trust_remote_code=trust)
    other = Tokenizer.from_pretrained(config.draft_model, trust_remote_code=trust)
    differing = own.vocabulary.items() ^ other.vocabulary.items()
    if differing:
        token, token_id = min(differing, key=lambda each: (each[1], each[0]))
        raise _unfit(config, f"has another vocabulary than the model: they differ in token {token_id}, {token!a:.40}")
    if own.encode(_SAMPLE) != other.encode(_SAMPLE):
        raise _unfit(config, "has the model's vocabulary, but its tokenizer cuts texts into other tokens")


def _unfit(config: EngineConfig, reason: str, advice: str = "Take one of the model's own family.") -> ConfigError:
    return ConfigError(f"--draft-model {config.draft_model} {reason}. {advice}")
