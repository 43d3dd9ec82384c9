"""The class `CaDDi`: training, bounds, samples and files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, cast, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from tqdm import tqdm

from fluvial.adapters.transformers import CausalLanguageModel
from fluvial.core.arguments import kind_of, whole_number
from fluvial.core.categorical.bounds import Bound
from fluvial.core.categorical.draws import check_tokens
from fluvial.core.categorical.losses import negative_log
from fluvial.core.protocols import Noise, Objective
from fluvial.data.format import Format
from fluvial.language.caddi.context import Calls, Kept, kept_levels, places
from fluvial.language.caddi.levels import IndependentLevels, Source
from fluvial.language.caddi.sampling import Choice, Disturb, Known, Rule, Trace, generate
from fluvial.networks import describe, rebuild
from fluvial.training.files import load_model, put_weights, save_model
from fluvial.training.loop import Stage, Training, train
from fluvial.training.processes import is_main
from fluvial.training.sharding import whole_state
from fluvial.training.use import IntendedUse, derive, read_use

SYSTEM = "caddi-discrete-diffusion"
BLOCK = 1 << 24
"""Tokens looked at together when a whole data set is checked."""
TOKENS = 512
"""Tokens of the levels that go through the network at once, at least, where levels are cut off."""


class CaDDi(Objective):
    """Discrete diffusion whose every step sees the whole noisy trajectory; CaDDi and CaDDi-AR.

    Levels x_1, ..., x_T are corruptions of x_0 independent of each other (`IndependentLevels`). A
    causal transformer reads them noisiest first and predicts mu(x_{k:T}, k), the clean tokens. As

        p(x_{k-1} | x_{k:T}) = q(x_{k-1} | x_0 ~ mu(x_{k:T}, k)),

    a sample guesses clean tokens, noises the guess to the next level, appends it and goes on; at
    k = 1 the guess is the sample. Every level is built afresh, so that a token can be revised.

    The bound on -ln p(x_0) is the sum over k = 1 .. T of

        E_q KL(q(x_{k-1} | x_0) || p(x_{k-1} | x_{k:T})),

    of absorbing noise alpha_{k-1} sum_i -ln mu^i(x_0^i), of visible tokens too; see
    `IndependentLevels.terms`.

    ``variant="block"`` predicts the tokens of a guess independently of each other. A token sees
    those of its own and of earlier levels, and one pass gives the losses of all levels. With
    ``augmented`` the network stays causal from token to token, as pretrained models are: a copy of
    x_k follows x_k, and the clean token i is read where the copy shows i - 1 (the first at the end
    of x_k), which sees all of x_k; one level a row is drawn for training.

    ``variant="ar"`` writes the guess from left to right after the prompt x_T, ..., x_k:
    prod_i p(x~_0^i | x~_0^{<i}, x_{k:T}). It is trained by the cross-entropy of x_0 after the
    prompt of a level k drawn for each row, times T alpha_{k-1}. With T = 1 the prompt is a constant
    and is left out: one symbol, ``start``, begins the row, and the model is an autoregressive one.

    The tokens of a block guess are independent, so the sum above is a bound. Those of "ar" are not,
    and with T > 1 alpha_{k-1} -ln p(x_0 | x_{k:T}) is too little: of two equal fair bits at T = 2
    it makes 0.75 bit of 1. `bound` therefore weighs token i with 1 - (1 - alpha_{k-1})^(L - i + 1),
    the chance that it or a later one is visible: a bound, as p(visible tokens) is at least p(all
    tokens up to the last visible one), and a loose one.

    With ``keep`` = c a step sees at most c levels: the nearest ("last", latent truncation), or k, T
    and some between ("spread", re-composition), in training and sampling alike, so that the bound
    is one of that model. Of blocks those are the levels that attention reaches directly; what they
    have seen themselves is passed on.

    Args:
        network: called as ``network(x, t, levels=, positions=, allowed=, cache=, last=, label=)``,
            as `fluvial.networks.CausalTransformer` is, of which ``levels="split"`` is the paper's
            two-dimensional rotary encoding (``levels="additive"`` to go on from pretrained
            weights); or what `fluvial.adapters.transformers.from_pretrained_causal` returns. Its
            input has V + 1 symbols. Logits beyond V are not used: the mask symbol is no output.
            Rotary levels tell it differences; with ``time=True`` it knows k / T too.
        classes: V.
        length: L, tokens of a row.
        steps: T. Published: 64 for Text8.
        variant: "block" (CaDDi) or "ar" (CaDDi-AR).
        source: "absorbing", or "uniform".
        alphas: (T + 1,) of `IndependentLevels`; by default the derived schedule.
        keep, kept: see above; None keeps all levels.
        weighting: "bound", or "simple": the cross-entropy with all levels alike, of less variance.
        uniform_mix: share of the visible tokens that training replaces by uniform ones, of
            absorbing noise. Sampling meets wrong visible tokens, and training without this does
            not. Not in `bound`.
        augmented: see above; of blocks.
        drop: chance that a row's label is replaced by none, for guidance.
        start: the symbol before the first token where T = 1 and "ar"; by default the network's own,
            as pretrained models have one, or V.
        format: how the user's text becomes tokens and back; saved with the model.

    Raises:
        TypeError: a class in the place of a network, a number that is not whole, a ``format`` that
            is none.
        ValueError: an argument out of range, or two that do not go together; a network with too few
            symbols; a format of another length, or of more tokens.

    Citation: Zhang, He et al., "Non-Markovian Discrete Diffusion with Causal Language Models",
    NeurIPS 2025, arXiv 2502.09767. Derived here, as the text of the paper was not at hand: the
    default schedule, "spread", the additive encoding, the match rule, the bound of "ar".
    """

    criterion = "nats_per_token"
    intended: tuple[str, ...] = (
        "generating and filling in token sequences that resemble the training data",
    )
    out_of_scope: tuple[dict[str, str], ...] = ()

    def __init__(
        self,
        network: nn.Module,
        *,
        classes: int,
        length: int,
        steps: int,
        variant: Literal["block", "ar"] = "block",
        source: Source = "absorbing",
        alphas: Any = None,
        keep: int | None = None,
        kept: Kept = "last",
        weighting: Literal["bound", "simple"] = "bound",
        uniform_mix: float = 0.0,
        augmented: bool = False,
        drop: float = 0.0,
        start: int | None = None,
        format: Format | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(network, nn.Module):
            raise TypeError(f"network must be a module, got {kind_of(network)}")
        length, steps = whole_number("length", length), whole_number("steps", steps)
        keep = None if keep is None else whole_number("keep", keep)
        for name, value, choices in (
            ("variant", variant, ("block", "ar")),
            ("kept", kept, ("last", "spread")),
            ("weighting", weighting, ("bound", "simple")),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        if length < 1 or (keep is not None and keep < 1):
            raise ValueError(f"need length >= 1 and keep >= 1, got {length} and {keep}")
        if not 0 <= uniform_mix < 1 or (uniform_mix and source != "absorbing"):
            raise ValueError(
                f"uniform_mix must lie in [0, 1), and be 0 unless source is 'absorbing', got "
                f"{uniform_mix} with {source!r}"
            )
        if augmented and variant != "block":
            raise ValueError("augmented goes with variant='block', got 'ar'")
        if not 0 <= drop < 1 or (drop and not getattr(network, "num_classes", 0)):
            raise ValueError(
                f"drop must lie in [0, 1), and a network with num_classes is needed for it, got "
                f"{drop} and num_classes={getattr(network, 'num_classes', 0)}"
            )
        if format is not None and not isinstance(format, Format):
            raise TypeError(f"format must be a Format, as data.format, got {kind_of(format)}")
        if format is not None and tuple(format.shape) != (length,):
            raise ValueError(
                f"format is of rows of shape {tuple(format.shape)}, the model of ({length},)"
            )
        pretrained = isinstance(network, CausalLanguageModel)  # whose tokenizer may hold more
        made = None if format is None or pretrained else format.tokenizer
        if made is not None and made.size > classes:
            raise ValueError(
                f"classes must be at least {made.size}, the tokens of format, got {classes}"
            )
        self.levels = IndependentLevels(classes, steps=steps, source=source, alphas=alphas)
        self.network: Any = network  # nn.Module says too little of its attributes
        self.classes, self.length, self.steps = classes, length, steps
        self.variant, self.keep, self.kept = variant, keep, kept
        self.weighting, self.uniform_mix = weighting, uniform_mix
        self.augmented, self.drop = augmented, drop
        self.plain = variant == "ar" and steps == 1
        own = getattr(network, "start", None)
        self.start = (classes if own is None else own) if start is None else start
        if not 0 <= self.start <= classes:
            raise ValueError(f"start must lie in 0 .. {classes}, got {self.start}")
        wanted = max(self.levels.states, self.start + 1 if self.plain else 0)
        vocabulary = getattr(network, "vocabulary", wanted)
        if vocabulary < wanted:
            raise ValueError(
                f"network must take {wanted} symbols, those of the data and the "
                f"{'start' if self.plain else 'mask'} symbol, got vocabulary={vocabulary}"
            )
        self.format = format
        self.use: IntendedUse | None = IntendedUse(intended=self.intended)
        self._contexts = [(), *(kept_levels(k, steps, keep, kept) for k in range(1, steps + 1))]
        most = max(map(len, self._contexts))
        # row k: the levels that level k sees, after as many zeros as it sees fewer than others
        self._table = torch.tensor([[0] * (most - len(c)) + [*c] for c in self._contexts])

    @property
    def shape(self) -> tuple[int]:
        """Of one row: (length,)."""
        return (self.length,)

    @property
    def rowwise(self) -> bool:
        """Whether one level a row is trained at a time: "ar" and augmented."""
        return self.variant == "ar" or self.augmented

    def context(self, k: int) -> tuple[int, ...]:
        """The levels that level k sees, the noisiest first and k last."""
        return self._contexts[k]

    # Training

    def forward(self, batch: Mapping[str, Tensor], noise: Noise) -> dict[str, Tensor]:
        """The loss of one batch, of ``"x"`` (batch, L) int64 and, if wanted, ``"label"`` (batch,).

        Returns:
            ``loss``, (); ``nats_per_token`` (batch,), the terms of the bound (of "ar" with T > 1,
            T alpha_{k-1} times the cross-entropy, which is none); where a level is drawn a row,
            ``t`` (batch,) = k / T; of text ``bits_per_character``, by its mean of characters a
            token.

        Raises:
            TypeError, ValueError: no tokens of the data, a label missing or out of range.
        """
        if "x" not in batch:
            raise ValueError(f"batch must hold 'x', got {', '.join(batch) or 'nothing'}")
        x0, label = _wide(batch["x"]), batch.get("label")
        self._check(x0)
        label = self._dropped(label, x0, noise)
        terms = self._loss_of_rows if self.rowwise else self._loss_of_levels
        result = terms(x0, label, noise)
        if self.format is not None and self.format.kind == "text":
            nats = math.log(2) * self.format.characters_per_token
            result["bits_per_character"] = result["nats_per_token"] / nats
        return result

    def _loss_of_levels(self, x0: Tensor, label: Tensor | None, noise: Noise) -> dict[str, Tensor]:
        x = self._mixed(self.levels.sample(x0, noise), noise)
        log_p = self._all_levels(x, label)
        k = torch.arange(1, self.steps + 1)[:, None]
        data = x0[:, None].expand(x.shape)
        terms = self.levels.terms(log_p, data, k).sum(1)
        loss = terms
        if self.weighting == "simple":
            loss = negative_log(log_p, data).mean(1)
        return {"loss": loss.mean(), "nats_per_token": terms.detach().mean(1)}

    def _loss_of_rows(self, x0: Tensor, label: Tensor | None, noise: Noise) -> dict[str, Tensor]:
        steps = self.steps
        # levels are drawn on the host, where they decide shapes
        u = noise.uniform(torch.empty(len(x0), dtype=torch.float64), "level")
        k = (u * steps).long().clamp(max=steps - 1) + 1
        seen = self._table[k]
        x = self._mixed(self.levels.sample(x0, noise, seen.clamp(min=1)), noise)
        used = seen.amax(0) > 0
        seen, x = seen[:, used], x[:, used.to(x.device)] if not bool(used.all()) else x
        log_p = self._rows(x, seen, x0 if self.variant == "ar" else x[:, -1], k, label)
        if self.variant == "ar":
            alpha = self.levels.alphas[k - 1].to(x0.device, log_p.dtype, non_blocking=True)
            terms = alpha[:, None] * negative_log(log_p, x0) * steps
        else:
            terms = self.levels.terms(log_p, x0, k[:, None]) * steps
        loss = negative_log(log_p, x0) if self.weighting == "simple" else terms
        t = k.to(x0.device, non_blocking=True) / steps
        return {"loss": loss.mean(), "nats_per_token": terms.detach().mean(1), "t": t}

    def _mixed(self, x: Tensor, noise: Noise) -> Tensor:
        return self.levels.mixed(x, self.uniform_mix, noise) if self.uniform_mix else x

    def _all_levels(self, x: Tensor, label: Tensor | None) -> Tensor:
        """(batch, T, L, V) log-probabilities at all levels of ``x`` (batch, T, L), by blocks.

        In one pass; where levels are cut off, in as few as keep attention linear in T.
        """
        size = self.steps
        if self.keep is not None:
            size = max(self.keep, -(-TOKENS // self.length))
        calls = Calls(self, label, keep=size < self.steps)
        falling = range(self.steps, 0, -1)
        parts = []
        for first in range(0, self.steps, size):
            new = falling[first : first + size]
            part = x[:, new[-1] - 1 : new[0]].flip(1)
            parts.append(calls.blocks(part, new))
        return torch.cat(parts, 1).flip(1)

    def _rows(
        self, x: Tensor, seen: Tensor, tail: Tensor, k: Tensor, label: Tensor | None
    ) -> Tensor:
        """(batch, L, V) log-probabilities of the clean tokens, where each row has its level k.

        Args:
            x: (batch, c, L), the levels ``seen``.
            seen: (batch, c) levels on the host, 0 for none.
            tail: (batch, L) tokens after them.
        """
        calls = Calls(self, label, keep=False)
        if self.plain:
            return calls.tail(x, 1, tail[:, :-1], at=0)
        batch, length, device = len(x), self.length, x.device
        rest = tail[:, :-1]
        tokens = torch.cat([x.flatten(1), rest], 1)
        _, positions = places(range(seen.shape[1]), length, device, tail=(0, length - 1))
        at = k if self.augmented else torch.zeros_like(k)
        levels = torch.cat(
            [seen.repeat_interleave(length, 1), at[:, None].expand(-1, length - 1)], 1
        )
        allowed = None
        if not bool((seen > 0).all()):
            real = torch.ones(batch, tokens.shape[1], dtype=torch.bool)
            real[:, : seen.shape[1] * length] = (seen > 0).repeat_interleave(length, 1)
            real = real.to(device, non_blocking=True)
            column = torch.arange(tokens.shape[1], device=device)
            # padding looks at itself, lest it be an average over nothing
            itself = column == column[:, None]
            allowed = (column <= column[:, None]) & real[:, None] | itself
        levels = levels.to(device, non_blocking=True)
        return calls(tokens, levels, positions, allowed=allowed, last=length)

    def _dropped(self, label: Tensor | None, x0: Tensor, noise: Noise) -> Tensor | None:
        if label is None:
            if self.drop:
                raise ValueError("batch lacks 'label', and drop needs one for every row")
            return None
        if not self.drop:
            return label
        like = torch.empty(len(x0), dtype=torch.float32, device=x0.device)
        none = noise.uniform(like, "drop") < self.drop
        return label.masked_fill(none.to(label.device), self.network.num_classes)

    def _check(self, x0: Tensor) -> None:
        self.levels.check(x0)
        if x0.shape[1] != self.length or not len(x0):
            raise ValueError(
                f"x0 must have shape (batch, {self.length}) with a row at least, got "
                f"{tuple(x0.shape)}"
            )

    def _check_label(self, label: Any, rows: int) -> Tensor:
        classes = getattr(self.network, "num_classes", 0)
        if not classes:
            raise ValueError("label given, and the network has num_classes=0")
        if not isinstance(label, Tensor) or label.dtype not in (torch.int64, torch.int32):
            got = label.dtype if isinstance(label, Tensor) else type(label).__name__
            raise TypeError(f"label must be an integer tensor (int64 or int32), got {got}")
        if tuple(label.shape) != (rows,):
            raise ValueError(f"label must have shape ({rows},), got {tuple(label.shape)}")
        if rows and not 0 <= int(label.min()) <= int(label.max()) < classes:
            raise ValueError(
                f"label must lie in 0 .. {classes - 1}, got {int(label.min())} .. "
                f"{int(label.max())}"
            )
        return label

    def fit(
        self,
        x: Tensor,
        label: Tensor | None = None,
        *,
        steps: int,
        validation: tuple[Tensor, Tensor | None] | None = None,
        out: str | Path | None = None,
        resume: bool = True,
        progress: bool = True,
        trackers: Sequence[str] = (),
        preview: Callable[[Path], None] | None = None,
        **training: Any,
    ) -> Self:
        """Train on data, then hold the averaged weights.

        Args:
            x: (rows, L) tokens, int64, or of a smaller type as `fluvial.data.read_text` gives
                them; may be memory-mapped.
            label: (rows,) classes.
            steps: optimiser steps.
            validation: (x, label) that are not trained on.
            out: folder for checkpoints, metrics and weights; see `fluvial.training.loop.train`.
            resume: go on from the latest checkpoint in ``out``, if there is one.
            progress: show a progress bar.
            trackers: see `fluvial.training.loop.train`.
            preview: see `fluvial.training.loop.Stage`.
            **training: other fields of `fluvial.training.loop.Training`.

        Raises:
            As `forward`, for all rows at once and before any step; and as
            `fluvial.training.loop.train`.
        """
        data = self._data(x, label)
        if validation is not None and not (isinstance(validation, tuple) and len(validation) == 2):
            raise TypeError(f"validation must be (x, label or None), got {kind_of(validation)}")
        held = None if validation is None else self._data(*validation)
        config = {"network": _describe(self.network), **self._options()}
        if self.format is not None:
            config["format"] = self.format.summary()
        train(
            Stage(self, data, Training(steps=steps, **training), held, preview),
            out=None if out is None else Path(out),
            resume=resume,
            progress=progress,
            config=config,
            trackers=trackers,
        )
        if self.use is not None and self.use.system is not None:
            # the statement of the model in a file that this one was made of
            self.use = derive([self.use], intended=self.intended)
        return self.eval()

    def _data(self, x: Tensor, label: Tensor | None) -> dict[str, Tensor]:
        if not isinstance(x, Tensor):
            raise TypeError(f"x0 must be int64 tokens, as the x of a DataSet, got {kind_of(x)}")
        self._check(_wide(x[:1]))
        size = max(1, BLOCK // self.length)
        for start in range(0, len(x), size):  # tokens may be more than the memory holds
            self._check(_wide(x[start : start + size]))
        if label is None:
            if self.drop:
                raise ValueError("label is missing, and drop needs one for every row")
            return {"x": x}
        return {"x": x, "label": self._check_label(label, len(x))}

    # Predictions and bounds

    @torch.no_grad()
    def predict(
        self,
        levels: Int[Tensor, "batch steps length"],
        k: int,
        *,
        tokens: Int[Tensor, "batch length"] | None = None,
        label: Int[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch length classes"]:
        """ln mu(x_{k:T}, k), log-probabilities of the clean tokens.

        Args:
            levels: (batch, T, L), level s at index s - 1; those below k are not looked at.
            k: 1 .. T.
            tokens: (batch, L), of "ar": the guess, of which each prediction sees what comes before
                its own token.
            label: (batch,).

        Raises:
            ValueError: another shape, k out of range, ``tokens`` missing or not wanted.
        """
        self._check_levels(levels)
        if not 1 <= k <= self.steps:
            raise ValueError(f"k must lie in 1 .. {self.steps}, got {k}")
        if (tokens is None) == (self.variant == "ar"):
            raise ValueError("tokens are wanted of variant='ar', and of no other")
        if self.rowwise:
            tail = levels[:, k - 1] if tokens is None else tokens
            return Calls(self, label, keep=False).tail(
                levels, k, tail[:, :-1], at=k if self.augmented else 0
            )
        calls = Calls(self, label, keep=False)
        falling = range(self.steps, k - 1, -1)
        return calls.blocks(levels[:, k - 1 :].flip(1), falling)[:, -1]

    def _every(
        self, x0: Tensor, levels: Tensor, label: Tensor | None
    ) -> Float[Tensor, "batch steps length classes"]:
        """Log-probabilities of the clean tokens at all levels."""
        if not self.rowwise:
            return self._all_levels(levels, label)
        calls, parts = Calls(self, label), []
        for k in range(self.steps, 0, -1):
            tail = levels[:, k - 1] if self.augmented else x0
            parts.append(calls.tail(levels, k, tail[:, :-1], at=k if self.augmented else 0))
        return torch.stack(parts, 1).flip(1)

    @torch.no_grad()
    def cross_entropies(
        self, x0: Tensor, levels: Tensor, label: Tensor | None = None
    ) -> Float[Tensor, "batch steps length"]:
        """-ln mu(x_0) of every token at every level, level k at index k - 1; of "ar" given x_0
        before it."""
        self._check(x0)
        self._check_levels(levels)
        log_p = self._every(x0, levels, label)
        return negative_log(log_p, x0[:, None].expand(levels.shape))

    @torch.no_grad()
    def nats(
        self, x0: Tensor, levels: Tensor, label: Tensor | None = None
    ) -> Float[Tensor, "batch steps"]:
        """The terms of the bound at given levels, without that of the prior.

        Args:
            x0: (batch, L) tokens.
            levels: (batch, T, L), level k at index k - 1.
            label: (batch,).
        """
        self._check(x0)
        self._check_levels(levels)
        log_p = self._every(x0, levels, label)
        data = x0[:, None].expand(levels.shape)
        if self.variant == "ar":
            # the chance that a token or a later one is visible
            dark = torch.log1p(-self.levels.alphas[:-1])[:, None]
            weight = -torch.expm1(dark * torch.arange(self.length, 0, -1))
            return (weight.to(log_p) * negative_log(log_p, data)).sum(-1)
        k = torch.arange(1, self.steps + 1)[:, None]
        return self.levels.terms(log_p, data, k).sum(-1)

    @torch.no_grad()
    def bound(
        self,
        x0: Int[Tensor, "batch length"],
        noise: Any,
        *,
        label: Int[Tensor, " batch"] | None = None,
        batch_size: int = 64,
    ) -> Bound:
        """A bound on -ln p(x_0) of every row, of all T levels, with levels drawn once.

        With "ar" and T = 1 it is the likelihood itself; with T > 1 it is loose, see the class.

        Args:
            x0: (batch, L) tokens.
            noise: keyed.
            label: (batch,); None for none.
            batch_size: rows at a time.

        Raises:
            TypeError, ValueError: no tokens of the data; ``batch_size`` < 1.
        """
        x0 = _wide(x0)
        self._check(x0)
        _check_noise(noise)
        batch_size = whole_number("batch_size", batch_size)
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        label = None if label is None else self._check_label(label, len(x0))
        device = next((p.device for p in self.parameters()), x0.device)
        was_training = self.training
        self.eval()
        parts = []
        try:
            for start in range(0, len(x0), batch_size):
                rows = torch.arange(start, min(len(x0), start + batch_size))
                x = x0[rows.to(x0.device)].to(device)
                levels = self.levels.sample(x, noise.rows(rows))
                part = None if label is None else label[rows.to(label.device)].to(device)
                nats = self.nats(x, levels, part).sum(1, dtype=torch.float64)
                parts.append(nats + self.levels.prior(x))
        finally:
            self.train(was_training)
        nats = torch.cat(parts).to(x0.device)
        return Bound(self.name, nats, torch.full_like(nats, self.length, dtype=torch.int64))

    @property
    def name(self) -> str:
        """Of the bound."""
        if self.plain:
            return "likelihood of an autoregressive model"
        name = f"ELBO at T = {self.steps}, independent levels"
        if self.keep is not None and self.keep < self.steps:
            name += f", {self.keep} kept ({self.kept})"
        return name + (", loose: autoregressive guesses" if self.variant == "ar" else "")

    def _check_levels(self, levels: Tensor) -> None:
        if levels.ndim != 3 or tuple(levels.shape[1:]) != (self.steps, self.length):
            raise ValueError(
                f"levels must have shape (batch, {self.steps}, {self.length}), got "
                f"{tuple(levels.shape)}"
            )
        check_tokens(levels, self.levels.states, None, name="levels")

    # Sampling

    @torch.no_grad()
    def sample(
        self,
        num: int,
        *,
        noise: Any,
        temperature: float = 1.0,
        top_p: float = 1.0,
        known: Int[Tensor, "*rows length"] | None = None,
        keep_known: Bool[Tensor, "*rows length"] | None = None,
        label: int | str | Tensor | None = None,
        guidance: float = 1.0,
        speculative: Rule = "match",
        disturb: Disturb | None = None,
        trace: bool = False,
        batch_size: int = 256,
        progress: bool = False,
    ) -> Any:
        """Samples (num, L) int64.

        Args:
            num: how many.
            noise: keyed; row i of the result depends on row i of it only.
            temperature: of the guesses; 0 takes the likeliest token. Low temperatures and
                repetition make a low generative perplexity: report the entropy beside it.
            top_p: guesses are drawn from the fewest likeliest tokens that have this probability.
            known: (L,) or (num, L) tokens that are given; they stand in every guess, and in every
                level where they survive its noise.
            keep_known: bool of the same shape, which of ``known`` are given; all by default.
            label: one class for all, by number or by the name it has in the format, or (num,).
            guidance: the scale of p ∝ p_none^(1 - scale) p_label^scale; needs a ``label``.
            speculative: how "ar" uses the guess of the level before as draft, which saves calls of
                the network: "match" draws as if there were none, and gives what "off" gives, as
                does "jacobi", which draws all tokens at once, again and again, until none changes:
                fewer calls of more tokens each (Song et al., ICML 2021);
                "greedy" takes the likeliest tokens, as temperature 0; "ratio" is the rule of
                speculative decoding, which is not exact here; see `sampling.verify`.
            disturb: ``disturb(x, k, noise)`` returns what stands for the level x_k (batch, L) that
                was drawn, k = T .. 1.
            trace: return (tokens, `Trace`).
            batch_size: rows at a time.
            progress: show a progress bar over batches.

        Raises:
            ValueError: a number out of range, something given row by row in another number, a label
                where the network has none, guidance without a label; what ``disturb`` returns is no
                level.
            TypeError: ``known`` is not int64, ``keep_known`` not bool; a number is none; ``noise``
                is not keyed.
        """
        num, batch_size = whole_number("num", num), whole_number("batch_size", batch_size)
        for name, value in (
            ("temperature", temperature),
            ("top_p", top_p),
            ("guidance", guidance),
        ):
            if not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, got {value!r}")
        _check_noise(noise)
        if num < 0 or batch_size < 1:
            raise ValueError(f"need num >= 0 and batch_size >= 1, got {num} and {batch_size}")
        if not 0 <= temperature < float("inf") or not 0 < top_p <= 1:
            raise ValueError(
                f"need temperature >= 0 and 0 < top_p <= 1, got {temperature} and {top_p}"
            )
        if speculative not in get_args(Rule):
            raise ValueError(
                f"speculative must be match, jacobi, greedy, ratio or off, got {speculative!r}"
            )
        if not abs(guidance) < float("inf") or (guidance != 1 and label is None):
            raise ValueError(f"guidance needs a label, and a finite scale, got {guidance}")
        if speculative == "greedy":
            temperature = 0.0
        if speculative == "ratio" and temperature == 0:
            raise ValueError("speculative='ratio' draws: temperature must be above 0")
        given = self._known(known, keep_known, num)
        label = self._labels(label, num)
        device = next((p.device for p in self.parameters()), torch.device("cpu"))
        was_training = self.training
        self.eval()
        parts: list[Trace] = []
        starts = range(0, num, batch_size)
        try:
            for start in tqdm(starts, desc="sampling", unit="batch", disable=not progress):
                rows = torch.arange(start, min(num, start + batch_size))
                parts.append(
                    generate(
                        self,
                        torch.zeros(len(rows), self.length, dtype=torch.int64, device=device),
                        noise.rows(rows),
                        choice=Choice(temperature, top_p),
                        rule=speculative,
                        known=given and Known(*(v[rows].to(device) for v in given)),
                        label=None if label is None else label[rows].to(device),
                        guidance=guidance,
                        disturb=disturb,
                    )
                )
                if not trace:  # the samples alone are kept
                    last = parts[-1]
                    parts[-1] = Trace(last.levels[:, :0], last.guesses[:, :1], last.passes)
        finally:
            self.train(was_training)
        empty = torch.zeros(0, self.steps, self.length, dtype=torch.int64, device=device)
        if not parts:
            parts = [Trace(empty, empty, empty[..., 0])]
        whole = Trace(
            torch.cat([part.levels for part in parts]),
            torch.cat([part.guesses for part in parts]),
            torch.cat([part.passes for part in parts]),
        )
        tokens = whole.guesses[:, 0]
        return (tokens, whole) if trace else tokens

    def _known(
        self, known: Tensor | None, where: Tensor | None, num: int
    ) -> tuple[Tensor, Tensor] | None:
        """(tokens, where), each (num, L), on the host."""
        if known is None:
            if where is not None:
                raise ValueError("keep_known says which of known are given, and known is None")
            return None
        for name, tensor in (("known", known), ("keep_known", where)):
            if tensor is not None and not isinstance(tensor, Tensor):
                raise TypeError(f"{name} must be a tensor, got {kind_of(tensor)}")
        where = torch.ones_like(known, dtype=torch.bool) if where is None else where
        if known.dtype != torch.int64 or where.dtype != torch.bool:
            raise TypeError(
                f"known must be int64 and keep_known bool, got {known.dtype} and {where.dtype}"
            )
        for name, value in (("known", known), ("keep_known", where)):
            if tuple(value.shape) not in ((self.length,), (num, self.length)):
                raise ValueError(
                    f"{name} must have shape ({self.length},) or ({num}, {self.length}), got "
                    f"{tuple(value.shape)}"
                )
        known, where = (v.cpu().expand(num, self.length) for v in (known, where))
        known = torch.where(where, known, 0)
        check_tokens(known, self.classes, None, self.levels.mask_token, name="known")
        return known, where

    def _labels(self, label: int | str | Tensor | None, num: int) -> Tensor | None:
        if label is None:
            return None
        if isinstance(label, str):
            if self.format is None:
                raise ValueError(f"label {label!r}: the model knows no names of classes")
            label = self.format.label(label)
        label = torch.as_tensor(label)
        return self._check_label(label.expand(num) if label.ndim == 0 else label, num)

    # Files

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """One safetensors file: the weights, all that `load` needs, and the statement of use.

        Of several processes all have to call it, and the main one writes.
        """
        network = getattr(self.network, "_orig_mod", self.network)  # what torch.compile wrapped
        header = {
            "system": SYSTEM,
            "network": _describe(network),
            "options": self._options(),
            "data": None if self.format is None else self.format.as_json(),
        }
        use = self.use and self.use.for_system(SYSTEM, self.out_of_scope)
        weights = whole_state(network.state_dict())
        if is_main():
            save_model(path, weights, header, use=use, overwrite=overwrite)

    def _options(self) -> dict[str, Any]:
        """The arguments of the constructor, but the network."""
        return {
            "classes": self.classes,
            "length": self.length,
            "steps": self.steps,
            "variant": self.variant,
            "source": self.levels.source,
            "alphas": self.levels.alphas.tolist(),
            "keep": self.keep,
            "kept": self.kept,
            "weighting": self.weighting,
            "uniform_mix": self.uniform_mix,
            "augmented": self.augmented,
            "drop": self.drop,
            "start": self.start,
        }

    @classmethod
    def load(cls, path: str | Path, *, network: nn.Module | None = None) -> Self:
        """The model that `save` wrote, on the CPU.

        Args:
            path: of the file.
            network: the network, built as it was; needed only for a class that is not fluvial's.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a CaDDi, or the weights do not fit the network.
            ModuleNotFoundError: the network is one of transformers, which is not installed.
        """
        weights, header = load_model(path, SYSTEM)
        network = _rebuild(header["network"]) if network is None else network
        put_weights(network, weights, path)
        data = header.get("data")
        model = cls(network, format=data and Format.from_json(data), **header["options"]).eval()
        model.use = read_use(path)
        return model


def _check_noise(noise: Any) -> None:
    if isinstance(noise, type) or not callable(getattr(noise, "rows", None)):
        raise TypeError(f"noise must be keyed, as KeyedNoise(0), got {kind_of(noise)}")


def _wide(x: Tensor) -> Tensor:
    """Tokens of smaller integer types, as data sets of text have them, as int64."""
    small = isinstance(x, Tensor) and x.dtype in (torch.uint8, torch.int16, torch.int32)
    return x.long() if small else x


def _describe(network: nn.Module) -> dict[str, Any]:
    """`fluvial.networks.describe`, of pretrained models too."""
    if isinstance(network, CausalLanguageModel):
        return {"class": "CausalLanguageModel", "args": network.args}
    return describe(network)


def _rebuild(description: Mapping[str, Any]) -> nn.Module:
    if description["class"] == "CausalLanguageModel":
        return CausalLanguageModel.rebuild(cast(Mapping[str, Any], description["args"]))
    return rebuild(description)
