"""Kernels are found or compiled for this CPU; where that fails, there is one warning and torch does the work."""

import logging
import os
import shlex
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine import kernels
from engine.core.errors import ConfigError
from engine.kernels import __main__ as prebuild
from engine.kernels import build, cpu_features
from engine.kernels.build import KernelBuildError, build_libraries, build_library, find_library, source_key
from engine.kernels.cpu_features import (
    GENERIC,
    levels_of,
    supported_levels,
)

ROOT = Path(__file__).parents[3]
TINY = 'extern "C" int twostep_answer() { return 42; }\n'
needs_compiler = pytest.mark.skipif(not build.find_compiler(), reason="no C++ compiler")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces the kernels' source directory by one that compiles in a second."""
    directory = tmp_path / "sources"
    directory.mkdir()
    (directory / "tiny.cpp").write_text(TINY)
    monkeypatch.setattr(build, "SOURCE_DIR", directory)
    return directory


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


# ---- Compiling ----


@needs_compiler
def test_a_library_is_compiled_once(sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (sources / "tiny.cpp").write_text("#include <ATen/Parallel.h>\n" + TINY)
    path = build_library(GENERIC, tmp_path / "out")
    assert path.name.startswith("generic-") and caplog.messages[0].startswith("compiling CPU")
    caplog.clear()
    assert build_library(GENERIC, tmp_path / "out") == path and not caplog.records
    assert [p.name for p in (tmp_path / "out").iterdir()] == [path.name]


@needs_compiler
def test_simultaneous_compiles_all_succeed(sources: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        paths = set(pool.map(lambda _: build_library(GENERIC, tmp_path / "out"), range(3)))
    assert len(paths) == 1 and list((tmp_path / "out").iterdir()) == list(paths)


@needs_compiler
def test_it_is_told_how_far_a_compile_is(sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (sources / "other.cpp").write_text(TINY.replace("answer", "question"))
    build_library(GENERIC, tmp_path / "out")
    assert caplog.messages[1:3] == [f"compiled {number} of 2 files for generic" for number in (1, 2)]


@needs_compiler
def test_sources_of_one_name_in_two_folders_are_both_in_the_library(sources: Path, tmp_path: Path) -> None:
    (sources / "folder").mkdir()
    (sources / "folder" / "tiny.cpp").write_text(TINY.replace("answer", "question"))
    data = build_library(GENERIC, tmp_path / "out", extra_flags=["-fvisibility=default"]).read_bytes()
    assert b"twostep_answer" in data and b"twostep_question" in data


class KilledError(BaseException):
    """Stands for the end of the process: what it would do after that does not happen."""


@needs_compiler
def test_a_compile_that_was_killed_goes_on_where_it_was(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources / "other.cpp").write_text(TINY.replace("answer", "question"))
    commands: list[str] = []
    run = build._run

    def run_until_linked(command: Sequence[str]) -> None:
        commands.append(" ".join(command))
        if "-shared" in command and len(commands) == 3:
            raise KilledError
        run(command)

    monkeypatch.setattr(build, "_run", run_until_linked)
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        build_library(GENERIC, tmp_path / "out")
    (objects,) = (tmp_path / "out").iterdir()
    (objects / "other.o").unlink()
    (objects / "other.77.part").touch()
    path = build_library(GENERIC, tmp_path / "out")
    assert [path] == list((tmp_path / "out").iterdir())
    assert len(commands) == 5 and "other.cpp" in commands[3] and "-shared" in commands[4]


@needs_compiler
def test_a_second_process_waits_for_the_first_and_compiles_nothing(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each opens the directory for itself, so threads stand for processes."""
    caplog.set_level(logging.INFO)
    is_compiling, may_go_on = threading.Event(), threading.Event()
    run, commands = build._run, []

    def run_when_let(command: Sequence[str]) -> None:
        commands.append(command)
        is_compiling.set()
        assert may_go_on.wait(60)
        run(command)

    monkeypatch.setattr(build, "_run", run_when_let)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(build_library, GENERIC, tmp_path / "out")
        assert is_compiling.wait(60)
        second = pool.submit(build_library, GENERIC, tmp_path / "out")
        while not any(message.startswith("waiting for another process") for message in caplog.messages):
            time.sleep(0.01)
        may_go_on.set()
        assert first.result() == second.result() and len(commands) == 2
    assert [first.result()] == list((tmp_path / "out").iterdir())


@needs_compiler
def test_levels_are_compiled_together_and_given_in_order(sources: Path, tmp_path: Path) -> None:
    levels = (GENERIC, cpu_features.IsaLevel("other", frozenset(), ("-DOTHER",)))
    names = [path.name.partition("-")[0] for path in build_libraries(levels, tmp_path)]
    assert names == ["generic", "other"] and len(list(tmp_path.glob("*.so"))) == 2


@needs_compiler
def test_a_level_that_fails_does_not_hide_those_before_it(sources: Path, tmp_path: Path) -> None:
    (sources / "tiny.cpp").write_text("int answer() { return ANSWER; }")
    levels = [
        cpu_features.IsaLevel(name, frozenset(), flags) for name, flags in (("good", ("-DANSWER=1",)), ("bad", ()))
    ]
    libraries = build_libraries(levels, tmp_path)
    assert next(libraries).name.startswith("good-")
    with pytest.raises(KernelBuildError, match="ANSWER"):
        next(libraries)


@needs_compiler
def test_a_changed_source_flag_or_compiler_compiles_anew(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {build_library(GENERIC, tmp_path)}
    (sources / "tiny.cpp").write_text(TINY + "// changed\n")
    paths.add(build_library(GENERIC, tmp_path))
    (sources / "shared.h").write_text("")
    paths.add(build_library(GENERIC, tmp_path))
    monkeypatch.setattr(build, "_COMMON_FLAGS", (*build._COMMON_FLAGS, "-DOTHER"))
    paths.add(build_library(GENERIC, tmp_path))
    monkeypatch.setattr(build, "_compiler_version", lambda compiler: "another 1.0")
    paths.add(build_library(GENERIC, tmp_path))
    paths.add(build_library(GENERIC, tmp_path, extra_flags=["-DANOTHER"]))
    assert len(paths) == 6


@needs_compiler
def test_a_compile_error_names_its_cause_and_leaves_nothing(sources: Path, tmp_path: Path) -> None:
    (sources / "tiny.cpp").write_text("int main() { return undeclared; }")
    with pytest.raises(KernelBuildError, match=r"failed: .*error.*undeclared"):
        build_library(GENERIC, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@needs_compiler
def test_a_directory_that_cannot_be_written_is_an_error_that_says_what_to_set(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KernelBuildError, match="set TWOSTEP_CACHE_DIR"):
        build_library(GENERIC, tmp_path / "file" / "out")


def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelBuildError, match="apt-get install g"):
        build_library(GENERIC, tmp_path)


def test_cxx_names_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = tmp_path / "my-c++"
    mine.write_text("#!/bin/sh\n")
    mine.chmod(mine.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(mine))
    assert build.find_compiler() == [str(mine)]
    monkeypatch.setenv("CXX", "g++ 'unclosed")
    with pytest.raises(KernelBuildError, match="CXX cannot be read: No closing quotation"):
        build_library(GENERIC, tmp_path)


@needs_compiler
def test_a_launcher_and_flags_belong_to_the_compiler(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources / "tiny.cpp").write_text("int answer() { return ANSWER; }")
    compiler = shlex.join(build.find_compiler())
    paths = set()
    for answer in (1, 2):
        monkeypatch.setenv("CXX", f"env {compiler} -DANSWER={answer}")
        paths.add(build_library(GENERIC, tmp_path / "out"))
    assert len(paths) == 2


# ---- Loading ----


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


def test_a_library_of_other_sources_is_not_taken(fresh: Path, sources: Path) -> None:
    make_library(GENERIC, fresh)
    (sources / "tiny.cpp").write_text("// other")
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


# ---- The command ----


@needs_compiler
def test_the_command_compiles_what_it_is_asked_for(
    sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [level.name for level in levels_of()[-2:]]
    assert prebuild.main(["--isa", *names, "--out", str(tmp_path / "out")]) == 0
    printed = {Path(line) for line in capsys.readouterr().out.split()}
    assert printed == set((tmp_path / "out").iterdir()) and len(printed) == len(names)


def test_the_command_refuses_levels_of_another_architecture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(SystemExit):
        prebuild.main(["--isa", "avx2"])
    assert "neon_i8mm" in capsys.readouterr().err


def test_the_command_says_why_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: [])
    assert prebuild.main(["--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: no C++ compiler found")


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prebuild.main(["--help"])
    out = capsys.readouterr().out
    assert "TWOSTEP_KERNEL_PATH" in out and "--isa amx avx512_bf16 avx512 avx2 --out" in out
