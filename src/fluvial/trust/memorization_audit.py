"""Does a generator copy its training data? An audit of any model or any set of samples.

Two comparisons, each against what would be seen if nothing was memorised:

* **copies**: a sample copies where its nearest training row is much nearer than the second nearest,
  d1 / d2 below a threshold. The threshold is calibrated on held-out rows, of which at most a share
  ``level`` may lie below it: these are real, and cannot be copies.
* **closer**: the share of samples that are nearer to the training set than to a held-out set of the
  same size, 1/2 if the model knows no more of the one than of the other.

Both searches for neighbours are exact, in blocks within a limit of memory.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from tqdm import tqdm

from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Noise
from fluvial.data import scaled, to_uint8
from fluvial.metrics.checks import Values, real
from fluvial.metrics.distances import MEMORY, squared_distances
from fluvial.metrics.extract import Extractor, extract
from fluvial.training.files import atomic, new_folder, write_json

NUM = 1000
"""Samples drawn from a model, if no number is given."""
NEAR = 1 / 3
"""Ratio d1 / d2 below which a sample is a copy to the eye (Yoon et al., 2023; Gu et al., 2023)."""
FLIPS = 9999
"""Random exchanges of training and held-out rows that the share ``closer`` is judged by."""
SIGNIFICANT = 0.005
"""p-value of either test from which the verdict speaks: together at most 1 % false alarms."""
LISTED = 100
"""Closest pairs that are kept."""
SHOWN = 12
"""Pairs in the figure."""
CONFIDENCE = 0.95
PASS = 1 << 22
"""Numbers encoded together where rows are only passed through."""


class Pair(NamedTuple):
    """A sample and its nearest training row.

    ``ratio`` is that of the distances to it and to the second nearest, different, training row.
    """

    sample: int
    train: int
    distance: float
    ratio: float


@dataclass(frozen=True, eq=False)
class MemorizationAudit:
    """What `audit_memorization` found; as text, a table with what the numbers can say.

    Args:
        num: samples.
        train, holdout: rows that were used, without repetitions.
        features: in what distances were taken, in words.
        level: false positives allowed, as a share.
        threshold: of d1 / d2.
        false_positive_rate: k / (h + 1), the chance that a new real row lies below the threshold;
            at most ``level``.
        false_positive_interval: 95 % of the rate of this threshold, which the held-out rows at hand
            have set: Beta(k, h + 1 - k).
        copies: samples below the threshold.
        share: ``copies`` over ``num``.
        share_interval: 95 % (Clopper and Pearson).
        p_copies: chance of as many copies or more, if samples were as far from the training rows as
            new real rows are: beta-binomial, exact with the threshold's own uncertainty.
        near_copies: share of samples with d1 / d2 below 1/3.
        holdout_near_copies: the same of held-out rows.
        median_ratio, holdout_median_ratio: medians of d1 / d2.
        compared: rows of either side of the second comparison.
        closer: share of samples nearer to the training side; ties count half.
        closer_null: 95 % of the share when sides are exchanged at random.
        median_side_ratio: median of distance to the training side over that to the held-out side.
        p_closer: chance of this share or more under such exchanges.
        pairs: the closest by ratio, at most 100.
        notes: what was left out.
        ratios, holdout_ratios: d1 / d2 of every sample and held-out row.
        images: the first samples of ``pairs`` and their training rows, (2, n, C, H, W) in [-1, 1];
            None where rows are not images.
    """

    num: int
    train: int
    holdout: int
    features: str
    level: float
    threshold: float
    false_positive_rate: float
    false_positive_interval: tuple[float, float]
    copies: int
    share: float
    share_interval: tuple[float, float]
    p_copies: float
    near_copies: float
    holdout_near_copies: float
    median_ratio: float
    holdout_median_ratio: float
    compared: int
    closer: float
    closer_null: tuple[float, float]
    median_side_ratio: float
    p_closer: float
    pairs: tuple[Pair, ...]
    notes: tuple[str, ...] = ()
    ratios: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)
    holdout_ratios: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)
    images: Tensor | None = field(default=None, repr=False)

    @property
    def verdict(self) -> str:
        """In words, from the two p-values."""
        if self.p_copies < SIGNIFICANT:
            return "more samples copy training rows than new real rows would"
        if self.p_closer < SIGNIFICANT:
            return "samples are closer to the training rows than to as many held-out rows"
        return "no sign of memorisation"

    def to_dict(self) -> dict[str, Any]:
        """Everything but the ratios of single rows and the images, as JSON holds it."""
        content = {
            name: value
            for name, value in vars(self).items()
            if name not in ("ratios", "holdout_ratios", "images")
        }
        content["pairs"] = [pair._asdict() for pair in self.pairs]
        return {"verdict": self.verdict, **_plain(content)}

    def __str__(self) -> str:
        low, high = self.false_positive_interval
        rows = [
            ("", "samples", "expected", "p"),
            (
                f"copies, d1/d2 < {self.threshold:.3g}",
                f"{_percent(self.share)} [{_percents(self.share_interval)}]",
                f"{_percent(self.false_positive_rate)} [{_percents((low, high))}]",
                f"{self.p_copies:.2g}",
            ),
            (
                "near copies, d1/d2 < 1/3",
                _percent(self.near_copies),
                _percent(self.holdout_near_copies),
                "",
            ),
            ("median d1/d2", f"{self.median_ratio:.3g}", f"{self.holdout_median_ratio:.3g}", ""),
            (
                "closer to training rows",
                _percent(self.closer),
                f"50 % [{_percents(self.closer_null)}]",
                f"{self.p_closer:.2g}",
            ),
            ("median d(train)/d(held out)", f"{self.median_side_ratio:.3g}", "1", ""),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in rows
        ]
        sizes = (
            f"{self.num:,} samples, {self.train:,} training and {self.holdout:,} held-out rows; "
            f"{self.compared:,} of each in the last two lines; distances in {self.features}"
        )
        notes = [f"note: {note}" for note in self.notes]
        text = [f"verdict: {self.verdict}", sizes, *notes, READING]
        return "\n".join([*table, "", *(line for part in text for line in textwrap.wrap(part, 96))])

    def figure(self, path: str | Path) -> None:
        """The ratios of samples and held-out rows, and the closest pairs where rows are images."""
        with atomic(path) as temporary:
            _draw(self, temporary)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """``audit.json``, ``audit.txt`` and ``figure.png`` in a folder.

        Raises:
            FileExistsError: the folder is not empty and ``overwrite`` is false.
        """
        place = new_folder(folder, force=overwrite)
        self.figure(place / "figure.png")
        with atomic(place / "audit.txt") as path:
            path.write_text(f"{self}\n", encoding="utf-8")
        write_json(place / "audit.json", self.to_dict())


READING = (
    "reading: 'expected' is what new real rows show, with 95 % ranges. The p-values are exact if "
    "samples are independent of each other and, for copies, if without memorisation they would lie "
    "to the training rows as new real rows do. A model whose samples look different from real rows "
    "can break that without copying; it cannot break the comparison with as many held-out rows. A "
    "small p-value says that samples depend on single training rows. A large one does not say that "
    "none do: copies that are rare, changed beyond what these distances see, or hidden by "
    "near-duplicates in the training set are missed. Look at the pairs."
)


def audit_memorization(
    model: Any,
    train: Values,
    holdout: Values,
    *,
    num: int | None = None,
    features: Extractor | None = None,
    level: float = 0.01,
    memory: int = MEMORY,
    noise: KeyedNoise = KeyedNoise(0),  # noqa: B008 (frozen)
    duplicates: Literal["refuse", "drop"] = "refuse",
    progress: bool = False,
    **options: Any,
) -> MemorizationAudit:
    """Audit a generator, or samples of one, for copies of its training rows.

    With d1 <= d2 the distances of a row to its nearest and second nearest different training row, a
    row is called a copy if d1 / d2 < tau. Of h held-out rows tau is the k-th smallest ratio, k =
    floor(level (h + 1)), so that a new real row is called a copy with probability k / (h + 1)
    exactly, if ratios have no ties (split-conformal calibration). The number of copies among n
    samples that lie as new real rows do is beta-binomial(n, k, h + 1 - k), the threshold's
    uncertainty included: that gives the p-value.

    Nearest distances shrink with the size of a set, so the second comparison takes as many training
    rows as held-out ones. Under its null hypothesis a training row and the held-out row it is
    paired with can be exchanged, whatever the model's quality: the p-value is that of a sign-flip
    test over these pairs, with 9,999 random exchanges.

    Args:
        model: a trained model with ``sample(num, noise=, ...)``; a function ``(num, noise, ...)``
            that returns samples, such as a simulation of an adapter's field; or samples, (num,
            *event).
        train: the rows it was trained on, (rows, *event).
        holdout: rows of the same origin that it has not seen, at least 1 / level - 1 of them.
        num: samples to draw; by default 1,000 of a model, and all of a tensor.
        features: what maps a batch to (batch, D), in which distances are then taken; by default
            rows are compared number by number.
        level: share of held-out rows that the threshold may call copies.
        memory: bytes that a block of the search may take, beside the data.
        noise: keyed, of the samples and of what is drawn here.
        duplicates: held-out rows that equal a training row are an error, or dropped.
        progress: show a progress bar.
        **options: for ``sample``, such as ``steps=`` and ``label=``.

    uint8 rows are taken for images, and brought to [-1, 1] as models see them; of a model with a
    ``format``, train and holdout are encoded by it, as in its ``fit``. Other numbers are taken as
    they are. Rows that occur more than once within train, or within holdout, count once.

    Raises:
        TypeError: ``model`` cannot be sampled; something is not made of real numbers.
        ValueError: shapes of events differ, values are not finite, too few rows, held-out rows
            among the training rows, an argument out of its range.

    Citation: Yoon et al., Diffusion Probabilistic Models Generalize when They Fail to Memorize,
    2023 (d1 / d2 < 1/3); Meehan et al., A Three Sample Hypothesis Test for Evaluating Generative
    Models, AISTATS 2020 (train against held-out); Vovk, Conditional validity of inductive conformal
    predictors, 2012 (the law of the rate).
    """
    _check_arguments(level, num, duplicates)
    format = getattr(model, "format", None) if hasattr(model, "sample") else None
    encode = _as_seen if format is None else format.encode
    known, fresh = _Rows.of("train", train, encode), _Rows.of("holdout", holdout, encode)
    known.check_same(fresh, "train", "holdout")
    known, fresh, notes = _distinct(known, fresh, duplicates)
    k = math.floor(level * (len(fresh) + 1))
    if k < 1:
        raise ValueError(
            f"holdout must have at least {math.ceil(1 / level) - 1} different rows for "
            f"level={level:g}, got {len(fresh)}"
        )
    if len(known) < 3:
        raise ValueError(f"train must have at least 3 different rows, got {len(known)}")
    drawn = _Rows.of("samples", _samples(model, num, noise, options), _as_seen)
    known.check_same(drawn, "train", "samples")
    repeated = len(drawn) - len(np.unique(drawn.digests()))
    if repeated:
        notes.append(
            f"{repeated:,} of {len(drawn):,} samples equal another one: they are not independent, "
            "and p-values too small"
        )

    compared = min(len(known), len(fresh))
    order = noise.uniform(torch.empty(len(known), dtype=torch.float64), "audit").argsort()
    words, rows = f"the {math.prod(known.shape):,} numbers of a row", [known, fresh, drawn]
    if features is not None:
        rows = [part.seen_by(features) for part in rows]
        words = f"{rows[0].shape[0]:,} features"
    ours, theirs, made = rows
    side, other = ours.part(order[:compared].numpy()), theirs.part(np.arange(compared))
    nearest = _Search(ours.mean(), math.prod(ours.shape), memory)
    total = len(known) * (len(drawn) + len(fresh)) + 2 * compared * len(drawn)
    with tqdm(total=total, desc="audit", unit="pair", unit_scale=True, disable=not progress) as bar:
        d, which = nearest(made, ours, 2, bar)
        d_fresh, _ = nearest(theirs, ours, 2, bar)
        to_side, at_side = (part[:, 0] for part in nearest(made, side, 1, bar))
        to_other, at_other = (part[:, 0] for part in nearest(made, other, 1, bar))

    ratios, fresh_ratios = (_ratio(*part.unbind(1)) for part in (d, d_fresh))
    threshold = float(fresh_ratios.sort().values[k - 1])
    n, copies, beta = len(drawn), int((ratios < threshold).sum()), (k, len(fresh) + 1 - k)
    closer, null, p_closer = _exchange(to_side, to_other, at_side, at_other, compared, noise)
    closest = ratios.argsort(stable=True)[:LISTED]
    partners = which[closest, 0].numpy()
    pairs = tuple(
        Pair(i, int(j), float(d[i, 0]), float(ratios[i]))
        for i, j in zip(closest.tolist(), known.index[partners], strict=True)
    )
    images = None
    if len(known.shape) == 3 and known.shape[0] in (1, 3):
        images = torch.stack(
            [drawn[closest[:SHOWN].numpy()].cpu(), known[partners[:SHOWN]].cpu()]
        ).float()
    return MemorizationAudit(
        num=n,
        train=len(known),
        holdout=len(fresh),
        features=words,
        level=level,
        threshold=threshold,
        false_positive_rate=k / (len(fresh) + 1),
        false_positive_interval=_central(*beta),
        copies=copies,
        share=copies / n,
        share_interval=_clopper_pearson(copies, n),
        p_copies=float(stats.betabinom.sf(copies - 1, n, *beta)),
        near_copies=float((ratios < NEAR).double().mean()),
        holdout_near_copies=float((fresh_ratios < NEAR).double().mean()),
        median_ratio=float(ratios.median()),
        holdout_median_ratio=float(fresh_ratios.median()),
        compared=compared,
        closer=closer,
        closer_null=null,
        median_side_ratio=float(_ratio(to_side, to_other).median()),
        p_closer=p_closer,
        pairs=pairs,
        notes=tuple(notes),
        ratios=ratios,
        holdout_ratios=fresh_ratios,
        images=images,
    )


def _check_arguments(level: float, num: int | None, duplicates: str) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must be a share in (0, 1), got {level}")
    if num is not None and num < 1:
        raise ValueError(f"num must be at least 1, got {num}")
    if duplicates not in ("refuse", "drop"):
        raise ValueError(f"duplicates must be 'refuse' or 'drop', got {duplicates!r}")


def _samples(model: Any, num: int | None, noise: KeyedNoise, options: Mapping[str, Any]) -> Values:
    if isinstance(model, Tensor | np.ndarray):
        if options:
            raise ValueError(f"model is samples already: {', '.join(options)} cannot be used")
        if num is not None and num > len(model):
            raise ValueError(f"num must be at most the {len(model)} samples given, got {num}")
        return model[:num]
    draw = getattr(model, "sample", None)
    if draw is not None:
        found = draw(NUM if num is None else num, noise=noise, **options)
    elif callable(model) and not isinstance(model, nn.Module):
        found = model(NUM if num is None else num, noise, **options)
    else:
        raise TypeError(
            "model must be samples, have sample(num, noise=), or be a function (num, noise) that "
            f"returns samples, got {type(model).__name__}"
        )
    return real("samples", found)


def _distinct(
    known: _Rows, fresh: _Rows, duplicates: Literal["refuse", "drop"]
) -> tuple[_Rows, _Rows, list[str]]:
    """Each row once, and no held-out row that is a training row."""
    notes, kept, digests = [], [], []
    whole = known.value.dtype == fresh.value.dtype == torch.uint8  # as they are, then
    for name, rows in (("training", known), ("held-out", fresh)):
        found, first = np.unique(rows.digests(encoded=not whole), return_index=True)
        if len(found) < len(rows):
            notes.append(f"{len(rows) - len(found):,} {name} rows equal another one: counted once")
        order = np.argsort(first)
        kept.append(rows.part(first[order]))
        digests.append(found[order])
    both = np.isin(digests[1], digests[0])
    if both.any():
        if duplicates == "refuse":
            first_row = int(kept[1].index[np.argmax(both)])
            raise ValueError(
                f"holdout has {int(both.sum())} rows that are training rows too, row {first_row} "
                "first: take them out, or pass duplicates='drop'"
            )
        notes.append(f"{int(both.sum()):,} held-out rows that are training rows were dropped")
        kept[1] = kept[1].part(np.flatnonzero(~both))
    return kept[0], kept[1], notes


# Rows


def _as_seen(x: Tensor) -> Tensor:
    """uint8 images as models see them, other numbers as they are."""
    return scaled(x) if x.dtype == torch.uint8 else x


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows that are encoded when they are looked at: all of them as floats may be too many."""

    value: Tensor
    encode: Callable[[Tensor], Tensor]
    index: np.ndarray
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, value: Values, encode: Callable[[Tensor], Tensor]) -> _Rows:
        value = real(name, value)
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(np.ascontiguousarray(value))
        value = value.detach()
        if value.ndim < 2 or value.numel() == 0:
            raise ValueError(f"{name} needs rows and an event shape, got {tuple(value.shape)}")
        rows = cls(value, encode, np.arange(len(value)), tuple(encode(value[:1]).shape[1:]))
        for part in rows.parts() if value.is_floating_point() else ():
            if not bool(part.isfinite().all()):
                raise ValueError(f"{name} must be finite, got NaN or infinite values")
        return rows

    def __len__(self) -> int:
        return len(self.index)

    def check_same(self, other: _Rows, name: str, other_name: str) -> None:
        if self.shape != other.shape:
            raise ValueError(
                f"{name} and {other_name} must hold events of one shape, got {self.shape} and "
                f"{other.shape}"
            )

    def part(self, rows: np.ndarray) -> _Rows:
        return _Rows(self.value, self.encode, self.index[rows], self.shape)

    def __getitem__(self, rows: Any) -> Tensor:
        """Encoded, (n, *event)."""
        index = torch.from_numpy(self.index[rows]).to(self.value.device)
        return self.encode(self.value[index])

    def parts(self) -> Iterator[Tensor]:
        size = max(1, PASS // math.prod(self.value.shape[1:]))
        for start in range(0, len(self), size):
            yield self[start : start + size]

    def flat(self, rows: slice, middle: Tensor) -> Tensor:
        """float64, (n, D), about ``middle``."""
        x = self[rows].flatten(1)
        return x.to(torch.float64).sub_(middle.to(x.device))

    def mean(self) -> Tensor:
        total = sum(part.flatten(1).double().sum(0) for part in self.parts())
        return torch.as_tensor(total) / len(self)

    def digests(self, *, encoded: bool = True) -> np.ndarray:
        """16 bytes a row: equal rows, equal bytes."""
        rows = self if encoded else _Rows(self.value, lambda x: x, self.index, self.shape)
        found = []
        for part in rows.parts():
            # -0 is 0, and float32 among float64 is what it was
            flat = part.flatten(1).double() + 0.0 if encoded else part.flatten(1)
            found += [blake2b(row, digest_size=16).digest() for row in flat.cpu().numpy()]
        return np.array(found, dtype="S16")

    def seen_by(self, features: Extractor) -> _Rows:
        """The same rows in features."""
        x = torch.cat([extract(features, part) for part in self.parts()])
        if not bool(x.isfinite().all()):
            raise ValueError("features must be finite, got NaN or infinite values")
        return _Rows(x, _as_seen, np.arange(len(x)), (x.shape[1],))


# Neighbours


@dataclass(frozen=True)
class _Search:
    """The nearest rows, exactly: every pair is looked at, in blocks within ``memory`` bytes."""

    middle: Tensor
    size: int
    memory: int

    @property
    def side(self) -> int:
        """Rows of either side of a block: s with 4 s D + 6 s^2 numbers in float64 at most."""
        s = math.isqrt(self.memory // 48 + (self.size // 3) ** 2) - self.size // 3
        if s < 1:
            raise ValueError(
                f"memory must be at least {8 * (4 * self.size + 8)} bytes for one pair, got "
                f"{self.memory}"
            )
        return s

    def __call__(self, x: _Rows, y: _Rows, count: int, bar: Any) -> tuple[Tensor, Tensor]:
        """Of every x the ``count`` nearest y: (distances, rows of y), each (n, count)."""
        distances, rows = [], []
        for start in range(0, len(x), self.side):
            a = x.flat(slice(start, start + self.side), self.middle)
            best = a.new_full((len(a), count), math.inf)
            at = torch.zeros(len(a), count, dtype=torch.int64, device=a.device)
            for left in range(0, len(y), self.side):
                b = y.flat(slice(left, left + self.side), self.middle).to(a.device)
                squares = squared_distances(a, b)
                near, column = squares.topk(min(count, len(b)), largest=False)
                best, chosen = torch.cat([best, near], 1).topk(count, largest=False)
                at = torch.cat([at, column + left], 1).gather(1, chosen)
                bar.update(len(a) * len(b))
            distances.append(best.sqrt().cpu())
            rows.append(at.cpu())
        return torch.cat(distances), torch.cat(rows)


def _ratio(near: Tensor, far: Tensor) -> Tensor:
    """near / far; 0 / 0, a row that both sides hold, is 1."""
    return torch.where(near == far, 1.0, near / far)


# Tests


def _exchange(
    to_side: Tensor, to_other: Tensor, at_side: Tensor, at_other: Tensor, rows: int, noise: Noise
) -> tuple[float, tuple[float, float], float]:
    """(share of samples nearer to the training side, its null range, p-value).

    Row i of the training side and row i of the held-out side are exchanged at random. A sample
    counts for the row it is nearest to, so an exchange changes the sign of what a pair adds.
    """
    n = len(to_side)
    votes = torch.zeros(rows, dtype=torch.float64)
    votes.index_add_(0, at_side, (to_side < to_other).double())
    votes.index_add_(0, at_other, -(to_other < to_side).double())
    seen, votes = float(votes.sum()), votes[votes != 0]
    sums = []
    size = max(1, PASS // max(1, len(votes)))
    for start in range(0, FLIPS, size):
        ids = torch.arange(start, min(start + size, FLIPS))
        like = torch.empty(len(ids), len(votes), dtype=torch.float32)
        signs = (noise.rows(ids).uniform(like, "exchange") < 0.5).double().mul_(2).sub_(1)
        sums.append(signs @ votes)
    flipped = torch.cat(sums)
    p = (1 + int((flipped >= seen - 1e-9).sum())) / (1 + FLIPS)
    ends = torch.tensor([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], dtype=torch.float64)
    low, high = (0.5 + flipped.quantile(ends) / (2 * n)).tolist()
    return 0.5 + seen / (2 * n), (low, high), p


def _clopper_pearson(count: int, n: int) -> tuple[float, float]:
    tail = (1 - CONFIDENCE) / 2
    low = float(stats.beta.ppf(tail, count, n - count + 1)) if count else 0.0
    high = float(stats.beta.isf(tail, count + 1, n - count)) if count < n else 1.0
    return low, high


def _central(a: int, b: int) -> tuple[float, float]:
    low, high = stats.beta.interval(CONFIDENCE, a, b)
    return float(low), float(high)


# Text and pictures


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _percents(interval: tuple[float, float]) -> str:
    return f"{100 * interval[0]:.3g}, {100 * interval[1]:.3g}"


def _draw(audit: MemorizationAudit, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = 0 if audit.images is None else audit.images.shape[1]
    figure = Figure(figsize=(8.0, 5.1 if count else 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    heights = [3.2, 1.9] if count else [3.2]
    parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights)
    axes = np.atleast_1d(parts)[0].subplots()
    both = torch.cat([audit.ratios, audit.holdout_ratios])
    bins = np.linspace(float(both.min()), max(1.0, float(both.max())), 51).tolist()
    for values, name, colour in (
        (audit.holdout_ratios, f"{audit.holdout:,} held-out rows", "0.7"),
        (audit.ratios, f"{audit.num:,} samples", "C0"),
    ):
        weights = np.full(len(values), 1 / len(values))
        kind = "stepfilled" if colour == "0.7" else "step"
        axes.hist(values.numpy(), bins, weights=weights, histtype=kind, color=colour, label=name)
    axes.axvline(
        audit.threshold, color="C3", linestyle="--", label=f"threshold {audit.threshold:.3g}"
    )
    axes.set_xlabel("distance to the nearest training row over that to the second nearest")
    axes.set_ylabel("share")
    axes.legend(frameon=False, loc="upper left", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    if count and audit.images is not None:
        pixels = to_uint8(audit.images.clamp(-1, 1).flatten(0, 1)).permute(0, 2, 3, 1).numpy()
        places = parts[1].subplots(2, count, squeeze=False)
        for axis, picture in zip(places.flat, pixels, strict=True):
            axis.imshow(picture.squeeze(-1) if picture.shape[-1] == 1 else picture, cmap="gray")
            axis.set(xticks=[], yticks=[])
        for axis, pair in zip(places[0], audit.pairs, strict=False):
            axis.set_title(f"{pair.ratio:.2f}", fontsize=8)
        places[0, 0].set_ylabel("sample", fontsize=8)
        places[1, 0].set_ylabel("training", fontsize=8)
    figure.savefig(path, dpi=144, format="png")


def _plain(value: Any) -> Any:
    """As JSON holds it."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, tuple | list) else value
