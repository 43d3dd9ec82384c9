"""How `fluvial train miri-imputation` fills the gaps of a user's table."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from fluvial.data.format import Format
from fluvial.tabular.checks import whole
from fluvial.tabular.miri.checkpoints import rounds_kept
from fluvial.tabular.miri.columns import Column
from fluvial.tabular.miri.files import TableFile, read_file
from fluvial.tabular.miri.imputer import SYSTEM, MIRIImputer
from fluvial.tabular.miri.report import (
    as_json,
    as_markdown,
    assumptions,
    column_report,
    draw_report,
)
from fluvial.tabular.miri.rounds import Rounds
from fluvial.tabular.miri.table import Table
from fluvial.training.files import atomic, write_json
from fluvial.training.run import FORMAT, read_settings

SPREAD = 5
"""Fillings that the spread of draws is measured on."""
SPREAD_ROWS = 10_000
"""Rows with gaps whose spread is measured, at most: it costs as many fillings of theirs."""


KEPT = "checkpoints"
"""Where in the folder of a run its finished rounds are, until all are done."""


@dataclass(frozen=True)
class Recipe:
    """A filled copy of a table in a CSV or Parquet file, and a report of what was filled with what.

    Observed values are copied as they stand; the file that is read is not touched.

    Args:
        rounds: of MIRI, each of which draws all gaps anew by a flow of its own.
        epochs: passes over the rows with gaps, in each round.
        max_steps: of the optimiser in a round, at most; what bounds the time on large tables.
        batch_size: rows a step; by default 100, and more on tables of over 5,000 rows.
        lr: learning rate of Adam.
        hidden: sizes of the hidden layers; by default three of 128, 256 or 512 by the number of
            columns.
        ode_steps: Euler steps of a filling.
        pairing: pair rows anew every epoch, or once a round, as the paper's code does.
        draws: what gaps are filled with is the mean of so many draws; 1 keeps the distribution
            right, 20 brings each value near its best guess.
        copies: further filled copies, independent draws, for multiple imputation.
        missing: texts that mean a gap in a CSV file, beside empty fields; by default NA, N/A, n/a,
            NaN, nan, null, NULL, None, <NA>, #N/A, ? and -.
        seed: of everything.

    Raises:
        ValueError: a value is out of its range.
    """

    rounds: int = 6
    epochs: int = 100
    max_steps: int = 2_000
    batch_size: int | None = None
    lr: float = 3e-3
    hidden: tuple[int, ...] | None = None
    ode_steps: int = 25
    pairing: Literal["epoch", "round"] = "epoch"
    draws: int = 1
    copies: int = 0
    missing: tuple[str, ...] | None = None
    seed: int = 0

    GROUPS: ClassVar[Mapping[str, str]] = {"method": "rounds", "filling": "draws"}
    """The first field of each group of hyper-parameters."""
    schedule: ClassVar[str] = "linear"
    """Of the learning rate: it falls to 0 in each round, so that a run cannot be made longer."""

    def __post_init__(self) -> None:
        own = {field.name for field in fields(Rounds)}
        Rounds(**{k: v for k, v in asdict(self).items() if k in own})  # whose checks speak
        if self.hidden is not None and (not self.hidden or min(self.hidden) < 1):
            raise ValueError(f"hidden must be sizes of at least 1, got {self.hidden}")
        whole("draws", self.draws)
        whole("copies", self.copies, least=0)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must lie in [0, 2**32), got {self.seed}")

    @property
    def steps(self) -> int:
        """Steps of the optimiser, at most."""
        return self.rounds * self.max_steps

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Recipe:
        """The recipe that ``as_json`` wrote.

        Raises:
            ValueError: a hyper-parameter is unknown, or out of its range.
        """
        unknown = set(content) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(
                f"the recipe has hyper-parameters of another version: {sorted(unknown)}"
            )
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in content.items()
        }
        return cls(**values)

    def as_json(self) -> dict[str, Any]:
        """The hyper-parameters, as JSON holds them."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    def prepare(self, source: str | os.PathLike[str], *, progress: bool = True) -> Job:
        """Read the table: what is wrong with it is found here.

        Raises:
            As `fluvial.tabular.miri.files.read_file`; ValueError if there is no gap to fill.
        """
        table = read_file(Path(os.fspath(source)).expanduser(), missing=self.missing)
        if not table.frame.isna().any().any():
            why = "".join(f"; {name}: {reason}" for name, reason in table.left.items())
            raise ValueError(f"{table.path} has no gap that could be filled{why}")
        values = asdict(self)
        model = MIRIImputer(
            **{k: v for k, v in values.items() if k not in ("copies", "missing", "seed")},
            random_state=self.seed,
            progress=progress,
        )
        return Job(self, model, table)


@dataclass
class Job:
    """A table and the imputer that fills it; see `fluvial.training.run.Job`.

    Args:
        recipe: hyper-parameters.
        model: not fitted.
        table: as it was read.
    """

    recipe: Recipe
    model: MIRIImputer
    table: TableFile
    system: str = SYSTEM

    @property
    def about(self) -> dict[str, Any]:
        names = [str(name) for name in self.table.frame.columns]
        return {
            "name": self.table.path.name,
            "source": "the user's files",
            "licence": "unknown",
            "rows": {"train": len(self.table.frame)},
            "notes": list(self.table.notes),
            "format": Format("table", (len(names),), columns=tuple(names)).as_json(),
        }

    @property
    def rows(self) -> tuple[dict[str, Tensor], None]:
        return {}, None

    def complete(
        self, out: Path, device: str = "cpu", *, progress: bool = True
    ) -> tuple[dict[str, Any], str]:
        """Fill the table into the folder ``out``.

        Writes the filled copy, further copies, ``report.md``, ``report.json``, ``figure.png``,
        ``model.safetensors`` and, last, ``result.json``. Each round is kept as it is done: what was
        stopped goes on after the last of them.

        Returns:
            (what is in ``result.json``, a summary in words).
        """
        begin = time.perf_counter()
        table, model = self.table, self.model
        model.set_params(device=device, progress=progress)
        filled = model.fit_transform(table.frame, folder=out / KEPT)
        place = out / table.filled_name
        table.write(place, filled)
        end = table.suffix
        copies = model.sample(table.frame, self.recipe.copies) if self.recipe.copies else []
        for k, copy in enumerate(copies):
            table.write(out / f"{place.name[: -len(end)]}-{k + 1}{end}", copy)
        columns: list[Column] = model.columns_
        gaps = table.frame.isna().to_numpy(dtype=bool)
        some = np.flatnonzero(gaps.any(1))
        some = some[:: -(-len(some) // SPREAD_ROWS)]
        several = model.sample(table.frame.iloc[some], SPREAD)
        values = _numbers(model, table.frame)
        drawn = [one[gaps[:, j]] for j, one in enumerate(_numbers(model, filled))]
        apart = [_numbers(model, one) for one in several]
        reports = [
            column_report(
                column, values[j], drawn[j], np.stack([one[j][gaps[some, j]] for one in apart])
            )
            for j, column in enumerate(columns)
        ]
        count, rows = int(gaps.sum()), len(table.frame)
        ends = ", ".join(f"{one['losses'][-1]:.3g}" for one in model.history_)
        facts = [
            f"{table.path.name}: {rows:,} rows, {len(table.names)} columns, {count:,} gaps filled "
            f"({count / gaps.size:.1%} of the entries that were looked at)",
            f"rows without any value: {int(gaps.all(1).sum()):,}",
            f"losses of the rounds at their ends: {ends}; far below 1: learned by heart",
            f"filled copy: {place.name}; seed {self.recipe.seed}",
        ]
        notes = [*table.notes, *assumptions(columns, rows, table.left)]
        with atomic(out / "report.md") as temporary:
            text = as_markdown(f"{table.path.name}, filled", reports, facts, notes)
            temporary.write_text(text, encoding="utf-8")
        write_json(
            out / "report.json",
            {"columns": as_json(reports), "left": table.left, "facts": facts, "notes": notes},
        )
        draw_report(out / "figure.png", columns, values, drawn)
        model.save(out / "model.safetensors", overwrite=True)
        weights = sum(value.numel() for value in model.parameters())
        if (out / "run.json").is_file():
            write_json(out / "run.json", {**read_settings(out), "parameters": weights})
        seconds = time.perf_counter() - begin
        result = {
            "format": FORMAT,
            "system": SYSTEM,
            "seconds": seconds,
            "steps": self.recipe.steps,
            "metrics": self._metrics(reports),
            "weights": "last",
            "filled": place.name,
            "notes": notes,
        }
        write_json(out / "result.json", result)
        shutil.rmtree(out / KEPT, ignore_errors=True)  # the model has them all
        return result, _summary(place, count, seconds, reports, table, out)

    def kept(self, out: Path) -> str:
        """What an interrupted run has left in ``out``, in words."""
        done = rounds_kept(out / KEPT)
        if not done:
            return "before the first round was done, so that it begins anew"
        return f"after {done} of {self.recipe.rounds} rounds, which are kept in {out / KEPT}"

    def _metrics(self, reports: Sequence[Any]) -> list[dict[str, Any]]:
        distances = [one.distance for one in reports if one.distance is not None]
        spreads = [one.spread for one in reports if one.spread is not None]
        what = {
            "distance of drawn and observed values": (
                distances,
                "largest difference of the distribution functions, or half the sum of differences "
                "of shares; mean over columns",
            ),
            "spread of draws": (
                spreads,
                f"deviation of {SPREAD} draws of an entry over that of the column, or share of "
                "pairs that differ; mean over columns",
            ),
        }
        return [
            {"name": name, "value": float(np.mean(values)), "floor": None, "what": words}
            for name, (values, words) in what.items()
            if values
        ]


def _numbers(model: MIRIImputer, frame: Any) -> list[np.ndarray]:
    """The columns of a frame as the imputer reads them, NaN in gaps."""
    table = Table.read(model, frame, None, reset=False)
    table.values_of(model.columns_)
    return [table.column(j) for j in range(table.shape[1])]


def _summary(
    place: Path, count: int, seconds: float, reports: Sequence[Any], table: TableFile, out: Path
) -> str:
    most = sorted(reports, key=lambda one: -one.missing)[:5]
    lines = [
        f"{count:,} gaps filled in {seconds:.0f} s; most of them in "
        f"{', '.join(f'{one.name} ({one.share:.0%})' for one in most if one.missing)}",
    ]
    if table.left:
        lines.append("left as they are: " + ", ".join(table.left))
    lines += [
        f"filled copy  {place}",
        f"report       {out / 'report.md'}",
        f"figure       {out / 'figure.png'}",
        f"model        {out / 'model.safetensors'}",
    ]
    return "\n".join(lines)
