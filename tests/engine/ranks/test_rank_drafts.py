"""What drafts beside several ranks: heads on all of them, another model on the first. Answers stay the same, and drafts
are those of one rank."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine.attention.kv_cache import bytes_per_block
from engine.core.batch import Batch
from engine.engine import Engine
from tests.crossed import crossed
from tests.engine.fakes import add, run_to_end
from tests.engine.model.always_drafting import let_always_draft
from tests.engine.model.eagle_checkpoints import make_target, write_head
from tests.engine.model.mtp_checkpoints import make_checkpoint_with_head, make_twin
from tests.engine.model.small_models import EMBEDDED, save_small_model
from tests.engine.ranks.rank_answers import PROMPTS, check_equal
from tests.engine.ranks.rank_threads import engine_on_ranks

pytestmark = pytest.mark.usefixtures("one_thread", "ops")

# latents and experts, a window, nothing fused in a head read hidden state first, recurrent states
WITH_HEADS = ("llama", "deepseek_v3", "qwen2", "qwen3_5", "glm4_moe", "mellum")
PRECISIONS: dict[str, dict[str, Any]] = {"float32": {}, "bfloat16": {"dtype": "bfloat16"}}


class Drafted(NamedTuple):
    """What clients see, the draft tokens of each step by request, and how many of them were right."""

    answers: dict[str, list[Any]]
    drafts: dict[str, list[Any]]
    num_accepted: int


def drafted(path: Path, size: int, **settings: Any) -> Drafted:
    """Runs requests whose prompts are computed in chunks, with three draft tokens in each step if something drafts."""
    with engine_on_ranks(path, size, max_num_batched_tokens=11, **settings) as (engine, _):
        drafts = record_drafts(engine) if engine.info.draft_size is not None else {}
        for name, prompt in PROMPTS.items():
            add(engine, f"greedy {name}", prompt, max_tokens=14, temperature=0.0, logprobs=0)
            add(engine, f"sampled {name}", prompt, max_tokens=14, temperature=1.1, seed=4, top_p=0.95, logprobs=0)
        updates = run_to_end(engine)
        add(engine, "after its prefix", [*PROMPTS["37"], 1, 2], max_tokens=14, temperature=0.0, logprobs=0)
        updates |= run_to_end(engine)
        found = {
            name: [(each.token_id, each.logprob) for update in own for each in update.logprobs]
            for name, own in updates.items()
        }
        return Drafted(found, drafts, engine._scheduler.stats.num_accepted_drafts)


def record_drafts(engine: Engine) -> dict[str, list[Any]]:
    """Has the engine draft three tokens in each step; returns what will have those of each request."""
    let_always_draft(engine, 3)
    drafts: dict[str, list[Any]] = {}
    draft = engine._runner.draft

    def recorded(batch: Batch) -> Batch:
        made = draft(batch)
        for each in made.requests:
            drafts.setdefault(each.request_id, []).append((each.start, [*each.draft]))
        return made

    engine._runner.draft = recorded  # type: ignore[method-assign]
    return drafts


def check_drafts(path: Path, **settings: Any) -> int:
    """Compares drafts of two and three ranks with those of one, and answers with those without drafts, too. Returns how
    many were right."""
    one = drafted(path, 1, **settings)
    assert any(tokens for own in one.drafts.values() for _, tokens in own)
    assert drafted(path, 1, **{**settings, "num_speculative_tokens": 0, "draft_model": None}).answers == one.answers
    for size in (2, 3):
        assert drafted(path, size, **settings) == one, size
    return one.num_accepted


@pytest.mark.parametrize(("architecture", "precision"), crossed(WITH_HEADS, PRECISIONS, num_quick=2))
def test_an_mtp_head_drafts_on_all_ranks(architecture: str, precision: str, tmp_path: Path) -> None:
    path = make_checkpoint_with_head(architecture, tmp_path, make_twin)
    assert check_drafts(path, **PRECISIONS[precision]) > 0


@pytest.mark.parametrize(("architecture", "precision"), crossed(("llama", "qwen3_moe"), PRECISIONS))
def test_an_eagle_head_drafts_on_all_ranks(architecture: str, precision: str, tmp_path: Path) -> None:
    path, head = make_target(architecture, tmp_path), write_head(tmp_path)
    check_drafts(path, draft_model=str(head), **PRECISIONS[precision])


def test_a_draft_model_drafts_on_the_first_rank(tmp_path: Path) -> None:
    settings = {"draft_model": str(save_small_model(tmp_path)), "max_model_len": 256}
    assert drafted(EMBEDDED, 2, **settings) == drafted(EMBEDDED, 1, **settings)


def test_kv_and_hidden_states_of_a_head_are_those_of_all_ranks(tmp_path: Path) -> None:
    path = make_checkpoint_with_head("llama", tmp_path)
    with engine_on_ranks(path, 1) as (alone, _), engine_on_ranks(path, 2) as (engine, ranks):
        assert ranks is not None
        other = ranks.ready[1]
        assert other.head is not None and engine.info.has_head
        assert engine.info.draft_kv_bytes == 2 * alone.info.draft_kv_bytes
        own = bytes_per_block(other.model.layers, 16, other.model.kv_dtype)
        assert other.model.bytes_per_block(16) - own == alone.info.draft_kv_bytes // 64
        assert engine.info.draft_size is not None and alone.info.draft_size is not None
        assert engine.info.draft_size.layer_bytes == 2 * alone.info.draft_size.layer_bytes


def test_a_head_that_one_rank_cannot_load_drafts_on_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.model.drafting import mtp_head

    path, load = make_checkpoint_with_head("llama", tmp_path), mtp_head.load_mtp_head
    num_loads: list[int] = []

    def load_once(*arguments: Any) -> Any:
        num_loads.append(1)
        return load(*arguments) if len(num_loads) == 1 else None

    monkeypatch.setattr(mtp_head, "load_mtp_head", load_once)
    with engine_on_ranks(path, 2) as (engine, ranks):
        assert ranks is not None and ranks.ready[1].head is None and not engine.info.has_head
        add(engine, "a", [1, 2, 3], max_tokens=3)
        assert run_to_end(engine)["a"][-1].finish_reason == "length"


def test_a_head_beside_ranks_is_not_loaded_unless_it_drafts(tmp_path: Path) -> None:
    check_equal(make_checkpoint_with_head("llama", tmp_path), (2,), mtp=False)
