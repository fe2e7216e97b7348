"""Models from the hub: which host is asked for them, and what happens if the hub cannot be reached."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import EntryNotFoundError

from engine.checkpoint.hub import look_for_hub, optional_file
from engine.checkpoint.pinning import pinned
from engine.core.config import EngineConfig
from engine.core.errors import ModelError


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each test an environment of its own, since `look_for_hub` writes to it."""
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower() and "HF_" not in name}
    monkeypatch.setattr(os, "environ", kept)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the hosts that were looked up; none is found."""
    hosts: list[str] = []

    def fail(host: str, *_: Any) -> None:
        hosts.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    return hosts


def test_a_hub_that_cannot_be_found_is_not_asked_again(asked: list[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    look_for_hub("org/model")
    assert os.environ["HF_HUB_OFFLINE"] == "1" and asked == ["huggingface.co"]
    assert "no directory org/model: asking huggingface.co" in caplog.text
    assert "huggingface.co cannot be found (Name or service not known)" in caplog.text


def test_another_hub_is_the_one_looked_for(asked: list[str]) -> None:
    os.environ["HF_ENDPOINT"] = "https://hub.example:8443"
    look_for_hub("org/model")
    assert asked == ["hub.example"]


@pytest.mark.parametrize(("name", "value"), [("HF_HUB_OFFLINE", "0"), ("https_proxy", "http://proxy.example:3128")])
def test_a_setting_of_how_the_hub_is_reached_is_respected(asked: list[str], name: str, value: str) -> None:
    os.environ[name] = value
    look_for_hub("org/model")
    assert asked == [] and os.environ.get("HF_HUB_OFFLINE") in (None, "0")


def test_a_hub_that_is_found_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    look_for_hub("org/model")
    assert "HF_HUB_OFFLINE" not in os.environ


def test_a_directory_has_no_commit(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path))
    assert pinned(config) is config


class TestOptionalFile:
    COMMIT = "1" * 40

    @pytest.fixture
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The cache of org/model's files, while HF_HUB_OFFLINE is set."""
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        for folder in ("snapshots", ".no_exist"):
            (tmp_path / "models--org--model" / folder / self.COMMIT).mkdir(parents=True)
        return tmp_path / "models--org--model"

    @pytest.fixture
    def asked(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The cache of org/model's files, while HF_HUB_OFFLINE is not set and the hub does not answer."""
        monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
        return cache

    def find(self) -> Path | None:
        return optional_file("org/model", self.COMMIT, "extra.json")

    def test_is_taken_where_it_is(self, asked: Path) -> None:
        path = asked / "snapshots" / self.COMMIT / "extra.json"
        path.touch()
        assert self.find() == path

    def test_is_not_missed_where_the_hub_has_answered_that_there_is_none(self, asked: Path) -> None:
        (asked / ".no_exist" / self.COMMIT / "extra.json").touch()
        assert self.find() is None

    def test_may_be_there_where_the_hub_does_not_answer(self, asked: Path) -> None:
        with pytest.raises(ModelError, match=r"extra\.json of org/model cannot be fetched; .* HF_HUB_OFFLINE=1"):
            self.find()

    def test_is_done_without_where_the_hub_must_not_be_asked(
        self, cache: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert self.find() is None
        assert "extra.json of org/model was not downloaded" in caplog.text

    def test_is_none_where_the_hub_has_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise EntryNotFoundError("404")

        monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
        assert self.find() is None

    def test_is_looked_for_in_a_directory(self, tmp_path: Path) -> None:
        assert optional_file(str(tmp_path), None, "extra.json") is None
        (tmp_path / "extra.json").touch()
        assert optional_file(str(tmp_path), None, "extra.json") == tmp_path / "extra.json"
