"""The command line: its commands, their help, and what it says about mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fluvial
from fluvial import catalog, cli
from fluvial.claims import meanflow
from fluvial.claims.recorded import recorded_claims

Capture = pytest.CaptureFixture[str]


def error(argv: list[str], capsys: Capture) -> str:
    """What is said about a mistake: one line, and nothing on the standard output."""
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("fluvial: ") and err.count("\n") == 1
    return err.removeprefix("fluvial: ").rstrip("\n")


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_without_a_command_there_is_help(argv: list[str], capsys: Capture) -> None:
    assert cli.main(argv) == 0
    out, err = capsys.readouterr()
    assert not err
    width = max(map(len, cli.COMMANDS))
    for name, what in cli.COMMANDS.items():
        assert f"  {name.ljust(width)}  {what}\n" in out
    assert "examples:\n  fluvial train meanflow --data photos" in out


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_describes_every_flag_and_ends_with_examples(name: str, capsys: Capture) -> None:
    assert cli.main([name, "--help"]) == 0
    out, err = capsys.readouterr()
    assert not err
    assert out.startswith(f"usage: fluvial {name} ")
    assert f"\nexamples:\n  fluvial {name}" in out
    assert max(map(len, out.splitlines())) <= 100
    described = out.partition("\n options\n")[2].partition("\nexamples:")[0]
    assert_described(described)


def assert_described(text: str) -> None:
    lines = text.splitlines()
    for k, line in enumerate(lines):
        if line.startswith("  -"):
            flag, _, rest = line.strip().partition("  ")
            assert rest.strip() or lines[k + 1].startswith(" " * 8), f"{flag} has no description"


def test_help_of_a_system_names_all_hyper_parameters(capsys: Capture) -> None:
    from fluvial.images.recipe import Recipe

    assert cli.main(["train", "meanflow", "--help"]) == 0
    out = capsys.readouterr().out
    for name in asdict(Recipe()):
        assert f"  --{name.replace('_', '-')} " in out, name
    for group in Recipe.GROUPS:
        assert f"\n {group} options\n" in out
    assert "(default: 0.99 0.999)" in " ".join(out.split()) and "None" not in out
    assert_described(out.partition("\nexamples:")[0])


def test_version(capsys: Capture) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == fluvial.__version__


def test_a_module_can_be_started_as_well() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fluvial.cli", "--version"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{fluvial.__version__}\n"


def test_the_list_of_commands_is_light() -> None:
    code = "import sys, fluvial.cli; fluvial.cli.main([]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "there is no command 'trian'; did you mean train?"),
        (["zzz"], f"there is no command 'zzz'; there are {', '.join(cli.COMMANDS)}"),
        (["list", "--jsn"], "there is no flag --jsn; did you mean --json?"),
        (["list", "x"], "'x' is one argument too many; see fluvial list --help"),
        (["report"], "--out is missing: folder for the page, index"),
        (["sample", "x"], "--out is missing: where to write them; see fluvial sample --help"),
        (["sample", "x", "--out"], "--out needs a value; see fluvial sample --help"),
        (
            ["sample", "x", "--out", "y", "--n", "a"],
            "--n must be a whole number, got 'a'; see fluvial sample --help",
        ),
        (
            ["train", "meanflow", "--size", "a", "b"],
            "--size must be a whole number or two whole numbers, got 'a b'",
        ),
        (["train", "meanflow", "--lr", "x"], "--lr must be a number, got 'x'"),
        (["train", "meanflow", "--betas", "1"], "--betas needs 2 values"),
        (["train", "meanflow", "--channels", "2"], "--channels must be 1 for grey or 3 for colour"),
        (
            ["train", "meanflow", "--schedule", "falling"],
            "--schedule must be constant, linear or cosine, got 'falling'",
        ),
        (["run"], "SYSTEM is missing: a name from `fluvial list`; see fluvial run --help"),
        (["run", "meanflow", "--lr"], "--lr needs at least one value"),
        (["run", "meanflow", "--seeds", "a"], "--seeds must be whole numbers, got 'a'"),
        (
            ["run", "meanfolw"],
            "there is no system 'meanfolw'; did you mean 'meanflow'? `fluvial list` shows all",
        ),
        (["run", "saemark-watermark"], "saemark-watermark is planned, it has no claim to run yet"),
        (["train"], "SYSTEM is missing: a name from `fluvial list`; not needed with --resume"),
        (["train", "saemark-watermark"], "saemark-watermark is planned; there is meanflow"),
        (["train", "meanfolw"], "there is no system 'meanfolw'; did you mean 'meanflow'?"),
        (["card", "nowhere"], "nowhere is not a run: it has neither model.safetensors nor run"),
        (["report", "nowhere", "--out", "x"], "runs: there is no folder nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_said_in_one_line(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert error(argv, capsys).startswith(message)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("columns", [None, "40", "200"])
def test_the_width_of_the_terminal_does_not_matter(
    columns: str | None, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    wanted = "--schedule must be constant, linear or cosine, got 'x'"
    assert error(["train", "meanflow", "--schedule", "x"], capsys).startswith(wanted)


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(argv: Any) -> int:
        raise RuntimeError("a fault")

    monkeypatch.setattr(cli, "_run", broken)
    with pytest.raises(RuntimeError, match="a fault"):
        cli.main(["list"])


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (SystemExit(143), 143, ""),
        (ModuleNotFoundError("install it"), 2, "install it"),
        (FloatingPointError("not\nfinite"), 2, "not finite"),
        (RuntimeError("CUDA out of memory"), 2, "the memory does not suffice"),
    ],
)
def test_statuses(
    raised: BaseException,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    def run(argv: Any) -> int:
        raise raised

    monkeypatch.setattr(cli, "_run", run)
    assert cli.main(["list"]) == status
    assert capsys.readouterr().err.startswith(f"fluvial: {said}" if said else "")


def test_warnings_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def run(argv: Any) -> int:
        warnings.simplefilter("default")
        warnings.warn("beware", UserWarning, stacklevel=1)
        return 0

    monkeypatch.setattr(cli, "_run", run)
    assert cli.main(["list"]) == 0
    assert capsys.readouterr().err == "fluvial: warning: beware\n"


def test_one_process_of_several_prints(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert cli.main(["list", "--json"]) == 0
    assert cli.main(["trian"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("fluvial (process 1): there is no command")


def test_list_as_table_and_json(capsys: Capture) -> None:
    assert cli.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(catalog.SYSTEMS)
    assert next(line for line in lines if line.startswith("meanflow")).split()[2] == "available"
    assert cli.main(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [system.name for system in catalog.SYSTEMS]


def test_claims_as_text_and_json(capsys: Capture) -> None:
    assert cli.main(["claims"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["system", "verdict"]
    assert cli.main(["claims", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows == json.loads(json.dumps([claim.as_json() for claim in recorded_claims()]))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def run(config: Any, preset: str, out: Path, *, force: bool, progress: bool) -> Any:
        calls.append(SimpleNamespace(config=config, preset=preset, out=out, force=force))
        print("something that a library prints")
        return SimpleNamespace(as_json=lambda: {"system": "meanflow"}, as_text=lambda: "table")

    monkeypatch.setattr(meanflow, "run", run)
    return calls


def test_presets_are_defaults_of_the_flags(seen: list[Any]) -> None:
    assert cli.main(["run", "meanflow"]) == 0
    assert cli.main(["run", "meanflow", "--preset", "record", "--steps", "7", "--out", "x"]) == 0
    assert cli.main(["run", "meanflow", "--seeds", "4", "5", "--preset=smoke", "--force"]) == 0
    laptop, record, smoke = seen
    assert (laptop.config, laptop.preset) == (meanflow.PRESETS["laptop"], "laptop")
    assert laptop.out == Path("runs/meanflow-laptop")
    assert asdict(record.config) == {**asdict(meanflow.PRESETS["record"]), "steps": 7}
    assert record.out == Path("x")
    assert smoke.config.seeds == (4, 5)
    assert smoke.force
    assert not laptop.force


def test_a_result_as_json_is_all_there_is(seen: list[Any], capsys: Capture) -> None:
    assert cli.main(["run", "meanflow", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"system": "meanflow"}
    assert "something that a library prints" in err


def test_existing_output_is_refused(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "mine").write_text("x")
    argv = ["run", "meanflow", "--preset", "smoke", "--out", str(tmp_path)]
    assert "not empty" in error(argv, capsys)


def test_help_names_the_flags_of_the_claim(capsys: Capture) -> None:
    assert cli.main(["run", "meanflow", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--rival-lr" in text
    assert "--preset" in text


def test_an_interrupted_claim_has_a_status(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def run(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(meanflow, "run", run)
    assert cli.main(["run", "meanflow"]) == 130
    assert "goes on" in capsys.readouterr().err
