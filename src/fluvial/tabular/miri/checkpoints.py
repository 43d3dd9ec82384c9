"""Rounds that are kept while a table is filled, so that a fit that was stopped goes on.

A round is the unit: ``round-3.safetensors`` is the third one's network, written when the round is
done. A fit that goes on draws by the kept networks what they drew before, from the same noise, and
trains the others: its table is that of a fit that was never stopped, bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from fluvial.tabular.miri.rounds import Round
from fluvial.training.files import load_model, put_weights, save_model

BLOCK = 1 << 18
"""Numbers whose bytes are digested at a time."""


def digest_of(settings: Mapping[str, Any], x: Tensor, mask: Tensor) -> str:
    """What a kept round depends on: the settings, the table where it is observed, and the mask."""
    state = blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=16)
    size = max(1, BLOCK // max(1, x[0].numel()))
    for start in range(0, len(x), size):
        rows = slice(start, start + size)
        seen = mask[rows].cpu().numpy()
        state.update(np.packbits(seen).tobytes())
        state.update(np.where(seen, x[rows].cpu().numpy(), 0).tobytes())
    return state.hexdigest()


def write_round(folder: Path, one: Round, net: nn.Module, digest: str) -> None:
    """Keep a round that is done."""
    header = {"kind": "round", "digest": digest, **round_as_json(one)}
    save_model(_path(folder, one.number), net.state_dict(), header, overwrite=True)


def read_rounds(
    folder: Path, make: Callable[[int], nn.Module], digest: str
) -> tuple[list[nn.Module], list[Round]]:
    """The first rounds that are there, up to the first that is not.

    Args:
        folder: they are in, if it is there.
        make: a network for the weights of round k, 0, 1, ...
        digest: of `digest_of`.

    Raises:
        ValueError: a file is damaged, or of another table or of other settings.
    """
    nets: list[nn.Module] = []
    rounds: list[Round] = []
    while (path := _path(folder, len(nets) + 1)).is_file():
        try:
            weights, header = load_model(path)
        except ValueError as error:
            raise ValueError(
                f"{error}; delete it, and the rounds from this one on are trained again"
            ) from error
        if header.get("digest") != digest:
            raise ValueError(
                f"the data or the settings have changed since {path} was written: put them back as "
                "they were, or begin anew in another folder"
            )
        net = make(len(nets))
        put_weights(net, weights, path)
        nets.append(net.eval())
        rounds.append(round_from_json(header))
    return nets, rounds


def rounds_kept(folder: Path) -> int:
    """How many rounds a fit would not have to train again."""
    count = 0
    while _path(folder, count + 1).is_file():
        count += 1
    return count


def round_as_json(one: Round) -> dict[str, Any]:
    """A round as JSON holds it: null where a loss is not finite."""
    losses = [loss if math.isfinite(loss) else None for loss in one.losses]
    moved = one.moved if math.isfinite(one.moved) else None
    return {"number": one.number, "losses": losses, "seconds": one.seconds, "moved": moved}


def round_from_json(content: Mapping[str, Any]) -> Round:
    """The round that `round_as_json` wrote."""
    losses = tuple(math.nan if loss is None else float(loss) for loss in content["losses"])
    moved = math.nan if content["moved"] is None else float(content["moved"])
    return Round(int(content["number"]), losses, float(content["seconds"]), moved)


def _path(folder: Path, number: int) -> Path:
    return folder / f"round-{number}.safetensors"
