"""Tokenizers in GGUF files cut texts as those do that they were made of."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from engine.checkpoint.gguf.header import read_gguf
from engine.checkpoint.gguf.tokenizer import eos_token_ids_of, tokenizer_config_of, tokenizer_of
from engine.core.errors import ModelError, UnsupportedModelError
from tests.engine.checkpoint.gguf_files import finish
from tests.engine.text.sample_tokenizers import TEXT

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SAMPLES = [
    TEXT,
    "I'll say: it's 12345,  'twas  \t\n\n\r\n THEY'RE été e\u0301 <|im_start|>user\n<|im_end|>",
    "   leading, trailing   ",
    "",
]
TEXTS = st.text(max_size=30) | st.text("aeT't \n0159.,é日😀", max_size=40)

Encode = Callable[[str], list[int]]


def trained(pre_tokenizer: Any) -> dict[str, Any]:
    """Returns vocabulary and merges of a byte-level BPE."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    backend.train_from_iterator([*SAMPLES, "12 123 1234 they're"], trainer)
    return json.loads(backend.to_str())["model"]


def gguf_of(path: Path, write: Callable[[gguf.GGUFWriter], None]) -> Any:
    writer = gguf.GGUFWriter(path, "llama")
    write(writer)
    finish(writer)
    return read_gguf(path)


def encoder_of(file: Any) -> Encode:
    backend = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_of(file)))
    return lambda text: backend.encode(text).ids


def byte_level(path: Path, model: dict[str, Any], pre: str, **flags: bool) -> Any:
    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(sorted(model["vocab"], key=model["vocab"].__getitem__))
        writer.add_token_types([3] * len(SPECIAL) + [1] * (len(model["vocab"]) - len(SPECIAL)))
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)
        writer.add_chat_template("{{ messages }}")
        for name, flag in flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", flag)

    return gguf_of(path, write)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Encode, Encode]:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    split = pre_tokenizers.Split(tokenizers.Regex(PRETOKENIZE_REGEX), "isolated")
    model = trained(pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)]))
    theirs = transformers.Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    theirs.add_special_tokens({"additional_special_tokens": SPECIAL})
    path = tmp_path_factory.mktemp("qwen2") / "model.gguf"
    return encoder_of(byte_level(path, model, "qwen2")), lambda text: theirs.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Encode, Encode]:
    model = trained(pre_tokenizers.ByteLevel(False))
    theirs = transformers.GPT2Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    theirs.add_special_tokens({"additional_special_tokens": SPECIAL})
    path = tmp_path_factory.mktemp("gpt2") / "model.gguf"
    return encoder_of(byte_level(path, model, "gpt-2")), lambda text: theirs.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module", params=[True, False], ids=["with a prefix", "without"])
def sentencepiece_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Encode, Encode]:
    trained_model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SAMPLES * 3),
        model_writer=trained_model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        add_dummy_prefix=request.param,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["<|im_start|>"],
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_proto=trained_model.getvalue())
    types = ((theirs.is_unknown, 2), (theirs.is_control, 3), (theirs.is_byte, 6))

    def write(writer: gguf.GGUFWriter) -> None:
        ids = range(theirs.vocab_size())
        writer.add_tokenizer_model("llama")
        writer.add_token_list([theirs.id_to_piece(each) for each in ids])
        writer.add_token_scores([theirs.get_score(each) for each in ids])
        kinds = [next((kind for is_kind, kind in types if is_kind(each)), 1) for each in ids]
        kinds[theirs.piece_to_id("<|im_start|>")] = 4
        writer.add_token_types(kinds)
        writer.add_add_bos_token(False)
        writer.add_add_space_prefix(request.param)

    return encoder_of(gguf_of(tmp_path_factory.mktemp("spm") / "model.gguf", write)), theirs.encode


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_samples_have_the_same_tokens(kind: str, text: str, request: pytest.FixtureRequest) -> None:
    ours, theirs = request.getfixturevalue(kind)
    assert ours(text) == theirs(text)


def test_samples_have_the_tokens_of_sentencepiece(sentencepiece_model: tuple[Encode, Encode]) -> None:
    ours, theirs = sentencepiece_model
    for text in SAMPLES:
        text = text.replace("<|im_start|>", "")  # after which llama.cpp puts a space, as transformers did
        assert ours(text) == theirs(text)


@given(text=TEXTS)
def test_texts_have_the_tokens_of_qwen2(qwen2: tuple[Encode, Encode], text: str) -> None:
    ours, theirs = qwen2
    assert ours(text) == theirs(text)


@given(text=TEXTS)
def test_texts_have_the_tokens_of_gpt2(gpt2: tuple[Encode, Encode], text: str) -> None:
    ours, theirs = gpt2
    assert ours(text) == theirs(text)


@given(text=TEXTS.filter(lambda text: "▁" not in text and "<" not in text and "\0" not in text))
def test_texts_have_the_tokens_of_sentencepiece(sentencepiece_model: tuple[Encode, Encode], text: str) -> None:
    ours, theirs = sentencepiece_model
    assert ours(text) == theirs(text)


def test_flags_say_which_tokens_are_added(tmp_path: Path) -> None:
    model = trained(pre_tokenizers.ByteLevel(False))
    plain = encoder_of(byte_level(tmp_path / "a.gguf", model, "gpt-2"))("a")
    assert encoder_of(byte_level(tmp_path / "b.gguf", model, "gpt-2", add_bos_token=True))("a") == [0, *plain]
    assert encoder_of(byte_level(tmp_path / "c.gguf", model, "llama-bpe"))("a") == [0, *plain]
    assert encoder_of(byte_level(tmp_path / "d.gguf", model, "llama-bpe", add_bos_token=False))("a") == plain
    assert encoder_of(byte_level(tmp_path / "e.gguf", model, "gpt-2", add_eos_token=True))("a") == [*plain, 0]


def test_names_of_tokens_and_the_chat_template_are_kept(tmp_path: Path) -> None:
    file = byte_level(tmp_path / "model.gguf", trained(pre_tokenizers.ByteLevel(False)), "gpt-2")
    assert tokenizer_config_of(file) == {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "chat_template": [{"name": "default", "template": "{{ messages }}"}],
    }
    assert eos_token_ids_of(file) == [0, 2], "the end of a turn ends a text, too"


def test_unknown_kinds_are_refused_by_name(tmp_path: Path) -> None:
    file = byte_level(tmp_path / "model.gguf", trained(pre_tokenizers.ByteLevel(False)), "viking")
    with pytest.raises(UnsupportedModelError, match="'viking'"):
        tokenizer_of(file)
    with pytest.raises(UnsupportedModelError, match="'rwkv'"):
        tokenizer_of(gguf_of(tmp_path / "b.gguf", lambda writer: _with_model(writer, "rwkv")))
    with pytest.raises(ModelError, match="no scores"):
        tokenizer_of(gguf_of(tmp_path / "c.gguf", lambda writer: _with_model(writer, "llama")))


def _with_model(writer: gguf.GGUFWriter, model: str) -> None:
    writer.add_tokenizer_model(model)
    writer.add_token_list(["a", "b"])
