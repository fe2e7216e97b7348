"""Same request, same answer, bit for bit: alone, among others, in chunks, after a prefix hit, after preemption."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import chain, cycle, product
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from engine.core.messages import RequestUpdate
from engine.core.thinking_budget import ThinkingBudget
from engine.engine import Engine
from engine.grammar.lark import Regex, to_lark
from engine.runner.loaded_model import LoadedModel
from engine.scheduling.speculation.prompt_lookup import PromptLookup
from tests.crossed import crossed
from tests.engine.fakes import add, run_to_end
from tests.engine.scheduling.speculation.prophets import OracleDrafter
from tests.engine.tiny_models import RARE, VOCAB_SIZE, WIDE, WITH_STATES, tiny_engine

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = ("float32", "bfloat16")
PRECISIONS = ("bfloat16 int8", "bfloat16 int4", "float32 int8")
FURTHER = ("glm4_moe", "hunyuan_moe", "ministral3", "gemma4", *sorted(RARE))
"""Architectures whose tests are slow: their parts are those of others, in other combinations, or rare."""
ARCHITECTURES = (
    "llama",
    "gemma3",
    "gpt2",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
    "olmo3",
    "cohere2",
    "gemma4_e",
    *sorted(WITH_STATES - RARE),
)
SAMPLED: dict[str, Any] = {"temperature": 1.3, "seed": 11}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": SAMPLED,
    "filtered": {**SAMPLED, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "grammar": {**SAMPLED, "ignore_eos": False, "grammar": to_lark(Regex("((a|bc|dab){2}(b|c)d{1,9}){12,}"))},
    "thinking": {**SAMPLED, "thinking": ThinkingBudget(max_tokens=5, end_id=VOCAB_SIZE - 1)},
    "penalized": {**SAMPLED, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
}
MAX_TOKENS = 12


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


MINE = prompt(1, 37)


def answer(updates: list[RequestUpdate]) -> list[tuple[int, float, tuple[tuple[int, float], ...]]]:
    """Token ids, log-probabilities and the top ones: everything a client could see."""
    return [(item.token_id, item.logprob, item.top) for update in updates for item in update.logprobs]


def add_mine(engine: Engine, params: dict[str, Any]) -> None:
    add(engine, "mine", MINE, max_tokens=MAX_TOKENS, logprobs=5, **params)


def alone(model: LoadedModel, params: dict[str, Any], **settings: Any) -> Any:
    engine = tiny_engine(model, **settings)
    add_mine(engine, params)
    return answer(run_to_end(engine)["mine"])


def among_others(model: LoadedModel, params: dict[str, Any]) -> Any:
    engine = tiny_engine(model, max_prefill_tokens_per_gap=64)
    for index in range(32):
        if index == 20:
            engine.step()  # some decode already when mine arrives
            add_mine(engine, params)
        add(engine, str(index), prompt(100 + index, 1 + 3 * index), max_tokens=15, temperature=1.0, seed=index)
    return answer(run_to_end(engine)["mine"])


def after_a_prefix_hit(model: LoadedModel, params: dict[str, Any]) -> Any:
    engine = tiny_engine(model, block_size=4, state_checkpoint_interval=12)
    add(engine, "before", MINE, max_tokens=1)
    run_to_end(engine)
    add_mine(engine, params)
    updates = run_to_end(engine)["mine"]
    assert updates[0].first is not None and updates[0].first.num_cached_tokens == 36
    return answer(updates)


def after_a_part_of_a_block(model: LoadedModel, params: dict[str, Any]) -> Any:
    """Runs the request behind another one that went on otherwise in the midst of a block."""
    engine = tiny_engine(model, block_size=16, state_checkpoint_interval=16)
    add(engine, "before", [*MINE[:27], *prompt(4, 10)], max_tokens=1)
    run_to_end(engine)
    add_mine(engine, params)
    updates = run_to_end(engine)["mine"]
    assert updates[0].first is not None and updates[0].first.num_cached_tokens == (16 if model.states else 27)
    return answer(updates)


def after_a_restart(model: LoadedModel, params: dict[str, Any]) -> Any:
    """Runs the request on an engine that finds most of its prompt in the files of another one."""
    with TemporaryDirectory() as directory:
        settings = {"block_size": 4, "kv_store": directory, "state_checkpoint_interval": 12}
        before = tiny_engine(model, **settings)
        add(before, "before", MINE, max_tokens=1)
        run_to_end(before)
        before.close()
        engine = tiny_engine(model, **settings)
        add_mine(engine, params)
        updates = run_to_end(engine)["mine"]
        engine.close()
    assert updates[0].first is not None and updates[0].first.num_cached_tokens == 36
    assert engine._scheduler.stats.prefix_disk_hits == 36
    return answer(updates)


def after_a_kill(model: LoadedModel, params: dict[str, Any]) -> Any:
    """Runs the request on an engine that finds what another one left in memory when it was killed in the midst of it,
    and where nothing is recorded, what no step would leave."""
    fd = os.memfd_create("kv")
    settings = {"block_size": 4, "kv_memory_fd": fd, "max_num_batched_tokens": 16}
    before = tiny_engine(model, **settings)
    add_mine(before, params)
    updates = first_updates(before)
    updates += first_updates(before)
    recorded = before._scheduler._kv._cache._hash_of_block
    for block in {*range(256)} - {*recorded}:
        for part in before._runner._runner._cache.block_bytes(block):
            part[:] = 0xFF
    engine = tiny_engine(model, **settings)
    os.close(fd)
    token_ids = [token_id for update in updates for token_id in update.token_ids]
    add_mine(engine, {**params, "output_token_ids": token_ids})
    rest = run_to_end(engine)["mine"]
    num_known = len(MINE) + len(token_ids)
    assert engine._scheduler.stats.prefix_hits == (num_known - 1) // 4 * 4 and token_ids
    return answer([*updates, *rest])


def first_updates(engine: Engine) -> list[RequestUpdate]:
    """Returns the updates of the first step that has any: a grammar may still be compiling."""
    while not (updates := list(engine.step().updates)):
        pass
    return updates


def after_preemption(model: LoadedModel, params: dict[str, Any]) -> Any:
    settings = {"enable_prefix_caching": False, "free_window_blocks": False}  # with which none would be preempted
    engine = tiny_engine(model, num_blocks=22, block_size=4, **settings)
    add_mine(engine, params)
    updates = first_updates(engine)
    add(engine, "first", prompt(5, 37), max_tokens=50, priority=-1)
    updates += run_to_end(engine)["mine"]
    assert updates[-1].num_preemptions > 0
    return answer(updates)


def engine_with_drafts(model: LoadedModel, mine: list[int], **settings: Any) -> Engine:
    """Returns an engine that drafts for its first request, every third token wrong, and for others by prompt lookup.
    Steps take no time, so every draft pays."""
    oracle = OracleDrafter(lambda _, output: mine[len(output) % len(mine)], cycle([False, True, False]).__next__)
    new_drafter = chain([oracle], iter(PromptLookup, None)).__next__
    return tiny_engine(model, num_speculative_tokens=4, new_drafter=new_drafter, clock=lambda: 0.0, **settings)


def speculating(model: LoadedModel, params: dict[str, Any], mine: list[int]) -> Any:
    """Runs the request with drafts, beside another one with drafts."""
    engine = engine_with_drafts(model, mine)
    add_mine(engine, params)
    updates = first_updates(engine)
    add(engine, "other", prompt(3, 9) * 4, max_tokens=30)
    updates += run_to_end(engine)["mine"]
    assert any(len(update.token_ids) > 1 for update in updates)
    return answer(updates)


def speculating_from_a_prefix(model: LoadedModel, params: dict[str, Any], mine: list[int]) -> Any:
    """Runs the request with drafts from a prefix that is cached, and in part again, from what steps with drafts left in
    the cache."""
    engine = engine_with_drafts(model, mine, block_size=4, state_checkpoint_interval=4, max_num_batched_tokens=16)
    add_mine(engine, params)
    first = answer(run_to_end(engine)["mine"])
    assert engine._scheduler.stats.num_accepted_drafts > 0
    num_hits = engine._scheduler.stats.prefix_hits
    add_mine(engine, {**params, "output_token_ids": mine[:10]})
    rest = answer(run_to_end(engine)["mine"])
    assert engine._scheduler.stats.prefix_hits - num_hits == (44 if model.states else 46)
    return first[:10] + rest


def preempted_while_speculating(model: LoadedModel, params: dict[str, Any], mine: list[int]) -> Any:
    settings = {"state_checkpoint_interval": 8, "free_window_blocks": False}
    engine = engine_with_drafts(model, mine, num_blocks=22, block_size=4, **settings)
    add_mine(engine, params)
    updates = first_updates(engine)
    add(engine, "first", prompt(5, 37), max_tokens=50, priority=-1)
    updates += run_to_end(engine)["mine"]
    assert updates[-1].num_preemptions > 0
    assert "grammar" in params or engine._scheduler.stats.num_drafts > 0  # it may forbid all of so few
    return answer(updates)


def predicting(model: LoadedModel, params: dict[str, Any], mine: list[int]) -> Any:
    """Runs the request with a prediction of which one token is wrong and one is missing, beside one whose prediction is
    all wrong."""
    predicted = (*mine[:4], (mine[4] + 1) % VOCAB_SIZE, *mine[5:8], *mine[9:])
    engine = tiny_engine(model, num_speculative_tokens=4, clock=lambda: 0.0)
    add_mine(engine, {**params, "predicted_token_ids": predicted})
    updates = first_updates(engine)
    add(engine, "other", prompt(3, 9), max_tokens=30, predicted_token_ids=prompt(6, 50))
    updates += run_to_end(engine)["mine"]
    assert any(len(update.token_ids) > 1 for update in updates)
    return answer(updates)


def resumed(model: LoadedModel, params: dict[str, Any], tokens: list[int]) -> Any:
    engine = tiny_engine(model)
    add_mine(engine, {**params, "output_token_ids": tokens})
    return answer(run_to_end(engine)["mine"])


@pytest.mark.parametrize(
    ("architecture", "dtype", "params"),
    [
        *crossed(ARCHITECTURES, DTYPES, PARAMS),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in product(FURTHER, DTYPES, PARAMS)),
    ],
)
def test_a_request_gets_the_same_answer_bit_for_bit(
    architecture: str, dtype: str, params: str, tiny_model: Callable[..., LoadedModel]
) -> None:
    assert_the_same_however_it_runs(tiny_model(architecture, dtype), PARAMS[params])


@pytest.mark.parametrize(
    ("architecture", "precision"),
    [
        *crossed(ARCHITECTURES, PRECISIONS, num_quick=12),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in product(FURTHER, PRECISIONS)),
    ],
)
def test_a_quantized_model_gives_the_same_answer_bit_for_bit_too(
    architecture: str, precision: str, tiny_model: Callable[..., LoadedModel]
) -> None:
    dtype, quantization = precision.split()
    assert_the_same_however_it_runs(tiny_model(architecture, dtype, quantization), PARAMS["filtered"])


@pytest.mark.parametrize(
    ("quantization", "dtype"), [("none", "float32"), ("none", "bfloat16"), ("int8", "bfloat16"), ("int4", "bfloat16")]
)
def test_a_wide_model_gives_the_same_answer_bit_for_bit_too(
    dtype: str, quantization: str, tiny_model: Callable[..., LoadedModel]
) -> None:
    """Holds of products over several panels, pieces of K and groups of 256."""
    assert_the_same_however_it_runs(tiny_model(WIDE, dtype, quantization), PARAMS["filtered"])


@pytest.mark.parametrize(
    ("precision", "architecture"),
    crossed(
        ("bfloat16 int8", "bfloat16 int4", "float32 int8", "float32 bfloat16"),
        ("gemma3", "gpt_oss", "deepseek_v4", WIDE),
    ),
)
def test_a_kv_cache_of_fewer_bits_gives_the_same_answer_bit_for_bit_too(
    precision: str, architecture: str, tiny_model: Callable[..., LoadedModel]
) -> None:
    dtype, kv = precision.split()
    model = tiny_model(architecture, dtype, "none", "none", kv)
    assert model.kv_dtype is not model.dtype
    assert_the_same_however_it_runs(model, PARAMS["filtered"])


@pytest.mark.slow
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_wide_model_gives_the_same_answer_with_every_parameter(
    dtype: str, quantization: str, params: dict[str, Any], tiny_model: Callable[..., LoadedModel]
) -> None:
    assert_the_same_however_it_runs(tiny_model(WIDE, dtype, quantization), params)


def assert_the_same_however_it_runs(model: LoadedModel, params: dict[str, Any]) -> None:
    mine = alone(model, params)
    assert len(mine) == MAX_TOKENS
    assert among_others(model, params) == mine
    assert alone(model, params, max_num_batched_tokens=5) == mine
    assert alone(model, params, block_size=1) == mine
    assert after_a_prefix_hit(model, params) == mine
    assert after_a_part_of_a_block(model, params) == mine
    assert after_a_restart(model, params) == mine
    assert model.states or after_a_kill(model, params) == mine  # states are not kept there
    assert after_preemption(model, params) == mine
    token_ids = [token_id for token_id, _, _ in mine]
    assert speculating(model, params, token_ids) == mine
    assert speculating_from_a_prefix(model, params, token_ids) == mine
    assert preempted_while_speculating(model, params, token_ids) == mine
    assert predicting(model, params, token_ids) == mine
    assert resumed(model, params, token_ids[:7]) == mine[7:]


def test_other_seeds_give_other_answers(tiny_model: Callable[..., LoadedModel]) -> None:
    model = tiny_model("llama")
    answers = [[token_id for token_id, _, _ in alone(model, {**SAMPLED, "seed": seed})] for seed in range(5)]
    assert len({tuple(tokens) for tokens in answers}) == 5


@pytest.mark.slow
def test_it_holds_in_plain_torch_too() -> None:
    """The same tests in a process that has no kernels."""
    some = "(llama or gpt_oss) and (greedy or int4) and not diffllama"
    command = [sys.executable, "-m", "pytest", "-q", "-k", some, __file__]
    result = subprocess.run(command, env={**os.environ, "TWOSTEP_KERNELS": "off"}, capture_output=True, text=True)
    assert result.returncode == 0 and "7 passed" in result.stdout, result.stdout
