"""Makes the folders of runs as a training and a claim leave them, small and quick."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import fluvial

SOURCE = Path(fluvial.__file__).parents[2]
RECORD = Path(fluvial.__file__).parent / "claims" / "results" / "meanflow.json"
RECORD_FIGURE = SOURCE / "docs" / "figures" / "meanflow.png"

CARD = """---
library_name: fluvial
license: apache-2.0
tags:
- image-generation
- meanflow
model-index:
- name: meanflow
  results:
  - task: {type: unconditional-image-generation}
    metrics:
    - {type: frechet, value: 3.21}
---
# A model of blobs

![samples and losses](figure.png)

One evaluation a sample, see [the paper](https://arxiv.org/abs/2505.13447).

| metric | value |
|---|---|
| Fréchet distance | 3.21 |

## Uses

Research on **fast sampling**.

### Out-of-scope use

- Output used to control a weapon.
"""


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def blobs(path: Path, sharpness: float, size: int = 28, columns: int = 8) -> None:
    """A grid of pictures of one blob each, sharper with the training."""
    path.parent.mkdir(parents=True, exist_ok=True)
    y, x = np.mgrid[0:size, 0:size]
    rng = np.random.default_rng(0)
    tiles = []
    for _ in range(columns * columns):
        cx, cy, width = rng.uniform(8, size - 8, 2).tolist() + [rng.uniform(2, 6)]
        blob = np.exp(-((x - cx) ** 2 + (y - cy) ** 2) / (2 * width**2))
        noise = rng.normal(0, 0.5, blob.shape)
        tiles.append(np.clip(sharpness * blob + (1 - sharpness) * (0.4 + noise), 0, 1))
    grid = np.stack(tiles).reshape(columns, columns, size, size).transpose(0, 2, 1, 3)
    pixels = (255 * grid.reshape(columns * size, columns * size)).astype(np.uint8)
    Image.fromarray(pixels).resize((2 * pixels.shape[1],) * 2, Image.Resampling.NEAREST).save(path)


def losses(step: int, steps: int, lr: float, seed: int = 0) -> dict[str, Any]:
    """What a training logs at a step: a loss that falls, less so for a poor learning rate."""
    rng = np.random.default_rng([seed, step])
    level = 0.2 + 0.05 * abs(math.log(lr / 3e-3)) + 4 * math.exp(-12 * step / steps)
    noise = float(np.exp(0.12 * rng.normal()))
    t = (np.arange(10) + 0.5) / 10
    by_time = level * (0.4 + 1.2 * t**2)
    return {"level": level, "loss": level * noise, "by_time": by_time}


def training(
    folder: Path,
    *,
    system: str = "meanflow",
    steps: int = 3000,
    stop: int | None = None,
    lr: float = 3e-3,
    every: int = 25,
    card: str = CARD,
    recipe: dict[str, Any] | None = None,
    data: str = "blobs",
) -> Path:
    """The folder of a training; an unfinished one if ``stop`` is given."""
    last = steps if stop is None else stop
    settings = {"lr": lr, "betas": [0.9, 0.95], "batch_size": 64, "width": 128, "steps": steps}
    run = {
        "format": 1,
        "kind": "training",
        "system": system,
        "command": f"fluvial train {system} --data photographs/ --lr {lr:g} --steps {steps}",
        "recipe": {**settings, "patch": 4, "omega": 1.0, "dropout": None, **(recipe or {})},
        "parameters": 1034256,
        "data": {
            "name": data,
            "source": "photographs/",
            "licence": "unknown",
            "citation": "",
            "rows": {"train": 7775, "validation": 969},
            "notes": ["3 files could not be read and were left out: a.jpg, b.png, c.tif."],
            "format": {
                "kind": "images",
                "shape": [1, 28, 28],
                "shift": [127.5],
                "scale": [127.5],
                "label_names": ["round", "square"],
                "columns": [],
                "resize": "crop",
            },
        },
        "versions": {"fluvial": fluvial.__version__, "torch": "2.13.0", "python": "3.11.7"},
    }
    write(folder / "run.json", run)
    loop = {"steps": steps, "warmup": 50, "clip": 1.0, "ema": [0.999], "checkpoint_every": 500}
    write(folder / "training.json", loop)
    lines = []
    for step in range(every, last + 1, every):
        now = losses(step, steps, lr)
        shared = {"step": step, "seconds": 0.16 * step}
        by_time = [round(float(value), 4) for value in now["by_time"]]
        entry = {
            **shared,
            "rows_per_second": 400.0 + 20 * math.sin(step),
            "lr": lr * min(1, step / 50),
            "loss": now["loss"],
            "delta": 40 * now["loss"],
            "by_time": {"loss": by_time},
        }
        lines.append(json.dumps(entry))
        if step % (4 * every) == 0:
            validation = {
                name: {
                    "loss": factor * now["level"],
                    "delta": 40 * factor * now["level"],
                    "by_time": {
                        "loss": [factor * value for value in by_time[:9]] + [None],
                        "delta": [40 * factor * value for value in by_time],
                    },
                }
                for name, factor in (("last", 1.1), ("ema-0.999", 0.95))
            }
            lines.append(json.dumps({**shared, "validation": validation}))
        if step % 500 == 0:
            blobs(folder / "samples" / f"step-{step:08d}.png", step / steps)
            (folder / "checkpoints").mkdir(exist_ok=True)
            (folder / "checkpoints" / f"step-{step:08d}.pt").touch()
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    if stop is None:
        blobs(folder / "figure.png", 1.0, columns=10)
        (folder / "README.md").write_text(card, encoding="utf-8")
        result = {
            "format": 1,
            "system": system,
            "seconds": 0.16 * steps,
            "steps": steps,
            "metrics": [
                {
                    "name": "Fréchet distance",
                    "value": 3.2112 + abs(math.log(lr / 3e-3)),
                    "floor": 0.5879,
                    "what": "969 samples against 969 held-out images, in 64 features.",
                },
                {"name": "validation loss", "value": 0.19, "floor": None, "what": "Of ema-0.999."},
            ],
            "weights": "ema-0.999",
            "notes": ["The last tenth of the training changed the validation loss by 0.3 %."],
        }
        write(folder / "result.json", result)
    return folder


def claim(folder: Path, *, preset: str = "record", finished: bool = True) -> Path:
    """The folder of a claim's run, made from the recorded one."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    write(folder / "config.json", {"preset": preset, **record["config"]})
    if not finished:
        return folder
    if preset != "record":
        record |= {"preset": preset, "verdict": "not judged"}
    write(folder / "result.json", record)
    if RECORD_FIGURE.is_file():
        shutil.copy(RECORD_FIGURE, folder / "figure.png")
    else:
        blobs(folder / "figure.png", 1.0)
    blobs(folder / "samples.png", 1.0)
    card = f"# meanflow, preset {preset}\n\n![samples](samples.png)\n\n{record['claim']}\n"
    (folder / "README.md").write_text(card, encoding="utf-8")
    return folder
