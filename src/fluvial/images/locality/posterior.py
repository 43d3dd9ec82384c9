"""Posterior means over a data set, seen chunk after chunk in bounded memory.

With u = x_t / alpha and r = sigma / alpha, the posterior over which image x_t came from is

    p_i = softmax_i(-q_i / (2 r^2)),    q_i = |u - x_i|^2,

and the denoisers of this package differ in which coordinates q_i sums over. A softmax over the
whole set needs no two images at the same time: each chunk gives its smallest q, the sum of its
weights and the sum of its weighted values, and two such triples make one,

    q = min(q_a, q_b),    sum = sum_a exp((q - q_a) / (2 r^2)) + sum_b exp((q - q_b) / (2 r^2)).

Averaging the means of chunks instead, as streaming code is found to do, gives far chunks an equal
say, and an answer that depends on the chunks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from fluvial.networks.layers import recompute

Compare: TypeAlias = Callable[[Tensor, Any], tuple[Tensor, Tensor]]
"""(u, chunk) -> (q, values): (outputs, batch, candidates) and (outputs, candidates, numbers)."""

Part: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Smallest q and sum of weights, (outputs, batch); weighted values, (outputs, batch, numbers)."""

TEMPORARIES = 4
"""Numbers held at a time for each coordinate of a query and an image, or of an image."""

CACHED = 1 << 24
"""Bytes of temporaries on a CPU, at most: those of the next operation are then in its cache."""

FEWEST = 64
"""Images that a chunk should have before queries are split."""


def posterior_mean(u: Tensor, chunks: Iterable[Any], compare: Compare, precision: Tensor) -> Tensor:
    """sum_i p_i v_i with p = softmax_i(-precision q_i), (outputs, batch, numbers).

    Where gradients are wanted, a chunk's temporaries are computed again in the backward pass
    rather than kept, so that the memory stays that of a chunk.

    Args:
        u: (batch, d).
        chunks: of the data set; what they are is `compare`'s affair.
        compare: the squared distances and the values of a chunk.
        precision: 1 / (2 r^2), () or (batch,).
    """

    def part(u: Tensor, chunk: Any) -> Part:
        q, values = compare(u, chunk)
        factor = -precision.to(q)[..., None] if precision.ndim else -float(precision)
        least = q.detach().amin(-1)
        # below, an exponential takes twenty times as long, and is nothing beside the largest, 1
        floor = 0.9 * math.log(torch.finfo(q.dtype).tiny)
        weights = q.sub_(least[..., None]).mul_(factor).clamp_(min=floor).exp_()
        return least, weights.sum(-1), weights @ values

    def merge(a: Part, b: Part) -> Part:
        scale = precision.to(a[0]) if precision.ndim else float(precision)
        least = torch.minimum(a[0], b[0])
        on_a, on_b = (torch.exp((least - part[0]) * scale) for part in (a, b))
        return (
            least,
            a[1] * on_a + b[1] * on_b,
            a[2] * on_a[..., None] + b[2] * on_b[..., None],
        )

    whole: Part | None = None
    for chunk, alone in _marked(chunks):
        forget = u.requires_grad and torch.is_grad_enabled() and not alone
        now = _recomputed(part, u, chunk) if forget else part(u, chunk)
        whole = now if whole is None else merge(whole, now)
    assert whole is not None, "a data set has one chunk at least"
    return whole[2] / whole[1][..., None]


def _recomputed(part: Callable[[Tensor, Any], Part], u: Tensor, chunk: Any) -> Part:
    return cast(Part, recompute(cast(Any, lambda u: part(u, chunk)), u))


def _marked(chunks: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each chunk, and whether it is the only one."""
    iterator = iter(chunks)
    first = next(iterator)
    second = next(iterator, None)
    yield first, second is None
    if second is not None:
        yield second, False
    for chunk in iterator:
        yield chunk, False


def plan(
    batch: int, images: int, *, pair: int, image: int, memory: int, device: torch.device
) -> tuple[int, int]:
    """(queries, images) to compare at a time.

    Args:
        batch, images: how many there are.
        pair: numbers in bytes that are held for one query and one image.
        image: those held for one image.
        memory: bytes that all may take.
        device: on a CPU less is taken, so that it stays in the cache.

    Raises:
        ValueError: ``memory`` has no room for one pair.
    """
    pair, image = TEMPORARIES * pair, TEMPORARIES * image
    if memory < pair + image:
        raise ValueError(
            f"memory must be at least {pair + image} bytes for images of this size, got {memory}"
        )
    most = min(memory, max(CACHED, pair + image)) if device.type == "cpu" else memory
    rows = min(batch, max(1, (most // FEWEST - image) // pair))
    return rows, min(images, most // (image + pair * rows))


class Windows:
    """A mask (outputs, d) that sums squared differences: q = mask @ (d, columns).

    A sparse mask costs what its entries cost. torch.func knows nothing of sparse tensors, so that
    their product says itself what its derivatives are.

    Args:
        mask: dense, or square and sparse in CSR.
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self._back: Windows | None = None

    def __call__(self, squares: Tensor) -> Tensor:
        if self.mask.layout == torch.strided:
            return self.mask @ squares
        return cast(Tensor, _SparseProduct.apply(squares, self))

    @property
    def transposed(self) -> Windows:
        """Of a sparse mask: what the backward pass needs."""
        if self._back is None:
            counts, column = self.mask.crow_indices().diff(), self.mask.col_indices()
            row = torch.arange(len(counts), device=column.device).repeat_interleave(counts)
            start = torch.bincount(column, minlength=len(counts)).cumsum(0)
            start = torch.cat([start.new_zeros(1), start]).to(column.dtype)
            order = column.argsort(stable=True)
            self._back = Windows(csr(start, row[order].to(column.dtype), self.mask.values()[order]))
        return self._back

    @property
    def bytes(self) -> int:
        """Kept by the mask, with its transpose."""
        if self.mask.layout == torch.strided:
            return self.mask.numel() * self.mask.itemsize
        entries = self.mask.values()
        return 2 * entries.numel() * (entries.itemsize + self.mask.col_indices().itemsize)


def csr(start: Tensor, column: Tensor, values: Tensor) -> Tensor:
    """A square sparse matrix; its rows end where the next ``start``."""
    size = len(start) - 1
    with warnings.catch_warnings():  # that they are in beta; this product of them has been tested
        warnings.filterwarnings("ignore", message="Sparse", category=UserWarning)
        return torch.sparse_csr_tensor(start, column, values, (size, size))


class _SparseProduct(torch.autograd.Function):
    @staticmethod
    def forward(squares: Tensor, windows: Windows) -> Tensor:
        return windows.mask @ squares

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Windows], output: Tensor) -> None:
        ctx.windows = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.windows.transposed(grads[0]), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return ctx.windows(tangents[0])

    @staticmethod
    def vmap(info: Any, in_dims: Any, squares: Tensor, windows: Windows) -> Any:
        columns = squares.movedim(in_dims[0], 1)
        return windows(columns.flatten(1)).reshape(-1, *columns.shape[1:]), 1
