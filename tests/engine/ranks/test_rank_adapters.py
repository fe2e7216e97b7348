"""Ranks with adapters give the answers of one process, bit for bit, whatever adapters a batch has, come and go."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.core.adapters import AdapterSource
from engine.core.errors import AdapterError, InvalidParameterError
from engine.engine import Engine
from tests.crossed import crossed
from tests.engine.fakes import add, run_to_end
from tests.engine.ranks.rank_adapters import adapters_of
from tests.engine.ranks.rank_answers import PARAMS, PROMPTS
from tests.engine.ranks.rank_threads import engine_on_ranks
from tests.engine.tiny_models import WIDE, make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread", "ops")

# heads and MLP cut, a mixture, shared experts beside one, merged by the checkpoint, nothing fused, gated attention and
# recurrent layers, latents, gates of a projection of their own
ARCHITECTURES = ("llama", "mixtral", "qwen2_moe", "phi3", "gemma3", "qwen3_5", "deepseek_v3", "afmoe", WIDE)
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
}


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_checkpoint(getattr(request, "param", "llama"), tmp_path)


def answers(engine: Engine, digests: Mapping[str, str]) -> dict[str, list[Any]]:
    """Asks for each adapter, and for none, in one batch."""
    for kind, params in PARAMS.items():
        for adapter, digest in digests.items():
            for name, prompt in PROMPTS.items():
                add(engine, f"{kind} {adapter} {name}", prompt, max_tokens=6, logprobs=3, adapter=digest, **params)
    return {
        name: [(each.token_id, each.logprob, each.top) for update in own for each in update.logprobs]
        for name, own in run_to_end(engine).items()
    }


def load_all(engine: Engine, paths: Mapping[str, Path]) -> dict[str, str]:
    return {name: engine.load_adapter(str(path)).digest for name, path in paths.items()}


@pytest.mark.parametrize(("architecture", "precision"), crossed(ARCHITECTURES, PRECISIONS, num_quick=4))
def test_ranks_change_no_bit_of_an_adapter(architecture: str, precision: str, tmp_path: Path) -> None:
    path = make_checkpoint(architecture, tmp_path)
    paths, settings = adapters_of(path), {"max_num_batched_tokens": 11, **PRECISIONS[precision]}
    with engine_on_ranks(path, 1, **settings) as (engine, _):
        expected = answers(engine, {"": ""} | load_all(engine, paths))
    for name in PROMPTS:
        assert len({str(expected[f"sampled {adapter} {name}"]) for adapter in ("", "a", "b")}) == 3
    for size in (2, 3):
        with engine_on_ranks(path, size, **settings) as (engine, _):
            assert answers(engine, {"": ""} | load_all(engine, paths)) == expected, size


def test_adapters_of_the_start_are_on_all_ranks(checkpoint: Path) -> None:
    paths = adapters_of(checkpoint)
    with engine_on_ranks(checkpoint, 1) as (engine, _):
        expected = answers(engine, load_all(engine, paths))
    sources = tuple(AdapterSource(name, str(path)) for name, path in paths.items())
    with engine_on_ranks(checkpoint, 2, adapters=sources) as (engine, _):
        assert answers(engine, {name: info.digest for name, info in engine.info.adapters.items()}) == expected


def test_adapters_come_and_go_on_all_ranks(checkpoint: Path) -> None:
    paths = adapters_of(checkpoint)
    with engine_on_ranks(checkpoint, 1) as (engine, _):
        expected = answers(engine, {"": ""} | load_all(engine, paths))
    with engine_on_ranks(checkpoint, 2) as (engine, ranks):
        assert ranks is not None
        digests = load_all(engine, paths)
        for name in ("a", "b", "a"):
            engine.unload_adapter(digests[name])
            with pytest.raises(InvalidParameterError, match="no longer loaded"):
                add(engine, "late", [1, 2], adapter=digests[name])
            run_to_end(engine)
            assert not engine._adapters.unloaded
            assert engine.load_adapter(str(paths[name])).digest == digests[name]
            assert answers(engine, {"": ""} | digests) == expected
        assert ranks.ready[1].adapters.unloaded == []
        assert all(ranks.ready[1].adapters.number_of(digest) is not None for digest in digests.values())


def test_the_second_matrices_divide_among_ranks(tmp_path: Path) -> None:
    path = make_checkpoint(WIDE, tmp_path)
    adapter = str(adapters_of(path)["a"])
    with engine_on_ranks(path, 1) as (alone, _), engine_on_ranks(path, 2) as (engine, _):
        whole, info = alone.load_adapter(adapter).num_bytes, engine.load_adapter(adapter)
        assert whole < info.num_bytes < 2 * whole


def test_what_one_rank_cannot_load_no_rank_has(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = adapters_of(checkpoint)
    with engine_on_ranks(checkpoint, 2) as (engine, ranks):
        assert ranks is not None
        other = ranks.ready[1].adapters
        for own in ({"_max_rank": 3}, {"_max_adapters": 0}):
            with monkeypatch.context() as patch:
                for name, value in own.items():
                    patch.setattr(other, name, value)
                with pytest.raises(AdapterError, match="cannot be loaded by all processes of the model"):
                    engine.load_adapter(str(paths["a"]))
        with pytest.raises(AdapterError, match="no directory"):
            engine.load_adapter(str(checkpoint / "nowhere"))
        digest = engine.load_adapter(str(paths["a"])).digest
        assert len(answers(engine, {"": "", "a": digest})) == 2 * len(PARAMS) * len(PROMPTS)
        assert [*other._loaded] == [digest]
