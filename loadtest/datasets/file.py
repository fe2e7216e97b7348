"""Reads a file of requests: a JSON array, or JSON objects a line. What is wrong is one sentence that names the line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loadtest.datasets.entries import Dataset, Entry
from loadtest.datasets.forms import entry_of
from loadtest.endpoints import Endpoint
from loadtest.errors import UsageError

_MAX_FILE_BYTES = 2**30
_MAX_LINE_BYTES = 2**24
_MAX_ENTRIES = 1_000_000


def read_dataset(path: str, endpoint: Endpoint, num_wanted: int | None) -> Dataset:
    """Returns the first `num_wanted` requests of a file (None: all of them). Raises UsageError if it cannot be read, if
    a record makes no sense, or if there are not so many."""
    entries: list[Entry] = []
    num_skipped = 0
    for line, record in _records(path):
        entry = _entry(path, line, record, endpoint)
        if entry is None:
            num_skipped += 1
            continue
        _check_arrival(path, line, entry, entries[-1] if entries else entry)
        entries.append(entry)
        if len(entries) == num_wanted:
            break
        if len(entries) > _MAX_ENTRIES:
            raise UsageError(f"{path}: more than {_MAX_ENTRIES:,} requests (--requests takes the first)")
    if len(entries) < (num_wanted or 1):
        raise UsageError(f"{path} has {len(entries)} requests, too few for --requests {num_wanted or 1}")
    return Dataset(path, tuple(entries), num_skipped)


def _entry(path: str, line: int, record: Any, endpoint: Endpoint) -> Entry | None:
    try:
        return entry_of(record, endpoint)
    except ValueError as error:
        raise UsageError(f"{path}, line {line}: {error}") from None


def _check_arrival(path: str, line: int, entry: Entry, before: Entry) -> None:
    if (entry.arrival_s is None) is not (before.arrival_s is None):
        raise UsageError(f"{path}, line {line}: either all requests have an arrival time or none")
    if entry.arrival_s is not None and entry.arrival_s < (before.arrival_s or 0.0):
        raise UsageError(f"{path}, line {line}: it arrives before the line above")


def _records(path: str) -> Iterator[tuple[int, Any]]:
    """Yields each record with its line."""
    try:
        size = Path(path).stat().st_size
        if size > _MAX_FILE_BYTES:
            raise UsageError(f"{path} is larger than 1 GiB")
        with open(path, "rb") as file:
            is_array = file.read(1024).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
            file.seek(0)
            yield from _of_array(path, file.read()) if is_array else _of_lines(path, file)
    except OSError as error:
        raise UsageError(f"--dataset: cannot read {path}: {error.strerror}") from None


def _of_lines(path: str, file: Any) -> Iterator[tuple[int, Any]]:
    number = 0
    while line := file.readline(_MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > _MAX_LINE_BYTES:
            raise UsageError(f"{path}, line {number}: it is longer than 16 MiB")
        if text := line.strip().removeprefix(b"\xef\xbb\xbf"):
            try:
                yield number, json.loads(text.decode())
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{path}, line {number}: it is not JSON: {_why(error)}") from None


def _of_array(path: str, data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the elements of an array one by one: a parsed file would take many times its size."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}, line {line}: it is not UTF-8") from None
    decoder, place, line, counted = json.JSONDecoder(), text.index("[") + 1, 1, 0
    while True:
        place = _after_space(text, place)
        line, counted = line + text.count("\n", counted, place), place
        if text[place : place + 1] == "]":
            return
        try:
            record, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            at = error.lineno if isinstance(error, json.JSONDecodeError) else line
            raise UsageError(f"{path}, line {at}: it is not JSON: {_why(error)}") from None
        yield line, record
        place = _after_space(text, place)
        if text[place : place + 1] == ",":
            place += 1
        elif text[place : place + 1] != "]":
            at = text.count("\n", 0, place) + 1
            raise UsageError(f"{path}, line {at}: it is not JSON: a comma or the array's end is missing")


def _after_space(text: str, place: int) -> int:
    while text[place : place + 1] in (" ", "\t", "\r", "\n"):
        place += 1
    return place


def _why(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)
