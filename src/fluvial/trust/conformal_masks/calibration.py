"""Conformal thresholds of a score map, from pairs of maps alone: what the guarantee rests on.

For calibration image i and a threshold t let L_i(t) be the largest local error over the pixels
whose score is below t, 0 if there are none. L_i does not decrease in t and, as the inequality is
strict, is continuous from the left. With errors in [0, bound] and n images,

    t_level = sup {t : (sum_i L_i(t) + bound) / (n + 1) <= level},    trusted: score < t_level.

If the images and the next one are exchangeable, the expectation of the largest error inside the
next one's mask is at most ``level``, over the draw of all of them together. For let t' be the sup
with the next image among the n + 1 and no bound: t_level <= t' as L <= bound, t' is attained by
continuity from the left, and by exchangeability E L_{n+1}(t') is the expectation of the average,
which is at most ``level``. With score <= t_level in place of < the sup is not attained and, where
scores repeat, the guarantee is lost.

Adame, Csillag and Goedert, "Image Super-Resolution with Guarantees via Conformalized Generative
Models", NeurIPS 2025, arXiv 2502.09664. Risk control: Angelopoulos et al., "Conformal Risk
Control", ICLR 2024; with high probability: Bates et al., "Distribution-Free, Risk-Controlling
Prediction Sets", J. ACM 2021.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeAlias, TypeVar, cast, get_args

import numpy as np
import torch
from scipy.special import bdtr, rel_entr
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.training.files import write_json

Map: TypeAlias = np.ndarray | Tensor
"""One number a pixel, of any shape: an image, or all frames or channels that form one unit."""
M = TypeVar("M", np.ndarray, Tensor)

Ties: TypeAlias = Literal["strict", "random"]
Guarantee: TypeAlias = Literal["mean", "hoeffding", "bentkus"]

FORMAT = 1
"""Version of the layout of a saved calibration."""
QUANTILES = (0.5, 0.9, 0.95, 1.0)
"""Of the largest error inside the mask, over images."""
EXACT = 1 << 19
"""Steps that are kept of all images together, at most; with more, thresholds are on a grid."""
GRID = 1 << 15
"""Thresholds of that grid."""
MOST = 10**9
"""Images beyond which it is not asked how many are needed."""


# Steps


class Steps(NamedTuple):
    """L_i(t) as the few places where it rises: exact, and far smaller than the maps.

    L_i(t) is the last of ``errors`` whose (score, tie) is below t. ``ties`` are zeros unless ties
    are broken at random. Of d pixels in random order about log d are left.
    """

    scores: np.ndarray
    ties: np.ndarray
    errors: np.ndarray

    def at(self, thresholds: np.ndarray) -> np.ndarray:
        """L_i at thresholds (k,); ties at their scores are not below."""
        before = np.searchsorted(self.scores, thresholds, side="left")
        return np.concatenate([[0.0], self.errors])[before]


def steps(score: Map, error: Map, ties: np.ndarray | None = None) -> Steps:
    """The steps of one image.

    Args:
        score, error: maps of one shape, finite, errors not negative.
        ties: independent uniform numbers, one a pixel, that decide between equal scores; None for
            equal scores that count as one.
    """
    s, d = _flat(score), _flat(error)
    top = d.max(initial=0.0)
    if top <= 0:
        return Steps(*(np.empty(0) for _ in range(3)))
    # beyond the first place where the error is largest nothing rises any more
    kept = np.flatnonzero((s <= s[d == top].min()) & (d > 0))
    s, d = s[kept], d[kept]
    u = np.zeros(len(s)) if ties is None else ties.reshape(-1)[kept]
    order = np.argsort(s) if ties is None else np.lexsort((u, s))
    s, u, highest = s[order], u[order], np.maximum.accumulate(d[order])
    if ties is None:  # of equal scores the last one has seen them all
        last = np.append(s[1:] != s[:-1], True)
        s, u, highest = s[last], u[last], highest[last]
    rises = np.diff(highest, prepend=0.0) > 0
    s, highest = s[rises], highest[rises]
    return Steps(s, np.broadcast_to(0.0, s.shape) if ties is None else u[rises], highest)


def _flat(values: Map) -> np.ndarray:
    """A map as float64, (pixels,)."""
    array = values.detach().cpu().double().numpy() if isinstance(values, Tensor) else values
    return np.asarray(array, np.float64).reshape(-1)


def check_map(name: str, values: Any) -> None:
    """Refuse what is no map of finite real numbers.

    Raises:
        TypeError: no array or tensor of real numbers.
        ValueError: no pixels, NaN or infinity.
    """
    if not isinstance(values, np.ndarray | Tensor):
        raise TypeError(f"{name} must be an array or a tensor, got {type(values).__name__}")
    real = not values.is_complex() if isinstance(values, Tensor) else values.dtype.kind in "fiub"
    if not real:
        raise TypeError(f"{name} must hold real numbers, got {values.dtype}")
    if not math.prod(values.shape):
        raise ValueError(f"{name} holds no pixels, its shape is {tuple(values.shape)}")
    finite = values.isfinite() if isinstance(values, Tensor) else np.isfinite(values)
    if not bool(finite.all()):
        raise ValueError(f"{name} must be finite, it holds NaN or infinity")


# Criteria: may the mean loss be at most ``level``, given the losses of n images?


def hoeffding(mean: float, n: int, bound: float, delta: float) -> float:
    """mean + bound sqrt(log(1 / delta) / (2 n)): above the expected loss with chance 1 - delta.

    Of n independent losses in [0, bound] with the average ``mean`` (Hoeffding, 1963).
    """
    return mean + bound * math.sqrt(math.log(1 / delta) / (2 * n))


def bentkus(mean: float, n: int, bound: float, delta: float) -> float:
    """The Hoeffding-Bentkus bound: above the expected loss with chance 1 - delta.

    The largest R with p(R) > delta, where for x = mean / bound and r = R / bound

        p = min {exp(-n kl(min(x, r), r)), e P(Binomial(n, r) <= ceil(n x))}.

    The binomial tail alone is a bound for losses that are 0 or ``bound`` only; for losses between
    it needs the factor e (Bentkus, 2004; Bates et al., J. ACM 2021, proposition 4).
    """
    low, high = mean / bound, 1.0
    if _bentkus_p(low, n, 1.0) > delta:
        return bound
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _bentkus_p(mean / bound, n, middle) > delta else (low, middle)
    return high * bound


def _bentkus_p(x: float, n: int, r: float) -> float:
    least = min(x, r)
    kl = float(rel_entr(least, r) + rel_entr(1 - least, 1 - r))
    return min(math.exp(-n * kl), math.e * float(bdtr(math.ceil(n * x), n, r)))


@dataclass(frozen=True)
class _Criterion:
    """Whether a threshold is allowed, from the losses that it leaves."""

    guarantee: Guarantee
    bound: float
    delta: float

    def allows(self, losses: Sequence[float], n: int, level: float) -> bool:
        if self.guarantee == "mean":
            return math.fsum([*losses, self.bound]) / (n + 1) <= level
        mean = math.fsum(losses) / n
        if level >= self.bound:
            return True
        if self.guarantee == "hoeffding":
            return hoeffding(mean, n, self.bound, self.delta) <= level
        x, r = mean / self.bound, level / self.bound
        return x < r and _bentkus_p(x, n, r) <= self.delta

    def needed(self, level: float) -> int:
        """The fewest images with which a mask can be other than empty."""
        low, high = 0, 1
        while high < MOST and not self.allows([], high, level):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.allows([], middle, level) else (middle, high)
        return high


# Calibration


class Threshold(NamedTuple):
    """A pixel is trusted if (score, its random number) < (score, tie), lexicographically."""

    score: float
    tie: float = 0.0


@dataclass(frozen=True)
class Part:
    """What was found on the calibration images of one group.

    Args:
        n: images.
        thresholds: one a level.
        means: of the largest error inside the mask, over these images.
        quantiles: of the same, at `QUANTILES`; a tuple a level. Empty where the thresholds are on a
            grid, since no single image is kept.
        over: share of the images whose largest error is above the level. Empty likewise.
    """

    n: int
    thresholds: tuple[Threshold, ...]
    means: tuple[float, ...]
    quantiles: tuple[tuple[float, ...], ...] = ()
    over: tuple[float, ...] = ()


@dataclass(frozen=True)
class Calibration:
    """Thresholds that turn a score map into a mask of the pixels to trust; made by `calibrate`.

    The guarantee "mean" holds for the average over images, not for every image and not for every
    region: ``parts`` says how far single calibration images are off, and `evaluate` says it of
    images that were not calibrated on. "hoeffding" and "bentkus" hold with chance 1 - delta over
    the calibration images, which must then be independent draws, not only exchangeable.

    Args:
        levels: what the expectation of the largest error inside a mask may be, at most.
        bound: of the errors.
        parts: by group; "" is the only one where there are no groups.
        ties: "strict", or "random": equal scores are told apart by a random number a pixel.
        guarantee: "mean", "hoeffding" or "bentkus".
        delta: of the last two.
        metric: of the errors, in words.
        score: in words.
        pointwise: is the error that of the pixel alone, summed over channels? Then `psnr_bound`.
    """

    levels: tuple[float, ...]
    bound: float
    parts: Mapping[str, Part]
    ties: Ties = "strict"
    guarantee: Guarantee = "mean"
    delta: float = 0.1
    metric: str = "error"
    score: str = "score"
    pointwise: bool = False

    def threshold(self, level: float, group: str = "") -> Threshold:
        """The threshold of a level.

        Raises:
            ValueError: the level or the group was not calibrated; says which were.
        """
        part = self._part(group)
        nearest = min(range(len(self.levels)), key=lambda k: abs(self.levels[k] - level))
        if math.isclose(self.levels[nearest], level, rel_tol=1e-9):  # 0.1 + 0.2 means 0.3
            return part.thresholds[nearest]
        known = ", ".join(f"{one:g}" for one in self.levels)
        raise ValueError(f"level {level:g} was not calibrated; there is {known}")

    def mask(
        self,
        score: M,
        level: float,
        *,
        group: str = "",
        noise: KeyedNoise = KeyedNoise(0),  # noqa: B008 (frozen)
    ) -> M:
        """Which pixels to trust: True where the score is below the threshold.

        Args:
            score: a map of any shape, or many; made as those of the calibration were.
            level: one of ``levels``.
            group: of the image, where groups were calibrated.
            noise: breaks ties, if the calibration does; pass ``noise.at(i)`` for image i.

        Returns:
            Booleans of the shape of ``score``; an array for an array, a tensor on the same device
            for a tensor.

        Raises:
            TypeError, ValueError: no map of finite numbers; and as `threshold`.
        """
        check_map("score", score)
        limit, tie = self.threshold(level, group)
        values: Any = score.double() if isinstance(score, Tensor) else score.astype(np.float64)
        trusted = values < limit
        if self.ties == "random":
            numbers: Any = _numbers(score, noise, "mask")
            if isinstance(score, Tensor):
                numbers = torch.from_numpy(numbers).to(score.device)
            trusted |= (values == limit) & (numbers.reshape(values.shape) < tie)
        return cast(M, trusted)

    def empty(self, level: float, group: str = "") -> str:
        """Why every mask of a level is empty, in words; "" if not every mask is.

        Raises:
            ValueError: as `threshold`.
        """
        if self.threshold(level, group).score > -math.inf:
            return ""
        needed, n = self.needed(level), self._part(group).n
        if needed > n:
            return f"every mask is empty: {needed:,} images or more are needed"
        return "every mask is empty: the surest pixels have larger errors"

    def needed(self, level: float) -> int:
        """The fewest calibration images with which a mask of this level can be other than empty.

        For the guarantee "mean" the least n with bound / (n + 1) <= level.
        """
        _check_level(level)
        return _Criterion(self.guarantee, self.bound, self.delta).needed(level)

    def leakage_bound(self, level: float, leaked: int, group: str = "") -> float:
        """What the expectation may be if ``leaked`` calibration images were trained on.

        level (n + 1) / (n - leaked + 1), whatever the errors of those images are, if the others are
        exchangeable with the next image: the sum over these alone is at most level (n + 1) - bound.

        Raises:
            ValueError: ``leaked`` is not among 0 .. n, or the guarantee is not "mean".
        """
        self.threshold(level, group)
        n = self._part(group).n
        if self.guarantee != "mean":
            raise ValueError(f"the leakage bound is for the guarantee 'mean', not {self.guarantee}")
        if not 0 <= leaked <= n:
            raise ValueError(f"leaked must lie between 0 and the {n} images, got {leaked}")
        return min(self.bound, level * (n + 1) / (n - leaked + 1))

    def psnr_bound(self, level: float, nonempty: float = 1.0) -> float:
        """-20 log10(level / nonempty): what the expected PSNR inside the mask is at least, in dB.

        For values in [0, 1]: the mean square inside is at most the squared largest error, and
        -20 log10 is convex. Averaged over the images whose mask is not empty; ``nonempty`` is
        their share, since the errors of the others, which are 0, leave room for larger ones.

        Raises:
            ValueError: the error is not pointwise: smoothed errors bound no PSNR, as signs cancel
                and peaks are spread; or ``nonempty`` is outside (0, 1].
        """
        self.threshold(level, next(iter(self.parts)))
        if not self.pointwise:
            raise ValueError(f"psnr_bound needs a pointwise error, got {self.metric}")
        if not 0 < nonempty <= 1:
            raise ValueError(f"nonempty must be a share in (0, 1], got {nonempty}")
        return -20 * math.log10(level / nonempty)

    def __str__(self) -> str:
        what = {
            "mean": "on average over images and calibrations",
            "hoeffding": f"with probability {1 - self.delta:g} (Hoeffding)",
            "bentkus": f"with probability {1 - self.delta:g} (Hoeffding-Bentkus)",
        }[self.guarantee]
        lines = [
            f"largest {self.metric} inside the mask at most the level, {what}; errors in "
            f"[0, {self.bound:g}], score: {self.score}"
        ]
        for group, part in self.parts.items():
            lines.append(f"{group + ': ' if group else ''}{part.n} calibration images")
            for k, (level, (limit, _)) in enumerate(zip(self.levels, part.thresholds, strict=True)):
                if limit == -math.inf:
                    lines.append(f"  level {level:g}: {self.empty(level, group)}")
                    continue
                where = "everything is trusted" if limit == math.inf else f"score < {limit:.6g}"
                tail = ""
                if part.quantiles:
                    shown = zip(QUANTILES[:-1], part.quantiles[k], strict=False)
                    tail = "; of single images " + ", ".join(
                        f"{100 * q:g} % below {value:.3g}" for q, value in shown
                    )
                    tail += f", {100 * part.over[k]:.0f} % over the level"
                lines.append(f"  level {level:g}: {where}, mean {part.means[k]:.3g}{tail}")
        return "\n".join(lines)

    # Files

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON holds it; infinite thresholds as text."""
        content = {f.name: getattr(self, f.name) for f in fields(self)}
        content["levels"] = list(self.levels)
        content["parts"] = {
            group: {
                **asdict(part),
                "thresholds": [
                    [t.score if math.isfinite(t.score) else str(t.score), t.tie]
                    for t in part.thresholds
                ],
            }
            for group, part in self.parts.items()
        }
        return {"format": FORMAT, "kind": "conformal mask", **json.loads(json.dumps(content))}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """The inverse of `as_json`.

        Raises:
            ValueError: it is no calibration, is damaged, or of a later format.
        """
        if not isinstance(content, Mapping) or content.get("kind") != "conformal mask":
            raise ValueError("this is not the calibration of a conformal mask")
        if content.get("format", FORMAT + 1) > FORMAT:
            raise ValueError(
                f"the calibration has format {content.get('format')}, this version of fluvial "
                f"reads up to {FORMAT}"
            )
        try:
            values = {f.name: content[f.name] for f in fields(cls)}
            values["levels"] = tuple(map(float, values["levels"]))
            values["parts"] = {
                group: Part(
                    n=int(part["n"]),
                    thresholds=tuple(Threshold(float(s), float(u)) for s, u in part["thresholds"]),
                    means=tuple(part["means"]),
                    quantiles=tuple(map(tuple, part["quantiles"])),
                    over=tuple(part["over"]),
                )
                for group, part in values["parts"].items()
            }
            return cls(**values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"the calibration is damaged: {error!r}") from error

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """As a JSON file.

        Raises:
            FileExistsError: there is such a file and ``overwrite`` is false.
        """
        if Path(path).exists() and not overwrite:
            raise FileExistsError(f"{path} exists; pass overwrite=True to replace it")
        write_json(path, self.as_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """What `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: as `from_json`.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"no calibration at {path}")
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no JSON file: {error}") from error
        return cls.from_json(content)

    def _part(self, group: str) -> Part:
        if str(group) not in self.parts:  # groups may be numbers, and are kept as text
            known = ", ".join(map(repr, self.parts))
            raise ValueError(f"group {group!r} was not calibrated; there is {known}")
        return self.parts[str(group)]


class Calibrator:
    """Calibration in one pass: `add` every image, then `finish`. Maps are not kept.

    What is kept are the steps of every image, some dozens of numbers each, and up to `EXACT` of
    them together the thresholds are exact. In one pass they cannot be in less memory than grows
    with n: of images of one pixel the threshold is an order statistic of the scores (Munro and
    Paterson, 1980). With more steps, and where ``thresholds`` are given, the sup is taken over a
    grid, those given or `GRID` quantiles of the steps so far, and memory is one sum for each of
    them whatever n is. The guarantee is the same for every grid, also for one made of the
    calibration images: its threshold is never above the exact one, and L does not decrease.

    Args:
        levels, bound, ties, guarantee, delta, thresholds, metric, score, pointwise, noise: see
            `calibrate`.

    Raises:
        ValueError: as `calibrate`.
    """

    def __init__(
        self,
        levels: Sequence[float],
        bound: float,
        *,
        ties: Ties = "strict",
        guarantee: Guarantee = "mean",
        delta: float = 0.1,
        thresholds: Sequence[float] | np.ndarray | None = None,
        metric: str = "error",
        score: str = "score",
        pointwise: bool = False,
        noise: KeyedNoise = KeyedNoise(0),  # noqa: B008 (frozen)
    ) -> None:
        self.levels = tuple(float(level) for level in levels)
        if not self.levels:
            raise ValueError("levels is empty: name one level or more")
        for level in self.levels:
            _check_level(level)
        if len(set(self.levels)) < len(self.levels):
            raise ValueError(f"levels must differ, got {self.levels}")
        if not 0 < bound < math.inf:
            raise ValueError(f"bound must be positive and finite, got {bound}")
        if max(self.levels) > bound:
            raise ValueError(
                f"levels must be at most the bound {bound:g} of the errors, got "
                f"{max(self.levels):g}"
            )
        if ties not in get_args(Ties):
            raise ValueError(f"ties must be 'strict' or 'random', got {ties!r}")
        if guarantee not in get_args(Guarantee):
            raise ValueError(
                f"guarantee must be one of {', '.join(get_args(Guarantee))}, got {guarantee!r}"
            )
        if not 0 < delta < 1:
            raise ValueError(f"delta must lie in (0, 1), got {delta}")
        self.grid: np.ndarray | None = None
        if thresholds is not None:
            grid = np.asarray(thresholds, np.float64)
            if grid.ndim != 1 or not len(grid) or not np.isfinite(grid).all():
                raise ValueError(f"thresholds must be finite numbers in a row, got {thresholds!r}")
            self.grid = np.append(np.unique(grid), np.inf)
        self.bound, self.ties, self.noise = float(bound), ties, noise
        self.criterion = _Criterion(guarantee, self.bound, delta)
        self.names: dict[str, Any] = {"metric": metric, "score": score, "pointwise": pointwise}
        self.count = self._kept = 0
        self._steps: dict[str, list[Steps]] = {}
        self._sums: dict[str, tuple[int, np.ndarray]] = {}

    def add(self, score: Map, error: Map, group: str = "") -> None:
        """One calibration image.

        Args:
            score: doubt, one number a pixel.
            error: local error in [0, bound], of the shape of ``score``.
            group: of the image; its threshold is made of this group's images alone.

        Raises:
            TypeError, ValueError: the maps are no maps, of two shapes, not finite, or an error is
                outside [0, bound].
        """
        where = f"of image {self.count}"
        check_map(f"score {where}", score)
        check_map(f"error {where}", error)
        if tuple(score.shape) != tuple(error.shape):
            raise ValueError(
                f"score and error {where} must have one shape, got {tuple(score.shape)} and "
                f"{tuple(error.shape)}"
            )
        low, high = float(error.min()), float(error.max())
        if low < 0 or high > self.bound:
            raise ValueError(
                f"error {where} must lie in [0, {self.bound:g}], it reaches from {low:g} to "
                f"{high:g}; clip it, or give the bound that it has for every conceivable image"
            )
        numbers = None
        if self.ties == "random":
            numbers = _numbers(score, self.noise.at(self.count), "calibration")
        found = steps(score, error, numbers)
        self.count += 1
        if self.grid is not None:
            self._sum(str(group), found)
            return
        self._steps.setdefault(str(group), []).append(found)
        self._kept += len(found.scores)
        if self._kept > EXACT:
            self._coarsen()

    def _sum(self, group: str, found: Steps) -> None:
        grid = cast(np.ndarray, self.grid)
        n, total = self._sums.get(group, (0, np.zeros(len(grid))))
        total += found.at(grid)
        self._sums[group] = n + 1, total

    def _coarsen(self) -> None:
        """Go on with a grid, and the sums over the images so far."""
        kept = np.concatenate([one.scores for part in self._steps.values() for one in part])
        kept.sort()
        places = np.linspace(0, len(kept) - 1, min(GRID, len(kept))).astype(np.int64)
        self.grid = np.append(np.unique(kept[places]), np.inf)
        for group, images in self._steps.items():
            for one in images:
                self._sum(group, one)
        self._steps.clear()

    def finish(self) -> Calibration:
        """The thresholds of all levels.

        Raises:
            ValueError: no image was added.
        """
        if not self.count:
            raise ValueError("scores is empty: there is no image to calibrate on")
        if self.grid is None:
            parts = {group: self._exact(found) for group, found in self._steps.items()}
        else:
            parts = {group: self._among(*found) for group, found in self._sums.items()}
        return Calibration(
            levels=self.levels,
            bound=self.bound,
            parts=dict(sorted(parts.items())),
            ties=self.ties,
            guarantee=self.criterion.guarantee,
            delta=self.criterion.delta,
            **self.names,
        )

    def _among(self, n: int, total: np.ndarray) -> Part:
        """The largest of the given thresholds that is allowed."""
        grid = cast(np.ndarray, self.grid)
        thresholds, means = [], []
        for level in self.levels:

            def violates(k: int, level: float = level) -> bool:
                return not self.criterion.allows([float(total[k])], n, level)

            k = _first(violates, len(grid)) - 1
            allowed = k >= 0
            thresholds.append(Threshold(float(grid[k]) if allowed else -math.inf))
            means.append(float(total[k]) / n if allowed else 0.0)
        return Part(n, tuple(thresholds), tuple(means))

    def _exact(self, images: list[Steps]) -> Part:
        """t_level: the first of all scores at which an error enters that is too much."""
        n = len(images)
        sizes = np.array([len(image.scores) for image in images])
        scores, ties, errors = (np.concatenate(column) for column in zip(*images, strict=True))
        order = np.lexsort((ties, scores))
        new = np.ones(len(order), bool)
        new[1:] = (np.diff(scores[order]) != 0) | (np.diff(ties[order]) != 0)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.cumsum(new) - 1
        first = order[new]  # a step of each rank
        starts = np.cumsum(sizes) - sizes
        before = np.concatenate([[0.0], errors[:-1]]) if len(errors) else errors
        before[starts[sizes > 0]] = 0.0
        rises = np.bincount(rank, weights=errors - before, minlength=len(first))
        sums = np.cumsum(rises)  # just above each candidate, up to rounding
        filled = starts[sizes > 0]

        def losses(k: int) -> list[float]:
            """Of the images that are not 0, with the candidates before the k-th inside."""
            if not len(filled):
                return []
            inside = np.where(rank < k, errors, 0.0)
            return cast(list[float], np.maximum.reduceat(inside, filled).tolist())

        thresholds, means, quantiles, over = [], [], [], []
        for level in self.levels:

            def violates(k: int, level: float = level) -> bool:
                return not self.criterion.allows([float(sums[k])], n, level)

            def too_much(k: int, level: float = level) -> bool:
                return not self.criterion.allows(losses(k), n, level)

            if too_much(0):
                k, threshold = 0, Threshold(-math.inf)
            else:
                k = _first(violates, len(sums))
                while k > 0 and too_much(k):  # sums as they are, not as they accumulated
                    k -= 1
                while k < len(sums) and not too_much(k + 1):
                    k += 1
                threshold = Threshold(math.inf)
                if k < len(sums):
                    threshold = Threshold(float(scores[first[k]]), float(ties[first[k]]))
            found = np.zeros(n)
            inside = losses(k)
            found[: len(inside)] = inside
            thresholds.append(threshold)
            means.append(math.fsum(inside) / n)
            quantiles.append(tuple(np.quantile(found, QUANTILES).tolist()))
            over.append(float((found > level).mean()))
        return Part(n, tuple(thresholds), tuple(means), tuple(quantiles), tuple(over))


def calibrate(
    scores: Iterable[Map],
    errors: Iterable[Map],
    levels: Sequence[float],
    bound: float,
    *,
    groups: Iterable[str] | None = None,
    ties: Ties = "strict",
    guarantee: Guarantee = "mean",
    delta: float = 0.1,
    thresholds: Sequence[float] | np.ndarray | None = None,
    metric: str = "error",
    score: str = "score",
    pointwise: bool = False,
    noise: KeyedNoise = KeyedNoise(0),  # noqa: B008 (frozen)
) -> Calibration:
    """The thresholds that keep the largest error inside the mask at each level on average.

    In O(n d log d) for n images of d pixels; all levels share the sort. Maps are read once and not
    kept, so that generators serve. Exact while the images have up to `EXACT` steps together, and
    after that in memory that does not grow; see `Calibrator`.

    Args:
        scores: a map of doubt an image, large where the image is doubtful; any sizes.
        errors: local errors in [0, bound], maps of the same sizes.
        levels: each in (0, bound]. Levels chosen after looking at masks void the
            guarantee.
        bound: what the error is at most for every conceivable image, not for those at hand.
        groups: the group of each image, for a guarantee within each.
        ties: "strict" leaves out all pixels that score as the threshold does; with scores that
            repeat (8-bit maps, flat regions) that is conservative, and "random" tells equal scores
            apart by a uniform number a pixel.
        guarantee: "mean" for the expectation; "hoeffding" or "bentkus" for a bound that holds with
            probability 1 - delta over the calibration images, which must be independent.
        delta: of the latter.
        thresholds: choose among these alone; see `Calibrator`.
        metric, score: in words, for reports.
        pointwise: see `Calibration`.
        noise: of the random ties.

    Raises:
        TypeError: a map is no array or tensor of real numbers.
        ValueError: no images; maps of two sizes; NaN; an error outside [0, bound]; levels, bound,
            delta or thresholds out of range; scores, errors and groups not equally many.
    """
    calibrator = Calibrator(
        levels,
        bound,
        ties=ties,
        guarantee=guarantee,
        delta=delta,
        thresholds=thresholds,
        metric=metric,
        score=score,
        pointwise=pointwise,
        noise=noise,
    )
    for one, other, group in together(scores, errors, groups):
        calibrator.add(one, other, group)
    return calibrator.finish()


def together(
    scores: Iterable[Map], errors: Iterable[Map], groups: Iterable[str] | None
) -> Iterable[tuple[Map, Map, str]]:
    """(score, error, group) of every image.

    Raises:
        ValueError: they are not equally many.
    """
    streams = [iter(scores), iter(errors), repeat("") if groups is None else iter(groups)]
    number = 0
    while True:
        row = [next(stream, None) for stream in streams]
        ended = [value is None for value in row]
        if all(ended if groups is not None else ended[:2]):
            return
        if any(ended):
            raise ValueError(
                f"scores, errors and groups must be equally many; one of them ends after {number}"
            )
        number += 1
        yield cast(tuple[Map, Map, str], tuple(row))


# Evaluation


def worst(error: Map, trusted: Map) -> float:
    """The largest error inside a mask, 0 if the mask is empty."""
    if tuple(error.shape) != tuple(trusted.shape):
        raise ValueError(
            f"error and trusted must have one shape, got {tuple(error.shape)} and "
            f"{tuple(trusted.shape)}"
        )
    return float((error * trusted).max())


@dataclass(frozen=True)
class Evaluation:
    """How masks did on images that were not calibrated on.

    Args:
        level: of the masks.
        n: images.
        mean: of the largest error inside the mask; what the level bounds in expectation.
        standard_error: of ``mean``; NaN for one image.
        quantiles: of the largest error, at `QUANTILES`.
        over: share of the images whose largest error is above the level.
        trusted: share of the pixels that are trusted, mean over images.
        empty: share of the images whose mask is empty.
    """

    level: float
    n: int
    mean: float
    standard_error: float
    quantiles: tuple[float, ...]
    over: float
    trusted: float
    empty: float


def evaluate(
    calibration: Calibration,
    scores: Iterable[Map],
    errors: Iterable[Map],
    *,
    groups: Iterable[str] | None = None,
    noise: KeyedNoise = KeyedNoise(0),  # noqa: B008 (frozen)
) -> tuple[Evaluation, ...]:
    """Largest errors and trusted shares of new images, for every level.

    Args:
        calibration: of maps like these.
        scores, errors, groups: as for `calibrate`.
        noise: of the random ties.

    Raises:
        ValueError: no images; maps of two sizes; as `Calibration.mask`.
    """
    largest: list[list[float]] = []
    shares: list[list[float]] = []
    for i, (score, error, group) in enumerate(together(scores, errors, groups)):
        masks: list[Any] = [
            calibration.mask(cast(Any, score), level, group=group, noise=noise.at(i))
            for level in calibration.levels
        ]
        largest.append([worst(error, mask) for mask in masks])
        shares.append([float(mask.sum()) / math.prod(mask.shape) for mask in masks])
    if not largest:
        raise ValueError("scores is empty: there is no image to evaluate on")
    n = len(largest)
    result = []
    for level, found, share in zip(
        calibration.levels, np.array(largest).T, np.array(shares).T, strict=True
    ):
        spread = float(found.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
        quantiles = tuple(np.quantile(found, QUANTILES).tolist())
        over, trusted, empty = ((found > level), share, (share == 0))
        means = (float(values.mean()) for values in (over, trusted, empty))
        result.append(Evaluation(level, n, float(found.mean()), spread, quantiles, *means))
    return tuple(result)


def _first(holds: Any, count: int) -> int:
    """The first of 0 .. count - 1 for which ``holds``, which stays true; ``count`` if none."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _numbers(like: Map, noise: KeyedNoise, tag: str) -> np.ndarray:
    """A uniform number a pixel, (pixels,)."""
    empty = torch.empty(1, math.prod(like.shape), dtype=torch.float64)
    return noise.uniform(empty, tag)[0].numpy()


def _check_level(level: float) -> None:
    if not 0 < level < math.inf:
        raise ValueError(f"level must be positive and finite, got {level}")
