"""What the stages of `tests.gpu.one_look` report: one JSON line each, written at once, since a stage may be killed."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Finding:
    """One result of a stage."""

    stage: str
    name: str
    value: Any
    unit: str = ""
    predicted: str = ""
    """What was expected before anything ran."""
    ok: bool | None = None
    """Whether it is as it must be; None if it is a measurement."""


@dataclass(frozen=True)
class Look:
    """What a stage runs with."""

    stage: str
    device: torch.device
    out: Path
    """The directory of all results."""

    @property
    def is_small(self) -> bool:
        """Whether sizes are those of a rehearsal on a CPU."""
        return self.device.type == "cpu"

    def report(self, name: str, value: Any, unit: str = "", predicted: str = "", ok: bool | None = None) -> None:
        """Writes a finding to the file, and to the stage's log."""
        finding = Finding(self.stage, name, value, unit, predicted, ok)
        write(self.out, finding)
        print(line_of(finding), flush=True)

    def check(self, name: str, is_right: bool, detail: str = "") -> None:
        """Reports something that must hold."""
        self.report(name, detail or ("holds" if is_right else "does not hold"), ok=is_right)


def results_file(out: Path) -> Path:
    return out / "one_look.jsonl"


def write(out: Path, finding: Finding) -> None:
    with results_file(out).open("a") as file:
        file.write(json.dumps(asdict(finding)) + "\n")


def read(out: Path, stages: Sequence[str]) -> list[Finding]:
    """Returns what these stages have reported so far."""
    try:
        lines = results_file(out).read_text().splitlines()
    except FileNotFoundError:
        return []
    return [each for line in lines if (each := Finding(**json.loads(line))).stage in stages]


def line_of(finding: Finding) -> str:
    value = f"{finding.value:,.4g}" if isinstance(finding.value, float) else str(finding.value)
    mark = {True: "ok", False: "WRONG", None: ""}[finding.ok]
    return f"{finding.stage:10} {finding.name:52} {f'{value} {finding.unit}':28} {finding.predicted:24} {mark}".rstrip()


def table(findings: Iterable[Finding]) -> str:
    head = f"{'stage':10} {'what':52} {'result':28} {'predicted':24}"
    return "\n".join([head, "-" * len(head), *map(line_of, findings)])
