"""Sweeps: the load of each point, the table, the document and the picture."""

import os
import signal
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from loadtest.arguments import parse_config
from loadtest.errors import UsageError
from loadtest.sweep.svg import Line, Panel, Scale, picture
from tests.loadtest.fake_server import FakeServer, running
from tests.loadtest.program import QUICK, Capture, Run, after_requests

SHORT = (*QUICK[:4], "--quiet")


def schedules(*flags: str) -> Any:
    sweep = parse_config(["http://a", *flags]).sweep
    assert sweep is not None
    return sweep.schedules


def test_each_concurrency_has_requests_enough_for_its_streams() -> None:
    found = schedules("--sweep", "1,8,16")
    assert [(point.concurrency, point.num_requests) for point in found] == [(1, 32), (8, 32), (16, 64)]
    assert all(point.rate_per_s is None for point in found)
    assert {point.num_requests for point in schedules("--sweep", "1,16", "--requests", "9")} == {9}
    assert {point.num_requests for point in schedules("--sweep", "1,16", "--duration", "5")} == {None}
    agents = schedules("--sweep", "1,4", "--workload", "agent-sessions", "--turns", "2")
    assert [(point.num_sessions, point.num_requests) for point in agents] == [(1, 2), (4, 8)]


def test_rates_make_open_loops() -> None:
    found = schedules("--sweep", "rate:0.5,2", "--concurrency", "9")
    assert [(point.rate_per_s, point.concurrency, point.num_requests) for point in found] == [(0.5, 9, 32), (2, 9, 32)]


@pytest.mark.parametrize(
    "text", ["", "1", "1,x", "2,1", "1,1", "0,1", "0.5,1", "rate:", "rate:0,1", "rate:1,nan", "speed:1,2"]
)
def test_loads_that_make_no_sense_are_refused(text: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        parse_config(["http://a", "--sweep", text])
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "flags",
    [
        ("--plot", "a.svg"),
        ("--sweep", "1,2", "--plot", "a.png"),
        ("--sweep", "1,2", "--concurrency", "3"),
        ("--sweep", "1,2", "--rate", "3"),
        ("--sweep", "rate:1,2", "--rate", "3"),
        ("--sweep", "rate:1,2", "--workload", "agent-sessions"),
        ("--sweep", "rate:1,2", "--workload", "long-among-decoders"),
    ],
)
def test_flags_that_do_not_go_with_a_sweep_are_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        parse_config(["http://a", *flags])


def test_a_sweep_takes_the_place_of_arrival_times(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text('{"prompt": "a", "arrival_s": 0}\n{"prompt": "a", "arrival_s": 5}\n', encoding="utf-8")
    flags = ("--dataset", str(path), "--sweep", "1,2")
    assert [(point.is_open, point.concurrency) for point in schedules(*flags)] == [(False, 1), (False, 2)]
    for wrong in (("--arrivals",), ("--speedup", "2")):
        with pytest.raises(UsageError):
            schedules(*flags, *wrong)


def test_a_sweep_measures_each_load_with_prompts_of_its_own(capsys: Capture, tmp_path: Path) -> None:
    picture_file = tmp_path / "sweep.svg"
    with running(FakeServer(first_token_s=0.01)) as fake:
        flags = (
            "--sweep",
            "1,3",
            "--requests",
            "6",
            "--prompt-len",
            "20",
            "--plot",
            str(picture_file),
            "--warmup",
            "0",
        )
        run = Run(capsys, fake.url, *SHORT, *flags, "--goodput", "ttft:60000", "--strict")
    assert (run.code, fake.peak_in_flight) == (0, 3)
    points = run.document["sweep"]
    assert [(point["load"], point["config"]["schedule"]["concurrency"]) for point in points] == [(1, 1), (3, 3)]
    assert [point["urls"][0]["groups"]["all"]["requests"]["ok"] for point in points] == [6, 6]
    assert points[0]["config"]["seed"] != points[1]["config"]["seed"]
    assert len({str(body["prompt"]) for body in fake.bodies}) == len(fake.bodies) == 12
    assert run.document["config"]["sweep"]["kind"] == "concurrency"
    for word in ("concurrency", "TTFT p99 ms", "goodput", "100%"):
        assert word in run.out
    drawn = "".join(ElementTree.parse(picture_file).getroot().itertext())
    for title in ("TTFT, ms", "ITL, ms", "output tokens per second", "good requests, %", fake.url):
        assert title in drawn


def test_warnings_name_their_load(capsys: Capture) -> None:
    with running(FakeServer()) as fake:
        run = Run(capsys, fake.url, *SHORT, "--sweep", "1,3", "--requests", "2")
    assert run.document["warnings"] == ["concurrency 3, A: only 2 of the 3 streams had a request (--requests)"]
    assert [point["warnings"] for point in run.document["sweep"]] == [
        [],
        ["A: only 2 of the 3 streams had a request (--requests)"],
    ]


def test_a_sweep_of_rates_over_two_servers_has_a_table_and_a_color_each(capsys: Capture, tmp_path: Path) -> None:
    picture_file = tmp_path / "sweep.svg"
    with running(FakeServer()) as one, running(FakeServer()) as other:
        flags = ("--sweep", "rate:100,200", "--requests", "3", "--rounds", "1", "--plot", str(picture_file))
        run = Run(capsys, one.url, other.url, *SHORT, *flags)
    assert [[url["label"] for url in point["urls"]] for point in run.document["sweep"]] == [["A", "B"]] * 2
    assert run.out.count("requests/s offered") == 2 or run.out.count("offered") == 2
    colors = {line.get("stroke") for line in ElementTree.parse(picture_file).getroot() if line.tag.endswith("polyline")}
    assert len(colors) == 2


def test_an_interrupt_ends_the_whole_sweep_and_keeps_its_results(capsys: Capture) -> None:
    with running(FakeServer(gap_s=0.01)) as fake:
        after_requests(fake, 8, lambda: os.kill(os.getpid(), signal.SIGINT))
        run = Run(capsys, fake.url, *SHORT, "--sweep", "1,2,3", "--requests", "5", "--warmup", "0")
    assert (run.code, run.document["is_interrupted"]) == (130, True)
    assert [point["load"] for point in run.document["sweep"]] == [1, 2]


def test_a_picture_that_cannot_be_written_is_told_before_any_load(capsys: Capture) -> None:
    with running(FakeServer()) as fake:
        run = Run(capsys, fake.url, *SHORT, "--sweep", "1,2", "--plot", "/nowhere/a.svg")
    assert (run.code, fake.bodies) == (2, [])
    assert run.err == "loadtest: --plot: cannot write /nowhere/a.svg: No such file or directory\n"


def line(*points: tuple[float, float]) -> Line:
    return Line("a", 0, points)


def elements(svg: str, tag: str) -> list[ElementTree.Element]:
    return [each for each in ElementTree.fromstring(svg).iter() if each.tag.endswith(f"}}{tag}")]


def test_larger_values_are_drawn_higher_and_larger_loads_to_the_right() -> None:
    svg = picture("t", "x", ["a"], [Panel("p", (line((1, 5), (2, 9), (3, 1)),))])
    lefts, heights = ([float(c.get(name) or "") for c in elements(svg, "circle")] for name in ("cx", "cy"))
    assert lefts == sorted(lefts)
    assert heights[1] < heights[0] < heights[2]
    assert [title.text for title in elements(svg, "title")] == ["a at 1: 5", "a at 2: 9", "a at 3: 1"]


def test_a_panel_without_a_point_is_left_out_and_names_are_escaped() -> None:
    svg = picture("a<b", "x&y", ["<s>"], [Panel("empty", (line(),)), Panel("p", (line((1, 0)),))])
    texts = [text.text for text in elements(svg, "text")]
    assert "empty" not in texts and {"a<b", "x&y", "<s>", "p"} <= set(texts)
    assert picture("t", "x", ["a"], []).endswith("</svg>\n")


def test_values_far_apart_have_a_logarithmic_scale_where_it_may_be() -> None:
    values = line((1, 1), (2, 1000))
    labels = [
        {text.text for text in elements(picture("t", "x", ["a"], [Panel("p", (values,), may)]), "text")}
        for may in (True, False)
    ]
    assert "10" in labels[0] and "10" not in labels[1] and "0" in labels[1]


@pytest.mark.parametrize(
    ("low", "high", "is_log"), [(0, 0.004, False), (0, 7, False), (3, 1000, True), (0.2, 9e6, True), (40, 60, False)]
)
def test_ticks_are_few_and_within_the_scale(low: float, high: float, is_log: bool) -> None:
    scale = Scale(low, high, 100, 0, is_log)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 8
    assert ticks == sorted(ticks) and all(0 <= scale.place(tick) <= 100 for tick in ticks)
