"""API keys without a server: the content of their file, new keys, look-up, and the limit of concurrent requests."""

import logging
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.core.errors import ConfigError, OverloadedError
from server.auth.api_keys import NOBODY, ApiKey, new_key, read_keys
from server.auth.key_ring import KeyRing
from server.cli import main
from tests.server.auth.key_files import FILE, HASHES, write


class TestFile:
    def test_each_entry_is_a_key(self, tmp_path: Path) -> None:
        assert read_keys(write(tmp_path)) == [
            ApiKey("alice", bytes.fromhex(HASHES["alice"]), 2.0, 2),
            ApiKey("bob", bytes.fromhex(HASHES["bob"]), 1.0, None),
        ]

    def test_an_empty_one_has_none_and_accepts_no_request(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = write(tmp_path, "# nobody\n")
        ring = KeyRing(path=path)
        assert read_keys(path) == [] and not ring.is_open
        ring.reload()
        warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert warnings == [f"{path} has no API key: nobody is let in; twostep key NAME makes one"] * 2

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ("alice: 3\n", ["alice: it needs fields, of sha256, weight, max-concurrent"]),
            (FILE.replace("alice", "2024"), ["2024: to be a name, it must stand in quotes"]),
            (FILE.replace("alice", "null"), ["None: to be a name"]),
            (FILE.replace("max-concurrent: 2", "max-concurent: 2"), ["max-concurent: ", "did you mean max-concurrent"]),
            (FILE.replace("weight: 2", "zz: 2"), ["alice.zz: ", "there are sha256, weight, max-concurrent"]),
            ("alice: {weight: 2}\n", ["alice.sha256"]),
            (f"alice: {{sha25: {HASHES['bob']}}}\n", ["alice.sha25: ", "did you mean sha256"]),
            (f"alice: {{sha256: {HASHES['bob'][:63]}}}\n", ["alice.sha256"]),
            (f"alice: {{sha256: {HASHES['bob']}x}}\n", ["alice.sha256"]),
            (FILE.replace("weight: 2", "weight: 0"), ["alice.weight", "greater"]),
            (FILE.replace("weight: 2", "weight: .inf"), ["alice.weight"]),
            (FILE.replace("weight: 2", "weigth: 2"), ["alice.weigth"]),
            (FILE.replace("max-concurrent: 2", "max-concurrent: 0"), ["alice.max-concurrent"]),
            (FILE.replace("alice", '"al ice"'), ["al ice"]),
            (FILE.replace("alice", "a" * 65), ["a" * 64]),
            ("- alice\n", ["content"]),
            ("a: [\n", ["not YAML"]),
            (2 * FILE, ["'alice' twice"]),
            (FILE.replace("bob: {", "bob: {weight: 2, weight: 3, "), ["'weight' twice"]),
            ("? [a]\n: 1\n? [b]\n: 2\n", ["not YAML"]),
            ("alice: {sha256: 2024-13-01}\n", ["not YAML"]),
        ],
    )
    def test_what_is_wrong_is_named_and_shows_no_hash(self, tmp_path: Path, content: str, words: list[str]) -> None:
        with pytest.raises(ConfigError) as error:
            read_keys(write(tmp_path, content))
        message = str(error.value)
        assert "\n" not in message and all(word in message for word in ["--api-keys-file", "keys.yaml", *words])
        assert HASHES["bob"][:16] not in message and HASHES["alice"][:16] not in message

    def test_a_missing_one_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="No such file"):
            KeyRing(path=Path("/nowhere/keys.yaml"))

    def test_a_name_is_that_of_one_key(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="default"):
            KeyRing(("one",), write(tmp_path, FILE.replace("bob", "default")))


class TestNewKeys:
    def test_the_command_prints_an_entry_and_apart_from_it_the_key(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["key", "carol"]) == 0
        shown = capsys.readouterr()
        secret = shown.err.split()[-1]
        ring = KeyRing(path=write(tmp_path, FILE + shown.out))
        found = ring.find(secret.encode())
        assert found is not None and found.name == "carol" and secret not in shown.out

    def test_they_cannot_be_guessed(self) -> None:
        secrets = {new_key("carol")[0] for _ in range(100)}
        assert len(secrets) == 100 and all(len(secret) >= 43 for secret in secrets)

    @pytest.mark.parametrize("name", ["2024", "2024-02-30", "null", "yes", "1e3", "carol"])
    def test_names_that_yaml_reads_otherwise_are_quoted(self, name: str, tmp_path: Path) -> None:
        (key,) = read_keys(write(tmp_path, new_key(name)[1]))
        assert key.name == name

    @pytest.mark.parametrize("name", ["", "a b", "a: b", "#", "x" * 65, "-", '"', "a\nb"])
    def test_their_names_are_checked(self, name: str) -> None:
        with pytest.raises(ConfigError, match="cannot name a key"):
            new_key(name)


class TestRing:
    def test_a_key_is_found_by_all_of_it(self, tmp_path: Path) -> None:
        ring = KeyRing(("one", "two"), write(tmp_path))
        names = [found and found.name for found in map(ring.find, (b"one", b"two", b"sk-alice", b"sk-bob"))]
        assert names == ["key-1", "key-2", "alice", "bob"]
        for wrong in (b"", b"on", b"onetwo", b"sk-alic", bytes.fromhex(HASHES["bob"]), HASHES["bob"].encode()):
            assert ring.find(wrong) is None

    def test_one_plain_key_is_the_default(self) -> None:
        found = KeyRing(("one",)).find(b"one")
        assert found is not None and found.name == "default"

    def test_it_is_open_only_without_any(self, tmp_path: Path) -> None:
        rings = [KeyRing(), KeyRing(("one",)), KeyRing(path=write(tmp_path, ""))]
        assert [ring.is_open for ring in rings] == [True, False, False]

    def test_a_file_that_changed_is_in_force_when_read_again(self, tmp_path: Path) -> None:
        ring = KeyRing(("one",), write(tmp_path))
        write(tmp_path, FILE.replace(HASHES["alice"], HASHES["bob"][::-1]))
        assert ring.find(b"sk-alice") is not None
        ring.reload()
        assert ring.find(b"sk-alice") is None and ring.find(b"sk-bob") is not None and ring.find(b"one") is not None

    def test_shares_are_parts_of_all_weights(self, tmp_path: Path) -> None:
        ring = KeyRing(("one",), write(tmp_path))
        found = [ring.find(secret) for secret in (b"one", b"sk-alice", b"sk-bob")]
        assert [key and ring.share_of(key) for key in found] == [0.25, 0.5, 0.25]
        assert ring.share_of(ApiKey("gone", b"", weight=100.0)) == 1.0
        assert KeyRing().share_of(NOBODY) == 1.0

    def test_a_file_that_is_wrong_changes_nothing(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        ring = KeyRing(path=write(tmp_path))
        write(tmp_path, "alice: 3\n")
        with caplog.at_level(logging.ERROR):
            ring.reload()
        assert ring.find(b"sk-alice") is not None and "stay as they were" in caplog.text

    def test_no_key_has_more_under_way_than_it_may(self) -> None:
        ring, key, other = KeyRing(), ApiKey("a", b"", max_concurrent=2), ApiKey("b", b"", max_concurrent=1)
        with ring.under_way(key), ring.under_way(other):
            with (
                ring.under_way(key),
                pytest.raises(OverloadedError, match="'a' may have 2 requests at once"),
                ring.under_way(key),
            ):
                pass
            with ring.under_way(key):
                pass

    def test_nobody_has_no_limit(self) -> None:
        ring = KeyRing()
        with ExitStack() as all_of_them:
            for _ in range(1000):
                all_of_them.enter_context(ring.under_way(NOBODY))


@pytest.mark.parametrize(("one", "other"), [("a", "b"), ("a", "ab"), ("", "a")])
def test_salts_of_two_keys_never_meet(one: str, other: str) -> None:
    salts = ["", "a", "b", "ab"]
    assert not {ApiKey(one, b"").salt(salt) for salt in salts} & {ApiKey(other, b"").salt(salt) for salt in salts}
    assert len({ApiKey(one, b"").salt(salt) for salt in salts}) == 4


@pytest.mark.parametrize("secret", ["", " ", " key", "key\n"])
def test_an_empty_key_and_white_space_around_one_are_refused(secret: str) -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        KeyRing(("one", secret))
