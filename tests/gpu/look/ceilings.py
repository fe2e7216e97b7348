"""Stage: versions, the card, and what it can do at most, against which everything else is held."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

from tests.gpu.look.report import Look
from tests.gpu.look.timing import copy_bytes_per_s, product_flops_per_s, read_bytes_per_s, seconds_of

_PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "tokenizers", "llguidance", "pydantic")
_NUM_LAUNCHES = 200


def run(look: Look) -> None:
    _report_versions(look)
    num_bytes, size = (1 << 24, 256) if look.is_small else (1 << 32, 8192)
    device = look.device
    look.report("read-only stream", read_bytes_per_s(device, num_bytes) / 1e9, "GB/s", "H100: 3,000")
    look.report("copy, read + written", copy_bytes_per_s(device, num_bytes) / 1e9, "GB/s", "H100: 3,000")
    dtype = torch.float32 if look.is_small else torch.bfloat16
    look.report(f"product of {size}^3", product_flops_per_s(device, size, dtype) / 1e12, "TFLOP/s", "H100: 770-800")
    _report_thin_products(look, dtype)
    _report_launches(look)


def _report_versions(look: Look) -> None:
    look.report("python", platform.python_version())
    for name in _PACKAGES:
        try:
            look.report(name, version(name))
        except PackageNotFoundError:
            look.report(name, "not installed")
    if look.device.type == "cuda":
        facts = torch.cuda.get_device_properties(look.device)
        look.report("card", facts.name, f"{facts.total_memory / 2**30:.1f} GiB, {facts.multi_processor_count} SMs")
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
        look.report("driver, clocks, power", subprocess.run(query, capture_output=True, text=True).stdout.strip())


def _report_thin_products(look: Look, dtype: torch.dtype) -> None:
    """Reports at what rate the library's product of few rows reads the weights of a wide layer."""
    width, height = (256, 512) if look.is_small else (4096, 28672)
    weights = [torch.randn(height, width, device=look.device, dtype=dtype) for _ in range(4)]  # beyond any cache
    for rows in (1, 16, 64, 128):
        x = torch.randn(rows, width, device=look.device, dtype=dtype)
        seconds = seconds_of(lambda x=x: [torch.nn.functional.linear(x, weight) for weight in weights], look.device)
        rate = sum(weight.nbytes for weight in weights) / seconds
        look.report(
            f"library's product, {rows} x {width} x {height}", rate / 1e9, "GB/s of weights", "80-90 % of reads"
        )


def _report_launches(look: Look) -> None:
    x = torch.ones(64, device=look.device)

    def work() -> None:
        for _ in range(_NUM_LAUNCHES):
            x.add_(1)

    look.report("a launch", seconds_of(work, look.device) / _NUM_LAUNCHES * 1e6, "us", "2-5")
    if look.device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        work()
        with torch.cuda.graph(graph):
            work()
        look.report("a launch in a graph", seconds_of(graph.replay, look.device) / _NUM_LAUNCHES * 1e6, "us", "1.2-1.6")
