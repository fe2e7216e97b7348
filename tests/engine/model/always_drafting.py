"""A draft model that drafts in every step, and answers of many kinds to compare."""

from collections.abc import Sequence

from engine.core.draft import Draft
from engine.core.request import Request
from engine.core.thinking_budget import ThinkingBudget
from engine.engine import Engine
from engine.grammar.lark import Regex, to_lark
from engine.scheduling.cost.step_cost import TokenPrice
from tests.engine.fakes import add, run_to_end
from tests.engine.tiny_models import VOCAB_SIZE

WORDS = to_lark(Regex("((a|bc|dab){2}(b|c)d{1,9}){12,}"))


class Always:
    """A draft length policy that drafts the same number of tokens in every step, accepted or not."""

    def __init__(self, length: int) -> None:
        self._length = length

    def plan(self, requests: Sequence[Request], drafts: Sequence[Draft], price: TokenPrice) -> list[int]:
        left = (each.asked.params.max_tokens - len(each.output_token_ids) - 1 for each in requests)
        return [min(self._length, num) for num in left]

    def learn(self, request: Request, draft: Sequence[int], sampled: Sequence[int]) -> None:
        pass


def let_always_draft(runs: Engine, length: int) -> Engine:
    runs._scheduler._speculation._draft_lengths = Always(length)
    return runs


def answers(runs: Engine) -> dict[str, list[tuple[int, float]]]:
    for index, length in enumerate((5, 1, 23)):
        prompt = [(7 * at + index) % VOCAB_SIZE for at in range(length)]
        add(runs, f"greedy {index}", prompt, max_tokens=14, temperature=0.0, logprobs=0)
        add(runs, f"sampled {index}", prompt, max_tokens=14, temperature=1.1, seed=index, top_p=0.95, logprobs=0)
    add(runs, "grammar", [5], max_tokens=14, temperature=1.1, seed=9, ignore_eos=False, grammar=WORDS, logprobs=0)
    add(
        runs,
        "thinking",
        [6],
        max_tokens=14,
        temperature=1.1,
        seed=8,
        thinking=ThinkingBudget(max_tokens=5, end_id=VOCAB_SIZE - 1),
        logprobs=0,
    )
    updates = run_to_end(runs)
    return {
        name: [(score.token_id, score.logprob) for each in own for score in each.logprobs]
        for name, own in updates.items()
    }
