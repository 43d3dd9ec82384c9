"""Several stages, several averages, validation, previews, trackers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Noise
from fluvial.training.averages import Averages
from fluvial.training.files import load_checkpoint
from fluvial.training.loop import LOG_EVERY, Outcome, Stage, train

from .runs import assert_same, assert_same_run, latest, metrics, step_of, weights
from .script import TRAINING, Flow, points, stage


def run(*stages: Stage, out: Path | None = None, **options: Any) -> list[Outcome]:
    return train(*stages, out=out, progress=False, **options)


# Averages


def test_averages_of_several_rates_are_those_of_one_each() -> None:
    module = nn.Linear(3, 2)
    several = Averages(module, (0.5, 0.9))
    single = {rate: Averages(module, (rate,)) for rate in (0.5, 0.9)}
    for step in range(20):
        with torch.no_grad():
            module.weight.add_(1.0)
        for one in (several, *single.values()):
            one.update(step)
    for rate, one in single.items():
        assert_same(several.of[f"ema-{rate}"], one.of[f"ema-{rate}"])
    assert not torch.equal(several.of["ema-0.5"]["weight"], several.of["ema-0.9"]["weight"])


def test_averages_are_applied_and_taken_back() -> None:
    module = nn.Linear(3, 2)
    averages = Averages(module, (0.9,))
    with torch.no_grad():
        module.weight.add_(1.0)
    live, mean = module.weight.detach().clone(), averages.of["ema-0.9"]["weight"].clone()
    storage = module.weight.data_ptr()
    with pytest.raises(RuntimeError), averages.applied("ema-0.9"):
        assert torch.equal(module.weight, mean)
        raise RuntimeError
    assert torch.equal(module.weight, live) and module.weight.data_ptr() == storage
    assert torch.equal(averages.of["ema-0.9"]["weight"], mean)


# Validation


def test_the_average_with_the_smallest_validation_loss_is_taken(tmp_path: Path) -> None:
    ending = stage()
    (outcome,) = run(ending, out=tmp_path)
    losses = {name: outcome.validation[name]["loss"] for name in ("ema-0.9", "ema-0.99")}
    assert outcome.weights == min(losses, key=losses.__getitem__)
    assert_same(ending.objective.state_dict(), weights(tmp_path)[outcome.weights])
    # and the best file is the best of all measurements
    lines = [line["validation"] for line in metrics(tmp_path) if "validation" in line]
    best = min(line[name]["loss"] for line in lines for name in losses)
    again = Flow()
    again.load_state_dict(weights(tmp_path)["best"])
    terms = again(points(15, 2), KeyedNoise(0))
    assert terms["loss"].item() == pytest.approx(best, rel=1e-5)


def test_validation_uses_the_same_times_and_noise_in_every_run(tmp_path: Path) -> None:
    for seed, size in ((0, 12), (1, 4)):
        training = replace(TRAINING, steps=30, seed=seed, lr=1e-12, batch_size=size)
        run(stage(training), out=tmp_path / str(seed))
    one, two = (
        next(line for line in metrics(tmp_path / seed) if "validation" in line)["validation"]
        for seed in "01"
    )
    # weights that hardly move: what is left is the measurement, in batches of another size
    assert one["last"]["loss"] == pytest.approx(two["last"]["loss"], rel=1e-5)
    terms = Flow()(points(15, 2), KeyedNoise(0))
    assert one["last"]["loss"] == pytest.approx(terms["loss"].item(), rel=1e-5)
    # ten bins of time: their mean weighted by their counts is the whole
    bins = one["last"]["by_time"]["error"]
    counts = torch.histc(terms["t"].detach(), 10, 0, 1)
    total = sum(n * (value or 0.0) for n, value in zip(counts.tolist(), bins, strict=True))
    assert total / 15 == pytest.approx(one["last"]["error"], rel=1e-5)
    assert [value is None for value in bins] == [n == 0 for n in counts.tolist()]


def test_validation_leaves_the_training_alone(tmp_path: Path) -> None:
    with_it, without = stage(), stage()
    run(with_it, out=tmp_path / "a")
    run(replace(without, validation=None), out=tmp_path / "b")
    assert_same(weights(tmp_path / "a")["last"], weights(tmp_path / "b")["last"])
    assert "best" not in weights(tmp_path / "b")
    trained = [
        [line for line in metrics(tmp_path / name) if "validation" not in line] for name in "ab"
    ]
    assert trained[0] == trained[1]


def test_what_a_line_holds(tmp_path: Path) -> None:
    run(stage(), out=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if "lr" in line)
    assert set(first) == {
        *("step", "seconds", "rows_per_second", "lr"),
        *("loss", "error", "by_time"),
    }
    assert first["step"] == LOG_EVERY and first["lr"] == TRAINING.rate(LOG_EVERY - 1)
    assert first["rows_per_second"] > 0 and len(first["by_time"]["error"]) == 10


# Accumulation, precision, length


def test_parts_of_a_batch_add_up_to_it(tmp_path: Path) -> None:
    seen: list[int] = []

    class Counting(Flow):
        def forward(self, batch: Mapping[str, Tensor], noise: Noise) -> dict[str, Tensor]:
            seen.append(len(batch["x"]))
            return super().forward(batch, noise)

    short = replace(TRAINING, steps=1, ema=0.0)
    whole, parts = Flow(), Counting()
    run(Stage(whole, points(40, 1), short))
    run(Stage(parts, points(40, 1), replace(short, accumulation=4)))
    assert seen == [3, 3, 3, 3]
    # Adam's first step is +-lr: only a gradient that is 0 but for rounding could differ
    for name, value in whole.named_parameters():
        assert torch.allclose(value, parts.get_parameter(name), atol=1e-6), name


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(ValueError, match="batch_size 12 does not divide into 5 parts"):
        run(stage(replace(TRAINING, accumulation=5)))


def test_autocast(tmp_path: Path) -> None:
    kinds: list[torch.dtype] = []

    class Listening(Flow):
        def forward(self, batch: Mapping[str, Tensor], noise: Noise) -> dict[str, Tensor]:
            kinds.append(self.body(torch.zeros(1, 3)).dtype)
            return super().forward(batch, noise)

    objective = Listening()
    run(Stage(objective, points(40, 1), replace(TRAINING, steps=3, precision="bf16")))
    assert set(kinds) == {torch.bfloat16}
    assert {value.dtype for value in objective.parameters()} == {torch.float32}
    with pytest.raises(ValueError, match="'fp16' needs an accelerator"):
        run(stage(replace(TRAINING, precision="fp16")))


def test_a_training_at_a_constant_rate_can_be_made_longer(tmp_path: Path) -> None:
    constant = replace(TRAINING, schedule="constant", warmup=5)
    run(stage(constant), out=tmp_path / "whole")
    run(stage(replace(constant, steps=70)), out=tmp_path / "parts")
    run(stage(constant), out=tmp_path / "parts")
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    for name in ("last", "ema-0.9", "ema-0.99"):
        assert_same(whole[name], parts[name])
    assert metrics(tmp_path / "whole")[-1]["step"] == metrics(tmp_path / "parts")[-1]["step"] == 120
    with pytest.raises(ValueError, match="steps was 120, is 60"):  # and not shorter
        run(stage(replace(constant, steps=60)), out=tmp_path / "parts")


# Stages


def two_stages(on_make: Any = None, kind: type[Flow] = Flow) -> tuple[Stage, Stage]:
    """The second is trained on what the first's model makes of noise."""
    first, second = kind(), kind()

    def made() -> dict[str, Tensor]:
        if on_make:
            on_make()
        with torch.no_grad():
            return {"x": first.body(KeyedNoise(5).normal(torch.empty(30, 3)))}

    return (
        Stage(first, points(40, 1), replace(TRAINING, steps=40), points(15, 2), name="first"),
        Stage(second, made, replace(TRAINING, steps=60, ema=0.5), name="second"),
    )


def test_stages_follow_one_another(tmp_path: Path) -> None:
    stages = two_stages()
    outcomes = run(*stages, out=tmp_path)
    assert [outcome.steps for outcome in outcomes] == [40, 60]
    assert outcomes[1].weights == "ema-0.5" and not outcomes[1].validation
    assert {line["stage"] for line in metrics(tmp_path)} == {"first", "second"}
    assert set(weights(tmp_path)) == {
        *("first-last", "first-best", "first-ema-0.9", "first-ema-0.99"),
        *("second-last", "second-ema-0.5"),
    }
    described = json.loads((tmp_path / "training.json").read_text())
    assert [one["name"] for one in described["stages"]] == ["first", "second"]
    # equal seeds, and yet noise of their own
    assert load_checkpoint(latest(tmp_path))["state"]["stage"] == 1
    alone = Stage(Flow(), stages[1].data, stages[1].training)
    run(alone, out=tmp_path / "alone")
    assert not torch.equal(
        weights(tmp_path / "alone")["last"]["body.0.weight"],
        weights(tmp_path)["second-last"]["body.0.weight"],
    )


@pytest.mark.parametrize("at", [10, 39, 40, 41, 77])
def test_stages_are_resumed(at: int, tmp_path: Path) -> None:
    run(*two_stages(), out=tmp_path / "whole")

    class Stopping(Exception):
        pass

    done = 0

    class Crashing(Flow):
        def after_step(self) -> None:
            nonlocal done
            super().after_step()
            done += 1
            if done == at:
                raise Stopping

    stages = two_stages(kind=Crashing)
    with pytest.raises(Stopping):
        run(*stages, out=tmp_path / "parts")
    # a crash: what is left is the last checkpoint, of step 34 or of the end of a stage
    run(*two_stages(), out=tmp_path / "parts")
    a, b = (load_checkpoint(latest(tmp_path / name)) for name in ("whole", "parts"))
    for one in (a, b):
        one["state"].pop("seconds")
        for outcome in one["state"]["outcomes"]:
            outcome.pop("seconds")
    assert_same(a, b)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")


def test_bad_stages() -> None:
    with pytest.raises(ValueError, match="empty"):
        run()
    with pytest.raises(ValueError, match="different names"):
        run(stage(), stage())
    calls: list[int] = []
    first, second = two_stages(lambda: calls.append(1))
    with pytest.raises(ValueError, match="does not divide"):
        run(first, replace(second, training=replace(TRAINING, accumulation=5)))
    assert not calls and first.objective.get_buffer("steps") == 0  # before any work


# Previews, trackers


def test_previews_show_averaged_weights(tmp_path: Path) -> None:
    objective, seen = Flow(), {}

    def preview(path: Path) -> None:
        assert not objective.training
        seen[path.relative_to(tmp_path).as_posix()] = objective.body[0].weight.detach().clone()

    training = replace(TRAINING, sample_every=50)
    run(replace(stage(training, objective), preview=preview), out=tmp_path)
    assert list(seen) == [f"samples/step-{step:08d}" for step in (50, 100, 120)]
    assert torch.equal(list(seen.values())[-1], objective.body[0].weight)  # the chosen ones
    assert not torch.equal(*list(seen.values())[:2])


def test_tensorboard_gets_what_the_metrics_file_gets(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter  # noqa: F401 (the format read below)

    run(stage(), out=tmp_path, trackers=("tensorboard",))
    found: dict[str, list[tuple[int, float]]] = {}
    for path in tmp_path.rglob("events.out.tfevents*"):
        data, at = path.read_bytes(), 0
        while at < len(data):  # length (8 bytes), its checksum (4), the record, its checksum (4)
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found.setdefault(value.tag, []).append((event.step, value.simple_value))
            at += 16 + size
    lines = [line for line in metrics(tmp_path) if "loss" in line]
    assert found["loss"] == [(line["step"], pytest.approx(line["loss"])) for line in lines]
    assert [step for step, _ in found["validation.ema-0.9.loss"]] == [30, 60, 90, 120]


def test_unknown_trackers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tracker 'tensorbord'; known are .*tensorboard"):
        run(stage(), out=tmp_path, trackers=("tensorbord",))
    with pytest.raises(ModuleNotFoundError, match="aim is not installed"):
        run(stage(), out=tmp_path, trackers=("aim",))
    with pytest.raises(ValueError, match="pass out="):
        run(stage(), trackers=("tensorboard",))


def test_resuming_with_a_tracker(tmp_path: Path) -> None:
    run(stage(), out=tmp_path / "whole", trackers=("tensorboard",))

    class Stopping(Flow):
        def after_step(self) -> None:
            super().after_step()
            if self.steps == 60:
                raise RuntimeError

    with pytest.raises(RuntimeError):
        run(stage(objective=Stopping()), out=tmp_path / "parts", trackers=("tensorboard",))
    assert step_of(tmp_path / "parts") == 51
    run(stage(), out=tmp_path / "parts", trackers=("tensorboard",))
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert math.isfinite(metrics(tmp_path / "parts")[-1]["validation"]["last"]["loss"])
