"""What the embedded model itself goes on with: the text that its MTP head will draft in."""

from __future__ import annotations

import inspect
import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from engine.assembly import assemble
from engine.core.config import EngineConfig
from engine.core.generation_request import GenerationRequest
from engine.core.messages import AddRequest
from engine.core.sampling_params import SamplingParams
from engine.model.setup import load_model_runner

__all__ = ["continued", "program_pieces", "prompts_of"]

TEMPERATURES = (0.0, 0.7, 1.0)
PROMPT_TOKENS = (8, 128)
AT_ONCE = 64


def prompts_of(rows: Sequence[Sequence[int]], count: int, rng: random.Random) -> list[list[int]]:
    """Returns the beginnings of `count` of the rows."""
    return [[*row[: rng.randint(*PROMPT_TOKENS)]] for row in rng.sample(rows, count)]


def program_pieces(
    tokenizer: PreTrainedTokenizerFast, held_out: ModuleType, count: int, rng: random.Random
) -> tuple[list[list[int]], list[list[int]]]:
    """Returns `count` pieces of the standard library's programs, and a tenth as many of the module `held_out`, of which
    the former have none."""
    own = Path(inspect.getfile(held_out))
    files = [path for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if path.name != own.name]
    texts = [path.read_text(encoding="utf-8") for path in (*files, own)]
    *others, last = tokenizer(texts)["input_ids"]
    others = [ids for ids in others if len(ids) > PROMPT_TOKENS[1]]
    return [_piece(rng.choice(others), rng) for _ in range(count)], [_piece(last, rng) for _ in range(count // 10)]


def _piece(token_ids: list[int], rng: random.Random) -> list[int]:
    start = rng.randrange(len(token_ids) - PROMPT_TOKENS[1])
    return token_ids[start : start + rng.randint(*PROMPT_TOKENS)]


def continued(model: Path, prompts: Sequence[list[int]], length: int) -> list[list[int]]:
    """Returns the prompts with what the model goes on with, `length` tokens each: greedily, and sampled."""
    config = EngineConfig(model=str(model), max_model_len=length, max_num_seqs=AT_ONCE, mtp=False)
    runner, info = load_model_runner(config)
    engine = assemble(config, info, runner)
    texts = [[*prompt] for prompt in prompts]
    for index, prompt in enumerate(prompts):
        temperature = TEMPERATURES[index % len(TEMPERATURES)]
        params = SamplingParams(max_tokens=length - len(prompt), temperature=temperature, seed=index, ignore_eos=True)
        asked = GenerationRequest(prompt_token_ids=prompt, params=params, arrival_s=0.0)
        engine.add_request(AddRequest(request_id=str(index), asked=asked))
    with tqdm(total=sum(length - len(prompt) for prompt in prompts), unit="token", dynamic_ncols=True) as bar:
        while engine.has_work:
            for update in engine.step().updates:
                texts[int(update.request_id)] += update.token_ids
                bar.update(len(update.token_ids))
    return texts
