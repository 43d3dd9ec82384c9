"""Tables in CSV, TSV and Parquet files."""

from __future__ import annotations

import csv
import gzip
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from fluvial.data.arrays import label_numbers, moments
from fluvial.data.dataset import DataSet
from fluvial.data.format import Format, choices
from fluvial.data.packages import extra

Frame: TypeAlias = Any
"""A data frame of pandas, which is imported only where it is needed."""
SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet", ".pq")
"""Ends of the names of files that are read as tables."""

MISSING = ("", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "None", "<NA>", "#N/A", "?", "-")
"""Texts that mean a gap."""
DELIMITERS = ",;\t|"
"""Those that are told apart."""
COMMA = re.compile(r"[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?([eE][+-]?\d+)?")
"""A number with a decimal comma, and dots between thousands."""
DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}([T ].*)?|\d{1,2}[./]\d{1,2}[./]\d{2,4}( .*)?")
"""A text that looks like a date."""


def read_table(path: Path, *, label: str | None) -> DataSet:
    """A table whose columns are numbers, but for that of the labels.

    The file's encoding (UTF-8, UTF-16, else Windows-1252), its delimiter (comma, semicolon,
    tabulator or bar) and decimal commas are recognised.

    Args:
        path: exists.
        label: name of the column of the classes; None for a table without.

    Raises:
        ModuleNotFoundError: pandas, or pyarrow for Parquet, is missing.
        ValueError: see `from_frame`; or the file is damaged, empty, or its lines are uneven.
    """
    pandas = _pandas()
    notes: list[str] = []
    if path.suffix.lower() in (".parquet", ".pq"):
        extra("pyarrow", "tabular", "Parquet files")
        try:
            frame = pandas.read_parquet(path)
        except (ValueError, OSError, KeyError) as error:  # pyarrow's own are ValueErrors
            raise ValueError(f"{path} is not a Parquet file that can be read: {error}") from error
    else:
        frame = _read_csv(path, label, notes)
    return from_frame(frame, label=label, name=path.name, notes=notes)


def from_frame(frame: Frame, *, label: str | None, name: str, notes: Sequence[str] = ()) -> DataSet:
    """(N, D) of the numbers of a table, standardised; booleans as 0 and 1.

    float32, unless that is too coarse for a column: whole numbers beyond 2**24, or numbers whose
    deviation is below 1/16,000 of the largest; float64 for all columns then. Columns of whole
    numbers are kept in mind, and rounded when decoded.

    Raises:
        ValueError: there are no rows or no columns; names are missing or occur twice; ``label`` is
            not among them; values are missing, infinite, or not numbers.
    """
    notes = list(notes)
    columns = [str(column) for column in frame.columns]
    twice = [column for column, number in Counter(columns).items() if number > 1]
    if twice:
        raise ValueError(f"{name}: column names occur twice: {', '.join(twice)}")
    if not len(frame) or not columns:
        raise ValueError(f"{name}: the table has {len(frame)} rows and {len(columns)} columns")
    frame = frame.set_axis(columns, axis=1)
    if label is not None and label not in columns:
        raise ValueError(f"label: {name} has no column {label!r}; {choices(label, columns)}")
    counts = {column: int(frame[column].isna().sum()) for column in columns}
    missing = [f"{column} ({number})" for column, number in counts.items() if number]
    if missing:
        raise ValueError(
            f"{name}: values are missing in {_listed(missing)} of {len(frame)} rows; leave out "
            "those rows or columns, or fill them in (imputation is a system of its own)"
        )
    labels = names = None
    if label is not None:
        values = frame.pop(label).to_numpy()
        if values.dtype.kind not in "biuf":
            values = np.array([str(value).strip() for value in values])
        labels, names = label_numbers(values, len(frame))
    if not len(frame.columns):
        raise ValueError(f"{name}: there is no column besides the label {label!r}")

    numbers: dict[str, np.ndarray] = {}
    odd: list[str] = []
    for column in frame.columns:
        values = _column(frame[column])
        if values is None:
            odd.append(_described(column, frame[column]))
        else:
            numbers[column] = values
    if odd:
        raise ValueError(
            f"{name}: columns that are not numbers: {_listed(odd)}; leave them out, write them as "
            "numbers, or name the one that is the class as label"
        )
    integers = tuple(column for column, values in numbers.items() if values.dtype.kind in "biu")
    flags = [column for column, values in numbers.items() if values.dtype.kind == "b"]
    if flags:
        notes.append(f"booleans as 0 and 1: {_listed(flags)}")
    x = np.stack([values.astype(np.float64) for values in numbers.values()], axis=1)
    mean, std, constant = moments(x, list(numbers))
    if constant:
        one = _listed([list(numbers)[column] for column in constant])
        notes.append(f"columns of one value only, scaled by 1: {one}")
    largest = np.abs(x).max(0)
    whole = np.array([column in integers for column in numbers])
    # float32 has 24 bits: its steps at the largest number, against what the column tells
    coarse = (largest * 2.0**-24 > 1e-3 * np.array(std)) | (whole & (largest > 2**24))
    if coarse.any():
        wide = _listed([column for column, flag in zip(numbers, coarse, strict=True) if flag])
        notes.append(f"kept in float64, as float32 is too coarse for {wide}")
    else:
        x = x.astype(np.float32)
    return DataSet(
        x=torch.from_numpy(x),
        label=None if labels is None else torch.from_numpy(labels),
        format=Format(
            "table",
            (x.shape[1],),
            mean,
            std,
            label_names=names or (),
            columns=tuple(numbers),
            integers=integers,
        ),
        name=name,
        licence="unknown",
        source="the user's files",
        notes=tuple(notes),
    )


def _pandas() -> Any:
    return extra("pandas", "tabular", "tables")


def _read_csv(path: Path, label: str | None, notes: list[str]) -> Frame:
    pandas = _pandas()
    encoding, start = read_start(path, notes)
    rows = {
        delimiter: [row for row in csv.reader(start, delimiter=delimiter, strict=False) if row]
        for delimiter in DELIMITERS
    }
    # the delimiter that cuts most lines into the same number of fields, then into most fields
    delimiter = max(rows, key=lambda key: evenness(rows[key]))
    if not rows[delimiter]:
        raise ValueError(f"{path} is empty")
    header = [name.strip() for name in rows[delimiter][0]]
    bare = all(is_number(name.replace(",", ".")) for name in header)
    if bare:
        header = [f"column {k}" for k in range(1, len(header) + 1)]
        notes.append("the first line holds numbers only and was read as a row, not as names")
    index = not header[0]
    if index:
        header[0] = "index"
    if "" in header:
        raise ValueError(f"{path}: column {header.index('') + 1} has no name")
    twice = [name for name, number in Counter(header).items() if number > 1]
    if twice:
        raise ValueError(f"{path}: column names occur twice: {', '.join(twice)}")
    try:
        with warnings.catch_warnings():
            # that a line is longer than the first is a warning, and the rest of it lost
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            frame = pandas.read_csv(
                path,
                sep=delimiter,
                encoding=encoding,
                header=None if bare else 0,
                names=header,
                index_col=False,
                skipinitialspace=True,
                keep_default_na=False,
                # a class may be called None
                na_values={name: [""] if name == label else list(MISSING) for name in header},
                dtype={label: str} if label in header else None,
                low_memory=False,
            )
    except pandas.errors.ParserWarning as error:
        raise ValueError(f"{path}: a line has more fields than the first one has names") from error
    except ValueError as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read as a table: {why}") from error
    if index and label != "index" and _counts_rows(frame["index"]):
        frame = frame.drop(columns="index")
        notes.append("the first column has no name and counts the rows: left out")
    if delimiter != ",":
        commas = [name for name in frame.columns if name != label and _has_commas(frame[name])]
        for name in commas:
            texts = frame[name].str.replace(".", "", regex=False)
            frame[name] = pandas.to_numeric(texts.str.replace(",", ".", regex=False))
        if commas:
            notes.append(f"decimal commas in {_listed(commas)}")
    return frame


def read_start(path: Path, notes: list[str]) -> tuple[str, list[str]]:
    """The encoding of a text file, plain or of gzip, and its first 200 lines.

    Args:
        path: exists.
        notes: gets a line where the file is not UTF-8.

    Raises:
        ValueError: it is no text, or damaged.
    """
    opened: Any = gzip.open if path.suffix.lower() == ".gz" else open
    with opened(path, "rb") as file:
        begin = file.read(4)
    if begin.startswith(b"PK"):
        raise ValueError(f"{path} is a zip file or a sheet of Excel, not text: save it as .csv")
    encodings = ["utf-16"] if begin[:2] in (b"\xff\xfe", b"\xfe\xff") else ["utf-8-sig", "cp1252"]
    for encoding in encodings:
        lines: list[str] = []
        try:
            with opened(path, "rt", encoding=encoding, newline="") as file:
                for line in file:  # all of it: the first odd letter may be anywhere
                    if len(lines) < 200:
                        lines.append(line)
        except (UnicodeError, EOFError, OSError) as error:
            if isinstance(error, UnicodeError) and encoding != encodings[-1]:
                continue
            raise ValueError(f"{path} cannot be read as text: {error}") from error
        if "\0" in "".join(lines):
            raise ValueError(f"{path} holds binary data, not text")
        if encoding == "cp1252":
            notes.append("not UTF-8: read as Windows-1252")
        return encoding, lines
    raise AssertionError


def evenness(rows: list[list[str]]) -> tuple[int, int]:
    """(lines of the most frequent width, that width): the larger, the likelier the delimiter."""
    widths = Counter(len(row) for row in rows)
    width, number = widths.most_common(1)[0] if widths else (0, 0)
    return (number, width) if width > 1 else (0, width)


def is_number(text: str) -> bool:
    """Is the text a number, with a decimal point if any?"""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _counts_rows(column: Any) -> bool:
    values = column.to_numpy()
    if values.dtype.kind not in "iu":
        return False
    return any(np.array_equal(values, np.arange(len(values)) + first) for first in (0, 1))


def _has_commas(column: Any) -> bool:
    if column.dtype.kind in "biuf":
        return False
    texts = [str(text) for text in column.dropna().unique()]
    return any("," in text for text in texts) and all(map(COMMA.fullmatch, texts))


def _column(column: Any) -> np.ndarray | None:
    """The numbers of a column without gaps; None if it holds others than real numbers."""
    pandas = _pandas()
    if pandas.api.types.is_bool_dtype(column.dtype):
        return column.to_numpy(dtype=bool)
    if pandas.api.types.is_integer_dtype(column.dtype):
        values = column.to_numpy()
        return values if values.dtype.kind in "iu" else values.astype(np.int64)
    if pandas.api.types.is_float_dtype(column.dtype):
        return column.to_numpy(dtype=np.float64)
    if column.dtype == object:
        try:  # decimal numbers of Parquet; text would be taken for numbers too
            if not any(isinstance(value, str | bytes) for value in column):
                return column.to_numpy().astype(np.float64)
        except (TypeError, ValueError):
            pass
    return None


def _described(name: str, column: Any) -> str:
    """A column that is not numbers: what it looks like."""
    pandas = _pandas()
    texts = column.astype(str).unique()
    dates = pandas.api.types.is_datetime64_any_dtype(column.dtype)
    if dates or all(map(DATE.fullmatch, texts)):
        return f"{name} (dates, {texts[0]}: write them as days from one of them)"
    odd = [text for text in texts if not is_number(text)]
    return f"{name} ({', '.join(map(repr, (odd or list(texts))[:3]))})"


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - 8
    return ", ".join(names[:8]) + (f" and {rest} more" if rest > 0 else "")
