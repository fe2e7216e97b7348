"""Checkpoints of DeepSeek-V4 as it is published: FP8 in blocks, experts in FP4, with scales that are powers of two."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint.weight_source import needs_float32
from engine.core.errors import ModelError
from tests.engine.checkpoint.published_checkpoints import write_beside_reference
from tests.engine.golden_tokens import generate, generated, prompts
from tests.engine.tiny_models import load_reference, load_tiny, make_checkpoint

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # of transformers' code

BLOCK = 16
LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
SCHEME = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [BLOCK, BLOCK]}
IN_FP8 = ("wq_a.weight", "wq_b.weight", "wkv.weight", "wo_a.weight", "wo_b.weight")
NAMES = {
    "model.embed_tokens.weight": "embed.weight",
    **{f"model.hc_head.hc_{name}": f"hc_head_{name}" for name in ("fn", "base", "scale")},
}


def powers(largest: Tensor, top: float) -> Tensor:
    return torch.exp2(torch.log2(largest / top).ceil())


def in_fp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    scales = powers(padded.view(rows, BLOCK, columns, BLOCK).abs().amax((1, 3)), 448.0)
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: weight.shape[0], : weight.shape[1]]
    numbers = (weight / wide).to(torch.float8_e4m3fn)
    return {"weight": numbers, "scale": scales.to(torch.float8_e8m0fnu)}, numbers.float() * wide


def in_fp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    groups = weight.unflatten(1, (-1, 32))
    scales = powers(groups.abs().amax(2), 6.0)
    codes = (groups / scales[..., None])[..., None].sub(LEVELS).abs().argmin(-1)
    bytes_ = codes.flatten(1)[:, 0::2] | codes.flatten(1)[:, 1::2] << 4
    tensors = {"weight": bytes_.to(torch.uint8).view(torch.int8), "scale": scales.to(torch.float8_e8m0fnu)}
    return tensors, (LEVELS[codes] * scales[..., None]).flatten(1)


def publish(path: Path) -> Path:
    """Writes the checkpoint again as it is published; returns one of the same numbers in float32."""
    plain = load_file(path / "model.safetensors")
    tensors: dict[str, Tensor] = {"mtp.0.e_proj.weight": torch.ones(4, 4, dtype=torch.bfloat16)}
    for name, weight in plain.items():
        own = NAMES.get(name, name.removeprefix("model."))
        is_expert, is_shared = ".experts." in name, ".shared_experts." in name
        if not is_expert and not is_shared and (not name.endswith(IN_FP8) or "compressor" in name):
            tensors[own] = weight
            continue
        found, plain[name] = (in_fp4 if is_expert else in_fp8)(weight)
        tensors |= {own.removesuffix("weight") + last: tensor.contiguous() for last, tensor in found.items()}
    return write_beside_reference(path, tensors, plain, quantization_config=SCHEME, expert_dtype="fp4")


def test_tokens_equal_those_of_transformers(tmp_path: Path) -> None:
    path = make_checkpoint("deepseek_v4", tmp_path)
    model = load_reference(publish(path))
    expected = [generated(model, prompt) for prompt in prompts()]
    assert generate(load_tiny(path), 4, 7, caching=True, is_tight=True) == expected


def test_all_numbers_are_those_of_16_bits(tmp_path: Path) -> None:
    path = make_checkpoint("deepseek_v4", tmp_path)
    reference = publish(path)
    assert not needs_float32(str(path), None)
    in_fewer_bits, plain = load_tiny(path, "bfloat16"), load_tiny(reference, "bfloat16")
    assert generate(in_fewer_bits, 16, 512, caching=True, is_tight=False) == generate(
        plain, 16, 512, caching=True, is_tight=False
    )


def test_scales_of_other_columns_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint("deepseek_v4", tmp_path)
    publish(path)
    tensors = load_file(path / "model.safetensors")
    name = "layers.0.ffn.experts.1.w2.scale"
    tensors[name] = tensors[name][:, :1].contiguous()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="1 groups of 16 do not make 32 columns"):
        load_tiny(path)
