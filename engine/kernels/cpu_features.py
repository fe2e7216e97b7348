"""Which instruction sets this machine's CPU has, as one ordered level; imports no torch and runs no compiler.

A level is what the kernels are compiled for. Those of an architecture form a chain, best first: a CPU that supports one
supports all after it. The last is `generic`, the portable code, which GCC's vector types turn into the architecture's
own baseline SIMD (SSE2 on x86-64, NEON on ARM). An architecture that is not listed has no other level.
"""

import functools
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class IsaLevel:
    """One compile target: what it needs of the CPU and what it tells the compiler."""

    name: str
    cpu_flags: frozenset[str]  # names as in /proc/cpuinfo; all of them, those of the levels below included
    compiler_flags: tuple[str, ...]


_AVX2_CPU = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_AVX512_CPU = _AVX2_CPU | {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}
_AVX512_BF16_CPU = _AVX512_CPU | {"avx512_bf16", "avx512_vnni"}
_AMX_CPU = _AVX512_BF16_CPU | {"avx512vbmi", "avx512_vbmi2", "amx_tile", "amx_bf16", "amx_int8"}

_AVX512_ISA = ("-march=x86-64-v4", "-mprefer-vector-width=512")
_AVX512_BF16_ISA = (*_AVX512_ISA, "-mavx512vnni", "-mavx512bf16")
_AMX_ISA = (*_AVX512_BF16_ISA, "-mavx512vbmi", "-mavx512vbmi2", "-mamx-tile", "-mamx-bf16", "-mamx-int8")

# Beside what they are named for: what -march=armv8.2-a lets a compiler use anywhere.
_NEON_DOT_CPU = frozenset({"asimd", "crc32", "atomics", "asimdrdm", "asimddp"})
_NEON_I8MM_CPU = _NEON_DOT_CPU | {"i8mm"}

_NEON_DOT_ISA = "-march=armv8.2-a+dotprod"
_NEON_I8MM_ISA = f"{_NEON_DOT_ISA}+i8mm"

GENERIC = IsaLevel("generic", frozenset(), ())

X86_LEVELS: tuple[IsaLevel, ...] = (  # best first, as all
    IsaLevel("amx", _AMX_CPU, _AMX_ISA),
    IsaLevel("avx512_bf16", _AVX512_BF16_CPU, _AVX512_BF16_ISA),
    IsaLevel("avx512", _AVX512_CPU, _AVX512_ISA),
    IsaLevel("avx2", _AVX2_CPU, ("-march=x86-64-v3",)),
    GENERIC,
)
ARM_LEVELS: tuple[IsaLevel, ...] = (
    IsaLevel("neon_i8mm", _NEON_I8MM_CPU, (_NEON_I8MM_ISA,)),
    IsaLevel("neon_dot", _NEON_DOT_CPU, (_NEON_DOT_ISA,)),
    GENERIC,
)

_LEVELS_OF_MACHINES = {"x86_64": X86_LEVELS, "AMD64": X86_LEVELS, "aarch64": ARM_LEVELS, "arm64": ARM_LEVELS}
_ALL_LEVELS = (*X86_LEVELS[:-1], *ARM_LEVELS)


def parse_cpu_flags(cpuinfo: str) -> frozenset[str]:
    """The feature names of the first processor in the text of /proc/cpuinfo (`flags` on x86, `Features` on ARM)."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The feature names of this machine's CPU; empty where the system does not tell (no /proc/cpuinfo)."""
    try:
        return parse_cpu_flags(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return frozenset()


def levels_of(machine: str | None = None) -> tuple[IsaLevel, ...]:
    """Returns the levels of an architecture, this machine's by default, whether or not its CPU can run them."""
    return _LEVELS_OF_MACHINES.get(platform.machine() if machine is None else machine, (GENERIC,))


def supported_levels(flags: frozenset[str] | None = None, machine: str | None = None) -> tuple[IsaLevel, ...]:
    """Returns the levels that a CPU can run, best first; `flags` and `machine` default to this machine's."""
    flags = cpu_flags() if flags is None else flags
    return tuple(level for level in levels_of(machine) if level.cpu_flags <= flags)


def best_level() -> IsaLevel:
    """The highest level this machine's CPU supports."""
    return supported_levels()[0]


def level_named(name: str) -> IsaLevel:
    """Returns the level of that name, of any architecture; ValueError lists the known names."""
    for level in _ALL_LEVELS:
        if level.name == name:
            return level
    raise ValueError(f"unknown ISA level {name!r}: one of {', '.join(level.name for level in _ALL_LEVELS)}")


def has_native_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware (AVX512-BF16, AMX, or ARM's BF16 extension)."""
    return not cpu_flags().isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})
