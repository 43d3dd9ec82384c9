"""Paths of linear SDEs dx = F x dt + G dW whose coefficients are scales.

A path is its transition kernel x_t | x_s ~ N(M_ts x_s, C_ts) and its coefficients F and G; the rest
follows by formulas that hold for every kind of scale (`fluvial.core.scales`), scalars included:
`OrnsteinUhlenbeck` with A = -1/2 and Q = 1 is a variance-preserving path, with A = 0 a
variance-exploding one.

Coefficients are computed in double precision, whatever the dtype of the times and of the state:
where noise enters the momentum alone, the variance of the position begins as t^3, and single
precision would lose the determinant of the covariance.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from fluvial.core.gaussian.paths import CEILING, AlphaSigmaPath, _rate, _ratio
from fluvial.core.protocols import Draw, LinearOperator, Noise, left_broadcast
from fluvial.core.scales import Block, Scalar, Split, mix


class LinearSDE(ABC):
    """The law of dx = F x dt + G dW, F and G scales of one kind or scalars, by its kernel.

    With M_s, C_s the moments of x_s given x_0, the law of x_s given both x_t and x_0 is normal with
    mean M_s x_0 + K (x_t - M_t x_0), K = C_s M_ts^T C_t^-1, and covariance
    (1 - K M_ts) C_s (1 - K M_ts)^T + K C_ts K^T: a sum of covariances, which rounding leaves one.
    """

    initial: Any = None
    """Covariance of the state at t = 0 about the clean end, None for 0. Such as that of a momentum,
    which data do not have: what is learned does then not depend on its draw (hybrid score
    matching)."""

    @abstractmethod
    def kernel(self, s: Tensor, t: Tensor, **cond: Any) -> tuple[Any, Any]:
        """(M, C): x_t | x_s ~ N(M x_s, C), s <= t, both () or (batch,)."""

    @abstractmethod
    def sde(self, t: Tensor, **cond: Any) -> tuple[Any, Any]:
        """(F, G)."""

    def moments(self, t: Tensor, **cond: Any) -> tuple[Any, Any]:
        """(M, C): x_t | x_0 ~ N(M x_0, C), the variance of the start included."""
        return self._with_initial(*self.kernel(torch.zeros_like(t), t, **cond))

    def _with_initial(self, scale: Any, cov: Any) -> tuple[Any, Any]:
        return scale, cov if self.initial is None else cov + scale @ self.initial @ scale.T

    def white(self, like: Tensor, noise: Noise, tag: str, **cond: Any) -> Tensor:
        """The noise that L and G are applied to, N(0, I). A subclass may colour it, by a covariance
        that commutes with the scales."""
        return noise.normal(like, tag)

    # GaussianPath

    def marginal(self, t: Tensor, **cond: Any) -> tuple[Any, Any]:
        """(M, L) with L L^T = C; of a `Block`, the lower triangular root."""
        scale, cov = self.moments(t, **cond)
        return scale, cov.cholesky()

    def rates(self, t: Tensor, **cond: Any) -> tuple[Any, Any]:
        """(F M, F L + G G^T L^-T / 2). What diverges at t = 0, where L = 0, is left out there."""
        drift, spread = self.sde(t, **cond)
        scale, level = self.marginal(t, **cond)
        grown = spread @ spread.T @ level.inverse().T
        return drift @ scale, drift @ level + 0.5 * grown

    # Path

    def source(self, like: Tensor, noise: Noise, **cond: Any) -> Tensor:
        """x_1 ~ N(0, C_1), shaped as ``like``."""
        _, level = self.marginal(torch.ones((), dtype=torch.float64), **cond)
        return cast(Tensor, level @ self.white(like, noise, "source", **cond))

    def sample(
        self, x0: Tensor, t: Tensor, noise: Noise, x1: Tensor | None = None, **cond: Any
    ) -> Draw:
        """x_t = M x_0 + L eps. A given ``x1`` is the source end: eps = L_1^-1 x1."""
        if not x0.is_floating_point():
            raise TypeError(f"x0 must be floating, got {x0.dtype}")
        if x1 is None:
            eps = self.white(x0, noise, "source", **cond)
        elif x1.shape != x0.shape:
            raise ValueError(f"x1 has shape {tuple(x1.shape)}, x0 {tuple(x0.shape)}")
        else:
            eps = self.marginal(torch.ones((), dtype=torch.float64), **cond)[1].solve(x1)
        scale, level = self.marginal(t, **cond)

        def target(kind: str) -> Tensor:
            match kind:
                case "clean":
                    return x0
                case "noise":
                    return eps
                case "velocity":
                    scale_rate, level_rate = self.rates(t, **cond)
                    return mix((scale_rate, x0), (level_rate, eps))
                case "score":
                    return cast(Tensor, -level.T.solve(eps))
            raise ValueError(
                f"{type(self).__name__} has targets 'clean', 'noise', 'velocity' and 'score', "
                f"got {kind!r}"
            )

        return Draw(mix((scale, x0), (level, eps)), x0, x1, t, target)

    def posterior(
        self, x: Tensor, clean: Tensor, t: Tensor, s: Tensor, noise: Noise, **cond: Any
    ) -> Tensor:
        """A draw of q(x_s | x_t = x, x_0 = clean), s <= t."""
        from_x, from_clean, cov = self.bridge(s, t, **cond)
        eps = self.white(x, noise, "posterior", **cond)
        return _unless(s == t, x, mix((from_x, x), (from_clean, clean), (cov.cholesky(), eps)))

    def bridge(self, s: Tensor, t: Tensor, **cond: Any) -> tuple[Any, Any, Any]:
        """(K, H, C): x_s | x_t, x_0 ~ N(K x_t + H x_0, C), s < t."""
        scale, cov = self.moments(s, **cond)
        forth, added = self.kernel(s, t, **cond)
        gain = cov @ forth.T @ (forth @ cov @ forth.T + added).inverse()
        rest = 1 - gain @ forth
        return gain, rest @ scale, rest @ cov @ rest.T + gain @ added @ gain.T

    def transition(self, x: Tensor, s: Tensor, t: Tensor, noise: Noise, **cond: Any) -> Tensor:
        """A draw of q(x_t | x_s = x), s <= t."""
        scale, cov = self.kernel(s, t, **cond)
        eps = self.white(x, noise, "transition", **cond)
        return _unless(s == t, x, mix((scale, x), (cov.cholesky(), eps)))

    def readout(self, x: Tensor, clean: Tensor) -> Tensor:
        return x


def _unless(same: Tensor, x: Tensor, moved: Tensor) -> Tensor:
    """``moved``, but ``x`` itself where a step goes nowhere."""
    if same.ndim == 0:
        return x if same else moved
    return torch.where(left_broadcast(same, x), x, moved)


# Clocks: how fast a process with constant coefficients runs


class Clock(Protocol):
    """tau(t) = int_0^t beta(u) du, rising from tau(0) = 0, and beta = ``rate``."""

    def __call__(self, t: Tensor) -> Tensor: ...
    def rate(self, t: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class LinearClock:
    """beta(t) = beta_min + t (beta_max - beta_min), constant if there is no ``beta_max``."""

    beta_min: float
    beta_max: float | None = None

    def __post_init__(self) -> None:
        if not (0 < self.beta_min < math.inf and 0 < self._last < math.inf):
            raise ValueError(
                f"betas must be positive and finite, got {self.beta_min} and {self.beta_max}"
            )

    @property
    def _last(self) -> float:
        return self.beta_min if self.beta_max is None else self.beta_max

    def __call__(self, t: Tensor) -> Tensor:
        return 0.5 * t * t * (self._last - self.beta_min) + t * self.beta_min

    def rate(self, t: Tensor) -> Tensor:
        return self.beta_min + t * (self._last - self.beta_min)


@dataclass(frozen=True)
class CustomClock:
    """The user's tau; its rate by forward-mode differentiation.

    Args:
        tau_of: an elementwise function of a tensor of times, differentiable by torch.

    Raises:
        ValueError: tau(0) is not 0, tau does not rise strictly, or a value before t = 1 is not
            finite.
    """

    tau_of: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        tau = self(torch.linspace(0, 1, 101, dtype=torch.float64))
        if tau.shape != (101,) or not bool(tau[:-1].isfinite().all()) or not tau[0].abs() < 1e-12:
            raise ValueError(f"tau_of must map (n,) times to (n,) values from 0 on, got {tau}")
        if not bool((tau.diff() > 0).all()):
            raise ValueError("tau_of must rise strictly as t grows from 0 to 1")

    def __call__(self, t: Tensor) -> Tensor:
        return self.tau_of(t)

    def rate(self, t: Tensor) -> Tensor:
        return _rate(self.tau_of, t, CEILING)


@dataclass(frozen=True, eq=False)
class OrnsteinUhlenbeck(LinearSDE):
    """dx = beta(t) A x dt + sqrt(beta(t)) S dW, S S^T = Q: constant coefficients on a clock.

    With tau = tau(t) - tau(s),

        M_ts = exp(A tau),    C_ts = int_0^tau exp(A u) Q exp(A^T u) du,

    which is (exp(2 A tau) - 1) / 2 A Q where A and Q commute. Of a `Block`, with mu half the trace
    of A, N = A - mu and delta^2 = -det N,

        exp(A u) = exp(mu u) (cosh(delta u) + N sinh(delta u) / delta).

    C is then a sum of three integrals, of the products of two functions of u. Gauss and Legendre's
    rule takes them to rounding, as the functions are entire and the nodes enough for their growth,
    and nothing cancels, however short tau is, with too little damping, too much or just enough.

    Critically damped Langevin dynamics has A = [[0, a^2], [-1, -2 a]] and Q = diag(eps^2, sigma^2),
    heat a `Spectral` A, minus the eigenvalues of the Laplacian, and coloured noise any Q, with A a
    `Scalar`.

    Args:
        drift: A, of any kind.
        noise: Q, symmetric and without negative eigenvalues.
        clock: tau and beta.
        initial: covariance of the start about the clean end; None for 0.

    Raises:
        ValueError: ``drift`` is not finite, ``noise`` or ``initial`` is no covariance; of blocks,
            rows differ, or the clock does not end.
        TypeError: the kinds do not go together.
    """

    drift: Any
    noise: Any
    clock: Clock
    initial: Any = None

    def __post_init__(self) -> None:
        for name in ("drift", "noise", "initial"):
            if getattr(self, name) is not None:
                _check_scale(name, getattr(self, name), covariance=name != "drift")
        self.drift @ self.noise @ (
            self.noise if self.initial is None else self.initial
        )  # their kinds
        if isinstance(self.drift, Block):
            end = float(self.clock(torch.ones((), dtype=torch.float64)))
            drift, noise = self._blocks()
            object.__setattr__(self, "_kernel", _BlockKernel.of(drift, noise, end))
            object.__setattr__(self, "_sde", (Block(drift), Block(noise).cholesky()))
        else:
            object.__setattr__(self, "_sde", (self.drift, self.noise.cholesky()))

    def _blocks(self) -> tuple[np.ndarray, np.ndarray]:
        """A and Q as matrices on the host."""
        both = []
        for name in ("drift", "noise"):
            matrix = (getattr(self, name) @ Block(np.eye(2))).matrix
            if matrix.shape != (2, 2):
                raise ValueError(f"{name} must be one block for all rows, got {matrix.shape}")
            both.append(matrix.detach().cpu().double().numpy())
        return both[0], both[1]

    def kernel(self, s: Tensor, t: Tensor, **cond: Any) -> tuple[Any, Any]:
        return self._law(self._on_clock(self.clock, t) - self._on_clock(self.clock, s))

    def moments(self, t: Tensor, **cond: Any) -> tuple[Any, Any]:
        return self._with_initial(*self._law(self._on_clock(self.clock, t)))

    def _law(self, tau: Any) -> tuple[Any, Any]:
        if isinstance(self.drift, Block):
            return self._kernel(tau)  # type: ignore[attr-defined]
        growth, a = tau * self.drift, self.drift.coefficients
        still = a == 0
        spread = torch.expm1(2 * growth.coefficients) / torch.where(still, 1.0, 2 * a)
        spread = torch.where(still, growth.spread(tau).to(spread), spread)
        return (
            growth.with_coefficients(growth.coefficients.exp()),
            growth.with_coefficients(spread) @ self.noise,
        )

    def sde(self, t: Tensor, **cond: Any) -> tuple[Any, Any]:
        rate = self._on_clock(self.clock.rate, t)
        drift, root = self._sde  # type: ignore[attr-defined]
        return rate * drift, rate**0.5 * root

    def _on_clock(self, clock: Callable[[Any], Any], t: Tensor) -> Any:
        """tau or beta at t; of blocks an array, where that can be."""
        array = _array(t) if isinstance(self.drift, Block) else None
        if array is not None and isinstance(self.clock, LinearClock):
            return clock(array)
        value = clock(_double(t))
        array = _array(value) if array is not None else None
        return value if array is None else array

    def stationary(self) -> Any:
        """The covariance S that stays: A S + S A^T + Q = 0.

        Raises:
            ValueError: A has an eigenvalue whose real part is not negative.
        """
        if not isinstance(self.drift, Block):
            if not bool((self.drift.coefficients < 0).all()):
                raise ValueError(f"drift must be negative, got {self.drift.coefficients}")
            return (-2 * self.drift).inverse() @ self.noise
        a, q = self._blocks()
        trace, det = np.trace(a), np.linalg.det(a)
        if not (trace < 0 < det):
            raise ValueError(f"drift must have eigenvalues of negative real part, got {a.tolist()}")
        rest = a - trace * np.eye(2)
        return Block(-(det * q + rest @ q @ rest.T) / (2 * trace * det))


@dataclass(frozen=True)
class _BlockKernel:
    """exp(A tau) and int_0^tau exp(A u) Q exp(A^T u) du for 2x2 matrices.

    Of an array tau it makes arrays, of a tensor tensors: of a few numbers, NumPy has computed what
    torch has not begun.
    """

    mean: float  # mu
    disc: float  # delta^2
    nodes: np.ndarray  # of the rule on [0, 1], and 1, of weight 0, for exp(A tau) itself
    weights: np.ndarray
    powers: np.ndarray  # (2, 4): 1 and N
    products: np.ndarray  # (3, 4): Q, Q N^T + N Q and N Q N^T

    @staticmethod
    def of(drift: np.ndarray, noise: np.ndarray, end: float) -> _BlockKernel:
        (a, b), (c, d) = drift.tolist()
        mean, disc = (a + d) / 2, ((a - d) / 2) ** 2 + b * c
        reach = (abs(mean) + math.sqrt(abs(disc))) * end
        if not reach < 1e4:
            raise ValueError(f"the clock must end within 1e4 times of the drift, got {reach:g}")
        # The integrands are sums of exp(z x), |z| <= 2 reach, on [0, 1]. Their coefficients in
        # Legendre's polynomials of order k, as I_k(z / 2) or J_k(z / 2), have left what rounding
        # sees at twice this order; a wave takes the longer.
        number = 12 + math.ceil(reach / 2 if disc >= 0 else reach)
        nodes, weights = np.polynomial.legendre.leggauss(number)
        turn = drift - mean * np.eye(2)
        products = [noise, noise @ turn.T + turn @ noise, turn @ noise @ turn.T]
        return _BlockKernel(
            mean,
            disc,
            np.append((nodes + 1) / 2, 1.0),
            np.append(weights / 2, 0.0),
            np.stack([np.eye(2), turn]).reshape(2, 4),
            np.stack(products).reshape(3, 4),
        )

    def __call__(self, tau: Any) -> tuple[Block, Block]:
        constants: Any = self.nodes, self.weights, self.powers, self.products
        if isinstance(tau, Tensor):
            constants = (torch.from_numpy(constant).to(tau.device) for constant in constants)
        nodes, weights, powers, products = constants
        tau = tau[..., None]
        cosh, sinh = self._functions(tau * nodes)
        weights = tau * weights
        cosh_, sinh_ = cosh * weights, sinh * weights
        gram = [(a * b).sum(-1) for a, b in ((cosh_, cosh), (cosh_, sinh), (sinh_, sinh))]
        return _combine([cosh[..., -1], sinh[..., -1]], powers), _combine(gram, products)

    def _functions(self, u: Any) -> tuple[Any, Any]:
        """exp(mu u) cosh(delta u) and exp(mu u) sinh(delta u) / delta."""
        lib: Any = torch if isinstance(u, Tensor) else np
        if self.disc > 0:
            delta = math.sqrt(self.disc)
            upper, ratio = lib.exp((self.mean + delta) * u), -2 * delta * u
            return upper * (1 + lib.exp(ratio)) / 2, upper * lib.expm1(ratio) / (-2 * delta)
        decay = lib.exp(self.mean * u)
        if self.disc == 0:
            return decay, decay * u
        omega = math.sqrt(-self.disc)
        return decay * lib.cos(omega * u), decay * lib.sin(omega * u) / omega


def _combine(weights: list[Any], matrices: Any) -> Block:
    """The sum of ``weights`` times the rows of ``matrices``, (n, 4)."""
    if isinstance(matrices, Tensor):
        return Block((torch.stack(weights, -1) @ matrices).unflatten(-1, (2, 2)))
    return Block((np.array(weights).T @ matrices).reshape(*weights[0].shape, 2, 2))


@dataclass(frozen=True, eq=False)
class RangeNull(LinearSDE):
    """What an operator measures goes one way, the rest another.

        x_t = (alpha_in P + alpha_out Q) x_0 + (sigma_in P + sigma_out Q) eps

    with P = A^+ A and Q = 1 - P, each part along a path of scalars of its own. The whole starts at
    the measured end, x_1 = A^+ y + sigma_out(1) Q eps. The system-embedded bridge has alpha_in = 1
    (Sobieski et al., NeurIPS 2025).

    Noise in the range is white here. Noise of the measurement, brought back by A^+, is white where
    the singular values of A are equal (masks, averages); for other operators override `white`.

    The operator and the measurement may come with a call, ``operator=`` and ``y=``.

    Args:
        inside: the path in the range of A^+; None where it is known without noise, and stays.
        outside: the path in the null space of A.
        operator: for calls that bring none.

    Raises:
        ValueError: in a call, no operator; in `source`, no ``y``; in `sample`, an ``x1``.
    """

    inside: AlphaSigmaPath | None
    outside: AlphaSigmaPath
    operator: LinearOperator | None = None

    def kernel(self, s: Tensor, t: Tensor, **cond: Any) -> tuple[Split, Split]:
        s, t = _double(s), _double(t)
        return self._split([_scalar_kernel(path, s, t) for path in self._paths], cond)

    def sde(self, t: Tensor, **cond: Any) -> tuple[Split, Split]:
        t = _double(t)
        return self._split(
            [_values(t, path.sde(t) if path else None) for path in self._paths], cond
        )

    def rates(self, t: Tensor, **cond: Any) -> tuple[Split, Split]:
        t = _double(t)
        return self._split(
            [_values(t, path.rates(t) if path else None) for path in self._paths], cond
        )

    def source(self, like: Tensor, noise: Noise, **cond: Any) -> Tensor:
        """x_1 = A^+ y + sigma_out(1) Q eps, shaped as ``like``."""
        if cond.get("y") is None:
            raise ValueError("RangeNull starts at a measurement: source needs y")
        one = torch.ones((), dtype=torch.float64)
        level, _ = self._split([(0 * one, one), (self.outside.sigma(one), one)], cond)
        eps = self.white(like, noise, "source", **cond)
        return cast(Tensor, level.operator.A_dagger(cond["y"].to(like)) + level @ eps)

    def sample(
        self, x0: Tensor, t: Tensor, noise: Noise, x1: Tensor | None = None, **cond: Any
    ) -> Draw:
        if x1 is not None:
            raise ValueError(
                "RangeNull draws x_t given x0 alone; bridge has its law given both ends"
            )
        return super().sample(x0, t, noise, **cond)

    @property
    def _paths(self) -> tuple[AlphaSigmaPath | None, AlphaSigmaPath]:
        return self.inside, self.outside

    def _split(self, parts: list[Pair], cond: Any) -> tuple[Split, Split]:
        operator = cond.get("operator", self.operator)
        if operator is None:
            raise ValueError("RangeNull needs an operator, its own or one of the call")
        first, second = (torch.stack(pair, -1) for pair in zip(*parts, strict=True))
        return Split(operator, first), Split(operator, second)


Pair: TypeAlias = tuple[Tensor, Tensor]


def _values(t: Tensor, scales: tuple[Scalar, Scalar] | None) -> Pair:
    if scales is None:  # what stays does not move
        return torch.zeros_like(t), torch.zeros_like(t)
    return scales[0].value, scales[1].value


def _scalar_kernel(path: AlphaSigmaPath | None, s: Tensor, t: Tensor) -> Pair:
    if path is None:
        return torch.ones_like(t), torch.zeros_like(t)
    rho, _ = path._correlation(t, s)
    return _ratio(path.alpha(t), path.alpha(s)), path.sigma(t).square() * (1 - rho.square())


def _double(t: Tensor) -> Tensor:
    return t if t.device.type == "mps" else t.double()


def _array(t: Tensor) -> np.ndarray | None:
    """Times on the host that nothing is differentiated by, as an array."""
    if t.device.type != "cpu" or unpack_dual(t).tangent is not None:
        return None
    try:
        return t.numpy().astype(np.float64, copy=False)
    except RuntimeError:  # it has a gradient, or stands for one in a transformation of torch.func
        return None


def _check_scale(name: str, scale: Any, covariance: bool) -> None:
    values = scale.matrix if isinstance(scale, Block) else scale.coefficients
    fine = bool(values.isfinite().all())
    if fine and covariance and isinstance(scale, Block):
        size = values.abs().amax((-2, -1), keepdim=True)
        fine = bool(((values - values.mT).abs() <= 1e-6 * size).all())
        fine = fine and bool((torch.linalg.eigvalsh(values) >= -1e-6 * size[..., 0]).all())
    elif fine and covariance:
        fine = not values.is_complex() and bool((values >= 0).all())
    if not fine:
        raise ValueError(
            f"{name} must be finite{' and a covariance' if covariance else ''}, got {values}"
        )
