"""Linear operators: what is measured of a state, its adjoint and its pseudo-inverse."""

from __future__ import annotations

from fluvial.core.operators.base import Operator, Product, Sum, check_operator
from fluvial.core.operators.blur import Blur, gaussian_kernel, motion_kernel
from fluvial.core.operators.dense import Dense
from fluvial.core.operators.diagonal import Diagonal, Mask, box_mask, random_mask
from fluvial.core.operators.downsample import AveragePool, Bicubic
from fluvial.core.operators.fourier import SubsampledFourier, columns_mask
from fluvial.core.operators.radon import Radon

__all__ = [
    "AveragePool",
    "Bicubic",
    "Blur",
    "Dense",
    "Diagonal",
    "Mask",
    "Operator",
    "Product",
    "Radon",
    "SubsampledFourier",
    "Sum",
    "box_mask",
    "check_operator",
    "columns_mask",
    "gaussian_kernel",
    "motion_kernel",
    "random_mask",
]
