"""A text model that transformers has no language model of becomes one with the head of its whole model."""

import copy
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Step3p7TextConfig

from engine.assembly import load_engine
from engine.attention import registry
from engine.core.config import EngineConfig
from engine.core.errors import UnsupportedModelError
from engine.model.known import text_models
from engine.model.known.text_models import leave_out_unused
from engine.model.loader import load_model
from engine.model.paging_proof import prove_paging
from engine.model.planning.estimate import estimate
from engine.model.small_copy import num_distinct_layers
from engine.model.text_part import TEXT_PART_NAMES, text_part_of
from tests.engine.model.text_parts.whole_models import save_whole_model
from tests.engine.served_answers import answers_of, generate, make_prompts, serve
from tests.engine.tiny_architectures import tiny_config

KINDS = [text.whole_type for text in text_models._TEXT_MODELS.values()]

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' own code, about its default configurations


def language_model(path: Path, whole: PreTrainedModel) -> PreTrainedModel:
    config = text_part_of(copy.deepcopy(whole.config))
    text_models.register_language_model(config, TEXT_PART_NAMES)
    model, info = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        key_mapping=TEXT_PART_NAMES,
        dtype=torch.float32,
        output_loading_info=True,
    )
    assert not info["missing_keys"]
    leave_out_unused(model)
    return model.eval()


@torch.inference_mode()
@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=() if each == "step3p7" else pytest.mark.slow) for each in KINDS]
)
def test_it_gives_the_logits_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    whole = save_whole_model(kind, tmp_path, {"tie_word_embeddings": False}, tie_word_embeddings=False)
    token_ids = torch.tensor([make_prompts()[1]])
    expected = whole(input_ids=token_ids, use_cache=False).logits
    logits = language_model(tmp_path, whole)(input_ids=token_ids, use_cache=False).logits
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=() if each == "step3p7" else pytest.mark.slow) for each in KINDS]
)
def test_in_16_bits_it_answers_in_a_batch_as_alone(kind: str, tmp_path: Path) -> None:
    save_whole_model(kind, tmp_path)
    prompts = make_prompts()
    config = EngineConfig(model=str(tmp_path), device="cpu", dtype="bfloat16", num_blocks=64, max_num_batched_tokens=16)
    together = answers_of(load_engine(config), prompts)
    alone = load_engine(msgspec.structs.replace(config, max_num_batched_tokens=128))
    assert together == [answers_of(alone, [prompt])[0] for prompt in prompts]


def test_parts_of_layers_for_images_are_not_in_memory(tmp_path: Path) -> None:
    model = language_model(tmp_path, save_whole_model("ernie4_5_vl_moe", tmp_path))
    names = {name for name, _ in model.named_modules()}
    assert any(name.endswith(".text_moe.experts") for name in names)
    assert not any("vision" in name for name in names)


def test_layers_for_further_tokens_are_left_out(tmp_path: Path) -> None:
    whole = save_whole_model("step3p7", tmp_path)
    add_mtp_layer(tmp_path, hidden_size=64)
    prompts = make_prompts()[:2]
    assert serve(tmp_path, prompts) == [generate(whole, prompt) for prompt in prompts]


def add_mtp_layer(path: Path, hidden_size: int) -> None:
    """Adds a layer's tensors behind the last one's, named as the published checkpoint has them."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    of_last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.3.")}
    assert of_last
    added = {name.replace(".3.", ".4.", 1): torch.randn_like(tensor) for name, tensor in of_last.items()}
    added |= {f"model.layers.4.{name}.weight": torch.randn(hidden_size) for name in ("enorm", "hnorm")}
    added["model.layers.4.eh_proj.weight"] = torch.randn(hidden_size, 2 * hidden_size)
    added["model.layers.4.transformer.shared_head.norm.weight"] = torch.randn(hidden_size)
    added["model.layers.4.transformer.shared_head.output.weight"] = torch.randn(128, hidden_size)
    save_file(tensors | added, file, metadata={"format": "pt"})


def test_a_copy_of_few_layers_is_proved_where_the_last_ones_have_other_bounds() -> None:
    """The published configuration of Step 3.7, with as many layers as fit."""
    registry.register()
    kinds = ["full_attention", *["sliding_attention"] * 3]
    config = Step3p7TextConfig(
        **{"num_hidden_layers": 8, "num_nextn_predict_layers": 1, "layer_types": [*kinds * 2, "sliding_attention"]},
        **{"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "share_expert_dim": 32},
        **{"head_dim": 16, "num_attention_heads": 4, "num_attention_groups": 2, "vocab_size": 128, "sliding_window": 8},
        attention_other_setting={"num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 16},
        **{"moe_num_experts": 4, "moe_top_k": 2, "moe_layers_enum": "3,4,5,6,7", "moe_router_scaling_factor": 3.0},
        rope_theta=[5_000_000.0, 10_000.0, 10_000.0, 10_000.0] * 2 + [10_000.0],
        partial_rotary_factors=[0.5, 1.0, 1.0, 1.0] * 2 + [1.0],
        swiglu_limits=[0.0] * 6 + [7.0, 7.0, 0.0],
        swiglu_limits_shared=[0.0] * 7 + [16.0, 0.0],
    )
    text_models.register_language_model(config, TEXT_PART_NAMES)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert num_distinct_layers(model) == 5
    prove_paging(model, 512)


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_takes_is_told_without_weights(kind: str, tmp_path: Path) -> None:
    config = tiny_config(kind)
    config.save_pretrained(tmp_path)
    told = estimate(str(tmp_path))
    assert told.architecture.endswith("TextForCausalLM")
    assert told.num_layers == config.get_text_config(decoder=True).num_hidden_layers
    assert told.kv_block_bytes > 0 < told.num_weights


def test_it_runs_with_weights_of_random_numbers(tmp_path: Path) -> None:
    tiny_config("step3p7").save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu", load_format="dummy", num_blocks=64)
    assert answers_of(load_engine(config), make_prompts()[:1])


def test_a_text_that_is_read_in_both_directions_is_refused(tmp_path: Path) -> None:
    save_whole_model("step3p7", tmp_path, {"use_bidirectional_attention": True})
    with pytest.raises(UnsupportedModelError, match="computes something else over a paged KV cache"):
        load_model(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"qk_norm_type": "olmo", "norm_after": True}, {"additional_vocab_size": 0, "rope_scaling_layers": [1]}]
)
def test_other_layers_of_the_same_family_are_served_too(changes: dict[str, object], tmp_path: Path) -> None:
    scaled = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    whole = save_whole_model("molmo2", tmp_path, {**changes, "rope_parameters": scaled})
    prompts = make_prompts()
    assert serve(tmp_path, prompts) == [generate(whole, prompt) for prompt in prompts]


def test_each_matrix_of_its_layers_is_multiplied_by_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_whole_model("step3p7", tmp_path)
    with caplog.at_level("WARNING"):
        loaded = load_model(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32"))
    assert "batch invariance is not guaranteed" not in caplog.text
    assert loaded.architecture == "Step3p7TextForCausalLM"
    assert not [each for each in loaded.module.modules() if isinstance(each, nn.Linear)]


def test_a_type_that_is_not_listed_is_left_as_it_is() -> None:
    config = tiny_config("llama")
    text_models.register_language_model(config, TEXT_PART_NAMES)
    assert type(AutoModelForCausalLM.from_config(config)).__name__ == "LlamaForCausalLM"
