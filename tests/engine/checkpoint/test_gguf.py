"""Models in GGUF files answer as transformers does with the numbers that the files store, token by token."""

import json
import weakref
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type

from engine.checkpoint.gguf.block_types import BLOCK_TYPES
from engine.checkpoint.gguf.blocks import BlockCodec
from engine.checkpoint.stored_tensor import StoredTensor
from engine.model.small_copy import randomize
from tests.crossed import slow_but
from tests.engine.checkpoint.gguf_files import stored, write_gguf
from tests.engine.golden_tokens import generate, generated, prompts
from tests.engine.tiny_architectures import tiny_model
from tests.engine.tiny_models import ARCHITECTURES as ARCHITECTURES_OF_TESTS
from tests.engine.tiny_models import WIDE, ReferenceModel, load_tiny, make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")

ARCHITECTURES = (
    *("llama", "qwen3", "mixtral", "qwen3_moe", "gemma2", "gemma3", "phi3", "granite", "olmo2", "smollm3"),
    *("starcoder2_mqa", "qwen2", "qwen2_moe", "gemma"),
)
PLAIN = {
    "phi3": {"rope__scaling__original_context_length": 256},
    "gemma3": {"attention__sliding_window_pattern": 2},
}
"""Metadata beside what llama.cpp's converter writes, where tiny models are not as it has them."""


def in_blocks_of_32(name: str, columns: int) -> Type:
    """A mix of types, as far as rows can be cut into their blocks."""
    if columns % 32:
        return Type.F16
    return (Type.Q8_0, Type.Q4_0, Type.Q5_1, Type.BF16)[len(name) % 4]


def checkpoint_of(architecture: str, directory: Path) -> Path:
    # Those of tests have windows, and layers without experts, which GGUF cannot say.
    if architecture in ARCHITECTURES_OF_TESTS and architecture not in ("qwen2", "qwen2_moe"):
        return make_checkpoint(architecture, directory)
    model = tiny_model(architecture, {"vocab_size": 199, "tie_word_embeddings": architecture == "gemma"})
    with torch.no_grad():
        randomize(model)
    model.save_pretrained(directory / architecture)
    return directory / architecture


@pytest.mark.parametrize("architecture", slow_but(ARCHITECTURES, "llama", "qwen3_moe", "gemma3", "phi3", "granite"))
def test_architectures_answer_as_transformers(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    checkpoint = checkpoint_of(architecture, tmp_path)
    reference = ReferenceModel(write_gguf(checkpoint, path, in_blocks_of_32, **PLAIN.get(architecture, {})))
    expected = [generated(reference, prompt) for prompt in prompts()]
    assert generate(load_tiny(path, "auto"), 4, 7, caching=True, is_tight=True) == expected


@pytest.mark.parametrize("kind", [Type(number) for number in BLOCK_TYPES], ids=lambda kind: kind.name)
def test_blocks_are_what_their_definition_says(kind: Type) -> None:
    raw = stored(np.random.default_rng(0).standard_normal((5, 512), dtype=np.float32), kind)
    numbers = BlockCodec(BLOCK_TYPES[kind.value]).decode(torch.from_numpy(raw))
    np.testing.assert_array_equal(numbers.numpy(), gguf.dequantize(raw, kind).reshape(5, 512))
    assert 0.5 < float(numbers.std()) < 2


def in_blocks_of_256(name: str, columns: int) -> Type:
    """A mix as llama.cpp makes it: rows that are no multiple of 256 have other types."""
    if columns % 256:
        return Type.Q8_0
    return (Type.Q4_K, Type.Q6_K, Type.Q5_K, Type.IQ4_XS, Type.Q3_K, Type.IQ4_NL, Type.Q2_K)[len(name) % 7]


def test_a_mix_of_large_blocks_answers_as_transformers(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    reference = ReferenceModel(write_gguf(make_checkpoint(WIDE, tmp_path), path, in_blocks_of_256))
    prompt = prompts()[-1]
    assert generate(load_tiny(path, "auto"), 16, 7, caching=True, is_tight=True)[-1] == generated(reference, prompt)


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.Q8_0])
def test_numbers_that_16_bits_would_round_are_computed_in_32(kind: Type, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(make_checkpoint("llama", tmp_path), path, lambda name, columns: Type.F16 if columns % 32 else kind)
    assert load_tiny(path, "auto").dtype is torch.float32  # even of BF16: the norms have 32 bits
    assert load_tiny(path, "bfloat16").dtype is torch.bfloat16, "whoever asks for it gets it"


def test_numbers_that_are_all_of_bfloat16_are_computed_in_it(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    checkpoint = make_checkpoint("gemma2", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    model.float().save_pretrained(checkpoint)
    write_gguf(checkpoint, path, lambda name, columns: Type.BF16)
    plain, from_gguf = load_tiny(checkpoint, "bfloat16"), load_tiny(path, "auto")
    assert from_gguf.dtype is torch.bfloat16
    assert from_gguf.weight_bytes == plain.weight_bytes
    assert generate(from_gguf, 16, 7, True, False) == generate(plain, 16, 7, True, False)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_stored_weights_are_quantized_as_dense_ones(quantization: str, tmp_path: Path) -> None:
    path, dense = tmp_path / "model.gguf", tmp_path / "dense"
    write_gguf(make_checkpoint("llama", tmp_path), path, in_blocks_of_32).save_pretrained(dense)
    drafts = "int4" if quantization == "int8" else "none"
    models = [load_tiny(each, "float32", quantization, drafts) for each in (path, dense)]
    assert generate(models[0], 4, 7, True, True) == generate(models[1], 4, 7, True, True)


def test_llama_3_has_its_frequencies_in_a_tensor(tmp_path: Path) -> None:
    checkpoint, path = make_checkpoint("llama", tmp_path), tmp_path / "model.gguf"
    rope = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    scaled = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    plain = 10_000.0 ** -(np.arange(0, 8, 2) / 8)
    factors = plain / scaled.model.rotary_emb.inv_freq.numpy()
    assert factors.max() > 7.9 and factors.min() == pytest.approx(1.0), "some frequencies are scaled, others are not"
    reference = ReferenceModel(write_gguf(checkpoint, path, in_blocks_of_32, factors.astype(np.float32)))
    expected = [generated(reference, prompt) for prompt in prompts()]
    assert generate(load_tiny(path, "auto"), 4, 7, caching=True, is_tight=True) == expected


def test_only_one_weight_at_a_time_is_dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(make_checkpoint(WIDE, tmp_path), path, in_blocks_of_256)
    expand, expanded, most = StoredTensor.expanded, [], 0

    def watched(tensor: StoredTensor) -> torch.Tensor:
        nonlocal most
        numbers = expand(tensor)
        expanded.append(weakref.ref(numbers))
        alive = [each for ref in expanded if (each := ref()) is not None]
        most = max(most, sum(each.nbytes for each in alive))
        return numbers

    monkeypatch.setattr(StoredTensor, "expanded", watched)
    load_tiny(path, "auto", "int4")
    assert len(expanded) > 30
    assert most == 3001 * 512 * 4, "the embedding and the head are the largest ones"
