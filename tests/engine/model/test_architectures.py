"""Every causal architecture of transformers is served as transformers computes it, or refused with a sentence.

`docs/models.md` lists those that are served.
"""

from pathlib import Path

import pytest

from engine.core.errors import ModelError, UnsupportedModelError
from engine.kernels import load_kernels
from engine.model.small_copy import randomize
from engine.model.text_part import has_text_part
from tests.engine.served_answers import answers_of, documented_types, engine_over, generate, make_prompts
from tests.engine.tiny_architectures import CAUSAL_TYPES, tiny_model

NOT_BUILT = {
    "cohere_compass_text",
    "dbrx",
    "dots3_note",
    "dots3_note_text",
    "gemma3n",  # needs an image library
    "gemma4_assistant",
    "gemma4_unified_assistant",
    "gpt_neo",
    "musicgen",
    "musicgen_melody",
    "reformer",
    "xlnet",
    "zamba",
}
"""Types whose default configuration transformers cannot make a small model of, or cannot save."""

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' own code, about its default configurations


def served_types() -> set[str]:
    """Returns the model types that the documentation says are served."""
    return documented_types("served")


def test_the_documentation_lists_types_that_transformers_knows() -> None:
    assert served_types() <= set(CAUSAL_TYPES) - NOT_BUILT
    assert set(CAUSAL_TYPES) >= NOT_BUILT


@pytest.mark.slow
@pytest.mark.parametrize("model_type", CAUSAL_TYPES)
def test_a_type_is_served_as_transformers_computes_it_or_refused(model_type: str, tmp_path: Path) -> None:
    try:
        model = tiny_model(model_type)
        randomize(model.requires_grad_(False))
        model.save_pretrained(tmp_path)
    except Exception as error:
        assert model_type in NOT_BUILT, error
        return
    assert model_type not in NOT_BUILT
    prompts = make_prompts()
    try:
        engine = engine_over(tmp_path)
        answers = answers_of(engine, prompts)
    except (UnsupportedModelError, ModelError) as error:
        assert model_type not in served_types(), error
        assert str(error).endswith(".") or ": " in str(error)
        return
    model.set_attn_implementation("eager")
    assert answers == [generate(model, prompt) for prompt in prompts]
    assert model_type in served_types()
    if load_kernels() is not None:
        served = model.config.get_text_config(decoder=True) if has_text_part(model.config) else model.config
        assert (engine.info.forward == "kernels") == (served.model_type in documented_types("in the kernels"))
