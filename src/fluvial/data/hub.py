"""Data sets of Hugging Face, and folders that their package `datasets` loads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fluvial.data.arrays import from_array, label_numbers
from fluvial.data.dataset import DataSet
from fluvial.data.format import Format, choices
from fluvial.data.images import Options, Source, pictures
from fluvial.data.packages import extra
from fluvial.data.store import SMALL, Rows, as_tensor, digest, keep, slices
from fluvial.data.tables import from_frame


def read_hub(name: str, label: str | None, options: Options) -> DataSet:
    """A data set of Hugging Face, or a local folder in one of the forms of `datasets`.

    A column of images gives images, one of arrays of equal shape arrays, columns of numbers a
    table. The labels are in the only column of classes, or one called ``label``, or the one named.

    Args:
        name: OWNER/NAME, OWNER/NAME:CONFIG, either with @SPLIT; or ./folder, with @SPLIT. Without
            SPLIT the only one is read, or "train".
        label: name of the column of labels.
        options: what is asked for. What is downloaded goes into the cache of Hugging Face.

    Raises:
        ModuleNotFoundError: the package `datasets` is missing.
        FileNotFoundError: there is no such data set or folder, or no connection.
        ValueError: there is no such configuration, split or column; the columns are of no kind that
            is read; see `fluvial.data.images.pictures` and `fluvial.data.tables.from_frame`.
    """
    datasets = extra("datasets", "hub", "data sets of Hugging Face")
    place, _, split = name.partition("@")
    if not place:
        raise ValueError(f"hf:{name} names no data set: hf:OWNER/NAME, or hf:./folder")
    hide = not options.progress and not datasets.are_progress_bars_disabled()
    if hide:
        datasets.disable_progress_bars()
    try:
        rows, notes = _loaded(datasets, place, split)
    finally:
        if hide:
            datasets.enable_progress_bars()
    label = _label_column(datasets, rows, label)
    columns: dict[str, list[str]] = {"images": [], "arrays": [], "numbers": []}
    for column, feature in rows.features.items():
        if column != label:
            columns[_kind(datasets, feature)].append(column)
    events = columns["images"] or columns["arrays"]
    if len(events) > 1:
        raise ValueError(
            f"hf:{name} has {len(events)} columns of images or arrays, {', '.join(events)}: save "
            "the rows with one of them"
        )
    unused = [column for column in rows.column_names if column not in (label, *events)]
    if events and unused:
        notes.append(f"columns not used: {', '.join(unused)}")
    numbers, label_names = _labels(datasets, rows, label)
    title = Path(place).resolve().name if _local(place) else place
    if columns["images"]:
        data, good = _images(datasets, rows, events[0], title, options, notes)
        numbers = None if numbers is None else numbers[good]
    elif columns["arrays"]:
        data = from_array(_array(rows, events[0], options), None, title, options, notes)
    elif options.size or options.channels:
        raise ValueError(f"size and channels are for images, and hf:{name} has no column of images")
    else:
        frame = rows.remove_columns([label] if label else []).to_pandas()
        data = from_frame(frame, label=None, name=title, notes=notes)
    licence, citation = _provenance(rows.info, place)
    return replace(
        data,
        label=None if numbers is None else torch.from_numpy(numbers),
        format=replace(data.format, label_names=label_names),
        licence=licence,
        source="the user's files" if _local(place) else f"Hugging Face, {place}",
        citation=citation,
    )


def _local(place: str) -> bool:
    return place.startswith((".", "~")) or Path(place).is_absolute()


def _loaded(datasets: Any, place: str, split: str) -> tuple[Any, list[str]]:
    """The rows of a split, and notes."""
    folder = Path(place).expanduser()
    if _local(place) and not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {place}")
    try:
        if _local(place) and any(
            (folder / file).exists() for file in ("state.json", "dataset_dict.json")
        ):  # from save_to_disk
            found = datasets.load_from_disk(str(folder))
        elif _local(place):
            found = datasets.load_dataset(str(folder))
        else:
            owner_and_name, _, config = place.partition(":")
            found = datasets.load_dataset(owner_and_name, config or None)
    except Exception as error:  # of many kinds: the files of others, read by a library
        absent = isinstance(error, FileNotFoundError | ConnectionError)
        raise (FileNotFoundError if absent else ValueError)(
            f"hf:{place} cannot be loaded: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(found, dict):
        found = {str(found.split or "train"): found}
    if not split:
        split = "train" if "train" in found else next(iter(found))
        if len(found) > 1 and split != "train":
            raise ValueError(
                f"hf:{place} has the splits {', '.join(found)}; choose one, as hf:{place}@{split}"
            )
    if split not in found:
        raise ValueError(f"hf:{place} has no split {split!r}; {choices(split, list(found))}")
    if not len(found[split]):
        raise ValueError(f"hf:{place}@{split} has no rows")
    rest = [other for other in found if other != split]
    return found[split], [f"split {split}; not read: {', '.join(rest)}"] if rest else []


def _label_column(datasets: Any, rows: Any, label: str | None) -> str | None:
    names = list(rows.features)
    if label is not None:
        if label not in names:
            raise ValueError(f"label: there is no column {label!r}; {choices(label, names)}")
        return label
    if "label" in names:
        return "label"
    classes = [name for name in names if isinstance(rows.features[name], datasets.ClassLabel)]
    if len(classes) > 1:
        raise ValueError(f"label: choose one of the columns of classes: {', '.join(classes)}")
    return classes[0] if classes else None


def _kind(datasets: Any, feature: Any) -> str:
    if isinstance(feature, datasets.Image):
        return "images"
    shaped = (datasets.Array2D, datasets.Array3D, datasets.Array4D, datasets.Array5D)
    if isinstance(feature, (*shaped, datasets.Sequence, datasets.List, list)):
        return "arrays"
    return "numbers"  # or text, which a table names


def _labels(
    datasets: Any, rows: Any, label: str | None
) -> tuple[np.ndarray | None, tuple[str, ...]]:
    if label is None:
        return None, ()
    values = rows.with_format(None)[label][:]
    named = isinstance(rows.features[label], datasets.ClassLabel)
    missing = sum(value is None or (named and value == -1) for value in values)
    if missing:
        raise ValueError(f"label: {missing} of {len(values)} are missing; leave those rows out")
    if named:
        return np.array(values, dtype=np.int64), tuple(rows.features[label].names)
    return label_numbers(np.array(values), len(values))


def _images(
    datasets: Any, rows: Any, column: str, name: str, options: Options, notes: list[str]
) -> tuple[DataSet, np.ndarray]:
    """The images, without labels, and which rows they are."""
    encoded = (
        rows.with_format(None)
        .select_columns(column)
        .cast_column(column, datasets.Image(decode=False))
    )

    def file(index: int) -> Source:
        image = encoded[index][column]
        if image is None:
            raise ValueError("missing")
        if image["bytes"] is not None:
            return BytesIO(image["bytes"])
        return Path(image["path"])

    x, good, found = pictures(
        [f"row {index}" for index in range(len(encoded))],
        file,
        options,
        digest(rows._fingerprint, column),
    )
    data = DataSet(
        x=as_tensor(x),
        label=None,
        format=Format("images", x.shape[1:], resize=options.resize),
        name=name,
        licence="unknown",
        source="the user's files",
        notes=(*notes, *found),
    )
    return data, good


def _array(rows: Any, column: str, options: Options) -> np.ndarray:
    """The arrays of a column, which must have one shape."""
    typed = rows.select_columns(column).with_format("numpy")
    first = np.asarray(typed[0][column])

    def blocks() -> Iterator[np.ndarray]:
        for part in slices(len(rows), first.nbytes):
            arrays = [np.asarray(value) for value in typed[part][column]]
            for row, array in enumerate(arrays, part.start):
                if array.shape != first.shape or array.dtype.kind not in "biuf":
                    raise ValueError(
                        f"column {column} must hold arrays of numbers of one shape, got "
                        f"{array.dtype} of shape {array.shape} in row {row} and "
                        f"{first.dtype} of shape {first.shape} in row 0"
                    )
            yield np.stack(arrays)

    whole = Rows((len(rows), *first.shape), first.dtype, blocks())
    cache = None if whole.nbytes <= SMALL else options.cache
    return keep(lambda: whole, cache, digest("hf array", rows._fingerprint, column))[0]


def _provenance(info: Any, place: str) -> tuple[str, str]:
    """Licence and citation: of the data set's info, else the licence of its card."""
    licence = info.license
    if not licence:
        hub = extra("huggingface_hub", "hub", "data sets of Hugging Face")
        owner_and_name = place.partition(":")[0]
        card = Path(place).expanduser() / "README.md" if _local(place) else owner_and_name
        try:
            licence = hub.DatasetCard.load(card).data.license
        except (OSError, ValueError):  # there is no card, or no connection
            licence = None
    if isinstance(licence, list):
        licence = ", ".join(licence)
    citation = " ".join((info.citation or "").split())
    return licence or "unknown", citation or info.homepage or ""
