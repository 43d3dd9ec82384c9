"""Several processes give what one gives; so do several parts of a batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fluvial.training.files import load_checkpoint
from fluvial.training.loop import train
from fluvial.training.processes import FSDP_CONFIG

from .runs import finish, latest, metrics, start, weights
from .script import TRAINING, Flow, sample, stage

# Sums of 12 rows are rounded in another order, a relative 1e-7 a step. Adam divides by the size of
# a gradient, so 120 steps of 1e-2 carry it to some 1e-5 of weights of the order of 1.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same training on one process, in parts, on two processes, and with sharded weights."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("one", "parts", "two", "sharded")}
    for name, parts in (("one", 1), ("parts", 3)):
        objective = Flow()
        training = replace(TRAINING, accumulation=parts)
        train(stage(training, objective), out=folders[name], progress=False)
        torch.save(sample(objective), folders[name] / "samples.pt")
    finish(start(folders["two"], "--accumulation", "2", processes=2))
    finish(start(folders["sharded"], "--shard", processes=2))
    return folders


def assert_close(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            assert_close(a[name], b[name])
    elif isinstance(a, list):
        for one, two in zip(a, b, strict=True):
            assert_close(one, two)
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=TOLERANCE, abs=TOLERANCE)
    else:
        assert a == b


@pytest.mark.parametrize("way", ["parts", "two", "sharded"])
def test_the_same_curve_and_the_same_weights(way: str, runs: dict[str, Path]) -> None:
    one, other = runs["one"], runs[way]
    for a, b in zip(metrics(one), metrics(other), strict=True):
        assert_close(a, b)
    assert weights(one).keys() == weights(other).keys() == {"last", "best", "ema-0.9", "ema-0.99"}
    for name, whole in weights(one).items():
        for part, value in whole.items():
            assert torch.allclose(
                weights(other)[name][part], value, rtol=TOLERANCE, atol=TOLERANCE
            ), (name, part)
    a, b = (load_checkpoint(latest(out)) for out in (one, other))
    assert a["config"]["data"] == b["config"]["data"]
    assert len(a["optimizer"]["state"]) == len(b["optimizer"]["state"])


def test_samples_do_not_depend_on_the_processes(runs: dict[str, Path]) -> None:
    one, two = (torch.load(runs[name] / "samples.pt") for name in ("one", "two"))
    assert one.shape == two.shape == (7, 2)
    assert torch.allclose(one, two, atol=1e-3)  # of networks that agree to TOLERANCE


def test_the_configuration_of_sharding_is_one_that_accelerate_reads() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(FSDP_CONFIG))
    assert config.distributed_type == "FSDP" and config.fsdp_config["fsdp_version"] == 2
    assert config.fsdp_config["fsdp_auto_wrap_policy"] == "NO_WRAP"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "options"), [(1, 2, ()), (2, 1, ()), (2, 2, ("--shard",))]
)
def test_a_run_goes_on_with_other_processes(
    before: int, after: int, options: tuple[str, ...], runs: dict[str, Path], tmp_path: Path
) -> None:
    died = start(tmp_path, *options, "--die", "70", processes=before)
    died.communicate(timeout=180)
    assert died.returncode != 0 and latest(tmp_path).name == "step-00000068.pt"
    finish(start(tmp_path, *options, processes=after))
    for a, b in zip(metrics(runs["one"]), metrics(tmp_path), strict=True):
        assert_close(a, b)
    if options:  # another way to lay out the state of the optimiser
        with pytest.raises(ValueError, match="with sharded weights"):
            train(stage(), out=tmp_path, progress=False)
