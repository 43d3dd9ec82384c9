"""A user's table in a file, and a copy of it with its gaps filled that differs in nothing else.

A text file is read as texts, which stay: only the texts of gaps are replaced, by ones written as
the rest of their column is. A Parquet file keeps its schema.
"""

from __future__ import annotations

import csv
import gzip
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fluvial.data.packages import extra
from fluvial.data.tables import (
    COMMA,
    DATE,
    DELIMITERS,
    MISSING,
    SUFFIXES,
    Frame,
    evenness,
    is_number,
    read_start,
)
from fluvial.tabular.miri.columns import MOST_CATEGORIES, read_series
from fluvial.training.files import atomic

DATES = (
    "%Y-%m-%d",
    "%Y-%m-%d %H:%M",
    "%Y-%m-%d %H:%M:%S",
    "%Y-%m-%dT%H:%M",
    "%Y-%m-%dT%H:%M:%S",
    "%d.%m.%Y",
    "%d.%m.%y",
    "%d/%m/%Y",
    "%m/%d/%Y",
    "%d.%m.%Y %H:%M",
    "%d/%m/%Y %H:%M",
    "%m/%d/%Y %H:%M",
)
"""How dates may be written; the first that reads a whole column is taken."""
CODE = re.compile(r"[+-]?0\d+|\+\d+")
"""Not a number but a code: it would lose its zeros, or its plus."""
DIGITS = re.compile(r"[+-]?\d{16,300}")
"""A whole number that float64 may not hold."""
DECIMAL = re.compile(r",(\d{1,2}|\d{4,})$|\..*,")
"""A comma that cannot stand between thousands."""
LINES = 10_000
"""Rows that are written at a time."""


@dataclass(frozen=True)
class Style:
    """How a column of a text file is written.

    Args:
        kind: "number", "date" or "text".
        decimals: digits after the mark; None to write as many as needed, at most 6 significant.
        mark: decimal point or comma.
        dots: dots stand between thousands.
        date: format of dates.
    """

    kind: str
    decimals: int | None = 0
    mark: str = "."
    date: str = ""
    dots: bool = False

    def write(self, value: Any) -> str:
        """A drawn value as text."""
        if self.kind == "text":
            return str(value)
        if self.kind == "date":
            return str(value.strftime(self.date))
        text = f"{value:.6g}" if self.decimals is None else f"{value:.{self.decimals}f}"
        if float(text) == 0:
            text = text.removeprefix("-")
        whole, point, rest = text.partition(".")
        if self.dots:
            whole = re.sub(r"(?<=\d)(?=(\d{3})+$)", ".", whole)
        return whole + (self.mark if point else "") + rest


@dataclass
class TableFile:
    """A table as it was read.

    Args:
        path: of the file.
        frame: the columns that can be filled or say something about the others, typed.
        left: columns that stay as they are, and why.
        notes: what was recognised or assumed.
        raw: the text frame, or the Arrow table.
        names: of all columns, in the file's order; those of ``frame`` among them.
        styles: by name.
        options: of the text file: delimiter, encoding, columns in quotes and so on.
    """

    path: Path
    frame: Frame
    left: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    raw: Any = None
    names: list[str] = field(default_factory=list)
    styles: dict[str, Style] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def suffix(self) -> str:
        """End of the file's name, with that of gzip."""
        name = self.path.name.lower()
        return next(end for end in sorted(SUFFIXES, key=len, reverse=True) if name.endswith(end))

    @property
    def filled_name(self) -> str:
        """Name of the filled copy."""
        return f"{self.path.name[: -len(self.suffix)]}.filled{self.suffix}"

    def write(self, path: Path, filled: Frame) -> None:
        """A copy of the file with the gaps of ``filled``'s columns replaced, atomically."""
        if self.suffix in (".parquet", ".pq"):
            self._write_parquet(path, filled)
        else:
            self._write_text(path, filled)

    def _write_text(self, path: Path, filled: Frame) -> None:
        texts = self.raw.copy()
        for name in self.frame:
            gaps = np.flatnonzero(self.frame[name].isna().to_numpy())
            if len(gaps):
                style = self.styles[name]
                column = texts[name].astype(object)
                column.iloc[gaps] = [style.write(value) for value in filled[name].iloc[gaps]]
                texts[name] = column
        delimiter, end = self.options["delimiter"], self.options["newline"]
        special = (delimiter, '"', "\n", "\r")

        def line(fields: Sequence[str], quotes: Sequence[bool]) -> str:
            return end.join(
                [
                    delimiter.join(
                        '"' + text.replace('"', '""') + '"'
                        if quoted or any(mark in text for mark in special)
                        else text
                        for text, quoted in zip(fields, quotes, strict=True)
                    ),
                    "",
                ]
            )

        opened: Any = gzip.open if self.suffix.endswith(".gz") else open
        with (
            atomic(path) as temporary,
            opened(temporary, "wt", encoding=self.options["encoding"], newline="") as file,
        ):
            if not self.options["bare"]:
                file.write(line(self.options["header"], self.options["quoted"][0]))
            for start in range(0, len(texts), LINES):
                rows = texts.iloc[start : start + LINES].to_numpy(dtype=object).tolist()
                file.writelines(line(row, self.options["quoted"][1]) for row in rows)

    def _write_parquet(self, path: Path, filled: Frame) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        table = self.raw
        for name in self.frame:
            gaps = self.frame[name].isna().to_numpy()
            if not gaps.any():
                continue
            at = self.names.index(name)
            kind = table.schema.field(at).type
            if pa.types.is_dictionary(kind):
                column = _with_categories(table.column(at), gaps, list(filled[name][gaps]))
            else:
                values = [_arrow_value(value, kind) for value in filled[name][gaps]]
                column = table.column(at).combine_chunks()
                drawn = pa.array(values, type=kind)
                if pa.types.is_duration(kind):  # of which pyarrow replaces none
                    column, drawn = column.cast(pa.int64()), drawn.cast(pa.int64())
                column = pc.replace_with_mask(column, pa.array(gaps), drawn).cast(kind)
            table = table.set_column(at, table.schema.field(at), column)
        with atomic(path) as temporary:
            pq.write_table(table, temporary)


def _with_categories(column: Any, gaps: np.ndarray, drawn: Sequence[Any]) -> Any:
    """A column of categories with values in its gaps; the categories and their order stay."""
    import pyarrow as pa
    import pyarrow.compute as pc

    whole = column.unify_dictionaries().combine_chunks()
    parts = whole if isinstance(whole, pa.DictionaryArray) else whole.chunk(0)
    rank = {value: k for k, value in enumerate(parts.dictionary.to_pylist())}
    codes = pa.array([rank[value] for value in drawn], type=parts.indices.type)
    indices = pc.replace_with_mask(parts.indices, pa.array(gaps), codes)
    ordered = column.type.ordered
    return pa.DictionaryArray.from_arrays(indices, parts.dictionary, ordered=ordered)


def _arrow_value(value: Any, kind: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_integer(kind):
        return int(value)
    if pa.types.is_decimal(kind):
        from decimal import Decimal

        return round(Decimal(str(float(value))), kind.scale)
    if pa.types.is_date(kind):
        return value.date()
    return value.item() if isinstance(value, np.generic) else value


def read_file(path: Path, *, missing: Sequence[str] | None = None) -> TableFile:
    """A table with gaps.

    Of a text file the encoding (UTF-8, UTF-16, else Windows-1252), the delimiter, decimal commas,
    dates and texts that mean a gap are recognised.

    Args:
        path: of the file.
        missing: texts that mean a gap, beside empty fields, in a text file; by default
            `fluvial.data.tables.MISSING`: NA, N/A, NaN, null, None, ?, - and so on.

    Raises:
        FileNotFoundError: there is no such file.
        ModuleNotFoundError: pandas, or pyarrow for Parquet, is missing.
        ValueError: the file is no table, is damaged, or holds no column that can be filled.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}; data must be a table, {', '.join(SUFFIXES)}")
    if not path.name.lower().endswith(SUFFIXES):
        raise ValueError(f"{path} is no table; data must be one of {', '.join(SUFFIXES)}")
    pandas = extra("pandas", "tabular", "tables")
    table = TableFile(path, pandas.DataFrame())
    if path.suffix.lower() in (".parquet", ".pq"):
        _read_parquet(table, pandas)
    else:
        _read_text(table, pandas, MISSING if missing is None else ("", *missing))
    if not len(table.raw):
        raise ValueError(f"{path} has no rows")
    if not len(table.frame.columns):
        why = "; ".join(f"{name}: {reason}" for name, reason in list(table.left.items())[:4])
        raise ValueError(f"{path} has no column that can be filled or says of others ({why})")
    return table


def _read_parquet(table: TableFile, pandas: Any) -> None:
    extra("pyarrow", "tabular", "Parquet files")
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table.raw = pq.read_table(table.path)
    except (ValueError, OSError, KeyError) as error:
        raise ValueError(f"{table.path} is not a Parquet file that can be read: {error}") from error
    table.names = list(table.raw.column_names)
    _check_names(table)
    columns = {}
    for name, kind in zip(table.names, table.raw.schema.types, strict=True):
        column = table.raw.column(name)
        # float64 would make large ones equal; those of usual size stay as pandas reads them
        wide = {pa.int64(): pandas.Int64Dtype(), pa.uint64(): pandas.UInt64Dtype()}
        large = kind in wide and column.null_count and _largest(column) > 2**53
        series = column.to_pandas(types_mapper=wide.get if large else None)
        if pa.types.is_date(kind):
            series = pandas.to_datetime(series)
        elif pa.types.is_decimal(kind):
            series = series.astype(float)
        elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
            series = _as_texts(series.astype(object), name, table)
        if series is not None and _usable(series, name, table):
            columns[name] = series
    table.frame = pandas.DataFrame(columns)


def _largest(column: Any) -> int:
    import pyarrow.compute as pc

    ends = pc.min_max(column).as_py()
    return max((abs(end) for end in ends.values() if end is not None), default=0)


def _read_text(table: TableFile, pandas: Any, missing: Sequence[str]) -> None:
    path, notes = table.path, table.notes
    encoding, start = read_start(path, notes)
    rows = {
        delimiter: [row for row in csv.reader(start, delimiter=delimiter, strict=False) if row]
        for delimiter in DELIMITERS
    }
    delimiter = max(rows, key=lambda key: evenness(rows[key]))
    if not rows[delimiter]:
        raise ValueError(f"{path} is empty")
    header = rows[delimiter][0]
    bare = all(is_number(name.strip().replace(",", ".")) for name in header)
    table.names = [
        f"column {k + 1}" if bare or not name.strip() else name.strip()
        for k, name in enumerate(header)
    ]
    _check_names(table)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            texts = pandas.read_csv(
                path,
                sep=delimiter,
                encoding=encoding,
                header=None,
                skiprows=0 if bare else 1,
                names=table.names,
                index_col=False,
                dtype=str,
                na_filter=False,
                skip_blank_lines=len(header) > 1,
            )
    except pandas.errors.ParserWarning as error:
        raise ValueError(f"{path}: a line has more fields than the first one has names") from error
    except pandas.errors.EmptyDataError:
        raise ValueError(f"{path} has no rows") from None
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read as a table: {' '.join(str(error).split())}"
        ) from error
    # a line that is too short leaves its last fields without a text at all
    table.raw = texts.fillna("")
    bom = encoding == "utf-8-sig" and not _has_mark(path)
    table.options = {
        "delimiter": delimiter,
        "encoding": "utf-8" if bom else encoding,
        "header": header,
        "bare": bare,
        "newline": "\r\n" if start[0].endswith("\r\n") else "\n",
        "quoted": _quoted(start, delimiter, len(header), bare),
    }
    if bare:
        notes.append("the first line holds numbers only and was read as a row, not as names")
    name_of = {",": "comma", ";": "semicolon", "\t": "tabulator", "|": "bar"}
    notes.append(f"delimiter: {name_of[delimiter]}; encoding: {table.options['encoding']}")
    found: Counter[str] = Counter()
    columns = {}
    for name in table.names:
        text = table.raw[name].astype(object).str.strip()
        gaps = text.isin(missing)
        found.update(text[gaps & (text != "")].tolist())
        series = _typed(text.mask(gaps), name, table, comma=delimiter != ",")
        if series is not None and _usable(series, name, table):
            columns[name] = series
    table.frame = pandas.DataFrame(columns)
    if found:
        words = ", ".join(f"{word!r} ({count})" for word, count in found.most_common(6))
        notes.append(f"read as gaps beside empty fields: {words}")


def _quoted(
    start: Sequence[str], delimiter: str, width: int, bare: bool
) -> tuple[list[bool], list[bool]]:
    """Which names, and which columns, stand in quotes, whether they need them or not."""
    raw = list(csv.reader(start, delimiter=delimiter, quoting=csv.QUOTE_NONE))
    names = [field.startswith('"') for field in raw[0]]
    if len(names) != width:  # a name holds the delimiter
        names = [names[0]] * width
    rows = [row for row in raw[0 if bare else 1 :] if len(row) == width]
    return names, [any(row[j].startswith('"') for row in rows) for j in range(width)]


def _has_mark(path: Path) -> bool:
    if path.suffix.lower() == ".gz":
        with gzip.open(path) as file:
            return bool(file.read(3) == b"\xef\xbb\xbf")
    with path.open("rb") as plain:
        return plain.read(3) == b"\xef\xbb\xbf"


def _check_names(table: TableFile) -> None:
    twice = [name for name, number in Counter(table.names).items() if number > 1]
    if twice:
        raise ValueError(f"{table.path}: column names occur twice: {', '.join(twice)}")


def _typed(text: Any, name: str, table: TableFile, *, comma: bool) -> Any:
    """A column of texts, None in its gaps, as what it is; None if it is left as it is."""
    import pandas

    seen = text.dropna()
    if not len(seen):
        table.left[name] = "no value at all"
        return None
    levels: Sequence[str] = [str(level) for level in seen.unique()]
    mark, written = ".", text
    # where fields are parted by commas too, digits must tell a decimal comma from one of thousands
    commas = [one for one in levels if "," in one and COMMA.fullmatch(one)]
    most = 2 * sum(map(bool, map(COMMA.fullmatch, levels))) > len(levels)
    if commas and most and (comma or any(map(DECIMAL.search, commas))):
        plain = text.str.replace(".", "", regex=False).str.replace(",", ".")
        mark, written = ",", plain.where(text.str.fullmatch(COMMA).fillna(False).astype(bool))
    numbers = pandas.to_numeric(written, errors="coerce").astype(float)
    if numbers.notna().sum() == len(seen) and not any(map(CODE.fullmatch, levels)):
        if any(DIGITS.fullmatch(one) and int(float(one)) != int(one) for one in levels):
            table.left[name] = "whole numbers beyond 2^53, which are codes and no quantities"
            return None
        if np.isinf(numbers).any():
            table.left[name] = "holds infinity"
            return None
        if mark == ",":
            table.notes.append(f"{name}: decimal commas")
        dots = mark == "," and any("." in one for one in levels)
        table.styles[name] = Style("number", _decimals(levels, mark), mark, dots=dots)
        return numbers
    if all(map(DATE.fullmatch, levels)):
        dates = _read_dates(text, seen, levels, name, table)
        if dates is not None:
            return dates
        table.left[name] = f"dates of a form that is not known, {levels[0]}"
        return None
    table.styles[name] = Style("text")
    texts = _as_texts(text, name, table)
    for what, fits in (("numbers", numbers.notna()), ("dates", text.str.fullmatch(DATE))):
        odd = seen[~fits[seen.index].astype(bool)]
        if 0 < 2 * len(odd) < len(seen):
            words = ", ".join(f"{word!r} ({count})" for word, count in Counter(odd).most_common(3))
            reason = f"texts, for not all of it are {what}: {words}; what means a gap can be named"
            if texts is None:
                table.left[name] = reason
            else:
                table.notes.append(f"{name}: {reason}")
    return texts


def _decimals(levels: Sequence[str], mark: str) -> int | None:
    if any("e" in one.lower() for one in levels):
        return None
    return min(10, max(len(one.partition(mark)[2]) for one in levels))


def _read_dates(text: Any, seen: Any, levels: Sequence[str], name: str, table: TableFile) -> Any:
    import pandas

    fits = []
    for form in DATES:
        try:
            pandas.to_datetime(pandas.Series(levels), format=form)
        except ValueError:
            continue
        fits.append(form)
    if not fits:
        return None
    table.styles[name] = Style("date", date=fits[0])
    either = fits[0].startswith("%d/") and len(fits) > 1
    other = " (as month/day/year it could be read too)" if either else ""
    table.notes.append(f"{name}: dates, read as {fits[0]}{other}")
    return pandas.to_datetime(text, format=fits[0])


def _as_texts(text: Any, name: str, table: TableFile) -> Any:
    """A column of categories; None where there are too many."""
    seen = text.dropna()
    count = seen.nunique()
    if count > MOST_CATEGORIES or (count > 10 and 2 * count > len(seen)):
        one = str(seen.iloc[0])
        short = one if len(one) <= 20 else f"{one[:20]}..."
        table.left[name] = f"{count} different texts such as {short!r}: names, and not categories"
        return None
    return text.astype("category")


def _usable(series: Any, name: str, table: TableFile) -> bool:
    plain = isinstance(series.dtype, np.dtype) and series.dtype.kind in "if"
    values = series.to_numpy() if plain else None
    if series.isna().all():
        table.left[name] = "no value at all"
        return False
    try:
        read_series(series, name)
    except (TypeError, ValueError) as error:
        table.left[name] = str(error).removeprefix(f"column {name!r} ")
        return False
    if values is not None and len(values) > 10:
        steps = values - np.arange(len(values))
        if steps[0] in (0, 1) and (steps == steps[0]).all():
            table.left[name] = "counts the rows"
            return False
    return True
