"""Greedy tokens equal Hugging Face `generate`, whatever the engine does with blocks, chunks, cache and pool."""

import random
from collections.abc import Callable

import pytest

from engine.runner.loaded_model import LoadedModel
from tests.engine.fakes import add, run_to_end, tokens_of
from tests.engine.tiny_models import ARCHITECTURES, VOCAB_SIZE, WIDE, ReferenceModel, tiny_engine

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_TOKENS = 14
MIN_MARGIN = 1e-4  # of the likeliest token, in standard deviations of logits; float32 errs by 0.2e-6 to 3e-6
LENGTHS = (1, 2, 15, 16, 17, 41)
# block size, chunk, prefix cache, tight pool: every pair of values of any two occurs
SETUPS = (
    (4, 7, True, True),
    (4, 512, False, True),
    (4, 512, True, False),
    (16, 7, False, True),
    (16, 7, True, False),
    (16, 512, True, True),
    (4, 7, False, False),
)
REQUIRED = (*tuple(ARCHITECTURES)[:15], WIDE)
ALSO = tuple(ARCHITECTURES)[15:]


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def generated(model: ReferenceModel, prompt: list[int]) -> list[int]:
    """Returns greedy tokens whose logits lead by so much that no order of summation changes them."""
    tokens = model.generate(prompt, MAX_TOKENS)
    margin = model.smallest_margin(prompt, tokens)
    assert margin > MIN_MARGIN, f"the tokens after a prompt of {len(prompt)} are nearly a tie: {margin}"
    return tokens


@pytest.fixture(scope="module")
def expected(reference_model: Callable[[str], ReferenceModel]) -> Callable[[str], list[list[int]]]:
    made: dict[str, list[list[int]]] = {}

    def generate(architecture: str) -> list[list[int]]:
        if architecture not in made:
            model = reference_model(architecture)
            made[architecture] = [generated(model, prompt) for prompt in prompts()]
        return made[architecture]

    return generate


def generate(model: LoadedModel, block_size: int, chunk: int, caching: bool, is_tight: bool) -> list[list[int]]:
    num_blocks = -(-(max(LENGTHS) + MAX_TOKENS) // block_size) if is_tight else 1024 // block_size
    engine = tiny_engine(
        model,
        num_blocks,
        block_size,
        max_num_batched_tokens=chunk,
        max_prefill_tokens_per_gap=chunk,
        enable_prefix_caching=caching,
    )
    for round_ in range(1 + caching):
        for index, prompt in enumerate(prompts()):
            add(engine, f"{round_}-{index}", prompt, max_tokens=MAX_TOKENS, temperature=0.0)
        updates = run_to_end(engine)
    if is_tight and block_size == 4:
        assert any(each[-1].num_preemptions for each in updates.values()), "the pool was not small enough"
    return [tokens_of(updates[f"{round_}-{index}"]) for index in range(len(LENGTHS))]


@pytest.mark.parametrize("architecture", REQUIRED)
def test_greedy_tokens_equal_hugging_face(
    architecture: str, tiny_model: Callable[..., LoadedModel], expected: Callable[[str], list[list[int]]]
) -> None:
    model = tiny_model(architecture)
    for setup in SETUPS:
        assert generate(model, *setup) == expected(architecture), setup


@pytest.mark.parametrize("architecture", ALSO)
def test_further_architectures_equal_hugging_face(
    architecture: str, tiny_model: Callable[..., LoadedModel], expected: Callable[[str], list[list[int]]]
) -> None:
    assert generate(tiny_model(architecture), 4, 7, caching=True, is_tight=True) == expected(architecture)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, WIDE])
def test_the_tiny_models_generate_various_tokens(architecture: str, expected: Callable[[str], list[list[int]]]) -> None:
    """The tokens of the tiny models vary: else their equality would prove nothing."""
    assert len({token for tokens in expected(architecture) for token in tokens}) >= 8
