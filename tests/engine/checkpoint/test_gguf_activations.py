"""`--gguf-activations`: models in GGUF files whose weights round the rows that they multiply to 8 bits."""

import time
from pathlib import Path

import pytest

from engine.core.config import EngineConfig
from engine.core.errors import ConfigError
from engine.model.loader import load_model
from engine.model.packed_key import packed_key
from tests.engine.checkpoint.gguf_files import in_blocks, write_gguf
from tests.engine.golden_tokens import generate
from tests.engine.ranks.rank_answers import check_equal
from tests.engine.tiny_models import WIDE, make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread", "ops", "own_cache")


def rounding_rows(path: Path, **settings: str) -> EngineConfig:
    return EngineConfig(model=str(path), device="cpu", gguf_activations="int8", **settings)  # type: ignore[arg-type]


def gguf_of(architecture: str, directory: Path) -> Path:
    path = directory / "model.gguf"
    write_gguf(make_checkpoint(architecture, directory), path, in_blocks)
    return path


@pytest.mark.parametrize("architecture", [WIDE, "qwen3_moe"])
def test_answers_depend_on_no_chunk_batch_or_cache(architecture: str, tmp_path: Path) -> None:
    model = load_model(rounding_rows(gguf_of(architecture, tmp_path)))
    assert model.linear.endswith(", int8 activations")
    expected = generate(model, 16, 64, caching=False, is_tight=False)
    assert generate(model, 4, 7, caching=True, is_tight=True) == expected


def test_ranks_change_no_bit(tmp_path: Path) -> None:
    check_equal(gguf_of(WIDE, tmp_path), (2,), dtype="auto", gguf_activations="int8")


def test_a_packed_model_of_exact_products_is_another_one(tmp_path: Path) -> None:
    path = gguf_of("llama", tmp_path)
    time.sleep(0.1)  # files that changed just now have no key
    keys = {packed_key(EngineConfig(model=str(path), device="cpu")), packed_key(rounding_rows(path))}
    assert len(keys) == 2 and None not in keys


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_weights_that_leave_their_blocks_are_refused(settings: dict[str, str], tmp_path: Path) -> None:
    path = gguf_of("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"^--gguf-activations int8 is for weights .* leave it out"):
        load_model(rounding_rows(path, **settings))


def test_checkpoints_without_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--gguf-activations int8 is for weights"):
        load_model(rounding_rows(make_checkpoint("llama", tmp_path)))


def test_other_types_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="gguf_activations must be one of float32, int8, got 'int4'"):
        EngineConfig(model="m", gguf_activations="int4")
