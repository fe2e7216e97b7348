"""`python -m engine.kernels`: compiles the CPU kernels ahead of time, for images or before a first start."""

import argparse
import logging
import sys
from pathlib import Path

from engine.kernels.build import KernelBuildError, build_libraries, cache_dir
from engine.kernels.cpu_features import best_level, level_named, levels_of

_EPILOG = """examples:
  python -m engine.kernels
      compile for this machine, into the cache that a server looks into
  python -m engine.kernels --isa amx avx512_bf16 avx512 avx2 --out /opt/kernels
      compile for several kinds of machine; servers find them with TWOSTEP_KERNEL_PATH=/opt/kernels,
      pick the best for their CPU, and need no compiler
  python -m engine.kernels --isa neon_i8mm neon_dot generic --out /opt/kernels
      the same on ARM

environment:
  CXX                  the C++ compiler, as "ccache g++" (else g++, c++ or clang++)
  TWOSTEP_CACHE_DIR    where libraries are kept (else twostep/kernels in XDG_CACHE_HOME or ~/.cache)
  TWOSTEP_KERNEL_PATH  read-only directory of libraries made beforehand, looked up first
  TWOSTEP_ISA          use this level instead of the CPU's best
  TWOSTEP_KERNELS=off  never use the kernels"""


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m engine.kernels",
        description="Compiles the CPU kernels beforehand. A server compiles them at its first start otherwise.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [level.name for level in levels_of()]
    parser.add_argument(
        "--isa", nargs="+", choices=names, metavar="LEVEL", help=f"of {', '.join(names)} (default: this machine's best)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the libraries go (default: the cache)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Compiles the levels that the arguments name, and prints each library's path; returns 1 when a compile fails."""
    options = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    levels = [level_named(name) for name in options.isa] if options.isa else [best_level()]
    try:
        for path in build_libraries(levels, options.out or cache_dir()):
            print(path)
    except KernelBuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
