"""Ten thousand small pictures of animals, from the package animal-mnist."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import torch

from fluvial.data.dataset import DataSet
from fluvial.data.format import Format
from fluvial.data.packages import read_gzip

INSTALL = "pip install --no-deps animal-mnist==0.4"
"""Without its dependencies: it asks for TensorFlow, which reading the files does not need."""

_FOLDER = "data/Animal_MNIST/"
_FILES = {
    "animal_data_version_3.gz": "68a30346781a0984f839463a4615d2decb899d1ce65091bb92586311754a34ce",
    "animal_label_version_3.gz": "dec8dba7c469830989fbab46825021a08a38470753a512f27ada847eced97b57",
}

_NAMES = (
    "bear",
    "bird",
    "cat",
    "cow",
    "dog",
    "elephant",
    "giraffe",
    "horse",
    "sheep",
    "zebra",
)

# The whole of what the pickle of an array names. NumPy 2 has renamed numpy.core.
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): "numpy._core.multiarray",
    ("numpy._core.multiarray", "_reconstruct"): "numpy._core.multiarray",
    ("numpy", "ndarray"): "numpy",
    ("numpy", "dtype"): "numpy",
}


class _ArrayUnpickler(pickle.Unpickler):
    """Loads arrays and nothing else: a pickle that names anything else could run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(
                f"the pickle names {module}.{name}, which an array does not need: refused"
            )
        return super().find_class(_ALLOWED[module, name], name)


def load_array(pickled: bytes) -> np.ndarray:
    """The NumPy array of a pickle, without trusting the pickle.

    Raises:
        pickle.UnpicklingError: the pickle names anything but what an array is rebuilt from, is
            damaged, or does not hold an array of numbers.
    """
    try:
        array = _ArrayUnpickler(io.BytesIO(pickled)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a damaged pickle fails in as many ways as there are opcodes
        raise pickle.UnpicklingError(f"the pickle is damaged: {error!r}") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "buifc":
        got = f"an array of {array.dtype}" if isinstance(array, np.ndarray) else type(array)
        raise pickle.UnpicklingError(f"the pickle must hold an array of numbers, got {got}")
    return array


def animals() -> DataSet:
    """Animal-Shape: silhouettes of animals in the format of MNIST, white on black.

    uint8, (10000, 1, 28, 28), 1,000 of each of ten classes, in the order of the classes; 9,716
    are distinct (812 of the birds, 937 of the bears), and no picture is in two classes. The
    silhouettes are filled except the zebras' and some giraffes' and cows', which show markings.

    The package holds no list of names. Its description gives the classes in alphabetical order,
    and the pictures of each label agree with it.

    Raises:
        ModuleNotFoundError: the package is not installed; the message says how to.
        FileNotFoundError, ValueError: its files are missing, damaged or of another version.
    """
    pixels, labels = (
        load_array(read_gzip("animal_mnist", _FOLDER + file, digest, INSTALL))
        for file, digest in _FILES.items()
    )
    return DataSet(
        # copied: the arrays of a pickle may lie in its read-only bytes
        x=torch.from_numpy(pixels.copy())[:, None],
        label=torch.from_numpy(labels.astype(np.int64)),
        format=Format("images", (1, 28, 28), label_names=_NAMES),
        name="animals",
        licence="MIT",
        source="animal-mnist 0.4",
        citation="Sina Mohammadi, Animal-Shape: animal silhouette extension to MNIST, 2025",
    )
