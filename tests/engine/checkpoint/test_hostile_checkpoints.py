"""A damaged or malicious checkpoint gives a ModelError that says what is wrong: no traceback, no hang, no code run."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.config import EngineConfig
from engine.core.errors import ConfigError, ModelError
from engine.model.loader import load_model
from engine.text.tokenizer import Tokenizer
from server.runtime.generation_defaults import load_generation_defaults
from tests.engine.tiny_models import make_checkpoint
from tests.fuzz import fuzz

pytestmark = pytest.mark.fuzz

ROOT = Path(__file__).resolve().parents[3]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.sampled_from([-1, 0, 1, 3, 7, 10**6, 2**40, 1.5, 1e308]) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)


def load(path: Path) -> None:
    load_model(EngineConfig(model=str(path), device="cpu"))


def is_refused_or_taken(act: Callable[[], Any]) -> None:
    try:
        act()
    except (ModelError, ConfigError) as error:
        assert "\n" not in str(error) and len(str(error)) < 2000


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def copy_of(path: Path, to: Path, **files: bytes) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(path, to)
    for name, content in files.items():
        (to / name).write_bytes(content)
    return to


@fuzz(15)
@given(data=st.data())
def test_any_config(llama: Path, tmp_path: Path, data: st.DataObject) -> None:
    config = json.loads((llama / "config.json").read_text())
    changes = data.draw(st.dictionaries(st.sampled_from(sorted(config)), ANYTHING, min_size=1, max_size=2))
    is_refused_or_taken(
        lambda: load(copy_of(llama, tmp_path / "model", **{"config.json": json.dumps(config | changes).encode()}))
    )


@fuzz(15)
@given(content=st.binary(max_size=40) | ANYTHING.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_for_a_config(llama: Path, tmp_path: Path, content: bytes) -> None:
    is_refused_or_taken(lambda: load(copy_of(llama, tmp_path / "model", **{"config.json": content})))


@fuzz(15)
@given(data=st.data())
def test_any_damage_to_the_weights(llama: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Damages the header of a safetensors file: its length, then the names, types and offsets of the tensors."""
    weights = bytearray((llama / "model.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        weights[data.draw(st.integers(0, 400))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([0, 7, 8, 100, len(weights) - 1, len(weights)]))
    is_refused_or_taken(lambda: load(copy_of(llama, tmp_path / "model", **{"model.safetensors": bytes(weights[:cut])})))


class Bomb:
    """An object that creates a file when it is unpickled, as by a careless loader."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_pickled_weights_run_no_code(llama: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    model = copy_of(llama, tmp_path / "model", **{"pytorch_model.bin": pickle.dumps(Bomb(trace), protocol=2)})
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError):
        load(model)
    assert not trace.exists()


TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]


@fuzz(20)
@given(name=st.sampled_from(TOKENIZER_FILES), data=st.data())
def test_any_tokenizer(tmp_path: Path, name: str, data: st.DataObject) -> None:
    source = ROOT / "engine" / "embedded_model"
    fields = json.loads((source / name).read_text()) if name == "tokenizer_config.json" else {"model": {}, "version": 1}
    changed = st.dictionaries(
        st.sampled_from([*fields, "chat_template", "added_tokens_decoder", "eos_token"]), ANYTHING
    )
    content = data.draw(
        st.binary(max_size=40)
        | (ANYTHING | changed.map(lambda each: fields | each)).map(lambda v: json.dumps(v).encode())
    )
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, model)
    (model / name).write_bytes(content)
    is_refused_or_taken(lambda: Tokenizer.from_pretrained(str(model)))
    for file in TOKENIZER_FILES:
        (model / file).unlink(missing_ok=True)


@fuzz(100)
@given(
    content=st.binary(max_size=40)
    | st.dictionaries(st.sampled_from(["temperature", "top_k", "top_p", "eos_token_id"]), ANYTHING).map(
        lambda v: json.dumps(v).encode()
    )
)
def test_any_generation_config(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "generation_config.json").write_bytes(content)
    is_refused_or_taken(lambda: load_generation_defaults("auto", str(tmp_path), None))
