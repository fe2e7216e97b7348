"""`python -m benchmarks.plans`: what its table says of predictions and measurements."""

from benchmarks.plans import Comparison, row
from twostep.commands.burst import BurstTimes


def test_a_row_has_each_prediction_its_measurement_and_their_ratio() -> None:
    found = Comparison(4, BurstTimes(0.5, 0.020, 300.0), BurstTimes(1.0, 0.010, 200.0))
    assert row("m", found) == ("m", "4", "0.50", "1.00", "0.50", "20.00", "10.00", "2.00", "300.00", "200.00", "1.50")


def test_tokens_that_come_at_once_have_no_ratio_of_gaps() -> None:
    found = Comparison(1, BurstTimes(0.5, 0.020, 300.0), BurstTimes(1.0, 0.0, 200.0))
    assert row("m", found)[5:8] == ("20.00", "0.00", "-")
