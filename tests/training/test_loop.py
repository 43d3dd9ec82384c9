from __future__ import annotations

import json
import math
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Noise, Objective
from fluvial.training import loop
from fluvial.training.files import load_checkpoint
from fluvial.training.loop import Batches, Outcome, Stage, Training, train

from .runs import assert_same, assert_same_run, latest, metrics, step_of


class Fit(Objective):
    """A noisy linear regression; calls ``on_step`` in every forward."""

    count: Tensor

    def __init__(self, on_step: Callable[[int], None] = lambda step: None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.on_step = on_step
        self.seen: list[Tensor] = []

    def forward(self, batch: Mapping[str, Tensor], noise: Noise) -> dict[str, Tensor]:
        self.on_step(int(self.count))
        self.seen.append(self.weight.detach().clone())
        x = batch["x"] + 0.1 * noise.normal(batch["x"], "data")
        error = (x @ self.weight.T)[:, 0] - batch["y"]
        return {"loss": error.square().mean(), "error": error.abs().mean().detach()}

    def after_step(self) -> None:
        self.count.add_(1)


def data(rows: int = 10) -> dict[str, Tensor]:
    x = KeyedNoise(1).normal(torch.empty(rows, 3))
    return {"x": x, "y": x.sum(1)}


TRAINING = Training(
    steps=130,
    batch_size=4,
    lr=1e-2,
    warmup=5,
    schedule="linear",
    decay=0.5,
    clip=1.0,
    checkpoint_every=40,
)


def run(
    objective: Objective, out: Path | None = None, training: Training = TRAINING, **more: Any
) -> Outcome:
    (outcome,) = train(Stage(objective, data(), training), out=out, progress=False, **more)
    return outcome


# The schedule, the batches, the average


def test_learning_rate() -> None:
    training = Training(steps=100, lr=2.0, warmup=10, schedule="linear", decay=0.3)
    assert training.rate(0) == 0.2 and training.rate(4) == 1.0
    assert all(training.rate(step) == 2.0 for step in range(9, 71))
    assert training.rate(85) == pytest.approx(1.0)
    assert training.rate(99) == pytest.approx(2 / 30)
    assert all(Training(steps=5, lr=0.5).rate(step) == 0.5 for step in range(5))
    assert Training(steps=4, lr=1.0, schedule="linear").rate(2) == 0.5
    cosine = Training(steps=100, lr=2.0, schedule="cosine", decay=0.5)
    assert cosine.rate(0) == cosine.rate(50) == 2.0
    assert cosine.rate(75) == pytest.approx(1.0)
    assert cosine.rate(99) == pytest.approx(1 - math.cos(math.pi * 0.02))


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0},
        {"batch_size": 0},
        {"checkpoint_every": 0},
        {"lr": 0.0},
        {"lr": float("nan")},
        {"ema": 1.0},
        {"ema": -0.1},
        {"ema": ()},
        {"ema": (0.9, 0.9)},
        {"steps": 2.5},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9,)},
        {"weight_decay": -1.0},
        {"decay": 1.1},
        {"decay": 0.0},
        {"schedule": "step"},
        {"precision": "fp8"},
        {"accumulation": 0},
        {"keep": 0},
        {"sample_every": 0},
        {"warmup": -1},
        {"clip": 0.0},
    ],
    ids=str,
)
def test_bad_training(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Training(**{"steps": 1, **options})


@pytest.mark.parametrize(("rows", "size"), [(12, 4), (10, 4), (3, 8), (5, 5), (1, 3)])
def test_every_epoch_is_a_permutation(rows: int, size: int) -> None:
    batches = Batches({"i": torch.arange(rows)}, size, seed=0)
    steps = 5 * rows
    drawn = torch.cat([batches(step)["i"] for step in range(steps)])
    assert len(drawn) == steps * size
    epochs = drawn[: len(drawn) // rows * rows].reshape(-1, rows)
    assert torch.equal(epochs.sort(1).values, torch.arange(rows).expand_as(epochs))
    if rows > 2:
        assert not torch.equal(epochs[0], epochs[1])


def test_batches_are_a_function_of_seed_and_step() -> None:
    values = {"i": torch.arange(10), "j": -torch.arange(10)}
    one, two = (Batches(values, 4, seed=0) for _ in range(2))
    forward = [one(step) for step in range(12)]
    for step in reversed(range(12)):
        assert torch.equal(two(step)["i"], forward[step]["i"])
        assert torch.equal(two(step)["j"], -two(step)["i"])
    other = Batches(values, 4, seed=1)
    assert any(not torch.equal(other(step)["i"], forward[step]["i"]) for step in range(3))


def test_bad_data() -> None:
    with pytest.raises(ValueError, match="same number of rows"):
        Batches({"x": torch.zeros(3), "y": torch.zeros(4)}, 1, seed=0)
    for empty in ({"x": torch.zeros(0, 3)}, {}):
        with pytest.raises(ValueError, match="empty"):
            Batches(empty, 1, seed=0)


@pytest.mark.parametrize("ema", [0.0, 0.3, 0.99])
def test_average_of_the_weights(ema: float) -> None:
    last: list[Tensor] = []

    class Ending(Fit):
        def finish(self, average: Mapping[str, Tensor]) -> None:
            last.append(self.weight.detach().clone())
            super().finish(average)

    objective = Ending()
    run(objective, training=Training(steps=30, batch_size=4, lr=1e-2, ema=ema))
    average = objective.state_dict()
    weights = [*objective.seen, *last]
    wanted = weights[0]
    for step, value in enumerate(weights[1:]):
        decay = min(ema, (1 + step) / (10 + step))
        wanted = decay * wanted + (1 - decay) * value
    assert torch.allclose(average["weight"], wanted, atol=1e-6)
    assert average["count"] == 30 and average["weight"].dtype == torch.float32


def test_it_is_adamw() -> None:
    training = Training(
        steps=20, batch_size=4, lr=1e-2, weight_decay=0.1, clip=0.5, schedule="cosine", ema=0.0
    )
    objective = Fit()
    run(objective, training=training)
    plain = Fit()
    optimizer = torch.optim.AdamW(plain.parameters(), 1.0, betas=(0.9, 0.95), weight_decay=0.1)
    batches = Batches(data(), 4, seed=0)
    for step in range(20):
        optimizer.zero_grad()
        plain(batches(step), KeyedNoise(0).at(step))["loss"].backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = training.rate(step)
        optimizer.step()
    assert torch.allclose(objective.weight, plain.weight, atol=1e-6)


# Files, interruption, resumption


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    run(Fit(), folder)
    return folder


def test_files_of_a_run(tmp_path: Path) -> None:
    run(Fit(), tmp_path, config={"system": "x", "options": (1, None)})
    written = json.loads((tmp_path / "training.json").read_text())
    assert written["steps"] == 130 and written["rows"] == 10 and written["options"] == [1, None]
    assert [line["step"] for line in metrics(tmp_path)] == [50, 100, 130]
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()} == {
        ".lock",
        "training.json",
        "metrics.jsonl",
        "checkpoints/step-00000130.pt",
        "weights/last.safetensors",
        "weights/ema-0.9999.safetensors",
    }
    run(Fit())  # writes nothing


def test_the_latest_checkpoints_are_kept(tmp_path: Path) -> None:
    run(Fit(), tmp_path, replace(TRAINING, keep=3))
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == [f"step-{step:08d}.pt" for step in (80, 120, 130)]
    # of a write that a power cut ended
    left = tmp_path / "checkpoints" / ".step-00000200.pt.abc"
    left.write_bytes(b"half")
    run(Fit(), tmp_path)
    assert not left.exists()


def test_metrics_are_means_over_their_steps(tmp_path: Path) -> None:
    losses: list[float] = []

    class Listening(Fit):
        def forward(self, batch: Mapping[str, Tensor], noise: Noise) -> dict[str, Tensor]:
            terms = super().forward(batch, noise)
            losses.append(terms["loss"].item())
            return terms

    run(Listening(), tmp_path)
    for line, part in zip(
        metrics(tmp_path), (losses[:50], losses[50:100], losses[100:]), strict=True
    ):
        assert line["loss"] == pytest.approx(sum(part) / len(part), rel=1e-5)


def raise_signal_at(step: int) -> Callable[[int], None]:
    def on_step(now: int) -> None:
        if now == step:
            signal.raise_signal(signal.SIGINT)

    return on_step


@pytest.mark.parametrize("step", [0, 39, 49, 77, 128])
def test_interrupted_and_resumed_is_the_same(step: int, whole: Path, tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(Fit(raise_signal_at(step)), parts)
    assert signal.getsignal(signal.SIGINT) is handler
    assert step_of(parts) == step + 1
    again = Fit()
    run(again, parts)
    assert_same(again.state_dict(), load_checkpoint(latest(whole))["averages"]["ema-0.9999"])
    assert len(again.seen) == 130 - step - 1
    assert_same_run(whole, parts)


def test_interrupt_in_the_last_step_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(Fit(raise_signal_at(129)), tmp_path)
    assert step_of(tmp_path) == 130
    finished = Fit()
    run(finished, tmp_path)
    assert not finished.seen


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    def twice(now: int) -> None:
        if now == 5:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    objective = Fit(twice)
    with pytest.raises(KeyboardInterrupt):
        run(objective, tmp_path)
    assert objective.count == 5 and not (tmp_path / "checkpoints").exists()


def test_crashed_and_resumed_is_the_same(whole: Path, tmp_path: Path) -> None:
    """Steps past the last checkpoint are done again, and their lines written once."""
    parts = tmp_path / "parts"

    def crash(now: int) -> None:
        if now == 119:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        run(Fit(crash), parts)
    assert [line["step"] for line in metrics(parts)] == [50, 100]
    with (parts / "metrics.jsonl").open("a") as file:
        file.write('{"step": 110, "lo')
    assert step_of(parts) == 80
    run(Fit(), parts)
    assert_same_run(whole, parts)


def test_training_off_the_main_thread() -> None:
    here, there = Fit(), Fit()
    thread = threading.Thread(target=run, args=(there,))
    thread.start()
    thread.join()
    run(here)
    assert_same(here.state_dict(), there.state_dict())
    assert there.count == 130


def test_resume_can_be_declined(tmp_path: Path) -> None:
    run(Fit(), tmp_path)
    objective = Fit(raise_signal_at(20))
    with pytest.raises(KeyboardInterrupt):
        run(objective, tmp_path, resume=False)
    assert len(objective.seen) == 21 and not metrics(tmp_path)
    assert step_of(tmp_path) == 21  # the checkpoints of the run before are gone


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    short = Training(steps=2, batch_size=2, schedule="linear")
    run(Fit(), tmp_path, short, config={"p": 1.0})
    for changed, words in (
        (replace(short, lr=0.5), "lr was 0.0001, is 0.5"),
        (replace(short, steps=3), "steps was 2, is 3"),
        (replace(short, betas=(0.8, 0.9)), r"betas was \[0.9, 0.95\]"),
    ):
        with pytest.raises(ValueError, match=words):
            run(Fit(), tmp_path, changed, config={"p": 1.0})
    with pytest.raises(ValueError, match=r"p was 1.0, is 2.0"):
        run(Fit(), tmp_path, short, config={"p": 2.0})
    with pytest.raises(ValueError, match=r"p was 1.0, is None"):
        run(Fit(), tmp_path, short)
    with pytest.raises(ValueError, match="rows was 10, is 9"):
        train(Stage(Fit(), data(9), short), out=tmp_path, config={"p": 1.0}, progress=False)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    run(Fit(), tmp_path)
    path = latest(tmp_path)
    path.write_bytes(path.read_bytes()[:200])
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match="readable checkpoint"):
        run(Fit(), tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("step", [3, 45])
def test_a_loss_that_is_not_finite(step: int, tmp_path: Path) -> None:
    """Said at the next log line or checkpoint, and never saved."""

    class Broken(Fit):
        def forward(self, batch: Mapping[str, Tensor], noise: Noise) -> dict[str, Tensor]:
            terms = super().forward(batch, noise)
            if self.count == step:
                terms["loss"] = terms["loss"] * float("nan")
            return terms

    objective = Broken()
    with pytest.raises(FloatingPointError, match="not finite"):
        run(objective, tmp_path)
    assert objective.count == (40 if step < 40 else 50)
    if step < 40:
        assert not (tmp_path / "checkpoints").exists()
    else:
        assert step_of(tmp_path) == 40


def test_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    train(Stage(Fit(), data(), Training(steps=2), name="fitting"))
    assert "fitting" in capsys.readouterr().err
    run(Fit(), training=Training(steps=2))
    assert not capsys.readouterr().err
    assert loop.LOG_EVERY == 50  # the numbers above
