"""What is predicted about tokens, and the exact maps between it.

======== ============================ ======================================================
kind     a prediction                 its optimum
======== ============================ ======================================================
clean    p, (batch, *event, V)        q(x_0^i = k | x_t), given all of x_t
cavity   c, (batch, *event, V)        q(x_0^i = k | x_t without token i)
score    s, (batch, *event, states)   q_t(x with token i set to y) / q_t(x); 1 at y = x
======== ============================ ======================================================

Both of the first two are called "the prediction of the clean token". `CategoricalPath.posterior`,
flow matching, DiGress and MDLM mean ``clean``; D3PM and UDLM, which put the softmax in the place of
a one-hot x_0, q(x_s | x_t, x_0), mean ``cavity``. Taking one for the other is an error of .15 to
.22 in total variation a token on small examples. With D_k = q(x_t^i | x_0^i = k),

    p_k ∝ c_k D_k,    s = alpha_t w + drop_t W pi with w = p / D and W = sum(w),

and back. On an absorbing path clean and cavity agree where the token is masked; where it is visible
clean is its one-hot, and neither cavity nor score can be found from it: such a cavity is returned
as that one-hot and such a score as 0 (its rate is 0 too, as no visible token moves).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fluvial.core.arguments import kind_of, whole_number
from fluvial.core.categorical.draws import (
    at_class,
    check_law,
    check_mask,
    check_probs,
    check_times,
    check_tokens,
    double,
    real_number,
    real_tokens,
    tensor_kind,
)
from fluvial.core.categorical.matrices import MatrixPath, TokenPath
from fluvial.core.categorical.paths import CategoricalPath
from fluvial.core.protocols import Field, left_broadcast

KINDS = ("clean", "cavity", "score")
CERTAIN = 1e300


def convert_prediction(
    value: Tensor, kind: str, to: str, x: Tensor, t: Tensor, path: TokenPath
) -> Tensor:
    """A prediction of one kind as one of another.

    Args:
        value: of ``kind``, see the module.
        x: (batch, *event) tokens at ``t``.

    Returns:
        A prediction of the kind ``to``, in the dtype of ``value``.

    Raises:
        ValueError: a kind that is none of `KINDS`, or a shape that is not of it; tokens out of
            range; a time out of [0, 1], or of another shape; a score at alpha(t) = 0, where it says
            nothing about the clean token; a score of a `MatrixPath`.
        TypeError: ``value`` is not in floating point, ``x`` not int64, ``path`` no path.
    """
    _check(kind)
    _check(to)
    if kind == to:
        return value
    check_path(path)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise TypeError(f"a {kind} prediction must be in floating point, got {tensor_kind(value)}")
    check_tokens(x, path.states, None, name="x")
    widths = {path.classes, path.states} if kind == "score" else {path.classes}
    if value.shape[:-1] != x.shape or value.shape[-1] not in widths:
        raise ValueError(
            f"a {kind} prediction must have shape {(*x.shape, max(widths))}, got "
            f"{tuple(value.shape)}"
        )
    if isinstance(path, MatrixPath):
        if "score" in (kind, to):
            raise ValueError(
                f"{path} has clean and cavity predictions, got {kind!r} to be made {to!r}"
            )
        return _by_matrices(value.to(double(value)), kind, x, t, path).to(value.dtype)
    check_times(x, t)
    if kind == "score":
        clean = _clean_from_score(value.to(double(value)), x, t, path)
    else:
        clean = value
    if kind == "cavity":
        clean = _reweighted(clean.to(double(value)), x, t, path, inverse=False)
    if to == "clean":
        return clean.to(value.dtype)
    if to == "cavity":
        return _reweighted(clean.to(double(value)), x, t, path, inverse=True).to(value.dtype)
    return _score(clean.to(double(value)), x, t, path).to(value.dtype)


def _reweighted(p: Tensor, x: Tensor, t: Tensor, path: CategoricalPath, *, inverse: bool) -> Tensor:
    """p_k D_k, or p_k / D_k, normalised. D is one value at k = x and another elsewhere."""
    if path.absorbing:
        return visible_one_hot(p, x, path)
    gain = at_token_gain(x, t, path)
    gain = 1 / gain if inverse else gain
    here = at_class(p, x)
    q = p.scatter(-1, x.unsqueeze(-1), (here * gain.clamp(max=CERTAIN)).unsqueeze(-1))
    q = _normalised(q, x)
    start = functional.one_hot(x, path.classes).to(p)
    # where pi(x) = 0 or drop = 0 the token can only be clean
    return q if inverse else torch.where(gain.isinf().unsqueeze(-1), start, q)


def _by_matrices(p: Tensor, kind: str, x: Tensor, t: Tensor, path: MatrixPath) -> Tensor:
    """p_k D_k of a cavity, p_k / D_k of a clean law, normalised, with D of a `MatrixPath`."""
    likelihood = path.likelihood(x, t)
    some = likelihood > 0
    if kind == "cavity":
        q = p * likelihood
    else:
        q = torch.where(some, p / torch.where(some, likelihood, 1.0), 0.0)
    return _normalised(q, x)


def _normalised(q: Tensor, x: Tensor) -> Tensor:
    """``q`` over its sum; the one-hot of ``x`` where that is 0, NaN where it is no sum of weights.

    Were a NaN, or a logarithm, made a one-hot, a broken prediction would pass for a sure one.
    """
    total = q.sum(-1, keepdim=True)
    start = functional.one_hot(x, q.shape[-1]).to(q)
    # where it is 0 the quotient is not used, but its gradient should be 0 and not NaN
    divisor = torch.where(total > 0, total, torch.where(total == 0, 1.0, torch.nan))
    return torch.where(total == 0, start, q / divisor)


def at_token_gain(x: Tensor, t: Tensor, path: CategoricalPath) -> Tensor:
    """D_x / D_k, k != x: 1 + alpha / (drop pi(x)), (batch, *event) float64."""
    alpha, drop = (left_broadcast(v, x).to(x.device) for v in (path.alpha(t), path.drop(t)))
    off = drop * path.source_at(x)
    # at alpha = 0 too, a token that the source never has is clean
    return torch.where(off > 0, 1 + alpha / off, torch.inf).expand(x.shape)


def visible_one_hot(p: Tensor, x: Tensor, path: TokenPath) -> Tensor:
    """``p`` where tokens are masked, and their one-hot where they are visible; absorbing."""
    visible = (x < path.classes).unsqueeze(-1)
    one = visible.to(p.dtype)
    # the filled copy is new, so that it may be changed in place
    return p.masked_fill(visible, 0.0).scatter_add_(
        -1, x.clamp(max=path.classes - 1).unsqueeze(-1), one
    )


def _score(p: Tensor, x: Tensor, t: Tensor, path: CategoricalPath) -> Tensor:
    start = functional.one_hot(x, path.states).to(p)
    alpha, drop = (left_broadcast(v, p).to(p.device) for v in (path.alpha(t), path.drop(t)))
    p = functional.pad(p, (0, path.states - path.classes))
    if path.absorbing:
        masked = path.masked(x).unsqueeze(-1)
        return torch.where(masked, alpha / drop * p, 0.0) + start
    pi = path.source_at(x)
    here = at_class(p, x)
    spread = path.spread(here, pi, t).unsqueeze(-1)
    off = drop * (pi.unsqueeze(-1) if pi.ndim else pi)
    score = (alpha * p + drop * path.pi.to(p) * spread) / torch.where(off > 0, off, 1.0)
    return torch.where(off > 0, score, 0.0).scatter(-1, x.unsqueeze(-1), 1.0)


def _clean_from_score(s: Tensor, x: Tensor, t: Tensor, path: CategoricalPath) -> Tensor:
    _check_informative(t, path)
    if path.absorbing:
        s = s[..., : path.classes]
        total = s.sum(-1, keepdim=True)
        return visible_one_hot(s / torch.where(total > 0, total, 1.0), x, path)
    alpha, drop = (left_broadcast(v, s).to(s.device) for v in (path.alpha(t), path.drop(t)))
    s = s.scatter(-1, x.unsqueeze(-1), 1.0)
    w = ((s - drop * path.pi.to(s) * s.sum(-1, keepdim=True)) / alpha).clamp(min=0)
    pi = path.source_at(x)
    off = drop * (pi.unsqueeze(-1) if pi.ndim else pi)
    return _normalised(w * (off + alpha * functional.one_hot(x, path.states).to(s)), x)


def tweedie_probs(score: Tensor, x: Tensor, t: Tensor, s: Tensor, path: CategoricalPath) -> Tensor:
    """P(x_s | x_t = x) from a score, the analytic step of SEDD (Lou et al., ICML 2024).

    The map of the step from s to t is inverted on the score, v -> (v - (1 - r) sum(v) pi) / r, and
    each entry weighed by the chance of that step to x_t. With a score that belongs to a clean
    prediction it is `posterior_probs`; of a learned one negative entries are cut to 0, and so is
    the chance to be masked at s = 0.

    Raises:
        ValueError: alpha(t) = 0, or a shape that is not that of a score.
        TypeError: the score is not in floating point.
    """
    check_law("a score", score, x, path.states)
    _check_informative(t, path)
    value = score.to(double(score))
    value = value.scatter(-1, x.unsqueeze(-1), 1.0)
    lost = left_broadcast(path._lost(s, t), value).to(value.device)
    pi = path.pi.to(value)
    staggered = ((value - lost * value.sum(-1, keepdim=True) * pi) / (1 - lost)).clamp(min=0)
    at_x = path.source_at(x)
    start = functional.one_hot(x, path.states).to(value)
    probs = staggered * ((1 - lost) * start + lost * (at_x.unsqueeze(-1) if at_x.ndim else at_x))
    if path.absorbing:  # visible tokens stay, and at s = 0 none is masked, whatever the score
        last = left_broadcast(s == 0, x).to(x.device)
        probs[..., path.classes] = torch.where(last, 0.0, probs[..., path.classes])
        probs = torch.where(path.masked(x).unsqueeze(-1), probs, start)
    return probs / probs.sum(-1, keepdim=True)


def _check_informative(t: Tensor, path: CategoricalPath) -> None:
    if t.device.type == "cpu" and bool((path.alpha(t) <= 0).any()):
        raise ValueError(
            "a score at alpha(t) = 0 says nothing about the clean token; start at t < 1, or take a "
            "schedule with alpha(1) > 0 such as Geometric()"
        )


def _check(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")


def check_path(path: Any) -> None:
    """Raise unless ``path`` is a path of tokens; its class is none."""
    if not isinstance(path, CategoricalPath | MatrixPath):
        got = kind_of(path)
        raise TypeError(f"path must be a CategoricalPath or a MatrixPath, got {got}")


def check_field(field: Any, path: TokenPath | None = None) -> None:
    """Raise unless ``field`` is a field, and, if it was made for a path, for one like ``path``.

    Schedules may differ, and where absorbing a `MixturePath` is the diffusion. But what is known
    of a masked token says nothing on a path without masks, and the other way round.
    """
    if isinstance(field, type) or not callable(field) or not hasattr(field, "predicts"):
        raise TypeError(f"field must be a field, such as TokenField(...), got {kind_of(field)}")
    while path is not None and field is not None:
        own = getattr(field, "path", None)
        if isinstance(own, CategoricalPath | MatrixPath) and (
            (own.classes, own.states) != (path.classes, path.states)
        ):
            raise ValueError(f"field was made for {own!r}, which does not go with {path!r}")
        field = getattr(field, "field", None)


def check_values(value: Tensor, kind: str, x: Tensor, path: TokenPath, mask: Any) -> None:
    """Raise unless ``value`` is a prediction of ``kind``, by its values; waits for an accelerator.

    For the first call of a loop. Padding is left out, and on an absorbing path visible tokens are:
    nothing is drawn for either.
    """
    if kind != "score":
        check_law(f"a {kind} prediction", value, x, path.classes)
    elif not isinstance(value, Tensor) or not value.is_floating_point():
        raise TypeError(f"a score must be in floating point, got {tensor_kind(value)}")
    elif value.shape[:-1] != x.shape or value.shape[-1] not in (path.classes, path.states):
        raise ValueError(
            f"a score must have shape {(*x.shape, path.states)}, got {tuple(value.shape)}"
        )
    used = path.masked(x) if path.absorbing else torch.ones_like(x, dtype=torch.bool)
    check_mask(x, mask)
    value = value.detach()[used if mask is None else used & mask]
    if kind != "score":
        check_probs(value.to(double(value)), f"a {kind} prediction")
    elif not bool((value >= 0).all()):
        raise ValueError(
            "a score must hold ratios >= 0, not their logarithms, got values from "
            f"{float(value.min()):.4g} to {float(value.max()):.4g}"
        )


# Fields


def network_time(network: nn.Module, t: Tensor, x: Tensor) -> Tensor:
    """``t`` as a network wants it: one time a row, or a token, in the dtype of its weights."""
    check_times(x, t)
    dtype = next(
        (p.dtype for p in network.parameters() if p.is_floating_point()), torch.get_default_dtype()
    )
    t = t.to(x.device, dtype)
    return t.expand(len(x)) if t.ndim == 0 else t


def logits_of(
    network: nn.Module, x: Tensor, t: Tensor, path: TokenPath, cond: Mapping[str, Any]
) -> Tensor:
    """What a network returns, (batch, *event, V or more) logits.

    Raises:
        TypeError: ``x`` is not int64, the network returns something else than floating point.
        ValueError: another shape; tokens out of range, where the network fails by them.
    """
    if not isinstance(x, Tensor) or x.dtype != torch.int64:
        raise TypeError(f"x must be int64 tokens, got {tensor_kind(x)}")
    check_mask(x, cond.get("mask"))
    try:
        logits = network(x, network_time(network, t, x), **cond)
    except IndexError:  # of a table of embeddings; asked only then, as nobody should wait for it
        check_tokens(x, path.states, cond.get("mask"), name="x")
        raise
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise TypeError(
            f"the network must return logits in floating point, got {tensor_kind(logits)}"
        )
    if logits.shape[:-1] != x.shape or logits.shape[-1] < path.classes:
        raise ValueError(
            f"the network must return {(*x.shape, path.classes)} or more logits, got "
            f"{tuple(logits.shape)}"
        )
    return logits


def log_clean(logits: Tensor, kind: str, x: Tensor, t: Tensor, path: TokenPath) -> Tensor:
    """Logarithms of the clean law that a network's logits stand for, float32 or wider.

    Logits are cut to the V symbols of the data: the mask symbol is no clean token. Those of a
    cavity gain ln(D_x / D_k) at the token that is there (of a `MatrixPath`, ln D_k everywhere).
    Visible tokens of an absorbing path are left as they are: nothing that uses this looks at them.
    """
    return _clean_logits(logits, kind, x, t, path).log_softmax(-1)


def _clean_logits(logits: Tensor, kind: str, x: Tensor, t: Tensor, path: TokenPath) -> Tensor:
    """What `log_clean` normalises: ``logits`` themselves, or a new tensor."""
    logits = logits[..., : path.classes]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if isinstance(path, MatrixPath):
        if kind == "cavity":
            # kept finite where a class is impossible: as a gradient of padding, -inf would be NaN
            logits = logits + path.likelihood(x, t).clamp(min=1e-300).log().to(logits)
    elif kind == "cavity" and not path.absorbing:
        gain = at_token_gain(x, t, path).log().clamp(max=80.0).to(logits)
        logits = logits.scatter_add(-1, x.unsqueeze(-1), gain.unsqueeze(-1))
    return logits


def log_score(output: Tensor, x: Tensor, t: Tensor, path: CategoricalPath) -> Tensor:
    """The logarithm of the score of a network's output, (batch, *event, states), 0 at y = x.

    On an absorbing path ln(alpha / drop) - ln V is added, the logarithm of the score where all
    symbols are equally likely, so that a network near 0 starts there (SEDD).
    """
    value = output if output.dtype == torch.float64 else output.float()
    value = value[..., : path.states]
    if value.shape[-1] < path.states:
        value = functional.pad(value, (0, path.states - value.shape[-1]))
    if path.absorbing:
        # kept finite at both ends, where a score is 0 or infinite
        odds = (path.alpha(t).clamp(min=1e-30) / path.drop(t).clamp(min=1e-30)).log()
        value = value + (left_broadcast(odds, value).to(value) - math.log(path.classes))
    return value.scatter(-1, x.unsqueeze(-1), 0.0)


@dataclass(frozen=True)
class TokenField:
    """A network of tokens as a field that predicts probabilities.

    The network is called as ``network(x, t, **conditions)`` and returns (batch, *event, V or more)
    logits; of a score network, (batch, *event, V or more) logarithms of ratios, up to `log_score`.
    On an absorbing path the mask symbol has probability 0 and visible tokens are certain (SUBS,
    Sahoo et al., NeurIPS 2024).

    Args:
        network: any module.
        path: for what its logits mean.
        output: "clean", "cavity" (as D3PM and UDLM train it) or "score" (SEDD).
        predicts: what to give: by default "clean", which samplers want.
        overwrite: put the probabilities in the place of the logits, which saves memory and time
            where V is large. Not for a network that keeps what it returned; without effect where
            gradients flow.
    """

    network: nn.Module
    path: TokenPath
    output: str = "clean"
    predicts: str = "clean"
    overwrite: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.network, nn.Module):
            raise TypeError(f"network must be a module, got {kind_of(self.network)}")
        check_path(self.path)
        _check(self.output)
        _check(self.predicts)
        if isinstance(self.path, MatrixPath) and "score" in (self.output, self.predicts):
            raise ValueError(f"{self.path} has clean and cavity predictions, got 'score'")

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        logits = logits_of(self.network, x, t, self.path, cond)
        x = real_tokens(x, cond.get("mask"))
        if self.path.absorbing and self.predicts == "clean":
            # of all kinds: p ∝ s, at t = 1 too, and a masked token's cavity is its clean law
            return self._masked(logits, x)
        if self.output == "score":
            value = log_score(logits, x, t, cast(CategoricalPath, self.path)).exp()
            return convert_prediction(value, "score", self.predicts, x, t, self.path)
        if self.output == "cavity" and self.predicts == "cavity":
            logits = logits[..., : self.path.classes]
            return (logits if logits.dtype == torch.float64 else logits.float()).softmax(-1)
        clean = self._softmax(_clean_logits(logits, self.output, x, t, self.path))
        if self.path.absorbing:
            clean = visible_one_hot(clean, x, self.path)
        return convert_prediction(clean, "clean", self.predicts, x, t, self.path)

    def _masked(self, logits: Tensor, x: Tensor) -> Tensor:
        logits = logits[..., : self.path.classes]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if logits.requires_grad:
            return visible_one_hot(logits.softmax(-1), x, self.path)
        # in place and by rows: where there are many classes, memory is what this costs
        flat = self._softmax(logits).reshape(-1, logits.shape[-1])
        tokens = x.flatten()
        rows = (tokens < self.path.classes).nonzero().squeeze(1)
        flat[rows] = 0.0
        flat[rows, tokens[rows]] = 1.0
        return flat.view(*x.shape, logits.shape[-1])

    def _softmax(self, logits: Tensor) -> Tensor:
        if self.overwrite and not logits.requires_grad:
            return torch.softmax(logits, -1, out=logits)
        return logits.softmax(-1)


@dataclass(frozen=True)
class Converted:
    """A field of tokens seen as one of another kind; made by `convert`."""

    field: Field
    predicts: str
    path: TokenPath
    _seen: list[bool] = dataclass_field(default_factory=list, init=False, repr=False, compare=False)

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        value, kind, mask = self.field(x, t, **cond), self.field.predicts, cond.get("mask")
        if not self._seen:  # what is normalised is not seen to be none later on
            check_values(value, kind, x, self.path, mask)
            self._seen.append(True)
        return convert_prediction(value, kind, self.predicts, real_tokens(x, mask), t, self.path)


def convert(field: Field, kind: str, path: TokenPath) -> Field:
    """The same field, predicting ``kind``. A field that does already comes back as it is."""
    check_field(field)
    check_path(path)
    _check(kind)
    _check(field.predicts)
    return field if field.predicts == kind else Converted(field, kind, path)


def clean_of(
    field: Field,
    x: Tensor,
    t: Tensor,
    path: Any,
    cond: Mapping[str, Any],
    check: bool = False,
) -> Tensor:
    """The clean prediction of a field of any kind; ``check`` looks at the values of others."""
    value: Tensor = field(x, t, **cond)
    if field.predicts == "clean":
        return value
    if check:
        check_values(value, field.predicts, x, path, cond.get("mask"))
    x = real_tokens(x, cond.get("mask"))
    return convert_prediction(value, field.predicts, "clean", x, t, path)


def check_clean(p: Tensor, x: Tensor, mask: Tensor | None) -> None:
    """Raise unless ``p`` are clean probabilities of any number of classes, by their values."""
    check_law("a clean prediction", p, x, p.shape[-1] if isinstance(p, Tensor) and p.ndim else 0)
    check_mask(x, mask)
    check_probs((p if mask is None else p[mask]).detach(), "a clean prediction")


# Fields made of fields


@dataclass(frozen=True)
class Tempered:
    """A clean prediction made sharper: temperature, then the k likeliest, then the nucleus.

        p <- p^(1 / temperature);  the top_k largest;  the fewest whose sum reaches top_p

    before the posterior is formed. It tempers every draw given what is visible, which is not
    sampling the tempered joint law.

    Args:
        field: predicts "clean".
        temperature: > 0.
        top_k: at least 1; None for all.
        top_p: in (0, 1]; the class that crosses it is kept.
        forbidden: (F,) classes that are never drawn; None for none.

    Raises:
        ValueError: one of these is out of range, or the field predicts something else; in the first
            call, predictions of the field that are no probabilities, where they are used.
        TypeError: an argument is of another type.
    """

    field: Field
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    forbidden: Tensor | None = None
    _seen: list[bool] = dataclass_field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_field(self.field)
        real_number("temperature", self.temperature)
        real_number("top_p", self.top_p)
        if self.top_k is not None:
            whole_number("top_k", self.top_k)
        if self.forbidden is not None and (
            not isinstance(self.forbidden, Tensor)
            or self.forbidden.dtype != torch.int64
            or self.forbidden.ndim != 1
        ):
            got = tensor_kind(self.forbidden)
            raise TypeError(f"forbidden must be int64 classes of shape (F,), got {got}")
        if self.field.predicts != "clean":
            raise ValueError(
                f"field must predict 'clean', got {self.field.predicts!r}; see convert"
            )
        if not self.temperature > 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"need temperature > 0 and 0 < top_p <= 1, got {self.temperature} and {self.top_p}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")

    @property
    def predicts(self) -> str:
        return "clean"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        p: Tensor = self.field(x, t, **cond)
        # what is normalised below is not seen to be none later on; who gives no tokens has looked
        if not self._seen and x.dtype == torch.int64:
            self._check_first(p, x, cond.get("mask"))
            self._seen.append(True)
        if self.forbidden is not None:
            p = p.index_fill(-1, self.forbidden.to(p.device), 0.0)
        if self.temperature != 1:
            p = (p / p.amax(-1, keepdim=True)) ** (1 / self.temperature)
        if self.top_k is not None and self.top_k < p.shape[-1]:
            kept = p.topk(self.top_k, dim=-1)
            p = torch.zeros_like(p).scatter(-1, kept.indices, kept.values)
        p = p / p.sum(-1, keepdim=True)
        if self.top_p < 1:
            ordered, order = p.sort(dim=-1, descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered  # what lies in front of each
            ordered = torch.where(before < self.top_p, ordered, 0.0)
            p = torch.zeros_like(p).scatter(-1, order, ordered)
            p = p / p.sum(-1, keepdim=True)
        return p

    def _check_first(self, p: Tensor, x: Tensor, mask: Tensor | None) -> None:
        check_clean(p, x, mask)
        if self.forbidden is not None and self.forbidden.numel():
            low, high = (int(v) for v in self.forbidden.aminmax())
            if low < 0 or high >= p.shape[-1]:
                raise ValueError(
                    f"forbidden must hold classes 0 .. {p.shape[-1] - 1}, got {low} to {high}"
                )


@dataclass
class Cached:
    """A field without time, asked again only for the rows that changed since the last call.

    For networks of absorbing paths that do not see t (MDLM): in more steps than tokens most steps
    change few rows. Conditions with one entry a row are cut to the rows. Not for a network that
    sees t. Other conditions than in the last call, by identity, ask for all rows again, so that
    guidance caches what is inside of it: nothing. Looking which rows changed waits for an
    accelerator, once a call.

    Args:
        field: any field of tokens whose rows are independent.
    """

    field: Field
    _x: Tensor | None = None
    _value: Tensor | None = None
    _cond: Mapping[str, Any] = dataclass_field(default_factory=dict)
    calls: int = 0
    """Rows that the field was asked for so far."""

    def __post_init__(self) -> None:
        check_field(self.field)

    @property
    def predicts(self) -> str:
        return self.field.predicts

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        last = self._cond
        same = last.keys() == cond.keys() and all(last[name] is cond[name] for name in cond)
        if not same or self._x is None or self._value is None or self._x.shape != x.shape:
            self._value = self.field(x, t, **cond)
            self.calls += len(x)
        else:
            rows = (self._x != x).flatten(1).any(1).nonzero().squeeze(1)
            if len(rows):
                part = {
                    name: value[rows]
                    if isinstance(value, Tensor) and value.ndim and len(value) == len(x)
                    else value
                    for name, value in cond.items()
                }
                at = t[rows] if t.ndim else t
                value = self.field(x[rows], at, **part)
                if value.shape != (len(rows), *self._value.shape[1:]):
                    raise ValueError(
                        "the field of Cached must predict the rows that it is given, of shape "
                        f"{(len(rows), *self._value.shape[1:])}, got {tuple(value.shape)}"
                    )
                self._value = self._value.index_copy(0, rows, value)
                self.calls += len(rows)
        self._x, self._cond = x, cond
        return self._value
