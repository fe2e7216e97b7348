"""The files of a KV store: which there are, and which go when there are too many bytes. No torch.

    DIR/<fingerprint>/<name>

A block is named by its hash, and states by another one.

Other servers may use the directory at the same time, with the same model or with others: files appear under their name
by an atomic rename, their times of change tell when they were last used, and all of them count towards the budget. What
others did is seen when the directory is looked through again, or when it is announced.
"""

import os
import re
import stat
import tempfile
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from engine.core.errors import ConfigError

_TEMPORARY = ".writing-"
_FOLDER = re.compile("[0-9a-f]{32}")  # no other name is looked into, and no other file deleted: see `_look`
_FILE = re.compile("[0-9a-f]{64}")


class _File(NamedTuple):
    num_bytes: int
    used_ns: int
    """Time of its last use, as the file system tells it."""


class StoreDirectory:
    """An index of a KV store's directory, in order of use. It may be asked from any thread; one thread writes, and
    calls `refresh` now and then."""

    def __init__(self, root: Path, fingerprint: str, max_bytes: int) -> None:
        """Opens the directory, made if it does not exist. `fingerprint` is 32 hexadecimal digits. Raises OSError if the
        directory cannot be used."""
        assert _FOLDER.fullmatch(fingerprint)
        self._root = root
        self._own = root / fingerprint
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _File] = OrderedDict()  # by path, least recently used first
        self._num_bytes = 0
        self._hidden: Counter[str] = Counter()  # paths of files to be removed, by how often that was asked for
        self._used: dict[str, None] = {}  # paths whose time of use is not on disk yet
        self._unfinished: set[str] = set()  # temporary files that were there at the last look
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(OSError):  # a read-only file system serves what is there
            self._own.mkdir(mode=0o700, exist_ok=True)
        if os.path.lexists(self._own):
            _check_private(self._own)
        self.refresh()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def path(self, name: bytes) -> str:
        return f"{self._own}/{name.hex()}"

    def num_stored(self, names: Sequence[bytes]) -> int:
        """Returns how many of the first files are there, without a gap."""
        with self._lock:
            for index, name in enumerate(names):
                path = self.path(name)
                if path not in self._files or path in self._hidden:
                    return index
        return len(names)

    def announce(self, names: Sequence[bytes]) -> None:
        """Takes files as there that another server says it has written, the first of them as the last used. Asks
        nothing of the file system: what size they have is seen at the next look, and those that are not there when they
        are read."""
        with self._lock:
            for path in map(self.path, reversed(names)):
                self._files.setdefault(path, _File(0, 0))

    def touch(self, names: Sequence[bytes]) -> None:
        """Makes files the most recently used ones, the first of them above all, where they are there."""
        with self._lock:
            for path in map(self.path, reversed(names)):
                if path in self._files:
                    self._files.move_to_end(path)
                    self._used.pop(path, None)
                    self._used[path] = None

    def add(self, name: bytes, num_bytes: int, write: Callable[[int], None]) -> None:
        """Adds a file of `num_bytes`, which `write` writes to a descriptor. Raises OSError, and then there is none."""
        self._make_room(num_bytes)
        fd, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=self._own)  # with mode 0600
        try:
            try:
                write(fd)
            finally:
                os.close(fd)
            os.rename(temporary, self.path(name))
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        with suppress(OSError):  # another server may have deleted it already
            self._put(self.path(name), _file_of(os.stat(self.path(name))))

    def remove(self, name: bytes) -> None:
        """Forgets a file and deletes it, if it is there and may be deleted."""
        self._delete(self.path(name))

    def forget(self, name: bytes) -> None:
        """Forgets a file that is not there, or not yet."""
        self._forget(self.path(name))

    @property
    def names(self) -> list[bytes]:
        """Names of the files of this fingerprint."""
        with self._lock:
            paths = [path for path in self._files if path.startswith(f"{self._own}/")]
        return [bytes.fromhex(os.path.basename(path)) for path in paths]

    def hide(self, names: Sequence[bytes]) -> None:
        """Takes files as not there, also those that are being added, until `remove_hidden` has removed them."""
        with self._lock:
            self._hidden.update(map(self.path, names))

    def remove_hidden(self, names: Sequence[bytes]) -> None:
        """Removes files that one call of `hide` had; what is added later is there."""
        for name in names:
            self.remove(name)
        with self._lock:
            self._hidden -= Counter(map(self.path, names))

    def refresh(self) -> None:
        """Writes down what was used, looks which files there are, and deletes what is over the budget and what writers
        that died left behind."""
        self.write_times()
        with self._lock:
            known = set(self._files)  # files that others announce meanwhile may be there too late to be seen
        found, unfinished = self._look()
        self._remove_abandoned(unfinished)
        with self._lock:
            gone = known - found.keys()
            changed = [path for path, file in found.items() if self._files.get(path) != file]
        for path in gone:
            self._forget(path)
        for path in sorted(changed, key=lambda path: found[path].used_ns):
            self._put(path, found[path])
        self._make_room(0)

    def _remove_abandoned(self, unfinished: set[str]) -> None:
        """Deletes those of these temporary files that were there at the last look, too: a file takes far less time to
        write than there is between two looks."""
        for path in unfinished & self._unfinished:
            with suppress(OSError):
                os.unlink(path)
        self._unfinished = unfinished

    def _look(self) -> tuple[dict[str, _File], set[str]]:
        """Returns the files by their paths, and the paths of temporary files."""
        found: dict[str, _File] = {}
        unfinished: set[str] = set()
        named = (entry for entry in _entries(self._root) if _FOLDER.fullmatch(entry.name))
        folders = (entry for entry in named if entry.is_dir(follow_symlinks=False))
        for entry in chain.from_iterable(map(_entries, folders)):
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if entry.name.startswith(_TEMPORARY):
                    unfinished.add(entry.path)
                elif _FILE.fullmatch(entry.name) and stat.S_ISREG(status.st_mode):
                    found[entry.path] = _file_of(status)
        return found, unfinished

    def write_times(self) -> None:
        """Writes down which files were used, for other servers and for the next start."""
        with self._lock:
            used, self._used = self._used, {}
        for path in used:
            with suppress(OSError):
                os.utime(path)
                file = _file_of(os.stat(path))
                self._resize(path, file)

    def _make_room(self, num_bytes: int) -> None:
        """Deletes the least recently used files until `num_bytes` more are within the budget."""
        while True:
            with self._lock:
                if not self._files or self._num_bytes + num_bytes <= self._max_bytes:
                    return
                path = next(iter(self._files))
            self._delete(path)

    def _put(self, path: str, file: _File) -> None:
        self._forget(path)
        with self._lock:
            self._num_bytes += file.num_bytes
            self._files[path] = file

    def _resize(self, path: str, file: _File) -> None:
        """Takes over what was found of a file that is known, in its place: others may have been used since."""
        with self._lock:
            if known := self._files.get(path):
                self._num_bytes += file.num_bytes - known.num_bytes
                self._files[path] = file

    def _forget(self, path: str) -> None:
        with self._lock:
            file = self._files.pop(path, None)
            self._num_bytes -= file.num_bytes if file else 0

    def _delete(self, path: str) -> None:
        self._forget(path)
        with suppress(OSError):
            os.unlink(path)


def check_store(path: str) -> None:
    """Raises ConfigError unless the path is a directory that can be read, or can be made one."""
    try:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        os.listdir(path)
    except OSError as error:
        raise ConfigError(f"The KV store {path} cannot be used: {error.strerror}.") from error


def _check_private(folder: Path) -> None:
    """Takes away others' rights to the folder. Raises PermissionError if it is not this user's, who alone must be able
    to put files there."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is not a directory of this user")
    if status.st_mode & 0o077:
        folder.chmod(0o700)


def _file_of(status: os.stat_result) -> _File:
    return _File(status.st_size, status.st_mtime_ns)


def _entries(folder: Path | os.DirEntry[str]) -> Iterator[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(folder) as entries:
        yield from entries
