"""Names of adapters outlive engine processes: each later one loads what was loaded, and nothing that was unloaded."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, cast

import pytest

from engine.client.adapter_registry import AdapterRegistry
from engine.core.adapters import AdapterInfo, AdapterSource
from engine.core.errors import AdapterError, EngineUnavailableError
from engine.core.messages import AdapterLoaded, LoadAdapter, UnloadAdapter
from engine.process.supervisor import Supervisor


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        asyncio.run(test(*args, **fixtures))

    return run


def info(path: str, digest: str = "") -> AdapterInfo:
    return AdapterInfo(path, digest or path * 8, rank=4, num_bytes=100)


class FakeSupervisor:
    """Keeps what it is told, and answers when a test says so."""

    def __init__(self, **adapters: AdapterInfo) -> None:
        self.is_up = True
        self.adapters = adapters
        self.sources: tuple[AdapterSource, ...] = ()
        self.sent: list[Any] = []

    def send(self, message: object) -> None:
        self.sent.append(message)

    def set_adapters(self, sources: tuple[AdapterSource, ...]) -> None:
        self.sources = sources


def registry_of(supervisor: FakeSupervisor) -> AdapterRegistry:
    registry = AdapterRegistry(cast(Supervisor, supervisor))
    registry.engine_has_started()
    return registry


async def load(registry: AdapterRegistry, name: str, answer: AdapterLoaded) -> AdapterInfo:
    loading = asyncio.create_task(registry.load(name, answer.path))
    await asyncio.sleep(0.01)
    registry.on_answer(answer)
    return await loading


@in_a_loop
async def test_what_was_loaded_with_the_model_is_loaded_again_and_must_be_the_same() -> None:
    supervisor = FakeSupervisor(a=info("/a"))
    registry = registry_of(supervisor)
    assert registry.loaded == {"a": info("/a")}
    assert supervisor.sources == (AdapterSource("a", "/a", info("/a").digest),)


@in_a_loop
async def test_an_adapter_that_is_loaded_later_is_loaded_again_too() -> None:
    supervisor = FakeSupervisor(a=info("/a"))
    registry = registry_of(supervisor)
    assert await load(registry, "b", AdapterLoaded("/b", info("/b"))) == info("/b")
    assert supervisor.sent == [LoadAdapter("/b")]
    assert [each.name for each in supervisor.sources] == ["a", "b"] and registry.loaded["b"] == info("/b")


@in_a_loop
async def test_an_adapter_that_cannot_be_loaded_gets_no_name() -> None:
    registry = registry_of(supervisor := FakeSupervisor())
    with pytest.raises(AdapterError, match=r"^it is damaged\.$"):
        await load(registry, "b", AdapterLoaded("/b", error="it is damaged."))
    assert not registry.loaded and supervisor.sources == ()


@in_a_loop
async def test_a_name_is_given_once() -> None:
    registry = registry_of(FakeSupervisor(a=info("/a")))
    with pytest.raises(AdapterError, match="'a' is loaded already"):
        await registry.load("a", "/b")
    answer = AdapterLoaded("/b", info("/b"))
    loading = [asyncio.create_task(registry.load("b", "/b")) for _ in range(2)]
    for _ in range(2):
        await asyncio.sleep(0.01)
        registry.on_answer(answer)
    first, second = await asyncio.gather(*loading, return_exceptions=True)
    assert first == info("/b") and isinstance(second, AdapterError)


@in_a_loop
async def test_unloading_tells_the_engine_unless_another_name_means_the_same() -> None:
    supervisor = FakeSupervisor(a=info("/a", "same"), b=info("/b", "same"))
    registry = registry_of(supervisor)
    registry.unload("a")
    assert supervisor.sent == [] and [each.name for each in supervisor.sources] == ["b"]
    registry.unload("b")
    assert supervisor.sent == [UnloadAdapter("same")] and supervisor.sources == () and not registry.loaded


@pytest.mark.parametrize(
    ("loaded", "unloaded"),
    [
        (AdapterLoaded("/b", info("/b", "same")), []),
        (AdapterLoaded("/b", info("/b", "other")), [UnloadAdapter("same")]),
        (AdapterLoaded("/b", error="it is damaged."), [UnloadAdapter("same")]),
        (None, [UnloadAdapter("same")]),
    ],
    ids=["the same", "another", "none", "the engine dies"],
)
@in_a_loop
async def test_what_loses_its_name_while_another_is_loaded_stays_if_it_is_the_same(
    loaded: AdapterLoaded | None, unloaded: list[UnloadAdapter]
) -> None:
    registry = registry_of(supervisor := FakeSupervisor(a=info("/a", "same")))
    loading = asyncio.create_task(registry.load("b", "/b"))
    await asyncio.sleep(0.01)
    registry.unload("a")
    assert supervisor.sent == [LoadAdapter("/b")] and not registry.loaded
    if loaded is None:
        registry.engine_is_down()
    else:
        registry.on_answer(loaded)
    await asyncio.gather(loading, return_exceptions=True)
    assert supervisor.sent[1:] == unloaded
    assert [*registry.loaded] == (["b"] if loaded is not None and loaded.info else [])


@in_a_loop
async def test_a_caller_that_leaves_changes_nothing() -> None:
    registry = registry_of(FakeSupervisor())
    loading = asyncio.create_task(registry.load("b", "/b"))
    await asyncio.sleep(0.01)
    loading.cancel()
    await asyncio.sleep(0.01)
    registry.on_answer(AdapterLoaded("/b", info("/b")))
    await asyncio.sleep(0.01)
    assert [*registry.loaded] == ["b"]


@in_a_loop
async def test_an_engine_that_dies_or_is_down_loads_nothing() -> None:
    registry = registry_of(supervisor := FakeSupervisor())
    loading = asyncio.create_task(registry.load("b", "/b"))
    await asyncio.sleep(0.01)
    registry.engine_is_down()
    with pytest.raises(EngineUnavailableError, match="died"):
        await loading
    supervisor.is_up = False
    with pytest.raises(EngineUnavailableError, match="No engine is up"):
        await registry.load("b", "/b")


@in_a_loop
async def test_after_a_restart_names_mean_what_they_meant_or_nothing(caplog: pytest.LogCaptureFixture) -> None:
    supervisor = FakeSupervisor(kept=info("/kept"), gone=info("/gone"), other=info("/other"), late=info("/late"))
    registry = registry_of(supervisor)
    registry.engine_is_down()
    registry.unload("late")  # the process that is being started knows nothing of that
    supervisor.sent.clear()
    supervisor.adapters = {"kept": info("/kept"), "other": info("/other", "new"), "late": info("/late")}
    registry.engine_is_up()
    assert registry.loaded == {"kept": info("/kept")}
    assert supervisor.sent == [UnloadAdapter("new"), UnloadAdapter(info("/late").digest)]
    assert "the adapter gone is gone" in caplog.text and "the adapter other is gone" in caplog.text
    assert [each.name for each in supervisor.sources] == ["kept"]
