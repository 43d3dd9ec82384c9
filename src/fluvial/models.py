"""Models of any system, from their files: `load`, the card of a run, publishing on the hub."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from fluvial import catalog
from fluvial.training.card import CARD, MODEL, card_digest, write_training_card
from fluvial.training.files import load_model, read_header

ABOUT = {system.name: (system.purpose, system.citation_markdown) for system in catalog.SYSTEMS}
"""Purpose and citation of every system, for the cards."""

PUBLISHED = (MODEL, CARD, "result.json", "figure.png")
"""What goes from the folder of a run to the hub, if it is there. ``run.json`` has paths of the
user's machine in it; what matters of it is in the card."""


def load(
    path: str | os.PathLike[str],
    *,
    weights: str | None = None,
    network: nn.Module | None = None,
) -> Any:
    """The model in a file or in the folder of a run, of any system, on the CPU.

    Its statement of intended use, ``use``, is the one in the weights. If the card or ``run.json``
    beside them has another, a warning names the digests, and nothing else comes of it.

    Args:
        path: file of a model, or folder with a ``model.safetensors``: of a run, or a download from
            the hub.
        weights: other weights of the run: "last", "best", or the name of an average as
            "ema-0.9999". By default those the run chose.
        network: the network, built as it was; needed only for a class that is not fluvial's.

    Raises:
        FileNotFoundError: there is no such file or folder, no model in the folder, or no such
            weights (those that exist are named).
        ValueError: the file is not a model of fluvial, damaged, of a later format, or of a system
            that is unknown or planned; the weights do not fit.
        ModuleNotFoundError: the system needs an extra, which is named.
    """
    file = _file(Path(path))
    header = read_header(file)
    cls = _class(_system(file, header.get("system")))
    other = None if weights is None else load_model(_weights(file.parent, weights))[0]
    model = cls.load(file) if network is None else cls.load(file, network=network)
    if other is not None:
        try:
            model.load_state_dict(other)
        except RuntimeError as error:
            raise ValueError(f"the weights {weights!r} do not fit the model: {error}") from error
    if model.use is not None:
        _compare(file, model.use.digest, header)
    return model


def system_of(path: str | os.PathLike[str]) -> catalog.System:
    """The system of the model in a file or in the folder of a run. Only the header is read.

    Raises:
        FileNotFoundError, ValueError: as `load`.
    """
    file = _file(Path(path))
    return _system(file, read_header(file).get("system"))


def _file(path: Path) -> Path:
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"no model at {path}: there is no such file or folder")
        return path
    if (path / MODEL).is_file():
        return path / MODEL
    if (path / "run.json").is_file() and not (path / "result.json").is_file():
        raise FileNotFoundError(
            f"{path} has no {MODEL} yet: the training has not ended; resume it, or wait"
        )
    raise FileNotFoundError(f"no model in {path}: the folder has no {MODEL}")


def _system(file: Path, name: Any) -> catalog.System:
    if name == "weights":
        raise ValueError(
            f"{file} holds weights only, of a training: fluvial.load(RUN, weights={file.stem!r})"
        )
    try:
        system = catalog.get(str(name))
    except ValueError as error:
        raise ValueError(f"{file} is of a system that this version lacks: {error}") from error
    if system.planned:
        raise ValueError(f"{file} is of the system {name!r}, which is planned in this version")
    return system


def _class(system: catalog.System) -> Any:
    try:
        return system.load()
    except ModuleNotFoundError as error:
        if system.extra is None:
            raise
        raise ModuleNotFoundError(
            f"{system.name} needs the extra {system.extra!r}: "
            f"pip install 'fluvial[{system.extra}]' ({error})"
        ) from error


def _weights(run: Path, name: str) -> Path:
    there = {path.stem: path for path in sorted((run / "weights").glob("*.safetensors"))}
    if name not in there:
        raise FileNotFoundError(
            f"weights: {run} has no {name!r}, but {', '.join(there) or 'none beside the model'}"
        )
    return there[name]


def _compare(file: Path, digest: str, header: dict[str, Any]) -> None:
    """One warning for all places where the digest is another."""
    places = {"the file's header": header.get("use_digest")}
    if file.name == MODEL:
        for name, read in (("run.json", _run_digest), (CARD, card_digest)):
            try:
                places[name] = read(file.parent)
            except (OSError, ValueError, TypeError) as error:
                places[name] = f"unreadable, {error}"
    others = [f"{name} ({found})" for name, found in places.items() if found not in (None, digest)]
    if others:
        warnings.warn(
            f"the statement of intended use in {file} has the digest {digest}; another one is in "
            f"{' and '.join(others)}. The one in the weights is used",
            stacklevel=3,
        )


def _run_digest(folder: Path) -> str | None:
    path = folder / "run.json"
    return (
        json.loads(path.read_text(encoding="utf-8")).get("use_digest") if path.is_file() else None
    )


def write_card(folder: str | os.PathLike[str]) -> Path:
    """Write the card of a training run, ``README.md``, from the statement in its weights.

    What is below the card's last line, a comment, stays; so do keys that were added to the front
    matter. Returns the card's path.

    Raises:
        FileNotFoundError: the folder is not a run.
        FileExistsError: it has a README.md that is not a card of fluvial's.
        ValueError: a file is damaged or of a later format; the run is a claim's, whose card is
            written with its result.
    """
    folder = Path(folder)
    if (folder / "config.json").is_file() and not (folder / "run.json").is_file():
        raise ValueError(f"{folder} is the run of a claim: its card is written with its result")
    return write_training_card(folder, ABOUT)


def push_to_hub(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = True,
    token: str | None = None,
    message: str = "Model and card",
) -> str:
    """Publish a run on the Hugging Face hub: the files of `PUBLISHED`, and a file LICENSE.

    Checkpoints, samples, data and the command line stay here.

    Args:
        folder: of the run. A card is written if there is none.
        repo_id: "owner/name" on the hub; made if there is none.
        private: who may see it. A public repository is not pushed to unless this is False.
        token: of the hub; by default the one of ``hf auth login``.
        message: of the commit.

    Returns:
        The address of the commit.

    Raises:
        FileNotFoundError: the folder has no model.
        ValueError: ``private`` is asked for, and the repository is public; ``repo_id`` is none.
    """
    from huggingface_hub import HfApi

    folder = Path(folder)
    if not (folder / MODEL).is_file():
        raise FileNotFoundError(f"no model in {folder}: there is nothing to push without {MODEL}")
    if not (folder / CARD).is_file():
        write_card(folder)
    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    if private and not api.model_info(repo_id).private:
        raise ValueError(
            f"private: {repo_id} exists and is public; pass private=False to push there"
        )
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        allow_patterns=[*PUBLISHED, "LICENSE"],
        commit_message=message,
    )
    return str(commit.commit_url)
