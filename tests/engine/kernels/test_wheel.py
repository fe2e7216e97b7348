"""Wheels that bring compiled kernels."""

import zipfile
from pathlib import Path

import pytest

from tools import wheel


@pytest.mark.slow
def test_a_wheel_brings_its_libraries_and_its_platform(tmp_path: Path) -> None:
    library = tmp_path / "avx2-0123-4567.so"
    library.write_bytes(b"compiled")
    path = wheel.build_wheel([library], tmp_path / "out")
    assert path.name.startswith("twostep-") and "-py3-none-manylinux_2_" in path.name
    with zipfile.ZipFile(path) as content:
        assert content.read("engine/kernels/shipped/avx2-0123-4567.so") == b"compiled"
        names = set(content.namelist())
    assert {
        "engine/kernels/layers/decoder.cpp",
        "server/page/index.html",
        "loadtest/cli.py",
        "twostep/__init__.py",
    } <= names
    assert not any("__pycache__" in name for name in names)


def test_a_compile_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TWOSTEP_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    assert wheel.main(["--isa", "generic", "--out", str(tmp_path / "out")]) == 1
    assert "error: false failed" in capsys.readouterr().err
