"""A sweep as one JSON document: the documents of its loads, in their order."""

from typing import Any

from loadtest.campaign import Campaign
from loadtest.document import VERSION, config_document, document
from loadtest.findings import warnings_of
from loadtest.sweep.table import loads


def sweep_document(campaign: Campaign, warnings: list[str], error: str | None) -> dict[str, Any]:
    """Returns the JSON document. `error` says what ended the sweep early, if anything did."""
    last = len(campaign.benchmarks) - 1
    return {
        "loadtest_version": VERSION,
        "config": config_document(campaign.config),
        "sweep": [
            {"load": load, **document(benchmark, warnings_of(benchmark), error if number == last else None)}
            for number, (load, benchmark) in enumerate(loads(campaign))
        ],
        "warnings": warnings,
        "is_interrupted": campaign.is_interrupted,
        "error": error,
    }
