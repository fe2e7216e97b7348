"""GGUF files that are damaged, hostile, split or of unknown kinds: each gets one sentence, and little memory."""

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.gguf.header import read_gguf
from engine.checkpoint.local import check_checkpoint
from engine.core.config import EngineConfig
from engine.core.errors import ModelError, UnsupportedModelError
from engine.model.loader import load_model
from engine.text.tokenizer import Tokenizer
from tests.engine.checkpoint.gguf_files import finish
from tests.fuzz import fuzz

pytestmark = pytest.mark.usefixtures("own_cache")

COUNTS = [0, 1, 2**16, 2**31 - 1, 2**32 - 1, 2**40, 2**63, 2**64 - 1]


def refusal(act: Callable[[], Any]) -> str:
    """Returns the sentence of the refusal; nothing if there is none."""
    try:
        act()
    except ModelError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
        return str(error)
    return ""


def head_of(content: bytes) -> int:
    """Returns about how long the header is: the tensors come after it."""
    return content.index(b"output_norm.weight") + 1500


def load(path: Path) -> None:
    load_model(EngineConfig(model=str(path), device="cpu"))


@pytest.mark.fuzz
@fuzz(60)
@given(data=st.data())
def test_any_damage_to_a_header_is_refused_or_harmless(gguf_file: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(gguf_file.read_bytes())
    head = head_of(content)
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, head))
        if data.draw(st.booleans()):
            content[at] = data.draw(st.integers(0, 255))
        else:
            content[at : at + 8] = struct.pack("<Q", data.draw(st.sampled_from(COUNTS)))
    cut = data.draw(st.sampled_from([0, 3, 4, 23, 24, 100, head, len(content) - 1, len(content)]))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content[:cut])
    tracemalloc.start()
    refusal(lambda: read_gguf(path))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 10 * len(content)
    refusal(lambda: load(path))


def test_a_header_of_huge_counts_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for kind in range(14):
        key = struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, kind, 2**62)
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**62, 2**62) + key)
        assert "damaged" in refusal(lambda: read_gguf(path))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"GGML" + bytes(40), "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version is 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "architecture missing"),
    ],
)
def test_what_is_no_model_is_refused_with_the_reason(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    for act in (lambda: check_checkpoint(str(path)), lambda: load(path), lambda: Tokenizer.from_pretrained(str(path))):
        assert reason in refusal(act)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(lambda: check_checkpoint(str(tmp_path / "model.gguf")))
    (tmp_path / "model.gguf").mkdir()
    assert "directory" in refusal(lambda: check_checkpoint(str(tmp_path / "model.gguf")))


def written(path: Path, arch: str, *, raw_dtype: Type = Type.F32, **metadata: int) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_token_list(["a", "b"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_block_count(1)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_context_length(64)
    for key, value in metadata.items():
        writer.add_uint32(f"{arch}.{key.replace('__', '.')}", value)
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))
    width = 1 if raw_dtype is Type.F32 else gguf.GGML_QUANT_SIZES[raw_dtype][1]
    dtype = np.float32 if raw_dtype is Type.F32 else np.uint8
    writer.add_tensor("blk.0.attn_norm.weight", np.zeros((1, width), dtype), raw_dtype=raw_dtype)
    finish(writer)
    return path


def test_unknown_architectures_types_and_settings_are_refused_by_name(tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(UnsupportedModelError) as error:
            check_checkpoint(str(path))
        return str(error.value)

    assert "'mamba'" in refused(written(tmp_path / "a.gguf", "mamba"))
    assert "IQ2_XXS" in refused(written(tmp_path / "b.gguf", "llama", raw_dtype=Type.IQ2_XXS))
    assert "llama.attention.scale" in refused(written(tmp_path / "c.gguf", "llama", attention__scale=3))
    assert "rotated in part" in refused(written(tmp_path / "d.gguf", "llama", rope__dimension_count=4))


def test_tensors_without_a_place_are_refused_by_name(gguf_file: Path, tmp_path: Path) -> None:
    content = gguf_file.read_bytes()
    path = tmp_path / "model.gguf"
    path.write_bytes(content.replace(b"blk.1.ffn_gate.weight", b"blk.1.ffn_gatx.weight"))
    assert "'blk.1.ffn_gatx.weight' has no place" in refusal(lambda: load(path))


def test_more_layers_than_tensors_are_refused(gguf_file: Path, tmp_path: Path) -> None:
    content = bytearray(gguf_file.read_bytes())
    at = content.index(b"llama.block_count") + len(b"llama.block_count") + 4
    content[at : at + 4] = struct.pack("<I", 2**30)
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert "3 of its 1073741824 layers" in refusal(lambda: check_checkpoint(str(path)))


def split(path: Path, folder: Path, num_parts: int) -> list[Path]:
    """Writes a file again as so many, the metadata in the first."""
    reader = gguf.GGUFReader(path)
    paths = []
    for number in range(num_parts):
        paths.append(folder / f"{path.stem}-{number + 1:05}-of-{num_parts:05}.gguf")
        writer = gguf.GGUFWriter(paths[-1], "llama")
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                kinds = [*field.types, None]
                writer.add_key_value(field.name, field.contents(), kinds[0], kinds[1])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", num_parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::num_parts]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        finish(writer)
    return paths


def test_split_files_are_one_model(gguf_file: Path, tmp_path: Path) -> None:
    paths = split(gguf_file, tmp_path, 3)
    whole, parts = load_model(EngineConfig(model=str(gguf_file))), load_model(EngineConfig(model=str(paths[0])))
    assert parts.weights_fingerprint == whole.weights_fingerprint
    assert f"name the first one, {paths[0].name.removesuffix('-of-00003.gguf')}" in refusal(lambda: load(paths[1]))
    paths[2].unlink()
    assert "No such file" in refusal(lambda: load(paths[0]))
    alone = paths[0].rename(tmp_path / "other.gguf")
    assert "one of 3 files" in refusal(lambda: load(alone))
