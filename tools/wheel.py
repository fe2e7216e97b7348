"""`python -m tools.wheel`: builds a wheel that brings compiled CPU kernels, so that a first start compiles nothing."""

import argparse
import logging
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from engine.kernels.build import SHIPPED_DIR, SOURCE_DIR, KernelBuildError, build_libraries, cache_dir
from engine.kernels.cpu_features import levels_of

ROOT = Path(__file__).parents[1]
_PACKAGES = ("engine", "loadtest", "server", "twostep")
_FILES = ("LICENSE", "README.md", "pyproject.toml")
_LEFT_OUT = shutil.ignore_patterns("__pycache__", SHIPPED_DIR.name)


def main(arguments: list[str] | None = None) -> int:
    """Builds the wheel that the arguments ask for, and prints its path; returns 1 where that fails."""
    options = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    levels = [level for level in levels_of() if options.isa is None or level.name in options.isa]
    try:
        libraries = list(build_libraries(levels, cache_dir()))
        print(build_wheel(libraries, options.out))
    except (KernelBuildError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.wheel",
        description="Builds a wheel with CPU kernels for the torch that is installed here. Beside another torch, and "
        "on kinds of CPU that it has none for, a server compiles them at its first start, as without.",
    )
    names = [level.name for level in levels_of()]
    parser.add_argument(
        "--isa", nargs="+", choices=names, metavar="LEVEL", help=f"of {', '.join(names)} (default: all of them)"
    )
    parser.add_argument("--out", type=Path, default=Path("dist"), metavar="DIR", help="where it goes (default: dist)")
    return parser.parse_args(arguments)


def build_wheel(libraries: Sequence[Path], out: Path) -> Path:
    """Builds a wheel with these libraries into a directory, from a copy of the sources. Raises CalledProcessError."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        source, made = Path(temporary) / "source", Path(temporary) / "made"
        for name in _PACKAGES:
            shutil.copytree(ROOT / name, source / name, ignore=_LEFT_OUT)
        for name in _FILES:
            shutil.copy(ROOT / name, source)
        shipped = source / SHIPPED_DIR.relative_to(SOURCE_DIR.parents[1])
        shipped.mkdir()
        for library in libraries:
            shutil.copy(library, shipped)
        options = ["--no-deps", "--quiet", "--wheel-dir", str(made), f"-C--build-option=--plat-name={_platform_tag()}"]
        subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True)
        (wheel,) = made.iterdir()
        return Path(shutil.move(wheel, out / wheel.name))


def _platform_tag() -> str:
    """Returns the tag of machines whose C library is at least as new as this one's, which the kernels are linked to."""
    _, version = platform.libc_ver()
    return f"manylinux_{version.replace('.', '_')}_{platform.machine()}"


if __name__ == "__main__":
    sys.exit(main())
