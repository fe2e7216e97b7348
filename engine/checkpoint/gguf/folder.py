"""The files of a checkpoint that a GGUF file's metadata stands for, in a folder of the cache; torch-free.

What a checkpoint's files say is read in many places, and of each there is one reader. So metadata is written once in
the form of these files, to a folder whose name is the hash of the metadata and of the code that wrote it.
"""

import hashlib
import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from engine.checkpoint.gguf.architectures import config_of
from engine.checkpoint.gguf.header import GgufFile, read_gguf
from engine.checkpoint.gguf.number_format import number_format_of
from engine.checkpoint.gguf.tokenizer import eos_token_ids_of, tokenizer_config_of, tokenizer_of
from engine.core.errors import ModelError
from engine.host.cache_home import cache_home

__all__ = ["gguf_folder"]


def gguf_folder(path: Path) -> Path:
    """Returns the folder with config.json, generation_config.json, tokenizer.json and tokenizer_config.json of a GGUF
    file. Raises ModelError."""
    file = read_gguf(path)
    folder = cache_home() / "gguf" / f"{file.digest[:32]}-{_code_digest()}"
    if not folder.is_dir():
        _write(folder, _contents(file))
    return folder


def _contents(file: GgufFile) -> dict[str, Any]:
    return {
        "config.json": {**config_of(file), "dtype": number_format_of(file)},
        "generation_config.json": {"eos_token_id": eos_token_ids_of(file)},
        "tokenizer.json": tokenizer_of(file),
        "tokenizer_config.json": tokenizer_config_of(file),
    }


def _write(folder: Path, contents: dict[str, Any]) -> None:
    """Writes the files beside their folder, which then takes its name at once: another process may do the same."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix="unfinished-"))
        try:
            for name, content in contents.items():
                (unfinished / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
            if not folder.is_dir():
                os.rename(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        if folder.is_dir():  # the other process was faster
            return
        raise ModelError(
            f"{folder} cannot be written: {error.strerror}. XDG_CACHE_HOME names another place."
        ) from error


@cache
def _code_digest() -> str:
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
