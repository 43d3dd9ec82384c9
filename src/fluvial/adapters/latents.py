"""A model behind an autoencoder: trained and sampled in latents, used in the data's own space."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from fluvial.core.protocols import Noise, Path, Sampler, Steering
from fluvial.core.simulate import simulate


class Latent:
    """A model or field of latents z, with x = decode(z) (Rombach et al., CVPR 2022).

        latent = Latent(MeanFlow(network), autoencoder)
        latent.fit(x, steps=10_000)
        x = latent.sample(16, noise=KeyedNoise(0))

    or, with a field,

        latent = Latent(field, autoencoder)
        x = latent.simulate(noise.normal(torch.empty(16, 4, 8, 8)), pairs, Euler(), path, noise)

    z = scale (encode(x) - shift), of about unit variance, is what the model sees. Encoding and
    decoding take ``batch_size`` rows at a time, to bound the memory, and keep no gradients.

    Args:
        model: with `fit` and `sample`, or a field.
        autoencoder: anything with ``encode(x)`` and ``decode(z)``, which return a tensor or, as in
            diffusers, something that holds it as ``latent_dist``, ``latents``, ``latent`` or
            ``sample``. A module is put into evaluation mode.
        scale, shift: numbers, one number a channel, or tensors that broadcast to latents. By
            default those of the autoencoder's ``config``: ``scaling_factor`` and ``shift_factor``,
            or ``scaling_factor / latents_std`` and ``latents_mean``; without these 1 and 0.
        batch_size: rows at a time.

    Raises:
        TypeError: ``autoencoder`` has no ``encode`` or ``decode``, or they return something else.
        ValueError: ``batch_size`` < 1, ``scale`` holds a zero, a value that is not finite; in a
            call, latents that ``scale`` and ``shift`` do not fit.
    """

    def __init__(
        self,
        model: Any,
        autoencoder: Any,
        *,
        scale: float | Tensor | None = None,
        shift: float | Tensor | None = None,
        batch_size: int = 8,
    ) -> None:
        if not (hasattr(autoencoder, "encode") and hasattr(autoencoder, "decode")):
            raise TypeError(
                f"autoencoder must have encode and decode, got {type(autoencoder).__name__}"
            )
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        usual = _normalisation(getattr(autoencoder, "config", None))
        self.scale, self.shift = (
            torch.as_tensor(default if given is None else given, dtype=torch.float64)
            for given, default in zip((scale, shift), usual, strict=True)
        )
        if not bool((self.scale != 0).all()):
            raise ValueError(f"scale must not be 0, got {self.scale.tolist()}")
        for name, value in (("scale", self.scale), ("shift", self.shift)):
            if not bool(value.isfinite().all()):
                raise ValueError(f"{name} must be finite, got {value.tolist()}")
        self.model, self.autoencoder, self.batch_size = model, autoencoder, batch_size
        if isinstance(autoencoder, nn.Module):
            autoencoder.eval()

    @torch.no_grad()
    def encode(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        """Latents of ``x`` (batch, *event), in its dtype and on its device.

        Args:
            x: data.
            noise: where the autoencoder has a law of latents, draw from it; its mean by default.

        Raises:
            TypeError: ``x`` is not floating.
        """
        if not x.is_floating_point():
            raise TypeError(f"x must be floating, got {x.dtype}")
        result = []
        for rows, part in self._parts(x):
            latent = self.autoencoder.encode(part)
            law = getattr(latent, "latent_dist", None)
            if law is None:
                z = _tensor(latent, "encode", ("latents", "latent"))
            elif noise is None:
                z = law.mean
            else:
                z = law.mean + law.std * noise.rows(rows).normal(law.mean, "latent")
            result.append(((z - self._shift(z)) * self._scale(z)).to(x))
        return torch.cat(result)

    @torch.no_grad()
    def decode(self, z: Tensor) -> Tensor:
        """Data of latents ``z`` (batch, *latent), in their dtype and on their device."""
        result = []
        for _, part in self._parts(z):
            raw = part / self._scale(part) + self._shift(part)
            result.append(_tensor(self.autoencoder.decode(raw), "decode", ("sample",)).to(z))
        return torch.cat(result)

    def fit(self, x: Tensor, *args: Any, **options: Any) -> Self:
        """The model's own ``fit``, on the latents of ``x``."""
        self.model.fit(self.encode(x), *args, **options)
        return self

    def sample(self, *args: Any, **options: Any) -> Tensor:
        """The model's own ``sample``, decoded."""
        return self.decode(self.model.sample(*args, **options))

    def simulate(
        self,
        z: Tensor,
        pairs: Tensor,
        sampler: Sampler,
        path: Path,
        noise: Noise,
        steer: Steering | None = None,
        **cond: Any,
    ) -> Tensor:
        """`fluvial.core.simulate.simulate` with the model as field, from latents ``z``, decoded."""
        end: Any = simulate(z, pairs, sampler, path, self.model, noise, steer, **cond)
        return self.decode(end)

    def _parts(self, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(row numbers, rows where the autoencoder is and in its dtype), a few at a time."""
        like = x
        if isinstance(self.autoencoder, nn.Module):
            like = next(self.autoencoder.parameters(), x)
        for start in range(0, max(1, len(x)), self.batch_size):
            part = x[start : start + self.batch_size]
            yield torch.arange(start, start + len(part)), part.to(like)

    def _scale(self, z: Tensor) -> Tensor:
        return _broadcast(self.scale, z)

    def _shift(self, z: Tensor) -> Tensor:
        return _broadcast(self.shift, z)


def _broadcast(value: Tensor, z: Tensor) -> Tensor:
    """One value a channel, (channels,), or something that broadcasts, in the dtype of ``z``."""
    value = value.reshape(-1, *(1,) * (z.ndim - 2)) if value.ndim == 1 else value
    try:
        fits = torch.broadcast_shapes(value.shape, z.shape) == z.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"scale and shift must broadcast to latents of shape {tuple(z.shape)}, got "
            f"{tuple(value.shape)}"
        )
    return value.to(z)


def _normalisation(config: Any) -> tuple[Any, Any]:
    """(scale, shift) by the configuration of an autoencoder of diffusers."""
    scale = getattr(config, "scaling_factor", None)
    mean, std = (getattr(config, f"latents_{name}", None) for name in ("mean", "std"))
    scale = 1.0 if scale is None else scale
    if mean is not None and std is not None:
        return scale / torch.as_tensor(std, dtype=torch.float64), mean
    shift = getattr(config, "shift_factor", None)
    return scale, 0.0 if shift is None else shift


def _tensor(value: Any, method: str, names: tuple[str, ...]) -> Tensor:
    for name in names:
        value = getattr(value, name, value)
    if not isinstance(value, Tensor):
        raise TypeError(
            f"autoencoder.{method} must return a tensor or something with {' or '.join(names)}, "
            f"got {type(value).__name__}"
        )
    return value
