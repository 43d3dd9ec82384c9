"""Solutions of partial differential equations to train and test on, made as they are asked for.

Fields are (rows, n_x, n_t) or (rows, n_x, n_y, n_t), float64: the last axis is physical time. Heat
is a closed form; reaction-diffusion is integrated by SciPy's LSODA, all rows as one banded system;
inviscid Burgers' equation by Godunov's method and the vorticity of two-dimensional Navier-Stokes
flow by a pseudo-spectral one, for which no kept solver is at hand. Random numbers come from keyed
noise: row i depends on row i of it only.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor
from tqdm import tqdm

from fluvial.core.protocols import Noise

RATES = (1.0, 5.0)
"""Of the decay a of heat."""
NU, RHO = 5e-3, 1e-2
"""Diffusion and growth of reaction-diffusion."""
CHUNK = 128
"""Rows that LSODA takes at once, with one step for all of them."""


def _uniform(rows: int, noise: Noise, tag: str, count: int = 1) -> Tensor:
    return noise.uniform(torch.empty(rows, count, dtype=torch.float64), tag)


# Heat


def heat(rate: Tensor, phase: Tensor, shape: tuple[int, int]) -> Tensor:
    """u = sin(x + phase) exp(-rate t), x on [0, 2 pi) without its end, t on [0, 1].

    Args:
        rate, phase: (rows,).
        shape: (n_x, n_t).

    Returns:
        (rows, n_x, n_t).
    """
    x = 2 * math.pi * torch.arange(shape[0], dtype=torch.float64) / shape[0]
    t = torch.linspace(0, 1, shape[1], dtype=torch.float64)
    wave = torch.sin(x + phase.double()[:, None])
    return wave[:, :, None] * torch.exp(-rate.double()[:, None, None] * t)


def heat_fields(
    rows: int, shape: tuple[int, int], noise: Noise, *, phase: float | None = None
) -> tuple[Tensor, Tensor]:
    """Fields with a ~ U[1, 5] and phase ~ U[0, pi], or one phase; and their rates (rows,)."""
    low, high = RATES
    rate = low + (high - low) * _uniform(rows, noise, "rate")[:, 0]
    drawn = math.pi * _uniform(rows, noise, "phase")[:, 0]
    phases = drawn if phase is None else torch.full_like(drawn, phase)
    return heat(rate, phases, shape), rate


# Reaction and diffusion


def reaction_diffusion(
    start: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    times: Tensor,
    nu: float = NU,
    rho: float = RHO,
    progress: bool = False,
) -> Tensor:
    """u_t = nu u_xx + rho u (1 - u) on the cells of [0, 1], fluxes given at both ends.

    Finite volumes in space, F_(i+1/2) = -nu (u_(i+1) - u_i) / dx, LSODA in time with a relative
    tolerance of 1e-9: the mass dx sum u grows by left - right + rho dx sum u (1 - u).

    Args:
        start: (rows, n_x) at t = 0.
        left, right: (rows,), fluxes in the direction of x at the ends.
        times: (n_t,) at which to save, from 0.
        nu, rho: diffusion and growth.
        progress: show a bar.

    Returns:
        (rows, n_x, n_t).

    Raises:
        RuntimeError: the solver failed.
    """
    n = start.shape[1]
    dx = 1 / n
    saved = times.double().numpy()
    parts = []
    for first in tqdm(range(0, len(start), CHUNK), desc="reaction", disable=not progress):
        u0 = start[first : first + CHUNK].double().numpy()
        ends = [flux[first : first + CHUNK].double().numpy() for flux in (left, right)]
        flux = np.empty((len(u0), n + 1))
        flux[:, 0], flux[:, -1] = ends

        def slope(t: float, flat: Any, flux: Any = flux) -> Any:
            u = flat.reshape(-1, n)
            flux[:, 1:-1] = -nu * np.diff(u, axis=1) / dx
            return (rho * u * (1 - u) - np.diff(flux, axis=1) / dx).reshape(-1)

        solved = solve_ivp(
            slope,
            (saved[0], saved[-1]),
            u0.reshape(-1),
            method="LSODA",
            t_eval=saved,
            rtol=1e-9,
            atol=1e-11,
            lband=1,
            uband=1,
        )
        if not solved.success:
            raise RuntimeError(f"LSODA failed: {solved.message}")
        parts.append(torch.from_numpy(solved.y.reshape(len(u0), n, len(saved))))
    return torch.cat(parts)


def reaction_starts(rows: int, n: int, noise: Noise) -> Tensor:
    """Random starts in [0, 1]: two sines, some folded, some windowed, brought to [0, 1]; (rows, n).

    Two modes of 1..3 with amplitudes U(0, 1) and random phases; of a tenth of the rows the absolute
    value, a random sign for all, in a tenth a smooth window with edges U(.1, .45) and U(.55, .9).
    """
    x = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    mode = (3 * _uniform(rows, noise, "mode", 2)).floor() + 1
    amplitude = _uniform(rows, noise, "amplitude", 2)
    phase = 2 * math.pi * _uniform(rows, noise, "phase", 2)
    waves = torch.sin(2 * math.pi * mode[..., None] * x + phase[..., None])
    u = (amplitude[..., None] * waves).sum(1)
    folded, signed, windowed, edges = _uniform(rows, noise, "shape", 4).split(1, 1)
    u = torch.where(folded < 0.1, u.abs(), u)
    u = torch.where(signed < 0.5, -u, u)
    low = 0.1 + 0.35 * edges
    high = 0.55 + 0.35 * _uniform(rows, noise, "edge")
    window = (torch.tanh((x - low) / 0.01) - torch.tanh((x - high) / 0.01)) / 2
    u = torch.where(windowed < 0.1, u * window, u)
    low, high = u.amin(1, keepdim=True), u.amax(1, keepdim=True)
    return (u - low) / (high - low).clamp(min=1e-12)


def reaction_fluxes(rows: int, noise: Noise) -> tuple[Tensor, Tensor]:
    """(left, right) fluxes, round(.05 U, 3) and round(-.05 U, 3), each (rows,)."""
    drawn = (0.05 * _uniform(rows, noise, "flux", 2)).mul(1000).round() / 1000
    return drawn[:, 0], -drawn[:, 1]


def reaction_times(n: int) -> Tensor:
    """n saves of [0, 1), equally spaced."""
    return torch.arange(n, dtype=torch.float64) / n


def reaction_fields(
    rows: int,
    shape: tuple[int, int],
    noise: Noise,
    *,
    start: Tensor | None = None,
    progress: bool = False,
) -> Tensor:
    """Fields (rows, n_x, n_t) of random starts, or of one start (n_x,), with random fluxes."""
    starts = reaction_starts(rows, shape[0], noise) if start is None else start.expand(rows, -1)
    left, right = reaction_fluxes(rows, noise)
    times = reaction_times(shape[1])
    return reaction_diffusion(starts, left, right, times=times, progress=progress)


# Burgers


def godunov(left: Tensor, right: Tensor) -> Tensor:
    """Godunov's flux of u^2 / 2 between two states, as in the official code of the paper.

    A shock, left > right: of the state on the side it leaves. A rarefaction: the smaller of the two
    fluxes, which at a sonic point (left < 0 < right) is not the exact one, 0.
    """
    f, g = left.square() / 2, right.square() / 2
    shock = torch.where(left + right > 0, f, g)
    return torch.where(left > right, shock, torch.minimum(f, g))


def burgers(start: Tensor, left: Tensor, *, steps: int, dx: float, dt: float) -> Tensor:
    """u_t + (u^2 / 2)_x = 0 by Godunov's method: u_0 = left from step 1 on, zero gradient at right.

    Args:
        start: (rows, n_x).
        left: (rows,), the value at the left end.
        steps: n_t - 1.
        dx, dt: of the grid; dt max|u| / dx must be at most 1.

    Returns:
        (rows, n_x, steps + 1).

    Raises:
        ValueError: the step is too large to be stable.
    """
    fastest = max(float(start.abs().max()), float(left.abs().max()))
    if dt * fastest > dx * (1 + 1e-9):
        raise ValueError(f"dt must be at most dx / max|u| = {dx / fastest:.3g}, got {dt}")
    u = start.double()
    saved = [u]
    for _ in range(steps):
        flux = godunov(u[:, :-1], u[:, 1:])
        inner = u[:, 1:-1] - dt / dx * flux.diff(dim=1)
        u = torch.cat([left.double()[:, None], inner, inner[:, -1:]], 1)
        saved.append(u)
    return torch.stack(saved, 2)


def burgers_starts(place: Tensor, n: int, width: float = 0.02) -> Tensor:
    """1 / (1 + exp((x - place) / width)) on n points of [0, 1]; (rows, n)."""
    x = torch.linspace(0, 1, n, dtype=torch.float64)
    return torch.sigmoid((place.double()[:, None] - x) / width)


def burgers_fields(
    rows: int,
    shape: tuple[int, int],
    noise: Noise,
    *,
    place: float | None = None,
    left: float | None = None,
    width: float = 0.02,
) -> tuple[Tensor, Tensor]:
    """Fields on [0, 1] x [0, 1], place ~ U[.2, .8] and left ~ U[0, 1] or given; and (rows, 2) of
    the two."""
    n, steps = shape[0], shape[1] - 1
    places = 0.2 + 0.6 * _uniform(rows, noise, "place")[:, 0]
    lefts = _uniform(rows, noise, "left")[:, 0]
    places = places if place is None else torch.full_like(places, place)
    lefts = lefts if left is None else torch.full_like(lefts, left)
    starts = burgers_starts(places, n, width)
    fields = burgers(starts, lefts, steps=steps, dx=1 / (n - 1), dt=1 / steps)
    return fields, torch.stack([places, lefts], 1)


# Navier and Stokes


def vorticity_starts(
    rows: int, n: int, noise: Noise, *, alpha: float = 2.5, tau: float = 7.0
) -> Tensor:
    """Gaussian random fields of spectrum (4 pi^2 |k|^2 + tau^2)^-alpha, scaled as Li et al. (2021)
    do, without a mean; (rows, n, n)."""
    k = torch.fft.fftfreq(n, 1 / n, dtype=torch.float64)
    square = k[:, None].square() + k.square()
    amplitude = (4 * math.pi**2 * square + tau**2) ** (-alpha / 2)
    amplitude = amplitude * math.sqrt(2) * tau ** (alpha - 1)
    amplitude[0, 0] = 0
    white = noise.normal(torch.empty(rows, n, n, dtype=torch.float64), "vorticity")
    # the spectrum of white noise has variance n^2
    return torch.fft.ifft2(torch.fft.fft2(white) * amplitude * n).real


def forcing(phase: Tensor, n: int) -> Tensor:
    """.1 sqrt(2) sin(2 pi (x + y) + phase) on the n x n grid; phase (rows,)."""
    x = torch.arange(n, dtype=torch.float64) / n
    return 0.1 * math.sqrt(2) * torch.sin(2 * math.pi * (x[:, None] + x) + phase[:, None, None])


def navier_stokes(
    start: Tensor,
    force: Tensor,
    *,
    saves: int,
    interval: float = 1.0,
    dt: float = 1e-3,
    viscosity: float = 1e-3,
    progress: bool = False,
) -> Tensor:
    """Vorticity w_t + (v . grad) w = viscosity lap w + force on the periodic unit square.

    Pseudo-spectral, products dealiased by the rule of two thirds; Crank and Nicolson's method for
    the viscous term, Euler's for the others. The mean of w stays as it is if the force has none.

    Args:
        start, force: (rows, n, n).
        saves: of w, the start among them.
        interval: between saves.
        dt: of a step; an interval is a whole number of them.
        viscosity: of the fluid.
        progress: show a bar.

    Returns:
        (rows, n, n, saves).

    Raises:
        ValueError: a step that does not divide the interval.
        FloatingPointError: the solution grew without bound: dt is too large.
    """
    n, each = start.shape[-1], round(interval / dt)
    if each < 1 or abs(each * dt - interval) > 1e-9 * interval:
        raise ValueError(f"dt must divide the interval {interval}, got {dt}")
    kx = torch.fft.fftfreq(n, 1 / n, dtype=torch.float64)[:, None]
    ky = torch.fft.rfftfreq(n, 1 / n, dtype=torch.float64)
    lap = 4 * math.pi**2 * (kx.square() + ky.square())
    kept = (kx.abs() < n / 3) & (ky < n / 3)
    back = torch.where(lap > 0, 1 / lap.clamp(min=1e-12), 0.0)
    dx, dy = 2j * math.pi * kx, 2j * math.pi * ky
    w = torch.fft.rfft2(start.double())
    f = torch.fft.rfft2(force.double())
    up, down = 1 - dt * viscosity * lap / 2, 1 + dt * viscosity * lap / 2
    saved = [start.double()]
    for _ in tqdm(range(saves - 1), desc="vorticity", disable=not progress):
        for _ in range(each):
            stream = w * back
            parts = torch.stack([dy * stream, -dx * stream, dx * w, dy * w])
            v_x, v_y, w_x, w_y = torch.fft.irfft2(parts, s=(n, n))
            carried = torch.fft.rfft2(v_x * w_x + v_y * w_y) * kept
            w = (up * w + dt * (f - carried)) / down
        saved.append(torch.fft.irfft2(w, s=(n, n)))
    fields = torch.stack(saved, -1)
    if not bool(fields.isfinite().all()):
        raise FloatingPointError(f"the vorticity grew without bound at dt={dt}")
    return fields


def vorticity_fields(
    starts: Tensor, phases: Tensor, *, saves: int, progress: bool = False, **options: Any
) -> Tensor:
    """`navier_stokes` of pairs of starts (rows, n, n) and phases of the forcing (rows,)."""
    force = forcing(phases, starts.shape[-1])
    return navier_stokes(starts, force, saves=saves, progress=progress, **options)
