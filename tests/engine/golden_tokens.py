"""Greedy tokens of tiny models: those of Hugging Face `generate`, and those of the engine."""

import random

from engine.runner.loaded_model import LoadedModel
from tests.engine.fakes import add, run_to_end, tokens_of
from tests.engine.tiny_models import VOCAB_SIZE, ReferenceModel, tiny_engine

MAX_TOKENS = 14
MIN_MARGIN = 1e-4  # of the likeliest token, in standard deviations of logits; float32 errs by 0.2e-6 to 3e-6
LENGTHS = (1, 2, 15, 16, 17, 41)


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def generated(model: ReferenceModel, prompt: list[int]) -> list[int]:
    """Returns greedy tokens whose logits lead by so much that no order of summation changes them."""
    tokens = model.generate(prompt, MAX_TOKENS)
    margin = model.smallest_margin(prompt, tokens)
    assert margin > MIN_MARGIN, f"the tokens after a prompt of {len(prompt)} are nearly a tie: {margin}"
    return tokens


def generate(model: LoadedModel, block_size: int, chunk: int, caching: bool, is_tight: bool) -> list[list[int]]:
    num_blocks = -(-(max(LENGTHS) + MAX_TOKENS) // block_size) if is_tight else 1024 // block_size
    engine = tiny_engine(
        model,
        num_blocks,
        block_size,
        max_num_batched_tokens=chunk,
        max_prefill_tokens_per_gap=chunk,
        enable_prefix_caching=caching,
        state_checkpoint_interval=8,
    )
    for round_ in range(1 + caching):
        for index, prompt in enumerate(prompts()):
            add(engine, f"{round_}-{index}", prompt, max_tokens=MAX_TOKENS, temperature=0.0)
        updates = run_to_end(engine)
    if is_tight and block_size == 4:
        assert any(each[-1].num_preemptions for each in updates.values()), "the pool was not small enough"
    return [tokens_of(updates[f"{round_}-{index}"]) for index in range(len(LENGTHS))]
