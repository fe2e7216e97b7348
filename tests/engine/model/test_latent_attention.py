"""Models with latent attention run over the latents, as transformers does over keys and values of all heads."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.kv_cache import LayerShape, bytes_per_block
from engine.core.config import EngineConfig
from engine.core.errors import AdapterError
from engine.engine import Engine
from engine.model import latent_attention
from engine.model.loader import load_model
from engine.model.planning.estimate import estimate
from engine.model.small_copy import randomize
from engine.weights.latent_heads import LatentHeads
from tests.crossed import slow_but
from tests.engine.logit_errors import reference_logits, relative_error, runner_logits
from tests.engine.served_answers import answers_of, engine_over, generate, make_prompts
from tests.engine.tiny_adapters import make_adapter
from tests.engine.tiny_architectures import tiny_config, tiny_model
from tests.engine.tiny_models import load_reference, load_tiny, tiny_engine
from tests.engine.tiny_models import make_checkpoint as make_tiny_checkpoint

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # of transformers' code

TINY = LayerShape(1, 24, 16, is_latent=True)
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3},
    **{"original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0},
}
HYBRID = ["linear_attention", "full_attention"] * 2
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {}),
    "minicpm3": ("minicpm3", {}),
    "halves": ("deepseek_v3", {"rope_interleave": False}),
    "yarn": ("deepseek_v3", {"rope_parameters": YARN}),
    "plain_queries": ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
}
CASES |= {kind: (kind, {}) for kind in ("axk1", "deepseek_v3", "glm4_moe_lite", "youtu")}
CASES |= {kind: (kind, {"layer_types": HYBRID}) for kind in ("bailing_hybrid", "kimi_linear")}


def make_checkpoint(directory: Path, kind: str, changes: dict[str, Any]) -> Any:
    """Writes a checkpoint; returns its model."""
    model = tiny_model(kind, changes)
    randomize(model.requires_grad_(False))
    model.save_pretrained(directory)
    model.set_attn_implementation("eager")
    return model


def assert_as_transformers(engine: Engine, model: Any) -> None:
    prompts = make_prompts()
    assert answers_of(engine, prompts) == [generate(model, prompt) for prompt in prompts]


@pytest.mark.parametrize("case", slow_but(CASES, "deepseek_v2", "plain_queries", "yarn", "bailing_hybrid"))
def test_tokens_equal_those_of_keys_and_values(case: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, *CASES[case])
    engine = engine_over(tmp_path)
    num_layers = sum(hasattr(each, "kv_b_proj") for each in model.modules())
    assert num_layers > 0
    assert engine.info.kv_bytes_per_token == num_layers * 4 * (16 + 8)
    assert_as_transformers(engine, model)


def test_a_token_takes_the_bytes_of_its_latent(tmp_path: Path) -> None:
    """Sizes are DeepSeek-V3's: 576 numbers a token and layer, where keys and values of 128 heads have 40,960."""
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    config = tiny_config("deepseek_v3", {**sizes, "qk_head_dim": 192, "head_dim": 64, "num_attention_heads": 128})
    config.num_key_value_heads = 128
    config.save_pretrained(tmp_path)
    assert estimate(str(tmp_path)).kv_block_bytes == 16 * 4 * 576 * 2
    assert bytes_per_block([LayerShape(1, 576, 512, is_latent=True)], 16, torch.bfloat16) == 16 * 576 * 2


@pytest.mark.parametrize(("dtype", "most"), [("auto", 2e-6), ("bfloat16", 0.003), ("int8", 0.008), ("int4", 0.13)])
def test_latents_of_fewer_bits_err_as_keys_and_values_do(dtype: str, most: float, tmp_path: Path) -> None:
    """Bounds are twice what they err by here."""
    sizes = {"kv_lora_rank": 256, "qk_rope_head_dim": 16, "qk_head_dim": 32, "head_dim": 16}
    make_checkpoint(tmp_path, "deepseek_v3", {**sizes, "first_k_dense_replace": 4})
    model, token_ids = load_tiny(tmp_path, kv=dtype), make_prompts()
    assert [(each.head_size, each.head_size_v, each.is_latent) for each in model.layers] == [(272, 256, True)] * 4
    logits = runner_logits(model, token_ids, chunk=11)
    assert relative_error(logits, reference_logits(load_reference(tmp_path), token_ids)) < most


def test_latents_that_cannot_be_shared_in_few_bits_are_expanded(tmp_path: Path) -> None:
    """A latent of 32 numbers is transformed together with what follows it."""
    sizes = {
        "kv_lora_rank": 32,
        "head_dim": 16,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "qk_head_dim": 32,
        "v_head_dim": 16,
    }
    make_checkpoint(tmp_path, "deepseek_v3", sizes)
    layers = load_model(EngineConfig(model=str(tmp_path), device="cpu", kv_cache_dtype="int8")).layers
    assert {(each.num_kv_heads, each.head_size, each.is_latent) for each in layers} == {(4, 32, False)}


def test_code_that_is_not_known_goes_on_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_checkpoint(tmp_path, "deepseek_v3", {})
    monkeypatch.setattr(latent_attention, "_known_expansion", lambda: lambda self, latents, rotated: None)
    engine = engine_over(tmp_path)
    assert engine.info.kv_bytes_per_token == 4 * 4 * 4 * (24 + 16)
    assert "way of expanding latents is not known" in caplog.text
    assert_as_transformers(engine, model)


def test_what_the_proof_refuses_is_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_checkpoint(tmp_path, "deepseek_v3", {})
    monkeypatch.setattr(latent_attention, "_joined", lambda latents, rotated: joined_wrongly(latents, rotated))
    engine = engine_over(tmp_path)
    assert engine.info.kv_bytes_per_token == 4 * 4 * 4 * (24 + 16)
    assert "not latents: DeepseekV3ForCausalLM computes something else" in caplog.text
    assert_as_transformers(engine, model)


def joined_wrongly(latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    key = torch.cat((latents, rotated.flip(-1)), dim=-1)
    return key, key[..., : latents.shape[-1]]


def test_an_adapter_of_up_projections_has_them_stay(tmp_path: Path) -> None:
    """An adapter that adds to them is served over keys and values, if it comes with the model; else it is refused."""
    path = make_tiny_checkpoint("deepseek_v3", tmp_path)
    make = functools.partial(make_adapter, model=load_reference(path), rank=4)
    ups, others = make(tmp_path / "ups", target_modules=["kv_b_proj"]), make(tmp_path / "o", target_modules=["o_proj"])
    assert not load_tiny(path, adapters={"ups": ups}).layers[0].is_latent
    model = load_tiny(path, adapters={"others": others})
    assert model.layers[0].is_latent
    engine = tiny_engine(model, has_adapters=True)
    engine.load_adapter(str(others))
    with pytest.raises(AdapterError, match="kv_b_proj is no linear layer that can have an adapter"):
        engine.load_adapter(str(ups))


def test_steps_do_the_same_products_and_read_latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "deepseek_v3", {})
    latent = load_tiny(tmp_path).size
    monkeypatch.setattr(latent_attention, "_known_expansion", lambda: None)
    expanded = load_tiny(tmp_path).size
    assert latent.layer_flops == expanded.layer_flops
    assert [each.bytes_per_token for each in latent.attention] == [4 * 4 * (16 + 8)]
    last = 2 * 4 * (24 + 16)
    assert [(each.flops_per_pair, each.flops_per_scored_pair) for each in latent.attention] == [(3 * last, last)]


def test_up_projections_are_not_quantized(tmp_path: Path) -> None:
    model = load_tiny(make_tiny_checkpoint("deepseek_v3", tmp_path), "bfloat16", "int4")
    heads = [each for each in model.module.modules() if isinstance(each, LatentHeads)]
    assert len(heads) == 3 and {weight.dtype for each in heads for weight in each.weights} == {torch.bfloat16}
    assert {type(weight).__name__ for each in heads for weight in each.weights} <= {
        "KernelWeight",
        "BatchInvariantWeight",
    }
