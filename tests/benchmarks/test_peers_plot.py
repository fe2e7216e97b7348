"""Plots of documents, and their refusal before anything is measured."""

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.peers import plot
from benchmarks.peers.cli import main
from benchmarks.peers.plot import check_plot, draw
from benchmarks.peers.report import SHOWN
from loadtest.errors import UsageError


def value(*per_round: float) -> dict[str, Any]:
    return {"median": sorted(per_round)[len(per_round) // 2], "per_round": list(per_round), "ratio": None}


DOCUMENT = {
    "servers": [{"name": "ours"}, {"name": "theirs"}, {"name": "absent"}],
    "comparison": [
        {"scenario": "S1", "group": "all", "servers": {"ours": {name: value(1.0, 2.0, 4.0) for name in SHOWN}}},
        {"scenario": "S2", "group": "all", "servers": {"ours": {}, "theirs": {"TTFT p50 ms": value(3.0)}}},
    ],
}


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install -e '\.\[plot\]'"):
        check_plot(tmp_path / "x.svg")


def test_a_picture_that_could_not_be_written_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda _: SimpleNamespace())
    check_plot(tmp_path / "x.svg")
    for path in (tmp_path / "x.txt", tmp_path / "no" / "x.svg"):
        with pytest.raises(UsageError):
            check_plot(path)


def test_where_no_picture_can_be_written_nothing_is_measured_or_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda _: SimpleNamespace())
    (tmp_path / "x.svg").mkdir()
    (tmp_path / "servers.toml").write_text('[[server]]\nname = "a"\ncommand = "true"\n')
    (tmp_path / "peers.json").write_text(json.dumps(DOCUMENT))
    for file in ("servers.toml", "peers.json"):
        assert main([str(tmp_path / file), "--plot", str(tmp_path / "x.svg")]) == 2
        assert capsys.readouterr().err == f"peers: --plot: {tmp_path / 'x.svg'} is a directory\n"


def test_a_document_is_drawn_without_measuring_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plot, "find_spec", lambda _: SimpleNamespace())
    monkeypatch.setattr("benchmarks.peers.cli.draw", lambda document, path: drawn.append((document, path)))
    (tmp_path / "peers.json").write_text(json.dumps(DOCUMENT))
    assert main([str(tmp_path / "peers.json"), "--plot", str(tmp_path / "x.svg")]) == 0
    assert drawn == [(DOCUMENT, tmp_path / "x.svg")]
    assert main([str(tmp_path / "peers.json")]) == 2
    assert main([str(tmp_path / "other.json"), "--plot", str(tmp_path / "x.svg")]) == 2


def test_a_document_that_is_not_there_is_not_called_a_wrong_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda _: SimpleNamespace())
    assert main([str(tmp_path / "no.json"), "--plot", str(tmp_path / "x.svg")]) == 2
    error = capsys.readouterr().err
    assert "No such file" in error and "not a document" not in error


@pytest.mark.parametrize(
    "asked",
    ["--dry-run", "--only a", "--rounds 2", "--json x.json", "--scenario S1", "--subject a", "--limit 3", "--seed 0",
     "--logs x", "-- --warmup 1"],
)  # fmt: skip
def test_what_has_no_effect_on_a_picture_is_refused(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plot, "find_spec", lambda _: SimpleNamespace())
    monkeypatch.setattr("benchmarks.peers.cli.draw", lambda *arguments: drawn.append(arguments))
    (tmp_path / "peers.json").write_text(json.dumps(DOCUMENT))
    code = main([str(tmp_path / "peers.json"), "--plot", str(tmp_path / "x.svg"), *asked.split()])
    assert (code, drawn) == (2, [])
    assert f"no effect: {asked.removeprefix('-- ').split()[0]}" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.parametrize("suffix", plot.FORMATS)
def test_every_format_is_drawn_also_with_gaps(suffix: str, tmp_path: Path) -> None:
    draw(DOCUMENT, tmp_path / f"x{suffix}")
    draw({"servers": [], "comparison": []}, tmp_path / f"empty{suffix}")
    assert (tmp_path / f"x{suffix}").stat().st_size > (tmp_path / f"empty{suffix}").stat().st_size > 0
