"""The JSON document of everything that was measured. Its names are a public format: add names, do not rename any."""

from dataclasses import asdict
from typing import Any

from benchmarks.peers.comparison import Comparison, Run, ServerResult
from benchmarks.peers.machine import description
from benchmarks.peers.summary import Section, Value, sections, warnings

VERSION = 1


def document(comparison: Comparison, is_complete: bool) -> dict[str, Any]:
    """Returns the document. It has no flags of the load test, one of which may be a key, but each run's settings."""
    plan = comparison.plan
    return {
        "peers_version": VERSION,
        "machine": description(),
        "idle_foreign_cpu_share": comparison.idle_foreign_cpu_share,
        "plan": {name: getattr(plan, name) for name in ("subject", "scenarios", "rounds", "limit_s", "seed")},
        "servers": [_server(result) for result in comparison.results],
        "comparison": [_section(section) for section in sections(comparison)],
        "warnings": list(warnings(comparison)),
        "is_complete": is_complete,
    }


def _server(result: ServerResult) -> dict[str, Any]:
    plan = result.plan
    return {
        "name": plan.name,
        "command": plan.command,
        "version": result.version,
        "skipped": plan.skipped,
        "starts_s": result.starts_s,
        "runs": [_run(run) for run in result.runs],
    }


def _run(run: Run) -> dict[str, Any]:
    names = ("scenario", "problem", "last_words", "warnings", "foreign_cpu_share", "loadtest")
    return {"round": run.round_number + 1, **{name: getattr(run, name) for name in names}}


def _section(section: Section) -> dict[str, Any]:
    servers = {
        name: {metric: _value(value) for metric, value in values.items()} for name, values in section.servers.items()
    }
    return {"scenario": section.scenario, "group": section.group, "servers": servers}


def _value(value: Value) -> dict[str, Any]:
    ratio = None if value.ratio is None else {"median": value.ratio.median, **asdict(value.ratio)}
    return {"median": value.median, "per_round": value.per_round, "ratio": ratio}
