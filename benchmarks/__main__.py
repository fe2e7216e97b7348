"""`python -m benchmarks`: runs every program of this package, each in a process of its own, one after the other.

A program is a module that can be run (`python -m benchmarks.NAME --help`); everything else here is shared code.
"""

import argparse
import ast
import subprocess
import sys
from pathlib import Path

from benchmarks.command import exit_with

FOLDER = Path(__file__).parent


def programs() -> dict[str, str]:
    """Returns the programs of this package: module name -> first line of its docstring."""
    found = {}
    for path in sorted(FOLDER.glob("[!_]*.py")):
        source = path.read_text(encoding="utf-8")
        if '__name__ == "__main__"' in source:
            found[path.stem] = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return found


def main(arguments: list[str] | None = None) -> int:
    """Runs the programs; returns 0 if each of them did, else 1."""
    known = programs()
    listing = "\n".join(f"  {name:12} {text}" for name, text in known.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Runs the benchmarks named, or all of them, one after the other.",
        epilog=f"benchmarks (python -m benchmarks.NAME --help tells what one takes):\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    names = parser.parse_args(arguments).names or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no benchmark is called {unknown[0]}; there are: {', '.join(known)}")
    failed = []
    for name in names:
        print(f"== {name}: {known[name]}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode != 0:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    exit_with(main)
