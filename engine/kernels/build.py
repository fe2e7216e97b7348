"""Compiles the C++ kernels of this directory's folders for one ISA level into one shared library, and finds it again.

A library's name is `<level>-<source key>-<compiler key>.so`. The source key covers the sources, the flags and torch's
version; the compiler key covers the compiler and extra flags. So a change of any of them makes another library, and a
machine without a compiler can still use one that was made elsewhere. Libraries appear under their final name by an
atomic rename. The cache keeps the objects of the newest, one of each folder of sources, in `<level>-<compiler
key>.objects`: what has not changed since is not compiled again, and an interrupted compile goes on where it was. Only
one of them depends on torch's version. A lock on that directory, which ends with its holder, has a second process wait
for the first.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from pathlib import Path

from engine.host.cache_home import cache_home
from engine.kernels.cpu_features import IsaLevel

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent
SHIPPED_DIR = SOURCE_DIR / "shipped"
"""Libraries that a wheel brings."""

# Kernels promise bit-equal results: products and sums are fused only where the source says so (fma), never by the
# compiler's choice, and never reordered (no -ffast-math). The two -fno flags change no result, only errno and traps.
# Functions begin with a cache line: the same loop took up to a quarter longer on Zen 3 where other code had shifted it.
_COMMON_FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-falign-functions=64", "-DNDEBUG", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-pragmas",
)  # fmt: skip


_BINDING = "binding"
"""The folder of sources that include torch's headers."""


class KernelBuildError(Exception):
    """The kernels could not be compiled; the message says why and what to do."""


def cache_dir() -> Path:
    """Where compiled libraries are kept: `$TWOSTEP_CACHE_DIR`, else `twostep/kernels` in `$XDG_CACHE_HOME` or in
    `~/.cache`; where that cannot be written, as by a service without a home, a private one among temporary files."""
    configured = os.environ.get("TWOSTEP_CACHE_DIR")
    if configured:
        return Path(configured)
    home = cache_home() / "kernels"
    if _can_write(home):
        return home
    temporary = Path(tempfile.gettempdir()) / f"twostep-{os.getuid()}"
    logger.warning("%s cannot be written: CPU kernels are kept in %s; set TWOSTEP_CACHE_DIR", home, temporary)
    return _private(temporary)


def _can_write(directory: Path) -> bool:
    """Whether files can be made in the directory, which is made if it is not there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK | os.X_OK)


def _private(directory: Path) -> Path:
    """Returns the directory, made if it is not there. Raises KernelBuildError if others could have put a library there:
    it would run in this process."""
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise KernelBuildError(f"{directory} is not this user's alone; remove it, or set TWOSTEP_CACHE_DIR")
    return directory


def prebuilt_dirs() -> list[Path]:
    """Read-only directories of libraries made beforehand: `$TWOSTEP_KERNEL_PATH` if set, then that of the wheel."""
    configured = os.environ.get("TWOSTEP_KERNEL_PATH")
    return [Path(configured), SHIPPED_DIR] if configured else [SHIPPED_DIR]


def find_compiler() -> list[str]:
    """How to call the C++ compiler: `$CXX` if set, with its launcher and flags, else the first of g++, c++, clang++ on
    the path. Empty if there is none; raises KernelBuildError."""
    try:
        configured = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise KernelBuildError(f"CXX cannot be read: {error}") from error
    commands = [configured] if configured else [["g++"], ["c++"], ["clang++"]]
    return next(([found, *flags] for name, *flags in commands if (found := shutil.which(name))), [])


def find_library(level: IsaLevel, directory: Path) -> Path | None:
    """A library in `directory` that was made from these very sources for `level`, by whatever compiler."""
    return max(directory.glob(f"{level.name}-{source_key(level)}-*.so"), default=None)


def build_libraries(levels: Sequence[IsaLevel], directory: Path) -> Iterator[Path]:
    """Yields the library of each level, in that order; all are compiled at the same time, by one pool of workers.

    Few sources take most of a level's time: alone, each level would leave all cores but one idle at its end. Raises
    KernelBuildError at the first level that fails, and then begins no further source of any.
    """
    with _compile_workers() as workers, ThreadPoolExecutor(max(1, len(levels))) as builds:
        try:
            yield from builds.map(lambda level: build_library(level, directory, workers), levels)
        except KernelBuildError:
            workers.shutdown(wait=False, cancel_futures=True)
            raise


def build_library(
    level: IsaLevel, directory: Path, workers: Executor | None = None, *, extra_flags: Sequence[str] = ()
) -> Path:
    """Returns the library for `level` in `directory`, compiled now unless it is there, by `workers` or a pool of its
    own; raises KernelBuildError. `extra_flags` follow the kernels' own where sources are compiled and linked."""
    compiler = find_compiler()
    if not compiler:
        raise KernelBuildError("no C++ compiler found; install one: apt-get install g++")
    compiler_key = _digest([*compiler, _compiler_version(compiler), *extra_flags])
    path = directory / f"{level.name}-{source_key(level)}-{compiler_key}.so"
    if path.exists():
        return path
    started_s = time.monotonic()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _own_objects(cache_dir() / f"{level.name}-{compiler_key}.objects") as kept:
            if path.exists():  # made by the process that was waited for
                return path
            logger.info("compiling CPU kernels for %s, once, a minute or more on few cores", level.name)
            with nullcontext(workers) if workers else _compile_workers() as pool:
                objects = _compile(compiler, level, extra_flags, kept, pool)
            _make([*compiler, *extra_flags, "-shared", "-pthread", *map(str, objects), *_torch_link_flags()], path)
    except OSError as error:
        raise KernelBuildError(f"cannot write {directory} ({error}); set TWOSTEP_CACHE_DIR") from error
    logger.info("compiled CPU kernels for %s in %.1f s: %s", level.name, time.monotonic() - started_s, path)
    return path


@contextmanager
def _own_objects(directory: Path) -> Iterator[Path]:
    """Makes the directory of what is compiled on the way to a library, and waits until no other process uses it."""
    directory.mkdir(parents=True, exist_ok=True)
    lock = os.open(directory, os.O_RDONLY)
    try:
        _wait_for(lock, directory)
        yield directory
    finally:
        os.close(lock)


def _wait_for(lock: int, directory: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("waiting for another process that compiles the CPU kernels (%s)", directory)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:  # some file systems have no locks: two processes compile the same then
        logger.debug("no lock on %s: %s", directory, error)


def source_key(level: IsaLevel) -> str:
    """What a library for `level` is made of, the compiler left out: sources, flags, torch's version, architecture."""
    return _key_of(SOURCE_DIR.rglob("*.cpp"), _level_flags(level), is_bound_to_torch=True)


def _key_of(sources: Iterable[Path], flags: Sequence[str], *, is_bound_to_torch: bool) -> str:
    """What is made of these sources and of all headers."""
    parts = [platform.machine(), *flags]
    if is_bound_to_torch:
        import torch

        parts.append(str(torch.__version__).partition("+")[0])  # builds for CPUs and for GPUs have the same interface
    for source in sorted([*sources, *SOURCE_DIR.rglob("*.h")]):
        parts += [source.relative_to(SOURCE_DIR).as_posix(), source.read_text(encoding="utf-8")]
    return _digest(parts)


def _compile_workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=os.cpu_count() or 1)


def _compile(
    compiler: Sequence[str], level: IsaLevel, extra_flags: Sequence[str], kept: Path, workers: Executor
) -> list[Path]:
    """Compiles the sources of every folder at once, one process each; returns their objects, in the directory `kept`.
    What is there already is not compiled again, and what is of other sources is removed."""
    flags, folders = [*_level_flags(level), *extra_flags], _source_folders()
    objects = {folder: kept / f"{folder.name}-{_object_key(folder, flags)}.o" for folder in folders}
    for path in set(kept.iterdir()).difference(objects.values()):
        path.unlink()
    jobs = [
        workers.submit(_make, [*compiler, *flags, f"-I{SOURCE_DIR}", *_as_one_source(folder)], target)
        for folder, target in objects.items()
        if not target.exists()
    ]
    for number, job in enumerate(as_completed(jobs), start=len(folders) - len(jobs) + 1):
        job.result()
        logger.info("compiled %d of %d parts for %s", number, len(folders), level.name)
    return list(objects.values())


def _object_key(folder: Path, flags: Sequence[str]) -> str:
    return _key_of(folder.glob("*.cpp"), flags, is_bound_to_torch=folder.name == _BINDING)


def _source_folders() -> list[Path]:
    """The folders that have sources: first the one that includes torch's headers, then the largest, since what takes
    longest must not be begun last."""
    sizes: Counter[Path] = Counter()
    for source in [*SOURCE_DIR.rglob("*.cpp"), *SOURCE_DIR.rglob("*.h")]:
        sizes[source.parent] += source.stat().st_size
    folders = sorted({source.parent for source in SOURCE_DIR.rglob("*.cpp")})
    return sorted(folders, key=lambda folder: (folder.name != _BINDING, -sizes[folder]))


def _as_one_source(folder: Path) -> list[str]:
    """Arguments that compile a folder's sources as if they were one: most take less time than the headers that they
    share. Torch's are there for the folder that binds to torch alone."""
    *others, last = map(str, sorted(folder.glob("*.cpp")))
    torch_flags = _torch_compile_flags() if folder.name == _BINDING else []
    return [*torch_flags, *(argument for source in others for argument in ("-include", source)), "-c", last]


def _make(command: Sequence[str], target: Path) -> None:
    """Runs a command that writes `target`, which is there once it is whole."""
    unfinished = target.with_suffix(f".{os.getpid()}.part")
    _run([*command, "-o", str(unfinished)])
    os.replace(unfinished, target)


def _level_flags(level: IsaLevel) -> list[str]:
    return [*_COMMON_FLAGS, *level.compiler_flags]


def _torch_compile_flags() -> list[str]:
    """Torch's headers as system headers (no warnings from them). That of all its operators, which takes longer than
    most kernels, is an error: each operator has its own."""
    operators = ["-DAT_PER_OPERATOR_HEADERS", "-DTORCH_ASSERT_ONLY_METHOD_OPERATORS"]
    return ["-isystem", f"{_torch_dir()}/include", *operators]


def _torch_link_flags() -> list[str]:
    """Torch's libraries by name only, without a run path: the process that loads a kernel has loaded them already."""
    return [f"-L{_torch_dir()}/lib", "-lc10", "-ltorch_cpu"]


def _torch_dir() -> Path:
    """Returns torch's folder. What torch has for finding it needs setuptools, and warns where CUDA finds no GPU."""
    import torch

    return Path(torch.__file__).parent


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or ["no message"]
        reason = next((line for line in lines if "error:" in line), lines[-1])
        logger.debug("%s\n%s", " ".join(command), result.stderr)
        raise KernelBuildError(f"{Path(command[0]).name} failed: {reason}")


def _compiler_version(compiler: Sequence[str]) -> str:
    result = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    return result.stdout


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
