"""Files: atomic writes, models as safetensors with a JSON header, training checkpoints.

A file is written beside its place under a temporary name, flushed to the disk and then renamed, so
a crash leaves either the old file or the new one.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = 1
"""Version of the layout of models and checkpoints."""


@contextmanager
def atomic(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path that takes the place of ``path`` when the block ends without an error."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        # mkstemp makes the file private; give it the mode an ordinary open would
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | os.PathLike[str], content: Any) -> None:
    """``content`` as indented JSON, atomically. NaN and infinity are refused: not JSON."""
    with atomic(path) as temporary:
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")


def save_model(
    path: str | os.PathLike[str],
    weights: Mapping[str, Tensor],
    header: Mapping[str, Any],
    *,
    overwrite: bool = False,
) -> None:
    """Weights and a JSON header in one safetensors file.

    Raises:
        FileExistsError: ``path`` exists and ``overwrite`` is false.
    """
    if Path(path).exists() and not overwrite:
        raise FileExistsError(f"{path} exists; pass overwrite=True to replace it")
    metadata = {"fluvial": json.dumps({"format": FORMAT, **header}, allow_nan=False)}
    tensors = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    with atomic(path) as temporary:
        save_file(tensors, temporary, metadata)


def load_model(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(weights, header) of a file that `save_model` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a model of fluvial, is damaged, or is of a later format.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no model at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
    if "fluvial" not in metadata:
        raise ValueError(f"{path} is a safetensors file, but not a model saved by fluvial")
    try:
        header = json.loads(metadata["fluvial"])
        newer = header["format"] > FORMAT
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} has a damaged header: {error}") from error
    if newer:
        raise ValueError(
            f"{path} has format {header['format']}, this version of fluvial reads up to {FORMAT}"
        )
    return weights, header


def save_checkpoint(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """A training checkpoint (tensors, numbers, strings), atomically."""
    with atomic(path) as temporary:
        torch.save({"format": FORMAT, **content}, temporary)


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `save_checkpoint` wrote, on the CPU.

    Raises:
        ValueError: the file is damaged, or of another format.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # torch raises many kinds for a damaged file
        raise ValueError(
            f"{path} is not a readable checkpoint ({type(error).__name__}); delete it, or train "
            "with resume=False"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of format {FORMAT}")
    return content


def new_folder(path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """A folder to write a run into, empty unless ``force``, which keeps what it holds.

    Raises:
        FileExistsError: ``path`` exists, is not an empty folder, and ``force`` is false.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; a run needs a folder")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise FileExistsError(f"{folder} is not empty; choose another folder or force it")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
