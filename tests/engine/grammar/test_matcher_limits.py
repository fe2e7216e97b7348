"""Limits of one request's grammar: where it reaches them, and that the work of other requests does not count."""

import random
import threading
from itertools import count

import pytest
from llguidance import LLMatcher, LLParserLimits

from engine.grammar.compiler import (
    GrammarCompiler,
    compile_grammar,
    make_tokenizer,
)
from engine.grammar.lark import Literal, Regex, to_lark
from engine.grammar.matcher import MAX_RECOMPILATIONS, Matcher
from tests.engine.grammar.matchers import ALPHABET, DIGITS, EOS, TEXTS, allowed, compiler, ids


def walk(matcher: Matcher, seed: int) -> int:
    """Returns how many digits are generated before the limits are reached."""
    rng, output = random.Random(seed), list[int]()
    while digits := [token_id for token_id in allowed(matcher, output) if token_id != EOS]:
        output.append(rng.choice(digits))
    return len(output)


def test_limits_that_other_requests_reached_end_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with equal grammars share a lexer, whose states are limited: here there are 8,000 of them."""
    monkeypatch.setattr("engine.grammar.compiler._LIMITS", LLParserLimits(verbose_errors=False, max_lexer_states=150))
    grammar, compile = to_lark(Regex("([0-9])*[0-4]([0-9]){12}")), compiler()
    alone = [walk(compiler()(grammar), seed) for seed in range(4)]
    assert min(alone) > 100
    assert [walk(compile(grammar), seed) for seed in range(4)] == alone
    drafting = compile(grammar)
    drafting.allowed_tokens([], ids("0123456789" * 30))  # reaches the limit
    assert walk(drafting, 3) == alone[3]


@pytest.mark.parametrize(("seconds", "num_tokens"), [(0.02, 13), (0.006, 195), (0.004, 300)])
def test_a_grammar_that_takes_too_long_in_steps_ends_its_request(seconds: float, num_tokens: int) -> None:
    """Each mask takes `seconds`. The limit is 0.2 s and 5 ms per token."""
    matcher = compiler()(to_lark(Regex("1*")))
    slow = Matcher(matcher._matcher, lambda: (matcher._matcher, 0.0), ALPHABET, clock=count(0.0, seconds).__next__)
    output = list[int]()
    while len(output) < 300 and allowed(slow, output):
        output += ids("1")
    assert len(output) == pytest.approx(num_tokens, abs=1)


def test_recompilation_counts_unless_other_requests_may_be_the_reason() -> None:
    """The clock advances only in the thread that recompiles."""
    seconds, here = count(0.0, 0.3), threading.current_thread()

    def clock() -> float:
        return 0.0 if threading.current_thread() is here else next(seconds)

    matcher = GrammarCompiler(make_tokenizer(TEXTS, [EOS]), clock)(DIGITS)
    assert allowed(matcher, ids("A")) == [] and matcher._spent_s == 0.0
    assert allowed(matcher, ids("A")) == [] and matcher._spent_s == pytest.approx(0.3)


def test_drafting_has_a_tenth_of_the_time() -> None:
    """Each reading of the clock takes 9 ms, of 20 ms for drafting."""
    matcher = compiler()(to_lark(Literal("1234567")))
    slow = Matcher(matcher._matcher, lambda: (matcher._matcher, 0.0), ALPHABET, clock=count(0.0, 0.009).__next__)
    assert slow.forced_tokens([], 9) == ids("1")  # no time to look further ahead
    assert slow._spent_s == pytest.approx(0.018)
    assert slow.forced_tokens([], 9) == ids("1")  # it is known
    assert slow._spent_s == pytest.approx(0.027)
    assert slow.forced_tokens([], 9) == ()
    assert allowed(slow, []) == ids("1")
    assert slow.forced_tokens(ids("1") * 10, 9) == ()  # of 25 ms


def test_an_ambiguous_grammar_reaches_its_limits() -> None:
    timed = GrammarCompiler(make_tokenizer(TEXTS, [EOS]))
    assert walk(timed("start: e\ne: e e e | e e | /[A-F]/"), seed=1) < 500


def test_recompilations_of_one_request_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher, num_compiled = compiler()(DIGITS), 0

    def recompile() -> tuple[LLMatcher, float]:
        nonlocal num_compiled
        num_compiled += 1
        return broken, 0.0

    broken = compile_grammar(make_tokenizer(TEXTS, [EOS]), "{")
    ill = Matcher(matcher._matcher, recompile, ALPHABET, lambda: 0.0)
    assert allowed(ill, ids("A")) == [] and num_compiled == 1  # it was not followed
    for _ in range(2 * MAX_RECOMPILATIONS):
        assert allowed(ill, ids("A")) == []
    assert num_compiled == MAX_RECOMPILATIONS
    assert allowed(Matcher(broken, recompile, ALPHABET, lambda: 0.0), []) == [] and num_compiled == MAX_RECOMPILATIONS
