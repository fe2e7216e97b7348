"""API keys among the settings: errors show none of them, and an empty one does not open the server."""

from pathlib import Path

import pytest

from engine.core.errors import ConfigError
from server.banner import loading_banner
from server.settings.settings import Settings
from tests.server.given_settings import read, write


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("api-key: 8271828\n", "write numbers in quotes"),
        ("api-key: [8271828]\n", "valid string"),
        ("api-key: {a: 8271828}\n", "a list of texts"),
        ("port: 1\napi-key: '8271828\nhost: a\n", "line 2, while scanning a quoted scalar"),
        ("port: 1\napi-key: 8271828: x\n", "line 2, mapping values"),
        ("api-key: *8271828\n", "see line 1"),
        ("api-key: !8271828 x\n", "see line 1"),
        ("api-key: !8271828!8271828 x\n", "see line 1"),
    ],
)
def test_what_is_wrong_about_a_key_shows_nothing_of_it(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        read("--config", write(tmp_path, content))
    message = str(error.value)
    assert words in message and "8271828" not in message and "\n" not in message


@pytest.mark.parametrize("name", ["TWOSTEP_API_KEY", "twostep_api_key"])
@pytest.mark.parametrize("empty", ["", " ", " , "])
def test_an_empty_variable_does_not_open_the_server(name: str, empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, empty)
    with pytest.raises(ConfigError, match="TWOSTEP_API_KEY is empty: leave it out"):
        read()
    assert read("--api-key", "given").api_key == ("given",)


@pytest.mark.parametrize("empty", ["''", "[]"])
def test_nor_does_an_empty_one_in_the_file(empty: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="api-key in the --config file is empty"):
        read("--config", write(tmp_path, f"api-key: {empty}\n"))


def test_white_space_around_keys_of_the_environment_is_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTEP_API_KEY", "a, b ,,\n")
    assert read().api_key == ("a", "b")


@pytest.mark.parametrize(
    ("fields", "address", "warns"),
    [
        ({}, "0.0.0.0", True),
        ({}, "::", True),
        ({}, "192.0.2.1", True),
        ({}, "fe80::1%eth0", True),
        ({}, "127.0.0.1", False),
        ({}, "::1", False),
        ({"api_key": ("secret",)}, "0.0.0.0", False),
        ({"api_keys_file": Path("keys.yaml")}, "0.0.0.0", False),
    ],
)
def test_the_banner_warns_of_an_open_server(fields: dict[str, object], address: str, warns: bool) -> None:
    banner = loading_banner(Settings(**fields), "http://x", address)
    assert ("anyone who can reach" in banner) == warns
