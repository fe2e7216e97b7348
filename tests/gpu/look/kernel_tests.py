"""Stages: the tests of tests/gpu on the device, and a few of them under compute-sanitizer."""

import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

from tests.gpu.look.report import Look

ROOT = Path(__file__).resolve().parents[3]
_PER_FILE = 2
"""Tests of each file that run under the sanitizer, which makes a kernel many times slower."""
_PYTEST = [
    *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark"),
    *("-p", "tests.gpu.look.live_failures", "-o", "filterwarnings=default", "--tb=short"),
]
_TESTS = ["--ignore=tests/gpu/test_one_look.py", "tests/gpu"]


def run_tests(look: Look) -> None:
    """Runs all of them, on several processes: kernels are compiled by one core each."""
    parallel = ["-n", "8"] if find_spec("xdist") and not look.is_small else []
    few = ["-m", "not slow"] if look.is_small else []
    _run(look, [*_PYTEST, *parallel, *few, "--durations=15", *_TESTS], "tests.log")


def run_sanitizer(look: Look) -> None:
    """Runs the first tests of each file under memcheck."""
    listed = subprocess.run(
        [*_PYTEST, "--collect-only", "-m", "not slow", *_TESTS], cwd=ROOT, capture_output=True, text=True
    )
    by_file = defaultdict(list)
    for name in re.findall(r"^tests/gpu/\S+::.*$", listed.stdout, re.MULTILINE):
        by_file[name.partition("::")[0]].append(name)
    names = [name for each in by_file.values() for name in each[:_PER_FILE]]
    sanitizer = shutil.which("compute-sanitizer")
    if look.is_small or sanitizer is None:
        look.report("memcheck", f"left out: no compute-sanitizer; it would run {len(names)} tests")
        return
    # With torch's own allocator a kernel that writes beyond a tensor stays inside of a block.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    command = [sanitizer, "--tool", "memcheck", "--target-processes", "application-only"]
    _run(look, [*command, *_PYTEST, "-o", "timeout=0", *names], "memcheck.log")
    log = (look.out / "memcheck.log").read_text()
    errors = re.findall(r"ERROR SUMMARY: (\d+) error", log)
    look.check("memcheck", bool(errors) and set(errors) == {"0"}, f"errors: {', '.join(errors) or 'no summary'}")


def _run(look: Look, command: list[str], log: str) -> None:
    with (look.out / log).open("w") as file:
        code = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT).returncode
    text = (look.out / log).read_text()
    for line in sorted({*re.findall(r"^(?:FAILED|ERROR) \S+::.*?(?= - |$)", text, re.MULTILINE)}):
        look.report("failed", line[:300], ok=False)
    summary = [line for line in text.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    look.check("pytest tests/gpu", code == 0, summary[-1].strip("= ") if summary else f"exit code {code}")
