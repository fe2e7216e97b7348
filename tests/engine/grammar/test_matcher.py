"""The state of one request's grammar: the tokens it allows after an output, and those it forces."""

import sys

import pytest
from llguidance import LLTokenizer

from engine.grammar.compiler import (
    CACHE_SIZE,
    GrammarCompiler,
    _Vocabulary,
    make_tokenizer,
)
from engine.grammar.lark import JsonSchema, Literal, Regex, choice, to_lark
from engine.grammar.matcher import Matcher
from tests.engine.grammar.matchers import ALPHABET, DIGITS, EOS, TEXTS, allowed, compiler, ids, text_of, tokens_in


def test_eos_is_allowed_exactly_where_the_text_may_end() -> None:
    matcher = compiler()(to_lark(Regex("1+2?")))
    masks = {text: allowed(matcher, ids(text)) for text in ("", "1", "11", "112")}
    assert masks == {"": ids("1"), "1": [EOS, *ids("12")], "11": [EOS, *ids("12")], "112": [EOS]}


def test_every_eos_token_is_allowed_where_one_is() -> None:
    matcher = GrammarCompiler(make_tokenizer(TEXTS, [EOS, 49]))(to_lark(Literal("1")))
    assert (allowed(matcher, []), allowed(matcher, ids("1"))) == (ids("1"), [EOS, 49])


def test_tokens_without_text_never_come() -> None:
    assert allowed(compiler()(to_lark(Regex("(?s:.*)"))), []) == list(range(49))


def test_a_tokens_whole_text_must_fit() -> None:
    tokens = [b"", b"a", b"ab", b"abc", b"b", b"bc", b"\xc3", b"\xa9"]
    matcher = compiler(tokens)(to_lark(choice(["ab", "é"])))
    assert allowed(matcher, []) == [1, 2, 6]
    assert allowed(matcher, [6]) == [7] and allowed(matcher, [6, 7]) == [EOS]


def test_the_state_is_a_function_of_the_tokens() -> None:
    compile, output, grammar = compiler(), ids("((12)(()3))"), 'start: "(" (start | /[0-9]/)* ")"'
    stepwise = compile(grammar)
    for length in range(len(output) + 1):
        assert allowed(stepwise, output[:length]) == allowed(compile(grammar), output[:length])


def test_masks_after_a_draft_are_those_after_generated_tokens() -> None:
    compile, text, grammar = compiler(), ids("((12)(()3))"), 'start: "(" (start | /[0-9]/)* ")"'
    matcher = compile(grammar)
    for length in range(len(text) + 1):
        masks = matcher.allowed_tokens(text[:length], text[length:])
        expected = [allowed(compile(grammar), text[:end]) for end in range(length, len(text) + 1)]
        assert [tokens_in(mask) for mask in masks] == expected
        assert allowed(matcher, text[:length]) == expected[0]


@pytest.mark.parametrize(
    ("grammar", "output", "forced"),
    [
        (Literal("(123)"), "", "(123)"),
        (Literal("(123)"), "(1", "23)"),
        (Literal("(123)"), "(123)", ""),  # may end, and must
        (Regex("11?"), "", "1"),  # then it may end
        (Regex("[12]3"), "", ""),
        (Regex("[12]3"), "1", "3"),
        (choice(["123A", "123B"]), "", "123"),
        (Literal("0" * 40), "", "0" * 20),
        (Regex("1[ 2]"), "", "1 "),
        (Regex("1[ 23]"), "", "1"),
        (Regex("1 ?"), "", "1"),
        (Literal("1"), "A", ""),  # was not followed
    ],
)
def test_forced_text_is_known_up_to_the_first_choice(grammar: Literal | Regex, output: str, forced: str) -> None:
    matcher = compiler()(to_lark(grammar))
    before = allowed(compiler()(to_lark(grammar)), ids(output))
    assert matcher.forced_tokens(ids(output), 20) == ids(forced)
    assert matcher.forced_tokens(ids(output), 2) == ids(forced[:2])
    assert allowed(matcher, ids(output)) == before


@pytest.mark.parametrize(
    ("texts", "spelt"),
    [
        ((b"a", b"b", b"ab"), (b"ab", b"ab")),
        ((b"a", b"b", b"aba", b"abx"), (b"aba", b"b")),  # another text's token is none
        ((b"a", b"b", b"abab1", b"abab2"), (b"a", b"b", b"a", b"b")),  # a token that goes on does not choose
        ((b"a", b"b", b"ba", *(b"abab%d" % i for i in range(40))), (b"a", b"ba", b"b")),
    ],
)
def test_of_several_spellings_the_longest_is_taken(texts: tuple[bytes, ...], spelt: tuple[bytes, ...]) -> None:
    tokens = [b"", *texts, *(bytes([digit]) for digit in b"0123456789")]
    matcher = compiler(tokens)(to_lark(Regex("abab[0-9]+")))
    assert tuple(tokens[token_id] for token_id in matcher.forced_tokens([], 9)) == spelt


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([""], "A, B: C;A, B: C;A, B: C;"),
        (["", "A,"], " B: C;A, B: C;A, B: C;"),
        (["", "A, "], "B: C;A, B: C;A, B: C;"),
        (["", "A,B"], ": C;A,B: C;A,B: C;"),
        (["", "A,B:C"], ";A,B: C;A,B: C;"),  # each call learns from one wrong expectation
        (["", "A,B:", "A,B:C"], ";A,B:C;A,B:C;"),
        (["", "A,B", "A,B: C;", "A,B: C;A, B"], ": C;A, B: C;"),
        (["A,B"], ": C;A, B: C;A, B: C;"),  # no expectation was wrong
    ],
)
def test_spaces_are_expected_as_they_were_before(outputs: list[str], expected: str) -> None:
    matcher = compiler()(to_lark(Regex("(A, ?B: ?C;){3}")))
    *_, last = [matcher.forced_tokens(ids(text), 64) for text in outputs]
    assert text_of(last) == expected


def test_the_look_ahead_is_bounded() -> None:
    matcher = compiler()(to_lark(Literal("0123456789" * 20)))
    assert text_of(matcher.forced_tokens([], 99)) == ("0123456789" * 20)[:64]
    assert text_of(matcher.forced_tokens(ids("012"), 99)) == ("0123456789" * 20)[3:64]
    assert text_of(matcher.forced_tokens(ids("0123456789" * 7), 99)) == ("0123456789" * 20)[70:134]


def test_drafts_have_no_masks_when_a_tenth_of_the_time_is_spent() -> None:
    matcher, seconds = compiler()(DIGITS), iter([0.0, 0.01, 0.01, 0.021, 0.021, 0.03])
    slow = Matcher(matcher._matcher, lambda: (matcher._matcher, 0.0), ALPHABET, clock=seconds.__next__)
    assert [len(slow.allowed_tokens([], ids("12"))) for _ in range(3)] == [3, 3, 1]


def test_of_two_tokens_for_a_character_the_later_is_drafted() -> None:
    """Vocabularies of SentencePiece begin with a token for each byte, which models hardly use."""
    tokens = [b"", b"{", b"a", b"a", b"{", b"aa"]
    matcher = compiler(tokens)(to_lark(Literal("{aa{a")))
    assert matcher.forced_tokens([], 9) == [4, 5, 4, 3]
    assert matcher.forced_tokens([1], 9) == [5, 4, 3]


def test_a_token_that_only_seems_to_be_one_character_is_not_drafted() -> None:
    """llguidance takes texts that begin with byte 255 for special tokens, and decodes them without that byte."""
    tokens = [b"", b"a", b"\xffa", b"\xffb"]
    assert compiler(tokens)(to_lark(Literal("aa"))).forced_tokens([], 9) == [1, 1]
    assert compiler(tokens)(to_lark(Literal("ab"))).forced_tokens([], 9) == [1]


def test_where_other_characters_may_come_there_is_a_choice() -> None:
    tokens = [b"", b"a", b"b", b"\xc3", b"\xa9", b"\xc3\xa9"]
    matcher = compiler(tokens)(to_lark(Regex("b[a\u00e9]b")))
    assert matcher.forced_tokens([], 9) == [2]
    assert matcher.forced_tokens([2], 9) == []
    assert matcher.forced_tokens([2, 5], 9) == [2]


def test_text_beyond_ascii_is_not_drafted() -> None:
    tokens = [b"", b"a", b"b", b"\xc3", b"\xa9", b"ab\xc3\xa9"]
    matcher = compiler(tokens)(to_lark(Literal("ab\u00e9ab")))
    assert matcher.forced_tokens([], 9) == [1, 2]
    assert matcher.forced_tokens([5], 9) == [1, 2]
    assert matcher.forced_tokens([5, 1], 9) == [2]


@pytest.mark.parametrize("draft", ["A", "A1", "2A1", "23A"])
def test_a_draft_is_followed_up_to_the_first_token_that_may_not_come(draft: str) -> None:
    matcher = compiler()(DIGITS)
    masks = matcher.allowed_tokens(ids("1"), ids(draft))
    assert [tokens_in(mask) for mask in masks] == [ids("0123456789"), ids("0123456789"), [EOS]][: 1 + draft.index("A")]
    assert allowed(matcher, ids("123")) == [EOS]


def test_asking_twice_changes_nothing() -> None:
    matcher = compiler()(DIGITS)
    assert allowed(matcher, ids("1")) == allowed(matcher, ids("1")) == ids("0123456789")


@pytest.mark.parametrize("max_length", [5, 12, 45, None])
def test_a_mask_is_the_same_whether_it_takes_tokens_as_one_or_one_by_one(max_length: int | None) -> None:
    texts = [
        *TEXTS,
        *(begin * length + end for begin in (b"A", b" ") for end in (b"", b'"') for length in range(2, 61)),
    ]
    grammar = to_lark(JsonSchema({"type": "string"} | ({} if max_length is None else {"maxLength": max_length})))
    plain = LLTokenizer(_Vocabulary(texts, EOS), eos_token=[EOS], slices=[])  # type: ignore[arg-type]
    one, other = (GrammarCompiler(tokenizer)(grammar) for tokenizer in (make_tokenizer(texts, [EOS]), plain))
    for num_chars in range(1 + (max_length or 60)):
        output = ids('"' + num_chars * "A")
        assert allowed(one, output) == allowed(other, output) != []


def test_a_tokenizer_keeps_no_second_copy_of_the_texts() -> None:
    text = b"this text"
    num_references = sys.getrefcount(text)
    tokenizer = make_tokenizer([*TEXTS, text], [EOS])
    assert sys.getrefcount(text) == num_references and tokenizer.vocab_size == len(TEXTS) + 1


@pytest.mark.parametrize("grammar", ["start: other", "start: start", "{"])
def test_what_cannot_be_compiled_allows_nothing(grammar: str) -> None:
    assert allowed(compiler()(grammar), []) == []


def test_tokens_that_do_not_follow_allow_nothing_after_them() -> None:
    matcher = compiler()(DIGITS)
    assert allowed(matcher, ids("A")) == [] and allowed(matcher, ids("A1")) == []


def test_equal_grammars_are_compiled_once_and_share_no_state() -> None:
    compile = compiler()
    first, second = compile(DIGITS), compile(DIGITS)
    assert len(compile._compiled) == 1
    assert allowed(first, ids("123")) == [EOS] and allowed(second, []) == ids("0123456789")


def test_the_grammars_used_last_are_kept() -> None:
    compile = compiler()
    for number in range(CACHE_SIZE + 1):
        compile(to_lark(Literal("0")))
        compile(to_lark(Literal(f"!{number}")))
    assert len(compile._compiled) == CACHE_SIZE
    assert to_lark(Literal("0")) in compile._compiled and to_lark(Literal("!0")) not in compile._compiled
