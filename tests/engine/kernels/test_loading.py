"""Kernels are found or compiled for this CPU; where that fails, there is one warning and torch does the work."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import kernels
from engine.core.errors import ConfigError
from engine.kernels import build, cpu_features
from engine.kernels.build import find_library, source_key
from engine.kernels.cpu_features import GENERIC, supported_levels

ROOT = Path(__file__).parents[3]


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Resets `load_kernels` as in a new process with an empty cache, which is returned; loading does nothing."""
    for name in ("TWOSTEP_KERNELS", "TWOSTEP_ISA", "TWOSTEP_KERNEL_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TWOSTEP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernels, "_load", lambda path: None)
    monkeypatch.setattr(kernels, "load_kernels", kernels.load_kernels.__wrapped__)
    return tmp_path / "cache"


def make_library(level: cpu_features.IsaLevel, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{level.name}-{source_key(level)}-000000000000.so"
    path.touch()
    return path


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )


def test_importing_kernels_imports_no_torch() -> None:
    result = run_python("import sys, engine.kernels, engine.kernels.build; sys.exit('torch' in sys.modules)")
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_kernels_bring_no_second_openmp_runtime() -> None:
    code = """
from engine.core.errors import ConfigError
from engine.kernels import load_kernels
if load_kernels() is None: raise SystemExit(77)
print(*{line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.split()[-1].rsplit("/", 1)[-1]})
"""
    result = run_python(code)
    if result.returncode == 77:
        pytest.skip("no kernels")
    assert result.returncode == 0 and len(result.stdout.split()) == 1, result.stderr + result.stdout


def test_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, fresh: Path) -> None:
    monkeypatch.setenv("TWOSTEP_KERNELS", "off")
    assert kernels.load_kernels() is None and not fresh.exists()


def test_a_switch_is_on_or_off(monkeypatch: pytest.MonkeyPatch, fresh: Path) -> None:
    monkeypatch.setenv("TWOSTEP_KERNELS", "of")
    with pytest.raises(ConfigError, match="TWOSTEP_KERNELS must be on or off, got 'of'"):
        kernels.load_kernels()


def test_a_prebuilt_library_is_preferred_and_needs_no_compiler(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTEP_KERNEL_PATH", str(tmp_path / "prebuilt"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    path = make_library(supported_levels()[0], tmp_path / "prebuilt")
    make_library(supported_levels()[0], fresh)
    assert kernels.load_kernels() == kernels.KernelInfo(supported_levels()[0].name, path)


def test_a_library_of_the_wheel_needs_no_compiler(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_it(*_: object) -> Path:
        raise AssertionError("there is no need to")

    monkeypatch.setattr(build, "SHIPPED_DIR", tmp_path / "shipped")
    monkeypatch.setattr(kernels, "build_library", compile_it)
    path = make_library(supported_levels()[0], tmp_path / "shipped")
    assert kernels.load_kernels() == kernels.KernelInfo(supported_levels()[0].name, path)


def test_builds_of_one_torch_for_other_devices_share_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for version in ("2.13.0", "2.13.0+cpu", "2.13.0+cu130", "2.14.0"):
        monkeypatch.setattr("torch.__version__", version)
        keys.add(build.source_key(GENERIC))
    assert len(keys) == 2


def test_without_a_compiler_a_lower_level_will_do(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: [])
    path = make_library(GENERIC, fresh)
    assert kernels.load_kernels() == kernels.KernelInfo("generic", path)


def test_a_library_of_other_sources_is_not_taken(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_library(GENERIC, fresh)
    (tmp_path / "other.cpp").write_text("// other")
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path)
    assert find_library(GENERIC, fresh) is None


def test_no_kernels_are_one_clear_warning(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: [])
    assert kernels.load_kernels() is None
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "apt-get install g++" in warning and "much slower" in warning


def test_a_lower_level_can_be_asked_for(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTEP_ISA", "generic")
    monkeypatch.setenv("TWOSTEP_KERNEL_PATH", str(fresh))
    for level in supported_levels():
        make_library(level, fresh)
    info = kernels.load_kernels()
    assert info is not None and info.isa == "generic"


def test_a_level_the_cpu_lacks_is_refused(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "supported_levels", lambda: (GENERIC,))
    monkeypatch.setenv("TWOSTEP_ISA", "amx")
    assert kernels.load_kernels() is None and "this CPU supports generic" in caplog.text


def test_a_level_that_there_is_not_is_no_fault_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch, fresh: Path) -> None:
    monkeypatch.setenv("TWOSTEP_ISA", "avx1024")
    with pytest.raises(ConfigError, match=r"TWOSTEP_ISA: .*'avx1024': one of amx, avx512_bf16"):
        kernels.load_kernels()
