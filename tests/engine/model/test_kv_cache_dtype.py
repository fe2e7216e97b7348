"""A KV cache of fewer bits: where it is refused, what it holds, and that the model computes with it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.attention.kv_cache import LayerShape
from engine.core.config import EngineConfig
from engine.core.errors import ConfigError
from engine.model.kv_cache_dtype import choose_kv_dtype
from engine.model.setup import load_model_runner
from engine.runner.loaded_model import LoadedModel
from tests.engine.logit_errors import relative_error, runner_logits, sequences
from tests.engine.tiny_models import WIDE, make_checkpoint

LAYERS = (LayerShape(2, 64, 64), LayerShape(2, 128, 80))
BF16 = torch.bfloat16


def chosen(name: str, dtype: torch.dtype = BF16) -> torch.dtype:
    return choose_kv_dtype(name, dtype, "A", LAYERS)


def test_the_format_is_the_models_own_unless_another_is_asked_for() -> None:
    assert chosen("auto") is BF16 and chosen("auto", torch.float32) is torch.float32
    assert chosen("auto", torch.float16) is torch.float16 and chosen("bfloat16") is BF16
    assert chosen("bfloat16", torch.float32) is BF16
    assert (chosen("int8"), chosen("int4")) == (torch.int8, torch.uint8)


def test_heads_that_cannot_be_quantized_are_refused() -> None:
    layers = (*LAYERS, LayerShape(4, 20, 10))
    with pytest.raises(ConfigError, match="a multiple of 16 numbers, and those of Deep have 10, 20; use bfloat16 or"):
        choose_kv_dtype("int8", BF16, "Deep", layers)
    assert choose_kv_dtype("bfloat16", torch.float32, "Deep", layers) is BF16


def test_a_model_with_such_heads_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    path = make_checkpoint("deepseek_v3", tmp_path)
    with pytest.raises(ConfigError, match="DeepseekV3ForCausalLM have 10, 20"):
        load_model_runner(EngineConfig(model=str(path), device="cpu", kv_cache_dtype="int8"))


def test_the_same_memory_holds_more_blocks_of_fewer_bits(tmp_path: Path) -> None:
    path = str(make_checkpoint(WIDE, tmp_path))
    infos = {
        name: load_model_runner(
            EngineConfig(
                model=path,
                device="cpu",
                dtype="bfloat16",
                max_model_len=64,
                kv_cache_dtype=name,
                kv_cache_bytes=1 << 20,
            )
        )[1]
        for name in ("auto", "int8", "int4")
    }
    numbers = 2 * 2 * 2 * 64  # layers, keys and values, kv heads
    bytes_per_token = {name: info.kv_bytes_per_token for name, info in infos.items()}
    assert bytes_per_token == {"auto": 2 * numbers, "int8": numbers * 68 // 64, "int4": numbers * 36 // 64}
    assert [info.kv_cache_dtype for info in infos.values()] == ["bfloat16", "int8", "int4"]
    for info in infos.values():
        assert info.num_blocks == (1 << 20) // (16 * info.kv_bytes_per_token)
        assert info.kv_cache_bytes == info.num_blocks * 16 * info.kv_bytes_per_token
        assert sum(part.bytes_per_token for part in info.size.attention) == info.kv_bytes_per_token


def test_logits_are_those_of_the_whole_numbers_but_for_rounding(tiny_model: Callable[..., LoadedModel]) -> None:
    token_ids = sequences((40, 25))
    truth = runner_logits(tiny_model(WIDE), token_ids, chunk=16)
    errors = {
        kv: relative_error(runner_logits(tiny_model(WIDE, "float32", "none", "none", kv), token_ids, chunk=16), truth)
        for kv in ("bfloat16", "int8", "int4")
    }
    assert 0 < errors["bfloat16"] < errors["int8"] < 0.1 < errors["int4"] < 1.0, errors
