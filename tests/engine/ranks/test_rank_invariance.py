"""Any number of ranks gives the same answers, bit for bit, and those of Hugging Face."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from engine.model.kernel_forward import KernelForward
from tests.crossed import crossed, slow_but
from tests.engine.fakes import add, run_to_end, tokens_of
from tests.engine.golden_tokens import MAX_TOKENS, generated, prompts
from tests.engine.ranks.rank_answers import answers, check_equal
from tests.engine.ranks.rank_threads import engine_on_ranks
from tests.engine.tiny_models import ARCHITECTURES, WIDE, ReferenceModel, make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread", "ops")

# heads cut, experts in the kernels, nothing fused, experts with biases, and recurrent states
EVERY_WAY = ("llama", "mixtral", "gemma3", "gpt_oss", "jamba")

PRECISIONS = {
    "int8": {"quantization": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
    "int4": {"quantization": "int4", "dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    directory = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda architecture: make_checkpoint(architecture, directory))


@pytest.mark.parametrize("architecture", slow_but(EVERY_WAY, "llama", "gpt_oss"))
def test_ranks_change_no_bit(architecture: str, checkpoint: Callable[[str], Path]) -> None:
    check_equal(checkpoint(architecture), (2, 4))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in EVERY_WAY])
def test_ranks_of_further_architectures_change_no_bit(architecture: str, checkpoint: Callable[[str], Path]) -> None:
    check_equal(checkpoint(architecture), (2, 3))


@pytest.mark.parametrize(("precision", "architecture"), crossed(PRECISIONS, ("mixtral", WIDE)))
def test_ranks_change_no_bit_of_any_weights(
    precision: str, architecture: str, checkpoint: Callable[[str], Path]
) -> None:
    check_equal(checkpoint(architecture), (3,), **PRECISIONS[precision])


def test_ranks_change_no_bit_of_a_draft(checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint("llama")
    assert answers(path, 2, draft_quantization="int4") == answers(path, 1)


def test_states_on_all_ranks_forget_wrong_draft_tokens(checkpoint: Callable[[str], Path]) -> None:
    text, params = [*range(30)], {"max_tokens": 40, "temperature": 1.2, "seed": 5}
    with engine_on_ranks(checkpoint("jamba"), 1, num_speculative_tokens=0) as (engine, _):
        add(engine, "plain", text, **params)
        answer = tokens_of(run_to_end(engine)["plain"])
    predicted = tuple(token_id + (at % 7 == 6) for at, token_id in enumerate(answer))
    with engine_on_ranks(checkpoint("jamba"), 2) as (engine, _):
        add(engine, "drafted", text, predicted_token_ids=predicted, **params)
        assert tokens_of(run_to_end(engine)["drafted"]) == answer
        stats = engine._scheduler.stats
    assert stats.num_drafts > stats.num_accepted_drafts > 0


def test_ranks_answer_as_hugging_face_does(
    checkpoint: Callable[[str], Path], reference_model: Callable[[str], ReferenceModel]
) -> None:
    model = reference_model("llama")
    with engine_on_ranks(checkpoint("llama"), 3) as (engine, _):
        for index, prompt in enumerate(prompts()):
            add(engine, str(index), prompt, max_tokens=MAX_TOKENS, temperature=0.0)
        updates = run_to_end(engine)
    assert [tokens_of(updates[str(index)]) for index in range(len(prompts()))] == [
        generated(model, prompt) for prompt in prompts()
    ]


def test_weights_and_kv_divide_among_ranks(checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint(WIDE)
    with engine_on_ranks(path, 1) as (alone, _), engine_on_ranks(path, 2) as (engine, ranks):
        assert ranks is not None and len(ranks.ready) == 1
        other = ranks.ready[1]
        assert isinstance(other.forward, KernelForward) and engine.info.forward == "kernels"
        assert engine.info.tensor_parallel_size == 2
        assert engine.info.kv_cache_bytes == alone.info.kv_cache_bytes == 2 * other.caches.kv.num_bytes
        assert engine.info.kv_bytes_per_token == alone.info.kv_bytes_per_token
        assert alone.info.weight_bytes <= engine.info.weight_bytes < 1.1 * alone.info.weight_bytes
        assert 0.4 < other.model.weight_bytes / alone.info.weight_bytes < 0.6
        assert engine.info.size.weight_bytes < 1.1 * alone.info.size.weight_bytes


def test_kv_heads_are_on_several_ranks_where_there_are_fewer(checkpoint: Callable[[str], Path]) -> None:
    with engine_on_ranks(checkpoint("llama"), 1) as (alone, _), engine_on_ranks(checkpoint("llama"), 4) as (engine, _):
        assert engine.info.kv_bytes_per_token == 2 * alone.info.kv_bytes_per_token  # 2 heads on 4 ranks


def test_memory_for_kv_is_that_of_all_ranks(checkpoint: Callable[[str], Path]) -> None:
    sizes = {"num_blocks": None, "kv_cache_bytes": 1 << 20}
    with engine_on_ranks(checkpoint(WIDE), 2, **sizes) as (engine, ranks):
        assert 0.9 * (1 << 20) < engine.info.kv_cache_bytes <= 1 << 20
        assert ranks is not None and ranks.ready[1].caches.kv.num_blocks == engine.info.num_blocks
