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
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

if TYPE_CHECKING:
    from fluvial.training.use import IntendedUse

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
    use: IntendedUse | None = None,
    overwrite: bool = False,
) -> None:
    """Weights, a JSON header and a statement of intended use in one safetensors file.

    The metadata of the file hold the header under "fluvial", the statement under "fluvial.use" and
    under "fluvial.checksum" the sum of the weights' 64-bit words, which `load_model` compares.
    Weights shared between names are written once a name.

    Args:
        path: of the file.
        weights: dense tensors of any shape, on any device.
        header: what JSON can hold; ``format`` is added, and with a statement ``use_digest``.
        use: what the model is for and what it is not for.
        overwrite: replace a file that is there.

    Raises:
        FileExistsError: ``path`` exists and ``overwrite`` is false.
        TypeError: a weight is not a tensor, or of a dtype that safetensors does not know.
        ValueError: a weight is sparse or without values; the header holds NaN or infinity.
    """
    if Path(path).exists() and not overwrite:
        raise FileExistsError(f"{path} exists; pass overwrite=True to replace it")
    tensors = _dense(weights)
    header = {"format": FORMAT, **header}
    metadata = {"fluvial.checksum": _checksum(tensors)}
    if use is not None:
        header["use_digest"] = use.digest
        metadata["fluvial.use"] = use.canonical
    metadata["fluvial"] = json.dumps(header, allow_nan=False)
    with atomic(path) as temporary:
        try:
            save_file(tensors, temporary, metadata)
        except KeyError as error:
            raise TypeError(f"weights: safetensors has no dtype for {error}") from error


def _dense(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights on the CPU, contiguous, each in memory of its own."""
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, value in weights.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"weights[{name!r}] must be a tensor, got {type(value).__name__}")
        if value.layout != torch.strided or value.is_meta:
            what = "on the meta device" if value.is_meta else f"of layout {value.layout}"
            raise ValueError(f"weights[{name!r}] must be dense and hold values, it is {what}")
        # safetensors would write a lazily conjugated tensor without its conjugation
        value = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        storage = value.untyped_storage().data_ptr()
        # and refuses overlapping weights; the checksum needs whole words from an aligned start
        if storage in storages or value.storage_offset():
            value = value.clone()
        storages.add(value.untyped_storage().data_ptr())
        tensors[name] = value
    return tensors


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """sum_k (k + 1) s_k mod 2^64, s_k the sum of the 64-bit words of the k-th tensor by name.

    Holes of zeros, flipped bits and exchanged tensors change it. It takes a tenth of the time of
    SHA-256, and is no protection against intent.
    """
    total = 0
    for k, name in enumerate(sorted(tensors)):
        flat = tensors[name].reshape(-1).view(torch.uint8)
        whole = len(flat) // 8 * 8
        words = int(flat[:whole].view(torch.int64).sum()) + int(flat[whole:].sum())
        total += (k + 1) * words
    return str(total % 2**64)


def open_safetensors(path: str | os.PathLike[str]) -> safe_open:
    """The file, open for reading; no tensor is read.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is cut short, or not a safetensors file.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no model at {path}")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        with open(path, "rb") as file:
            start = file.read(9)
        if start == b"version h":
            what = "a Git LFS pointer to one: `git lfs pull` fetches it"
        elif start[8:] == b"{" or len(start) < 9:
            what = f"it is damaged or cut short ({error})"
        else:
            what = f"it is of another kind ({error})"
        raise ValueError(f"{path} is not a readable safetensors file: {what}") from error


def load_model(
    path: str | os.PathLike[str], system: str | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(weights, header) of a file that `save_model` wrote.

    Args:
        path: of the file.
        system: whose model it has to be; any by default.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a model of fluvial or not of ``system``, is damaged, or is of a later
            format.
    """
    with open_safetensors(path) as file:
        metadata = file.metadata() or {}
        header = _header(path, metadata)
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if metadata.get("fluvial.checksum", wanted := _checksum(weights)) != wanted:
        raise ValueError(
            f"{path} is damaged: its weights are not those that were saved (their checksum differs)"
        )
    if system not in (None, header.get("system")):
        raise ValueError(f"{path} holds the system {header.get('system')!r}, not {system!r}")
    return weights, header


def put_weights(
    module: nn.Module, weights: Mapping[str, Tensor], path: str | os.PathLike[str]
) -> None:
    """The weights of a file at ``path`` into a module, in their own dtype.

    Raises:
        ValueError: they do not fit.
    """
    try:
        module.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"the weights in {path} do not fit the network: {error}") from error


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The header alone, as `load_model` returns it; no tensor is read.

    Raises:
        As `load_model`.
    """
    with open_safetensors(path) as file:
        return _header(path, file.metadata() or {})


def _header(path: str | os.PathLike[str], metadata: Mapping[str, str]) -> dict[str, Any]:
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
    return header


def save_checkpoint(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """A training checkpoint, atomically.

    Dicts, lists and tuples, nested, of tensors, numbers, texts and None come back as they were.

    Raises:
        OSError: it cannot be written, for want of room for instance.
    """
    # torch.save spends a third of its time on a CRC32 of every tensor, which torch.load never reads
    crc32 = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        with atomic(path) as temporary:
            torch.save({"format": FORMAT, **content}, temporary)
    except RuntimeError as error:
        if "inline_container" not in str(error):
            raise
        # how torch says that bytes did not reach the disk
        raise OSError(f"{path} could not be written: is the disk full?") from error
    finally:
        torch.serialization.set_crc32_options(crc32)


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
