"""A model that is no directory here: where it is looked for, and what happens where the hub is not there."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.hub import look_for_hub, pinned


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that `look_for_hub` may write to."""
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower() and "HF_" not in name}
    monkeypatch.setattr(os, "environ", kept)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hosts that were looked up; none is found."""
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
def test_who_said_how_it_is_reached_is_believed(asked: list[str], name: str, value: str) -> None:
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
