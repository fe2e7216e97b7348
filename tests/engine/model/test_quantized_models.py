"""Whole models with quantized weights: greedy tokens are those of Hugging Face with the dequantized weights."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from engine.core.config import EngineConfig
from engine.core.errors import ConfigError
from engine.kernels import load_kernels
from engine.model.loader import load_model
from engine.runner.loaded_model import LoadedModel
from engine.weights.affine_quantization import BITS
from engine.weights.moe import is_experts
from engine.weights.packing_policy import check_quantization
from tests.crossed import slow_but
from tests.engine.fakes import add, run_to_end, tokens_of
from tests.engine.tiny_models import (
    ARCHITECTURES,
    ReferenceModel,
    load_reference,
    make_checkpoint,
    tiny_engine,
)
from tests.engine.weights.rounding import rounded_rows, rounded_weight

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("architecture", slow_but(ARCHITECTURES, "llama", "gpt2", "deepseek_v3", "jamba"))
def test_every_architecture_runs_quantized_and_holds_fewer_bytes(
    architecture: str, tiny_model: Callable[..., LoadedModel]
) -> None:
    models = [tiny_model(architecture, "float32", name) for name in ("none", "int8", "int4")]
    assert all(model.weight_bytes < models[0].weight_bytes for model in models[1:])
    assert [model.linear.partition(", ")[2] for model in models] == ["", "int8 weights", "int4 weights"]
    engine = tiny_engine(models[2])
    add(engine, "a", [1, 2, 3], max_tokens=5, temperature=0.0)
    assert len(tokens_of(run_to_end(engine)["a"])) == 5


def dequantized_reference(path: Path, bits: int) -> ReferenceModel:
    """Loads Hugging Face's model with dequantized weights; routers and embeddings keep their own numbers."""
    reference = load_reference(path)
    head = reference.model.get_output_embeddings()
    for module in reference.model.modules():
        if not isinstance(module, nn.Linear | Conv1D) and not is_experts(module):
            continue
        is_transposed = isinstance(module, Conv1D) or getattr(module, "is_transposed", False)
        for name, parameter in module.named_parameters(recurse=False):
            if not name.endswith("bias"):
                rows = parameter.data.transpose(-1, -2) if is_transposed else parameter.data  # [..., N, K]
                rounded = rounded_weight(rows.flatten(0, -2), *form_of(bits, module is head))
                rows.copy_(rounded.view_as(rows))
    return reference


def form_of(bits: int, is_head: bool) -> tuple[int, int]:
    """Returns the bits of a weight and of its rows. Without kernels nothing is transformed, as for rows of 16 bits."""
    return 8 if is_head else bits, 8 if load_kernels() and not is_head else 16


def round_inputs(reference: ReferenceModel, bits: int) -> None:
    """Makes the reference's layers round their input rows as packed layers of `bits` bits do, and as the head does."""
    head = reference.model.get_output_embeddings()
    for module in reference.model.modules():
        if is_experts(module):
            module.forward = functools.partial(call_with_rounding, module.forward, form_of(bits, False)[1])
        if isinstance(module, nn.Linear | Conv1D):
            module.register_forward_pre_hook(rounding(form_of(bits, module is head)[1]))


class RoundedProducts(TorchFunctionMode):
    """Rounds the rows of every matrix product."""

    def __init__(self, row_bits: int) -> None:
        super().__init__()
        self._row_bits = row_bits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (nn.functional.linear, torch._grouped_mm):
            return func(*args, **(kwargs or {}))
        rows, *others = args
        return func(rounded_rows(rows, self._row_bits), *others, **(kwargs or {}))


def call_with_rounding(forward: Callable[..., Tensor], row_bits: int, *args: Any, **kwargs: Any) -> Tensor:
    with RoundedProducts(row_bits):
        return forward(*args, **kwargs)


def rounding(row_bits: int) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    return lambda _, inputs: (rounded_rows(inputs[0].flatten(0, -2), row_bits).view_as(inputs[0]),)


WITH_EXPERTS = ("mixtral", "gpt_oss", "deepseek_v3")
GOLDEN = [
    *((architecture, "int8") for architecture in ("llama", "gemma2", "gpt2", *WITH_EXPERTS)),
    *((architecture, "int4") for architecture in ("llama", "gemma2", "gpt2")),
]


@pytest.mark.parametrize(("architecture", "quantization"), GOLDEN)
def test_greedy_tokens_equal_hugging_face_over_the_dequantized_weights(
    architecture: str, quantization: str, tiny_model: Callable[..., LoadedModel], tmp_path: Path
) -> None:
    reference = dequantized_reference(make_checkpoint(architecture, tmp_path), BITS[quantization])
    if load_kernels():
        round_inputs(reference, BITS[quantization])
    prompt = list(range(1, 40, 3))
    engine = tiny_engine(tiny_model(architecture, "float32", quantization))
    add(engine, "a", prompt, max_tokens=14, temperature=0.0)
    assert tokens_of(run_to_end(engine)["a"]) == reference.generate(prompt, 14)


def test_the_head_keeps_eight_bits(tiny_model: Callable[..., LoadedModel]) -> None:
    heads = [tiny_model("llama", "float32", name).module.get_output_embeddings() for name in ("int8", "int4")]
    assert heads[0].nbytes == heads[1].nbytes


def test_embeddings_stay_exact(tiny_model: Callable[..., LoadedModel]) -> None:
    plain, quantized = (tiny_model("llama", "float32", name).module.get_input_embeddings() for name in ("none", "int4"))
    assert torch.equal(plain.weight, quantized.weight)


def test_drafts_in_fewer_bits_are_refused_on_cuda_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    path = make_checkpoint("llama", tmp_path)
    for device in ("cuda", "auto"):
        with pytest.raises(ConfigError, match=r"^--draft-quantization int4 runs on the CPU only"):
            load_model(EngineConfig(model=str(path), device=device, draft_quantization="int4"))


def test_fp8_is_refused_on_the_cpu_and_on_gpus_that_do_not_know_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = make_checkpoint("llama", tmp_path)
    for device in ("cpu", "auto"):
        with pytest.raises(ConfigError, match=r"^--quantization fp8 runs on GPUs only; on the CPU, int8 is as small"):
            load_model(EngineConfig(model=str(path), device=device, quantization="fp8"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    with pytest.raises(ConfigError, match=r"needs a GPU of compute capability 8\.9 or later, and this one has 8\.6"):
        check_quantization("fp8", torch.device("cuda"))
    check_quantization("int4", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    check_quantization("fp8", torch.device("cuda"))


def test_other_quantizations_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="quantization must be one of none, fp8, int8, int4, got 'int3'"):
        EngineConfig(model="m", quantization="int3")
