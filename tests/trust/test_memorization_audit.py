"""The audit: exact neighbours, calibrated errors, copies that are found, input that is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from fluvial.core.noise import KeyedNoise
from fluvial.data import scaled
from fluvial.networks import MLP
from fluvial.trust import audit_memorization
from fluvial.trust.memorization_audit import Pair, _exchange
from fluvial.trust.rectified_flow_memorization import PairedFlow

NOISE = KeyedNoise(11)
LEVEL: dict[str, Any] = {"level": 0.1}


def normal(*shape: int, tag: str = "") -> Tensor:
    return NOISE.normal(torch.empty(*shape, dtype=torch.float64), tag)


TRAIN, HOLDOUT, NEW = (
    normal(60, 3, tag="train"),
    normal(40, 3, tag="held"),
    normal(50, 3, tag="new"),
)


# The numbers


@pytest.mark.parametrize("memory", [2**28, 3000, 500])
def test_ratios_are_those_of_all_pairs(memory: int) -> None:
    found = audit_memorization(NEW, TRAIN, HOLDOUT, memory=memory, **LEVEL)
    for rows, ratios in ((NEW, found.ratios), (HOLDOUT, found.holdout_ratios)):
        near = torch.cdist(rows, TRAIN).sort().values
        assert (ratios - near[:, 0] / near[:, 1]).abs().max() < 1e-12
    best = torch.cdist(NEW, TRAIN).argmin(1)
    for pair in found.pairs:
        assert pair.train == best[pair.sample]
        assert pair.distance == pytest.approx(float((NEW[pair.sample] - TRAIN[pair.train]).norm()))
    assert [pair.ratio for pair in found.pairs] == sorted(found.ratios.tolist())


def test_many_columns_in_few_bytes() -> None:
    train, held, new = (normal(30, 3, 8, 8, tag=tag) for tag in ("a", "b", "c"))
    found = audit_memorization(new, train, held, memory=9000, **LEVEL)
    near = torch.cdist(new.flatten(1), train.flatten(1)).sort().values
    assert (found.ratios - near[:, 0] / near[:, 1]).abs().max() < 1e-12


def test_threshold_and_intervals() -> None:
    found = audit_memorization(NEW, TRAIN, HOLDOUT, **LEVEL)
    k = 4  # floor(0.1 * 41)
    assert found.threshold == found.holdout_ratios.sort().values[k - 1]
    assert found.copies == int((found.ratios < found.threshold).sum())
    assert found.false_positive_rate == k / 41
    assert found.false_positive_interval == pytest.approx(stats.beta(k, 37).interval(0.95))
    exact = stats.binomtest(found.copies, 50).proportion_ci(0.95, "exact")
    assert found.share_interval == pytest.approx((exact.low, exact.high))
    assert found.p_copies == pytest.approx(
        math.fsum(stats.betabinom.pmf(j, 50, k, 37) for j in range(found.copies, 51))
    )
    assert (found.num, found.train, found.holdout, found.compared) == (50, 60, 40, 40)


def test_closer_is_a_share_of_sides_of_one_size() -> None:
    train = torch.cat([TRAIN, 100 + TRAIN])  # far rows change nothing but the number
    found = audit_memorization(NEW, TRAIN[:40], HOLDOUT, **LEVEL)
    to_train, to_held = (torch.cdist(NEW, rows).amin(1) for rows in (TRAIN[:40], HOLDOUT))
    assert found.closer == float((to_train < to_held).double().mean())
    assert found.median_side_ratio == pytest.approx(float((to_train / to_held).median()))
    assert audit_memorization(NEW, train, HOLDOUT, **LEVEL).compared == 40


def test_exchanges_have_the_law_of_sign_flips() -> None:
    """Of votes 3, -1 and 1 the sum of random signs has eight values."""
    to_side = torch.tensor([1.0, 1, 1, 2, 1, 1])
    to_other = torch.tensor([2.0, 2, 2, 1, 2, 1])  # the last is a tie
    at_side = torch.tensor([0, 0, 0, 5, 2, 3])
    at_other = torch.tensor([9, 9, 9, 1, 9, 3])
    closer, (low, high), p = _exchange(to_side, to_other, at_side, at_other, 10, NOISE)
    assert closer == 0.5 + 3 / 12
    # 3 or 5 of the sums {5, 3, 3, 1, -1, -3, -3, -5}: 3/8, by 9,999 draws
    assert abs(p - 3 / 8) < 5 * math.sqrt(3 / 8 * 5 / 8 / 9999)
    assert (low, high) == pytest.approx((0.5 - 5 / 12, 0.5 + 5 / 12))


def test_false_alarms_are_as_rare_as_they_say() -> None:
    """p-values over 80 sets of real rows: P(p <= a) <= a, and not far below."""
    p = []
    for k in range(80):
        noise = NOISE.at(k)
        parts = noise.normal(torch.empty(200, 2, dtype=torch.float64)).split([80, 60, 60])
        found = audit_memorization(parts[2], parts[0], parts[1], noise=noise, **LEVEL)
        p.append((found.p_copies, found.p_closer))
    for column in np.array(p).T:
        for a in (0.05, 0.2, 0.5):
            share, slack = (column <= a).mean(), 4 * math.sqrt(a * (1 - a) / 80)
            assert a / 3 - slack < share < a + slack


def test_a_hub_does_not_make_samples_look_close() -> None:
    """All samples next to one training row that is central: one vote, not fifty."""
    train = TRAIN.clone()
    train[0] = 0
    found = audit_memorization(0.1 * NEW, train[:40], HOLDOUT, **LEVEL)
    naive = stats.binomtest(round(50 * found.closer), 50, 0.5, "greater").pvalue
    assert found.p_closer > 10 * naive


# What is found


def test_copies_are_found_and_shown(tmp_path: Path) -> None:
    images = (255 * NOISE.uniform(torch.empty(260, 1, 4, 4))).to(torch.uint8)
    train, held = images[:200], images[200:]
    samples = torch.cat([train[7:17], (255 * NOISE.uniform(torch.empty(50, 1, 4, 4), "n")).byte()])
    found = audit_memorization(samples, train, held, level=0.05)
    assert "copy training rows" in found.verdict and found.p_copies < 1e-3
    assert found.copies >= 10 and found.near_copies == 10 / 60
    assert set(found.pairs[:10]) == {Pair(i, 7 + i, 0.0, 0.0) for i in range(10)}
    assert found.images is not None and found.images.shape == (2, 12, 1, 4, 4)
    assert torch.equal(found.images[0, :10], found.images[1, :10])
    found.save(tmp_path / "audit")
    content = json.loads((tmp_path / "audit" / "audit.json").read_text())
    assert content == json.loads(json.dumps(found.to_dict()))
    assert content["pairs"][0] == {"sample": 0, "train": 7, "distance": 0.0, "ratio": 0.0}
    assert (tmp_path / "audit" / "audit.txt").read_text() == f"{found}\n"
    assert (tmp_path / "audit" / "figure.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FileExistsError):
        found.save(tmp_path / "audit")
    found.save(tmp_path / "audit", overwrite=True)


def test_the_text_is_a_table_with_what_it_means() -> None:
    found = audit_memorization(NEW, TRAIN, HOLDOUT, **LEVEL)
    lines = str(found).splitlines()
    assert lines[0].split() == ["samples", "expected", "p"]
    assert lines[1].startswith(f"copies, d1/d2 < {found.threshold:.3g}")
    assert "verdict: no sign of memorisation" in lines
    assert max(map(len, lines)) <= 100


def test_vectors_have_no_pictures_and_a_figure(tmp_path: Path) -> None:
    found = audit_memorization(NEW, TRAIN, HOLDOUT, **LEVEL)
    assert found.images is None
    found.figure(tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 1000


def test_a_repeated_training_row_does_not_hide_a_copy() -> None:
    train = torch.cat([TRAIN, TRAIN])
    samples = NEW.clone()
    samples[3] = TRAIN[5] + 1e-3
    found = audit_memorization(samples, train, HOLDOUT, **LEVEL)
    assert found.pairs[0].sample == 3 and found.pairs[0].train == 5
    assert found.pairs[0].ratio < 0.05
    assert found.train == 60 and "60 training rows equal another one" in found.notes[0]


def test_samples_that_repeat_are_named() -> None:
    found = audit_memorization(NEW[:1].expand(20, 3), TRAIN, HOLDOUT, **LEVEL)
    assert any("19 of 20 samples equal another one" in note for note in found.notes)


# Sources of samples


def test_models_functions_and_tensors() -> None:
    model = PairedFlow(MLP(shape=(3,), width=8, depth=1))
    train, held = TRAIN.float(), HOLDOUT.float()
    noise = KeyedNoise(5)
    of_model = audit_memorization(model, train, held, num=30, noise=noise, steps=2, **LEVEL)
    samples = model.sample(30, noise=noise, steps=2)
    assert torch.equal(
        audit_memorization(samples, train, held, noise=noise, **LEVEL).ratios, of_model.ratios
    )

    def draw(num: int, noise: KeyedNoise, *, steps: int) -> Tensor:
        return model.sample(num, noise=noise, steps=steps)

    of_function = audit_memorization(draw, train, held, num=30, noise=noise, steps=2, **LEVEL)
    assert of_function.to_dict() == of_model.to_dict()
    again = audit_memorization(samples.numpy(), train.numpy(), held.numpy(), noise=noise, **LEVEL)
    assert again.to_dict() == of_model.to_dict()
    assert audit_memorization(samples, train, held, num=10, **LEVEL).num == 10


def test_uint8_and_their_scaled_selves_are_one() -> None:
    images = (255 * NOISE.uniform(torch.empty(90, 1, 4, 4))).to(torch.uint8)
    train, held, new = images.split([40, 30, 20])
    a = audit_memorization(scaled(new), train, held, **LEVEL)
    b = audit_memorization(new, scaled(train), scaled(held), **LEVEL)
    assert torch.allclose(a.ratios, b.ratios, atol=1e-6)


def test_a_models_format_brings_rows_to_its_units() -> None:
    class Format:
        def encode(self, x: Tensor) -> Tensor:
            return (x - 5) / 10

    class Model:
        format = Format()

        def sample(self, num: int, *, noise: KeyedNoise) -> Tensor:
            return NEW[:num]

    found = audit_memorization(Model(), 5 + 10 * TRAIN, 5 + 10 * HOLDOUT, num=50, **LEVEL)
    plain = audit_memorization(NEW, TRAIN, HOLDOUT, **LEVEL)
    assert torch.allclose(found.ratios, plain.ratios)


def test_features() -> None:
    def first_two(x: Tensor) -> Tensor:
        return x[:, :2]

    found = audit_memorization(NEW, TRAIN, HOLDOUT, features=first_two, **LEVEL)
    plain = audit_memorization(NEW[:, :2], TRAIN[:, :2], HOLDOUT[:, :2], **LEVEL)
    assert torch.equal(found.ratios, plain.ratios) and found.features == "2 features"
    order = torch.arange(59, -1, -1)
    turned = audit_memorization(NEW, TRAIN[order], HOLDOUT, features=first_two, **LEVEL)
    assert [59 - pair.train for pair in turned.pairs] == [pair.train for pair in found.pairs]


# Bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"level": 0.0}, "level"),
        ({"level": 0.01}, "at least 99 different rows"),
        ({"train": TRAIN[:2]}, "at least 3"),
        ({"train": normal(60, 4)}, "one shape"),
        ({"model": normal(5, 4)}, "one shape"),
        ({"holdout": torch.cat([HOLDOUT, TRAIN[3:5]])}, "2 rows that are training rows.*row 40"),
        ({"train": TRAIN / 0}, "train must be finite"),
        ({"holdout": HOLDOUT * math.nan}, "holdout must be finite"),
        ({"model": NEW * math.nan}, "samples must be finite"),
        ({"holdout": HOLDOUT[:0]}, "needs rows"),
        ({"holdout": HOLDOUT[0]}, "needs rows"),
        ({"model": nn.Linear(3, 3)}, "Linear"),
        ({"model": "runs/photos"}, "got str"),
        ({"model": lambda num, noise: "x"}, "samples must be a tensor"),
        ({"train": "photos"}, "train must be a tensor"),
        ({"num": 0}, "num"),
        ({"num": 51}, "at most the 50 samples"),
        ({"steps": 3}, "steps cannot be used"),
        ({"memory": 100}, "memory"),
        ({"duplicates": "keep"}, "duplicates"),
        ({"features": lambda x: x[:, 0]}, "features"),
        ({"features": lambda x: x / 0}, "features must be finite"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    arguments = {"model": NEW, "train": TRAIN, "holdout": HOLDOUT, **LEVEL} | change
    with pytest.raises((TypeError, ValueError), match=message):
        audit_memorization(**arguments)


def test_duplicates_can_be_dropped() -> None:
    held = torch.cat([HOLDOUT, TRAIN[3:5]])
    found = audit_memorization(NEW, TRAIN, held, duplicates="drop", **LEVEL)
    assert found.holdout == 40 and "2 held-out rows" in found.notes[0]
    plain = audit_memorization(NEW, TRAIN, HOLDOUT, **LEVEL)
    assert torch.equal(found.ratios, plain.ratios) and found.threshold == plain.threshold


def test_nothing_is_changed_and_results_repeat() -> None:
    copies = [part.clone() for part in (NEW, TRAIN, HOLDOUT)]
    first = audit_memorization(NEW, TRAIN, HOLDOUT, **LEVEL)
    assert audit_memorization(NEW, TRAIN, HOLDOUT, **LEVEL).to_dict() == first.to_dict()
    for part, copy in zip((NEW, TRAIN, HOLDOUT), copies, strict=True):
        assert torch.equal(part, copy)
