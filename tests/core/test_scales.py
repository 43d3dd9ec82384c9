"""Scales are linear maps: against dense matrices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.fft
import torch
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.core.operators.dense import Dense
from fluvial.core.operators.diagonal import Mask
from fluvial.core.protocols import Scale, left_broadcast, per_row
from fluvial.core.scales import (
    Block,
    Cosine,
    Diagonal,
    Fourier,
    Scalar,
    Sine,
    Spectral,
    Split,
    mix,
    project,
)

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


# The kinds with coefficients of their own for coordinates, modes, and what an operator measures

EVENT = (2, 3, 4)
KERNEL = torch.zeros(3, 4, dtype=torch.float64)  # of no symmetry, so its transform is complex
KERNEL[0, :3], KERNEL[1, 0] = torch.tensor([1.0, 0.5, -0.2]), 0.3
MASK = Mask(torch.tensor([[True, False, True, False]]).reshape(1, 1, 1, 4), EVENT)
WIDE = Dense(normal(B, 7, 24, tag="wide"), EVENT)
KINDS = {
    "diagonal": Diagonal(normal(1, *EVENT, tag="d")),
    "diagonal, rows": Diagonal(normal(B, *EVENT, tag="e")),
    "diagonal, channels": Diagonal(normal(1, 2, 1, 1, tag="f")),
    "cosine": Spectral(Cosine((3, 4)), normal(1, *EVENT, tag="g")),
    "sine, rows": Spectral(Sine((3, 4)), normal(B, 1, 3, 4, tag="h")),
    "cosine of signals": Spectral(Cosine((4,)), normal(1, *EVENT, tag="i")),
    "fourier": Spectral(Fourier((3, 4)), 1 + Fourier((3, 4)).laplacian().expand(1, 1, 3, 3)),
    "fourier, complex": Spectral(Fourier((3, 4)), torch.fft.rfft2(KERNEL).reshape(1, 1, 3, 3)),
    "split, mask": Split(MASK, torch.tensor([1.0, -0.3]).double()),
    "split, mask, rows": Split(MASK, normal(B, 2, tag="j")),
    "split, dense, rows": Split(WIDE, normal(B, 2, tag="k")),
}
PARTNERS = {  # of the same kind, and where there is one the same basis or operator
    "diagonal": "diagonal, rows",
    "diagonal, rows": "diagonal, channels",
    "cosine": "cosine",
    "sine, rows": "sine, rows",
    "fourier": "fourier, complex",
    "fourier, complex": "fourier, complex",
    "split, mask": "split, mask, rows",
    "split, dense, rows": "split, dense, rows",
}
X, Y = normal(B, *EVENT, tag="x"), normal(B, *EVENT, tag="y")


@pytest.mark.parametrize("key", KINDS)
def test_kinds_are_linear_maps(key: str) -> None:
    scale = KINDS[key]
    assert isinstance(scale, Scale)
    matrix = dense(scale, X)
    assert_close((matrix @ X.reshape(B, -1, 1)).reshape(X.shape), scale @ X)
    assert_close(((scale @ X) * Y).sum(), (X * (scale.T @ Y)).sum())
    assert_close(dense(scale.T, X), matrix.mT)
    assert_close(scale.solve(scale @ X), X)
    assert_close(scale.inverse() @ X, scale.solve(X))
    assert_close(scale.logdet(X), torch.linalg.slogdet(matrix).logabsdet)
    assert_close(dense(-2.0 * scale, X), -2 * matrix)
    assert_close(dense(1 - scale, X), torch.eye(24).double() - matrix)
    assert (scale @ X.float()).dtype == scale.logdet(X.float()).dtype == torch.float32


@pytest.mark.parametrize("key", PARTNERS)
def test_kinds_compose(key: str) -> None:
    a, b = KINDS[key], KINDS[PARTNERS[key]]
    one, two = dense(a, X), dense(b, X)
    assert_close(dense(a @ b, X), one @ two)
    assert_close(dense(a + b, X), one + two)
    assert_close(dense(a - b, X), one - two)
    assert_close(mix((a, X), (b, Y), (a, Y)), a @ X + b @ Y + a @ Y)


@pytest.mark.parametrize("number", ["scalar", "scalar, rows"])
@pytest.mark.parametrize("key", KINDS)
def test_a_scalar_goes_with_every_kind(key: str, number: str) -> None:
    a, c = KINDS[key], SCALES[number]
    matrix, times = dense(a, X), dense(c, X)
    for product in (a @ c, c @ a):
        assert type(product) is type(a)
        assert_close(dense(product, X), matrix @ times)
    for total in (a + c, c + a):
        assert_close(dense(total, X), matrix + times)
    assert_close(dense(c - a, X), times - matrix)
    assert_close(mix((c, X), (a, Y), (c, Y)), c @ X + a @ Y + c @ Y)


@pytest.mark.parametrize("number", ["scalar", "scalar, rows"])
@pytest.mark.parametrize("key", ["block", "block, rows"])
def test_a_scalar_goes_with_a_block(key: str, number: str) -> None:
    a, c, x = SCALES[key], SCALES[number], normal(B, 2, 3, tag="x")
    matrix, times = dense(a, x), dense(c, x)
    assert_close(dense(a @ c, x), matrix @ times)
    assert_close(dense(c @ a, x), times @ matrix)
    assert_close(dense(a + c, x), matrix + times)
    assert_close(dense(c - a, x), times - matrix)
    assert_close(dense(1 - a, x), torch.eye(6).double() - matrix)
    y = normal(B, 2, 3, tag="y")
    assert_close(mix((a, x), (SCALES["block"], y), (c, y)), a @ x + SCALES["block"] @ y + c @ y)


@pytest.mark.parametrize("key", [*KINDS, "block", "block, rows"])
def test_cholesky(key: str) -> None:
    """S S^T is a covariance, and the square of its root. Of one not quite a covariance, its part
    without negative eigenvalues."""
    scale = {**KINDS, **SCALES}[key]
    x = normal(B, 2, 3, tag="x") if key.startswith("block") else X
    cov: Any = scale @ scale.T
    if key == "fourier, complex":
        with pytest.raises(ValueError, match="no real root"):
            cov.cholesky()
        return
    root = cov.cholesky()
    assert_close(dense(root @ root.T, x), dense(cov, x))
    off = (cov - cov.identity() @ cov - 1e-3 * cov.identity()).cholesky()
    assert dense(off, x).abs().max() == 0


def test_cholesky_of_a_degenerate_block() -> None:
    for matrix in ([[0.0, 0.0], [0.0, 2.0]], [[4.0, 2.0], [2.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]):
        for block in (Block(torch.tensor(matrix).double()), Block(np.array(matrix))):
            root = block.cholesky()
            assert root.matrix[0, 1] == 0
            assert_close((root @ root.T).matrix, block.matrix)


@pytest.mark.parametrize("batch", [(), (B,)])
def test_blocks_of_arrays_are_those_of_tensors(batch: tuple[int, ...]) -> None:
    a, b = normal(*(batch or (1,)), 2, 2, tag="a"), normal(2, 2, tag="b")
    a = a if batch else a[0]
    here, there = (Block(a.numpy()), Block(b.numpy())), (Block(a), Block(b))
    for left, right in ((here[0], here[1]), (here[0], there[1]), (there[0], here[1])):
        assert_close((left @ right).matrix, a @ b)
        assert_close((left - right).matrix, a - b)
    cov = here[0] @ here[0].T
    assert isinstance(cov.coefficients, np.ndarray)
    assert_close(here[0].T.matrix, a.mT)
    assert_close(here[0].inverse().matrix, there[0].inverse().matrix)
    assert_close(cov.cholesky().matrix, (there[0] @ there[0].T).cholesky().matrix)
    assert_close((1 - here[0]).matrix, torch.eye(2).double() - a)
    x = normal(B, 2, 3, tag="x")
    assert_close(here[0] @ x, there[0] @ x)
    assert (here[0] @ x.float()).dtype == torch.float32


def test_split() -> None:
    split = Split(MASK, torch.tensor([1.0, 0.0]).double())
    assert torch.equal(split @ X, project(MASK, X)) and torch.equal(project(MASK, X), MASK.A(X))
    inside = Split(WIDE, torch.tensor([1.0, 0.7]).double())
    assert_close(WIDE.A(inside @ X), WIDE.A(X))  # what is measured stays
    singular = Split(WIDE, torch.tensor([2.0, 0.0]).double())
    assert_close(singular.solve(singular @ X), WIDE.project(X))
    assert (singular.logdet(X) == -math.inf).all()
    whole = Split(Mask(torch.ones(1, *EVENT, dtype=torch.bool)), torch.tensor([2.0, 0.0]).double())
    assert_close(whole.logdet(X), torch.full((B,), 24 * math.log(2), dtype=torch.float64))

    class Stub:
        def A(self, x: Tensor) -> Tensor:
            return x[..., :1]

        def A_adjoint(self, y: Tensor) -> Tensor:
            return torch.cat([y, torch.zeros(*y.shape[:-1], 3).to(y)], -1)

        A_dagger = A_adjoint

    stub = Split(Stub(), torch.tensor([3.0, 2.0]).double())
    assert_close(stub @ X, torch.cat([3 * X[..., :1], 2 * X[..., 1:]], -1))
    with pytest.raises(TypeError, match="Stub does not know its rank"):
        stub.logdet(X)


@pytest.mark.parametrize("shape", [(1,), (5,), (8,), (9, 4)])
def test_bases(shape: tuple[int, ...]) -> None:
    x = normal(B, 2, *shape, tag="basis")
    dims = tuple(range(-len(shape), 0))
    for basis, peer in ((Cosine(shape), ("dctn", 2)), (Sine(shape), ("dstn", 1))):
        want = getattr(scipy.fft, peer[0])(x.numpy(), type=peer[1], axes=dims, norm="ortho")
        assert_close(basis.forward(x), torch.from_numpy(want))
        assert_close(basis.inverse(basis.forward(x)), x)
        assert basis.forward(x.float()).dtype == torch.float32
    basis = Fourier(shape)
    modes = basis.forward(x)
    assert_close(modes, torch.from_numpy(scipy.fft.rfftn(x.numpy(), axes=dims, norm="ortho")))
    assert_close(basis.inverse(modes), x)
    size = (modes.abs().square() * basis.weights).flatten(1).sum(1)
    assert_close(size, x.square().flatten(1).sum(1))


@pytest.mark.parametrize("kind", [Fourier, Cosine, Sine])
def test_laplacian(kind: Any) -> None:
    """Smooth modes are eigenfunctions of second differences, up to their error of order two."""
    errors = []
    for n in (32, 64):
        basis = kind((n,))
        step = {Fourier: 1 / n, Cosine: 1 / n, Sine: 1 / (n + 1)}[kind]
        unit = torch.zeros(1, n // 2 + 1 if kind is Fourier else n, dtype=torch.float64)
        unit[0, 3] = 1
        wave = basis.inverse(unit.to(torch.complex128) if kind is Fourier else unit)[0]
        second = -(wave[2:] - 2 * wave[1:-1] + wave[:-2]) / step**2
        eigenvalue = basis.laplacian()[3]
        errors.append(float((second / eigenvalue - wave[1:-1]).norm() / wave.norm()))
    assert 1.9 < math.log2(errors[0] / errors[1]) < 2.1
    grid = kind((5, 4)).laplacian()
    lines = kind((5,)).laplacian(), kind((4,)).laplacian()
    first = grid[:, 0] - grid[0, 0]
    assert_close(grid, grid[:, :1] + grid[:1] - grid[0, 0])
    if kind is not Fourier:
        assert_close(first, lines[0] - lines[0][0])
    assert_close(grid[0] - grid[0, 0], lines[1] - lines[1][0])


def test_kinds_that_do_not_go_together() -> None:
    diagonal, cosine, sine = KINDS["diagonal"], KINDS["cosine"], KINDS["sine, rows"]
    for act in (diagonal.__matmul__, diagonal.__add__):
        with pytest.raises(TypeError, match="Diagonal goes with its own kind and with Scalar"):
            act(cosine)
    for pair in ((cosine, sine), (sine, cosine)):
        with pytest.raises(ValueError, match="must share a basis"):
            pair[0] @ pair[1]
        with pytest.raises(ValueError, match="must share a basis"):
            mix((pair[0], X), (pair[1], X))
    with pytest.raises(ValueError, match="must share an operator"):
        KINDS["split, mask"] + KINDS["split, dense, rows"]


@pytest.mark.parametrize(
    ("scale", "match"),
    [
        (Diagonal(torch.ones(24)), "values .24,. do not fit a diagonal scale"),
        (Diagonal(torch.ones(2, 2, 3, 4)), "do not fit"),
        (Diagonal(torch.ones(1, 2, 3, 5)), "do not fit"),
        (Spectral(Cosine((3, 4)), torch.ones(3, 4)), "do not fit a spectral scale"),
        (Spectral(Cosine((4, 4)), torch.ones(1, 2, 4, 4)), "the basis is one of .4, 4., got"),
    ],
)
def test_states_that_do_not_fit(scale: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        scale @ X


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (1, 2, 2)])
def test_bad_values_of_a_split(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"values must have shape \(2,\) or \(batch, 2\)"):
        Split(MASK, torch.ones(shape))


@pytest.mark.parametrize("key", KINDS)
def test_gradients_flow_through_kinds(key: str) -> None:
    scale, v = KINDS[key], Y
    out, tangent = torch.func.jvp(scale.apply, (X,), (v,))
    assert_close(out, scale @ X)
    assert_close(tangent, scale @ v)
    (gradient,) = torch.func.vjp(scale.apply, X)[1](v)
    assert_close(gradient, scale.T @ v)
