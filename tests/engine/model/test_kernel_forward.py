"""A model that runs in one call into C++ computes, bit for bit, what its own code does."""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.attention import cpu, reference
from engine.attention.kv_cache import KVCache
from engine.core.batch import ScheduledRequest
from engine.core.sampling_params import SamplingParams
from engine.model.forward_choice import FAMILIES, choose_forward, decoder_parts, is_known
from engine.model.kernel_forward import KernelForward
from engine.runner.forward import Forward, ForwardOutput, TransformersForward
from engine.runner.loaded_model import LoadedModel
from engine.runner.model_inputs import ModelInputs, build_inputs
from tests.crossed import crossed, slow_but
from tests.engine.further_configs import FURTHER
from tests.engine.model.steps import BLOCK_SIZE, STEPS, request
from tests.engine.served_answers import documented_types
from tests.engine.tiny_models import ARCHITECTURES, QUICK, load_tiny, make_checkpoint, make_config

pytestmark = pytest.mark.usefixtures("one_thread", "kernels")

KNOWN = (
    *("llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe", "gemma2", "gemma3", "gpt_oss"),
    *("smollm3", "smollm3_nope", "phi3", "phi3_partial", "seed_oss", "granite", "olmo2", "olmo3", "exaone4"),
    *("glm", "glm4", "ernie4_5", "cohere2", "starcoder2", "starcoder2_mqa"),
    *("gemma1", "ministral", "cohere", "olmoe", "qwen2_moe", "glm4_moe", "dots1", "ernie4_5_moe", "hunyuan_moe"),
    *("hunyuan", "ministral3", "nemotron", "arcee", "gemma4", "gemma4_e", "gemma4_moe"),
    *("deepseek_v3", "gpt_neox", "stablelm", *FURTHER),
)
KEPT: dict[str, list[int] | None] = {"all": None, "none": [], "some": [20, 3], "most": [*range(31)]}
NUM_BLOCKS = 12


def cache_of(model: LoadedModel) -> KVCache:
    cache = KVCache(model.layers, NUM_BLOCKS, BLOCK_SIZE, model.dtype, model.device)
    for tensor in chain.from_iterable(cache.layers):
        tensor.zero_()
    return cache


def kernel_forward(model: LoadedModel, cache: KVCache) -> KernelForward:
    return KernelForward(decoder_parts(model.module), cache)


@torch.inference_mode()
def run(forward: Forward, kept: list[int] | None) -> list[Tensor]:
    batches = [[request(*each) for each in step] for step in STEPS]
    return [forward(build_inputs(batch, BLOCK_SIZE, torch.device("cpu")), kept).logits for batch in batches]


@pytest.mark.parametrize(
    ("name", "dtype", "quantization", "kept"),
    crossed(KNOWN, ("float32", "bfloat16"), ("none", "int8", "int4"), KEPT),
)
def test_one_call_changes_no_bit_of_logits_and_cache(
    tiny_model: Callable[..., LoadedModel], name: str, dtype: str, quantization: str, kept: str
) -> None:
    model = tiny_model(name, dtype, quantization)
    caches = cache_of(model), cache_of(model)
    expected = run(TransformersForward(model.module, caches[0], cpu), KEPT[kept])
    logits = run(kernel_forward(model, caches[1]), KEPT[kept])
    assert all(map(torch.equal, logits, expected))
    for one, other in zip(*([*chain.from_iterable(cache.layers)] for cache in caches), strict=True):
        assert torch.equal(one, other)


@torch.inference_mode()
def test_positions_come_in_any_order_and_however_far_apart(llama: LoadedModel) -> None:
    """The C++ decoder computes rotations for thousands of positions at once, and only once."""
    blocks = tuple(block % NUM_BLOCKS for block in range(9_000 // BLOCK_SIZE))
    caches = cache_of(llama), cache_of(llama)
    fast, plain = (
        kernel_forward(llama, caches[0]),
        TransformersForward(llama.module, caches[1], cpu),
    )
    for start, num_tokens in [(4_090, 3), (0, 5), (4_093, 5), (8_990, 1), (4_096, 2), (8_200, 9)]:
        inputs = build_inputs([request(start, num_tokens, blocks)], BLOCK_SIZE, torch.device("cpu"))
        assert all(map(torch.equal, fast(inputs, None)[:2], plain(inputs, None)[:2])), start


@torch.inference_mode()
def test_what_a_step_computed_stays_whatever_size_the_next_ones_have(llama: LoadedModel) -> None:
    """Small steps compute in scratch memory that is reused by the next step of their size."""
    caches, blocks = (cache_of(llama), cache_of(llama)), tuple(range(NUM_BLOCKS))
    fast, plain = (
        kernel_forward(llama, caches[0]),
        TransformersForward(llama.module, caches[1], cpu),
    )
    fast._head = lambda hidden: hidden  # type: ignore[method-assign]  # so that nothing is copied
    head, results = llama.module.get_output_embeddings(), []
    for start, num_tokens in [(0, 1), (1, 1), (2, 3), (5, 70), (75, 3), (78, 1), (79, 3), (82, 1)]:
        inputs = build_inputs([request(start, num_tokens, blocks)], BLOCK_SIZE, torch.device("cpu"))
        results.append((fast(inputs, None).logits, plain(inputs, None).logits))
    assert all(torch.equal(head(hidden), logits) for hidden, logits in results)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@torch.inference_mode()
def test_a_prompt_whose_gated_rows_are_computed_in_parts(
    tiny_model: Callable[..., LoadedModel], quantization: str
) -> None:
    model, num_blocks = tiny_model("qwen2", "bfloat16", quantization), 2_100 // BLOCK_SIZE + 1
    caches = [KVCache(model.layers, num_blocks, BLOCK_SIZE, model.dtype, model.device) for _ in range(2)]
    fast, plain = (
        kernel_forward(model, caches[0]),
        TransformersForward(model.module, caches[1], cpu),
    )
    inputs = build_inputs([request(0, 2_100, tuple(range(num_blocks)))], BLOCK_SIZE, torch.device("cpu"))
    for kept in (None, [3, *range(600, 2_100)]):
        assert all(map(torch.equal, fast(inputs, kept)[:2], plain(inputs, kept)[:2]))


@pytest.mark.parametrize("token_id", [-1, 10**9])
def test_tokens_that_the_model_does_not_have_are_refused(llama: LoadedModel, token_id: int) -> None:
    step = ScheduledRequest("", [3, token_id], 0, (0,), SamplingParams(), [], [], True)
    inputs = build_inputs([step], BLOCK_SIZE, torch.device("cpu"))
    with torch.inference_mode(), pytest.raises(RuntimeError, match="out of range"):
        kernel_forward(llama, cache_of(llama))(inputs, None)


def rotary_embedding(kind: str) -> LlamaRotaryEmbedding:
    config = make_config("llama")
    factors = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    config.rope_parameters = {"rope_theta": 10_000.0, "rope_type": kind, **factors}
    return LlamaRotaryEmbedding(config)


@pytest.fixture
def llama(tmp_path: Path) -> LoadedModel:
    """A model of the test's own, which it may change."""
    return load_tiny(make_checkpoint("llama", tmp_path))


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_scaled_rotations_are_those_of_the_model(llama: LoadedModel, kind: str) -> None:
    cache = cache_of(llama)
    unscaled = run(kernel_forward(llama, cache), None)
    llama.module.base_model.rotary_emb = rotary_embedding(kind)
    assert is_known(llama.module)
    logits = run(kernel_forward(llama, cache), None)
    assert all(map(torch.equal, logits, run(TransformersForward(llama.module, cache, cpu), None)))
    assert not torch.equal(logits[0], unscaled[0])


ROTARY_KINDS = {"linear": {"factor": 4.0}, "yarn": {"factor": 4.0, "original_max_position_embeddings": 64}}


@pytest.mark.parametrize("kind", ROTARY_KINDS)
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_layers_take_the_rotations_of_their_type(tmp_path: Path, name: str, kind: str) -> None:
    model, config = load_tiny(make_checkpoint(name, tmp_path)), make_config(name)
    cache = cache_of(model)
    unscaled = run(kernel_forward(model, cache), None)
    scaled = {"rope_type": kind, "rope_theta": 10_000.0, **ROTARY_KINDS[kind]}
    plain = {"rope_type": "default", "rope_theta": 100.0}
    by_type = {"full_attention": scaled, "sliding_attention": plain}
    config.rope_parameters = scaled if name == "gpt_oss" else by_type
    model.module.base_model.rotary_emb = type(model.module.base_model.rotary_emb)(config)
    assert is_known(model.module)
    logits = run(kernel_forward(model, cache), None)
    assert all(map(torch.equal, logits, run(TransformersForward(model.module, cache, cpu), None)))
    assert not torch.equal(logits[0], unscaled[0])


def double(_: Any, __: Any, output: Any) -> Any:
    return 2 * output


CHANGES: dict[str, Callable[[Any], object]] = {
    "a watched embedding": lambda model: model.model.embed_tokens.register_forward_hook(double),
    "a clipped embedding": lambda model: setattr(model.model.embed_tokens, "max_norm", 1.0),
    "an embedding in another format": lambda model: model.model.embed_tokens.to(torch.float64),
    "another norm": lambda model: setattr(model.model, "norm", torch.nn.Identity()),
    "rotations that depend on the batch": lambda model: setattr(model.model, "rotary_emb", rotary_embedding("dynamic")),
    "a layer left out": lambda model: setattr(model.config, "num_hidden_layers", 2),
    "another layer": lambda model: model.model.layers.__setitem__(1, torch.nn.Identity()),
    "a watched decoder": lambda model: model.model.register_forward_pre_hook(print),
    "another code": lambda model: setattr(model, "forward", model.forward),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_model_of_which_a_part_is_not_known_runs_its_own_code(
    llama: LoadedModel, change: Callable[[Any], object]
) -> None:
    assert is_known(llama.module)
    change(llama.module)
    assert not is_known(llama.module)


def rotate_one_type_by_the_batch(model: Any) -> None:
    model.model.rotary_emb.rope_type["full_attention"] = "dynamic"


CHANGES_OF_FAMILIES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "a type of layers whose rotations depend on the batch": ("gemma3", rotate_one_type_by_the_batch),
    "a clipped embedding that is scaled": ("gemma2", lambda model: setattr(model.model.embed_tokens, "max_norm", 1.0)),
    "what a router says": ("gpt_oss", lambda model: setattr(model.config, "output_router_logits", True)),
    "rotations of the batch": ("gpt_oss", lambda model: setattr(model.model.rotary_emb, "rope_type", "dynamic")),
    "rotations of a text's length": ("phi3", lambda model: setattr(model.model.rotary_emb, "rope_type", "dynamic")),
    "a rotation of some layers by the batch": (
        "granite_swa",
        lambda model: setattr(model.model.rotary_embs[1], "rope_type", "dynamic"),
    ),
    "a dropout behind the embedding": ("gpt_neox", lambda model: model.gpt_neox.emb_dropout.train()),
    "another last norm": ("phi", lambda model: setattr(model.model, "final_layernorm", torch.nn.Identity())),
    "pairs by the batch": ("cohere2", lambda model: setattr(model.model.rotary_emb, "rope_type", "dynamic")),
    "a type of layers by the batch": ("olmo3", rotate_one_type_by_the_batch),
    "dropout": ("starcoder2", lambda model: setattr(model.model, "training", True)),
    "a clipped embedding of layers": (
        "gemma4_e",
        lambda model: setattr(model.model.embed_tokens_per_layer, "max_norm", 1),
    ),
    "another norm of layers' inputs": (
        "gemma4_e",
        lambda model: setattr(model.model, "per_layer_projection_norm", torch.nn.Identity()),
    ),
    "rotations of latents by the batch": (
        "deepseek_v3",
        lambda model: setattr(model.model.rotary_emb, "rope_type", "dynamic"),
    ),
    "a watched head": ("granite", lambda model: model.register_forward_hook(print)),
}


@pytest.mark.parametrize("change", CHANGES_OF_FAMILIES.values(), ids=CHANGES_OF_FAMILIES)
def test_a_family_of_which_a_part_is_not_known_runs_its_own_code(
    tmp_path: Path, change: tuple[str, Callable[[Any], object]]
) -> None:
    name, apply = change
    model = load_tiny(make_checkpoint(name, tmp_path))
    assert is_known(model.module)
    apply(model.module)
    assert not is_known(model.module)


def test_a_known_model_that_computes_something_else_runs_its_own_code(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llama.module.base_model.embed_tokens.register_forward_hook(double)
    monkeypatch.setattr("engine.model.forward_choice.is_known", lambda _: True)
    assert isinstance(choose_forward(llama.module, cache_of(llama), cpu), TransformersForward)
    assert "LlamaForCausalLM of transformers" in caplog.text and "it computes something else" in caplog.text


def test_a_known_model_that_decodes_something_else_runs_its_own_code(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = KernelForward.__call__

    def forget_the_past(self: KernelForward, inputs: ModelInputs, kept: Sequence[int] | None) -> ForwardOutput:
        output = compute(self, inputs, kept)
        has_past = inputs.attention.max_context_len > inputs.attention.max_seqlen_q
        return output._replace(logits=output.logits * 2) if has_past else output

    monkeypatch.setattr(KernelForward, "__call__", forget_the_past)
    assert isinstance(choose_forward(llama.module, cache_of(llama), cpu), TransformersForward)


def test_a_family_that_is_known_does_not_get_slow_in_silence(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.model.forward_choice.is_known", lambda _: False)
    assert choose_forward(llama.module, cache_of(llama), cpu).name == "transformers"
    assert "steps take two to three times as long" in caplog.text and "a part of it is not known" in caplog.text


def test_a_known_model_with_a_damaged_weight_is_known(llama: LoadedModel) -> None:
    llama.module.base_model.embed_tokens.weight[1, 0] = torch.nan
    assert isinstance(choose_forward(llama.module, cache_of(llama), cpu), KernelForward)


def test_the_documentation_lists_types_that_run_in_the_kernels() -> None:
    assert documented_types("in the kernels") == {*FAMILIES}
    assert {make_config(name).model_type for name in KNOWN} <= {*FAMILIES}


@pytest.mark.parametrize("name", slow_but(ARCHITECTURES, *QUICK))
def test_models_known_in_all_their_parts_run_in_one_call(tiny_model: Callable[..., LoadedModel], name: str) -> None:
    model = tiny_model(name)
    forward = choose_forward(model.module, cache_of(model), cpu)
    assert isinstance(forward, KernelForward) == (name in KNOWN)


def test_the_comparison_fits_into_the_smallest_cache(tiny_model: Callable[..., LoadedModel]) -> None:
    model = tiny_model("llama")
    cache = cache_of(model)
    cache.num_blocks = 1
    assert isinstance(choose_forward(model.module, cache, cpu), KernelForward)
    assert not any(tensor[1:].any() for tensor in chain.from_iterable(cache.layers))


def test_attention_without_kernels_keeps_the_model_to_its_own_code(tiny_model: Callable[..., LoadedModel]) -> None:
    model = tiny_model("llama")
    assert isinstance(choose_forward(model.module, cache_of(model), reference), TransformersForward)
