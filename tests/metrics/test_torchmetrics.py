"""Agreement with torchmetrics, whose import takes some seconds: here alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchmetrics.classification import BinaryCalibrationError, MulticlassCalibrationError
from torchmetrics.functional.regression import continuous_ranked_probability_score
from torchmetrics.image import PeakSignalNoiseRatio, StructuralSimilarityIndexMeasure
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import KernelInceptionDistance

from fluvial.metrics import crps, expected_calibration_error, frechet_distance, kid, psnr, ssim


class Pixels(torch.nn.Module):
    num_features = 12

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1)


def images(count: int, *event: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, *event, generator=generator, dtype=torch.float64)


def test_frechet_distance() -> None:
    a, b = images(40, 3, 2, 2), images(30, 3, 2, 2, seed=1) ** 2
    peer = FrechetInceptionDistance(feature=Pixels(), normalize=True).set_dtype(torch.float64)
    peer.update(a, real=True)
    peer.update(b, real=False)
    ours = frechet_distance(a, b, features=Pixels())
    assert ours == pytest.approx(float(peer.compute()), rel=1e-9)


@pytest.mark.filterwarnings("ignore:.*will save all extracted features")
def test_kid() -> None:
    a, b = images(30, 3, 2, 2), images(30, 3, 2, 2, seed=1) ** 2
    peer = KernelInceptionDistance(feature=Pixels(), normalize=True, subsets=1, subset_size=30)
    peer.update(a, real=True)
    peer.update(b, real=False)
    ours = kid(a.flatten(1), b.flatten(1))
    assert ours == pytest.approx(float(peer.compute()[0]), rel=1e-5)  # torchmetrics in float32


def test_psnr_and_ssim() -> None:
    x, y = images(4, 3, 20, 24), images(4, 3, 20, 24, seed=1)
    y = 0.7 * x + 0.3 * y
    peer = PeakSignalNoiseRatio(data_range=1.0, reduction="none", dim=(1, 2, 3))
    torch.testing.assert_close(psnr(x, y, data_range=1), peer(x, y).double(), rtol=1e-6, atol=0)
    peer = StructuralSimilarityIndexMeasure(
        data_range=1.0, reduction="none", return_full_image=True
    )
    # over the places where the window lies inside; torchmetrics takes the reflected border too
    inside = peer(x, y)[1][..., 5:-5, 5:-5].mean((1, 2, 3))
    torch.testing.assert_close(ssim(x, y, data_range=1), inside.double(), rtol=0, atol=1e-6)


def test_calibration_error() -> None:
    p, outcome = images(500), (images(500, seed=1) < 0.4).long()
    ours = expected_calibration_error(p, outcome, bins=10)
    assert ours == pytest.approx(float(BinaryCalibrationError(n_bins=10)(p, outcome)), abs=1e-6)
    logits = 3 * images(500, 4)
    answer = (images(500, seed=2) * 4).long()
    peer = MulticlassCalibrationError(4, n_bins=15)
    ours = expected_calibration_error(logits.softmax(1), answer)
    assert ours == pytest.approx(float(peer(logits.softmax(1), answer)), abs=1e-6)


def test_crps() -> None:
    x, y = images(20, 9), images(20)
    peer = continuous_ranked_probability_score(x, y)
    assert np.mean(crps(x, y, fair=False).numpy()) == pytest.approx(float(peer), rel=1e-6)
