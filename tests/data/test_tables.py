from __future__ import annotations

import gzip
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fluvial.data import DataSet, read

pandas = pytest.importorskip("pandas")


def quiet(path: Path, **options: Any) -> DataSet:
    return read(path, progress=False, **options)


def csv(folder: Path, content: str | bytes, name: str = "table.csv") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


PLAIN = "age,income,kind\n30,1.5,x\n40,2.5,y\n50,2e3,x\n"


def test_table(tmp_path: Path) -> None:
    data = quiet(csv(tmp_path, PLAIN), label="kind")
    assert data.x.tolist() == [[30, 1.5], [40, 2.5], [50, 2000]]
    assert data.x.dtype == torch.float32
    assert data.label.tolist() == [0, 1, 0] and data.label_names == ("x", "y")
    form = data.format
    assert (form.kind, form.shape, form.columns) == ("table", (2,), ("age", "income"))
    assert form.integers == ("age",)
    assert form.shift == pytest.approx((40, 668), rel=1e-12)
    assert form.scale == pytest.approx(np.std([[30, 1.5], [40, 2.5], [50, 2000]], 0), rel=1e-12)
    back = form.decode(form.encode(data.x))
    assert back[:, 0].tolist() == [30, 40, 50] and back[:, 1].tolist() == pytest.approx(
        [1.5, 2.5, 2000], rel=1e-4
    )
    assert (data.name, data.licence, data.notes) == ("table.csv", "unknown", ())


WANTED = [[1.0, 2.5], [3.0, 1000.25]]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "a,b\n1,2.5\n3,1000.25\n"),
        ("a.csv", "a,b\r\n1,2.5\r\n3,1000.25\r\n"),
        ("a.csv", "\n a , b \n 1 , 2.5 \n\n3,1000.25"),
        ("a.csv", '"a","b"\n"1","2.5"\n3,1000.25\n'),
        ("a.csv", "a;b\n1;2.5\n3;1000.25\n"),
        ("a.csv", "a;b\n1;2,5\n3;1000,25\n"),
        ("a.csv", "a;b\n1;2,5\n3;1.000,25\n"),
        ("a.tsv", "a\tb\n1\t2.5\n3\t1000.25\n"),
        ("a.csv", "a|b\n1|2.5\n3|1000.25\n"),
        ("a.csv", "\ufeffa,b\n1,2.5\n3,1000.25\n".encode()),
        ("a.csv", "a,b\n1,2.5\n3,1000.25\n".encode("utf-16")),
        ("A.CSV", "a,b\n1,2.5\n3,1000.25\n"),
        ("a.csv.gz", gzip.compress(b"a,b\n1,2.5\n3,1000.25\n")),
        ("a.csv", ",a,b\n0,1,2.5\n1,3,1000.25\n"),
    ],
)
def test_spellings_of_one_table(tmp_path: Path, name: str, content: str | bytes) -> None:
    data = quiet(csv(tmp_path, content, name))
    assert data.format.columns == ("a", "b") and data.x.tolist() == WANTED
    assert data.format.integers == ("a",)


def test_what_was_recognised_is_noted(tmp_path: Path) -> None:
    for content, note in (
        ("a;b\n1;2,5\n3;1,25\n", "decimal commas in b"),
        ("größe,b\n1,2\n3,4\n".encode("cp1252"), "not UTF-8: read as Windows-1252"),
        (",a\n0,3\n1,4\n", "the first column has no name and counts the rows: left out"),
        ("1,2\n3,4\n", "the first line holds numbers only and was read as a row, not as names"),
        ("a,b\n1,True\n3,False\n", "booleans as 0 and 1: b"),
        ("a,b\n1,5\n3,5\n", "columns of one value only, scaled by 1: b"),
    ):
        data = quiet(csv(tmp_path, content))
        assert data.notes == (note,) and len(data) == 2


def test_names_with_line_breaks_and_delimiters(tmp_path: Path) -> None:
    data = quiet(csv(tmp_path, '"a, x","b\nc"\n1,2\n3,4\n'))
    assert data.format.columns == ("a, x", "b\nc") and data.x.tolist() == [[1, 2], [3, 4]]


def test_columns_too_fine_for_float32(tmp_path: Path) -> None:
    data = quiet(csv(tmp_path, "t,id,a\n1700000000.5,1,0\n1700000001.5,16777217,1\n"))
    assert data.x.dtype == torch.float64
    assert data.notes == ("kept in float64, as float32 is too coarse for t, id",)
    z = data.format.encode(data.x)
    assert z.dtype == torch.float32 and z.tolist() == [[-1, -1, -1], [1, 1, 1]]
    assert torch.equal(data.format.decode(z), data.x)


def test_single_row_and_column(tmp_path: Path) -> None:
    data = quiet(csv(tmp_path, "a\n7\n"))
    assert data.x.tolist() == [[7]] and data.format.encode(data.x).tolist() == [[0]]


def test_labels_may_be_called_none(tmp_path: Path) -> None:
    data = quiet(csv(tmp_path, "a,kind\n1,None\n2,NA\n3,10\n"), label="kind")
    assert data.label_names == ("10", "NA", "None")
    data = quiet(csv(tmp_path, "a,kind\n1,9\n2,10\n3,9\n"), label="kind")
    assert data.label_names == ("9", "10") and data.label.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("content", "label", "message"),
    [
        ("", None, "table.csv is empty"),
        ("\n\n", None, "table.csv is empty"),
        ("a,b\n", None, "has 0 rows and 2 columns"),
        ("a,b,a\n1,2,3\n", None, "column names occur twice: a"),
        ("a,,b\n1,2,3\n", None, "column 2 has no name"),
        ("a,b\n1,\n,3\n4,NA\n", None, r"missing in a \(1\), b \(2\) of 3 rows; .*imputation"),
        ("a,b\n1,?\n2,3\n", None, r"missing in b \(1\)"),
        ("a,kind\n1,\n2,x\n", "kind", r"missing in kind \(1\)"),
        ("a,city\n1,Rome\n2,Oslo\n", None, r"not numbers: city \('Rome', 'Oslo'\);.*as label"),
        ("a,b\n1,2\n2,oops\n", None, r"not numbers: b \('oops'\)"),
        ("a,when\n1,2020-01-02\n2,2021-02-03\n", None, r"when \(dates, 2020-01-02: write them"),
        ("a,when\n1,2.1.2020\n2,31.12.2021\n", None, r"when \(dates, 2.1.2020"),
        ('a,b\n1,"1,234.5"\n2,"2,000"\n', None, r"b \('1,234.5', '2,000'\)"),
        ("a,b\n1,inf\n2,3\n", None, "infinite, the first in row 0, column 'b'"),
        ("a,b\n1,2\n3,4,5\n", None, "Expected 2 fields in line 3, saw 3"),
        ("a,b\n1,2,9\n3,4,5\n", None, "a line has more fields than the first one has names"),
        ('a,b\n"1,2\n3,4\n', None, "EOF inside string"),
        (PLAIN, "kynd", "no column 'kynd'; did you mean kind"),
        ("a\n1\n", "a", "no column besides the label 'a'"),
        ("a,b\n1,1.5\n2,2.5\n", "b", "whole numbers or names, got 1.5"),
        (b"PK\x03\x04 a sheet", None, "a sheet of Excel"),
        (b"a,b\n\x00\x01,\x00\n", None, "binary data"),
        (bytes(range(256)), None, "table.csv cannot be read as text"),
    ],
)
def test_tables_that_are_refused(
    tmp_path: Path, content: str | bytes, label: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        quiet(csv(tmp_path, content), label=label)
    assert "\n" not in str(caught.value)


def test_truncated_gzip(tmp_path: Path) -> None:
    path = csv(tmp_path, gzip.compress(PLAIN.encode())[:30], "a.csv.gz")
    with pytest.raises(ValueError, match="cannot be read as text"):
        quiet(path, label="kind")


def test_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame(
        {
            "a": [1, 2, 3],
            "b": pandas.array([1, 2, 3], dtype="Int64"),
            "c": [1.5, 2, 3],
            "d": [True, False, True],
            "e": [Decimal("1.5"), Decimal("2.5"), Decimal("3.5")],
            "f": np.array([1, 2, 3], np.uint8),
            "kind": pandas.Categorical(["u", "v", "u"]),
        }
    )
    frame.to_parquet(tmp_path / "t.parquet")
    data = quiet(tmp_path / "t.parquet", label="kind")
    assert data.x.tolist() == [
        [1, 1, 1.5, 1, 1.5, 1],
        [2, 2, 2, 0, 2.5, 2],
        [3, 3, 3, 1, 3.5, 3],
    ]
    assert data.format.integers == ("a", "b", "d", "f") and data.label.tolist() == [0, 1, 0]
    frame["when"], frame["list"] = pandas.Timestamp("2020-01-01"), [[1], [2], [3]]
    frame.to_parquet(tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"when \(dates, 2020-01-01.*list \('\[1\]'"):
        quiet(tmp_path / "t.parquet", label="kind")
    with pytest.raises(ValueError, match=r"kind \('u', 'v'\)"):
        quiet(tmp_path / "t.parquet")
    pandas.DataFrame({"a": pandas.array([1, None], dtype="Int64")}).to_parquet(tmp_path / "t.pq")
    with pytest.raises(ValueError, match=r"missing in a \(1\) of 2"):
        quiet(tmp_path / "t.pq")
    (tmp_path / "t.pq").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"t.pq is not a Parquet file"):
        quiet(tmp_path / "t.pq")


def test_images_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="size and channels are for images"):
        quiet(csv(tmp_path, PLAIN), size=4)


@pytest.mark.parametrize(
    ("package", "name"), [("pandas", "a.csv"), ("pandas", "a.parquet"), ("pyarrow", "a.parquet")]
)
def test_missing_package_names_the_extra(
    tmp_path: Path, package: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fluvial.data import packages

    found = packages.import_module

    def absent(wanted: str) -> Any:
        if wanted == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return found(wanted)

    monkeypatch.setattr(packages, "import_module", absent)
    with pytest.raises(ModuleNotFoundError, match=rf"{package}.*fluvial\[tabular\]") as caught:
        quiet(csv(tmp_path, PLAIN, name))
    assert caught.value.name == package
