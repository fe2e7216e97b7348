"""What a client sees of engines of several ranks, to be compared."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.engine.fakes import add, run_to_end
from tests.engine.ranks.rank_threads import engine_on_ranks
from tests.engine.tiny_models import VOCAB_SIZE

PROMPTS = {str(length): [(7 * at + length) % VOCAB_SIZE for at in range(length)] for length in (1, 5, 16, 37)}
PARAMS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.2, "seed": 5}}


def answers(path: Path, size: int, **settings: Any) -> dict[str, list[Any]]:
    """Everything that a client sees of several requests in one batch, whose prompts are computed in chunks."""
    with engine_on_ranks(path, size, max_num_batched_tokens=11, **settings) as (engine, _):
        for kind, params in PARAMS.items():
            for name, prompt in PROMPTS.items():
                add(engine, f"{kind} {name}", prompt, max_tokens=8, logprobs=3, **params)
        updates = run_to_end(engine)
        add(engine, "beside a block", [*PROMPTS["37"][:30], 1, 2, 3], max_tokens=8, logprobs=3)
        updates |= run_to_end(engine)
        return {
            name: [(each.token_id, each.logprob, each.top) for update in own for each in update.logprobs]
            for name, own in updates.items()
        }


def check_equal(path: Path, sizes: Sequence[int], **settings: Any) -> None:
    expected = answers(path, 1, **settings)
    assert len(expected) == len(PROMPTS) * len(PARAMS) + 1 and all(len(each) == 8 for each in expected.values())
    for size in sizes:
        assert answers(path, size, **settings) == expected, size
