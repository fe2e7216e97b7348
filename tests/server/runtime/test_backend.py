"""Loading of the backend: its fingerprint, and one commit of the hub for all files."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

import engine as engine_package
from engine.client.observer import NullObserver
from engine.core.config import EngineConfig, EngineInfo
from engine.core.errors import AdapterError, ConfigError, ModelError
from server.runtime.backend import backend_opener
from server.runtime.generation_defaults import GenerationDefaults
from server.settings.settings import EMBEDDED_MODEL_DIR
from tests.server.fake_engine import INFO
from tests.server.given_settings import read

OLD, NEW = "1" * 40, "2" * 40


class InstantEngine:
    """An engine that loads nothing and reports the model of its configuration."""

    def __init__(self, config: EngineConfig, *_: Any, **__: Any) -> None:
        self.info = msgspec.structs.replace(INFO, model=config.model)

    async def spawn(self) -> None:
        pass

    async def start(self, table: Any) -> EngineInfo:
        return self.info

    async def stop(self) -> None:
        pass


@pytest.fixture
def main_ref(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the file that holds the commit of org/model's branch `main`. Only the old commit's files are
    downloaded."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshots, refs = (tmp_path / "models--org--model" / name for name in ("snapshots", "refs"))
    snapshots.mkdir(parents=True)
    (snapshots / OLD).symlink_to(Path(engine_package.__file__).parent / "embedded_model")
    refs.mkdir()
    (refs / "main").write_text(OLD)
    return refs / "main"


@pytest.mark.parametrize("model", [[], [str(EMBEDDED_MODEL_DIR)]])
def test_a_revision_of_what_is_not_on_the_hub_is_refused(model: list[str]) -> None:
    what = f"{model[0]} is on this machine" if model else "the embedded model"
    with pytest.raises(ConfigError, match=f"--revision names .* on the hub, and {what}"):
        backend_opener(read(*model, "--revision", "main"))


def test_an_adapter_without_settings_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none", "is no directory of an adapter"), (tmp_path, "adapter_config.json")):
        with pytest.raises(AdapterError, match=why):
            backend_opener(read("--lora", f"sql={path}"))


def fingerprint_of(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> str:
    """Returns the fingerprint of a server whose engine reports these facts."""

    class ChangedEngine(InstantEngine):
        def __init__(self, config: EngineConfig, *_: Any, **__: Any) -> None:
            self.info = msgspec.structs.replace(INFO, **facts)

    async def load() -> str:
        async with backend_opener(read(str(EMBEDDED_MODEL_DIR)))(NullObserver()) as backend:
            return backend.fingerprint()

    monkeypatch.setattr("engine.client.async_engine.AsyncEngine", ChangedEngine)
    return asyncio.run(load())


def test_the_fingerprint_tells_the_weights_and_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint_of(monkeypatch)
    assert before == fingerprint_of(monkeypatch, model="/elsewhere/model", load_s=77.0)
    for fact in ("weights_fingerprint", "device", "dtype", "attention", "linear", "forward", "computing_libraries"):
        assert fingerprint_of(monkeypatch, **{fact: "other"}) != before


def test_all_is_of_the_commit_that_the_branch_was_at_the_start(main_ref: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[EngineConfig] = []

    class LastEngine:
        """An engine that is started after everything else is loaded."""

        def __init__(self, config: EngineConfig, *_: Any, **__: Any) -> None:
            started.append(config)

        async def spawn(self) -> None:
            pass

        async def start(self, table: Any) -> None:
            raise ModelError("It is enough.")

        async def stop(self) -> None:
            pass

    def move_branch(*_: Any) -> GenerationDefaults:
        main_ref.write_text(NEW)
        return GenerationDefaults()

    async def load() -> None:
        async with backend_opener(read("org/model"))(NullObserver()):
            pass

    monkeypatch.setattr("engine.client.async_engine.AsyncEngine", LastEngine)
    monkeypatch.setattr("server.runtime.backend.load_generation_defaults", move_branch)
    with pytest.raises(ModelError, match="It is enough"):
        asyncio.run(load())
    assert [config.revision for config in started] == [OLD]


def test_random_weights_take_a_directory_with_config_json_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_bytes((EMBEDDED_MODEL_DIR / "config.json").read_bytes())
    started: list[EngineConfig] = []

    class KeptEngine(InstantEngine):
        def __init__(self, config: EngineConfig, *_: Any, **__: Any) -> None:
            started.append(config)
            self.info = INFO

    async def load() -> int:
        async with backend_opener(read(str(tmp_path), "--load-format", "dummy"))(NullObserver()) as backend:
            return len(backend.tokenizer.encode("Hello"))

    monkeypatch.setattr("engine.client.async_engine.AsyncEngine", KeptEngine)
    assert asyncio.run(load()) > 0 and started[0].tokenizer == str(EMBEDDED_MODEL_DIR)
    with pytest.raises(ModelError, match="has no weights"):
        backend_opener(read(str(tmp_path)))


def test_an_admission_queue_is_of_the_size_that_the_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    class CudaEngine(InstantEngine):
        def __init__(self, config: EngineConfig, *_: Any, **__: Any) -> None:
            self.info = msgspec.structs.replace(INFO, device="cuda")

    async def num_slots(*flags: str) -> int:
        async with backend_opener(read(str(EMBEDDED_MODEL_DIR), *flags))(NullObserver()) as backend:
            return backend.admission_size.num_slots

    monkeypatch.setattr("engine.client.async_engine.AsyncEngine", CudaEngine)
    assert asyncio.run(num_slots()) == 256 and asyncio.run(num_slots("--max-num-seqs", "9")) == 9
