"""What a simulation measured."""

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field

_WIDTH = math.log(1.01)


class Histogram:
    """Durations in buckets of one percent each."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float, times: int = 1) -> None:
        self._counts[round(math.log(max(seconds, 1e-6)) / _WIDTH)] += times

    def percentile(self, percent: float) -> float:
        """Returns the nearest-rank percentile in seconds, to one percent; 0 if there is nothing."""
        rank = math.ceil(percent / 100 * self._counts.total())
        for bucket in sorted(self._counts):
            rank -= self._counts[bucket]
            if rank <= 0:
                return math.exp(bucket * _WIDTH)
        return 0.0


@dataclass(slots=True)
class Results:
    """Counts and durations of one simulation."""

    num_requests: int = 0
    """Requests that ended."""
    num_good: int = 0
    """Requests that met both objectives: `good_ttft_s` and `good_tpot_s`."""
    num_wrong: int = 0
    """Requests whose answer was not what it had to be."""
    num_moved: int = 0
    """Times that a request went on on another replica."""
    num_handed_over: int = 0
    """Prompts that one replica computed for another."""
    num_output_tokens: int = 0
    num_sampled: int = 0
    """Tokens that replicas sampled, and that arrived: more than `num_output_tokens` if any was sampled twice."""
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_preemptions: int = 0
    end_s: float = 0.0
    """When the last request ended."""
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    decisions: "hashlib._Hash" = field(default_factory=hashlib.sha256)
    """Digest of every decision, with its time."""

    @property
    def hit_rate(self) -> float:
        return self.prefix_hits / max(self.prefix_queries, 1)

    @property
    def goodput(self) -> float:
        """The share of the requests that were good."""
        return self.num_good / max(self.num_requests, 1)

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / max(self.end_s, 1e-9)

    def row(self) -> dict[str, str]:
        """Returns the row of a table."""
        return {
            "goodput": f"{self.goodput:.1%}",
            "hit rate": f"{self.hit_rate:.1%}",
            "TTFT p50": f"{self.ttft.percentile(50) * 1e3:.0f} ms",
            "TTFT p99": f"{self.ttft.percentile(99) * 1e3:.0f} ms",
            "ITL p99": f"{self.itl.percentile(99) * 1e3:.0f} ms",
            "tokens/s": f"{self.tokens_per_s:,.0f}",
            "preempted": str(self.num_preemptions),
            "handed over": str(self.num_handed_over),
            "moved": str(self.num_moved),
            "whole": f"{self.num_requests - self.num_wrong} of {self.num_requests}",
            "decisions": self.decisions.hexdigest()[:8],
        }


def table(rows: dict[str, dict[str, str]]) -> str:
    """Returns rows of results as a table in Markdown, one for each name."""
    cells = [["policy", *next(iter(rows.values()))]]
    cells += [[name, *row.values()] for name, row in rows.items()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    lines = (" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(f"| {line} |" for line in lines)
