"""The systemd unit: systemd understands it, its flags are those of the program, and it lets streams end."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from server.cli import EXIT_ERROR, parse_command
from server.settings.reading import read_settings
from server.settings.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
UNIT = (ROOT / "deploy" / "twostep.service").read_text(encoding="utf-8")
VALUES = dict(line.split("=", 1) for line in UNIT.splitlines() if "=" in line and not line.startswith("#"))
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def analyzed(command: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Returns what systemd says of the unit, with a program that is installed here."""
    (folder / "twostep.service").write_text(UNIT.replace("/opt/twostep/bin/twostep", "/bin/true"))
    arguments = ["systemd-analyze", command, *options, str(folder / "twostep.service")]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=120)


def test_it_starts_the_program_with_flags_that_there_are(tmp_path: Path) -> None:
    program, *arguments = shlex.split(VALUES["ExecStart"])
    (tmp_path / "server.yaml").write_text("model: /srv/model\n")
    arguments[arguments.index("/etc/twostep/server.yaml")] = str(tmp_path / "server.yaml")
    settings = read_settings(parse_command(arguments)[1])
    assert program.endswith("/bin/twostep") and settings.require_kernels and settings.model == "/srv/model"


def test_streams_may_end_before_it_is_killed() -> None:
    assert float(VALUES["TimeoutStopSec"]) > Settings().shutdown_timeout + 10
    assert VALUES["KillMode"] == "mixed"  # SIGTERM goes to the server, which ends its engine itself


def test_it_counts_as_started_when_the_model_is_loaded() -> None:
    assert VALUES["Type"] == "notify" and VALUES["TimeoutStartSec"] == "infinity"
    assert float(VALUES["WatchdogSec"]) > 30


def test_what_cannot_work_is_not_started_again() -> None:
    assert VALUES["RestartPreventExitStatus"] == str(EXIT_ERROR)


def test_caches_are_where_it_may_write() -> None:
    assert VALUES["CacheDirectory"] == "twostep" and "XDG_CACHE_HOME=/var/cache " in VALUES["Environment"]


@needs_systemd
def test_systemd_understands_it(tmp_path: Path) -> None:
    verified = analyzed("verify", tmp_path)
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")


@needs_systemd
def test_it_is_confined(tmp_path: Path) -> None:
    judged = analyzed("security", tmp_path, "--offline=yes", "--threshold=25")  # tenths of systemd's exposure level
    assert judged.returncode == 0, judged.stdout
