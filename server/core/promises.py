"""What a client wants to be promised of one request (its SLO), and whether that was kept."""

from collections.abc import Container, Iterator
from dataclasses import dataclass

from server.core.timings import PhaseReport

TTFT_HEADER, ITL_HEADER = "x-slo-ttft-ms", "x-slo-itl-ms"


@dataclass(frozen=True, slots=True)
class Promises:
    """Longest times that a request asks for; None where it asks for none."""

    ttft_s: float | None = None
    """From its arrival to its first token."""
    itl_s: float | None = None
    """Between its tokens, as the mean over the whole answer."""

    def outcomes(self, report: PhaseReport) -> Iterator[tuple[str, str]]:
        """Yields each promise's name and outcome, kept or missed, as far as the request has shown it."""
        took = (("ttft", self.ttft_s, report.timings.ttft_s), ("itl", self.itl_s, report.timings.tpot_s))
        for name, limit_s, took_s in took:
            if limit_s is not None and took_s is not None:
                yield name, "kept" if took_s <= limit_s else "missed"


NO_PROMISES = Promises()


def asked_in(headers: Container[str]) -> Iterator[str]:
    """Yields the names of the promises that headers ask for, right or wrong."""
    yield from (name for name, header in (("ttft", TTFT_HEADER), ("itl", ITL_HEADER)) if header in headers)
