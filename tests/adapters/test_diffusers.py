"""Models of diffusers, built here with random weights, against diffusers' loops, step by step."""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from fluvial import Ancestral, KeyedNoise, Steering, simulate
from fluvial.adapters import from_diffusers
from fluvial.adapters.diffusers import Clip
from fluvial.adapters.tabulated import Tabulated
from fluvial.core.gaussian.fields import convert
from fluvial.core.gaussian.multistep import DDIM, DPMSolver
from fluvial.core.gaussian.ode import Euler
from fluvial.core.gaussian.paths import Linear

NOISE = KeyedNoise(11)
SHAPE = (2, 2, 8, 8)


def build(kind: str, **config: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # diffusers draws weights from the global generator
        return getattr(diffusers, kind)(**config).eval()


@pytest.fixture(scope="module")
def unet() -> Any:
    return build(
        "UNet2DModel",
        sample_size=8,
        in_channels=2,
        out_channels=2,
        block_out_channels=(8,),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
        add_attention=False,
    )


@pytest.fixture(scope="module")
def dit() -> Any:
    return build(
        "DiTTransformer2DModel",
        num_attention_heads=2,
        attention_head_dim=4,
        in_channels=2,
        out_channels=4,
        num_layers=1,
        sample_size=8,
        norm_num_groups=4,
        num_embeds_ada_norm=5,
    )


@pytest.fixture(scope="module")
def sd3() -> Any:
    return build(
        "SD3Transformer2DModel",
        sample_size=8,
        patch_size=2,
        in_channels=2,
        out_channels=2,
        num_layers=1,
        attention_head_dim=4,
        num_attention_heads=2,
        joint_attention_dim=6,
        caption_projection_dim=8,
        pooled_projection_dim=5,
        pos_embed_max_size=8,
    )


def start() -> Tensor:
    return NOISE.normal(torch.empty(SHAPE), "start")


class Record(Steering):
    """Another steering, whose states are kept."""

    def __init__(self, inner: Steering) -> None:
        self.inner, self.states = inner, []  # type: ignore[var-annotated]

    def clean(self, clean: Any, x: Any, aim: Any, run: Any) -> Any:
        return self.inner.clean(clean, x, aim, run)

    def after(self, x: Any, clean: Any, aim: Any, run: Any) -> Any:
        self.states.append(x)
        return x, aim, None


@torch.no_grad()
def ours(made: Any, sampler: Any, steps: int, field: Any = None, **cond: Any) -> list[Tensor]:
    record = Record(made.steer)
    field = made.field if field is None else field
    simulate(start(), made.grid(steps), sampler, made.path, field, NOISE, record, **cond)
    return record.states


@torch.no_grad()
def theirs(model: Any, scheduler: Any, steps: int, cond: Any = None, **step: Any) -> list[Tensor]:
    """The loop of diffusers' pipelines."""
    scheduler.set_timesteps(steps)
    x, states = start() * scheduler.init_noise_sigma, []
    for k, t in enumerate(scheduler.timesteps):
        now = {name: value(k) for name, value in step.items()}
        inner = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
        out = model(inner, timestep=t.expand(len(x)), return_dict=False, **(cond or {}))[0]
        x = scheduler.step(out[:, : x.shape[1]], t, x, return_dict=False, **now)[0]
        states.append(x)
    return states


def check(mine: list[Tensor], other: list[Tensor], error: float = 2e-5) -> None:
    assert len(mine) == len(other) > 3
    for a, b in zip(mine, other, strict=True):
        assert a.shape == SHAPE and (a - b).abs().max() < error * (1 + b.abs().max())
    assert (mine[0] - mine[-1]).abs().max() > 0.1


# Equality with diffusers' loops


@pytest.mark.parametrize("spacing", ["leading", "trailing"])
@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
def test_ddim(unet: Any, prediction: str, spacing: str) -> None:
    """In equal steps, which their DDIM presumes."""
    scheduler = diffusers.DDIMScheduler(
        prediction_type=prediction, timestep_spacing=spacing, clip_sample=False
    )
    check(ours(from_diffusers(unet, scheduler), DDIM(), 10), theirs(unet, scheduler, 10))


def test_ddim_with_noise(unet: Any) -> None:
    scheduler = diffusers.DDIMScheduler(
        beta_schedule="scaled_linear", set_alpha_to_one=False, steps_offset=1, clip_sample=False
    )
    made = from_diffusers(unet, scheduler)
    draws = {
        "eta": lambda k: 0.7,
        "variance_noise": lambda k: NOISE.at(k).normal(torch.empty(SHAPE), "posterior"),
    }
    mine = ours(made, DDIM(eta=0.7), 10)
    check(mine, theirs(unet, scheduler, 10, **draws))
    assert made.grid(10)[-1].tolist() == [0.002, 0.001]  # such models stop at timestep 0
    eta = {"eta": lambda k: 0.0}
    assert (mine[-1] - theirs(unet, scheduler, 10, **eta)[-1]).abs().max() > 0.01


def test_ddim_without_signal_at_the_end(unet: Any) -> None:
    scheduler = diffusers.DDIMScheduler(
        rescale_betas_zero_snr=True,
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        clip_sample=False,
    )
    made = from_diffusers(unet, scheduler)
    assert made.path.alpha(made.grid(10)[0, 0]) < 1e-6
    check(ours(made, DDIM(), 10), theirs(unet, scheduler, 10))


def test_ddim_clipped(unet: Any) -> None:
    scheduler = diffusers.DDIMScheduler(clip_sample_range=0.5)
    made = from_diffusers(unet, scheduler)
    assert made.steer == Clip(0.5)
    mine = ours(made, DDIM(), 10)
    check(mine, theirs(unet, scheduler, 10, use_clipped_model_output=lambda k: True))
    assert mine[-1].abs().max() == 0.5


def test_ddim_pipeline(unet: Any, tmp_path: Path) -> None:
    """Saved, loaded by both, and run whole."""
    pipeline = diffusers.DDIMPipeline(unet, diffusers.DDIMScheduler())
    pipeline.save_pretrained(tmp_path / "saved")
    made = from_diffusers(tmp_path / "saved")
    loaded = diffusers.DDIMPipeline.from_pretrained(tmp_path / "saved")
    loaded.set_progress_bar_config(disable=True)
    images = loaded(
        batch_size=2,
        generator=torch.Generator().manual_seed(5),
        num_inference_steps=8,
        use_clipped_model_output=True,
        output_type="np",
        return_dict=False,
    )[0]
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        x = simulate(x, made.grid(8), DDIM(), made.path, made.field, NOISE, made.steer)
    wanted = torch.from_numpy(images).permute(0, 3, 1, 2)
    assert (x / 2 + 0.5 - wanted).abs().max() < 2e-5


@pytest.mark.parametrize("clip", [False, True])
def test_ddpm(unet: Any, clip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = diffusers.DDPMScheduler(clip_sample=clip)
    made = from_diffusers(unet, scheduler)
    assert made.steer == Clip(1.0) if clip else type(made.steer) is Steering
    step = iter(range(10))

    def draw(*_: Any, **__: Any) -> Tensor:
        return NOISE.at(next(step)).normal(torch.empty(SHAPE), "posterior")

    monkeypatch.setattr("diffusers.schedulers.scheduling_ddpm.randn_tensor", draw)
    mine = ours(made, Ancestral(), 10, field=convert(made.field, "clean", made.path))
    check(mine, theirs(unet, scheduler, 10))


def test_euler_discrete(unet: Any) -> None:
    """Whose x is x_0 + sigma eps; its step is that of DDIM."""
    scheduler = diffusers.EulerDiscreteScheduler(timestep_spacing="leading", steps_offset=1)
    made = from_diffusers(unet, scheduler)
    other = theirs(unet, scheduler, 10)
    scaled = [x / (1 + s**2) ** 0.5 for x, s in zip(other, scheduler.sigmas[1:], strict=True)]
    check(ours(made, DDIM(), 10), scaled)


def test_euler_discrete_with_karras_sigmas(unet: Any) -> None:
    """Levels agree; timesteps between entries differ by their interpolation, in 1e-3 of one."""
    scheduler = diffusers.EulerDiscreteScheduler(use_karras_sigmas=True)
    made = from_diffusers(unet, scheduler)
    other = theirs(unet, scheduler, 10)
    times = made.grid(10)[:, 0]
    levels = made.path.sigma(times) / made.path.alpha(times)
    assert torch.allclose(levels, scheduler.sigmas[:-1].double(), rtol=1e-6)
    assert (made.path.timestep(times) - scheduler.timesteps).abs().max() < 0.1
    scaled = [x / (1 + s**2) ** 0.5 for x, s in zip(other, scheduler.sigmas[1:], strict=True)]
    check(ours(made, DDIM(), 10), scaled, error=2e-3)


def test_dpm_solver(unet: Any) -> None:
    scheduler = diffusers.DPMSolverMultistepScheduler()
    made = from_diffusers(unet, scheduler)
    check(ours(made, DPMSolver(2, steps=10), 10), theirs(unet, scheduler, 10))


def test_dit(dit: Any) -> None:
    """Learned variances are dropped; without a label the class is the extra one."""
    scheduler = diffusers.DDIMScheduler(clip_sample=False)
    made = from_diffusers(dit, scheduler)
    label = torch.tensor([4, 1])
    check(ours(made, DDIM(), 6, label=label), theirs(dit, scheduler, 6, {"class_labels": label}))
    same = {"class_labels": torch.tensor([4, 4])}
    check(ours(made, DDIM(), 6, label=torch.tensor(4)), theirs(dit, scheduler, 6, same))
    none = torch.tensor([5, 5])
    check(ours(made, DDIM(), 6, label=None), theirs(dit, scheduler, 6, {"class_labels": none}))


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_sd3(sd3: Any, shift: float) -> None:
    """Flow matching: Euler along the linear path; the shift is in the grid, once."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    made = from_diffusers(sd3, scheduler)
    assert isinstance(made.path, Linear) and made.field.predicts == "velocity"
    cond = {
        "context": NOISE.normal(torch.empty(2, 3, 6), "context"),
        "vector": NOISE.normal(torch.empty(2, 5), "vector"),
    }
    named = {"encoder_hidden_states": cond["context"], "pooled_projections": cond["vector"]}
    scheduler.init_noise_sigma = 1.0
    check(ours(made, Euler(), 6, **cond), theirs(sd3, scheduler, 6, named))
    # of even times; their last one, though, is shifted on its own before
    even = torch.linspace(1, shift * 1e-3 / (1 + (shift - 1) * 1e-3), 6).double()
    assert torch.allclose(made.grid(6)[:, 0], shift * even / (1 + (shift - 1) * even), atol=1e-6)


def test_dynamic_shift(sd3: Any) -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    grid = from_diffusers(sd3, scheduler).grid
    scheduler.set_timesteps(7, mu=0.8)
    assert torch.equal(grid(7, mu=0.8).flatten()[::2], scheduler.sigmas[:-1].double())
    with pytest.raises(ValueError, match="mu"):
        grid(7)


def test_conditional_unet() -> None:
    model = build(
        "UNet2DConditionModel",
        sample_size=8,
        in_channels=2,
        out_channels=2,
        block_out_channels=(8,),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        mid_block_type="UNetMidBlock2DCrossAttn",
        cross_attention_dim=6,
        attention_head_dim=4,
        addition_embed_type="text_time",
        addition_time_embed_dim=2,
        projection_class_embeddings_input_dim=7,
    )
    scheduler = diffusers.PNDMScheduler(skip_prk_steps=True, steps_offset=1)
    made = from_diffusers(model, scheduler)
    context = NOISE.normal(torch.empty(2, 3, 6), "context")
    mask = torch.tensor([[True, True, False], [True, True, True]])
    more = {
        "text_embeds": NOISE.normal(torch.empty(2, 3), "text"),
        "time_ids": torch.ones(2, 2),
    }
    with torch.no_grad():
        mine = made.field(
            start(),
            torch.tensor([0.401, 0.901]),
            context=context,
            context_mask=mask,
            added_cond_kwargs=more,
        )
        wanted = model(
            start(),
            torch.tensor([400, 900]),
            context,
            encoder_attention_mask=mask,
            added_cond_kwargs=more,
        ).sample
    assert torch.equal(mine, wanted) and made.field.predicts == "noise"


# Schedules


@pytest.mark.parametrize(
    ("kind", "config", "last"),
    [
        ("DDPMScheduler", {}, 0.0),
        ("DDPMScheduler", {"beta_schedule": "squaredcos_cap_v2"}, 0.0),
        ("DDIMScheduler", {"timestep_spacing": "trailing"}, 0.0),
        ("DDIMScheduler", {"set_alpha_to_one": False, "steps_offset": 1}, 1e-3),
        ("DDIMScheduler", {"set_alpha_to_one": False}, 1e-3),
        ("PNDMScheduler", {"skip_prk_steps": True, "steps_offset": 1}, 1e-3),
        ("PNDMScheduler", {}, 1e-3),
        ("DPMSolverMultistepScheduler", {}, 0.0),
        ("DPMSolverMultistepScheduler", {"final_sigmas_type": "sigma_min"}, 1e-3),
        ("UniPCMultistepScheduler", {"timestep_spacing": "leading"}, 0.0),
        ("EulerDiscreteScheduler", {"rescale_betas_zero_snr": True}, 0.0),
        ("EulerAncestralDiscreteScheduler", {"beta_schedule": "scaled_linear"}, 0.0),
        ("EulerDiscreteScheduler", {"trained_betas": [0.1] * 50, "num_train_timesteps": 50}, 0.0),
    ],
    ids=str,
)
def test_tables_and_grids(unet: Any, kind: str, config: dict[str, Any], last: float) -> None:
    scheduler = getattr(diffusers, kind)(**config)
    made = from_diffusers(unet, scheduler)
    assert isinstance(made.path, Tabulated)
    table = scheduler.alphas_cumprod.double()
    t = (torch.arange(len(table)) + 1).double() / len(table)
    assert torch.allclose(made.path.alpha(t)[:-1], table[:-1].sqrt(), atol=1e-15)
    assert abs(made.path.alpha(t)[-1] - table[-1].sqrt()) < (
        3e-4 if len(config) == 1 and "rescale_betas_zero_snr" in config else 1e-15
    )
    pairs = made.grid(10)
    scheduler.set_timesteps(10)
    visited = scheduler.timesteps.double().unique().flip(0)
    if kind == "PNDMScheduler" and not config:  # its first steps look around in between
        visited = torch.arange(900, -1, -100).double()
    timesteps = made.path.timestep(pairs[:, 0])
    assert torch.allclose(timesteps, visited[: len(pairs)], atol=1e-9)
    assert pairs[-1, 1] == last and bool((pairs[:, 1] < pairs[:, 0]).all())
    # a timestep that ends where it starts is no step
    stays = int(visited[-1]) == 0 and last > 0
    assert len(pairs) == len(visited) - stays
    assert torch.equal(pairs, made.grid(10))


def test_flow_by_other_schedulers(sd3: Any) -> None:
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=2.0
    )
    made = from_diffusers(sd3, scheduler)
    assert isinstance(made.path, Linear) and made.field.predicts == "velocity"
    scheduler.set_timesteps(9)
    assert torch.equal(made.grid(9).flatten()[::2], scheduler.sigmas[:-1].double())


@pytest.mark.parametrize("steps", [0, -1, 1001])
def test_bad_steps(unet: Any, steps: int) -> None:
    with pytest.raises(ValueError, match="steps"):
        from_diffusers(unet, diffusers.DDIMScheduler()).grid(steps)


# The field


def test_dtypes_and_times(unet: Any) -> None:
    made = from_diffusers(unet, diffusers.DDIMScheduler(prediction_type="v_prediction"))
    t = torch.tensor([0.301, 0.7])
    with torch.no_grad():
        rows = made.field(start(), t)
        for row in range(2):
            one = made.field(start()[row : row + 1], t[row].double())
            assert torch.allclose(rows[row], one[0], atol=1e-5)
        double = made.field(start().double(), t.double())
    assert double.dtype == torch.float64 and torch.allclose(double.float(), rows, rtol=1e-4)
    assert made.field.predicts == "velocity"


def test_gradients_reach_x(unet: Any) -> None:
    made = from_diffusers(unet, diffusers.DDIMScheduler())
    x = start().requires_grad_()
    made.field(x, torch.tensor(0.5)).sum().backward()
    assert x.grad is not None and x.grad.abs().max() > 0


def test_bad_x(unet: Any) -> None:
    field = from_diffusers(unet, diffusers.DDIMScheduler()).field
    for shape in ((2, 3, 8, 8), (2, 8, 8)):
        with pytest.raises(ValueError, match=r"x must have shape \(batch, 2, height, width\)"):
            field(torch.zeros(shape), torch.tensor(0.5))


def test_bad_labels(dit: Any) -> None:
    field = from_diffusers(dit, diffusers.DDIMScheduler()).field
    x, t, label = start(), torch.tensor(0.5), torch.tensor([1, 3])
    with torch.no_grad():
        wanted = field(x, t, label=label)
        assert torch.equal(field(x, t, label=label.to(torch.uint8)), wanted)
    with pytest.raises(TypeError, match="label must be a tensor of integers, got torch.float32"):
        field(x, t, label=label.float())
    with pytest.raises(ValueError, match=r"label must have shape \(\) or \(2,\), got \(3,\)"):
        field(x, t, label=torch.tensor([1, 2, 3]))


def test_clip() -> None:
    x = torch.tensor([[-3.0, 0.5, 2.0]])
    assert Clip(1.5).clean(x, x, None, None).tolist() == [[-1.5, 0.5, 1.5]]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="limit must be positive, got 0"):
        Clip(0)


# What is taken, and from where


def test_sources(unet: Any, dit: Any, tmp_path: Path) -> None:
    scheduler = diffusers.DDIMScheduler(beta_end=0.03)
    pipeline = diffusers.DDIMPipeline(unet, scheduler)
    unet.save_pretrained(tmp_path / "model")
    scheduler.save_pretrained(tmp_path / "scheduler")
    pipeline.save_pretrained(tmp_path / "pipeline")
    t = torch.tensor(0.5)
    with torch.no_grad():
        wanted = from_diffusers(unet, scheduler).field(start(), t)
        for source in (
            (pipeline,),
            (tmp_path / "pipeline",),
            (str(tmp_path / "pipeline"),),
            (tmp_path / "model", scheduler),
            (str(tmp_path / "model"), tmp_path / "scheduler"),
        ):
            made = from_diffusers(*source)
            assert torch.equal(made.field(start(), t), wanted)
            assert made.path.alpha(t.double()) == pytest.approx(
                float(scheduler.alphas_cumprod[499]) ** 0.5
            )
        other = from_diffusers(pipeline, diffusers.DDIMScheduler())
        assert other.path.alpha(t) != made.path.alpha(t)
        half = from_diffusers(tmp_path / "pipeline", torch_dtype=torch.bfloat16)
        out = half.field(start(), t)
        assert next(half.field.model.parameters()).dtype == torch.bfloat16
        assert out.dtype == torch.float32 and (out - wanted).abs().max() < 0.1 * wanted.abs().max()
    assert not from_diffusers(dit.train(), scheduler).field.model.training


def test_refused(unet: Any, tmp_path: Path) -> None:
    scheduler = diffusers.DDIMScheduler()
    for missing in (tmp_path / "nothing", str(tmp_path / "nothing"), "./nothing", "nothing"):
        with pytest.raises(FileNotFoundError, match="no folder"):
            from_diffusers(missing)
    with pytest.raises(TypeError, match="model must be one of UNet2DModel.*, got Linear"):
        from_diffusers(torch.nn.Linear(1, 1), scheduler)
    with pytest.raises(TypeError, match="model must be one of UNet2DModel.*, got object"):
        from_diffusers(object(), scheduler)
    with pytest.raises(ValueError, match="scheduler must be given with a bare UNet2DModel"):
        from_diffusers(unet)
    with pytest.raises(TypeError, match="scheduler must be one of .*, got VQDiffusionScheduler"):
        from_diffusers(unet, diffusers.VQDiffusionScheduler(num_vec_classes=3))
    diffusers.VQDiffusionScheduler(num_vec_classes=3).save_pretrained(tmp_path / "other")
    with pytest.raises(TypeError, match="holds a scheduler of kind VQDiffusionScheduler"):
        from_diffusers(unet, tmp_path / "other")
    build(
        "AutoencoderTiny",
        encoder_block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
    ).save_pretrained(tmp_path / "vae")
    with pytest.raises(TypeError, match="holds a model of kind AutoencoderTiny"):
        from_diffusers(tmp_path / "vae", scheduler)
    with pytest.raises(ValueError, match="thresholding=False, got True"):
        from_diffusers(unet, diffusers.DDIMScheduler(thresholding=True))
    with pytest.raises(ValueError, match="prediction_type must be one of .*, got 'other'"):
        from_diffusers(unet, diffusers.DDIMScheduler(prediction_type="other"))
    with pytest.raises(ValueError, match="timestep_type='discrete', got 'continuous'"):
        from_diffusers(unet, diffusers.EulerDiscreteScheduler(timestep_type="continuous"))


def test_missing_package(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ImportError, match=r"pip install 'fluvial\[vision\]'"):
        from_diffusers(unet, None)


@pytest.mark.parametrize("module", ["diffusers", "edm", "latents", "tabulated"])
def test_import_stays_light(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for heavy in ("diffusers", "transformers"):
        monkeypatch.setitem(sys.modules, heavy, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a module that is run a second time
        runpy.run_module(f"fluvial.adapters.{module}")
