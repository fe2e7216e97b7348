"""Dates and times that the formats of JSON Schema allow: those of a calendar and a clock, as programs read them."""

import json
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from random import Random
from typing import Any

import pytest

from engine.grammar.lark import JsonSchema
from tests.engine.grammar.grammars import accepted, accepts

PARSERS: dict[str, Callable[[str], Any]] = {
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "date-time": datetime.fromisoformat,
}


def taken(schema: dict[str, Any], *texts: str) -> list[str]:
    """Returns the texts that are values of the schema."""
    return [json.loads(text) for text in accepted(JsonSchema(schema), *map(json.dumps, texts))]


def test_a_day_is_in_its_month_and_the_29th_of_february_in_its_year() -> None:
    days = [f"{year}-02-29" for year in (1900, 2000, 2023, 2024, 2100, 2400)]
    assert taken({"format": "date"}, *days) == ["2000-02-29", "2024-02-29", "2400-02-29"]
    ends = [f"2023-{month:02}-{day}" for month in range(14) for day in (28, 30, 31)]
    for end in ends:
        assert bool(taken({"format": "date"}, end)) == is_read("date", end)


def is_read(name: str, text: str) -> bool:
    try:
        PARSERS[name](text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", PARSERS)
def test_what_a_clock_and_a_calendar_have_is_allowed(name: str) -> None:
    rng = Random(1)
    for _ in range(30):
        moment = datetime(1, 1, 1) + timedelta(seconds=rng.randrange(9998 * 365 * 86400))
        day, clock = moment.isoformat().split("T")
        clock += rng.choice(["Z", "+00:00", "-23:59", "+05:30"])
        text = {"date": day, "time": clock, "date-time": f"{day}T{clock}"}[name]
        assert is_read(name, text) and taken({"type": "string", "format": name}, text) == [text]


def test_a_minute_has_sixty_seconds() -> None:
    times = ["23:59:59Z", "23:59:60Z", "10:00:60+01:00", "10:00:00.5z", "24:00:00Z", "10:60:00Z", "10:00:00"]
    assert taken({"format": "time"}, *times) == ["23:59:59Z", "10:00:00.5z"]
    moments = ["2023-02-28T10:00:00Z", "2023-02-29T10:00:00Z", "2023-02-28T10:00:60Z", "2023-02-28 10:00:00Z"]
    assert taken({"format": "date-time"}, *moments) == ["2023-02-28T10:00:00Z"]


@pytest.mark.parametrize("beside", [{}, {"allOf": [{"maxLength": 10}]}, {"type": ["string", "null"]}])
def test_a_format_and_a_pattern_hold_both(beside: dict[str, Any]) -> None:
    schema = {"format": "date", "pattern": "^2023|29$", **beside}
    assert taken(schema, "2023-02-28", "2023-02-29", "2024-02-29", "2024-02-28") == ["2023-02-28", "2024-02-29"]


def test_a_format_says_nothing_of_other_types() -> None:
    assert accepts(JsonSchema({"format": "date"}), "5")
    assert not accepts(JsonSchema({"format": "date", "type": ["integer", "string"]}), '"5"')
