"""Ranks on devices answer as one does, bit for bit: by NCCL on GPUs, or by Gloo and the interpreter with none."""

import json
from functools import cache, partial
from typing import Any

import pytest
import torch

from tests.gpu.programs import output_of

pytestmark = pytest.mark.usefixtures("triton_device")


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
