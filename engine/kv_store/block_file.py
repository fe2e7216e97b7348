"""The file of one block, or of the states after it: a header, the bytes of all layers, a checksum of both.

    magic | fingerprint | name | token ids of the block | bytes | SHA-256 of all before

The reader knows beforehand, from what it looks for, every byte of the header and the file's size, so nothing is parsed:
a file is what it should be, or it is not used.
"""

import hashlib
import os
import stat
from array import array
from collections.abc import Sequence
from typing import Any

_MAGIC = b"twostep KV 1\n"
_DIGEST_BYTES = 32
_MAX_PARTS = 512  # per system call; systems allow 1024
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe of that name must not hang


class DamagedFileError(Exception):
    """A file does not hold what it should."""


class BlockFormat:
    """Reads and writes the files of blocks, or of states, of one kind."""

    def __init__(self, fingerprint: bytes, block_size: int, num_bytes: int) -> None:
        """`fingerprint` stands for all but the tokens that the `num_bytes` of a file depend on."""
        self._beginning = _MAGIC + fingerprint
        self._block_size = block_size
        self._num_bytes = num_bytes

    @property
    def file_bytes(self) -> int:
        """Size of each file."""
        return len(self._header(bytes(_DIGEST_BYTES), (0,) * self._block_size)) + self._num_bytes + _DIGEST_BYTES

    def write(self, fd: int, name: bytes, token_ids: Sequence[int], parts: Sequence[Any]) -> None:
        """Writes what is named so, whose bytes are those of the buffers `parts`, to an empty file. Raises OSError."""
        parts = [self._header(name, token_ids), *parts]
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        parts.append(digest.digest())
        num_written = sum(os.writev(fd, parts[at : at + _MAX_PARTS]) for at in range(0, len(parts), _MAX_PARTS))
        if num_written != self.file_bytes:
            raise OSError(f"only {num_written} of {self.file_bytes} bytes were written")

    def read(self, path: str, name: bytes, token_ids: Sequence[int]) -> memoryview:
        """Returns the bytes of what is named so. Raises DamagedFileError unless the file holds it, and OSError."""
        header = self._header(name, token_ids)
        content = memoryview(bytearray(self.file_bytes))
        fd = os.open(path, _READ_FLAGS)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size != len(content):
                raise DamagedFileError("its size is wrong")
            if os.readv(fd, [content]) != len(content):
                raise DamagedFileError("its end is missing")
        finally:
            os.close(fd)
        if content[: len(header)] != header:
            raise DamagedFileError("it is of another block")
        if hashlib.sha256(content[:-_DIGEST_BYTES]).digest() != content[-_DIGEST_BYTES:]:
            raise DamagedFileError("its checksum is wrong")
        return content[len(header) : -_DIGEST_BYTES]

    def _header(self, name: bytes, token_ids: Sequence[int]) -> bytes:
        return self._beginning + name + array("q", token_ids).tobytes()
