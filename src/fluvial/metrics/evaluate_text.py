"""`evaluate` of texts: likelihood, divergence and variety of their n-grams of characters."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from tqdm import tqdm

from fluvial.data import DataSet, Tokenizer, read_text
from fluvial.data.store import Cache
from fluvial.data.text import read_samples
from fluvial.data.tokenizer import LETTERS, Normalise, normal
from fluvial.metrics.bootstrap import Interval, bootstrap_interval
from fluvial.metrics.evaluation import FEWEST, Evaluation, Measured, cut, one_source, order_of
from fluvial.metrics.text import NGram, distinct, ngram_divergence, unigram_entropy

SHARE = (0.0, 1.0)
"""Values of a share."""
ORDER = 5
"""Of the n-grams that judge a text, where their numbers fit 63 bits."""
JUDGE = 1 << 22
"""Characters of the data that they are counted in, at most."""
SPAN = 3
"""Characters of the n-grams whose frequencies are compared."""

TEXTS: dict[str, str] = {
    "bits": "bits a character, n-grams",
    "divergence": "divergence of n-grams",
    "entropy": "entropy of characters",
    "distinct": "distinct n-grams",
}
"""Of texts: the titles by the names that `evaluate` takes. All are good near the floor but the
divergence: likely texts, or varied ones, are cheap alone."""


def is_text(source: Any, name: str) -> bool:
    """Whether the source ``name``, "samples" or "against", holds text by its type or suffix."""
    if isinstance(source, DataSet):
        return source.format.kind == "text"
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        suffixes = [path.suffix.lower()]
        if path.is_dir() and name == "against":
            suffixes = [one.suffix.lower() for one in path.iterdir() if one.is_file()]
        return bool({".txt", ".jsonl"} & set(suffixes))
    return isinstance(source, (list, tuple)) and all(isinstance(one, str) for one in source)


def evaluate_texts(
    samples: Any,
    against: Any,
    metrics: list[str],
    rows: int | None,
    how: Normalise,
    cache: Cache,
    progress: bool,
    settings: dict[str, Any],
) -> Evaluation:
    """`fluvial.metrics.evaluate` of texts.

    Args:
        samples, against, metrics, rows: as there; ``metrics`` are names in `TEXTS`.
        how: normalisation of both sides.
        cache, progress: as there.
        settings: level, resamples and seed of the intervals.

    Raises:
        TypeError: ``against`` is neither a place nor texts.
        ValueError: too few texts on a side, or one that cannot be read.
        FileNotFoundError: a side is not there.
    """
    texts, before = _drawn_texts(samples, how)
    length = sorted(map(len, texts))[len(texts) // 2] if texts else 0
    whole = [text[:length] for text in texts if len(text) >= length]
    if len(texts) < FEWEST or length < SPAN:
        raise ValueError(
            f"samples must be at least {FEWEST} texts of {SPAN} characters or more, got "
            f"{len(texts)}, of {length} in the median"
        )
    real = _real_texts(against, length, how, cache, progress)
    known = cast(Tokenizer, real.format.tokenizer)
    # characters that only the samples have are classes of their own
    more = sorted(set("".join(whole)) - set(known.alphabet))
    tokenizer = Tokenizer(known.alphabet + "".join(more))
    seed = settings["seed"]
    count = min(len(whole), len(real) // 2, rows or len(whole))
    if count < FEWEST:
        raise ValueError(
            f"against must have {2 * FEWEST} stretches of {length} characters, as samples have, or "
            f"more (half of them are the floor), and samples {FEWEST} texts, got {len(real)} and "
            f"{len(whole)}"
        )
    chosen = order_of(len(whole), seed, "samples")[:count].tolist()
    x = torch.stack([torch.from_numpy(tokenizer.encode(whole[k])) for k in chosen])
    order = order_of(len(real), seed, "against")
    floor, rest = (real.x[part].long() for part in (order[:count], order[count:]))
    reference, judge = rest[:count], rest[: max(count, JUDGE // length)]
    size = tokenizer.size
    longest = min(ORDER, length, int(62.9 / math.log2(max(size, 2))))
    model = NGram(judge, size, longest) if "bits" in metrics else None
    n = min(SPAN, longest)

    def measured(name: str, z: Tensor) -> Interval:
        match name:
            case "bits":
                each = -cast(NGram, model).log_probs(z).mean(1) / math.log(2)
                return bootstrap_interval(_mean, each, method="percentile", **settings)
            case "divergence":
                divergence = partial(ngram_divergence, classes=size, n=n)
                found = bootstrap_interval(divergence, z, reference, method="half", **settings)
                return cut(found, SHARE)
            case "entropy":
                entropy = partial(unigram_entropy, classes=size)
                found = bootstrap_interval(entropy, z, method="half", **settings)
                return cut(found, (0.0, math.inf))
        found = bootstrap_interval(partial(distinct, n=n), z, method="half", **settings)
        return cut(found, SHARE)

    found = [
        Measured(
            name,
            TEXTS[name],
            "lower" if name == "divergence" else "near the floor",
            measured(name, x),
            measured(name, floor),
        )
        for name in tqdm(metrics, desc="metrics", disable=not progress)
    ]
    notes = [
        f"{count:,} of {len(texts):,} samples and 2 x {count:,} of {len(real):,} stretches of "
        f"{real.name} used"
    ]
    notes += _same_texts(samples, against, [whole[k] for k in chosen], real, tokenizer)
    if short := len(texts) - len(whole):
        notes.append(f"{short:,} samples of fewer than {length} characters are left out")
    if more:
        noun = "character" + "s" * (len(more) != 1)
        notes.append(f"{len(more)} {noun} of the samples not in the data: {more[:10]}")
    if how == "none" and set(before) <= set(LETTERS) and set(known.alphabet) - set(LETTERS):
        notes.append(
            "the samples have 27 symbols and the data more: normalise='letters' is missing"
        )
    words = (
        f"{length} characters a row; bits under {longest}-grams of {judge.numel():,} other "
        f"characters of the data, divergence and variety of {n}-grams"
    )
    return Evaluation("text", count, words, settings["level"], tuple(found), tuple(notes))


def _drawn_texts(samples: Any, how: Normalise) -> tuple[list[str], str]:
    """The texts, normal, and the characters that they have before."""
    if isinstance(samples, DataSet):
        texts = samples.format.text(samples.format.encode(samples.x))
    elif isinstance(samples, (list, tuple)):
        texts = list(samples)
    else:
        try:
            texts = read_samples(samples)
        except (ValueError, FileNotFoundError) as error:
            raise type(error)(f"samples: {error}") from error
    return [normal(text, how) for text in texts], "".join(sorted(set("".join(texts))))


def _real_texts(against: Any, length: int, how: Normalise, cache: Cache, progress: bool) -> DataSet:
    if isinstance(against, DataSet):
        if against.format.kind != "text":
            raise ValueError(f"against are {against.format.kind} and samples are texts")
        against = ["".join(against.format.text(against.format.encode(against.x)))]
    if not isinstance(against, (str, os.PathLike, list, tuple)):
        raise TypeError(
            f"against must be the place of a text or a list of texts, as samples are texts, got "
            f"{type(against).__name__}"
        )
    try:
        return read_text(against, length=length, normalise=how, cache=cache, progress=progress)
    except (ValueError, FileNotFoundError) as error:
        raise type(error)(f"against: {error}") from error


def _same_texts(
    samples: Any, against: Any, texts: Sequence[str], real: DataSet, tokenizer: Tokenizer
) -> list[str]:
    """Is it one file twice, or do samples stand in the data?"""
    if one_source(samples, against):
        return ["SAMPLES AND DATA ARE THE SAME: these values say nothing about a model"]
    looked = real.x[: JUDGE // real.x.shape[1]].flatten()
    data = tokenizer.decode(looked)
    copies = sum(text in data for text in texts)
    return [f"{copies:,} of {len(texts):,} samples stand in the data as they are"] if copies else []


def _mean(x: Tensor) -> float:
    return float(x.mean())
