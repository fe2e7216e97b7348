"""Facts about this machine, gathered and measured."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from engine.core.errors import ConfigError

__all__ = ["HostFacts", "gather_facts"]

_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MEASURED_BYTES = 1 << 29  # more than caches hold


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What a machine has, and how fast it is."""

    cpu_name: str
    level: str
    """The best ISA level that the CPU has."""
    num_cpus: int
    """CPUs that this process may use."""
    num_cores: int
    """CPUs of these that share no core."""
    num_threads: int
    """Threads that a model would use."""
    kernels: str | None
    """Level of the kernels that load here; None where none do."""
    kernel_path: str = ""
    why_no_kernels: str = ""
    compiler: str | None
    available_bytes: int
    total_bytes: int
    read_bytes_per_s: float
    flops_per_s: float
    flops_dtype: str
    huge_pages: str | None
    """`always`, `madvise` or `never`; None where the system does not tell."""
    gpu: str | None
    gpu_advice: str | None = None
    """How torch would find a GPU that is there; None if there is none, or it does."""
    load: float
    """Processes that wanted to run, on average over the last minute."""


def gather_facts() -> HostFacts:
    """Measures for most of a second; imports torch. Compiles kernels where there are none yet, for minutes."""
    import torch

    from engine.host.available_memory import available_bytes
    from engine.host.nvidia import cuda_build_advice
    from engine.kernels.cpu_features import best_level
    from engine.model.machine_ceilings import measure_ceilings

    kernels, path, why = _kernels()
    cpu = torch.device("cpu")
    ceilings = measure_ceilings(cpu, torch.bfloat16, _MEASURED_BYTES)
    return HostFacts(
        cpu_name=_cpu_name(),
        level=best_level().name,
        num_cpus=len(os.sched_getaffinity(0)),
        num_cores=_num_cores(),
        num_threads=torch.get_num_threads(),
        kernels=kernels,
        kernel_path=path,
        why_no_kernels=why,
        compiler=_compiler(),
        available_bytes=available_bytes(cpu),
        total_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        read_bytes_per_s=ceilings.read_bytes_per_s,
        flops_per_s=ceilings.flops_per_s,
        flops_dtype=ceilings.dtype,
        huge_pages=_huge_pages(),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        gpu_advice=cuda_build_advice(),
        load=os.getloadavg()[0],
    )


def _kernels() -> tuple[str | None, str, str]:
    """Returns the level and path of the kernels that load here, and why there are none."""
    from engine.kernels import load_kernels

    try:
        found = load_kernels()
    except ConfigError as error:
        return None, "", str(error)
    if found is None:
        return None, "", "TWOSTEP_KERNELS turns them off, or they cannot be compiled (the log above says why)"
    return found.isa, str(found.path), ""


def _compiler() -> str | None:
    from engine.kernels.build import KernelBuildError, find_compiler

    try:
        return " ".join(find_compiler())
    except KernelBuildError:
        return None


def _cpu_name() -> str:
    names = re.findall(r"^(?:model name|Model)\s*: (.*)$", _text_of(Path("/proc/cpuinfo")), re.MULTILINE)
    return names[0] if names else "CPU of unknown name"


def _num_cores() -> int:
    """Returns how many cores the CPUs of this process are, by the CPUs that each shares its core with."""
    cpus = os.sched_getaffinity(0)
    siblings = {
        _text_of(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")) or str(cpu) for cpu in cpus
    }
    return len(siblings)


def _huge_pages() -> str | None:
    chosen = re.search(r"\[(\w+)\]", _text_of(_PAGES))
    return chosen[1] if chosen else None


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
