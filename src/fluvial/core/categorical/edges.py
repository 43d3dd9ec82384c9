"""Undirected graphs without loops: one token a pair of nodes, instead of two that must agree.

Edge types (batch, n, n) are symmetric and their diagonal is empty. Noised or drawn entry by entry
they would not stay so. So the state is the upper triangle, (batch, n (n - 1) / 2), an event like
any other for paths, losses and samplers, and only the network sees the square:

    x0, mask = upper_triangle(edges), pair_mask(nodes)
    logits = upper_triangle(network(symmetric(x), t))          # of a network of squares

With logits (batch, n, n, V) that are not symmetric, ``upper_triangle(a + a.transpose(1, 2))``
(DiGress, Vignac et al., ICLR 2023).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fluvial.core.arguments import kind_of


def upper_triangle(edges: Tensor) -> Tensor:
    """Entries (i, j), i < j, row by row: (batch, n, n, ...) to (batch, n (n - 1) / 2, ...).

    Raises:
        ValueError: no squares, or tokens (int64) that are not symmetric; looked at on the CPU only.
    """
    _check_tensor("edges", edges)
    if edges.ndim < 3 or edges.shape[1] != edges.shape[2]:
        raise ValueError(f"edges must have shape (batch, n, n, ...), got {tuple(edges.shape)}")
    tokens = edges.dtype == torch.int64 and edges.device.type == "cpu"
    if tokens and not torch.equal(edges, edges.transpose(1, 2)):
        raise ValueError("edges must be symmetric, got some with edges[:, i, j] != edges[:, j, i]")
    i, j = torch.triu_indices(edges.shape[1], edges.shape[1], 1, device=edges.device)
    return edges[:, i, j]


def symmetric(upper: Tensor, empty: int | float = 0) -> Tensor:
    """The square of an upper triangle, mirrored: (batch, n (n - 1) / 2, ...) to (batch, n, n, ...).

    Args:
        upper: as `upper_triangle` gives it.
        empty: what stands on the diagonal: the type "no edge".

    Raises:
        ValueError: a length that is no n (n - 1) / 2.
    """
    _check_tensor("upper", upper)
    count = upper.shape[1] if upper.ndim > 1 else -1
    n = (1 + math.isqrt(max(0, 1 + 8 * count))) // 2
    if n * (n - 1) // 2 != count:
        raise ValueError(
            f"upper must have shape (batch, n (n - 1) / 2, ...), got {tuple(upper.shape)}"
        )
    i, j = torch.triu_indices(n, n, 1, device=upper.device)
    edges = upper.new_full((len(upper), n, n, *upper.shape[2:]), empty)
    edges[:, i, j] = upper
    edges[:, j, i] = upper
    return edges


def pair_mask(nodes: Tensor) -> Tensor:
    """Which pairs are of two real nodes: (batch, n) bool to (batch, n (n - 1) / 2) bool.

    Raises:
        ValueError: ``nodes`` is not bool of shape (batch, n).
    """
    _check_tensor("nodes", nodes)
    if nodes.ndim != 2 or nodes.dtype != torch.bool:
        raise ValueError(
            f"nodes must be bool of shape (batch, n), got {nodes.dtype} of {tuple(nodes.shape)}"
        )
    return upper_triangle(nodes[:, :, None] & nodes[:, None, :])


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {kind_of(value)}")
