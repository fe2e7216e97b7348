"""Settings made from command lines and files."""

from pathlib import Path

from server.cli import parse_command, read_settings
from server.settings.settings import Settings


def read(*arguments: str) -> Settings:
    return read_settings(parse_command(["serve", *arguments])[1])


def write(tmp_path: Path, content: str) -> str:
    """Writes a file for --config and returns its path."""
    path = tmp_path / "settings.yaml"
    path.write_text(content)
    return str(path)
