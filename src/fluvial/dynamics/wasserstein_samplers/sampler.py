"""The six schemes as one sampler, on any Gaussian path of scalars."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, cast, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from fluvial.core.arguments import whole_number
from fluvial.core.gaussian.fields import combine, predicted, scalars
from fluvial.core.gaussian.levels import time_of
from fluvial.core.gaussian.paths import AlphaSigmaPath
from fluvial.core.protocols import Field, Noise, Run, Steering, take
from fluvial.core.scales import Scalar
from fluvial.core.simulate import simulate
from fluvial.core.time import check_pairs
from fluvial.dynamics.wasserstein_samplers.brownian import SharedBrownian
from fluvial.dynamics.wasserstein_samplers.clock import clock_grid, clock_of

Scheme: TypeAlias = Literal["em", "ei", "rem", "rei", "so", "so-jvp"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
DENSE = 200
"""Numbers in an event up to which ``hessian="auto"`` forms the Hessian."""
TANGENTS = 1 << 22
"""Numbers in the tangents that are carried through a field at a time."""

Score: TypeAlias = Callable[[Tensor], tuple[Tensor, tuple[Tensor, ...]]]
"""y -> (score, (clean prediction,) or, where nobody will read it, ())."""


class WassersteinSampler:
    r"""Samples a diffusion by a scheme with a bound on the Wasserstein distance of what it makes.

    In the clock s = log(1 + sigma^2 / alpha^2) and with y = x / sqrt(alpha^2 + sigma^2) every path
    of scalars is the variance-preserving one, dy = -y / 2 ds + dW, whatever its schedule, and
    sampling is its reversal, dy = g du + dW with g = y / 2 + score and u running against s. A step
    of the grid, from s to s - h, is one of (z, z' ~ N(0, I), U ~ U[0, 1] a row)

    * ``"em"`` (Euler-Maruyama): y + h g + sqrt(h) z;
    * ``"ei"`` (exponential integrator): e^(h/2) y + 2 (e^(h/2) - 1) score + sqrt(e^h - 1) z;
    * ``"rem"``, ``"rei"`` (randomised midpoint): as these two, with the score, and in ``"rem"`` all
      of g, taken at s - U h and at the state to which the scheme itself brings y in the time U h;
    * ``"so"`` (local linearisation): with H the derivative of the score and L = I / 2 + H,
      y + h phi_1(h L) g + h^2 phi_2(h L) M + sqrt(h) phi_1(2 h L)^(1/2) z, exact for Gaussian data
      of unit variance, where M = -score / 2 - H g is the drift of g in time, by the Fokker-Planck
      equation;
    * ``"so-jvp"``: the same with one product, y + h g + (h^2 / 8) y + sqrt(h) (I + h L / 2) z.

    Since L g + M = y / 4, whatever H, the drift of ``"so"`` is h g + (h^2 / 4) phi_2(h L) y, and
    neither M nor a series in g is ever formed: its power series has the two vectors y and z, and by
    Horner's rule ``order`` products with H serve both.

    For data whose density is strongly log-concave and smooth, ``"so"`` needs O(sqrt(d) / eps) steps
    for an accuracy of eps, the others O(d / eps^2): see `w2_bound`. On one Brownian path their
    errors fall as h^1.5 to h^2, and as h. Where the bound does not hold, as for data of many modes,
    what matters is h times the largest eigenvalue of H, which is about 1 / s near the data and can
    be large between modes: steps should be short there (``pairs``). The eigenvalues of L may have
    either sign; nothing here inverts it.

    On a path of constant rate, ``VPLinear(T, T)``, ``"em"`` is the step of
    `fluvial.core.gaussian.sde.EulerMaruyama`; on others that one freezes the rate over a step,
    where this one takes its integral, h. Where alpha = 0 the clock is infinite, and every scheme
    draws x_s = alpha_s clean + sigma_s z. Pairs that rise are drawn from the path's transition.

    Args:
        scheme: one of the six.
        hessian: how ``"so"`` comes by H: ``"dense"`` forms it by forward-mode derivatives, one a
            number of the event, and takes the functions of L by its eigenvalues, after making it
            symmetric; ``"jvp"`` sums the series; ``"auto"`` is dense up to 200 numbers.
        order: products in the series: the noise up to (h L)^order, the drift up to h^order. The
            default leaves an error of 2e-6 where the norm of h L is 0.3 and of 2e-4 where it is 1.
            Beyond pi the series does not converge.
        t_min: the midpoint schemes ask for the score at times as near to 0 as chance has it; never
            before this one, which should be the smallest that the field has learnt.
        brownian: take the noise from this path instead, as to compare schemes and step counts.

    Raises:
        ValueError: an unknown ``scheme`` or ``hessian``, ``order`` < 1, ``t_min`` outside [0, 1);
            at a step, a path without one alpha and one sigma for all rows, a step that is not made
            of cells of ``brownian``.

    Citation: Yu and Yu, NeurIPS 2025, arXiv 2502.04849. ``"so-jvp"``, the sum in one series and the
    clock are not in the paper.
    """

    def __init__(
        self,
        scheme: Scheme = "so",
        *,
        hessian: Literal["auto", "dense", "jvp"] = "auto",
        order: int = 6,
        t_min: float = 0.0,
        brownian: SharedBrownian | None = None,
    ) -> None:
        if scheme not in SCHEMES:
            raise ValueError(f"scheme must be one of {', '.join(SCHEMES)}, got {scheme!r}")
        if hessian not in ("auto", "dense", "jvp"):
            raise ValueError(f"hessian must be 'auto', 'dense' or 'jvp', got {hessian!r}")
        if order < 1:
            raise ValueError(f"order must be at least 1, got {order}")
        if not 0 <= t_min < 1:
            raise ValueError(f"t_min must lie in [0, 1), got {t_min}")
        self.scheme, self.hessian, self.t_min, self.brownian = scheme, hessian, t_min, brownian
        self.order = 1 if scheme == "so-jvp" else order

    def is_dense(self, dim: int) -> bool:
        """Whether the Hessian of an event of ``dim`` numbers is formed."""
        if self.scheme != "so" or dim == 0:
            return False
        return self.hessian == "dense" or self.hessian == "auto" and dim <= DENSE

    def calls(self, dim: int) -> tuple[int, int]:
        """(evaluations of the field, products with its derivative) of a step, ``dim`` numbers an
        event. A product evaluates the field as well."""
        if self.scheme in ("so", "so-jvp"):
            return (1, dim) if self.is_dense(dim) else (0, self.order)
        return (2 if self.scheme in ("rem", "rei") else 1), 0

    # Sampler

    def start(self, x: Tensor) -> None:
        return None

    def step(self, x: Tensor, memory: Any, run: Run) -> tuple[Tensor, Any, Tensor | None]:
        if run.s >= run.t:
            clean = predicted(x, run).clean if run.watched else None
            if run.s > run.t:
                path = cast(AlphaSigmaPath, run.path)
                x = path.transition(x, run.t, run.s, run.noise, **run.cond)
            return x, memory, clean
        now, then = (_place(run, t) for t in (run.t, run.s))
        h = now.clock - then.clock
        if math.isinf(h):
            clean = predicted(x, run).clean
            z = run.noise.normal(x, "brownian")
            alpha, sigma = scalars(run.path, run.s, run.cond, "WassersteinSampler")
            return combine(alpha, clean, sigma, z), memory, clean
        motion: _Motion = (
            _Drawn(run.noise, x, h)
            if self.brownian is None
            else self.brownian.over(now.clock, then.clock, x, run.noise)
        )
        match self.scheme:
            case "em" | "ei":
                x, clean = self._frozen(x, run, now, then, h, motion)
            case "rem" | "rei":
                x, clean = self._midpoint(x, run, now, then, h, motion)
            case _:
                x, clean = self._linearised(x, run, now, then, h, motion)
        return x, memory, clean

    def _frozen(
        self, x: Tensor, run: Run, now: _Place, then: _Place, h: float, motion: _Motion
    ) -> tuple[Tensor, Tensor | None]:
        """EM and EI: the score stays as it is over the step; EI solves for the rest."""
        if self.scheme == "em":
            rate, on_y, on_score = 0.0, 1 + h / 2, h
        else:
            rate, on_y, on_score = 0.5, math.exp(h / 2), 2 * math.expm1(h / 2)
        guess = predicted(x, run)
        grown = then.scale / now.scale * on_y
        moved = guess.mix(0.0, -then.scale * on_score / now.level, on_x=grown)
        moved.add_(motion.integral(rate), alpha=then.scale)
        return moved, guess.clean if run.watched else None

    def _midpoint(
        self, x: Tensor, run: Run, now: _Place, then: _Place, h: float, motion: _Motion
    ) -> tuple[Tensor, Tensor | None]:
        """REM and REI."""
        path = cast(AlphaSigmaPath, run.path)
        u = run.noise.uniform(x.new_empty(len(x)), "midpoint").double()
        exponential = self.scheme == "rei"
        to_midpoint, whole = motion.split(0.5 if exponential else 0.0, u)

        guess = predicted(x, run)
        y, score = x / now.scale, guess.mix(0.0, -1 / now.level)
        half = 0.5 * h * u
        on_y, on_score = (half.exp(), 2 * half.expm1()) if exponential else (1 + half, 2 * half)
        middle = Scalar(on_y) @ y + Scalar(on_score) @ score + to_midpoint

        t = time_of(path, torch.expm1(now.clock - h * u).sqrt()).clamp(min=self.t_min)
        alpha, sigma = path.alpha(t), path.sigma(t)
        scale = torch.hypot(alpha, sigma)
        noise = predicted(Scalar(scale) @ middle, replace(run, t=t)).ends()[1]
        score = (Scalar(-scale / sigma) @ noise).to(x.dtype)  # a field may have taken that of t
        if exponential:
            growth = h * torch.exp(0.5 * h * (1 - u))
            y = math.exp(h / 2) * y + Scalar(growth) @ score + whole
        else:
            y = y + h * (0.5 * middle + score) + whole
        return then.scale * y, guess.clean if run.watched else None

    def _linearised(
        self, x: Tensor, run: Run, now: _Place, then: _Place, h: float, motion: _Motion
    ) -> tuple[Tensor, Tensor | None]:
        """SO: y + h g, and the rest, which depends on the Hessian."""

        def score(y: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            guess = predicted(y * now.scale, run)
            return guess.mix(0.0, -1 / now.level), (guess.clean,) if run.watched else ()

        y = x / now.scale
        rest = _by_eigenvalues if self.is_dense(x[0].numel()) else self._by_series
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no forward-mode derivative
            value, clean, bent = rest(score, y, h, motion)
        moved = then.scale * ((1 + 0.5 * h) * y + h * value + bent)
        return moved, clean[0] if clean else None

    def _by_series(
        self, score: Score, y: Tensor, h: float, motion: _Motion
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """(score, clean, (h^2 / 4) phi_2(h L) y + noise): sum_k L^k v_k by Horner's rule."""

        def term(k: int) -> Tensor:
            if k > max(self.order - 2, 0):
                return motion.moment(k)
            return motion.moment(k).add(y, alpha=h ** (k + 2) / (4 * math.factorial(k + 2)))

        bent = motion.moment(self.order)
        for k in range(self.order - 1, -1, -1):
            value, product, clean = _jvp(score, y, bent)
            bent = term(k).add_(product).add_(bent, alpha=0.5)
        return value, clean, bent

    # Samples

    @torch.no_grad()
    def sample(
        self,
        field: Field,
        num: int,
        *,
        path: AlphaSigmaPath,
        shape: tuple[int, ...],
        noise: Noise,
        steps: int | None = None,
        horizon: float | None = None,
        pairs: Tensor | None = None,
        x1: Float[Tensor, "num *event"] | None = None,
        steer: Steering | None = None,
        batch_size: int = 500,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        progress: bool = False,
        **cond: Any,
    ) -> Float[Tensor, "num *event"]:
        """Samples (num, *shape) of a field, learned or not, of any kind.

        The start is x ~ N(0, sigma^2 I) with sigma that of the path at the first time: the law of
        noised data that are all 0, which the bounds are for. It is not N(0, I) where the path ends
        before the data are gone.

        Args:
            field: a prediction along ``path``; its kind is converted.
            num: how many.
            path: of the field. ``VPLinear(T, T)`` is the paper's, with its time T t.
            shape: of one event.
            noise: keyed noise; row i of the result depends on row i of it only.
            steps: of equal length in the clock (see the class), from ``horizon`` to 0.
            horizon: clock at the start, the paper's T; that of the end of the path by default,
                which has to be finite then.
            pairs: other times, (K, 2), falling to 0, in place of ``steps`` and ``horizon``.
            x1: start to use in place of a draw.
            steer: bends the simulation.
            batch_size: rows at a time.
            dtype, device: of the samples, where ``x1`` does not say.
            progress: show a progress bar over batches.
            **cond: passed on to the field: numbers, or tensors with ``num`` rows.

        Raises:
            TypeError: a number that has to be whole is not.
            ValueError: both or none of ``steps`` and ``pairs``; they are not as said; a negative
                ``num``, a ``batch_size`` that is not positive; ``x1`` of another shape, or not
                finite; ``brownian`` of another number of rows.
            FloatingPointError: a sample is not finite, since the field was not.
        """
        num, batch_size = whole_number("num", num), whole_number("batch_size", batch_size)
        if num < 0 or batch_size < 1:
            raise ValueError(f"need num >= 0 and batch_size >= 1, got {num} and {batch_size}")
        if (steps is None) == (pairs is None):
            raise ValueError(f"need either steps or pairs, got {steps} and {pairs}")
        if pairs is None:
            pairs = clock_grid(path, cast(int, steps), horizon)
        elif horizon is not None:
            raise ValueError(f"horizon goes with steps; pairs have their own, got {horizon}")
        check_pairs(pairs)
        if pairs[-1, 1] != 0 or not bool((pairs[:, 1] < pairs[:, 0]).all()):
            raise ValueError(f"pairs must fall to 0, got {pairs.tolist()}")
        if x1 is not None:
            if tuple(x1.shape) != (num, *shape):
                raise ValueError(f"x1 must have shape {(num, *shape)}, got {tuple(x1.shape)}")
            if not bool(x1.isfinite().all()):
                raise ValueError("x1 holds values that are not finite")
            dtype, device = x1.dtype, x1.device
        if self.brownian is not None:
            batch_size = max(num, 1)

        simulated: Any = simulate  # whose parts take any state, and these only tensors
        level = Scalar(path.sigma(pairs[0, 0].double().cpu()))
        result = torch.empty(num, *shape, dtype=dtype, device=device)
        starts = range(0, num, batch_size)
        for start in tqdm(starts, desc="sampling", unit="batch", disable=not progress):
            rows = torch.arange(start, min(num, start + batch_size))
            part = noise.rows(rows)
            x = level @ part.normal(result[rows], "source") if x1 is None else x1[rows]
            result[rows] = simulated(x, pairs, self, path, field, part, steer, **take(cond, rows))
        if not bool(result.isfinite().all()):
            raise FloatingPointError("samples are not finite: the field gave such values")
        return result


class _Place(NamedTuple):
    """A time: its clock, x / y, and the standard deviation of y given the data."""

    clock: float
    scale: float
    level: float


def _place(run: Run, t: Tensor) -> _Place:
    alpha, sigma = scalars(run.path, t, run.cond, "WassersteinSampler")
    scale = math.hypot(alpha, sigma)
    return _Place(clock_of(alpha, sigma), scale, sigma / scale)


class _Motion(Protocol):
    """What a step of length h needs of the Brownian motion W, with a = 0 where the step begins."""

    def integral(self, rate: float) -> Tensor:
        """The integral of e^(rate (h - a)) dW over the step."""
        ...

    def split(self, rate: float, u: Tensor) -> tuple[Tensor, Tensor]:
        """The integral of e^(rate (u h - a)) dW up to u h, u (batch,), and `integral`."""
        ...

    def moment(self, k: int) -> Tensor:
        """n_k, a new tensor, where the sum of L^k n_k is the integral of e^(L (h - a)) dW."""
        ...

    def modes(self, rates: Tensor, basis: Tensor) -> Tensor:
        """The coordinates, (batch, d), in ``basis`` (batch, d, d) of that integral, for an L with
        these eigenvectors, its columns, and the eigenvalues ``rates`` (batch, d)."""
        ...


class _Drawn:
    """A `_Motion` drawn anew: the same normal numbers for every scheme."""

    def __init__(self, noise: Noise, like: Tensor, h: float) -> None:
        self.noise, self.like, self.h = noise, like, h

    def integral(self, rate: float) -> Tensor:
        spread = math.sqrt(self.h * _phi1(2 * rate * self.h))
        return self.noise.normal(self.like, "brownian").mul_(spread)

    def split(self, rate: float, u: Tensor) -> tuple[Tensor, Tensor]:
        # over disjoint intervals W is independent; so no correlation has to be worked out, which
        # would be 0 / 0 at both ends
        first, second = self.h * u, self.h * (1 - u)
        parts = [
            Scalar((length * phi1(2 * rate * length)).sqrt()) @ self.noise.normal(self.like, tag)
            for length, tag in ((first, "brownian"), (second, "rest"))
        ]
        return parts[0], Scalar(torch.exp(rate * second)) @ parts[0] + parts[1]

    @functools.cached_property
    def _normal(self) -> Tensor:
        return self.noise.normal(self.like, "brownian")

    def moment(self, k: int) -> Tensor:
        return self._normal * (math.sqrt(self.h) * root_series(k)[k] * self.h**k)

    def modes(self, rates: Tensor, basis: Tensor) -> Tensor:
        normal = self.noise.normal(self.like, "brownian").reshape(rates.shape).to(basis)
        return (self.h * phi1(2 * self.h * rates)).sqrt() * _coordinates(basis, normal)


def _coordinates(basis: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("bij,bi->bj", basis, x)


def _jvp(score: Score, y: Tensor, along: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """(score, its derivative along a direction, clean prediction)."""
    value, product, clean = torch.func.jvp(score, (y,), (along,), has_aux=True)  # type: ignore[misc]
    return value, product, clean


def _by_eigenvalues(
    score: Score, y: Tensor, h: float, motion: _Motion
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """As `WassersteinSampler._by_series`, by functions of the eigenvalues of L."""
    value, clean = score(y)
    dim = y[0].numel()
    directions = torch.eye(dim, dtype=y.dtype, device=y.device).reshape(dim, *y.shape[1:])

    def derivative(direction: Tensor) -> Tensor:
        return _jvp(score, y, direction.expand_as(y))[1]

    chunk = max(1, TANGENTS // max(1, y.numel()))
    rows = torch.func.vmap(derivative, chunk_size=chunk)(directions)
    exact = torch.promote_types(y.dtype, torch.float32)
    jacobian = rows.reshape(dim, len(y), dim).movedim(0, 2).to(exact)
    linear = (jacobian + jacobian.mT).mul_(0.5)
    linear.diagonal(dim1=1, dim2=2).add_(0.5)
    rates, basis = torch.linalg.eigh(linear)
    turned = _coordinates(basis, y.reshape(rates.shape).to(exact))
    bent = 0.25 * h * h * phi2(h * rates) * turned + motion.modes(rates, basis)
    return value, clean, torch.einsum("bij,bj->bi", basis, bent).reshape(y.shape).to(y.dtype)


# Functions of h L


def phi1(z: Tensor) -> Tensor:
    """(e^z - 1) / z elementwise, 1 at 0."""
    zero = z == 0
    return torch.where(zero, 1.0, torch.expm1(z) / torch.where(zero, 1.0, z))


def phi2(z: Tensor) -> Tensor:
    """(e^z - 1 - z) / z^2 elementwise, 1 / 2 at 0."""
    # Taylor's series where the difference loses digits
    near = z.clamp(-1, 1)
    series = torch.zeros_like(z)
    for k in range(18, -1, -1):
        series = series * near + 1 / math.factorial(k + 2)
    far = torch.where(z.abs() < 1, 1.0, z)
    return torch.where(z.abs() < 1, series, (torch.expm1(far) - far) / far.square())


def _phi1(z: float) -> float:
    return math.expm1(z) / z if z else 1.0


@functools.cache
def root_series(order: int) -> tuple[float, ...]:
    """a_0 .. a_order with sqrt((e^(2 u) - 1) / (2 u)) = sum_k a_k u^k: 1, 1/2, 5/24, 1/16, ...

    Its radius of convergence is pi.
    """
    root = [Fraction(1)]
    for k in range(1, order + 1):
        square = Fraction(2**k, math.factorial(k + 1))
        square -= sum((root[i] * root[k - i] for i in range(1, k)), Fraction(0))
        root.append(square / 2)
    return tuple(float(a) for a in root)
