"""A request's phases as clients read them: response headers, the `timings` object, and the usage chunk's `metrics`.

|-- queue --|-- prefill --|-- decode --|
arrival     scheduled     first token  last token
|-------- ttft -----------|
|---------------- e2e -----------------|

Where a prefill server was asked for the prompt, the time of that, `remote_prefill`, lies between arrival and scheduled;
it is no part of queue, and told only then.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.core.outputs import RequestOutput
from engine.core.stats import RequestTimings


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of one HTTP request. A prompt counts once, however many sequences were generated from it; each sequence's
    output tokens count."""

    prompt: int
    cached: int
    output: int


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """Times of all sequences of one HTTP request: from its arrival to its first token, then to its last."""

    timings: RequestTimings
    """Queue and prefill times of the sequence with the earliest first token; gaps between tokens, prefill chunks and
    preemptions of all sequences. The gaps are sorted, so that each percentile of them is found soon."""
    decode_s: float
    """Seconds from the first token of the first sequence to the last token of the last sequence."""
    counts: TokenCounts

    @classmethod
    def of(cls, timings: Sequence[RequestTimings], counts: TokenCounts) -> "PhaseReport":
        first = min(timings, key=lambda each: each.ttft_s)
        together = RequestTimings(
            queue_s=first.queue_s,
            remote_prefill_s=first.remote_prefill_s,
            prefill_s=first.prefill_s,
            inter_token_s=tuple(sorted(itertools.chain.from_iterable(each.inter_token_s for each in timings))),
            prefill_chunks=sum(each.prefill_chunks for each in timings),
            preemptions=sum(each.preemptions for each in timings),
        )
        return cls(together, max(each.e2e_s for each in timings) - first.ttft_s, counts)

    def body(self) -> dict[str, float | int | None]:
        """Returns the `timings` object. `ttft_ms` and `e2e_ms` are sums of rounded parts, so they add up exactly."""
        timings, counts = self.timings, self.counts
        queue_ms, prefill_ms, decode_ms = _ms(timings.queue_s), _ms(timings.prefill_s), _ms(self.decode_s)
        remote = {} if timings.remote_prefill_s is None else {"remote_prefill_ms": _ms(timings.remote_prefill_s)}
        ttft_ms = round(queue_ms + sum(remote.values()) + prefill_ms, 3)
        return {
            "queue_ms": queue_ms,
            **remote,
            "prefill_ms": prefill_ms,
            "ttft_ms": ttft_ms,
            "decode_ms": decode_ms,
            "itl_ms": _ms_or_none(timings.tpot_s),
            "itl_p50_ms": _ms_or_none(timings.itl_percentile_s(50)),
            "itl_p99_ms": _ms_or_none(timings.itl_percentile_s(99)),
            "e2e_ms": round(ttft_ms + decode_ms, 3),
            "prompt_tokens": counts.prompt,
            "cached_tokens": counts.cached,
            "generated_tokens": counts.output,
            "prefill_chunks": timings.prefill_chunks,
            "preemptions": timings.preemptions,
        }


def first_token_headers(output: RequestOutput, num_prompts: int, num_prompt_tokens: int) -> dict[str, str]:
    """Returns the headers of a stream, which are sent with its first token. With several prompts there is no
    `X-Cached-Tokens`: the other prompts' cached tokens are not known yet."""
    headers = {"X-Prompt-Tokens": str(num_prompt_tokens)}
    if num_prompts == 1:
        headers["X-Cached-Tokens"] = str(output.num_cached_tokens)
    if output.timings is None:
        return headers
    body = PhaseReport.of([output.timings], TokenCounts(num_prompt_tokens, output.num_cached_tokens, 0)).body()
    phases = ("queue", "remote_prefill", "prefill", "ttft")
    return headers | _duration_headers(body, *phases) | _server_timing(body, *phases)


def complete_headers(body: Mapping[str, float | int | None]) -> dict[str, str]:
    """Returns the headers of a response that is not streamed, from its `timings` object."""
    return {
        "X-Prompt-Tokens": str(body["prompt_tokens"]),
        "X-Cached-Tokens": str(body["cached_tokens"]),
        "X-Generated-Tokens": str(body["generated_tokens"]),
        **_duration_headers(body, "queue", "remote_prefill", "prefill", "ttft", "itl", "itl_p99", "decode", "e2e"),
        **_server_timing(body, "queue", "remote_prefill", "prefill", "ttft", "decode", "e2e"),
    }


def usage_metrics(body: Mapping[str, float | int | None]) -> dict[str, float | int | None]:
    """Returns the `metrics` object of the usage chunk, from the `timings` object."""
    return {
        "queue_time_ms": body["queue_ms"],
        "time_to_first_token_ms": body["ttft_ms"],
        "mean_itl_ms": body["itl_ms"],
    }


_HEADER_NAMES = {
    "queue": "X-Queue-Ms",
    "remote_prefill": "X-Remote-Prefill-Ms",
    "prefill": "X-Prefill-Ms",
    "ttft": "X-TTFT-Ms",
    "itl": "X-ITL-Ms",
    "itl_p99": "X-ITL-P99-Ms",
    "decode": "X-Decode-Ms",
    "e2e": "X-E2E-Ms",
}
EXPOSED_HEADERS = (
    *_HEADER_NAMES.values(),
    "X-Prompt-Tokens",
    "X-Cached-Tokens",
    "X-Generated-Tokens",
    "X-Request-Id",
    "Request-Id",
    "Retry-After",
    "X-Should-Retry",
    "Server-Timing",
)
"""Response headers that scripts of another origin may read (CORS)."""


def _duration_headers(body: Mapping[str, float | int | None], *phases: str) -> dict[str, str]:
    """Returns one header per phase; none for a phase that did not happen (gaps between fewer than two tokens)."""
    return {_HEADER_NAMES[phase]: str(value) for phase in phases if (value := body.get(f"{phase}_ms")) is not None}


def _server_timing(body: Mapping[str, float | int | None], *phases: str) -> dict[str, str]:
    """Returns the phases as a W3C `Server-Timing` header, which browsers' developer tools draw."""
    told = [phase for phase in phases if f"{phase}_ms" in body]
    return {"Server-Timing": ", ".join(f"{phase};dur={body[f'{phase}_ms']}" for phase in told)}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _ms_or_none(seconds: float | None) -> float | None:
    return None if seconds is None else _ms(seconds)
