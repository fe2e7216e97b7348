"""A file of any size is memory, also one that is larger than all memory there is."""

import os
from pathlib import Path

import pytest
import torch

from engine.host.mapped_file import MappedFile, paging_bytes_per_s


def test_a_file_that_is_larger_than_memory_is_mapped(tmp_path: Path) -> None:
    size = 4 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with (tmp_path / "file").open("wb") as file:
        file.truncate(size)  # a hole
        file.seek(size - 8)
        file.write(bytes(range(8)))
    mapped = MappedFile(tmp_path / "file")
    assert mapped.bytes_of(0, 2) == b"\0\0"
    assert mapped.tensor(size - 8, (2, 4), torch.uint8).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mapped.tensor(3, (0, 5), torch.float32).shape == (0, 5)
    with pytest.raises(ValueError, match="buffer"):
        mapped.tensor(size - 8, (3,), torch.float32)


def test_what_is_written_to_a_mapped_file_stays_here(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345678")
    MappedFile(tmp_path / "file").tensor(0, (8,), torch.uint8).zero_()
    assert (tmp_path / "file").read_bytes() == b"12345678"


def test_pages_of_files_of_any_size_have_a_speed(tmp_path: Path) -> None:
    for num_bytes in (1, 5000, 40 << 20):
        (tmp_path / "file").write_bytes(b"x" * num_bytes)
        assert paging_bytes_per_s(tmp_path / "file") > 0
