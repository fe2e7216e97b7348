import io

from rich.console import Console

from loadtest.config import Schedule
from loadtest.progress import ProgressBar
from loadtest.record import Outcome, Record, Reply


def shown(schedule: Schedule, *outcomes: Outcome) -> str:
    output = io.StringIO()
    with ProgressBar(Console(file=output, force_terminal=True, width=100)) as progress:
        progress.begin("A round 1/1", schedule)
        for outcome in outcomes:
            progress.on_record(Record("all", 1, 0.0, Reply(outcome, 0.0, 0.0)))
    return output.getvalue()


def test_the_bar_counts_what_ended_and_what_failed() -> None:
    text = shown(Schedule(num_requests=3), Outcome.OK, Outcome.OK, Outcome.BROKEN)
    assert "A round 1/1" in text
    assert "3 ended, 1 failed" in text


def test_a_run_of_unknown_size_has_a_bar_by_time() -> None:
    assert "1 ended, 0 failed" in shown(Schedule(duration_s=60), Outcome.OK)
