"""Plots: what is drawn stands where it should."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from fluvial.report import plots
from fluvial.report.plots import Line, colour, intervals, plot

AXES = {"title": "Loss", "x_label": "step", "y_label": "loss"}


def labels(svg: str, css: str) -> list[str]:
    return [
        node.text or ""
        for node in ElementTree.fromstring(svg).iter("text")
        if node.get("class") == css
    ]


def path_points(svg: str, css: str) -> list[tuple[float, float]]:
    (path,) = (n for n in ElementTree.fromstring(svg).iter("path") if n.get("class") == css)
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", path.get("d", ""))]


def test_a_line_ends_at_the_edges_of_its_axes() -> None:
    svg = plot([Line("a", [(0, 1.0), (5, 2.0), (10, 3.0)])], **AXES)
    points = path_points(svg, "line c1")
    xs, ys = zip(*points, strict=True)
    assert xs == (
        plots.LEFT,
        (plots.LEFT + plots.WIDTH - plots.RIGHT) / 2,
        plots.WIDTH - plots.RIGHT,
    )
    assert ys[0] > ys[1] > ys[2] and ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)
    assert labels(svg, "y") == ["1.0", "1.5", "2.0", "2.5", "3.0"]
    assert labels(svg, "x") == ["0", "2", "4", "6", "8", "10"]


def test_the_axis_is_logarithmic_where_the_range_asks_for_it() -> None:
    svg = plot([Line("a", [(0, 1.0), (1, 0.1), (2, 0.01)])], **AXES)
    assert labels(svg, "y") == ["0.01", "0.1", "1"]
    ys = [y for _, y in path_points(svg, "line c1")]
    assert ys[1] - ys[0] == pytest.approx(ys[2] - ys[1], abs=0.2)
    assert "loss, log scale" in svg
    for linear in ([(0, 1.0), (1, -100.0)], [(0, 0.0), (1, 100.0)], [(0, 1.0), (1, 5.0)]):
        assert "log scale" not in plot([Line("a", linear)], **AXES)


def test_gaps_and_single_points() -> None:
    svg = plot([Line("a", [(0, 1.0), (1, None), (2, 3.0)])], **AXES)
    assert svg.count("M") - svg.count("Math") == 2
    assert "<circle" in plot([Line("a", [(5, 1.0)])], **AXES)
    assert plot([], **AXES) == "" and plot([Line("a", [(0, None)])], **AXES) == ""


def test_a_spike_of_the_band_does_not_set_the_scale() -> None:
    band = [(float(i), 0.9, 1e9 if i == 50 else 1.1) for i in range(100)]
    svg = plot([Line("a", [(x, 1.0 + x / 1e3) for x, _, _ in band], band)], **AXES)
    assert all(float(label) < 1.2 for label in labels(svg, "y"))
    assert min(y for _, y in path_points(svg, "band c1")) == plots.TOP


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 1.0],
        [0.0, 0.0],
        [-3.0, -3.0],
        [1e-300, 2e-300],
        [5e-324, 1.0],
        [1e199, -1e199],
        [1e-199, 1e199],
        [1e9, 1e9 + 1],
        [123456.0, 123457.0],
    ],
)
def test_any_range_can_be_drawn(values: list[float]) -> None:
    svg = plot([Line("a", list(enumerate(values)))], **AXES)
    numbers = [float(n) for n in re.findall(r'(?:x|y|x1|y1|cx|cy)="(-?[\d.]+)"', svg)]
    assert "nan" not in svg and "inf" not in svg and all(map(math.isfinite, numbers))
    assert 1 <= len(labels(svg, "y")) <= 12 and len(set(labels(svg, "y"))) == len(labels(svg, "y"))


def test_text_is_escaped() -> None:
    svg = plot([Line("<b>&\"'", [(0, 1.0)])], title="<i>", x_label="<x>", y_label="&")
    ElementTree.fromstring(svg)
    assert "<b>" not in svg and "<i>" not in svg and "&lt;x&gt;" in svg


def test_colours_come_again_dashed() -> None:
    names = [colour(i) for i in range(2 * plots.COLOURS)]
    assert (
        names[0] == "c1" and names[plots.COLOURS] == "c1 dashed" and len(set(names)) == len(names)
    )


def test_intervals_stand_on_one_scale() -> None:
    def drawn(mean: float, ends: tuple[float, float] | None) -> dict[str, list[float]]:
        svg = intervals(
            name="a < b", mean=mean, interval=ends, margin=0.0, points=[mean], span=(-1.0, 3.0)
        )
        found: dict[str, list[float]] = {}
        for node in ElementTree.fromstring(svg):
            place = node.get("cx") or node.get("x1")
            found.setdefault(node.get("class", ""), []).append(float(place or "nan"))
        assert f"a &lt; b: mean {mean:g}" in svg
        return found

    first, second = drawn(2.0, (1.0, 3.0)), drawn(0.5, None)
    assert first["margin"] == second["margin"]
    low, high = min(first["bar c1"]), max(first["bar c1"])
    assert first["margin"][0] < low < first["dot c1"][0] < high
    assert first["dot c1"][0] == pytest.approx((low + high) / 2, abs=0.1)
    assert "bar c1" not in second and second["seed c1"] == second["dot c1"]
