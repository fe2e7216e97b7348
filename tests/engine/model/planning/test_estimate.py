"""What is told of a model from its configuration is what loading it finds."""

from pathlib import Path

import pytest

import engine
from engine.core.config import EngineConfig
from engine.core.errors import ModelError
from engine.core.kv_groups import ONE_GROUP
from engine.model.loader import load_model
from engine.model.planning.estimate import estimate
from engine.model.setup import load_model_runner
from tests.engine.tiny_models import make_checkpoint

EMBEDDED = str(Path(engine.__file__).parent / "embedded_model")


def test_an_estimate_is_what_loading_finds() -> None:
    model = load_model(EngineConfig(model=EMBEDDED, device="cpu", dtype="bfloat16"))
    told = estimate(EMBEDDED)
    assert told.architecture == model.architecture and told.max_model_len == model.max_model_len
    assert 0.7 * 2 * told.num_weights < model.weight_bytes <= 2 * told.num_weights  # kernels may code them without loss
    assert told.kv_block_bytes == model.bytes_per_block(16) and told.kv_groups == ONE_GROUP
    assert 0.7 * told.size.weight_bytes < model.size.weight_bytes <= told.size.weight_bytes
    assert (told.size.layer_flops, told.size.head_flops) == (model.size.layer_flops, model.size.head_flops)
    (attention,), (loaded,) = told.size.attention, model.size.attention
    assert attention.bytes_per_token == loaded.bytes_per_token
    assert attention.flops_per_pair == loaded.flops_per_pair + loaded.flops_per_scored_pair


def test_layers_with_windows_are_in_the_groups_of_the_engine(tmp_path: Path) -> None:
    path = str(make_checkpoint("gemma3", tmp_path))
    info = load_model_runner(EngineConfig(model=path, device="cpu", num_blocks=8, dtype="bfloat16"))[1]
    told = estimate(path)
    assert told.kv_groups == info.kv_groups != ONE_GROUP
    assert told.kv_block_bytes == info.kv_cache_bytes // info.num_blocks


def test_nothing_but_the_configuration_is_read(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    before = estimate(str(path))
    for weights in path.glob("*.safetensors"):
        weights.unlink()
    assert estimate(str(path)) == before


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ModelError, match="encoder-decoder"):
        estimate(str(tmp_path))
    with pytest.raises(ModelError, match="get it with twostep pull org/model:Q4_0, and name its path"):
        estimate("org/model:Q4_0")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "many"}')
    with pytest.raises(ModelError, match=r"cannot be told from its config\.json"):
        estimate(str(tmp_path))
