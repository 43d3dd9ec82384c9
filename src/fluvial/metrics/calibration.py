"""Do probabilities and intervals keep what they promise?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from fluvial.metrics.checks import Values, float64, real, wide

Bins: TypeAlias = Literal["uniform", "quantile"]


class Reliability(NamedTuple):
    """A reliability curve: for every bin that is not empty."""

    predicted: Tensor
    """(K,) mean probability that was stated."""
    observed: Tensor
    """(K,) share of times it came true."""
    number: Tensor
    """(K,) int64, how many rows."""


def reliability_curve(
    probabilities: Values, outcomes: Values, *, bins: int = 10, strategy: Bins = "uniform"
) -> Reliability:
    r"""How often what was given a probability came true, in bins of that probability.

    A calibrated forecast has observed = predicted, up to a standard error of
    sqrt(p (1 - p) / number) in each bin (Niculescu-Mizil and Caruana, Predicting good probabilities
    with supervised learning, 2005).

    Args:
        probabilities: in [0, 1]: (N,) of the event; or (N, K) of K classes, which sum to 1, of
            which the largest is taken: the confidence of the answer.
        outcomes: (N,): 0 or 1, whether the event took place; or the class, 0 to K - 1.
        bins: at least 1: of [0, 1] of equal width, closed on the right, or between quantiles of the
            probabilities.
        strategy: "uniform" or "quantile".

    Raises:
        TypeError: not real numbers.
        ValueError: the shapes do not fit, there are no rows, a probability is not in [0, 1], those
            of classes do not sum to 1, an outcome is none, or ``bins`` is below 1.
    """
    stated, hit = _stated(probabilities, outcomes)
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    if strategy not in get_args(Bins):
        raise ValueError(f"strategy must be uniform or quantile, got {strategy!r}")
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=stated.device)
    if strategy == "quantile":
        edges = _between(stated.sort().values[None], edges * (len(stated) - 1))[0]
    place = torch.bucketize(stated, edges[1:-1].contiguous())
    count = place.bincount(minlength=bins)
    kept = count > 0
    sums = [place.bincount(weights=values, minlength=bins)[kept] for values in (stated, hit)]
    return Reliability(sums[0] / count[kept], sums[1] / count[kept], count[kept])


def expected_calibration_error(
    probabilities: Values, outcomes: Values, *, bins: int = 15, strategy: Bins = "uniform"
) -> float:
    r"""The mean distance of stated probability and observed share.

    .. math::
        \mathrm{ECE} = \sum_b \frac{n_b}{N} |\text{observed}_b - \text{predicted}_b|

    (Guo, Pleiss, Sun and Weinberger, On calibration of modern neural networks, 2017.) Of a
    calibrated forecast it is not 0, but up to about 0.4 sqrt(bins / N): compare with that.

    Args and errors: as for `reliability_curve`.
    """
    curve = reliability_curve(probabilities, outcomes, bins=bins, strategy=strategy)
    gap = (curve.observed - curve.predicted).abs()
    return float((gap * curve.number).sum() / curve.number.sum())


def brier_score(probabilities: Values, outcomes: Values) -> Tensor:
    r"""The Brier score of every row, (N,): take the mean.

    .. math::
        (p - o)^2 \quad\text{of an event,} \qquad \sum_k (p_k - [k = o])^2 \quad\text{of classes}

    (Brier, Verification of forecasts expressed in terms of probability, 1950.) A proper score: its
    mean is least for the true probabilities. For two classes the second is twice the first.

    Args:
        probabilities, outcomes: as for `reliability_curve`.

    Raises:
        TypeError, ValueError: as `reliability_curve`.
    """
    p, outcome = _probabilities(probabilities, outcomes)
    if p.ndim == 1:
        return (p - outcome).square()
    return (p - torch.nn.functional.one_hot(outcome.long(), p.shape[1])).square().sum(1)


def interval_coverage(low: Values, high: Values, truth: Values) -> float:
    """The share of ``truth`` in [low, high].

    Args:
        low, high, truth: real, the same shape, at least one number. Infinite ends are allowed.

    Raises:
        TypeError: not real numbers.
        ValueError: the shapes differ, there is NaN, nothing at all, or a low end above its high.
    """
    ends = [real(name, value) for name, value in (("low", low), ("high", high), ("truth", truth))]
    if not (ends[0].shape == ends[1].shape == ends[2].shape) or 0 in ends[2].shape:
        raise ValueError(
            "low, high and truth must have the same shape, with no dimension of 0, got "
            f"{', '.join(str(tuple(end.shape)) for end in ends)}"
        )
    target = float64("truth", ends[2])
    lower, upper = (wide(end).to(target.device) for end in ends[:2])
    if not (lower <= upper).all():  # NaN as well
        raise ValueError("low must not lie above high, and neither may be NaN")
    return float(((lower <= target) & (target <= upper)).double().mean())


class Coverage(NamedTuple):
    """How often central intervals held the truth."""

    level: Tensor
    """(K,) stated."""
    observed: Tensor
    """(K,) share of rows."""
    width: Tensor
    """(K,) mean width of the intervals: of two calibrated forecasts the narrower is better."""


def coverage_curve(
    draws: Values, truth: Values, *, levels: Sequence[float] = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9)
) -> Coverage:
    r"""How often the central interval of an ensemble holds the truth, at several levels.

    The ends of the interval of a level l are the quantiles (1 - l) / 2 and (1 + l) / 2 of the M
    draws, at the places

    .. math::
        (M + 1)\,q

    of the sorted draws, between two of them by linear interpolation. Where a place is a whole
    number the interval covers exactly in the mean, for draws and truth of one law and any M;
    quantiles of other rules are too narrow by about 2 / M. An M of 19 or 99 makes all places of
    levels in tenths whole.

    Args:
        draws: real, (N, M): M draws for each of N rows.
        truth: real, (N,).
        levels: in (0, 1), none above (M - 1) / (M + 1), beyond which no draws lie.

    Raises:
        TypeError: not real numbers.
        ValueError: the shapes do not fit, there is NaN or inf, or a level is out of its range.
    """
    x, y = _ensemble(draws, truth)
    levels = [float(level) for level in levels]
    count = x.shape[1]
    most = (count - 1) / (count + 1)
    if not levels or not all(0 < level <= most + 1e-12 for level in levels):
        raise ValueError(
            f"levels must lie in (0, {most:.4g}], as far as {count} draws reach, got {levels}"
        )
    x = x.sort(1).values
    level = torch.tensor(levels, dtype=torch.float64, device=x.device)
    low, high = (_between(x, (count + 1) * (1 + sign * level) / 2 - 1) for sign in (-1, 1))
    inside = (low <= y[:, None]) & (y[:, None] <= high)
    return Coverage(level, inside.double().mean(0), (high - low).mean(0))


def crps(draws: Values, truth: Values, *, fair: bool = True) -> Tensor:
    r"""The continuous ranked probability score of every row, (N,): take the mean.

    .. math::
        \frac1M \sum_m |x_m - y| - \frac{1}{2 M (M - 1)} \sum_{m, n} |x_m - x_n|

    (Gneiting and Raftery, Strictly proper scoring rules, prediction, and estimation, 2007; the
    divisor M - 1, fair to small ensembles, Ferro, Fair scores for ensemble forecasts, 2014.) In the
    units of the data; for one draw, not fair, the absolute error. Its mean is least for draws of
    the law of the truth. The fair score is unbiased for that of infinitely many draws, and may be
    negative for one row; with the divisor M it is the score of the ensemble's step function.

    Args:
        draws: real, (N, M).
        truth: real, (N,).
        fair: as above; needs M at least 2.

    Raises:
        TypeError: not real numbers.
        ValueError: the shapes do not fit, there is NaN or inf, or too few draws.
    """
    x, y = _ensemble(draws, truth)
    count = x.shape[1]
    if fair and count < 2:
        raise ValueError(f"draws must be at least 2 for the fair score, got {count}")
    error = (x - y[:, None]).abs().mean(1)
    # sum over pairs of |x_m - x_n| = 2 sum_i (2 i - M - 1) x_(i), about the mean for its digits
    x = (x - x.mean(1, keepdim=True)).sort(1).values
    rank = torch.arange(1, count + 1, dtype=torch.float64, device=x.device)
    spread = 2 * (x * (2 * rank - count - 1)).sum(1)
    return error - spread / (2 * count * (count - 1 if fair else count))


def _between(ordered: Tensor, place: Tensor) -> Tensor:
    """The values at fractional places along dimension 1, (N, K)."""
    place = place.clamp(0, ordered.shape[1] - 1)
    near = (place - place.round()).abs() < 1e-9  # the place of a level in tenths is rounded
    place = torch.where(near, place.round(), place)
    below = place.floor().long()
    above = place.ceil().long()
    return torch.lerp(ordered[:, below], ordered[:, above], place - below)


def _ensemble(draws: Any, truth: Any) -> tuple[Tensor, Tensor]:
    draws, truth = real("draws", draws), real("truth", truth)
    if draws.ndim != 2 or 0 in draws.shape:
        raise ValueError(f"draws must have shape (N, M), got {tuple(draws.shape)}")
    if tuple(truth.shape) != (len(draws),):
        raise ValueError(
            f"truth must have shape ({len(draws)},) as draws has {len(draws)} rows, "
            f"got {tuple(truth.shape)}"
        )
    x = float64("draws", draws)
    return x, float64("truth", truth).to(x.device)


def _probabilities(probabilities: Any, outcomes: Any) -> tuple[Tensor, Tensor]:
    """Checked, in float64: (N,) or (N, K), and (N,)."""
    probabilities, outcomes = real("probabilities", probabilities), real("outcomes", outcomes)
    shape = tuple(probabilities.shape)
    if probabilities.ndim not in (1, 2) or 0 in shape or (len(shape) == 2 and shape[1] < 2):
        raise ValueError(
            f"probabilities must have shape (N,) or (N, K) with K at least 2, got {shape}"
        )
    if tuple(outcomes.shape) != shape[:1]:
        raise ValueError(
            f"outcomes must have shape ({shape[0]},) as probabilities has {shape[0]} rows, "
            f"got {tuple(outcomes.shape)}"
        )
    p = float64("probabilities", probabilities)
    outcome = float64("outcomes", outcomes).to(p.device)
    if p.min() < 0 or p.max() > 1:
        raise ValueError(
            f"probabilities must lie in [0, 1], got values from {float(p.min())} to "
            f"{float(p.max())}"
        )
    classes = 2 if p.ndim == 1 else p.shape[1]
    if not ((outcome == outcome.round()) & (outcome >= 0) & (outcome < classes)).all():
        odd = outcome[(outcome != outcome.round()) | (outcome < 0) | (outcome >= classes)]
        raise ValueError(
            f"outcomes must be whole numbers from 0 to {classes - 1}, got {float(odd[0])}"
        )
    if p.ndim == 2 and (p.sum(1) - 1).abs().max() > 1e-3:
        raise ValueError("probabilities of classes must sum to 1 in every row")
    return p, outcome


def _stated(probabilities: Any, outcomes: Any) -> tuple[Tensor, Tensor]:
    """The probability of what is claimed, and whether it came true, (N,)."""
    p, outcome = _probabilities(probabilities, outcomes)
    if p.ndim == 1:
        return p, outcome
    confidence, answer = p.max(1)
    return confidence, (answer == outcome).double()
