"""Models whose parts are fused with the operators in Triton compute what they computed before."""

import json

import pytest

from tests.engine.model.fused_models import LAYERS, PARTS
from tests.gpu.programs import output_of

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "mistral", "mixtral", "qwen3_moe", "smollm3", "phi3", "deepseek_v3")
FUSED = PARTS | {
    "smollm3": PARTS["llama"],
    "phi3": PARTS["llama"],
    "deepseek_v3": {"FusedMLP": 1, "FusedDecoderLayer": 1, "FusedRMSNorm": 4},
}
ROUNDING = {"torch.float32": 2e-6, "torch.bfloat16": 1e-2, "torch.float16": 1e-3}


@pytest.mark.slow
@pytest.mark.usefixtures("triton_device")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_fused_model_is_as_exact_as_the_plain_one(name: str) -> None:
    lines = [json.loads(line) for line in output_of("tests.gpu.fused_errors", name).splitlines()]
    assert len(lines) == len(ROUNDING)
    for _, dtype, (fused_error, plain_error, is_same_apart, parts) in lines:
        assert parts == fused_parts(name)
        assert fused_error <= plain_error + ROUNDING[dtype]
        assert is_same_apart


def fused_parts(name: str) -> dict[str, int]:
    parts = {part: LAYERS * count for part, count in FUSED[name].items()}
    parts |= {"FusedRMSNorm": parts["FusedRMSNorm"] + 1} if "FusedRMSNorm" in parts else {}
    return parts | {"FusedRotaryEmbedding": 1}


@pytest.mark.slow
@pytest.mark.usefixtures("triton_device")
def test_segments_of_products_are_added_alike_along_with_a_norm_and_alone() -> None:
    assert json.loads(output_of("tests.gpu.fused_errors", "segments")) is True


@pytest.mark.usefixtures("triton_device")
@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_a_decode_step_has_few_launches(name: str) -> None:
    launches = json.loads(output_of("tests.gpu.count_launches", name, "32", "8", TRITON_INTERPRET="1"))
    launches["_merge_kernel"] = launches["_attend_kernel"]  # of long contexts, which only a GPU's size calls for
    assert sum(launches.values()) <= 388, launches
