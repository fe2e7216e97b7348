import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from engine.attention import AttentionBackend
from engine.kernels import load_kernels
from engine.model import machine_ceilings
from engine.runner.loaded_model import LoadedModel
from tests.engine.attention.attention_cases import named_backend
from tests.engine.tiny_models import ReferenceModel, load_reference, load_tiny, make_checkpoint


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Limits torch to one thread: tiny models are slower with more, and much slower on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session", autouse=True)
def brief_measurements() -> Iterator[None]:
    """Measures the machine's ceilings for a moment alone, each time that a model is loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_ceilings, "_BUDGET_S", 0.0)
        patch.setattr(machine_ceilings, "_RUN_S", 1e-9)
        patch.setattr(machine_ceilings, "_DOUBTFUL_RATIO", 1e9)
        yield


@pytest.fixture
def memory_fd() -> Iterator[int]:
    """The descriptor of an empty file in memory."""
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Sets torch to two threads, which share matmuls, and to the same random numbers every time."""
    torch.manual_seed(3)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def kernels() -> None:
    """Loads the kernels' operators."""
    if load_kernels() is None:
        pytest.skip("no kernels here")


@pytest.fixture
def ops(kernels: None) -> None:
    """Puts the kernels' activations in place of torch's, as when a model is loaded."""
    torch.ops.twostep.replace_activations()


@pytest.fixture(params=["reference", "kernel"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    """Each backend of paged attention that runs on a CPU."""
    return named_backend(request.param)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """The folder of a tiny checkpoint, which the test may change."""
    return make_checkpoint("llama", tmp_path)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LoadedModel]:
    """tiny_model(architecture, dtype="float32", quantization="none", drafts="none", kv="auto"): loads it once."""
    directory = tmp_path_factory.mktemp("checkpoints")

    @cache
    def load(architecture: str, *settings: str) -> LoadedModel:
        path = directory / architecture
        return load_tiny(path if path.exists() else make_checkpoint(architecture, directory), *settings)

    return load


@pytest.fixture(scope="session")
def reference_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ReferenceModel]:
    """reference_model(architecture): the same checkpoint, untouched, for `generate`."""
    directory = tmp_path_factory.mktemp("references")
    return cache(lambda architecture: load_reference(make_checkpoint(architecture, directory)))
