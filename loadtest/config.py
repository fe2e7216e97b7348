"""The config of a run, frozen and complete, and the defaults and named scenarios of the command line."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from loadtest.datasets.entries import Dataset
from loadtest.endpoints import Endpoint, WireOptions
from loadtest.errors import UsageError
from loadtest.stats import Targets
from loadtest.workload import Shape, WorkloadKind

API_KEY_VARIABLES = ("TWOSTEP_API_KEY", "OPENAI_API_KEY")  # environment variables; the first that is set counts


@dataclass(frozen=True)
class Schedule:
    """When requests are sent: an open loop with `rate_per_s` or the arrival times of a file, else a closed loop."""

    concurrency: int | None = None  # closed loop: streams; open loop: maximum of requests in flight
    rate_per_s: float | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    num_warmup: int = 2
    long_every_s: float = 2.0
    keeps_arrivals: bool = False  # each request of the file is sent at its arrival time
    num_sessions: int | None = None  # of agents; None without a limit
    think_s: float = 1.0  # of an agent between two turns, on average
    speedup: float = 1.0  # by which these times are divided

    @property
    def is_open(self) -> bool:
        return self.rate_per_s is not None or self.keeps_arrivals


class SweepKind(StrEnum):
    """What differs between the points of a sweep."""

    CONCURRENCY = "concurrency"
    RATE = "rate"


@dataclass(frozen=True)
class Sweep:
    """The loads that are measured one after the other, and the schedule of each."""

    kind: SweepKind
    loads: tuple[float, ...]
    schedules: tuple[Schedule, ...]
    plot_file: str | None = None


@dataclass(frozen=True)
class Config:
    """All settings of the command line."""

    urls: tuple[str, ...]
    seed: int
    scenario: str | None = None
    rounds: int = 1
    shape: Shape = field(default_factory=Shape)
    dataset: Dataset | None = field(default=None, repr=False)
    is_salted: bool = True  # prompts of a file begin with a mark of their run
    schedule: Schedule = field(default_factory=Schedule)  # of a sweep: that of its first point
    sweep: Sweep | None = None
    point: str = ""  # of a sweep that this config is one load of: which, in words
    wire: WireOptions = field(default_factory=WireOptions)
    targets: Targets = field(default_factory=Targets)
    wait_s: float = 0.0
    is_quiet: bool = False
    is_strict: bool = False
    json_file: str | None = None

    def __post_init__(self) -> None:
        shape, schedule = self.shape, self.schedule
        if shape.kind is WorkloadKind.SHARED_PREFIX and not 0 < shape.prefix_len < shape.prompt_len:
            raise UsageError("shared-prefix needs 0 < --prefix-len < --prompt-len (the whole prompt's length)")
        if shape.kind is not WorkloadKind.SHARED_PREFIX and shape.prefix_len:
            raise UsageError("--prefix-len belongs to --workload shared-prefix")
        if shape.kind is WorkloadKind.LONG_AMONG_DECODERS and schedule.rate_per_s is not None:
            raise UsageError("long-among-decoders is a closed loop: --rate does not go with it (--long-every does)")
        if shape.kind is WorkloadKind.AGENT_SESSIONS and self.wire.endpoint is Endpoint.COMPLETIONS:
            raise UsageError("agent-sessions have messages: --endpoint chat or responses")
        if self.wire.endpoint is Endpoint.RESPONSES and not (self.wire.include_usage and self.wire.expects_done):
            raise UsageError(
                "responses have usage and a last event always: --no-include-usage and --no-done are not theirs"
            )


# Defaults by the flags' names in argparse. A given flag wins over the scenario, which wins over these.
DEFAULT_NUM_REQUESTS = 32
DEFAULTS: Mapping[str, Any] = {
    "workload": WorkloadKind.RANDOM,
    "prompt_len": 128,
    "output_len": 128,
    "vocab_size": 1000,
    "prefix_len": 0,
    "long_prompt_len": 2048,
    "long_output_len": 16,
    "long_every": 2.0,
    "turns": 8,
    "system_len": 512,
    "tools": 4,
    "think_time": 1.0,
}
DECODER_DEFAULTS: Mapping[str, Any] = {**DEFAULTS, "prompt_len": 32, "output_len": 256, "concurrency": 8}
SCENARIOS: Mapping[str, Mapping[str, Any]] = {
    "S1": {"concurrency": 1, "prompt_len": 128, "output_len": 128, "requests": 8},
    "S2": {"concurrency": 8, "prompt_len": 256, "output_len": 128, "requests": 32},
    "S3": {"concurrency": 32, "prompt_len": 256, "output_len": 128, "requests": 96},
    "S4": {"concurrency": 4, "prompt_len": 2048, "output_len": 64, "requests": 8},
    "S5": {
        "workload": WorkloadKind.LONG_AMONG_DECODERS,
        "concurrency": 8,
        "prompt_len": 32,
        "output_len": 256,
        "requests": 8,
        "long_prompt_len": 2048,
        "long_output_len": 16,
        "long_every": 2.0,
    },
}
