from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fluvial.core import noise as module
from fluvial.core.noise import BrownianPath, KeyedNoise

ALARM = 1e-6  # the chance of a false alarm, over all the comparisons of one statement
KINDS = ["normal", "uniform"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def sigmas(comparisons: int = 1) -> float:
    """How many standard errors off one of so many Gaussian estimates may be."""
    return float(stats.norm.isf(ALARM / 2 / comparisons))


def draw(noise: KeyedNoise, kind: str, like: Tensor, tag: str = "") -> Tensor:
    if kind == "categorical":
        return noise.categorical(like.new_ones(*like.shape, 7, dtype=torch.float32), tag)
    return getattr(noise, kind)(like, tag)


def standard(noise: KeyedNoise, kind: str, like: Tensor, tag: str = "") -> Tensor:
    """A draw with mean 0 and variance 1."""
    x = draw(noise, kind, like, tag)
    return x if kind == "normal" else (x - 0.5) * 12**0.5


def assert_uncorrelated(streams: list[Tensor]) -> None:
    """Streams with mean 0 and variance 1: every pair, then every pair of squares."""
    x = torch.stack([stream.double().flatten() for stream in streams])
    pairs = len(x) * (len(x) - 1) // 2
    squares = x.square() - 1
    for y in (x, squares / squares.square().mean().sqrt()):
        products = (y @ y.T).fill_diagonal_(0) / y.shape[1]
        assert products.abs().max() < sigmas(pairs) / y.shape[1] ** 0.5


# The generator

# counter, key and output of philox4x32-10 in the known-answer tests of Random123
VECTORS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize(
    "number", [int, lambda word: np.array([word]), lambda word: torch.tensor([word])]
)
@pytest.mark.parametrize("vector", VECTORS)
def test_known_answers(vector: tuple[str, str, str], number: Any) -> None:
    counter, key, output = ([int(word, 16) for word in words.split()] for words in vector)
    words = module._philox([number(word) for word in counter], key)
    assert [int(word if number is int else word.item()) for word in words] == output


def test_layout() -> None:
    """Element j of row i is word j % 4 of block j // 4, from the scalar function."""
    seed, ids = 0x123456789ABCDEF0, [0, 5, 2**32 + 1, 2**63 - 1]
    noise = KeyedNoise(seed).rows(torch.tensor(ids))

    def words(kind: str, block: int) -> list[list[int]]:
        tail = module._hash(kind, "x")
        return [
            [
                module._philox((b, i % 2**32, i >> 32, tail), (seed % 2**32, seed >> 32))[w]
                for b in range(block, block + 3)
                for w in range(4)
            ]
            for i in ids
        ]

    def fine(kind: str) -> Tensor:
        high, low = (torch.tensor(words(kind, block))[:, :10] for block in (0, 2**31))
        return (high * 2**21 + low // 2**11).double()

    u = fine("uniform") / 2**53
    assert torch.equal(noise.uniform(torch.empty(4, 2, 5).double(), "x").flatten(1), u)
    assert torch.equal(noise.uniform(torch.empty(4, 10), "x").double(), (u * 2**24).floor() / 2**24)

    radius = ((fine("normal")[:, 0::2] + 1) / 2**53).log().mul(-2).sqrt()
    angle = (fine("normal")[:, 1::2] / 2**53 - 0.5) * 2 * torch.pi
    z = torch.stack((radius * angle.cos(), radius * angle.sin()), -1).flatten(1)
    torch.testing.assert_close(noise.normal(torch.empty(4, 10).double(), "x"), z)


def test_step_is_a_seed() -> None:
    noise = KeyedNoise(3)
    x = torch.empty(2, 5)
    assert torch.equal(noise.at(4).normal(x), KeyedNoise(noise.at(4).seed).normal(x))
    assert 0 <= noise.at(4).seed < 2**64
    other = KeyedNoise(np.int64(3)).at(torch.tensor(4))  # type: ignore[arg-type]
    assert other.seed == noise.at(4).seed


# What a draw depends on


@pytest.mark.parametrize("kind", [*KINDS, "categorical"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("event", [(), (3,), (3, 5, 5)])
@pytest.mark.parametrize("chunk", [module.CHUNK, 128])
def test_whole_equals_pieces(
    kind: str, dtype: torch.dtype, event: tuple[int, ...], chunk: int, monkeypatch: Any
) -> None:
    noise = KeyedNoise(7).at(2)
    whole = draw(noise, kind, torch.empty(100, *event, dtype=dtype), "tag")
    monkeypatch.setattr(module, "CHUNK", chunk)
    cuts = [0, 1, 3, 3, 10, 41, 77, 100]
    pieces = [
        draw(noise.rows(torch.arange(a, b)), kind, torch.empty(b - a, *event, dtype=dtype), "tag")
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    assert whole.shape == (100, *event)
    assert whole.dtype == (torch.int64 if kind == "categorical" else dtype)
    assert whole.is_contiguous()
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_event_begins_as_a_shorter_one(kind: str) -> None:
    noise = KeyedNoise(7)
    long = draw(noise, kind, torch.empty(5, 103))
    for n in (1, 2, 3, 4, 50):
        assert torch.equal(draw(noise, kind, torch.empty(5, n)), long[:, :n])
    assert torch.equal(draw(noise, kind, torch.empty(5, 1, 103)).flatten(1), long)


@pytest.mark.parametrize("kind", KINDS)
def test_rows(kind: str) -> None:
    noise, x = KeyedNoise(7), torch.empty(20, 6)
    ids = torch.tensor([3, 19, 3, 0])
    assert torch.equal(draw(noise.rows(ids), kind, x[ids]), draw(noise, kind, x)[ids])
    assert torch.equal(
        draw(noise.rows(ids).at(5), kind, x[ids]), draw(noise.at(5).rows(ids), kind, x[ids])
    )
    far = torch.tensor([2**62, 7, 2**63 - 1])
    part = torch.tensor([2, 0])
    assert torch.equal(
        draw(noise.rows(far).rows(part), kind, x[:2]), draw(noise.rows(far[part]), kind, x[:2])
    )
    with pytest.raises(IndexError):
        noise.rows(far).rows(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_streams_are_independent(kind: str) -> None:
    """Seeds, steps, nested steps, tags and kinds, neighbours of each among them."""
    noise, x = KeyedNoise(1), torch.empty(64, 512)
    noises = [KeyedNoise(seed) for seed in (0, 1, 2, 3, 2**32, 2**32 + 1, 2**63, 2**64 - 1)]
    noises += [noise.at(step) for step in (0, 1, 2, 3, 5, 2**32, 2**64 - 1)]
    noises += [noise.at(3).at(5), noise.at(5).at(3), noise.at(0).at(0), noise.at(1).at(1)]
    streams = [standard(each, kind, x) for each in noises]
    streams += [standard(noise, kind, x, tag) for tag in ("a", "b", "aa", "drop", "normal")]
    streams += [standard(noise, other, x, "kind") for other in KINDS]
    assert_uncorrelated(streams)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_independent(kind: str) -> None:
    ids = [0, 1, 2, 3, 4, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**33, 2**62, 2**63 - 2, 2**63 - 1]
    x = standard(KeyedNoise(1).rows(torch.tensor(ids)), kind, torch.empty(len(ids), 1 << 16))
    assert_uncorrelated(list(x))


@pytest.mark.parametrize("kind", KINDS)
def test_elements_are_independent(kind: str) -> None:
    """Lags within a row, which cross words, pairs and blocks, and lags between rows."""
    x = standard(KeyedNoise(1), kind, torch.empty(256, 512)).double()
    lags = [1, 2, 3, 4, 5, 7, 8, 16, 64, 128]
    for y in (x, x.T):
        for z in (y, (y.square() - 1) / (y.square() - 1).square().mean().sqrt()):
            for lag in lags:
                product = z[:, lag:] * z[:, :-lag]
                assert abs(product.mean()) < sigmas(4 * len(lags)) / product.numel() ** 0.5
    # words of a block, elements 0 .. 3, against each other over many rows
    assert_uncorrelated(list(standard(KeyedNoise(2), kind, torch.empty(1 << 18, 6)).T))


def test_cells_of_successive_uniforms() -> None:
    for size, side in ((2, 16), (3, 8), (4, 4)):
        u = KeyedNoise(3).uniform(torch.empty(1 << 18, size))
        cell = sum((u[:, i] * side).long() * side**i for i in range(size))
        counts = torch.bincount(cell, minlength=side**size)
        assert stats.chisquare(counts).pvalue > ALARM


def test_bits() -> None:
    """Each bit is fair, and independent of its neighbour in the word, the event and the batch."""
    key = 5, 7, module._hash("normal", "")
    planes = module._words(np.arange(512), 128, key, 32)
    words = torch.from_numpy(np.stack(planes, -1)).flatten(1)
    bits = (words[..., None] >> torch.arange(32)) & 1
    samples = [
        bits,
        bits[..., 1:] ^ bits[..., :-1],
        bits[:, 1:] ^ bits[:, :-1],
        bits[1:] ^ bits[:-1],
    ]
    for sample in samples:
        ones = sample.double().mean((0, 1))
        assert (ones - 0.5).abs().max() < sigmas(4 * 32) * 0.5 / (sample.numel() / len(ones)) ** 0.5


# Distributions


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_normal_moments_tails_and_law(dtype: torch.dtype) -> None:
    z = KeyedNoise(11).normal(torch.empty(1 << 11, 1 << 9, dtype=dtype)).double().flatten()
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        error = (variance / len(z)) ** 0.5
        assert abs(z.pow(power).mean() - mean) < sigmas(4) * error
    for level in (2.0, 3.0, 4.0):
        for tail in (z > level, z < -level):
            p = stats.norm.sf(level)
            assert abs(tail.double().mean() - p) < sigmas(6) * (p / len(z)) ** 0.5
    assert stats.kstest(z, "norm").pvalue > ALARM
    # Box and Muller's pairs: the squared radius is exponential, the angle uniform
    pairs = z.view(-1, 2)
    assert stats.kstest(pairs.square().sum(1) / 2, "expon").pvalue > ALARM
    angle = torch.atan2(pairs[:, 1], pairs[:, 0]) / (2 * torch.pi) + 0.5
    assert stats.kstest(angle, "uniform").pvalue > ALARM


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_uniform_moments_and_law(dtype: torch.dtype) -> None:
    u = KeyedNoise(11).uniform(torch.empty(1 << 10, 1 << 10, dtype=dtype)).double().flatten()
    assert u.min() >= 0
    assert u.max() < 1
    for power in (1, 2, 3, 4):
        mean = 1 / (power + 1)
        error = ((1 / (2 * power + 1) - mean**2) / len(u)) ** 0.5
        assert abs(u.pow(power).mean() - mean) < sigmas(4) * error
    assert stats.kstest(u, "uniform").pvalue > ALARM
    digits = 2**20 if dtype == torch.float64 else 2**8
    assert stats.kstest((u * digits).frac() + 1e-9, "uniform").pvalue > ALARM


def test_precisions_see_the_same_noise() -> None:
    noise, x = KeyedNoise(13), torch.empty(1 << 10, 1 << 9)
    fine = noise.uniform(x.double())
    assert torch.equal(noise.uniform(x).double(), (fine * 2**24).floor() / 2**24)
    assert (fine != noise.uniform(x)).double().mean() > 0.99
    z = noise.normal(x.double())
    radius = z.view(-1, 2).norm(dim=1)[:, None].expand(-1, 2).reshape(z.shape)
    missing = 2**-32 * (radius.square() / 2).exp() / radius
    gap = (noise.normal(x) - z).abs()
    assert (gap < 2e-6 + missing).all()
    assert gap[radius < 4].max() < 2e-6
    assert (z.float() != z).double().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    noise, x = KeyedNoise(13), torch.empty(1 << 9, 1 << 9)
    assert torch.equal(noise.normal(x.to(dtype)), noise.normal(x).to(dtype))
    u = noise.uniform(x.to(dtype))
    assert noise.uniform(x).to(dtype).max() == 1  # so the next line says something
    assert u.max() == 1 - torch.finfo(dtype).eps / 2
    assert torch.equal(u, noise.uniform(x).to(dtype).clamp(max=u.max()))


def test_extreme_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, wide in ((0, False), (2**32 - 1, False), (0, True), (2**53 - 1, True)):
        words = [np.full((1, 1), word)] * 4
        monkeypatch.setattr(module, "_words", lambda *_, words=words: words)
        like = torch.empty(1, 4, dtype=torch.float64 if wide else torch.float32)
        z, u = KeyedNoise(0).normal(like), KeyedNoise(0).uniform(like)
        assert z.isfinite().all()
        assert 0 <= u.min() <= u.max() < 1
        largest = 0.0 if word else (8.57 if wide else 6.66)
        assert z.abs().max() == pytest.approx(largest, abs=0.01)


# Classes


@pytest.mark.parametrize("dtype", DTYPES)
def test_categorical_frequencies(dtype: torch.dtype) -> None:
    p = torch.tensor([0.0, 3.0, 0.0, 1.0, 0.5, 8.0, 0.125, 0.0], dtype=dtype)
    draws = KeyedNoise(17).categorical(p.expand(1 << 11, 1 << 7, 8))
    assert draws.shape == (1 << 11, 1 << 7)
    assert draws.dtype == torch.int64
    counts = torch.bincount(draws.flatten(), minlength=8)
    some = p > 0
    assert counts[~some].sum() == 0
    expected = p[some].double() / p.double().sum() * draws.numel()
    assert stats.chisquare(counts[some], expected).pvalue > ALARM


def test_categorical_scale_and_edges() -> None:
    noise = KeyedNoise(17)
    p = torch.tensor([[0.2, 0.0, 0.8], [0.5, 0.5, 0.0]]).double().repeat(500, 1)
    draws = noise.categorical(p)
    for scale in (2.0**-1000, 2.0**1000, 5e-324, 1e308):
        scaled = p * scale if scale != 5e-324 else (p > 0).double() * scale
        assert torch.isin(noise.categorical(scaled), torch.tensor([0, 1, 2])).all()
        if scale in (2.0**-1000, 2.0**1000):
            assert torch.equal(noise.categorical(scaled), draws)
    single = torch.nn.functional.one_hot(torch.arange(1000) % 5, 5).double()
    assert torch.equal(noise.categorical(single), torch.arange(1000) % 5)
    assert noise.categorical(torch.ones(3, 1)).tolist() == [0, 0, 0]
    assert noise.categorical(torch.ones(0, 4)).shape == (0,)
    assert noise.categorical(torch.ones(4, 0, 3)).shape == (4, 0)


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_categorical_skips_zeros_at_both_ends(u: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyedNoise, "_draw", lambda self, kernel, like, *_: like * 0 + u)
    p = torch.tensor([[0.0, 0.3, 0.0, 0.6, 0.0], [0.0, 0.0, 1e-30, 0.0, 0.0]])
    assert KeyedNoise(0).categorical(p).tolist() == [1 if u == 0 else 3, 2]


# Surroundings


def test_global_state_is_untouched() -> None:
    def states() -> str:
        arrays = np.random.get_state(legacy=False)  # noqa: NPY002
        return f"{torch.get_rng_state().tolist()} {arrays} {random.getstate()}"

    before = states()
    noise, x = KeyedNoise(1), torch.empty(10, 10)
    first = noise.normal(x)
    noise.uniform(x)
    noise.categorical(x.new_ones(3, 4))
    assert states() == before
    with torch.random.fork_rng():
        torch.manual_seed(5)
        assert torch.equal(noise.normal(x), first)


def test_default_dtype_and_inference_mode_change_nothing() -> None:
    noise, x = KeyedNoise(1), torch.empty(10, 10)
    expected = noise.normal(x), noise.uniform(x)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(noise.normal(x), expected[0])
        assert torch.equal(noise.uniform(x), expected[1])
    finally:
        torch.set_default_dtype(torch.float32)
    weight = torch.nn.Parameter(torch.empty(10, 10))
    assert not noise.normal(weight).requires_grad
    with torch.inference_mode():
        assert torch.equal(noise.normal(x), expected[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tensors_and_arrays_give_the_same(dtype: torch.dtype) -> None:
    """Accelerators and the compiler run the kernels on tensors, a CPU on arrays."""
    ids, key = torch.tensor([0, 1, 2**40, 2**63 - 1]), (5, 7, 9)
    for kernel, tolerance in ((module._uniform, 0), (module._normal, 4 * torch.finfo(dtype).eps)):
        array = torch.from_numpy(module._in_chunks(kernel, ids.numpy(), 33, key, dtype).numpy())
        for words in (key, [torch.tensor(word) for word in key]):
            tensor = module._in_chunks(kernel, ids, 33, words, dtype)
            torch.testing.assert_close(
                tensor, array, rtol=0, atol=tolerance * float(array.abs().max())
            )


@pytest.mark.parametrize("shape", [(3, 5), (0, 5), (3, 0), (3,)])
def test_device_of_like(shape: tuple[int, ...]) -> None:
    """The meta device runs what an accelerator runs, and refuses whatever waits for values."""
    like = torch.empty(shape, device="meta", dtype=torch.bfloat16)
    ids = torch.arange(shape[0])
    for draws in (
        KeyedNoise(1).normal(like),
        KeyedNoise(1).uniform(like),
        KeyedNoise(1).rows(ids).normal(like),
    ):
        assert (draws.shape, draws.dtype, draws.device) == (like.shape, like.dtype, like.device)


@pytest.mark.slow
def test_compiled_equals_eager() -> None:
    import torch._dynamo.testing

    eager, fused = KeyedNoise(3), KeyedNoise(3, compile=True)
    compilations = []
    for shape in [(64, 20), (7, 5), (33, 3, 8, 8)]:
        x = torch.empty(shape)
        for step in (1, 2**60):
            for tag in ("", "b"):
                e, f = eager.at(step), fused.at(step)
                assert torch.equal(f.uniform(x, tag), e.uniform(x, tag))
                torch.testing.assert_close(f.normal(x, tag), e.normal(x, tag), rtol=0, atol=2e-6)
                compilations.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(set(compilations)) == 1  # neither seed, step, tag nor shape compiles anew
    for shape in [(50, 7), (50, 101)]:
        x = torch.empty(shape)
        for size in (10, 7, 25):  # vectors end elsewhere in each
            pieces = [fused.rows(i).normal(x[i]) for i in torch.arange(50).split(size)]
            assert torch.equal(torch.cat(pieces), fused.normal(x))
    assert fused.rows(torch.arange(7)).at(1).compile


@pytest.mark.slow
def test_traced_by_the_user() -> None:
    def noisy(x: Tensor, noise: KeyedNoise) -> Tensor:
        return noise.at(3).normal(x, "a") + noise.uniform(x, "b")

    x, noise = torch.empty(6, 7), KeyedNoise(5)
    compiled = torch.compile(noisy, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, noise), noisy(x, noise), rtol=0, atol=2e-6)


def test_no_compiler_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import BackendCompilerFailed

    def broken(*_: Any) -> Tensor:
        raise BackendCompilerFailed(broken, RuntimeError("no C++ compiler"), None)

    monkeypatch.setattr(module, "_compiler_missing", False)
    monkeypatch.setattr(module, "_compiled", lambda kernel: broken)
    noise, x = KeyedNoise(3, compile=True), torch.empty(4, 5)
    with pytest.warns(RuntimeWarning, match="noise runs uncompiled.*no C.. compiler") as caught:
        draws = noise.normal(x), noise.at(1).uniform(x), noise.normal(x)
    assert len(caught) == 1
    assert torch.equal(draws[0], KeyedNoise(3).normal(x))
    assert torch.equal(draws[1], KeyedNoise(3).at(1).uniform(x))
    assert torch.equal(draws[2], draws[0])


def test_bad_input() -> None:
    noise, x = KeyedNoise(0), torch.empty(3, 2)
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match="seed"):
            KeyedNoise(seed)
        with pytest.raises(ValueError, match="step"):
            noise.at(seed)
    with pytest.raises(TypeError):
        KeyedNoise(0.5)  # type: ignore[arg-type]
    for kind in KINDS:
        with pytest.raises(TypeError, match="like .*int64"):
            draw(noise, kind, torch.zeros(3, dtype=torch.int64))
        with pytest.raises(ValueError, match="like"):
            draw(noise, kind, torch.zeros(()))
        with pytest.raises(ValueError, match="2 row ids for a batch of 3"):
            draw(noise.rows(torch.arange(2)), kind, x)
    with pytest.raises(ValueError, match="2 row ids for a batch of 3"):
        noise.rows(torch.arange(2)).categorical(torch.ones(3, 4))
    with pytest.raises(TypeError, match="ids .*int32"):
        noise.rows(torch.arange(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="ids"):
        noise.rows(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match="probs .*int64"):
        noise.categorical(torch.ones(3, 4, dtype=torch.int64))
    for shape in [(3,), (), (3, 0)]:
        with pytest.raises(ValueError, match="probs"):
            noise.categorical(torch.ones(shape))
    rows = [[0.0, 0.0], [1.0, -1e-9], [-1.0, -1.0], [1.0, np.nan], [np.nan] * 2, [1.0, np.inf]]
    for row in rows:
        with pytest.raises(ValueError, match="probs"):
            noise.categorical(torch.tensor([[0.5, 0.5], row]))


# Brownian motion


class Counting:
    """Keyed noise that counts its draws, over all its steps."""

    def __init__(self, noise: KeyedNoise, count: list[int]) -> None:
        self.noise, self.count = noise, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.noise, name)

    def at(self, step: int) -> Counting:
        return Counting(self.noise.at(step), self.count)

    def normal(self, like: Tensor, tag: str = "") -> Tensor:
        self.count[0] += 1
        return self.noise.normal(like, tag)


def test_brownian_covariance() -> None:
    path = BrownianPath(KeyedNoise(1), torch.empty(1 << 8, 1 << 7, dtype=torch.float64))
    times = [0.1, 0.25, 0.5, 2 / 3, 0.7, 1.0]
    w = torch.stack([path(t).flatten() for t in times])
    assert (w.mean(1).abs() < sigmas(6) * torch.tensor(times).div(w.shape[1]).sqrt()).all()
    for i, t in enumerate(times):
        for j, s in enumerate(times[: i + 1]):
            error = ((t * s + min(t, s) ** 2) / w.shape[1]) ** 0.5
            bias = path.resolution / 4  # of the interpolation
            assert abs((w[i] * w[j]).mean() - min(t, s)) < sigmas(21) * error + bias
    assert path(0.0).abs().max() == 0


def test_brownian_increments() -> None:
    rows, steps = 1 << 15, 16
    path = BrownianPath(KeyedNoise(2), torch.empty(rows // 64, 64))
    grid = [k / steps for k in range(steps + 1)]
    pieces = [path.increment(t, s) * steps**0.5 for t, s in zip(grid, grid[1:], strict=False)]
    assert_uncorrelated(pieces)
    assert stats.kstest(torch.cat(pieces).flatten(), "norm").pvalue > ALARM
    total = torch.stack(pieces).double().sum(0) / steps**0.5
    torch.testing.assert_close(total.float(), path(1.0), rtol=0, atol=1e-5)
    assert torch.equal(path.increment(0.75, 0.25), path(0.25) - path(0.75))


def test_brownian_quadratic_variation() -> None:
    rows = 64
    for steps in (64, 256):
        path = BrownianPath(KeyedNoise(3), torch.empty(rows, 4, dtype=torch.float64))
        w = torch.stack([path(k / steps) for k in range(steps + 1)])
        variation = w.diff(dim=0).square().sum(0)
        assert abs(variation.mean() - 1) < sigmas(2) * (2 / steps / (4 * rows)) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_brownian_is_a_function_of_time(dtype: torch.dtype) -> None:
    """Neither order, refinement, what is kept, nor resolution changes a bit; rows are keyed."""
    like, noise = torch.empty(7, 3, dtype=dtype), KeyedNoise(4)
    times = [k / 32 for k in range(33)] + [0.1, 1 / 3, 0.123456789, 1 - 1e-9]
    swept = {t: w for t in sorted(times) for w in [BrownianPath(noise, like)(t)]}
    path = BrownianPath(noise, like)
    shuffled = times * 3
    random.Random(0).shuffle(shuffled)
    for t in shuffled:
        w = path(t)
        assert torch.equal(w, swept[t])
        w.zero_()  # the caller's own
    for resolution in (2.0**-6, 2.0**-30):
        other = BrownianPath(noise, like, resolution)
        for k in range(33):
            assert torch.equal(other(k / 32), swept[k / 32])
    ids = torch.tensor([5, 0])
    part = BrownianPath(noise.rows(ids), like[ids])
    for t in times:
        assert torch.equal(part(t), swept[t][ids])


def test_brownian_interpolation_error() -> None:
    like, noise = torch.empty(1 << 9, 1 << 6, dtype=torch.float64), KeyedNoise(5)
    coarse, fine = BrownianPath(noise, like, 2.0**-8), BrownianPath(noise, like, 2.0**-24)
    error = coarse(1 / 3) - fine(1 / 3)
    variance = 2 / 9 * 2.0**-8  # rest (1 - rest) resolution, rest = 1/3
    assert abs(error.var() / variance - 1) < sigmas() * (2 / like.numel()) ** 0.5 + 1e-4
    assert error.std() < coarse.resolution**0.5 / 2


def test_brownian_cost() -> None:
    like, count = torch.empty(1), [0]
    steps = 256
    path = BrownianPath(Counting(KeyedNoise(6), count), like)
    for k in range(steps):
        path.increment(k / steps, (k + 1) / steps)
    assert count[0] <= 1.2 * steps
    count[0] = 0
    for k in range(50):
        path.increment(k / 50, (k + 1) / 50)
    assert count[0] <= 50 * (20 - np.log2(50) + 3)
    assert path._node.cache_info().currsize <= 28


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_brownian_narrow_dtypes(dtype: torch.dtype) -> None:
    like = torch.empty(5, 2)
    wide, narrow = (BrownianPath(KeyedNoise(7), each) for each in (like, like.to(dtype)))
    assert torch.equal(narrow(0.3), wide(0.3).to(dtype))
    assert torch.equal(narrow.increment(0.3, 0.31), wide.increment(0.3, 0.31).to(dtype))


def test_brownian_bad_input() -> None:
    path = BrownianPath(KeyedNoise(0), torch.empty(2))
    for t in (-1e-9, 1.1, float("nan")):
        with pytest.raises(ValueError, match="t must lie"):
            path(t)
        with pytest.raises(ValueError, match="t must lie"):
            path.increment(0.5, t)
    for resolution in (0.0, 0.3, -0.5, 2.0, 2.0**-53, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="resolution"):
            BrownianPath(KeyedNoise(0), torch.empty(2), resolution)
    assert BrownianPath(KeyedNoise(0), torch.empty(2), 1.0)(0.5).shape == (2,)
