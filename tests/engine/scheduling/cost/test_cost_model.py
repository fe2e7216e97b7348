"""The cost model finds a hidden linear law, follows its changes, and bounds durations."""

import random
from collections.abc import Iterator
from math import inf
from operator import mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduling.cost.cost_model import CostModel, Work

TRUSTED = (1, 32, 1 << 30, 1 << 15, 8)
ALIKE = (1.0, 128.0, 1.0, 8256.0, 0.0)


def cost(law: Work, work: Work) -> float:
    return sum(rate * amount for rate, amount in zip(law, work, strict=True))


def works(rng: random.Random) -> Iterator[Work]:
    """Yields the work of prefill steps of all sizes and positions in their prompts; some are scored."""
    while True:
        count, start = rng.randint(1, 500), rng.randint(0, 4000)
        pairs = count * start + count * (count + 1) // 2
        yield 1, count, rng.randint(1, 4), pairs, count * rng.randint(0, 1)


def fitted(law: Work, num_seen: int, noise: float = 0.0, seed: int = 1) -> CostModel:
    rng, model = random.Random(seed), CostModel(TRUSTED)
    for work, _ in zip(works(rng), range(num_seen), strict=False):
        model.observe(work, cost(law, work) * rng.lognormvariate(0, noise))
    return model


class PlainCostModel(CostModel):
    """Goes over every amount anew in each sweep, without what is known before the first."""

    def _sweep(self) -> None:
        for _ in range(8):
            for index, row in enumerate(self._products):
                if row[index] >= 1e-9:
                    old = self._coefficients[index]
                    rest = self._sums[index] - sum(map(mul, row, self._coefficients)) + row[index] * old
                    self._coefficients[index] = max(0.0, rest / row[index])


def observed(model: CostModel, work: Work, *durations: float) -> CostModel:
    for seconds in durations:
        model.observe(work, seconds)
    return model


rates = st.floats(0.1, 10)
laws = st.builds(lambda a, b, c, d, e: (0.02 * a, 4e-4 * b, 0.002 * c, 1e-7 * d, 1e-3 * e), *[rates] * 5)


@settings(max_examples=60, deadline=None)
@given(law=laws, seed=st.integers(0, 1000))
def test_a_hidden_law_is_found(law: Work, seed: int) -> None:
    model = fitted(law, 150)
    for work, _ in zip(works(random.Random(seed)), range(20), strict=False):
        assert model.predict(work) == pytest.approx(cost(law, work), rel=0.05)


def test_each_amount_gets_its_own_coefficient() -> None:
    law = (0.03, 5e-4, 0.004, 2e-7, 1e-3)
    assert fitted(law, 600).coefficients == pytest.approx(law, rel=0.02)


def test_an_amount_that_costs_nothing_gets_no_negative_coefficient() -> None:
    model = CostModel(TRUSTED)
    for count in (
        16,
        400,
        64,
        128,
        8,
        256,
        32,
    ):  # what costs less and less would be fitted by a negative price of pairs
        model.observe((1, count, 1, count * (count + 1) / 2, 0), 0.01 * count**0.5)
        assert all(rate >= 0 for rate in model.coefficients)


def test_nothing_is_predicted_before_anything_was_seen() -> None:
    assert CostModel(TRUSTED).predict(ALIKE) is None


def test_only_little_is_trusted_before_anything_was_seen() -> None:
    model = CostModel(TRUSTED)
    assert (model.bound((1, 32, 1, 100, 0)), model.bound((1, 33, 1, 100, 0))) == (0, inf)


@pytest.mark.parametrize("index", [1, 3, 4])
def test_twice_what_was_seen_is_trusted_of_each_amount_and_no_more(index: int) -> None:
    work = (1, 400, 1, 80_000, 400)
    model = observed(CostModel(TRUSTED), work, 0.2)
    double = tuple(amount * (2 if at == index else 1) for at, amount in enumerate(work))
    more = tuple(amount + (at == index) for at, amount in enumerate(double))
    assert model.bound(double) < inf == model.bound(more)


def test_what_was_seen_long_ago_is_no_longer_trusted() -> None:
    model = observed(CostModel(TRUSTED), (1, 1000, 1, 500_500, 0), 0.5)
    assert observed(model, ALIKE, *[0.08] * 10).bound((1, 1000, 1, 500_500, 0)) < inf
    assert observed(model, ALIKE, *[0.08] * 200).bound((1, 257, 1, 8256, 0)) == inf > model.bound((1, 256, 1, 8256, 0))


def test_little_stays_trusted_however_little_was_seen() -> None:
    assert observed(CostModel(TRUSTED), (1, 1, 1, 1, 0), *[0.05] * 300).bound(TRUSTED) < inf


@settings(max_examples=60, deadline=None)
@given(
    law=laws,
    seed=st.integers(0, 100),
    num_seen=st.integers(0, 30),
    work=st.tuples(*[st.integers(0, 5000)] * 5),
    more=st.tuples(*[st.integers(0, 5000)] * 5),
)
def test_the_bound_never_falls_as_work_grows(law: Work, seed: int, num_seen: int, work: Work, more: Work) -> None:
    model = fitted(law, num_seen, noise=0.3, seed=seed)
    assert model.bound(work) <= model.bound(tuple(a + b for a, b in zip(work, more, strict=True)))


def test_work_that_is_all_alike_is_predicted_and_its_neighbours_sanely() -> None:
    model = observed(CostModel(TRUSTED), ALIKE, *[0.08] * 300)
    assert model.predict(ALIKE) == pytest.approx(0.08)
    assert 0.04 <= (model.predict((1, 64, 1, 2080, 0)) or 0) <= 0.08
    assert 0.08 <= model.bound((1, 256, 1, 16_500, 0)) <= 0.32


def test_what_was_known_survives_work_that_is_all_alike() -> None:
    law = (0.03, 5e-4, 0.004, 2e-7, 1e-3)
    model = observed(fitted(law, 300), ALIKE, *[cost(law, ALIKE)] * 3000)
    for work in ((1, 32, 1, 528, 0), (1, 500, 2, 125_000, 0), (1, 100, 1, 5000, 100)):  # here predict, not bound
        assert model.predict(work) == pytest.approx(cost(law, work), rel=0.05)


def test_an_outlier_changes_the_bound_little_and_not_for_long() -> None:
    model = observed(CostModel(TRUSTED), ALIKE, *[0.08] * 100)
    before = model.bound(ALIKE)
    observed(model, ALIKE, 0.24)
    assert before < model.bound(ALIKE) < 1.1 * before
    assert observed(model, ALIKE, *[0.08] * 20).bound(ALIKE) < 1.05 * before


def test_a_first_step_that_takes_ten_times_as_long_is_soon_forgotten() -> None:
    model = observed(CostModel(TRUSTED), ALIKE, 0.8, *[0.08] * 5)
    assert model.predict(ALIKE) == pytest.approx(0.08, rel=0.1)


@pytest.mark.parametrize("factor", [1 / 3, 3])
def test_a_machine_that_changes_its_speed_is_followed(factor: float) -> None:
    model = observed(CostModel(TRUSTED), ALIKE, *[0.08] * 500)
    assert observed(model, ALIKE, *[0.08 * factor] * 100).predict(ALIKE) == pytest.approx(0.08 * factor, rel=0.2)


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.2])
def test_durations_are_rarely_above_the_bound(noise: float) -> None:
    law = (0.03, 5e-4, 0.004, 2e-7, 1e-3)
    rng, model = random.Random(5), fitted(law, 300, noise)
    misses = 0
    for work, _ in zip(works(rng), range(3000), strict=False):
        seconds = cost(law, work) * rng.lognormvariate(0, noise)
        misses += seconds > model.bound(work)
        model.observe(work, seconds)
    assert misses <= 0.06 * 3000


def test_on_a_quiet_machine_the_bound_is_hardly_more_than_the_prediction() -> None:
    model = observed(CostModel(TRUSTED), ALIKE, *[0.08] * 300)
    assert 0.08 <= model.bound(ALIKE) <= 0.08 * 1.05


def test_no_time_at_all_is_no_error() -> None:
    model = observed(CostModel(TRUSTED), ALIKE, 0.0, 0.0, 0.0)
    assert model.predict(ALIKE) == pytest.approx(0.0, abs=1e-6)


def test_a_machine_that_does_as_it_likes_makes_the_bound_no_more_than_twice_the_prediction() -> None:
    model = observed(CostModel(TRUSTED), ALIKE, *[0.08, 0.8] * 300)
    assert model.bound(ALIKE) == pytest.approx(2 * (model.predict(ALIKE) or 0))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), noise=st.sampled_from([0.0, 0.3]))
def test_what_is_learnt_is_the_plain_descent_to_the_last_bit(seed: int, noise: float) -> None:
    rng, models = random.Random(seed), (CostModel(TRUSTED), PlainCostModel(TRUSTED))
    for work, _ in zip(works(rng), range(30), strict=False):
        seconds = cost((1e-2, 4e-5, 0.0, 1e-9, 1e-4), work) * rng.lognormvariate(0, noise)
        for model in models:
            model.observe(work, seconds)
        assert models[0].coefficients == models[1].coefficients
