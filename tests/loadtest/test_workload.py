import json
from itertools import islice, takewhile

import pytest

from loadtest.workload import RequestSpec, Shape, WorkloadKind, long_stream, poisson_offsets, request_stream


def drawn(shape: Shape, num: int, seed: str = "1") -> list[RequestSpec]:
    return list(islice(request_stream(shape, seed), num))


def test_random_prompts_are_distinct_ids_of_the_vocabulary() -> None:
    specs = drawn(Shape(prompt_len=20, output_len=7, vocab_size=50), 100)
    assert all(len(spec.prompt) == 20 and spec.max_tokens == 7 for spec in specs)
    assert {token for spec in specs for token in spec.prompt} == set(range(50))
    assert len({json.dumps(spec.prompt) for spec in specs}) == 100


def test_prompts_are_a_function_of_the_seed() -> None:
    assert drawn(Shape(), 5) == drawn(Shape(), 5)
    assert drawn(Shape(), 5) != drawn(Shape(), 5, seed="2")


def test_prompts_of_one_workload_share_exactly_the_prefix() -> None:
    prompts = [spec.prompt for spec in drawn(Shape(WorkloadKind.SHARED_PREFIX, prompt_len=30, prefix_len=20), 50)]
    assert {len(prompt) for prompt in prompts} == {30}
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 1
    assert len({tuple(prompt[20:]) for prompt in prompts}) == 50


def test_text_prompts_have_as_many_words_as_asked_for() -> None:
    prompts = [spec.prompt for spec in drawn(Shape(prompt_len=12, is_text=True), 9)]
    assert all(isinstance(prompt, str) and len(prompt.split(" ")) == 12 for prompt in prompts)
    assert len(set(map(str, prompts))) == 9


def test_decoders_and_long_prompts_are_groups_of_their_own() -> None:
    shape = Shape(WorkloadKind.LONG_AMONG_DECODERS, prompt_len=3, long_prompt_len=40, long_output_len=5)
    decoder, long = drawn(shape, 1)[0], next(long_stream(shape, "1"))
    assert (decoder.group, len(decoder.prompt)) == ("decoders", 3)
    assert (long.group, len(long.prompt), long.max_tokens) == ("long", 40, 5)


def test_arrivals_are_seeded_ascending_and_of_the_asked_rate() -> None:
    offsets = list(islice(poisson_offsets(50.0, "1"), 5000))
    assert offsets == list(islice(poisson_offsets(50.0, "1"), 5000))
    assert offsets == sorted(offsets)
    assert offsets[-1] == pytest.approx(100, rel=0.1)


def test_gaps_between_arrivals_are_exponential() -> None:
    # The share of seconds without any arrival at rate 1 is exp(-1).
    seconds = {int(offset) for offset in takewhile(lambda offset: offset < 5000, poisson_offsets(1.0, "1"))}
    assert 1 - len(seconds) / 5000 == pytest.approx(0.368, abs=0.03)
