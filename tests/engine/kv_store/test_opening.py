"""A store is opened for one model on one machine; all else that it could be mistaken for is another one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.attention.kv_cache import KVCache, LayerShape, VectorShape
from engine.core.config import EngineConfig
from engine.core.errors import ConfigError
from engine.host import code_digest
from engine.kv_store.fingerprint import kv_fingerprint
from engine.kv_store.opening import open_store
from engine.mixers.state import StateCache, StateShape
from tests.engine.fakes import fake_info


def cache(
    block_size: int = 4, dtype: torch.dtype = torch.bfloat16, num_blocks: int = 4, hidden: VectorShape | None = None
) -> KVCache:
    return KVCache([LayerShape(2, 8, 8)], num_blocks, block_size, dtype, torch.device("cpu"), hidden)


def states(*sizes: int, dtype: torch.dtype = torch.float32, num_slots: int = 2) -> StateCache:
    return StateCache([StateShape((size,), dtype) for size in sizes], num_slots, torch.device("cpu"))


def fingerprint_of(
    info: dict[str, Any] | None = None, kv: KVCache | None = None, kept: StateCache | None = None, **settings: Any
) -> str:
    config = EngineConfig(model="fake", **settings)
    return kv_fingerprint(config, msgspec.structs.replace(fake_info(4, 4), **(info or {})), kv or cache(), kept)


def test_equal_engines_have_equal_fingerprints() -> None:
    assert fingerprint_of() == fingerprint_of()


def test_what_changes_no_bit_changes_no_fingerprint() -> None:
    settings = {"max_num_seqs": 2, "kv_store_bytes": 10**6, "num_speculative_tokens": 0, "trace": "x"}
    assert fingerprint_of(**settings) == fingerprint_of({"num_blocks": 9}, cache(num_blocks=9)) == fingerprint_of()


@pytest.mark.parametrize(
    "other",
    [
        lambda: fingerprint_of({"weights_fingerprint": "4567"}),
        lambda: fingerprint_of({"attention": "reference"}),
        lambda: fingerprint_of({"forward": "transformers"}),
        lambda: fingerprint_of({"linear": "twostep avx512"}),
        lambda: fingerprint_of({"dtype": "bfloat16"}),
        lambda: fingerprint_of(quantization="int8"),
        lambda: fingerprint_of(kv=cache(block_size=8)),
        lambda: fingerprint_of(kv=cache(dtype=torch.float16)),
        lambda: fingerprint_of(kv=cache(hidden=VectorShape(8, torch.bfloat16))),
        lambda: fingerprint_of(trust_remote_code=True),
    ],
    ids=[
        "weights",
        "attention",
        "forward",
        "isa",
        "dtype",
        "quantization",
        "block size",
        "kv dtype",
        "hidden",
        "remote code",
    ],
)
def test_what_may_change_a_bit_changes_it(other: Callable[[], str]) -> None:
    assert other() != fingerprint_of()


def test_the_shapes_of_states_change_it_and_their_number_does_not() -> None:
    usual = fingerprint_of(kept=states(6))
    assert fingerprint_of(kept=states(6, num_slots=9), state_checkpoint_interval=64) == usual
    others = states(), states(7), states(6, 6), states(6, dtype=torch.bfloat16)
    assert usual not in {fingerprint_of(kept=each) for each in others}
    assert fingerprint_of(kept=states()) == fingerprint_of()


def test_libraries_settings_and_the_cpu_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = fingerprint_of()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    with_library_setting = fingerprint_of()
    monkeypatch.setattr("engine.kv_store.fingerprint.cpu_flags", lambda: frozenset({"another"}))
    assert len({usual, with_library_setting, fingerprint_of()}) == 3


@pytest.mark.parametrize("package", ["mixers", "model"])
def test_code_that_computes_changes_it(package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usual = fingerprint_of()
    monkeypatch.setattr(code_digest.engine, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / package).mkdir()
    others = set()
    for text in ("x = 1", "x = 2"):
        (tmp_path / package / "layer.py").write_text(text)
        others.add(fingerprint_of())
    assert len(others - {usual}) == 2


def opened(directory: Path, num_copies: int | None = None, **settings: Any) -> Any:
    """Opens the store of a model that has states if there may be `num_copies` of them."""
    config = EngineConfig(model="fake", block_size=4, kv_store=str(directory), **settings)
    slots = {} if num_copies is None else {"num_state_slots": 2, "num_state_checkpoints": num_copies}
    store = open_store(config, fake_info(4, 4, **slots), cache(), states() if num_copies is None else states(2000))
    if store is not None:
        store.close()
    return store


def test_a_store_that_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="CPU"):
        opened(tmp_path, device="cuda")
    with pytest.raises(ConfigError, match="less than one block"):
        opened(tmp_path, kv_store_bytes=100)
    with pytest.raises(ConfigError, match="prefix caching"):
        opened(tmp_path, enable_prefix_caching=False)


def test_so_is_one_that_cannot_keep_states(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"recurrent states, for which --state-cache-memory-bytes leaves no room"):
        opened(tmp_path, num_copies=0)
    with pytest.raises(ConfigError, match=r"less than the recurrent states of one request take, 8\d{3}:"):
        opened(tmp_path, num_copies=1, kv_store_bytes=8000)
    assert opened(tmp_path, num_copies=1, kv_store_bytes=9000) is not None


def test_an_engine_goes_on_without_a_directory_that_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("x")
    assert opened(tmp_path / "file") is None and "no KV store" in caplog.text
    assert opened(tmp_path / "new") is not None


def test_there_is_none_unless_asked_for() -> None:
    assert open_store(EngineConfig(model="fake"), fake_info(4, 4), cache()) is None
