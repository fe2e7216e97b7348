"""The budget holds, what is used stays, nobody else can look, and no other file is touched."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.errors import ConfigError
from engine.kv_store.directory import StoreDirectory, check_store

MINE, THEIRS = "a" * 32, "b" * 32


def name_of(index: int) -> bytes:
    return index.to_bytes(32, "big")


def directory(root: Path, max_bytes: int = 100, fingerprint: str = MINE) -> StoreDirectory:
    return StoreDirectory(root, fingerprint, max_bytes)


def add(to: StoreDirectory, *indices: int, num_bytes: int = 10) -> None:
    for index in indices:
        to.add(name_of(index), num_bytes, lambda fd: os.ftruncate(fd, num_bytes))


def stored(in_: StoreDirectory, indices: range = range(100)) -> set[int]:
    return {index for index in indices if in_.num_stored([name_of(index)])}


def on_disk(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_what_is_added_is_found_now_and_by_the_next(tmp_path: Path) -> None:
    first = directory(tmp_path)
    add(first, 1, 2)
    assert stored(first) == stored(directory(tmp_path)) == {1, 2}
    assert first.num_bytes == directory(tmp_path).num_bytes == 20


def test_blocks_are_counted_up_to_the_first_that_lacks(tmp_path: Path) -> None:
    mine = directory(tmp_path)
    add(mine, 0, 1, 3)
    assert mine.num_stored([name_of(index) for index in range(5)]) == 2
    assert mine.num_stored([name_of(4), name_of(0)]) == 0
    assert mine.num_stored([]) == 0


def test_what_another_server_announces_is_stored_until_a_look_tells_otherwise(tmp_path: Path) -> None:
    mine, theirs = directory(tmp_path), directory(tmp_path)
    add(theirs, 1)
    assert stored(mine) == set()
    mine.announce([name_of(1), name_of(2)])
    assert stored(mine) == {1, 2} and mine.num_bytes == 0
    mine.refresh()
    assert stored(mine) == {1} and mine.num_bytes == 10
    mine.announce([name_of(1)])
    assert mine.num_bytes == 10


def test_what_is_announced_and_used_before_a_look_counts_once(tmp_path: Path) -> None:
    mine, theirs = directory(tmp_path), directory(tmp_path)
    add(theirs, 1)
    mine.announce([name_of(1)])
    mine.touch([name_of(1)])
    mine.write_times()
    assert mine.num_bytes == 10
    mine.refresh()
    assert mine.num_bytes == 10
    mine.remove(name_of(1))
    assert mine.num_bytes == 0


def test_what_is_announced_while_it_looks_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = directory(tmp_path), directory(tmp_path)
    look = StoreDirectory._look

    def look_too_early(self: StoreDirectory) -> Any:
        found = look(self)
        add(theirs, 1)
        mine.announce([name_of(1)])
        return found

    monkeypatch.setattr(StoreDirectory, "_look", look_too_early)
    mine.refresh()
    assert stored(mine) == {1}


def test_of_what_is_announced_the_first_block_makes_room_last(tmp_path: Path) -> None:
    mine, theirs = directory(tmp_path, max_bytes=40), directory(tmp_path)
    add(mine, 0)
    add(theirs, 1, 2)
    mine.announce([name_of(1), name_of(2)])
    add(mine, 3, num_bytes=31)
    assert stored(mine) == {1, 2, 3}


def test_only_the_owner_may_look(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        add(directory(tmp_path / "new"), 1)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new", tmp_path / "new" / MINE)}
    assert modes == {0o700}
    assert stat.S_IMODE((tmp_path / "new" / MINE / name_of(1).hex()).stat().st_mode) == 0o600


def test_others_rights_to_what_is_there_are_taken_away(tmp_path: Path) -> None:
    (tmp_path / MINE).mkdir()
    (tmp_path / MINE).chmod(0o755)
    directory(tmp_path)
    assert stat.S_IMODE((tmp_path / MINE).stat().st_mode) == 0o700


def test_a_link_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / MINE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError):
        directory(tmp_path)


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    mine = directory(tmp_path, max_bytes=30)
    add(mine, 1, 2, 3)
    mine.touch([name_of(1)])
    add(mine, 4)
    assert stored(mine) == {1, 3, 4} and mine.num_bytes == 30


def test_a_prefix_outlives_its_continuations(tmp_path: Path) -> None:
    mine = directory(tmp_path, max_bytes=30)
    add(mine, 1, 2, 3)
    mine.touch([name_of(index) for index in (1, 2, 3)])
    add(mine, 4, 5)
    assert stored(mine) == {1, 4, 5}


def test_use_is_remembered_by_the_next(tmp_path: Path) -> None:
    first = directory(tmp_path, max_bytes=30)
    add(first, 1, 2, 3)
    for index in (1, 2, 3):
        os.utime(first.path(name_of(index)), (index, index))
    first.refresh()
    first.touch([name_of(1)])
    first.write_times()
    second = directory(tmp_path, max_bytes=30)
    add(second, 4)
    assert stored(second) == {1, 3, 4}


def test_too_large_a_store_shrinks_when_it_is_opened(tmp_path: Path) -> None:
    add(directory(tmp_path), *range(10))
    assert directory(tmp_path, max_bytes=30).num_bytes == 30
    assert len(on_disk(tmp_path)) == 3


def test_what_other_servers_did_is_seen(tmp_path: Path) -> None:
    mine, theirs = directory(tmp_path), directory(tmp_path)
    add(mine, 1)
    add(theirs, 2)
    theirs.refresh()
    theirs.remove(name_of(1))
    mine.refresh()
    assert stored(mine) == stored(theirs) == {2} and mine.num_bytes == 10


def test_a_file_that_another_server_uses_is_used(tmp_path: Path) -> None:
    mine = directory(tmp_path, max_bytes=30)
    add(mine, 1, 2, 3)
    os.utime(mine.path(name_of(1)), (2**31, 2**31))
    mine.refresh()
    add(mine, 4)
    assert stored(mine) == {1, 3, 4}


def test_other_models_files_count_and_go_too(tmp_path: Path) -> None:
    theirs = directory(tmp_path, fingerprint=THEIRS)
    add(theirs, 1, 2)
    mine = directory(tmp_path, max_bytes=30)
    assert stored(mine) == set() and mine.num_bytes == 20
    add(mine, 3, 4)
    assert mine.num_bytes == 30 and len(on_disk(tmp_path)) == 3 and stored(mine) == {3, 4}


def test_no_other_file_is_touched(tmp_path: Path) -> None:
    others = ["letter", "photos/cat", f"{MINE}/notes", f"photos/{name_of(1).hex()}"]
    for name in others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(1000))
    mine = directory(tmp_path, max_bytes=10)
    add(mine, 1, 2)
    mine.remove_hidden(mine.names)
    mine.refresh()
    assert on_disk(tmp_path) == set(others)


def test_clearing_leaves_other_models_alone(tmp_path: Path) -> None:
    mine, theirs = directory(tmp_path), directory(tmp_path, fingerprint=THEIRS)
    add(mine, 1)
    add(theirs, 2)
    mine.refresh()
    mine.hide(mine.names)
    assert stored(mine) == set() and mine.num_bytes == 20
    mine.remove_hidden([name_of(1)])
    assert on_disk(tmp_path) == {f"{THEIRS}/{name_of(2).hex()}"} and mine.num_bytes == 10


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    mine = directory(tmp_path)

    def fail(fd: int) -> None:
        os.write(fd, b"half")
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        mine.add(name_of(1), 10, fail)
    assert on_disk(tmp_path) == set() and stored(mine) == set() and mine.num_bytes == 0


def test_what_a_writer_that_died_left_behind_goes_at_the_second_look(tmp_path: Path) -> None:
    mine = directory(tmp_path)
    left = tmp_path / MINE / ".writing-x"
    left.write_bytes(b"half")
    mine.refresh()
    assert left.exists(), "its writer may be alive"
    mine.refresh()
    assert not left.exists()


def test_a_path_that_cannot_be_a_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="KV store"):
        check_store(str(tmp_path / "file"))


@given(st.lists(st.tuples(st.sampled_from(["add", "touch", "remove", "refresh"]), st.integers(0, 7)), max_size=40))
@settings(max_examples=60, deadline=None)
def test_the_index_is_what_is_on_disk(tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int]]) -> None:
    """In order of use: the model is a list, least recently used first."""
    mine, expected = directory(tmp_path_factory.mktemp("store"), max_bytes=40), []
    for action, index in actions:
        if action == "add" and index not in expected:
            add(mine, index)
            expected = [*expected, index][-4:]
        elif action == "touch" and index in expected:
            mine.touch([name_of(index)])
            expected = [*(each for each in expected if each != index), index]
        elif action == "remove":
            mine.remove(name_of(index))
            expected = [each for each in expected if each != index]
        elif action == "refresh":
            mine.refresh()
        assert stored(mine) == set(expected) and mine.num_bytes == 10 * len(expected) <= 40
