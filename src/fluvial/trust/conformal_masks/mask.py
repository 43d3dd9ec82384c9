"""`ConfidenceMask`: any restorer of images, with a mask of the pixels to trust."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, cast

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from fluvial.core.noise import KeyedNoise
from fluvial.trust.conformal_masks.calibration import (
    Calibration,
    Calibrator,
    Evaluation,
    Map,
    evaluate,
)
from fluvial.trust.conformal_masks.errors import Difference, ErrorMap
from fluvial.trust.conformal_masks.kernels import as_pixels
from fluvial.trust.conformal_masks.scores import ScoreMap, Variance

LEVELS = (0.05, 0.1, 0.2)
"""Of a calibration, if no others are asked for."""
CALIBRATING, EVALUATING, RESTORING = range(3)
"""Steps of the noise, which are independent of each other."""


class Restored(NamedTuple):
    """A restored image, (channels, height, width) in [0, 1], and which pixels to trust."""

    image: Any
    trusted: Any


class ConfidenceMask:
    """Restores images and says, by one mask, which pixels may be trusted.

    A restorer mu that draws from what the true image Y may be, given the degraded X, is asked
    several times. Where its answers differ the score sigma(X) is large, and

        M_level(X) = {p : sigma_p(X) < t_level}

    with t_level calibrated on clean images and their degraded versions so that, for a new pair,

        E [max over p in M_level(X) of D_p(Y, mu(X))] <= level

    where D is a local error with a known bound. It holds in finite samples, for any restorer, score
    and law of the images, if the calibration images and the new one are exchangeable: as draws of
    one population are, degraded in one way. It says nothing of images from elsewhere or of another
    degradation. It is an average over images: `calibration` reports how far single images are off.

    A lower level gives a smaller mask, within that of a higher one.

    Args:
        restorer: called as ``restorer(x, noise)``, a restored image of ``x``, one draw; an array or
            a tensor, (channels, height, width) or (height, width), of any size. Values are cut off
            at 0 and 1. ``noise`` is a `KeyedNoise`, of which a generator of another library takes
            ``noise.seed``. If it draws nothing, all its answers agree and their variance is 0
            everywhere: give a ``score`` of your own then. A method ``draws(x, num, noise)`` that
            makes ``num`` at a time, (num, ...), is used where there is one.
        score: of the draws, as `Variance`; or any `ScoreMap`.
        error: as `Difference`, which by default is of Lab colours and wants three channels; or any
            `ErrorMap`.
        draws: restorations an image; published 10.
        prediction: the image that is shown and measured: the "first" draw, their "mean", or another
            function of (x, noise). It is the same when calibrated and when used.
        noise: of everything that is drawn.

    Attributes:
        calibration: thresholds and what was found on the way, once calibrated.

    Raises:
        TypeError: the restorer or the score cannot be called; the error is no `ErrorMap`.
        ValueError: ``draws`` is not positive; an unknown prediction.

    Citation: Adame et al., NeurIPS 2025, arXiv 2502.09664.
    """

    def __init__(
        self,
        restorer: Callable[[Any, KeyedNoise], Any],
        *,
        score: ScoreMap = Variance(),  # noqa: B008 (frozen)
        error: ErrorMap = Difference(),  # noqa: B008 (frozen)
        draws: int = 10,
        prediction: Literal["first", "mean"] | Callable[[Any, KeyedNoise], Any] = "first",
        noise: KeyedNoise = KeyedNoise(0),  # noqa: B008 (frozen)
    ) -> None:
        if not callable(restorer):
            raise TypeError(f"restorer must be callable, got {type(restorer).__name__}")
        if not callable(score):
            raise TypeError(f"score must be callable, got {type(score).__name__}")
        if not callable(error) or not all(hasattr(error, name) for name in ("bound", "pointwise")):
            raise TypeError(
                "error must be an error map with a bound, as Difference() or Custom(function, "
                f"bound), got {type(error).__name__}"
            )
        if draws < 1:
            raise ValueError(f"draws must be at least 1, got {draws}")
        if prediction not in ("first", "mean") and not callable(prediction):
            raise ValueError(
                f"prediction must be 'first', 'mean' or a function, got {prediction!r}"
            )
        self.restorer, self.score, self.error = restorer, score, error
        self.draws, self.prediction, self.noise = draws, prediction, noise
        self.calibration: Calibration | None = None

    def predict(self, x: Any, *, noise: KeyedNoise | None = None) -> tuple[np.ndarray, Map]:
        """(restored image, score), before any threshold.

        Args:
            x: a degraded image, as the restorer takes it.
            noise: of the draws.

        Returns:
            (channels, height, width) in [0, 1], float64, and a map (height, width).

        Raises:
            TypeError: the restorer returns no floating-point numbers.
            ValueError: the restorer's images are not finite, far outside [0, 1], of another shape
                than one another, not of 1 or 3 channels or not as many as asked for; the score is
                of another height and width.
        """
        noise = self.noise.at(RESTORING) if noise is None else noise
        if hasattr(self.restorer, "draws"):
            found = list(self.restorer.draws(x, self.draws, noise))
            if len(found) != self.draws:
                raise ValueError(f"restorer must make {self.draws} draws, got {len(found)}")
        else:
            found = [self.restorer(x, noise.at(k)) for k in range(self.draws)]
        images = [_restored(image) for image in found]
        if len({image.shape for image in images}) > 1:
            shapes = sorted({image.shape for image in images})
            raise ValueError(f"restorer must make images of one shape from an image, got {shapes}")
        stack = np.stack(images)
        if self.prediction == "first":
            image = stack[0]
        elif self.prediction == "mean":
            image = stack.mean(0)
        else:
            image = _restored(self.prediction(x, noise.at(self.draws)))
        score = self.score(stack, x)
        if tuple(score.shape) != image.shape[-2:]:
            raise ValueError(
                f"score must be a map of {image.shape[-2:]}, as the image, got {tuple(score.shape)}"
            )
        return image, score

    def calibrate(
        self,
        images: Iterable[Any],
        degrade: Callable[[Any], Any] | None,
        *,
        levels: Sequence[float] = LEVELS,
        groups: Iterable[str] | None = None,
        progress: bool = False,
        **options: Any,
    ) -> Self:
        """Find the thresholds, in one pass over clean images; none is kept.

        Args:
            images: clean images in [0, 1], of any sizes, that the restorer was not trained on and
                no kernel was chosen on. Crops of one photograph are exchangeable with crops of
                another only if all, and those the masks will be used for, are drawn from one pool.
            degrade: makes the degraded image of a clean one; None if ``images`` are pairs
                (degraded, clean).
            levels: of the masks.
            groups: the group of each image, for a guarantee within each group.
            progress: show a progress bar.
            **options: ``ties``, ``guarantee``, ``delta`` and ``thresholds`` of `calibrate`.

        Raises:
            TypeError, ValueError: as `calibrate` and `predict`.
        """
        calibrator = Calibrator(
            levels,
            self.error.bound,
            **self._names(),
            pointwise=self.error.pointwise,
            noise=self.noise.at(CALIBRATING),
            **options,
        )
        names = None if groups is None else iter(groups)
        for score, error in self._maps(images, degrade, CALIBRATING, progress):
            group = "" if names is None else next(names, None)
            if group is None:
                raise ValueError(f"groups ends after {calibrator.count} images, there are more")
            calibrator.add(score, error, group)
        if names is not None and next(names, None) is not None:
            raise ValueError(f"groups goes on after the {calibrator.count} images")
        self.calibration = calibrator.finish()
        return self

    def evaluate(
        self,
        images: Iterable[Any],
        degrade: Callable[[Any], Any] | None,
        *,
        groups: Iterable[str] | None = None,
        progress: bool = False,
    ) -> tuple[Evaluation, ...]:
        """How the masks do on clean images that were not calibrated on, for every level.

        Args:
            images, degrade, groups, progress: as for `calibrate`.

        Raises:
            ValueError: nothing was calibrated; and as `calibrate`.
        """
        calibration = self._calibrated()
        scores: list[Map] = []
        errors: list[Map] = []
        for score, error in self._maps(images, degrade, EVALUATING, progress):
            scores.append(score)
            errors.append(error)
        return evaluate(calibration, scores, errors, groups=groups, noise=self.noise.at(EVALUATING))

    def restore(
        self, x: Any, level: float, *, group: str = "", noise: KeyedNoise | None = None
    ) -> Restored:
        """A restored image and the mask of the pixels to trust at a level.

        Args:
            x: a degraded image, as the restorer takes it.
            level: one of those calibrated.
            group: of the image, where groups were calibrated.
            noise: of the draws; by default the same every time.

        Returns:
            ``image``, (channels, height, width) in [0, 1], and ``trusted``, (height, width) of
            booleans: tensors for a tensor, arrays for an array.

        Raises:
            ValueError: nothing was calibrated, or not this level or group; and as `predict`.
        """
        calibration = self._calibrated()
        calibration.threshold(level, group)  # before the work
        noise = self.noise.at(RESTORING) if noise is None else noise
        image, score = self.predict(x, noise=noise)
        mask: Any = calibration.mask(cast(Any, score), level, group=group, noise=noise)
        if not isinstance(x, Tensor):
            return Restored(image, np.asarray(mask))
        dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        trusted = torch.as_tensor(mask).to(x.device)
        return Restored(torch.from_numpy(image).to(x.device, dtype), trusted)

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """The calibration as a JSON file; the restorer is the user's own.

        Raises:
            ValueError: nothing was calibrated.
            FileExistsError: there is such a file and ``overwrite`` is false.
        """
        self._calibrated().save(path, overwrite=overwrite)

    def load(self, path: str | Path) -> Self:
        """Take over the calibration that `save` wrote, of the same restorer, score and error.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no calibration, or of another score, error, prediction or number of
                draws, by their names.
        """
        found = Calibration.load(path)
        ours = {**self._names(), "bound": self.error.bound}
        for name, mine in ours.items():
            if getattr(found, name) != mine:
                raise ValueError(
                    f"{path} was calibrated with {name} {getattr(found, name)!r}, this one has "
                    f"{mine!r}"
                )
        self.calibration = found
        return self

    def _maps(
        self,
        images: Iterable[Any],
        degrade: Callable[[Any], Any] | None,
        step: int,
        progress: bool,
    ) -> Iterable[tuple[Map, Map]]:
        """(score, error) of every image."""
        noise, i = self.noise.at(step), -1
        for i, entry in enumerate(tqdm(images, desc="restoring", disable=not progress)):
            if degrade is None and not (isinstance(entry, tuple | list) and len(entry) == 2):
                raise TypeError(
                    f"image {i} must be a pair (degraded, clean) where degrade is None, got "
                    f"{type(entry).__name__}"
                )
            true = entry[1] if degrade is None else entry
            clean = as_pixels(f"image {i}", true)
            try:
                x = entry[0] if degrade is None else degrade(entry)
                image, score = self.predict(x, noise=noise.at(i))
            except Exception as error:
                error.add_note(f"with image {i}")
                raise
            if clean.shape != image.shape:
                raise ValueError(
                    f"image {i} has shape {clean.shape}, its restoration {image.shape}"
                )
            yield score, self.error(clean, image)
        if i < 0:
            raise ValueError("images is empty: there is none to restore")

    def _names(self) -> dict[str, Any]:
        """What a calibration holds for, in words: with other draws it does not."""
        metric = _name(self.error)
        if self.prediction == "mean":
            metric += f" of the mean of {self.draws} restorations"
        elif callable(self.prediction):
            metric += f" of {_name(self.prediction)}"
        return {"metric": metric, "score": f"{_name(self.score)}, of {self.draws} restorations"}

    def _calibrated(self) -> Calibration:
        if self.calibration is None:
            raise ValueError("nothing was calibrated: call calibrate first, or load a calibration")
        return self.calibration


def _name(part: Any) -> str:
    """Of a score, an error or a function, the same in every process."""
    kind: Any = type(part)
    if (kind.__str__, kind.__repr__) == (object.__str__, object.__repr__):
        return kind.__qualname__
    return getattr(part, "__qualname__", None) or str(part)


def _restored(image: Any) -> np.ndarray:
    """What a restorer returned, float64 (channels, height, width) in [0, 1]."""
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        image = (image.double() if image.is_floating_point() else image).numpy()
    array = np.asarray(image)
    if array.dtype.kind != "f":
        found = array.dtype if array.ndim else type(image).__name__
        raise TypeError(f"restorer must return floating-point numbers in [0, 1], got {found}")
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise ValueError("restorer returned values that are not finite")
    low, high = float(array.min(initial=0.0)), float(array.max(initial=1.0))
    if low < -1 or high > 2:
        raise ValueError(
            f"restorer must return values in [0, 1], they reach from {low:g} to {high:g}; only "
            "what is less than 1 outside is cut off"
        )
    array = as_pixels("the image of restorer", np.clip(array, 0.0, 1.0))
    if array.ndim != 3:
        raise ValueError(f"restorer must return one image, got shape {array.shape}")
    return array
