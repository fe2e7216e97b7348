"""An engine process without a model: `python fake_engine_process.py LINK_FD MARKER_FD MEMORY_FD`. Requests choose what
it does.

Token i of a request is `prompt[0] + i`. The last prompt token is one of the commands below, and `config.model` may be
one of the ways to fail to start.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine.core.batch import Phase
from engine.core.cache_steering import CachedPrefixes
from engine.core.config import EngineConfig, EngineInfo
from engine.core.crash_marker import Marker, NullMarker
from engine.core.errors import InvalidParameterError, ModelError, ModelMemoryError
from engine.core.machine import Ceilings, ModelSize
from engine.core.messages import (
    AddRequest,
    ComputedSpan,
    FindPrefix,
    FirstTokenInfo,
    PrefixFound,
    RequestState,
    RequestUpdate,
    StepUpdate,
)
from engine.core.request import FinishReason
from engine.core.stats import PoolStats, StepStats
from engine.process import __main__ as process

PLAIN, SLOW, WAIT, RAISE, DIE, HANG, REFUSE, FAIL, BURST, PREFILL, EXIT, CRASH, STUMBLE, CHOKE, LONG = range(15)
"""Commands, in this order: tokens come at once; every 20 ms; never; a step raises; the process is killed; the process
hangs; the request is refused; the request fails in its second step; three tokens come per step; the request is
scheduled and gets no token; the process exits; crashes; is killed at the second token that it makes for the request;
exits when it receives the request; the first token takes half a second."""


def info_of(config: EngineConfig) -> EngineInfo:
    return EngineInfo(
        model=config.model,
        architecture="Fake",
        device="cuda" if config.device == "cuda" else "cpu",
        dtype="float32",
        kv_cache_dtype="float32",
        attention="none",
        linear="none",
        forward="none",
        vocab_size=1000,
        hidden_size=8,
        max_model_len=config.max_model_len or 4096,
        block_size=config.block_size,
        kv_fingerprint="" if config.model == "without a store" else "f",
        state_checkpoint_tokens=32 if config.model == "with states" else 0,
        num_blocks=config.num_blocks or 1000,
        eos_token_ids=(0,),
        weights_fingerprint="0123",
        weight_bytes=0,
        kv_cache_bytes=0,
        kv_bytes_per_token=0,
        load_s=time.monotonic(),  # this and the ceilings differ in every process
        size=ModelSize(layer_bytes=1, layer_flops=1, head_bytes=0, head_flops=0, attention=()),
        ceilings=Ceilings(time.monotonic(), 1.0),
    )


class FakeEngine:
    """A fake of `Engine`. In its statistics `num_requests` counts the aborts that it received, and `prefix_queries` the
    messages with them."""

    def __init__(self, config: EngineConfig, marker: Marker | None = None) -> None:
        self._marker = marker or NullMarker()
        self.info = info_of(config)
        self._requests: dict[str, AddRequest] = {}
        self._num_done: dict[str, int] = {}
        self._scheduled: set[str] = set()
        self._num_aborts = self._num_abort_messages = self._num_told = 0
        self._has_updates = False
        self._drops: list[tuple[str, str | None]] = []

    @property
    def has_work(self) -> bool:
        return self._has_updates or any(
            request.asked.prompt_token_ids[-1] not in (WAIT, PREFILL) for request in self._requests.values()
        )

    def add_request(self, message: AddRequest) -> None:
        if message.asked.prompt_token_ids[-1] == REFUSE:
            raise InvalidParameterError("prompt", "The fake refuses this prompt.")
        if message.asked.prompt_token_ids[-1] == CHOKE:
            os._exit(9)
        self._requests[message.request_id] = message
        self._num_done[message.request_id] = len(message.output_token_ids)
        self._has_updates = True

    def set_stalled(self, request_id: str, is_stalled: bool) -> None:
        pass

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self._num_abort_messages += 1
        for request_id in request_ids:
            self._num_told += 1
            self._num_aborts += self._requests.pop(request_id, None) is not None
        self._has_updates = True

    def inspect(self, request_ids: Iterable[str]) -> list[RequestState]:
        """Returns states in which the computed tokens are those that were made, and the blocks of each request are as
        many as there are `request_ids`."""
        ids = list(request_ids)
        known = [name for name in ids if name in self._requests]
        return [RequestState(name, num_computed_tokens=self._num_done[name], num_blocks=len(ids)) for name in known]

    def find_prefix(self, message: FindPrefix) -> PrefixFound:
        """Returns that as many tokens are cached and stored as the prompt's second token says. Where that is 999 the
        process is killed instead."""
        if message.token_ids[1] == 999:
            os.kill(os.getpid(), signal.SIGKILL)
        return PrefixFound(message.number, message.token_ids[1], message.token_ids[1])

    def cached_prefixes(self, tenant: str) -> list[CachedPrefixes]:
        """Returns one entry for each call of `drop_prefixes` for the tenant, with its key."""
        return [CachedPrefixes(str(key), *[0] * 4, 0.0, 0.0) for name, key in self._drops if name == tenant]

    def drop_prefixes(self, tenant: str, key: str | None) -> None:
        self._drops.append((tenant, key))

    def step(self, on_scheduled: Callable[[list[str]], None]) -> StepUpdate:
        self._has_updates = False
        self._marker.mark(list(self._requests))
        self._schedule(on_scheduled)
        commands = {request.asked.prompt_token_ids[-1] for request in self._requests.values()}
        if SLOW in commands:
            time.sleep(0.02)
        if RAISE in commands:
            raise RuntimeError("a broken kernel")
        if DIE in commands:
            print("dying now", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if HANG in commands:
            time.sleep(1000)
        if EXIT in commands:
            os._exit(5)
        if CRASH in commands:
            os.kill(os.getpid(), signal.SIGSEGV)
        if any(self._stumbles(request) for request in self._requests.values()):
            os.kill(os.getpid(), signal.SIGKILL)
        computed = [ComputedSpan(name, 0, 3) for name in self._requests]
        updates = [update for request in list(self._requests.values()) for update in self._updates_of(request)]
        return StepUpdate(time.monotonic(), updates, self._stats(), computed)

    def _schedule(self, on_scheduled: Callable[[list[str]], None]) -> None:
        """Schedules new requests, and computes the prompts of those that are long."""
        new = [name for name, each in self._requests.items() if each.asked.prompt_token_ids[-1] != WAIT]
        new = [name for name in new if name not in self._scheduled]
        if new:
            self._scheduled.update(new)
            on_scheduled(new)
        if any(self._requests[name].asked.prompt_token_ids[-1] == LONG for name in new):
            time.sleep(0.5)

    def rest(self, is_wanted: Callable[[], bool]) -> None:
        pass

    def close(self) -> None:
        pass

    def _stumbles(self, request: AddRequest) -> bool:
        num_new = self._num_done[request.request_id] - len(request.output_token_ids)
        return request.asked.prompt_token_ids[-1] == STUMBLE and num_new == 1

    def _updates_of(self, request: AddRequest) -> list[RequestUpdate]:
        command, num_done = request.asked.prompt_token_ids[-1], self._num_done[request.request_id]
        if command in (WAIT, PREFILL):
            return []
        if command == FAIL and num_done == 1:
            del self._requests[request.request_id]
            return [RequestUpdate(request.request_id, finish_reason=FinishReason.ERROR, error="a bad step")]
        num_new = min(3 if command == BURST else 1, request.asked.params.max_tokens - num_done)
        self._num_done[request.request_id] = num_done + num_new
        tokens = [request.asked.prompt_token_ids[0] + num_done + i for i in range(num_new)]
        return [self._update(request, tokens, is_first=num_done == 0)]

    def _update(self, request: AddRequest, tokens: list[int], is_first: bool) -> RequestUpdate:
        reason = None
        if tokens and tokens[-1] in request.asked.params.stop_token_ids:
            reason = FinishReason.STOP
        elif self._num_done[request.request_id] == request.asked.params.max_tokens:
            reason = FinishReason.LENGTH
        if reason:
            del self._requests[request.request_id]
        return RequestUpdate(
            request.request_id,
            tuple(tokens),
            first=FirstTokenInfo(time.monotonic(), 2, 1) if is_first else None,
            num_stored_tokens=request.num_announced_tokens,
            finish_reason=reason,
            stop_token_id=tokens[-1] if reason is FinishReason.STOP else None,
        )

    def _stats(self) -> StepStats:
        pool = PoolStats(free=10 - len(self._requests), held=len(self._requests), cached=0)
        running = len(self._requests)
        messages = self._num_abort_messages
        stats = StepStats(Phase.DECODE, self._num_aborts, 0, 0.0, 0.0, running, 0, pool, 0, messages, 0)
        return msgspec.structs.replace(stats, num_aborts=self._num_told)


def load(config: EngineConfig, marker: Marker, kv_memory_fd: int) -> FakeEngine:
    if config.model == "missing":
        raise ModelError("The model is missing.")
    if config.model == "large":
        raise ModelMemoryError("The model is too large.")
    if config.model == "broken":
        raise RuntimeError("a broken loader")
    if config.model == "dies":
        print("last words", file=sys.stderr, flush=True)
        os._exit(7)
    if config.model == "slow":
        time.sleep(1000)
    engine = FakeEngine(config, marker)
    how, _, folder = config.model.partition(":")
    if folder:
        number = len(os.listdir(folder))
        Path(folder, str(number)).touch()
        load_again(how, number, engine)
    return engine


def load_again(how: str, number: int, engine: FakeEngine) -> None:
    """Fails in the way that the model is named for, when it is loaded once more after `number` times."""
    if how == "vanishes" and number > 0:
        raise ModelError("The model is missing.")
    if how == "changes":
        engine.info = msgspec.structs.replace(engine.info, weight_bytes=number)
    if how == "stumbles" and number == 1:
        os._exit(7)
    if how == "starves" and number == 1:
        raise ModelMemoryError("The model is too large.")
    if how == "dies" and number > 0:
        os._exit(7)
    if (how == "freezes" and number == 1) or (how == "waits" and number > 0):
        time.sleep(1000)


if __name__ == "__main__":
    process.PARENT_GRACE_S = 1.0
    sys.exit(process.main(sys.argv[1:], load))
