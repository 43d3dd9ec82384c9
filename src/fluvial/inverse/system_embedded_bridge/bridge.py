"""The class: signals restored by a bridge that knows the measurement system."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import LinearOperator, Noise
from fluvial.core.steering.inverse import DDNM
from fluvial.data.format import Format
from fluvial.inverse.system_embedded_bridge.process import (
    Deviation,
    EmbeddedPath,
    Method,
    backwards,
    noisy,
    perturb,
    span,
)
from fluvial.inverse.system_embedded_bridge.restorer import Loss, PairedRestorer
from fluvial.inverse.system_embedded_bridge.schedules import Schedule
from fluvial.inverse.system_embedded_bridge.schedules import schedule as named
from fluvial.inverse.system_embedded_bridge.tasks import Task
from fluvial.networks import describe, rebuild
from fluvial.training.files import load_model, put_weights, save_model
from fluvial.training.processes import is_main
from fluvial.training.sharding import whole_state
from fluvial.training.use import read_use

SYSTEM = "system-embedded-bridge"


class SystemEmbeddedBridge(PairedRestorer):
    """Restores x_0 from y = A x_0 + S^(1/2) n, A and S known, by a bridge from A^+ y to x_0.

    What is measured is only denoised and what is not is generated, as the coefficients of

        x_t = (P + alpha Q) x_0 + sqrt(gamma) A^+ S^(1/2) n + sqrt(beta) Q eps

    are matrices: P = A^+ A projects on what A measures, Q = 1 - P on the rest. One network learns
    the clean end, D(x_t, A^+ y, t) -> x_0, from pairs that are simulated, and steps of the reverse
    process from x_1 = A^+ y + sqrt(beta(1)) Q eps restore a measurement. With the exact D and a
    schedule with alpha(1) = 0 that draws from p(x_0 | y).

    In the range, noise of x_t and of y is the same in training as it will be when a measurement is
    restored (``consistent``); the published training has two independent ones.

    Args:
        network: see `PairedRestorer`. Published: a U-Net of widths 64, 128, 256, 512 and 1,024.
        schedule: ``"sb"`` (`SB`, a Brownian bridge in the null space), ``"vp"``, ``"ve"``, or one
            with numbers of its own.
        consistent: see above; for systems without noise there is no difference.
        steps: of the restoration.
        loss: see `PairedRestorer`.
        format: how the user's data become numbers, and back.
        task: a system by its name, saved with the model: then neither `fit` nor `restore` nor the
            command line needs an operator. Needs a format of images.

    Attributes:
        examples: measurements that `sample` restores, saved with the model; None for none.

    Raises:
        ValueError: of an argument; a task without a format of images.

    Citation: Sobieski et al., NeurIPS 2025, arXiv 2506.23726.
    """

    out_of_scope: tuple[dict[str, str], ...] = ()

    def __init__(
        self,
        network: nn.Module,
        schedule: Schedule | str = "sb",
        *,
        consistent: bool = True,
        steps: int = 50,
        loss: Loss = "absolute",
        format: Format | None = None,
        task: Task | None = None,
    ) -> None:
        super().__init__(network, loss=loss, format=format)
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        self.schedule = named(schedule) if isinstance(schedule, str) else schedule
        self.consistent, self.steps, self.task = consistent, steps, task
        self.examples: Tensor | None = None
        if task is not None:
            if format is None or format.kind != "images":
                raise ValueError("task needs a format of images, whose size its operator has")
            self.operator, self.obs_noise = task.operator(format.shape), task.obs_noise

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Of one event, if it is known."""
        return None if self.format is None else self.format.shape

    def path(
        self, operator: LinearOperator | None = None, obs_noise: Deviation | None = None
    ) -> EmbeddedPath:
        """The process for a system, by default that of the training."""
        std = self.obs_noise if obs_noise is None else obs_noise
        return EmbeddedPath.of(self.schedule, self._operator(operator), std)

    def noised(
        self, x0: Tensor, t: Tensor, operator: LinearOperator, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        x, c, _ = perturb(
            self.schedule, operator, self.obs_noise, x0, t, noise, consistent=self.consistent
        )
        return x, c

    @torch.no_grad()
    def restore(
        self,
        measurement: Tensor,
        operator: LinearOperator | None = None,
        *,
        obs_noise: Deviation | None = None,
        noise: Noise = KeyedNoise(0),
        steps: int | None = None,
        method: Method = "ancestral",
        t_max: float | None = None,
        t_min: float | None = None,
        keep: bool = True,
        decode: bool = True,
        batch_size: int = 256,
        progress: bool = False,
    ) -> Tensor:
        """Restored events, one a measurement, in the units of the data (uint8 for images).

        Args:
            measurement: (rows, *measurement), or one without rows. Floating, in the units of the
                network, as `measure` gives it; or uint8 pictures, of a model of images, where the
                operator makes pictures of pictures: with a hole, smaller, or blurred.
            operator: A; by default that of the training. Another one, of another size even, is
                what the process is then built on, while the network stays.
            obs_noise: of ``measurement``; by default that of the training.
            noise: keyed noise. Row i of the result depends on row i of it only; another seed gives
                another draw.
            steps: network calls.
            method, t_max, t_min: see `backwards`.
            keep: of a measurement without noise, take P D = A^+ y: what is measured stays as it is,
                A x = y to rounding.
            decode: in the units of the data; else as the network sees them, unrounded.
            batch_size: rows at a time.
            progress: show a bar over batches.

        Raises:
            TypeError: a measurement of another type.
            ValueError: no operator; one whose A^+ A is no projector, or whose rows are not those of
                the measurement; a measurement of another shape or not finite; a deviation, count,
                time or method out of its range.
        """
        count = self.steps if steps is None else steps
        if count < 1:
            raise ValueError(f"steps must be at least 1, got {count}")
        span(method, self.schedule, t_max, t_min)
        std = self.obs_noise if obs_noise is None else obs_noise

        def simulate(y: Tensor, c: Tensor, operator: LinearOperator, noise: Noise) -> Tensor:
            return backwards(
                EmbeddedPath.of(self.schedule, operator, std),
                Denoiser(self, c),
                y,
                noise,
                steps=count,
                method=method,
                t_max=t_max,
                t_min=t_min,
                steer=DDNM(operator, y) if keep and not noisy(std) else None,
            )

        return self._restored(
            measurement, operator, std, noise, batch_size, progress, simulate, decode
        )

    def sample(
        self,
        num: int,
        *,
        noise: KeyedNoise,
        steps: int | None = None,
        batch_size: int = 256,
    ) -> Tensor:
        """Restorations of the kept ``examples``, measurements of the training's system, in turn.

        Args:
            num: how many.
            noise: keyed noise; row i of the result depends on row i of it only.
            steps, batch_size: see `restore`.

        Returns:
            (num, *shape), as the network sees events: ``format.decode`` makes them images.

        Raises:
            ValueError: there are no examples; and as `restore`.
        """
        if self.examples is None:
            raise ValueError("there are no examples to restore: restore takes measurements")
        ids = torch.arange(num) if noise.ids is None else noise.ids
        y = self.examples[ids.cpu() % len(self.examples)]
        return self.restore(y, noise=noise, steps=steps, batch_size=batch_size, decode=False)

    # Files

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """One safetensors file: the weights, all that `load` needs, and the statement of use.

        An operator is not saved, unless it is that of a task: `restore` wants it again.
        """
        std = self.obs_noise
        header = {
            "system": SYSTEM,
            "network": describe(self.network),
            "options": self._options(),
            "obs_noise": None if isinstance(std, Tensor) else float(std),
            "data": None if self.format is None else self.format.as_json(),
        }
        use = self.use and self.use.for_system(SYSTEM, self.out_of_scope)
        weights = whole_state(self.state_dict())
        for name, value in (("obs_noise", std), ("examples", self.examples)):
            if isinstance(value, Tensor):
                weights = {**weights, name: value}
        if is_main():
            save_model(path, weights, header, use=use, overwrite=overwrite)

    def _options(self) -> dict[str, Any]:
        return {
            **super()._options(),
            "schedule": self.schedule.as_json(),
            "consistent": self.consistent,
            "steps": self.steps,
            "task": None if self.task is None else self.task.as_json(),
        }

    @classmethod
    def load(cls, path: str | Path, *, network: nn.Module | None = None) -> Self:
        """The model that `save` wrote, on the CPU.

        Args:
            path: of the file.
            network: built as it was; needed only for a class that is not fluvial's.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a system-embedded bridge, or the weights do not fit the network.
        """
        weights, header = load_model(path, SYSTEM)
        options, data = dict(header["options"]), header.get("data")
        options["schedule"] = named(**options["schedule"])
        options["task"] = options["task"] and Task(**options["task"])
        model = cls(
            network or rebuild(header["network"]),
            format=data and Format.from_json(data),
            **options,
        )
        std, examples = weights.pop("obs_noise", header["obs_noise"]), weights.pop("examples", None)
        put_weights(model, weights, path)
        model.obs_noise, model.examples = std, examples
        model.use = read_use(path)
        return model.eval()


@dataclass(frozen=True)
class Denoiser:
    """D as a field, given A^+ y."""

    model: PairedRestorer
    c: Tensor
    predicts: str = "clean"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return self.model.denoise(x, self.c, t)
