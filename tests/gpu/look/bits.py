"""Stage: the same request has the same answer, to the last bit of its log-probabilities, whatever runs beside it."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

import engine as engine_package
from engine.assembly import assemble
from engine.core.config import EngineConfig
from engine.core.messages import RequestUpdate
from engine.engine import Engine
from engine.model.setup import load_model_runner
from tests.engine.fakes import add, run_to_end, tokens_of
from tests.gpu.look.report import Look

EMBEDDED = Path(engine_package.__file__).parent / "embedded_model"
_LENGTHS = (1, 5, 17, 64, 130, 300, 700)
_SAMPLED = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "seed": 3},
    {"temperature": 0.7, "top_k": 20, "min_p": 0.05, "seed": 4, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 1.2, "seed": 5, "frequency_penalty": 0.3, "logit_bias": {7: 2.0, 8: -100.0}},
)

Answer = tuple[tuple[int, ...], tuple[Any, ...]]
"""Token ids, and the log-probabilities of all of them."""


def run(look: Look) -> None:
    num_requests, num_tokens = (6, 8) if look.is_small else (32, 48)
    settings: dict[str, Any] = {"device": look.device.type, "num_blocks": 4096, "num_speculative_tokens": 0}
    runner, info = load_model_runner(EngineConfig(model=str(EMBEDDED), **settings))
    look.report("model runs on", f"{info.device}, {info.dtype}, {info.forward}, {info.attention}, {info.linear}")
    chance = random.Random(0)
    requests = [
        (
            [chance.randrange(8, info.vocab_size) for _ in range(_LENGTHS[n % len(_LENGTHS)])],
            _SAMPLED[n % len(_SAMPLED)] | {"max_tokens": num_tokens, "logprobs": 3, "ignore_eos": True},
        )
        for n in range(num_requests)
    ]

    def new_engine(num_blocks: int = info.num_blocks, **changes: Any) -> Engine:
        config = EngineConfig(model=str(EMBEDDED), **settings | changes)
        return assemble(config, msgspec.structs.replace(info, num_blocks=num_blocks), runner)

    alone = [answers_of(new_engine(), [request])[0] for request in requests]
    cached = new_engine()
    runs = {
        "with an empty prefix cache": answers_of(cached, requests),
        "after prefix hits": answers_of(cached, requests),  # at once: all engines share the memory of the KV cache
        "alone, again": [answers_of(new_engine(), [request])[0] for request in requests[:8]],
        f"in a batch of {num_requests}": answers_of(new_engine(), requests),
        "in another order": answers_of(new_engine(), requests[::-1])[::-1],
        "in chunks of 48": answers_of(new_engine(max_num_batched_tokens=48, max_prefill_tokens_per_gap=48), requests),
        "in chunks of 7": answers_of(new_engine(max_num_batched_tokens=7, max_prefill_tokens_per_gap=7), requests),
        "without a prefix cache": answers_of(new_engine(enable_prefix_caching=False), requests),
        "preempted": answers_of(new_engine(num_blocks=96), requests),
        "with drafts": answers_of(new_engine(num_speculative_tokens=8), requests),
    }
    for name, answers in runs.items():
        compare(look, name, alone[: len(answers)], answers)


def answers_of(engine: Engine, requests: Sequence[tuple[list[int], dict[str, Any]]]) -> list[Answer]:
    for number, (prompt, params) in enumerate(requests):
        add(engine, str(number), prompt, **params)
    updates = run_to_end(engine, 100_000)
    return [_answer_of(updates[str(number)]) for number in range(len(requests))]


def _answer_of(updates: Sequence[RequestUpdate]) -> Answer:
    scores = (each for update in updates for each in update.logprobs)
    return tuple(tokens_of(updates)), tuple((each.token_id, each.logprob, each.top) for each in scores)


def compare(look: Look, name: str, expected: Sequence[Answer], found: Sequence[Answer]) -> None:
    other_tokens = sum(one[0] != other[0] for one, other in zip(expected, found, strict=True))
    other_bits = sum(one != other for one, other in zip(expected, found, strict=True))
    gap = max((_largest_gap(one, other) for one, other in zip(expected, found, strict=True)), default=0.0)
    detail = f"{len(found)} requests: {other_tokens} with other tokens, {other_bits} with other bits"
    look.check(name, other_bits == 0, detail + (f", logprobs by up to {gap:.3g}" if other_bits else ""))


def _largest_gap(one: Answer, other: Answer) -> float:
    """Returns the largest difference of log-probabilities before the tokens differ."""
    gap = 0.0
    for (token, score, _), (other_token, other_score, _) in zip(one[1], other[1], strict=False):
        gap = max(gap, abs(score - other_score))
        if token != other_token:
            break
    return gap
