"""The tokenizer compared with transformers, and texts and files that are hard to handle."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from engine.core.errors import ContextLengthError, ModelError
from engine.text.tokenizer import Tokenizer
from tests.engine.text import sample_tokenizers

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("byte_level")
    return sample_tokenizers.load(
        folder,
        sample_tokenizers.byte_level(),
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        chat_template=sample_tokenizers.CHAT_TEMPLATE,
    )


@pytest.fixture(scope="module")
def sentencepiece_like(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("sp")
    backend = sample_tokenizers.sentencepiece_like()
    return sample_tokenizers.load(folder, backend, bos_token="<s>", eos_token="</s>")


@given(st.text(st.characters(codec="utf-8")))
def test_every_text_comes_back(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text), skip_special_tokens=False) == text


@given(st.text(st.characters(exclude_categories=())))
def test_no_text_raises(byte_level: Tokenizer, sentencepiece_like: Tokenizer, text: str) -> None:
    byte_level.encode(text)
    sentencepiece_like.encode(text)


def test_lone_surrogates_and_null_bytes_are_characters(byte_level: Tokenizer) -> None:
    assert byte_level.decode(byte_level.encode("a\ud800\0\ud83d\ude00")) == "a\ufffd\0😀"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (LocalEntryNotFoundError("Got: ConnectError"), "the hub cannot be reached"),
        (OSError("disk full\nmore"), "can give: disk full"),
        (ValueError(), "can give: ValueError"),
    ],
)
def test_what_the_hub_cannot_give_is_an_error_with_the_reason(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelError, match=f"org/model is .*{words}"):
        Tokenizer.from_pretrained("org/model")


def test_other_threads_run_while_it_works(byte_level: Tokenizer) -> None:
    """A long text in a thread of its own must not hold up the streams of others."""
    text = "".join(f"{number} " for number in range(100_000))
    token_ids = byte_level.encode(text)
    with ThreadPoolExecutor(1) as thread:
        for work in (lambda: byte_level.encode(text), lambda: byte_level.decode(token_ids)):
            num_turns, running = 0, thread.submit(work)
            while not running.done():
                num_turns += 1
                time.sleep(0)
            assert num_turns > 100
            running.result()


class TestLongTexts:
    @pytest.fixture
    def bounded(self, tmp_path: Path) -> Tokenizer:
        tokenizer = sample_tokenizers.load(tmp_path, sample_tokenizers.byte_level())
        tokenizer.max_tokens = 100
        return tokenizer

    @pytest.mark.parametrize("num_chars", [401, 10**6])
    def test_one_with_too_many_tokens_is_refused_and_not_read(
        self, bounded: Tokenizer, monkeypatch: pytest.MonkeyPatch, num_chars: int
    ) -> None:
        read: list[int] = []
        encode = bounded._encode

        def recorded(text: str, add_special_tokens: bool) -> list[int]:
            read.append(len(text))
            return encode(text, add_special_tokens)

        monkeypatch.setattr(bounded, "_encode", recorded)
        with pytest.raises(ContextLengthError):
            bounded.encode("\u4e2d" * num_chars)
        assert read == [400]

    def test_a_shorter_one_is_left_to_request_validation(self, bounded: Tokenizer) -> None:
        assert len(bounded.encode("\u4e2d" * 400)) > 100

    def test_a_long_one_of_few_tokens_is_taken(self, bounded: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bounded, "_encode", lambda text, add_special_tokens: [1] * (len(text) // 50))
        assert len(bounded.encode("x" * 5000)) == 100


@given(st.lists(st.integers(-5, 2**40), max_size=10))
def test_no_id_raises(byte_level: Tokenizer, token_ids: list[int]) -> None:
    byte_level.decode(token_ids)
    assert all(isinstance(byte_level.token_bytes(token_id), bytes) for token_id in token_ids)


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(
    byte_level: Tokenizer, sentencepiece_like: Tokenizer, text: str
) -> None:
    joined = b"".join(map(byte_level.token_bytes, byte_level.encode(text)))
    assert joined == text.encode()
    joined = b"".join(map(sentencepiece_like.token_bytes, sentencepiece_like.encode(text, add_special_tokens=False)))
    assert joined == (" " + text if text else "").replace("▁", " ").encode()


def test_token_texts_keep_spaces_and_show_special_tokens(byte_level: Tokenizer, sentencepiece_like: Tokenizer) -> None:
    assert [byte_level.token_bytes(i) for i in byte_level.encode(" the<|eos|>")] == [b" the", b"<|eos|>"]
    assert sentencepiece_like.token_bytes(sentencepiece_like.encode("the")[0]).startswith(b" ")


def test_it_has_every_token_that_it_writes_and_none_beyond(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("Hello <|eos|> wörld", add_special_tokens=True)
    assert all(byte_level.has_token(each) for each in ids)
    assert not any(byte_level.has_token(each) for each in (-1, byte_level.vocab_size + 10_000, 2**31 - 1, 2**40))


def test_special_tokens_are_known(byte_level: Tokenizer) -> None:
    assert byte_level.special_ids == set(byte_level.encode("<|bos|><|eos|><|im_start|>"))
    assert byte_level.eos_token_id == byte_level.encode("<|eos|>")[0]


def test_bytes_of_a_sentencepiece_vocabulary_are_not_special(sentencepiece_like: Tokenizer) -> None:
    assert len(sentencepiece_like.special_ids) == 3
    assert sentencepiece_like.decode(sentencepiece_like.encode("日")) == "日"


@pytest.mark.parametrize("config", [{"add_bos_token": True}, {"tokenizer_class": "PreTrainedTokenizerFast"}, {}])
def test_encoding_equals_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    backend = sample_tokenizers.sentencepiece_like()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    mine = sample_tokenizers.load(tmp_path, backend, **tokens, **config)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the fox", "  été\n日本 <pad></s>x", sample_tokenizers.TEXT):
        for special in (True, False):
            assert mine.encode(text, special) == theirs.encode(text, add_special_tokens=special)
            assert mine.decode(mine.encode(text), special) == theirs.decode(mine.encode(text), special)
    assert mine.vocab_size == len(theirs)
    assert mine.special_ids == set(theirs.all_special_ids)


def test_added_tokens_of_the_configuration_are_added(tmp_path: Path) -> None:
    backend = sample_tokenizers.byte_level()
    tool = backend.get_vocab_size()
    entries = {str(tool): {"content": "<tool>", "special": False, "normalized": False}}
    pad = {"content": "<pad>"}
    tokenizer = sample_tokenizers.load(tmp_path, backend, added_tokens_decoder=entries, pad_token=pad)
    assert tokenizer.encode("<tool><pad>") == [tool, tool + 1]
    assert tool + 1 in tokenizer.special_ids and tool not in tokenizer.special_ids


def test_prompts_are_never_truncated_or_padded(tmp_path: Path) -> None:
    backend = sample_tokenizers.byte_level()
    plain = backend.encode(sample_tokenizers.TEXT).ids
    backend.enable_truncation(4)
    backend.enable_padding(length=2000)
    assert sample_tokenizers.load(tmp_path, backend).encode(sample_tokenizers.TEXT) == plain


def test_threads_encode_and_decode_at_once(byte_level: Tokenizer) -> None:
    def round_trip(number: int) -> bool:
        text = f"{number} {sample_tokenizers.TEXT}"
        return byte_level.decode(byte_level.encode(text, add_special_tokens=number % 2 == 0)) == text

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(round_trip, range(400)))


@pytest.mark.parametrize("word", ["fox", " fox", "the lazy"])
def test_bad_words_are_found_as_new_words_and_inside_words(byte_level: Tokenizer, word: str) -> None:
    texts = {byte_level.decode(ids) for ids in byte_level.bad_word_ids(word)}
    assert texts == {" " + word.strip(), word.strip()}


def test_bad_words_of_a_stripping_tokenizer_are_found_inside_words(sentencepiece_like: Tokenizer) -> None:
    after_quote = sentencepiece_like.encode("x\nfox", add_special_tokens=False)
    inside = [ids for ids in sentencepiece_like.bad_word_ids("fox") if tuple(after_quote[-len(ids) :]) == ids]
    assert inside


def test_chat_templates_and_the_named_tokens_they_use_are_known(byte_level: Tokenizer) -> None:
    assert byte_level.chat_templates == {"default": sample_tokenizers.CHAT_TEMPLATE}
    assert byte_level.named_tokens.items() >= {"eos_token": "<|eos|>", "bos_token": "<|bos|>"}.items()


def test_chat_template_file_comes_before_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("file")
    tokenizer = sample_tokenizers.load(tmp_path, sample_tokenizers.byte_level(), chat_template="config")
    assert tokenizer.chat_templates == {"default": "file"}


def test_there_may_be_several_chat_templates_or_none(tmp_path: Path, sentencepiece_like: Tokenizer) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = sample_tokenizers.load(tmp_path, sample_tokenizers.byte_level(), chat_template=templates)
    assert tokenizer.chat_templates == {"default": "plain", "tool_use": "tools"}
    assert sentencepiece_like.chat_templates == {}


def test_a_missing_directory_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        Tokenizer.from_pretrained(str(tmp_path / "nowhere"))


def test_a_directory_without_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ModelError, match=r"no tokenizer in .*: copy tokenizer\.json"):
        Tokenizer.from_pretrained(str(tmp_path))


def test_a_vocabulary_that_is_not_understood_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "vocab").write_text("")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ModelError, match="no vocabulary"):
        Tokenizer.from_pretrained(str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_damaged_file_is_a_clear_error(tmp_path: Path, name: str) -> None:
    sample_tokenizers.write_checkpoint(tmp_path, sample_tokenizers.byte_level())
    (tmp_path / name).write_text('{"half')
    with pytest.raises(ModelError, match="damaged"):
        Tokenizer.from_pretrained(str(tmp_path))


def test_a_checkpoint_without_tokenizer_json_goes_through_transformers(tmp_path: Path) -> None:
    backend = sample_tokenizers.byte_level()
    backend.model.save(str(tmp_path))  # vocab.json and merges.txt, as old GPT-2 checkpoints have
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    text = "The quick brown fox"
    assert Tokenizer.from_pretrained(str(tmp_path)).encode(text) == backend.encode(text).ids


def write_sentencepiece(folder: Path) -> Path:
    """Trains a SentencePiece model, and writes a checkpoint that has no other tokenizer; returns the model's path."""
    sentencepiece = pytest.importorskip("sentencepiece")
    (folder / "text.txt").write_text(sample_tokenizers.TEXT * 20)
    arguments = {"model_type": "bpe", "vocab_size": 400, "byte_fallback": True, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "tokenizer"), **arguments
    )
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}')
    return folder / "tokenizer.model"


def test_a_sentencepiece_model_alone_is_a_tokenizer(tmp_path: Path) -> None:
    model = write_sentencepiece(tmp_path)
    tokenizer, text = Tokenizer.from_pretrained(str(tmp_path)), "The quick fox, été, 日本語 😀"
    theirs = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=str(model))
    assert tokenizer.encode(text, add_special_tokens=False) == theirs.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_id == theirs.eos_id()


@pytest.mark.parametrize("missing", ["sentencepiece", "google", "google.protobuf"])
def test_what_a_sentencepiece_model_takes_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def found(package: str) -> bool | None:
        if missing == "google" and package != "sentencepiece":
            raise ModuleNotFoundError("No module named 'google'")
        return None if package == missing else True

    monkeypatch.setattr("engine.text.tokenizer_files.find_spec", found)
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(ModelError, match=r"SentencePiece model \(tokenizer.model\): .* 'twostep\[sentencepiece\]', or"):
        Tokenizer.from_pretrained(str(tmp_path))


def test_other_vocabularies_take_no_sentencepiece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.text.tokenizer_files.find_spec", lambda package: None)
    backend = sample_tokenizers.byte_level()
    backend.model.save(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "spiece.model").write_bytes(b"\n")
    assert Tokenizer.from_pretrained(str(tmp_path)).encode("fox") == backend.encode("fox").ids


def test_tokenizing_and_chat_templates_import_no_torch(tmp_path: Path) -> None:
    backend = sample_tokenizers.byte_level()
    sample_tokenizers.write_checkpoint(tmp_path, backend, chat_template=sample_tokenizers.CHAT_TEMPLATE)
    script = (
        "import sys; from engine.text.chat_template import ChatTemplate, Conversation\n"
        "from engine.text.tokenizer import Tokenizer\n"
        "tokenizer = Tokenizer.from_pretrained(sys.argv[1])\n"
        "template = ChatTemplate(tokenizer.chat_templates['default'])\n"
        "chat = Conversation(messages=[{'role': 'user', 'content': 'hi'}])\n"
        "tokenizer.decode(tokenizer.encode(template.render(chat, tokenizer.named_tokens)))\n"
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, timeout=120).returncode == 0
