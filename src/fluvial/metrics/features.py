"""Features of a classifier trained on the data at hand, for distances between sets of images.

Networks trained on photographs say little about 28 x 28 silhouettes, and their weights would have
to be downloaded. A small classifier of the same images takes seconds to train.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init
from tqdm import tqdm

from fluvial.metrics.extract import evaluating

GRID = 3
"""Side of the grid to which the last feature map is averaged, whatever the size of the images."""


class ConvFeatures(nn.Module):
    """A small convolutional classifier whose last hidden layer serves as features.

    Three 3 x 3 convolutions of ``width``, 2 ``width`` and 4 ``width`` channels, each with batch
    norm and ReLU, maxima over 2 x 2 pixels between them; the mean over a 3 x 3 grid; a linear map
    to the features; ReLU and a linear map to the logits. The features are taken before that ReLU,
    where they are nearer to the Gaussians that the Fréchet distance fits.

    Values of a distance can be compared only where the features are of the same weights. To keep
    them: ``torch.save(net.state_dict(), file)``, and ``load_state_dict`` into a network built with
    the same arguments.

    Args:
        channels: C of the images.
        num_classes: at least 2.
        feature_dim: number of features.
        width: channels of the first convolution.
        seed: of the initial weights, He normal; the global generator is not touched.

    Raises:
        ValueError: an argument is too small.
    """

    def __init__(
        self,
        channels: int = 1,
        num_classes: int = 10,
        feature_dim: int = 64,
        width: int = 16,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("channels", channels, 1),
            ("num_classes", num_classes, 2),
            ("feature_dim", feature_dim, 1),
            ("width", width, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        self.channels, self.num_classes, self.feature_dim = channels, num_classes, feature_dim

        # built without weights: the constructors would draw them from the global generator
        def block(inputs: int, outputs: int) -> list[nn.Module]:
            convolution = skip_init(nn.Conv2d, inputs, outputs, 3, padding=1, bias=False)
            return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

        self.trunk = nn.Sequential(
            *block(channels, width),
            nn.MaxPool2d(2),
            *block(width, 2 * width),
            nn.MaxPool2d(2),
            *block(2 * width, 4 * width),
            nn.AdaptiveAvgPool2d(GRID),
            nn.Flatten(),
            skip_init(nn.Linear, 4 * width * GRID**2, feature_dim),
        )
        self.head = skip_init(nn.Linear, feature_dim, num_classes)
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu", generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, (N, num_classes).

        Args:
            images: floating point in [-1, 1], (N, C, H, W), H and W at least 8.

        Raises:
            TypeError: ``images`` is not of a floating-point type.
            ValueError: its shape is wrong.
        """
        self._check(images)
        return self.head(F.relu(self.trunk(images)))

    @torch.no_grad()
    def features(self, images: Tensor, batch_size: int = 500) -> Tensor:
        """The features, float32, (N, feature_dim), on the device of ``images``.

        Computed in eval mode and without gradients; the mode is put back. A row depends on its
        image alone.

        Args:
            images: floating point in [-1, 1], (N, C, H, W), H and W at least 8. Values outside are
                taken as they are: samples may overshoot.
            batch_size: images at a time.

        Raises:
            TypeError: ``images`` is not of a floating-point type.
            ValueError: its shape is wrong, it holds NaN or inf, or batch_size is below 1.
        """
        self._check(images)
        if not images.isfinite().all():
            raise ValueError("images must be finite, got NaN or inf")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        device = self.head.weight.device
        with evaluating(self):
            parts = [
                self.trunk(part.to(device, torch.float32)) for part in images.split(batch_size)
            ]
        return torch.cat(parts).to(images.device)

    @torch.no_grad()
    def accuracy(self, images: Tensor, labels: Tensor, batch_size: int = 500) -> float:
        """The share of images whose largest logit is that of their label.

        Args:
            images: as for `features`.
            labels: int64, (N,).

        Raises:
            TypeError, ValueError: as `features`; or the labels are not int64, of another number
                than the images, or outside [0, num_classes).
        """
        _check_labels("labels", labels, len(images), self.num_classes)
        hidden = self.features(images, batch_size).to(self.head.weight.device)
        guess = self.head(F.relu(hidden)).argmax(1)
        return float((guess == labels.to(guess.device)).double().mean())

    def _check(self, images: Tensor) -> None:
        if not images.is_floating_point():
            raise TypeError(f"images must be of a floating-point type, got {images.dtype}")
        if (
            images.ndim != 4
            or images.shape[0] < 1
            or images.shape[1] != self.channels
            or min(images.shape[2:]) < 8
        ):
            raise ValueError(
                f"images must have shape (N, {self.channels}, H, W) with N at least 1 and H and W "
                f"at least 8, got {tuple(images.shape)}"
            )


def train_classifier(
    images: Tensor,
    labels: Tensor,
    *,
    num_classes: int,
    validation: tuple[Tensor, Tensor] | None = None,
    epochs: int = 6,
    steps: int | None = None,
    batch_size: int = 128,
    lr: float = 6e-3,
    shift: int = 2,
    feature_dim: int = 64,
    width: int = 16,
    seed: int = 0,
    progress: bool = True,
) -> ConvFeatures:
    """Trains a `ConvFeatures`, on the device of ``images``, and returns it in eval mode.

    AdamW with weight decay 0.01; a learning rate that rises over the first quarter of the steps
    and falls over the rest, both as half a cosine (one cycle: Smith and Topin, Super-convergence,
    2018); cross-entropy with labels smoothed by 0.05. The images of a batch are
    each moved by up to ``shift`` pixels, their edges repeated. Nothing is drawn from the global
    generators. On a CPU, with the same number of threads, the same arguments give the same weights.

    Args:
        images: floating point in [-1, 1], (N, C, H, W), H and W at least 8.
        labels: int64, (N,).
        num_classes: at least 2.
        validation: images and labels whose accuracy the progress bar shows after every epoch. It
            has no influence on the training.
        epochs: passes over the images; the last batch of one is left out where it is not full.
        steps: number of batches, in place of ``epochs``.
        batch_size: images a step, at most all.
        lr: peak learning rate.
        shift: in pixels, not negative.
        feature_dim, width: of `ConvFeatures`.
        seed: of the weights, of the order and of the shifts.
        progress: show a progress bar.

    Raises:
        TypeError: images not floating point, labels not int64.
        ValueError: shapes that do not fit, images outside [-1, 1] or not finite, labels outside
            [0, num_classes), or a number out of its range.
        FloatingPointError: the loss is not finite at the end of an epoch.
    """
    if images.ndim != 4:
        raise ValueError(f"images must have shape (N, C, H, W), got {tuple(images.shape)}")
    for name, value, least in (
        ("epochs", epochs, 1),
        ("steps", 1 if steps is None else steps, 1),
        ("batch_size", batch_size, 1),
        ("shift", shift, 0),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if not lr > 0:
        raise ValueError(f"lr must be positive, got {lr}")
    model = ConvFeatures(images.shape[1], num_classes, feature_dim, width, seed)
    pairs = [("images", images, "labels", labels)]
    if validation is not None:
        pairs.append(("validation[0]", validation[0], "validation[1]", validation[1]))
    for name, pictures, label_name, truth in pairs:
        try:
            model._check(pictures)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None
        if not pictures.abs().max() <= 1:  # NaN as well
            raise ValueError(
                f"{name} must lie in [-1, 1], got values from {float(pictures.min())} to "
                f"{float(pictures.max())}"
            )
        _check_labels(label_name, truth, len(pictures), num_classes)

    device = images.device
    model.to(device)
    # on the CPU whatever the device, so that every device sees the same batches
    generator = torch.Generator().manual_seed(seed)
    batch_size = min(batch_size, len(images))
    batches = len(images) // batch_size
    steps = epochs * batches if steps is None else steps
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _one_cycle(step / steps))
    model.train()
    done = 0
    with tqdm(total=steps, desc="training a classifier", disable=not progress) as bar:
        while done < steps:
            order = torch.randperm(len(images), generator=generator)
            for rows in order.split(batch_size)[: min(batches, steps - done)]:
                rows = rows.to(device)
                batch = _shifted(images[rows].float(), shift, generator)
                loss = F.cross_entropy(model(batch), labels[rows], label_smoothing=0.05)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                schedule.step()
                done += 1
                bar.update()
            if not loss.isfinite():
                raise FloatingPointError(f"the loss is {loss.item()} at step {done}: lower lr={lr}")
            if progress and validation is not None:
                bar.set_postfix(accuracy=model.accuracy(*validation))
    return model.eval()


def _one_cycle(done: float) -> float:
    """The learning rate over its peak, when a share ``done`` in [0, 1] of the steps is done."""
    low, top = 0.04, 0.25
    if done < top:
        return low + (1 - low) * (1 - math.cos(math.pi * done / top)) / 2
    return (1 + math.cos(math.pi * (done - top) / (1 - top))) / 2


def _shifted(images: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Each image moved by up to ``most`` pixels down or up and right or left, edges repeated."""
    if most == 0:
        return images
    count, _, height, width = images.shape
    down, right = torch.randint(-most, most + 1, (2, count, 1), generator=generator)
    rows = (torch.arange(height) - down).clamp(0, height - 1).to(images.device)
    columns = (torch.arange(width) - right).clamp(0, width - 1).to(images.device)
    which = torch.arange(count, device=images.device)
    moved = images[which[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return moved.movedim(-1, 1).contiguous()


def _check_labels(name: str, labels: Tensor, count: int, num_classes: int) -> None:
    if labels.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, got {labels.dtype}")
    if labels.shape != (count,):
        raise ValueError(f"{name} must have shape ({count},), got {tuple(labels.shape)}")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        raise ValueError(f"{name} must lie in [0, {num_classes}), got values from {low} to {high}")
