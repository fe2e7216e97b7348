"""A child process runs this program's modules, not what the working directory has of the same name."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.host.python_module import module_command


def test_a_folder_of_the_same_name_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine" / "core").mkdir(parents=True)
    (tmp_path / "engine" / "core" / "errors.py").write_text("print('another one')")
    monkeypatch.chdir(tmp_path)
    command = module_command("engine.core.errors")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "another one" not in ended.stdout and command[0] == sys.executable


def test_a_checkout_runs_without_being_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).resolve().parents[3]
    monkeypatch.chdir(root)
    command = module_command("engine.core.errors")
    isolated = [command[0], "-S", *command[1:]]  # without what is installed
    assert subprocess.run(isolated, timeout=60).returncode == 0
