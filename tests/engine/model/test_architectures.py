"""Every causal architecture of transformers is served as transformers computes it, or refused with a sentence.

`docs/models.md` lists those that are served.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.assembly import load_engine
from engine.core.config import EngineConfig
from engine.core.errors import ModelError, UnsupportedModelError
from engine.model.paging_proof import randomize
from tests.engine.fakes import add, run_to_end, tokens_of
from tests.engine.tiny_architectures import CAUSAL_TYPES, tiny_model

DOCS = Path(__file__).parents[3] / "docs/models.md"
LISTED = re.compile(r"<!-- served -->\n(.*?)\n<!-- end -->", re.DOTALL)
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
    "qwen4_exp",
    "qwen4_exp_text",
    "reformer",
    "xlnet",
    "zamba",
}
"""Types whose default configuration transformers cannot make a small model of, or cannot save."""
NUM_TOKENS = 12
PROMPT_LENGTHS = (5, 33, 90)

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' own code, about its default configurations


def served_types() -> set[str]:
    """Returns the model types that the documentation says are served."""
    (listed,) = LISTED.findall(DOCS.read_text())
    return set(re.findall(r"`([^`]+)`", listed))


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
        answers = serve(tmp_path, prompts)
    except (UnsupportedModelError, ModelError) as error:
        assert model_type not in served_types(), error
        assert str(error).endswith(".") or ": " in str(error)
        return
    model.set_attn_implementation("eager")
    assert answers == [generate(model, prompt) for prompt in prompts]
    assert model_type in served_types()


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 128, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def serve(path: Path, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Answers all prompts in one batch, each prompt in several chunks."""
    config = EngineConfig(model=str(path), device="cpu", dtype="float32", num_blocks=64, max_num_batched_tokens=16)
    engine = load_engine(config)
    for index, prompt in enumerate(prompts):
        add(engine, str(index), prompt, max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0)
    updates = run_to_end(engine)
    return [tokens_of(updates[str(index)]) for index in range(len(prompts))]


@torch.inference_mode()
def generate(model: Any, prompt: list[int]) -> list[int]:
    """Returns the most probable tokens after `prompt`, each from a whole forward pass of transformers."""
    token_ids = list(prompt)
    for _ in range(NUM_TOKENS):
        logits = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits
        token_ids.append(int(logits[0, -1].argmax()))
    return token_ids[len(prompt) :]
