"""How much a filled table still tells of its gaps, and how far it is from the truth.

None of these feeds back into the method, and the distance to the truth needs the truth: they are
for reading, not for stopping.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fluvial.core.noise import KeyedNoise
from fluvial.metrics import mmd
from fluvial.metrics.checks import pair
from fluvial.metrics.distances import squared_distances
from fluvial.networks.layers import initialise, linear

Rows = Tensor | np.ndarray


def cross_mmd(a: Rows, b: Rows, *, rows: int = 2_000) -> float:
    r"""The biased squared MMD with a Gaussian kernel of the median distance across the samples.

    .. math::
        \mathrm{mean}\,k(X, X) + \mathrm{mean}\,k(Y, Y) - 2\,\mathrm{mean}\,k(X, Y), \qquad
        k(x, y) = \exp(-|x - y|^2 / (2 h^2)), \quad h = \mathrm{median}\,|X_i - Y_j|

    It is the distance of the paper's figures; `fluvial.metrics.mmd` has a bandwidth of both samples
    together, and the unbiased estimate.

    Args:
        a, b: (N, D) and (M, D).
        rows: the median is that of the first so many rows of either; the sums are over all, in
            blocks.

    Raises:
        TypeError, ValueError: as `fluvial.metrics.mmd`.
    """
    x, y = pair(a, b)
    bandwidth = float(squared_distances(x[:rows], y[:rows]).median().sqrt())
    if bandwidth == 0:
        raise ValueError("a and b have a median distance of 0 from one another: no bandwidth")
    return mmd(x, y, kernel="gaussian", bandwidth=bandwidth, unbiased=False)


def mask_auc(
    x: Rows, mask: Rows, *, rows: int = 5_000, folds: int = 3, seed: int = 0
) -> dict[int, float]:
    """How well a classifier tells from a filled row whether one of its entries had been missing.

    The area under the curve of gradient-boosted trees, cross-validated, column by column: 1/2 where
    the filled table holds no information about this column of the mask, as I(X; M) = 0 asks for.
    Under MNAR, and for the observed columns under MAR, the values do depend on the mask, and 1/2 is
    not the truth.

    The classifier sees the whole row, the column itself too: a filling that ignores the mask's own
    column (the mean, say) is told by that column alone.

    Args:
        x: (n, d), filled.
        mask: (n, d), True where observed.
        rows: at most, drawn at random from more.
        folds: of the cross-validation.
        seed: of the draw and the folds.

    Returns:
        By column; those with fewer than 2 * ``folds`` missing or observed entries are left out.

    Raises:
        ValueError: the shapes differ, or x is not finite.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    values, seen = _arrays(x, mask)
    if len(values) > rows:
        order = KeyedNoise(seed).uniform(torch.empty(len(values), dtype=torch.float64)).argsort()
        chosen = order[:rows].numpy()
        values, seen = values[chosen], seen[chosen]
    result = {}
    for j in range(seen.shape[1]):
        y = seen[:, j]
        if min(y.sum(), (~y).sum()) < 2 * folds:
            continue
        trees = HistGradientBoostingClassifier(max_iter=40, max_leaf_nodes=15, random_state=seed)
        split = StratifiedKFold(folds, shuffle=True, random_state=seed)
        said = cross_val_predict(trees, values, y, cv=split, method="predict_proba")[:, 1]
        result[j] = float(roc_auc_score(y, said))
    return result


class _Statistics(nn.Module):
    """T(x, m) of the bound: 2 d -> 500 -> 500 -> 1, ReLU."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        self.first, self.second = linear(width, 500), linear(500, 500)
        self.out = linear(500, 1)
        initialise(self, seed)

    def forward(self, z: Tensor) -> Tensor:
        hidden = functional.relu(self.second(functional.relu(self.first(z))))
        value: Tensor = self.out(hidden)[:, 0]
        return value


def mutual_information(
    x: Rows, mask: Rows, *, epochs: int = 100, batch_size: int = 100, seed: int = 0
) -> float:
    r"""A neural lower bound of I(X; M), in nats, on held-out rows (MINE).

    .. math::
        I(X; M) \ge \mathrm{E}\,T(X, M) - \log \mathrm{E}\,e^{T(X, M')}

    with M' the mask of another row (Donsker and Varadhan; Belghazi et al., ICML 2018). T is a
    network of two hidden layers of 500, trained by Adagrad at 0.002 on 80 % of the rows; the bound
    is its value on the other 20 %. It is noisy, and negative where T has learned its rows by heart:
    `mask_auc` is cheaper and steadier.

    Args:
        x: (n, d), filled, columns of unit scale.
        mask: (n, d), True where observed.
        epochs, batch_size: of the training.
        seed: of the split, the weights and the pairs.

    Raises:
        ValueError: the shapes differ, x is not finite, or there are fewer than 10 rows.
    """
    values, seen = _arrays(x, mask)
    if len(values) < 10:
        raise ValueError(f"x must have at least 10 rows, got {len(values)}")
    noise = KeyedNoise(seed)
    z, m = (torch.from_numpy(np.array(part, np.float32)) for part in (values, seen))
    order = _order(noise, len(z))
    held, kept = order.tensor_split([len(z) // 5])
    net = _Statistics(z.shape[1] + m.shape[1], seed)
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.002)
    with torch.enable_grad():
        for epoch in range(epochs):
            drawn = noise.at(1 + epoch)
            rows = kept[_order(drawn, len(kept))]
            others = kept[_order(drawn.at(0), len(kept))]
            for part, other in zip(rows.split(batch_size), others.split(batch_size), strict=True):
                optimizer.zero_grad()
                loss = -_bound(net, z[part], m[part], m[other])
                loss.backward()
                optimizer.step()
    with torch.no_grad():
        return float(_bound(net, z[held], m[held], m[held.roll(1)]))


def _bound(net: nn.Module, z: Tensor, m: Tensor, other: Tensor) -> Tensor:
    joint, product = net(torch.cat([z, m], 1)), net(torch.cat([z, other], 1))
    bound: Tensor = joint.mean() - (torch.logsumexp(product, 0) - math.log(len(z)))
    return bound


def _order(noise: KeyedNoise, count: int) -> Tensor:
    return noise.uniform(torch.empty(count, dtype=torch.float64), "order").argsort()


def _arrays(x: Rows, mask: Rows) -> tuple[Any, Any]:
    values, seen = np.asarray(x, np.float64), np.asarray(mask).astype(bool)
    if values.ndim != 2 or values.shape != seen.shape:
        raise ValueError(
            f"x and mask must have one shape, (n, d), got {values.shape} and {seen.shape}"
        )
    if not np.isfinite(values).all():
        raise ValueError("x must be finite: a filled table has no gaps")
    return values, seen
