"""The processes of all ranks but the first, which starts them and cannot go on without any of them."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection, Pipe

import msgspec
import torch

from engine.core.config import EngineConfig
from engine.core.errors import ConfigError, ModelError, ModelMemoryError, TwostepError, UnsupportedModelError
from engine.host.numa import cpus_of_ranks, numa_nodes
from engine.ranks.groups import check_ranks, new_shared_file, open_group_of
from engine.ranks.leader import Leader
from engine.ranks.messages import RankFailure, RankMessage, RankStart
from engine.ranks.rank import EXIT_CANNOT_LOAD
from engine.weights.rank_group import RankGroup

__all__ = ["RankProcesses"]

logger = logging.getLogger(__name__)

_END_GRACE_S = 5.0
_ERRORS: dict[str, type[TwostepError]] = {
    kind.__name__: kind for kind in (ConfigError, ModelError, ModelMemoryError, UnsupportedModelError)
}


def end_alike(exit_code: int) -> None:
    """Ends this process at once, as the rank has ended: by its signal, or with an exit code. Another one takes over its
    requests."""
    if exit_code < 0:
        os.kill(os.getpid(), -exit_code)
    os._exit(1)


class RankProcesses:
    """All ranks of a model but the first, which is in this process. They end when this process does, however that dies,
    and so it does when one of them ends."""

    def __init__(self, config: EngineConfig, on_death: Callable[[int], None] = end_alike) -> None:
        """Starts the processes, which load their part of the model. Raises ConfigError where there can be none."""
        check_ranks(config)
        size = config.tensor_parallel_size
        self._on_death = on_death
        self._is_closing = False
        self._failure: TwostepError | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._ranks: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._group: Future[RankGroup] = Future()  # which on GPUs is there once all ranks are
        self.config = _own_config(config)
        shared = new_shared_file(config)
        try:
            cpus = cpus_of_ranks(size, os.sched_getaffinity(0), numa_nodes())
            self._ranks += [self._start(rank, shared, cpus[rank]) for rank in range(1, size)]
            self._group.set_result(open_group_of(config, shared, 0))
        finally:
            os.close(shared)
        if cpus[0] != os.sched_getaffinity(0):
            os.sched_setaffinity(0, cpus[0])

    @property
    def group(self) -> RankGroup:
        """The first rank among all."""
        return self._group.result()

    def _start(self, rank: int, shared: int, cpus: frozenset[int]) -> "tuple[subprocess.Popen[bytes], Connection]":
        own_end, other_end = Pipe()
        fds = (other_end.fileno(), shared)
        command = [sys.executable, "-m", "engine.ranks", *map(str, fds)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=fds)
        other_end.close()
        start = RankStart(self.config, rank, tuple(sorted(cpus)), logging.getLogger().getEffectiveLevel())
        own_end.send_bytes(self._encoder.encode(start))
        threading.Thread(target=self._watch, args=(rank, process, own_end), daemon=True).start()
        return process, own_end

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]", link: Connection) -> None:
        """Waits for the end of a rank, and has this process hear of it."""
        code = process.wait()
        if self._is_closing:
            return
        if code == EXIT_CANNOT_LOAD:
            failure = msgspec.msgpack.decode(link.recv_bytes(), type=RankFailure)
            self._failure = _ERRORS.get(failure.kind, ModelError)(failure.message)
            self.group.exchange.abort()
            return
        logger.error("rank %d of the model has ended (exit code %d), and so does the engine", rank, code)
        self._on_death(code)

    @property
    def leader(self) -> Leader:
        """What has all ranks do what the first does."""
        return Leader(self._tell)

    def _tell(self, message: RankMessage) -> None:
        data = self._encoder.encode(message)
        for _, link in self._ranks:
            link.send_bytes(data)

    def reason_of(self, error: Exception) -> Exception:
        """Returns why loading the model failed with `error`: what another rank has found, if it has."""
        return self._failure or error

    def close(self) -> None:
        """Ends the processes."""
        self._is_closing = True
        for process, link in self._ranks:
            link.close()
            if process.stdin:
                process.stdin.close()
        for process, _ in self._ranks:
            try:
                process.wait(_END_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
        self.group.exchange.abort()  # else GPUs would wait at the end of this process for what no other one computes


def _own_config(config: EngineConfig) -> EngineConfig:
    """Returns the settings of each rank, which has its share of the threads."""
    num_threads = config.num_threads or torch.get_num_threads()
    return msgspec.structs.replace(config, num_threads=max(1, num_threads // config.tensor_parallel_size))
