"""The laws of the source tree: imports go one way, policy has no tensors, and nothing grows past one screen."""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("engine", "server", "loadtest", "twostep")

# Who may import whom: a package names only packages above it, so imports go one way. Names, lazy imports and those for
# types alone all count. The package of the same name as its tree is what stands at its root.
MAY_IMPORT = {
    "engine": {
        "core": "",
        "host": "",
        "checkpoint": "core host",
        "kernels": "core host",
        "weights": "checkpoint core kernels",
        "scheduling.cost": "core",
        "attention": "host kernels weights",
        "mixers": "kernels",
        "text": "checkpoint core host",
        "scheduling.speculation": "core scheduling.cost",
        "runner": "attention core kernels mixers scheduling.speculation weights",
        "scheduling": "core scheduling.cost scheduling.speculation",
        "kv_store": "attention checkpoint core host kernels mixers",
        "grammar": "core host scheduling text",
        "model": "attention checkpoint core host kernels mixers runner text weights",
        "ranks": "attention core host kernels mixers model runner weights",
        "engine": "core grammar host kv_store ranks scheduling scheduling.cost scheduling.speculation",
        "process": "core engine host",
        "client": "core host process text",
    },
    "server": {
        "protocol": "",
        "routing": "",
        "settings": "",
        "auth": "settings",
        "core": "auth protocol",
        "limits": "core",
        "telemetry": "core",
        "metrics": "core protocol",
        "tools": "core protocol",
        "templates": "core protocol settings tools",
        "runtime": "auth core limits metrics routing settings telemetry templates",
        "middleware": "auth core metrics runtime telemetry",
        "generation": "auth core limits protocol runtime",
        "completions": "core generation protocol runtime",
        "chat": "core generation protocol runtime templates tools",
        "anthropic": "chat core generation protocol tools",
        "ollama": "chat core generation protocol runtime tools",
        "responses": "chat core generation protocol tools",
        "routes": "anthropic chat completions core generation limits metrics ollama protocol responses runtime",
        "http": "auth core limits middleware routes runtime",
        "server": "auth core http limits metrics middleware routes runtime settings telemetry",
    },
    "twostep": {
        "offline": "",
        "commands": "",
        "twostep": "commands offline",
    },
}

# Scheduling policy: thousands of random schedules run in seconds because nothing here needs torch.
WITHOUT_TENSORS = ("engine/core", "engine/scheduling")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

MAX_FILE_LINES = 400
MAX_FOLDER_FILES = 40
MAX_LINE_LENGTH = 120
MAX_CLASS_LINES = 250
MAX_FUNCTION_LINES = 40
MAX_PARAMETERS = 6

# What may be longer, or have more parameters, and why. An entry that is no longer needed fails the tests too.
LONG_FILES: dict[str, str] = {}
LONG_CLASSES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
MANY_PARAMETERS: dict[str, str] = {
    "engine/assembly.py:assemble": "parts of an engine, each by name, of which tests replace some",
    "engine/attention/kv_cache.py:__init__": "sizes of a cache, where it lies and how numbers are kept",
    "engine/attention/registry.py:_attention": "transformers calls it",
    "engine/client/async_engine.py:__init__": "parts of an engine's client, each by name",
    "engine/engine.py:__init__": "the parts that `assemble` makes",
    "engine/mixers/functions.py:_gated_delta_rule": "the code of models calls it",
    "engine/mixers/functions.py:_mamba2_scan": "the code of models calls it",
    "engine/mixers/functions.py:_mamba_scan": "the code of models calls it",
    "engine/mixers/metadata.py:__init__": "what a step has of each sequence",
    "engine/model/fused_modules.py:__init__": "the parts of a fused layer",
    "engine/scheduling/kv_allocator.py:__init__": "parts of an allocator, of which most are null objects by default",
    "engine/scheduling/kv_tiers.py:__init__": "those of `KVAllocator`, and two more",
}


def source_files(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def policy_files() -> list[Path]:
    return [path for folder in WITHOUT_TENSORS for path in source_files(folder)]


def kernel_files() -> list[Path]:
    return [path for pattern in ("*.h", "*.cpp") for path in sorted((ROOT / "engine" / "kernels").rglob(pattern))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
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


def modules_of(tree: str) -> dict[str, set[str]]:
    """Every module of a tree -> the modules and packages of that tree that it imports."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in source_files(tree)}
    known = {name.removesuffix(".__init__") for name in names.values()}
    return {name: {to for to in imported_modules(path) & known if to != name} for path, name in names.items()}


def package_of(module: str) -> str:
    """The innermost package of `MAY_IMPORT` that a module is in."""
    tree, *parts = module.removesuffix(".__init__").split(".")
    inside = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    return next((name for name in inside if name in MAY_IMPORT[tree]), tree)


def arrows(tree: str) -> dict[tuple[str, str], list[str]]:
    """Each pair of packages of which the first imports the second -> where it does."""
    found: dict[tuple[str, str], list[str]] = {}
    for module, imported in modules_of(tree).items():
        for to in imported - {tree}:  # the root's own file, of which every import names the folder
            if package_of(module) != package_of(to):
                found.setdefault((package_of(module), package_of(to)), []).append(f"{module} imports {to}")
    return found


def offenders(paths: list[Path], forbidden: tuple[str, ...]) -> list[str]:
    """`file imports module` for each import of a forbidden module or of one below it."""
    return [
        f"{name_of(path)} imports {module}"
        for path in paths
        for module in sorted(imported_modules(path))
        if any(module == name or module.startswith(name + ".") for name in forbidden)
    ]


@cache
def definitions() -> list[tuple[Path, Definition]]:
    """Every function and class of the program, with its file."""
    files = source_files(*PACKAGES, "benchmarks")
    nodes = ((path, node) for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return [(path, node) for path, node in nodes if isinstance(node, Definition)]


def longest(*kinds: type[Definition]) -> dict[str, int]:
    """`file:name` of every definition of the given kinds -> its lines, without the docstring."""
    lines: dict[str, int] = {}
    for path, node in definitions():
        if isinstance(node, kinds):
            name = f"{name_of(path)}:{node.name}"
            lines[name] = max(lines.get(name, 0), num_lines(node) - docstring_lines(node))
    return lines


def num_parameters() -> dict[str, int]:
    """`file:name` of every function -> its parameters, without `self`; those of Triton's kernels are left out."""
    counted: dict[str, int] = {}
    for path, node in definitions():
        if not isinstance(node, ast.ClassDef) and path.parent.name != "cuda":
            named = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            name = f"{name_of(path)}:{node.name}"
            counted[name] = max(counted.get(name, 0), len(named) - (named[:1] in (["self"], ["cls"])))
    return counted


def num_lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def docstring_lines(node: Definition) -> int:
    return 0 if ast.get_docstring(node, clean=False) is None else num_lines(node.body[0])


def assert_within(limit: int, measured: dict[str, int], allowed: dict[str, str]) -> None:
    over = {name: number for name, number in measured.items() if number > limit}
    assert over.keys() - allowed.keys() == set(), f"over {limit}: {over}"
    assert allowed.keys() - over.keys() == set(), "exceptions that are no longer needed"


def test_loadtest_imports_neither_server_nor_engine() -> None:
    assert offenders(source_files("loadtest"), ("server", "engine", "twostep", "torch", "transformers")) == []


def test_server_knows_the_engine_but_no_tensors_and_no_models() -> None:
    below_the_engine = ("torch", "transformers", "tokenizers", "engine.attention", "engine.kernels")
    assert offenders(source_files("server"), (*below_the_engine, "loadtest", "twostep")) == []


def test_engine_knows_neither_http_nor_its_users() -> None:
    above_the_engine = (
        "server",
        "loadtest",
        "twostep",
        "benchmarks",
        "fastapi",
        "starlette",
        "uvicorn",
        "pydantic",
        "sse_starlette",
    )
    assert offenders(source_files("engine"), above_the_engine) == []


def test_policy_imports_no_tensors() -> None:
    assert offenders(policy_files(), ("torch", "numpy", "transformers")) == []


@pytest.mark.parametrize("tree", MAY_IMPORT)
def test_packages_import_what_they_may(tree: str) -> None:
    allowed = {(package, to) for package, names in MAY_IMPORT[tree].items() for to in names.split()}
    found = arrows(tree)
    assert [where for arrow, where in found.items() if arrow not in allowed] == []
    assert allowed - found.keys() == set(), "rights that nobody uses"


@pytest.mark.parametrize("tree", MAY_IMPORT)
def test_what_packages_may_import_goes_one_way(tree: str) -> None:
    above: set[str] = set()
    for package, names in MAY_IMPORT[tree].items():
        assert set(names.split()) <= above, package
        above.add(package)


@pytest.mark.parametrize("tree", MAY_IMPORT)
def test_every_package_is_in_the_picture(tree: str) -> None:
    folders = {path.parent.relative_to(ROOT / tree).parts for path in source_files(tree)}
    assert {parts[0] for parts in folders if parts} <= MAY_IMPORT[tree].keys()


@pytest.mark.parametrize("tree", MAY_IMPORT)
def test_no_modules_import_one_another_in_a_circle(tree: str) -> None:
    """Each round takes away the modules that import none of those that are left."""
    left = {name: imported - {tree} for name, imported in modules_of(tree).items()}
    while done := {name for name, imported in left.items() if not imported & left.keys()}:
        left = {name: imported for name, imported in left.items() if name not in done}
    assert left == {}


def test_tests_import_no_tests() -> None:
    """What several need has a file of its own."""
    paths = source_files("tests")
    tests = tuple(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths if path.name[:5] == "test_")
    assert offenders(paths, tests) == []


def policy_modules() -> tuple[str, ...]:
    return tuple(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in policy_files())


@pytest.mark.parametrize(
    "modules",
    [
        policy_modules(),
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
    dates = {f"server/{name}.py" for name in ("runtime/backend", "generation/plan", "responses/writer")}
    dates |= {"engine/text/chat_template.py", "engine/scheduling/cost/step_trace.py"}
    dates |= {"server/telemetry/exporting.py"}  # when spans end; how long they last is measured otherwise
    dates |= {"engine/model/packed_key.py", "engine/model/packed_cache.py"}  # ages of files
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


def test_folders_fit_a_reader() -> None:
    folders = Counter(
        name_of(path.parent) for path in [*source_files(*PACKAGES, "benchmarks", "tests"), *kernel_files()]
    )
    assert_within(MAX_FOLDER_FILES, dict(folders), {})


def test_lines_of_kernels_fit_a_reader() -> None:
    """Those of Python are ruff's affair."""
    measured = {name_of(path): max(map(len, path.read_text(encoding="utf-8").splitlines())) for path in kernel_files()}
    assert_within(MAX_LINE_LENGTH, measured, {})


def test_kernels_include_of_torch_what_they_name() -> None:
    """Torch's headers take a compiler longer than most kernels do."""
    for path in kernel_files():
        text = path.read_text(encoding="utf-8")
        for operator in re.findall(r"#include <ATen/ops/(\w+)\.h>", text):
            assert f"at::{operator}" in text, f"{name_of(path)} includes {operator}, which it does not call"
        if path.parent.name != "binding":
            assert not re.search(r"#include <(ATen|c10|torch)/", text), f"{name_of(path)} includes torch's own headers"


def test_classes_fit_a_reader() -> None:
    assert_within(MAX_CLASS_LINES, longest(ast.ClassDef), LONG_CLASSES)


def test_functions_fit_one_screen() -> None:
    assert_within(MAX_FUNCTION_LINES, longest(ast.FunctionDef, ast.AsyncFunctionDef), LONG_FUNCTIONS)


def test_functions_have_few_parameters() -> None:
    assert_within(MAX_PARAMETERS, num_parameters(), MANY_PARAMETERS)
