"""ARM's code paths compute what x86-64's do, bit for bit, seen from x86-64: cross-compiled, and run by an emulator.

The programs of aarch64/ are made of the kernels' own sources and run without torch. ARM fuses products with sums, as
AVX2 does, so their bits are the same; `generic` of x86-64 does not, and has the same bits in all else.
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.kernels import build
from engine.kernels.cpu_features import ARM_LEVELS, GENERIC, IsaLevel, cpu_flags, level_named

PROGRAMS = Path(__file__).parent / "aarch64"
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")

# Everything that a program needs is in it, but for what is only named (without_torch.h).
LINKED = ("-static", "-pthread", "-Wl,--unresolved-symbols=ignore-all")


@dataclass(frozen=True)
class Target:
    """What a program is compiled for, by which compiler, and what runs it."""

    level: IsaLevel
    compiler: str = "g++"
    runner: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.level.name} of {'ARM' if self.runner else 'x86-64'}"


ARM = [Target(level, "aarch64-linux-gnu-g++", (str(EMULATOR), "-cpu", "max")) for level in ARM_LEVELS]
AVX2, X86_GENERIC = Target(level_named("avx2")), Target(GENERIC)

# On ARM levels differ in products of integers alone.
TARGETS = {
    "dots": [AVX2, X86_GENERIC, *ARM],
    "products": [AVX2, *ARM],
    "floats": [AVX2, ARM[0]],
    "sampling": [AVX2, ARM[0]],
}
INCLUDED = "".join(path.read_text() for path in sorted(PROGRAMS.iterdir()))


def sources() -> list[tuple[str, Target]]:
    """Sources that are in no program, to be compiled alone; products of integers for each level that has its own."""
    names = (path.relative_to(build.SOURCE_DIR).with_suffix("").as_posix() for path in build.SOURCE_DIR.rglob("*.cpp"))
    alone = sorted(name for name in names if f'#include "{name}.cpp"' not in INCLUDED)
    return [(name, target) for name in alone for target in (ARM if name == "quantized/quantized" else ARM[:1])]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with x86-64, on x86-64"),
    pytest.mark.skipif(not AVX2.level.cpu_flags <= cpu_flags(), reason="compares with AVX2, which this CPU lacks"),
    pytest.mark.skipif(not shutil.which("g++"), reason="no compiler: apt-get install g++"),
    pytest.mark.skipif(not shutil.which(ARM[0].compiler), reason="no compiler: apt-get install g++-aarch64-linux-gnu"),
    pytest.mark.skipif(not EMULATOR, reason="no emulator: apt-get install qemu-user-static"),
]

Outputs = dict[tuple[str, Target], Future[list[str]]]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outputs]:
    """Every program's output on each of its targets, as soon as it is there: all cores compile."""
    directory = tmp_path_factory.mktemp("programs")
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        yield {
            (name, target): workers.submit(output_of, name, target, directory)
            for name, targets in TARGETS.items()
            for target in targets
        }
        workers.shutdown(cancel_futures=True)


def output_of(name: str, target: Target, directory: Path) -> list[str]:
    program = directory / f"{name} for {target}"
    run([*compile_command(target), str(PROGRAMS / f"{name}.cpp"), *LINKED, "-o", str(program)])
    return run([*target.runner, str(program)])


def compile_command(target: Target) -> list[str]:
    return [target.compiler, *build._level_flags(target.level), "-Werror", f"-I{build.SOURCE_DIR}"]


def run(command: list[str]) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr[-8000:]}"
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("name", "target"), [(name, each) for name in TARGETS for each in ARM if each in TARGETS[name]], ids=str
)
def test_arm_has_the_bits_of_avx2(name: str, target: Target, outputs: Outputs) -> None:
    expected = outputs[name, AVX2].result()
    assert len(expected) >= 6 and outputs[name, target].result() == expected


def test_without_fused_products_all_else_has_the_same_bits(outputs: Outputs) -> None:
    fused, unfused = outputs["dots", AVX2].result(), outputs["dots", X86_GENERIC].result()
    differing = {one.partition(":")[0] for one, other in zip(fused, unfused, strict=True) if one != other}
    assert differing == {"fused"}


@pytest.mark.parametrize(("name", "target"), sources(), ids=str)
def test_every_source_compiles_for_arm(name: str, target: Target) -> None:
    torch_flags = build._torch_compile_flags() if name.startswith("binding/") else []
    run([*compile_command(target), *torch_flags, "-fsyntax-only", str(build.SOURCE_DIR / f"{name}.cpp")])
