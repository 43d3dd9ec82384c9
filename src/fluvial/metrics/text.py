"""How good generated text is: its bits under a model of other text, beside its variety.

Likely text is cheap to make: a low temperature, or one phrase over and over, has a low perplexity
under any language model. Print `unigram_entropy` or `distinct` next to it, always.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fluvial.core.categorical.draws import check_tokens


class NGram:
    """A language model of counts: interpolated Witten-Bell.

        p_k(w | h) = (c(h w) + n(h) p_{k-1}(w | h')) / (c(h) + n(h)),    p_0 = 1 / V,

    h the k - 1 tokens before w and h' the last k - 2 of them, c(h w) how often w followed h, c(h)
    the sum over w, n(h) the number of different w that did. Where h never occurred, p_k = p_{k-1}.
    All of p_k(. | h) sum to 1. Tokens at the beginning of a row have as many before them as there
    are.

    Args:
        texts: what to count: (rows, length) int64 tokens, or a sequence of (length,), for example
            files. Nothing is counted across their ends.
        classes: V; tokens are 0 .. V - 1.
        order: of the longest n-grams; 1 for single tokens.

    Raises:
        TypeError: tokens that are not int64.
        ValueError: no tokens, or some out of range; ``order`` < 1, or so large that an n-gram does
            not fit an int64: V^order >= 2^63.

    Citation: Witten and Bell, IEEE Trans. Inf. Theory 37 (1991); the form is that of Chen and
    Goodman, "An empirical study of smoothing techniques for language modeling", 1999.
    """

    def __init__(self, texts: Tensor | Sequence[Tensor], classes: int, order: int = 5) -> None:
        if order < 1 or classes < 1 or order * math.log2(max(classes, 2)) >= 63:
            raise ValueError(
                f"need order >= 1, classes >= 1 and classes**order < 2**63, got order={order} and "
                f"classes={classes}"
            )
        rows = [row[None] for row in texts] if not isinstance(texts, Tensor) else [texts]
        for row in rows:
            check_tokens(row, classes, None)
        if not sum(row.numel() for row in rows):
            raise ValueError("texts must hold tokens, got none")
        self.classes, self.order = classes, order
        self._tables = [_Counts(rows, classes, k) for k in range(1, order + 1)]

    def probs(self, before: Tensor) -> Tensor:
        """The law of the next token, (batch, V) float64, after ``before``, (batch, n) tokens."""
        if before.shape[1]:
            check_tokens(before, self.classes, None)
        words = torch.arange(self.classes, device=before.device)
        rows = torch.cat(
            [
                before[:, max(0, before.shape[1] - self.order + 1) :]
                .unsqueeze(1)
                .expand(-1, self.classes, -1),
                words.expand(len(before), -1).unsqueeze(2),
            ],
            dim=2,
        )
        return self._last(rows.flatten(0, 1)).reshape(len(before), self.classes)

    def log_probs(self, x: Tensor) -> Tensor:
        """ln p(x_i | the tokens before it), (batch, n) float64, of ``x``, (batch, n) tokens."""
        check_tokens(x, self.classes, None)
        p = torch.full(x.shape, 1 / self.classes, dtype=torch.float64)
        for k, table in enumerate(self._tables, 1):
            if k <= x.shape[1]:
                p[:, k - 1 :] = table.mixed(_codes(x, self.classes, k), p[:, k - 1 :])
        return p.log()

    def _last(self, rows: Tensor) -> Tensor:
        return self.log_probs(rows)[:, -1].exp()


class _Counts:
    """c(h w), c(h) and n(h) of all n-grams of one length that occurred, in the order of codes."""

    def __init__(self, rows: Sequence[Tensor], classes: int, length: int) -> None:
        codes = torch.cat([_codes(row, classes, length).flatten() for row in rows])
        self.classes = classes
        self.grams, counts = codes.unique(return_counts=True)
        self.counts = counts.double()
        self.before, where, kinds = (self.grams // classes).unique(
            return_inverse=True, return_counts=True
        )
        self.kinds = kinds.double()
        self.totals = torch.zeros_like(self.kinds).index_add_(0, where, self.counts)

    def mixed(self, codes: Tensor, lower: Tensor) -> Tensor:
        """The probabilities of n-grams' last tokens, from those of one token less before them."""
        count = _look_up(self.grams, self.counts, codes)
        before = codes // self.classes
        kinds, total = (_look_up(self.before, v, before) for v in (self.kinds, self.totals))
        seen = total > 0
        return torch.where(
            seen, (count + kinds * lower) / torch.where(seen, total + kinds, 1.0), lower
        )


def _codes(x: Tensor, classes: int, length: int) -> Tensor:
    """Every n-gram of ``length`` as one number, (batch, n - length + 1), or none."""
    if x.shape[1] < length:
        return x[:, :0]
    codes = x.unfold(1, length, 1)
    return (codes * classes ** torch.arange(length - 1, -1, -1)).sum(-1)


def _look_up(keys: Tensor, values: Tensor, wanted: Tensor) -> Tensor:
    """The values at ``wanted``, and 0 where there is no such key; keys are sorted."""
    if not len(keys):
        return torch.zeros(wanted.shape, dtype=values.dtype)
    index = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
    return torch.where(keys[index] == wanted, values[index], 0.0)


@torch.no_grad()
def language_model_log_probs(
    model: Callable[[Tensor], Tensor], x: Tensor, *, start: int | None = None, batch_size: int = 256
) -> Tensor:
    """ln p(x_i | the tokens before it) under a causal model, (batch, n) float64.

    Args:
        model: tokens (batch, n) to (batch, n, V or more) logits of the token after each, for
            example a `fluvial.networks.CausalTransformer`; of a model of `transformers`,
            ``lambda x: model(x).logits``. Logits are normalised over all classes they have but
            ``start``, which no text holds.
        x: (batch, n) int64 tokens.
        start: the token that stands before a text; without one the first token of each row is
            not predicted, and the result has one column less.
        batch_size: rows at a time.

    Raises:
        TypeError, ValueError: ``x`` are no (batch, n) int64 tokens, or there are none to predict;
            logits of another shape.
    """
    if x.dtype != torch.int64:
        raise TypeError(f"x must be int64 tokens, got {x.dtype}")
    if x.ndim != 2 or not x.numel() or (start is None and x.shape[1] < 2):
        raise ValueError(f"x must be (batch, n) tokens with some to predict, got {tuple(x.shape)}")
    parts = []
    for rows in x.split(batch_size):
        if start is not None:
            rows = functional.pad(rows, (1, 0), value=start)
        logits = model(rows[:, :-1])
        if logits.shape[:-1] != rows[:, 1:].shape:
            raise ValueError(
                f"model must return logits {tuple(rows[:, 1:].shape)} + (V,), got "
                f"{tuple(logits.shape)}"
            )
        logits = logits.double()
        if start is not None and start < logits.shape[-1]:
            logits[..., start] = -math.inf
        parts.append(logits.log_softmax(-1).gather(-1, rows[:, 1:].unsqueeze(-1)).squeeze(-1))
    return torch.cat(parts)


def bits(log_probs: Tensor) -> float:
    """Bits a token, -mean / ln 2: the generative perplexity of what was generated is 2 to it."""
    return float(-log_probs.mean() / math.log(2))


def unigram_entropy(x: Tensor, classes: int) -> float:
    """The entropy of the frequencies of all tokens of ``x`` together, in bits a token.

    Of n tokens it is too low by about (V - 1) / (2 n ln 2) on average (Miller, 1955): compare as
    many.

    Raises:
        TypeError, ValueError: ``x`` are no int64 tokens 0 .. classes - 1, or none.
    """
    check_tokens(x, classes, None)
    if not x.numel():
        raise ValueError(f"x must hold tokens, got shape {tuple(x.shape)}")
    p = torch.bincount(x.flatten(), minlength=classes).double() / x.numel()
    return float(-torch.special.xlogy(p, p).sum() / math.log(2))


def ngram_divergence(x: Tensor, y: Tensor, classes: int, n: int = 3) -> float:
    """The Jensen-Shannon divergence of the frequencies of n-grams, in bits, 0 to 1.

        (KL(p || m) + KL(q || m)) / 2,    m = (p + q) / 2,

    p and q those of all n-grams of the rows of ``x`` and of ``y``. It falls with the number of
    tokens: compare as many.

    Args:
        x: (rows, length) int64 tokens.
        y: in the same way.
        classes: V; tokens are 0 .. V - 1.
        n: tokens of an n-gram.

    Raises:
        TypeError, ValueError: no tokens 0 .. classes - 1; rows shorter than ``n``, or none;
            V^n >= 2^63.
    """
    if n < 1 or classes < 1 or n * math.log2(max(classes, 2)) >= 63:
        raise ValueError(f"need n >= 1 and classes**n < 2**63, got n={n} and classes={classes}")
    codes = []
    for name, rows in (("x", x), ("y", y)):
        check_tokens(rows, classes, None, name=name)
        if not len(rows) or rows.shape[1] < n:
            raise ValueError(
                f"{name} must be rows of n={n} tokens or more, got {tuple(rows.shape)}"
            )
        codes.append(_codes(rows, classes, n).flatten())
    _, where = torch.cat(codes).unique(return_inverse=True)
    kinds = int(where.max()) + 1
    p, q = (
        torch.bincount(part, minlength=kinds).double() / len(part)
        for part in where.split([len(part) for part in codes])
    )
    middle = ((p + q) / 2).log()
    both = sum((torch.special.xlogy(r, r) - r * middle).sum() for r in (p, q))
    return float(both) / (2 * math.log(2))


def distinct(x: Tensor, n: int) -> float:
    """Distinct-n: different n-grams of the rows over all n-grams of the rows.

    It falls with the number of rows: compare as many (Li et al., NAACL 2016).

    Args:
        x: (batch, length) int64 tokens.
        n: tokens of an n-gram, 1 to length.

    Raises:
        ValueError: ``n`` is out of range, or there are no rows.
    """
    if x.ndim != 2 or not len(x) or not 1 <= n <= x.shape[1]:
        raise ValueError(f"need rows of n >= 1 tokens or more, got n={n}, shape {tuple(x.shape)}")
    grams = x.unfold(1, n, 1).reshape(-1, n)
    return len(grams.unique(dim=0)) / len(grams)
