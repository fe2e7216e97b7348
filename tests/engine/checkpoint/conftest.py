from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from engine.kernels import load_kernels
from tests.engine.checkpoint.gguf_files import write_gguf
from tests.engine.tiny_models import make_checkpoint


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Gives the test a cache of its own, but for the kernels, which would be compiled again."""
    load_kernels()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(make_checkpoint("llama", folder), folder / "model.gguf", lambda name, columns: Type.F16)
    return folder / "model.gguf"
