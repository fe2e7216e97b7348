"""Each ISA level that this machine can run passes the tests of what kernels compute, and levels have the same bits
wherever docs/kernels.md says so. `make test` itself runs the best level only."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path

import pytest

from engine.kernels.build import build_libraries, cache_dir, find_compiler
from engine.kernels.cpu_features import ARM_LEVELS, X86_LEVELS, supported_levels

ROOT = Path(__file__).parents[3]
NAMES = [level.name for level in supported_levels()]

# What computes with kernels, and little else. Each level takes minutes, so whole engines are left to one file.
TESTS = (
    "tests/engine/attention",
    "tests/engine/kernels/test_elementwise.py",
    "tests/engine/kernels/test_fused.py",
    "tests/engine/kernels/test_memory_bounds.py",
    "tests/engine/kernels/test_threads.py",
    "tests/engine/mixers",
    "tests/engine/model/recurrent/test_whole_layers.py",
    "tests/engine/model/test_kernel_forward.py",
    "tests/engine/model/test_kernel_layer.py",
    "tests/engine/runner/test_logprobs.py",
    "tests/engine/runner/test_sampler.py",
    "tests/engine/runner/test_token_draw.py",
    "tests/engine/test_invariance.py",
    "tests/engine/weights",
)

# Levels that have the same bits, group by group. On ARM all have, in everything.
ALL = ("generic avx2 avx512 avx512_bf16 amx",)
FUSED = ("generic", "avx2 avx512 avx512_bf16 amx")
BFLOAT16_PRODUCTS = ("generic avx2 avx512", "avx512_bf16", "amx")
QUANTIZED_KV = ("generic", "avx2 avx512 avx512_bf16", "amx")
BFLOAT16_ATTENTION = ("generic", "avx2 avx512", "avx512_bf16", "amx")

# As in docs/kernels.md: operators, by the names that operator_bits gives them, and what has the same bits.
FAMILIES: dict[str, tuple[str, ...]] = {
    "argmax": ALL,
    "write_kv": ALL,
    "linear_attention": ALL,
    "causal_convolution": ALL,
    "short_convolution": ALL,
    "rms_norm": ALL,
    "add_rms_norm": ALL,
    "layer_norm": ALL,
    "rotate_heads": ALL,
    "norm_heads": ALL,
    "square_relu": ALL,
    "scale_columns": ALL,
    "inverse_hadamard": ALL,
    "quantize to 8 bits": ALL,
    "quantize to 4 bits": ALL,
    "to_levels": ALL,
    "pack_int8": ALL,
    "pack_int4": ALL,
    "quantize_and_pack": ALL,
    "activations": FUSED,
    "gate": FUSED,
    "xielu": FUSED,
    "gelu_new": FUSED,
    "multiply_by_gates": FUSED,
    "gated_convolution": FUSED,
    "delta_gates": FUSED,
    "gated_delta_rule": FUSED,
    "mamba2_gates": FUSED,
    "mamba2_scan": FUSED,
    "mamba2_layer": FUSED,
    "gated_group_norm": FUSED,
    "gated_reads": FUSED,
    "selective_scan": FUSED,
    "real_gated_recurrence": FUSED,
    "token_weights": FUSED,
    "draw_tokens": FUSED,
    "score_tokens": FUSED,
    "linear_int8": FUSED,
    "linear_int8_wide_rows": FUSED,
    "linear_int4": FUSED,
    "take_block_rows": ALL,
    "expand_blocks": ALL,
    "linear in blocks": FUSED,
    "linear of rounded rows in blocks": ALL,
    "linear, float32": FUSED,
    "linear, bfloat16": BFLOAT16_PRODUCTS,
    "experts, float32": FUSED,
    "experts, bfloat16": BFLOAT16_ATTENTION,
    "paged_attention, float32": FUSED,
    "paged_attention, bfloat16": BFLOAT16_ATTENTION,
    "paged_attention over int8": QUANTIZED_KV,
    "paged_attention over int4": QUANTIZED_KV,
    "decoder, float32": FUSED,
    "decoder, bfloat16": BFLOAT16_ATTENTION,
}

needs_compiler = pytest.mark.skipif(not find_compiler(), reason="no C++ compiler")
needs_several = pytest.mark.skipif(len(NAMES) < 2, reason="this machine has no level but generic")


@pytest.fixture(scope="module")
def _libraries() -> None:
    """All levels are compiled at the same time, once: into the cache that other tests take them from."""
    list(build_libraries(supported_levels(), cache_dir()))


def run_at(level: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "TWOSTEP_ISA": level, **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@needs_compiler
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("_libraries")
@pytest.mark.parametrize("level", NAMES[1:])
def test_what_kernels_compute_is_right_at_a_lower_level(level: str) -> None:
    options = ("-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider")
    done = run_at(level, "pytest", *options, *TESTS, CI="true")  # with the same examples each time
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4000:]
    assert "no kernels" not in done.stdout, "a test was skipped since it found no kernels"


@pytest.mark.slow
@needs_compiler
@needs_several
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("_libraries")
def test_levels_have_the_same_bits_where_that_is_promised() -> None:
    bits = {level: bits_at(level) for level in NAMES}
    for families in bits.values():
        assert {family_of(name) for name in families} == set(FAMILIES), "an operator is in no family"
    assert not differences(bits)


def bits_at(level: str) -> dict[str, str]:
    done = run_at(level, "tests.engine.kernels.operator_bits")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["isa"] == level
    return dict(found["bits"])


def differences(bits: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Tells each pair of levels whose bits differ though they are promised to be the same, and the operator."""
    return [
        f"{operator}: {one} and {other}"
        for one, other in combinations(bits, 2)
        for operator, digest in bits[one].items()
        if have_same_bits(FAMILIES[family_of(operator)], one, other) and bits[other][operator] != digest
    ]


def have_same_bits(groups: Iterable[str], one: str, other: str) -> bool:
    is_arm = any(name in (level.name for level in ARM_LEVELS[:-1]) for name in (one, other))
    return is_arm or any({one, other} <= set(group.split()) for group in groups)


def family_of(operator: str) -> str:
    """`decoder of 8 bits, float32` is of `decoder, float32`, and `gate, bfloat16` of `gate`."""
    name = re.sub(r"^decoder of \d+ bits", "decoder", operator.replace("16 or 32 bits", "16 bits"))
    return name if name in FAMILIES else name.rpartition(",")[0] or name


def test_every_level_is_in_one_group_of_each_family() -> None:
    for groups in FAMILIES.values():
        assert sorted(" ".join(groups).split()) == sorted(level.name for level in X86_LEVELS)


def test_the_documentation_has_the_same_groups() -> None:
    section = (ROOT / "docs" / "kernels.md").read_text().partition("## Bits\n")[2].partition("\n## ")[0]
    rows = [row.strip("| ").split(" | ") for row in section.splitlines() if row.startswith("| `")]
    documented = {
        name: tuple(group.replace("`", "").replace(",", "") for group in groups.split("; "))
        for operators, groups in rows
        for name in re.findall(r"`([^`]+)`", operators)
    }
    assert documented == FAMILIES
