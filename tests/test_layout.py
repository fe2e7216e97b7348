"""The laws of the source tree: imports go one way, policy has no tensors, and nothing grows past one screen."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("engine", "server", "loadtest")

# Scheduling policy: thousands of random schedules run in seconds because none of these files needs torch.
SCHEDULER_SIDE = tuple(
    f"engine.{name}"
    for name in (
        "batch", "block_pool", "client", "config", "cost_model", "errors", "fair_queue", "messages", "outputs",
        "prefill_budget", "prefix_cache", "request", "request_state", "request_view", "sampling_params", "scheduler",
        "stats", "step_cost", "step_floor", "thinking",
    )
)  # fmt: skip

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

MAX_FILE_LINES = 300
MAX_LINE_LENGTH = 120
MAX_CLASS_LINES = 250
MAX_FUNCTION_LINES = 40

# What may be longer, and why. An entry that is no longer needed fails the tests too.
LONG_FILES: dict[str, str] = {}
LONG_CLASSES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}


def source_files(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def kernel_files() -> list[Path]:
    return [path for pattern in ("*.h", "*.cpp") for path in sorted((ROOT / "engine" / "kernels").rglob(pattern))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_modules(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever in the file it stands, type-only imports included."""
    package = path.relative_to(ROOT).parent.parts
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            modules |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return modules


def offenders(paths: list[Path], forbidden: tuple[str, ...]) -> list[str]:
    """`file imports module` for each import of a forbidden module or of one below it."""
    return [
        f"{name_of(path)} imports {module}"
        for path in paths
        for module in sorted(imported_modules(path))
        if any(module == name or module.startswith(name + ".") for name in forbidden)
    ]


def longest(*kinds: type[Definition]) -> dict[str, int]:
    """`file:name` of every definition of the given kinds -> its lines, without the docstring."""
    lines: dict[str, int] = {}
    for path in source_files(*PACKAGES, "benchmarks"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kinds):
                name = f"{name_of(path)}:{node.name}"
                lines[name] = max(lines.get(name, 0), num_lines(node) - docstring_lines(node))
    return lines


def num_lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def docstring_lines(node: Definition) -> int:
    return 0 if ast.get_docstring(node, clean=False) is None else num_lines(node.body[0])


def assert_within(limit: int, measured: dict[str, int], allowed: dict[str, str]) -> None:
    over = {name: lines for name, lines in measured.items() if lines > limit}
    assert over.keys() - allowed.keys() == set(), f"over {limit} lines: {over}"
    assert allowed.keys() - over.keys() == set(), "exceptions that are no longer needed"


def test_loadtest_imports_neither_server_nor_engine() -> None:
    assert offenders(source_files("loadtest"), ("server", "engine", "torch", "transformers")) == []


def test_server_knows_the_engine_but_no_tensors_and_no_models() -> None:
    below_the_engine = ("torch", "transformers", "tokenizers", "engine.attention", "engine.kernels", "loadtest")
    assert offenders(source_files("server"), below_the_engine) == []


def test_engine_knows_neither_http_nor_its_users() -> None:
    above_the_engine = (
        "server",
        "loadtest",
        "benchmarks",
        "fastapi",
        "starlette",
        "uvicorn",
        "pydantic",
        "sse_starlette",
    )
    assert offenders(source_files("engine"), above_the_engine) == []


def test_policy_imports_no_tensors() -> None:
    paths = [ROOT / f"{module.replace('.', '/')}.py" for module in SCHEDULER_SIDE]
    assert offenders([path for path in paths if path.exists()], ("torch", "numpy", "transformers")) == []


def test_tests_import_no_tests() -> None:
    """What several need has a file of its own."""
    paths = source_files("tests")
    tests = tuple(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths if path.name[:5] == "test_")
    assert offenders(paths, tests) == []


@pytest.mark.parametrize(
    "modules",
    [
        SCHEDULER_SIDE,
        ("server.cli", "server.serve", "engine.client.async_engine", "engine.text.tokenizer"),
        ("loadtest.cli",),
    ],
    ids=["policy", "server", "loadtest"],
)
def test_without_tensors_also_means_whatever_is_imported_in_turn(modules: tuple[str, ...]) -> None:
    """Torch costs seconds and hundreds of megabytes: only the engine process has it."""
    script = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60).returncode == 0


@pytest.mark.parametrize(
    "source", ["import engine.x", "from engine import x", "from ..engine import x", "def f():\n import engine"]
)
def test_imports_are_found_however_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "loadtest" / "x.py"
    path.parent.mkdir()
    path.write_text(source)
    assert offenders([path], ("engine",)) != []


def test_no_duration_depends_on_the_wall_clock() -> None:
    """It jumps. Only what users read as a date may come from it."""
    dates = {f"server/{name}.py" for name in ("backend", "generation/plan", "responses/writer")}
    dates |= {"engine/text/chat_template.py", "engine/scheduling/cost/step_trace.py"}
    words = ("time.time(", "time_ns(", "datetime.now(", "utcnow(")
    found = {name_of(path) for path in source_files("engine", "server") for word in words if word in path.read_text()}
    assert found <= dates


def test_no_test_moves_the_clock_of_servers_in_other_threads() -> None:
    """An event loop that looks at it then sleeps for what is between that time and its next timer's. Tests replace the
    name `time` in the module under test."""
    moves = re.compile(r'setattr\((time,|"[\w.]*\btime\.\w+")')
    assert moves.search('setattr("server.generation.sse.time.monotonic", ') and moves.search(
        'setattr(time, "monotonic", '
    )
    tests = {name_of(path) for path in source_files("tests") if moves.search(path.read_text())}
    assert tests == {"tests/test_layout.py"}  # this one


def test_files_fit_a_reader() -> None:
    paths = [*source_files(*PACKAGES, "benchmarks", "tests"), *kernel_files()]
    measured = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert_within(MAX_FILE_LINES, measured, LONG_FILES)


def test_lines_of_kernels_fit_a_reader() -> None:
    """Those of Python are ruff's affair."""
    measured = {name_of(path): max(map(len, path.read_text(encoding="utf-8").splitlines())) for path in kernel_files()}
    assert_within(MAX_LINE_LENGTH, measured, {})


def test_classes_fit_a_reader() -> None:
    assert_within(MAX_CLASS_LINES, longest(ast.ClassDef), LONG_CLASSES)


def test_functions_fit_one_screen() -> None:
    assert_within(MAX_FUNCTION_LINES, longest(ast.FunctionDef, ast.AsyncFunctionDef), LONG_FUNCTIONS)
