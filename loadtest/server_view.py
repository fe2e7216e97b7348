"""The server's own figures of a run, compared with the client's."""

from dataclasses import dataclass

from loadtest.metrics import Snapshot
from loadtest.record import Outcome, Record
from loadtest.stats import Sample

_TOLERANCE_MS = 1.0  # rounding, and clocks read at slightly different places
_PHASES = ("queue_ms", "prefill_ms", "ttft_ms", "itl_ms", "decode_ms", "e2e_ms")


@dataclass(frozen=True)
class CounterCheck:
    """The advance of the server's token counters over a run, beside the sum of `usage` over the run's answers."""

    prompt_advance: int
    generation_advance: int
    prompt_usage: int
    generation_usage: int
    num_incomplete: int  # requests that ended without `usage`: the server may have counted any part of their tokens
    leftovers: dict[str, float]

    @property
    def problems(self) -> list[str]:
        """Sentences about what does not match. If requests ended without usage, only a lower bound is checked."""
        pairs = (
            ("prompt", self.prompt_advance, self.prompt_usage),
            ("generation", self.generation_advance, self.generation_usage),
        )
        found = [
            f"{name} tokens: the server's counter advanced by {advance}, the answers' usage adds up to {usage}"
            for name, advance, usage in pairs
            if advance < usage or (advance > usage and not self.num_incomplete)
        ]
        left = ", ".join(f"{value:g} {name}" for name, value in self.leftovers.items())
        return [*found, f"after the last request the server still shows {left}"] if left else found


class ServerView:
    """Collects the server's figures of each request, and what does not match the client's."""

    def __init__(self) -> None:
        self.phases = {name: Sample() for name in _PHASES}
        self.ttft_beyond_server_ms = Sample()  # client - server, per request: network, HTTP, unmeasured server time
        self.itl_beyond_server_ms = Sample()
        self.checks: list[CounterCheck] = []  # one per run of a server that has the counters
        self.num_impossible_ttft = 0  # requests whose server TTFT is longer than the client's
        self.num_other_count = 0  # requests whose timings.generated_tokens differs from usage.completion_tokens
        self._prompt_tokens = self._generation_tokens = self._num_incomplete = 0

    @property
    def is_silent(self) -> bool:
        """Whether the server has reported nothing to compare with the client's figures."""
        return not self.checks and not any(sample.values for sample in self.phases.values())

    def add(self, record: Record) -> None:
        reply = record.reply
        if reply.usage is not None:
            self._prompt_tokens += reply.usage.prompt_tokens
            self._generation_tokens += reply.usage.completion_tokens
        elif reply.outcome not in (Outcome.REJECTED, Outcome.HTTP_ERROR, Outcome.CONNECT_ERROR):
            self._num_incomplete += 1
        if reply.outcome is not Outcome.OK:
            return
        reported = reply.server_ms
        for name, sample in self.phases.items():
            sample.add(reported.get(name))
        if "ttft_ms" in reported and reply.ttft_s is not None:
            beyond_ms = reply.ttft_s * 1000 - reported["ttft_ms"]
            self.ttft_beyond_server_ms.add(beyond_ms)
            self.num_impossible_ttft += beyond_ms < -_TOLERANCE_MS
        if "itl_ms" in reported and reply.tpot_s is not None:
            self.itl_beyond_server_ms.add(reply.tpot_s * 1000 - reported["itl_ms"])
        if "generated_tokens" in reported and reply.usage is not None:
            self.num_other_count += reported["generated_tokens"] != reply.usage.completion_tokens

    def end_run(self, before: Snapshot | None, after: Snapshot | None, num_interrupted: int) -> None:
        """Ends a run: checks the counters and starts the next run's token counts at zero."""
        if before is not None and after is not None:
            check = CounterCheck(
                prompt_advance=round(after.prompt_tokens - before.prompt_tokens),
                generation_advance=round(after.generation_tokens - before.generation_tokens),
                prompt_usage=self._prompt_tokens,
                generation_usage=self._generation_tokens,
                num_incomplete=self._num_incomplete + num_interrupted,
                leftovers=after.leftovers,
            )
            self.checks.append(check)
        self._prompt_tokens = self._generation_tokens = self._num_incomplete = 0

    @property
    def problems(self) -> list[str]:
        """Sentences about what does not match."""
        found = [problem for check in self.checks for problem in check.problems]
        if self.num_impossible_ttft:
            found.append(f"{self.num_impossible_ttft} requests: the server's TTFT is longer than the client's")
        if self.num_other_count:
            found.append(f"{self.num_other_count} requests: timings.generated_tokens is not usage.completion_tokens")
        return found
