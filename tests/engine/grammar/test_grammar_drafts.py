"""Guesses under a grammar in the engine: those that it forbids, those that it makes, and who is marked meanwhile."""

from collections.abc import Sequence
from itertools import cycle

import pytest

from engine.core.request import FinishReason
from engine.grammar.lark import JsonSchema, Literal, to_lark
from tests.engine.fakes import batches, run_to_end, tokens_of
from tests.engine.grammar.matchers import DIGITS, EOS, TEXTS, compiler, tokens_in
from tests.engine.grammar.obedient import Gate, add_with, engine_with, the_end
from tests.engine.scheduling.speculation.prophets import Prophet


@pytest.mark.parametrize("max_length", [3, 40])
def test_guesses_that_a_grammar_forbids_are_not_tried(max_length: int) -> None:
    """Every third guess ends a string too early, or goes on where it must end."""
    grammar = to_lark(JsonSchema({"type": "string", "minLength": max_length, "maxLength": max_length}))
    plain = engine_with(compiler(), num_speculative_tokens=0)
    add_with(plain, "a", grammar, max_tokens=60)
    said = tokens_of(run_to_end(plain)["a"])
    errs = cycle([False, True, False]).__next__
    prophet = Prophet(lambda _, output: said[len(output)] if len(output) < len(said) else EOS, errs)
    guessing = engine_with(compiler(), new_drafter=lambda: prophet, clock=lambda: 0.0, num_speculative_tokens=4)
    add_with(guessing, "a", grammar, max_tokens=60)
    updates = run_to_end(guessing)["a"]
    assert tokens_of(updates) == said and the_end(updates) is FinishReason.STOP
    tried = [request for batch in batches(guessing) for request in batch.requests if request.num_drafts]
    assert tried
    for request in tried:
        assert len(request.allowed_tokens) == 1 + request.num_drafts
        for token_id, mask in zip(request.draft, request.allowed_tokens, strict=False):
            assert token_id in tokens_in(mask)
    assert guessing._speculation.num_drafts == sum(request.num_drafts for request in tried)


@pytest.mark.parametrize("longest", ["", "123", "312"])
def test_text_that_must_come_is_guessed_and_saves_steps(longest: str) -> None:
    """Also where its tokens are others than those that were guessed."""
    tokens = [*TEXTS[:-1], longest.encode()]
    compile = compiler(tokens)
    grammar, said, steps = to_lark(Literal("123123123123")), [], []
    for num_guesses in (0, 4):
        engine = engine_with(compile, clock=lambda: 0.0, num_speculative_tokens=num_guesses)
        add_with(engine, "a", grammar)
        said.append(tokens_of(run_to_end(engine)["a"]))
        steps.append(len(batches(engine)))
        engine.close()
    assert said[0] == said[1] and b"".join(tokens[token_id] for token_id in said[0]) == b"123123123123"
    assert steps[1] < steps[0] / 2


class Marks:
    """What was marked last."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def mark(self, request_ids: Sequence[str]) -> None:
        self.ids = list(request_ids)


class MarkedConstraint:
    """Tells what was marked when its mask was asked for, and what must come."""

    is_exhausted = False

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self.seen: list[str] = []
        self.seen_before: list[list[str]] = []

    def allowed_tokens(self, output_token_ids: Sequence[int], draft: Sequence[int]) -> tuple[bytes, ...]:
        self.seen = self.marks.ids
        return (b"\xff" * 64,)

    def forced_tokens(self, output_token_ids: Sequence[int], max_tokens: int) -> Sequence[int]:
        self.seen_before.append(self.marks.ids)
        return ()


def test_whatever_a_grammar_may_do_to_the_engine_it_is_marked_before() -> None:
    marks, gate = Marks(), Gate()
    constraint = MarkedConstraint(marks)
    engine = engine_with(lambda grammar: gate(grammar) if grammar == "gated" else constraint, marker=marks)
    add_with(engine, "a", DIGITS)
    engine.step()
    assert constraint.seen == ["a"]
    add_with(engine, "compiling", "gated")
    engine.step()
    assert marks.ids == ["a", "compiling"]
    gate.is_open.set()
    engine.close()


def test_it_is_marked_too_when_it_is_asked_for_guesses() -> None:
    """They are asked for before the step is, and a request that arrives is marked alone."""
    marks = Marks()
    made = {name: MarkedConstraint(marks) for name in "abc"}
    engine = engine_with(made.__getitem__, marker=marks, clock=lambda: 0.0)
    for name in made:
        add_with(engine, name, name, prompt=[1] * 9, max_tokens=9)
        for _ in range(4):
            engine.step()
            marks.mark(["arriving"])
    run_to_end(engine)
    for name, constraint in made.items():
        assert constraint.seen_before and all(name in seen for seen in constraint.seen_before)
    engine.close()


def test_all_whose_grammars_are_compiled_are_marked_while_nothing_runs() -> None:
    marks, gate = Marks(), Gate()
    engine = engine_with(gate, marker=marks)
    for name in "ab":
        marks.mark([name])  # as `engine.process` does with each that arrives
        add_with(engine, name, name)
    engine.step()
    assert marks.ids == ["a", "b"]
    gate.is_open.set()
    engine.close()
