"""Warnings of what makes runs of two servers incomparable, but is no fault of one alone, so the load test has none."""

from collections.abc import Iterator, Mapping

from loadtest.record import Outcome
from loadtest.stats import Summary


def uneven(groups: Mapping[str, Summary], is_length_fixed: bool) -> Iterator[str]:
    """Yields sentences on refused requests and answers of another length.

    Where the length is fixed, the load test itself warns of other lengths.
    """
    for name, summary in sorted(groups.items()):
        if num_refused := summary.outcomes[Outcome.REJECTED]:
            yield f"{num_refused} of {summary.num_requests} requests of {name} were refused"
        if summary.num_other_length and not is_length_fixed:
            yield f"{summary.num_other_length} answers of {name} are not of the length asked for"
