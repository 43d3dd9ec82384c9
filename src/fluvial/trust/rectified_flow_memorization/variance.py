"""The variance of the loss gradient: measured for any network, in closed form where there is one.

The loss of a pair is |x_1 - x_0 - V(x_t, t)|^2, a sum over coordinates, and the variance of its
gradient the trace of the covariance over samples (pair, t, noise): that of a mean over b samples is
b times smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fluvial.core.gaussian.paths import Linear
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Noise, Path, take
from fluvial.core.time import Times, Uniform
from fluvial.metrics.extract import evaluating
from fluvial.trust.rectified_flow_memorization.fields import (
    GaussianPairField,
    PairOptimal,
    check_noise,
)
from fluvial.trust.rectified_flow_memorization.pairs import check_pairs

SMALL = 100_000
"""Parameters up to which gradients are taken a row at a time."""
BATCH = 64
"""Rows of a batch, where they are not."""
MEMORY = 2**28
"""Bytes that gradients of single rows may take together."""


@dataclass(frozen=True)
class GradientVariance:
    """What `gradient_variance` found.

    Args:
        loss: mean of |x_1 - x_0 - V|^2, a sum over coordinates: `Matching`'s loss times d.
        variance: trace of the covariance of the gradient of one sample's loss.
        relative: ``variance`` over the squared norm of the mean gradient of the ``samples``; near a
            stationary point it tends to their number, and it is NaN where every gradient is 0.
        per_parameter: the share of every parameter in ``variance``, by name.
        samples: that were looked at.
        batch_size: rows that a gradient was taken of together; 1 for gradients of single rows.
    """

    loss: float
    variance: float
    relative: float
    per_parameter: Mapping[str, float]
    samples: int
    batch_size: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def gradient_variance(
    model: Any,
    x_source: Tensor,
    x_target: Tensor,
    *,
    path: Path = Linear(),  # noqa: B008 (frozen)
    label: Tensor | None = None,
    samples: int = 4096,
    batch_size: int | None = None,
    times: Times = Uniform(),  # noqa: B008 (frozen)
    noise: Noise = KeyedNoise(0),
) -> GradientVariance:
    """The variance of the gradient of the flow-matching loss on pairs, at the model's weights.

    Low variance is neither good nor bad: read it with the pairing. With loss it goes to 0 on fixed
    pairs that the model has memorised, whatever pairs they are.

    Args:
        model: a network called as ``network(x, t)`` that returns velocities; a model that has one
            as ``.network``, such as `PairedFlow`; or a `GaussianPairField` without noise, whose
            parameters are those of `PairOptimal` and whose gradients are known in closed form.
        x_source: (pairs, *event).
        x_target: (pairs, *event), partners in the same order.
        path: how the pairs are interpolated: `NoisyLinear` adds noise.
        label: (pairs,) classes, for a network that takes them.
        samples: drawn, each a random pair at a random time.
        batch_size: rows of the batches whose gradients are compared, at least two batches. If None,
            1 for networks of at most 100,000 parameters: gradients of single rows, by
            ``vmap(grad)``; else 64. Networks with operations that vmap does not know need batches.
        times: law of t.
        noise: keyed, of the samples.

    Raises:
        TypeError: ``model`` is neither; the pairs are not floating.
        ValueError: unequal or empty pairs, values that are not finite, fewer than two gradients to
            compare, a network without parameters.
    """
    check_pairs(x_source, x_target)
    pairs = _Pairs(x_source, x_target, label, path, times, noise, samples)
    if isinstance(model, GaussianPairField):
        if model.interpolant_noise:
            raise ValueError("model has interpolant_noise: such a field is not in PairOptimal")
        model = PairOptimal(model.mean.to(x_source), model.change.to(x_source))
    if isinstance(model, PairOptimal) and batch_size in (None, 1):
        _check_counts(samples, 1)
        return _closed_form(model, pairs)
    network = getattr(model, "network", model)
    if not isinstance(network, nn.Module):
        raise TypeError(
            "model must be a network, have one as .network, or be a GaussianPairField, got "
            f"{type(model).__name__}: the gradient is one in its parameters"
        )
    count = sum(p.numel() for p in network.parameters() if p.requires_grad)
    if not count:
        raise ValueError("model has no parameters that are trained")
    if batch_size is None:
        batch_size = 1 if count <= SMALL else BATCH
    _check_counts(samples, batch_size)
    with evaluating(network):
        if batch_size == 1:
            return _by_row(network, pairs, max(1, MEMORY // (16 * count)))
        return _by_batch(network, pairs, batch_size)


def _check_counts(samples: int, batch_size: int) -> None:
    if batch_size < 1 or samples < 2 * batch_size:
        raise ValueError(
            f"need batch_size >= 1 and samples for two batches, got {batch_size} and {samples}"
        )


@dataclass(frozen=True)
class _Pairs:
    """Samples (pair, t, noise), row i the same however many are drawn together."""

    x_source: Tensor
    x_target: Tensor
    label: Tensor | None
    path: Path
    times: Times
    noise: Noise
    samples: int

    def draws(self, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]]:
        """(x_t, t, velocity, conditions) of ``size`` samples after another."""
        for start in range(0, self.samples, size):
            ids = torch.arange(start, min(start + size, self.samples))
            noise = self.noise.rows(ids)
            u = noise.uniform(torch.empty(len(ids), dtype=torch.float64), "pair")
            rows = (u * len(self.x_source)).long().to(self.x_source.device)
            x0, x1 = self.x_target[rows], self.x_source[rows]
            t = self.times(x0, noise)
            draw = self.path.sample(x0, t, noise, x1)
            cond = {} if self.label is None else {"label": take(self.label, rows)}
            yield cast(Tensor, draw.x), t, cast(Tensor, draw.target("velocity")), cond


@dataclass
class _Moments:
    """Running sums, in float64, of gradients that are independent of each other."""

    sums: dict[str, Tensor]
    squares: dict[str, Tensor]
    loss: float = 0.0
    count: int = 0

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor]) -> _Moments:
        sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
        return cls(sums, {name: value.new_zeros(()) for name, value in sums.items()})

    def add(self, gradients: Mapping[str, Tensor], losses: Tensor) -> None:
        """Gradients (n, *parameter) and their losses (n,)."""
        for name, gradient in gradients.items():
            gradient = gradient.double()
            self.sums[name] += gradient.sum(0)
            self.squares[name] += gradient.square().sum()
        self.loss += float(losses.double().sum())
        self.count += len(losses)

    def result(self, batch_size: int) -> GradientVariance:
        n = self.count
        per, mean = {}, 0.0
        for name, total in self.sums.items():
            norm = float(total.square().sum()) / n
            mean += norm / n
            spread = max(0.0, float(self.squares[name]) - norm)
            per[name] = batch_size * spread / (n - 1)
        variance = math.fsum(per.values())
        relative = variance / mean if mean else math.inf if variance else math.nan
        return GradientVariance(self.loss / n, variance, relative, per, n * batch_size, batch_size)


def _closed_form(model: PairOptimal, pairs: _Pairs) -> GradientVariance:
    moments = _Moments.of(dict(model.named_parameters()))
    size = len(model.theta)
    for x, t, velocity, _ in pairs.draws(max(1, MEMORY // (64 * size * size))):
        loss, theta, Theta = model.gradients(x, t, velocity)
        moments.add({"theta": theta, "Theta": Theta}, loss)
    return moments.result(1)


def _by_row(network: nn.Module, pairs: _Pairs, rows: int) -> GradientVariance:
    parameters, buffers = _state(network)

    def loss(
        parameters: dict[str, Tensor], x: Tensor, t: Tensor, velocity: Tensor, cond: Any
    ) -> Tensor:
        cond = {name: value[None] for name, value in cond.items()}
        state = (parameters, buffers)
        guess = torch.func.functional_call(network, state, (x[None], t[None]), cond)
        return (guess[0] - velocity).square().sum()

    each = torch.func.vmap(torch.func.grad_and_value(loss), in_dims=(None, 0, 0, 0, 0))
    moments = _Moments.of(parameters)
    for x, t, velocity, cond in pairs.draws(rows):
        moments.add(*each(parameters, x, t, velocity, cond))
    return moments.result(1)


def _by_batch(network: nn.Module, pairs: _Pairs, batch_size: int) -> GradientVariance:
    parameters, _ = _state(network)
    of_network = [p for p in network.parameters() if p.requires_grad]
    moments = _Moments.of(parameters)
    for x, t, velocity, cond in pairs.draws(batch_size):
        if len(x) < batch_size:  # a rest has a variance of its own
            break
        loss = (network(x, t, **cond) - velocity).square().flatten(1).sum(1).mean()
        gradients = torch.autograd.grad(loss, of_network, allow_unused=True)
        named = {
            name: torch.zeros_like(parameters[name])[None] if g is None else g[None]
            for name, g in zip(parameters, gradients, strict=True)
        }
        moments.add(named, loss.detach()[None])
    return moments.result(batch_size)


def _state(network: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(parameters that are trained, everything else), detached."""
    trained = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
    rest = {name: p.detach() for name, p in network.named_parameters() if not p.requires_grad}
    return trained, {**rest, **dict(network.named_buffers())}


# Closed forms, for the pair-optimal class between N(0, I) and N(mean, I) in an even number of
# dimensions; the variance is that of the gradient in theta alone.


class Expected(NamedTuple):
    """Loss of a sample, and the variance of its gradient in theta (`PairOptimal`)."""

    loss: float
    variance: float


def optimal_field_on_rotated(phi: float, dim: int = 2) -> Expected:
    """The field of the optimal pairing, met with pairs rotated by ``phi``, without noise (derived).

    In every plane loss 4 (1 - cos phi) and variance 16 (1 - cos phi): they grow with the mismatch,
    crossings or not. `optimal_field_on_independent` lies at the value of 90 degrees.
    """
    mismatch = (1 - math.cos(phi)) * _planes(dim)
    return Expected(4 * mismatch, 16 * mismatch)


def optimal_field_on_independent(dim: int = 2) -> Expected:
    """The field of the optimal pairing, met with independent pairs, without noise (derived)."""
    return Expected(4 * _planes(dim), 16 * _planes(dim))


def rotated_field_on_rotated(phi: float, interpolant_noise: float, dim: int = 2) -> Expected:
    """The field of the rotated pairing on its own pairs, with noise in the interpolant (derived).

    In every plane loss 4 sigma^2 phi tan(phi / 2) and variance 16 sigma^2 tan^2(phi / 2)
    (1 + phi / sin phi): both diverge as phi comes to 180 degrees, and both are 0 without noise.

    Raises:
        ValueError: ``phi`` is not in [0, pi), a noise that is negative, or an odd ``dim``.
    """
    check_noise(interpolant_noise)
    if not 0 <= phi < math.pi:
        raise ValueError(f"phi must lie in [0, pi), where lines do not meet, got {phi}")
    scale, half = interpolant_noise**2 * _planes(dim), math.tan(phi / 2)
    ratio = phi / math.sin(phi) if phi else 1.0
    return Expected(4 * scale * phi * half, 16 * scale * half**2 * (1 + ratio))


def optimal_field_noisy_loss(deviations: Tensor, interpolant_noise: float) -> float:
    """Loss of the optimal field to N(mean, M) on its own pairs, with noise (derived).

    sigma^2 sum_i (lambda_i - 1)^2 / lambda_i with lambda the eigenvalues of M^(1/2),
    ``deviations`` (d,), all positive; 0 for M = I.
    """
    check_noise(interpolant_noise)
    if not bool((deviations > 0).all()):
        raise ValueError(f"deviations must be positive, got {deviations.tolist()}")
    return interpolant_noise**2 * float(((deviations - 1).square() / deviations).sum())


def _planes(dim: int) -> int:
    if dim < 2 or dim % 2:
        raise ValueError(f"dim must be even and positive, got {dim}")
    return dim // 2
