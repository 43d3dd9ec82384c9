"""``fluvial restore RUN IMAGE``: an image restored, with a mask of what to trust."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from fluvial.cli.console import duration, note, only_errors, show, show_json
from fluvial.cli.flags import as_flags, parse
from fluvial.cli.train import _device

EXAMPLES = """\
fluvial restore runs/faces small.png --level 0.1 --out restored
fluvial restore runs/faces photo.png --level 0.1 --degrade --out restored
fluvial restore runs/deblurred blurred.png --out restored"""


@dataclass(frozen=True)
class Restore:
    """Restore an image and say which of its pixels to trust.

    Writes restored.png, trusted.png (white where to trust), figure.png with the doubtful area
    hatched, and result.json. The mask is calibrated: over images like those of the training, the
    largest error inside it is on average at most the level.

    A run of system-embedded-bridge restores what its task measures, a small, blurred or incomplete
    image, without a mask: there are restored.png, with --degrade measured.png, and result.json.

    Args:
        run: folder of a run of conformal-masks or system-embedded-bridge, or the file of its model.
        image: file of a small image, which is enlarged; or as the task measures them.
        out: folder to write to.
        level: of the mask, one of those calibrated.
        degrade: the image is a clean one: make it small, or measure it, first, and show the true
            error too.
        seed: of the restoration.
        device: where to compute; auto takes the first there is of cuda, mps and cpu.
        force: write into a folder that is not empty.
        json: print the result as one JSON document in place of text.
        quiet: no notes.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    image: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE")]
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    level: float = 0.1
    degrade: bool = False
    seed: int = 0
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    force: bool = False
    json: bool = False
    quiet: bool = False


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    command = parse(Restore, argv, prog="fluvial restore", examples=EXAMPLES)
    try:
        with only_errors(command.json):
            document = _restore(command)
    except (ValueError, OSError) as error:
        text = str(error).replace("or force it", "or --force")
        raise ValueError(as_flags(text, Restore)) from error
    if command.json:
        show_json(document)
    else:
        height, width = document["size"]
        text = f"{height} x {width} pixels in {duration(document['seconds'])}"
        if "trusted" in document:
            text += f", {100 * document['trusted']:.0f} % trusted at level {command.level:g}"
        if "worst" in document:
            text += f"; largest error inside the mask {document['worst']:.3g}"
        if "psnr" in document:
            text += f", PSNR {document['psnr']:.2f} dB"
        show(f"{text}: {command.out}")
    return 0


def _restore(command: Restore) -> dict[str, Any]:
    from PIL import Image

    import fluvial
    from fluvial.core.noise import KeyedNoise
    from fluvial.data import to_uint8
    from fluvial.inverse.system_embedded_bridge import SystemEmbeddedBridge
    from fluvial.training.files import atomic, new_folder, write_json
    from fluvial.trust.conformal_masks import Panel, RestorationFlow, draw_masks, worst

    if command.seed < 0:
        raise ValueError(f"seed must not be negative, got {command.seed}")
    device = _device(command.device)
    model = fluvial.load(command.run)
    if isinstance(model, SystemEmbeddedBridge):
        return _restore_measured(command, model.to(device))
    if not isinstance(model, RestorationFlow):
        raise ValueError(f"{command.run} holds a {type(model).__name__}, which restores no images")
    if model.calibration is None or model.shape is None:
        raise ValueError(f"{command.run} was not calibrated, and has no masks")
    model.calibration.threshold(command.level)
    given = _read(command.image, model.shape[0])
    clean = None
    if command.degrade:
        sides = [side - side % model.factor for side in given.shape[1:]]
        if min(sides) < 1:
            raise ValueError(f"IMAGE: {command.image} is too small to be degraded")
        if sides != list(given.shape[1:]) and not command.quiet:
            note(f"cut to {sides[0]} x {sides[1]}, multiples of {model.factor}")
        clean = given[:, : sides[0], : sides[1]]
        given = model.file(clean)
    high, wide = (side // model.factor for side in model.shape[1:])
    if given.shape[1] < high or given.shape[2] < wide:
        raise ValueError(
            f"IMAGE: {command.image} has {given.shape[1]} x {given.shape[2]} pixels"
            f"{' when degraded' if command.degrade else ''}, at least {high} x {wide} are needed, "
            "as in the calibration"
        )
    why = model.calibration.empty(command.level)
    if why and not command.quiet:
        note(f"level {command.level:g}: {why}")
    if tuple(given.shape[1:]) != (high, wide) and not command.quiet:
        note(
            f"calibrated on images of {high} x {wide} pixels, this one has {given.shape[1]} x "
            f"{given.shape[2]}: the level is that of a tile of {high} x {wide}"
        )
    place = new_folder(command.out, force=command.force)
    begin = time.perf_counter()
    image, trusted = model.to(device).restore(
        given.to(device),
        command.level,
        noise=KeyedNoise(command.seed),
        progress=not command.quiet,
    )
    seconds = time.perf_counter() - begin
    image, trusted = image.cpu(), trusted.cpu()
    error = None if clean is None else model.mask.error(clean, image)
    pixels = to_uint8(2 * image - 1).permute(1, 2, 0).numpy()
    for name, array in (
        ("restored.png", pixels[..., 0] if pixels.shape[2] == 1 else pixels),
        ("trusted.png", 255 * trusted.numpy().astype("uint8")),
    ):
        with atomic(place / name) as path:
            Image.fromarray(array).save(path, format="png")
    draw_masks(
        place / "figure.png",
        [Panel(image, trusted, degraded=given, true=clean, error=error)],
        command.level,
    )
    document = {
        "out": str(place),
        "image": str(command.image),
        "size": list(trusted.shape),
        "level": command.level,
        "trusted": float(trusted.double().mean()),
        "calibrated_on": model.calibration.parts[""].n,
        "seed": command.seed,
        "seconds": seconds,
    }
    if error is not None:
        document["worst"] = worst(error, trusted.numpy())
    write_json(place / "result.json", document)
    return document


def _restore_measured(command: Restore, model: Any) -> dict[str, Any]:
    """By a system-embedded bridge, without a mask."""
    from PIL import Image

    from fluvial.core.noise import KeyedNoise
    from fluvial.data import to_uint8
    from fluvial.metrics import psnr
    from fluvial.training.files import atomic, new_folder, write_json

    task = model.task
    if task is None or not task.pictures:
        what = "no task" if task is None else f"the task {task.name}"
        raise ValueError(f"{command.run} has {what}, whose measurements are no images")
    noise, times = KeyedNoise(command.seed), task.smaller
    given = 2 * _read(command.image, model.shape[0])[None] - 1
    sides = [side if command.degrade else side * times for side in given.shape[2:]]
    sides = [side - side % times for side in sides]
    if min(sides) < 1:
        raise ValueError(f"IMAGE: {command.image} is too small to be degraded")
    operator, clean = task.operator((model.shape[0], *sides)), None
    if command.degrade:
        clean = given[..., : sides[0], : sides[1]]
        given = operator.A(clean)
        given = given + task.obs_noise * noise.normal(given, "measurement")
    if tuple(sides) != model.shape[1:] and not command.quiet:
        note(f"trained on images of {model.shape[1]} x {model.shape[2]} pixels")
    place = new_folder(command.out, force=command.force)
    begin = time.perf_counter()
    restored = model.restore(given, operator, noise=noise, progress=not command.quiet).cpu()
    seconds = time.perf_counter() - begin
    files = {"restored.png": restored}
    if clean is not None:
        files["measured.png"] = to_uint8(given)
    for name, pixels in files.items():
        array = pixels[0].permute(1, 2, 0).numpy()
        with atomic(place / name) as path:
            Image.fromarray(array[..., 0] if array.shape[2] == 1 else array).save(
                path, format="png"
            )
    document = {
        "out": str(place),
        "image": str(command.image),
        "size": sides,
        "task": task.as_json(),
        "seed": command.seed,
        "seconds": seconds,
    }
    if clean is not None:
        document["psnr"] = float(psnr(restored, to_uint8(clean), data_range=255).mean())
    write_json(place / "result.json", document)
    return document


def _read(path: Path, channels: int) -> Any:
    """(channels, height, width) in [0, 1] of an image file."""
    import torch

    from fluvial.data.images import decode, header

    if not path.is_file():
        raise FileNotFoundError(f"IMAGE: there is no file {path}")
    try:
        found = header(path)
        pixels = decode(path, (found.height, found.width), channels, "crop")
    except (ValueError, OSError, SyntaxError) as error:
        raise ValueError(f"IMAGE: {path} cannot be read: {error}") from error
    return torch.from_numpy(pixels.copy()).float() / 255
