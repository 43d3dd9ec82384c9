"""What the denoisers of a data set share: the images, the noise levels, sampling and files."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from fluvial.adapters.tabulated import Tabulated
from fluvial.core.arguments import whole_number
from fluvial.core.gaussian.multistep import DDIM
from fluvial.core.gaussian.paths import VE, AlphaSigmaPath, Linear, VPCosine, VPLinear, numbers
from fluvial.core.protocols import Noise, Run, Sampler, Steering, left_broadcast
from fluvial.core.simulate import simulate
from fluvial.core.time import grid_pairs, uniform_grid
from fluvial.data.format import Format
from fluvial.training.files import load_model, save_model
from fluvial.training.use import IntendedUse, read_use

T = TypeVar("T")

SYSTEM = "locality-denoiser"
MEMORY = 1 << 30
"""Bytes that temporaries may take, by default: 1 GiB."""
FAINTEST = 1e-9
"""alpha over sigma, at least: below, every denoiser returns what it tends to, to 1e-9."""
FINEST = 1e-12
"""sigma over alpha, at least, where it is not 0."""
DELAY = 3.0
"""Seconds after which a progress bar appears."""
BLOCK = 1 << 24
"""Numbers looked at together when the images are checked."""

_PATHS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Linear, VPLinear, VPCosine, VE)}


def linear_beta_path(
    steps: int = 1000, beta_min: float = 1e-4, beta_max: float = 0.02
) -> Tabulated:
    """The schedule of DDPM: alpha^2 at t = (n + 1) / steps is prod_{m <= n} (1 - beta_m).

    beta_m rises linearly from ``beta_min`` to ``beta_max`` (Ho et al., NeurIPS 2020).
    """
    beta = torch.linspace(beta_min, beta_max, steps, dtype=torch.float64)
    return Tabulated((1 - beta).cumprod(0))


@dataclass(frozen=True)
class Clip(Steering):
    """Clamps the clean prediction, as published samplers of images do.

    Every denoiser here but the Wiener filter returns means of images, which this does not change.
    """

    low: float = -1.0
    high: float = 1.0

    def clean(self, clean: Tensor, x: Tensor, aim: Any, run: Run) -> Tensor:  # type: ignore[override]
        return clean.clamp(self.low, self.high)


class Denoiser:
    """A field made of a data set alone: E[x_0 | x_t] under a model of it, without training.

    A denoiser depends on (alpha, sigma) through u = x / alpha and r = sigma / alpha only, so it
    serves every Gaussian path of scalars, and every sampler and steering of the core takes it as
    ``field(x, t)``. Conditions of a call are not used: for one class, build it of the images of
    that class.

    Args:
        images: (N, *event), the data. Floating and finite, of any scale; or uint8 images, which
            become x / 127.5 - 1; or, with ``format``, in its units. Not copied: they may be
            memory-mapped, and lie on the host while queries are on an accelerator.
        path: whose times ``field(x, t)`` means; by default the paper's, `linear_beta_path`.
        format: how the data become what the denoiser sees; saved with it.
        memory: bytes that temporaries may take, 1 GiB by default. Chunk sizes follow from it, and
            results do not: one softmax runs over all chunks.
        progress: show a bar over the chunks of work that takes longer than 3 seconds.

    Raises:
        TypeError: ``images`` is not a tensor of these types.
        ValueError: no images, or one that is not finite; when called, too little ``memory``.
    """

    predicts = "clean"
    least_images: ClassVar[int] = 1

    def __init__(
        self,
        images: Tensor,
        *,
        path: AlphaSigmaPath | None = None,
        format: Format | None = None,
        memory: int = MEMORY,
        progress: bool = True,
    ) -> None:
        if not isinstance(images, Tensor):
            raise TypeError(f"images must be a tensor, got {type(images).__name__}")
        if images.ndim < 2 or len(images) < self.least_images or images[:1].numel() == 0:
            raise ValueError(
                f"images must have shape (N, *event) with N >= {self.least_images} for "
                f"{type(self).__name__}, got {tuple(images.shape)}"
            )
        if format is None and images.dtype == torch.uint8:
            format = Format("images", tuple(images.shape[1:]))
        if format is not None:
            format.encode(images[:1])
        elif not images.is_floating_point():
            raise TypeError(f"images must be floating or uint8, got {images.dtype}")
        self.images, self.format = images, format
        self.path = linear_beta_path() if path is None else path
        self.memory, self.progress = memory, progress
        self.use: IntendedUse | None = IntendedUse(
            intended=("denoising and drawing images that resemble those it holds",)
        )
        rows = max(1, BLOCK // self.size)
        for start in range(0, len(images), rows) if images.is_floating_point() else ():
            finite = images[start : start + rows].flatten(1).isfinite().all(1)
            if not bool(finite.all()):
                row = start + int(finite.logical_not().nonzero()[0])
                raise ValueError(f"images holds values that are not finite, in row {row} first")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image."""
        return tuple(self.images.shape[1:])

    @property
    def size(self) -> int:
        """Numbers of one image, d."""
        return math.prod(self.shape)

    def to(self, device: torch.device | str) -> Self:
        """Itself, with the images on ``device``. They need not be where the queries are."""
        self.images = self.images.to(device)
        return self

    # Denoising

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        """`denoise` at the path's alpha(t) and sigma(t). t: () or (batch,)."""
        if t.ndim == 0:
            return self.denoise(x, *numbers(self.path, float(t)))
        exact = t.to(_double(t))
        return self.denoise(x, self.path.alpha(exact), self.path.sigma(exact))

    def denoise(
        self, x: Float[Tensor, "batch *event"], alpha: Tensor | float, sigma: Tensor | float
    ) -> Tensor:
        """The estimate of x_0 from x = alpha x_0 + sigma eps, in the shape and dtype of ``x``.

        Where sigma is 0 it is x / alpha; as alpha goes to 0 it tends to the mean image, and the
        nearest image to the one with the largest x . x_i.

        Args:
            x: noisy images; below float32, computed in float32.
            alpha, sigma: not negative, numbers or (batch,).

        Raises:
            TypeError: ``x`` is not floating.
            ValueError: another shape, or an alpha or sigma that is negative, not finite, or both 0.
        """
        if not x.is_floating_point():
            raise TypeError(f"x must be floating, got {x.dtype}")
        if tuple(x.shape[1:]) != self.shape:
            event = ", ".join(map(str, self.shape))
            raise ValueError(f"x must have shape (batch, {event}), got {tuple(x.shape)}")
        alpha, sigma = (_coefficient(value, x) for value in (alpha, sigma))
        if alpha.device.type == sigma.device.type == "cpu":  # elsewhere looking would wait
            good = (alpha >= 0) & (sigma >= 0) & (alpha + sigma > 0) & (alpha + sigma).isfinite()
            if not bool(good.all()):
                raise ValueError(
                    "alpha and sigma must be finite, not negative and not both 0, got "
                    f"{alpha.tolist()} and {sigma.tolist()}"
                )
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        alpha = torch.maximum(alpha, FAINTEST * sigma)
        u = wide / (left_broadcast(alpha, wide).to(wide) if alpha.ndim else float(alpha))
        still = sigma == 0
        if not len(x) or (still.ndim == 0 and still.device.type == "cpu" and bool(still)):
            return u.to(x.dtype)
        level = (sigma / alpha).clamp(min=FINEST)
        clean = self._denoise(u.flatten(1), level).reshape(x.shape)
        if still.ndim:
            clean = torch.where(left_broadcast(still, u), u, clean)
        return clean.to(x.dtype)

    def _denoise(self, u: Tensor, level: Tensor) -> Tensor:
        """The estimate (batch, d) from u = x / alpha, for level = sigma / alpha, () or (batch,)."""
        raise NotImplementedError

    def _bar(self, parts: Iterable[T], what: str | None) -> Iterable[T]:
        """A progress bar, which appears if this takes long."""
        hide = what is None or not self.progress
        return tqdm(parts, what, unit="chunk", leave=False, delay=DELAY, disable=hide)

    def _chunks(self, size: int, like: Tensor, what: str | None = "denoising") -> Iterator[Tensor]:
        """All images, (c, d) with c <= ``size`` at a time, in dtype and on device of ``like``."""
        for start in self._bar(range(0, len(self.images), size), what):
            rows = self.images[start : start + size].to(like.device, non_blocking=True)
            rows = rows if self.format is None else self.format.encode(rows)
            yield rows.to(like.dtype).flatten(1)

    def _by_level(
        self, u: Tensor, level: Tensor, denoise: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """``denoise(u, level)`` for the rows of every level; waits for the device once."""
        if level.ndim == 0:
            return denoise(u, level)
        groups: dict[float, list[int]] = {}
        for row, value in enumerate(level.tolist()):
            groups.setdefault(value, []).append(row)
        if len(groups) == 1:
            return denoise(u, torch.tensor(next(iter(groups)), dtype=torch.float64))
        rows = [torch.tensor(part, device=u.device) for part in groups.values()]
        parts = [
            denoise(u[part], torch.tensor(value, dtype=torch.float64))
            for value, part in zip(groups, rows, strict=True)
        ]
        return torch.cat(parts)[torch.cat(rows).argsort()]

    def _chosen(self, options: T | Mapping[float, T], level: float) -> T:
        """The option itself, or of a mapping by time the one of the nearest level of noise."""
        if not isinstance(options, Mapping):
            return options

        def distance(t: float) -> float:
            alpha, sigma = numbers(self.path, t)
            there = max(sigma, FINEST) / max(alpha, FAINTEST)
            return abs(math.log(there) - math.log(level))

        return cast(T, options[min(options, key=distance)])

    # Sampling

    @torch.no_grad()
    def sample(
        self,
        num: int,
        *,
        noise: Noise,
        steps: int = 10,
        sampler: Sampler | None = None,
        grid: Sequence[float] | None = None,
        x1: Tensor | None = None,
        steer: Steering | None = None,
        batch_size: int = 64,
        progress: bool = False,
    ) -> Tensor:
        """Samples (num, *event), in the units the denoiser sees; ``format.decode`` goes back.

        Args:
            num: how many.
            noise: keyed noise; row i of the result depends on row i of it only.
            steps: evaluations. On the path of a table, as the default one, at timesteps from 0.9 T
                down to 0, then to the clean prediction; on others in equal steps from t = 1 to 0.
            sampler: `DDIM` by default, deterministic.
            grid: falling times to use in place of ``steps``.
            x1: (num, *event) states to start from, in place of noise of the level at the start.
            steer: bends the simulation; `Clip` for instance.
            batch_size: rows at a time.
            progress: show a bar over batches.

        Raises:
            TypeError: a number that has to be whole is not.
            ValueError: a count is not positive, ``grid`` does not fall, ``x1`` has another shape.
        """
        num = whole_number("num", num)
        steps = whole_number("steps", steps)
        batch_size = whole_number("batch_size", batch_size)
        if num < 0 or min(steps, batch_size) < 1:
            raise ValueError(
                f"need num >= 0, steps >= 1 and batch_size >= 1, got {num}, {steps}, {batch_size}"
            )
        pairs = self._grid(steps) if grid is None else grid_pairs(grid)
        if not bool((pairs[:, 1] < pairs[:, 0]).all()):
            raise ValueError(f"grid must fall, got {grid}")
        if x1 is not None and tuple(x1.shape) != (num, *self.shape):
            raise ValueError(f"x1 must have shape {(num, *self.shape)}, got {tuple(x1.shape)}")
        dtype = self.images.dtype if self.format is None else torch.float32
        result = torch.zeros(num, *self.shape, dtype=dtype, device=self.images.device)
        starts = range(0, num, batch_size)
        for start in tqdm(starts, "sampling", unit="batch", disable=not progress):
            rows = torch.arange(start, min(num, start + batch_size))
            part = noise.rows(rows)
            # zeros at the clean end leave noise of the level at the start
            begin = self.path.sample(result[rows], pairs[0, 0], part).x if x1 is None else x1[rows]
            drawn = simulate(
                cast(Tensor, begin).to(result),
                pairs,
                DDIM() if sampler is None else sampler,
                self.path,
                self,
                part,
                steer,
            )
            result[rows] = cast(Tensor, drawn)
        return result

    def _grid(self, steps: int) -> Tensor:
        if not isinstance(self.path, Tabulated):
            return uniform_grid(steps)
        count = self.path.timesteps
        if steps > 1:
            times = torch.linspace(0.9 * count, 0, steps, dtype=torch.float64).add(1) / count
        else:
            times = torch.tensor([(0.9 * count + 1) / count], dtype=torch.float64)
        return grid_pairs(torch.cat([times.clamp(max=1), times.new_zeros(1)]))

    # Files

    def _options(self) -> dict[str, Any]:
        """Arguments of the constructor of its own, as JSON holds them."""
        return {}

    def _with(self, **attributes: Any) -> Self:
        """A copy that shares the images and all that was computed of them."""
        other = copy.copy(self)
        for name, value in attributes.items():
            setattr(other, name, value)
        return other

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """One safetensors file with all that `load` needs. It holds the images themselves.

        Raises:
            ValueError: the path is of a class that is not fluvial's; hand it to `load` yourself.
        """
        weights = {"images": self.images}
        described: dict[str, Any] = {"class": type(self.path).__name__}
        if type(self.path) is Tabulated:
            weights["alphas_cumprod"] = self.path.alphas_cumprod
        elif _PATHS.get(described["class"]) is type(self.path):
            described["args"] = asdict(self.path)  # type: ignore[call-overload]
        else:
            raise ValueError(
                f"path: a {described['class']} cannot be saved, only Tabulated, {', '.join(_PATHS)}"
            )
        header = {
            "system": SYSTEM,
            "class": type(self).__name__,
            "options": self._options(),
            "memory": self.memory,
            "path": described,
            "data": None if self.format is None else self.format.as_json(),
        }
        use = self.use and self.use.for_system(SYSTEM, ())
        save_model(path, weights, header, use=use, overwrite=overwrite)

    @classmethod
    def load(cls, path: str | Path) -> Denoiser:
        """The denoiser that `save` wrote, on the CPU: of the class that it was.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a denoiser of this system.
        """
        weights, header = load_model(path, SYSTEM)
        kind = next((k for k in _kinds(Denoiser) if k.__name__ == header["class"]), None)
        if kind is None:
            raise ValueError(f"{path} holds a {header['class']}, which is no denoiser of fluvial")
        described, data = header["path"], header.get("data")
        along = (
            Tabulated(weights["alphas_cumprod"])
            if described["class"] == "Tabulated"
            else _PATHS[described["class"]](**described["args"])
        )
        model = kind(
            weights["images"],
            path=along,
            format=data and Format.from_json(data),
            memory=header.get("memory", MEMORY),
            **kind._read(header["options"]),
        )
        model.use = read_use(path)
        return model

    @classmethod
    def _read(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that `_options` wrote. A mapping by time is a list of pairs in JSON."""
        known = inspect.signature(cls).parameters
        if unknown := set(options) - set(known):
            raise ValueError(f"{cls.__name__} has no options {sorted(unknown)}")
        return {
            name: dict(value) if isinstance(value, list) else value
            for name, value in options.items()
        }


def by_time(options: Any) -> Any:
    """An option as JSON holds it: a mapping by time as a list of pairs."""
    return [list(pair) for pair in options.items()] if isinstance(options, Mapping) else options


def _kinds(kind: type[Denoiser]) -> Iterator[type[Denoiser]]:
    for sub in kind.__subclasses__():
        yield sub
        yield from _kinds(sub)


def level_of(alpha: float, sigma: float) -> Tensor:
    """sigma / alpha, () in float64, within the bounds that `Denoiser.denoise` sets.

    Raises:
        ValueError: one is negative or not finite, or both are 0.
    """
    if not (alpha >= 0 and sigma >= 0 and 0 < alpha + sigma < math.inf):
        raise ValueError(
            f"alpha and sigma must be finite, not negative and not both 0, got {alpha} and {sigma}"
        )
    level = max(sigma / max(alpha, FAINTEST * sigma), FINEST)
    return torch.tensor(level, dtype=torch.float64)


def _coefficient(value: Tensor | float, x: Tensor) -> Tensor:
    """In double precision where there is such a thing: () on the host, or (batch,)."""
    result = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    if result.ndim == 0:
        return result.to(_double(result))
    if tuple(result.shape) != (len(x),):
        raise ValueError(
            f"alpha and sigma must be numbers or ({len(x)},), got shape {tuple(result.shape)}"
        )
    return result.to(x.device, _double(x))


def _double(x: Tensor) -> torch.dtype:
    # the GPUs of Apple have no float64
    return torch.float32 if x.device.type == "mps" else torch.float64
