"""Whole tiny models over the CUDA attention, with decode steps recorded: greedy tokens equal Hugging Face `generate`.

Without a GPU Triton's interpreter runs the attention, and what a recorded step launches is run again.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention import reference
from engine.core.config import EngineConfig
from engine.core.kv_groups import ONE_GROUP
from engine.model.forward_choice import choose_forward
from engine.model.loader import load_model
from engine.runner.forward import Forward
from engine.runner.graphs import GraphedForward, StaticInputs, graph_sizes, in_cuda_graphs
from engine.runner.loaded_model import LoadedModel
from tests.engine import golden_tokens, tiny_models
from tests.engine.golden_tokens import generate, generated, prompts

MODELS = ("llama", "gemma2", "gpt_oss", "deepseek_v3")
MORE_MODELS = ("qwen3", "mistral", "gemma3", "gpt2", "mixtral", "qwen3_moe", "olmo2", "granite", "phi3")
SIZES = graph_sizes(8)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="takes minutes without a CUDA device")


@pytest.fixture
def recorded(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[Forward]:
    """Has engines run over the CUDA attention, with decode steps recorded; returns their forward passes."""
    from engine.attention import cuda

    made: list[Forward] = []

    def choose_recorded(module: Any, cache: Any, backend: Any, states: Any) -> Forward:
        plain = choose_forward(module, cache, backend, states)
        static = StaticInputs(SIZES[-1], 200, cache.block_size, triton_device)
        if triton_device.type == "cuda":
            made.append(in_cuda_graphs(plain, static, SIZES))
        else:
            made.append(GraphedForward(plain, static, SIZES, lambda run: run))
        return made[-1]

    monkeypatch.setattr(tiny_models, "load_kernels", lambda: None)  # they would define operators that Triton's have
    monkeypatch.setattr(tiny_models, "select_backend", lambda *_: cuda)
    monkeypatch.setattr(tiny_models, "window_groups", lambda *_: ONE_GROUP)  # as on a CUDA device
    monkeypatch.setattr(tiny_models, "choose_forward", choose_recorded)
    return made


@pytest.fixture(autouse=True)
def few_tokens(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the interpreter compute less."""
    if triton_device.type == "cpu":
        monkeypatch.setattr(golden_tokens, "LENGTHS", (1, 17))
        monkeypatch.setattr(golden_tokens, "MAX_TOKENS", 5)


@pytest.fixture
def load(triton_device: torch.device) -> Callable[[Path], LoadedModel]:
    def load(path: Path) -> LoadedModel:
        return load_model(EngineConfig(model=str(path), device=triton_device.type, dtype="float32"))

    return load


@pytest.mark.parametrize("architecture", [*MODELS, *(pytest.param(name, marks=needs_gpu) for name in MORE_MODELS)])
@pytest.mark.parametrize(("block_size", "chunk"), [(16, 512), pytest.param(4, 7, marks=needs_gpu)])
@pytest.mark.slow
def test_greedy_tokens_equal_hugging_face(
    architecture: str,
    block_size: int,
    chunk: int,
    load: Callable[[Path], LoadedModel],
    recorded: list[Forward],
    tmp_path: Path,
) -> None:
    path = tiny_models.make_checkpoint(architecture, tmp_path)
    reference = tiny_models.load_reference(path)
    tokens = generate(load(path), block_size, chunk, caching=chunk < 512, is_tight=False)
    assert tokens == [generated(reference, prompt) for prompt in prompts()]
    assert all("CUDA graphs" in forward.name for forward in recorded)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.slow
def test_greedy_tokens_over_rounded_kv_are_those_of_the_plain_attention(
    kv_dtype: str, recorded: list[Forward], triton_device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tiny_models.make_checkpoint(tiny_models.WIDE, tmp_path))
    config = EngineConfig(model=path, device=triton_device.type, dtype="float32", kv_cache_dtype=kv_dtype)
    tokens = generate(load_model(config), 16, 512, caching=True, is_tight=False)
    monkeypatch.setattr(tiny_models, "select_backend", lambda *_: reference)
    monkeypatch.setattr(tiny_models, "choose_forward", choose_forward)
    assert tokens == generate(load_model(config), 16, 512, caching=True, is_tight=False)
    assert recorded
