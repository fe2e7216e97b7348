"""Grammars at work in the engine: beside the steps, replayed from the tokens, gone with their requests."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import pytest

import engine as engine_package
from engine.batch import Batch, ScheduledRequest, StepOutput
from engine.config import EngineConfig, EngineInfo
from engine.drafter import Drafter, PromptLookup
from engine.engine import Engine
from engine.errors import InvalidParameterError, RequestError
from engine.grammar import GrammarQueue, NoGrammars, load_grammars
from engine.grammar_source import JsonSchema, Literal, Regex, Repeat, to_lark
from engine.matcher import Matcher
from engine.messages import RequestUpdate
from engine.request import Constraint, FinishReason
from engine.sampling_params import SamplingParams
from engine.step_marker import Marker
from engine.tokenizer import Tokenizer
from tests.engine.fakes import FakeRunner, add, batches, expected_tokens, fake_info, run_to_end, tokens_of
from tests.engine.matchers import DIGITS, EOS, TEXTS, allowed, compiler, text_of, tokens_in
from tests.engine.prophets import Prophet


class ObedientRunner(FakeRunner):
    """Takes the nearest allowed token above the fake model's own; none where none is allowed."""

    def _choose(self, request: ScheduledRequest) -> tuple[int, ...]:
        (token_id,) = super()._choose(request)
        if not request.allowed_tokens:
            return (token_id,)
        may_come = tokens_in(request.allowed_tokens[0])
        near = [(token_id + step) % len(TEXTS) for step in range(len(TEXTS))]
        return tuple(token for token in near if token in may_come)[:1]


def engine_with(
    compile: Callable[[str], Constraint],
    num_blocks: int = 64,
    marker: Marker | None = None,
    clock: Callable[[], float] = time.monotonic,
    new_drafter: Callable[[], Drafter] = PromptLookup,
    **settings: Any,
) -> Engine:
    config = EngineConfig(model="fake", block_size=4, **settings)
    info, runner, grammars = fake_info(num_blocks, 4), ObedientRunner(4), GrammarQueue(compile)
    return Engine(config, info, runner, marker=marker, clock=clock, grammars=grammars, new_drafter=new_drafter)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = engine_with(compiler())
    yield engine
    engine.close()


def add_with(engine: Engine, request_id: str, grammar: str | None, **fields: Any) -> None:
    add(engine, request_id, **{"grammar": grammar, "ignore_eos": False, "max_tokens": 20, **fields})


def the_end(updates: list[RequestUpdate]) -> FinishReason | None:
    return updates[-1].finish_reason


def test_the_text_follows_the_grammar_and_ends_with_it(engine: Engine) -> None:
    add_with(engine, "a", DIGITS)
    updates = run_to_end(engine)["a"]
    tokens = tokens_of(updates)
    assert text_of(tokens[:3]).isdigit() and tokens[3:] == [EOS] and the_end(updates) is FinishReason.STOP


def test_a_grammar_that_is_cut_off_is_a_matter_of_length(engine: Engine) -> None:
    add_with(engine, "a", DIGITS, max_tokens=2)
    assert the_end(run_to_end(engine)["a"]) is FinishReason.LENGTH


def test_requests_without_a_grammar_are_left_alone(engine: Engine) -> None:
    add_with(engine, "a", DIGITS)
    add(engine, "b", max_tokens=20)
    assert tokens_of(run_to_end(engine)["b"]) == expected_tokens([1, 2, 3], 20)


class Gate:
    """Compiles when it is opened."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_compiling = threading.Event()

    def __call__(self, grammar: str) -> Matcher:
        self.is_compiling.set()
        assert self.is_open.wait(20)
        return compiler()(grammar)


def test_a_compiling_grammar_holds_up_nobody_else() -> None:
    gate = Gate()
    engine = engine_with(gate)
    add_with(engine, "a", DIGITS)
    add(engine, "b", max_tokens=5)
    assert gate.is_compiling.wait(20)
    tokens: list[int] = []
    while len(tokens) < 5:
        (update,) = engine.step().updates
        assert update.request_id == "b"
        tokens += update.token_ids
    assert engine.has_work and engine.step().stats.num_waiting == 1
    gate.is_open.set()
    assert the_end(run_to_end(engine)["a"]) is FinishReason.STOP
    engine.close()


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


def test_a_request_may_leave_while_its_grammar_is_compiled() -> None:
    gate = Gate()
    engine = engine_with(gate)
    for name in ("a", "b"):
        add_with(engine, name, DIGITS)
    engine.abort_requests(["a", "b", "c"])
    assert engine.has_work and engine.step().stats.num_waiting == 0 and not engine.has_work
    gate.is_open.set()
    engine.close()


def test_an_id_is_in_use_while_its_grammar_is_compiled() -> None:
    gate = Gate()
    engine = engine_with(gate)
    add_with(engine, "a", DIGITS)
    with pytest.raises(InvalidParameterError):
        add(engine, "a")
    gate.is_open.set()
    engine.close()


@pytest.mark.parametrize("end", ["stop", "abort", "length", "error"])
def test_a_matcher_is_gone_with_its_request(end: str) -> None:
    made: list[weakref.ref[Matcher]] = []
    compile = compiler()

    def remember(grammar: str) -> Matcher:
        matcher = compile(grammar)
        made.append(weakref.ref(matcher))
        return matcher

    engine = engine_with(remember)
    add_with(engine, "a", DIGITS if end != "error" else "start: start", max_tokens=2 if end == "length" else 9)
    while not engine.step().updates:
        pass
    if end == "abort":
        engine.abort_requests(["a"])
    run_to_end(engine)
    gc.collect()
    assert [matcher() for matcher in made] == [None]
    engine.close()


def test_a_request_that_may_have_no_token_ends_with_an_error_of_its_own(engine: Engine) -> None:
    add_with(engine, "a", "start: start")
    add_with(engine, "b", DIGITS)
    updates = run_to_end(engine)
    (update,) = updates["a"]
    assert update.finish_reason is FinishReason.ERROR and update.blames_request and "grammar" in (update.error or "")
    assert the_end(updates["b"]) is FinishReason.STOP
    assert engine._pool.stats.held == 0


def test_preemption_changes_no_token() -> None:
    grammar = to_lark(Repeat(Regex("[A-F]{1,4}[0-9]"), 15, 19))
    calm, tight = engine_with(compiler()), engine_with(compiler(), num_blocks=20, enable_prefix_caching=False)
    for engine in (calm, tight):
        add_with(engine, "older", None, max_tokens=40, ignore_eos=True)
        add_with(engine, "a", grammar, max_tokens=70, prompt=(4, 5, 6))
        wait([compiling for _, compiling in engine._grammars._pending.values()])  # type: ignore[attr-defined]
    expected, preempted = run_to_end(calm)["a"], run_to_end(tight)["a"]
    assert preempted[-1].num_preemptions > 0
    assert tokens_of(preempted) == tokens_of(expected) and the_end(preempted) is FinishReason.STOP


@pytest.mark.parametrize("count", [0, 1, 7, 25])
def test_a_resumed_request_goes_on_where_it_was(count: int) -> None:
    grammar = to_lark(Repeat(Regex("[A-F]{1,4}[0-9]"), 15, 19))
    first, second = engine_with(compiler()), engine_with(compiler(), max_num_batched_tokens=3)
    add_with(first, "a", grammar, max_tokens=90)
    tokens = tokens_of(run_to_end(first)["a"])
    add_with(second, "a", grammar, max_tokens=90, output_token_ids=tokens[:count])
    assert tokens_of(run_to_end(second)["a"]) == tokens[count:]


def test_a_model_that_cannot_follow_says_so() -> None:
    engine = Engine(EngineConfig(model="fake"), fake_info(64, 16), FakeRunner(16))
    with pytest.raises(RequestError, match="EOS"):
        add_with(engine, "a", DIGITS)
    assert not engine.has_work


def test_a_grammar_cannot_be_made_endless() -> None:
    with pytest.raises(InvalidParameterError, match="ignore_eos"):
        SamplingParams(grammar=DIGITS, ignore_eos=True)


def test_only_the_chunk_that_samples_has_a_mask() -> None:
    engine = engine_with(compiler(), max_num_batched_tokens=2)
    add_with(engine, "a", DIGITS, prompt=range(1, 6))
    run_to_end(engine)
    masks = [len(request.allowed_tokens) > 0 for batch in batches(engine) for request in batch.requests]
    assert masks == [False, False, True, True, True, True]


class Breaks(ObedientRunner):
    def decode(self, batch: Batch) -> StepOutput:
        raise RuntimeError("broken")


def test_the_engines_own_failures_are_not_blamed_on_the_request() -> None:
    engine = Engine(
        EngineConfig(model="fake", block_size=4), fake_info(64, 4), Breaks(4), grammars=GrammarQueue(compiler())
    )
    add_with(engine, "a", DIGITS)
    update = run_to_end(engine)["a"][-1]
    assert update.finish_reason is FinishReason.ERROR and not update.blames_request
    engine.close()


def test_what_was_left_before_its_turn_is_not_compiled() -> None:
    gate, compiled = Gate(), []

    def remember(grammar: str) -> Matcher:
        compiled.append(grammar)
        return gate(grammar)

    engine = engine_with(remember)
    for name in "012":
        add_with(engine, name, to_lark(Literal(name)))
    assert gate.is_compiling.wait(20)
    engine.abort_requests(["1"])
    gate.is_open.set()
    run_to_end(engine)
    assert compiled == [to_lark(Literal("0")), to_lark(Literal("2"))]
    engine.close()


def test_special_tokens_are_no_text() -> None:
    model = str(Path(engine_package.__file__).parent / "embedded_model")
    tokenizer = Tokenizer.from_pretrained(model)
    eos = tokenizer.eos_token_id
    assert eos is not None and len(tokenizer.special_ids) > 1
    size = tokenizer.vocab_size + 40  # models' vocabularies are larger than their tokenizers'
    info = msgspec.structs.replace(fake_info(64, 4), vocab_size=size, eos_token_ids=(eos,))
    grammars = load_grammars(EngineConfig(model=model), info)
    assert isinstance(grammars, GrammarQueue)
    text = set(range(tokenizer.vocab_size)) - tokenizer.special_ids
    assert set(allowed(grammars._compile(to_lark(Regex("(?s:.*)"))), [])) <= text | {eos}
    assert isinstance(load_grammars(EngineConfig(model=model), fake_info_without_eos()), NoGrammars)


def fake_info_without_eos() -> EngineInfo:
    return msgspec.structs.replace(fake_info(64, 4), eos_token_ids=())
