"""What models answer, served and by transformers, and which of them the documentation lists."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.assembly import load_engine
from engine.core.config import EngineConfig
from engine.engine import Engine
from tests.engine.fakes import add, run_to_end, tokens_of

NUM_TOKENS = 12
PROMPT_LENGTHS = (5, 33, 90)
DOCS = Path(__file__).parents[2] / "docs/models.md"


def documented_types(mark: str) -> set[str]:
    """Returns the model types in the list of `docs/models.md` that has this mark."""
    (listed,) = re.findall(rf"<!-- {mark} -->\n(.*?)\n<!-- end -->", DOCS.read_text(), re.DOTALL)
    return set(re.findall(r"`([^`]+)`", listed))


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 128, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def serve(path: Path, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Answers all prompts in one batch, each prompt in several chunks."""
    return answers_of(engine_over(path), prompts)


def engine_over(path: Path) -> Engine:
    """Returns an engine that computes prompts in chunks."""
    config = EngineConfig(model=str(path), device="cpu", dtype="float32", num_blocks=64, max_num_batched_tokens=16)
    return load_engine(config)


def answers_of(engine: Engine, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Answers all prompts in one batch."""
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
