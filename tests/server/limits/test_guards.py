"""The table of guards in `server.limits` matches the code: what it names exists, and what bounds clients is named."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from server import limits
from server.settings.settings import Settings

ROOT = Path(__file__).resolve().parents[3]
TABLE = limits.__doc__ or ""
PLACES = sorted(set(re.findall(r"\b((?:server|engine)(?:\.\w+)+):(\w+)", TABLE)))
FLAGS = set(re.findall(r"(?<!\S)--([a-z-]+)\b", TABLE))

# Modules with a constant MAX_... that bounds no client; those of routing bound what a router remembers.
BOUNDS_NO_CLIENT = {
    *("server.metrics.buffered_observer", "server.routing.moves", "server.routing.policy"),
    "server.routing.prompt_digests",
}


@cache
def definitions(path: Path) -> set[str]:
    """Returns the names that a module defines at its top level."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize(("module", "name"), PLACES)
def test_each_place_exists(module: str, name: str) -> None:
    assert name in definitions(ROOT / Path(*module.split(".")).with_suffix(".py"))


def test_each_flag_exists() -> None:
    assert {flag.replace("-", "_") for flag in FLAGS} <= Settings.model_fields.keys()


def test_each_setting_that_bounds_clients_is_named() -> None:
    fields = {name: field for name, field in Settings.model_fields.items() if "max_" in name or "timeout" in name}
    of_the_server = {name for name, field in fields.items() if field.json_schema_extra["group"] == "Server"}  # type: ignore[index]
    assert of_the_server <= {flag.replace("-", "_") for flag in FLAGS}


def test_each_module_of_limits_is_named() -> None:
    modules = {module_name(path) for path in (ROOT / "server" / "limits").glob("[a-z]*.py")}
    assert modules and modules <= {module for module, _ in PLACES}


def test_each_module_of_the_server_with_a_maximum_is_named() -> None:
    modules = {
        module_name(path)
        for path in (ROOT / "server").rglob("*.py")
        if any(name.startswith("MAX_") for name in definitions(path))
    }
    assert modules - {module for module, _ in PLACES} == BOUNDS_NO_CLIENT
