"""Samples against data: the metrics that fit, each beside its floor and with its interval."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from fluvial.data import DataSet, read
from fluvial.data.arrays import from_array
from fluvial.data.format import choices
from fluvial.data.images import Options
from fluvial.data.store import Cache
from fluvial.data.tokenizer import Normalise
from fluvial.metrics.bootstrap import Interval, bootstrap_interval, check_resampling
from fluvial.metrics.classifier_test import classifier_test
from fluvial.metrics.distances import MEMORY
from fluvial.metrics.energy import energy_distance
from fluvial.metrics.evaluate_text import TEXTS, evaluate_texts, is_text
from fluvial.metrics.evaluation import FEWEST, Evaluation, Measured, cut, one_source, order_of
from fluvial.metrics.extract import Extractor, extract
from fluvial.metrics.frechet import frechet_distance
from fluvial.metrics.mmd import kid, median_distance, mmd
from fluvial.metrics.neighbours import density_coverage, precision_recall
from fluvial.metrics.pretrained import EfficientNetLite
from fluvial.metrics.sliced import sliced_wasserstein
from fluvial.metrics.wasserstein import LIMIT, wasserstein

Source: TypeAlias = str | os.PathLike[str] | Tensor | np.ndarray | DataSet | Sequence[str]

COMPONENTS = 64
"""Principal components of pixels, at most, and at most a quarter of the rows."""
LARGE = 64
"""Side in pixels above which principal components say little."""
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


class Metric(NamedTuple):
    """A row of the table to be.

    ``better`` says which values are good: lower, higher, or near a number. ``measure`` takes
    samples, reference, the bandwidth of a kernel, and bytes of memory. No value lies outside of
    ``span``, to which intervals are cut.
    """

    title: str
    better: str
    measure: Callable[[Tensor, Tensor, float, int], float]
    span: tuple[float, float] = (0.0, math.inf)


ANY = (-math.inf, math.inf)
"""The span of an estimate without bias of what is at least 0."""
SHARE = (0.0, 1.0)


METRICS: dict[str, Metric] = {
    "frechet": Metric("Fréchet distance", "lower", lambda x, y, h, m: frechet_distance(x, y)),
    "kid": Metric("KID", "lower", lambda x, y, h, m: kid(x, y, memory=m), ANY),
    "mmd": Metric(
        "MMD^2, Gaussian", "lower", lambda x, y, h, m: mmd(x, y, bandwidth=h, memory=m), ANY
    ),
    "energy": Metric(
        "energy distance", "lower", lambda x, y, h, m: energy_distance(x, y, memory=m), ANY
    ),
    "sliced": Metric("sliced Wasserstein", "lower", lambda x, y, h, m: sliced_wasserstein(x, y)),
    "wasserstein": Metric("Wasserstein, exact", "lower", lambda x, y, h, m: wasserstein(x, y)),
    "precision": Metric(
        "precision", "higher", lambda x, y, h, m: precision_recall(x, y, memory=m).precision, SHARE
    ),
    "recall": Metric(
        "recall", "higher", lambda x, y, h, m: precision_recall(x, y, memory=m).recall, SHARE
    ),
    "density": Metric(
        "density", "near 1", lambda x, y, h, m: density_coverage(x, y, memory=m).density
    ),
    "coverage": Metric(
        "coverage", "higher", lambda x, y, h, m: density_coverage(x, y, memory=m).coverage, SHARE
    ),
    "classifier": Metric(
        "classifier accuracy", "near 0.5", lambda x, y, h, m: classifier_test(x, y).accuracy, SHARE
    ),
}
"""By the name that `evaluate` takes."""

IMAGES = ("frechet", "kid", "precision", "recall", "density", "coverage")
ROWS = ("sliced", "energy", "mmd", "precision", "recall", "classifier")


def evaluate(
    samples: Source,
    against: Source,
    *,
    metrics: Sequence[str] | None = None,
    features: str | Extractor | None = None,
    rows: int | None = 1000,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    label: str | None = None,
    normalise: Normalise | None = None,
    level: float = 0.95,
    resamples: int = 100,
    seed: int = 0,
    memory: int = MEMORY,
    device: str | torch.device = "cpu",
    cache: Cache = "default",
    progress: bool = False,
) -> Evaluation:
    """Samples against data, by the metrics that fit their kind.

    Two disjoint sets of n real rows are drawn. The first is the reference: the samples, n of them,
    are measured against it, and so is the second, which gives the floor, the value that perfect
    samples would have. n is the largest number that both can give, ``rows`` at most. Intervals
    are `bootstrap_interval` of method "half", cut to the values that a metric can have.

    Images are measured in features: by default in the principal components of their pixels, which
    are fitted to the reference and see colour and rough shape; for photographs name an extractor.
    Arrays and tables are scaled by the mean and deviation of the data's columns.

    Texts are measured in characters, whatever the tokenizer was. The data are cut into rows as long
    as the samples mostly are, and longer samples are cut too. Their bits a character are those
    under an `NGram` of all the data but the floor; 5-grams know spelling and little more.

    Args:
        samples: a path that `fluvial.data.read` takes, or rows: uint8 (N, 1 or 3, H, W) for images,
            other real numbers for arrays. One picture of many samples is refused. Of texts the
            .txt or .jsonl file that `fluvial sample` writes, or a list of them.
        against: real data, in the same way; of texts what `fluvial.data.read_text` takes.
        metrics: names in `METRICS`, or of texts in `TEXTS`. If None, of images the Fréchet
            distance, KID, precision, recall, density and coverage; of arrays and tables the sliced
            Wasserstein and energy distances, MMD, precision, recall and the accuracy of a
            classifier; of texts all of `TEXTS`.
        features: of images "pixels" or "efficientnet-lite0", which needs the extra "features"; of
            anything a function of a batch that gives (batch, D), such as ``network.features``. It
            sees what a model sees: images in [-1, 1], other numbers standardised.
        rows: n at most; None for all. The time of most metrics grows with the square.
        size, channels: what images are brought to, as `fluvial.data.read` does.
        label: where labels are, as for `fluvial.data.read`, in both or in the one that has them;
            they are not used.
        normalise: what is done to the samples and the data first, of texts; see `read_text`.
        level: nominal coverage of the intervals.
        resamples: for each interval.
        seed: of the rows, the resampling and the directions.
        memory: bytes that a block of pairs may take.
        device: where to compute.
        cache: as for `fluvial.data.read`.
        progress: show progress bars.

    Raises:
        FileNotFoundError: there is no such path.
        TypeError: a source or ``features`` is of no kind that is known.
        ValueError: the two do not fit each other, there are too few rows, a metric is not known,
            or an argument is out of its range.
        ModuleNotFoundError: a package is missing; the message says how to install it.
    """
    if isinstance(features, str) and features not in ("pixels", "efficientnet-lite0"):
        raise ValueError(
            f"features must be pixels, efficientnet-lite0 or a function, got {features!r}"
        )
    metrics = [metrics] if isinstance(metrics, str) else metrics
    if metrics is not None and not metrics:
        raise ValueError("metrics must name at least one, or be None for those that fit")
    text = is_text(samples, "samples")
    known = list(TEXTS if text else METRICS)
    for name in metrics or ():
        if name not in known:
            of = " of texts" if text else ""
            raise ValueError(f"metrics: there is no {name!r}{of}; {choices(name, known)}")
    if rows is not None and rows < FEWEST:
        raise ValueError(f"rows must be at least {FEWEST}, got {rows}")
    check_resampling(resamples, level, seed)
    if text:
        for name, value in (
            ("features", features),
            ("size", size),
            ("channels", channels),
            ("label", label),
        ):
            if value is not None:
                raise ValueError(f"{name} is not of texts, got {value!r}")
        return evaluate_texts(
            samples,
            against,
            list(dict.fromkeys(metrics or TEXTS)),
            rows,
            normalise or "none",
            cache,
            progress,
            {"level": level, "resamples": resamples, "seed": seed},
        )
    if normalise is not None:
        raise ValueError(f"normalise is of texts, got {normalise!r}, and samples are none")
    if is_text(against, "against"):
        raise ValueError(
            "against is text and samples are none: give those that fluvial sample wrote as .jsonl "
            "or .txt"
        )
    reading = {"size": size, "channels": channels, "cache": cache, "progress": progress}
    drawn, real = _read_both({"samples": samples, "against": against}, label, reading)
    drawn_x = _matched(drawn, real)

    count = min(len(drawn_x), len(real) // 2, rows or len(drawn_x))
    if count < FEWEST:
        raise ValueError(
            f"samples must have at least {FEWEST} rows, and against {2 * FEWEST} (half of them are "
            f"the floor), got {len(drawn_x)} and {len(real)}"
        )
    chosen = order_of(len(drawn_x), seed, "samples")[:count]
    order = order_of(len(real), seed, "against")
    parts = [drawn_x[chosen], real.x[order[:count]], real.x[order[count : 2 * count]]]
    notes = [
        f"{count:,} of {len(drawn_x):,} samples and 2 x {count:,} of {len(real):,} real rows used"
        + ("" if count == len(drawn_x) else ", drawn at random")
    ]
    notes += _same(samples, against, parts[0], real)
    notes += [f"samples: {note}" for note in drawn.notes] + [f"data: {n}" for n in real.notes]

    encoded = [real.format.encode(part).to(device) for part in parts]
    (x, reference, floor), words = _features(encoded, features, real)
    if metrics is None:
        metrics = IMAGES if real.format.kind == "images" else ROWS
    metrics = list(dict.fromkeys(metrics))
    if "wasserstein" in metrics and x.shape[1] > 1 and count > LIMIT:
        raise ValueError(
            f"metrics: wasserstein takes {LIMIT:,} rows at most, got {count:,}: give rows={LIMIT}, "
            "or take sliced"
        )
    bandwidth = _bandwidth(reference) if "mmd" in metrics else 0.0
    measured = []
    for name in tqdm(metrics, desc="metrics", disable=not progress):
        intervals = [
            _interval(name, z, reference, bandwidth, memory, level, resamples, seed)
            for z in (x, floor)
        ]
        measured.append(Measured(name, METRICS[name].title, METRICS[name].better, *intervals))
    return Evaluation(real.format.kind, count, words, level, tuple(measured), tuple(notes))


def _interval(
    name: str,
    x: Tensor,
    reference: Tensor,
    bandwidth: float,
    memory: int,
    level: float,
    resamples: int,
    seed: int,
) -> Interval:
    settings: dict[str, Any] = {"level": level, "resamples": resamples, "seed": seed}
    if name == "classifier":  # the rows held out are what is uncertain: nothing is trained anew
        correct = classifier_test(x, reference, seed=seed).correct
        return bootstrap_interval(np.mean, correct, method="percentile", **settings)
    metric = METRICS[name]
    statistic = partial(_call, metric.measure, bandwidth, memory)
    found = bootstrap_interval(statistic, x, reference, method="half", **settings)
    return cut(found, metric.span)


def _call(
    measure: Callable[[Tensor, Tensor, float, int], float],
    bandwidth: float,
    memory: int,
    x: Tensor,
    y: Tensor,
) -> float:
    return measure(x, y, bandwidth, memory)


def _bandwidth(reference: Tensor) -> float:
    try:
        return median_distance(reference[::2], reference[1::2])
    except ValueError:
        raise ValueError(
            "metrics: mmd has no bandwidth, as most rows of against are equal: leave it out"
        ) from None


def _read_both(
    sources: dict[str, Any], label: str | None, settings: dict[str, Any]
) -> tuple[DataSet, DataSet]:
    """Samples and data, of which one may be without labels."""
    found: list[DataSet] = []
    refused: list[ValueError] = []
    for name, source in sources.items():
        try:
            found.append(_read(name, source, label=label, **settings))
        except ValueError as error:
            if label is None or refused:
                raise (refused or [error])[0] from None
            refused.append(error)
            try:
                found.append(_read(name, source, label=None, **settings))
            except ValueError:
                raise error from None
    return found[0], found[1]


def _read(name: str, source: Any, **settings: Any) -> DataSet:
    if isinstance(source, DataSet):
        return source
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if path.suffix.lower() in PICTURES and not path.is_dir():
            raise ValueError(
                f"{name}: {path} is one picture; many samples in one picture cannot be told apart "
                "again: give a folder with one image each, or an .npz or .npy file"
            )
        if (path / "run.json").is_file() or path.suffix == ".safetensors":
            raise ValueError(
                f"{name}: {path} is a trained model: draw samples of it first, by "
                f"`fluvial sample {path} --n 1000 --out FILE`"
            )
        try:
            return read(source, **settings)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{name}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    if isinstance(source, Tensor):
        source = source.detach().cpu()
        # which NumPy does not have
        source = (source.float() if source.dtype == torch.bfloat16 else source).numpy()
    if not isinstance(source, np.ndarray):
        raise TypeError(
            f"{name} must be a path, a tensor, an array or a DataSet, got {type(source).__name__}"
        )
    size = settings["size"]
    sides = (size, size) if isinstance(size, int) else size
    try:
        return from_array(source, None, name, Options(sides, settings["channels"]))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _matched(samples: DataSet, real: DataSet) -> Tensor:
    """The rows of the samples, their columns in the order of the data's."""
    kind, other = samples.format.kind, real.format.kind
    if (kind == "images") != (other == "images"):
        raise ValueError(
            f"samples are {_described(samples)} and against {_described(real)}: images are uint8, "
            "or files of images"
        )
    x = samples.x
    if kind == other == "table" and samples.format.columns != real.format.columns:
        have, want = samples.format.columns, real.format.columns
        if set(have) != set(want):
            missing, more = sorted(set(want) - set(have)), sorted(set(have) - set(want))
            raise ValueError(
                "samples must have the columns of against: missing "
                f"{', '.join(missing) or 'none'}; unknown {', '.join(more) or 'none'} (a column of "
                "labels is named by label)"
            )
        x = x[:, [have.index(column) for column in want]]
    shape, wanted = tuple(x.shape[1:]), real.format.shape
    if shape != wanted:
        hint = ""
        if kind == "images":
            needed = [f"channels={wanted[0]}"] * (shape[0] != wanted[0])
            needed += [f"size={wanted[1:]}"] * (shape[1:] != wanted[1:])
            hint = f": give {' and '.join(needed)}"
        raise ValueError(f"samples are {_described(samples)} and against {_described(real)}{hint}")
    return x


def _described(data: DataSet) -> str:
    what = {"images": "images", "arrays": "arrays", "table": "rows of a table"}[data.format.kind]
    return f"{what} of shape {' x '.join(map(str, data.format.shape))}"


def _same(samples: Any, against: Any, chosen: Tensor, real: DataSet) -> list[str]:
    """Is it one file twice, or are samples rows of the data?"""
    if one_source(samples, against):
        return ["SAMPLES AND DATA ARE THE SAME: these values say nothing about a model"]
    known = set(_digests(real.x, real))
    copies = sum(digest in known for digest in _digests(chosen, real))
    if not copies:
        return []
    if copies == len(chosen):
        return [
            "EVERY SAMPLE EQUALS A ROW OF THE DATA: the same rows, or a model that has memorised "
            "them"
        ]
    return [f"{copies:,} of {len(chosen):,} samples equal a row of the data"]


def _digests(x: Tensor, real: DataSet) -> list[bytes]:
    """Of every row as a model sees it."""
    found = []
    for part in x.split(1024):
        block = real.format.encode(part).flatten(1) + 0.0  # -0 is 0
        found += [blake2b(row, digest_size=16).digest() for row in block.cpu().numpy()]
    return found


def _features(
    parts: list[Tensor], features: str | Extractor | None, real: DataSet
) -> tuple[list[Tensor], str]:
    """Of samples, reference and floor, and what they are in words."""
    images = real.format.kind == "images"
    if callable(features):
        found = [extract(features, part) for part in parts]
        if not all(bool(part.isfinite().all()) for part in found):
            raise ValueError("features must be finite, got NaN or inf")
        return found, f"{found[0].shape[1]:,}, of the function given"
    if not images:
        if features is not None:
            raise ValueError(f"features={features!r} is for images, got {real.format.kind}")
        columns = parts[0].flatten(1).shape[1]
        return [part.flatten(1) for part in parts], (
            f"the {columns:,} numbers of a row, scaled by the mean and deviation of the data"
        )
    if features == "efficientnet-lite0":
        network = EfficientNetLite().to(parts[0].device)
        found = [extract(network, part) for part in parts]
        return found, f"{found[0].shape[1]:,}, of EfficientNet-Lite0 trained on ImageNet"
    flat = [part.flatten(1).double() for part in parts]
    mean = flat[1].mean(0)
    # fitted to the reference alone, so that samples and floor are treated alike
    axes = torch.linalg.svd(flat[1] - mean, full_matrices=False).Vh
    axes = axes[: min(COMPONENTS, len(flat[1]) // 4)].T
    words = (
        f"the first {axes.shape[1]} principal components of the pixels of the reference: colour "
        "and rough shape, not content"
    )
    if max(real.format.shape[1:]) > LARGE:
        words += "; for images of this size give features, such as efficientnet-lite0"
    return [(part - mean) @ axes for part in flat], words
