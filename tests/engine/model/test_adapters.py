"""Adapters over loaded models: both ways to run a model add them, bit for bit alike; what does not fit is refused."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.assembly import load_engine
from engine.attention import cpu
from engine.attention.kv_cache import KVCache
from engine.core.adapters import AdapterSource
from engine.core.batch import ScheduledRequest
from engine.core.config import EngineConfig
from engine.core.errors import AdapterError
from engine.kernels import load_kernels
from engine.model.adapters import ModelAdapters, load_adapters
from engine.model.forward_choice import choose_forward, decoder_parts
from engine.model.kernel_forward import KernelForward
from engine.runner.forward import Forward, TransformersForward
from engine.runner.loaded_model import LoadedModel
from engine.runner.model_inputs import build_inputs
from engine.weights.adapters import AdaptedWeight, rows_with_adapters
from engine.weights.packed_weight import pack_weight
from tests.crossed import crossed
from tests.engine.fakes import add, run_to_end, tokens_of
from tests.engine.model.steps import BLOCK_SIZE, STEPS, request
from tests.engine.tiny_adapters import make_adapter, rewrite
from tests.engine.tiny_models import WIDE, load_reference, load_tiny, make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_BLOCKS = 12
ADAPTED = (
    "llama",
    "qwen3",
    "qwen3_moe",
    WIDE,
    "phi3",
    "glm4",
    "starcoder2",
    "cohere2",
    "olmo2",
    "qwen2_moe",
    "hunyuan_moe",
    "gpt_neox",
    "phi",
    "llama4",
    "afmoe",
)
# Layers of which each of three adapters is made, where a model's have other names than Llama's.
TARGETS = {
    "llama": (["q_proj", "v_proj", "o_proj"], ["gate_proj", "k_proj", "down_proj"], ["up_proj", "o_proj", "q_proj"]),
    "phi3": (["qkv_proj", "o_proj"], ["gate_up_proj", "qkv_proj"], ["gate_up_proj", "down_proj"]),
    "glm4": (["q_proj", "v_proj", "o_proj"], ["gate_up_proj", "k_proj"], ["gate_up_proj", "down_proj"]),
    "qwen2_moe": (["q_proj", "shared_expert_gate"], ["gate_proj", "k_proj", "down_proj"], ["up_proj", "o_proj"]),
    "gpt_neox": (["query_key_value", "dense_h_to_4h"], ["query_key_value", "dense"], ["dense_4h_to_h", "dense"]),
    "phi": (["q_proj", "v_proj", "fc1"], ["k_proj", "dense"], ["fc2", "fc1"]),
    "starcoder2": (["q_proj", "c_fc"], ["v_proj", "c_proj"], ["c_fc", "c_proj", "o_proj"]),
}


def cache_of(model: LoadedModel, num_blocks: int = NUM_BLOCKS) -> KVCache:
    return KVCache(model.layers, num_blocks, BLOCK_SIZE, model.kv_dtype, model.device)


class Pair:
    """Both ways to run one model, each with the same adapters, of the numbers 0, 1 and 2."""

    def __init__(self, checkpoint: Path, *settings: str, num_blocks: int = NUM_BLOCKS) -> None:
        model, reference = load_tiny(checkpoint, *settings), load_reference(checkpoint)
        caches = [cache_of(model, num_blocks) for _ in range(2)]
        self.plain = TransformersForward(model.module, caches[0], cpu)
        self.fast = KernelForward(decoder_parts(model.module), caches[1])
        targets = TARGETS.get(checkpoint.name, TARGETS["llama"])
        self.has_adapters = [ModelAdapters(model, forward, 8, 64) for forward in (self.plain, self.fast)]
        for number, (rank, names) in enumerate(zip((5, 16, 5), targets, strict=True)):
            path = checkpoint.parent / f"adapter-{number}"
            changes: dict[str, Any] = {"rank": rank, "target_modules": names}
            make_adapter(path, reference, number, 0.2, **changes)
            for each in self.has_adapters:
                assert each.number_of(each.load(str(path)).digest) == number


def with_adapters(requests: Sequence[ScheduledRequest], numbers: Sequence[int | None]) -> list[ScheduledRequest]:
    return [replace(each, adapter=number) for each, number in zip(requests, numbers, strict=True)]


@torch.inference_mode()
def run(forward: Forward, numbers: Sequence[int | None], kept: list[int] | None) -> list[Tensor]:
    batches = [with_adapters([request(*each) for each in step], numbers) for step in STEPS]
    return [forward(build_inputs(batch, BLOCK_SIZE, torch.device("cpu")), kept).logits.clone() for batch in batches]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("name", "dtype", "quantization"), crossed(ADAPTED, ("float32", "bfloat16"), ("none", "int8", "int4"))
)
def test_the_kernels_add_adapters_as_the_plain_path_does(
    name: str, dtype: str, quantization: str, tmp_path: Path
) -> None:
    pair = Pair(make_checkpoint(name, tmp_path), dtype, quantization)
    without = run(pair.fast, (None, None, None), None)
    for numbers in ((0, 1, 2), (2, None, 0), (None, None, 1), (1, 1, 1)):
        for kept in (None, [], [20, 3], [*range(31)]):
            logits = run(pair.fast, numbers, kept)
            assert all(map(torch.equal, logits, run(pair.plain, numbers, kept)))
            assert kept is not None or not torch.equal(logits[0], without[0])
    assert all(map(torch.equal, run(pair.fast, (None, None, None), None), without))


@pytest.mark.usefixtures("kernels")
@torch.inference_mode()
def test_a_prompt_whose_gated_rows_are_computed_in_parts_has_its_adapter_in_all(tmp_path: Path) -> None:
    num_blocks = 2_200 // BLOCK_SIZE + 2
    pair = Pair(make_checkpoint("llama", tmp_path), "bfloat16", num_blocks=num_blocks)
    requests = [request(0, 1_300, tuple(range(170))), request(0, 790, tuple(range(170, num_blocks)))]
    inputs = build_inputs(with_adapters(requests, (1, 2)), BLOCK_SIZE, torch.device("cpu"))
    for kept in (None, [3, *range(1_000, 2_090)]):
        assert all(map(torch.equal, pair.fast(inputs, kept)[:2], pair.plain(inputs, kept)[:2]))


@pytest.mark.usefixtures("kernels")
def test_rows_without_an_adapter_keep_their_bits_beside_others(tmp_path: Path) -> None:
    pair = Pair(make_checkpoint("llama", tmp_path), "bfloat16")
    alone = run(pair.fast, (None, None, None), None)[0]
    beside = run(pair.fast, (None, 1, 2), None)[0]
    assert torch.equal(alone[:21], beside[:21]) and not torch.equal(alone[21:], beside[21:])


@torch.inference_mode()
@pytest.mark.parametrize("has_kernels", [False, True])
def test_an_adapted_weight_adds_what_the_definition_says(has_kernels: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(6, 8, generator=generator), torch.randn(5, 8, generator=generator)
    down, up = torch.randn(2, 8, generator=generator), torch.randn(3, 2, generator=generator)
    has_kernels = has_kernels and load_kernels() is not None
    adapted = AdaptedWeight(pack_weight(weight, has_kernels))
    columns = torch.tensor([5, 0, 2])
    adapted.adapt(4, columns, pack_weight(down, has_kernels), pack_weight(up, has_kernels))
    expected = x @ weight.T
    torch.testing.assert_close(adapted.multiply(x, None), expected)
    with rows_with_adapters(torch.tensor([-1, 4, 7, 4, -1])):
        changed = adapted.multiply(x, None)
    for row in (1, 3):
        for place, column in enumerate(columns):
            expected[row, column] += up[place] @ (down @ x[row])
    torch.testing.assert_close(changed, expected)
    with rows_with_adapters(torch.tensor([4])), pytest.raises(RuntimeError, match="1 rows, and 5 are multiplied"):
        adapted.multiply(x, None)


# What does not fit.


@pytest.fixture
def llama(tmp_path: Path) -> LoadedModel:
    return load_tiny(make_checkpoint("llama", tmp_path))


@pytest.fixture
def adapters(llama: LoadedModel) -> ModelAdapters:
    return ModelAdapters(llama, choose_forward(llama.module, cache_of(llama), cpu), 3, 64)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """make(name, **settings): writes an adapter of the tiny llama."""
    return lambda name, **settings: make_adapter(tmp_path / name, load_reference(tmp_path / "llama"), **settings)


KEY = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"


def renamed(tensors: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


MISFITS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "another width": (lambda tensors: {**tensors, KEY: torch.ones(4, 31)}, r"shape \[48, 31\].* has \[48, 32\]"),
    "an unknown module": (lambda tensors: renamed(tensors, "1.mlp.up_proj", "1.mlp.side_proj"), "is no linear layer"),
    "a layer too many": (lambda tensors: renamed(tensors, "layers.2", "layers.3"), "is no linear layer"),
    "the head": (lambda tensors: renamed(tensors, "model.layers.0.mlp.down_proj", "lm_head"), "lm_head is no linear"),
    "a missing module": (
        lambda tensors: {name: each for name, each in tensors.items() if "1.mlp.up" not in name},
        "1 modules that it names lack, such as model.layers.1.mlp.up_proj",
    ),
    "a layer twice": (
        lambda tensors: (
            tensors
            | renamed({KEY: tensors[KEY]}, "model.model", "model.model.language_model")
            | renamed(
                {KEY.replace("lora_A", "lora_B"): tensors[KEY.replace("lora_A", "lora_B")]},
                "model.model",
                "model.model.language_model",
            )
        ),
        "under two names",
    ),
}


@pytest.mark.parametrize(("edit", "message"), MISFITS.values(), ids=MISFITS)
def test_an_adapter_of_another_model_is_refused(
    adapters: ModelAdapters,
    make: Callable[..., Path],
    edit: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    message: str,
) -> None:
    path = make("a")
    rewrite(path, edit)
    with pytest.raises(AdapterError, match=message):
        adapters.load(str(path))
    assert adapters.load(str(make("b"))).rank == 4, "a refused adapter leaves something behind"


def test_numbers_that_the_models_format_cannot_hold_are_refused(
    tmp_path: Path, llama: LoadedModel, make: Callable[..., Path]
) -> None:
    half = replace(llama, dtype=torch.float16)
    adapters = ModelAdapters(half, choose_forward(llama.module, cache_of(llama), cpu), 3, 64)
    with pytest.raises(AdapterError, match="too large for"):
        adapters.load(str(make("a", std=30_000.0)))


def test_no_more_adapters_are_loaded_than_allowed(adapters: ModelAdapters, make: Callable[..., Path]) -> None:
    digests = [adapters.load(str(make(str(seed), seed=seed))).digest for seed in range(3)]
    with pytest.raises(AdapterError, match="--max-loras allows, 3"):
        adapters.load(str(make("more", seed=9)))
    adapters.unload(digests[1])
    with pytest.raises(AdapterError, match="--max-loras"):  # it holds memory until its requests have ended
        adapters.load(str(make("yet", seed=10)))
    assert [adapters.number_of(digest) for digest in digests] == [0, None, 2]
    adapters.release(1)
    assert adapters.number_of(adapters.load(str(make("less", seed=11))).digest) == 1


def test_equal_content_is_loaded_once(adapters: ModelAdapters, make: Callable[..., Path]) -> None:
    first, second = (adapters.load(str(make(name))) for name in "ab")
    assert first.digest == second.digest and (first.path, second.path) != (second.path, first.path)
    assert adapters.number_of(first.digest) == 0 and first.num_bytes == second.num_bytes > 0


def test_a_module_of_a_multimodal_checkpoint_is_that_of_its_text_model(
    adapters: ModelAdapters, make: Callable[..., Path]
) -> None:
    path = make("a")
    rewrite(path, lambda tensors: renamed(tensors, "model.model.layers", "model.model.language_model.layers"))
    assert adapters.load(str(path)).rank == 4


# With the model.


def config_of(tmp_path: Path, sources: Sequence[AdapterSource], **settings: Any) -> EngineConfig:
    sizes: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 16, "adapters": tuple(sources)}
    return EngineConfig(model=str(tmp_path / "llama"), **sizes, **settings)


def tokens_with(config: EngineConfig, name: str) -> list[int]:
    engine = load_engine(config)
    digest = engine.info.adapters[name].digest if name else ""
    add(engine, "a", range(3, 20), max_tokens=12, temperature=0.0, adapter=digest)
    return tokens_of(run_to_end(engine)["a"])


def test_adapters_are_loaded_with_the_model_also_from_packed_weights(
    tmp_path: Path, llama: LoadedModel, make: Callable[..., Path]
) -> None:
    sources = [AdapterSource("a", str(make("a"))), AdapterSource("b", str(make("b", seed=1)))]
    config = config_of(tmp_path, sources, packed_cache=str(tmp_path / "packed"))
    answers = [tokens_with(config, name) for name in ("", "a", "b")]
    assert answers == [tokens_with(config, name) for name in ("", "a", "b")]
    assert len({str(each) for each in answers}) == 3


def test_a_first_start_without_an_adapter_is_refused(tmp_path: Path, llama: LoadedModel) -> None:
    with pytest.raises(AdapterError, match="no directory"):
        load_engine(config_of(tmp_path, [AdapterSource("a", str(tmp_path / "nothing"))]))


def test_a_restart_goes_on_without_adapters_that_are_gone_or_others(
    adapters: ModelAdapters, make: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept, changed = make("kept"), make("changed", seed=1)
    sources = [AdapterSource(each.name, str(each), adapters.load(str(each)).digest) for each in (kept, changed)]
    sources.append(AdapterSource("gone", str(tmp_path / "gone"), "00" * 32))
    settings = json.loads((changed / "adapter_config.json").read_text())
    (changed / "adapter_config.json").write_text(json.dumps({**settings, "lora_alpha": 13}))
    with caplog.at_level(logging.ERROR):
        loaded = load_adapters(adapters, sources)
    assert [*loaded] == ["kept"] and "changed is not loaded again" in caplog.text and "gone" in caplog.text
