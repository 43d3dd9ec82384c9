"""What else fills a table: scikit-learn's imputers, MissForest, and those with networks.

`BASELINES` makes each from a seed and a setting; `SETTINGS` lists as many settings for each, and
`tune` chooses among them on entries that are hidden for the purpose, so that a comparison gives all
of them, and MIRI, the same effort.

GAIN, MIWAE, TabCSDI, TDM and KnewImp keep to their papers' methods and to their codes' losses and
settings; their networks and numbers of steps are what an argument says, smaller by default than
where a paper's is long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sklearn.experimental import enable_iterative_imputer  # noqa: F401
from sklearn.impute import IterativeImputer, KNNImputer, SimpleImputer

from fluvial.tabular.baselines.gain import GAIN
from fluvial.tabular.baselines.knewimp import KnewImp
from fluvial.tabular.baselines.miwae import MIWAE
from fluvial.tabular.baselines.scikit import Quietly, miss_forest
from fluvial.tabular.baselines.tabcsdi import TabCSDI
from fluvial.tabular.baselines.tdm import TDM
from fluvial.tabular.baselines.tuning import Make, crps, draws, tune
from fluvial.tabular.miri.imputer import MIRIImputer

__all__ = [
    "BASELINES",
    "DRAWING",
    "GAIN",
    "MIWAE",
    "SETTINGS",
    "TDM",
    "KnewImp",
    "Make",
    "Quietly",
    "TabCSDI",
    "crps",
    "draws",
    "miss_forest",
    "tune",
]


def _mean(seed: int, strategy: str = "mean") -> Any:
    return SimpleImputer(strategy=strategy)


def _knn(seed: int, neighbours: int = 5) -> Any:
    return Quietly(KNNImputer(n_neighbors=neighbours))


def _iterative(seed: int, iterations: int = 10, posterior: bool = False) -> Any:
    return Quietly(
        IterativeImputer(max_iter=iterations, sample_posterior=posterior, random_state=seed)
    )


def _posterior(seed: int, iterations: int = 10) -> Any:
    return _iterative(seed, iterations, posterior=True)


def _gain(seed: int, **setting: Any) -> Any:
    return GAIN(**setting, random_state=seed)


def _miwae(seed: int, **setting: Any) -> Any:
    return MIWAE(**setting, random_state=seed)


def _tabcsdi(seed: int, **setting: Any) -> Any:
    return TabCSDI(**setting, random_state=seed)


def _tdm(seed: int, **setting: Any) -> Any:
    return TDM(**setting, random_state=seed)


def _knewimp(seed: int, **setting: Any) -> Any:
    return KnewImp(**setting, random_state=seed)


def _miri(seed: int, **setting: Any) -> Any:
    return MIRIImputer(**setting, progress=False, random_state=seed)


BASELINES: Mapping[str, Make] = {
    "mean": _mean,
    "KNN": _knn,
    "IterativeImputer": _iterative,
    "IterativeImputer, posterior": _posterior,
    "MissForest": miss_forest,
    "GAIN": _gain,
    "MIWAE": _miwae,
    "TabCSDI": _tabcsdi,
    "TDM": _tdm,
    "KnewImp": _knewimp,
    "MIRI": _miri,
}
"""All ways to fill a table, MIRI among them, by name."""

DRAWING = ("IterativeImputer, posterior", "MIWAE", "TabCSDI", "MIRI")
"""Those whose fillings are draws: they are tuned by several."""

SETTINGS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "mean": ({"strategy": "mean"}, {"strategy": "median"}, {"strategy": "most_frequent"}),
    "KNN": ({"neighbours": 5}, {"neighbours": 10}, {"neighbours": 20}),
    "IterativeImputer": ({"iterations": 5}, {"iterations": 10}, {"iterations": 20}),
    "IterativeImputer, posterior": ({"iterations": 5}, {"iterations": 10}, {"iterations": 20}),
    "MissForest": ({"leaf": 1}, {"leaf": 3}, {"leaf": 5}),
    "GAIN": ({"weight": 10.0}, {"weight": 100.0}, {"weight": 1000.0}),
    "MIWAE": ({"latent": 10}, {"latent": 5}, {"latent": 2}),
    "TabCSDI": ({"lr": 2e-3}, {"lr": 1e-3}, {"lr": 5e-4}),
    "TDM": ({"lr": 1e-2}, {"lr": 3e-2}, {"lr": 1e-1}),
    "KnewImp": ({"bandwidth": 0.5}, {"bandwidth": 2.0}, {"bandwidth": 10.0}),
    "MIRI": ({"epochs": 50}, {"epochs": 100}, {"epochs": 200}),
}
"""Three settings of each, its usual one among them."""
