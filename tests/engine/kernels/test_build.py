"""Kernels are compiled for a level, and not again while they are the same."""

import logging
import shlex
import stat
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.kernels import __main__ as prebuild
from engine.kernels import build, cpu_features
from engine.kernels.build import KernelBuildError, build_libraries, build_library
from engine.kernels.cpu_features import (
    GENERIC,
    levels_of,
)

ROOT = Path(__file__).parents[3]
TINY = 'extern "C" int twostep_answer() { return 42; }\n'
needs_compiler = pytest.mark.skipif(not build.find_compiler(), reason="no C++ compiler")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces the kernels' source directory by one that compiles in a second, and the cache by an empty one."""
    directory = tmp_path / "sources"
    directory.mkdir()
    monkeypatch.setenv("TWOSTEP_CACHE_DIR", str(tmp_path / "cache"))
    (directory / "tiny.cpp").write_text(TINY)
    monkeypatch.setattr(build, "SOURCE_DIR", directory)
    return directory


def add_source(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(TINY.replace("answer", "question"))


@needs_compiler
def test_a_library_is_compiled_once(sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (sources / "binding").mkdir()
    (sources / "binding" / "torch.cpp").write_text("#include <ATen/Parallel.h>\n")
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
    add_source(sources / "folder" / "other.cpp")
    build_library(GENERIC, tmp_path / "out")
    assert caplog.messages[1:3] == [f"compiled {number} of 2 parts for generic" for number in (1, 2)]


@needs_compiler
@pytest.mark.parametrize("name", ["folder/tiny.cpp", "other.cpp"])
def test_all_sources_are_in_the_library(sources: Path, tmp_path: Path, name: str) -> None:
    add_source(sources / name)
    data = build_library(GENERIC, tmp_path / "out", extra_flags=["-fvisibility=default"]).read_bytes()
    assert b"twostep_answer" in data and b"twostep_question" in data


@needs_compiler
def test_sources_of_a_folder_are_compiled_as_one(sources: Path, tmp_path: Path) -> None:
    """So a name that is declared in two of them is an error."""
    for name in ("tiny.cpp", "other.cpp"):
        (sources / name).write_text("namespace { [[maybe_unused]] int kNumber = 1; }\n")
    with pytest.raises(KernelBuildError, match=r"redefinition of .*kNumber"):
        build_library(GENERIC, tmp_path / "out")


def test_what_takes_longest_is_compiled_first(sources: Path) -> None:
    for name, size in (("binding", 1), ("small", 2), ("large", 3)):
        add_source(sources / name / "a.cpp")
        (sources / name / "a.h").write_text("// " + "a" * 100 * size)
    names = [folder.name for folder in build._source_folders()]
    assert names == ["binding", "large", "small", sources.name]


class KilledError(BaseException):
    """Stands for the end of the process: what it would do after that does not happen."""


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has been run so far: the second folder's source is "other.cpp"."""
    ran: list[str] = []
    run = build._run

    def run_and_tell(command: Sequence[str]) -> None:
        ran.append(" ".join(command))
        run(command)

    monkeypatch.setattr(build, "_run", run_and_tell)
    return ran


@needs_compiler
def test_a_compile_that_was_killed_goes_on_where_it_was(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: list[str]
) -> None:
    add_source(sources / "folder" / "other.cpp")
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(build, "_torch_link_flags", raise_killed)
        build_library(GENERIC, tmp_path / "out")
    (other,) = (tmp_path / "cache").glob("*.objects/folder-*.o")
    other.rename(other.with_suffix(".77.part"))
    path = build_library(GENERIC, tmp_path / "out")
    assert [path] == list((tmp_path / "out").iterdir())
    assert len(commands) == 4 and "other.cpp" in commands[2] and "-shared" in commands[3]
    assert len([*(tmp_path / "cache").glob("*.objects/*")]) == 2


def raise_killed() -> list[str]:
    raise KilledError


@needs_compiler
def test_what_has_not_changed_is_not_compiled_again(sources: Path, tmp_path: Path, commands: list[str]) -> None:
    add_source(sources / "folder" / "other.cpp")
    build_library(GENERIC, tmp_path / "out")
    (sources / "tiny.cpp").write_text(TINY + "// changed")
    build_library(GENERIC, tmp_path / "out")
    assert len(commands) == 5 and "tiny.cpp" in commands[3] and "-shared" in commands[4]
    (sources / "folder" / "shared.h").touch()
    build_library(GENERIC, tmp_path / "out")
    assert len(commands) == 8
    assert len([*(tmp_path / "cache").glob("*.objects/*")]) == 2


@needs_compiler
def test_another_version_of_torch_compiles_anew_what_binds_to_it_alone(
    sources: Path, tmp_path: Path, commands: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_source(sources / "binding" / "other.cpp")
    paths = {build_library(GENERIC, tmp_path / "out")}
    monkeypatch.setattr("torch.__version__", "99.0")
    paths.add(build_library(GENERIC, tmp_path / "out"))
    assert len(paths) == 2
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
