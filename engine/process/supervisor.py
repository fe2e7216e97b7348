"""Keeps an engine process alive: starts it, starts another when it dies, and gives up when that does not help."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from engine.core.adapters import AdapterInfo, AdapterSource
from engine.core.config import EngineConfig, EngineInfo
from engine.core.errors import (
    ConfigError,
    EngineFailedError,
    EngineUnavailableError,
    ModelError,
    ModelMemoryError,
    TwostepError,
)
from engine.core.messages import FromEngine, ToEngine
from engine.process.engine_process import EngineProcess
from engine.process.first_process import FirstProcess
from engine.process.kv_memory import KVMemory
from engine.process.poison_requests import Death
from engine.process.restart_policy import RestartPolicy
from engine.process.spare_process import NoSpareProcess, SpareProcess

logger = logging.getLogger(__name__)

_LOAD_FACTOR, _LOAD_GRACE_S = 10.0, 60.0  # a restart that takes so much longer than the first start hangs
_MEASURED_ANEW = ("load_s", "ceilings")  # fields that each process measures for itself
_MAY_DIFFER = (*_MEASURED_ANEW, "adapters", "kv_fingerprint")


class EngineOwner(Protocol):
    """The supervisor's owner, which it calls back. None of these methods may raise."""

    def on_message(self, message: FromEngine) -> None: ...

    def on_engine_down(self) -> bool:
        """The process died; its last messages may still arrive. Returns whether it was fruitful: it answered a request,
        or had nothing to do."""

    def on_engine_starting(self) -> None:
        """Another process is being started."""

    def on_engine_up(self, death: Death) -> None:
        """The new process is ready and knows of no request. Nothing more will arrive from the dead one."""

    def on_engine_lost(self, error: EngineFailedError) -> None:
        """The engine is given up: no other process will be started."""


class Supervisor:
    """Runs one engine process at a time. All methods are for the event loop's thread."""

    def __init__(
        self,
        config: EngineConfig,
        command: Sequence[str],
        policy: RestartPolicy,
        owner: EngineOwner,
        keeps_spare: bool = False,
        first: FirstProcess | None = None,
    ) -> None:
        """`keeps_spare` has another process waiting for the death of the one that runs. `first` is the process to start
        with, if it was spawned before."""
        self._config = config
        self._command = command
        self._policy = policy
        self._owner = owner
        self._kv_memory = first.kv_memory if first else KVMemory()
        self._process = first.process if first else None
        self._spare = SpareProcess(self._new_process) if keeps_spare else NoSpareProcess()
        self._restart: asyncio.Task[None] | None = None
        self._info: EngineInfo | None = None
        self._load_s = 0.0
        self._down_since_s = 0.0
        self.is_up = False
        """Whether there is a process that is ready."""
        self.adapters: Mapping[str, AdapterInfo] = {}
        """The adapters that the newest process has loaded with the model, by name."""

    async def spawn(self) -> None:
        """Have the first process, unless it was spawned, import its libraries meanwhile, and wait for `start`. Raises
        OSError."""
        if self._process is None:
            self._process = self._new_process()
            await self._process.spawn()

    async def start(self) -> EngineInfo:
        """Start the first process, which is spawned unless it was. Raises ConfigError or ModelError as it reports them,
        EngineFailedError if it dies: then no other one is started."""
        started_s = time.monotonic()
        self._process = self._process or self._new_process()
        self._info = await self._process.start(self._config, self._owner.on_message, self._on_death)
        if self._process.death is not None:
            raise self._process.death
        self._load_s = time.monotonic() - started_s
        # What was measured holds for every later process, so that what was admitted fits.
        self._config = msgspec.structs.replace(
            self._config, num_blocks=self._info.num_blocks, max_model_len=self._info.max_model_len
        )
        self.is_up, self.adapters = True, self._info.adapters
        self._spare.prepare()
        return self._info

    def set_adapters(self, adapters: tuple[AdapterSource, ...]) -> None:
        """Has later processes load these adapters with the model."""
        self._config = msgspec.structs.replace(self._config, adapters=adapters)

    @property
    def down_s(self) -> float:
        """Seconds since the last death of a process."""
        return time.monotonic() - self._down_since_s

    @property
    def up_in_s(self) -> float:
        """Seconds until the process that is being started should be ready, judged by how long the first one took."""
        return max(self._load_s - self.down_s, 0.0)

    def send(self, message: ToEngine) -> None:
        """Send a message, or drop it while no process is up: the next one knows of no request anyway."""
        if self.is_up and self._process is not None:
            self._process.send(message)

    def kill(self, reason: EngineFailedError) -> None:
        """End the process, as if it had died for this reason."""
        if self._process is not None:
            self._process.kill(reason)

    async def stop(self, reason: EngineUnavailableError) -> None:
        """End the process, and start no other. Idempotent."""
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.wait((self._restart,))
        if self._process is not None:
            await self._process.stop(reason)
        await self._spare.stop()
        self._kv_memory.close()
        self.is_up = False

    def _new_process(self) -> EngineProcess:
        return EngineProcess(self._command, self._kv_memory.fd)

    def _on_death(self, reason: TwostepError) -> None:
        if not self.is_up:
            return  # the process is not in use yet: `start` or `_load` will see its death
        self.is_up = False
        self._down_since_s = time.monotonic()
        logger.error("%s", reason)
        was_fruitful = self._owner.on_engine_down()
        self._restart = asyncio.create_task(self._replace(reason, was_fruitful))

    async def _replace(self, reason: TwostepError, was_fruitful: bool) -> None:
        dead = self._process
        assert dead is not None
        try:
            await dead.reap()  # it may hold the memory that the next one needs
            if dead.may_have_damaged_memory:
                self._kv_memory.clear()
            process = await self._next_process(reason, was_fruitful)
            death = dead.close()
            self._process, self.is_up = process, True
            self._spare.prepare()
            self._owner.on_engine_up(death)
        except Exception as error:
            logger.critical("the engine is lost: %s", error, exc_info=not isinstance(error, TwostepError))
            self._kv_memory.clear()
            self._owner.on_engine_lost(EngineFailedError(str(error), _detail(error)))
        finally:
            dead.close()

    async def _next_process(self, reason: TwostepError, was_fruitful: bool) -> EngineProcess:
        """Returns a process that is ready. Raises EngineFailedError when the policy allows no more restarts, or when
        the cause will not pass."""
        has_failed = False
        while True:
            delay_s = self._policy.on_death(was_fruitful)
            if delay_s is None:
                raise EngineFailedError(f"The engine keeps dying and is not started again. {reason}", _detail(reason))
            await asyncio.sleep(delay_s)
            self._owner.on_engine_starting()
            try:
                process = await self._spare.take() or self._new_process()
                await self._load(process)
                return process
            except (ModelMemoryError, EngineUnavailableError, OSError) as error:
                logger.error("the engine process could not be started again: %s", error)
                reason = EngineFailedError(str(error), _detail(error))
                was_fruitful = False
                if has_failed:
                    self._kv_memory.clear()  # it may be what processes lack, and are killed for
                has_failed = True
            except (ConfigError, ModelError) as error:
                raise EngineFailedError(f"The engine died and cannot be started again: {error}") from error

    async def _load(self, process: EngineProcess) -> None:
        """Starts the process and waits until it is ready; leaves nothing of one that does not get there."""
        limit_s = _LOAD_FACTOR * self._load_s + _LOAD_GRACE_S
        try:
            async with asyncio.timeout(limit_s):
                info = await process.start(self._config, self._owner.on_message, self._on_death)
                self._check_same(info)
                self.adapters = info.adapters
            if process.death is not None:
                raise process.death
        except BaseException as error:
            is_damaged = process.may_have_damaged_memory
            await process.stop(EngineUnavailableError("The engine was stopped."))
            if is_damaged:
                self._kv_memory.clear()
            if isinstance(error, TimeoutError):
                raise EngineFailedError(f"It was not ready after {limit_s:.0f} seconds.") from None
            raise

    def _check_same(self, info: EngineInfo) -> None:
        """Raises ModelError if the model is not the one that was loaded first: streams may continue with the same model
        only. Clients see the error, so it names no values."""
        assert self._info is not None
        now, before = (msgspec.structs.asdict(each) for each in (info, self._info))
        if names := [name for name in before if name not in _MAY_DIFFER and now[name] != before[name]]:
            logger.error(
                "the model is another one, before and now: %s", {name: (before[name], now[name]) for name in names}
            )
            raise ModelError(f"The model is not the one that was loaded first: another {', '.join(names)}.")


def _detail(error: Exception) -> str:
    return error.detail if isinstance(error, EngineFailedError) else ""
