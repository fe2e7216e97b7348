"""GGUF files on the hub, named as users of llama.cpp do: `owner/name:Q4_K_M`, a repository and a type of weights."""

import re
from collections.abc import Sequence
from pathlib import Path

from engine.checkpoint.hub import snapshot
from engine.checkpoint.local import is_local
from engine.core.errors import ModelError

__all__ = ["check_has_config", "gguf_of", "split_tag"]

_TAG = re.compile(r"[-._/]([\w]+)(?:-(\d{5})-of-\d{5})?\.gguf$")
"""Finds the type of a file's weights at the end of its name, and which of several parts it is."""
_SEPARATORS = "-._/"


def split_tag(model: str) -> tuple[str, str | None]:
    """Returns the hub id, and the type of weights that `model` names behind a colon, if it does."""
    name, colon, tag = model.partition(":")
    return (model, None) if is_local(model) or not colon else (name, tag)


def gguf_of(model: str, tag: str, revision: str | None) -> Path:
    """Returns the downloaded GGUF file with weights of the type `tag`, or the first of its parts. Raises ModelError."""
    folder = snapshot(model, revision, _patterns(tag))
    found = [path for path in sorted(folder.rglob("*.gguf")) if _tag_of(path.name) == tag.lower()]
    if len(found) > 1:
        found = [path for path in found if _part_of(path.name) in (None, 1)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(str(path.relative_to(folder)) for path in found)
        raise ModelError(f"{model} has several files for {tag}: {names}. Download one, and name its path.")
    raise ModelError(f"{model} has no GGUF file for {tag}{_choice(_names(model, revision, folder))}.")


def check_has_config(model: str, revision: str | None, folder: Path) -> None:
    """Raises ModelError for a repository of GGUF files alone: `folder` has its config.json, if there is one."""
    if (folder / "config.json").is_file():
        return
    if tags := _tags(_names(model, revision, folder)):
        raise ModelError(f"{model} has GGUF files: name the one to serve, as in {model}:{tags[0]}{_choice(tags)}.")


def _patterns(tag: str) -> list[str]:
    tags = sorted({tag, tag.upper(), tag.lower()})
    parts = ("", "-?????-of-*")
    return [f"*{separator}{each}{part}.gguf" for separator in _SEPARATORS for each in tags for part in parts]


def _names(model: str, revision: str | None, folder: Path) -> list[str]:
    """Returns the names of all files of a repository, or, if the hub cannot be asked, of those that were downloaded."""
    import huggingface_hub

    try:
        return huggingface_hub.list_repo_files(model, revision=revision)
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError):
        return [path.name for path in folder.rglob("*.gguf")]


def _choice(names: Sequence[str]) -> str:
    tags = _tags(names) or list(names)
    return f"; there are {', '.join(tags)}" if tags else ""


def _tags(names: Sequence[str]) -> list[str]:
    found = (_TAG.search(name) for name in names if not Path(name).name.startswith("mmproj"))
    return sorted({match[1] for match in found if match})


def _tag_of(name: str) -> str | None:
    match = None if name.startswith("mmproj") else _TAG.search(name)
    return match[1].lower() if match else None


def _part_of(name: str) -> int | None:
    match = _TAG.search(name)
    return int(match[2]) if match and match[2] else None
