"""One round of MIRI and all of them, against what is known exactly."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fluvial.core.noise import KeyedNoise
from fluvial.tabular.miri import cross_mmd, impute_images, mask_auc, mutual_information
from fluvial.tabular.miri.rounds import (
    Round,
    Rounds,
    VelocityCNN,
    VelocityMLP,
    apply_rounds,
    fill_first,
    fill_round,
    round_inputs,
    round_loss,
    run_rounds,
    train_round,
)

SMALL = (48, 48)


class Constant(nn.Module):
    """v = c, whatever it sees; remembers what it saw."""

    def __init__(self, value: float, width: int) -> None:
        super().__init__()
        self.value, self.width = value, width
        self.seen: list[Tensor] = []

    def forward(self, z: Tensor) -> Tensor:
        self.seen.append(z)
        return z.new_full((len(z), self.width), self.value)


def normal(n: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return KeyedNoise(seed).normal(torch.empty(n, d, dtype=dtype))


def holes(n: int, d: int, rate: float, seed: int = 1) -> Tensor:
    """Observed where True."""
    return KeyedNoise(seed).uniform(torch.empty(n, d)) >= rate


def test_e1_observed_entries_come_back_bit_for_bit_and_e2_a_whole_table_is_not_trained_on() -> None:
    x, mask = normal(40, 3), holes(40, 3, 0.4)
    before = x.clone()
    settings = Rounds(rounds=2, epochs=2, ode_steps=3)
    filled, nets, rounds = run_rounds(
        x, mask, lambda k: VelocityMLP(3, SMALL, k), settings, KeyedNoise(0)
    )
    assert torch.equal(filled[mask], before[mask]) and filled.isfinite().all()
    assert len(nets) == len(rounds) == 2 and [one.number for one in rounds] == [1, 2]
    assert not torch.equal(filled[~mask], before[~mask])

    def none(k: int) -> nn.Module:
        raise AssertionError("nothing is to be trained")

    whole, nets, rounds = run_rounds(before, torch.ones_like(mask), none, settings, KeyedNoise(0))
    assert whole is before and nets == [] and rounds == []


def recursion(rho: float, p: float, rounds: int) -> list[tuple[float, float]]:
    """(slope, mean conditional variance) of the imputed entries after each round, exactly.

    A round draws from the mixture of p observed rows, slope rho and variance 1 - rho^2, and 1 - p
    imputed ones: slopes average, variances average and gain the variance of the two means.
    """
    slope, variance, result = 0.0, 1.0, []
    for _ in range(rounds):
        variance = p * (1 - rho**2) + (1 - p) * variance + p * (1 - p) * (rho - slope) ** 2
        slope = p * rho + (1 - p) * slope
        result.append((slope, variance))
    return result


def test_e3_the_recursion_is_the_briefs() -> None:
    found = recursion(0.8, 0.7, 4)
    assert [s for s, _ in found] == pytest.approx([0.56, 0.728, 0.7784, 0.79352], abs=1e-12)
    assert [v for _, v in found] == pytest.approx([0.6864, 0.4700, 0.3941, 0.3703], abs=5e-5)
    assert all(s == pytest.approx(0.8 * (1 - 0.3 ** (k + 1))) for k, (s, _) in enumerate(found))


def test_e3_slopes_of_a_bivariate_gaussian_follow_the_recursion() -> None:
    n, rho, p = 4_000, 0.8, 0.7
    z = normal(n, 2, 50)
    x = torch.stack([z[:, 0], rho * z[:, 0] + math.sqrt(1 - rho**2) * z[:, 1]], 1)
    mask = torch.ones(n, 2, dtype=torch.bool)
    mask[:, 1] = holes(n, 1, 1 - p, 51)[:, 0]
    gaps = ~mask[:, 1]
    slopes, spreads = [], []

    def watch(one: Round, net: nn.Module, table: Tensor) -> None:
        a, b = table[gaps].double().T
        slope = (a @ b) / (a @ a)
        slopes.append(float(slope))
        spreads.append(float((b - slope * a).var()))

    settings = Rounds(rounds=3, epochs=25, ode_steps=20)
    run_rounds(x, mask, lambda k: VelocityMLP(2, (96, 96), k), settings, KeyedNoise(0), watch=watch)
    # about 1,200 imputed rows: a standard error of 0.03 of a slope, and as much again of training
    assert abs(slopes[0]) < 0.1
    for found, spread, (slope, variance) in zip(
        slopes[1:], spreads[1:], recursion(rho, p, 3), strict=True
    ):
        assert found == pytest.approx(slope, abs=0.07)
        assert spread == pytest.approx(variance, abs=0.09)


def test_e4_a_constant_velocity_moves_missing_entries_by_just_that() -> None:
    x, mask = normal(7, 3, dtype=torch.float64), holes(7, 3, 0.5)
    for steps in (1, 8):
        # the paper's w = c adds c; v = -w, and time runs from 1 to 0
        moved = fill_round(Constant(-0.75, 3), x, mask, steps=steps)
        assert torch.equal(moved[mask], x[mask])
        assert torch.allclose(moved[~mask], x[~mask] + 0.75, atol=1e-12)


def test_both_blocks_are_advanced_together() -> None:
    x, mask = normal(5, 2), holes(5, 2, 0.5, 4)
    net = Constant(1.0, 2)
    fill_round(net, x, mask, steps=4)
    for k, z in enumerate(net.seen):
        a, b, m, t = z[:, :2], z[:, 2:4], z[:, 4:6], z[:, 6]
        rows = (~mask).any(1)
        assert torch.equal(a, b)
        assert torch.equal(m.bool(), mask[rows])
        assert torch.allclose(t, torch.full_like(t, 1 - k / 4))
        wanted = torch.where(mask, x, x - k / 4)[rows]
        assert torch.allclose(a, wanted, atol=1e-6)


def test_e5_the_exact_velocity_fills_with_the_target_law() -> None:
    mean, std = 1.5, 0.6

    class Exact(nn.Module):
        """dx/dt between N(mean, std^2) at t = 0 and N(0, 1) at t = 1, x_obs of no account."""

        def forward(self, z: Tensor) -> Tensor:
            x, t = z[:, :2], z[:, -1:]
            variance = ((1 - t) * std) ** 2 + t**2
            rate = t - (1 - t) * std**2
            return -mean + rate / variance * (x - (1 - t) * mean)

    x, mask = normal(40_000, 2, 3), torch.tensor([[True, False]]).expand(40_000, 2)
    filled = fill_round(Exact(), x, mask, steps=100)[:, 1].double()
    # standard errors 0.003 and 0.002
    assert float(filled.mean()) == pytest.approx(mean, rel=0.03)
    assert float(filled.std()) == pytest.approx(std, rel=0.03)


def test_e6_mmd() -> None:
    a, b = normal(2_000, 1, 7), normal(2_000, 1, 8) + 3
    assert cross_mmd(a, a) == pytest.approx(0, abs=1e-12)
    assert cross_mmd(a, b) > 0.3
    assert cross_mmd(a, normal(2_000, 1, 9)) < 0.005
    with pytest.raises(ValueError, match="no bandwidth"):
        cross_mmd(torch.zeros(5, 1), torch.zeros(5, 1))


def test_e7_the_order_of_the_rows_changes_the_draws_and_not_their_law() -> None:
    n = 1_000
    z = normal(n, 2, 20)
    x = torch.stack([z[:, 0], 0.9 * z[:, 0] + 0.3 * z[:, 1]], 1)
    mask = holes(n, 2, 0.3, 21)
    order = KeyedNoise(22).uniform(torch.empty(n)).argsort()
    settings = Rounds(rounds=2, epochs=50, ode_steps=15)

    def filled(rows: Tensor) -> Tensor:
        table, _, _ = run_rounds(
            x[rows].clone(),
            mask[rows],
            lambda k: VelocityMLP(2, (96, 96), k),
            settings,
            KeyedNoise(0),
        )
        return table

    one, two = filled(torch.arange(n)), filled(order)
    assert not torch.equal(one[order], two)
    assert cross_mmd(one, two) < 0.002


def test_e8_inputs_and_loss_by_hand() -> None:
    x1, x0 = torch.tensor([[1.0, 5.0]]), torch.tensor([[2.0, 3.0]])
    mask, t = torch.tensor([[True, False]]), torch.tensor([0.75])  # the paper's tau is 0.25
    net = Constant(0.5, 2)
    loss = round_loss(net, x0, x1, mask, t)
    assert net.seen[0].tolist() == [[1.0, 4.5, 2.0, 4.5, 1.0, 0.0, 0.75]]
    # w = Y - X = -2 on the missing entry, so v = 2; the observed one does not count
    assert float(loss) == pytest.approx((0.5 - 2.0) ** 2)
    assert float(round_loss(Constant(2.0, 2), x0, x1, mask, t)) == 0
    # one mean over the missing entries of all rows, and not a mean of the rows' means
    x1, x0 = torch.zeros(2, 3), torch.tensor([[1.0, 1.0, 1.0], [4.0, 4.0, 4.0]])
    mask = torch.tensor([[False, False, True], [False, True, True]])
    loss = round_loss(Constant(0.0, 3), x0, x1, mask, torch.rand(2, generator=torch.Generator()))
    assert float(loss) == pytest.approx((1 + 1 + 16) / 3)
    assert float(round_loss(Constant(0.0, 3), x0, x1, torch.ones(2, 3) > 0, torch.zeros(2))) == 0


def test_a_network_that_blows_up_spoils_nothing() -> None:
    class Wild(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            v = torch.full((len(z), 2), math.inf)
            v[0], v[1, 0] = math.nan, -1e30
            return v

    x, mask = normal(6, 2), holes(6, 2, 0.6, 5)
    mask[:2] = False
    low, high = torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 1.0])
    filled = fill_round(Wild(), x, mask, steps=5, low=low, high=high)
    assert torch.equal(filled[mask], x[mask])
    assert torch.equal(filled[0], x[0])  # not finite: as it was
    assert float(filled[1, 0]) == 1.0  # finite and far: clamped


def test_the_fitted_rows_come_out_as_they_did_and_a_fill_is_by_row() -> None:
    x, mask = normal(60, 3), holes(60, 3, 0.4)
    settings = Rounds(rounds=2, epochs=3, ode_steps=4)
    filled, nets, _ = run_rounds(
        x.clone(), mask, lambda k: VelocityMLP(3, SMALL, k), settings, KeyedNoise(5)
    )
    again = apply_rounds(nets, x.clone(), mask, settings, KeyedNoise(5))
    assert torch.equal(again, filled)
    start, whole = x.clone(), x.clone()
    fill_first(whole, mask, KeyedNoise(5))
    fill_first(start[:20], mask[:20], KeyedNoise(5))
    assert torch.equal(start[:20], whole[:20])


def test_rounds_that_are_done_are_not_trained_again() -> None:
    x, mask = normal(60, 3), holes(60, 3, 0.4)
    settings = Rounds(rounds=3, epochs=3, ode_steps=4)

    def run(done: list[nn.Module]) -> tuple[Tensor, list[nn.Module]]:
        made: list[int] = []

        def make(k: int) -> nn.Module:
            made.append(k)
            return VelocityMLP(3, SMALL, k)

        table, nets, _ = run_rounds(x.clone(), mask, make, settings, KeyedNoise(5), done=done)
        assert made == list(range(len(done), 3))
        return table, nets

    whole, nets = run([])
    assert torch.equal(run(nets[:2])[0], whole)


def test_pairs_are_drawn_anew_every_epoch_unless_the_papers_code_is_wanted() -> None:
    # one row of 20 stands out: how often it is a target of the first row
    x = torch.arange(20.0)[:, None].repeat(1, 2)
    mask = torch.ones(20, 2, dtype=torch.bool)
    mask[0, 1] = False
    for pairing, fewest, most in (("epoch", 8, 20), ("round", 1, 1)):
        net = nn.Sequential(nn.Linear(7, 2))
        seen: list[float] = []
        net.register_forward_pre_hook(lambda m, z, s=seen: s.append(round(float(z[0][0, 2]), 3)))
        settings = Rounds(rounds=1, epochs=20, pairing=pairing)
        train_round(net, x, mask, settings, KeyedNoise(0))
        assert fewest <= len(set(seen)) <= most
        assert len(seen) == 20


def test_only_rows_with_gaps_are_sources_and_the_plan_bounds_the_steps() -> None:
    settings = Rounds(epochs=3, batch_size=10)
    x, mask = normal(100, 2), torch.ones(100, 2, dtype=torch.bool)
    assert train_round(VelocityMLP(2, SMALL), x, mask, settings, KeyedNoise(0)) == []
    mask[:20, 0] = False
    ticks: list[int] = []
    losses = train_round(
        VelocityMLP(2, SMALL), x, mask, settings, KeyedNoise(0), tick=lambda: ticks.append(1)
    )
    assert len(losses) == 3 and len(ticks) == 6
    assert Rounds().plan(150) == (200, 2) and Rounds().plan(149) == (100, 1)
    assert Rounds().plan(100_000) == (2_000, 100) and Rounds(max_steps=7).plan(500) == (7, 5)
    chains = [Rounds().copies(n) for n in (3, 150, 400, 1_000, 5_000, 5_001)]
    assert chains == [8, 8, 5, 2, 2, 1] and Rounds(chains=3).copies(9) == 3
    rates = [Rounds(decay=0.5).rate(s) for s in (0, 0.5, 0.75, 1)]
    assert rates == [1, 1, 0.5, 0] and Rounds(decay=0).rate(1) == 1


def test_double_precision_stays() -> None:
    x, mask = normal(30, 2, dtype=torch.float64), holes(30, 2, 0.5)
    settings = Rounds(rounds=1, epochs=2, ode_steps=2)
    table, _, _ = run_rounds(
        x, mask, lambda k: VelocityMLP(2, SMALL, k).double(), settings, KeyedNoise(0)
    )
    assert table.dtype == torch.float64


def test_networks_have_the_papers_shapes() -> None:
    net = VelocityMLP(10, (1001, 1001, 1001))
    assert [tuple(layer.weight.shape) for layer in net.layers] == [
        (1001, 31), (1001, 1001), (1001, 1001)
    ]  # fmt: skip
    assert net(torch.zeros(2, 31)).shape == (2, 10)
    cnn = VelocityCNN(3)
    kernels = [m for m in cnn.modules() if isinstance(m, nn.Conv2d)]
    assert len(kernels) == 10 and kernels[0].weight.shape == (64, 10, 3, 3)
    a = torch.zeros(2, 3, 6, 5)
    z = round_inputs(a, a + 1, a > 1, torch.tensor([0.25, 0.5]))
    assert z.shape == (2, 10, 6, 5) and z[1, 9].eq(0.5).all()
    assert cnn(z).shape == (2, 3, 6, 5)
    with pytest.raises(ValueError, match="at least 1"):
        VelocityMLP(0)


def test_images_are_filled_within_their_range() -> None:
    images = 40 + 10 * KeyedNoise(0).uniform(torch.empty(12, 1, 6, 6))
    mask = KeyedNoise(1).uniform(torch.empty(12, 1, 6, 6)) < 0.5
    holed = images.masked_fill(~mask, torch.nan)
    settings = Rounds(rounds=2, epochs=2, ode_steps=4, batch_size=6, images=True)
    filled = impute_images(holed, mask, settings=settings, width=8, blocks=1, progress=False)
    assert torch.equal(filled[mask], images[mask])
    seen = images[mask]
    assert filled.min() >= seen.min() - 1e-4 and filled.max() <= seen.max() + 1e-4
    again = impute_images(holed, mask, settings=settings, width=8, blocks=1, progress=False)
    assert torch.equal(filled, again)
    for bad, message in (
        ((images.long(), mask), "must be floating"),
        ((images[0], mask), r"must be \(n, C, H, W\)"),
        ((images, mask[:5]), "must be shaped as the images"),
        ((images, mask & False), "must have observed pixels"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            impute_images(*bad)


def test_what_a_mask_tells() -> None:
    # two columns of correlation 0.95: filled with noise, a gap shows; filled rightly, it does not
    n = 900
    z = normal(n, 2, 30)
    x = torch.stack([z[:, 0], 0.95 * z[:, 0] + math.sqrt(1 - 0.95**2) * z[:, 1]], 1)
    mask = holes(n, 2, 0.4, 31)
    noisy = torch.where(mask, x, normal(n, 2, 32))
    told = mask_auc(noisy, mask)
    assert set(told) == {0, 1} and min(told.values()) > 0.6
    # a standard error of about 0.02 of an area of 0.5 with 360 against 540 rows
    assert all(abs(auc - 0.5) < 0.08 for auc in mask_auc(x, mask).values())
    much, little = (
        mutual_information(table, mask, epochs=20, batch_size=180) for table in (noisy, x)
    )
    assert much > 0.06 and little < 0.05
    with pytest.raises(ValueError, match="one shape"):
        mask_auc(x, mask[:5])
    with pytest.raises(ValueError, match="must be finite"):
        mask_auc(x.masked_fill(~mask, torch.nan), mask)
    with pytest.raises(ValueError, match="at least 10 rows"):
        mutual_information(x[:5], mask[:5])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "rounds must be a whole number of at least 1"),
        ({"epochs": 1.5}, "epochs must be a whole number"),
        ({"lr": math.inf}, "lr must be positive and finite"),
        ({"decay": 2}, r"decay must lie in \[0, 1\]"),
        ({"pairing": "once"}, "pairing must be 'epoch' or 'round'"),
    ],
)
def test_bad_settings(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Rounds(), **changes)


def test_bad_tables() -> None:
    make, settings = (lambda k: VelocityMLP(2, SMALL)), Rounds()
    for x, mask, message in (
        (normal(3, 2), torch.ones(3, 2), "mask must be bool"),
        (normal(3, 2), torch.ones(3, 1, dtype=torch.bool), "must have one shape"),
        (normal(3, 2) / 0, holes(3, 2, 0.5), "finite where observed"),
    ):
        with pytest.raises(ValueError, match=message):
            run_rounds(x, mask, make, settings, KeyedNoise(0))
