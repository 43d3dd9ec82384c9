from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import diffusers
import pytest
import torch
from torch import Tensor, nn

from fluvial import KeyedNoise, simulate
from fluvial.adapters import Latent
from fluvial.core.gaussian.ode import Euler
from fluvial.core.gaussian.paths import Linear
from fluvial.core.time import uniform_grid

NOISE = KeyedNoise(8)


class Rotation:
    """An exact autoencoder: z = Q x + 3. Remembers the batches it was given."""

    def __init__(self) -> None:
        self.turn = torch.linalg.qr(NOISE.normal(torch.empty(4, 4, dtype=torch.float64)))[0]
        self.batches: list[int] = []

    def encode(self, x: Tensor) -> Tensor:
        self.batches.append(len(x))
        return x @ self.turn.T.to(x) + 3

    def decode(self, z: Tensor) -> Tensor:
        self.batches.append(len(z))
        return (z - 3) @ self.turn.to(z)


@dataclass
class Towards:
    """A field whose clean prediction is always the same."""

    clean: Tensor
    predicts: str = "clean"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return self.clean.expand_as(x)


class Model:
    """Fits a mean and samples around it."""

    def fit(self, x: Tensor, scale: float = 1.0) -> Self:
        self.mean, self.scale = x.mean(0), scale
        return self

    def sample(self, num: int, *, noise: KeyedNoise) -> Tensor:
        return self.mean + self.scale * noise.normal(self.mean.expand(num, -1))


def kl(**config: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # diffusers draws weights from the global generator
        return diffusers.AutoencoderKL(
            in_channels=3,
            out_channels=3,
            latent_channels=2,
            block_out_channels=(8, 8),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            norm_num_groups=4,
            mid_block_add_attention=False,
            **config,
        )


def images(rows: int = 5) -> Tensor:
    return NOISE.normal(torch.empty(rows, 3, 8, 8), "images")


def test_there_and_back_in_parts() -> None:
    autoencoder = Rotation()
    latent = Latent(None, autoencoder, scale=0.5, shift=3.0, batch_size=3)
    x = NOISE.normal(torch.empty(7, 4, dtype=torch.float64))
    z = latent.encode(x)
    assert torch.allclose(z, 0.5 * x @ autoencoder.turn.T)
    assert torch.allclose(latent.decode(z), x)
    assert autoencoder.batches == [3, 3, 1] * 2
    each = torch.tensor([2.0, 1.0, 3.0, 1.0])  # one number a channel
    assert torch.allclose(Latent(None, autoencoder, scale=each).encode(x), each * (2 * z + 3))
    assert latent.encode(x[:0]).shape == latent.decode(z[:0]).shape == (0, 4)


def test_a_model_behind_it() -> None:
    model = Model()
    latent = Latent(model, Rotation(), shift=3.0, batch_size=4)
    x = 2 + NOISE.normal(torch.empty(9, 4, dtype=torch.float64))
    assert latent.fit(x, scale=0.1) is latent and model.scale == 0.1
    assert torch.allclose(latent.decode(model.mean[None])[0], x.mean(0))
    assert torch.equal(latent.sample(5, noise=NOISE), latent.decode(model.sample(5, noise=NOISE)))


def test_a_field_behind_it() -> None:
    autoencoder = Rotation()
    goal = torch.arange(4, dtype=torch.float64)
    latent = Latent(Towards(goal), autoencoder, shift=3.0)
    z = NOISE.normal(torch.empty(3, 4, dtype=torch.float64))
    run: tuple[Any, ...] = (z, uniform_grid(4), Euler(), Linear())
    x = latent.simulate(*run, NOISE, label=None)
    wanted = simulate(*run, Towards(goal), NOISE)
    assert isinstance(wanted, Tensor) and torch.equal(x, latent.decode(wanted))
    assert torch.allclose(x, (goal @ autoencoder.turn).expand(3, 4))


@pytest.mark.parametrize(
    ("config", "scale", "shift"),
    [
        ({"scaling_factor": 0.3}, 0.3, 0.0),
        ({"scaling_factor": 0.3, "shift_factor": 0.7}, 0.3, 0.7),
        (
            {"scaling_factor": 0.3, "latents_mean": [1.0, 2.0], "latents_std": [0.5, 2.0]},
            torch.tensor([0.6, 0.15]),
            torch.tensor([1.0, 2.0]),
        ),
    ],
    ids=["scale", "shift", "channels"],
)
def test_autoencoder_kl(config: dict[str, Any], scale: Any, shift: Any) -> None:
    """z = scale (mean - shift), x = decode(z / scale + shift), as the pipelines have it."""
    autoencoder = kl(**config)
    latent = Latent(None, autoencoder, batch_size=2)
    assert not autoencoder.training
    x = images()
    scale, shift = (torch.as_tensor(v).reshape(-1, 1, 1) for v in (scale, shift))
    with torch.no_grad():
        mean = autoencoder.encode(x).latent_dist.mean
        z = latent.encode(x)
        assert z.shape == (5, 2, 4, 4) and torch.allclose(z, (mean - shift) * scale, atol=1e-5)
        wanted = autoencoder.decode(z / scale + shift).sample
        assert torch.allclose(latent.decode(z), wanted, atol=1e-5)
    assert not z.requires_grad
    given = Latent(None, autoencoder, scale=2.0, shift=1.0).encode(x)
    assert torch.allclose(given, 2 * (mean - 1), atol=1e-5)


def test_draws_of_latents_are_keyed() -> None:
    autoencoder = kl()
    x = images()
    one, other = (Latent(None, autoencoder, batch_size=size) for size in (2, 5))
    before = torch.get_rng_state()
    z = one.encode(x, NOISE)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.allclose(z, other.encode(x, NOISE), atol=1e-6)
    law = autoencoder.encode(x).latent_dist
    scale = autoencoder.config.scaling_factor
    xi = (z / scale - law.mean) / law.std
    assert torch.allclose(xi, NOISE.normal(xi, "latent"), atol=1e-4)


def test_dtypes() -> None:
    latent = Latent(None, kl().to(torch.bfloat16), batch_size=2)
    z = latent.encode(images())
    assert z.dtype == torch.float32 and latent.decode(z).dtype == torch.float32
    assert (z - Latent(None, kl()).encode(images())).abs().max() < 0.05 * z.abs().max()


def test_autoencoder_tiny() -> None:
    channels = (8, 8, 8, 8)
    autoencoder = diffusers.AutoencoderTiny(
        encoder_block_out_channels=channels,
        decoder_block_out_channels=channels,
        num_encoder_blocks=(1, 1, 1, 1),
        num_decoder_blocks=(1, 1, 1, 1),
        scaling_factor=0.5,
    )
    latent = Latent(None, autoencoder)
    with torch.no_grad():
        z = autoencoder.encode(images()).latents
        assert torch.allclose(latent.encode(images()), 0.5 * z, atol=1e-6)
        assert torch.allclose(latent.decode(z), autoencoder.decode(2 * z).sample, atol=1e-6)


def test_refused() -> None:
    with pytest.raises(TypeError, match="autoencoder must have encode and decode, got Linear"):
        Latent(None, nn.Linear(1, 1))
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        Latent(None, Rotation(), batch_size=0)
    with pytest.raises(ValueError, match=r"scale must not be 0, got \[1.0, 0.0\]"):
        Latent(None, Rotation(), scale=torch.tensor([1.0, 0.0]))

    for name in ("scale", "shift"):
        with pytest.raises(ValueError, match=f"{name} must be finite, got nan"):
            Latent(None, Rotation(), **{name: float("nan")})
        latent = Latent(None, Rotation(), **{name: torch.ones(3)})
        for call in (latent.encode, latent.decode):
            with pytest.raises(ValueError, match=r"to latents of shape \(2, 4\), got \(3,\)"):
                call(torch.zeros(2, 4))
    with pytest.raises(TypeError, match="x must be floating, got torch.uint8"):
        Latent(None, Rotation()).encode(torch.zeros(2, 4, dtype=torch.uint8))

    class Wrong(Rotation):
        def encode(self, x: Tensor) -> Any:
            return [x]

    with pytest.raises(TypeError, match="autoencoder.encode must return a tensor or .* got list"):
        Latent(None, Wrong()).encode(torch.zeros(2, 4))
