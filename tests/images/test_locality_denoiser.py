"""The denoisers made of a data set: closed forms, limits, invariances, peers, misuse, files."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from sklearn.decomposition import PCA
from torch import Tensor

import fluvial
from fluvial.cli import main as fluvial_command
from fluvial.core.gaussian.fields import convert
from fluvial.core.gaussian.multistep import DDIM, DPMSolver, UniPC
from fluvial.core.gaussian.ode import Euler, Heun
from fluvial.core.gaussian.paths import CustomPath, Linear, VPLinear
from fluvial.core.gaussian.sde import EulerMaruyama
from fluvial.core.noise import KeyedNoise
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.steering.rewards import RewardGradient
from fluvial.core.time import uniform_grid
from fluvial.images import (
    EquivariantLocalScoreMachine,
    LocalityDenoiser,
    LocalScoreMachine,
    NearestDenoiser,
    OptimalDenoiser,
    WienerDenoiser,
)
from fluvial.images.locality import (
    Clip,
    Denoiser,
    agreement,
    calibrate_scales,
    cosine,
    linear_beta_path,
    match,
    radius,
    sensitivity,
    trajectory,
)
from fluvial.images.locality.posterior import Windows, csr
from fluvial.networks import MLP

A, B = 0.6, 0.4
ALPHA, SIGMA = math.sqrt(A), math.sqrt(B)


def images(n: int = 30, channels: int = 1, height: int = 5, width: int = 5) -> Tensor:
    """Correlated along the width, so that fields have a shape."""
    noise = KeyedNoise(0).normal(torch.empty(n, channels, height, width, dtype=torch.float64))
    return 0.5 * noise.cumsum(-1)


def states(like: Tensor, n: int = 4) -> Tensor:
    return KeyedNoise(1).normal(like.new_empty(n, *like.shape[1:]))


def every(x: Tensor, **options: Any) -> list[Denoiser]:
    """One of every kind and option."""
    ells = EquivariantLocalScoreMachine
    return [
        OptimalDenoiser(x, **options),
        OptimalDenoiser(x, top_k=3, temperature=2.0, **options),
        NearestDenoiser(x, **options),
        WienerDenoiser(x, **options),
        LocalScoreMachine(x, k=3, **options),
        ells(x, k=3, **options),
        ells(x, k=3, train_patches="circular", **options),
        ells(x, k=3, boundary="broken", **options),
        LocalityDenoiser(x, tau=0.3, **options),
        LocalityDenoiser(x, tau=0.05, threshold="global", temperature=0.5, **options),
        LocalityDenoiser(x, tau=0.0, **options),
    ]


def name(denoiser: Denoiser) -> str:
    return f"{type(denoiser).__name__} {denoiser._options()}"


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


# Closed forms


@pytest.mark.parametrize(("x", "wanted"), [(0.3, 0.52335375), (-1.2, -0.98101248)])
def test_two_points_make_a_hyperbolic_tangent(x: float, wanted: float) -> None:
    points = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    got = OptimalDenoiser(points).denoise(torch.tensor([[x]], dtype=torch.float64), ALPHA, SIGMA)
    assert float(got) == pytest.approx(math.tanh(ALPHA * x / B), abs=1e-12)
    assert float(got) == pytest.approx(wanted, abs=5e-8)


def test_wiener_in_one_dimension() -> None:
    # mean 0.5 and variance 4, divisor N - 1
    points = torch.tensor([[0.5 - math.sqrt(2)], [0.5 + math.sqrt(2)]], dtype=torch.float64)
    wiener = WienerDenoiser(points)
    x = torch.tensor([[2.0]], dtype=torch.float64)
    assert float(wiener.denoise(x, 0.6, 0.8)) == pytest.approx(2.46153846, abs=1e-8)
    assert float(wiener.denoise(x, 1.0, 1e-8)) == pytest.approx(2.0, abs=1e-12)
    assert float(wiener.denoise(x, 0.0, 1.0)) == pytest.approx(0.5, abs=1e-8)


def test_wiener_is_the_posterior_mean_of_a_gaussian() -> None:
    x = images(200, 1, 3, 3)
    flat, y = x.flatten(1), states(x)
    mean, cov = flat.mean(0), torch.from_numpy(np.cov(flat.numpy().T))
    noisy = A * cov + B * torch.eye(9, dtype=torch.float64)
    shift = torch.linalg.solve(noisy, (y.flatten(1) - ALPHA * mean).T).T
    wanted = mean + ALPHA * shift @ cov
    close(WienerDenoiser(x).denoise(y, ALPHA, SIGMA).flatten(1), wanted)
    gain = WienerDenoiser(x).gain(ALPHA, SIGMA)
    close(gain, A * cov @ torch.linalg.inv(noisy))


def test_spectrum_is_that_of_principal_components_with_many_and_with_few_images() -> None:
    for n in (200, 12):
        x = images(n)
        spectrum = WienerDenoiser(x).spectrum
        peer = PCA().fit(x.flatten(1).numpy())
        rank = min(n - 1, 25)
        close(spectrum.values[:rank], torch.from_numpy(peer.explained_variance_[:rank]))
        overlap = (spectrum.vectors[:, :5] * torch.from_numpy(peer.components_[:5].T)).sum(0)
        close(overlap.abs(), torch.ones(5, dtype=torch.float64), 1e-6)
        assert (spectrum.values >= 0).all()


def test_of_fewer_images_than_numbers_wiener_knows_only_their_span() -> None:
    x = images(4)
    wiener = WienerDenoiser(x)
    assert torch.linalg.matrix_rank(wiener.gain(1.0, 1e-6)) == 3
    offset = states(x) - x.mean(0)
    basis = torch.linalg.qr((x - x.mean(0)).flatten(1).T)[0][:, :3]
    inside = (offset.flatten(1) @ basis) @ basis.T
    got = wiener.denoise(states(x), 1.0, 1e-8) - x.mean(0)
    close(got.flatten(1), inside, 1e-9)


def test_jacobian_of_the_optimal_denoiser_is_a_covariance() -> None:
    x, y = images(20, 1, 2, 3), states(images(20, 1, 2, 3), 1)
    optimal = OptimalDenoiser(x, path=Linear())
    t = torch.tensor(0.3, dtype=torch.float64)
    rows = sensitivity(optimal, y, t, range(6)).reshape(6, 6)
    weights = torch.softmax(-(y - 0.7 * x).square().flatten(1).sum(1) / (2 * 0.09), 0)
    flat = x.flatten(1)
    offset = flat - weights @ flat
    close(rows, 0.7 / 0.09 * (offset.T * weights) @ offset, 1e-12)


@pytest.mark.parametrize("sparse", [False, True])
def test_jacobian_of_the_locality_denoiser_in_closed_form(
    sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """J_mn = (alpha / sigma^2) M_mn Cov_{p(m)}(x_m, x_n), over one chunk and over many."""
    monkeypatch.setattr("fluvial.images.locality.locality.SPARSE", 1.0 if sparse else 0.0)
    x, y = images(20, 1, 2, 3), states(images(20, 1, 2, 3), 2)
    for memory in (1 << 30, 1600):
        locality = LocalityDenoiser(x, tau=0.4, path=Linear())
        _ = locality.wiener.spectrum
        locality.memory = memory
        mask = locality.mask(0.7, 0.3).double()
        assert 0 < (mask == 0).sum() < 30
        rows = sensitivity(locality, y, torch.tensor(0.3, dtype=torch.float64), range(6))
        for one, got in zip(y, rows.reshape(2, 6, 6), strict=True):
            squares = (one - 0.7 * x).square().flatten(1)
            weights = torch.softmax(-squares @ mask.T / (2 * 0.09), 0)
            flat = x.flatten(1)
            for m in range(6):
                offset = flat - weights[:, m] @ flat
                cov = (weights[:, m] * offset[:, m]) @ offset
                close(got[m], 0.7 / 0.09 * mask[m] * cov, 1e-11)


def test_wiener_sensitivity_is_its_gain_over_alpha() -> None:
    x = images()
    wiener = WienerDenoiser(x, path=Linear())
    rows = sensitivity(wiener, states(x), torch.tensor(0.3, dtype=torch.float64), [3, 7])
    wanted = (wiener.gain(0.7, 0.3)[[3, 7]] / 0.7).reshape(2, 1, 5, 5)
    close(rows, wanted.expand(4, 2, 1, 5, 5))


def test_ring_of_pixels_with_a_markov_law() -> None:
    """Precision with -c beside 1 + 2 c: the filter decays by a closed-form ratio a pixel."""
    n, c = 201, 2.0
    frequency = torch.arange(n, dtype=torch.float64) * (2 * math.pi / n)
    power = 1 / (1 + 2 * c - 2 * c * frequency.cos())
    first = torch.fft.ifft(power).real
    place = torch.arange(n)
    cov = first[(place[:, None] - place) % n]
    assert float(first[1] / first[0]) == pytest.approx(0.5, abs=1e-12)
    root = torch.linalg.cholesky(cov)
    # 2 n images with exactly this covariance: +- sqrt((2 n - 1) / 2) times the columns of its root
    x = torch.cat([root.T, -root.T]) * math.sqrt((2 * n - 1) / 2)
    denoiser = LocalityDenoiser(x.reshape(2 * n, 1, 1, n), tau=0.02)
    for a, top, ratio, width in (
        (0.5, 0.22360680, 0.38196601, 4),
        (0.9, 0.67082039, 0.14589803, 2),
        (0.1, 0.03492151, 0.48234327, 5),
    ):
        alpha, sigma = math.sqrt(a), math.sqrt(1 - a)
        gain = denoiser.wiener.gain(alpha, sigma)
        q = a + (1 - a) * (1 + 2 * c)
        root_q = math.sqrt(q * q - 4 * (1 - a) ** 2 * c * c)
        assert float(gain[0, 0]) == pytest.approx(a / root_q, abs=1e-12)
        assert float(gain[0, 0]) == pytest.approx(top, abs=1e-8)
        for j in range(1, 8):
            assert float(gain[0, j] / gain[0, j - 1]) == pytest.approx(ratio, abs=1e-7)
        mask = denoiser.mask(alpha, sigma)
        away = torch.minimum(place, n - place)
        assert torch.equal(mask[0], away <= width)
        assert torch.equal(mask[50], torch.roll(mask[0], 50))


def test_a_pattern_added_to_all_images_shapes_the_fields_on_it() -> None:
    """S + gamma^2 w w^T: the field of a pixel on w takes the shape of w (Sherman-Morrison)."""
    x = images(400)
    w = torch.zeros(1, 5, 5, dtype=torch.float64)
    w[0, :, 2], w[0, 2, :] = 1.0, 1.0
    z = KeyedNoise(5).normal(torch.empty(400, 1, 1, 1, dtype=torch.float64))
    marked = WienerDenoiser(x + 3 * z * w).gain(0.5, math.sqrt(0.75))
    plain = WienerDenoiser(x).gain(0.5, math.sqrt(0.75))
    on_it = cosine(marked[[2, 14]].abs(), w.flatten().expand(2, -1))
    assert (on_it > 0.8).all()
    assert (cosine(plain[[2, 14]].abs(), w.flatten().expand(2, -1)) < on_it - 0.1).all()


# Limits in which one is another


@pytest.mark.parametrize("channels", [1, 2])
def test_whole_windows_make_the_optimal_denoiser(channels: int) -> None:
    x = images(channels=channels)
    y = states(x)
    wanted = OptimalDenoiser(x).denoise(y, ALPHA, SIGMA)
    close(LocalScoreMachine(x, k=9).denoise(y, ALPHA, SIGMA), wanted)
    everything = LocalityDenoiser(x, tau=1e-14)
    assert everything.mask(ALPHA, SIGMA).all()
    close(everything.denoise(y, ALPHA, SIGMA), wanted)
    close(OptimalDenoiser(x, top_k=len(x)).denoise(y, ALPHA, SIGMA), wanted)
    close(OptimalDenoiser(x, temperature=1e-9).denoise(y, ALPHA, SIGMA), nearest(x, y), 1e-12)
    close(NearestDenoiser(x).denoise(y, ALPHA, SIGMA), nearest(x, y), 0)


def nearest(x: Tensor, y: Tensor) -> Tensor:
    return x[(y[:, None] / ALPHA - x).square().flatten(2).sum(2).argmin(1)]


def test_single_coordinates_make_histograms() -> None:
    x = KeyedNoise(2).normal(torch.empty(2000, 2, 3, 3, dtype=torch.float64))
    y = states(x)
    own = LocalityDenoiser(x, tau=1.0)
    assert torch.equal(own.mask(ALPHA, SIGMA), torch.eye(18, dtype=torch.bool))
    columns = [OptimalDenoiser(x.flatten(1)[:, [m]]) for m in range(18)]
    wanted = [one.denoise(y.flatten(1)[:, [m]], ALPHA, SIGMA) for m, one in enumerate(columns)]
    close(own.denoise(y, ALPHA, SIGMA).flatten(1), torch.cat(wanted, 1))
    grey, z = x[:, :1], y[:, :1]
    wanted_grey = LocalityDenoiser(grey, tau=1.0).denoise(z, ALPHA, SIGMA)
    close(LocalScoreMachine(grey, k=1).denoise(z, ALPHA, SIGMA), wanted_grey)


def test_one_image_is_returned_as_it_is() -> None:
    x = images(1)
    y = states(x)
    for denoiser in (OptimalDenoiser(x), NearestDenoiser(x), LocalScoreMachine(x, k=3)):
        close(denoiser.denoise(y, ALPHA, SIGMA), x.expand_as(y), 0)
    twice = torch.cat([x, x])
    for threshold in ("row", "global"):
        locality = LocalityDenoiser(twice, threshold=threshold)  # type: ignore[arg-type]
        assert torch.equal(locality.mask(ALPHA, SIGMA), torch.eye(25, dtype=torch.bool))
        close(locality.denoise(y, ALPHA, SIGMA), x.expand_as(y), 0)
    for boundary in ("circular", "broken"):
        mosaic = EquivariantLocalScoreMachine(x, k=3, boundary=boundary)  # type: ignore[arg-type]
        assert (mosaic.denoise(y, ALPHA, SIGMA) - x).abs().max() > 0.1
        constant = EquivariantLocalScoreMachine(0 * x + 0.3, k=3)
        close(constant.denoise(y, ALPHA, SIGMA), torch.full_like(y, 0.3), 1e-15)


def test_without_noise_and_without_signal() -> None:
    x = images(channels=2)
    y = states(x)
    for denoiser in every(x):
        close(denoiser.denoise(y, 0.5, 0.0), y / 0.5, 0)
        mixed = torch.tensor([0.0, SIGMA, 0.0, SIGMA], dtype=torch.float64)
        got = denoiser.denoise(y, ALPHA, mixed)
        close(got[::2], y[::2] / ALPHA, 1e-15)
        close(got[1::2], denoiser.denoise(y[1::2], ALPHA, SIGMA), 1e-12)
        faint = denoiser.denoise(y, 0.0, 1.0)
        assert faint.isfinite().all(), name(denoiser)
        if isinstance(denoiser, EquivariantLocalScoreMachine) or getattr(denoiser, "top_k", None):
            continue
        close(faint, x.mean(0).expand_as(y), 1e-6)
        tiny = denoiser.denoise(y, 1.0, 1e-150)
        assert tiny.isfinite().all(), name(denoiser)


def test_gains_and_masks_have_the_limits_of_denoising() -> None:
    """Also where the covariance has an eigenvalue of 0, though there are many images."""
    x = images(200)
    x[..., 1] = x[..., 0]
    wiener = WienerDenoiser(x)
    spectrum = wiener.spectrum
    assert float(spectrum.values.min()) < 1e-12
    assert wiener.gain(1.0, 0.0).isfinite().all()
    close(wiener.gain(1.0, 0.0), wiener.gain(1.0, 1e-12), 0)
    close(wiener.gain(0.0, 1.0), torch.zeros(25, 25, dtype=torch.float64), 1e-12)
    for tau in (0.0, 0.1):
        for threshold in ("row", "global"):
            locality = LocalityDenoiser(x, tau=tau, threshold=threshold)  # type: ignore[arg-type]
            for alpha, sigma in ((1.0, 0.0), (0.0, 1.0)):
                assert locality.mask(alpha, sigma).isfinite().all()
    for read in (wiener.gain, LocalityDenoiser(x).mask):
        for alpha, sigma in ((1.0, -1.0), (0.0, 0.0), (1.0, math.nan), (math.inf, 1.0)):
            with pytest.raises(ValueError, match="alpha and sigma must be finite"):
                read(alpha, sigma)


def test_results_of_constant_images_can_be_written_to() -> None:
    x = torch.full((3, 1, 2, 2), 0.3, dtype=torch.float64)
    got = LocalityDenoiser(x).denoise(states(x), ALPHA, SIGMA)
    got[0] += 1
    close(got[1:], torch.full_like(got[1:], 0.3), 0)


def test_constant_coordinates_stay_what_they_are() -> None:
    x = images(channels=2)
    x[:, :, 0], x[:, 1, 3] = 0.1, -1.0  # 0.1 has a mean that is not itself, in floating point
    y = states(x)
    for denoiser in every(x):
        if isinstance(denoiser, EquivariantLocalScoreMachine):
            continue
        got = denoiser.denoise(y, ALPHA, SIGMA)
        close(got[:, :, 0], torch.full_like(got[:, :, 0], 0.1), 1e-15)
        close(got[:, 1, 3], torch.full_like(got[:, 1, 3], -1.0), 1e-15)
    locality = LocalityDenoiser(x, tau=0.1)
    mask, index = locality.mask(ALPHA, SIGMA), 3
    assert mask[index].sum() == 1 and mask[:, index].sum() == 1
    # and the others see the same as if the constants were not there
    left = x[:, :1, 1:]
    alone = LocalityDenoiser(left, tau=0.1)
    both = LocalityDenoiser(torch.cat([left, 0 * left - 1], 1), tau=0.1)
    z = states(left)
    got = both.denoise(torch.cat([z, z], 1), ALPHA, SIGMA)[:, :1]
    close(got, alone.denoise(z, ALPHA, SIGMA), 1e-12)


# Exactness


def literal(denoiser: Denoiser, x: Tensor, y: Tensor) -> Tensor:
    """The brief's formulas, with everything materialised."""
    shape, flat, noisy = y.shape, x.flatten(1), y.flatten(1)
    if isinstance(denoiser, LocalityDenoiser):
        mask = denoiser.mask(ALPHA, SIGMA).double()
        squares = (noisy[:, None] - ALPHA * flat).square()
        q = torch.einsum("mn,bin->bim", mask, squares)
        p = torch.softmax(-q / (2 * B * denoiser.temperature), 1)
        return torch.einsum("bim,im->bm", p, flat).reshape(shape)
    assert isinstance(denoiser, LocalScoreMachine)
    equivariant = isinstance(denoiser, EquivariantLocalScoreMachine)
    circular = equivariant and denoiser.boundary == "circular"  # type: ignore[attr-defined]
    k = denoiser.k
    assert isinstance(k, int)
    _, channels, height, width = x.shape
    half, result = k // 2, torch.zeros_like(y)

    def crosses(place: int, side: int) -> Any:
        return place if place < half or place >= side - half else "inside"

    for b in range(len(y)):
        for r in range(height):
            for c in range(width):
                q, values = [], []
                for r2 in range(height) if equivariant else (r,):
                    for c2 in range(width) if equivariant else (c,):
                        inside = (crosses(r2, height), crosses(c2, width)) == ("inside", "inside")
                        if circular and denoiser.train_patches == "valid" and not inside:  # type: ignore[attr-defined]
                            continue
                        if equivariant and not circular:
                            here = crosses(r, height), crosses(c, width)
                            if here != (crosses(r2, height), crosses(c2, width)):
                                continue
                        total = torch.zeros(len(x), dtype=x.dtype)
                        for i in range(-half, half + 1):
                            for j in range(-half, half + 1):
                                at, to = (r + i, c + j), (r2 + i, c2 + j)
                                if circular:
                                    at = at[0] % height, at[1] % width
                                    to = to[0] % height, to[1] % width
                                elif not (0 <= at[0] < height and 0 <= at[1] < width):
                                    continue  # zeros on both sides
                                difference = y[b, :, at[0], at[1]] - ALPHA * x[:, :, to[0], to[1]]
                                total += difference.square().sum(1)
                        q.append(total)
                        values.append(x[:, :, r2, c2])
                p = torch.softmax(-torch.cat(q) / (2 * B), 0)
                result[b, :, r, c] = p @ torch.cat(values)
    return result


def test_all_agree_with_their_formulas_written_out() -> None:
    x = images(6, 2, 4, 5)
    y = states(x, 2)
    for denoiser in every(x)[4:]:
        close(denoiser.denoise(y, ALPHA, SIGMA), literal(denoiser, x, y), 1e-12)


def test_broken_machine_with_large_windows_is_the_local_one() -> None:
    x = images()
    y = states(x)
    for k in (5, 7):
        broken = EquivariantLocalScoreMachine(x, k=k, boundary="broken")
        local = LocalScoreMachine(x, k=k).denoise(y, ALPHA, SIGMA)
        close(broken.denoise(y, ALPHA, SIGMA), local)
    assert (
        EquivariantLocalScoreMachine(x, k=3, boundary="broken")
        .denoise(y, ALPHA, SIGMA)
        .ne(LocalScoreMachine(x, k=3).denoise(y, ALPHA, SIGMA))
        .any()
    )


def test_shifts() -> None:
    x = images()
    y = states(x)
    moved = torch.roll(y, (1, 2), (2, 3))
    for train_patches in ("valid", "circular"):
        machine = EquivariantLocalScoreMachine(x, k=3, train_patches=train_patches)  # type: ignore[arg-type]
        got = machine.denoise(y, ALPHA, SIGMA)
        close(machine.denoise(moved, ALPHA, SIGMA), torch.roll(got, (1, 2), (2, 3)))
    for other in (
        LocalScoreMachine(x, k=3),
        LocalityDenoiser(x, tau=0.3),
        EquivariantLocalScoreMachine(x, k=3, boundary="broken"),
    ):
        got = other.denoise(y, ALPHA, SIGMA)
        assert (
            other.denoise(moved, ALPHA, SIGMA) - torch.roll(got, (1, 2), (2, 3))
        ).abs().max() > 0.01


def test_chunks_and_their_order_change_nothing() -> None:
    x = images(12, 2, 4, 4)
    y = states(x, 5)
    order = KeyedNoise(3).uniform(x[:, 0, 0, 0]).argsort()
    for whole, shuffled in zip(every(x), every(x[order]), strict=True):
        if getattr(whole, "top_k", None) and not isinstance(whole, NearestDenoiser):
            continue
        wanted = whole.denoise(y, ALPHA, SIGMA)
        shuffled.denoise(y, ALPHA, SIGMA)  # principal components need more room than chunks
        counts = set()
        for memory in (5_000, 40_000):
            for one in (whole, shuffled):
                seen: list[int] = []
                one.memory, one._chunks = memory, counted(one, seen)  # type: ignore[method-assign]
                close(one.denoise(y, ALPHA, SIGMA), wanted)
                counts.add(max(seen, default=0))
                del one._chunks
        assert isinstance(whole, WienerDenoiser) or len(counts) > 1, name(whole)


def counted(denoiser: Denoiser, sizes: list[int]) -> Any:
    """The denoiser's chunks, whose sizes are noted."""

    def chunks(*args: Any, inner: Any = denoiser._chunks, **options: Any) -> Any:
        for chunk in inner(*args, **options):
            sizes.append(len(chunk))
            yield chunk

    return chunks


def test_far_chunks_have_no_equal_say() -> None:
    """Averaging softmaxes of chunks, as streaming code has done, would give 0 here."""
    x = torch.cat([torch.ones(64, 1), -torch.ones(64, 1)]).double()
    optimal = OptimalDenoiser(x, memory=4 * 8 * 80)
    got = optimal.denoise(torch.ones(1, 1, dtype=torch.float64), 1.0, 0.1)
    assert float(got) == pytest.approx(1.0, abs=1e-12)


def test_float32_keeps_its_digits_with_little_noise() -> None:
    """Of nearly equal distances, the expanded square would have lost the difference."""
    x = images(200, 1, 8, 8)
    y = x[:5] + 1e-3 * states(x, 5)
    for exact, single in zip(every(x), every(x.float()), strict=True):
        got = single.denoise(y.float(), 1.0, 1e-3)
        assert got.dtype == torch.float32
        close(got.double(), exact.denoise(y, 1.0, 1e-3), 2e-4)


def test_dtypes() -> None:
    x = images()
    y = states(x)
    pixels = ((x.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    for single, coded in zip(every(pixels / 127.5 - 1), every(pixels), strict=True):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            got = coded.denoise(y.to(dtype), ALPHA, SIGMA)
            assert got.dtype == dtype
            wanted = single.denoise(y.to(dtype), ALPHA, SIGMA)
            close(got, wanted, 1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_a_level_for_every_row() -> None:
    x = images(channels=2)
    y = states(x, 6)
    t = torch.tensor([0.2, 0.7, 0.2, 0.0, 1.0, 0.5], dtype=torch.float64)
    for denoiser in every(x, path=Linear()):
        alone = [denoiser(y[i : i + 1], t[i]) for i in range(6)]
        close(denoiser(y, t), torch.cat(alone), 1e-12)
        single = denoiser(y.float(), t.float())
        assert single.dtype == torch.float32 and single.isfinite().all()


def test_only_the_ratio_of_noise_to_signal_counts() -> None:
    """x / alpha and sigma / alpha: the same answer on every path."""
    x = images(channels=2)
    y = states(x)
    for denoiser in every(x):
        wanted = denoiser.denoise(y, ALPHA, SIGMA)
        close(denoiser.denoise(y / ALPHA, 1.0, SIGMA / ALPHA), wanted)


# Memory


def test_memory_is_bounded_and_masks_are_kept_and_dropped() -> None:
    x = images(64, 1, 8, 8).float()
    y = states(x, 16)
    locality = LocalityDenoiser(x, tau=0.05, memory=600_000)
    _ = locality.wiener.spectrum
    wanted = LocalityDenoiser(x, tau=0.05)
    for level in torch.linspace(0.05, 3.0, 40).tolist():
        close(locality.denoise(y, 1.0, level), wanted.denoise(y, 1.0, level), 1e-5)
        assert sum(window.bytes for window in locality._windows.values()) <= 150_000
    assert 1 < len(locality._windows) < 40
    kept = list(locality._windows.values())[-1]
    locality.denoise(y, 1.0, level)
    assert list(locality._windows.values())[-1] is kept


@pytest.mark.parametrize("kind", [OptimalDenoiser, LocalScoreMachine, LocalityDenoiser])
def test_no_temporary_is_larger_than_the_memory(kind: Any) -> None:
    x = images(2000, 1, 8, 8).float()
    y = states(x, 16)
    options = {"k": 3} if kind is LocalScoreMachine else {}
    denoiser = kind(x, memory=2_000_000, **options)
    denoiser.denoise(y, ALPHA, SIGMA)
    sizes = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.layout == torch.strided:
                sizes.append(result.untyped_storage().nbytes())
            return result

    with Watch():
        denoiser.denoise(y, ALPHA, SIGMA)
    whole = x.numel() * x.itemsize
    assert 100_000 < max(size for size in sizes if size != whole) <= 2_000_000


# In samplers


def test_schedule_is_that_of_the_paper() -> None:
    path = linear_beta_path()
    times = (torch.arange(900, -1, -100, dtype=torch.float64) + 1) / 1000
    wanted = [
        *(0.00027, 0.001508, 0.006868, 0.025567, 0.077797),
        *(0.193572, 0.394011, 0.656347, 0.895142, 0.9999),
    ]
    close(path.alpha(times).square(), torch.tensor(wanted, dtype=torch.float64), 1e-6)
    pairs = OptimalDenoiser(images())._grid(10)
    close(pairs[:, 0], times, 1e-15)
    assert pairs[-1, 1] == 0


@pytest.mark.parametrize("clip", [False, True])
def test_sampling_is_that_of_diffusers_step_by_step(clip: bool) -> None:
    x = images()
    for denoiser in (WienerDenoiser(x), LocalityDenoiser(x)):
        scheduler = DDIMScheduler(
            beta_start=1e-4,
            beta_end=0.02,
            clip_sample=clip,
            prediction_type="sample",
        )
        scheduler.set_timesteps(10)
        state = start = states(x)
        for step in scheduler.timesteps:
            clean = denoiser(state, (step.double() + 1) / 1000)
            state = scheduler.step(
                clean, int(step), state, use_clipped_model_output=clip
            ).prev_sample
        got = denoiser.sample(4, noise=KeyedNoise(0), x1=start, steer=Clip() if clip else None)
        close(got, state, 1e-4)  # the scheduler's table is float32
        assert (got.abs() <= 1).all() or not clip


@pytest.mark.parametrize(
    "sampler",
    [Ancestral(), DDIM(), DDIM(1.0), Euler(), Heun(), DPMSolver(), UniPC(), EulerMaruyama()],
    ids=lambda sampler: type(sampler).__name__,
)
def test_every_sampler_takes_it_as_a_field(sampler: Any) -> None:
    """With the optimal denoiser it ends in an image of the data set."""
    x = 2 * images()
    for path in (Linear(), VPLinear(), linear_beta_path()):
        optimal = OptimalDenoiser(x, path=path)
        pairs = uniform_grid(60, start=0.999)
        start = states(x)
        got: Any = simulate(start, pairs, sampler, path, optimal, KeyedNoise(2))
        apart = (got[:, None] - x).square().flatten(2).sum(2).sqrt().sort(1)[0]
        assert (apart[:, 0] < 0.2 * apart[:, 1]).all(), type(path).__name__


def test_rewards_steer_it() -> None:
    x = images()
    bright = LocalityDenoiser(x)
    steer = RewardGradient(lambda clean: clean.flatten(1).sum(1), scale=1.0)
    plain = bright.sample(6, noise=KeyedNoise(0))
    moved = bright.sample(6, noise=KeyedNoise(0), steer=steer)
    assert (moved.mean((1, 2, 3)) > plain.mean((1, 2, 3)) + 0.01).all()


def test_samples_do_not_depend_on_batches_and_are_the_same_again() -> None:
    for denoiser in every(images()):
        whole = denoiser.sample(5, noise=KeyedNoise(4))
        assert torch.equal(whole, denoiser.sample(5, noise=KeyedNoise(4)))
        close(denoiser.sample(5, noise=KeyedNoise(4), batch_size=2), whole)
        assert whole.dtype == torch.float64 and whole.shape == (5, 1, 5, 5)
    assert not torch.equal(whole, denoiser.sample(5, noise=KeyedNoise(5)))


def test_other_paths_start_with_the_noise_of_their_start() -> None:
    x = images()
    drawn = WienerDenoiser(x, path=Linear()).sample(400, noise=KeyedNoise(0), steps=30)
    spread = drawn.flatten(1).std(0) / x.flatten(1).std(0)
    assert ((spread - 1).abs() < 0.2).all()


# Diagnostics


def test_agreement() -> None:
    a = torch.tensor([[1.0, 2, 3, 4], [1, 2, 3, 4]])
    b = torch.tensor([[1.0, 2, 3, 5], [-1, -2, -3, -4]])
    got = agreement(a, b)
    assert float(got.r2[0]) == pytest.approx(0.91428571, abs=1e-8)
    assert float(agreement(a, b, divisor=0).r2[0]) == pytest.approx(0.88571429, abs=1e-8)
    assert float(got.mse[0]) == pytest.approx(0.25)
    assert float(got.correlation[0]) == pytest.approx(np.corrcoef(a[0], b[0])[0, 1], abs=1e-12)
    assert float(got.correlation[1]) == pytest.approx(-1)


def test_match_of_fields() -> None:
    x = images()
    optimal, wiener = OptimalDenoiser(x), WienerDenoiser(x)
    y, t = states(x), torch.tensor(0.4, dtype=torch.float64)
    got = match(optimal, wiener, y, t)
    assert torch.equal(got.r2, agreement(optimal(y, t), wiener(y, t)).r2)
    close(match(wiener, wiener, y, t).r2, torch.ones(4, dtype=torch.float64))
    with pytest.raises(ValueError, match="reference must predict 'clean', got 'noise'"):
        match(optimal, convert(wiener, "noise", wiener.path), y, t)
    with pytest.raises(ValueError, match="one shape"):
        agreement(y, y[:2])


def test_sensitivity_of_a_network_and_of_all_denoisers_against_differences() -> None:
    x = images(channels=2, height=3, width=3)
    y = states(x, 3)
    t = torch.tensor(0.35, dtype=torch.float64)
    network = MLP(shape=(2, 3, 3), width=8, depth=1).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.1 * torch.linspace(-1, 1, parameter.numel()).view_as(parameter)

    class Field:
        predicts = "clean"

        def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
            return network(x, t.expand(len(x)))

    fields: list[Any] = [Field(), *every(x, path=Linear())]
    step = 1e-6 * KeyedNoise(8).normal(y)
    for field in fields:
        rows = sensitivity(field, y, t, [0, 7, 7])
        assert torch.equal(rows[:, 1], sensitivity(field, y, t, 7))
        with torch.no_grad():
            change = (field(y + step, t) - field(y - step, t)).flatten(1)[:, [0, 7]] / 2
        product = (rows[:, :2] * step[:, None]).flatten(2).sum(2)
        close(product, change, 1e-10)
    with pytest.raises(ValueError, match=r"index must lie in \[0, 18\), got 18"):
        sensitivity(fields[0], y, t, 18)


def test_derivatives_by_torch_func() -> None:
    x = images(height=3, width=3)
    y = states(x, 1)
    for denoiser in every(x)[3:]:

        def field(y: Tensor, denoiser: Denoiser = denoiser) -> Tensor:
            return denoiser.denoise(y, ALPHA, SIGMA)

        wanted = torch.autograd.functional.jacobian(field, y)
        close(torch.func.jacrev(field)(y), wanted)
        close(torch.func.jvp(field, (y,), (y,))[1].flatten(), wanted.reshape(9, 9) @ y.flatten())


def test_sparse_products_and_their_derivatives() -> None:
    mask = KeyedNoise(0).uniform(torch.empty(7, 7, dtype=torch.float64)) < 0.3
    mask[3] = False
    start = torch.cat([torch.zeros(1), mask.sum(1).cumsum(0)]).int()
    windows = Windows(csr(start, mask.nonzero()[:, 1].int(), torch.ones(int(mask.sum())).double()))
    dense = Windows(mask.double())
    squares = KeyedNoise(1).normal(torch.empty(7, 5, dtype=torch.float64)).requires_grad_()
    close(windows(squares), dense(squares))
    close(windows.transposed(squares), mask.double().T @ squares)
    assert torch.autograd.gradcheck(windows, squares, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(windows, squares)


def test_radius() -> None:
    rows = torch.zeros(2, 2, 4, 5)
    rows[0, 0, 1, 1] = rows[1, 1, 1, 1] = 1.0
    assert torch.equal(radius(rows, 6), torch.zeros(2))  # row 1, column 1 of either channel
    assert torch.equal(radius(rows, 26), torch.zeros(2))
    rows[0, 1, 1, 4] = -3.0
    assert float(radius(rows, 6)[0]) == pytest.approx(0.75 * 3)
    assert float(radius(rows, 3 * 5 + 4)[1]) == pytest.approx(math.hypot(2, 3))


def test_radius_of_the_wiener_filter_grows_with_the_noise() -> None:
    wiener = WienerDenoiser(images(500, 1, 1, 21))
    rows = torch.stack([wiener.gain(a**0.5, (1 - a) ** 0.5)[10] for a in (0.99, 0.9, 0.5, 0.1)])
    assert (radius(rows.reshape(4, 1, 1, 21), 10).diff() > 0).all()


# Calibration


def test_scales_are_found_again() -> None:
    x = images()
    times = (0.1, 0.4, 0.8)
    y = {t: states(x, 12) * 0.5 for t in times}
    truth = {0.1: 3, 0.4: 5, 0.8: 5}
    machine = LocalScoreMachine(x, k=3)
    target = convert(machine.at_scale(truth), "noise", machine.path)
    assert calibrate_scales(machine, y, target, scales=(1, 3, 5, 7)) == truth
    assert calibrate_scales(machine, y, target, scales=(1, 3, 5, 7), growing=True) == truth
    locality = LocalityDenoiser(x)
    taus = {0.1: 0.5, 0.4: 0.2, 0.8: 0.05}
    wanted = locality.at_scale(taus)
    assert calibrate_scales(locality, y, wanted, scales=(0.5, 0.2, 0.05, 0.01)) == taus
    clean = wanted(y[0.4], torch.tensor(0.4))
    assert calibrate_scales(locality, {0.4: y[0.4]}, clean) == {0.4: 0.2}
    assert locality.tau == 0.02


def test_growing_scales_stop_when_the_match_gets_worse() -> None:
    x = images()
    machine = LocalScoreMachine(x, k=1)
    asked: list[tuple[float, int]] = []

    class Counted(LocalScoreMachine):
        def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
            assert isinstance(self.k, int)
            asked.append((float(t), self.k))
            return super().__call__(x, t)

    y = {t: states(x, 6) * 0.5 for t in (0.2, 0.6)}
    got = calibrate_scales(
        Counted(x, k=1), y, machine.at_scale({0.2: 3, 0.6: 5}), scales=(1, 3, 5, 7, 9), growing=True
    )
    assert got == {0.2: 3, 0.6: 5}
    assert asked == [(0.2, 1), (0.2, 3), (0.2, 5), (0.6, 3), (0.6, 5), (0.6, 7)]


def test_growing_scales_pass_equal_ones() -> None:
    x = images()
    locality, y = LocalityDenoiser(x), {0.3: states(x, 6)}
    time = torch.tensor(0.3, dtype=torch.float64)
    target, scales = locality.at_scale(0.05)(y[0.3], time), (1.0, 0.9999, 0.05)
    assert torch.equal(
        locality.at_scale(1.0)(y[0.3], time), locality.at_scale(0.9999)(y[0.3], time)
    )
    assert calibrate_scales(locality, y, target, scales=scales, growing=True) == {0.3: 0.05}


def test_default_sides_fit_windows_that_wrap_around() -> None:
    x = images(4)
    y = {0.3: x + 0.1 * states(x)}
    for boundary in ("circular", "broken"):
        machine = EquivariantLocalScoreMachine(x, k=3, boundary=boundary)  # type: ignore[arg-type]
        assert calibrate_scales(machine, y, x)[0.3] in range(3, 6 if boundary == "circular" else 18)


def test_trajectory_holds_the_states_of_the_sampler() -> None:
    x = images()
    wiener = WienerDenoiser(x, path=Linear())
    start, pairs = states(x), uniform_grid(4)
    passed = trajectory(wiener, start, pairs, wiener.path)
    assert list(passed) == [1.0, 0.75, 0.5, 0.25]
    assert torch.equal(passed[1.0], start)
    half: Any = simulate(start, pairs[:2], DDIM(), wiener.path, wiener, KeyedNoise(0))
    assert torch.equal(passed[0.5], half)


def test_options_by_time_take_the_nearest_level_of_noise() -> None:
    x = images()
    machine = LocalScoreMachine(x, k={0.2: 1, 0.8: 5}, path=Linear())
    y = states(x)
    for t, k in ((0.1, 1), (0.45, 1), (0.55, 5), (1.0, 5)):
        time = torch.tensor(t, dtype=torch.float64)
        assert torch.equal(machine(y, time), machine.at_scale(k)(y, time))


# Files


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    x = images()
    paths: list[Any] = [linear_beta_path(), Linear(), VPLinear(0.2, 15.0)]
    made = [one for path in paths for one in every(x, path=path)]
    made += [
        LocalScoreMachine(x, k={0.1: 1, 0.9: 5}),
        LocalityDenoiser(x, tau={0.1: 0.2, 0.9: 0.02}),
        OptimalDenoiser(((x.clamp(-1, 1) + 1) * 127).to(torch.uint8)),
    ]
    for number, denoiser in enumerate(made):
        file = tmp_path / f"{number}.safetensors"
        denoiser.save(file)
        with pytest.raises(FileExistsError):
            denoiser.save(file)
        for again in (LocalityDenoiser.load(file), fluvial.load(file)):
            assert type(again) is type(denoiser)
            assert again._options() == denoiser._options() and again.format == denoiser.format
            close(
                again.sample(3, noise=KeyedNoise(0), steps=3),
                denoiser.sample(3, noise=KeyedNoise(0), steps=3),
                0,
            )
            assert again.use is not None and again.use.known


def test_memory_is_saved(tmp_path: Path) -> None:
    """Principal components of large images need more than the default."""
    LocalityDenoiser(images(), memory=123_456).save(tmp_path / "a")
    again = LocalityDenoiser.load(tmp_path / "a")
    assert isinstance(again, LocalityDenoiser)
    assert again.memory == again.wiener.memory == 123_456


def test_command_line_samples_from_a_file(tmp_path: Path) -> None:
    pixels = ((images().clamp(-1, 1) + 1) * 127.5).to(torch.uint8)
    file, out = tmp_path / "digits.safetensors", tmp_path / "out.npz"
    model = LocalityDenoiser(pixels)
    model.save(file)
    assert fluvial_command(["sample", str(file), "--n", "5", "--out", str(out), "--quiet"]) == 0
    with np.load(out) as arrays:
        drawn = next(iter(arrays.values()))
    assert model.format is not None
    wanted = model.format.decode(model.sample(5, noise=KeyedNoise(0)))
    assert np.array_equal(drawn, wanted.numpy())


def test_what_cannot_be_saved_or_loaded(tmp_path: Path) -> None:
    custom = CustomPath(lambda t: 1 - t, lambda t: t)
    with pytest.raises(ValueError, match="a CustomPath cannot be saved"):
        OptimalDenoiser(images(), path=custom).save(tmp_path / "x")
    from fluvial.training.files import save_model

    save_model(tmp_path / "y", {"a": torch.zeros(1)}, {"system": "meanflow"})
    with pytest.raises(ValueError, match="holds the system 'meanflow'"):
        LocalityDenoiser.load(tmp_path / "y")
    save_model(tmp_path / "z", {"images": images()}, {"system": "locality-denoiser", "class": "No"})
    with pytest.raises(ValueError, match="holds a No"):
        LocalityDenoiser.load(tmp_path / "z")


# Misuse


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: OptimalDenoiser(x.numpy()), "images must be a tensor, got ndarray"),
        (lambda x: OptimalDenoiser(x[:0]), r"N >= 1 for OptimalDenoiser, got \(0, 1, 5, 5\)"),
        (lambda x: WienerDenoiser(x[:1]), "N >= 2 for WienerDenoiser"),
        (lambda x: LocalityDenoiser(x[:1]), "N >= 2 for LocalityDenoiser"),
        (lambda x: OptimalDenoiser(x.long()), "images must be floating or uint8, got torch.int64"),
        (lambda x: OptimalDenoiser(x / (x > 0)), "images holds values that are not finite"),
        (lambda x: LocalScoreMachine(x, k=4), "k must be odd and positive, got 4"),
        (lambda x: LocalScoreMachine(x, k=-1), "k must be odd and positive, got -1"),
        (lambda x: LocalScoreMachine(x, k={}), "k must hold"),
        (lambda x: LocalScoreMachine(x.flatten(1), k=3), r"\(N, channels, height, width\)"),
        (lambda x: EquivariantLocalScoreMachine(x, k=7), "k must be at most 5"),
        (lambda x: EquivariantLocalScoreMachine(x, k=3, boundary="open"), "boundary must be"),
        (
            lambda x: EquivariantLocalScoreMachine(
                x, k=3, boundary="broken", train_patches="circular"
            ),
            "train_patches='circular' needs",
        ),
        (lambda x: LocalityDenoiser(x, tau=1.1), r"tau must lie in \[0, 1\], got 1.1"),
        (lambda x: LocalityDenoiser(x, tau={0.5: -0.1}), "tau must lie in"),
        (lambda x: LocalityDenoiser(x, threshold="column"), "threshold must be 'row' or 'global'"),
        (lambda x: LocalityDenoiser(x, temperature=0.0), "temperature must be positive"),
        (lambda x: OptimalDenoiser(x, top_k=0), "top_k must be at least 1"),
        (lambda x: OptimalDenoiser(x, memory=10).denoise(x, 1.0, 1.0), "memory must be at least"),
        (lambda x: LocalityDenoiser(x, memory=9_000).denoise(x, 1.0, 1.0), "memory must be at"),
        (lambda x: OptimalDenoiser(x).denoise(x[:, 0], 1.0, 1.0), r"x must have shape \(batch, 1"),
        (lambda x: OptimalDenoiser(x).denoise(x.long(), 1.0, 1.0), "x must be floating"),
        (lambda x: OptimalDenoiser(x).denoise(x, 1.0, -1.0), "not negative"),
        (lambda x: OptimalDenoiser(x).denoise(x, 0.0, 0.0), "not both 0"),
        (lambda x: OptimalDenoiser(x).denoise(x, 1.0, float("nan")), "must be finite"),
        (lambda x: OptimalDenoiser(x).denoise(x, 1.0, torch.ones(3)), r"numbers or \(30,\)"),
        (lambda x: OptimalDenoiser(x).sample(2, noise=KeyedNoise(0), steps=0), "steps >= 1"),
        (lambda x: OptimalDenoiser(x).sample(2, noise=KeyedNoise(0), grid=[0, 1]), "grid must"),
        (lambda x: OptimalDenoiser(x).sample(2, noise=KeyedNoise(0), x1=x), "x1 must have shape"),
        (lambda x: calibrate_scales(LocalityDenoiser(x), {}, x), "need states and scales"),
    ],
)
def test_misuse(make: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make(images())


def test_no_global_seed_is_read_or_set() -> None:
    state = torch.get_rng_state()
    tracemalloc.start()
    LocalityDenoiser(images()).sample(2, noise=KeyedNoise(0), steps=2)
    tracemalloc.stop()
    assert torch.equal(state, torch.get_rng_state())
