"""What is refused, by the name it has, before anything is trained; and odd input that is kept."""

from __future__ import annotations

import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from fluvial import cli
from fluvial.tabular import MIRIImputer, ampute, pool
from fluvial.tabular.baselines import (
    BASELINES,
    GAIN,
    MIWAE,
    TDM,
    KnewImp,
    TabCSDI,
    crps,
    draws,
    tune,
)
from fluvial.tabular.checks import truth, whole
from fluvial.tabular.miri.files import read_file
from fluvial.tabular.miri.rounds import Rounds, run_rounds

X = np.random.default_rng(0).normal(size=(40, 3))
HOLED = np.where(np.random.default_rng(1).random(X.shape) < 0.3, np.nan, X)
ODD: tuple[Any, ...] = ("a", None, True, float("nan"), [1], 1.5, 0, -1)


def quick(**changes: Any) -> MIRIImputer:
    few = {"rounds": 1, "epochs": 1, "hidden": (8,), "ode_steps": 2, "random_state": 0}
    return MIRIImputer(**{**few, **changes})


def frame(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame(HOLED, columns=list("abc")).assign(**columns)


# Hyper-parameters


@pytest.mark.parametrize("name", ["rounds", "epochs", "ode_steps", "max_steps", "draws"])
def test_counts_are_whole_numbers(name: str) -> None:
    for value in ODD:
        with pytest.raises(ValueError, match=f"^{name} must be a whole number of at least 1, got"):
            quick(**{name: value}).fit(HOLED)
    filled = quick(**{name: 2.0}).fit_transform(HOLED)  # which 2.0 is, and np.int64 too
    assert np.array_equal(filled, quick(**{name: np.int64(2)}).fit_transform(HOLED))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": "a"}, "batch_size must be a whole number"),
        ({"chains": [2]}, "chains must be a whole number"),
        ({"lr": "a"}, "lr must be positive and finite, got 'a'"),
        ({"lr": None}, "lr must be positive and finite, got None"),
        ({"hide": "a"}, r"hide must be a share in \[0, 1\), got 'a'"),
        ({"clamp": "no"}, "clamp must be True or False, got 'no'"),
        ({"hidden": ()}, r"hidden must be sizes such as \(128, 128\), or None, got \(\)"),
        ({"hidden": 64}, "hidden must be sizes"),
        ({"hidden": "64"}, "hidden must be sizes"),
        ({"hidden": (8.5,)}, "each of hidden must be a whole number"),
        ({"net": 5}, "net must make a network"),
        ({"net": lambda width, seed: 5}, "net must make a torch.nn.Module, got int"),
        ({"net": lambda width, seed: nn.Linear(3, 3)}, r"net must take \(n, 10\)"),
        ({"net": lambda width, seed: nn.Linear(10, 4)}, r"net must give \(n, 3\), got \(2, 4\)"),
        ({"device": "gpu0"}, "device must be one of this machine, got 'gpu0'"),
        ({"device": None}, "device must be one of this machine, got None"),
        ({"random_state": 1.5}, "random_state must be a whole number, a generator"),
        ({"random_state": True}, "random_state must be a whole number, a generator"),
        ({"bounds": [(0, 1)]}, "bounds must be a mapping by column"),
        ({"kinds": "numeric"}, "kinds must be a mapping by column"),
        ({"bounds": {0: 1}}, r"bounds of 'x0': \(low, high\) must be finite or None, and in order"),
        ({"bounds": {0: ("a", None)}}, r"bounds of 'x0': \(low, high\)"),
        ({"bounds": {0: (9, -9)}}, r"bounds of 'x0': \(low, high\)"),
        ({"bounds": {True: (-9, 9)}}, "bounds names a column True"),
        ({"bounds": {0: (0, 1)}, "kinds": {0: "categorical"}}, "the column is categorical"),
    ],
)
def test_hyper_parameters_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quick(**changes).fit(HOLED)


def test_bounds_are_for_numbers_and_of_one_name() -> None:
    table = frame(kind=["u", "v"] * 20, day=pd.date_range("2024", periods=40))
    for name, bounds in (("kind", (0, 1)), ("day", (pd.Timestamp("2024"), None))):
        with pytest.raises(ValueError, match=f"bounds of '{name}': the column is"):
            quick(bounds={name: bounds}).fit(table)
    with pytest.raises(ValueError, match="bounds names column 0 twice"):
        quick(bounds={"a": (-9, 9), 0: (-8, 8)}).fit(table)
    quick(bounds={np.int64(0): (-9, 9)}).fit(HOLED)  # as a search over parameters has them


def test_how_often_is_a_whole_number_and_refits_are_of_the_same_columns() -> None:
    imputer = quick().fit(HOLED)
    for m in ODD:
        with pytest.raises(ValueError, match="^m must be a whole number of at least 1, got"):
            imputer.sample(HOLED, m)
    with pytest.raises(ValueError, match="refit must be True or False, got 'no'"):
        imputer.sample(HOLED, 1, refit="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="X has 2 features"):
        imputer.sample(HOLED[:, :2], 1, refit=True)
    assert whole("m", 2.0) == 2 and truth("refit", np.True_)


def test_folders_are_looked_at_before_a_round_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "mine"
    own.write_text("mine")
    for folder in (own, own / "below"):
        with pytest.raises(NotADirectoryError, match="mine is a file; choose another folder"):
            quick().fit(HOLED, folder=folder)
    assert own.read_text() == "mine"
    with pytest.raises(TypeError, match="folder must be a path, got 5"):
        quick().fit(HOLED, folder=5)  # type: ignore[arg-type]
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(PermissionError, match="cannot be written to"):
        quick().fit(HOLED, folder=tmp_path / "new" / "rounds")


def test_settings_of_a_search_are_saved(tmp_path: Path) -> None:
    changes = {"epochs": np.int64(1), "lr": np.float64(1e-3), "hidden": np.array([8])}
    imputer = quick(**changes).fit(HOLED)
    imputer.save(tmp_path / "m.safetensors")
    loaded = MIRIImputer.load(tmp_path / "m.safetensors")
    assert loaded.hidden == (8,) and loaded.epochs == 1
    assert np.array_equal(loaded.transform(HOLED), imputer.transform(HOLED))


# Tables


def test_masked_arrays_and_arrays_of_dates() -> None:
    masked = np.ma.masked_array(np.nan_to_num(HOLED, nan=9.0), np.isnan(HOLED))
    assert np.array_equal(quick().fit_transform(masked), quick().fit_transform(HOLED))
    whole = np.ma.masked_array(np.arange(12).reshape(6, 2), np.eye(6, 2, dtype=bool))
    filled = quick().fit_transform(whole)
    assert (filled[~whole.mask] == whole.data[~whole.mask]).all() and filled[0, 0] != 0
    days = np.arange(12).reshape(6, 2).astype("datetime64[D]")
    with pytest.raises(TypeError, match="dates go in a data frame"):
        quick().fit(days)
    with pytest.raises(ValueError, match="mask must be truth values, got 2"):
        quick().fit(HOLED, mask=np.full(HOLED.shape, 2))


def test_new_frames_that_are_not_those_of_the_fit() -> None:
    kind = pd.Categorical(["u", None, "v", "v"] * 10)
    imputer = quick().fit(frame(kind=kind))
    with pytest.raises(TypeError, match="'kind' was categorical in fitting.*of type float now"):
        imputer.transform(frame(kind=HOLED[:, 0]))
    fewer = pd.Categorical(["w", None] * 20)  # neither u nor v can stand in its gaps
    with pytest.raises(TypeError, match="'kind': category cannot hold what is drawn, '[uv]'"):
        imputer.transform(frame(kind=fewer))
    with pytest.raises(TypeError, match="'kind': float64 cannot hold what is drawn"):
        imputer.transform(frame(kind=np.full(40, np.nan)))
    # a table without gaps is read too
    whole = pd.DataFrame({"a": ["x"] * 4, "b": 1.0, "c": 1.0, "kind": ["u"] * 4})
    with pytest.raises(TypeError, match="'a' was numeric in fitting"):
        imputer.transform(whole)
    with pytest.raises(
        ValueError, match="column 'x0' holds 1e\\+300, too far from what was fitted"
    ):
        quick().fit(HOLED).transform(np.array([[1e300, np.nan, 0.0]]))


def test_objects_are_filled_with_their_own_kind() -> None:
    ints = [None, 1, 2, 5] * 10
    prices = [None, Decimal("1.25"), Decimal("9.50"), Decimal("4")] * 10
    columns = {"int": pd.Series(ints, dtype=object), "price": pd.Series(prices, dtype=object)}
    filled = quick().fit_transform(frame(**columns))
    assert {type(value) for value in filled["int"]} == {int}
    assert {type(value) for value in filled["price"]} == {Decimal}
    assert all(value.as_tuple().exponent == -2 for value in filled["price"][::4])
    with pytest.raises(TypeError, match="'mixed' holds values of type bool, int"):
        quick().fit(frame(mixed=pd.Series([True, None, 3, 4] * 10, dtype=object)))


@pytest.mark.parametrize(("least", "dtype"), [(2**60, "Int64"), (2**64 - 80, "UInt64")])
def test_large_whole_numbers_are_told_apart(least: int, dtype: str, tmp_path: Path) -> None:
    numbers = [None if k % 4 == 0 else least + 2 * k for k in range(40)]
    table = pd.DataFrame({"big": pd.array(numbers, dtype=dtype), "x": np.arange(40.0)})
    imputer = quick(bounds={"big": (least + 1, None)}).fit(table)
    filled = imputer.transform(table)
    seen = table["big"].notna()
    assert (filled["big"][seen] == table["big"][seen]).all() and filled["big"].dtype == dtype
    drawn = [int(value) - least for value in filled["big"][~seen]]
    assert len(set(drawn)) > 3 and min(drawn) >= 1
    imputer.save(tmp_path / "m.safetensors")
    assert MIRIImputer.load(tmp_path / "m.safetensors").transform(table).equals(filled)
    with pytest.raises(ValueError, match="bounds of 'big' are"):
        quick(bounds={"big": (least + 5, None)}).fit(table)


def test_draws_fit_their_dtype() -> None:
    ends = pd.array([127, 126, None, -128] * 10, dtype="Int8")
    filled = quick(clamp=False, epochs=3).fit_transform(pd.DataFrame({"a": ends, "b": HOLED[:, 0]}))
    assert filled["a"].dtype == "Int8" and filled["a"].notna().all()
    wide = pd.array([-(2**63), 2**63 - 1, None, 0] * 10, dtype="Int64")
    filled = quick().fit_transform(pd.DataFrame({"a": wide, "b": np.arange(40.0)}))
    assert filled["a"].notna().all() and filled["a"][0] == -(2**63)


# Files


def test_codes_of_text_files_are_left_and_large_numbers_of_parquet_filled(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["code,x", *(f"{2**60 + k},{k}" for k in range(20)), ",", "1,2"]))
    table = read_file(path)
    assert table.left == {"code": "whole numbers beyond 2^53, which are codes and no quantities"}
    numbers = [None if k % 4 == 0 else 2**60 + k * k for k in range(40)]
    pq.write_table(pa.table({"big": pa.array(numbers), "x": np.arange(40.0)}), tmp_path / "t.pq")
    arguments = ["--data", str(tmp_path / "t.pq"), "--out", str(tmp_path / "out"), "--quiet"]
    small = ["--rounds", "1", "--epochs", "2", "--hidden", "8"]
    assert cli.main(["train", "miri-imputation", *arguments, *small]) == 0
    filled = pq.read_table(tmp_path / "out" / "t.filled.pq")["big"].to_pylist()
    assert all(new == old for new, old in zip(filled, numbers, strict=True) if old is not None)
    assert len({filled[k] for k in range(0, 40, 4)}) > 3


@pytest.mark.parametrize("flag", ["draws", "copies"])
def test_flags_are_named_alone(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "miri-imputation", "--data", "t.csv", f"--{flag}", "-1"]) == 2
    assert f"--{flag} must be a whole number" in capsys.readouterr().err


def test_the_bar_of_a_resumed_fit_ends_at_its_total(monkeypatch: pytest.MonkeyPatch) -> None:
    from fluvial.tabular.miri import rounds

    bars: list[Any] = []

    class Bar(rounds.tqdm):
        def __init__(self, **options: Any) -> None:
            bars.append(self)
            self.at, self.goal = options["initial"], options["total"]
            super().__init__(**{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.at += n

    monkeypatch.setattr(rounds, "tqdm", Bar)
    x, mask = torch.randn(20, 2), torch.rand(20, 2) > 0.3
    net = rounds.VelocityMLP(2, (4,), seed=0)
    settings = Rounds(rounds=2, epochs=2, ode_steps=2)
    noise = rounds.KeyedNoise(0)
    run_rounds(x, mask, lambda k: net, settings, noise, done=[net], progress=True)
    assert bars[0].at == bars[0].goal


# Gaps on purpose, and pooling


@pytest.mark.parametrize("name", ["rate", "observed", "strength", "tail", "seed"])
def test_ampute_names_its_arguments(name: str) -> None:
    odd: tuple[Any, ...] = ("a", None, float("nan"), True, -1)
    for value in odd:
        with pytest.raises(ValueError, match=f"^{name} must"):
            ampute(X, **{name: value})


def test_ampute_refuses_what_is_no_table_of_numbers() -> None:
    with pytest.raises(ValueError, match="column 1 of X contains infinity"):
        ampute(np.array([[1.0, np.inf], [2.0, 3.0]]))
    for table in (X.astype(complex), X.astype(int).astype("datetime64[D]")):
        with pytest.raises(TypeError, match="X must hold real numbers, got"):
            ampute(table)
    with pytest.raises(TypeError, match="column 'a' of X must hold real numbers"):
        ampute(pd.DataFrame({"a": [1j, 2j]}))
    with pytest.raises(TypeError, match="column 'a' of X cannot be ordered"):
        ampute(pd.DataFrame({"a": [[1], [2]]}))
    with pytest.raises(ValueError, match="X must be a table"):
        ampute(pd.Series([1.0, 2.0]))


def test_ampute_keeps_columns_of_one_name_masks_and_large_numbers() -> None:
    twice = pd.DataFrame(X, columns=["a", "a", "b"])
    made = ampute(twice, 0.4)
    assert (made.data.isna().to_numpy() == ~made.mask).all() and not made.mask.all(0).any()
    hidden = np.ma.masked_array(X, X > 1)
    assert not ampute(hidden, 0.4).mask[X > 1].any()
    large = pd.DataFrame({"a": np.arange(40, dtype=np.uint64) + 2**63})
    made = ampute(large, 0.4)
    assert made.data["a"].dtype == "UInt64"
    assert made.data["a"].dropna().equals(large["a"].astype("UInt64")[made.mask[:, 0]])


def test_pool_names_its_arguments() -> None:
    with pytest.raises(ValueError, match="estimates must be numbers of one shape"):
        pool([[1, 2], [3]], [1, 1])
    with pytest.raises(ValueError, match="complete_df must be positive and finite, got 'a'"):
        pool([1, 2], [1, 1], complete_df="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"level must lie in \(0, 1\), got None"):
        pool([1, 2], [1, 1]).interval(None)  # type: ignore[arg-type]


# Baselines

FEW: dict[type, dict[str, Any]] = {
    GAIN: {"steps": 1},
    MIWAE: {"steps": 1, "hidden": 4, "importance": 2},
    TabCSDI: {"steps": 1, "levels": 2, "width": 8, "blocks": 1},
    TDM: {"steps": 1},
    KnewImp: {"steps": 1, "epochs": 1, "rounds": 1},
}


@pytest.mark.parametrize("kind", FEW)
def test_baselines_name_their_arguments(kind: Any) -> None:
    names = [name for name in kind().get_params() if name != "random_state"]
    for name in names:
        for value in ("a", None, True, float("nan"), -1):
            with pytest.raises(ValueError, match=f"^{name} must"):
                kind(**{name: value}).fit(HOLED)
    imputer = kind(**FEW[kind], random_state=0).fit(HOLED)
    for m in ODD:
        with pytest.raises(ValueError, match="^m must be a whole number of at least 1, got"):
            imputer.sample(HOLED, m)
    with pytest.raises(ValueError, match="column 0 of X holds numbers too far from the fit's"):
        imputer.transform(np.array([[1e300, np.nan, 0.0]]))
    with pytest.raises(ValueError, match="column 0 of X has numbers too large to be scaled"):
        kind(**FEW[kind]).fit(np.array([[1e308, 1.0], [-1e308, 2.0]]))


@pytest.mark.parametrize("kind", FEW)
def test_baselines_fill_a_column_of_one_value_with_it(kind: Any) -> None:
    constant = HOLED.copy()
    constant[:, 1] = np.where(np.isnan(HOLED[:, 1]), np.nan, 7.0)
    filled = kind(**FEW[kind], random_state=0).fit_transform(constant)
    assert (filled[:, 1] == 7).all() and np.isfinite(filled).all()


def test_columns_without_a_value_are_named() -> None:
    none = HOLED.copy()
    none[:, 2] = np.nan
    for name in ("KNN", "IterativeImputer", "MissForest", "GAIN"):
        with pytest.raises(ValueError, match="column 2 of X has no value at all"):
            BASELINES[name](0).fit(none)


def test_tuning_names_its_arguments() -> None:
    make, settings = BASELINES["mean"], [{"strategy": "mean"}, {"strategy": "median"}]
    for arguments, error, message in (
        (("mean", settings, HOLED), TypeError, "make must make an imputer"),
        ((make, settings[0], HOLED), TypeError, "settings must be a list of mappings"),
        ((make, [], HOLED), ValueError, "settings must hold one at least"),
        ((make, settings, HOLED[:, 0]), ValueError, "X must be a table"),
        ((make, settings, np.full((4, 2), np.nan)), ValueError, "column 0 of X has no value"),
    ):
        with pytest.raises(error, match=message):
            tune(*arguments)
    with pytest.raises(ValueError, match="^m must be a whole number"):
        tune(make, settings, HOLED, m=0)
    with pytest.raises(ValueError, match="^m must be a whole number"):
        draws(make, HOLED, 2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"values must be \(m, k\) and truth \(k,\)"):
        crps(np.ones((2, 3)), np.ones(2))
    same = tune(make, settings, HOLED)
    assert tune(make, settings, pd.DataFrame(HOLED)) == same
    assert tune(make, settings, torch.from_numpy(HOLED)) == same
