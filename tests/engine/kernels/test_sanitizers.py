"""Sanitizers find nothing in the kernels: no access outside of memory, no undefined behaviour, no data race.

The libraries that they watch are kept in folders of their own in the cache, so only a change of sources compiles them.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.kernels.build import SOURCE_DIR, build_library, cache_dir, find_compiler
from engine.kernels.cpu_features import IsaLevel, best_level

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TIMEOUT_S = 3600

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S)]


@dataclass(frozen=True)
class Sanitizer:
    """A sanitizer of the compiler, and how a process that it did not compile runs code that it did."""

    flags: tuple[str, ...]
    runtime: str  # the shared library that such a process loads first
    environment: Mapping[str, str] = field(default_factory=dict)


ADDRESS = Sanitizer(
    (
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        # These need type information of torch's classes, which its libraries do not export, or tell of an address that
        # the other sanitizer tells of when it is accessed.
        "-fno-sanitize=vptr,null,object-size,pointer-overflow",
        "--param=asan-instrumentation-with-call-threshold=0",  # checks are calls, which compile faster
    ),
    "libasan.so",
    # Python and torch keep memory until their end; that is no leak of the kernels.
    {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
)
THREAD = Sanitizer(
    ("-fsanitize=thread",),
    "libtsan.so",
    # Torch's own threads, which are not instrumented, meet in ways that the sanitizer does not see.
    {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1", "OMP_NUM_THREADS": "4"},
)


def test_operators_access_their_memory_only_and_all_they_do_is_defined(tmp_path: Path) -> None:
    run_operators(ADDRESS, best_level(), tmp_path)


def test_threads_of_operators_do_not_race(tmp_path: Path) -> None:
    run_operators(THREAD, best_level(), tmp_path)


def test_the_thread_pool_does_not_race_and_runs_each_task_once(tmp_path: Path) -> None:
    require(THREAD, tmp_path)
    program = tmp_path / "stress"
    compiled = run(
        [*compile_command(THREAD), f"-I{SOURCE_DIR}", str(HERE / "thread_pool_stress.cpp"), "-o", str(program)]
    )
    assert compiled.returncode == 0, compiled.stderr
    done = run([str(program)])
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[:8000]


def run_operators(sanitizer: Sanitizer, level: IsaLevel, folder: Path) -> None:
    """Runs every operator, on inputs beside pages that nobody may touch, in a library that the sanitizer watches."""
    runtime = require(sanitizer, folder)
    directory = cache_dir() / sanitizer.runtime.partition(".")[0]
    library = build_library(level, directory, extra_flags=(*sanitizer.flags, "-O1", "-g1"))
    environment = {"TWOSTEP_KERNEL_PATH": str(library.parent), "TWOSTEP_ISA": level.name, "LD_PRELOAD": runtime}
    done = run(
        [sys.executable, "-m", "tests.engine.kernels.fenced_operators"], {**sanitizer.environment, **environment}
    )
    cases = done.stdout.splitlines()
    assert done.returncode == 0, f"{cases[-1:]}: {done.returncode}\n{done.stderr[:8000]}"
    assert len(cases) > 600


def require(sanitizer: Sanitizer, folder: Path) -> str:
    """Returns the libraries that a process loads first, for `LD_PRELOAD`; skips the test where the compiler has none
    that runs here."""
    if not find_compiler():
        pytest.skip("no C++ compiler")
    (folder / "empty.cpp").write_text("int main() {}\n")
    program = str(folder / "empty")
    for command in ([*compile_command(sanitizer), str(folder / "empty.cpp"), "-o", program], [program]):
        if (done := run(command)).returncode != 0:
            pytest.skip(f"no {' '.join(sanitizer.flags)} here: {done.stderr.strip()[-200:]}")
    # The library of C++ as well: the sanitizer looks for the function that throws when it is loaded itself.
    libraries = [library_path(name) for name in (sanitizer.runtime, "libstdc++.so.6")]
    if not all(map(Path.is_absolute, libraries)):
        pytest.skip(f"the compiler has no {sanitizer.runtime}")
    return " ".join(map(str, libraries))


def library_path(name: str) -> Path:
    """Returns where the compiler finds a library; the name alone if it has none."""
    return Path(run([*find_compiler(), f"-print-file-name={name}"]).stdout.strip())


def compile_command(sanitizer: Sanitizer) -> list[str]:
    return [*find_compiler(), "-std=c++20", "-O1", "-g", "-pthread", *sanitizer.flags]


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **(environment or {})}
    return subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
