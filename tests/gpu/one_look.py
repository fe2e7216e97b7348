"""One look at a GPU: everything that needs one, in one program, for the minutes in which there is one.

    python -m tests.gpu.one_look --out DIR                        all stages, in the order below
    python -m tests.gpu.one_look --out DIR --stages bits,decode   some of them
    python -m tests.gpu.one_look --out DIR --device cpu           a rehearsal, with tiny sizes

Each stage runs in a process of its own within a time limit, so that one that fails or hangs does not stop the next.
Findings go to DIR/one_look.jsonl as they come, the output of stages to DIR/STAGE.log, and a table of all findings,
beside what was predicted, is printed at the end.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from tests.gpu.look.report import Finding, Look, read, table, write

ROOT = Path(__file__).resolve().parents[2]


class Stage(NamedTuple):
    """A function of a module in `tests.gpu.look`, which takes a `Look`."""

    module: str
    function: str
    limit_s: int


STAGES = {
    "ceilings": Stage("ceilings", "run", 60),
    "tests": Stage("kernel_tests", "run_tests", 150),
    "bits": Stage("bits", "run", 90),
    "models": Stage("models", "run", 90),
    "decode": Stage("steps", "run_graphs", 120),
    "quantized": Stage("steps", "run_quantized", 180),
    "kv": Stage("steps", "run_kv", 150),
    "eager": Stage("steps", "run_eager", 60),
    "profile": Stage("steps", "run_profile", 60),
    "server": Stage("serving", "run", 150),
    "ranks": Stage("ranks", "run", 240),
    "peers": Stage("peers", "run", 120),
    "sanitizer": Stage("kernel_tests", "run_sanitizer", 120),
}


def main() -> int:
    flags = _parser().parse_args()
    flags.out = flags.out.resolve()
    flags.out.mkdir(parents=True, exist_ok=True)
    if flags.run is not None:
        return _run_here(flags.run, flags.device, flags.out)
    stages = flags.stages.split(",") if flags.stages else list(STAGES)
    if unknown := sorted({*stages} - {*STAGES}):
        print(f"There is no stage {unknown[0]}; there are {', '.join(STAGES)}.", file=sys.stderr)
        return 2
    for name in stages:
        _run_in_child(name, flags.device, flags.out, flags.limit or STAGES[name].limit_s)
    findings = read(flags.out, stages)
    text = table(findings)
    (flags.out / "table.txt").write_text(text + "\n")
    print(text)
    return int(any(each.ok is False for each in findings))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.one_look", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of the results")
    parser.add_argument("--stages", help=f"comma-separated, of {', '.join(STAGES)}; default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=int, help="seconds that each stage may take, instead of its own limit")
    parser.add_argument("--run", choices=tuple(STAGES), help=argparse.SUPPRESS)  # a stage in this process
    return parser


def _run_in_child(name: str, device: str, out: Path, limit_s: int) -> None:
    """Runs a stage, and at its end or limit kills all that it has started."""
    command = [sys.executable, "-m", "tests.gpu.one_look", "--run", name, "--device", device, "--out", str(out)]
    started_s, mark = time.monotonic(), f"TWOSTEP_ONE_LOOK={os.getpid()}-{name}"
    environment = os.environ | dict([mark.split("=")])
    with (out / f"{name}.log").open("w") as log:
        child = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            code: int | str = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = f"killed after {limit_s} s"
        finally:
            _kill_all_with(mark)
            child.wait()
    seconds = time.monotonic() - started_s
    write(
        out, Finding(name, "stage ended", f"{seconds:.0f} s" if code == 0 else f"{code}, {seconds:.0f} s", ok=code == 0)
    )
    print(f"{name}: {'done' if code == 0 else code} in {seconds:.0f} s", flush=True)


def _kill_all_with(mark: str) -> None:
    """Kills every process that has the mark in its environment, whatever session it is in."""
    for _ in range(2):  # one may be starting another
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark.encode() in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)
            except OSError:
                continue  # it has ended, or is another user's


def _run_here(name: str, device: str, out: Path) -> int:
    import torch

    stage = STAGES[name]
    look = Look(name, torch.device(device), out)
    try:
        getattr(import_module(f"tests.gpu.look.{stage.module}"), stage.function)(look)
    except Exception as error:
        traceback.print_exc()
        look.report("the stage failed", f"{type(error).__name__}: {str(error)[:400]}", ok=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
