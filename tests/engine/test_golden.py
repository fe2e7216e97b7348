"""Greedy tokens equal Hugging Face `generate`, whatever the engine does with blocks, chunks, cache and pool."""

from collections.abc import Callable

import pytest

from engine.runner.loaded_model import LoadedModel
from tests.crossed import slow_but
from tests.engine.golden_tokens import generate, generated, prompts
from tests.engine.tiny_models import ARCHITECTURES, QUICK, WIDE, ReferenceModel

pytestmark = pytest.mark.usefixtures("one_thread")

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


@pytest.fixture(scope="module")
def expected(reference_model: Callable[[str], ReferenceModel]) -> Callable[[str], list[list[int]]]:
    made: dict[str, list[list[int]]] = {}

    def generate(architecture: str) -> list[list[int]]:
        if architecture not in made:
            model = reference_model(architecture)
            made[architecture] = [generated(model, prompt) for prompt in prompts()]
        return made[architecture]

    return generate


@pytest.mark.parametrize("architecture", REQUIRED)
def test_greedy_tokens_equal_hugging_face(
    architecture: str, tiny_model: Callable[..., LoadedModel], expected: Callable[[str], list[list[int]]]
) -> None:
    model = tiny_model(architecture)
    for setup in SETUPS:
        assert generate(model, *setup) == expected(architecture), setup


@pytest.mark.parametrize("architecture", slow_but(ALSO, *QUICK & {*ALSO}))
def test_further_architectures_equal_hugging_face(
    architecture: str, tiny_model: Callable[..., LoadedModel], expected: Callable[[str], list[list[int]]]
) -> None:
    assert generate(tiny_model(architecture), 4, 7, caching=True, is_tight=True) == expected(architecture)


@pytest.mark.parametrize("architecture", slow_but([*ARCHITECTURES, WIDE], *QUICK, WIDE))
def test_the_tiny_models_generate_various_tokens(architecture: str, expected: Callable[[str], list[list[int]]]) -> None:
    """The tokens of the tiny models vary: else their equality would prove nothing."""
    assert len({token for tokens in expected(architecture) for token in tokens}) >= 8
