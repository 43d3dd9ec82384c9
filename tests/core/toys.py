"""Small systems whose answers are known: paths, fields, samplers and steerings for the tests."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from fluvial.core.gaussian.paths import AlphaSigmaPath
from fluvial.core.protocols import Draw, Field, Noise, Run, State, Steering, left_broadcast
from fluvial.core.scales import Block
from fluvial.core.simulate import Ancestral

ALARM = 1e-6  # the chance of a false alarm, over all the comparisons of one statement


def assert_law(x: Tensor, mean: Tensor, std: Tensor) -> None:
    """Rows of ``x`` have this mean and this standard deviation: independent, nearly normal rows."""
    mean, std = mean.expand(x.shape[1:]), std.expand(x.shape[1:])
    z = float(stats.norm.isf(ALARM / 4 / mean.numel()))
    n = len(x)
    assert ((x.mean(0) - mean).abs() <= z * std / math.sqrt(n)).all()
    assert ((x.std(0) / std - 1).abs() <= z / math.sqrt(2 * n)).all()


def assert_shares(drawn: Tensor, probs: Tensor) -> None:
    """Independent draws (n,) of classes have these probabilities (K,)."""
    counts = torch.bincount(drawn, minlength=len(probs)).double()
    expected = probs / probs.sum() * len(drawn)
    chi2 = float(((counts - expected).square() / expected).sum())
    assert chi2 <= stats.chi2.isf(ALARM, len(probs) - 1)


@dataclass(frozen=True)
class Constant:
    """Noise whose every draw is ``value``: the affine map behind a draw becomes visible."""

    value: float

    def normal(self, like: Tensor, tag: str = "") -> Tensor:
        return torch.full_like(like, self.value)

    def uniform(self, like: Tensor, tag: str = "") -> Tensor:
        return torch.full_like(like, self.value)

    def categorical(self, probs: Tensor, tag: str = "") -> Tensor:
        return probs.argmax(-1)

    def at(self, step: int) -> Constant:
        return self

    def rows(self, ids: Tensor) -> Constant:
        return self


def remembered(method: Callable[..., Any]) -> Callable[..., Any]:
    """What ``method(path, t)`` gave for one time before: solvers come to a time again and again."""

    @functools.lru_cache(4096)
    def at(path: Any, t: float, dtype: torch.dtype) -> Any:
        return method(path, torch.tensor(t, dtype=dtype))

    @functools.wraps(method)
    def call(path: Any, t: Tensor, **cond: Any) -> Any:
        if t.ndim or t.requires_grad:
            return method(path, t)
        return at(path, float(t), t.dtype)

    return call


# Gaussian data on a path with scalar coefficients


@remembered
def coefficients(path: AlphaSigmaPath, t: Tensor) -> tuple[Tensor, Tensor]:
    return path.alpha(t), path.sigma(t)


@remembered
def rates(path: AlphaSigmaPath, t: Tensor) -> tuple[Tensor, Tensor]:
    return path.alpha_rate(t), path.sigma_rate(t)


@dataclass(frozen=True)
class VectorGaussian:
    """The field of data N(mean, diag(std^2)), mean and std (dim,), in closed form.

    With v = alpha^2 std^2 + sigma^2 and r = x - alpha mean:
    clean = mean + alpha std^2 r / v, noise = sigma r / v, score = -r / v,
    velocity = alpha' mean + (alpha alpha' std^2 + sigma sigma') r / v.
    """

    path: AlphaSigmaPath
    mean: Tensor
    std: Tensor
    predicts: str = "clean"

    def moments(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of x_t."""
        alpha, sigma = self.path.alpha(t), self.path.sigma(t)
        return alpha * self.mean, (alpha * self.std).square() + sigma.square()

    def flow(self, x: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """Where the probability flow carries x from t to s."""
        (m_t, v_t), (m_s, v_s) = self.moments(t), self.moments(s)
        return m_s + (v_s / v_t).sqrt() * (x - m_t)

    def __call__(self, x: Tensor, t: Tensor, s: Tensor | None = None, **cond: Any) -> Tensor:
        path, var = self.path, self.std.square().to(x.dtype)
        m = self.mean.to(x.dtype)
        alpha, sigma = (left_broadcast(value, x) for value in coefficients(path, t))
        whitened = (x - alpha * m) / (alpha.square() * var + sigma.square())
        match self.predicts:
            case "clean":
                return m + alpha * var * whitened
            case "noise":
                return sigma * whitened
            case "score":
                return -whitened
            case "velocity":
                alpha_rate, sigma_rate = (left_broadcast(value, x) for value in rates(path, t))
                return alpha_rate * m + (alpha * alpha_rate * var + sigma * sigma_rate) * whitened
            case "mean_velocity":
                assert s is not None
                if bool((s == t).all()):
                    return replace(self, predicts="velocity")(x, t)
                return (self.flow(x, t, s) - x) / left_broadcast(s - t, x)
        raise AssertionError(self.predicts)


# Critically damped Langevin dynamics: position and momentum


def cholesky(cov: Tensor) -> Tensor:
    """The lower root of (..., 2, 2), also where it is singular."""
    a, b, c = cov[..., 0, 0], cov[..., 1, 0], cov[..., 1, 1]
    top = a.clamp(min=0).sqrt()
    side = torch.where(top > 0, b / torch.where(top > 0, top, 1), 0)
    low = (c - side.square()).clamp(min=0).sqrt()
    return torch.stack([torch.stack([top, 0 * top], -1), torch.stack([side, low], -1)], -2)


@dataclass(frozen=True)
class BlockGaussian:
    """dx = beta v / m dt, dv = -beta x dt - gamma beta v / m dt + sqrt(2 gamma beta) dW.

    The state is (batch, 2, dim): position and momentum. Dockhorn et al., ICLR 2022.
    """

    beta: float = 4.0
    gamma: float = 1.0
    mass: float = 0.25

    @property
    def F(self) -> Tensor:
        rows = [[0, 1 / self.mass], [-1, -self.gamma / self.mass]]
        return self.beta * torch.tensor(rows, dtype=torch.float64)

    @property
    def GG(self) -> Tensor:
        return torch.diag(torch.tensor([0, 2 * self.gamma * self.beta], dtype=torch.float64))

    @remembered
    def flow_matrix(self, t: Tensor) -> Tensor:
        return torch.linalg.matrix_exp(self.F * t.double()[..., None, None])

    @remembered
    def cov(self, t: Tensor) -> Tensor:
        """Of x_t given x_0, by Van Loan's matrix exponential."""
        both = torch.cat(
            [torch.cat([self.F, self.GG], 1), torch.cat([torch.zeros_like(self.F), -self.F.mT], 1)]
        )
        power = torch.linalg.matrix_exp(both * t.double()[..., None, None])
        return power[..., :2, 2:] @ power[..., :2, :2].mT

    def source(self, like: Tensor, noise: Noise, **cond: Any) -> Tensor:
        end = torch.diag(torch.tensor([1, self.mass], dtype=torch.float64)).sqrt()
        return Block(end) @ noise.normal(like, "source")

    def sample(
        self, x0: Tensor, t: Tensor, noise: Noise, x1: Tensor | None = None, **cond: Any
    ) -> Draw:
        eps = noise.normal(x0, "sample")
        scale, level = self.marginal(t)

        def target(kind: str) -> Tensor:
            match kind:
                case "clean":
                    return x0
                case "noise":
                    return eps
                case "score":
                    return -level.T.solve(eps)
                case "velocity":
                    scale_rate, level_rate = self.rates(t)
                    return scale_rate @ x0 + level_rate @ eps
            raise ValueError(f"no target {kind!r}")

        return Draw(scale @ x0 + level @ eps, x0, None, t, target)

    def gain(self, t: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """(K, C) with q(x_s | x_t, x_0) = N(M_s x_0 + K (x_t - M_t x_0), C)."""
        forth, spread = self.flow_matrix(t - s), self.cov(t - s)
        gain = self.cov(s) @ forth.mT @ torch.linalg.pinv(self.cov(t))
        same = (s == t)[..., None, None]
        gain = torch.where(same, torch.eye(2, dtype=torch.float64), gain)
        left = torch.eye(2, dtype=torch.float64) - gain @ forth
        return gain, left @ self.cov(s) @ left.mT + gain @ spread @ gain.mT

    def posterior(
        self, x: Tensor, clean: Tensor, t: Tensor, s: Tensor, noise: Noise, **cond: Any
    ) -> Tensor:
        gain, cov = self.gain(t, s)
        mean = Block(self.flow_matrix(s)) @ clean
        mean = mean + Block(gain) @ (x - Block(self.flow_matrix(t)) @ clean)
        return mean + Block(cholesky(cov)) @ noise.normal(x, "posterior")

    def transition(self, x: Tensor, s: Tensor, t: Tensor, noise: Noise, **cond: Any) -> Tensor:
        spread = Block(cholesky(self.cov(t - s)))
        return Block(self.flow_matrix(t - s)) @ x + spread @ noise.normal(x, "transition")

    def readout(self, x: Tensor, clean: Tensor) -> Tensor:
        return x[:, 0]

    @remembered
    def marginal(self, t: Tensor, **cond: Any) -> tuple[Block, Block]:
        return Block(self.flow_matrix(t)), Block(cholesky(self.cov(t)))

    @remembered
    def rates(self, t: Tensor, **cond: Any) -> tuple[Block, Block]:
        scale, level = self.marginal(t)
        back = torch.linalg.pinv(level.matrix).mT
        return (
            Block(self.F @ scale.matrix),
            Block(self.F @ level.matrix + 0.5 * self.GG @ back),
        )

    def sde(self, t: Tensor, **cond: Any) -> tuple[Block, Block]:
        return Block(self.F), Block(self.GG.sqrt())


@dataclass(frozen=True)
class BlockField:
    """The field of data N(mean, cov) on `BlockGaussian`, mean (2,) and cov (2, 2) a coordinate."""

    path: BlockGaussian
    mean: Tensor
    cov: Tensor
    predicts: str = "score"

    def moments(self, t: Tensor) -> tuple[Tensor, Tensor]:
        scale = self.path.flow_matrix(t)
        return scale @ self.mean, scale @ self.cov @ scale.mT + self.path.cov(t)

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        scale, level = self.path.marginal(t)
        mean, cov = self.moments(t)
        whitened = Block(torch.linalg.inv(cov)) @ (x - mean[..., None].to(x))
        match self.predicts:
            case "score":
                return -whitened
            case "clean":
                gain = Block(self.cov @ scale.matrix.mT)
                return self.mean[:, None].to(x) + gain @ whitened
            case "noise":
                return level.T @ whitened
            case "velocity":
                return Block(self.path.F) @ x + Block(0.5 * self.path.GG) @ whitened
        raise AssertionError(self.predicts)


# Tokens


def rows_of(probs: Tensor, like: Tensor) -> Tensor:
    return probs.expand(*like.shape, -1)


@dataclass(frozen=True)
class AbsorbingTokens:
    """Tokens 0 .. K - 1 that turn into K, for good, at rate 1 / (1 - t): keep(t) = 1 - t.

    The state is {"tokens": (B, N) int64, "mask": (B, N) bool}; positions outside the mask hold K.

    Args:
        classes: K.
        grow: the chance that a row gains a position at its end in a step of `posterior` with s > 0.
            The state widens when a row needs it, so its width depends on the batch.
    """

    classes: int
    grow: float = 0.0

    def source(self, like: Mapping[str, Tensor], noise: Noise, **cond: Any) -> State:
        return {**like, "tokens": torch.full_like(like["tokens"], self.classes)}

    def sample(self, x0: Any, t: Tensor, noise: Noise, x1: Any = None, **cond: Any) -> Draw:
        def target(kind: str) -> State:
            if kind != "clean":
                raise ValueError(f"absorbing tokens have the target 'clean', got {kind!r}")
            return x0

        x = self.transition(x0, torch.zeros_like(t), t, noise)
        return Draw(x, x0, None, t, target)

    def posterior(
        self, x: Any, clean: Any, t: Tensor, s: Tensor, noise: Noise, **cond: Any
    ) -> State:
        tokens, mask, probs = x["tokens"], x["mask"], clean["tokens"]
        reveal = torch.where(t > 0, (t - s) / torch.where(t > 0, t, 1), 0)
        like = probs[..., 0]
        hidden = (tokens == self.classes) & mask
        now = hidden & (noise.uniform(like, "reveal") < left_broadcast(reveal, like))
        tokens = torch.where(now, noise.categorical(probs, "token"), tokens)
        if self.grow and s > 0:
            gains = noise.uniform(like.new_empty(len(like)), "grow") < self.grow
            length = mask.sum(1) + gains
            width = max(mask.shape[1], int(length.max()))
            tokens = torch.nn.functional.pad(tokens, (0, width - mask.shape[1]), value=self.classes)
            mask = torch.arange(width) < length[:, None]
        return {"tokens": tokens, "mask": mask}

    def transition(self, x: Any, s: Tensor, t: Tensor, noise: Noise, **cond: Any) -> State:
        like = x["tokens"].double()
        keep = left_broadcast((1 - t) / (1 - s), like)
        kept = noise.uniform(like, "absorb") < keep
        return {**x, "tokens": torch.where(kept, x["tokens"], self.classes)}

    def readout(self, x: Any, clean: Any) -> State:
        return x


@dataclass(frozen=True)
class TokenField:
    """Every position has probabilities ``probs`` (K,), whatever the others show."""

    probs: Tensor
    predicts: str = "clean"

    def __call__(self, x: Any, t: Tensor, **cond: Any) -> State:
        return {"tokens": rows_of(self.probs, x["tokens"]), "mask": x["mask"]}


def token_state(batch: int, width: int, classes: int) -> dict[str, Tensor]:
    return {
        "tokens": torch.full((batch, width), classes),
        "mask": torch.ones(batch, width, dtype=torch.bool),
    }


# Steerings


@dataclass
class Projection(Steering):
    """Keeps sum_i normal_i x_i = value, by the orthogonal projection."""

    normal: Tensor
    value: float

    def project(self, x: Tensor) -> Tensor:
        normal = self.normal.to(x)
        excess = (x @ normal - self.value) / normal.square().sum()
        return x - excess[:, None] * normal

    def clean(self, clean: Any, x: Any, aim: Any, run: Run) -> State:
        return self.project(clean)

    def end(self, x0: Any, aim: Any) -> State:
        return self.project(x0)


@dataclass
class FeynmanKac(Steering):
    """Samples p(x_0) exp(reward * number of zeros among the tokens), by particles.

    After each step the rows of every group of ``group`` neighbours are drawn anew with weights
    exp(reward * zeros revealed in the step).
    """

    reward: float
    group: int
    kept: list[Tensor] = field(default_factory=list)

    def start(self, x: Any) -> Any:
        return {"zeros": (x["tokens"] == 0).sum(1), "id": torch.arange(len(x["tokens"]))}

    def after(self, x: Any, clean: Any, aim: Any, run: Run) -> tuple[State, Any, Tensor | None]:
        zeros = (x["tokens"] == 0).sum(1)
        gain = (self.reward * (zeros - aim["zeros"])).double().reshape(-1, self.group)
        weights = gain.softmax(1).repeat_interleave(self.group, 0)
        first = torch.arange(len(zeros)) // self.group * self.group
        kept = first + run.noise.categorical(weights, "resample")
        self.kept.append(kept)
        aim = {"zeros": zeros[kept], "id": aim["id"][kept]}
        return {key: leaf[kept] for key, leaf in x.items()}, aim, kept


@dataclass
class Infill(Steering):
    """Known tokens (B, N); -1 where unknown."""

    known: Tensor

    def clean(self, clean: Any, x: Any, aim: Any, run: Run) -> State:
        probs, known = clean["tokens"], self.known[: len(x["tokens"])]
        sure = torch.nn.functional.one_hot(known.clamp(min=0), probs.shape[-1]).to(probs)
        return {**clean, "tokens": torch.where((known >= 0)[..., None], sure, probs)}


# Samplers


class Remember(Ancestral):
    """Ancestral, with a memory that must always be the state itself, row by row."""

    def start(self, x: Any) -> Any:
        return {"state": x, "nested": ({"tokens": x["tokens"]}, [x["tokens"]], None)}

    def step(self, x: Any, memory: Any, run: Run) -> tuple[State, Any, State]:
        mapping, listed, nothing = memory["nested"]
        assert nothing is None
        for tokens in (memory["state"]["tokens"], mapping["tokens"], listed[0]):
            assert torch.equal(tokens, x["tokens"])
        x, _, clean = super().step(x, None, run)
        return x, self.start(x), clean


class Langevin:
    """Pairs (t, t): x + step score + sqrt(2 step) z, a Markov chain whose target is q(x_t)."""

    def __init__(self, size: float) -> None:
        self.size = size

    def start(self, x: Tensor) -> None:
        return None

    def step(self, x: Tensor, memory: None, run: Run) -> tuple[Tensor, None, Tensor]:
        assert run.t == run.s
        score = run.field(x, run.t, **run.cond)
        moved = x + self.size * score
        return moved + math.sqrt(2 * self.size) * run.noise.normal(x, "langevin"), None, x


@dataclass
class Counting:
    """A field that counts its calls and notes their conditions."""

    field: Field
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def predicts(self) -> str:
        return self.field.predicts

    def __call__(self, x: Any, t: Tensor, **cond: Any) -> Any:
        self.calls.append(cond)
        return self.field(x, t, **cond)
