"""What one run sends, and when: a config's requests, drawn from the run's seed, and the schedule that sends them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, takewhile

from loadtest.config import Config
from loadtest.datasets.entries import dataset_stream
from loadtest.runner import SendTurn, closed_loop, limited, long_among_decoders, open_loop, session_loop
from loadtest.sessions.session import session_stream
from loadtest.workload import RequestSpec, WorkloadKind, long_stream, poisson_offsets, request_stream

_MAX_WARMUP_TOKENS = 16


class Load:
    """The load of one run. Take the warm-up's requests first, then run it, once each."""

    def __init__(self, config: Config, seed: str, arrivals_seed: str) -> None:
        self._config = config
        self._arrivals_seed = arrivals_seed
        self._kind = config.shape.kind
        self._sessions = session_stream(config.shape, seed)
        self._longs = long_stream(config.shape, seed)
        self._main = self._warming = request_stream(config.shape, seed)
        if config.dataset is not None:
            # The requests of a file are all measured, so its warm-up has prompts with a mark of their own.
            self._main = dataset_stream(config.dataset, config.shape, seed, config.is_salted)
            self._warming = dataset_stream(config.dataset, config.shape, f"{seed}/warm-up", is_salted=True)
        elif self._kind is WorkloadKind.AGENT_SESSIONS:
            self._warming = (session.first_turn() for session in self._sessions)

    def warm_up(self) -> list[RequestSpec]:
        """Returns the first requests of the same streams, with short outputs; of long-among-decoders one is long."""
        num = self._config.schedule.num_warmup
        num_longs = min(num, 1) if self._kind is WorkloadKind.LONG_AMONG_DECODERS else 0
        drawn = [*islice(self._warming, num - num_longs), *islice(self._longs, num_longs)]
        return [replace(spec, max_tokens=min(spec.max_tokens, _MAX_WARMUP_TOKENS)) for spec in drawn]

    async def run(self, send: SendTurn) -> None:
        """Sends all requests, each when its time has come; returns when the last one has ended."""
        schedule = self._config.schedule
        num_streams = schedule.concurrency or 1
        if self._kind is WorkloadKind.AGENT_SESSIONS:
            sessions = islice(self._sessions, schedule.num_sessions)
            await session_loop(send, sessions, num_streams, schedule.think_s, schedule.duration_s)
            return
        specs = limited(self._main, schedule.num_requests, schedule.duration_s)
        if self._kind is WorkloadKind.LONG_AMONG_DECODERS:
            await long_among_decoders(send, specs, self._longs, num_streams, schedule.long_every_s)
        elif (offsets_s := self._offsets_s()) is not None:
            await open_loop(send, specs, offsets_s, schedule.concurrency)
        else:
            await closed_loop(send, specs, num_streams)

    def _offsets_s(self) -> Iterator[float] | None:
        """Returns when requests are due; None in a closed loop."""
        schedule, dataset = self._config.schedule, self._config.dataset
        offsets_s: Iterator[float]
        if dataset is not None and schedule.keeps_arrivals:
            offsets_s = dataset.offsets_s(schedule.speedup)
        elif schedule.rate_per_s is not None:
            offsets_s = poisson_offsets(schedule.rate_per_s, self._arrivals_seed)
        else:
            return None
        if (duration_s := schedule.duration_s) is not None:
            offsets_s = takewhile(lambda offset_s: offset_s < duration_s, offsets_s)
        return offsets_s
