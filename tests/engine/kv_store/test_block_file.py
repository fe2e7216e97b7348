"""A file is the block that is looked for, to the last bit, or it is not used."""

import os
from pathlib import Path

import pytest

from engine.kv_store.block_file import BlockFormat, DamagedFileError

HASH, TOKENS = bytes(range(32)), (5, 6)
PARTS = [bytes([7]) * 100, bytes([8]) * 60]
FORMAT = BlockFormat(b"f" * 16, 2, 160)


def write(path: Path, block_format: BlockFormat = FORMAT, parts: list[bytes] = PARTS) -> str:
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    block_format.write(fd, HASH, TOKENS, parts)
    os.close(fd)
    return str(path)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x")
    assert os.stat(path).st_size == FORMAT.file_bytes
    assert FORMAT.read(path, HASH, TOKENS) == b"".join(PARTS)


def test_a_block_of_more_parts_than_a_system_call_takes_is_written(tmp_path: Path) -> None:
    parts = [bytes([index % 256]) for index in range(1500)]
    block_format = BlockFormat(b"f" * 16, 2, 1500)
    assert block_format.read(write(tmp_path / "x", block_format, parts), HASH, TOKENS) == b"".join(parts)


def test_a_file_with_any_bit_flipped_is_damaged(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "x"))
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(DamagedFileError):
            FORMAT.read(str(path), HASH, TOKENS)


@pytest.mark.parametrize("num_bytes", [0, 1, 50, FORMAT.file_bytes - 1, FORMAT.file_bytes + 1])
def test_a_file_of_another_length_is_damaged(tmp_path: Path, num_bytes: int) -> None:
    path = Path(write(tmp_path / "x"))
    path.write_bytes((path.read_bytes() + b"x")[:num_bytes])
    with pytest.raises(DamagedFileError, match="size"):
        FORMAT.read(str(path), HASH, TOKENS)


@pytest.mark.parametrize(
    ("fingerprint", "block_hash", "token_ids"),
    [(b"g" * 16, HASH, TOKENS), (b"f" * 16, bytes(32), TOKENS), (b"f" * 16, HASH, (5, 7))],
    ids=["model", "context", "tokens"],
)
def test_a_file_of_another_block_is_damaged(
    tmp_path: Path, fingerprint: bytes, block_hash: bytes, token_ids: tuple[int, ...]
) -> None:
    path = write(tmp_path / "x")
    with pytest.raises(DamagedFileError, match="another block"):
        BlockFormat(fingerprint, 2, 160).read(path, block_hash, token_ids)


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to(write(tmp_path / "x"))
    for name in ("pipe", "directory", "link"):
        with pytest.raises((DamagedFileError, OSError)):
            FORMAT.read(str(tmp_path / name), HASH, TOKENS)
