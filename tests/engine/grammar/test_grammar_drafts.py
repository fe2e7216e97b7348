"""Draft tokens under a grammar in the engine: those it forbids and those it forces, and which requests the crash marker
names meanwhile."""

from collections.abc import Sequence
from itertools import cycle

import pytest

from engine.core.request import FinishReason
from engine.grammar.lark import JsonSchema, Literal, to_lark
from tests.engine.fakes import batches, run_to_end, tokens_of
from tests.engine.grammar.matchers import DIGITS, EOS, TEXTS, compiler, tokens_in
from tests.engine.grammar.obedient import Gate, add_with, engine_with, the_end
from tests.engine.scheduling.speculation.prophets import OracleDrafter


@pytest.mark.parametrize("max_length", [3, 40])
def test_draft_tokens_that_a_grammar_forbids_are_not_verified(max_length: int) -> None:
    """Every third draft token ends a string too early, or goes on where it must end."""
    grammar = to_lark(JsonSchema({"type": "string", "minLength": max_length, "maxLength": max_length}))
    plain = engine_with(compiler(), num_speculative_tokens=0)
    add_with(plain, "a", grammar, max_tokens=60)
    expected = tokens_of(run_to_end(plain)["a"])
    errs = cycle([False, True, False]).__next__
    oracle = OracleDrafter(lambda _, output: expected[len(output)] if len(output) < len(expected) else EOS, errs)
    drafting = engine_with(compiler(), new_drafter=lambda: oracle, clock=lambda: 0.0, num_speculative_tokens=4)
    add_with(drafting, "a", grammar, max_tokens=60)
    updates = run_to_end(drafting)["a"]
    assert tokens_of(updates) == expected and the_end(updates) is FinishReason.STOP
    verified = [request for batch in batches(drafting) for request in batch.requests if request.num_drafts]
    assert verified
    for request in verified:
        assert len(request.allowed_tokens) == 1 + request.num_drafts
        for token_id, mask in zip(request.draft, request.allowed_tokens, strict=False):
            assert token_id in tokens_in(mask)
    assert drafting._scheduler.stats.num_drafts == sum(request.num_drafts for request in verified)


@pytest.mark.parametrize("longest", ["", "123", "312"])
def test_forced_text_is_drafted_and_saves_steps(longest: str) -> None:
    """It saves steps even if the model spells the text with other tokens than the draft's."""
    tokens = [*TEXTS[:-1], longest.encode()]
    compile = compiler(tokens)
    grammar, outputs, steps = to_lark(Literal("123123123123")), [], []
    for num_draft_tokens in (0, 4):
        engine = engine_with(compile, clock=lambda: 0.0, num_speculative_tokens=num_draft_tokens)
        add_with(engine, "a", grammar)
        outputs.append(tokens_of(run_to_end(engine)["a"]))
        steps.append(len(batches(engine)))
        engine.close()
    assert outputs[0] == outputs[1] and b"".join(tokens[token_id] for token_id in outputs[0]) == b"123123123123"
    assert steps[1] < steps[0] / 2


class Marks:
    """A crash marker that keeps what was marked last."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def mark(self, request_ids: Sequence[str]) -> None:
        self.ids = list(request_ids)


class MarkedConstraint:
    """Records what was marked when its mask and its forced tokens were requested."""

    is_exhausted = False

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self.marked_at_mask: list[str] = []
        self.marked_at_draft: list[list[str]] = []

    def allowed_tokens(self, output_token_ids: Sequence[int], draft: Sequence[int]) -> tuple[bytes, ...]:
        self.marked_at_mask = self.marks.ids
        return (b"\xff" * 64,)

    def forced_tokens(self, output_token_ids: Sequence[int], max_tokens: int) -> Sequence[int]:
        self.marked_at_draft.append(self.marks.ids)
        return ()


def test_a_request_is_marked_before_its_grammar_is_compiled_or_used() -> None:
    marks, gate = Marks(), Gate()
    constraint = MarkedConstraint(marks)
    engine = engine_with(lambda grammar: gate(grammar) if grammar == "gated" else constraint, marker=marks)
    add_with(engine, "a", DIGITS)
    engine.step()
    assert constraint.marked_at_mask == ["a"]
    add_with(engine, "compiling", "gated")
    engine.step()
    assert marks.ids == ["a", "compiling"]
    gate.is_open.set()
    engine.close()


def test_a_request_is_marked_before_its_grammar_is_asked_for_forced_tokens() -> None:
    """Drafting comes before the step marks its requests, and an arriving request has been marked alone meanwhile."""
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
        assert constraint.marked_at_draft and all(name in marked for marked in constraint.marked_at_draft)
    engine.close()


def test_all_requests_with_pending_grammars_are_marked_while_nothing_runs() -> None:
    marks, gate = Marks(), Gate()
    engine = engine_with(gate, marker=marks)
    for name in "ab":
        marks.mark([name])  # as `engine.process` does with each that arrives
        add_with(engine, name, name)
    engine.step()
    assert marks.ids == ["a", "b"]
    gate.is_open.set()
    engine.close()
