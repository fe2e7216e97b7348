"""Compiles kernels in Triton for GPUs that are not here, and says what each of them takes.

`compiled` runs this file as a program, since Triton either interprets or compiles as long as a process lives. In it
every launch only compiles its kernel, so what is checked is what is launched: tensors may lie on the CPU.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
CAPABILITIES = (80, 89, 90, 100)
SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227}
"""What one block may use of a multiprocessor's memory."""


class Usage(NamedTuple):
    """What a compiled kernel takes."""

    kernel: str
    capability: int  # 90 is compute capability 9.0
    constants: dict[str, Any]
    registers: int  # of a thread
    spilled: int  # bytes of the stack and accesses to it
    shared_bytes: int  # of a block
    products: int  # instructions of tensor cores
    types: list[str]  # of arguments that are not constants
    layouts_of_sums: list[str]  # of numbers over threads, by which each sum along an axis has its order


def compiled(launches: str, capabilities: tuple[int, ...] = CAPABILITIES, timeout_s: float = 280) -> list[Usage]:
    """Calls the function `launches`, "module:function", for each capability; returns what its kernels take.

    Skips the test where there is no Triton. Fails if nothing is launched, or a kernel does not compile.
    """
    if find_spec("triton") is None:
        pytest.skip("pip install -e '.[triton]' brings the compiler of CUDA kernels")
    command = [sys.executable, "-m", __name__, launches, *map(str, capabilities)]
    with tempfile.TemporaryDirectory() as cache:
        own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        result = subprocess.run(
            command, cwd=ROOT, env=os.environ | own, timeout=timeout_s, capture_output=True, text=True, check=False
        )
    assert result.returncode == 0, result.stderr
    return [Usage(**json.loads(line)) for line in result.stdout.splitlines()]


def assert_fit(usages: list[Usage], spilled: Callable[[Usage], int] = lambda _: 0) -> None:
    """Asserts that no kernel spills more than `spilled` says of it, or takes more shared memory than its GPU has."""
    assert usages
    assert not [usage for usage in usages if usage.spilled > spilled(usage)]
    assert not [usage for usage in usages if usage.shared_bytes > SHARED_KIB[usage.capability] << 10]


class _NoDevice:
    """A driver of Triton whose devices are the compute capabilities to compile for."""

    def __init__(self) -> None:
        self.capability = 0

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def _usages(launches: str, capabilities: list[int]) -> Iterator[Usage]:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found: dict[int, tuple[str, Any]] = {}
    launch, no_device = JITFunction.run, _NoDevice()
    driver.set_active(no_device)

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        found[id(kernel)] = (self.fn.__name__, kernel)
        return kernel

    JITFunction.run = compile_only
    module, function = launches.split(":")
    for capability in capabilities:
        found.clear()
        no_device.capability = capability
        getattr(importlib.import_module(module), function)()
        assert found, "nothing was launched"
        yield from (_usage(name, capability, kernel) for name, kernel in found.values())


def _usage(name: str, capability: int, kernel: Any) -> Usage:
    names = kernel.src.fn.arg_names
    constants = {names[place[0]]: str(value) for place, value in kernel.src.constants.items()}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        resources, code = (_cuobjdump(option, file.name) for option in ("-res-usage", "-sass"))
    (registers, stack), *others = re.findall(r"REG:(\d+) STACK:(\d+)", resources)
    assert not others
    spills = re.findall(r"\b(?:LDL|STL)\b", code)
    products = re.findall(r"\b(?:[HQI]G?MMA|UTC[A-Z]*MMA)\b", code)
    shared = kernel.metadata.shared
    types = [each for each in kernel.src.signature.values() if each != "constexpr"]
    took = int(registers), int(stack) + len(spills), shared, len(products)
    return Usage(name, capability, constants, *took, types, _layouts_of_sums(kernel.asm["ttgir"]))


def _layouts_of_sums(code: str) -> list[str]:
    layouts = dict(re.findall(r"^#(\w+) = (#ttg\.\w+<.*>)$", code, re.MULTILINE))
    return [layouts[name] for name in re.findall(r"\}\) : \(tensor<\w+, #(\w+)>\) -> f32", code)]


def _cuobjdump(option: str, path: str) -> str:
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([program, option, path], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    for usage in _usages(sys.argv[1], [*map(int, sys.argv[2:])]):
        print(json.dumps(usage._asdict()))
