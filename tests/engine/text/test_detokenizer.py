"""Incremental detokenization: deltas add up to the full decode, and stop strings are found."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer
from tests.engine.text import sample_tokenizers


class Chunks:
    """A token table in which token i is the i-th chunk, so that a test chooses the tokenization."""

    special_ids: frozenset[int] = frozenset()

    def __init__(self, chunks: Sequence[str | bytes]) -> None:
        self._chunks = [chunk.encode() if isinstance(chunk, str) else chunk for chunk in chunks]

    def token_bytes(self, token_id: int) -> bytes:
        return self._chunks[token_id]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return sample_tokenizers.load(tmp_path_factory.mktemp("byte_level"), sample_tokenizers.byte_level())


@pytest.fixture(scope="module")
def sentencepiece_like(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return sample_tokenizers.load(tmp_path_factory.mktemp("sp"), sample_tokenizers.sentencepiece_like())


def deltas(detokenizer: IncrementalDetokenizer, token_ids: Sequence[int]) -> list[str]:
    """Returns all deltas up to the stop string or the flush at the end."""
    texts = []
    for token_id in token_ids:
        texts.append(detokenizer.append(token_id))
        if detokenizer.stop_string is not None:
            return texts
    return [*texts, detokenizer.flush()]


def output(chunks: Sequence[str], stop: Sequence[str], include: bool = False, min_tokens: int = 0) -> str:
    detokenizer = IncrementalDetokenizer(
        Chunks(chunks), stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens
    )
    return "".join(deltas(detokenizer, range(len(chunks))))


def first_stop(text: str, stop: Sequence[str], after: int = 0) -> tuple[int, int] | None:
    """Returns [start, end) of the stop string that is completed first after position `after`, by exhaustive search."""
    matches = [
        (end, -len(string)) for end in range(after + 1, len(text) + 1) for string in stop if text[:end].endswith(string)
    ]
    return (min(matches)[0] + min(matches)[1], min(matches)[0]) if matches else None


ids_of_any_tokens = st.lists(st.integers(0, 399), max_size=60)
few_letters = st.text("ab\n", min_size=1, max_size=4)
chunks_of_few_letters = st.lists(st.text("ab\n", max_size=4), max_size=20)
stops = st.lists(few_letters, min_size=1, max_size=4)


@given(ids_of_any_tokens, st.booleans())
def test_concatenated_deltas_are_the_full_decode(byte_level: Tokenizer, token_ids: list[int], skip: bool) -> None:
    detokenizer = IncrementalDetokenizer(byte_level, skip_special_tokens=skip)
    assert "".join(deltas(detokenizer, token_ids)) == byte_level.decode(token_ids, skip_special_tokens=skip)


@given(st.binary(max_size=12))
def test_broken_bytes_are_shown_as_the_full_decode_shows_them(byte_level: Tokenizer, data: bytes) -> None:
    id_of = {byte_level.token_bytes(token_id): token_id for token_id in range(byte_level.vocab_size)}
    token_ids = [id_of[data[i : i + 1]] for i in range(len(data))]
    assert "".join(deltas(IncrementalDetokenizer(byte_level), token_ids)) == byte_level.decode(token_ids)


@given(st.text(max_size=40), st.text(min_size=1, max_size=40))
def test_text_of_a_stripping_decoder_continues_the_prompt(
    sentencepiece_like: Tokenizer, prompt: str, text: str
) -> None:
    prompt_ids = sentencepiece_like.encode("a" + prompt + ".", add_special_tokens=False)
    token_ids = sentencepiece_like.encode(text, add_special_tokens=False)
    continued = "".join(deltas(IncrementalDetokenizer(sentencepiece_like), token_ids))
    assert sentencepiece_like.decode([*prompt_ids, *token_ids]) == sentencepiece_like.decode(prompt_ids) + continued


@given(st.text(max_size=40))
def test_no_delta_of_a_valid_text_shows_half_a_character(byte_level: Tokenizer, text: str) -> None:
    texts = deltas(IncrementalDetokenizer(byte_level), byte_level.encode(text))
    assert sum(delta.count("\ufffd") for delta in texts) == text.count("\ufffd")


@given(st.binary(max_size=30))
def test_only_an_unfinished_character_is_held_back(data: bytes) -> None:
    detokenizer = IncrementalDetokenizer(Chunks([data[i : i + 1] for i in range(len(data))]))
    delivered = ""
    for index in range(len(data)):
        delivered += detokenizer.append(index)
        whole = data[: index + 1].decode(errors="replace")
        assert whole.startswith(delivered) and whole[len(delivered) :] in ("", "\ufffd", "\ufffd" * 2)


def test_bytes_that_never_become_a_character_flow_on() -> None:
    detokenizer = IncrementalDetokenizer(Chunks([b"\xff"]))
    assert [detokenizer.append(0) for _ in range(5)] == ["\ufffd"] * 5


def test_a_character_cut_off_at_the_end_is_one_replacement_character() -> None:
    detokenizer = IncrementalDetokenizer(Chunks([b"ok \xf0\x9f", b"\x98"]))
    assert deltas(detokenizer, [0, 1]) == ["ok ", "", "\ufffd"]


@given(chunks_of_few_letters, stops, st.booleans())
def test_output_ends_at_the_first_stop_string_whatever_the_tokenization(
    chunks: list[str], stop: list[str], include: bool
) -> None:
    text = "".join(chunks)
    found = first_stop(text, stop)
    expected = text if found is None else text[: found[include]]
    assert output(chunks, stop, include) == output(list(text), stop, include) == expected


@given(chunks_of_few_letters, stops)
def test_stop_string_is_named(chunks: list[str], stop: list[str]) -> None:
    detokenizer = IncrementalDetokenizer(Chunks(chunks), stop=stop)
    deltas(detokenizer, range(len(chunks)))
    found = first_stop("".join(chunks), stop)
    assert detokenizer.stop_string == (found and "".join(chunks)[slice(*found)])


@given(chunks_of_few_letters, stops)
def test_text_is_held_back_only_while_it_may_become_a_stop_string(chunks: list[str], stop: list[str]) -> None:
    detokenizer = IncrementalDetokenizer(Chunks(chunks), stop=stop)
    text = delivered = ""
    for index, chunk in enumerate(chunks):
        text, delivered = text + chunk, delivered + detokenizer.append(index)
        if detokenizer.stop_string is not None:
            break
        ends = [k for string in stop for k in range(len(string)) if text.endswith(string[:k])]
        assert delivered == text[: len(text) - max(ends)]


@given(chunks_of_few_letters, stops, st.integers(0, 8))
def test_no_stop_string_ends_the_text_before_min_tokens(chunks: list[str], stop: list[str], min_tokens: int) -> None:
    text = "".join(chunks)
    found = first_stop(text, stop, after=len("".join(chunks[: max(min_tokens - 1, 0)])))
    assert output(chunks, stop, min_tokens=min_tokens) == (text if found is None else text[: found[0]])


def test_a_stop_string_with_a_character_in_two_tokens_is_found() -> None:
    detokenizer = IncrementalDetokenizer(Chunks([b"a\xf0\x9f", b"\x98\x80b"]), stop=["😀"])
    assert (deltas(detokenizer, [0, 1]), detokenizer.stop_string) == (["a", ""], "😀")


def test_a_stop_string_completed_only_by_the_flush_cuts_too() -> None:
    detokenizer = IncrementalDetokenizer(Chunks([b"ok\xf0\x9f"]), stop=["\ufffd"])
    assert (deltas(detokenizer, [0]), detokenizer.stop_string) == (["ok", ""], "\ufffd")


def test_special_tokens_are_left_out_or_shown(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("fox<|eos|> dog")
    for skip, expected in ((True, "fox dog"), (False, "fox<|eos|> dog")):
        detokenizer = IncrementalDetokenizer(byte_level, skip_special_tokens=skip)
        assert "".join(deltas(detokenizer, token_ids)) == expected


def test_special_tokens_that_are_marks_can_be_shown_alone(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("a<|im_start|>b<|eos|>", add_special_tokens=False)
    shown = byte_level.encode("<|im_start|>", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(byte_level, shown_token_ids=shown)
    assert "".join(deltas(detokenizer, token_ids)) == "a<|im_start|>b"


def test_stop_strings_apply_to_special_tokens_that_are_shown(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level, stop=["<|eos|>"], skip_special_tokens=False)
    assert "".join(deltas(detokenizer, byte_level.encode("fox<|eos|> dog"))) == "fox"
