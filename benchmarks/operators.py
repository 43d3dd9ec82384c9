"""What operators cost beside their bare FFT, gather or product, and structured paths beside scalar.

    python benchmarks/operators.py [--threads N] [--batch N ...] [--side N ...]

Contestants of a row take turns, in float32, and a figure is the lowest CPU time of the thread over
all turns, which does not count what other programs of a busy machine take.

* Operators: one call on a batch of images of 3 channels, as a multiple of the torch operations that
  it cannot do without, on constants that are ready. "rows" have an operator of their own each.
  Aim: at most 1.2.
* Paths: critically damped Langevin dynamics as a multiple of `VPLinear`, for one time and for one
  time a row: the coefficients of the kernel of x_t | x_0 alone, and draws of a state with as many
  numbers, position and momentum, as the images have. Aim: at most 2. In brackets: of a state for
  as many images, so of twice the numbers.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fluvial.core.gaussian.linear import LinearClock, OrnsteinUhlenbeck
from fluvial.core.gaussian.paths import VPLinear
from fluvial.core.noise import KeyedNoise
from fluvial.core.operators.blur import Blur, gaussian_kernel
from fluvial.core.operators.dense import Dense
from fluvial.core.operators.diagonal import Mask, random_mask
from fluvial.core.operators.downsample import AveragePool, Bicubic
from fluvial.core.operators.fourier import SubsampledFourier, columns_mask
from fluvial.core.operators.radon import Radon
from fluvial.core.scales import Block

Contestant = Callable[[], Any]
NOISE = KeyedNoise(0)


def best(contestants: list[Contestant], turns: int, seconds: float = 0.02) -> list[float]:
    """The lowest seconds a call of each."""
    calls = []
    for contestant in contestants:
        contestant()
        start = time.thread_time()
        contestant()
        calls.append(max(1, int(seconds / max(time.thread_time() - start, 1e-6))))
    lowest = [math.inf] * len(contestants)
    for _ in range(turns):
        for i, contestant in enumerate(contestants):
            start = time.thread_time()
            for _ in range(calls[i]):
                contestant()
            lowest[i] = min(lowest[i], (time.thread_time() - start) / calls[i])
    return lowest


def operators(batch: int, side: int) -> dict[str, tuple[Contestant, Contestant]]:
    """(bare, ours) by name."""
    shape, dims = (3, side, side), (-2, -1)
    x = torch.randn(batch, *shape)
    rows: dict[str, tuple[Contestant, Contestant]] = {}

    kernels = {"blur": 1, "blur, rows": batch}
    for name, count in kernels.items():
        std = torch.linspace(0.8, 1.2, count)[:, None].expand(-1, 2)
        blur = Blur(gaussian_kernel(std), shape)
        for act in ("transfer", "inverse"):
            h = getattr(blur, act).to(torch.complex64)

            def bare(h: Tensor = h) -> Tensor:
                return torch.fft.irfftn(torch.fft.rfftn(x, dim=dims) * h, (side, side), dim=dims)

            method = blur.A if act == "transfer" else blur.A_dagger
            rows[f"{name}: {method.__name__}"] = bare, lambda method=method: method(x)

    columns = columns_mask((side, side), torch.arange(side // 6)[None])
    index = columns.flatten().nonzero()[:, 0]
    some = SubsampledFourier(columns, shape)
    y = some.A(x)
    half = side // 2 + 1

    def transform() -> Tensor:
        return torch.fft.rfftn(x, dim=dims, norm="ortho").flatten(-2).index_select(-1, index)

    def back() -> Tensor:
        modes = torch.zeros(batch, 3, side * half, dtype=torch.complex64)
        modes[..., index] = torch.view_as_complex(y)
        return torch.fft.irfftn(
            modes.unflatten(-1, (side, half)), (side, side), dim=dims, norm="ortho"
        )

    rows["fourier: A"] = transform, lambda: some.A(x)
    rows["fourier: A_dagger"] = back, lambda: some.A_dagger(y)
    offsets = (torch.arange(batch)[:, None] + torch.arange(side // 6)) % half
    each = SubsampledFourier(columns_mask((side, side), offsets), shape)
    gather = each.index.expand(batch, 3, -1)

    def transform_rows() -> Tensor:
        return torch.fft.rfftn(x, dim=dims, norm="ortho").flatten(-2).gather(-1, gather)

    rows["fourier, rows: A"] = transform_rows, lambda: each.A(x)

    seen = random_mask(x[:, :1], 0.3, NOISE)
    mask, weights = Mask(seen, shape), seen.float()
    rows["mask, rows: A"] = lambda: weights * x, lambda: mask.A(x)

    pool = AveragePool((4, 4), shape)
    small = pool.A(x)
    rows["pool: A"] = lambda: F.avg_pool2d(x, 4), lambda: pool.A(x)
    rows["pool: A_dagger"] = (
        lambda: F.interpolate(small, scale_factor=4, mode="nearest"),
        lambda: pool.A_dagger(small),
    )
    bicubic, size = Bicubic(4, shape), (side // 4, side // 4)
    rows["bicubic: A"] = (
        lambda: F.interpolate(x, size, mode="bicubic", antialias=True),
        lambda: bicubic.A(x),
    )
    back_first, back_second = bicubic.first_inverse.float(), bicubic.second_inverse.float().mT
    rows["bicubic: A_dagger"] = (
        lambda: back_first @ small @ back_second,
        lambda: bicubic.A_dagger(small),
    )

    flat = torch.randn(batch, 1024)
    matrix = torch.randn(256, 1024) / 32
    dense = Dense(matrix)
    rows["dense: A"] = lambda: flat @ matrix.mT, lambda: dense.A(flat)
    rays = Radon(torch.linspace(0, math.pi, 31)[:-1], shape)
    crow, column, values = rays.forth_indptr, rays.forth_indices, rays.forth_data.float()
    warnings.simplefilter("ignore", UserWarning)  # torch says that the format is young
    sparse = torch.sparse_csr_tensor(crow, column, values, size=(30 * side, side * side))
    rows["radon, 30 angles: A"] = (
        lambda: (sparse @ x.reshape(-1, side * side).mT).mT.contiguous(),
        lambda: rays.A(x),
    )
    return rows


def paths(batch: int, side: int) -> dict[str, list[Contestant]]:
    """[VPLinear, ours at as many numbers, ours at as many images] by name."""
    a, eps = 2.0, 0.25
    drift = torch.tensor([[0, a * a], [-1, -2 * a]], dtype=torch.float64)
    noise = torch.diag(torch.tensor([eps**2, 2.0], dtype=torch.float64))
    langevin = OrnsteinUhlenbeck(Block(drift), Block(noise), LinearClock(4.0))
    size = 3 * side * side
    states: list[tuple[Any, Tensor]] = [
        (VPLinear(), torch.randn(batch, size)),
        (langevin, torch.randn(batch, 2, size // 2)),
        (langevin, torch.randn(batch, 2, size)),
    ]
    one = torch.tensor(0.6, dtype=torch.float64), torch.tensor(0.4, dtype=torch.float64)
    each = 0.5 + torch.rand(batch) / 2, torch.rand(batch) / 2
    acts: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Any]] = {
        "kernel": lambda path, x, t, s: path.marginal(t),
        "sample": lambda path, x, t, s: path.sample(x, t, NOISE).x,
        "transition": lambda path, x, t, s: path.transition(x, s, t, NOISE),
        "posterior": lambda path, x, t, s: path.posterior(x, x, t, s, NOISE),
    }
    return {
        f"{name}, {times}": [
            lambda act=act, path=path, x=x, t=t, s=s: act(path, x, t, s) for path, x in states
        ]
        for times, (t, s) in (("one time", one), ("rows", each))
        for name, act in acts.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, nargs="*", default=[64, 16])
    parser.add_argument("--side", type=int, nargs="*", default=[32, 128])
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} thread(s), microseconds a call")
    for batch, side in zip(options.batch, options.side, strict=True):
        print(f"\n{f'{batch} x 3 x {side} x {side}':<24}{'bare':>10}{'ours':>10}{'ratio':>8}")
        for name, pair in operators(batch, side).items():
            bare, ours = best(list(pair), options.turns)
            print(
                f"{name:<24}{bare * 1e6:>10.1f}{ours * 1e6:>10.1f}{ours / bare:>7.2f}x", flush=True
            )
        print(f"\n{'Langevin, for VP':<24}{'VP':>10}{'ours':>10}{'ratio':>8}")
        for name, contestants in paths(batch, side).items():
            scalar, ours, twice = best(contestants, options.turns)
            print(
                f"{name:<24}{scalar * 1e6:>10.1f}{ours * 1e6:>10.1f}{ours / scalar:>7.2f}x"
                f"  ({twice / scalar:.2f}x)",
                flush=True,
            )


if __name__ == "__main__":
    main()
