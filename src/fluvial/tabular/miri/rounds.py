"""The rounds of MIRI on tensors: one round is one conditional rectified flow.

The table X, its gaps filled with noise, and the mask M (True where observed) are dependent: what
the gaps hold tells which they were. A round draws every missing part anew from the conditional law
of the present table given what is observed, x_mis ~ q(x_mis | x_obs), regardless of the mask. Among
all that can be written into the gaps this comes nearest to the product of the laws of X and M, so
the mutual information I(X; M) does not grow from round to round; where values are missing
completely at random it goes to 0.

The flow of a round runs in the library's time: t = 1 is the present row x1 with its own mask, t = 0
another row x0 of the same table, drawn at random, whose mask does not matter::

    x_t = (1 - t) x0 + t x1,   a = x1 where observed, else x_t,   b = x0 where observed, else x_t,
    loss = mean over missing entries of (v(a, b, M, t) - (x1 - x0))^2,

so v is the velocity dx/dt of a straight-line transport from p(x_mis | a_obs, M) to
q(x_mis | b_obs). Both blocks are needed: without b the transport is unconditional. A row is filled
with a_obs = b_obs, its own, from t = 1 to t = 0. (The paper's clock is tau = 1 - t, its velocity
w = -v.)

Everything here works for rows of a table, (n, d), and for images, (n, channels, height, width):
a, b, M and t are put side by side along dimension 1.

The loop is a light one of its own, not `fluvial.training.loop`: K short trainings of fresh
networks, of a second or less each, need no checkpoints, averages or trackers, and pairs are drawn
anew every epoch from the table that the round changes.

Citation: Yu et al., Missing Data Imputation by Reducing Mutual Information with Rectified Flows,
NeurIPS 2025, arXiv:2505.11749.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from fluvial.core.gaussian.ode import Euler
from fluvial.core.gaussian.paths import Linear as LinearPath
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Run, State, Steering, left_broadcast
from fluvial.core.simulate import simulate
from fluvial.core.time import uniform_grid
from fluvial.networks.layers import conv, initialise, linear
from fluvial.tabular.checks import number, whole
from fluvial.tabular.seeds import mixed
from fluvial.training.threads import threads

BLOCK = 1 << 18
"""Numbers that are filled at a time: rows of a block times numbers of a row, at most."""

Pairing = Literal["epoch", "round"]


@dataclass(frozen=True)
class Rounds:
    """How often and how long.

    Args:
        rounds: K. The paper's code takes 10 (15 for images), its interface 100; 6 is measured to be
            enough on small tables.
        epochs: passes over the rows with gaps in a round (paper: 100).
        batch_size: rows a step; None takes 100 (paper), and one fiftieth of the rows, at most
            1,000, where that is more.
        max_steps: of the optimiser in a round, at most: what bounds the time on large tables.
        lr: of Adam (paper: 0.01 with width 1001, unstable on small tables).
        decay: share of a round's steps, the last ones, over which the learning rate falls to 0; 0
            keeps it as the paper does. In the bivariate Gaussian of the tests 0.5 brings the slope
            of a round from within 0.1 to within 0.05 of the exact one, at the same cost.
        ode_steps: Euler steps of filling (paper: 100). On the mixture of the claim and on iris 25
            and 50 give tables whose MMD from the truth agrees to 2e-5, and in the bivariate
            Gaussian of the tests 25 and 100 give slopes that agree to 0.01.
        chains: fillings of each row that are carried through the rounds side by side; None takes
            2,000 over the rows, between 2 and 8, and 1 beyond 5,000 rows. With one, a network
            learns by heart which noise stands in the gaps of which row, and what it draws from
            other noise is far off: on 125 rows of the wine table draws had an energy distance of
            0.193 from the truth with one chain, and 0.048 with eight. The steps of a round are as
            many.
        pairing: a new random row for every row in each epoch, or, as the paper's code, one for the
            whole round, which small tables are memorised by.
        images: the first fill is uniform on [0, 1] and every step of the ODE is clamped, where
            otherwise the first fill is N(0, 1) and only the end is.

    Raises:
        ValueError: a number is out of its range.
    """

    rounds: int = 6
    epochs: int = 100
    batch_size: int | None = None
    max_steps: int = 2_000
    lr: float = 3e-3
    decay: float = 0.5
    ode_steps: int = 25
    chains: int | None = None
    pairing: Pairing = "epoch"
    images: bool = False

    def __post_init__(self) -> None:
        for name in ("rounds", "epochs", "batch_size", "max_steps", "ode_steps", "chains"):
            value = getattr(self, name)
            if value is not None or name not in ("batch_size", "chains"):
                object.__setattr__(self, name, whole(name, value))  # 2.0 counts as 2
        number("lr", self.lr, "be positive and finite", lambda lr: 0 < lr < math.inf)
        number("decay", self.decay, "lie in [0, 1]", lambda share: 0 <= share <= 1)
        if self.pairing not in ("epoch", "round"):
            raise ValueError(f"pairing must be 'epoch' or 'round', got {self.pairing!r}")

    def plan(self, rows: int) -> tuple[int, int]:
        """(steps of a round, batches of an epoch) for so many rows with gaps."""
        size = self.batch_size or max(100, min(1_000, rows // 50))
        batches = max(1, round(rows / size))  # of equal size, give or take a row
        return min(self.epochs * batches, self.max_steps), batches

    def copies(self, rows: int) -> int:
        """Chains of a table of so many rows."""
        if self.chains is not None:
            return self.chains
        return 1 if rows > 5_000 else min(8, max(2, round(2_000 / max(rows, 1))))

    def rate(self, done: float) -> float:
        """Of the learning rate, what is left when a share ``done`` of a round's steps is."""
        return 1.0 if done <= 1 - self.decay else (1 - done) / self.decay


# Networks


class VelocityMLP(nn.Module):
    """3 d + 1 -> hidden -> ... -> d with SiLU, neither normalised nor dropped out.

    Args:
        width: d.
        hidden: sizes of the hidden layers (paper: 1001 three times).
        seed: of the initial weights; the last layer starts at 0.

    Raises:
        ValueError: a size is below 1.
    """

    def __init__(self, width: int, hidden: Sequence[int] = (256, 256, 256), seed: int = 0) -> None:
        super().__init__()
        sizes = [3 * width + 1, *map(int, hidden)]
        if min(width, *sizes) < 1:
            raise ValueError(f"width and hidden must be at least 1, got {width} and {hidden}")
        self.layers = nn.ModuleList(linear(i, o) for i, o in zip(sizes, sizes[1:], strict=False))
        self.out = linear(sizes[-1], width, start="zero")
        initialise(self, seed)

    def forward(self, z: Tensor) -> Tensor:
        """(n, 3 d + 1) to (n, d)."""
        for layer in self.layers:
            z = functional.silu(layer(z))
        return cast(Tensor, self.out(z))


class VelocityCNN(nn.Module):
    """The paper's network of images: 3 x 3 convolutions with batch norm, four residual blocks.

    Args:
        channels: C of the images; 3 C + 1 come in.
        width: channels inside (paper: 64).
        blocks: residual blocks of two convolutions (paper: 4).
        seed: of the initial weights.
    """

    def __init__(self, channels: int, width: int = 64, blocks: int = 4, seed: int = 0) -> None:
        super().__init__()
        self.enter = nn.Sequential(conv(3 * channels + 1, width, 3), nn.BatchNorm2d(width))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                conv(width, width, 3),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                conv(width, width, 3),
                nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )
        self.out = conv(width, channels, 3)
        initialise(self, seed)

    def forward(self, z: Tensor) -> Tensor:
        """(n, 3 C + 1, height, width) to (n, C, height, width)."""
        z = functional.relu(self.enter(z))
        for block in self.blocks:
            z = functional.relu(z + block(z))
        return cast(Tensor, self.out(z))


# One round


def round_inputs(a: Tensor, b: Tensor, mask: Tensor, t: Tensor) -> Tensor:
    """What the network sees: [a, b, mask, t] along dimension 1.

    Args:
        a, b, mask: of one shape, (n, d) or (n, channels, height, width).
        t: (n,), in [0, 1].

    Returns:
        (n, 3 d + 1), or (n, 3 channels + 1, height, width) with t as a constant channel.
    """
    last = left_broadcast(t, a).expand(len(a), 1, *a.shape[2:])
    return torch.cat([a, b, mask.to(a.dtype), last.to(a.dtype)], 1)


def round_loss(net: nn.Module, x0: Tensor, x1: Tensor, mask: Tensor, t: Tensor) -> Tensor:
    """Mean of (v - (x1 - x0))^2 over all missing entries of the batch together.

    Args:
        net: (n, 3 d + 1) to (n, d).
        x0: target rows, of any mask.
        x1: source rows.
        mask: True where x1 is observed.
        t: (n,).

    Returns:
        A scalar; 0 where nothing is missing.
    """
    moving = torch.lerp(x0, x1, left_broadcast(t, x0).to(x0.dtype))
    a, b = torch.where(mask, x1, moving), torch.where(mask, x0, moving)
    error = net(round_inputs(a, b, mask, t)) - (x1 - x0)
    # where and not a product: 0 times an infinity is not 0
    missing = torch.where(mask, torch.zeros_like(error), error)
    return missing.square().sum() / (mask.numel() - mask.sum()).clamp(min=1)


@dataclass(frozen=True)
class _Velocity:
    """The velocity of filling: both blocks hold the row itself; it is 0 where observed."""

    net: nn.Module
    predicts: str = "velocity"

    def __call__(self, x: Tensor, t: Tensor, *, mask: Tensor) -> Tensor:
        z = round_inputs(x, x, mask, t.to(x.dtype).expand(len(x)))
        velocity = self.net(z)
        return torch.where(mask, torch.zeros_like(velocity), velocity)


class _Within(Steering):
    """Keeps the state within bounds after every step."""

    def __init__(self, low: Tensor, high: Tensor) -> None:
        self.low, self.high = low, high

    def after(self, x: State, clean: State, aim: Any, run: Run) -> tuple[State, Any, Tensor | None]:
        return torch.clamp(cast(Tensor, x), self.low, self.high), aim, None


@torch.no_grad()
def fill_round(
    net: nn.Module,
    x: Tensor,
    mask: Tensor,
    *,
    steps: int = 100,
    low: Tensor | None = None,
    high: Tensor | None = None,
    every_step: bool = False,
) -> Tensor:
    """Missing entries drawn anew by one round's network; observed ones as they are, bit for bit.

    Euler steps from t = 1 to 0 of dx/dt = v, x in both blocks. Then clamped to [low, high]; an
    entry that is not finite keeps its value of before.

    Args:
        net: as for `round_loss`; put into evaluation mode.
        x: (n, *event).
        mask: True where observed, shaped as x.
        steps: N.
        low, high: broadcast against x; None for no bound.
        every_step: clamp after every step too.

    Returns:
        A new tensor; rows without gaps cost nothing.
    """
    net.eval()
    result = x.clone()
    rows = (~mask).flatten(1).any(1).nonzero()[:, 0]
    size = max(1, BLOCK // max(1, x[0].numel())) if len(x) else 1
    bounds = [None if bound is None else bound.to(x) for bound in (low, high)]
    steer = None
    if every_step and bounds[0] is not None and bounds[1] is not None:
        steer = _Within(bounds[0], bounds[1])
    grid = uniform_grid(steps)
    run: Any = simulate
    for block in rows.split(size):
        before, observed = x[block], mask[block]
        after = run(
            before, grid, Euler(), LinearPath(), _Velocity(net), KeyedNoise(0), steer, mask=observed
        )
        finite = after.isfinite()
        for bound, clip in zip(bounds, (torch.maximum, torch.minimum), strict=True):
            if bound is not None:
                after = clip(after, bound.expand_as(after))
        result[block] = torch.where(~observed & finite, after, before)
    return result


def fill_first(x: Tensor, mask: Tensor, noise: KeyedNoise, *, images: bool = False) -> None:
    """N(0, 1), or of images U[0, 1), into the missing entries of ``x``, in place.

    Row i has the draw of row i of ``noise``, whatever rows are with it.
    """
    size = max(1, BLOCK // max(1, x[0].numel())) if len(x) else 1
    for ids in torch.arange(len(x), device=x.device).split(size):
        rows = slice(int(ids[0]), int(ids[-1]) + 1)
        drawn = noise.rows(ids)
        fresh = drawn.uniform(x[rows], "fill") if images else drawn.normal(x[rows], "fill")
        x[rows] = torch.where(mask[rows], x[rows], fresh)


SMALL = 1e7
"""Rows of a batch times weights below which one thread trains: two gain a fifth alone, and on
a busy machine they take several times as long, waiting for each other."""


def train_round(
    net: nn.Module,
    x: Tensor,
    mask: Tensor,
    settings: Rounds,
    noise: KeyedNoise,
    *,
    targets: int | None = None,
    chains: int = 1,
    tick: Callable[[], object] = lambda: None,
) -> list[float]:
    """Fit one round's network to the present table.

    Beside ``x`` and ``mask`` it holds a batch, and five numbers of 8 bytes a row: two
    permutations, what they were sorted by, times.

    Args:
        net: fresh; put into training mode.
        x: (n, *event), all entries filled.
        mask: True where observed.
        settings: epochs, batches, learning rate, pairing.
        noise: of pairs, order and times.
        targets: the first so many rows are what is drawn from; all by default.
        chains: copies of each row that x holds: an epoch counts as so many.
        tick: called after every step.

    Returns:
        The mean loss of every epoch; empty where nothing is missing.
    """
    sources = (~mask.flatten(1).all(1)).nonzero()[:, 0]  # without a second mask
    if not len(sources):
        return []
    steps, _ = settings.plan(len(sources) // chains)
    _, batches = settings.plan(len(sources))
    fused = x.device.type in ("cpu", "cuda")
    optimizer = torch.optim.Adam(net.parameters(), lr=settings.lr, fused=fused)
    net.train()
    losses: list[Tensor] = []
    like = torch.empty(len(sources), dtype=torch.float64)
    work = len(sources) / batches * sum(weight.numel() for weight in net.parameters())
    few = 1 if work < SMALL else torch.get_num_threads()
    with torch.enable_grad(), threads(few):
        for epoch in range(-(-steps // batches)):
            drawn = noise.at(epoch)
            if epoch == 0 or settings.pairing == "epoch":
                partners = _partners(drawn, len(sources), targets or len(x)).to(x.device)
            order = drawn.uniform(like, "order").argsort().to(x.device)
            t = drawn.uniform(like, "t").to(x)
            total = x.new_zeros(())
            parts = order.tensor_split(batches)[: steps - epoch * batches]
            for k, part in enumerate(parts):
                rows = sources[part]
                done = (epoch * batches + k) / steps
                for group in optimizer.param_groups:
                    group["lr"] = settings.lr * settings.rate(done)
                optimizer.zero_grad(set_to_none=True)
                loss = round_loss(net, x[partners[part]], x[rows], mask[rows], t[part])
                loss.backward()
                optimizer.step()
                total += loss.detach()
                tick()
            losses.append(total / len(parts))
    return torch.stack(losses).tolist()


def _partners(noise: KeyedNoise, count: int, targets: int) -> Tensor:
    """(count,) rows below ``targets``: random permutations of them, as many as are needed."""
    parts = []
    for k in range(-(-count // targets)):
        like = torch.empty(targets, dtype=torch.float64)
        parts.append(noise.at(k).uniform(like, "pairs").argsort())
    return torch.cat(parts)[:count]


# All rounds

FILL, TRAIN = 0, 1
"""Steps of the keyed noise: of the first fill, and of the trainings."""


@dataclass(frozen=True)
class Round:
    """What a round did.

    Args:
        number: from 1.
        losses: mean loss of every epoch. It ends near the variance of what cannot be foretold, of
            the order of 1; far below, the pairs were memorised.
        seconds: training and filling.
        moved: root mean square of the change of the missing entries, in the units of the networks.
    """

    number: int
    losses: tuple[float, ...]
    seconds: float
    moved: float


def run_rounds(
    x: Tensor,
    mask: Tensor,
    make: Callable[[int], nn.Module],
    settings: Rounds,
    noise: KeyedNoise,
    *,
    low: Tensor | None = None,
    high: Tensor | None = None,
    targets: int | None = None,
    chains: int = 1,
    done: Sequence[nn.Module] = (),
    watch: Callable[[Round, nn.Module, Tensor], object] | None = None,
    progress: bool = False,
) -> tuple[Tensor, list[nn.Module], list[Round]]:
    """The whole method: fill with noise, then train and draw anew, K times.

    Args:
        x: (n, *event), of unit scale; what stands where the mask is False does not matter. Its
            missing entries are overwritten, so that no second table is held.
        mask: True where observed, bool, shaped as x.
        make: the network of round k, 0, 1, ..., freshly made.
        settings: how often and how long.
        noise: keyed; the same gives the same bits on one machine.
        low, high: of every column, what is drawn is clamped to them.
        targets, chains: see `train_round`.
        done: trained networks of the first rounds, which are not trained again.
        watch: called after every round with (round, network, table), and before the first with
            round number 0.
        progress: show a bar.

    Returns:
        (x, networks, rounds). Nothing missing: no networks.

    Raises:
        ValueError: the shapes differ, the mask is not bool, x has no rows, or an observed entry is
            not finite.
    """
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, True where observed, got {mask.dtype}")
    if x.ndim < 2 or mask.shape != x.shape or not len(x):
        raise ValueError(
            f"x and mask must have one shape, (n, ...) with n at least 1, got {tuple(x.shape)} and "
            f"{tuple(mask.shape)}"
        )
    if mask.all():
        return x, [], []
    size = max(1, BLOCK // max(1, x[0].numel()))
    for some, seen in zip(x.split(size), mask.split(size), strict=True):
        if not (some.isfinite() | ~seen).all():
            raise ValueError("x must be finite where observed")
    fill_first(x, mask, noise.at(FILL), images=settings.images)
    sources = int((~mask.flatten(1).all(1)).sum())
    steps, _ = settings.plan(sources // chains)
    bar = tqdm(
        total=settings.rounds * (steps + 1),
        disable=not progress,
        desc="imputing",
        unit="step",
        initial=len(done) * (steps + 1),
    )
    nets, rounds = list(done), []
    with bar:
        if watch is not None:
            watch(Round(0, (), 0.0, 0.0), nn.Identity(), x)
        for k in range(settings.rounds):
            begin = time.perf_counter()
            losses: list[float] = []
            if k >= len(nets):
                bar.set_postfix_str(f"round {k + 1} of {settings.rounds}")
                net = make(k).to(x.device)
                losses = train_round(
                    net,
                    x,
                    mask,
                    settings,
                    noise.at(TRAIN).at(k),
                    targets=targets,
                    chains=chains,
                    tick=bar.update,
                )
                nets.append(net.eval())
            moved = _fill(nets[k], x, mask, settings, low, high)
            if k >= len(done):  # those are counted from the beginning
                bar.update()
            one = Round(k + 1, tuple(losses), time.perf_counter() - begin, moved)
            rounds.append(one)
            if watch is not None:
                watch(one, nets[k], x)
    return x, nets, rounds


def _fill(
    net: nn.Module,
    x: Tensor,
    mask: Tensor,
    settings: Rounds,
    low: Tensor | None,
    high: Tensor | None,
) -> float:
    """`fill_round` into x, block by block; returns the root mean square of the change."""
    size = max(1, BLOCK // max(1, x[0].numel()))
    change, count = 0.0, 0
    for start in range(0, len(x), size):
        rows = slice(start, start + size)
        after = fill_round(
            net,
            x[rows],
            mask[rows],
            steps=settings.ode_steps,
            low=low,
            high=high,
            every_step=settings.images,
        )
        change += float((after - x[rows]).double().square().sum())
        count += int((~mask[rows]).sum())
        x[rows] = after
    return math.sqrt(change / max(count, 1))


def apply_rounds(
    nets: Iterable[nn.Module],
    x: Tensor,
    mask: Tensor,
    settings: Rounds,
    noise: KeyedNoise,
    *,
    low: Tensor | None = None,
    high: Tensor | None = None,
) -> Tensor:
    """Fill new rows in place: noise into their gaps, then every round's network in turn.

    With the rows and the noise of `run_rounds` it gives the table that `run_rounds` gave, where the
    two take the same number of Euler steps.
    """
    fill_first(x, mask, noise.at(FILL), images=settings.images)
    for net in nets:
        _fill(net, x, mask, settings, low, high)
    return x


def impute_images(
    images: Tensor,
    mask: Tensor,
    *,
    settings: Rounds | None = None,
    width: int = 64,
    blocks: int = 4,
    seed: int = 0,
    progress: bool = True,
) -> Tensor:
    """Missing pixels of a set of images, by the paper's network for them.

    Pixels are brought to [0, 1] by the least and largest observed value; what is drawn stays there.

    Args:
        images: (n, channels, height, width), floating.
        mask: True where observed, bool, of the same shape or with one channel for all.
        settings: by default the paper's: 15 rounds of 900 epochs, batch 500, learning rate 0.01,
            100 steps, all of the epochs of a round whatever they take.
        width, blocks: of `VelocityCNN`.
        seed: of everything.
        progress: show a bar.

    Returns:
        As ``images``, observed pixels bit for bit.

    Raises:
        TypeError, ValueError: the images are not floating or not (n, C, H, W), the mask does not
            fit, nothing is observed, or an observed pixel is not finite.
    """
    if not images.is_floating_point():
        raise TypeError(f"images must be floating, got {images.dtype}")
    if images.ndim != 4 or mask.dtype != torch.bool:
        raise ValueError(
            f"images must be (n, C, H, W) and mask bool, got {tuple(images.shape)}, {mask.dtype}"
        )
    if mask.shape not in (images.shape, (len(images), 1, *images.shape[2:])):
        raise ValueError(
            f"mask must be shaped as the images {tuple(images.shape)}, or with one channel, got "
            f"{tuple(mask.shape)}"
        )
    mask = mask.expand_as(images)
    seen = images[mask]
    if not len(seen) or not seen.isfinite().all():
        raise ValueError("images must have observed pixels, and all of them finite")
    settings = settings or Rounds(
        rounds=15, epochs=900, batch_size=500, lr=0.01, ode_steps=100, max_steps=10**9, images=True
    )
    least, span = seen.min(), (seen.max() - seen.min()).clamp(min=torch.finfo(images.dtype).tiny)
    scaled = torch.where(mask, (images - least) / span, torch.zeros_like(images))
    zero, one = scaled.new_zeros(()), scaled.new_ones(())
    filled, _, _ = run_rounds(
        scaled,
        mask,
        lambda k: VelocityCNN(images.shape[1], width, blocks, seed=mixed(seed, k)),
        settings,
        KeyedNoise(seed),
        low=zero,
        high=one,
        progress=progress,
    )
    return torch.where(mask, images, filled * span + least)
