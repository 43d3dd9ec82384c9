"""`SchrodingerBridge` against closed forms, its training and files, the command line."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import fluvial
from fluvial.cli import main
from fluvial.core.couplings import EntropicOptimalTransport
from fluvial.core.gaussian.sde import EulerMaruyama
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Steering
from fluvial.core.simulate import Ancestral
from fluvial.data.format import Format
from fluvial.images import MeanFlow
from fluvial.models import system_of
from fluvial.networks import MLP
from fluvial.training.files import read_header
from fluvial.training.recipe import as_json, from_json
from fluvial.transport import Reference, SchrodingerBridge
from fluvial.transport.schrodinger_bridge import (
    GaussianCoupling,
    GaussianField,
    gaussian_bridge,
)
from fluvial.transport.schrodinger_bridge.increments import Free, IncrementMatching, increments
from fluvial.transport.schrodinger_bridge.recipe import Recipe

BROWNIAN, OU = Reference(1.0), Reference(1.3, 0.5)
NOISE = KeyedNoise(0)


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


MARGINALS = GaussianCoupling.independent(
    f64([1, -1]), f64([[2, 0.5], [0.5, 1]]), f64([-0.5, 2]), f64([[1, -0.3], [-0.3, 0.5]])
)


class Exact(nn.Module):
    """The field of a Gaussian coupling as a network that predicts the end."""

    def __init__(self, coupling: GaussianCoupling, reference: Reference) -> None:
        super().__init__()
        self.field = GaussianField(coupling, reference)
        self.unused = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.field(x, t)


class Affine(nn.Module):
    """W(t) x + b(t), three cosines a number: the class of Gaussian drifts, nearly."""

    def __init__(self, d: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3 * (d + 1), d))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        waves = torch.stack([torch.cos(math.pi * k * t) for k in range(3)], 1)
        both = torch.cat([x, torch.ones_like(x[:, :1])], 1)
        return (waves[:, :, None] * both[:, None]).flatten(1) @ self.weight


def exact(reference: Reference, steps: int = 60) -> tuple[SchrodingerBridge, GaussianCoupling]:
    coupling = gaussian_bridge(MARGINALS, reference)
    networks = (Exact(coupling, reference), Exact(coupling.mirrored, reference))
    bridge = SchrodingerBridge(
        *networks, reference=reference, predicts="clean", steps=steps, shape=(2,)
    )
    return bridge, coupling


def small(**options: Any) -> SchrodingerBridge:
    return SchrodingerBridge(
        MLP(shape=(2,), width=8, depth=1, ratio=1.0),
        MLP(shape=(2,), width=8, depth=1, ratio=1.0, seed=1),
        **{"steps": 4, **options},
    )


def points(rows: int, shift: float = 0.0) -> Tensor:
    return NOISE.normal(torch.empty(rows, 2)) + shift


QUICK: dict[str, Any] = {
    "half_iterations": 4,
    "steps": 3,
    "pairs": 16,
    "batch_size": 8,
    "progress": False,
}


# Against closed forms


@pytest.mark.parametrize("reference", [BROWNIAN, OU], ids=["brownian", "ou"])
def test_drifts_of_both_directions_and_the_flow_between(reference: Reference) -> None:
    bridge, coupling = exact(reference)
    t, x = f64(0.3), f64([[0.5, 1.0], [-1, 2]])
    w0, w1, v = reference.weights(t)
    mean = w0 * coupling.mean0 + w1 * coupling.mean1
    both = coupling.cross + coupling.cross.mT
    cov = w0**2 * coupling.cov0 + w1**2 * coupling.cov1 + w0 * w1 * both + v * torch.eye(2)
    # f - b = sigma^2 score of the marginal, which is Nelson's relation
    forward, backward = bridge.drift(x, t, "forward"), bridge.drift(x, t, "backward")
    score = -(x - mean) @ torch.linalg.inv(cov)
    assert torch.allclose(forward - backward, reference.diffusion**2 * score, atol=1e-10)
    assert torch.allclose(bridge.flow()(x, t), (forward + backward) / 2, atol=1e-12)
    assert torch.allclose(bridge.flow("forward")(x, 1 - t), -(forward + backward) / 2, atol=1e-12)
    rows = bridge.drift(x, f64([0.3, 0.3]), "forward")
    assert torch.allclose(rows, forward, atol=1e-14)


@pytest.mark.parametrize("reference", [BROWNIAN, OU], ids=["brownian", "ou"])
def test_the_flow_carries_one_marginal_to_the_other(reference: Reference) -> None:
    bridge, coupling = exact(reference)
    # an affine map of x: its matrix and shift from three points
    corners = f64([[0, 0], [1, 0], [0, 1]])
    for direction, begin, end in (
        ("backward", (coupling.mean1, coupling.cov1), (coupling.mean0, coupling.cov0)),
        ("forward", (coupling.mean0, coupling.cov0), (coupling.mean1, coupling.cov1)),
    ):
        out = bridge.ode(corners, direction, steps=100)
        matrix = (out[1:] - out[0]).T
        assert torch.allclose(out[0] + matrix @ begin[0], end[0], atol=2e-3)
        assert torch.allclose(matrix @ begin[1] @ matrix.T, end[1], atol=5e-3)
    back = bridge.ode(bridge.ode(corners, steps=100), "forward", steps=100)
    assert torch.allclose(back, corners, atol=5e-3)


@pytest.mark.parametrize("direction", ["backward", "forward"])
def test_simulation_has_the_law_of_the_bridge(direction: Any) -> None:
    bridge, coupling = exact(OU, steps=40)
    num = 2_000
    x0, x1 = MARGINALS.sample(num, KeyedNoise(2))
    start = x1 if direction == "backward" else x0
    states = bridge.sample(start, direction=direction, noise=KeyedNoise(3), batch_size=700)
    assert states.shape == (41, num, 2) and torch.equal(states[0], start)
    ends = (states[-1], start) if direction == "backward" else (start, states[-1])
    joint = torch.cov(torch.cat(ends, 1).T)
    # entries of a covariance have the deviation sqrt((S_ii S_jj + S_ij^2) / num)
    diagonal = coupling.covariance.diagonal()
    deviation = (diagonal[:, None] * diagonal + coupling.covariance.square()).div(num).sqrt()
    assert float(((joint - coupling.covariance).abs() / (5 * deviation + 0.02)).max()) < 1
    shift = (torch.cat(ends, 1).mean(0) - coupling.mean).abs()
    assert float((shift / (5 * (diagonal / num).sqrt())).max()) < 1
    # half way too
    w0, w1, v = (float(w) for w in OU.weights(f64(0.5)))
    both = coupling.cross + coupling.cross.mT
    half = w0**2 * coupling.cov0 + w1**2 * coupling.cov1 + w0 * w1 * both + v * torch.eye(2)
    found = torch.cov(states[20].T)
    size = half.diagonal().max() * math.sqrt(2 / num)
    assert float((found - half).abs().max()) < 5 * float(size) + 0.02


def test_rows_do_not_depend_on_batches_and_trajectories_end_where_translations_do() -> None:
    bridge = small().eval()
    for network in (bridge.network0, bridge.network1):
        nn.init.normal_(network.out.weight, generator=torch.Generator().manual_seed(0))
    x = points(7)
    whole = bridge.translate(x, "forward", noise=NOISE)
    parts = bridge.translate(x, "forward", noise=NOISE, batch_size=3)
    assert torch.allclose(whole, parts, atol=1e-6)
    assert torch.equal(bridge.sample(x, direction="forward", noise=NOISE)[-1], whole)
    assert not torch.equal(bridge.translate(x, "forward", noise=KeyedNoise(1)), whole)
    assert bridge.translate(x, steps=9).shape == (7, 2)
    assert bridge.sample(x, noise=NOISE, steps=9).shape == (10, 7, 2)
    quiet = bridge.translate(x, "forward", noise=NOISE, sampler=Ancestral())
    assert quiet.shape == (7, 2) and not torch.equal(quiet, whole)

    class Lower(Steering):
        def clean(self, clean: Any, x: Any, aim: Any, run: Any) -> Any:
            return torch.zeros_like(clean)

    # an end that is known is reached, but for the noise of the last step
    aimed = bridge.translate(x, sampler=Ancestral(), steer=Lower())
    assert torch.equal(aimed, torch.zeros(7, 2))


# The chains of DSB


@pytest.mark.parametrize("reference", [BROWNIAN, OU], ids=["brownian", "ou"])
def test_increments_are_the_published_targets(reference: Reference) -> None:
    # x_{k+1} = x_k + h f + sigma sqrt(h) z_k, target -f(x_{k+1}, t_k) - sigma z_k / sqrt(h),
    # which is against time
    steps, h = 5, 1 / 5
    coupling = gaussian_bridge(MARGINALS, reference)
    bridge, _ = exact(reference, steps)
    x0, _ = coupling.sample(6, KeyedNoise(4))
    states = bridge.sample(x0, direction="forward", noise=NOISE)

    def f(x: Tensor, k: int) -> Tensor:
        return bridge.drift(x, f64(k * h), "forward")

    field = fluvial.core.gaussian.fields.convert(bridge.field("forward"), "score", reference)
    data = increments(states, field, reference)
    assert data["x"].shape == (30, 2) and torch.equal(data["x"], states[1:].flatten(0, 1))
    assert torch.allclose(data["t"], f64([0.2, 0.4, 0.6, 0.8, 1]).repeat_interleave(6))
    for k in range(steps):
        push = states[k + 1] - states[k] - h * f(states[k], k)  # sigma sqrt(h) z_k
        wanted = -f(states[k + 1], k) - push / h
        assert torch.allclose(-data["drift"][6 * k : 6 * k + 6], wanted, atol=1e-9)
    # the first chain is the reference's own
    free = Free(reference)
    drift = -reference.drift(states[1], free(states[1], f64(0.5)))
    assert torch.allclose(drift, -reference.reversion * states[1], atol=1e-12)
    objective = IncrementMatching(bridge.network0, reference, "clean")
    terms = objective({name: value[:6] for name, value in data.items()}, NOISE)
    error = bridge.drift(data["x"][:6], data["t"][:6]) - data["drift"][:6]
    assert float(terms["loss"]) == pytest.approx(float(error.square().mean()))


# Training


@pytest.mark.parametrize("reference", [BROWNIAN, OU], ids=["brownian", "ou"])
def test_training_finds_the_bridge_of_gaussians_in_both_directions(reference: Reference) -> None:
    x0, x1 = (x.float() for x in MARGINALS.sample(3_000, KeyedNoise(5)))
    bridge = SchrodingerBridge(Affine(), Affine(), reference=reference, steps=20, shape=(2,))
    bridge.fit(
        x0,
        x1,
        half_iterations=6,
        steps=120,
        pairs=3_000,
        batch_size=512,
        lr=0.05,
        schedule="linear",
        ema=0.9,
        progress=False,
    )
    coupling = gaussian_bridge(MARGINALS, reference)
    y0, y1 = (y.float() for y in MARGINALS.sample(8_000, KeyedNoise(6)))
    for direction, start in (("backward", y1), ("forward", y0)):
        end = bridge.translate(start, direction, noise=KeyedNoise(7))
        ends = (end, start) if direction == "backward" else (start, end)
        both = torch.cat(ends, 1).double()
        assert float((both.mean(0) - coupling.mean).abs().max()) < 0.12
        assert float((torch.cov(both.T) - coupling.covariance).abs().max()) < 0.2
        # one projection of independent ends misses it by a fifth
        cross = torch.cov(both.T)[:2, 2:]
        assert float((cross - coupling.cross).norm()) < 0.12 * float(coupling.cross.norm())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"renew": 2, "first_steps": 5},
        {"coupling": None},
        {"coupling": EntropicOptimalTransport(2.0)},
        {"directions": ("backward",)},
        {"method": "dsb"},
        {"half_iterations": 1},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_every_training_is_deterministic(options: dict[str, Any]) -> None:
    def fit(seed: int = 0) -> list[Tensor]:
        bridge = small().fit(points(20), points(12, 1.0), **{**QUICK, **options}, seed=seed)
        assert not bridge.training and bridge.shape == (2,)
        return list(bridge.state_dict().values())

    one, two, other = fit(), fit(), fit(1)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert all(bool(value.isfinite().all()) for value in one)


def test_the_stages_of_a_training(tmp_path: Path) -> None:
    small().fit(points(20), points(20, 1.0), **{**QUICK, "renew": 2}, out=tmp_path)
    described = json.loads((tmp_path / "training.json").read_text())
    found = {stage["name"]: stage["steps"] for stage in described["stages"]}
    assert found == {
        "01-backward": 3,
        "02-forward": 3,
        "03-backward-1": 2,
        "03-backward-2": 1,
        "04-forward-1": 2,
        "04-forward-2": 1,
    }
    assert described["bridge"]["reference"] == {"diffusion": 1.0, "reversion": 0.0}
    with pytest.raises(ValueError, match="configuration: bridge.reference.diffusion was 1.0"):
        small(reference=Reference(2.0)).fit(
            points(20), points(20, 1.0), **{**QUICK, "renew": 2}, out=tmp_path
        )
    with pytest.raises(ValueError, match="another configuration: bridge.x1 was"):
        small().fit(points(20), points(20, 2.0), **{**QUICK, "renew": 2}, out=tmp_path)


def test_one_direction_alone_leaves_the_other_network(tmp_path: Path) -> None:
    bridge = small()
    before = [value.clone() for value in bridge.network1.state_dict().values()]
    bridge.fit(points(20), points(20, 1.0), **QUICK, directions=("backward",))
    after = bridge.network1.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_training_that_was_stopped_goes_on(tmp_path: Path) -> None:
    x0, x1 = points(20), points(20, 1.0)
    whole = small().fit(x0, x1, **QUICK)
    # a network that fails in the third half-iteration, whose pairs the second one makes
    bridge, calls = small(), 0

    def fail(*args: Any) -> None:
        nonlocal calls
        calls += bridge.network0.training
        if calls == 5:
            raise KeyboardInterrupt

    hook = bridge.network0.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        bridge.fit(x0, x1, **QUICK, out=tmp_path)
    hook.remove()
    resumed = small().fit(x0, x1, **QUICK, out=tmp_path)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name])


def test_float64_stays() -> None:
    bridge = small().double().fit(points(20).double(), points(20).double(), **QUICK)
    assert bridge.translate(points(3).double()).dtype == torch.float64
    assert bridge.ode(points(3).double()).dtype == torch.float64
    # the dtype of the rows, whatever that of the networks
    bridge, x = small(shape=(2,)), points(3).double()
    ends = (bridge.translate(x), bridge.ode(x), bridge.sample(x, noise=NOISE)[-1])
    assert all(end.dtype == torch.float64 for end in ends)
    assert torch.equal(ends[0].float(), bridge.translate(x.float(), noise=NOISE))
    # with a format too: float32 holds numbers near 1e9 to 64 only
    bridge = small(format=Format("arrays", (2,), (1e9,), (1.0,)))
    end = bridge.translate(x + 1e9)
    assert end.dtype == torch.float64 and 0.01 < float((end - 1e9 - x).abs().mean()) < 3


# Files


def test_save_and_load(tmp_path: Path) -> None:
    format = Format("table", (2,), (1.0, 2.0), (3.0, 0.5), columns=("a", "b"))
    bridge = small(reference=OU, predicts="clean", format=format)
    bridge.fit(points(20), points(20, 1.0), **QUICK)
    bridge.save(tmp_path / "model.safetensors")
    loaded = fluvial.load(tmp_path / "model.safetensors")
    assert isinstance(loaded, SchrodingerBridge) and loaded.reference == OU
    assert (loaded.predicts, loaded.measure, loaded.steps) == ("clean", "clean", 4)
    assert loaded.format == format and not loaded.training
    x = points(5).double()
    moved = bridge.translate(x, "forward")
    assert torch.equal(loaded.translate(x, "forward"), moved) and moved.dtype == torch.float64
    assert loaded.use is not None and loaded.use.system == "schrodinger-bridge-imf"
    with pytest.raises(FileExistsError, match="overwrite=True"):
        bridge.save(tmp_path / "model.safetensors")
    assert read_header(tmp_path / "model.safetensors")["network"]["class"] == "MLP"


def test_networks_of_the_user_are_handed_over(tmp_path: Path) -> None:
    bridge = SchrodingerBridge(Affine(), Affine(), shape=(2,), steps=3)
    bridge.save(tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="is not a network of fluvial"):
        SchrodingerBridge.load(tmp_path / "m.safetensors")
    loaded = SchrodingerBridge.load(tmp_path / "m.safetensors", network=(Affine(), Affine()))
    assert torch.equal(loaded.translate(points(3)), bridge.translate(points(3)))
    with pytest.raises(ValueError, match="do not fit the network"):
        SchrodingerBridge.load(tmp_path / "m.safetensors", network=(Affine(3), Affine(3)))


# Mistakes


def test_bad_models() -> None:
    network = MLP(shape=(2,), width=8, depth=1)
    other, third = MLP(shape=(2,), width=8, depth=1), MLP(shape=(3,), width=8, depth=1)
    with pytest.raises(ValueError, match="network0 and network1 are one network"):
        SchrodingerBridge(network, network)
    with pytest.raises(ValueError, match="the shape of an event differs"):
        SchrodingerBridge(network, third)
    for options, message in (
        ({"predicts": "velocity"}, "predicts must be one of score, noise, clean, got 'velocity'"),
        ({"measure": "drift"}, "measure must be one of"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            SchrodingerBridge(network, other, **options)


def test_bad_fits() -> None:
    x = points(20)
    for options, message in (
        ({"half_iterations": 0}, "half_iterations must be at least 1, got 0"),
        ({"pairs": 0}, "pairs must be at least 1, got 0"),
        ({"renew": 0}, "renew must be at least 1, got 0"),
        ({"away": 0.5}, r"away must lie in \(0, 0.5\), got 0.5"),
        ({"method": "imf"}, "method must be 'dsbm' or 'dsb', got 'imf'"),
        ({"directions": ("up",)}, "direction must be 'backward' or 'forward', got 'up'"),
        ({"directions": ()}, "trains both directions in turn, got"),
        ({"method": "dsb", "directions": ("forward",)}, "dsb trains both directions in turn"),
        ({"lr": -1}, "lr must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            small().fit(x, x, **{**QUICK, **options})
    for x0, x1, error, message in (
        (x, points(20)[:, :1], ValueError, r"x1 must have shape \(rows, 2\), got \(20, 1\)"),
        (x[:0], x, ValueError, r"x0 must have shape \(rows, \*event\), got \(0, 2\)"),
        (x / 0, x, ValueError, "x0 holds values that are not finite"),
        (x, x.int(), TypeError, "x1 must be floating, got torch.int32"),
        ([1.0], x, TypeError, "x0 must be a tensor, got list"),
    ):
        with pytest.raises(error, match=message):
            small().fit(x0, x1, **QUICK)
    free = SchrodingerBridge(Affine(), Affine())
    with pytest.raises(ValueError, match="x0 and x1 must have events of one shape"):
        free.fit(x, torch.ones(5, 3), **QUICK)
    with pytest.raises(ValueError, match="shape is unknown: fit first"):
        free.translate(x)


def test_bad_translations() -> None:
    bridge = small()
    for call, message in (
        (lambda: bridge.translate(points(3), "up"), "direction must be"),
        (lambda: bridge.ode(points(3), "up"), "direction must be"),
        (lambda: bridge.translate(points(3), batch_size=0), "batch_size must be at least 1"),
        (lambda: bridge.translate(points(3), steps=0), "steps must be at least 1"),
        (lambda: bridge.translate(torch.ones(3, 4)), r"x must have shape \(rows, 2\)"),
        (lambda: bridge.sample(torch.ones(3, 4), noise=NOISE), r"x must have shape \(rows, 2\)"),
        (lambda: bridge.sample(points(3) / 0, noise=NOISE), "x holds values that are not finite"),
        (lambda: bridge.ode(points(3) / 0), "x holds values that are not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="x must be a floating tensor"):
        bridge.sample(torch.ones(3, 2, dtype=torch.int64), noise=NOISE)


# The command line


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUVIAL_CACHE", str(tmp_path / "cache"))


def table(path: Path, shift: float, rows: int = 30) -> Path:
    values = np.random.default_rng(0).normal(shift, 2, (rows, 2))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["height", "weight"], *values.tolist()])
    return path


def folder(path: Path, level: int, count: int = 12) -> Path:
    path.mkdir()
    rng = np.random.default_rng(level)
    for k in range(count):
        pixels = np.clip(rng.normal(level, 20, (8, 8)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(path / f"{k:02d}.png")
    return path


FLAGS = ["--steps", "8", "--half-iterations", "4", "--pairs", "16", "--batch-size", "8"]
FLAGS += ["--simulation", "3", "--width", "8", "--depth", "1", "--ema", "0.5", "--quiet"]


def test_two_tables_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, run = table(tmp_path / "a.csv", 0), table(tmp_path / "b.csv", 5, 40), tmp_path / "run"
    system = "schrodinger-bridge-imf"
    arguments = ["train", system, "--data", str(a), "--target", str(b), "--out", str(run), *FLAGS]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "8 steps in" in out and f"next: fluvial translate {run} INPUT --out" in out
    settings = json.loads((run / "run.json").read_text())
    assert settings["source"] == str(a) and settings["target"] == str(b)
    assert settings["data"]["name"] == "a.csv to b.csv"
    assert settings["data"]["rows"] == {"train": 63, "validation": 7}
    result = json.loads((run / "result.json").read_text())
    assert [row["name"][:6] for row in result["metrics"]] == ["sliced", "root m"] * 2
    assert "fluvial translate ." in (run / "README.md").read_text()
    assert (run / "figure.png").stat().st_size > 1000
    # pooled moments: those of both files together
    rows = [np.loadtxt(path, delimiter=",", skiprows=1) for path in (a, b)]
    format = fluvial.load(run).format
    assert format.shift == pytest.approx(np.concatenate(rows).mean(0), rel=1e-5)
    assert format.scale == pytest.approx(np.concatenate(rows).std(0), rel=1e-5)

    moved = tmp_path / "moved.csv"
    assert main(["translate", str(run), str(a), "--out", str(moved), "--quiet"]) == 0
    assert "30 rows in" in capsys.readouterr().out
    found = np.loadtxt(moved, delimiter=",", skiprows=1)
    exact = fluvial.load(run).translate(torch.from_numpy(rows[0].astype("f4")))
    assert found == pytest.approx(exact.numpy(), abs=1e-4)
    back = tmp_path / "back.csv"
    arguments = ["translate", str(run), str(b), "--out", str(back), "--reverse", "--json"]
    assert main([*arguments, "--steps", "5", "--quiet"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["rows"], document["steps"], document["reverse"]) == (40, 5, True)
    assert document["last_noise"] == "auto"

    for arguments, message in (
        (
            ["translate", str(run), str(a), "--out", str(moved)],
            "exists; choose another, or --force",
        ),
        (["translate", str(run), str(a), "--out", "x.png"], "are written as .csv"),
        (["translate", str(run), str(a), "--out", "x.csv", "--steps", "0"], "--steps must be at"),
        (["translate", str(run), "digits", "--out", "x.csv"], " INPUT: digits has kind images"),
        (["sample", str(run), "--out", "x.csv"], "joins two data sets and makes nothing of noise"),
        (["train", system, "--data", str(a), "--out", str(tmp_path / "n")], "--target is missing"),
        (["train", "meanflow", "--data", str(a), "--target", str(b)], "--target is for systems"),
        (["train", "--resume", str(run), "--target", str(a)], f"--target was {b}"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


def test_two_folders_of_images_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, run = folder(tmp_path / "dark", 60), folder(tmp_path / "light", 190), tmp_path / "run"
    arguments = ["train", "schrodinger-bridge-imf", "--data", str(a), "--target", str(b)]
    assert main([*arguments, "--out", str(run), *FLAGS, "--reversion", "0.5"]) == 0
    assert main(["train", "--resume", str(run), "--quiet"]) == 0
    out = capsys.readouterr().out
    assert f"to translate:    fluvial translate {run}" in out
    moved = tmp_path / "moved"
    assert main(["translate", str(run), str(a), "--out", str(moved), "--quiet"]) == 0
    assert [path.name for path in (run / "samples").iterdir()] == ["step-00000008.png"]
    images = sorted(moved.glob("*.png"))
    with Image.open(images[0]) as image:
        assert len(images) == 12 and image.size == (8, 8)
    model = fluvial.load(run)
    assert model.reference == Reference(1.0, 0.5)
    # images end without the noise of the last step, unless it is asked for
    x = torch.stack([torch.from_numpy(np.array(Image.open(p)))[None] for p in sorted(a.iterdir())])
    kinds = {None: "auto", Ancestral(): "off", EulerMaruyama(): "on"}
    ends = {name: model.translate(x, sampler=sampler) for sampler, name in kinds.items()}
    assert torch.equal(ends["auto"], ends["off"]) and not torch.equal(ends["off"], ends["on"])
    for name, end in ends.items():
        out = tmp_path / f"{name}.npy"
        arguments = ["translate", str(run), str(a), "--out", str(out), "--quiet"]
        assert main([*arguments, "--last-noise", name]) == 0
        assert np.array_equal(np.load(out), end.numpy())

    def fails(*arguments: str) -> str:
        assert main([*map(str, arguments)]) == 2
        return capsys.readouterr().err

    # sides that differ, and how to bring them to one
    (tmp_path / "wide").mkdir()
    for k in range(12):
        pixels = np.full((12, 10, 3), (k, 2 * k, 9), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "wide" / f"{k}.png")
    train = ["train", "schrodinger-bridge-imf", "--out", tmp_path / "n", *FLAGS]
    error = fails(*train, "--data", a, "--target", tmp_path / "wide")
    assert "wide has (3, 12, 10); bring both to one, --size 8 8 and --channels 1, say" in error
    error = fails(*train, "--data", tmp_path / "wide", "--target", tmp_path / "wide")
    assert "images of 12 x 10 are halved twice, so both sides must be multiples of 4" in error
    assert "bring them to --size 12 8" in error
    assert "--size: images of 6 x 6 are" in fails(*train, "--data", "x", "--size", "6")


def test_a_training_of_half_iterations_is_not_made_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, run = table(tmp_path / "a.csv", 0), tmp_path / "run"
    arguments = ["train", "schrodinger-bridge-imf", "--data", str(a), "--target", str(a)]
    assert main([*arguments, "--out", str(run), *FLAGS, "--schedule", "constant"]) == 0
    assert "The loss was not measured on held-out rows" in capsys.readouterr().out
    assert main(["train", "--resume", str(run)]) == 0
    assert "to train longer: begin another run" in capsys.readouterr().out
    assert main(["train", "--resume", str(run), "--steps", "16"]) == 2
    assert "its half-iterations share the steps out), but --steps was 8" in capsys.readouterr().err


def test_commands_know_what_joins_two_sets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bridge.safetensors"
    small().fit(points(20), points(20, 1.0), **QUICK).save(path)
    assert system_of(path).joins
    assert main(["translate", str(path), "x.csv", "--out", "y.csv"]) == 2
    assert "was fitted on tensors" in capsys.readouterr().err
    other = tmp_path / "meanflow.safetensors"
    MeanFlow(MLP(shape=(2,), width=8, depth=1)).save(other)
    assert not system_of(other).joins
    assert main(["translate", str(other), "x.csv", "--out", "y.csv"]) == 2
    assert "does not join two data sets; fluvial sample" in capsys.readouterr().err


def test_recipes(tmp_path: Path) -> None:
    recipe = Recipe(size=(8, 12), clip=None, first="ot", diffusion=0.5, label="kind")
    assert from_json(Recipe, json.loads(json.dumps(as_json(recipe)))) == recipe
    assert (recipe.training.steps, recipe.training.clip) == (1_000, None)
    with pytest.raises(ValueError, match="hyper-parameters of another version"):
        from_json(Recipe, {"colour": 3})
    for options, message in (
        ({"validation": 1.0}, "validation must be a share"),
        ({"channels": 2}, "channels must be 1 for grey or 3"),
        ({"pairs": 0}, "pairs must be at least 1"),
        ({"first": "best"}, "first must be one of independent, ot, reference"),
        ({"steps": 5}, "steps must be at least one for each of 10 half-iterations, got 5"),
        ({"steps": 25}, "steps must be a multiple of the 10 half-iterations, got 25; 20 and 30"),
        ({"size": (8, 6)}, "images of 8 x 6 are halved twice"),
        ({"seed": -1}, "seed must not be negative"),
        ({"diffusion": 0.0}, "diffusion must be positive"),
        ({"lr": 0.0}, "lr must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            Recipe(**options)
    a, b = table(tmp_path / "a.csv", 0), folder(tmp_path / "b", 99)
    with pytest.raises(ValueError, match="target must have the kind of the data, table of a.csv"):
        Recipe().prepare(a, b, progress=False)
    arrays = [tmp_path / f"{k}.npy" for k in (2, 3)]
    for k, path in zip((2, 3), arrays, strict=True):
        np.save(path, np.random.default_rng(0).normal(size=(30, k, 4)))
    with pytest.raises(ValueError, match="target must have the shape of the data"):
        Recipe().prepare(*arrays, progress=False)
    job = Recipe(validation=0.0).prepare(arrays[0], arrays[0], progress=False)
    assert job.measure() == [] and job.rows[1] is None
    with pytest.raises(ValueError, match="hold out another share, or nothing, validation=0"):
        Recipe(validation=0.001).prepare(arrays[0], arrays[0], progress=False)
    one = table(tmp_path / "one.csv", 0, rows=1)
    with pytest.raises(ValueError, match="leaves no row of one.csv, which has 1 to share out"):
        Recipe().prepare(table(tmp_path / "many.csv", 0), one, progress=False)
