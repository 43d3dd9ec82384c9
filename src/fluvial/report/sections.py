"""What the page says about a run, about runs of one system, and about all of them.

The template draws what is built here; text is plain and is escaped there, `Markup` is our own HTML.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fluvial import catalog
from fluvial.report.cards import Card, exact, flat, read_card
from fluvial.report.curves import Snapshots, Stage, number
from fluvial.report.pictures import Picture, embed
from fluvial.report.plots import Line, colour, intervals, plot
from fluvial.report.runs import Run, mapping, numbered, reason, text

MOST_ROWS, MOST_COLUMNS = 200, 30
"""Of a table."""

MOST_PLOTS = 12
"""Of the folded terms of a stage."""

MOST_LINES = 18
"""Of one plot."""

VERDICTS = {
    "holds": "The claim holds.",
    "fails": "The claim fails.",
    "undecided": "The runs do not decide the claim.",
    "not judged": "Not judged: only the preset record gives a verdict.",
}
COLOUR_OF = {"holds": "holds", "fails": "fails", "undecided": "undecided"}

FOLDER_PICTURES = (
    ("figure.png", "Figure of the run {}."),
    ("samples.png", "Samples of the run {}."),
)


@dataclass(frozen=True)
class Table:
    """A table of text. ``left`` is how many rows were left out."""

    columns: list[str]
    numeric: list[bool]
    rows: list[list[str]]
    left: int = 0
    row_heads: bool = True  # the first cell names its row


@dataclass(frozen=True)
class Plot:
    """A plot with the lines of its legend, (name, classes), none for a single line."""

    svg: Markup
    title: str
    legend: list[tuple[str, str]] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """A picture in the page."""

    id: str
    picture: Picture
    alt: str
    caption: str


@dataclass(frozen=True)
class Compared:
    """A comparison of a claim."""

    name: str
    svg: Markup
    figures: str
    verdict: str
    colour: str


@dataclass
class Section:
    """Everything about one run."""

    id: str
    label: str
    kind: str
    system: str
    purpose: str
    citation: str
    paper: str | None
    state: str
    state_text: str
    claim: str
    verdict: str
    verdict_text: str
    rule: str
    problems: list[str]
    command: str
    numbers: list[tuple[str, str, str]]
    figures: list[Figure]
    samples: list[Figure]
    results: Table | None
    compared: list[Compared]
    plots: list[tuple[str, list[Plot]]]
    more_plots: list[Plot]
    recipe: list[tuple[str, str]]
    loop: list[tuple[str, str]]
    data: list[tuple[str, str]]
    data_notes: list[str]
    notes: list[str]
    card: Card | None
    versions: list[tuple[str, str]]


def section(run: Run, label: str, index: int) -> Section:
    """What the page says about a run. Pictures that cannot be shown join its problems."""
    anchor = f"run-{index}"
    figures = _figures(run, label, anchor)
    samples = _samples(run, label, anchor)
    shown = {
        run.path.resolve() / name: f"{anchor}-{name.removesuffix('.png')}"
        for name, _ in FOLDER_PICTURES
        if any(figure.caption == name for figure in figures)
    }
    known = _system(run.system)
    plots: list[tuple[str, list[Plot]]] = []
    more: list[Plot] = []
    for name, stage in run.metrics.stages.items():
        title = "" if name is None else f"Stage {name}"
        plots.append((title, [*_losses(run, stage), *_by_time(run, stage)]))
        more += _terms(stage, f", stage {name}" if name is not None else "")
    data = run.data
    return Section(
        id=anchor,
        label=label,
        kind=f"Claim, preset {run.preset or 'unknown'}" if run.kind == "claim" else "Training",
        system=run.system,
        purpose=known.purpose if known else "",
        citation=known.citation if known else "",
        paper=f"https://arxiv.org/abs/{known.arxiv}" if known and known.arxiv else None,
        state=run.state,
        state_text=state(run),
        claim=text(run.result.get("claim")),
        verdict=COLOUR_OF.get(run.verdict, ""),
        verdict_text=VERDICTS.get(run.verdict, run.verdict),
        rule=text(run.result.get("rule")),
        problems=run.problems,
        command=text(run.settings.get("command")),
        numbers=_numbers(run),
        figures=figures,
        samples=samples,
        results=table(run.rows("metrics" if run.kind == "training" else "table")),
        compared=compared(run.rows("comparisons")),
        plots=[(title, drawn) for title, drawn in plots if drawn],
        more_plots=more[:MOST_PLOTS],
        recipe=flat(run.recipe),
        loop=flat(run.loop),
        data=_about(data),
        data_notes=run.sentences(data),
        notes=run.sentences(run.result),
        card=_card(run, shown),
        versions=flat(run.versions),
    )


def _system(name: str) -> catalog.System | None:
    return next((system for system in catalog.SYSTEMS if system.name == name), None)


def state(run: Run) -> str:
    """ "finished", "damaged", or where the run was stopped."""
    if run.state != "stopped":
        return run.state
    if run.kind == "claim":
        return "stopped before its result"
    if run.step is None:
        return "stopped before its first line of metrics"
    planned = run.planned
    of = f" of {count(planned)}" if planned is not None and planned >= run.step else ""
    return f"stopped at step {count(run.step)}{of}"


def key_metric(run: Run) -> tuple[str, str, str]:
    """(name, value, floor) of what a run is judged by first."""
    if run.kind == "claim":
        rows = run.rows("comparisons")
        holding = sum(row.get("verdict") == "holds" for row in rows)
        judged = run.verdict in COLOUR_OF
        return (
            ("comparisons that hold", f"{holding} of {len(rows)}", "") if judged else ("", "", "")
        )
    rows = run.rows("metrics")
    if not rows:
        return "", "", ""
    row = rows[0]
    floor = "" if row.get("floor") is None else figure(row["floor"])
    return text(row.get("name")), figure(row.get("value")), floor


def _numbers(run: Run) -> list[tuple[str, str, str]]:
    """(what, value, more) in large type at the head of a section."""
    data = run.data
    rows = mapping(data.get("rows"))
    train = number(rows.get("train"))
    name, value, floor = key_metric(run)
    found = [
        (name, value, f"floor {floor}" if floor else ""),
        ("data", text(data.get("name")), f"{count(train)} training rows" if train else ""),
        ("steps", count(steps(run)), ""),
        ("time", duration(run.seconds), ""),
        ("parameters", count(number(run.settings.get("parameters"))), ""),
        ("date", text(run.result.get("date")), ""),
    ]
    return [entry for entry in found if entry[1]]


def _about(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is known of data, in words; what is empty is left out."""
    given = {key: value for key, value in data.items() if key not in ("notes", "rows", "format")}
    rows = {f"{part} rows": n for part, n in mapping(data.get("rows")).items()}
    facts = flat(given | rows | mapping(data.get("format")))
    return [(name.replace("_", " "), value) for name, value in facts if value not in ("", "none")]


def steps(run: Run) -> float | None:
    """Steps of a training that were taken; of a claim, those of its configuration."""
    return run.step if run.kind == "training" else number(run.recipe.get("steps"))


def summary(runs: Sequence[Run], labels: Sequence[str]) -> list[dict[str, str]]:
    """A row a run for the first table of the page."""
    rows = []
    for i, (run, label) in enumerate(zip(runs, labels, strict=True), 1):
        name, value, floor = key_metric(run)
        rows.append(
            {
                "id": f"run-{i}",
                "label": label,
                "system": run.system,
                "data": text(run.data.get("name")),
                "steps": count(steps(run)),
                "time": duration(run.seconds),
                "parameters": count(number(run.settings.get("parameters"))),
                "metric": name,
                "value": value,
                "floor": floor,
                "verdict": run.verdict,
                "colour": COLOUR_OF.get(run.verdict, ""),
                "state": run.state,
                "state_text": state(run),
            }
        )
    return rows


# --- pictures -------------------------------------------------------------------------------------


def _embed(run: Run, path: Path, id: str, alt: str, caption: str) -> list[Figure]:
    try:
        return [Figure(id, embed(path), alt, caption)]
    except (OSError, ValueError) as error:
        name = path.relative_to(run.path).as_posix()
        run.problems.append(f"{name} cannot be shown: {reason(error)}.")
        return []


def _figures(run: Run, label: str, anchor: str) -> list[Figure]:
    found = []
    for name, alt in FOLDER_PICTURES:
        path = run.path / name
        if path.exists():
            id = f"{anchor}-{name.removesuffix('.png')}"
            found += _embed(run, path, id, alt.format(label), name)
        elif name == "figure.png" and run.state == "finished":
            run.problems.append(f"{name} is missing.")
    return found


def _samples(run: Run, label: str, anchor: str) -> list[Figure]:
    """The first, the middle and the last grid of samples."""
    grids = numbered(run.path / "samples", "png")
    chosen = sorted({0, len(grids) // 2, len(grids) - 1}) if grids else []
    found = []
    for i in chosen:
        step, path = grids[i]
        words = f"step {count(step)}"
        found += _embed(
            run, path, f"{anchor}-step-{step}", f"Grid of samples of {label} at {words}.", words
        )
    return found


def _card(run: Run, shown: Mapping[Path, str]) -> Card | None:
    path = next((run.path / n for n in ("README.md", "card.md") if (run.path / n).is_file()), None)
    if path is None:
        if run.state == "finished":
            run.problems.append("README.md, the card, is missing.")
        return None

    def picture(target: Path) -> str | None:
        # a picture that stands in the section already is not embedded twice
        if target in shown:
            return f'<a href="#{shown[target]}">{escape(target.name)}, shown above</a>'
        try:
            found = embed(target)
        except (OSError, ValueError) as error:
            run.problems.append(f"{target.name} of the card cannot be shown: {reason(error)}.")
            return None
        return (
            f'<img src="{found.uri}" width="{found.width}" height="{found.height}" '
            f'alt="{escape(target.name, quote=True)}">'
        )

    try:
        return read_card(path, picture)
    except (OSError, ValueError) as error:
        run.problems.append(f"{path.name} cannot be read: {reason(error)}.")
        return None


# --- curves ---------------------------------------------------------------------------------------


def _losses(run: Run, stage: Stage) -> list[Plot]:
    """The training loss and the validation loss of every set of weights."""
    lines = []
    if "loss" in stage.training:
        curve = stage.training["loss"]
        lines.append(Line("training", curve.points, curve.band, css="c0"))
    for i, (weights, terms) in enumerate(stage.validation.items()):
        if "loss" in terms:
            lines.append(Line(f"validation, {weights}", terms["loss"].points, css=colour(i)))
    note = ""
    if "loss" in stage.training and stage.training["loss"].size > 1:
        note = (
            f"A point of the training line is a mean of up to {stage.training['loss'].size} logged "
            "values; the band behind it spans their least and largest."
        )
    return _plot(lines, title="Loss", x_label="step", y_label="loss", note=note)


def _by_time(run: Run, stage: Stage) -> list[Plot]:
    """Terms of the loss by t, early, midway and at the end."""
    weights = next((w for w in (run.weights, "") if stage.by_time.get(w)), None)
    if weights is None:
        return []
    whose = f"validation, {weights}" if weights else "training"
    terms = sorted(stage.by_time[weights].items(), key=lambda item: item[0] != "loss")
    plots = []
    for term, snapshots in terms[:3]:
        name = "Loss" if term == "loss" else term
        plots += _plot(
            _times(snapshots),
            title=f"{name} by time ({whose})",
            x_label="t (0 is data, 1 is the source)",
            y_label=term,
            markers=True,
            x_range=(0.0, 1.0),
        )
    return plots


def _times(snapshots: Snapshots) -> list[Line]:
    rows = snapshots.first_middle_last()
    strokes: tuple[str, ...] = ("c0", "c1 faint", "c1")
    strokes = strokes[::2] if len(rows) == 2 else strokes[3 - len(rows) :]
    return [
        Line(
            f"step {count(step)}",
            [((i + 0.5) / len(row), value) for i, value in enumerate(row)],
            css=css,
        )
        for css, (step, row) in zip(strokes, rows, strict=True)
    ]


def _terms(stage: Stage, of_stage: str) -> list[Plot]:
    """Everything else that was logged: a plot a term."""
    names = dict.fromkeys(stage.training)
    names.update(dict.fromkeys(t for terms in stage.validation.values() for t in terms))
    titles = {"lr": "Learning rate", "rows_per_second": "Rows a second"}
    plots = []
    for name in sorted(names, key=lambda name: name in titles):
        if name == "loss":
            continue
        lines = []
        if name in stage.training:
            curve = stage.training[name]
            lines.append(Line("training", curve.points, curve.band, css="c0"))
        for i, (weights, terms) in enumerate(stage.validation.items()):
            if name in terms:
                lines.append(Line(f"validation, {weights}", terms[name].points, css=colour(i)))
        title = f"{titles.get(name, name)}{of_stage}"
        plots += _plot(lines, title=title, x_label="step", y_label=name)
    return plots


def _plot(lines: Sequence[Line], *, title: str, note: str = "", **settings: Any) -> list[Plot]:
    """One plot, or none where nothing is finite."""
    lines = [line for line in lines if line.values]
    svg = plot(lines[:MOST_LINES], title=title, **settings)
    if not svg:
        return []
    if len(lines) > MOST_LINES:
        note = f"The first {MOST_LINES} of {len(lines)} lines. {note}".strip()
    legend = [(line.name, line.css) for line in lines[:MOST_LINES]]
    return [Plot(Markup(svg), title, legend, note)]


# --- several runs of one system -------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Runs of one system and kind side by side."""

    id: str
    system: str
    what: str
    plots: list[Plot]
    different: Table | None


def comparisons(runs: Sequence[Run], labels: Sequence[str]) -> list[Comparison]:
    """A comparison for every system with several runs of a kind, in the order they come in."""
    groups: dict[tuple[str, str], list[tuple[str, Run]]] = {}
    for run, label in zip(runs, labels, strict=True):
        if run.system:
            groups.setdefault((run.system, run.kind), []).append((label, run))
    several = {key: group for key, group in groups.items() if len(group) > 1}
    names = {"training": "trainings", "claim": "runs of the claim"}
    return [
        Comparison(
            id=f"comparison-{i}",
            system=system,
            what=f"{len(group)} {names[kind]} side by side",
            plots=_together(group),
            different=_different(group),
        )
        for i, ((system, kind), group) in enumerate(several.items(), 1)
    ]


def _together(group: Sequence[tuple[str, Run]]) -> list[Plot]:
    """Loss curves of runs in one plot a stage: of the validation if all have one."""
    names = list(dict.fromkeys(name for _, run in group for name in run.metrics.stages))
    plots = []
    for name in names:
        trained = [(label, run, run.metrics.stages.get(name)) for label, run in group]
        validated = all(
            stage is None or "loss" in stage.validation.get(run.weights, {})
            for _, run, stage in trained
        )
        lines = []
        for i, (label, run, stage) in enumerate(trained):
            if stage is None:
                continue
            terms = stage.validation[run.weights] if validated else stage.training
            if "loss" in terms:
                lines.append(
                    Line(
                        f"{label} ({run.weights})" if validated else label,
                        terms["loss"].points,
                        css=colour(i),
                    )
                )
        if len(lines) < 2:
            continue
        what = "Validation loss" if validated else "Training loss"
        sets = {repr((run.data.get("name"), run.data.get("rows"))) for _, run, s in trained if s}
        note = "These runs differ in their data: the losses do not compare." * (len(sets) > 1)
        title = what if name is None else f"{what}, stage {name}"
        plots += _plot(lines, title=title, x_label="step", y_label="loss", note=note)
    return plots


def _different(group: Sequence[tuple[str, Run]]) -> Table | None:
    """The settings in which runs differ; ``None`` if they do not."""
    settings = []
    for _, run in group:
        rows = mapping(run.data.get("rows"))
        about = {
            "preset": run.preset,
            "data": text(run.data.get("name")),
            "training rows": rows.get("train"),
            "parameters": run.settings.get("parameters"),
            "fluvial": run.versions.get("fluvial"),
            "torch": run.versions.get("torch"),
        }
        shown = {name: exact(value) for name, value in about.items() if value not in (None, "")}
        settings.append(shown | dict(flat(run.recipe)))
    names = list(dict.fromkeys(name for own in settings for name in own))
    rows_ = [[name, *(own.get(name, "–") for own in settings)] for name in names]
    rows_ = [row for row in rows_ if len(set(row[1:])) > 1]
    if not rows_:
        return None
    columns = ["setting", *(label for label, _ in group)]
    numeric = [False] * len(columns)
    return Table(columns, numeric, rows_[:MOST_ROWS], max(0, len(rows_) - MOST_ROWS))


# --- claims ---------------------------------------------------------------------------------------


def compared(rows: Sequence[Mapping[str, Any]]) -> list[Compared]:
    """The comparisons of a claim with their intervals, on one scale where that can be read."""
    measured = []
    for row in rows[:MOST_ROWS]:
        mean, margin = number(row.get("mean")), number(row.get("margin")) or 0.0
        if mean is None:
            continue
        low, high = number(row.get("low")), number(row.get("high"))
        ends = None if low is None or high is None else (low, high)
        seeds = row.get("differences")
        points = [n for n in map(number, seeds) if n is not None] if isinstance(seeds, list) else []
        measured.append((row, mean, margin, ends, points[:100]))
    spans = [
        (min(values), max(values))
        for _, mean, margin, ends, points in measured
        for values in [[mean, margin, *(ends or ()), *points]]
    ]
    whole = (min((a for a, _ in spans), default=0.0), max((b for _, b in spans), default=1.0))
    narrow = [ends for _, _, _, ends, _ in measured if ends]
    # a scale on which some interval is a speck says nothing: each has its own then
    shared = all(b - a > 0.03 * (whole[1] - whole[0]) for a, b in narrow)
    found = []
    for (row, mean, margin, ends, points), own in zip(measured, spans, strict=True):
        verdict = text(row.get("verdict"))
        name = text(row.get("name"))
        svg = intervals(
            name=name,
            mean=mean,
            interval=ends,
            margin=margin,
            points=points,
            span=whole if shared else own,
            css=COLOUR_OF.get(verdict, "c1"),
        )
        between = f"{figure(ends[0], 3)} to {figure(ends[1], 3)}" if ends else "no interval"
        figures = f"{figure(mean, 3)} ({between}), margin {figure(margin, 3)}"
        found.append(Compared(name, Markup(svg), figures, verdict, COLOUR_OF.get(verdict, "")))
    return found


# --- text -----------------------------------------------------------------------------------------


def table(rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """Rows as a table whose columns are their keys, in the order in which they come."""
    if not rows:
        return None
    names = list(dict.fromkeys(key for row in rows for key in row))[:MOST_COLUMNS]
    numeric = [
        all(isinstance(row.get(name), (int, float, type(None))) for row in rows) for name in names
    ]
    cells = [[figure(row.get(name)) for name in names] for row in rows[:MOST_ROWS]]
    titles = [name.replace("_", " ") for name in names]
    return Table(titles, numeric, cells, max(0, len(rows) - MOST_ROWS))


def figure(value: Any, digits: int = 4) -> str:
    """A value of a result as the text of a cell; numbers to ``digits`` significant digits."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return exact(value) if not isinstance(value, (dict, list)) else _listed(value)
    if isinstance(value, int):
        return exact(value).replace("-", "−")
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    large = 10**digits <= abs(value) < 1e9
    shown = f"{value:.0f}" if large else f"{value:#.{digits}g}".removesuffix(".")
    return shown.replace("-", "−")


def _listed(value: Any) -> str:
    return "; ".join(f"{name}: {item}" if name else item for name, item in flat({"": value}))


def count(value: float | None) -> str:
    """A whole number with its thousands apart; "" for ``None``."""
    return "" if value is None else f"{value:,.0f}".replace(",", "\u202f")


def duration(seconds: float | None) -> str:
    """A time to two units; "" for ``None``."""
    if seconds is None or seconds < 0:
        return ""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"
