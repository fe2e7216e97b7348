"""Engines whose ranks are threads of this process, which share memory as processes do: they start at once."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest

from engine.assembly import assemble
from engine.core.config import EngineConfig
from engine.engine import Engine
from engine.kernels import load_kernels
from engine.model.drafting import eagle_head, mtp_head
from engine.model.loading import weights
from engine.model.setup import ReadyModel, load_model_runner, load_ready_model
from engine.ranks.leader import Leader
from engine.ranks.memory import new_memory, open_group
from engine.ranks.messages import RankMessage
from engine.ranks.rank import serve
from engine.weights.rank_group import RankGroup


def groups(size: int) -> list[RankGroup]:
    """Returns the group of each rank, over new memory."""
    memory = new_memory(size)
    try:
        return [open_group(memory, rank, size) for rank in range(size)]
    finally:
        os.close(memory)


def together(ranks: Sequence[RankGroup], run: Callable[[RankGroup], Any]) -> list[Any]:
    """Runs all ranks at once, each in a thread of its own."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, ranks))


class _Link:
    """The end of a link that a rank reads."""

    def __init__(self) -> None:
        self.sent: SimpleQueue[bytes | None] = SimpleQueue()

    def recv_bytes(self) -> bytes:
        data = self.sent.get()
        if data is None:
            raise EOFError
        return data


class RankThreads:
    """All ranks but the first, as threads."""

    def __init__(self, config: EngineConfig) -> None:
        size = config.tensor_parallel_size
        self.config = config
        self.errors: list[Exception] = []
        self.ready: dict[int, ReadyModel] = {}
        self.loaded = threading.Semaphore(0)
        load_kernels()
        self.group, *others = groups(size)
        self._links = [_Link() for _ in others]
        self._threads = [
            threading.Thread(target=self._run, args=(group, link), daemon=True)
            for group, link in zip(others, self._links, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, group: Any, link: Any) -> None:
        try:
            self.ready[group.rank] = load_ready_model(self.config, group)
            self.loaded.release()
            serve(link, self.ready[group.rank])
        except EOFError:
            pass
        except Exception as error:
            self.errors.append(error)
            group.exchange.abort()

    @property
    def leader(self) -> Leader:
        return Leader(self._tell)

    def _tell(self, message: RankMessage) -> None:
        for link in self._links:
            link.sent.put(msgspec.msgpack.encode(message))

    def close(self) -> None:
        for link in self._links:
            link.sent.put(None)
        for thread in self._threads:
            thread.join(30)


@contextmanager
def loading_one_by_one() -> Iterator[None]:
    """Has threads take turns in building a module: transformers sets torch's default number format meanwhile."""
    turn = threading.Lock()

    def in_turn(build: Callable[..., Any]) -> Callable[..., Any]:
        def load(*arguments: Any) -> Any:
            with turn:
                return build(*arguments)

        return load

    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (weights, "_load_weights"),
            (mtp_head, "_model_of_one_layer"),
            (eagle_head, "_new_module"),
        ):
            patch.setattr(module, name, in_turn(getattr(module, name)))
        yield


@contextmanager
def engine_on_ranks(path: Path, size: int, **settings: Any) -> Iterator[tuple[Engine, RankThreads | None]]:
    """Yields an engine over so many ranks, and those other than the first, if there are any."""
    # However long steps take, their chunks are the same, and with these the drafts.
    fields = {"device": "cpu", "dtype": "float32", "num_blocks": 64, "num_threads": 1, "target_itl_ms": 1e6, **settings}
    config = EngineConfig(model=str(path), tensor_parallel_size=size, **fields)
    if size == 1:
        runner, info = load_model_runner(config)
        yield assemble(config, info, runner, adapters=runner.adapters), None
        return
    with loading_one_by_one():
        ranks = RankThreads(config)
        try:
            runner, info = load_model_runner(config, ranks.group, ranks.leader)
            assert all([ranks.loaded.acquire(timeout=60) for _ in range(size - 1)]), ranks.errors
            yield assemble(config, info, runner, adapters=runner.adapters), ranks
        finally:
            ranks.close()
            assert not ranks.errors, ranks.errors
