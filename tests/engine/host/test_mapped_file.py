"""A file of any size is memory, also one that is larger than all memory there is."""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE, Popen

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


READER = """
import sys
from pathlib import Path
from engine.host.mapped_file import MappedFile
tensor = MappedFile(Path(sys.argv[1]), is_leased=True).tensor(0, (1 << 20,), __import__("torch").uint8)
print("mapped", flush=True)
while True:
    assert tensor.sum() == ord("1") << 20
"""


@pytest.mark.parametrize("change", ["truncate", "write"])
def test_a_process_ends_with_a_sentence_before_its_leased_file_is_changed(tmp_path: Path, change: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1" * (1 << 20))
    with Popen([sys.executable, "-c", READER, path], stdout=PIPE, stderr=PIPE, text=True) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == "mapped\n"
        path.rename(tmp_path / "renamed")  # which changes nothing
        (tmp_path / "renamed").read_bytes()
        if change == "truncate":
            os.truncate(tmp_path / "renamed", 10)
        else:
            (tmp_path / "renamed").write_bytes(b"2" * (1 << 20))
        _, said = reader.communicate(timeout=60)
    assert reader.returncode == 1, said
    assert f"{path}, whose weights are in use, is about to be changed" in said


def test_a_file_is_leased_as_long_as_a_tensor_of_it_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    path = tmp_path / "file"
    path.write_bytes(b"12345678")
    before = signal.getsignal(signal.SIGIO)
    try:
        tensor = MappedFile(path, is_leased=True).tensor(0, (8,), torch.uint8)
        with pytest.raises(BlockingIOError):
            os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        assert codes == [1] and tensor.sum() == sum(b"12345678")
        del tensor
        with path.open("r+b"), pytest.raises(BlockingIOError, match="somebody is writing to it"):
            MappedFile(path, is_leased=True)
        assert codes == [1]
    finally:
        signal.signal(signal.SIGIO, before)


def test_files_that_cannot_be_leased_are_mapped_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345678")
    with ThreadPoolExecutor() as pool:  # signals are handled in the main thread only
        mapped = pool.submit(MappedFile, path, is_leased=True).result()
    assert mapped.bytes_of(0, 2) == b"12"


def test_pages_of_files_of_any_size_have_a_speed(tmp_path: Path) -> None:
    for num_bytes in (1, 5000, 40 << 20):
        (tmp_path / "file").write_bytes(b"x" * num_bytes)
        assert paging_bytes_per_s(tmp_path / "file") > 0
