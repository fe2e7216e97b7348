"""Ranks of models with recurrent states, and with latents: all have these whole, and give the answers of one."""

from pathlib import Path
from typing import Any

import pytest

from tests.crossed import crossed, slow_but
from tests.engine.fakes import add, run_to_end
from tests.engine.ranks.rank_answers import check_equal
from tests.engine.ranks.rank_threads import engine_on_ranks
from tests.engine.tiny_models import SPARSE, VOCAB_SIZE, WIDE, WITH_STATES, make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread", "ops")

TEXT = [(7 * at + 3) % VOCAB_SIZE for at in range(37)]
LATENT = ("deepseek_v3", "kimi_linear")
PRECISIONS: dict[str, dict[str, Any]] = {"bfloat16": {"dtype": "bfloat16"}, "int8": {"quantization": "int8"}}


def after_copies(path: Path, size: int) -> list[Any]:
    """Asks twice with the same beginning, so that the second request goes on from copied states."""
    settings: dict[str, Any] = {"block_size": 4, "state_checkpoint_interval": 12, "max_num_batched_tokens": 11}
    with engine_on_ranks(path, size, **settings) as (engine, _):
        add(engine, "before", TEXT, max_tokens=8, temperature=0.0)
        run_to_end(engine)
        add(engine, "mine", [*TEXT, 1, 2, 3], max_tokens=12, temperature=1.2, seed=5, logprobs=3)
        updates = run_to_end(engine)["mine"]
        assert updates[0].first is not None and updates[0].first.num_cached_tokens == 36
        return [(each.token_id, each.logprob, each.top) for update in updates for each in update.logprobs]


@pytest.mark.parametrize("architecture", slow_but(sorted(WITH_STATES), "qwen3_5"))
def test_copies_of_states_are_on_all_ranks(architecture: str, tmp_path: Path) -> None:
    path = make_checkpoint(architecture, tmp_path)
    expected = after_copies(path, 1)
    assert after_copies(path, 2) == after_copies(path, 3) == expected


def test_states_are_whole_on_all_ranks(tmp_path: Path) -> None:
    path = make_checkpoint("lfm2", tmp_path)
    with engine_on_ranks(path, 1) as (alone, _), engine_on_ranks(path, 2) as (engine, _):
        assert engine.info.state_bytes_per_request == 2 * alone.info.state_bytes_per_request
        assert engine.info.num_state_slots == alone.info.num_state_slots


@pytest.mark.parametrize(("architecture", "precision"), crossed(LATENT, PRECISIONS))
def test_ranks_change_no_bit_over_latents(architecture: str, precision: str, tmp_path: Path) -> None:
    path = make_checkpoint(architecture, tmp_path)
    check_equal(path, (2, 3), **PRECISIONS[precision])


def test_latents_are_whole_on_all_ranks(tmp_path: Path) -> None:
    path = make_checkpoint("deepseek_v3", tmp_path)
    with engine_on_ranks(path, 1) as (alone, _), engine_on_ranks(path, 2) as (engine, ranks):
        assert ranks is not None and ranks.ready[1].model.layers == alone_layers(path)
        assert engine.info.kv_bytes_per_token == 2 * alone.info.kv_bytes_per_token


@pytest.mark.parametrize("architecture", slow_but({*SPARSE, "deepseek_v4"}, "deepseek_v32"))
def test_ranks_choose_the_positions_that_one_does(architecture: str, tmp_path: Path) -> None:
    check_equal(make_checkpoint(architecture, tmp_path), (2, 3))


def alone_layers(path: Path) -> Any:
    with engine_on_ranks(path, 1) as (engine, _):
        return engine._runner._model.layers  # type: ignore[attr-defined]


@pytest.mark.parametrize("kv_cache_dtype", slow_but(("int8", "int4"), "int4"))
def test_ranks_change_no_bit_of_rounded_kv(kv_cache_dtype: str, tmp_path: Path) -> None:
    check_equal(make_checkpoint(WIDE, tmp_path), (2,), kv_cache_dtype=kv_cache_dtype)
