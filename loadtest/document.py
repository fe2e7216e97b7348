"""Everything that was measured as one JSON document. Its names are a public format: add, do not rename."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from loadtest.benchmark import Benchmark
from loadtest.compare import METRICS, Ratio, ratio
from loadtest.config import Config
from loadtest.event_loop import EVENT_LOOP_NAME
from loadtest.record import Outcome
from loadtest.results import RunResult, TargetResult
from loadtest.server_view import CounterCheck, ServerView
from loadtest.stats import Sample, Summary

VERSION = 1


def document(benchmark: Benchmark, warnings: list[str], error: str | None) -> dict[str, Any]:
    """Returns the JSON document. `error` says what ended the run early, if anything did."""
    return {
        "loadtest_version": VERSION,
        "config": config_document(benchmark.config),
        "urls": [_target(result) for result in benchmark.results],
        "comparison": _comparison(benchmark.results),
        "warnings": warnings,
        "is_interrupted": benchmark.is_interrupted,
        "error": error,
    }


def config_document(config: Config) -> dict[str, Any]:
    """Returns the settings, without secrets and without the contents of files."""
    settings = asdict(replace(config, dataset=None))
    if (dataset := config.dataset) is not None:
        settings["dataset"] = {
            "file": dataset.file,
            "num_requests": len(dataset.entries),
            "num_skipped": dataset.num_skipped,
        }
    # Secrets stay out of reports: the key, and the values of headers that the user added.
    settings["wire"]["api_key"] = bool(config.wire.api_key)
    settings["wire"]["headers"] = sorted(config.wire.headers)
    return settings


def _target(result: TargetResult) -> dict[str, Any]:
    cpu_s = sum(run.client_cpu_s for run in result.rounds)
    wall_s = sum(run.wall_s for run in result.rounds)
    num_tokens = sum(summary.completion_tokens for summary in result.groups.values())
    return {
        "label": result.target.label,
        "url": result.target.url,
        "model": result.model,
        "groups": {name: _summary(summary) for name, summary in sorted(result.groups.items())},
        "turns": _turns(result.turns),
        "server_view": _server_view(result.server_view),
        "client": {
            "event_loop": EVENT_LOOP_NAME,
            "cpu_s": cpu_s,
            "wall_s": wall_s,
            "cores": cpu_s / wall_s if wall_s else None,
            "cpu_us_per_output_token": cpu_s / num_tokens * 1e6 if num_tokens else None,
        },
        "num_interrupted": sum(run.num_interrupted for run in result.rounds),
        "warmup_failures": result.warmup_failures,
        "rounds": [_run(run) for run in result.rounds],
    }


def _run(run: RunResult) -> dict[str, Any]:
    return {
        "groups": {name: _summary(summary) for name, summary in sorted(run.groups.items())},
        "turns": _turns(run.turns),
        "client_cpu_s": run.client_cpu_s,
        "wall_s": run.wall_s,
        "num_interrupted": run.num_interrupted,
    }


def _turns(turns: Mapping[int, Summary]) -> list[dict[str, Any]]:
    return [{"turn": number, **_summary(summary)} for number, summary in sorted(turns.items())]


def _summary(summary: Summary) -> dict[str, Any]:
    is_counted = not summary.num_without_usage
    return {
        "requests": {"total": summary.num_requests, **{end.value: summary.outcomes[end] for end in Outcome}},
        "http_statuses": {str(status): count for status, count in sorted(summary.statuses.items())},
        "failures": dict(summary.examples),
        "ttft_ms": _distribution(summary.ttft_ms),
        "itl_ms": _distribution(summary.itl_ms),
        "tpot_ms": _distribution(summary.tpot_ms),
        "e2e_ms": _distribution(summary.e2e_ms),
        "connect_ms": _distribution(summary.connect_ms),
        "send_lag_ms": _distribution(summary.send_lag_ms),
        "tokens": {
            "prompt": summary.prompt_tokens if is_counted else None,
            "output": summary.completion_tokens if is_counted else None,
            "cached_prompt": summary.cached_prompt_tokens if is_counted else None,
        },
        "throughput": {
            "requests_per_s": summary.per_second(summary.num_ok),
            "output_tokens_per_s": summary.token_rate(summary.completion_tokens),
            "prompt_tokens_per_s": summary.token_rate(summary.prompt_tokens),
        },
        "goodput": _goodput(summary),
        "num_without_usage": summary.num_without_usage,
        "num_other_prompt": summary.num_other_prompt,
        "num_other_length": summary.num_other_length,
        "num_coalesced_chunks": summary.num_coalesced,
        "num_retries": summary.num_retries,
        "retry_wait_s": summary.retry_wait_s,
        "busy_s": summary.busy_s,
    }


def _goodput(summary: Summary) -> dict[str, Any] | None:
    if not summary.targets.is_set:
        return None
    return {
        "requests": summary.num_good,
        "fraction": summary.good_fraction,
        "requests_per_s": summary.per_second(summary.num_good),
        "met": {name: summary.met[name] for name in summary.targets.limits},
    }


def _distribution(sample: Sample) -> dict[str, Any] | None:
    distribution = sample.distribution()
    return None if distribution is None else asdict(distribution)


def _server_view(view: ServerView) -> dict[str, Any] | None:
    if view.is_silent:
        return None
    return {
        **{name: _distribution(sample) for name, sample in view.phases.items()},
        "client_minus_server_ttft_ms": _distribution(view.ttft_beyond_server_ms),
        "client_minus_server_itl_ms": _distribution(view.itl_beyond_server_ms),
        "counters": [_check(check) for check in view.checks],
        "problems": view.problems,
    }


def _check(check: CounterCheck) -> dict[str, Any]:
    return {**asdict(check), "problems": check.problems}


def _comparison(results: list[TargetResult]) -> dict[str, Any]:
    """Returns {"B/A": {group: {metric: ratio}}}."""
    compared: dict[str, Any] = {}
    for other in results[1:]:
        base = results[0]
        compared[f"{other.target.label}/{base.target.label}"] = {
            group: {
                name: _ratio(found)
                for name, metric in METRICS.items()
                if (found := ratio(metric, group, base.rounds, other.rounds)) is not None
            }
            for group in sorted(base.groups)
        }
    return compared


def _ratio(found: Ratio) -> dict[str, Any]:
    return {
        "median": found.median,
        "mean": found.mean,
        "ci95": found.interval and list(found.interval),
        "per_round": list(found.per_round),
    }
