"""Adapters are models to clients: named by requests, listed, and, where that is allowed, loaded and unloaded."""

from collections.abc import Generator
from pathlib import Path

import httpx
import pytest

from engine.core.adapters import AdapterInfo
from engine.core.errors import AdapterError, EngineUnavailableError
from tests.server.auth.key_files import bearer, write
from tests.server.events import error_of
from tests.server.live_server import LiveServer, live_server

INFO = AdapterInfo("/adapters/sql", "ab" * 32, rank=8, num_bytes=2**20)


@pytest.fixture(scope="module")
def running() -> Generator[LiveServer, None, None]:
    with live_server(allow_runtime_lora_updating=True, max_loras=3) as server:
        yield server


@pytest.fixture
def updating(running: LiveServer) -> LiveServer:
    """A server that lets clients load adapters."""
    running.engine.reset()
    return running


def load(server: LiveServer, name: str, path: str = "/adapters/sql", **fields: object) -> httpx.Response:
    return server.client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **fields})


def unload(server: LiveServer, name: str) -> httpx.Response:
    return server.client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def names(server: LiveServer) -> list[str]:
    return [card["id"] for card in server.client.get("/v1/models").json()["data"]]


def test_a_request_that_names_an_adapter_runs_with_it(server: LiveServer) -> None:
    server.engine.adapters.loaded["team/sql"] = INFO
    plain, adapted = server.complete("Hi"), server.complete("Hi", model="team/sql")
    assert [request.adapter for request in server.engine.requests] == ["", INFO.digest]
    assert (plain.json()["model"], adapted.json()["model"]) == ("fake", "team/sql")
    assert plain.json()["system_fingerprint"] != adapted.json()["system_fingerprint"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}),
        ("/v1/embeddings", {"input": ["Hi", "Ho"]}),
    ],
)
def test_every_endpoint_knows_adapters(server: LiveServer, path: str, body: dict[str, object]) -> None:
    server.engine.adapters.loaded["sql"] = INFO
    response = server.client.post(path, json={"model": "sql", **body})
    assert response.status_code == 200 and response.json()["model"] == "sql"
    assert {request.adapter for request in server.engine.requests} == {INFO.digest}


def test_adapters_are_listed_below_their_model(server: LiveServer) -> None:
    server.engine.adapters.loaded["team/sql"] = INFO
    model, adapter = server.client.get("/v1/models").json()["data"]
    assert (model["id"], model["parent"]) == ("fake", None)
    assert (adapter["id"], adapter["parent"], adapter["root"]) == ("team/sql", "fake", "/adapters/sql")
    assert server.client.get("/v1/models/team/sql").json() == adapter
    assert server.client.post("/tokenize", json={"prompt": "Hi", "model": "team/sql"}).status_code == 200


def test_an_adapter_that_is_not_loaded_is_no_model(server: LiveServer) -> None:
    response = server.complete("Hi", model="sql")
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


def test_adapters_come_and_go(updating: LiveServer) -> None:
    response = load(updating, "sql")
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert names(updating) == ["fake", "sql"] and updating.complete("Hi", model="sql").status_code == 200
    response = unload(updating, "sql")
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert names(updating) == ["fake"] and updating.complete("Hi", model="sql").status_code == 404


def test_what_cannot_be_loaded_is_said(updating: LiveServer) -> None:
    updating.engine.adapters.refusals = {
        "/damaged": AdapterError("The adapter /damaged has NaN."),
        "/down": EngineUnavailableError("No engine is up."),
    }
    refused, down = load(updating, "a", "/damaged"), load(updating, "a", "/down")
    assert (refused.status_code, error_of(refused)["message"]) == (400, "The adapter /damaged has NaN.")
    assert down.status_code == 503 and names(updating) == ["fake"]


def test_names_and_numbers_are_checked(updating: LiveServer) -> None:
    assert error_of(load(updating, "fake"))["param"] == "lora_name"
    assert error_of(load(updating, ""))["param"] == "lora_name"
    assert error_of(load(updating, "a", load_inplace=True))["param"] == "load_inplace"
    assert error_of(load(updating, "a", lora_rank=3))["param"] == "lora_rank"
    assert error_of(unload(updating, "nobody"))["code"] == "model_not_found"
    assert [load(updating, name).status_code for name in "abcd"] == [200, 200, 200, 400]


def test_without_the_flag_nothing_is_loaded(server: LiveServer) -> None:
    server.engine.adapters.loaded["sql"] = INFO
    for response in (load(server, "a"), unload(server, "sql")):
        assert response.status_code == 400 and "--allow-runtime-lora-updating" in response.text
    assert names(server) == ["fake", "sql"]


def test_one_of_several_keys_may_load_nothing(tmp_path: Path) -> None:
    with live_server(api_keys_file=write(tmp_path), allow_runtime_lora_updating=True) as server:
        body = {"lora_name": "a", "lora_path": "/a"}
        response = server.client.post("/v1/load_lora_adapter", json=body, headers=bearer("alice"))
        assert response.status_code == 400 and "none of several" in response.text
        assert server.client.post("/v1/load_lora_adapter", json=body).status_code == 401
