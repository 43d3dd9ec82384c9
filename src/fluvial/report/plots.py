"""Plots as inline SVG, coloured by the style sheet of the page so that they follow light and dark.

All text is real text: it can be selected, searched and read aloud. Everything is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = 6
"""Colours of the style sheet; further lines repeat them dashed."""

WIDTH, HEIGHT = 480, 270
LEFT, RIGHT, TOP, BOTTOM = 62, 20, 12, 46

SMALLEST = 1e-200
"""Differences below it are none: their powers of ten are not numbers any more."""

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Line:
    """A line of a plot.

    Args:
        name: for the legend.
        points: (x, y); a ``None`` breaks the line.
        band: (x, low, high) behind the line.
        css: the classes of its strokes, "c0" (grey) or one of `colour`.
    """

    name: str
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()
    css: str = "c1"

    @property
    def values(self) -> list[float]:
        return [y for _, y in self.points if y is not None]


def colour(i: int) -> str:
    """The classes of the i-th line, from 0; after `COLOURS` of them they come again, dashed."""
    turn, k = divmod(i, COLOURS)
    return f"c{k + 1}{' dashed' * (turn % 2)}"


def plot(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_label: str = "",
    markers: bool = False,
    x_range: tuple[float, float] | None = None,
) -> str:
    """An SVG element with lines over two axes; "" if there is nothing to draw.

    The y axis is logarithmic where all values are positive and span a factor of 10 or more.
    """
    lines = [line for line in lines if line.values]
    if not lines:
        return ""
    ys = [y for line in lines for y in line.values]
    xs = [x for line in lines for x, _ in line.points]
    log = min(ys) > SMALLEST and max(ys) / min(ys) >= 10
    ys += _inner(lines, positive=log)
    x_axis = _Axis(*(x_range or (min(xs), max(xs))), LEFT, WIDTH - RIGHT)
    y_axis = _Axis(min(ys), max(ys), HEIGHT - BOTTOM, TOP, log=log, space=0.06)
    parts = [
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(_describe(title, lines), quote=True)}">'
    ]
    for value, label in y_axis.ticks():
        y = _n(y_axis(value))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="y" x="{LEFT - 8}" y="{y}" dy=".32em">{label}</text>')
    for value, label in x_axis.ticks(5):
        x = _n(x_axis(value))
        base = HEIGHT - BOTTOM
        parts.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{base}" y2="{base + 4}"/>')
        parts.append(f'<text class="x" x="{x}" y="{base + 19}">{label}</text>')
    parts.append(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" '
        f'y2="{HEIGHT - BOTTOM}"/>'
    )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="x name" x="{middle}" y="{HEIGHT - 6}">{escape(x_label)}</text>')
    if y_label:
        scale = ", log scale" if log else ""
        parts.append(
            f'<text class="x name" transform="rotate(-90)" x="{-(TOP + HEIGHT - BOTTOM) / 2}" '
            f'y="14">{escape(y_label + scale)}</text>'
        )
    for line in lines:
        if line.band:
            parts.append(f'<path class="band {line.css}" d="{_band(line.band, x_axis, y_axis)}"/>')
    for line in lines:
        parts.append(f'<path class="line {line.css}" d="{_path(line.points, x_axis, y_axis)}"/>')
        if markers or len(line.values) == 1:
            parts += [
                f'<circle class="dot {line.css}" cx="{_n(x_axis(x))}" cy="{_n(y_axis(y))}" r="3"/>'
                for x, y in line.points
                if y is not None
            ]
    return "".join([*parts, "</svg>"])


def _inner(lines: Sequence[Line], *, positive: bool) -> list[float]:
    """The ends of the bands without their outermost twentieths: a spike does not set the scale."""
    lows = sorted(low for line in lines for _, low, _ in line.band if low > 0 or not positive)
    highs = sorted(high for line in lines for _, _, high in line.band)
    return [*lows[len(lows) // 20 :][:1], *highs[: len(highs) - len(highs) // 20][-1:]]


def intervals(
    *,
    name: str,
    mean: float,
    interval: tuple[float, float] | None,
    margin: float,
    points: Sequence[float],
    span: tuple[float, float],
    css: str = "c1",
) -> str:
    """An SVG element with one mean, its interval, the single values and the margin, on one scale.

    Args:
        name: what is compared; for readers who do not see the plot.
        interval: ``None`` if it is unbounded.
        points: the differences of single seeds.
        span: the ends of the scale; all intervals of a claim share it.
        css: the class of the colour.
    """
    width, height, side, middle, base = 480, 66, 16, 20, 40
    axis = _Axis(*span, side, width - side, space=0.03)
    ends = "" if interval is None else f", interval {interval[0]:.3g} to {interval[1]:.3g}"
    label = f"{name}: mean {mean:.3g}{ends}, margin {margin:g}"
    parts = [
        f'<svg class="plot interval" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(label, quote=True)}">',
        f'<line class="axis" x1="{side}" x2="{width - side}" y1="{base}" y2="{base}"/>',
    ]
    for value, text in axis.ticks(6):
        x = _n(axis(value))
        parts.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{base}" y2="{base + 4}"/>')
        parts.append(f'<text class="x" x="{x}" y="{base + 19}">{text}</text>')
    x = _n(axis(margin))
    parts.append(f'<line class="margin" x1="{x}" x2="{x}" y1="3" y2="{base}"/>')
    if interval is not None:
        low, high = (_n(axis(end)) for end in interval)
        parts.append(
            f'<line class="bar {css}" x1="{low}" x2="{high}" y1="{middle}" y2="{middle}"/>'
        )
        parts += [
            f'<line class="bar {css}" x1="{end}" x2="{end}" y1="{middle - 5}" y2="{middle + 5}"/>'
            for end in (low, high)
        ]
    parts += [
        f'<circle class="seed {css}" cx="{_n(axis(value))}" cy="{middle}" r="3"/>'
        for value in points
    ]
    parts.append(f'<circle class="dot {css}" cx="{_n(axis(mean))}" cy="{middle}" r="5"/></svg>')
    return "".join(parts)


class _Axis:
    """A map from values to pixels.

    Args:
        low, high: ends of the values; equal ends are moved apart.
        begin, end: their pixels.
        log: logarithmic.
        space: free share beyond both ends.
    """

    def __init__(
        self,
        low: float,
        high: float,
        begin: float,
        end: float,
        log: bool = False,
        space: float = 0.0,
    ) -> None:
        self.log = log
        low, high = (math.log10(low), math.log10(high)) if log else (low, high)
        if high - low <= max(1e-9 * max(abs(low), abs(high)), SMALLEST):
            room = 0.5 * abs(high) if abs(high) > SMALLEST else 0.5
            low, high = low - room, high + room
        room = space * (high - low)
        self.low, self.high, self.begin, self.end = low - room, high + room, begin, end

    def __call__(self, value: float) -> float:
        if self.log:
            value = math.log10(value) if value > 0 else self.low
        # what lies outside (a band's spike) ends at the edge
        share = min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))
        return self.begin + share * (self.end - self.begin)

    def ticks(self, most: int = 5) -> list[tuple[float, str]]:
        """(value, label) of round numbers within the axis."""
        if self.log:
            first, last = math.ceil(self.low), math.floor(self.high)
            if last - first >= 1:
                every = -(-(last - first + 1) // most)
                values = [10.0**k for k in range(first, last + 1, every)]
            else:
                values = [
                    m * 10.0**k
                    for k in range(math.floor(self.low), last + 1)
                    for m in (1, 2, 5)
                    if self.low <= math.log10(m) + k <= self.high
                ]
            return [(value, _label(value, value, value)) for value in values]
        raw = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        values = [k * step for k in range(first, last + 1)]
        largest = max(map(abs, values), default=0.0)
        return [(value, _label(value, step, largest)) for value in values]


def _label(value: float, step: float, largest: float) -> str:
    """A tick's number, as exact as its distance to the next asks for, in the axis's unit."""
    if largest >= 1e13 or 0 < largest < 1e-4:
        mantissa, _, power = f"{value:.1e}".partition("e")
        text = f"{mantissa.removesuffix('.0')}e{int(power)}" if value else "0"
    else:
        units = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"), (0.0, 1.0, ""))
        unit, letter = next((u, name) for least, u, name in units if largest >= least)
        digits = max(0, -math.floor(math.log10(step / unit) + 1e-9))
        text = f"{value / unit:,.{digits}f}{letter if value else ''}"
    return text.replace("-", "−")


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _path(points: Sequence[Point], x_axis: _Axis, y_axis: _Axis) -> str:
    pieces, pen = [], "M"
    for x, y in points:
        if y is None:
            pen = "M"
            continue
        pieces.append(f"{pen}{_n(x_axis(x))},{_n(y_axis(y))}")
        pen = "L"
    return "".join(pieces)


def _band(band: Sequence[tuple[float, float, float]], x_axis: _Axis, y_axis: _Axis) -> str:
    there = [f"{_n(x_axis(x))},{_n(y_axis(high))}" for x, _, high in band]
    back = [f"{_n(x_axis(x))},{_n(y_axis(low))}" for x, low, _ in reversed(band)]
    return f"M{'L'.join([*there, *back])}Z"


def _describe(title: str, lines: Sequence[Line]) -> str:
    """The plot in words."""
    ends = "; ".join(
        f"{line.name} from {line.values[0]:.3g} to {line.values[-1]:.3g}" for line in lines[:8]
    )
    return f"{title}: {ends}"
