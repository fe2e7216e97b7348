"""Draws lines over a common x axis, in panels above each other, as the text of an SVG picture. Nothing here knows what
is drawn."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

_COLORS = ("#1f6feb", "#d9480f", "#2b8a3e", "#9c36b5", "#b08900", "#5c677d")
_WIDTH, _PANEL_HEIGHT, _LEFT, _RIGHT = 760, 220, 72, 20
_TOP, _LEGEND_LINE, _PANEL_TOP, _PANEL_GAP = 34, 20, 26, 26
_STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600; font-size: 14px }
.back { fill: #ffffff } .grid { stroke: #d0d7de; stroke-width: 1 } .line { fill: none; stroke-width: 2 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .back { fill: #0d1117 } .grid { stroke: #30363d } }"""


@dataclass(frozen=True)
class Line:
    """Points (x, y), in the color of its series; dashed where a series has a second line in the panel."""

    name: str
    series: int
    points: tuple[tuple[float, float], ...]
    is_dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Lines with a common y axis, which is logarithmic where values are far apart and `may_be_log`."""

    title: str
    lines: tuple[Line, ...]
    may_be_log: bool = False


@dataclass(frozen=True)
class Scale:
    """Places values between two positions, which may be in either order."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        low, high, at = (
            (math.log(v) for v in (self.low, self.high, value)) if self.is_log else (self.low, self.high, value)
        )
        return self.begin + (at - low) / (high - low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Returns round values within the scale, from 2 to about 8 of them."""
        if not self.is_log:
            step = _round_step((self.high - self.low) / 5)
            return [number * step for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        fine = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
        inside = [value for value in fine if self.low <= value <= self.high]
        return inside if len(inside) <= 8 else [value for value in inside if f"{value:e}".startswith("1")]


def picture(title: str, x_label: str, series: Sequence[str], panels: Sequence[Panel]) -> str:
    """Returns the SVG text; `series` are the names in the legend. Panels without a point are left out."""
    drawn = [panel for panel in panels if any(line.points for line in panel.lines)]
    xs = sorted({x for panel in drawn for line in panel.lines for x, _ in line.points})
    top = _TOP + _LEGEND_LINE * len(series)
    height = top + (_PANEL_HEIGHT + _PANEL_GAP) * len(drawn) + 24
    body = [f'<text class="title" x="16" y="24">{escape(title)}</text>', *_legend(series)]
    for number, panel in enumerate(drawn):
        body += _panel(panel, xs, top + number * (_PANEL_HEIGHT + _PANEL_GAP))
    body.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2:g}" y="{height - 12}" text-anchor="middle">{escape(x_label)}</text>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}">',
            f"<style>{_STYLE}</style>",
            f'<rect class="back" width="{_WIDTH}" height="{height}"/>',
            *body,
            "</svg>\n",
        ]
    )


def _legend(series: Sequence[str]) -> Iterator[str]:
    for number, name in enumerate(series):
        y = _TOP + _LEGEND_LINE * number + 10
        yield f'<line class="line" x1="16" y1="{y - 4}" x2="44" y2="{y - 4}" stroke="{_color(number)}"/>'
        yield f'<text x="52" y="{y}">{escape(name)}</text>'


def _panel(panel: Panel, xs: list[float], top: float) -> Iterator[str]:
    x = _x_scale(xs)
    y = _y_scale(panel, top + _PANEL_HEIGHT, top + _PANEL_TOP)
    yield f'<text x="16" y="{top + 16:g}">{escape(panel.title)}</text>'
    for tick in y.ticks():
        at = f"{y.place(tick):.1f}"
        yield f'<line class="grid" x1="{_LEFT}" y1="{at}" x2="{_WIDTH - _RIGHT}" y2="{at}"/>'
        yield f'<text x="{_LEFT - 8}" y="{float(at) + 4:.1f}" text-anchor="end">{_number(tick)}</text>'
    last = -math.inf
    for value in xs:
        if (at_x := x.place(value)) - last >= 34:  # else its label would touch the one before
            last = at_x
            yield f'<text x="{at_x:.1f}" y="{top + _PANEL_HEIGHT + 16:g}" text-anchor="middle">{_number(value)}</text>'
    for line in panel.lines:
        yield from _line(line, x, y)


def _line(line: Line, x: Scale, y: Scale) -> Iterator[str]:
    places = [(x.place(at), y.place(value)) for at, value in line.points]
    path = " ".join(f"{left:.1f},{high:.1f}" for left, high in places)
    dash = ' stroke-dasharray="5 4"' if line.is_dashed else ""
    yield f'<polyline class="line" points="{path}" stroke="{_color(line.series)}"{dash}/>'
    for (at, value), (left, high) in zip(line.points, places, strict=True):
        told = f"<title>{escape(f'{line.name} at {_number(at)}: {_number(value)}')}</title>"
        yield f'<circle cx="{left:.1f}" cy="{high:.1f}" r="3.5" fill="{_color(line.series)}">{told}</circle>'


def _x_scale(xs: list[float]) -> Scale:
    begin, end = _LEFT + 20.0, _WIDTH - _RIGHT - 20.0
    if len(xs) < 2:
        return Scale(xs[0] - 1, xs[0] + 1, begin, end)
    return Scale(xs[0], xs[-1], begin, end, is_log=xs[-1] / xs[0] >= 8)


def _y_scale(panel: Panel, begin: float, end: float) -> Scale:
    values = [value for line in panel.lines for _, value in line.points]
    low, high = min(values), max(values)
    if panel.may_be_log and low > 0 and high / low > 10:
        return Scale(low / 1.2, high * 1.2, begin, end, is_log=True)
    return Scale(0.0, high * 1.08 or 1.0, begin, end)


def _round_step(about: float) -> float:
    """Returns the first of 1, 2, 5, 10, 20, ... (and their tenths) that is at least `about`."""
    decade = 10.0 ** math.floor(math.log10(about))
    return next(digit * decade for digit in (1, 2, 5, 10) if digit * decade >= about * 0.999)


def _color(series: int) -> str:
    return _COLORS[series % len(_COLORS)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
