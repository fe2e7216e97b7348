"""Ranks on devices answer as one does, bit for bit: by NCCL on GPUs, or by Gloo and the interpreter with none."""

import json
from functools import cache, partial
from typing import Any

import pytest
import torch

from engine.checkpoint.stored_tensor import StoredTensor
from engine.model.fusion import fuse_modules
from engine.model.loading.preparation import made_to_run
from engine.model.probe import probe_layers
from engine.weights.linear import is_linear
from engine.weights.moe import is_experts
from tests.engine.model.fused_models import model_of
from tests.gpu.programs import output_of

pytestmark = pytest.mark.usefixtures("triton_device")


OTHER = torch.device("meta")
"""A device that is not the CPU: no operator takes tensors of both."""


@cache
def answers(model: str, size: int, settings: str = "{}") -> Any:
    if 0 < torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs, or none")
    kernels = {} if torch.cuda.is_available() else {"TWOSTEP_KERNELS": "off"}  # those in C++ have other bits
    return json.loads(output_of("tests.gpu.device_ranks", model, str(size), settings, **kernels))


@pytest.mark.parametrize("quantization", ["none", "fp8", "int8", "int4"])
def test_a_part_of_a_weight_has_the_bits_of_the_whole(
    quantization: str, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.kernels.cuda import linear
    from engine.weights.triton_quantized_weight import triton_quantized
    from engine.weights.triton_weight import TritonWeight

    monkeypatch.setattr(linear, "_BUSY_TILES", 4)
    monkeypatch.setattr(linear, "_MIN_SEGMENT", 16)
    pack: Any = TritonWeight if quantization == "none" else partial(triton_quantized, quantization=quantization)
    weight, x = (torch.randn(rows, 700, device=triton_device) for rows in (200, 3))
    whole, part, apart = pack(weight), pack(weight[70:120], num_columns=200), pack(weight[70:120])
    assert part.order == whole.order != apart.order
    assert torch.equal(part.multiply(x, None), whole.multiply(x, None)[:, 70:120])


def test_a_part_keeps_nothing_of_the_whole(triton_device: torch.device) -> None:
    from engine.weights.triton_weight import TritonWeight

    rows = TritonWeight(torch.randn(64, 128, device=triton_device)[32:48], num_columns=64).rows
    assert rows.untyped_storage().nbytes() == rows.nbytes == 16 * 128 * 4


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_models_run_on_a_device_with_weights_that_stay_in_the_checkpoint(name: str) -> None:
    model = model_of(name)
    calls = probe_layers(model, torch.device("cpu"))
    made_to_run(model, OTHER, stays_mapped=True)
    assert [call.query.shape for call in probe_layers(model, OTHER)] == [call.query.shape for call in calls]


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_oss", "gpt2"])
def test_weights_stay_in_the_checkpoint_until_a_part_is_packed(name: str) -> None:
    from engine.weights.triton_weight import TritonWeight

    model = model_of(name)
    calls = probe_layers(model, torch.device("cpu"))
    fuse_modules(made_to_run(model, OTHER, stays_mapped=True), calls)
    matrices = [
        parameter
        for module in model.modules()
        if is_linear(module) or is_experts(module)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() > 1
    ]
    assert len(matrices) > 4 and all(isinstance(each, StoredTensor) and each.device == OTHER for each in matrices)
    assert all(part.device.type == "cpu" for each in matrices for part in each.parts)
    assert {parameter.device for parameter in model.parameters()} == {OTHER}
    for each in matrices:
        assert each.new_zeros(2).device == OTHER
        matrix = each.detach() if each.dim() == 2 else each.detach()[0]
        assert TritonWeight(matrix[: len(matrix) // 2], len(matrix)).rows.device == OTHER


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_two_ranks_answer_as_one_does(model: str) -> None:
    alone, two = answers(model, 1), answers(model, 2)
    assert two["answers"] == alone["answers"] and len(alone["answers"]) == 3
    assert two["forward"] == alone["forward"] == "transformers in CUDA graphs"
    assert alone["weight_bytes"] <= two["weight_bytes"] < 1.1 * alone["weight_bytes"]


@pytest.mark.slow
def test_columns_need_not_be_even() -> None:
    assert answers("llama", 3)["answers"] == answers("llama", 1)["answers"]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"quantization": "int4", "enforce_eager": True}])
def test_ranks_change_no_bit_of_any_weights(settings: dict[str, Any]) -> None:
    given = json.dumps(settings)
    assert answers("qwen3_moe", 2, given)["answers"] == answers("qwen3_moe", 1, given)["answers"]
