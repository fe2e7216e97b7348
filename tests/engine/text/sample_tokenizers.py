"""Small byte-level and SentencePiece-like tokenizers, trained within a second."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from engine.text.tokenizer import Tokenizer

TEXT = "The quick brown fox, the lazy dog: été à Zürich, 日本語 and 😀😀👍🏽. def f(x):\n    return x + 1\n" * 3
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"


def byte_level() -> tokenizers.Tokenizer:
    """Trains a tokenizer like those of GPT-2, Llama 3 and Qwen: every byte has a token, merges cross character
    borders."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|bos|>", "<|eos|>", "<|im_start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([TEXT], trainer)
    return backend


def sentencepiece_like() -> tokenizers.Tokenizer:
    """Trains a tokenizer like those of Llama 2 and Mistral: U+2581 for spaces, a leading one added and stripped, bytes
    for unknown characters."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=tokens, limit_alphabet=40, show_progress=False)
    backend.train_from_iterator([TEXT.replace(" ", "▁")], trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # the bytes are ordinary tokens
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def write_checkpoint(folder: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    """Writes the tokenizer files of a checkpoint directory."""
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def load(folder: Path, backend: tokenizers.Tokenizer, **config: Any) -> Tokenizer:
    return Tokenizer.from_pretrained(str(write_checkpoint(folder, backend, **config)))
