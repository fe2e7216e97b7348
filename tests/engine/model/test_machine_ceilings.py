"""Measured ceilings of the machine: what is read and multiplied for them, and in which dtype."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.core.machine import Ceilings
from engine.model import machine_ceilings
from engine.model.machine_ceilings import measure_again, measure_ceilings

CPU = torch.device("cpu")


def test_ceilings_are_measured() -> None:
    measured = measure_ceilings(CPU, torch.float32, weight_bytes=1 << 20)
    assert 0 < measured.read_bytes_per_s < 1e13
    assert 0 < measured.flops_per_s < 1e15


@pytest.mark.parametrize(
    ("run_s", "matrix_size"),
    [(0.01, 512), (0.004, 512), (0.0004, 1024), (1e-6, 2048)],  # a slow machine is content with small ones
)
def test_ceilings_are_work_over_time(run_s: float, matrix_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    sums: list[float] = []

    def seconds(run: Callable[[], Tensor], device: torch.device) -> float:
        """Returns times as if a matmul of 256 took `run_s`, one twice as large eight times that, and a read `run_s`."""
        if not isinstance(run, functools.partial):
            sums.append(run().item())
            return run_s
        assert run.func is torch.matmul
        sizes.append(run.args[0].shape[0])
        return run_s * (sizes[-1] / 256) ** 3

    monkeypatch.setattr(machine_ceilings, "_seconds", seconds)
    monkeypatch.setattr(machine_ceilings, "_BUDGET_S", 0.0)
    monkeypatch.setattr(machine_ceilings, "_RUN_S", 0.005)
    measured = measure_ceilings(CPU, torch.float32, weight_bytes=1 << 20)
    assert measured.read_bytes_per_s == pytest.approx((1 << 20) / run_s)
    assert measured.flops_per_s == pytest.approx(2 * 256**3 / run_s)
    assert max(sizes) == matrix_size
    assert set(sums) == {(1 << 20) / torch.float32.itemsize}  # of ones: all of them are read, each time


def test_a_product_that_waits_for_a_busy_cpu_is_no_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(run: Any, device: torch.device) -> float:
        """Returns times as if each matmul waited 8 ms for a thread, and one of 256 took a microsecond beside that."""
        return 0.008 + 1e-6 * (run.args[0].shape[0] / 256) ** 3 if run.func is torch.matmul else 1.0

    monkeypatch.setattr(machine_ceilings, "_seconds", seconds)
    monkeypatch.setattr(machine_ceilings, "_reading", lambda *_: torch.empty(7))
    monkeypatch.setattr(machine_ceilings, "_read_speed", lambda *_: 1.0)
    measured = measure_ceilings(CPU, torch.float32, weight_bytes=1 << 20)
    assert measured.flops_per_s == pytest.approx(2 * 2048**3 / (0.008 + 512e-6))


@pytest.mark.parametrize(("available", "num_read", "read_speed"), [(10 << 30, 512 << 20, 7.0), (4 << 30, None, 1.0)])
@pytest.mark.parametrize(("name", "is_quantized"), [("bfloat16", False), ("float32", False), ("int8", True)])
def test_beside_a_model_the_same_is_measured_unless_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
    available: int,
    num_read: int | None,
    read_speed: float,
    name: str,
    is_quantized: bool,
) -> None:
    read: list[int] = []
    products: list[Any] = []

    def reading(device: torch.device, weight_bytes: int, _: Any) -> Tensor:
        read.append(machine_ceilings._read_bytes(device, weight_bytes))
        return torch.empty(7)

    monkeypatch.setattr(machine_ceilings, "all_caches_bytes", lambda: 64 << 20)
    monkeypatch.setattr(machine_ceilings, "available_bytes", lambda _: available)
    monkeypatch.setattr(machine_ceilings, "_reading", reading)
    monkeypatch.setattr(machine_ceilings, "_best_seconds", lambda *_: 4.0)
    monkeypatch.setattr(machine_ceilings, "_unless", lambda _, run: run)
    monkeypatch.setattr(machine_ceilings, "_plain_matmul", lambda *arguments: arguments)
    monkeypatch.setattr(machine_ceilings, "_quantized_matmul", lambda *arguments: arguments)
    monkeypatch.setattr(machine_ceilings, "_flops_per_s", lambda _, matmul_of: products.append(matmul_of(8)) or 8.0)
    found = measure_again(Ceilings(1.0, 2.0, name, is_in_doubt=True), torch.bfloat16, 1 << 31, lambda: False)
    assert found == Ceilings(read_speed, 8.0, name, is_in_doubt=num_read is None)
    assert read == ([] if num_read is None else [num_read])
    assert products == [(torch.bfloat16, name, 8) if is_quantized else (CPU, getattr(torch, name), 8)]


def test_a_measurement_ends_at_any_moment_at_which_the_process_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_ceilings, "_BUDGET_S", 0.0)
    monkeypatch.setattr(machine_ceilings, "_MAX_MATRIX_SIZE", {"cpu": 512})
    monkeypatch.setattr(machine_ceilings, "all_caches_bytes", lambda: 0)
    monkeypatch.setattr(machine_ceilings, "_seconds", lambda run, _: run() is None or 1.0)
    ended = []
    before = Ceilings(1e30, 1e30)
    for num_moments in range(20):
        moments = iter([False] * num_moments + [True])
        ended.append(measure_again(before, torch.float32, 1 << 26, moments.__next__))
        assert next(moments, None) is None or ended[-1] is not None  # nothing ran behind the moment
    assert ended[0] is None and ended[-1] is not None
    assert sum(each is None for each in ended) >= 10  # six matrix products, two pieces written, two reads


@pytest.mark.parametrize(
    ("device", "cache_bytes", "most"),
    [("cpu", 32 << 20, 256 << 20), ("cpu", 384 << 20, 1 << 30), ("cpu", 0, 1 << 30), ("cuda", 32 << 20, 1 << 30)],
)
def test_a_model_reads_as_much_as_it_has_up_to_more_than_caches_hold(
    device: str, cache_bytes: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_ceilings, "all_caches_bytes", lambda: cache_bytes)
    for weight_bytes, expected in ((1, 1 << 16), (10 << 20, 10 << 20), (1 << 40, most)):
        assert machine_ceilings._read_bytes(torch.device(device), weight_bytes) == expected


@pytest.mark.parametrize(
    ("weight_bytes", "cache_bytes", "reads", "told"),
    [
        (19 << 20, 32 << 20, True, "the processor's cache"),
        (64 << 20, 32 << 20, False, "memory"),
        (1, 0, False, "memory"),  # where the system tells of no cache
    ],
)
def test_it_is_told_whether_a_cache_was_read(
    weight_bytes: int, cache_bytes: int, reads: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_ceilings, "largest_cache_bytes", lambda: cache_bytes)
    monkeypatch.setattr(machine_ceilings, "_flops_per_s", lambda *_: 1.0)
    monkeypatch.setattr(machine_ceilings, "_read_speed", lambda *_: 1.0)
    found = measure_ceilings(CPU, torch.float32, weight_bytes)
    assert (found.reads_cache, found.read_from) == (reads, told)


@pytest.mark.parametrize(("speeds", "is_in_doubt"), [((3.0, 2.1), False), ((2.0, 3.1), True), ((3.1, 2.0), True)])
def test_two_measurements_that_differ_much_are_in_doubt(
    speeds: tuple[float, float], is_in_doubt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = iter(speeds)
    monkeypatch.setattr(machine_ceilings, "_DOUBTFUL_RATIO", 1.5)
    monkeypatch.setattr(machine_ceilings, "_flops_per_s", lambda *_: 1.0)
    monkeypatch.setattr(machine_ceilings, "_read_speed", lambda *_: next(measured))
    found = measure_ceilings(CPU, torch.float32, 1)
    assert (found.read_bytes_per_s, found.is_in_doubt) == (max(speeds), is_in_doubt)


@pytest.mark.parametrize(("has_native", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_cpu_without_bfloat16_is_measured_in_what_it_multiplies(
    has_native: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_ceilings, "has_native_bf16", lambda: has_native)
    assert machine_ceilings.matmul_dtype(CPU, torch.bfloat16) is expected
    assert machine_ceilings.matmul_dtype(CPU, torch.float32) is torch.float32
    assert machine_ceilings.matmul_dtype(torch.device("cuda"), torch.bfloat16) is torch.bfloat16


def test_the_dtype_that_the_cpu_multiplies_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[torch.dtype] = []

    def speed(_: torch.device, matmul_of: Callable[[int], machine_ceilings.Matmul]) -> float:
        measured.append(matmul_of(8)().dtype)
        return 1.0

    monkeypatch.setattr(machine_ceilings, "has_native_bf16", lambda: False)
    monkeypatch.setattr(machine_ceilings, "_flops_per_s", speed)
    found = measure_ceilings(CPU, torch.bfloat16, weight_bytes=1)
    assert (found.flops_per_s, found.dtype) == (1.0, "float32")
    assert measured == [torch.float32]


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("is_faster", [True, False])
def test_quantized_weights_count_where_they_are_faster(
    quantization: str, is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def speed(_: torch.device, matmul_of: Callable[[int], machine_ceilings.Matmul]) -> float:
        product = matmul_of(64)
        assert product().shape == (64, 64)
        is_packed = getattr(product, "func", None) is not torch.matmul
        return 2.0 if is_packed is is_faster else 1.0

    monkeypatch.setattr(machine_ceilings, "_flops_per_s", speed)
    found = measure_ceilings(CPU, torch.float32, weight_bytes=1, quantization=quantization)
    assert found.flops_per_s == 2.0
    assert found.dtype == (quantization if is_faster else "float32")
