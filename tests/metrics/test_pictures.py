from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from fluvial.metrics import psnr, ssim


def images(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = images(*shape)
    return x, (0.7 * x + 0.3 * images(*shape, seed=1))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["unit", "levels", "symmetric"])
def test_agrees_with_scikit_image(kind: str, channels: int) -> None:
    x, y = pair(3, channels, 20, 17)
    span = {"unit": 1.0, "levels": 255.0, "symmetric": 2.0}[kind]
    if kind == "levels":
        x, y = ((255 * z).round().to(torch.uint8) for z in (x, y))
    elif kind == "symmetric":
        x, y = 2 * x - 1, 2 * y - 1
    paper = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    for window, size, options in (
        ("gaussian", None, paper),
        ("uniform", None, {}),
        ("uniform", 3, {"win_size": 3}),
    ):
        found = ssim(x, y, data_range=span, window=window, size=size)
        wanted = [
            structural_similarity(a, b, channel_axis=0, data_range=span, **options)
            for a, b in zip(x.numpy(), y.numpy(), strict=True)
        ]
        assert found.dtype == torch.float64
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-10)
    wanted = [
        peak_signal_noise_ratio(a, b, data_range=span)
        for a, b in zip(x.numpy(), y.numpy(), strict=True)
    ]
    np.testing.assert_allclose(psnr(x, y, data_range=span), wanted, rtol=1e-12)


def test_float32_is_computed_in_float64() -> None:
    """Nearly constant and bright: variances in float32 would be rounding."""
    x, y = pair(2, 3, 16, 16)
    x, y = (1000 + 0.01 * x).float(), (1000 + 0.01 * y).float()
    found = ssim(x, y, data_range=0.01)
    assert found.dtype == torch.float32
    wanted = [
        structural_similarity(
            a, b, channel_axis=0, data_range=0.01, gaussian_weights=True, sigma=1.5,
            use_sample_covariance=False,
        )
        for a, b in zip(x.double().numpy(), y.double().numpy(), strict=True)
    ]  # fmt: skip
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_of_constant_images() -> None:
    """No variance: what is left is the term of the means."""
    x, y = torch.full((1, 1, 12, 12), 0.25), torch.full((1, 1, 12, 12), 0.75)
    c1 = 0.01**2
    wanted = (2 * 0.25 * 0.75 + c1) / (0.25**2 + 0.75**2 + c1)
    for window in ("gaussian", "uniform"):
        assert float(ssim(x, y, data_range=1, window=window)) == pytest.approx(wanted, rel=1e-6)
    assert float(psnr(x, y, data_range=1)) == pytest.approx(10 * math.log10(4), rel=1e-6)
    assert float(psnr(x, y, data_range=10)) == pytest.approx(20 + 10 * math.log10(4), rel=1e-6)


def test_of_equal_images() -> None:
    x = images(2, 3, 12, 12)
    assert torch.equal(psnr(x, x, data_range=1), torch.full((2,), math.inf, dtype=torch.float64))
    torch.testing.assert_close(ssim(x, x, data_range=1), torch.ones(2, dtype=torch.float64))


def test_an_image_is_measured_alone() -> None:
    x, y = pair(4, 3, 12, 14)
    for metric in (psnr, ssim):
        whole = metric(x, y, data_range=1)
        assert whole.shape == (4,)
        parts = [metric(x[k : k + 1], y[k : k + 1], data_range=1) for k in range(4)]
        torch.testing.assert_close(whole, torch.cat(parts), rtol=1e-12, atol=0)


@pytest.mark.parametrize("metric", [psnr, ssim])
def test_slopes_are_those_of_small_steps(metric) -> None:
    x, y = pair(2, 1, 12, 12)
    x.requires_grad_()
    metric(x, y, data_range=1).sum().backward()
    along = images(2, 1, 12, 12, seed=5) - 0.5
    step = 1e-5
    with torch.no_grad():
        ends = [metric(x + sign * step * along, y, data_range=1).sum() for sign in (1, -1)]
    assert float((x.grad * along).sum()) == pytest.approx(
        float(ends[0] - ends[1]) / (2 * step), rel=1e-6
    )


def test_rows_of_any_shape_have_a_psnr() -> None:
    x, y = pair(5, 7)
    wanted = -10 * ((x - y) ** 2).mean(1).log10()
    torch.testing.assert_close(psnr(x, y, data_range=1), wanted)


@pytest.mark.parametrize("metric", [psnr, ssim])
def test_refuses(metric) -> None:
    x, y = pair(2, 3, 12, 12)
    for bad, error, message in (
        (x[:1], ValueError, "same shape"),
        (x[:0], ValueError, "same shape"),
        (x * math.nan, ValueError, "must be finite"),
        (x.to(torch.complex64), TypeError, "must be a tensor of real numbers, got torch.complex64"),
        (x.numpy(), TypeError, "got ndarray"),
    ):
        with pytest.raises(error, match=message):
            metric(bad, y, data_range=1)
        with pytest.raises(error, match=message):
            metric(x, bad, data_range=1)
    for span in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="data_range must be positive"):
            metric(x, y, data_range=span)


def test_ssim_refuses() -> None:
    x, y = pair(2, 3, 12, 12)
    with pytest.raises(ValueError, match="window must be one of gaussian, uniform, got 'box'"):
        ssim(x, y, data_range=1, window="box")
    for size in (2, 4, 1):
        with pytest.raises(ValueError, match="size must be odd and at least 3"):
            ssim(x, y, data_range=1, size=size)
    with pytest.raises(ValueError, match=r"H and W at least 11, .* got \(2, 3, 12, 8\)"):
        ssim(x[..., :8], y[..., :8], data_range=1)
    with pytest.raises(ValueError, match=r"shape \(N, C, H, W\)"):
        ssim(x[:, 0], y[:, 0], data_range=1)
    for k in (-0.1, math.nan):
        with pytest.raises(ValueError, match="k1 and k2 must not be negative"):
            ssim(x, y, data_range=1, k1=k)
