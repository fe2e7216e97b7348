"""Machines that may compute other numbers are told apart, and others are not."""

import pytest
import torch

from engine.host.computing_libraries import computing_libraries

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_the_kind_of_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A")
    one = computing_libraries(GPU, "transformers", has_kernels=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B")
    assert computing_libraries(GPU, "transformers", has_kernels=False) != one


@pytest.mark.parametrize(
    ("forward", "has_kernels", "names"),
    [("kernels", True, {"torch"}), ("transformers", True, {"torch", "transformers"})],
)
def test_the_versions_of_what_computes_count(
    forward: str, has_kernels: bool, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = computing_libraries(CPU, forward, has_kernels)
    assert names == {name for name in ("torch", "transformers", "triton") if f"{name} " in text}
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert computing_libraries(CPU, forward, has_kernels) != text


def test_the_kind_of_cpu_counts_where_torch_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [computing_libraries(CPU, "transformers", has_kernels) for has_kernels in (False, True)]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    after = [computing_libraries(CPU, "transformers", has_kernels) for has_kernels in (False, True)]
    assert before[0] != after[0] and before[1] == after[1]
