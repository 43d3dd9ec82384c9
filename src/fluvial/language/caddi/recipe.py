"""How `fluvial train caddi-discrete-diffusion` makes a model of any text: hyper-parameters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from fluvial.core.categorical.bounds import Bound
from fluvial.core.noise import KeyedNoise
from fluvial.data.dataset import HELD_OUT, DataSet
from fluvial.data.format import Format
from fluvial.data.text import read_text
from fluvial.data.tokenizer import Normalise, Tokenizer
from fluvial.data.write import text_picture, write_texts
from fluvial.language.caddi.model import SYSTEM, CaDDi
from fluvial.networks import CausalTransformer
from fluvial.training.files import atomic
from fluvial.training.loop import Training
from fluvial.training.processes import is_main, sample_across
from fluvial.training.recipe import absolute, training_of

WIDTH, DEPTH, HEADS = 96, 3, 4
"""Of the network, if it is not pretrained."""
RATE = 0.288
"""Learning rate times width: 0.003 at width 96."""
PRETRAINED_RATE = 1e-4
"""Learning rate of a pretrained model."""
MEASURED = 256
"""Held-out windows that the bound is measured on at the end, at most."""
WATCHED = 32
"""Held-out windows that it is measured on at every preview."""
SHOWN = 12
"""Texts of a preview."""
PREVIEW = KeyedNoise(1)
"""Of what is shown and measured."""


@dataclass(frozen=True)
class Recipe:
    """A CaDDi of a user's text, with a `CausalTransformer` or a pretrained causal language model.

    Args:
        length: tokens of a window, which is what the model generates.
        tokenizer: characters (those of the text), bpe (byte-pair encoding learned from it), a
            tokenizer.json, a folder, a .gguf file, or OWNER/NAME of Hugging Face; by default
            characters, or the tokenizer of the pretrained model.
        vocabulary: tokens of bpe; by default 1,024.
        normalise: what is done to the text first: none, lower (lower case), or letters (the 27
            symbols of Text8: digits spelled out, all other characters but a to z become a space).
        encoding: of the files, as Python names it.
        column: of the texts, in .jsonl, .csv and .parquet files.
        held_out: another file or folder, which is held out in place of a share of the text.
        validation: share of the windows that is held out, at most 1,000, in up to 8 stretches of
            the text. The bound on them is measured while training, and chooses among the averages
            of the weights. 0 for none.
        pretrained: a causal language model to start from: a folder, a .gguf file, or OWNER/NAME of
            Hugging Face. Width, depth, heads and tokenizer are then its own.
        width: of the network; by default 96. Four times the heads divide it.
        depth: blocks of the network; by default 3.
        heads: attention heads; by default 4.
        variant: block writes all tokens of a noise level at once; ar writes them one after another,
            from the left, with drafts that are checked at once. By default block, and ar for a
            pretrained model.
        levels: noise levels, and so the steps of a sample; 1 with ar is a plain language model.
        context: noise levels that the network sees at a time, 0 for all. Time and memory of a step
            grow with the square of context times length.
        kept: which ones: last (those before the one that is predicted) or spread (that one, and
            others evenly up to the first).
        source: absorbing (noise hides a token) or uniform (it puts another one in its place).
        weighting: bound (the variational bound) or simple (all levels alike, of smaller variance).
        uniform_mix: share of tokens that are false where a level shows them, so that the network
            learns to mistrust what it wrote.
        augmented: with block, a copy of the last level and the plain causal mask, so that the
            function of a pretrained model is kept.
        steps: optimiser steps.
        batch_size: windows a step, over all processes and parts.
        accumulation: parts a batch is computed in, one after another, to save memory.
        lr: peak learning rate of AdamW; by default 0.003 at width 96, in inverse proportion to the
            width, and 0.0001 for a pretrained model.
        betas: of AdamW.
        weight_decay: of AdamW.
        warmup: steps over which the learning rate rises from 0.
        schedule: how it falls over the last steps: constant (not at all; such a training can be
            made longer), linear or cosine.
        decay: share of the steps over which it falls.
        clip: largest norm of the gradient.
        precision: of the network's arithmetic: no (float32), bf16, or fp16 on a GPU.
        ema: decays of the averages of the weights; the best on the held-out windows is the model.
        checkpoint_every: steps between checkpoints, from which a run goes on.
        keep: checkpoints kept, the latest ones.
        validate_every: steps between measurements on held-out windows; by default a tenth of the
            steps, at least 100.
        sample_every: steps between previews in RUN/samples; by default a fifth of the steps, at
            least 100.
        seed: of the initial weights, the held-out stretches, the order of the windows and the
            noise.

    Raises:
        ValueError: a value is out of its range.
    """

    length: int = 64
    tokenizer: str | None = None
    vocabulary: int | None = None
    normalise: Literal["none", "lower", "letters"] = "none"
    encoding: str = "utf-8"
    column: str = "text"
    held_out: str | None = None
    validation: float = 0.05
    pretrained: str | None = None
    width: int | None = None
    depth: int | None = None
    heads: int | None = None
    variant: Literal["block", "ar"] | None = None
    levels: int = 8
    context: int = 4
    kept: Literal["last", "spread"] = "last"
    source: Literal["absorbing", "uniform"] = "absorbing"
    weighting: Literal["bound", "simple"] = "bound"
    uniform_mix: float = 0.0
    augmented: bool = False
    steps: int = 1_500
    batch_size: int = 16
    accumulation: int = 1
    lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    warmup: int = 100
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    decay: float = 1.0
    clip: float | None = 1.0
    precision: Literal["no", "bf16", "fp16"] = "no"
    ema: tuple[float, ...] = (0.99, 0.999)
    checkpoint_every: int = 250
    keep: int = 1
    validate_every: int | None = None
    sample_every: int | None = None
    seed: int = 0

    GROUPS: ClassVar[Mapping[str, str]] = {
        "reading": "length",
        "network": "pretrained",
        "method": "variant",
        "training": "steps",
    }
    """The first field of each group of hyper-parameters."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation must be a share in [0, 1), got {self.validation}")
        for name in ("length", "levels", "width", "depth", "heads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.context < 0:
            raise ValueError(f"context must be at least 1, or 0 for all, got {self.context}")
        for name in ("width", "depth", "heads"):
            if self.pretrained is not None and getattr(self, name) is not None:
                raise ValueError(f"{name} is that of the pretrained model; leave it out")
        if self.vocabulary is not None and self.tokenizer != "bpe":
            raise ValueError(f"vocabulary is that of tokenizer='bpe', got {self.vocabulary}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        _ = self.training  # whose own checks speak

    @property
    def training(self) -> Training:
        """How the loop trains."""
        rate = RATE / (self.width or WIDTH) if self.pretrained is None else PRETRAINED_RATE
        return training_of(self, lr=rate if self.lr is None else self.lr)

    def prepare(self, source: str | os.PathLike[str], *, progress: bool = True) -> Job:
        """Read the text and build the model: what is wrong with either is found here.

        Args:
            source: a file or folder of text; see `fluvial.data.read_text`.
            progress: show progress bars.

        Raises:
            As `fluvial.data.read_text`, `fluvial.data.DataSet.hold_out`, `CaDDi` and, for a
            pretrained model, `fluvial.adapters.transformers.from_pretrained_causal`.
        """
        tokenizer: str | Tokenizer = self.tokenizer or "characters"
        if self.tokenizer is None and self.pretrained is not None:
            tokenizer = _tokenizer_of(self.pretrained, self.normalise)
        if tokenizer == "characters" and self.held_out is not None:
            # those of the text that is held out are in the alphabet too
            known = [self._read(source, tokenizer, progress), self._read_held(tokenizer, progress)]
            both = (cast(Tokenizer, one.format.tokenizer).alphabet for one in known)
            tokenizer = Tokenizer("".join(sorted(set("".join(both)))), normalise=self.normalise)
        data = self._read(source, tokenizer, progress)
        if self.held_out is None:
            train, held = data.hold_out(self.validation, seed=self.seed)
        else:
            train = data
            held = self._read_held(cast(Tokenizer, data.format.tokenizer), progress)
            if len(held) > HELD_OUT:
                held = replace(held, x=held.x[torch.linspace(0, len(held) - 1, HELD_OUT).long()])
        training = self.training
        new = self.pretrained is None
        recipe = replace(
            self,
            tokenizer=absolute(self.tokenizer),
            pretrained=absolute(self.pretrained),
            held_out=absolute(self.held_out),
            width=(self.width or WIDTH) if new else None,
            depth=(self.depth or DEPTH) if new else None,
            heads=(self.heads or HEADS) if new else None,
            variant=self.variant or ("block" if new else "ar"),
            lr=training.lr,
            validate_every=training.validate_every,
            sample_every=training.sample_every,
        )
        return Job(recipe, recipe._model(data.format), data, train, held)

    def _read(
        self, source: str | os.PathLike[str], tokenizer: str | Tokenizer, progress: bool
    ) -> DataSet:
        return read_text(
            source,
            tokenizer=tokenizer,
            vocabulary=self.vocabulary if tokenizer == "bpe" else None,
            length=self.length,
            normalise=self.normalise,
            encoding=self.encoding,
            column=self.column,
            progress=progress,
        )

    def _read_held(self, tokenizer: str | Tokenizer, progress: bool) -> DataSet:
        try:
            return self._read(cast(str, self.held_out), tokenizer, progress)
        except (ValueError, FileNotFoundError) as error:
            raise type(error)(f"held_out: {error}") from error

    def _model(self, format: Format) -> CaDDi:
        seen = self.context if 0 < self.context < self.levels else None
        network: nn.Module
        if self.pretrained is not None:
            network = _pretrained(self.pretrained)
            classes = int(cast(Any, network).vocabulary) - 1
        else:
            classes = cast(Tokenizer, format.tokenizer).size
            network = CausalTransformer(
                vocabulary=classes + 1,
                width=cast(int, self.width),
                depth=cast(int, self.depth),
                heads=cast(int, self.heads),
                levels="split",
                time=seen is not None,  # the rotary encoding tells differences of levels alone
                seed=self.seed,
            )
        return CaDDi(
            network,
            classes=classes,
            length=self.length,
            steps=self.levels,
            variant=cast(Literal["block", "ar"], self.variant),
            source=self.source,
            keep=seen,
            kept=self.kept,
            weighting=self.weighting,
            uniform_mix=self.uniform_mix,
            augmented=self.augmented,
            format=format,
        )


@dataclass
class Job:
    """A CaDDi and the text it is trained on; see `fluvial.training.run.Job`.

    Args:
        recipe: with a value for every hyper-parameter that was left to the data.
        model: untrained.
        data: all of the text.
        train, held: its parts; None where nothing is held out.
    """

    recipe: Recipe
    model: CaDDi
    data: DataSet
    train: DataSet
    held: DataSet | None
    system: str = SYSTEM

    @property
    def about(self) -> dict[str, Any]:
        held = {} if self.held is None else {"validation": len(self.held)}
        return self.train.about(train=len(self.train), **held)

    @property
    def rows(self) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
        return {"x": self.train.x}, None if self.held is None else {"x": self.held.x}

    def fit(self, out: Path, *, progress: bool, trackers: Sequence[str] = ()) -> None:
        self.model.fit(
            self.train.x,
            validation=None if self.held is None else (self.held.x, None),
            out=out,
            progress=progress,
            trackers=trackers,
            preview=self.preview,
            **asdict(self.recipe.training),
        )
        tokenizer = cast(Tokenizer, self.data.format.tokenizer)
        if tokenizer.model and is_main():
            with atomic(out / "tokenizer.json") as temporary:
                temporary.write_text(tokenizer.model, encoding="utf-8")

    def preview(self, path: Path) -> None:
        """Texts drawn into ``path`` with the suffix .txt, under the bound on held-out text, and as
        a picture, .png; by the main process."""
        texts = self.data.format.text(self._sample(SHOWN))
        title = ""
        if self.held is not None:
            bound = self._bound(self.held.x[_spread(len(self.held), WATCHED)])
            title = (
                f"{bound}, at most {self._per_character(bound):.4f} bits a character; held-out text"
            )
        if is_main():
            write_texts(path.with_suffix(".txt"), texts, title)
            text_picture(path.with_suffix(".png"), texts)

    def measure(self) -> list[dict[str, Any]]:
        """The bound on held-out text, in bits a token and a character, under its name."""
        if self.held is None:
            return []
        held = self.held.x[_spread(len(self.held), MEASURED)]
        bound = self._bound(held)
        what = f"upper bound: {bound.name}; {len(held)} held-out windows of {held.shape[1]} tokens"
        values = {
            "bits per token": bound.bits_per_token,
            "bits per character": self._per_character(bound),
        }
        return [
            {"name": name, "value": value, "floor": None, "what": what}
            for name, value in values.items()
        ]

    def _bound(self, x: Tensor) -> Bound:
        return self.model.bound(x, PREVIEW)

    def _per_character(self, bound: Bound) -> float:
        held = self.data if self.held is None else self.held
        return bound.bits_per_token / held.format.characters_per_token

    def _sample(self, num: int) -> Tensor:
        """Samples on the CPU, every process drawing its share."""

        def draw(rows: Tensor) -> Tensor:
            return cast(Tensor, self.model.sample(len(rows), noise=PREVIEW.rows(rows)))

        return sample_across(draw, num).cpu()


def _tokenizer_of(place: str, how: Normalise) -> Tokenizer:
    """That of a pretrained model."""
    try:
        return Tokenizer.load(place, normalise=how)
    except (ValueError, FileNotFoundError) as error:
        reason, *_ = str(error).removeprefix("tokenizer: ").split("; it is characters")
        reason = reason.replace("none can be", "no tokenizer can be", 1)
        raise type(error)(f"pretrained: {reason}") from error


def _pretrained(place: str) -> nn.Module:
    """A causal language model from a folder, a .gguf file or the hub."""
    from fluvial.adapters.transformers import from_pretrained_causal

    gguf = place if place.lower().endswith(".gguf") else None
    try:
        return from_pretrained_causal(None if gguf else place, gguf_file=gguf)
    except OSError as error:  # what transformers raises for a name that it does not find
        reason = " ".join(str(error).split())
        raise FileNotFoundError(f"pretrained: {place} cannot be loaded: {reason}") from error


def _spread(rows: int, most: int) -> Tensor:
    """Row numbers, at most so many, spread evenly."""
    return torch.linspace(0, rows - 1, min(rows, most)).round().long()
