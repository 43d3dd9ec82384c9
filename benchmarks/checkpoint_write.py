"""What writing a training checkpoint costs next to safetensors with the same tensors.

    python benchmarks/checkpoint_write.py [--width W] [--rounds N] [--threads N] [--folder DIR]

The checkpoint of a DiT (100 M parameters by default) holds its weights, one average of them and
AdamW's two moments. Contestants take turns in a shuffled order; before each one the last file is
deleted and the disk flushed. safetensors writes the same tensors, flat, with and without fsync;
`save_checkpoint` too is shown without its fsync. torch.save is with the CRC32 that it writes by
default. `save_model` writes the weights only.

Aim: `save_checkpoint`, atomic and flushed, in at most 1.3 times safetensors alone.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fluvial.networks import DiT
from fluvial.training.files import save_checkpoint, save_model

AIM = 1.3


def checkpoint(width: int) -> dict[str, Any]:
    network = DiT(size=32, channels=4, patch=2, width=width, depth=12, heads=8, num_classes=10)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-4)
    for parameter in network.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    weights = network.state_dict()
    return {
        "step": 1,
        "objective": weights,
        "average": {name: value.clone() for name, value in weights.items()},
        "optimizer": optimizer.state_dict(),
    }


def flat(content: Any, name: str = "") -> dict[str, Tensor]:
    """Every tensor of a nested checkpoint under one name."""
    if isinstance(content, Tensor):
        return {name: content}
    parts = content.items() if isinstance(content, dict) else ()
    return {k: v for key, part in parts for k, v in flat(part, f"{name}.{key}").items()}


def flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=672)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    content = checkpoint(options.width)
    tensors, weights = flat(content), content["objective"]
    parameters = sum(value.numel() for value in weights.values())
    size = sum(value.nbytes for value in tensors.values())

    def torch_save(path: Path) -> None:
        torch.save(content, path)
        flush(path)

    def flushed(tensors: dict[str, Tensor], path: Path) -> None:
        save_file(tensors, path)
        flush(path)

    def unflushed(path: Path) -> None:
        torch.serialization.set_crc32_options(False)
        torch.save(content, path)
        torch.serialization.set_crc32_options(True)

    contestants: dict[str, Callable[[Path], None]] = {
        "safetensors": lambda path: save_file(tensors, path),
        "safetensors, fsync": lambda path: flushed(tensors, path),
        "torch.save, fsync": torch_save,
        "save_checkpoint": lambda path: save_checkpoint(path, content),
        "save_checkpoint, no fsync": unflushed,
        "weights: safetensors, fsync": lambda path: flushed(weights, path),
        "weights: save_model": lambda path: save_model(path, weights, {"system": "dit"}),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path, order = Path(folder) / "file", random.Random(0)
        for round_ in range(options.rounds + 1):
            for name in order.sample(list(contestants), len(contestants)):
                path.unlink(missing_ok=True)
                os.sync()
                begin = time.perf_counter()
                contestants[name](path)
                if round_:  # the first one warms up
                    seconds[name].append(time.perf_counter() - begin)

    print(
        f"{parameters / 1e6:.0f} M parameters, checkpoint {size / 1e9:.2f} GB, torch "
        f"{torch.__version__}, {options.threads} thread(s); seconds, {options.rounds} rounds"
    )
    median = {name: statistics.median(times) for name, times in seconds.items()}
    print(f"{'':28} {'median':>7} {'lowest':>7} {'highest':>8} {'x safetensors':>14}")
    for name, times in seconds.items():
        base = median[("weights: " if name.startswith("weights") else "") + "safetensors, fsync"]
        print(
            f"{name:28} {median[name]:7.2f} {min(times):7.2f} {max(times):8.2f} "
            f"{median[name] / base:14.2f}"
        )
    for base in ("safetensors", "safetensors, fsync"):
        ratios = [a / b for a, b in zip(seconds["save_checkpoint"], seconds[base], strict=True)]
        print(
            f"save_checkpoint / {base}: {median['save_checkpoint'] / median[base]:.2f} of medians, "
            f"{statistics.median(ratios):.2f} median of pairs   aim <= {AIM}"
        )


if __name__ == "__main__":
    main()
