"""Tables in files, from the command line: what is recognised, what is written, what stays."""

from __future__ import annotations

import csv
import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fluvial
from fluvial import cli
from fluvial.tabular.miri.files import Style, read_file
from fluvial.tabular.miri.recipe import Recipe

SMALL = ["--rounds", "1", "--epochs", "2", "--hidden", "8", "--ode-steps", "3", "--quiet"]
Capture = pytest.CaptureFixture[str]


def rows(n: int = 40) -> list[list[str]]:
    rng = np.random.default_rng(1)
    table = []
    for k in range(n):
        size = float(rng.normal(10, 2))
        day = pd.Timestamp("2024-03-01") + pd.Timedelta(days=int(size))
        row = [
            str(k + 1),
            f"{1000 * size:.2f}",
            str(int(3 * size)),
            "Köln" if size > 10 else "Ulm",
            day.strftime("%d.%m.%Y"),
            "007" if size > 9 else "012",
            f"Person {k}",
            "",
        ]
        for j in range(1, 6):
            if rng.random() < 0.25:
                row[j] = str(rng.choice(["", "NA", "?"]))
        table.append(row)
    return table


HEADER = ["id", "Größe", "count", "town", "day", "code", "name", "empty"]
GAPS = {"", "NA", "?"}


def write(path: Path, table: list[list[str]], *, delimiter: str, encoding: str, end: str) -> None:
    text = end.join(delimiter.join(row) for row in [HEADER, *table]) + end
    data = text.encode(encoding)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.mark.parametrize(
    ("name", "delimiter", "encoding", "end", "mark"),
    [
        ("a.csv", ",", "utf-8", "\n", "."),
        ("b.csv", ";", "cp1252", "\r\n", ","),
        ("c.tsv.gz", "\t", "utf-8-sig", "\n", ","),
    ],
)
def test_a_filled_copy_differs_in_its_gaps_alone(
    tmp_path: Path, capsys: Capture, name: str, delimiter: str, encoding: str, end: str, mark: str
) -> None:
    path, out = tmp_path / name, tmp_path / "out"
    table = rows()
    for row in table:
        row[1] = row[1].replace(".", mark)
    write(path, table, delimiter=delimiter, encoding=encoding, end=end)
    before = path.read_bytes()
    arguments = ["train", "miri-imputation", "--data", str(path), "--out", str(out), *SMALL]
    assert cli.main([*arguments, "--copies", "1"]) == 0
    said = capsys.readouterr()
    assert "gaps filled" in said.out and "left as they are: id, name, empty" in said.out
    assert path.read_bytes() == before
    stem, suffix = name.split(".", 1)
    for place in (out / f"{stem}.filled.{suffix}", out / f"{stem}.filled-1.{suffix}"):
        data = place.read_bytes()
        text = (gzip.decompress(data) if suffix.endswith("gz") else data).decode(encoding)
        assert (b"\xef\xbb\xbf" in (gzip.decompress(data) if suffix.endswith("gz") else data)) == (
            encoding == "utf-8-sig"
        )
        assert text.count("\r\n") == (len(table) + 1 if end == "\r\n" else 0)
        filled = list(csv.reader(text.splitlines(), delimiter=delimiter))
        assert filled[0] == HEADER and len(filled) == len(table) + 1
        for old, new in zip(table, filled[1:], strict=True):
            for j, (was, now) in enumerate(zip(old, new, strict=True)):
                assert now == was if was not in GAPS or j > 5 else now not in GAPS
            assert len(new[1].partition(mark)[2]) == 2
            assert new[2].isdigit() and new[3] in ("Köln", "Ulm") and new[5] in ("007", "012")
            pd.to_datetime(new[4], format="%d.%m.%Y")
    report = (out / "report.md").read_text()
    for part in ("day: dates, read as %d.%m.%Y", "'NA'", "missing at random", "counts the rows"):
        assert part in report
    content = json.loads((out / "report.json").read_text())
    by = {column["name"]: column for column in content["columns"]}
    assert list(by) == HEADER[1:6]
    assert by["count"]["missing"] == sum(row[2] in GAPS for row in table)
    assert all(0 <= column["distance"] <= 1 for column in by.values())
    for file in ("figure.png", "README.md", "model.safetensors", "run.json", "result.json"):
        assert (out / file).stat().st_size > 0
    assert json.loads((out / "run.json").read_text())["parameters"] > 0
    model = fluvial.load(out)
    frame = read_file(path).frame
    assert not model.transform(frame).isna().any().any()
    assert cli.main(["sample", str(out), "--out", str(tmp_path / "s.csv")]) == 2
    assert "fills the gaps of tables" in capsys.readouterr().err
    assert cli.main(arguments) == 2  # the folder holds a finished run


def test_parquet_keeps_its_schema(tmp_path: Path) -> None:
    n, rng = 50, np.random.default_rng(0)

    def holed(values: list[Any]) -> list[Any]:
        return [None if rng.random() < 0.3 else value for value in values]

    size = rng.normal(10, 2, n)
    days = pd.Timestamp("2024-01-01") + pd.to_timedelta(np.round(size), unit="D")
    table = pa.table(
        {
            "x": pa.array(holed(size.tolist()), pa.float32()),
            "n": pa.array(holed([int(v) for v in size]), pa.int16()),
            "b": pa.array(holed([bool(v > 10) for v in size]), pa.bool_()),
            "s": pa.array(holed(["u" if v > 10 else "v" for v in size])),
            "k": pa.array(holed(["u" if v > 9 else "v" for v in size])).dictionary_encode(),
            "d": pa.array(holed([day.date() for day in days]), pa.date32()),
            "t": pa.array(holed(list(days)), pa.timestamp("ms")),
            "name": pa.array([f"n{v}" for v in range(n)]),
        }
    ).replace_schema_metadata({"origin": "kept"})
    path = tmp_path / "table.parquet"
    pq.write_table(table, path)
    recipe = Recipe(rounds=1, epochs=2, hidden=(8,), ode_steps=3)
    job = recipe.prepare(path, progress=False)
    out = tmp_path / "out"
    out.mkdir()
    result, text = job.complete(out, progress=False)
    filled = pq.read_table(out / result["filled"])
    assert filled.schema.equals(table.schema, check_metadata=True)
    for name in table.column_names:
        old, new = table.column(name).to_pylist(), filled.column(name).to_pylist()
        assert all(
            b == a if a is not None else b is not None for a, b in zip(old, new, strict=True)
        )
    assert "left as they are: name" in text
    assert len(result["metrics"]) == 2


def fill(path: Path, **changes: Any) -> tuple[Path, str]:
    """The filled copy of a file, and the report."""
    recipe = Recipe(**{"rounds": 1, "epochs": 2, "hidden": (8,), "ode_steps": 2, **changes})
    out = path.parent / f"out-{path.name}"
    out.mkdir()
    result, _ = recipe.prepare(path, progress=False).complete(out, progress=False)
    return out / result["filled"], (out / "report.md").read_text()


def test_quotes_stay_where_they_were(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text('"a","b","c"\n1.50,"x",NA\n2.50,NA,3\n3.50,"y, ""z""\nw",4\nNA,"x",3\n')
    place, _ = fill(path)
    lines = place.read_text().splitlines()
    assert lines[0] == '"a","b","c"' and lines[1][:8] == '1.50,"x"' and lines[1][9:] in "34"
    assert lines[2] in ('2.50,"x",3', '2.50,"y, ""z""')
    assert '3.50,"y, ""z""\nw",4\n' in place.read_text()
    plain = tmp_path / "p.csv"
    plain.write_text("a,b\n1,x\n,y\n3,\n")
    assert '"' not in fill(plain)[0].read_text()


def test_which_texts_mean_a_gap_can_be_said(tmp_path: Path, capsys: Capture) -> None:
    path, out = tmp_path / "t.csv", tmp_path / "out"
    lines = [
        f"{k},{'n.a.' if k % 7 == 0 else k * k},{'NA' if k % 2 else '-999'}" for k in range(40)
    ]
    path.write_text("\n".join(["x,y,country", *lines, ",1,DE"]) + "\n")
    _, report = fill(path)  # NA is taken for a gap, and n.a. for a text
    assert "'NA' (20)" in report
    assert "y was left as it is" in report and "not all of it are numbers: 'n.a.' (6)" in report
    arguments = ["train", "miri-imputation", "--data", str(path), "--out", str(out), *SMALL]
    assert cli.main([*arguments, "--missing", "n.a.", "-999"]) == 0, capsys.readouterr()
    filled = pd.read_csv(out / "t.filled.csv", keep_default_na=False, dtype=str)
    assert filled["y"].str.fullmatch(r"\d+").all()
    assert set(filled["country"]) == {"NA", "DE"} or set(filled["country"]) == {"NA"}
    assert (filled["country"][1:40:2] == "NA").all()


def test_columns_that_cannot_be_read_are_left_and_named(tmp_path: Path) -> None:
    n = 15
    table = pa.table(
        {
            "x": pa.array([1.5, None, *map(float, range(n - 2))]),
            "took": pa.array([None, *range(n - 1)], pa.duration("s")),
            "list": pa.array([[1]] * n),
            "bytes": pa.array([b"a", None] + [b"c"] * (n - 2)),
            "inf": pa.array([None, np.inf] + [1.0] * (n - 2)),
            "far": pa.array([None, 253402214400] + [0] * (n - 2), pa.timestamp("s")),
            "names": pa.array([f"n{k}" for k in range(n)] + [None] * 0).dictionary_encode(),
            "huge": pa.array([2**60 + 1, None] + [2**60 + 3] * (n - 2)),
        }
    )
    path = tmp_path / "t.parquet"
    pq.write_table(table, path)
    table = pq.read_table(path)  # the format has its own names for some types
    place, report = fill(path)
    filled = pq.read_table(place)
    assert filled.schema.equals(table.schema)
    for name in ("x", "took", "huge"):
        assert filled.column(name).null_count == 0
    for name, why in (
        ("list", "holds values of type"),
        ("bytes", "holds values of type bytes"),
        ("inf", "contains infinity"),
        ("far", "reaches from 1970-01-01 00:00:00 to 9999-12-31"),
    ):
        assert f"{name} was left as it is, gaps and all, and not used: {why}" in report
        assert filled.column(name).equals(table.column(name))
    far = tmp_path / "far.csv"
    far.write_text("d,x,tel\n2024-01-01,1,+491\n9999-12-31,,+492\n,3,\n")
    place, report = fill(far)
    assert "d was left" in report and place.read_text().splitlines()[3][:3] == ",3,"
    assert place.read_text().splitlines()[3][3:] in ("+491", "+492")


def test_ambiguous_days_and_months_are_named(tmp_path: Path) -> None:
    for time in ("", " 10:00"):
        path = tmp_path / f"d{len(time)}.csv"
        path.write_text(f"d,x\n01/02/2024{time},1\n03/04/2024{time},\n05/06/2024{time},2\n")
        assert "as month/day/year it could be read too" in "".join(read_file(path).notes)


def test_the_spread_of_large_tables_is_measured_on_some_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fluvial.tabular.miri import recipe

    monkeypatch.setattr(recipe, "SPREAD_ROWS", 4)
    path = tmp_path / "t.csv"
    lines = [f"{k % 5 if k % 3 else ''},{k},{'' if k == 5 else 'ab'[k % 2]}" for k in range(30)]
    path.write_text("\n".join(["a,b,c", *lines]) + "\n")
    asked: list[int] = []
    several = recipe.MIRIImputer._several

    def remember(self: Any, table: Any, m: int) -> Any:
        asked.append(table.shape[0])
        return several(self, table, m)

    monkeypatch.setattr(recipe.MIRIImputer, "_several", remember)
    fill(path)
    assert asked == [4]


def test_what_cannot_be_filled_is_said(tmp_path: Path) -> None:
    def read(text: str) -> Any:
        path = tmp_path / "t.csv"
        path.write_text(text)
        return Recipe().prepare(path)

    for text, message in (
        ("a,b\n1,2\n3,4\n", "has no gap that could be filled"),
        ("a,b\n", "has no rows"),
        ("", "is empty"),
        ("a,a\n1,\n", "column names occur twice: a"),
        ("a,b\n,\n,\n", "has no column that can be filled"),
    ):
        with pytest.raises(ValueError, match=message):
            read(text)
    with pytest.raises(FileNotFoundError, match="there is no nowhere.csv"):
        Recipe().prepare("nowhere.csv")
    (tmp_path / "t.txt").write_text("a")
    with pytest.raises(ValueError, match="is no table"):
        Recipe().prepare(tmp_path / "t.txt")
    table = read("a,b,c\n1,x,inf\n2,,3\n").table
    assert table.left == {"c": "holds infinity"}
    table = read("a,b\n1.5,2024-13-45\n2.5,2024-01-01\n,2024-01-02\n").table
    assert table.left == {"b": "dates of a form that is not known, 2024-13-45"}


def test_texts_are_written_as_their_column_is() -> None:
    assert Style("number", 2, ",").write(1.005) == "1,00"
    assert Style("number", 0).write(-0.2) == "0"
    assert Style("number", None).write(1.5e-9) == "1.5e-09"
    dots = Style("number", 1, ",", dots=True)
    assert [dots.write(x) for x in (-1234567.25, 123.4, 1000)] == [
        "-1.234.567,2",
        "123,4",
        "1.000,0",
    ]
    assert Style("number", 6, ",", dots=True).write(1234.567891) == "1.234,567891"
    assert Style("number", 0, ",", dots=True).write(12345) == "12.345"
    assert Style("date", date="%d.%m.%Y").write(pd.Timestamp("2024-02-03")) == "03.02.2024"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draws": 0}, "^draws must be a whole number of at least 1"),
        ({"copies": -1}, "^copies must be a whole number of at least 0"),
        ({"hidden": ()}, "hidden must be sizes"),
        ({"seed": -1}, "seed must lie in"),
        ({"rounds": 0}, "rounds must be"),
    ],
)
def test_bad_recipes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**changes)
    assert Recipe.from_json(Recipe(hidden=(3, 4)).as_json()) == Recipe(hidden=(3, 4))
    with pytest.raises(ValueError, match="of another version"):
        Recipe.from_json({"odd": 1})


def test_a_run_that_was_stopped_goes_on_after_its_last_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    from fluvial.tabular.miri import rounds

    path = tmp_path / "t.csv"
    lines = [f"{k % 7 if k % 3 else ''},{k},{'' if k % 5 == 1 else k % 4}" for k in range(60)]
    path.write_text("\n".join(["a,b,c", *lines]) + "\n")
    flags = ["train", "miri-imputation", "--data", str(path), *SMALL, "--rounds", "3"]
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert cli.main([*flags, "--out", str(whole)]) == 0
    assert not (whole / "checkpoints").exists()
    train, calls = rounds.train_round, []

    def stopped(*arguments: Any, **named: Any) -> list[float]:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return train(*arguments, **named)

    monkeypatch.setattr(rounds, "train_round", stopped)
    capsys.readouterr()
    assert cli.main([*flags, "--out", str(out)]) == 130
    said = capsys.readouterr().err
    assert "stopped after 2 of 3 rounds" in said and f"--resume {out}" in said
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == [
        "round-1.safetensors",
        "round-2.safetensors",
    ]
    assert not (out / "result.json").exists()
    before = path.read_text()
    path.write_text(before.replace("\n1,1,", "\n2,1,"))
    assert cli.main(["train", "--resume", str(out), "--quiet"]) == 2
    assert "the data or the settings have changed since" in capsys.readouterr().err
    path.write_text(before)
    second = out / "checkpoints" / "round-2.safetensors"
    second.write_bytes(second.read_bytes()[:-9])
    assert cli.main(["train", "--resume", str(out), "--quiet"]) == 2
    assert "delete it, and the rounds from this one on are trained" in capsys.readouterr().err
    second.unlink()
    assert cli.main(["train", "--resume", str(out), "--quiet"]) == 0
    assert len(calls) == 5  # the last two rounds alone were trained
    assert (out / "t.filled.csv").read_bytes() == (whole / "t.filled.csv").read_bytes()
    assert (out / "report.md").read_text() == (whole / "report.md").read_text()
    assert not (out / "checkpoints").exists()


def test_categories_keep_their_order_in_parquet(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    kinds = ["lo", "mid", "hi"]
    values = [None if k % 4 == 1 else kinds[k % 3 and 2] for k in range(40)]  # "mid" never occurs
    table = pd.DataFrame(
        {
            "x": [float(k % 3) for k in range(40)],
            "ranked": pd.Categorical(values, kinds, ordered=True),
            "kind": pd.Categorical(values, kinds),
        }
    )
    table.to_parquet(path)
    place, _ = fill(path)
    filled = pd.read_parquet(place)
    assert (filled.dtypes == table.dtypes).all() and not filled.isna().any().any()
    for name in ("ranked", "kind"):
        seen = table[name].notna()
        assert (filled[name][seen] == table[name][seen]).all()
        assert list(filled[name].cat.categories) == kinds


def test_decimal_commas_and_words_for_gaps_are_recognised_or_named(tmp_path: Path) -> None:
    path = tmp_path / "de.csv"
    lines = [f'"1.{500 + k},25",{"k.A." if k % 5 == 1 else k * 7 % 13}' for k in range(30)]
    path.write_text("\n".join(["a,b", *lines, '"",3', '"NA",4']) + "\n")
    table = read_file(path)
    assert table.frame["a"][0] == 1500.25 and "a: decimal commas" in table.notes
    assert "not all of it are numbers: 'k.A.' (6)" in "".join([*table.notes, *table.left.values()])
    place, _ = fill(path, missing=("k.A.", "NA"))
    last = place.read_text().splitlines()[-2:]
    assert all(re.fullmatch(r'"1\.\d{3},\d\d",[34]', line) for line in last)
    # between thousands, as English writes them, a comma is no decimal one
    path.write_text("\n".join(["a,b", *(f'"1,{500 + k}",{k % 4}' for k in range(30)), ",1"]))
    table = read_file(path)
    assert "30 different texts such as '1,500': names" in table.left["a"]
    other = tmp_path / "d.csv"
    dates = ["keine" if k % 4 == 1 else f"{k % 28 + 1:02}.03.2024" for k in range(60)]
    sizes = ["k.A." if k % 4 == 2 else f"{k},5" for k in range(60)]
    both = zip(dates, sizes, strict=True)
    lines = [f"{one};{size};{k % 3 or ''}" for k, (one, size) in enumerate(both)]
    other.write_text("\n".join(["d;s;x", *lines]) + "\n")
    table = read_file(other)
    assert "d: texts, for not all of it are dates: 'keine' (15)" in "".join(table.notes)
    assert "not all of it are numbers: 'k.A.' (15)" in table.left["s"]
