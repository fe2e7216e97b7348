"""Compiled libraries are kept where users keep caches, and nowhere that others could write to."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from engine.kernels import build
from engine.kernels.build import KernelBuildError


@pytest.mark.parametrize(
    ("variables", "where"),
    [
        ({"TWOSTEP_CACHE_DIR": "mine"}, "mine"),
        ({"XDG_CACHE_HOME": "xdg", "HOME": "home"}, "xdg/twostep/kernels"),
        ({"HOME": "home"}, "home/.cache/twostep/kernels"),
    ],
)
def test_libraries_are_kept_where_users_keep_caches(
    variables: dict[str, str], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TWOSTEP_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    assert build.cache_dir() == tmp_path / where


@pytest.fixture
def without_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the directory for temporary files; the home is a file."""
    (tmp_path / "home").touch()
    for name in ("TWOSTEP_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def test_without_a_home_libraries_are_kept_among_temporary_files(
    without_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = build.cache_dir()
    assert found.parent == without_home and stat.S_IMODE(found.stat().st_mode) == 0o700
    assert build.cache_dir() == found and "cannot be written" in caplog.text


@pytest.mark.parametrize("kind", ["open to all", "a link"])
def test_a_directory_that_others_can_write_is_not_trusted(kind: str, without_home: Path) -> None:
    """Who can write a library there has it run in the engine."""
    place = without_home / f"twostep-{os.getuid()}"
    if kind == "a link":
        (without_home / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(without_home / "elsewhere")
    else:
        place.mkdir()
        place.chmod(0o777)
    with pytest.raises(KernelBuildError, match="is not this user's alone"):
        build.cache_dir()
