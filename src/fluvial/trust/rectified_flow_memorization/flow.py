"""Flow matching on pairs, with noise in the interpolant so that the pairing is not memorised."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from tqdm import tqdm

from fluvial.core.couplings import Coupling, Independent, OptimalTransport
from fluvial.core.gaussian.losses import Matching
from fluvial.core.gaussian.paths import CEILING, Linear
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Draw, Noise, Sampler, left_broadcast, take
from fluvial.core.time import Uniform
from fluvial.data.format import Format
from fluvial.networks import describe, rebuild
from fluvial.training.files import load_model, put_weights, save_model
from fluvial.training.loop import Stage, Training, train
from fluvial.training.processes import is_main
from fluvial.training.sharding import whole_state
from fluvial.training.use import IntendedUse, derive, read_use
from fluvial.trust.rectified_flow_memorization.fields import check_noise
from fluvial.trust.rectified_flow_memorization.pairs import check_pairs, check_rows, transport

SYSTEM = "rectified-flow-memorization"

Interpolant = Literal["constant", "bridge"]
Target = Literal["plain", "interpolant"]
Pairs = Literal["given", "independent", "ot"]
COUPLINGS: dict[str, Coupling | None] = {
    "given": None,
    "independent": Independent(),
    "ot": OptimalTransport(),
}
AWAY = 1e-3
"""How far times stay from the ends, where the derivative of the bridge-shaped noise diverges."""
ODD = 0.1
"""How far mean and deviation of sources may be from 0 and 1 to be taken for N(0, I)."""


@dataclass(frozen=True)
class NoisyLinear(Linear):
    """The linear path with noise of its own: x_t = (1 - t) x_0 + t x_1 + g(t) eps.

    ``"constant"``: g = interpolant_noise, which is the linear path between ends that are shifted
    by the same noise. ``"bridge"``: g = interpolant_noise sqrt(t (1 - t)), which leaves the ends
    where they are. The velocity to learn is x_1 - x_0 (``"plain"``), or that of the stochastic
    interpolant, x_1 - x_0 + g'(t) eps (``"interpolant"``; Albergo et al., 2023), which differs for
    the bridge alone and whose square has no finite mean unless times stay away from 0 and 1.

    A path to train velocities on, in any objective that draws from a path, such as
    `fluvial.core.gaussian.losses.Matching`. Sample along `Linear`, by the ODE.

    Args:
        interpolant_noise: at least 0, in the units of the data. 0.05 is the paper's.
        interpolant: shape of g.
        target: of the velocity.

    Raises:
        ValueError: a negative noise, an unknown interpolant or target.

    Citation: Reu et al., NeurIPS 2025, arXiv 2510.18118.
    """

    interpolant_noise: float = 0.05
    interpolant: Interpolant = "constant"
    target: Target = "plain"

    def __post_init__(self) -> None:
        check_noise(self.interpolant_noise)
        if self.interpolant not in ("constant", "bridge"):
            raise ValueError(
                f"interpolant must be 'constant' or 'bridge', got {self.interpolant!r}"
            )
        if self.target not in ("plain", "interpolant"):
            raise ValueError(f"target must be 'plain' or 'interpolant', got {self.target!r}")

    def sample(
        self, x0: Tensor, t: Tensor, noise: Noise, x1: Tensor | None = None, **cond: Any
    ) -> Draw:
        draw = super().sample(x0, t, noise, x1)
        if not self.interpolant_noise:
            return draw
        eps = noise.normal(x0, "interpolant")
        level, rate = (left_broadcast(g, eps).to(eps) for g in self._noise(t))

        def target(kind: str) -> Tensor:
            if kind != "velocity":
                raise ValueError(f"NoisyLinear has the target 'velocity' alone, got {kind!r}")
            plain = cast(Tensor, draw.target("velocity"))
            return plain if self.target == "plain" else plain + rate * eps

        return Draw(cast(Tensor, draw.x) + level * eps, draw.x0, draw.x1, t, target)

    def _noise(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """(g, g')."""
        if self.interpolant == "constant":
            return torch.full_like(t, self.interpolant_noise), torch.zeros_like(t)
        bridge = (t * (1 - t)).sqrt()
        rate = (0.5 - t) / bridge.clamp(min=1 / CEILING)
        return self.interpolant_noise * bridge, self.interpolant_noise * rate

    def posterior(self, *args: Any, **cond: Any) -> Tensor:
        raise ValueError("NoisyLinear is a path to train on; sample along Linear(), by the ODE")

    def transition(self, *args: Any, **cond: Any) -> Tensor:
        raise ValueError("NoisyLinear is a path to train on; sample along Linear(), by the ODE")


class PairedFlow(Matching):
    """A flow trained on pairs (x_1, x_0): noise to data, noisy to clean, before to after.

    Learns V(x, t) by regression of x_1 - x_0 at x_t = (1 - t) x_0 + t x_1 + sigma eps, t ~ U(0, 1),
    and takes new sources to the target side by dx/dt = V from t = 1 to t = 0.

    With fixed pairs and sigma = 0 the loss can be driven to 0 by storing the pairing: integrated
    from a training source the flow then ends at its training partner, whatever partner that is,
    and a second rectification changes nothing. The loss is lowest exactly when that has happened.
    Noise removes the one-to-one map between (x_t, t) and the pair, and with it the incentive. It
    works where lines come within a few sigma of each other, or through what the network cannot
    resolve. `fluvial.trust.rectified_flow_memorization.report.closest_approach` gives the distance
    between lines: a sigma of about its median ends memorisation, one far below it, as any usual one
    is for whole images, changes little.
    `fluvial.trust.rectified_flow_memorization.report.memorization_report` measures what happened,
    and `fluvial.trust.rectified_flow_memorization.variance.gradient_variance` what predicts it.

    Args:
        network: called as ``network(x, t)`` or ``network(x, t, label=)``.
        interpolant_noise: sigma, in the units of the data; 0 is plain flow matching. The paper's
            0.05 is for data and sources of unit deviation.
        interpolant: shape of the noise along the way: ``"constant"``, or ``"bridge"``, sigma
            sqrt(t (1 - t)).
        target: the velocity to learn; see `NoisyLinear`.
        pairs: how the ends of a batch are paired: as they are ``"given"``, or anew in every batch,
            ``"independent"`` or by optimal transport (``"ot"``).
        shape: of one event; taken from the network or the data if left out.

    Raises:
        ValueError: a value out of its range; ``shape`` and the network disagree.

    Citation: Reu et al., NeurIPS 2025, arXiv 2510.18118; Liu et al., ICLR 2023 (rectified flow).
    """

    criterion = "loss"
    format: Format | None = None
    intended: tuple[str, ...] = (
        "taking new rows of the source to the target side of the pairs it was trained on",
    )

    def __init__(
        self,
        network: nn.Module,
        *,
        interpolant_noise: float = 0.05,
        interpolant: Interpolant = "constant",
        target: Target = "plain",
        pairs: Pairs = "given",
        shape: Sequence[int] | None = None,
    ) -> None:
        if pairs not in COUPLINGS:
            raise ValueError(f"pairs must be one of {', '.join(COUPLINGS)}, got {pairs!r}")
        away = AWAY if interpolant == "bridge" and target == "interpolant" else 0.0
        super().__init__(
            network,
            NoisyLinear(interpolant_noise, interpolant, target),
            predicts="velocity",
            times=Uniform(away, 1 - away),
            coupling=COUPLINGS[pairs],
        )
        self.pairs = pairs
        built: Any = getattr(network, "shape", None)
        shapes = {tuple(map(int, s)) for s in (shape, built) if s is not None}
        if len(shapes) > 1:
            raise ValueError(f"shape must be the network's, {tuple(built)}, got {shape}")
        self.shape: tuple[int, ...] | None = next(iter(shapes), None)
        self.source: tuple[float, float] | None = None
        self.use: IntendedUse | None = IntendedUse(intended=self.intended)

    # Training

    def fit(
        self,
        x_source: Float[Tensor, "rows *event"] | None,
        x_target: Float[Tensor, "rows *event"],
        label: Int[Tensor, " rows"] | None = None,
        *,
        steps: int,
        validation: tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor] | None = None,
        out: str | Path | None = None,
        resume: bool = True,
        progress: bool = True,
        trackers: Sequence[str] = (),
        preview: Callable[[Path], None] | None = None,
        **training: Any,
    ) -> Self:
        """Train on pairs, then hold the averaged weights.

        Args:
            x_source: (rows, *event), floating, x_1; None draws fresh N(0, I) for every batch.
            x_target: (rows, *event), their partners x_0 in the same order.
            label: (rows,) classes, for a network that takes them.
            steps: optimiser steps.
            validation: (x_source, x_target[, label]) of pairs that are not trained on.
            out: folder for checkpoints, metrics and weights; see `fluvial.training.loop.train`.
            resume: go on from the latest checkpoint in ``out``, if there is one.
            progress: show a progress bar.
            trackers, preview: see `fluvial.training.loop`.
            **training: other fields of `fluvial.training.loop.Training`.

        Raises:
            TypeError: rows that are not floating, or not of the network's dtype.
            ValueError: shapes or numbers of rows differ, values that are not finite, no rows.
        """
        data = self._rows(x_source, x_target, label)
        held = None if validation is None else self._rows(*validation)
        config = {"network": describe(self.network), **self._options(), "shape": None}
        train(
            Stage(self, data, Training(steps=steps, **training), held, preview),
            out=None if out is None else Path(out),
            resume=resume,
            progress=progress,
            config=config,
            trackers=trackers,
        )
        self.shape = tuple(x_target.shape[1:])
        self.source = (0.0, 1.0) if x_source is None else _moments(x_source)
        if self.use is not None and self.use.system is not None:
            self.use = derive([self.use], intended=self.intended)
        return self.eval()

    def _rows(
        self, x_source: Tensor | None, x_target: Tensor, label: Tensor | None = None
    ) -> dict[str, Tensor]:
        if x_source is None:
            check_rows("x_target", x_target)
        else:
            check_pairs(x_source, x_target)
        self._check_event("x_target", x_target)
        data = {"x": x_target}
        if x_source is not None:
            data["x1"] = x_source.to(x_target.dtype)
        if label is not None:
            if label.dtype not in (torch.int64, torch.int32) or label.shape != (len(x_target),):
                raise ValueError(
                    f"label must be integers of shape ({len(x_target)},), got {label.dtype} "
                    f"{tuple(label.shape)}"
                )
            data["label"] = label
        return data

    def _check_event(self, name: str, x: Tensor) -> None:
        if self.shape is not None and tuple(x.shape[1:]) != self.shape:
            event = ", ".join(map(str, self.shape))
            raise ValueError(f"{name} must have shape (rows, {event}), got {tuple(x.shape)}")
        wanted = next((p.dtype for p in self.parameters()), x.dtype)
        if x.dtype != wanted:
            raise TypeError(f"{name} is {x.dtype} and the network {wanted}; convert one of them")

    # Sampling

    @torch.no_grad()
    def translate(
        self,
        x_source: Float[Tensor, "rows *event"],
        *,
        steps: int = 100,
        sampler: Sampler | None = None,
        label: Tensor | int | None = None,
        batch_size: int = 500,
        progress: bool = False,
        noise: Noise = KeyedNoise(0),
    ) -> Tensor:
        """The target ends of source rows, in the dtype of the network.

        Args:
            x_source: (rows, *event), at t = 1.
            steps: equal steps from t = 1 to 0. To see what noise did to the flow they have to be
                shorter than ``interpolant_noise``: longer ones jump over the layer it made.
            sampler: Euler's method by default.
            label: one class for all, or (rows,).
            batch_size: rows at a time.
            progress: show a progress bar over batches.
            noise: for samplers that draw.

        Raises:
            TypeError, ValueError: as `fit` for rows; ``steps`` or ``batch_size`` is not positive.
        """
        check_rows("x_source", x_source)
        self._check_event("x_source", x_source)
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        device = next(self.parameters(), x_source).device
        cond = {}
        if label is not None:
            cond["label"] = torch.as_tensor(label, device=device).expand(len(x_source))
        was_training = self.training
        self.eval()
        parts = []
        try:
            starts = range(0, len(x_source), batch_size)
            for start in tqdm(starts, desc="translating", unit="batch", disable=not progress):
                rows = torch.arange(start, min(start + batch_size, len(x_source)))
                parts.append(
                    transport(
                        self.field,
                        x_source[rows.to(x_source.device)].to(device),
                        steps=steps,
                        sampler=sampler,
                        noise=noise.rows(rows),
                        **take(cond, rows.to(device)),
                    )
                )
        finally:
            self.train(was_training)
        return torch.cat(parts)

    def sample(
        self,
        num: int,
        *,
        noise: Noise,
        steps: int = 100,
        sampler: Sampler | None = None,
        label: Tensor | int | None = None,
        batch_size: int = 500,
        progress: bool = False,
    ) -> Tensor:
        """Samples (num, *event) from sources N(0, I); row i depends on row i of ``noise`` only.

        Args:
            num: how many, at least 1.
            noise: keyed, of the sources.
            steps, sampler, label, batch_size, progress: as for `translate`.

        Raises:
            ValueError: ``num`` is not positive; the event's shape is not known yet; the model was
                fitted to sources that are not N(0, I), which only `translate` can carry.
        """
        if num < 1:
            raise ValueError(f"num must be at least 1, got {num}")
        if self.shape is None:
            raise ValueError("the event's shape is unknown: fit first, or give shape=")
        mean, std = self.source or (0.0, 1.0)
        if abs(mean) > ODD or abs(std - 1) > ODD:
            raise ValueError(
                f"the model was fitted to sources of mean {mean:.3g} and deviation {std:.3g}, not "
                "to N(0, I): translate(x_source) takes rows of that kind"
            )
        parameter = next(self.parameters())
        x_source = noise.normal(parameter.new_empty(num, *self.shape), "source")
        return self.translate(
            x_source,
            steps=steps,
            sampler=sampler,
            label=label,
            batch_size=batch_size,
            progress=progress,
            noise=noise,
        )

    # Files

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """One safetensors file: the weights, all that `load` needs, and the statement of use."""
        network = getattr(self.network, "_orig_mod", self.network)  # what torch.compile wrapped
        header = {
            "system": SYSTEM,
            "network": describe(network),
            "options": self._options(),
            "source": self.source,
        }
        weights = whole_state(network.state_dict())
        if is_main():
            use = self.use and self.use.for_system(SYSTEM)
            save_model(path, weights, header, use=use, overwrite=overwrite)

    def _options(self) -> dict[str, Any]:
        path = cast(NoisyLinear, self.path)
        return {
            "interpolant_noise": path.interpolant_noise,
            "interpolant": path.interpolant,
            "target": path.target,
            "pairs": self.pairs,
            "shape": self.shape,
        }

    @classmethod
    def load(cls, path: str | Path, *, network: nn.Module | None = None) -> Self:
        """The model that `save` wrote, on the CPU.

        Args:
            path: of the file.
            network: the network, built as it was; needed only for a class that is not fluvial's.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a PairedFlow, or the weights do not fit the network.
        """
        weights, header = load_model(path, SYSTEM)
        network = rebuild(header["network"]) if network is None else network
        put_weights(network, weights, path)
        model = cls(network, **header["options"]).eval()
        model.source = header["source"] and tuple(header["source"])
        model.use = read_use(path)
        return model


def _moments(x: Tensor) -> tuple[float, float]:
    """Mean and deviation of all numbers; NaN-free: x is finite."""
    mean = float(x.double().mean())
    return mean, math.sqrt(float((x.double() - mean).square().mean()))
