"""Slow to start or slow to stream? What the newest answers and steps say to that, for `GET /stats/diagnosis`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from server.protocol.stats import Diagnosis, Percentiles, RecentSteps, Stats

SLOW_START_MS = 1000.0
"""Answers are slow to start if one in ten has a longer time to first token."""
SLOW_GAP_MS = 100.0
"""Answers are slow to stream if half of the gaps are longer: ten tokens a second are about what people read."""
STALL_MS = 1000.0
"""Answers are slow to stream, too, if one gap in a hundred is longer."""
FULL = 0.9
"""The KV cache is full if a larger share of it is held: what is left is for running requests to grow into."""
NEAR = 0.5
"""Steps are near the machine's ceiling from this share on. Below, something else takes most of their time."""

Phase = Literal["queue", "prefill", "decode"]

_NONE = Percentiles(p50=0, p90=0, p99=0, max=0)
_DOES = {"queue": "waiting in the queue", "prefill": "reading the prompt", "decode": "writing the answer"}


@dataclass(frozen=True, slots=True)
class Load:
    """What runs now, and the settings that bound it."""

    running: int
    waiting: int
    kv_held_ratio: float
    max_num_seqs: int
    target_itl_ms: float
    is_quantized: bool


def diagnose(stats: Stats, load: Load) -> Diagnosis:
    """Returns whether the newest answers were slow to start or slow to stream, with evidence and advice."""
    if stats.requests.ttft_ms is None:
        return Diagnosis(verdict="unknown", cause=None, sentence="No answer has ended yet.", evidence=[], advice=[])
    times = _Times.of(stats)
    advice = []
    if times.starts_late:
        advice += [*_advice_on_queue(load)] if times.late_phase == "queue" else [*_advice_on_prefill(stats, load)]
    if times.streams_slowly:
        advice += _advice_on_decode(stats.decode, load)
    if times.stalls:
        advice.append(
            f"Prompts of others are read between tokens: a lower --target-itl-ms ({load.target_itl_ms:g} now) cuts them"
            " shorter. Other programs on the machine make gaps, too."
        )
    return Diagnosis(
        verdict=times.verdict,
        cause=times.cause,
        sentence=times.sentence,
        evidence=[*_evidence(times, stats, load)],
        advice=advice,
    )


@dataclass(frozen=True, slots=True)
class _Times:
    """The times of the newest answers."""

    queue: Percentiles
    prefill: Percentiles
    decode: Percentiles
    ttft: Percentiles
    gaps: Percentiles

    @classmethod
    def of(cls, stats: Stats) -> "_Times":
        recent = stats.requests
        times = recent.queue_ms, recent.prefill_ms, recent.decode_ms, recent.ttft_ms, recent.itl_ms
        return cls(*(each or _NONE for each in times))

    @property
    def starts_late(self) -> bool:
        return self.ttft.p90 > SLOW_START_MS

    @property
    def late_phase(self) -> Phase:
        """The phase before the first token that takes late answers longer."""
        return "queue" if self.queue.p90 > self.prefill.p90 else "prefill"

    @property
    def stalls(self) -> bool:
        return self.gaps.p50 <= SLOW_GAP_MS and self.gaps.p99 > STALL_MS

    @property
    def streams_slowly(self) -> bool:
        return self.gaps.p50 > SLOW_GAP_MS

    @property
    def verdict(self) -> Literal["neither", "start", "stream", "both"]:
        slow = self.streams_slowly or self.stalls
        if self.starts_late:
            return "both" if slow else "start"
        return "stream" if slow else "neither"

    @property
    def cause(self) -> Phase:
        if self.verdict == "start":
            return self.late_phase
        if self.verdict == "stream" or self.decode.p50 > self.queue.p50 + self.prefill.p50:
            return "decode"
        return self.late_phase

    @property
    def sentence(self) -> str:
        start = f"one answer in ten takes {_ms(self.ttft.p90)} or more to begin, most of it {_DOES[self.late_phase]}"
        pace = f"a token comes every {_ms(self.gaps.p50)}"
        if self.stalls:
            pace += f", but after one in a hundred the next takes {_ms(self.gaps.p99)} or more"
        match self.verdict:
            case "both":
                return f"Slow to start, and slow to stream: {start}; {pace}."
            case "start":
                return f"Slow to start: {start}."
            case "stream":
                return f"Slow to stream: {pace}."
        begins = f"nine answers in ten begin within {_ms(self.ttft.p90)}"
        return f"Neither: {begins}{f', and {pace}' if self.gaps.p50 else ''}. Most time goes into {_DOES[self.cause]}."


def _evidence(times: _Times, stats: Stats, load: Load) -> Iterator[str]:
    yield (
        f"The median answer: {_ms(times.queue.p50)} in the queue, {_ms(times.prefill.p50)} of prefill, "
        f"{_ms(times.decode.p50)} of decode."
    )
    for phase, steps in (("Prefill", stats.prefill), ("Decode", stats.decode)):
        if steps is not None:
            yield (
                f"{phase} steps: {_count(steps.tokens)} tokens in {_ms(steps.mean_ms)}, bound by {steps.bound}, at "
                f"{_share(steps.of_ceiling)} of what the machine could do."
            )
    yield (
        f"Now {load.running} of at most {load.max_num_seqs} run, {load.waiting} wait, and {load.kv_held_ratio:.0%} of "
        "the KV cache is held."
    )


def _advice_on_queue(load: Load) -> Iterator[str]:
    if load.kv_held_ratio > FULL:
        yield "The KV cache is full: give it more memory (--kv-cache-memory-bytes) or bound contexts (--max-model-len)."
    elif load.running >= load.max_num_seqs:
        yield f"All {load.max_num_seqs} places are taken: raise --max-num-seqs, if streams may become slower."
    elif load.running:
        yield (
            "Prompts wait for those before them, which are read in pieces between the tokens of streams: a higher "
            f"--target-itl-ms ({load.target_itl_ms:g} now) reads them sooner, and makes gaps longer."
        )
    yield "Where more comes than one server can do, add another one, or refuse sooner (--max-queue-time)."


def _advice_on_prefill(stats: Stats, load: Load) -> Iterator[str]:
    cache = stats.prefix_cache
    if cache.prompt_tokens:
        found = (cache.memory_hit_tokens + cache.disk_hit_tokens) / cache.prompt_tokens
        yield f"{found:.0%} of prompts was found in the prefix cache: put first what prompts have in common."
    if stats.prefill is not None and stats.prefill.bound == "memory":
        yield f"Prompts are read in small pieces: --target-itl-ms ({load.target_itl_ms:g} now) makes them larger."
    yield "Shorter prompts, or a machine that multiplies faster, start sooner."


def _advice_on_decode(steps: RecentSteps | None, load: Load) -> Iterator[str]:
    if steps is None:
        return
    if steps.of_ceiling is not None and steps.of_ceiling < NEAR:
        yield "Steps are far from what the machine could do: `twostep doctor` looks for what takes the time."
    elif steps.bound == "memory" and not load.is_quantized:
        yield "Each step reads all weights: fewer bits (--quantization int8 or int4) read faster."
    elif steps.bound == "memory":
        yield "Each step reads all weights: draft tokens (--draft-model) bring several tokens a step."
    else:
        yield f"{_count(steps.tokens)} tokens share a step: fewer at once (--max-num-seqs) are faster each."


def _share(value: float | None) -> str:
    return "an unknown share" if value is None else f"{value:.0%}"


def _ms(value: float) -> str:
    return f"{value / 1000:.1f} s" if value >= 1000 else f"{_count(value)} ms"


def _count(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
