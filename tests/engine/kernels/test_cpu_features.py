"""A CPU has its level of instructions and all below."""

from itertools import pairwise
from pathlib import Path

import pytest

from engine.kernels import cpu_features
from engine.kernels.cpu_features import (
    ARM_LEVELS,
    GENERIC,
    X86_LEVELS,
    level_named,
    levels_of,
    parse_cpu_flags,
    supported_levels,
)

ROOT = Path(__file__).parents[3]
CHAINS = {"x86_64": X86_LEVELS, "aarch64": ARM_LEVELS}


@pytest.mark.parametrize("levels", CHAINS.values(), ids=CHAINS)
def test_levels_are_ordered_and_each_includes_those_below(levels: tuple[cpu_features.IsaLevel, ...]) -> None:
    for higher, lower in pairwise(levels):
        assert higher.cpu_flags > lower.cpu_flags
    assert levels[-1] is GENERIC


@pytest.mark.parametrize("machine", CHAINS)
def test_a_cpu_supports_its_level_and_all_below(machine: str) -> None:
    levels = levels_of(machine)
    assert levels == CHAINS[machine]
    for i, level in enumerate(levels):
        assert supported_levels(level.cpu_flags | {"sse2"}, machine) == levels[i:]


def test_one_missing_instruction_lowers_the_level() -> None:
    assert supported_levels(level_named("amx").cpu_flags - {"amx_bf16"}, "x86_64")[0].name == "avx512_bf16"
    assert supported_levels(level_named("avx2").cpu_flags - {"fma"}, "x86_64") == (GENERIC,)
    assert supported_levels(level_named("neon_i8mm").cpu_flags - {"i8mm"}, "aarch64")[0].name == "neon_dot"
    assert supported_levels(level_named("neon_dot").cpu_flags - {"atomics"}, "aarch64") == (GENERIC,)


@pytest.mark.parametrize(("cpu", "level"), [("a72", "generic"), ("n1", "neon_dot"), ("v1", "neon_i8mm")])
def test_arm_processors_have_their_level(cpu: str, level: str) -> None:
    features = {
        "a72": "fp asimd evtstrm crc32 cpuid",
        "n1": "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs",
        "v1": "fp asimd crc32 atomics fphp asimdhp asimdrdm jscvt fcma lrcpc dcpop asimddp sve i8mm bf16 dgh rng",
    }
    flags = parse_cpu_flags(f"processor\t: 0\nFeatures\t: {features[cpu]}\n")
    assert supported_levels(flags, "aarch64")[0].name == level


def test_an_architecture_that_is_not_known_is_generic() -> None:
    assert supported_levels(frozenset({"asimd", "bf16", "avx2"}), "riscv64") == (GENERIC,)


def test_cpuinfo_is_read_for_x86_and_arm() -> None:
    assert parse_cpu_flags("processor\t: 0\nflags\t\t: fpu avx2\nflags\t\t: other") == {"fpu", "avx2"}
    assert parse_cpu_flags("Features\t: fp asimd bf16\n") == {"fp", "asimd", "bf16"}
    assert parse_cpu_flags("nothing of the kind") == frozenset()


@pytest.mark.parametrize(("flags", "native"), [({"avx512_bf16"}, True), ({"bf16"}, True), ({"avx512f"}, False)])
def test_native_bfloat16_is_recognised(flags: set[str], native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_features, "cpu_flags", lambda: frozenset(flags))
    assert cpu_features.has_native_bf16() is native


def test_an_unknown_level_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'sse9': one of amx, "):
        level_named("sse9")


def test_the_image_has_every_level_of_its_architecture() -> None:
    for machine, levels in CHAINS.items():
        assert f"{machine}) set -- {' '.join(level.name for level in levels)} ;;" in (ROOT / "Dockerfile").read_text()
