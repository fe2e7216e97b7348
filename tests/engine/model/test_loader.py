"""Checkpoints are loaded to run over the paged cache, or refused with the reason; engines size their KV cache."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.assembly import load_engine
from engine.core.config import EngineConfig
from engine.core.errors import ConfigError, ModelError, ModelMemoryError, UnsupportedModelError
from engine.core.prompt_logprobs import PromptLogprobs
from engine.engine import Engine
from engine.host.huge_pages import empty_in_huge_pages
from engine.kernels import KernelInfo, load_kernels
from engine.model.kernel_layer import KernelDecoderLayer
from engine.model.loader import load_model
from engine.model.loading import placement
from engine.model.setup import load_model_runner
from engine.runner.loaded_model import LoadedModel
from tests.crossed import slow_but
from tests.engine.fakes import add, run_to_end, tokens_of
from tests.engine.tiny_models import ARCHITECTURES, QUICK, WITH_STATES, make_checkpoint

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "falcon": ("FalconConfig", SMALL, "attention registry"),
    "bloom": ("BloomConfig", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "attention registry"),
    "rwkv": (
        "RwkvConfig",
        {"vocab_size": 64, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2},
        "attention registry",
    ),
    "t5": (
        "T5Config",
        {"vocab_size": 64, "d_model": 32, "d_ff": 32, "num_layers": 1, "num_heads": 2},
        "encoder-decoder",
    ),
    "bert_encoder": (
        "ViTConfig",
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        "not a causal",
    ),
}


def load(path: Path | str, **settings: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(path), device="cpu", **settings))


def edit_config(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_run_paged_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    class_name, fields, reason = REFUSED[name]
    config = getattr(transformers, class_name)(**fields)
    auto = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    if name == "bert_encoder":
        auto = transformers.AutoModel
    auto.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason):
        load(tmp_path)


def test_a_missing_directory_is_named() -> None:
    with pytest.raises(ModelError, match=r"/no/such/place .*no such directory"):
        load("/no/such/place")


def test_a_file_in_the_place_of_a_directory_is_named() -> None:
    with pytest.raises(ModelError, match="not a checkpoint directory: it is a file"):
        load(__file__)


def test_a_directory_of_something_else_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path)


def test_truncated_weights_are_damage(llama: Path) -> None:
    weights = llama / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="damaged"):
        load(llama)


def allocate_on_the_cpu(*_: Any) -> None:
    torch.empty(1 << 60)


def allocate_on_a_gpu(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def allocate_in_python(*_: Any) -> None:
    raise MemoryError


def allocate_in_huge_pages(*_: Any) -> None:
    empty_in_huge_pages((1 << 60,), torch.int8, torch.device("cpu"))


@pytest.mark.parametrize(
    "allocate", [allocate_on_the_cpu, allocate_on_a_gpu, allocate_in_python, allocate_in_huge_pages]
)
@pytest.mark.parametrize("where", ["loading.weights._load_weights", "caches.KVCache"])
def test_a_lack_of_memory_is_no_damage(
    where: str, allocate: Callable[..., None], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"engine.model.{where}", allocate)
    with pytest.raises(ModelMemoryError, match="not enough memory"):
        load_model_runner(EngineConfig(model=str(llama), device="cpu", num_blocks=8))


def test_a_lack_of_memory_in_the_probe_is_no_model_that_cannot_run(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.probe._Recorder.attend", allocate_on_the_cpu)
    with pytest.raises(ModelMemoryError, match="not enough memory"):
        load(llama)


def test_other_errors_are_no_lack_of_memory(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("engine.model.caches.KVCache", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        load_model_runner(EngineConfig(model=str(llama), device="cpu", num_blocks=8))


@pytest.mark.parametrize("where", ["weights._load_weights", "placement.load_kernels"])
def test_an_error_that_is_not_about_files_is_no_damage(
    where: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(f"engine.model.loading.{where}", fail)
    with pytest.raises(ModelError, match="cannot be loaded: RuntimeError: no driver"):
        load(llama)


def test_missing_weights_are_not_made_up(llama: Path) -> None:
    edit_config(llama, num_hidden_layers=4)
    with pytest.raises(ModelError, match="incomplete"):
        load(llama)


def test_weights_of_another_shape_are_refused(llama: Path) -> None:
    edit_config(llama, intermediate_size=64)
    with pytest.raises(ModelError, match=r"do not fit its config\.json: .*mlp\..* has the shape .*48.*, not .*64"):
        load(llama)


def test_a_reason_of_many_lines_is_reported_in_one(llama: Path) -> None:
    edit_config(llama, layer_types=["x"] * 3)
    with pytest.raises(ModelError, match=r"validate_layer_type.*got \['x', 'x', 'x'\]"):
        load(llama)


def test_a_directory_without_weights_is_refused(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(llama)


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "nothing"}'])
def test_a_config_without_a_known_model_type_is_refused(llama: Path, text: str) -> None:
    (llama / "config.json").write_text(text)
    with pytest.raises(ModelError):
        load(llama)


def test_code_in_a_checkpoint_does_not_run_unless_trusted(llama: Path) -> None:
    marker = llama / "ran"
    (llama / "custom.py").write_text(f"open({str(marker)!r}, 'w')\nclass Custom: pass\n")
    edit_config(
        llama, model_type="custom", auto_map={"AutoConfig": "custom.Custom", "AutoModelForCausalLM": "custom.C"}
    )
    with pytest.raises(ModelError):
        load(llama)
    assert not marker.exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_asked_for_is_used(llama: Path, dtype: str) -> None:
    assert load(llama, dtype=dtype).dtype == getattr(torch, dtype)


@pytest.mark.parametrize("settings", [{"device": "cuda"}, {"dtype": "float16"}])
def test_what_this_machine_does_not_support_is_refused_by_its_flag(
    settings: dict[str, str], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ((name, value),) = settings.items()
    with pytest.raises(ConfigError, match=f"^--{name} {value}"):
        load_model(EngineConfig(model=str(llama), **settings))


def test_float32_on_a_gpu_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for dtype, num_warnings in (("bfloat16", 0), ("float32", 1)):
        config = EngineConfig(model="", dtype=dtype)
        found = placement._dtype(config, transformers.LlamaConfig(), torch.device("cuda"), None)
        assert found == getattr(torch, dtype)
        assert len(caplog.records) == num_warnings


@pytest.mark.parametrize("has_kernels", [True, False])
def test_kernels_can_be_required(has_kernels: bool, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = KernelInfo("generic", Path())
    monkeypatch.setattr(placement, "load_kernels", lambda: info if has_kernels else None)
    config = EngineConfig(model=str(llama), device="cpu", require_kernels=True)
    if has_kernels:
        assert placement._load_kernels(config) is info
    else:
        with pytest.raises(ConfigError, match=r"^--require-kernels: "):
            load_model(config)


def test_contexts_stay_where_rotary_frequencies_do_not_depend_on_the_batch(llama: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    edit_config(llama, rope_parameters=rope)
    assert load(llama).max_model_len == 64


def engine_over(path: Path, **settings: Any) -> Engine:
    return load_engine(EngineConfig(model=str(path), device="cpu", dtype="float32", **settings))


def test_an_engine_from_a_checkpoint_generates(llama: Path) -> None:
    engine = engine_over(llama)
    add(engine, "a", [1, 2, 3], temperature=0.0)
    assert len(tokens_of(run_to_end(engine)["a"])) == 5
    assert engine.info.max_model_len == 256 and engine.info.kv_cache_bytes > 0


def test_a_context_the_user_asked_for_must_fit_the_kv_cache(llama: Path) -> None:
    with pytest.raises(ConfigError, match="more with --num-gpu-blocks-override,"):
        engine_over(llama, max_model_len=200, num_blocks=4)
    with pytest.raises(ConfigError, match="more with --kv-cache-memory-bytes,"):
        engine_over(llama, max_model_len=200, kv_cache_bytes=10_000)


def test_the_models_own_context_is_lowered_to_what_fits(llama: Path) -> None:
    assert engine_over(llama, num_blocks=4).info.max_model_len == 64


def test_no_room_for_a_single_block_is_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="kv-cache-memory-bytes"):
        engine_over(llama, kv_cache_bytes=100)


def test_a_context_beyond_the_models_limit_is_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="limit of 256"):
        engine_over(llama, max_model_len=257)


def test_prompt_scores_equal_the_log_softmax_of_hugging_face(llama: Path, reference_model: Callable[..., Any]) -> None:
    prompt = list(range(1, 30))
    engine = engine_over(llama, max_num_batched_tokens=7)
    add(engine, "a", prompt, max_tokens=1, prompt_logprobs=3)
    first = run_to_end(engine)["a"][0].first
    assert first is not None and first.prompt_logprobs is not None
    logits = reference_model("llama").model(torch.tensor([prompt])).logits[0].detach()
    expected = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    items = [*PromptLogprobs(first.prompt_logprobs)][1:]
    scores = torch.tensor([item.logprob for item in items])
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
    assert all(len(item.top) == 3 for item in items)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_layers_run_in_the_kernels_where_there_are_any(llama: Path, quantization: str) -> None:
    model = load(llama, quantization=quantization)
    num_layers = sum(isinstance(module, KernelDecoderLayer) for module in model.module.modules())
    assert num_layers == (len(model.layers) if model.has_kernels else 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # that of the file, and another
def test_a_loaded_model_does_not_hold_on_to_its_files(llama: Path, dtype: str) -> None:
    model = load(llama, dtype=dtype)
    assert str(llama) not in Path("/proc/self/maps").read_text()
    assert model.module.get_input_embeddings().weight.numel() > 0


@pytest.mark.parametrize("architecture", slow_but(ARCHITECTURES, *QUICK))
def test_a_model_with_biases_experts_or_routers_does_not_hold_on_to_its_files(
    architecture: str, tmp_path: Path
) -> None:
    path = make_checkpoint(architecture, tmp_path)
    model = load(path, dtype="float32", draft_quantization="none" if architecture in WITH_STATES else "int4")
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert model.weight_bytes > 0


def test_every_model_is_compared_with_itself_once_fused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *_: object) -> None:
        raise UnsupportedModelError(f"{name} computes something else")

    monkeypatch.setattr("engine.model.loading.preparation.check_same", refuse)
    if load_kernels() is None:
        pytest.skip("nothing is fused without kernels")
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM computes"):
        load(llama)
