"""What the server loads before it is ready."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import engine as engine_package
from engine.client import NullObserver
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelError
from server.backend import backend_opener
from server.generation_defaults import GenerationDefaults
from server.settings import EMBEDDED_MODEL_DIR
from tests.server.given_settings import read

OLD, NEW = "1" * 40, "2" * 40


@pytest.fixture
def main_ref(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Which commit the branch `main` of org/model is. All that was downloaded of it is the old one."""
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
    what = f"{model[0]} is a directory" if model else "the embedded model"
    with pytest.raises(ConfigError, match=f"--revision names .* on the hub, and {what}"):
        backend_opener(read(*model, "--revision", "main"))


def test_all_is_of_the_commit_that_the_branch_was_at_the_start(main_ref: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[EngineConfig] = []

    class LastEngine:
        """Started after all else is loaded."""

        def __init__(self, config: EngineConfig, *_: Any, **__: Any) -> None:
            started.append(config)

        async def start(self) -> None:
            raise ModelError("It is enough.")

        async def stop(self) -> None:
            pass

    def move_branch(*_: Any) -> GenerationDefaults:
        main_ref.write_text(NEW)
        return GenerationDefaults()

    async def load() -> None:
        async with backend_opener(read("org/model"))(NullObserver()):
            pass

    monkeypatch.setattr("engine.async_engine.AsyncEngine", LastEngine)
    monkeypatch.setattr("server.backend.load_generation_defaults", move_branch)
    with pytest.raises(ModelError, match="It is enough"):
        asyncio.run(load())
    assert [config.revision for config in started] == [OLD]
