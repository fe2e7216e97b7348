"""Where a model comes from: a directory on this machine or a hub id; torch-free."""

from pathlib import Path

from engine.errors import ModelError


def is_local(model: str) -> bool:
    """Whether `model` means a directory: it exists, or is written as a path is."""
    return model.startswith((".", "/", "~")) or Path(model).exists()


def check_checkpoint(model: str) -> None:
    """Raise ModelError for a directory that holds no checkpoint. Hub ids pass: only asking the hub can tell."""
    if not is_local(model):
        return
    path = Path(model).expanduser()
    if not path.is_dir():
        raise ModelError(f"{model} is not a checkpoint directory: there is no such directory.")
    if not (path / "config.json").is_file():
        raise ModelError(f"{model} is not a checkpoint directory: it has no config.json.")
