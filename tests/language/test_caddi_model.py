"""CaDDi as a model: caches, rows, known tokens, guidance, misuse, files, training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluvial
from fluvial.core.noise import KeyedNoise
from fluvial.data.format import Format
from fluvial.language import CaDDi
from fluvial.language.caddi import IndependentLevels
from fluvial.language.caddi import model as module
from fluvial.networks import CausalTransformer

from .toys import NOISE, random_model, random_network, tokens

KINDS: list[dict[str, Any]] = [
    {},
    {"source": "uniform", "keep": 2},
    {"keep": 3, "kept": "spread"},
    {"augmented": True},
    {"augmented": True, "source": "uniform", "keep": 2},
    {"variant": "ar"},
    {"variant": "ar", "keep": 2},
    {"variant": "ar", "keep": 3, "kept": "spread", "source": "uniform"},
    {"variant": "ar", "steps": 1},
]
LABELLED: dict[str, Any] = {"num_classes": 3, "time": True}
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
# one of each part of the code that is not shared: blocks, a copy, drafts, padded rows, no prompt
each_part = pytest.mark.parametrize("kind", [KINDS[i] for i in (0, 1, 3, 5, 7, 8)], ids=str)


def tail(model: CaDDi, x0: Tensor) -> Tensor | None:
    return x0 if model.variant == "ar" else None


@every_kind
def test_cached_and_full_passes_agree(kind: dict[str, Any]) -> None:
    """Check 7: what sampling and `bound` compute with caches is what one pass computes."""
    model = random_model(**kind)
    x0, steps = tokens(), model.steps
    levels = model.levels.sample(x0, NOISE)
    costs = model.cross_entropies(x0, levels)
    for k in range(1, steps + 1):
        log_p = model.predict(levels, k, tokens=tail(model, x0))
        assert torch.allclose(log_p.exp().sum(-1), torch.ones_like(costs[:, 0]))
        one = -log_p.gather(-1, x0[..., None])[..., 0]
        assert torch.allclose(one, costs[:, k - 1], rtol=0, atol=1e-10)
    # greedy guesses of a sample are the predictions at its own levels
    x, trace = model.sample(7, noise=NOISE, temperature=0.0, trace=True)
    for k in range(1, steps + 1):
        guess = trace.guesses[:, k - 1]
        log_p = model.predict(trace.levels, k, tokens=tail(model, guess))
        assert torch.equal(log_p.argmax(-1), guess)
    assert torch.equal(x, trace.guesses[:, 0])


@every_kind
def test_a_level_sees_its_context_alone(kind: dict[str, Any]) -> None:
    """Check 7: no later level, and of one layer none that is not kept."""
    model = random_model(network={"depth": 1}, **kind)
    x0 = tokens(1)
    levels = model.levels.sample(x0, NOISE)
    for k in range(1, model.steps + 1):
        out = model.predict(levels, k, tokens=tail(model, x0))
        for s in range(1, model.steps + 1):
            changed = levels.clone()
            changed[:, s - 1] = (changed[:, s - 1] + 1) % model.levels.states
            moved = (model.predict(changed, k, tokens=tail(model, x0)) - out).abs().amax(-1)
            if s in model.context(k) and not model.plain:
                assert (moved > 1e-9).all()
            else:
                assert (moved == 0).all()


def test_training_sees_what_sampling_sees() -> None:
    """The loss of rows that each have their level, padded to one batch, is that of each alone."""
    for kind in KINDS:
        model = random_model(**kind)
        if not model.rowwise:
            continue
        x0 = tokens(12)
        k = torch.arange(12) % model.steps + 1
        levels = model.levels.sample(x0, NOISE)
        seen = model._table[k]
        x = levels.gather(1, (seen.clamp(min=1) - 1)[..., None].expand(-1, -1, 6))
        end = x0 if model.variant == "ar" else x[:, -1]
        with torch.no_grad():
            rows = model._rows(x, seen, end, k, None)
        for row in range(12):
            one = slice(row, row + 1)
            wanted = model.predict(levels[one], int(k[row]), tokens=tail(model, x0[one]))
            assert torch.allclose(rows[one], wanted, rtol=0, atol=1e-10)


def test_levels_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for kept in ("last", "spread"):
        model = random_model(steps=7, keep=2, kept=kept)
        x0 = tokens()
        levels = model.levels.sample(x0, NOISE)
        whole = model.cross_entropies(x0, levels)
        with monkeypatch.context() as patch:
            patch.setattr(module, "TOKENS", 1)
            pieces = model.cross_entropies(x0, levels)
            model({"x": x0}, NOISE)["loss"].backward()
        assert torch.allclose(whole, pieces, rtol=0, atol=1e-10)
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        model({"x": x0}, NOISE)["loss"].backward()
        for one, p in zip(gradients, model.parameters(), strict=True):
            assert p.grad is not None and torch.allclose(one, p.grad, rtol=1e-8, atol=1e-10)


@each_part
def test_loss(kind: dict[str, Any]) -> None:
    """Its mean over draws is the bound's (of guesses with dependent tokens, its own weights)."""
    model = random_model(network={"depth": 1}, **kind)
    many = tokens(4).repeat(75, 1)
    out = model({"x": many}, NOISE)
    assert out["loss"].requires_grad and out["nats_per_token"].shape == (300,)
    loss = out["loss"].detach()
    assert torch.allclose(loss, out["nats_per_token"].mean())
    levels = model.levels.sample(many, NOISE.at(1))
    if model.variant == "ar":
        costs = model.cross_entropies(many, levels).sum(2) @ model.levels.alphas[:-1]
    else:
        costs = model.nats(many, levels).sum(1)
    spread = (out["nats_per_token"].var() + (costs / 6).var()).div(300).sqrt()
    assert abs(float(loss - costs.mean() / 6)) < 4 * float(spread) + 1e-12
    assert ("t" in out) == model.rowwise
    model.weighting = "simple"
    with torch.no_grad():
        simple = model({"x": many}, NOISE)["loss"]
    costs = model.cross_entropies(many, levels).mean(2)
    # of one level a row at most
    spread = costs.var().div(300).mul(2).sqrt()
    assert abs(float(simple - costs.mean())) < 4 * float(spread) + 1e-12
    model.weighting = "bound"
    # a row's loss is its own, whatever the batch
    rows = torch.arange(3, 9)
    part = model({"x": many[rows]}, NOISE.rows(rows))["nats_per_token"]
    assert torch.allclose(part, out["nats_per_token"][3:9], rtol=1e-9)


def test_wrong_tokens_in_training() -> None:
    x0 = tokens(2000)
    levels = IndependentLevels(5, steps=4)
    x = levels.sample(x0, NOISE)
    mixed = levels.mixed(x, 0.3, NOISE)
    assert torch.equal(mixed == 5, x == 5)
    visible = x < 5
    share = float((mixed != x)[visible].double().mean())
    assert abs(share - 0.3 * 0.8) < 4 * (0.25 / float(visible.sum())) ** 0.5
    # none at the bound
    model, plain = random_model(uniform_mix=0.5), random_model()
    assert torch.equal(model.bound(x0[:9], NOISE).nats, plain.bound(x0[:9], NOISE).nats)
    batch = {"x": x0[:9]}
    assert model(batch, NOISE)["loss"] != plain(batch, NOISE)["loss"]


@each_part
def test_rows_do_not_depend_on_their_batch(kind: dict[str, Any]) -> None:
    model = random_model(network=LABELLED, **kind)
    label = torch.arange(9) % 3
    options: dict[str, Any] = {"noise": NOISE, "label": label, "guidance": 1.5, "trace": True}
    whole, trace = model.sample(9, **options)
    parts, other = model.sample(9, batch_size=2, **options)
    assert torch.equal(whole, parts) and torch.equal(trace.levels, other.levels)
    assert torch.equal(trace.passes, other.passes)
    assert whole.shape == (9, 6) and whole.dtype == torch.int64
    assert int(whole.min()) >= 0 and int(whole.max()) < 5  # never the mask symbol
    assert torch.equal(model.sample(9, noise=NOISE), model.sample(9, noise=NOISE))
    assert not torch.equal(model.sample(9, noise=NOISE), model.sample(9, noise=KeyedNoise(8)))
    x0 = tokens(9)
    bounds = [model.bound(x0, NOISE, label=label, batch_size=size).nats for size in (9, 2)]
    assert torch.allclose(*bounds, rtol=1e-10)


def test_no_global_seed() -> None:
    before = torch.get_rng_state()
    model = random_model(uniform_mix=0.1)
    model({"x": tokens()}, NOISE)
    model.sample(3, noise=NOISE)
    assert torch.equal(before, torch.get_rng_state())


@each_part
def test_infilling(kind: dict[str, Any]) -> None:
    model = random_model(**kind)
    known = torch.tensor([1, 2, 3, 4, 0, 1])
    where = torch.tensor([True, True, False, False, True, False])
    x, trace = model.sample(200, noise=NOISE, known=known, keep_known=where, trace=True)
    assert (x[:, where] == known[where]).all() and x[:, ~where].double().std() > 0
    assert (trace.guesses[:, :, where] == known[where]).all()
    shown = trace.levels[:, :, where]
    if model.levels.mask_token is not None:
        assert ((shown == known[where]) | (shown == 5)).all()
    if model.steps > 1:
        share = (shown == known[where]).double().mean((0, 2))
        extra = 0.2 if kind.get("source") == "uniform" else 0.0
        alphas = model.levels.alphas[1:]
        assert ((share - alphas - (1 - alphas) * extra).abs() < 5 * (0.25 / 600) ** 0.5).all()
    # a row of its own; all known; a prefix
    rows = known.expand(200, 6).clone()
    assert torch.equal(
        x, model.sample(200, noise=NOISE, known=rows, keep_known=where.expand(200, 6))
    )
    assert (model.sample(3, noise=NOISE, known=known) == known).all()
    if model.variant == "ar":
        options: dict[str, Any] = {"noise": NOISE, "known": known, "keep_known": where}
        off, slow = model.sample(200, **options, speculative="off", trace=True)
        assert torch.equal(x, off)
        assert (slow.passes == 4).all() and (trace.passes <= 4).all()
        assert torch.equal(x, model.sample(200, **options, speculative="jacobi"))
        assert (model.sample(9, **options, speculative="ratio")[:, where] == known[where]).all()


def test_infilling_of_a_last_level_that_shows_data() -> None:
    model = random_model(alphas=[1.0, 0.5, 0.4, 0.3, 0.5])
    _, trace = model.sample(300, noise=NOISE, known=torch.arange(6) % 5, trace=True)
    share = float((trace.levels[:, 3] == torch.arange(6) % 5).double().mean())
    assert abs(share - 0.5) < 5 * (0.25 / 1800) ** 0.5


@pytest.mark.parametrize("variant", ["block", "ar"])
def test_guidance(variant: Any) -> None:
    """p ∝ p_none^(1 - scale) p_label^scale, at every level."""
    model = random_model(network=LABELLED, variant=variant)
    label = torch.full((6,), 2)
    options: dict[str, Any] = {"noise": NOISE, "temperature": 0.0, "trace": True}
    x, trace = model.sample(6, label=2, guidance=3.0, **options)
    for k in (4, 1):
        guess = trace.guesses[:, k - 1]
        one, none = (
            model.predict(trace.levels, k, tokens=tail(model, guess), label=value)
            for value in (label, torch.full((6,), 3))
        )
        assert torch.equal((none + 3.0 * (one - none)).argmax(-1), guess)
        assert torch.equal(none, model.predict(trace.levels, k, tokens=tail(model, guess)))
    plain = model.sample(6, noise=NOISE, label=label)
    assert torch.equal(plain, model.sample(6, noise=NOISE, label=2, guidance=1.0))
    free = model.sample(6, noise=NOISE)
    assert torch.equal(free, model.sample(6, noise=NOISE, label=2, guidance=0.0))
    assert not torch.equal(free, plain)


def test_labels_are_dropped() -> None:
    model = random_model(network=LABELLED, drop=0.999999)
    plain = random_model(network=LABELLED)
    x, label = tokens(), torch.arange(5) % 3
    dropped = model({"x": x, "label": label}, NOISE)["loss"]
    assert torch.equal(dropped, plain({"x": x}, NOISE)["loss"])
    assert not torch.equal(dropped, plain({"x": x, "label": label}, NOISE)["loss"])


def test_temperature_and_nucleus() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01])
    model = CaDDi(_Constant(p), classes=5, length=6, steps=2)
    for temperature in (1.0, 0.5):
        x = model.sample(2000, noise=NOISE, temperature=temperature)
        share = torch.bincount(x.flatten(), minlength=5) / 12_000
        wanted = p ** (1 / temperature)
        assert ((share - wanted / wanted.sum()).abs() < 5 * (0.25 / 12_000) ** 0.5).all()
    nucleus = model.sample(2000, noise=NOISE, top_p=0.7).flatten()
    assert sorted(set(nucleus.tolist())) == [0, 1]
    assert abs(float((nucleus == 0).double().mean()) - 0.625) < 5 * (0.25 / 12_000) ** 0.5
    assert (model.sample(3, noise=NOISE, temperature=0.0) == 0).all()


class _Constant(nn.Module):
    def __init__(self, p: Tensor) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor, t: Tensor, *, cache: Any = None, **options: Any) -> Any:
        out = self.p.log().expand(*x.shape, 5)
        return out if cache is None else (out, {"keys.0": torch.zeros(*x.shape, 1, 1)})


@pytest.mark.parametrize("variant", ["block", "ar"])
def test_disturb(variant: Any) -> None:
    model = random_model(variant=variant)
    seen: list[int] = []

    def disturb(x: Tensor, k: int, noise: Any) -> Tensor:
        seen.append(k)
        u = noise.uniform(torch.empty(x.shape, dtype=torch.float64))
        return torch.where(u < 0.5, 2, x) if k == 3 else x

    plain, before = model.sample(50, noise=NOISE, trace=True)
    bent, after = model.sample(50, noise=NOISE, trace=True, disturb=disturb)
    assert seen == [4, 3, 2, 1]
    assert torch.equal(before.levels[:, 3], after.levels[:, 3])
    assert torch.equal(before.guesses[:, 3], after.guesses[:, 3])
    changed = (before.levels[:, 2] != after.levels[:, 2]).double().mean()
    assert 0.3 < changed < 0.6 and not torch.equal(plain, bent)
    parts = model.sample(50, noise=NOISE, disturb=disturb, batch_size=7)
    assert torch.equal(parts, bent)


def test_revised() -> None:
    _, trace = random_model().sample(9, noise=NOISE, trace=True)
    wanted = [
        float((trace.guesses[:, k] != trace.guesses[:, k + 1]).double().mean()) for k in range(3)
    ]
    assert trace.revised.tolist() == pytest.approx([*wanted, 0.0])
    assert trace.levels.shape == trace.guesses.shape == (9, 4, 6)
    assert trace.passes.tolist() == [[1] * 4] * 9
    empty, trace = random_model().sample(0, noise=NOISE, trace=True)
    assert empty.shape == (0, 6) and trace.levels.shape == (0, 4, 6)


# Misuse


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": 0}, "classes must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"length": 0}, "length >= 1"),
        ({"keep": 0}, "keep >= 1, got 6 and 0"),
        ({"variant": "row"}, "variant must be one of block, ar, got 'row'"),
        ({"kept": "some"}, "kept must be one of last, spread"),
        ({"weighting": "none"}, "weighting must be one of bound, simple"),
        ({"source": "marginal"}, "source must be 'absorbing' or 'uniform', got 'marginal'"),
        ({"alphas": [0.9, 0.5, 0.3, 0.1, 0.0]}, "alphas must begin with 1"),
        ({"alphas": [1.0, 1.5, 0.3, 0.1, 0.0]}, r"lie in \[0, 1\]"),
        ({"alphas": [1.0, 0.0]}, r"alphas must have shape \(5,\) for steps=4, got \(2,\)"),
        ({"uniform_mix": 1.0}, "uniform_mix must lie in"),
        ({"uniform_mix": 0.1, "source": "uniform"}, "unless source is 'absorbing'"),
        ({"augmented": True, "variant": "ar"}, "augmented goes with variant='block'"),
        ({"drop": 0.1}, "a network with num_classes is needed"),
        ({"start": 6}, "start must lie in 0 .. 5, got 6"),
        ({"classes": 6}, "network must take 7 symbols, .* mask symbol, got vocabulary=6"),
        (
            {"classes": 6, "source": "uniform", "variant": "ar", "steps": 1},
            "network must take 7 symbols, .* start symbol",
        ),
        ({"format": Format("arrays", (5,))}, r"format is of rows of shape \(5,\)"),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        random_model(**options)


def test_bad_schedules() -> None:
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        IndependentLevels.schedule(0)
    with pytest.raises(ValueError, match="base must be 'linear' or a schedule"):
        IndependentLevels.schedule(3, "cosine")  # type: ignore[arg-type]


def test_bad_data() -> None:
    model = random_model()
    x = tokens()
    with pytest.raises(ValueError, match="batch must hold 'x', got y"):
        model({"y": x}, NOISE)
    for call in (lambda x: model({"x": x}, NOISE), lambda x: model.bound(x, NOISE)):
        with pytest.raises(TypeError, match="x0 must be int64 tokens, got torch.float32"):
            call(x.float())
        with pytest.raises(ValueError, match=r"tokens 0 .. 4 \(the mask symbol is 5\), got 5 to 5"):
            call(torch.full_like(x, 5))
        with pytest.raises(ValueError, match=r"shape \(batch, 6\) .* got \(5, 4\)"):
            call(x[:, :4])
        with pytest.raises(ValueError, match=r"x0 must have shape \(batch, length\)"):
            call(x[:, None])
        with pytest.raises(ValueError, match="with a row at least"):
            call(x[:0])
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        model.bound(x, NOISE, batch_size=0)
    levels = model.levels.sample(x, NOISE)
    with pytest.raises(
        ValueError, match=r"levels must have shape \(batch, 4, 6\), got \(5, 3, 6\)"
    ):
        model.predict(levels[:, :3], 1)
    with pytest.raises(ValueError, match="levels must hold tokens 0 .. 5, got"):
        model.predict(levels + 1, 1)
    with pytest.raises(ValueError, match="k must lie in 1 .. 4, got 5"):
        model.predict(levels, 5)
    with pytest.raises(ValueError, match="tokens are wanted of variant='ar', and of no other"):
        model.predict(levels, 1, tokens=x)
    with pytest.raises(ValueError, match="tokens are wanted"):
        random_model(variant="ar").predict(levels, 1)
    with pytest.raises(ValueError, match="label given, and the network has num_classes=0"):
        model.fit(x, torch.zeros(5, dtype=torch.int64), steps=1)
    labelled = random_model(network=LABELLED, drop=0.1)
    with pytest.raises(ValueError, match="label is missing, and drop needs one"):
        labelled.fit(x, steps=1)
    with pytest.raises(ValueError, match="batch lacks 'label'"):
        labelled({"x": x}, NOISE)
    with pytest.raises(ValueError, match="label must lie in 0 .. 2, got 0 .. 3"):
        labelled.fit(x, torch.arange(5) % 4, steps=1)
    with pytest.raises(ValueError, match=r"label must have shape \(5,\), got \(4,\)"):
        labelled.fit(x, torch.arange(4) % 3, steps=1)
    with pytest.raises(TypeError, match="label must be an integer tensor .* got torch.float32"):
        labelled.fit(x, torch.zeros(5), steps=1)


def test_bad_networks() -> None:
    x = tokens()
    few = CaDDi(random_network(vocabulary=6), classes=5, length=6, steps=4)
    few.network.out = nn.Linear(16, 4).double()
    with pytest.raises(ValueError, match=r"must return \(5, 24, 5\) or more logits, got .* 4\)"):
        few({"x": x}, NOISE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num": -1}, "need num >= 0"),
        ({"batch_size": 0}, "batch_size >= 1"),
        ({"temperature": -1.0}, "need temperature >= 0"),
        ({"top_p": 0.0}, "0 < top_p <= 1"),
        (
            {"speculative": "maybe"},
            "speculative must be match, jacobi, greedy, ratio or off, got 'maybe'",
        ),
        ({"speculative": "ratio", "temperature": 0.0}, "temperature must be above 0"),
        ({"guidance": 2.0}, "guidance needs a label"),
        ({"label": 0}, "label given, and the network has num_classes=0"),
        ({"label": "cat"}, "label 'cat': the model knows no names of classes"),
        ({"keep_known": torch.ones(6) > 0}, "keep_known says which of known"),
        ({"known": torch.zeros(5, dtype=torch.int64)}, r"known must have shape \(6,\) or \(3, 6\)"),
        ({"known": torch.full((6,), 5)}, r"known must hold tokens 0 .. 4 \(the mask symbol is 5\)"),
        (
            {"known": torch.zeros(6, dtype=torch.int64), "keep_known": torch.ones(3) > 0},
            r"keep_known must have shape .* got \(3,\)",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_samples(options: dict[str, Any], message: str) -> None:
    model = random_model()
    num = options.pop("num", 3)
    with pytest.raises(ValueError, match=message):
        model.sample(num, noise=NOISE, **options)


def test_known_of_another_type() -> None:
    with pytest.raises(TypeError, match="known must be int64 and keep_known bool, got torch.float"):
        random_model().sample(3, noise=NOISE, known=torch.zeros(6))


# Files and training


@each_part
def test_saved_and_loaded(kind: dict[str, Any], tmp_path: Path) -> None:
    model = random_model(
        network=LABELLED, format=Format("arrays", (6,)), drop=0.1, weighting="simple", **kind
    )
    model.network.float()
    path = tmp_path / "model.safetensors"
    model.save(path)
    for again in (CaDDi.load(path), fluvial.load(path)):
        assert type(again) is CaDDi and not again.training
        assert again._options() == model._options() and again.format == model.format
        options: dict[str, Any] = {"noise": NOISE, "label": 1}
        assert torch.equal(model.sample(4, **options), again.sample(4, **options))
    assert again.use is not None and again.use.system == "caddi-discrete-diffusion"
    with pytest.raises(FileExistsError):
        model.save(path)


def test_files_of_others(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        CaDDi.load(tmp_path / "none.safetensors")
    path = tmp_path / "other.safetensors"
    fluvial.training.files.save_model(path, {"w": torch.zeros(1)}, {"system": "meanflow"})
    with pytest.raises(ValueError, match="holds the system 'meanflow'"):
        CaDDi.load(path)
    model = random_model()
    model.save(path, overwrite=True)
    with pytest.raises(ValueError, match="do not fit the network"):
        CaDDi.load(path, network=random_network(width=32))


WORDS = ("bead", "deaf", "cafe", "face", "fade", "beef", "dead", "babe")


def spelled(words: Any) -> Tensor:
    return torch.tensor([["abcdef".index(letter) for letter in word] for word in words])


@pytest.mark.parametrize("variant", ["block", "ar"])
def test_it_learns_words(variant: Any, tmp_path: Path) -> None:
    """Eight words of four letters, of 1296 there could be: six in a thousand by chance."""
    network = CausalTransformer(vocabulary=7, width=32, depth=2, heads=2, levels="split", time=True)
    levels = 8 if variant == "block" else 3
    model = CaDDi(network, classes=6, length=4, steps=levels, variant=variant, weighting="simple")
    x = spelled(WORDS).repeat(8, 1)
    training: dict[str, Any] = {"batch_size": 32, "lr": 7e-3, "ema": 0.9, "progress": False}
    model.fit(x, steps=140, validation=(x[:16], None), out=tmp_path / "run", **training)
    assert (tmp_path / "run" / "weights").is_dir()
    drawn = model.sample(200, noise=NOISE)
    letters = ["".join("abcdef"[i] for i in row) for row in drawn.tolist()]
    share = sum(word in WORDS for word in letters) / 200
    assert share > (0.3 if variant == "block" else 0.8) and set(letters) >= set(WORDS[:4])
    bound = model.bound(spelled(WORDS), NOISE)
    assert bound.nats_per_token < 1.0  # ln 6 is 1.79, the entropy a letter 0.52


def test_training_is_a_function_of_the_seed() -> None:
    def trained() -> Tensor:
        model = random_model(uniform_mix=0.1)
        model.fit(tokens(20), steps=3, batch_size=5, progress=False)
        return model.sample(5, noise=NOISE)

    assert torch.equal(trained(), trained())
