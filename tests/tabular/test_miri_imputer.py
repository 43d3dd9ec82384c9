"""`MIRIImputer` on arrays, tensors and data frames: what comes back, and what is refused."""

from __future__ import annotations

import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_diabetes, load_iris
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

import fluvial
from fluvial.tabular import MIRIImputer, ampute
from fluvial.tabular.miri import Column, cross_mmd
from fluvial.tabular.miri.columns import learn_column, read_series
from fluvial.tabular.miri.rounds import VelocityMLP

QUICK: dict[str, Any] = {
    "rounds": 2, "epochs": 3, "hidden": (16,), "ode_steps": 4, "random_state": 0
}  # fmt: skip


def quick(**changes: Any) -> MIRIImputer:
    return MIRIImputer(**{**QUICK, **changes})


def iris(rate: float = 0.3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    x = load_iris().data
    return x, ampute(x, rate, seed=seed).data


def frame(n: int = 60) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    size = rng.normal(10, 2, n)
    table = pd.DataFrame(
        {
            "size": size,
            "count": pd.array(np.round(3 * size).astype(int), dtype="Int64"),
            "whole": np.round(size),
            "share": (1 / (1 + np.exp(10 - size))).astype(np.float32),
            "large": pd.array(size > 10, dtype="boolean"),
            "flag": np.array((size > 9).tolist(), dtype=object),
            "kind": pd.Categorical(rng.choice(["a", "b", "c"], n), categories=["c", "b", "a", "z"]),
            "grade": pd.Categorical(
                np.where(size > 10, "high", "low"), categories=["low", "mid", "high"], ordered=True
            ),
            "town": rng.choice(["Bath", "Ely"], n),
            "day": pd.Timestamp("2024-03-01") + pd.to_timedelta(np.round(size), unit="D"),
            "zoned": pd.date_range("2024-01-01", periods=n, freq="h", tz="Europe/Paris"),
            "took": pd.to_timedelta(np.round(size), unit="min"),
            "same": 7.5,
        },
        index=pd.Index(range(100, 100 + n), name="id"),
    )
    for j in range(table.shape[1]):
        table.iloc[rng.choice(n, n // 4, replace=False), j] = pd.NA if j in (1, 4) else None
    table.iloc[0] = None  # a row with nothing in it
    return table


# Arrays


def test_e1_arrays_keep_what_is_observed_and_lose_their_gaps() -> None:
    _, x = iris()
    x[3] = np.nan  # a row with nothing in it draws from the whole law
    for dtype in (np.float64, np.float32):
        table = x.astype(dtype)
        before = table.copy()
        filled = quick().fit_transform(table)
        assert filled.dtype == dtype and np.isfinite(filled).all()
        seen = ~np.isnan(before)
        assert (filled[seen] == before[seen]).all()
        assert np.array_equal(table, before, equal_nan=True)
        low, high = np.nanmin(before, 0), np.nanmax(before, 0)
        assert (filled >= low).all() and (filled <= high).all()


def test_e2_a_whole_table_comes_back_and_trains_nothing() -> None:
    x, _ = iris()
    imputer = quick(net=lambda *args: pytest.fail("nothing is to be trained"))
    assert np.array_equal(imputer.fit_transform(x), x)
    assert imputer.nets_ == [] and imputer.history_ == []
    assert np.array_equal(imputer.transform(x[:5]), x[:5])


def test_transform_repeats_fit_transform_and_fills_new_rows() -> None:
    _, x = iris()
    imputer = quick()
    filled = imputer.fit_transform(x)
    assert np.array_equal(imputer.transform(x), filled)
    assert np.array_equal(clone(imputer).fit(x).transform(x), filled)
    assert np.array_equal(imputer.transform(x[:40]), filled[:40])
    assert not np.array_equal(quick(random_state=1).fit_transform(x), filled)
    new = np.full((3, 4), np.nan)
    assert np.isfinite(imputer.transform(new)).all()
    assert len(imputer.history_) == 2 and imputer.history_[0]["number"] == 1
    fresh = MIRIImputer(**{**QUICK, "random_state": None})
    assert not np.array_equal(fresh.fit_transform(x), fresh.fit_transform(x))
    for state in (np.random.default_rng(3), np.random.RandomState(3)):
        assert np.isfinite(quick(random_state=state).fit_transform(x)).all()


def test_tensors_and_masks() -> None:
    x, holed = iris()
    mask = ~np.isnan(holed)
    tensor = torch.from_numpy(x).float()
    filled = quick().fit_transform(tensor, mask=torch.from_numpy(mask))
    assert isinstance(filled, torch.Tensor) and filled.dtype == torch.float32
    assert torch.equal(filled[mask], tensor[mask])
    # what stands where the mask is False is of no account
    other = tensor.clone()
    other[~mask] = 99.0
    assert torch.equal(quick().fit_transform(other, mask=mask), filled)
    with pytest.raises(ValueError, match="mask must be truth values shaped as X"):
        quick().fit(tensor, mask=mask[:4])


def test_draws_and_their_mean() -> None:
    _, x = iris()
    imputer = quick(epochs=20).fit(x)
    drawn = imputer.sample(x, 5)
    gaps = np.isnan(x)
    assert drawn.shape == (5, *x.shape)
    assert (drawn[:, ~gaps] == x[~gaps]).all()
    assert drawn[:, gaps].std(0).min() > 0
    assert np.array_equal(imputer.sample(x, 2), drawn[:2])
    mean = imputer.set_params(draws=5).transform(x)
    assert np.allclose(mean, drawn.mean(0))
    assert np.allclose(quick(epochs=20, draws=5).fit_transform(x), mean)
    again = quick().fit(x).sample(x, 2, refit=True)
    assert again.shape == (2, *x.shape) and (again[0] != again[1])[gaps].all()
    with pytest.raises(ValueError, match="m must be a whole number"):
        imputer.sample(x, 0)


def test_gaps_in_a_column_that_had_none() -> None:
    x, _ = iris()
    holed = x.copy()
    holed[::3, 0] = np.nan
    new = x[:30].copy()
    new[::2, 2] = np.nan
    new[::5, 0] = np.nan
    imputer = quick().fit(holed)
    with pytest.warns(UserWarning, match="'x2' had no gaps in fitting.*hide=0.2"):
        filled = imputer.transform(new)
    assert set(filled[::2, 2]) <= set(x[:, 2]) and len(set(filled[::2, 2])) > 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hidden = quick(hide=0.3).fit(holed)
        assert np.isfinite(hidden.transform(new)).all()
        assert np.array_equal(hidden.transform(holed), quick(hide=0.3).fit_transform(holed))
    assert hidden.gaps_.all() and imputer.gaps_.tolist() == [True, False, False, False]


def test_kinds_and_bounds_of_arrays() -> None:
    x, holed = iris()
    holed[:, 3] = np.where(np.isnan(holed[:, 3]), np.nan, np.round(holed[:, 3]))
    filled = quick(kinds={3: "categorical", 0: "integer"}, bounds={1: (0.0, None)}).fit_transform(
        holed
    )
    assert set(filled[:, 3]) <= set(np.unique(holed[~np.isnan(holed[:, 3]), 3]))
    gaps = np.isnan(holed)
    assert (filled[gaps[:, 0], 0] % 1 == 0).all()
    imputer = quick(kinds={3: "categorical"}).fit(holed)
    odd = holed[:5].copy()
    odd[0] = [np.nan, 1.0, 1.0, 77.0]  # a category that was not seen stays as it is
    assert imputer.transform(odd)[0, 3] == 77.0
    for changes, message in (
        ({"kinds": {9: "integer"}}, "kinds names a column 9"),
        ({"kinds": {0: "text"}}, "kinds must be of"),
        ({"kinds": {0: "boolean"}}, "is no boolean"),
        ({"bounds": {0: (5.0, 6.0)}}, "its values reach from"),
        ({"bounds": {0: (math.inf, None)}}, "must be finite or None"),
    ):
        with pytest.raises(ValueError, match=message):
            quick(**changes).fit(holed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "rounds must be"),
        ({"hide": 1.0}, "hide must be a share"),
        ({"draws": 0}, "draws must be a whole number"),
        ({"random_state": -1}, "random_state must lie in"),
        ({"pairing": "x"}, "pairing must be"),
    ],
)
def test_bad_hyper_parameters(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quick(**changes).fit(iris()[1])


def test_bad_tables() -> None:
    _, x = iris()
    empty, infinite = x.copy(), x.copy()
    empty[:, 2], infinite[0, 0] = np.nan, np.inf
    for table, kind, message in (
        (empty, ValueError, "column 'x2' has no value at all"),
        (infinite, ValueError, "infinity"),
        (np.array([["a", "b"]], dtype=object), ValueError, "could not convert"),
        (x[:0], ValueError, "minimum of 1"),
        (pd.DataFrame({"a": [1.0, np.inf]}), ValueError, "column 'a' contains infinity"),
        (pd.DataFrame({"a": [[1], [2]]}), TypeError, "column 'a' holds values of type list"),
        (pd.DataFrame({"a": [f"n{k}" for k in range(101)]}), ValueError, "101 different values"),
        (pd.DataFrame({"a": [None, None]}), ValueError, "column 'a' has no value"),
        (pd.DataFrame(), ValueError, r"0 sample\(s\)"),
        (pd.DataFrame({"a": ["x", 1.0, None]}), TypeError, "'a' holds values of type float, str"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), ValueError, "names that differ.*'a'"),
        (
            pd.DataFrame({"a": pd.Series([1.0, None]).astype("Sparse[float]")}),
            TypeError,
            "column 'a' is sparse",
        ),
        (
            pd.DataFrame({"a": np.array(["9999-12-31", "NaT", "2024-01-01"], "M8[s]")}),
            ValueError,
            "column 'a' reaches from 2024-01-01 .* dates must lie in 1678 to 2261",
        ),
    ):
        with pytest.raises(kind, match=message):
            quick().fit(table)
    imputer = quick().fit(x)
    with pytest.raises(ValueError, match="X has 3 features, but MIRIImputer is expecting 4"):
        imputer.transform(x[:, :3])
    with pytest.raises(NotFittedError):
        quick().transform(x)


def test_a_loss_that_is_not_finite_is_told() -> None:
    _, x = iris()
    with pytest.warns(RuntimeWarning, match="the loss of round 1 is not finite.*smaller lr"):
        filled = quick(lr=1e18, epochs=20).fit_transform(x)
    assert np.isfinite(filled).all()
    assert (filled[~np.isnan(x)] == x[~np.isnan(x)]).all()


# Data frames


def test_kinds_of_frames() -> None:
    table = pd.DataFrame(
        {"a": [1.0, 2.0, None, 2.0, None], "b": [1.0, 2.0, 3.0, 4.0, 5.0], "c": list("uvuvu")}
    )
    filled = quick(kinds={"a": "boolean"}).fit_transform(table)
    assert set(filled["a"]) == {1.0, 2.0}
    for kinds, message in (
        ({"b": "boolean"}, "column 'b' is no boolean, with 5 values"),
        ({"c": "integer"}, "column 'c' is categorical by its values, and not integer"),
    ):
        with pytest.raises(ValueError, match=message):
            quick(kinds=kinds).fit(table)


def test_one_table_is_held_unless_chains_ask_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[torch.Tensor] = []
    encoded = MIRIImputer._encoded

    def remember(self: MIRIImputer, table: Any) -> Any:
        held.extend(made := encoded(self, table))
        return made

    monkeypatch.setattr(MIRIImputer, "_encoded", remember)
    quick(chains=1).fit(iris()[1])
    (x, _), gaps = held, np.isnan(iris()[1])
    assert (x[torch.from_numpy(gaps)] != 0).all()  # filled where it is, and no copy of it


def test_frames_keep_types_order_index_and_what_is_observed() -> None:
    table = frame()
    before = table.copy()
    filled = quick(bounds={"share": (0.0, 1.0)}).fit_transform(table)
    pd.testing.assert_frame_equal(table, before)
    assert list(filled.columns) == list(table.columns) and filled.index.equals(table.index)
    assert (filled.dtypes == table.dtypes).all()
    assert not filled.isna().any().any()
    for name in table:
        seen = table[name].notna()
        assert filled[name][seen].tolist() == table[name][seen].tolist(), name
    gaps = table.isna()
    assert (filled["whole"][gaps["whole"]] % 1 == 0).all()
    assert filled["share"].between(0, 1).all()
    assert set(filled["flag"]) == {True, False}
    assert set(filled["kind"]) <= {"a", "b", "c"}
    assert (filled["day"].dt.normalize() == filled["day"]).all()
    assert (filled["took"].dt.total_seconds() % 60 == 0).all()
    assert (filled["same"] == 7.5).all()


def test_new_frames_are_read_as_the_fitted_one() -> None:
    table = frame()
    imputer = quick().fit(table)
    again = imputer.transform(table)
    pd.testing.assert_frame_equal(again, quick().fit_transform(table))
    part = table.iloc[:8].copy()
    part["town"] = part["town"].astype(object)
    part.loc[101, "town"] = "Oslo"  # not seen in fitting: it stays, and says nothing
    filled = imputer.transform(part)
    assert filled.loc[101, "town"] == "Oslo" and not filled.isna().any().any()
    with pytest.raises(ValueError, match="feature names"):
        imputer.transform(table.rename(columns={"size": "sizes"}))
    bad = table.assign(size=pd.Timestamp("2024-01-01"))
    with pytest.raises(TypeError, match="column 'size' was numeric in fitting, and is date"):
        imputer.transform(bad)
    with (
        pytest.warns(UserWarning, match="valid feature names"),
        pytest.raises(TypeError, match="'flag' was boolean|'kind' was categorical.*a data frame"),
    ):
        imputer.transform(np.zeros((1, table.shape[1])))
    drawn = imputer.sample(table, 2)
    assert len(drawn) == 2 and (drawn[0].dtypes == table.dtypes).all()
    mean = quick(draws=3).fit_transform(table)
    assert set(mean["kind"]) <= {"a", "b", "c"} and (mean.dtypes == table.dtypes).all()


def test_output_containers_pipelines_and_column_transformers() -> None:
    x, holed = iris()
    y = load_iris().target
    names = ["a", "b", "c", "d"]
    table = pd.DataFrame(holed, columns=names)
    imputer = quick().set_output(transform="pandas")
    filled = imputer.fit_transform(holed)
    assert isinstance(filled, pd.DataFrame) and list(filled) == ["x0", "x1", "x2", "x3"]
    assert list(quick().fit(table).get_feature_names_out()) == names
    pipeline = make_pipeline(quick(), LogisticRegression(max_iter=500)).fit(holed, y)
    assert pipeline.score(holed, y) > 0.6
    both = ColumnTransformer(
        [("gaps", quick(), ["a", "b"])], remainder="drop", verbose_feature_names_out=False
    ).set_output(transform="pandas")
    part = both.fit_transform(table)
    assert list(part) == ["a", "b"] and not part.isna().any().any()
    assert pickle.loads(pickle.dumps(quick().fit(holed))).transform(holed).shape == x.shape


def test_what_is_saved_fills_as_before(tmp_path: Path) -> None:
    table = frame().drop(columns=["zoned"])
    imputer = quick(hidden=(8, 8)).fit(table)
    imputer.save(tmp_path / "model.safetensors")
    for loaded in (
        MIRIImputer.load(tmp_path / "model.safetensors"),
        fluvial.load(tmp_path / "model.safetensors"),
    ):
        pd.testing.assert_frame_equal(loaded.transform(table), imputer.transform(table))
        assert list(loaded.get_feature_names_out()) == list(table.columns)
    with pytest.raises(FileExistsError):
        imputer.save(tmp_path / "model.safetensors")
    with pytest.raises(NotFittedError):
        quick().save(tmp_path / "other.safetensors")

    def net(width: int, seed: int) -> VelocityMLP:
        return VelocityMLP(width, (4,), seed)

    _, x = iris()
    own = quick(net=net).fit(x)
    own.save(tmp_path / "own.safetensors")
    with pytest.raises(ValueError, match="networks of your own: pass network="):
        MIRIImputer.load(tmp_path / "own.safetensors")
    loaded = MIRIImputer.load(tmp_path / "own.safetensors", network=net)
    assert np.array_equal(loaded.transform(x), own.transform(x))


# Columns


def test_columns_encode_and_decode() -> None:
    values = np.array([1.0, 2.0, np.nan, 6.0])
    column = learn_column("a", values)
    z = column.encode(values)
    assert z[2, 0] == 0 and z[[0, 1, 3]].mean() == pytest.approx(0, abs=1e-6)
    assert column.decode(z)[[0, 1, 3]] == pytest.approx([1, 2, 6], rel=1e-6)
    assert column.decode(np.array([[9.0], [-9.0]])).tolist() == [6, 1]
    low, high = column.bounds
    assert column.decode(np.array([low, high])).tolist() == [1, 6]
    hot = learn_column("k", np.array([0, 1, 2, 2, np.nan]), "categorical", categories="abc")
    assert hot.width == 3 and hot.decode(hot.encode(np.array([2.0, 0.0, 1.0]))).tolist() == [
        2,
        0,
        1,
    ]
    assert hot.encode(np.array([-1.0])).tolist() == [[0, 0, 0]]
    ranks = learn_column("g", np.array([0, 2, 1.0]), "integer", categories="abc")
    assert ranks.encode(np.array([-1.0])).tolist() == [[0]]  # not seen in fitting
    assert hot.average(np.array([[0.0, 2.0], [0.0, 1.0], [1.0, 1.0]])).tolist() == [0, 1]
    two = learn_column("b", np.array([0, 1, 1.0]), "boolean")
    assert two.width == 1 and two.average(np.array([[0.0], [1.0], [1.0]])).tolist() == [1]
    one = learn_column("c", np.array([3.0, np.nan, 3.0]), clamp=False)
    assert one.constant and one.decode(np.array([[5.0]])).tolist() == [3]
    free = learn_column("f", values, clamp=False)
    assert free.decode(np.array([[9.0]])) > 6
    for each in (column, hot, two, one, free):
        assert Column.from_json(each.as_json()) == each
    with pytest.raises(ValueError, match="too large to be scaled"):
        learn_column("h", np.array([1e308, -1e308]))
    dates = read_series(
        pd.Series(pd.to_datetime(["2024-01-02 12:00", None, "2024-01-05 12:00"])), "d"
    )
    assert learn_column("d", dates.values, "date").unit == 86_400 * 10**9


# The method


def test_noise_is_not_learned_by_heart() -> None:
    # new noise through the fitted networks draws as well as the noise they were fitted with
    x = load_iris().data[50:110]
    x = (x - x.mean(0)) / x.std(0)
    holed = ampute(x, 0.4, seed=1).data
    imputer = MIRIImputer(rounds=2, hidden=(48, 48), ode_steps=10, random_state=0)
    errors = []
    for chains in (1, 8):
        imputer.set_params(chains=chains).fit(holed)
        drawn = imputer.sample(holed, 4)
        errors.append(np.sqrt(((drawn - x)[:, np.isnan(holed)] ** 2).mean()))
    assert errors[1] < errors[0]


@pytest.mark.slow
def test_the_demonstration_on_diabetes() -> None:
    """40 % MCAR: an MMD below those of chained equations and of neighbours."""
    from fluvial.tabular.baselines import BASELINES

    x = load_diabetes().data
    x = (x - x.mean(0)) / x.std(0)
    holed = ampute(x, 0.4, seed=3).data
    ours = cross_mmd(MIRIImputer(random_state=0).fit_transform(holed), x)
    chained = cross_mmd(BASELINES["IterativeImputer"](0).fit_transform(holed), x)
    near = cross_mmd(BASELINES["KNN"](0).fit_transform(holed), x)
    assert ours < 0.8 * chained and ours < 0.3 * near
