"""The look at a GPU runs to its end whatever its stages do; what they find is told apart from what they measure."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.gpu import one_look
from tests.gpu.look import ceilings
from tests.gpu.look.report import Look, read, table


@pytest.mark.parametrize("name", one_look.STAGES)
def test_each_stage_is_there(name: str) -> None:
    stage = one_look.STAGES[name]
    assert callable(getattr(import_module(f"tests.gpu.look.{stage.module}"), stage.function))


def test_a_stage_reports_as_it_goes(tmp_path: Path) -> None:
    ceilings.run(Look("ceilings", torch.device("cpu"), tmp_path))
    findings = read(tmp_path, ["ceilings"])
    assert {"torch", "read-only stream", "a launch"} <= {each.name for each in findings}
    assert all(each.ok is None for each in findings) and read(tmp_path, ["bits"]) == []
    assert "product of 256^3" in table(findings)


def look(out: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tests.gpu.one_look", "--device", "cpu", "--out", str(out), *arguments]
    return subprocess.run(command, cwd=one_look.ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_stage_that_takes_too_long_stops_no_other(tmp_path: Path) -> None:
    result = look(tmp_path, "--stages", "models,eager", "--limit", "1")
    ends = [each for each in read(tmp_path, ["models", "eager"]) if each.name == "stage ended"]
    assert result.returncode == 1 and [(each.stage, each.ok) for each in ends] == [("models", False), ("eager", False)]
    assert "killed after 1 s" in result.stdout


def test_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    result = look(tmp_path, "--stages", "bits,speed")
    assert result.returncode == 2 and "There is no stage speed; there are ceilings, tests," in result.stderr
