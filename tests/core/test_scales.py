"""Scales are linear maps: against dense matrices."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Scale, left_broadcast, per_row
from fluvial.core.scales import Block, Scalar

B = 3
NOISE = KeyedNoise(2)


def normal(*shape: int, tag: str = "") -> Tensor:
    return NOISE.normal(torch.empty(shape, dtype=torch.float64), tag)


SCALES = {
    "scalar": Scalar(torch.tensor(-1.7).double()),
    "scalar, rows": Scalar(normal(B, tag="a")),
    "block": Block(normal(2, 2, tag="b")),
    "block, rows": Block(normal(B, 2, 2, tag="c")),
}
SHAPES = [(B, 2), (B, 2, 4), (B, 2, 2, 3)]


def dense(scale: Any, x: Tensor) -> Tensor:
    """(B, d, d) matrices of the map on flattened events."""
    size = math.prod(x.shape[1:])
    columns = [
        (scale @ unit.reshape(1, *x.shape[1:]).expand_as(x)).reshape(B, size)
        for unit in torch.eye(size, dtype=x.dtype)
    ]
    return torch.stack(columns, -1)


def assert_close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("key", SCALES)
def test_linear_map(key: str, shape: tuple[int, ...]) -> None:
    scale, x, y = SCALES[key], normal(*shape, tag="x"), normal(*shape, tag="y")
    assert isinstance(scale, Scale)
    assert (scale @ x).shape == x.shape
    matrix = dense(scale, x)
    assert_close((matrix @ x.reshape(B, -1, 1)).reshape(shape), scale @ x)
    assert_close(scale @ (2 * x - y), 2 * (scale @ x) - scale @ y)
    inner = ((scale @ x) * y).sum(), (x * (scale.T @ y)).sum()
    assert_close(*inner)
    assert_close(dense(scale.T, x), matrix.mT)
    assert_close(scale.solve(scale @ x), x)
    assert_close(scale @ scale.solve(x), x)
    assert_close(scale.T.solve(scale.T @ x), x)
    logdet = scale.logdet(x)
    assert logdet.shape == (B,)
    assert_close(logdet, torch.linalg.slogdet(matrix).logabsdet)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("scalar", "scalar, rows"),
        ("scalar, rows", "scalar, rows"),
        ("block", "block, rows"),
        ("block, rows", "block"),
        ("block", "block"),
    ],
)
def test_composition(a: str, b: str) -> None:
    one, two, x = SCALES[a], SCALES[b], normal(B, 2, 4, tag="x")
    assert_close((one @ two) @ x, one @ (two @ x))
    assert_close((one + two) @ x, one @ x + two @ x)
    assert_close((one - two) @ x, one @ x - two @ x)
    assert_close((one @ two).T @ x, two.T @ (one.T @ x))
    assert_close((one @ two).logdet(x), one.logdet(x) + two.logdet(x))


def test_values() -> None:
    x = normal(B, 2, 4, tag="x")
    rows = torch.tensor([2.0, -1.0, 0.5]).double()
    assert torch.equal(Scalar(rows) @ x, torch.stack([2 * x[0], -x[1], 0.5 * x[2]]))
    swap = Block(torch.tensor([[0.0, 1.0], [2.0, 0.0]]).double())
    assert torch.equal(swap @ x, torch.stack([x[:, 1], 2 * x[:, 0]], 1))
    mixed = torch.stack([torch.eye(2), torch.zeros(2, 2), 3 * torch.eye(2)]).double()
    assert torch.equal(Block(mixed) @ x, torch.stack([x[0], 0 * x[1], 3 * x[2]]))


def test_pseudo_inverse() -> None:
    x = normal(B, 2, 4, tag="x")
    zero = torch.tensor(0.0).double()
    assert torch.equal(Scalar(zero).solve(x), torch.zeros_like(x))
    assert (Scalar(zero).logdet(x) == -math.inf).all()
    some = Scalar(torch.tensor([0.0, 2.0, 0.0]).double()).solve(x)
    assert torch.equal(some, torch.stack([0 * x[0], x[1] / 2, 0 * x[2]]))
    for matrix in (
        torch.zeros(2, 2),
        torch.tensor([[1.0, 2.0], [2.0, 4.0]]),
        torch.diag(torch.tensor([0.0, 3.0])),
    ):
        block = Block(matrix.double())
        solved = block.solve(x)
        assert solved.isfinite().all() and (block.logdet(x) == -math.inf).all()
        assert_close(
            block @ block.solve(block @ x), block @ x
        )  # the conditions of Moore and Penrose
        assert_close(block.solve(block @ solved), solved)
        for product in (dense(block, x) @ torch.linalg.pinv(dense(block, x)),):
            assert_close(product, product.mT)
        assert_close((block @ solved * x).sum(), ((block @ solved) ** 2).sum())


def test_gradients_do_not_see_the_zero() -> None:
    value = torch.tensor([0.0, 2.0, 4.0], dtype=torch.float64, requires_grad=True)
    Scalar(value).solve(torch.ones(B, 2, dtype=torch.float64)).sum().backward()
    assert value.grad is not None and value.grad.tolist() == [0.0, -0.5, -0.125]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("key", SCALES)
def test_dtype_is_that_of_the_state(key: str, dtype: torch.dtype) -> None:
    scale, x = SCALES[key], normal(B, 2, 4, tag="x").to(dtype)
    for value in (scale @ x, scale.solve(x), scale.logdet(x), scale.T @ x):
        assert value.dtype == dtype


@pytest.mark.parametrize("shape", [(2, 3), (3,), (), (2, 2, 2, 2), (5, 1, 2)])
def test_bad_matrices(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="matrix must have shape"):
        Block(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 1, 2), (2,)])
def test_block_refuses_other_states(shape: tuple[int, ...]) -> None:
    block = Block(torch.eye(2))
    for act in (block.__matmul__, block.solve, block.logdet):
        with pytest.raises(ValueError, match=r"acts on \(batch, 2, \*rest\)"):
            act(torch.zeros(shape))


def test_empty_batch() -> None:
    for key in ("scalar", "block"):
        x = torch.empty(0, 2, 4, dtype=torch.float64)
        assert (SCALES[key] @ x).shape == SCALES[key].solve(x).shape == x.shape
        assert SCALES[key].logdet(x).shape == (0,)


@pytest.mark.parametrize("key", ["scalar, rows", "block, rows"])
def test_rows_must_match(key: str) -> None:
    with pytest.raises(RuntimeError):
        SCALES[key] @ torch.zeros(B + 1, 2, 4, dtype=torch.float64)


def test_broadcasting_of_times() -> None:
    x = torch.zeros(3, 2, 4)
    scalar, rows = torch.tensor(0.5).double(), torch.arange(3.0)
    assert left_broadcast(scalar, x).shape == ()
    assert left_broadcast(rows, x).shape == (3, 1, 1)
    assert left_broadcast(rows, rows).shape == (3,)
    assert per_row(scalar, x).shape == (3,) and per_row(scalar, x).dtype == torch.float32
    assert torch.equal(per_row(rows, x), rows)
