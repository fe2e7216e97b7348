"""The packed cache: models that the kernels run as a whole are kept in files, packed, so that the next start reads one
file and needs no code of transformers.

Files appear under their names by an atomic rename; the longest unused ones go where there are too many bytes. Several
servers may share a directory. What cannot be read or written is loaded or left out, with a line in the log. A model
that is larger than memory stays in its file, or is refused (`engine.model.planning.paged_weights`).
"""

import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from engine.core.config import EngineConfig
from engine.core.errors import ModelError, reason_of
from engine.host.mapped_file import paging_bytes_per_s
from engine.host.mkl_warmup import warm_up_vector_functions
from engine.model.decoder_parts import DecoderParts
from engine.model.drafting.kernel_head import HeadParts
from engine.model.packed_file import DamagedFileError, read_packed, write_packed
from engine.model.packed_key import packed_key, wants_head
from engine.model.planning.paged_weights import are_too_large, check_paging_speed
from engine.runner.loaded_model import LoadedModel

__all__ = ["PackedCache"]

logger = logging.getLogger(__name__)

_SUFFIX, _UNFINISHED = ".safetensors", ".writing"
_ABANDONED_S = 3600
"""Age of an unfinished file whose writer must have died."""


class PackedCache:
    """The place of one configured model in a directory of packed models."""

    def __init__(self, config: EngineConfig) -> None:
        """Looks which file stands for the configured model. Call before any of the checkpoint's files are read."""
        self._config = config
        self._key = _key_of(config)

    def find(self) -> LoadedModel | None:
        """Returns the configured model if it is kept. `LoadedModel.module` then is what the kernels run. Raises
        ModelMemoryError for one that would have to be read from the disk too often."""
        if self._key is None:
            return None
        path = self._path(self._key)
        started_s = time.monotonic()
        try:
            if are_too_large(path.stat().st_size, self._config):
                bytes_per_s = paging_bytes_per_s(path)  # while none of it is mapped
                model = read_packed(path, is_paged=True)
                check_paging_speed(path.parent, bytes_per_s, model.size, self._config)
            else:
                model = read_packed(path)
            os.utime(path)
        except FileNotFoundError:
            return None
        except (OSError, DamagedFileError) as error:
            logger.warning("%s is not used: %s", path, reason_of(error))
            return None
        warm_up_vector_functions()
        torch.ops.twostep.replace_activations()
        logger.info("packed weights read from %s in %.1f s", path, time.monotonic() - started_s)
        return model

    def keep(self, model: LoadedModel, parts: DecoderParts, head: HeadParts | None = None) -> None:
        """Keeps the configured model, whose decoder has these parts, and so its MTP head, if its files are those that
        there were before. A model is not kept without a head that its checkpoint brings."""
        if self._key is None or _key_of(self._config) != self._key or (head is None) == wants_head(self._config):
            return
        if model.weight_bytes > self._config.packed_cache_bytes:
            logger.info(
                "packed weights are not kept: %.1f GiB are more than --packed-cache-bytes", model.weight_bytes / 2**30
            )
            return
        path = self._path(self._key)
        try:
            with _written_beside(path) as unfinished:
                write_packed(unfinished, model, parts, head)
            _delete_unused(path.parent, self._config.packed_cache_bytes)
        except OSError as error:
            logger.warning("packed weights cannot be kept in %s: %s", path.parent, error.strerror)
            return
        logger.info("packed weights are kept in %s: the next start reads them", path)

    def _path(self, key: str) -> Path:
        return Path(self._config.packed_cache or "") / f"{key}{_SUFFIX}"


def _key_of(config: EngineConfig) -> str | None:
    if config.packed_cache is None or config.load_format == "dummy" or config.tensor_parallel_size > 1:
        return None
    try:
        return packed_key(config)
    except (OSError, ModelError):  # said when the checkpoint is loaded
        return None


@contextmanager
def _written_beside(path: Path) -> Iterator[Path]:
    """Yields the path of a private file in the same directory, which takes the name `path` in the end."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, unfinished = tempfile.mkstemp(suffix=_UNFINISHED, dir=path.parent)
    os.close(fd)
    try:
        yield Path(unfinished)
        os.chmod(unfinished, 0o600)
        os.rename(unfinished, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)
        raise


def _delete_unused(folder: Path, max_bytes: int) -> None:
    """Deletes the longest unused models beyond `max_bytes`, and what writers that died left behind."""
    for path in folder.glob(f"*{_UNFINISHED}"):
        if path.stat().st_mtime < time.time() - _ABANDONED_S:
            path.unlink(missing_ok=True)
    files = [(path.stat(), path) for path in folder.glob(f"*{_SUFFIX}")]
    for stat, path in sorted(files, key=lambda file: file[0].st_mtime, reverse=True):
        max_bytes -= stat.st_size
        if max_bytes < 0:
            path.unlink(missing_ok=True)
