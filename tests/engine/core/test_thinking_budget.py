"""The thinking budget: only the tokens between the start and the end mark count."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import InvalidParameterError
from engine.core.request_validation import check_request
from engine.core.sampling_params import SamplingParams
from engine.core.thinking_budget import START_WITHIN, ThinkingBudget
from engine.grammar.compiler import GrammarCompiler, GrammarQueue, make_tokenizer
from engine.grammar.lark import Literal, Sequence, TextUntil, to_lark
from engine.runner.loaded_model import LoadedModel
from tests.engine.fakes import add, fake_info, run_to_end, tokens_of
from tests.engine.runner.sampled import adjusted, draw, scheduled
from tests.engine.scheduling.speculation.prophets import OracleDrafter
from tests.engine.tiny_models import VOCAB_SIZE, tiny_engine

START, END, OTHER = 1, 2, 3
outputs = st.lists(st.sampled_from([START, END, OTHER]), max_size=12)


def begun(max_tokens: int) -> ThinkingBudget:
    return ThinkingBudget(max_tokens=max_tokens, end_id=END)


def marked(max_tokens: int) -> ThinkingBudget:
    return ThinkingBudget(max_tokens=max_tokens, end_id=END, start_id=START)


def obeying(thinking: ThinkingBudget, wanted: list[int]) -> list[int]:
    """Returns the output of a model that wants these tokens, under the budget."""
    output: list[int] = []
    for token_id in wanted:
        forced_id = thinking.forced_id(output)
        output.append(token_id if forced_id is None else forced_id)
    return output


@given(outputs, st.integers(0, 6))
def test_thinking_that_the_prompt_began_is_never_longer_than_its_budget(wanted: list[int], budget: int) -> None:
    output = obeying(begun(budget), wanted)
    num_thought = output.index(END) if END in output else len(output)
    assert num_thought <= budget
    assert [a != b for a, b in zip(output, wanted, strict=True)].count(True) <= 1


@given(outputs, st.integers(0, 6))
def test_after_a_start_mark_thinking_is_never_longer_than_its_budget(wanted: list[int], budget: int) -> None:
    output = obeying(marked(budget), wanted)
    if START in output[:START_WITHIN]:
        thought = output[output.index(START) + 1 :]
        assert (thought.index(END) if END in thought else len(thought)) <= budget
    else:
        assert output == wanted


@given(outputs, st.integers(0, 6))
def test_thinking_within_its_budget_is_left_alone(wanted: list[int], budget: int) -> None:
    if END in wanted[: budget + 1]:
        assert obeying(begun(budget), wanted) == wanted


def test_the_end_is_forced_exactly_when_the_budget_is_used_up() -> None:
    assert obeying(begun(2), [OTHER] * 5) == [OTHER, OTHER, END, OTHER, OTHER]
    assert obeying(begun(0), [OTHER] * 2) == [END, OTHER]
    assert obeying(marked(1), [START, *[OTHER] * 4]) == [START, OTHER, END, OTHER, OTHER]
    assert obeying(marked(0), [OTHER, START, OTHER]) == [OTHER, START, END]


def test_an_end_mark_before_the_start_counts_for_nothing() -> None:
    assert obeying(marked(1), [END, START, OTHER, OTHER]) == [END, START, OTHER, END]


def test_thinking_begins_early_or_never() -> None:
    late = [OTHER, OTHER, OTHER, OTHER, START, OTHER]
    assert obeying(marked(0), late) == late
    early = [OTHER, OTHER, OTHER, START, OTHER]
    assert obeying(marked(0), early) == [*early[:-1], END]


def test_a_forced_token_overrules_all_that_a_request_asks_of_its_logits() -> None:
    params: dict[str, Any] = {
        "allowed_token_ids": (3,),
        "logit_bias": {2: -100.0},
        "bad_words": ((2,),),
        "min_tokens": 9,
    }
    inf = float("inf")
    assert adjusted([9.0, 9.0, 9.0, 9.0], thinking=begun(0), **params) == [-inf, -inf, 0.0, -inf]


def test_a_forced_token_is_drawn_whatever_the_filters_say() -> None:
    for params in ({"temperature": 0.0}, {"temperature": 2.0}, {"top_k": 1}, {"min_p": 0.5, "top_p": 0.1}):
        assert draw(torch.tensor([[9.0, 0.0, -50.0, 1.0]]), [scheduled(thinking=begun(0), **params)]) == [END]


def test_a_mark_that_the_grammar_refuses_waits_until_it_is_allowed() -> None:
    logits = torch.tensor([[9.0, 1.0, 0.0, 2.0]])
    assert draw(logits, [scheduled(thinking=begun(0), allowed=[1, 3])]) == [OTHER]
    assert draw(logits, [scheduled(thinking=begun(0), output=(OTHER, OTHER), allowed=[1, 3, END])]) == [END]
    assert draw(logits, [scheduled(thinking=begun(0), allowed=[])]) == [None]


def test_a_mark_that_has_waited_for_a_character_waits_no_longer() -> None:
    assert begun(1).forced_id([OTHER] * 4) == END
    assert begun(1).forced_id([OTHER] * 5) is None
    assert begun(1).forced_id([OTHER, OTHER, END]) is None


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_a_budget_that_ends_in_a_character_lets_it_end(
    num_draft_tokens: int, tiny_model: Callable[..., LoadedModel]
) -> None:
    eos = VOCAB_SIZE - 1
    texts = [b"\xf0", b"\x9f", b"</t>", b"yes", *[b""] * (VOCAB_SIZE - 4)]
    grammars = GrammarQueue(GrammarCompiler(make_tokenizer(texts, [eos]), clock=lambda: 0.0))
    expected = [0, 1, 1, 1, END, 3, eos]
    errs = cycle([False, False, True]).__next__
    oracle = OracleDrafter(lambda _, output: expected[len(output) % len(expected)], errs)
    engine = tiny_engine(
        tiny_model("llama"),
        grammars=grammars,
        eos_token_ids=(eos,),
        new_drafter=lambda: oracle,
        clock=lambda: 0.0,
        num_speculative_tokens=num_draft_tokens,
    )
    grammar = to_lark(Sequence((TextUntil("</t>"), Literal("yes"))))
    params: dict[str, Any] = {"grammar": grammar, "thinking": begun(1), "logit_bias": {0: 100.0}}
    add(engine, "r", [5, 6, 7], max_tokens=20, ignore_eos=False, temperature=0.0, **params)
    assert tokens_of(run_to_end(engine)["r"]) == expected


def test_a_budget_leaves_no_trace_after_the_thinking(tiny_model: Callable[..., LoadedModel]) -> None:
    """After the end mark the model generates the same as after a prompt of the same tokens."""
    model = tiny_model("llama")

    def generate(prompt: list[int], **fields: Any) -> list[int]:
        engine = tiny_engine(model)
        add(engine, "r", prompt, **{"max_tokens": 8, "temperature": 1.0, "seed": 3, **fields})
        return tokens_of(run_to_end(engine)["r"])

    thought = generate([5, 6, 7], thinking=ThinkingBudget(max_tokens=3, end_id=END))
    assert thought[:3] == generate([5, 6, 7])[:3] and thought[3] == END
    assert thought[4:] == generate([5, 6, 7, *thought[:4]])[:4]


def test_a_budget_crosses_the_wire_between_the_processes() -> None:
    for params in (SamplingParams(thinking=begun(3), shown_token_ids=(1, 2)), SamplingParams(thinking=marked(0))):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(InvalidParameterError) as error:
        SamplingParams(thinking=begun(-1))
    assert error.value.param == "thinking_token_budget"


@pytest.mark.parametrize(
    "thinking", [ThinkingBudget(max_tokens=1, end_id=50), ThinkingBudget(max_tokens=1, end_id=2, start_id=-1)]
)
def test_marks_outside_the_vocabulary_are_refused(thinking: ThinkingBudget) -> None:
    with pytest.raises(InvalidParameterError) as error:
        check_request(fake_info(8, 4), [1], SamplingParams(thinking=thinking))
    assert error.value.param == "thinking_token_budget"
