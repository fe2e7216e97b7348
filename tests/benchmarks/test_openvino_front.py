"""The engine thread of the OpenVINO front, with a fake pipeline: requests of disconnected clients are cancelled."""

import argparse
import asyncio
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.peers import openvino_front
from benchmarks.peers.openvino_front import Answer, Pipeline

OPTIONS = argparse.Namespace(model=Path(), cache_gb=1, batch_tokens=8, threads=1, precision="f32")
LOOP: Any = SimpleNamespace(call_soon_threadsafe=lambda act, *values: act(*values))


@dataclass
class Handle:
    status: str = "running"

    def can_read(self) -> bool:
        return False

    def get_status(self) -> str:
        return self.status

    def cancel(self) -> None:
        self.status = "cancelled"


class Engine:
    """A fake pipeline that runs one of the test's functions at each step, and raises StopIteration after the last."""

    def __init__(self, *steps: Any) -> None:
        self.handles: list[Handle] = []
        self._steps = iter(steps)

    def add_request(self, *_: Any) -> Handle:
        self.handles.append(Handle())
        return self.handles[-1]

    def step(self) -> None:
        next(self._steps)()


def pipeline_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    genai = SimpleNamespace(
        SchedulerConfig=SimpleNamespace,
        GenerationConfig=SimpleNamespace,
        GenerationStatus=SimpleNamespace(RUNNING="running"),
        ContinuousBatchingPipeline=lambda *_: engine,
    )
    others = SimpleNamespace(Tensor=list, array=lambda values, dtype: values)
    monkeypatch.setattr(openvino_front, "import_module", lambda name: {"openvino_genai": genai}.get(name, others))
    return Pipeline(OPTIONS)


def test_the_request_of_a_disconnected_client_is_cancelled_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    leaving, staying = (Answer([1, 2], 3, asyncio.Queue()) for _ in range(2))
    engine = Engine(lambda: setattr(leaving, "is_disconnected", True), lambda: None, lambda: None)
    pipeline = pipeline_of(engine, monkeypatch)
    pipeline.add(leaving)
    pipeline.add(staying)
    with pytest.raises(StopIteration):
        pipeline.run(LOOP)
    assert [handle.status for handle in engine.handles] == ["cancelled", "running"]
    assert leaving.tokens.get_nowait() is None and leaving.tokens.empty()
    assert staying.tokens.empty()
