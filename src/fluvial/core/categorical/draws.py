"""Draws of tokens in two stages: does a token change (one uniform), and then into what.

The second stage is by inversion in float64, and only at the tokens that change. So a step in which
a token changes with probability 1e-6 into one of 65,536 gives each of these its share, whereas a
race of exponentials in float32, argmax_k p_k / (-ln u_k), cannot draw what is rarer than 2^-24:
over many steps it suppresses rare tokens, which looks like a lower temperature. And where nothing
changes, nothing is computed.

Finding the tokens that change waits for an accelerator, once a draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fluvial.core.arguments import kind_of
from fluvial.core.noise import inverse_cdf
from fluvial.core.protocols import Noise

CHUNK = 1 << 18
CHUNK_ELSEWHERE = 1 << 24
"""Probabilities that are summed in float64 at a time; on a CPU they should stay in its cache."""
TOLERANCE = 1e-2
"""By how much probabilities may miss a sum of 1."""


@dataclass(frozen=True)
class Moves:
    """What may become of every token: it leaves, and then for y with a weight made of two parts.

        P(x -> somewhere else) = leave,    P(y | it leaves) ∝ on_clean p_y + on_source pi_y,  y != x

    with p the clean prediction and pi the law of the source. Of rates, ``leave`` is the total rate.

    Args:
        leave: (batch, *event) float64.
        on_clean, on_source: numbers, or (batch, *event); None for a part that is not there.
    """

    leave: Tensor
    on_clean: Tensor | None
    on_source: Tensor | None


def uniform(x: Tensor, noise: Noise, tag: str) -> Tensor:
    """One uniform a token of ``x``, in float64 where there is such a thing."""
    check_noise(noise)
    return noise.uniform(torch.empty(x.shape, dtype=double(x), device=x.device), tag)


def check_noise(noise: Any) -> None:
    """Raise unless ``noise`` is noise: a seed is none, nor is the class."""
    if isinstance(noise, type) or not hasattr(noise, "uniform"):
        raise TypeError(f"noise must be keyed noise, such as KeyedNoise(0), got {kind_of(noise)}")


def double(x: Tensor) -> torch.dtype:
    """float64 where there is such a thing."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def at_class(clean: Tensor, x: Tensor) -> Tensor:
    """p_x, the probability of the token that is there: (batch, *event) float64; 0 for a mask."""
    if not clean.is_floating_point():
        return (clean == x).to(double(x))
    count = clean.shape[-1]
    value = clean.gather(-1, x.clamp(max=count - 1).unsqueeze(-1)).squeeze(-1).to(double(x))
    return torch.where(x < count, value, 0)


def rows_of(clean: Tensor, index: tuple[Tensor, ...], classes: int) -> Tensor:
    """(n, classes) probabilities, float64, of the tokens at ``index``."""
    rows = clean[index]
    if not clean.is_floating_point():
        if rows.device.type == "cpu" and rows.numel():
            low, high = (int(v) for v in rows.aminmax())
            if low < 0 or high >= classes:
                raise ValueError(f"clean must hold tokens 0 .. {classes - 1}, got {low} to {high}")
        return functional.one_hot(rows, classes).to(double(rows))
    return rows.to(double(rows))


def real_number(name: str, value: Any) -> float:
    """The argument ``name`` as a float.

    Raises:
        TypeError: it is no number.
    """
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise TypeError(f"{name} must be a number, got {value!r}")


def tensor_kind(value: Any) -> str:
    """What came, for a message: the dtype of a tensor, else the name of the type."""
    return str(value.dtype) if isinstance(value, Tensor) else kind_of(value)


def check_prediction(clean: Tensor, x: Tensor, classes: int) -> None:
    """Raise unless ``clean`` is (*x.shape, classes) of floats, or int64 tokens shaped as ``x``."""
    if not isinstance(clean, Tensor) or not (
        clean.is_floating_point() or clean.dtype == torch.int64
    ):
        raise TypeError(
            "clean must be probabilities in floating point, or int64 tokens, got "
            f"{tensor_kind(clean)}"
        )
    wanted = (*x.shape, classes) if clean.is_floating_point() else tuple(x.shape)
    if tuple(clean.shape) != wanted:
        raise ValueError(
            f"clean must have shape {wanted} as {clean.dtype}, got {tuple(clean.shape)}"
        )


def check_law(name: str, p: Tensor, x: Tensor, classes: int) -> None:
    """Raise unless ``p`` is (*x.shape, classes) in floating point; tokens are none."""
    if not isinstance(p, Tensor) or not p.is_floating_point():
        raise TypeError(f"{name} must be in floating point, got {tensor_kind(p)}")
    if tuple(p.shape) != (*x.shape, classes):
        raise ValueError(f"{name} must have shape {(*x.shape, classes)}, got {tuple(p.shape)}")


def check_times(x: Tensor, *times: Tensor) -> None:
    """Raise unless each is a time of tokens ``x``: (), (batch,) or shaped as ``x``, in [0, 1].

    Values are looked at where they are on the host.
    """
    for t in times:
        if not isinstance(t, Tensor):
            raise TypeError(f"times must be tensors, got {t!r}; see torch.tensor")
        if not t.is_floating_point():
            raise TypeError(f"times must be in floating point, got {t.dtype}")
        if t.ndim > x.ndim or any(n not in (1, m) for n, m in zip(t.shape, x.shape, strict=False)):
            raise ValueError(
                f"times must have shape (), ({len(x)},) or {tuple(x.shape)}, got {tuple(t.shape)}"
            )
        if t.device.type == "cpu" and not bool(((t >= 0) & (t <= 1)).all()):
            raise ValueError(f"times must lie in [0, 1], got {t.tolist()}")


def check_probs(p: Tensor, name: str = "clean") -> None:
    """Raise unless ``p`` (..., V) are probabilities, within `TOLERANCE`."""
    if not p.numel():
        return
    total = p.sum(-1)
    # a NaN compares with nothing
    if not bool(((total - 1).abs() <= TOLERANCE).all() & (p.amin() >= 0)):
        raise ValueError(
            f"{name} must be probabilities, finite and not negative, that sum to 1, got sums "
            f"from {float(total.min()):.4g} to {float(total.max()):.4g} and a least value of "
            f"{float(p.min()):.4g}"
        )


def check_tokens(
    x0: Tensor,
    classes: int,
    mask: Tensor | None,
    symbol: int | None = None,
    name: str = "x0",
) -> None:
    """Raise unless ``x0`` is tokens 0 .. classes - 1; values are looked at on the CPU only."""
    if not isinstance(x0, Tensor) or x0.dtype != torch.int64:
        got = x0.dtype if isinstance(x0, Tensor) else type(x0).__name__
        raise TypeError(f"{name} must be int64 tokens, got {got}")
    if x0.ndim < 2:
        raise ValueError(f"{name} must have shape (batch, *event), got {tuple(x0.shape)}")
    check_mask(x0, mask)
    if x0.device.type != "cpu" or not x0.numel():
        return
    low, high = (int(v) for v in real_tokens(x0, mask).aminmax())
    if low < 0 or high >= classes:
        note = "" if symbol is None else f" (the mask symbol is {symbol})"
        raise ValueError(f"{name} must hold tokens 0 .. {classes - 1}{note}, got {low} to {high}")


def check_mask(x: Tensor, mask: Tensor | None) -> None:
    """Raise unless ``mask`` is None, or bool in the shape of ``x``."""
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a bool tensor, got {kind_of(mask)}")
    if mask.dtype != torch.bool or mask.shape != x.shape:
        raise ValueError(
            f"mask must be bool of shape {tuple(x.shape)}, got {mask.dtype} of {tuple(mask.shape)}"
        )


def real_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """``x`` with 0 in the place of padding, which may hold anything."""
    check_mask(x, mask)
    return x if mask is None else torch.where(mask, x, 0)


def move(
    x: Tensor,
    moves: Moves,
    clean: Tensor,
    source: Tensor,
    classes: int,
    noise: Noise,
    tag: str,
    mask: Tensor | None = None,
) -> Tensor:
    """The tokens after the moves.

    Args:
        x: (batch, *event) int64.
        moves: see `Moves`.
        clean: (batch, *event, V) probabilities, or (batch, *event) tokens.
        source: pi, (V,) or, with a mask symbol, (V + 1,); or (batch, *event) tokens, each the one
            place that its own token's source has.
        classes: V.
        mask: (batch, *event) bool, False for tokens that stay as they are.

    Raises:
        ValueError: a probability that is used is negative, infinite or NaN, or those of a token do
            not sum to 1, within `TOLERANCE`.
    """
    check_mask(x, mask)
    moved = uniform(x, noise, tag) < moves.leave
    fine = moves.leave > -torch.inf  # not of NaN, nor of an infinite probability of what is there
    if mask is not None:
        moved, fine = moved & mask, fine | ~mask
    index = moved.nonzero(as_tuple=True)
    if not bool(fine.all()):
        raise ValueError("clean must be finite, got NaN or an infinite probability")
    if not len(index[0]):
        return x
    u = uniform(x, noise, tag + " to")[index]
    drawn, size = [], _at_a_time(x, classes)
    for start in range(0, len(u), size):
        part = tuple(axis[start : start + size] for axis in index)
        here = x[part]
        weights = _weights(moves, clean, source, classes, part, x.shape)
        # what it leaves is no place to go
        there = here.clamp(max=weights.shape[-1] - 1).unsqueeze(-1)
        kept = (here >= weights.shape[-1]).unsqueeze(-1).to(weights.dtype)
        weights.scatter_(-1, there, weights.gather(-1, there) * kept)
        some = weights.amax(-1) > 0  # where there is none, what is drawn is not used
        drawn.append(torch.where(some, inverse(weights, u[start : start + len(here)]), here))
    return x.index_put(index, torch.cat(drawn))


def _weights(
    moves: Moves,
    clean: Tensor,
    source: Tensor,
    classes: int,
    index: tuple[Tensor, ...],
    shape: torch.Size,
) -> Tensor:
    """(n, V or V + 1) weights of where to, a new tensor."""
    weights = torch.zeros((), dtype=double(clean), device=clean.device)
    if moves.on_clean is not None:
        p = rows_of(clean, index, classes)
        check_probs(p)
        if moves.on_source is None and not moves.on_clean.ndim:  # only ratios count
            return p
        weights = p.mul_(_part(moves.on_clean, index, shape))
    if moves.on_source is None:
        return weights
    if source.is_floating_point():
        pi = source.to(clean.device, double(clean))
    else:
        pi = functional.one_hot(source[index], classes).to(double(clean))
    if weights.ndim and pi.shape[-1] > classes:
        weights = functional.pad(weights, (0, pi.shape[-1] - classes))
    part = _part(moves.on_source, index, shape)
    return weights.addcmul_(pi, part) if weights.ndim else pi * part


def _part(value: Tensor, index: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
    """A factor of the rows at ``index``."""
    return value.expand(shape)[index].unsqueeze(-1) if value.ndim else value


def inverse(probs: Tensor, u: Tensor) -> Tensor:
    """`inverse_cdf` of rows (n, V) and levels (n,); on a CPU by two passes instead of nine."""
    if probs.device.type != "cpu":
        return inverse_cdf(probs, u)
    # summed in order it never falls, and so a class of probability 0 is never the first beyond u
    reach = probs.detach().cumsum(-1, dtype=torch.float64)
    level = (u * reach[:, -1]).unsqueeze(-1)
    return torch.searchsorted(reach, level, right=True).squeeze(-1).clamp(max=probs.shape[-1] - 1)


def _at_a_time(like: Tensor, classes: int) -> int:
    """Rows of a chunk."""
    return max(1, (CHUNK if like.device.type == "cpu" else CHUNK_ELSEWHERE) // classes)


def draw_classes(probs: Tensor, u: Tensor) -> Tensor:
    """A class of every token, by inversion of ``u`` (batch, *event), a few rows at a time."""
    flat, levels = probs.flatten(0, -2), u.flatten()
    size = _at_a_time(flat, probs.shape[-1])
    parts = [
        inverse(flat[start : start + size], levels[start : start + size])
        for start in range(0, len(levels), size)
    ]
    return torch.cat(parts).reshape(u.shape) if parts else u.long()
