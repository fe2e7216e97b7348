"""Models with recurrent states give the same answer, bit for bit, cold, from memory and from files, whatever befalls
these."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine.assembly import load_engine
from engine.core.config import EngineConfig
from engine.core.messages import RequestUpdate
from engine.engine import Engine
from engine.runner.loaded_model import LoadedModel
from tests.engine.fakes import add, run_to_end
from tests.engine.tiny_architectures import tiny_model
from tests.engine.tiny_models import load_tiny, tiny_engine

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS = ("qwen3_5_text", "jamba", "lfm2", "mamba", "mamba2")
"""A gated delta net, a Mamba beside attention, a short convolution; and two that have no attention at all."""
PROMPT = [random.Random(1).randrange(3, 120) for _ in range(45)]
"""Eleven full blocks of four tokens, with states after 12, 24 and 36 of them."""
STATES = 3


SETTINGS: dict[str, Any] = {"block_size": 4, "state_checkpoint_interval": 12, "max_num_seqs": 4, "num_blocks": 64}

Loads = Callable[..., Engine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    @cache
    def loaded(model_type: str) -> LoadedModel:
        path = tmp_path_factory.mktemp(model_type)
        tiny_model(model_type).save_pretrained(path)
        return load_tiny(path, "bfloat16")

    return loaded


@pytest.fixture
def loads(model: Callable[[str], LoadedModel], tmp_path: Path) -> Loads:
    """Returns what makes an engine over a store of this test."""
    return lambda model_type, **settings: tiny_engine(
        model(model_type), **{**SETTINGS, "kv_store": str(tmp_path / "kv"), **settings}
    )


def ask(engine: Engine, **fields: Any) -> tuple[list[Any], int]:
    """Returns all that a client could see of the answer, and how many prompt tokens were cached."""
    add(engine, "a", PROMPT, max_tokens=8, logprobs=3, temperature=1.1, seed=5, **fields)
    updates: list[RequestUpdate] = run_to_end(engine)["a"]
    assert updates[0].first is not None
    seen = [(each.token_id, each.logprob, each.top) for update in updates for each in update.logprobs]
    return seen, updates[0].first.num_cached_tokens


def files(tmp_path: Path) -> list[Path]:
    return sorted(
        (path for path in (tmp_path / "kv").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )


@pytest.mark.parametrize("model_type", MODELS)
def test_an_answer_is_the_same_cold_from_memory_and_from_files(model_type: str, loads: Loads, tmp_path: Path) -> None:
    engine = loads(model_type)
    cold, num_found = ask(engine)
    assert len(cold) == 8 and num_found == 0
    assert ask(engine) == (cold, 36) and engine._scheduler.stats.prefix_disk_hits == 0
    engine.close()
    again = loads(model_type)
    assert ask(again) == (cold, 36) and again._scheduler.stats.prefix_disk_hits == 36
    shorter = loads(model_type, kv_store=str(tmp_path / "other"), state_checkpoint_interval=8)
    assert ask(shorter) == (cold, 0) and ask(shorter) == (cold, 40)


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign", "missing"])
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "jamba", "lfm2"])
def test_damaged_states_cost_time_and_no_bit(model_type: str, damage: str, loads: Loads, tmp_path: Path) -> None:
    engine = loads(model_type)
    cold, _ = ask(engine)
    engine.close()
    sizes = [path.stat().st_size for path in files(tmp_path)]
    [size] = {each for each in sizes if sizes.count(each) == STATES + 1}  # one more of the answer
    states = [path for path in files(tmp_path) if path.stat().st_size == size]
    contents = [path.read_bytes() for path in states]
    for path, content, other in zip(states, contents, [*contents[1:], contents[0]], strict=True):
        flipped = bytearray(content)
        flipped[-50] ^= 8
        path.write_bytes({"cut": content[:-9], "flipped": flipped, "foreign": other, "missing": b""}[damage])
        if damage == "missing":
            path.unlink()
    again = loads(model_type)
    assert ask(again) == (cold, 0)
    assert again.step().stats.store_damaged_files == (0 if damage == "missing" else STATES)
    again.close()
    assert ask(loads(model_type)) == (cold, 36), "they are stored again"


def test_an_engine_that_is_loaded_anew_finds_them(tmp_path: Path) -> None:
    tiny_model("qwen3_5_text").save_pretrained(tmp_path / "model")
    settings = {**SETTINGS, "device": "cpu", "max_model_len": 128, "kv_store": str(tmp_path / "kv")}
    answers = []
    for _ in range(2):
        engine = load_engine(EngineConfig(model=str(tmp_path / "model"), kv_cache_bytes=8 << 20, **settings))
        answers.append(ask(engine))
        engine.close()
    assert [num_found for _, num_found in answers] == [0, 36] and answers[0][0] == answers[1][0]
    assert engine.info.kv_fingerprint
