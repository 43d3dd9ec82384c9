"""`RestorationFlow`: a conditional flow that enlarges images, with masks of what to trust."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from fluvial.core.arguments import whole_number
from fluvial.core.gaussian.losses import Matching
from fluvial.core.gaussian.ode import Midpoint
from fluvial.core.gaussian.paths import Linear
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Noise, Objective, per_row
from fluvial.core.simulate import simulate
from fluvial.core.time import uniform_grid
from fluvial.data.format import Format
from fluvial.networks.layers import (
    ScalarEmbedding,
    conv,
    initialise,
    layer_norm,
    linear,
)
from fluvial.training.files import load_model, put_weights, save_model
from fluvial.training.loop import Stage, Training, train
from fluvial.training.processes import is_main
from fluvial.training.sharding import whole_state
from fluvial.training.use import IntendedUse, derive, read_use
from fluvial.trust.conformal_masks.calibration import Calibration
from fluvial.trust.conformal_masks.errors import Difference
from fluvial.trust.conformal_masks.kernels import Box, as_pixels
from fluvial.trust.conformal_masks.mask import LEVELS, ConfidenceMask, Restored
from fluvial.trust.conformal_masks.scores import Variance

SYSTEM = "conformal-masks"
PATH = Linear()
EXAMPLES = 64
"""Degraded calibration images that a model keeps, at most, for `RestorationFlow.sample`."""


class EnlargingNet(nn.Module):
    """Velocity of an enlarged image, at the resolution of the small one.

    Squares of ``factor`` x ``factor`` pixels become channels, of the state and of the enlarged
    image it is conditioned on; residual blocks of 3 x 3 convolutions follow,

        z <- z + conv(silu((1 + scale) conv(silu(norm z)) + shift)),

    with scale and shift linear in the embedding of t, and the channels become squares again. No
    layer looks at the whole image, so that any size a multiple of ``factor`` will do.

    Args:
        channels: of the images.
        factor: of the enlargement.
        width: channels inside.
        blocks: residual blocks; each sees 2 ``factor`` pixels farther.
        seed: of the initial weights. The network starts at 0.
    """

    def __init__(
        self, *, channels: int, factor: int, width: int = 96, blocks: int = 4, seed: int = 0
    ) -> None:
        super().__init__()
        if min(channels, factor, width, blocks) < 1:
            raise ValueError(
                f"need positive counts, got channels={channels}, factor={factor}, width={width}, "
                f"blocks={blocks}"
            )
        self.args = {"channels": channels, "factor": factor, "width": width, "blocks": blocks}
        self.factor = factor
        inside = channels * factor**2
        self.time = ScalarEmbedding(width)
        self.enter = conv(2 * inside, width, 3)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(blocks))
        self.out = conv(width, inside, 3, start="zero")
        initialise(self, seed)

    def forward(self, x: Tensor, t: Tensor, *, condition: Tensor) -> Tensor:
        """The velocity at (x, t), given the enlarged image.

        Args:
            x, condition: (batch, channels, height, width), multiples of ``factor``.
            t: () or (batch,), in [0, 1].
        """
        c = functional.silu(self.time(per_row(t, x)))
        both = (functional.pixel_unshuffle(image, self.factor) for image in (x, condition))
        z = self.enter(torch.cat(tuple(both), dim=1))
        for block in self.blocks:
            z = block(z, c)
        return functional.pixel_shuffle(self.out(functional.silu(z)), self.factor)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = conv(width, width, 3)
        self.modulation = linear(width, 2 * width)
        self.conv2 = conv(width, width, 3, start="zero")

    def forward(self, z: Tensor, c: Tensor) -> Tensor:
        normed = layer_norm(z.movedim(1, -1)).movedim(-1, 1)
        scale, shift = self.modulation(c)[:, :, None, None].chunk(2, dim=1)
        y = self.conv1(functional.silu(normed)) * (1 + scale) + shift
        return cast(Tensor, z + self.conv2(functional.silu(y)))


class RestorationFlow(Objective):
    """A flow that enlarges images, and masks of the pixels of its results that may be trusted.

    A clean image y is degraded to x, the means over squares of ``factor`` x ``factor`` pixels; U x
    is x enlarged smoothly. The flow goes from noise to what is missing, r = (y - U x) / scale,
    given U x, and learns the velocity eps - r along r_t = (1 - t) r + t eps. One x has as many
    restorations U x + scale r as there is noise, and where they differ the image is doubtful.

    ``calibrate`` turns that into masks. With n images that the flow was not trained on,

        E [max over trusted pixels p of D_p(Y, restored)] <= level

    for a new image of their kind, in finite samples and however good the flow is; D is the average
    over squares of ``kernel`` pixels of the L1 error, of Lab colours or of grey levels. See
    `ConfidenceMask`, which makes such masks for any other restorer.

    Args:
        network: called as ``network(x, t, condition=)``; `EnlargingNet`.
        factor: of the enlargement.
        scale: standard deviation of y - U x in [-1, 1]; found by `fit`.
        steps: of a restoration, of two network calls each.
        draws: restorations that an image's score is made of; published 10.
        kernel: side of the squares over which score and error are averaged.
        shape: of a clean image; taken from ``format`` or the data if left out. A larger image is
            restored in tiles of this shape, as the guarantee is for images of one size.
        format: how images become numbers, and back.

    Attributes:
        calibration: the thresholds; None before `calibrate`, and when other weights are loaded.
        examples: degraded calibration images, for `sample`.

    Raises:
        ValueError: a count is not positive, or ``shape`` does not divide by ``factor``.

    Citation: Adame et al., NeurIPS 2025, arXiv 2502.09664 (the masks); Lipman et al., ICLR 2023
        (the flow).
    """

    criterion = "loss"
    intended: tuple[str, ...] = (
        "enlarging images of the kind it was trained on, with a mask of what to trust",
    )
    out_of_scope: tuple[dict[str, str], ...] = (
        {
            "id": "identification",
            "text": "identifying a person, a sign or a number by detail that was generated, even "
            "where the mask trusts it: the mask bounds an average error, not what is seen",
        },
    )

    def __init__(
        self,
        network: nn.Module,
        *,
        factor: int = 4,
        scale: float = 1.0,
        steps: int = 4,
        draws: int = 10,
        kernel: int = 5,
        shape: Sequence[int] | None = None,
        format: Format | None = None,
    ) -> None:
        super().__init__()
        for name, value in (
            *(("factor", factor), ("steps", steps)),
            *(("draws", draws - 1), ("kernel", kernel)),
        ):
            if value < 1:
                least = 2 if name == "draws" else 1
                raise ValueError(f"{name} must be at least {least}, got {value + least - 1}")
        self.network: Any = network
        self.factor, self.scale, self.steps = factor, float(scale), steps
        self.draws, self.kernel = draws, kernel
        self.format = format
        self.shape: tuple[int, ...] | None = None
        said = shape if format is None else format.shape
        if said is not None:
            self._take_shape(said)
        self.calibration: Calibration | None = None
        self.examples: Tensor | None = None
        self.use: IntendedUse | None = IntendedUse(intended=self.intended)

    def _take_shape(self, shape: Sequence[int]) -> None:
        shape = tuple(map(int, shape))
        if len(shape) != 3 or shape[0] not in (1, 3):
            raise ValueError(f"images must be (1 or 3, height, width), got {shape}")
        if shape[1] % self.factor or shape[2] % self.factor:
            near = [max(1, round(side / self.factor)) * self.factor for side in shape[1:]]
            raise ValueError(
                f"size: {shape[1]} x {shape[2]} does not divide by the factor {self.factor}; "
                f"{near[0]} x {near[1]} does"
            )
        if self.shape not in (None, shape):
            raise ValueError(f"images must have shape {self.shape}, got {shape}")
        self.shape = shape

    # Degradation

    def degrade(self, y: Tensor) -> Tensor:
        """Means over squares of ``factor`` pixels: (..., channels, height, width) made smaller."""
        many = y.reshape(-1, *y.shape[-3:])
        return functional.avg_pool2d(many, self.factor).reshape(*y.shape[:-2], *self._small(y))

    def _small(self, y: Tensor) -> tuple[int, int]:
        return y.shape[-2] // self.factor, y.shape[-1] // self.factor

    def enlarge(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) made larger by bicubic interpolation."""
        return functional.interpolate(
            x, scale_factor=float(self.factor), mode="bicubic", align_corners=False
        )

    # Training

    def forward(self, batch: Mapping[str, Tensor], noise: Noise) -> dict[str, Tensor]:
        y = self._encoded(batch["x"])
        condition = self.enlarge(self.degrade(y))
        rows = {"x": (y - condition) / self.scale, "condition": condition}
        return Matching(self.network, PATH).forward(rows, noise)

    def fit(
        self,
        x: Tensor,
        *,
        validation: Tensor | None = None,
        out: str | Path | None = None,
        resume: bool = True,
        progress: bool = True,
        trackers: Sequence[str] = (),
        preview: Callable[[Path], None] | None = None,
        **training: Any,
    ) -> Self:
        """Learn to restore clean images, and hold the averaged weights; `calibrate` comes after.

        Args:
            x: (n, channels, height, width), uint8 if the model has a format, else in [-1, 1].
            validation: images that are not trained on.
            out, resume, progress, trackers, preview: see `fluvial.training.loop.train`.
            **training: fields of `fluvial.training.loop.Training`, ``steps`` among them.

        Raises:
            TypeError, ValueError: no images, of another shape, not finite; as the loop.
        """
        y = self._checked(x)
        with torch.no_grad():
            missing = y - self.enlarge(self.degrade(y))
            spread = float(missing.double().square().mean().sqrt())
        self.scale = spread if spread > 0 else 1.0
        held = None
        if validation is not None:
            self._checked(validation)
            held = {"x": validation}
        stage = Stage(self, {"x": x}, Training(**training), validation=held, preview=preview)
        train(
            stage,
            out=None if out is None else Path(out),
            resume=resume,
            progress=progress,
            config={"restoration": self._options()},
            trackers=trackers,
        )
        self.calibration = None
        if self.use is not None and self.use.system is not None:
            self.use = derive([self.use], intended=self.intended)
        return self.eval()

    def _checked(self, x: Tensor) -> Tensor:
        """Images as the network sees them, in [-1, 1]."""
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a tensor, got {type(x).__name__}")
        if x.ndim != 4 or not len(x):
            raise ValueError(f"x must be (images, channels, height, width), got {tuple(x.shape)}")
        self._take_shape(x.shape[1:])
        y = self._encoded(x)
        if not bool(y.isfinite().all()) or float(y.abs().max()) > 1:
            raise ValueError("x must lie in [-1, 1]")
        return y

    def _encoded(self, x: Tensor) -> Tensor:
        y = x if self.format is None else self.format.encode(x)
        if not y.is_floating_point():
            raise TypeError(f"x must be floating where the model has no format, got {y.dtype}")
        parameter = next(self.parameters())
        return y.to(parameter.device, parameter.dtype)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        """As that of any module. The calibration was of the weights before, and is dropped."""
        self.calibration = None
        return super().load_state_dict(*args, **options)

    # Restoration

    @torch.no_grad()
    def restorations(self, x: Tensor, noise: KeyedNoise, *, steps: int | None = None) -> Tensor:
        """A draw for each degraded image, (batch, channels, factor height, factor width).

        Args:
            x: (batch, channels, height, width) in [0, 1], of any height and width.
            noise: row i of the result depends on row i of it only.
            steps: of two network calls each.
        """
        parameter = next(self.parameters())
        condition = self.enlarge(2 * x.to(parameter) - 1)
        was_training, run = self.training, cast(Any, simulate)
        self.eval()
        try:
            found = run(
                PATH.source(condition, noise),
                uniform_grid(self.steps if steps is None else steps),
                Midpoint(),
                PATH,
                Matching(self.network, PATH).field,
                noise,
                condition=condition,
            )
        finally:
            self.train(was_training)
        return ((condition + self.scale * found + 1) / 2).clamp(0, 1)

    @property
    def mask(self) -> ConfidenceMask:
        """The flow as a `ConfidenceMask`, with its calibration if there is one."""
        grey = self.shape is not None and self.shape[0] == 1
        result = ConfidenceMask(
            _Restorer(self),
            score=Variance(kernel=Box(self.kernel)),
            error=Difference(kernel=Box(self.kernel), colour="grey" if grey else "lab"),
            draws=self.draws,
        )
        result.calibration = self.calibration
        return result

    def calibrate(
        self,
        x: Tensor,
        *,
        levels: Sequence[float] = LEVELS,
        progress: bool = False,
        **options: Any,
    ) -> Self:
        """Find the thresholds of the masks, on images that were not trained on.

        The first `EXAMPLES` of them stay with the model in their degraded form.

        Args:
            x: clean images, as for `fit`.
            levels: see `ConfidenceMask.calibrate`.
            progress: show a progress bar.
            **options: ``ties``, ``guarantee``, ``delta`` and ``thresholds`` of
                `fluvial.trust.conformal_masks.calibrate`.

        Raises:
            TypeError, ValueError: as `fit` and `ConfidenceMask.calibrate`.
        """
        if "groups" in options:
            raise ValueError("groups are calibrated by ConfidenceMask: use that of ``mask``")
        clean = self.pixels(x)
        mask = self.mask.calibrate(clean, self.file, levels=levels, progress=progress, **options)
        self.calibration = mask.calibration
        self.examples = self.file(clean[:EXAMPLES]).cpu()
        return self

    def file(self, y: Tensor) -> Tensor:
        """A clean image in [0, 1] degraded, as a file of 8 bits a channel would hold it.

        Calibrated on these, the masks are for the files that are restored.
        """
        return (255 * self.degrade(y)).round() / 255

    def pixels(self, x: Tensor) -> Tensor:
        """Images as for `fit`, in [0, 1]."""
        return (self._checked(x) + 1) / 2

    def restore(
        self,
        x: Tensor,
        level: float,
        *,
        noise: KeyedNoise = KeyedNoise(0),  # noqa: B008 (frozen)
        progress: bool = False,
    ) -> Restored:
        """A degraded image enlarged, and the mask of the pixels to trust.

        An image larger than those of the calibration is restored in tiles of their size, and the
        level is that of a tile, on average over tiles. At the right and lower border tiles overlap.

        Args:
            x: (channels, height, width) in [0, 1], the degraded image.
            level: one of those calibrated.
            noise: of the restoration.
            progress: show a progress bar over the tiles, if there are many.

        Returns:
            (channels, factor height, factor width) in [0, 1], and booleans (factor height, factor
            width).

        Raises:
            TypeError: ``x`` is no tensor of floating-point numbers.
            ValueError: nothing or not this level was calibrated; an image of other channels,
                smaller than those of the calibration, not finite or outside [0, 1].
        """
        if self.calibration is None or self.shape is None:
            raise ValueError("nothing was calibrated: call calibrate first")
        self.calibration.threshold(level)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            found = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"x must be a floating-point tensor in [0, 1], got {found}")
        channels, high, wide = self.shape[0], *(side // self.factor for side in self.shape[1:])
        if x.ndim != 3 or x.shape[0] != channels or x.shape[1] < high or x.shape[2] < wide:
            raise ValueError(
                f"x must be ({channels}, height, width) of at least {high} x {wide} pixels, as in "
                f"the calibration, got {tuple(x.shape)}"
            )
        as_pixels("x", x)
        mask, f = self.mask, self.factor
        image = torch.empty(channels, f * x.shape[1], f * x.shape[2], dtype=x.dtype)
        trusted = torch.empty(image.shape[1:], dtype=torch.bool)
        tops, lefts = (_starts(x.shape[k], side) for k, side in ((1, high), (2, wide)))
        places = [(top, left) for top in tops for left in lefts]
        quiet = not progress or len(places) < 20
        for k, (top, left) in enumerate(tqdm(places, desc="tiles", disable=quiet)):
            tile = x[:, top : top + high, left : left + wide]
            part = mask.restore(tile, level, noise=noise.at(k))
            rows, columns = slice(f * top, f * (top + high)), slice(f * left, f * (left + wide))
            image[:, rows, columns], trusted[rows, columns] = part.image.cpu(), part.trusted.cpu()
        return Restored(image.to(x.device), trusted.to(x.device))

    def sample(
        self,
        num: int,
        *,
        noise: KeyedNoise,
        steps: int | None = None,
        level: float | None = None,
        batch_size: int = 256,
    ) -> Tensor:
        """Restorations of the kept examples in turn, their doubtful pixels hatched.

        Args:
            num: how many.
            noise: keyed noise; row i of the result depends on row i of it only.
            steps: of a restoration; with others than those of the calibration nothing is hatched.
            level: of the masks; by default the calibrated one in the middle.
            batch_size: does not matter here.

        Returns:
            (num, *shape) in [-1, 1], for ``format.decode``.

        Raises:
            TypeError: a number that has to be whole is not.
            ValueError: there are no examples: nothing was calibrated; and as `restore`.
        """
        num, batch_size = whole_number("num", num), whole_number("batch_size", batch_size)
        if num < 0 or batch_size < 1:
            raise ValueError(f"need num >= 0 and batch_size >= 1, got {num} and {batch_size}")
        if self.examples is None or self.shape is None:
            raise ValueError("there are no examples to restore: call calibrate first")
        ids = torch.arange(num) if noise.ids is None else noise.ids
        result = torch.empty(num, *self.shape)
        for row, number in enumerate(ids.tolist()):
            x = self.examples[number % len(self.examples)]
            own = KeyedNoise(noise.seed).at(number)
            if self.calibration is None or steps not in (None, self.steps):
                rows = self.restorations(x[None], own, steps=steps)
                result[row] = 2 * rows[0].cpu() - 1
                continue
            levels = sorted(self.calibration.levels)
            chosen = levels[len(levels) // 2] if level is None else level
            image, trusted = self.restore(x, chosen, noise=own)
            result[row] = 2 * hatched(image, trusted) - 1
        return result

    # Files

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """One safetensors file: weights, thresholds, examples and the statement of use.

        Of several processes all have to call it, and the main one writes.
        """
        header = {
            "system": SYSTEM,
            "network": getattr(self.network, "args", None),
            "options": self._options(),
            "data": None if self.format is None else self.format.as_json(),
            "calibration": None if self.calibration is None else self.calibration.as_json(),
        }
        use = self.use and self.use.for_system(SYSTEM, self.out_of_scope)
        weights = dict(whole_state(self.network.state_dict()))
        if self.examples is not None:
            weights["examples"] = self.examples
        if is_main():
            save_model(path, weights, header, use=use, overwrite=overwrite)

    def _options(self) -> dict[str, Any]:
        return {
            "factor": self.factor,
            "scale": self.scale,
            "steps": self.steps,
            "draws": self.draws,
            "kernel": self.kernel,
            "shape": None if self.shape is None else list(self.shape),
        }

    @classmethod
    def load(cls, path: str | Path, *, network: nn.Module | None = None) -> Self:
        """The model that `save` wrote, on the CPU.

        Args:
            path: of the file.
            network: the network, built as it was; needed only for another than `EnlargingNet`.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a RestorationFlow, or the weights do not fit the network.
        """
        weights, header = load_model(path, SYSTEM)
        if network is None:
            if header["network"] is None:
                raise ValueError(
                    f"the network in {path} is not of fluvial; build it as it was and pass it as "
                    "network="
                )
            network = EnlargingNet(**header["network"])
        examples = weights.pop("examples", None)
        put_weights(network, weights, path)
        data = header.get("data")
        model = cls(network, format=data and Format.from_json(data), **header["options"]).eval()
        found = header.get("calibration")
        model.calibration = None if found is None else Calibration.from_json(found)
        model.examples = examples
        model.use = read_use(path)
        return model


class _Restorer:
    """The flow as `ConfidenceMask` calls a restorer."""

    def __init__(self, model: RestorationFlow) -> None:
        self.model = model

    def __call__(self, x: Tensor, noise: KeyedNoise) -> Tensor:
        return self.draws(x, 1, noise)[0]

    def draws(self, x: Tensor, num: int, noise: KeyedNoise) -> Tensor:
        return self.model.restorations(x[None].expand(num, -1, -1, -1), noise)


def hatched(image: Tensor, trusted: Tensor) -> Tensor:
    """An image (channels, height, width) in [0, 1] with thin lines over what is not trusted.

    The lines are black where the image is bright, and white where it is dark.
    """
    rows, columns = (torch.arange(side, device=image.device) for side in image.shape[1:])
    lines = ~trusted & ((rows[:, None] + columns) % max(4, len(rows) // 8) == 0)
    ink = (image.mean(0) < 0.5).to(image.dtype)
    return torch.where(lines, ink, image)


def _starts(length: int, side: int) -> list[int]:
    """Where tiles begin: side by side, the last one at the end."""
    return [*range(0, length - side, side), length - side]
