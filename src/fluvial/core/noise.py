"""Keyed noise: random numbers as a function of (seed, row, step, tag), not as a stream.

The function is Philox-4x32-10 (Salmon, Moraes, Dror and Shaw, *Parallel random numbers: as easy as
1, 2, 3*, SC 2011), a bijection of 128-bit counters for every 64-bit key::

    key     = seed, into which each step has been folded
    counter = (block, row id, row id >> 32, hash of kind and tag)

A block is four words of 32 bits. Block b serves the elements 4 b .. 4 b + 3 of a row's event.
Under one key no counter serves two purposes, so draws of different rows and elements are disjoint
by construction, and so are those of different tags, unless two tags share a 32-bit hash, a chance
of 2^-32 a pair.
"""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2s
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fluvial.core.arguments import kind_of
from fluvial.core.protocols import Noise

Words: TypeAlias = Any  # an int, an int64 array or an int64 tensor of 32-bit words
Key: TypeAlias = Sequence[Words]  # low and high word of the seed, hash of kind and tag
Kernel: TypeAlias = Callable[[Words, int, Key, torch.dtype], Any]  # (ids, blocks, key, dtype)

MASK = 0xFFFFFFFF
LOWER = 1 << 31  # from this block on lie the lower words of a float64, beyond any event

# Elements in one pass of a kernel, whose integers are several times the size of its result. On a
# CPU they should stay in cache, and torch calls no threads for half as many.
CHUNK = (1 << 16) - 1
CHUNK_ELSEWHERE = 1 << 24

NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


def _philox(counter: Sequence[Words], key: Sequence[Words]) -> list[Words]:
    """Ten rounds of Philox-4x32 on ints, arrays or tensors, which broadcast.

    A product of two words fills 64 bits. Where int64 takes it for negative, the shift brings in
    ones, hence the masks; low halves are masked at the end alone, since only ``^`` reads them.
    No word depends on both block and row before the second round ends, so that the first two cost
    next to nothing.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0 = (p1 >> 32) ^ c1
        c0 ^= k0  # in place: temporaries are what this costs
        c0 &= MASK
        c2 = (p0 >> 32) ^ c3
        c2 ^= k1
        c2 &= MASK
        c1, c3 = p1, p0
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return [c0, c1 & MASK, c2, c3 & MASK]


def _fold(seed: int, step: int) -> int:
    """The seed of a step: from a block of the seed's own Philox that no row id < 2^63 can reach."""
    low, high, *_ = _philox((step & MASK, step >> 32, MASK, 0), (seed & MASK, seed >> 32))
    return low | high << 32


def _uint64(name: str, number: int) -> int:
    number = operator.index(number)  # NumPy's integers would overflow
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{name} must lie in [0, 2**64), got {number}")
    return number


def _hash(kind: str, tag: str) -> int:
    return int.from_bytes(blake2s(f"{kind}:{tag}".encode(), digest_size=4).digest(), "little")


# What torch.compiler.assume_constant_result does, which would import the compiler to do it.
_hash._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _words(ids: Words, blocks: int, key: Key, bits: int) -> list[Words]:
    """Four planes (rows, blocks), plane i the words i of all blocks.

    Words of 32 bits, or of 53, the upper 32 of which are the same.
    """
    block = np.arange(blocks) if _is_array(ids) else torch.arange(blocks, device=ids.device)
    row = (ids & MASK)[:, None], ((ids >> 32) & MASK)[:, None]
    k0, k1, tag = key
    planes = _philox((block, *row, tag), (k0, k1))
    if bits == 32:
        return planes
    lower = _philox((block + LOWER, *row, tag), (k0, k1))
    return [high << 21 | low >> 11 for high, low in zip(planes, lower, strict=True)]


def _interleave(planes: Sequence[Any], dtype: Any) -> np.ndarray:
    """(rows, blocks, 4), in the order of the elements."""
    result = np.empty((*planes[0].shape, 4), dtype)
    for i, plane in enumerate(planes):
        result[..., i] = plane
    return result


# Kernels. From tensors, four planes, since what follows is fused better; from arrays, the same
# interleaved. On a CPU arrays are faster: NumPy starts an operation in a quarter of torch's time,
# and in one thread, whereas torch shares a logarithm of 2048 numbers out to its threads.


def _uniform(ids: Words, blocks: int, key: Key, dtype: torch.dtype) -> Any:
    bits, digits = (53, 53) if dtype == torch.float64 else (32, 24)
    planes = [plane >> (bits - digits) for plane in _words(ids, blocks, key, bits)]
    if _is_array(ids):
        u = _interleave(planes, NUMPY[dtype])
        u *= 2.0**-digits
        return u
    return [plane.to(dtype) * 2.0**-digits for plane in planes]


def _normal(ids: Words, blocks: int, key: Key, dtype: torch.dtype) -> Any:
    """Box and Muller: sqrt(-2 log u) (cos v, sin v), u in (0, 1] and v in [-pi, pi).

    u stays in double precision until its logarithm is taken: near 0 it makes the tails, near 1 the
    middle, and no float32 holds both 2^-32 and 1 - 2^-32.
    """
    bits = 53 if dtype == torch.float64 else 32
    half, turn = 1 << (bits - 1), 2 * math.pi * 2.0**-bits
    planes = _words(ids, blocks, key, bits)
    if _is_array(ids):
        words = _interleave(planes, np.int64)
        u = (words[..., 0::2] + 1) * 2.0**-bits
        np.log(u, out=u)
        u *= -2
        radius = np.sqrt(u.astype(NUMPY[dtype], copy=False))
        v = (words[..., 1::2] - half).astype(NUMPY[dtype])
        v *= turn
        # torch computes both in one pass, and in one thread
        pairs = torch.polar(torch.from_numpy(radius), torch.from_numpy(v))
        return pairs.numpy().view(NUMPY[dtype])
    result = []
    for a, b in (planes[:2], planes[2:]):
        r = ((a + 1).to(_double(a)) * 2.0**-bits).log().mul(-2).to(dtype).sqrt()
        v = (b - half).to(dtype) * turn
        result += [r * v.cos(), r * v.sin()]
    return result


def _is_array(ids: Words) -> bool:
    return isinstance(ids, np.ndarray)


def _double(x: Tensor) -> torch.dtype:
    """float64 where there is such a thing."""
    return torch.float32 if x.device.type == "mps" else torch.float64


_compiler_missing = False


@functools.cache
def _compiled(kernel: Kernel) -> Kernel:
    # One thread, as torch.randn: a draw is too short to wait for others.
    return torch.compile(kernel, dynamic=True, options={"cpp.threads": 1})


def _run(kernel: Kernel, ids: Tensor | None, like: Tensor, key: Key, fuse: bool) -> Tensor:
    """``kernel`` for ``like``: (batch, elements), by the fastest way there is."""
    global _compiler_missing
    batch, n = like.shape[0], math.prod(like.shape[1:])
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    traced = torch.compiler.is_compiling()
    fuse = fuse and not traced and not _compiler_missing
    rows: Words
    if like.device.type == "cpu" and not fuse and not traced:
        rows = np.arange(batch) if ids is None else ids.cpu().numpy()
    elif ids is None:
        rows = torch.arange(batch, device=like.device)
    else:
        rows = ids.to(like.device, non_blocking=ids.device.type == "cpu")
    if traced:
        return torch.stack(kernel(rows, -(-n // 4), key, dtype), -1).flatten(1)[:, :n]
    if not fuse:
        return _in_chunks(kernel, rows, n, key, dtype)
    # Tensors, since a new seed, step or tag must not compile anew, and on the host, where they
    # become arguments of a launch without a copy.
    words = [torch.tensor(word, device="cpu") for word in key]
    try:
        return _in_chunks(_compiled(kernel), rows, n, words, dtype)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        _compiler_missing = True
        reason = str(error.inner_exception).strip().partition("\n")[0]
        warnings.warn(f"noise runs uncompiled: {reason}", RuntimeWarning, stacklevel=4)
        return _run(kernel, ids, like, key, False)


def _in_chunks(kernel: Kernel, ids: Words, n: int, key: Key, dtype: torch.dtype) -> Tensor:
    array = _is_array(ids)
    host = array or ids.device.type == "cpu"
    blocks = -(-n // 4)
    rows = max(1, (CHUNK if host else CHUNK_ELSEWHERE) // (4 * blocks))
    parts = []
    for start in range(0, len(ids), rows):
        part = kernel(ids[start : start + rows], blocks, key, dtype)
        if not array:
            part = _interleave(part, NUMPY[dtype]) if host else torch.stack(part, -1)
        parts.append(part.reshape(-1, 4 * blocks)[:, :n])
    if not host:
        return torch.cat(parts)
    if len(parts) > 1:
        return torch.from_numpy(np.concatenate(parts))
    return torch.from_numpy(np.ascontiguousarray(parts[0]))


def inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """The class that holds the share ``u`` of the sum, where classes lie in line: a draw, if u is.

    In double precision, so that of many classes and of rare ones each gets its share: a race of
    exponentials in float32 cannot draw what is rarer than about 2^-24. A class of probability 0 is
    never chosen.

    Args:
        probs: (..., K), finite, >= 0, a positive sum in every row; not checked.
        u: (...) in [0, 1), best in float64.

    Returns:
        (...) int64.
    """
    p = probs.detach().to(_double(probs))
    q = p / p.amax(-1, keepdim=True)  # its sum cannot overflow
    # A parallel sum need not be monotone: by a rounding, a class of probability 0 could be hit.
    reach = torch.where(q > 0, q.cumsum(-1), 0)
    level = u.to(q.dtype).unsqueeze(-1) * reach.amax(-1, keepdim=True)  # below the last reach
    return (reach > level).to(torch.uint8).argmax(-1)  # the first of equals


@dataclass(frozen=True, eq=False)
class KeyedNoise:
    """Noise that depends on the seed, the row, the step and the tag of a draw, and on nothing else.

    A draw is shaped as ``like``, (batch, *event), in its dtype and on its device. Element j of row
    i, j the flat index in the event, is a function of (seed, steps, id of row i, kind of draw, tag,
    j). So a batch drawn whole equals the same batch drawn in pieces, bit for bit, and a longer
    event begins as a shorter one does. Nothing reads or sets a global random state, and `normal`
    and `uniform` never wait for an accelerator.

    float32 and float64 see the same noise: see `uniform` and `normal`. bfloat16 and float16 get the
    float32 draw, rounded. Uniforms agree bit for bit between devices and with ``compile``; normals
    agree to the last bits of logarithm, sine and cosine.

    Inside code that you compile yourself, seed and step are constants: a new one compiles that code
    anew. Draw outside it.

    Args:
        seed: 0 <= seed < 2^64. Neighbouring seeds are as independent as any.
        compile: fuse each kind of draw with `torch.compile`, once for all seeds, steps, tags and
            shapes, but once more for single rows and for events of at most 4 elements. Without a
            compiler: one warning, and draws as if not set.
        ids: (batch,) int64, the number of every row; 0 .. batch - 1 if None. Set it with `rows`.

    Raises:
        ValueError: ``seed`` is out of range.
    """

    seed: int
    compile: bool = False
    ids: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", _uint64("seed", self.seed))

    def at(self, step: int) -> KeyedNoise:
        """The noise of one step, 0 <= step < 2^64. Steps nest.

        ``at(3)``, ``at(5)``, ``at(3).at(5)`` and ``at(5).at(3)`` are independent of each other.

        Raises:
            ValueError: ``step`` is out of range.
        """
        return replace(self, seed=_fold(self.seed, _uint64("step", step)))

    def rows(self, ids: Tensor) -> KeyedNoise:
        """The noise whose row i is row ``ids[i]`` of this one.

        ``noise.rows(ids).normal(x[ids])`` is ``noise.normal(x)[ids]``, and ``rows(a).rows(b)`` is
        ``rows(a[b])``, so that a rank's share of the rows can be split again. `rows` and `at`
        commute.

        Args:
            ids: (batch,) int64, 0 <= id < 2^63, repeats allowed. Best on the device of the draws:
                from elsewhere each draw copies them.

        Raises:
            TypeError: ``ids`` is not int64.
            ValueError: ``ids`` is not (batch,).
            IndexError: this noise has its rows set already, and fewer than ``ids`` asks for.
        """
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
            raise TypeError(f"ids must be int64, got {getattr(ids, 'dtype', kind_of(ids))}")
        if ids.ndim != 1:
            raise ValueError(f"ids must have shape (batch,), got {tuple(ids.shape)}")
        return replace(self, ids=ids if self.ids is None else self.ids[ids.to(self.ids.device)])

    def normal(self, like: Tensor, tag: str = "") -> Tensor:
        """N(0, 1), by Box and Muller's transform, which turns two words into two elements.

        Values reach 6.66 in float32 and 8.57 in float64. The two agree to 2e-6 where the radius
        r = sqrt(-2 log u) of the float64 draw is below 4, in all but 3e-4 of the pairs; farther out
        float32 lacks the low bits of u, and its r is smaller by up to 2^-32 exp(r^2 / 2) / r.

        Raises:
            TypeError: ``like`` is not floating.
            ValueError: ``like`` has no batch, or not as many rows as there are ids.
        """
        return self._draw(_normal, like, tag, "normal")

    def uniform(self, like: Tensor, tag: str = "") -> Tensor:
        """U[0, 1): multiples of 2^-53 in float64 and, the same rounded down, of 2^-24 in float32.

        Raises:
            TypeError: ``like`` is not floating.
            ValueError: ``like`` has no batch, or not as many rows as there are ids.
        """
        u = self._draw(_uniform, like, tag, "uniform")
        if u.itemsize < 4:  # rounding may have reached 1
            u.clamp_(max=1 - torch.finfo(u.dtype).eps / 2)
        return u

    def categorical(self, probs: Tensor, tag: str = "") -> Tensor:
        """Class k with probability ``probs[..., k] / probs.sum(-1)``, by inversion.

        In double precision and from one uniform of 53 bits, whatever the dtype of ``probs``. A
        class of probability zero is never drawn.

        Args:
            probs: (batch, ..., K), >= 0, a positive sum in every row.
            tag: what the draw is for.

        Returns:
            (batch, ...) int64.

        Raises:
            TypeError: ``probs`` is not floating.
            ValueError: ``probs`` is not (batch, ..., K) with K >= 1, has a negative, infinite or
                NaN entry or a row of zeros, or not as many rows as there are ids. The check of the
                entries waits for an accelerator, once a call; nothing else here does.
        """
        if not probs.is_floating_point():
            raise TypeError(f"probs must be floating, got {probs.dtype}")
        if probs.ndim < 2 or probs.shape[-1] == 0:
            raise ValueError(f"probs must have shape (batch, ..., K), got {tuple(probs.shape)}")
        p = probs.detach().to(_double(probs))
        if not (((p >= 0) & (p < math.inf)).all() & (p.amax(-1) > 0).all()):
            raise ValueError("probs must be finite and >= 0, with a positive sum in every row")
        return inverse_cdf(p, self._draw(_uniform, p[..., 0], tag, "categorical"))

    def _draw(self, kernel: Kernel, like: Tensor, tag: str, kind: str) -> Tensor:
        if not like.is_floating_point():
            raise TypeError(f"like must be floating, got {like.dtype}")
        if like.ndim == 0:
            raise ValueError("like must have shape (batch, *event), got ()")
        if self.ids is not None and self.ids.shape[0] != like.shape[0]:
            raise ValueError(f"got {self.ids.shape[0]} row ids for a batch of {like.shape[0]}")
        if not like.numel():
            return like.new_empty(like.shape)
        key = self.seed & MASK, self.seed >> 32, _hash(kind, tag)
        draw = _run(kernel, self.ids, like, key, self.compile)
        return draw.to(like.dtype).reshape(like.shape)


class BrownianPath:
    """Standard Brownian motion W on [0, 1], W(0) = 0, as a function of time.

    Lévy's construction: W(1) is normal, and a dyadic interval [a, b] is halved at its middle m ::

        W(m) = (W(a) + W(b)) / 2 + sqrt(b - a) / 2 * xi_m

    where xi_m is the draw of ``noise`` at the step that numbers the node m of the tree. So W(t) is
    a function of (noise, t): refining a grid, or asking in another order, changes no bit of it. Nor
    does ``resolution``, at times that are multiples of it.

    Between two multiples of ``resolution`` W is interpolated linearly; there W(t) has a standard
    error of at most sqrt(resolution) / 2, 5e-4 by default, about the true path.

    A sweep on a grid of multiples of 2^-k draws once a step, one on any grid of step h about
    log2(h / resolution) + 3 times. At most log2(1 / resolution) + 8 states are kept.

    Args:
        noise: keyed noise; its rows are those of the path.
        like: (batch, *event), shape, dtype and device of W. Below float32, sums are float32.
        resolution: a power of two, 2^-52 <= resolution <= 1.

    Raises:
        ValueError: ``resolution`` is something else.
    """

    def __init__(self, noise: Noise, like: Tensor, resolution: float = 2.0**-20) -> None:
        mantissa, exponent = math.frexp(resolution)
        levels = 1 - exponent
        if mantissa != 0.5 or not 0 <= levels <= 52:
            raise ValueError(f"resolution must be a power of two in [2**-52, 1], got {resolution}")
        self.noise = noise
        self.resolution = resolution
        self._dtype = like.dtype
        dtype = torch.promote_types(like.dtype, torch.float32)
        self._like = torch.empty((), dtype=dtype, device=like.device).expand(like.shape)
        self._size = 1 << levels
        self._node = functools.lru_cache(levels + 8)(self._bisect)

    def __call__(self, t: float) -> Tensor:
        """W(t), 0 <= t <= 1, shaped as ``like``. `ValueError` elsewhere."""
        return self._at(t).to(self._dtype)

    def increment(self, t: float, s: float) -> Tensor:
        """W(s) - W(t), of variance |s - t|."""
        before = self._at(t)  # first: a sweep has just been there
        return (self._at(s) - before).to(self._dtype)

    def _at(self, t: float) -> Tensor:
        if not 0 <= t <= 1:
            raise ValueError(f"t must lie in [0, 1], got {t}")
        index, rest = divmod(float(t) * self._size, 1)  # exact, as the size is a power of two
        left = self._node(int(index))
        if not rest:
            return left.clone()  # the caller's own: the original is kept
        return left + (self._node(int(index) + 1) - left) * rest

    def _bisect(self, index: int) -> Tensor:
        """W(index * resolution) from the two ends of the interval it halves."""
        size = self._size
        if index == 0:
            return torch.zeros_like(self._like)
        if index == size:
            return self.noise.at(0).normal(self._like, "brownian")
        gap = index & -index
        number = (size + index) // (2 * gap)  # 1 for 1/2, 2 and 3 for 1/4 and 3/4, and so on
        xi = self.noise.at(number).normal(self._like, "brownian")
        mean = (self._node(index - gap) + self._node(index + gap)) * 0.5
        return mean + xi * math.sqrt(gap / size / 2)
