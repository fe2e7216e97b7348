"""The application on Ray Serve but for its gateway, without a Ray that runs: replicas, request router, autoscaling."""

import asyncio
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

pytest.importorskip("ray", reason="pip install -e '.[ray]' brings Ray Serve")
pytestmark = pytest.mark.slow

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, while it is imported
    from deploy.ray import app
    from deploy.ray.autoscaling import ByWaitingTokens
    from deploy.ray.replica import Replica
    from deploy.ray.request_router import PolicyRequestRouter
    from deploy.ray.settings import ClusterSettings

from server.routing.policies import new_policy  # noqa: E402
from server.routing.prompt_digests import prompt_of_tokens  # noqa: E402
from server.routing.recording import RecordingPolicy, replay  # noqa: E402


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_replica_whose_server_ends_ends_itself(monkeypatch: pytest.MonkeyPatch, is_wanted: bool) -> None:
    """So that no request is sent to it any more; but for one that is being taken away."""
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    replica = object.__new__(Replica)
    replica._process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], text=True)
    replica._is_wanted = True
    if is_wanted:
        replica._process.kill()
    else:
        replica.__del__()
    replica._end_with_server()
    assert exits == [1] * is_wanted


class TestRequestRouter:
    def router(self, *names: str, **stats: tuple[int, int]) -> Any:
        """A router that knows these replicas, without what Ray adds to it."""
        router = object.__new__(PolicyRequestRouter)
        router.initialize_state("prefix-aware")
        self.replicas = [
            SimpleNamespace(
                replica_id=SimpleNamespace(unique_id=name),
                routing_stats=dict(zip(("waiting_tokens", "requests_running"), stats.get(name, ()), strict=False)),
            )
            for name in names
        ]
        return router

    def choose(self, router: Any, **asked: Any) -> list[list[str]]:
        request = SimpleNamespace(kwargs=asked)
        ranks = asyncio.run(router.choose_replicas(self.replicas, request))
        return [[replica.replica_id.unique_id for replica in rank] for rank in ranks]

    def known(self, monkeypatch: pytest.MonkeyPatch, *names: str, **stats: tuple[int, int]) -> Any:
        router = self.router(*names, **stats)
        monkeypatch.setattr("ray.serve.request_router.RequestRouter.update_replicas", lambda *_: None)
        router.update_replicas(self.replicas)
        return router

    def test_decisions_are_recorded_where_a_directory_is_named(self, tmp_path: Path) -> None:
        for _ in range(2):
            router = PolicyRequestRouter.__new__(PolicyRequestRouter)
            router.initialize_state("least-loaded", str(tmp_path / "new"))
            router._policy.add("r")
            assert router._policy.choose(prompt_of_tokens([1], "")) == "r"
            assert isinstance(router._policy, RecordingPolicy)
            router._policy._file.close()
        files = list((tmp_path / "new").iterdir())
        assert [replay(each.read_text().splitlines()).num_decisions for each in files] == [1, 1]

    def test_the_policys_choice_comes_first_and_all_others_behind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        router = self.known(monkeypatch, "a", "b", "c", a=(500, 0), b=(0, 0), c=(100, 1))
        assert self.choose(router) == [["b"], ["a", "c"]]

    def test_what_failed_a_request_is_not_asked_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        router = self.known(monkeypatch, "a", "b", b=(500, 0), a=(0, 0))
        assert self.choose(router, excluded=("a",)) == [["b"], ["a"]]
        assert self.choose(router, excluded=("a", "b")) == [["a", "b"]]

    def test_replicas_that_left_are_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        router = self.known(monkeypatch, "a", "b", a=(0, 0), b=(900, 0))
        router.update_replicas(self.replicas[1:])
        self.replicas = self.replicas[1:]
        assert self.choose(router) == [["b"], []]


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ({}, 3),
        ({"waiting_tokens": {"a": 0.0}, "sequences": {"a": 0.0}}, 1),
        ({"waiting_tokens": {"a": 900.0, "b": 101.0}, "sequences": {"a": 1.0}}, 11),
        ({"waiting_tokens": {"a": 0.0}, "sequences": {"a": 4.0, "b": 5.0}}, 3),
    ],
)
def test_replicas_are_as_many_as_what_waits_and_runs_asks_for(reports: dict[str, Any], expected: int) -> None:
    policy = ByWaitingTokens(waiting_tokens=100, sequences=4)
    context = SimpleNamespace(aggregated_metrics=reports, current_num_replicas=3)
    assert policy(context) == (expected, {})


def test_the_application_is_built_of_its_settings() -> None:
    application = app(ClusterSettings(routing="random", max_replicas=7))
    assert application is not None


def test_the_file_for_deploying_has_settings_that_exist() -> None:
    path = Path(__file__).resolve().parents[2] / "deploy" / "ray" / "config.yaml"
    (application,) = yaml.safe_load(path.read_text(encoding="utf-8"))["applications"]
    assert application["import_path"] == "deploy.ray:app"
    ClusterSettings.model_validate(application["args"])


def test_every_routing_that_can_be_named_exists() -> None:
    for name in ClusterSettings.model_fields["routing"].annotation.__args__:
        assert new_policy(name).choose is not None
