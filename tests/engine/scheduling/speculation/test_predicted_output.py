"""Drafts of a predicted output, and what they save."""

import random
from collections.abc import Sequence

import pytest

from engine.core.draft import Draft
from engine.engine import Engine
from engine.scheduling.speculation.predicted_output import PredictedOutput
from tests.engine.fakes import add, batches, expected_tokens, fake_engine, run_to_end, tokens_of


def chances_of(prediction: Sequence[int], answer: Sequence[int]) -> list[Draft]:
    """Returns the draft before each token of the answer."""
    drafter = PredictedOutput(prediction)
    return [drafter.draft([], answer[:length], 4) for length in range(len(answer))]


def test_the_prediction_is_drafted_from_the_place_that_the_output_has_reached() -> None:
    drafts = chances_of([1, 2, 3, 4, 5, 6], [1, 2, 9, 4, 5, 6])
    assert [list(draft.token_ids) for draft in drafts] == [[1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6], [], [5, 6], [6]]


def test_how_often_it_is_right_is_learnt_by_how_certain_the_place_is() -> None:
    follows = [draft.chance for draft in chances_of(range(100), range(50))]
    assert follows[0] == 0.9 and follows[-1] > 0.98
    numbers = list(range(100))
    leaves = [draft.chance for draft in chances_of(numbers, [number for number in numbers if number % 5 < 3])]
    assert leaves[-3] < 0.8 < follows[-1]
    strays = chances_of(range(100), [random.Random(1).randrange(100) for _ in range(60)])
    assert max(draft.chance for draft in strays[30:]) < 0.25


def predicting(**settings: int) -> Engine:
    """Returns an engine whose steps take no time, so that every draft pays."""
    return fake_engine(clock=lambda: 0.0, **{"num_speculative_tokens": 8, "num_blocks": 200, **settings})


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_predicted_answer_takes_few_steps(block_size: int) -> None:
    answer = expected_tokens([3, 1, 4], 60)
    engine = predicting(block_size=block_size)
    add(engine, "a", [3, 1, 4], max_tokens=60, predicted_token_ids=answer)
    assert tokens_of(run_to_end(engine)["a"]) == answer
    assert len(batches(engine)) <= 2 + -(-60 // 9)
    assert engine._scheduler.stats.num_accepted_drafts >= 50
    assert engine._scheduler.stats.pool.held == 0


@pytest.mark.parametrize("seed", range(5))
def test_no_prediction_changes_an_answer(seed: int) -> None:
    rng = random.Random(seed)
    answer = expected_tokens([seed], 60)
    prediction = [token_id if rng.random() < 0.9 else rng.randrange(50) for token_id in answer]
    engine = predicting(num_blocks=30, max_prefill_tokens_per_gap=4)
    for name, predicted in {"a": prediction, "b": answer[::-1], "c": []}.items():
        add(engine, name, [seed], max_tokens=60, predicted_token_ids=tuple(predicted))
    updates = run_to_end(engine)
    assert [tokens_of(updates[name]) for name in "abc"] == [answer] * 3


def test_a_request_that_goes_on_after_a_restart_does_not_draft() -> None:
    answer = expected_tokens([3], 40)
    engine = predicting()
    add(engine, "a", [3], max_tokens=40, predicted_token_ids=answer, output_token_ids=answer[:10])
    assert tokens_of(run_to_end(engine)["a"]) == answer[10:]
    assert engine._scheduler.stats.num_drafts == 0


def test_a_request_whose_first_tokens_were_given_drafts() -> None:
    answer = expected_tokens([3], 40)
    given = answer[:10]
    engine = predicting()
    fields = {"predicted_token_ids": answer, "output_token_ids": given, "given_token_ids": tuple(given)}
    add(engine, "a", [3], max_tokens=40, **fields)
    assert tokens_of(run_to_end(engine)["a"]) == answer[10:]
    assert engine._scheduler.stats.num_accepted_drafts >= 20
