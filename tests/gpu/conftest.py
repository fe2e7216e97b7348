"""Kernels in Triton run on the GPU where there is one, else by Triton's interpreter, if that is installed."""

from importlib.util import find_spec

import pytest
import torch


@pytest.fixture(scope="session")
def triton_device() -> torch.device:
    """The device whose tensors Triton's kernels take here. Skips the test where there is no Triton."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if find_spec("triton") is None:
        pytest.skip("pip install -e '.[triton]' brings the interpreter of CUDA kernels")
    from tests.gpu.interpreter import make_exact

    make_exact()
    return torch.device("cpu")
