"""Bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from fluvial.core.noise import KeyedNoise

Method: TypeAlias = Literal["centred", "half", "percentile", "bca"]
Sample: TypeAlias = Tensor | np.ndarray

GROUPS = 100
"""Jackknife values of a sample for BCa, at most: more rows are left out in groups."""

CHUNK = 1 << 20
"""Row numbers drawn at a time."""


class Interval(NamedTuple):
    """An estimate and the ends of its interval."""

    estimate: float
    low: float
    high: float


def bootstrap_interval(
    statistic: Callable[..., Any],
    *samples: Sample,
    method: Method = "centred",
    paired: bool = False,
    resamples: int = 200,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    r"""An interval for the expected value of ``statistic`` at these sample sizes.

    With T the statistic of the samples, T* that of resamples (each sample's rows drawn anew, with
    replacement, independently of the other samples; Efron, Bootstrap methods: another look at the
    jackknife, 1979), q its quantiles and :math:`\alpha = 1 - \text{level}`:

    ``centred``, for anything, and above all for distances between samples,

    .. math::
        [\,T + q_{\alpha/2}(T^*) - \overline{T^*},\;
           T + q_{1-\alpha/2}(T^*) - \overline{T^*}\,],

    is the percentile interval, moved so that the resamples' mean lies on T. For a mean or an
    accuracy that changes next to nothing. For the Fréchet distance it is needed. That is biased
    upwards by b = O(1/N) for finite samples; to a resample the sample plays the population, so T*
    carries the bias twice and lies about b above T. Where b exceeds the standard deviation, as it
    does for two samples that are alike, the percentile interval lies wholly above T and covers
    nothing, and the basic interval (2T - q) wholly below. Neither T nor this interval is freed of
    the bias: the target is E[T] for samples of these sizes, to be compared with other values of the
    same sizes.

    ``half``, for statistics that equal rows upset: those of nearest neighbours, of kernels and
    energies without bias, exact transport. T* is that of halves drawn without replacement, m of n
    rows each, and its deviations from their mean, times sqrt(m / (n - m)), are put around T. For a
    mean that gives its standard error exactly (Efron, The jackknife, the bootstrap and other
    resampling plans, 1982, chapter 8; Politis, Romano and Wolf, Subsampling, 1999). It takes half
    the rows, and for work that grows as their square a quarter of the time.

    ``percentile``, whose ends are the quantiles of T* themselves, and ``bca``, for means, shares,
    scores and correlations: their skewness shows in T*. BCa takes the quantiles at

    .. math::
        \Phi\Bigl(z_0 + \frac{z_0 + z_q}{1 - a (z_0 + z_q)}\Bigr), \qquad
        z_0 = \Phi^{-1}(\text{share of } T^* < T)

    with a the skewness of jackknife values over 6 (Efron, Better bootstrap confidence intervals,
    1987); more than `GROUPS` rows are left out in groups. Not for a distance near its floor.

    Coverage of the 95 % interval, simulated: for the Fréchet distance of Gaussians with known E[T]
    "centred" covers 92 to 97 % for samples that differ, and 99 to 100 % for two samples of one
    distribution, where it is about 1.8 times as wide as need be: the floor is uncertain by less
    than it says. There an end can lie below 0. "half" covers 89 to 94 % for samples that differ,
    and 93 to 100 % for two of one distribution: 100 rows a side in 3 dimensions, 200 repetitions,
    MMD and energy distance without bias, recall, coverage, density and sliced Wasserstein. For the
    mean of 40 lognormal numbers "percentile" covers 86 % and "bca" 90 %, for the variance of 40
    normal ones 87 % and 92 %, in 600 repetitions.

    Args:
        statistic: called as ``statistic(*samples)``, gives one number. It must not draw random
            numbers itself.
        samples: tensors or arrays with at least 2 rows (dimension 0). A row is what is
            independent.
        method: see above.
        paired: row i of one sample belongs to row i of the others, and they are drawn together:
            images and their targets, forecasts and outcomes, two methods on the same data.
        resamples: how often to resample; enough for one to lie beyond each end.
        level: nominal coverage, in (0, 1).
        seed: of the resampling. The rows of resample r depend on (seed, r), the position of the
            sample and its number of rows.

    Raises:
        TypeError: a sample is neither a tensor nor an array.
        ValueError: no sample, a sample with fewer than 2 rows (4 for "half"), samples of different
            lengths that are paired, level not in (0, 1), too few resamples for it, a negative seed,
            no such method, or a statistic that is not one finite number.
    """
    _check(samples, method, paired, resamples, level, seed)
    estimate = _number(statistic(*samples))
    drawn = _resampled(samples, KeyedNoise(seed), resamples, method == "half", paired)
    values = np.array([_number(statistic(*parts)) for parts in drawn])
    shares = np.array([(1 - level) / 2, (1 + level) / 2])
    if method == "percentile":
        low, high = np.quantile(values, shares)
    elif method == "bca":
        shares = _corrected(shares, values, estimate, statistic, samples, paired)
        low, high = np.quantile(values, shares)
    else:
        deviations = np.quantile(values, shares) - values.mean()
        if method == "half":
            # halves of an odd number are a row short: of several samples the least correction
            kept = [(n // 2) / (n - n // 2) for n in map(len, samples)]
            deviations *= math.sqrt(max(kept))
        low, high = estimate + deviations
    return Interval(estimate, float(low), float(high))


def _check(
    samples: Sequence[Any], method: str, paired: bool, resamples: int, level: float, seed: int
) -> None:
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}")
    if not samples:
        raise ValueError("samples: at least one is needed, got none")
    least = 4 if method == "half" else 2
    for position, sample in enumerate(samples):
        if not isinstance(sample, (Tensor, np.ndarray)):
            raise TypeError(
                f"samples[{position}] must be a tensor or array, got {type(sample).__name__}"
            )
        if sample.ndim == 0 or len(sample) < least:
            raise ValueError(
                f"samples[{position}] must have at least {least} rows, "
                f"got shape {tuple(sample.shape)}"
            )
    lengths = [len(sample) for sample in samples]
    if paired and len(set(lengths)) > 1:
        raise ValueError(f"paired samples must have the same number of rows, got {lengths}")
    check_resampling(resamples, level, seed)


def check_resampling(resamples: int, level: float, seed: int) -> None:
    """Raises a ValueError where there is no interval of this level."""
    if not 0 < level < 1:
        raise ValueError(f"level must lie in (0, 1), got {level}")
    needed = math.ceil(round(2 / (1 - level), 6))
    if resamples < needed:
        raise ValueError(f"resamples must be at least {needed} for level {level}, got {resamples}")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must not be negative, and below 2**64, got {seed}")


def _resampled(
    samples: Sequence[Sample], noise: KeyedNoise, resamples: int, half: bool, paired: bool
) -> Iterator[list[Sample]]:
    """Rows of each sample, again and again: as many with replacement, or a half without."""
    lengths = [len(sample) for sample in samples]
    # many resamples in one draw, which costs little more than one of few numbers
    for ids in torch.arange(resamples).split(max(1, CHUNK // sum(lengths))):
        rows = []
        for position, count in enumerate(lengths[:1] if paired else lengths):
            like = torch.empty(len(ids), count, dtype=torch.float64)
            u = noise.rows(ids).uniform(like, tag=str(position))
            if half:
                rows.append(u.argsort(1)[:, : count // 2].sort(1).values)
            else:
                rows.append((u * count).long())
        for row in zip(*rows, strict=True):
            several = row * len(samples) if paired else row
            yield [_taken(sample, index) for sample, index in zip(samples, several, strict=True)]


def _taken(sample: Sample, rows: Tensor) -> Sample:
    return sample[rows.to(sample.device)] if isinstance(sample, Tensor) else sample[rows.numpy()]


def _corrected(
    shares: np.ndarray,
    values: np.ndarray,
    estimate: float,
    statistic: Callable[..., Any],
    samples: Sequence[Sample],
    paired: bool,
) -> np.ndarray:
    """The shares at which BCa takes quantiles."""
    from scipy.stats import norm

    # ties count half; a shift beyond all resamples is no longer a number
    below = ((values < estimate).mean() + (values <= estimate).mean()) / 2
    shift = norm.ppf(np.clip(below, 0.5 / len(values), 1 - 0.5 / len(values)))
    third, second = 0.0, 0.0
    for which in [range(len(samples))] if paired else [[k] for k in range(len(samples))]:
        left_out = _jackknife(statistic, samples, which)
        pull = (left_out.mean() - left_out) * (len(left_out) - 1) / len(left_out)
        third, second = third + (pull**3).sum(), second + (pull**2).sum()
    skew = third / (6 * second**1.5) if second > 0 else 0.0
    z = shift + norm.ppf(shares)
    return norm.cdf(shift + z / (1 - skew * z))


def _jackknife(
    statistic: Callable[..., Any], samples: Sequence[Sample], which: Sequence[int]
) -> np.ndarray:
    """The statistic without each group of rows of the samples ``which``."""
    count = len(samples[which[0]])
    values = []
    for group in torch.arange(count).tensor_split(min(count, GROUPS)):
        kept = torch.ones(count, dtype=torch.bool)
        kept[group] = False
        rows = kept.nonzero()[:, 0]
        parts = [_taken(s, rows) if k in which else s for k, s in enumerate(samples)]
        values.append(_number(statistic(*parts)))
    return np.array(values)


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"statistic must give one number, got {value!r}") from error
    if not math.isfinite(number):
        raise ValueError(f"statistic must be finite, got {number}")
    return number
