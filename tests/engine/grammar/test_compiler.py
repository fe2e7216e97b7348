"""Grammars in the engine: compiled beside the steps, resumed from the tokens, freed with their requests."""

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import wait
from itertools import count
from pathlib import Path

import msgspec
import pytest
from llguidance import LLParserLimits

import engine as engine_package
from engine.assembly import assemble
from engine.core.batch import Batch, StepOutput
from engine.core.config import EngineConfig, EngineInfo
from engine.core.errors import InvalidParameterError, RequestError
from engine.core.request import FinishReason
from engine.core.sampling_params import SamplingParams
from engine.engine import Engine
from engine.grammar.compiler import GrammarCompiler, GrammarQueue, NoGrammars, load_grammars, make_tokenizer
from engine.grammar.lark import Literal, Regex, Repeat, to_lark
from engine.grammar.matcher import Matcher
from engine.text.tokenizer import Tokenizer
from tests.engine.fakes import FakeRunner, add, batches, expected_tokens, fake_info, run_to_end, tokens_of
from tests.engine.grammar.matchers import DIGITS, EOS, TEXTS, allowed, compiler, text_of
from tests.engine.grammar.obedient import Gate, ObedientRunner, add_with, engine_with, the_end
from tests.engine.requests import queued


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = engine_with(compiler())
    yield engine
    engine.close()


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


def test_a_compiling_grammar_holds_up_no_other_request() -> None:
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
    assert update.finish_reason is FinishReason.ERROR and update.blames_request and "leave none" in (update.error or "")
    assert the_end(updates["b"]) is FinishReason.STOP
    assert engine._scheduler.stats.pool.held == 0


@pytest.mark.parametrize("limit", ["time", "states"])
def test_a_grammar_that_reaches_its_limits_ends_with_an_error_that_says_so(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit == "states":
        monkeypatch.setattr(
            "engine.grammar.compiler._LIMITS", LLParserLimits(verbose_errors=False, max_lexer_states=60)
        )
    seconds = count(0.0, 0.05 if limit == "time" else 0.0)
    engine = engine_with(GrammarCompiler(make_tokenizer(TEXTS, [EOS]), clock=seconds.__next__))
    add_with(engine, "a", to_lark(Regex("[0-9]{80}")), max_tokens=90)
    update = run_to_end(engine)["a"][-1]
    assert update.finish_reason is FinishReason.ERROR and update.blames_request
    assert "took more time, or more states" in (update.error or "")
    engine.close()


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
    engine = assemble(EngineConfig(model="fake"), fake_info(64, 16), FakeRunner(16))
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
    engine = assemble(
        EngineConfig(model="fake", block_size=4), fake_info(64, 4), Breaks(4), grammars=GrammarQueue(compiler())
    )
    add_with(engine, "a", DIGITS)
    update = run_to_end(engine)["a"][-1]
    assert update.finish_reason is FinishReason.ERROR and not update.blames_request
    engine.close()


def test_what_was_aborted_before_its_turn_is_not_compiled() -> None:
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


def test_tenants_share_the_compiler_by_its_seconds() -> None:
    gate, compiled, clock = Gate(), [], [0.0]

    def remember(grammar: str) -> Matcher:
        compiled.append(grammar)
        clock[0] += 10.0 if grammar.startswith("slow") else 1.0
        return gate(DIGITS)

    def add(grammar: str, tenant: str) -> None:
        grammars.add(queued(grammar, [1], SamplingParams(grammar=grammar), tenant=tenant))

    grammars = GrammarQueue(remember, lambda: clock[0])
    for name in ("slow 0", "slow 1", "slow 2"):
        add(name, "a")
    assert gate.is_compiling.wait(20)
    for name in ("quick 0", "quick 1"):
        add(name, "b")
    gate.is_open.set()
    ready: list[str] = []
    while len(grammars):
        ready += [request.request_id for request in grammars.take_ready(20)]
    assert compiled == ["slow 0", "quick 0", "quick 1", "slow 1", "slow 2"] and sorted(ready) == sorted(compiled)
    grammars.close()


def test_a_new_grammar_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside requests that run, too: it waits for no other step. One that was aborted is not waited for."""
    gate = Gate()
    grammars = GrammarQueue(gate)
    grammars.add(first := queued("0", [1], SamplingParams(grammar=DIGITS)))
    assert grammars.take_ready(0.0) == []
    monkeypatch.setattr("engine.grammar.compiler.NEW_WAIT_S", 1000.0)
    assert grammars.take_ready(0.0) == []
    grammars.add(queued("1", [1], SamplingParams(grammar=DIGITS)))
    grammars.abort(["1"])
    assert grammars.take_ready(0.0) == []
    gate.is_open.set()
    assert grammars.take_ready(20.0) == [first]
    grammars.add(second := queued("2", [1], SamplingParams(grammar=DIGITS)))
    assert grammars.take_ready(0.0) == [second]
    grammars.close()


def test_an_error_of_the_compiler_is_raised() -> None:
    def broken(grammar: str) -> Matcher:
        raise RuntimeError("broken")

    engine = engine_with(broken)
    add_with(engine, "a", DIGITS)
    with pytest.raises(RuntimeError, match="broken"):
        run_to_end(engine)
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
    assert isinstance(load_grammars(EngineConfig(model="/without", tokenizer=model), info), GrammarQueue)
    assert isinstance(load_grammars(EngineConfig(model=model), fake_info_without_eos()), NoGrammars)


def fake_info_without_eos() -> EngineInfo:
    return msgspec.structs.replace(fake_info(64, 4), eos_token_ids=())
