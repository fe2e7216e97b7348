"""What Ollama's API tells of the model that is served, and what it would do with others."""

from typing import Any

import pytest

from server.protocol.ollama import LoadedModels, ModelDescription, OllamaModels
from tests.server.fake_engine import INFO
from tests.server.live_server import FakeBackend, LiveServer, live_server


def test_the_models_names_are_listed(server: LiveServer) -> None:
    body = server.client.get("/api/tags").json()
    [model] = OllamaModels.model_validate(body).models
    assert model.name == model.model == "fake" and model.size == INFO.weight_bytes
    assert model.modified_at == "2023-11-14T22:13:20Z" and len(model.digest) == 64
    assert model.details.family == INFO.architecture and model.details.quantization_level == INFO.dtype


def test_what_is_loaded_stays(server: LiveServer) -> None:
    [model] = LoadedModels.model_validate(server.client.get("/api/ps").json()).models
    assert model.context_length == INFO.max_model_len and model.expires_at > "2300"
    assert (model.size, model.size_vram) == (INFO.weight_bytes + INFO.kv_cache_bytes, 0)


def test_adapters_are_listed_with_their_parent() -> None:
    backend = FakeBackend()
    with live_server(backend, allow_runtime_lora_updating=True, served_model_name=["base"]) as server:
        server.post_json("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": "/x"})
        base, mine = server.client.get("/api/tags").json()["models"]
        assert (mine["name"], mine["details"]["parent_model"]) == ("mine", "base")
        assert base["details"]["parent_model"] == "" and base["digest"] != mine["digest"]
        assert server.ollama("Hi", model="mine").json()["model"] == "mine"
        assert server.engine.requests[-1].adapter


@pytest.mark.parametrize("field", ["model", "name"])
def test_show_tells_the_context_and_the_defaults(server: LiveServer, field: str) -> None:
    body = server.post_json("/api/show", {field: "fake:latest"}).json()
    shown = ModelDescription.model_validate(body)
    assert shown.model_info[f"{shown.model_info['general.architecture']}.context_length"] == INFO.max_model_len
    assert "temperature 1.0" in shown.parameters.splitlines()


def test_show_tells_what_the_model_can_do(server: LiveServer, agent: LiveServer) -> None:
    def capabilities(of: LiveServer) -> Any:
        return of.post_json("/api/show", {}).json()["capabilities"]

    assert capabilities(server) == ["completion"]
    assert capabilities(agent) == ["completion", "tools", "thinking"]
    with live_server(FakeBackend(chat_templates={})) as bare:
        assert capabilities(bare) == ["completion"]


def test_the_tag_that_clients_add_is_no_other_model(server: LiveServer) -> None:
    assert server.ollama("Hi", model="fake:latest").json()["model"] == "fake"
    for wrong in ("fake:8b", "other:latest", ":latest"):
        refused = server.ollama("Hi", model=wrong)
        assert refused.status_code == 404 and wrong.removesuffix(":latest") in refused.json()["error"]
    with live_server(served_model_name=["m:latest"]) as tagged:
        assert tagged.ollama("Hi", model="m:latest").json()["model"] == "m:latest"


def test_the_version_is_that_of_the_api(server: LiveServer) -> None:
    assert server.client.get("/api/version").json()["version"].count(".") == 2


@pytest.mark.parametrize("name", ["pull", "push", "create", "copy"])
def test_what_it_does_with_other_models_is_refused(server: LiveServer, name: str) -> None:
    refused = server.post_json(f"/api/{name}", {"model": "x"})
    assert refused.status_code == 400 and refused.json()["error"].startswith(f"/api/{name} is not supported: ")
    assert server.client.request("DELETE", "/api/delete", json={"model": "x"}).status_code == 400
