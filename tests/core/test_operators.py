"""Operators: against small matrices, the conditions of Moore and Penrose, and other libraries."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from scipy import ndimage
from skimage.data import shepp_logan_phantom
from skimage.transform import radon, resize
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.core.operators.base import Operator, Product, Sum, check_operator
from fluvial.core.operators.blur import Blur, gaussian_kernel, motion_kernel
from fluvial.core.operators.dense import Dense, dense
from fluvial.core.operators.diagonal import Diagonal, Mask, box_mask, random_mask
from fluvial.core.operators.downsample import AveragePool, Bicubic
from fluvial.core.operators.fourier import SubsampledFourier, columns_mask
from fluvial.core.operators.iterative import conjugate_gradients
from fluvial.core.operators.radon import Radon
from fluvial.core.protocols import LinearOperator
from fluvial.core.steering.inverse import DDNM

NOISE = KeyedNoise(5)
B = 3
IMAGE = (2, 8, 8)


def normal(*shape: int, tag: str = "") -> Tensor:
    return NOISE.normal(torch.empty(shape, dtype=torch.float64), tag)


def assert_close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


class Stub:
    """Differences of neighbours, by the three methods alone."""

    matrix = torch.tensor([[1.0, -1.0, 0.0, 0.0], [0.0, 0.0, 2.0, -2.0]], dtype=torch.float64)

    def A(self, x: Tensor) -> Tensor:
        return x @ self.matrix.mT.to(x)

    def A_adjoint(self, y: Tensor) -> Tensor:
        return y @ self.matrix.to(y)

    def A_dagger(self, y: Tensor) -> Tensor:
        return y @ torch.linalg.pinv(self.matrix).mT.to(y)


# What a row's own operator is made of, (B, ...), and how
ROWS: dict[str, tuple[Callable[[Tensor], Operator], Tensor, tuple[int, ...]]] = {
    "dense": (Dense, normal(B, 3, 5, tag="m"), (5,)),
    "diagonal": (lambda v: Diagonal(v, IMAGE, 0.3), normal(B, 1, 8, 8, tag="d"), IMAGE),
    "mask": (
        lambda seen: Mask(seen, IMAGE),
        random_mask(torch.empty(B, 1, 8, 8), 0.4, NOISE),
        IMAGE,
    ),
    "blur": (
        lambda kernel: Blur(kernel, IMAGE, 0.1),
        motion_kernel(torch.tensor([2, 3, 5]), torch.tensor([0.0, 0.4, 1.5])),
        IMAGE,
    ),
    "fourier": (
        lambda kept: SubsampledFourier(kept, IMAGE),
        columns_mask((8, 8), torch.tensor([[0, 1], [2, 3], [4, 0]])),
        IMAGE,
    ),
    "radon": (
        lambda angles: Radon(angles, IMAGE, 1e-10),
        torch.linspace(0, 3.1, 12).reshape(B, 4),
        IMAGE,
    ),
}
ODD = (2, 5, 7)
BLUR = Blur(gaussian_kernel(0.6), IMAGE)
CASES: dict[str, tuple[Operator, tuple[int, ...]]] = {
    "dense": (Dense(normal(3, 12, tag="wide"), (2, 6), (3, 1)), (2, 6)),
    "dense, tall": (Dense(normal(9, 4, tag="tall")), (4,)),
    "dense, of rank 2": (Dense(normal(5, 2, tag="a") @ normal(2, 6, tag="b")), (6,)),
    "dense, truncated": (Dense(normal(6, 6, tag="square"), cutoff=0.4), (6,)),
    "diagonal": (Diagonal(torch.tensor([[2.0, 0.0, -0.5]])), (3,)),
    "diagonal, truncated": (Diagonal(torch.tensor([[2.0, 0.1, -0.5]]), cutoff=0.1), (3,)),
    "box": (Mask(box_mask(IMAGE, (3, 4), torch.tensor([[1, 2]]))), IMAGE),
    "blur": (BLUR, IMAGE),
    "blur, exact": (Blur(gaussian_kernel(0.6), IMAGE, 0.0), IMAGE),
    "blur, singular": (Blur(torch.full((1, 2, 2), 0.25), IMAGE, 0.0), IMAGE),
    "blur, anisotropic": (
        Blur(gaussian_kernel(torch.tensor([[0.9, 0.4]]), angle=0.5), (2, 9, 11), 0.3),
        (2, 9, 11),
    ),
    "blur, signal": (Blur(gaussian_kernel(0.8, 1), (2, 9), 0.02), (2, 9)),
    "pool": (AveragePool((2, 4), IMAGE), IMAGE),
    "pool, signal": (AveragePool((3,), (9,)), (9,)),
    "pool, volume": (AveragePool((1, 2, 2), (2, 4, 4)), (2, 4, 4)),
    "bicubic": (Bicubic(2, IMAGE), IMAGE),
    "bicubic, oblong": (Bicubic(4, (8, 12)), (8, 12)),
    "fourier": (
        SubsampledFourier(columns_mask((8, 8), torch.tensor([[0, 2, 4]])), IMAGE),
        IMAGE,
    ),
    "fourier, odd": (SubsampledFourier(columns_mask((5, 7), torch.tensor([[0, 3]])), ODD), ODD),
    "fourier, signal": (
        SubsampledFourier(torch.tensor([[True, False, True, True]]), (2, 6)),
        (2, 6),
    ),
    "radon": (Radon(torch.linspace(0, 3, 5), IMAGE, 1e-10), IMAGE),
    "product": (Product(AveragePool((2, 2), IMAGE), BLUR, 1e-10), IMAGE),
    "product of rows": (Product(ROWS["mask"][0](ROWS["mask"][1]), BLUR, 1e-10), IMAGE),
    "sum": (Sum(BLUR, ROWS["mask"][0](ROWS["mask"][1]), 1e-10), IMAGE),
    "sum of stubs": (Sum(Stub(), Stub(), 1e-10), (4,)),
    **{f"{key}, rows": (make(of), shape) for key, (make, of, shape) in ROWS.items()},
}


def states(key: str) -> tuple[Operator, Tensor, Tensor]:
    """(operator, x, y)."""
    operator, shape = CASES[key]
    x = normal(B, *shape, tag="x")
    return operator, x, NOISE.normal(operator.A(x), "y")


def tolerance(operator: Operator) -> float:
    """Of what the pseudo-inverse gives: the square of the condition stands before the residual."""
    return 1e-6 if operator.pseudo_inverse == "iterative" else 1e-10


def inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).flatten(1).sum(1)


@pytest.mark.parametrize("key", CASES)
def test_adjoint(key: str) -> None:
    operator, x, y = states(key)
    assert isinstance(operator, LinearOperator)
    assert_close(inner(operator.A(x), y), inner(x, operator.A_adjoint(y)))
    z = normal(*x.shape, tag="z")
    assert_close(operator.A(2 * x - z), 2 * operator.A(x) - operator.A(z), 1e-11)


@pytest.mark.parametrize("key", CASES)
def test_pseudo_inverse(key: str) -> None:
    """The conditions of Moore and Penrose; of a truncated one, A A^+ A = A where it was kept."""
    operator, x, y = states(key)
    A, dagger, close = operator.A, operator.A_dagger, tolerance(operator)
    z, w = normal(*x.shape, tag="z"), NOISE.normal(y, "w")
    kept = operator.project(x) if operator.pseudo_inverse == "truncated" else x
    assert_close(A(dagger(A(kept))), A(kept), close)
    assert_close(dagger(A(dagger(y))), dagger(y), close)
    assert_close(inner(A(dagger(y)), w), inner(y, A(dagger(w))), close)
    assert_close(inner(dagger(A(x)), z), inner(x, dagger(A(z))), close)
    assert_close(operator.project(x), dagger(A(x)), close)
    check_operator(operator, x, 10 * close)


@pytest.mark.parametrize("key", CASES)
def test_what_a_pseudo_inverse_says_of_itself(key: str) -> None:
    operator = CASES[key][0]
    match operator.pseudo_inverse:
        case "exact":
            assert operator.cutoff == operator.tolerance == 0
        case "truncated":
            assert operator.cutoff > 0 and operator.tolerance == 0
        case "iterative":
            assert operator.tolerance > 0 and operator.cutoff == 0 and operator.iterations > 0
    if "truncated" in key or "anisotropic" in key:
        assert operator.pseudo_inverse == "truncated"
        assert operator.rank is not None and operator.spectrum is not None
        assert (operator.rank < operator.spectrum.shape[-1]).all()  # something was cut off


@pytest.mark.parametrize("key", CASES)
def test_agreement_with_a_matrix(key: str) -> None:
    operator, x, y = states(key)
    matrix = dense(operator, x.shape[1:], operator.cutoff, operator.rows)
    assert matrix.out_shape == y.shape[1:]
    assert operator.out_shape in (matrix.out_shape, None)
    assert_close(operator.A(x), matrix.A(x))
    assert_close(operator.A_adjoint(y), matrix.A_adjoint(y))
    assert_close(operator.A_dagger(y), matrix.A_dagger(y), tolerance(operator))
    spectrum = operator.spectrum
    if spectrum is None:
        assert operator.rank is None and operator.pseudo_inverse == "iterative"
        return
    want = matrix.spectrum
    values = spectrum.sort(-1, descending=True).values
    values = F.pad(values, (0, max(0, want.shape[-1] - values.shape[-1])))
    assert (values[:, want.shape[-1] :] < 1e-12).all()
    assert_close(values[:, : want.shape[-1]], want, 1e-10)
    assert operator.rank is not None and matrix.rank is not None
    assert torch.equal(operator.rank, matrix.rank)


@pytest.mark.parametrize("key", CASES)
def test_batches_are_their_rows(key: str) -> None:
    operator, x, y = states(key)
    if operator.rows != 1:
        with pytest.raises(ValueError, match=rf"must be \({B}, "):
            operator.A(x[:1])
        return
    for act, z in ((operator.A, x), (operator.A_adjoint, y), (operator.A_dagger, y)):
        rows = [act(row.unsqueeze(0)) for row in z]
        assert_close(act(z), torch.cat(rows), 1e-11)


@pytest.mark.parametrize("key", ROWS)
def test_rows_have_operators_of_their_own(key: str) -> None:
    make, of, shape = ROWS[key]
    together, x = make(of), normal(B, *shape, tag="x")
    y = NOISE.normal(together.A(x), "y")
    assert together.rows == B
    for row in range(B):
        own, this = make(of[row : row + 1]), slice(row, row + 1)
        assert own.rows == 1
        assert_close(own.A(x[this]), together.A(x)[this])
        assert_close(own.A_adjoint(y[this]), together.A_adjoint(y)[this])
        assert_close(own.A_dagger(y[this]), together.A_dagger(y)[this], tolerance(own))
        assert_close(own.project(x[this]), together.project(x)[this], tolerance(own))


@pytest.mark.parametrize("key", CASES)
def test_dtype_follows_the_input(key: str) -> None:
    operator, x, y = states(key)
    loose = 1e-3 if operator.pseudo_inverse == "iterative" else 1e-4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # float32 is not good for 1e-10
        for act, z in ((operator.A, x), (operator.A_adjoint, y), (operator.A_dagger, y)):
            low = act(z.float())
            assert low.dtype == torch.float32
            if act != operator.A_dagger or not key.startswith(("product", "radon", "sum")):
                torch.testing.assert_close(low, act(z).float(), rtol=loose, atol=loose)
    assert operator.A(x).dtype == torch.float64  # still


@pytest.mark.parametrize("key", CASES)
def test_gradients(key: str) -> None:
    """Backwards A^T and its like, forwards the map itself, and both through what was converted."""
    operator, x, y = states(key)
    pairs = [
        (operator.A, operator.A_adjoint, x, y),
        (operator.A_adjoint, operator.A, y, x),
        (operator.project, operator.project, x, normal(*x.shape, tag="z")),
    ]
    for act, back, z, w in pairs:
        out, tangent = torch.func.jvp(act, (z,), (normal(*z.shape, tag="t"),))
        assert_close(tangent, act(normal(*z.shape, tag="t")), tolerance(operator))
        leaf = z.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(act(leaf), leaf, w)
        assert_close(gradient, back(w), tolerance(operator))
        assert_close(out, act(z), tolerance(operator))
    # the pseudo-inverse: <A^+ y, z> has the gradient (A^+)^T z
    leaf, z = y.clone().requires_grad_(), normal(*x.shape, tag="z")
    (gradient,) = torch.autograd.grad(operator.A_dagger(leaf), leaf, z)
    assert_close(inner(gradient, y), inner(operator.A_dagger(y), z), tolerance(operator))
    _, tangent = torch.func.jvp(operator.A_dagger, (y,), (2 * y,))
    assert_close(tangent, 2 * operator.A_dagger(y), tolerance(operator))
    low = x.float()
    _, tangent = torch.func.jvp(operator.A, (low,), (low,))
    assert_close(operator.A(low), tangent, 1e-5)  # nothing of the transformation was kept


def test_products_and_sums() -> None:
    one, two = normal(4, 6, tag="one"), normal(6, 5, tag="two")
    product = Dense(one) @ Dense(two)
    x, y = normal(B, 5, tag="x"), normal(B, 4, tag="y")
    assert isinstance(product, Product) and product.in_shape == (5,) and product.out_shape == (4,)
    assert_close(product.A(x), x @ (one @ two).mT)
    assert_close(product.A_adjoint(y), y @ one @ two)
    three = normal(6, 5, tag="three")
    total = Dense(two) + Dense(three)
    assert isinstance(total, Sum)
    assert_close(total.A(x), x @ (two + three).mT)
    chain = Dense(one) @ (Dense(two) + Dense(three))
    assert_close(chain.A(x), x @ (one @ (two + three)).mT)
    stub = Dense(normal(3, 2, tag="left")) @ Stub()
    assert stub.in_shape is None
    x = normal(B, 4, tag="stub")
    assert_close(stub.A(x), x @ (normal(3, 2, tag="left") @ Stub.matrix).mT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_operator(stub, x, 1e-5)


def test_any_object_serves() -> None:
    assert isinstance(Stub(), LinearOperator) and not isinstance(object(), LinearOperator)
    x = normal(B, 4, tag="x")
    check_operator(Stub(), x)
    y = Stub().A(normal(1, 4, tag="truth"))
    for operator in (Stub(), dense(Stub(), (4,))):
        assert_close(operator.A(DDNM(operator, y).end(x, None)), y.expand(B, 2))


def test_operators_guide() -> None:
    """Every exact or truncated one is a measurement that a sample can be made to agree with."""
    for key in ("fourier", "pool", "bicubic", "box", "blur, exact", "dense"):
        operator, x, _ = states(key)
        y = operator.A(normal(1, *x.shape[1:], tag="truth"))
        out = DDNM(operator, y).end(x, None)
        assert_close(operator.A(out), y.expand(B, *y.shape[1:]), 1e-9)


def test_check_operator() -> None:
    class Wrong(Stub):
        pass

    x = normal(B, 4, tag="x")
    wrong = Wrong()
    wrong.A_adjoint = lambda y: 2 * Stub().A_adjoint(y)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="A_adjoint is not the adjoint of A of Wrong: off by"):
        check_operator(wrong, x)
    wrong = Wrong()
    wrong.A_dagger = wrong.A_adjoint  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="A_dagger A A_dagger is not A_dagger of Wrong"):
        check_operator(wrong, x)
    oblique = torch.linalg.pinv(Stub.matrix) + torch.tensor([[1.0, 0], [1.0, 0], [0, 0], [0, 0]])
    wrong = Wrong()
    wrong.A_dagger = lambda y: y @ oblique.mT  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="A_dagger A is no orthogonal projector"):
        check_operator(wrong, x)


def test_check_operator_asks_of_an_iterative_one_what_it_promises() -> None:
    x = normal(2, 1, 16, 16, tag="x")
    radon = Radon(torch.linspace(0, 3, 12), (1, 16, 16))
    check_operator(radon, x)
    check_operator(radon @ Mask(x[:1] > 0), x)
    radon.iterations = 2
    with (
        pytest.warns(RuntimeWarning, match="after 2 iterations"),
        pytest.raises(ValueError, match=r"A_dagger does not solve A\^T A x = A\^T y of Radon"),
    ):
        check_operator(radon, x)


@pytest.mark.parametrize("key", CASES)
def test_no_rows_and_half_precision(key: str) -> None:
    operator, x, y = states(key)
    if operator.rows == 1 and operator.in_shape and operator.out_shape:
        assert operator.A(x[:0]).shape == (0, *operator.out_shape)
        assert operator.A_adjoint(y[:0]).shape == (0, *operator.in_shape)
        assert operator.A_dagger(y[:0]).shape == operator.project(x[:0]).shape == x[:0].shape
    for dtype, close in ((torch.float16, 2e-2), (torch.bfloat16, 1e-1)):
        found, adjoint = operator.A(x.to(dtype)), operator.A_adjoint(y.to(dtype))
        assert found.dtype == adjoint.dtype == dtype
        assert_close(found.double(), operator.A(x), close)
        assert_close(adjoint.double(), operator.A_adjoint(y), close)


# Kernels and masks


def test_gaussian_kernels() -> None:
    """Those of scipy, and of the covariance that was asked for."""
    image = normal(1, 19, 17, tag="image")
    for std in ((1.0, 1.0), (2.0, 0.7)):
        kernel = gaussian_kernel(torch.tensor([std], dtype=torch.float64))
        radius = [k // 2 for k in kernel.shape[1:]]
        theirs = ndimage.gaussian_filter(image[0].numpy(), std, mode="wrap", radius=radius)
        assert_close(Blur(kernel, (19, 17)).A(image)[0], torch.from_numpy(theirs))
    signal = normal(1, 25, tag="signal")
    ours = Blur(gaussian_kernel(1.5, 1), (25,)).A(signal)
    assert_close(ours[0], torch.from_numpy(ndimage.gaussian_filter1d(signal[0], 1.5, mode="wrap")))

    std, angle = torch.tensor([[2.0, 1.0], [3.0, 1.5]]), torch.tensor([0.4, -1.1])
    kernel = gaussian_kernel(std, angle=angle)
    axis = torch.arange(kernel.shape[1]).double() - kernel.shape[1] // 2
    places = torch.stack(torch.meshgrid(axis, axis, indexing="ij"))
    cov = torch.einsum("bhw,ihw,jhw->bij", kernel, places, places)
    turn = torch.stack([angle.cos(), angle.sin(), -angle.sin(), angle.cos()], 1).unflatten(
        1, (2, 2)
    )
    turn = turn.double()
    want = turn @ torch.diag_embed(std.double().square()) @ turn.mT
    torch.testing.assert_close(cov, want, rtol=2e-3, atol=2e-3)
    assert_close(kernel.sum((1, 2)), torch.ones(2).double())


def test_motion_kernels() -> None:
    mean = motion_kernel(9)
    assert mean.shape == (1, 11, 11)
    assert_close(mean[0, 5, 1:-1], torch.full((9,), 1 / 9, dtype=torch.float64))
    assert_close(mean.sum(), torch.tensor(1.0).double())
    assert_close(mean[0, 5].sum(), torch.tensor(1.0).double())
    down = motion_kernel(9, math.pi / 2)
    assert_close(down, mean.mT)
    slanted = motion_kernel(torch.tensor([3, 9, 6]), torch.tensor([0.3, 0.6, -0.6]))
    assert_close(slanted.sum((1, 2)), torch.ones(3).double())
    assert_close(slanted, slanted.flip((1, 2)))  # in the middle
    axis = torch.arange(11).double() - 5
    along = torch.einsum("bhw,h,w->b", slanted, axis, axis)
    assert along[0] > 0 and along[1] > 0 and along[2] < 0  # down and to the right is positive
    assert_close(motion_kernel(1), F.pad(torch.ones(1, 1, 1).double(), (1, 1, 1, 1)))


def test_blurs_are_convolutions() -> None:
    kernel, x = normal(1, 3, 5, tag="kernel"), normal(B, 2, 8, 9, tag="x")
    ours = Blur(kernel, (2, 8, 9)).A(x)
    padded = F.pad(x, (2, 2, 1, 1), mode="circular")
    theirs = F.conv2d(padded, kernel.flip(1, 2).expand(2, 1, 3, 5), groups=2)
    assert_close(ours, theirs)
    even = Blur(torch.tensor([[1.0, 2.0]]), (4,)).A(torch.tensor([[1.0, 0, 0, 0]]).double())
    assert_close(even, torch.tensor([[2.0, 0, 0, 1.0]]).double())  # the middle of 2 is the second


def test_masks() -> None:
    like = torch.empty(50, 1, 6, 5)
    seen = random_mask(like, 0.3, NOISE)
    assert seen.shape == like.shape and (seen.flatten(1).sum(1) == 9).all()
    assert torch.equal(seen[3:5], random_mask(like[3:5], 0.3, NOISE.rows(torch.arange(3, 5))))
    assert (random_mask(like, 0.001, NOISE).flatten(1).sum(1) == 1).all()
    assert random_mask(like, 1.0, NOISE).all()
    # each place is as likely: binomial, with a chance of 1e-6 of a false alarm
    share = random_mask(torch.empty(4000, 30), 0.3, NOISE).double().mean(0)
    assert ((share - 0.3).abs() < 5.5 * math.sqrt(0.21 / 4000)).all()

    box = box_mask((2, 4, 5), (2, 3), torch.tensor([[0, 1], [2, 2]]))
    assert box.shape == (2, 2, 4, 5) and ((~box).flatten(1).sum(1) == 12).all()
    assert not box[0, :, :2, 1:4].any() and not box[1, :, 2:, 2:].any()
    x = normal(2, 2, 4, 5, tag="x")
    assert torch.equal(Mask(box).A(x), x.masked_fill(~box, 0.0))


# Downsampling


def test_pools_are_those_of_torch() -> None:
    x = normal(B, *IMAGE, tag="x")
    pool = AveragePool((2, 2), IMAGE)
    assert_close(pool.A(x), F.avg_pool2d(x, 2))
    y = pool.A(x)
    assert_close(pool.A_dagger(y), 4 * pool.A_adjoint(y))
    assert_close(pool.A_dagger(y), F.interpolate(y, scale_factor=2, mode="nearest"))
    noise = dense(pool, IMAGE).inverse[0]
    want = torch.zeros(128, 128, dtype=torch.float64)
    blocks = torch.arange(128).reshape(IMAGE) % 8 // 2 + torch.arange(128).reshape(IMAGE) // 16 * 4
    want[blocks.flatten()[:, None] == blocks.flatten()] = 1.0  # A^+ A^+T: 1 within a block
    assert_close(noise @ noise.mT, want)


def test_bicubic_is_that_of_torch_and_pillow() -> None:
    for factor, shape in ((2, (16, 12)), (4, (16, 12)), (3, (9, 15))):
        x = normal(1, *shape, tag="x")
        ours = Bicubic(factor, shape).A(x)[0]
        size = [n // factor for n in shape]
        theirs = F.interpolate(x[None], size, mode="bicubic", antialias=True)[0, 0]
        assert_close(ours, theirs)
        image = Image.fromarray(x[0].float().numpy())
        small = np.array(image.resize(size[::-1], Image.Resampling.BICUBIC))
        torch.testing.assert_close(ours.float(), torch.from_numpy(small), rtol=1e-5, atol=1e-5)


# Frequencies


def test_subsampled_fourier() -> None:
    x = normal(B, *IMAGE, tag="x")
    modes = torch.fft.rfft2(x, norm="ortho")
    kept = columns_mask((8, 8), torch.tensor([[1, 4]]))
    operator = SubsampledFourier(kept, IMAGE)
    y = torch.view_as_complex(operator.A(x))
    assert_close(y, modes[..., [1, 4]].flatten(-2))
    zeroed = torch.zeros_like(modes)
    zeroed[..., [1, 4]] = modes[..., [1, 4]]
    assert_close(operator.project(x), torch.fft.irfft2(zeroed, (8, 8), norm="ortho"))
    whole = SubsampledFourier(torch.ones(1, 8, 5, dtype=torch.bool), IMAGE)
    assert_close(whole.project(x), x)
    # single frequencies, where their pairs are kept too
    some = torch.zeros(1, 8, 5, dtype=torch.bool)
    some[0, [0, 3, 5, 2], [0, 0, 0, 2]] = True
    check_operator(SubsampledFourier(some, IMAGE), x, 1e-12)


def test_variance_of_white_noise_in_the_half_spectrum() -> None:
    """Of `torch.fft.irfft2` without a norm: (4 H (W / 2 - 1) + 2 H) / (H W)^2 a pixel."""
    operator = SubsampledFourier(torch.ones(1, 8, 5, dtype=torch.bool), (8, 8))
    units = torch.eye(80, dtype=torch.float64).reshape(80, 40, 2)
    back = operator.A_dagger(units).flatten(1) / 8  # of y in the units of rfft2
    assert_close(back.square().sum(0).mean(), torch.tensor(0.0273438).double(), 1e-6)


# Rays


@pytest.mark.parametrize("n", [31, 32])
def test_radon_is_that_of_skimage(n: int) -> None:
    phantom = resize(shepp_logan_phantom(), (n, n), anti_aliasing=True)
    places = np.arange(n) - n // 2
    phantom[places[:, None] ** 2 + places**2 > (n // 2) ** 2] = 0  # the resized edge
    degrees = np.array([0.0, 17.5, 45.0, 90.0, 133.0, 179.0])
    theirs = radon(phantom, degrees, circle=True)
    operator = Radon(torch.from_numpy(np.deg2rad(degrees)), (n, n))
    ours = operator.A(torch.from_numpy(phantom)[None])[0]
    assert_close(ours, torch.from_numpy(theirs).mT, 1e-10)


def test_radon_of_what_is_known() -> None:
    image = torch.zeros(1, 9, 9, dtype=torch.float64)
    image[0, 4, 4] = 2.0  # the centre: on the middle ray at every angle
    sinogram = Radon(torch.linspace(0, math.pi, 7), (9, 9)).A(image)[0]
    assert_close(sinogram[:, 4], torch.full((7,), 2.0).double(), 0.35)
    columns = normal(1, 9, 9, tag="x")
    assert_close(Radon(torch.zeros(1), (9, 9)).A(columns)[0, 0], columns[0].sum(0))


def test_radon_reconstructs() -> None:
    """From as many angles as it takes, and better with more iterations: to the tolerance."""
    phantom = torch.from_numpy(resize(shepp_logan_phantom(), (16, 16), anti_aliasing=True))[None]
    angles = torch.linspace(0, math.pi, 41)[:-1]
    operator = Radon(angles, (16, 16), tolerance=1e-9, iterations=2000)
    y = operator.A(phantom)
    found = operator.A_dagger(y)
    residual = operator.A_adjoint(operator.A(found) - y)
    assert residual.norm() <= 2e-9 * operator.A_adjoint(y).norm()
    few = Radon(angles, (16, 16), tolerance=1e-9, iterations=3)
    with pytest.warns(RuntimeWarning, match="left a relative residual of .* after 3 iterations"):
        few.A_dagger(y)
    truncated = dense(operator, (16, 16), cutoff=0.05)
    assert truncated.pseudo_inverse == "truncated"
    assert truncated.rank is not None and 0 < int(truncated.rank) < 256


# Size


def test_nothing_is_quadratic_but_a_matrix() -> None:
    """All that is stored of an image of 128 x 128 is far from its 16,384^2 numbers, and rows share
    what they can."""
    n = 128
    shape = (n, n)
    operators: list[Operator] = [
        Blur(gaussian_kernel(2.0), shape),
        Mask(box_mask(shape, (30, 40), torch.tensor([[3, 5]]))),
        AveragePool((4, 4), shape),
        Bicubic(4, shape),
        SubsampledFourier(columns_mask(shape, torch.arange(20)[None]), shape),
        Radon(torch.linspace(0, 3, 4), shape),
    ]
    x = normal(1, *shape, tag="x")
    for operator in operators:
        stored = [v for v in vars(operator).values() if isinstance(v, Tensor)]
        assert max([v.numel() for v in stored], default=0) <= 20 * n * n
        assert operator.A(x).isfinite().all()
    with pytest.raises(ValueError, match="an event of 16384 coordinates is too large"):
        dense(operators[0], shape)


def test_constants_are_converted_once() -> None:
    x = normal(B, *IMAGE, tag="x").float()
    operator = Blur(gaussian_kernel(0.7), IMAGE)
    operator.A(x)
    first = operator._like("transfer", x)
    assert first.dtype == torch.complex64 and operator._like("transfer", x) is first


# Conjugate gradients


def test_conjugate_gradients() -> None:
    a = normal(6, 6, tag="a")
    spd = a @ a.mT + 0.1 * torch.eye(6).double()
    right = normal(B, 6, tag="b")
    right[1] = 0
    want = right @ torch.linalg.inv(spd)
    calls = []

    def matrix(u: Tensor) -> Tensor:
        calls.append(1)
        return u @ spd

    assert_close(conjugate_gradients(matrix, right, 40), want, 1e-8)
    assert len(calls) == 40  # without a tolerance nobody looks
    calls.clear()
    out = conjugate_gradients(matrix, right, 1000, 1e-10)
    assert len(calls) <= 30
    assert_close(out, want, 1e-7)
    assert torch.equal(out[1], torch.zeros(6).double())
    with pytest.warns(
        RuntimeWarning, match=r"relative residual of .* after 2 iterations, of 1.0e-10"
    ):
        conjugate_gradients(matrix, right, 2, 1e-10)


# Bad input


SEEN = torch.ones(1, 4, dtype=torch.bool)
HALF = torch.ones(1, 8, 5, dtype=torch.bool)
LONE = torch.zeros(1, 8, 5, dtype=torch.bool)
LONE[0, 3, 0] = True
UNEVEN = torch.stack([HALF[0], LONE[0] | LONE[0].flip(0).roll(1, 0)])


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: Dense(torch.zeros(2, 3)), ValueError, "matrix must be finite and not 0"),
        (lambda: Dense(torch.full((2, 3), math.nan)), ValueError, "matrix must be finite"),
        (lambda: Dense(torch.ones(3)), ValueError, "matrix must be .m, n. or"),
        (lambda: Dense(torch.ones(0, 3)), ValueError, "not empty"),
        (lambda: Dense(torch.ones(2, 3), (4,)), ValueError, "does not map .4,. to .2,."),
        (lambda: Dense(torch.ones(2, 3), cutoff=1.0), ValueError, "cutoff must lie in"),
        (lambda: Diagonal(torch.ones(3)), ValueError, "values must be .1 or batch, .event."),
        (lambda: Diagonal(torch.zeros(1, 3)), ValueError, "values must be finite and not 0"),
        (lambda: Diagonal(torch.ones(1, 2, 3), (3,)), ValueError, "does not fit in_shape"),
        (lambda: Diagonal(torch.ones(1, 2), (3,)), ValueError, "does not fit in_shape"),
        (lambda: Mask(SEEN.float()), TypeError, "seen must be bool, got torch.float32"),
        (lambda: Mask(SEEN[:0]), ValueError, "not empty"),
        (lambda: Mask(~SEEN), ValueError, "seen must be true somewhere in every row"),
        (lambda: Mask(torch.cat([SEEN, ~SEEN])), ValueError, "in every row"),
        (lambda: random_mask(torch.empty(2, 3), 0.0, NOISE), ValueError, "share must lie in"),
        (
            lambda: box_mask((4, 4), (0, 2), torch.zeros(1, 2)),
            ValueError,
            "a box of .0, 2. must lie inside",
        ),
        (lambda: box_mask((4, 4), (2, 2), torch.tensor([[3, 0]])), ValueError, "must lie inside"),
        (lambda: box_mask((4, 4), (4, 4), torch.zeros(1, 2)), ValueError, "not hide"),
        (lambda: box_mask((4, 4), (2, 2), torch.zeros(2)), ValueError, "needs start"),
        (lambda: Blur(torch.ones(1, 9, 9), (2, 8, 8)), ValueError, "is larger than .8, 8."),
        (lambda: Blur(torch.zeros(1, 3, 3), (8, 8)), ValueError, "kernel must be finite and not 0"),
        (lambda: Blur(torch.ones(1, 0, 3), (8, 8)), ValueError, "kernel must be .1 or batch"),
        (lambda: Blur(torch.ones(1, 3, 3), (8,)), ValueError, "kernel must be .1 or batch"),
        (lambda: Blur(torch.ones(1, 3), (8,), -0.1), ValueError, "cutoff must lie in"),
        (lambda: gaussian_kernel(0.0), ValueError, "std must be positive"),
        (lambda: gaussian_kernel(1.0, 1, 0.3), ValueError, "only a kernel of 2 dimensions"),
        (lambda: motion_kernel(0), ValueError, "length must be at least 1"),
        (lambda: AveragePool((3,), (8,)), ValueError, "must be divisible by factor"),
        (lambda: AveragePool((0,), (8,)), ValueError, "factor must be positive"),
        (lambda: AveragePool((), (8,)), ValueError, "factor must be positive"),
        (lambda: AveragePool((2, 2), (8,)), ValueError, "factor must be positive"),
        (lambda: Bicubic(3, (8, 9)), ValueError, "must be divisible by factor"),
        (lambda: SubsampledFourier(HALF.float(), (8, 8)), TypeError, "kept must be bool"),
        (lambda: SubsampledFourier(HALF, (8, 9, 10)), ValueError, "kept must be .1 or batch"),
        (lambda: SubsampledFourier(~HALF, (8, 8)), ValueError, "and some, got .0."),
        (lambda: SubsampledFourier(UNEVEN, (8, 8)), ValueError, "as many frequencies in every row"),
        (lambda: SubsampledFourier(LONE, (8, 8)), ValueError, "kept must hold -k with k"),
        (lambda: columns_mask((8, 8), torch.tensor([[5]])), ValueError, "columns must be"),
        (lambda: Radon(torch.zeros(0), (8, 8)), ValueError, "angles must be finite"),
        (lambda: Radon(torch.tensor([math.nan]), (8, 8)), ValueError, "angles must be finite"),
        (lambda: Radon(torch.zeros(2), (8, 9)), ValueError, "in_shape must be"),
        (lambda: Radon(torch.zeros(2), (8, 8), 0.0), ValueError, "tolerance must lie in"),
        (lambda: Product(BLUR, AveragePool((2, 2), IMAGE)), ValueError, "outer takes"),
        (lambda: Product(BLUR, BLUR, iterations=0), ValueError, "iterations be at least 1"),
        (lambda: Sum(BLUR, AveragePool((2, 2), IMAGE)), ValueError, "both must have one out_shape"),
        (
            lambda: Sum(Dense(torch.ones(2, 3, 3)), Dense(torch.ones(4, 3, 3))),
            ValueError,
            "must be of as many rows, got .2, 4.",
        ),
    ],
)
def test_bad_operators(make: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize("key", ["dense", "box", "blur", "pool", "fourier", "radon", "product"])
def test_bad_states(key: str) -> None:
    operator, x, y = states(key)
    for act, z, name in (
        (operator.A, x, "x"),
        (operator.A_adjoint, y, "y"),
        (operator.A_dagger, y, "y"),
    ):
        with pytest.raises(ValueError, match=rf"{name} must be \(batch, .*\) for \w+, got"):
            act(z[..., :-1])
        with pytest.raises(ValueError, match="must be"):
            act(z[0])


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integers_are_refused(dtype: torch.dtype) -> None:
    x = torch.ones(2, 1, 4, 4, dtype=dtype)
    operators: list[tuple[Operator, Tensor]] = [
        (Dense(torch.full((1, 3, 16), 0.5)), x.flatten(1)),
        (Diagonal(torch.full((1, 1, 4, 4), 0.5)), x),
        (AveragePool((2, 2), (4, 4)), x[:, 0]),
        (Bicubic(2, (1, 4, 4)), x),
    ]
    for operator, event in operators:
        with pytest.raises(TypeError, match=rf"x must be floating for \w+, got {dtype}"):
            operator.A(event)
