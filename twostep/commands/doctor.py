"""`twostep doctor`: what this machine has, which kernels run here, and what is slow and why."""

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from twostep.commands.arguments import CommandParser
from twostep.commands.host_facts import HostFacts, gather_facts

__all__ = ["Finding", "findings_of", "main", "parser"]

_DESCRIPTION = """\
Tell what this machine has for language models, and what is slow and why. The exit code is 1 if something makes a model
many times slower than this machine could run it."""
_EXAMPLES = """\
  twostep doctor"""
_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "llguidance", "numpy")
_SLOW_READ = 8e9
"""Bytes per second below which memory is slow for any machine of the last ten years."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact, and what to do about it where it makes models slow."""

    name: str
    value: str
    advice: str | None = None
    is_grave: bool = False
    """Whether it costs many times the speed."""


def parser() -> CommandParser:
    return CommandParser("doctor", _DESCRIPTION, _EXAMPLES)


def main(arguments: Sequence[str]) -> int:
    """Prints all findings; returns 1 if one is grave."""
    parser().parse(arguments)
    findings = [*_versions(), *findings_of(gather_facts())]
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.name:{width}}  {finding.value}")
        if finding.advice:
            print(f"{'':{width}}  {'!' if finding.is_grave else '-'} {finding.advice}")
    if not any(finding.advice for finding in findings):
        print("Nothing here makes models slower than they need be.")
    return int(any(finding.is_grave for finding in findings))


def findings_of(facts: HostFacts) -> Iterator[Finding]:
    """Yields what the facts about a machine mean for a model on it."""
    yield Finding("cpu", f"{facts.cpu_name}, level {facts.level}", _advice_on_level(facts))
    yield Finding("threads", f"{facts.num_threads} of {facts.num_cpus} CPUs", _advice_on_threads(facts))
    yield _kernels(facts)
    yield Finding("compiler", facts.compiler or "none")
    memory = f"{facts.available_bytes / 2**30:.1f} of {facts.total_bytes / 2**30:.1f} GiB available"
    yield Finding("memory", memory)
    slow = "memory is slow: other programs are busy, or other virtual machines share its channels"
    yield Finding(
        "reads",
        f"{facts.read_bytes_per_s / 1e9:.1f} GB/s; a model of 1 GB decodes at most "
        f"{facts.read_bytes_per_s / 1e9:.1f} tokens/s for one client",
        slow if facts.read_bytes_per_s < _SLOW_READ else None,
    )
    yield Finding("multiplies", f"{facts.flops_per_s / 1e9:,.0f} GFLOP/s ({facts.flops_dtype})")
    yield Finding("huge pages", facts.huge_pages or "not known", _advice_on_pages(facts))
    yield Finding(
        "gpu", facts.gpu or "none that torch can use", facts.gpu_advice, is_grave=facts.gpu_advice is not None
    )
    yield Finding("load", f"{facts.load:.1f} processes want the {facts.num_cpus} CPUs", _advice_on_load(facts))


def _versions() -> Iterator[Finding]:
    yield Finding("twostep", f"{version('twostep')}, Python {platform.python_version()}, {platform.platform()}")
    found = []
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    yield Finding("libraries", ", ".join(found))


def _kernels(facts: HostFacts) -> Finding:
    if facts.kernels is None:
        return Finding("kernels", f"none: {facts.why_no_kernels}", "torch computes, many times slower", is_grave=True)
    lower = None
    if facts.kernels != facts.level:
        lower = f"those for {facts.level} would be faster: is TWOSTEP_ISA set, or is there no compiler?"
    return Finding("kernels", f"for {facts.kernels}, from {facts.kernel_path}", lower)


def _advice_on_level(facts: HostFacts) -> str | None:
    if facts.level == "generic":
        return "no vector instructions that the kernels know: everything is slow on this CPU"
    if facts.level == "avx2":
        return "without AVX-512 or AMX prompts are read slowly: --quantization int8 multiplies faster"
    return None


def _advice_on_threads(facts: HostFacts) -> str | None:
    if facts.num_threads < facts.num_cores:
        return f"there are {facts.num_cores} cores: leave --num-threads and OMP_NUM_THREADS out"
    if facts.num_threads > facts.num_cpus:
        return f"more than the {facts.num_cpus} CPUs that this process may use: threads wait for one another"
    return None


def _advice_on_pages(facts: HostFacts) -> str | None:
    if facts.huge_pages == "never":
        return "set /sys/kernel/mm/transparent_hugepage/enabled to madvise: weights and KV are read faster"
    return None


def _advice_on_load(facts: HostFacts) -> str | None:
    if facts.load > 0.5 * facts.num_cpus:
        return "other programs are busy: what is measured here is less than the machine can do"
    return None
