"""Adapters in the whole product: named, loaded and unloaded over HTTP, and loaded again when the engine dies."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from torch import nn

from engine import embedded_model
from tests.engine.tiny_adapters import make_adapter
from tests.engine.tiny_models import load_reference
from tests.soak.adapters import run
from tests.soak.server import ServerProcess, eventually, running_server

EMBEDDED = Path(next(iter(embedded_model.__path__)))


def answer(server: ServerProcess, model: str) -> Any:
    fields = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    return server.complete(prompt="The list of all", model=model, **fields)["choices"]


def post(server: ServerProcess, verb: str, **fields: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{verb}_lora_adapter", json=fields, timeout=60)


def restart_engine(server: ServerProcess) -> None:
    server.kill_engine()
    assert eventually(lambda: server.metrics()["twostep_engine_restarts_total"] == 1, within_s=120)


@pytest.mark.slow
def test_adapters_are_served_by_name_and_outlive_the_engine(tmp_path: Path) -> None:
    model = load_reference(EMBEDDED)
    names = {name.rpartition(".")[2] for name, module in model.model.named_modules() if isinstance(module, nn.Linear)}
    targets = sorted(names - {"lm_head"})
    a, b, c = (make_adapter(tmp_path / name, model, ord(name), 0.05, target_modules=targets) for name in "abc")
    with running_server("--lora", f"a={a}", "--lora", f"c={c}", "--allow-runtime-lora-updating") as server:
        (base,) = {card["id"] for card in httpx.get(f"{server.url}/v1/models").json()["data"] if not card["parent"]}
        assert post(server, "load", lora_name="b", lora_path=str(b)).status_code == 200
        answers = {name: answer(server, name) for name in (base, "a", "b", "c")}
        assert len({json.dumps(each) for each in answers.values()}) == 4
        assert "no directory" in post(server, "load", lora_name="d", lora_path=str(tmp_path / "d")).text
        assert post(server, "unload", lora_name="a").status_code == 200
        (c / "adapter_model.safetensors").write_bytes((b / "adapter_model.safetensors").read_bytes())
        restart_engine(server)
        assert {name: answer(server, name) for name in (base, "b")} == {name: answers[name] for name in (base, "b")}
        cards = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert {card["id"]: card["parent"] for card in cards} == {base: None, "b": base}
        assert post(server, "load", lora_name="a", lora_path=str(a)).status_code == 200
        assert answer(server, "a") == answers["a"]
        assert server.stop() == 0


@pytest.mark.slow
def test_adapters_that_come_and_go_change_no_stream_and_keep_nothing(tmp_path: Path) -> None:
    samples, problems = run(3, 0, tmp_path)
    assert problems == []
    assert len({each.num_fds for each in samples[1:]}) == 1
