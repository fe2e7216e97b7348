"""An engine runs without torch's compiler and torch.distributed; code that uses the compiler gets it."""

import asyncio
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import pytest
import torch

from engine.client.async_engine import AsyncEngine
from engine.core.config import EngineConfig
from engine.host.lean_torch import make_torch_lean
from engine.kernels import load_kernels
from tests.engine.async_engines import Words, collect, request, tokens_of

LEAN = """
import sys
from engine.host.lean_torch import make_torch_lean
make_torch_lean()
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", LEAN + code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def imported_by_engine(config: EngineConfig, capfd: pytest.CaptureFixture[str]) -> set[str]:
    """Returns the modules that an engine process imports until it has answered a request."""

    async def answer() -> None:
        engine = AsyncEngine(config)
        try:
            await engine.start(Words())
            assert len(tokens_of(await collect(engine, request()))) == 5
        finally:
            await engine.stop()

    asyncio.run(answer())
    return {line.rpartition("|")[2].strip() for line in capfd.readouterr().err.splitlines()}


@pytest.mark.slow
def test_an_engine_imports_less_of_torch_to_build_a_model_and_least_for_one_that_is_kept(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if load_kernels() is None:
        pytest.skip("without kernels no model is kept")
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    config = EngineConfig(model=str(files("engine") / "embedded_model"), num_blocks=8, packed_cache=str(tmp_path))
    built, kept = imported_by_engine(config, capfd), imported_by_engine(config, capfd)
    assert {"engine.host.lean_torch", "transformers.masking_utils", "torch._meta_registrations"} <= built
    assert not [name for name in built if name.startswith(("torch._dynamo", "torch.distributed.tensor"))]
    assert "engine.model.setup" in kept
    unwanted = ("transformers", "sympy", "torch._dynamo", "torch._meta_registrations", "torch._refs")
    assert not [name for name in kept if name.startswith(unwanted)]


def test_no_op_decorators_and_code_that_inspects_all_modules_load_nothing() -> None:
    run("""
import inspect, torch
def double(x): return 2 * x
assert torch.compiler.disable(double) is double
assert torch.compiler.disable(recursive=False)(double) is double
assert torch._dynamo.allow_in_graph(double) is double
assert torch._dynamo.assume_constant_result(double) is double
torch._dynamo.mark_static_address(torch.ones(1))
[hasattr(module, "__file__") for module in list(sys.modules.values())]
inspect.getmodule(inspect.currentframe())
assert "torch._dynamo.config" not in sys.modules
""")


@pytest.mark.slow
@pytest.mark.parametrize(
    "wanted",
    [
        "assert torch.compile(lambda x: 2 * x, backend='eager')(torch.ones(2)).tolist() == [2, 2]",
        "import torch._dynamo.config",
    ],
)
def test_the_compiler_comes_when_more_of_it_is_wanted(wanted: str) -> None:
    real = "from torch._dynamo.decorators import disable; assert torch._dynamo.disable is disable"
    run(f"import torch\n{wanted}\n{real}")


@pytest.mark.slow
def test_the_helper_of_masks_is_the_real_one_once_it_is_used() -> None:
    run("""
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
assert "torch._dynamo.config" not in sys.modules
table, at = torch.arange(6.0).view(2, 3), torch.tensor([2, 0])
with TransformGetItemToIndex():  # without it, vmap refuses to index by a tensor
    assert torch.vmap(lambda i: table[1, i])(at).tolist() == [5, 3]
""")


def test_a_compiler_that_is_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = ModuleType("torch._dynamo")
    monkeypatch.setitem(sys.modules, "torch._dynamo", compiler)
    monkeypatch.setattr(torch.distributed, "is_available", torch.distributed.is_available)
    make_torch_lean()
    assert sys.modules["torch._dynamo"] is compiler and not torch.distributed.is_available()
