"""Each published format is computed as exactly as its type allows, and as exactly as the documentation says."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from benchmarks.formats.table import FORMATS
from benchmarks.published_formats import Text, measure
from benchmarks.quantization import MODEL, WINDOW, docstrings
from engine.kernels import load_kernels
from tests.crossed import slow_but

HEADROOM = 2.0
LARGEST_ERROR = 20.0
"""Largest error of a logit, in RMS errors of transformers."""


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load_kernels()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights, whose rows all formats can store."""
    path = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 199}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "initializer_range": 0.06}
    ids = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    config = LlamaConfig(**sizes, **heads, **ids, tie_word_embeddings=True, max_position_embeddings=128)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


QUICK = (
    *("fp8, in blocks", "gptq, 4 bits, desc_act", "awq", "compressed-tensors W4A16", "modelopt NVFP4"),
    *("quark MXFP4", "bitsandbytes NF4, nested", "GGUF Q4_K, Q5_0"),
)
"""One of each kind of scales and blocks."""


@pytest.mark.parametrize("name", slow_but(FORMATS, *QUICK))
def test_errors_are_those_of_arithmetic(name: str, small_model: Path, tmp_path: Path) -> None:
    tokens = torch.randint(199, (1, 60), generator=torch.Generator().manual_seed(1))
    result = measure(FORMATS[name], Text(small_model, tokens), tmp_path)
    assert result.served.rms <= HEADROOM * result.plain.rms
    assert result.served.largest <= LARGEST_ERROR * result.plain.rms
    assert str(result.dtype) in ("torch.float32", f"torch.{documented()[name][1]}")


@cache
def documented() -> dict[str, list[str]]:
    """Format -> the cells of its row in the documentation."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| (\d+\.\d\d \|.*) \|$", page, re.MULTILINE)
    return {name: rest.split(" | ") for name, rest in rows if name in FORMATS}


def test_every_format_is_documented() -> None:
    assert [*documented()] == [*FORMATS]


@cache
def text() -> Text:
    """Half of what the documentation was measured with."""
    token_ids = AutoTokenizer.from_pretrained(MODEL)(docstrings(), return_tensors="pt", verbose=False).input_ids
    return Text(MODEL, token_ids[:, :WINDOW])


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_errors_are_those_documented(name: str, tmp_path: Path) -> None:
    bits, _, rms, *_, divergence = documented()[name]
    result = measure(FORMATS[name], text(), tmp_path)
    assert f"{result.bits:.2f}" == bits
    assert result.served.rms <= HEADROOM * float(rms)
    assert result.cost.divergence == pytest.approx(float(divergence), rel=0.5, abs=1e-9)
