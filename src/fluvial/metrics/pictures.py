"""How close images are to those they should be: PSNR and SSIM."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Window: TypeAlias = Literal["gaussian", "uniform"]


def psnr(images: Tensor, target: Tensor, *, data_range: float) -> Tensor:
    r"""The peak signal-to-noise ratio of every image, in dB, (N,).

    .. math::
        10 \log_{10} \frac{\text{data\_range}^2}{\text{mean of}\ (x - y)^2}

    Infinite for equal images. Differentiable in both. The mean over a set is that of its images'
    values, and not the value of the mean error, which is larger in no case.

    Args:
        images, target: real, (N, *event), the same shape.
        data_range: largest possible value less the smallest: 255 for levels, 2 for [-1, 1].

    Returns:
        In the type of the images, float64 for integers; computed in float64.

    Raises:
        TypeError: an argument is not a tensor of real numbers.
        ValueError: the shapes differ or are empty, there is NaN or inf, or ``data_range`` is not
            positive.
    """
    x, y, dtype = _both(images, target, data_range)
    error = (x - y).square().flatten(1).mean(1)
    return (10 * (data_range**2 / error).log10()).to(dtype)


def ssim(
    images: Tensor,
    target: Tensor,
    *,
    data_range: float,
    window: Window = "gaussian",
    size: int | None = None,
    k1: float = 0.01,
    k2: float = 0.03,
) -> Tensor:
    r"""The structural similarity of every image, (N,), 1 for equal images.

    .. math::
        \frac{(2 \mu_x \mu_y + c_1)(2 \sigma_{xy} + c_2)}
             {(\mu_x^2 + \mu_y^2 + c_1)(\sigma_x^2 + \sigma_y^2 + c_2)},
        \qquad c_i = (k_i\,\text{data\_range})^2

    with means, variances and covariance in a window, averaged over the places where the window lies
    inside the image, and over the channels (Wang, Bovik, Sheikh and Simoncelli, Image quality
    assessment: from error visibility to structural similarity, 2004). "gaussian" is the paper's:
    deviation 1.5 pixels, 11 x 11, weights as they are. "uniform" is 7 x 7 with the divisor n - 1 in
    variances. These are `skimage.metrics.structural_similarity` with ``gaussian_weights=True,
    sigma=1.5, use_sample_covariance=False``, and its default. Differentiable in both images.

    Args:
        images, target: real, (N, C, H, W), the same shape.
        data_range: largest possible value less the smallest: 255 for levels, 2 for [-1, 1].
        window: "gaussian" or "uniform".
        size: side of the window, odd, at least 3; 11 or 7 if None.
        k1, k2: not negative.

    Returns:
        In the type of the images, float64 for integers; computed in float64.

    Raises:
        TypeError: an argument is not a tensor of real numbers.
        ValueError: the shapes differ or are not (N, C, H, W), there is NaN or inf, the window is
            larger than the images, or a number is out of its range.
    """
    if window not in get_args(Window):
        raise ValueError(f"window must be one of {', '.join(get_args(Window))}, got {window!r}")
    size = {"gaussian": 11, "uniform": 7}[window] if size is None else size
    if size < 3 or size % 2 == 0:
        raise ValueError(f"size must be odd and at least 3, got {size}")
    if not (0 <= k1 < math.inf and 0 <= k2 < math.inf):
        raise ValueError(f"k1 and k2 must not be negative, got {k1} and {k2}")
    x, y, dtype = _both(images, target, data_range)
    if x.ndim != 4 or min(x.shape[2:]) < size:
        raise ValueError(
            f"images must have shape (N, C, H, W) with H and W at least {size}, the side of the "
            f"window, got {tuple(x.shape)}"
        )
    # one call for all five means; about a common level, which spares the digits of variances
    level = y.mean((1, 2, 3), keepdim=True)
    u, v = x - level, y - level
    mean_u, mean_v, uu, vv, uv = _windowed(
        torch.stack([u, v, u * u, v * v, u * v]), window, size
    ).unbind()
    scale = size**2 / (size**2 - 1) if window == "uniform" else 1.0
    var_x = scale * (uu - mean_u * mean_u)
    var_y = scale * (vv - mean_v * mean_v)
    covariance = scale * (uv - mean_u * mean_v)
    mean_x, mean_y = mean_u + level, mean_v + level
    c1, c2 = (k1 * data_range) ** 2, (k2 * data_range) ** 2
    similarity = ((2 * mean_x * mean_y + c1) * (2 * covariance + c2)) / (
        (mean_x * mean_x + mean_y * mean_y + c1) * (var_x + var_y + c2)
    )
    return similarity.mean((1, 2, 3)).to(dtype)


def _windowed(x: Tensor, window: Window, size: int) -> Tensor:
    """Weighted means over each window inside (..., H, W)."""
    if window == "uniform":
        weights = x.new_full((size,), 1 / size)
    else:
        place = torch.arange(size, dtype=x.dtype, device=x.device) - size // 2
        weights = (-(place**2) / (2 * 1.5**2)).exp()
        weights = weights / weights.sum()
    flat = x.reshape(-1, 1, *x.shape[-2:])
    flat = F.conv2d(flat, weights[None, None, :, None])
    flat = F.conv2d(flat, weights[None, None, None, :])
    return flat.reshape(*x.shape[:-2], *flat.shape[-2:])


def _both(images: Tensor, target: Tensor, data_range: float) -> tuple[Tensor, Tensor, torch.dtype]:
    """Both in float64, on one device, and the type of the result."""
    for name, value in (("images", images), ("target", target)):
        if not isinstance(value, Tensor) or value.is_complex():
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name} must be a tensor of real numbers, got {got}")
        if not value.isfinite().all():
            raise ValueError(f"{name} must be finite, got NaN or inf")
    if images.shape != target.shape or images.ndim < 2 or images.numel() == 0:
        raise ValueError(
            "images and target must have the same shape (N, ...), with no dimension of 0, got "
            f"{tuple(images.shape)} and {tuple(target.shape)}"
        )
    if not 0 < data_range < math.inf:
        raise ValueError(f"data_range must be positive and finite, got {data_range}")
    wide = torch.float32 if images.device.type == "mps" else torch.float64
    dtype = images.dtype if images.is_floating_point() else wide
    return images.to(wide), target.to(images.device, wide), dtype
