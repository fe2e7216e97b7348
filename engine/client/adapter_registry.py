"""The names of adapters: which ones the engine process has, and every later one is to load. All methods are for the
event loop's thread."""

import asyncio
import logging
from collections.abc import Mapping
from types import MappingProxyType

from engine.core.adapters import AdapterInfo, AdapterSource
from engine.core.errors import AdapterError, EngineUnavailableError
from engine.core.messages import AdapterLoaded, LoadAdapter, UnloadAdapter
from engine.process.supervisor import Supervisor

__all__ = ["AdapterRegistry"]

logger = logging.getLogger(__name__)


class AdapterRegistry:
    """Implements `engine.client.interface.AdapterClient` over the engine process."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._loaded: dict[str, AdapterInfo] = {}
        self._turn = asyncio.Lock()  # one is loaded at a time
        self._answer: asyncio.Future[AdapterLoaded] | None = None
        """The answer that who loads waits for; None while nobody does."""
        self._unnamed: set[str] = set()
        """Digests of adapters that lost a name meanwhile: what is being loaded may have the same content."""

    @property
    def loaded(self) -> Mapping[str, AdapterInfo]:
        return MappingProxyType(self._loaded)

    async def load(self, name: str, path: str) -> AdapterInfo:
        loading = asyncio.ensure_future(self._load(name, path))
        loading.add_done_callback(lambda each: each.exception())  # counts as retrieved, should the caller leave
        return await asyncio.shield(loading)

    async def _load(self, name: str, path: str) -> AdapterInfo:
        async with self._turn:
            if name in self._loaded:
                raise AdapterError(f"The adapter {name!r} is loaded already: unload it first, or choose another name.")
            if not self._supervisor.is_up:
                raise EngineUnavailableError("No engine is up that could load an adapter; try again later.")
            try:
                return await self._load_as(name, path)
            finally:
                self._answer = None
                while self._unnamed:
                    self._unload_unnamed(self._unnamed.pop())

    async def _load_as(self, name: str, path: str) -> AdapterInfo:
        self._answer = asyncio.get_running_loop().create_future()
        self._supervisor.send(LoadAdapter(path))
        answer = await self._answer
        if answer.info is None:
            raise AdapterError(answer.error)
        self._loaded[name] = answer.info
        self._remember()
        return answer.info

    def unload(self, name: str) -> None:
        digest = self._loaded.pop(name).digest
        self._remember()
        self._unload_unnamed(digest)

    def on_answer(self, answer: AdapterLoaded) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)

    def engine_is_down(self) -> None:
        """Answers who waits for an adapter: an engine that is down loads none."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(EngineUnavailableError("The engine died while it loaded the adapter."))

    def engine_has_started(self) -> None:
        """Takes over what the first process has loaded."""
        self._loaded |= self._supervisor.adapters
        self._remember()

    def engine_is_up(self) -> None:
        """Takes over what another process has loaded: of the names that there are, those whose files are as before."""
        now = self._supervisor.adapters
        for name in [each for each in self._loaded if now.get(each) != self._loaded[each]]:
            logger.error("the adapter %s is gone: the engine that was started again could not load it", name)
            del self._loaded[name]
        self._remember()
        for info in now.values():
            self._unload_unnamed(info.digest)

    def _unload_unnamed(self, digest: str) -> None:
        """Unloads the adapter of this digest, once none is being loaded, unless it has another name then."""
        if self._answer is not None:
            self._unnamed.add(digest)
        elif all(digest != each.digest for each in self._loaded.values()):
            self._supervisor.send(UnloadAdapter(digest))

    def _remember(self) -> None:
        """Has later engine processes load what is loaded now."""
        sources = [AdapterSource(name, info.path, info.digest) for name, info in self._loaded.items()]
        self._supervisor.set_adapters(tuple(sources))
