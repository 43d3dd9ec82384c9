"""Arguments of metrics: checked once, and brought to float64."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Values: TypeAlias = Tensor | np.ndarray


LARGEST = 1e150
"""The squares of larger numbers overflow."""


def real(name: str, value: Any) -> Values:
    """``value``, a dense tensor or array of real numbers.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return value
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_complex():
        return value
    got = value.dtype if isinstance(value, (Tensor, np.ndarray)) else type(value).__name__
    if isinstance(value, Tensor) and value.layout != torch.strided:
        got = value.layout
    raise TypeError(f"{name} must be a tensor or array of real numbers, got {got}")


def rows_of(name: str, value: Any, least: int = 2) -> Values:
    """``value``, real and of shape (N, D), not looked into.

    Raises:
        TypeError, ValueError: it is something else; fewer than ``least`` rows, or no columns.
    """
    value = real(name, value)
    if value.ndim != 2 or value.shape[0] < least or value.shape[1] < 1:
        raise ValueError(
            f"{name} must have shape (N, D) with N at least {least} and D at least 1, "
            f"got {tuple(value.shape)}"
        )
    return value


def wide(value: Values) -> Tensor:
    """Detached and in float64, where it lies; on the CPU where a device has no float64.

    What is float64 already may be shared: it is not to be written to.
    """
    if isinstance(value, np.ndarray):
        array = value.astype(np.float64, copy=False)
        if not array.flags.writeable or min(array.strides, default=0) < 0:
            array = array.copy()  # torch takes neither
        return torch.from_numpy(array)
    result = value.detach()
    return (result.cpu() if result.device.type == "mps" else result).double()


def float64(name: str, value: Values) -> Tensor:
    """As `wide`.

    Raises:
        ValueError: ``value`` holds NaN or inf, or a number beyond `LARGEST`.
    """
    result = wide(value)
    if result.numel():
        low, high = map(float, result.aminmax())  # takes no memory; NaN survives in it
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError(f"{name} must be finite, got NaN or inf")
        if max(-low, high) > LARGEST:
            raise ValueError(
                f"{name} must lie within {LARGEST:g} of 0, as larger squares overflow, got values "
                f"from {low} to {high}"
            )
    return result


def matrix(name: str, value: Any, least: int = 2) -> Tensor:
    """A checked float64 (N, D).

    Raises:
        TypeError: ``value`` is not a tensor or array of real numbers.
        ValueError: it is not a matrix, has fewer than ``least`` rows, no columns, NaN or inf.
    """
    return float64(name, rows_of(name, value, least))


def same_columns(names: tuple[str, str], columns: tuple[int, int]) -> None:
    """Raises a ValueError where two sets of features have different numbers of columns."""
    if columns[0] != columns[1]:
        raise ValueError(
            f"{names[0]} and {names[1]} must have the same number of columns, "
            f"got {columns[0]} and {columns[1]}"
        )


def pair(
    a: Any, b: Any, names: tuple[str, str] = ("a", "b"), least: int = 2
) -> tuple[Tensor, Tensor]:
    """Two checked float64 matrices with as many columns, on the device of the first.

    Raises:
        TypeError, ValueError: as `matrix`; or the numbers of columns differ.
    """
    x, y = matrix(names[0], a, least), matrix(names[1], b, least)
    same_columns(names, (x.shape[1], y.shape[1]))
    return x, y.to(x.device)


def check_order(p: float) -> None:
    """Raises a ValueError where there is no p-Wasserstein distance."""
    if not 1 <= p < math.inf:
        raise ValueError(f"p must be at least 1 and finite, got {p}")
