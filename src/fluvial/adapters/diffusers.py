"""Models and schedulers of the diffusers library, as a field, a path, and a grid.

A scheduler of diffusers holds three things that are apart here: the law of the noise (`Tabulated`,
made of its table, or `Linear` for flow matching), the times at which a run evaluates the model (a
grid), and the solver. The solver is a matter of choice: `fluvial.core.gaussian.multistep.DDIM` is
that of DDIMScheduler and, up to the scale of x, of EulerDiscreteScheduler; `Ancestral` that of
DDPMScheduler; `Euler` that of FlowMatchEulerDiscreteScheduler.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fluvial.adapters.tabulated import Tabulated
from fluvial.core.gaussian.levels import time_of
from fluvial.core.gaussian.paths import AlphaSigmaPath, Linear
from fluvial.core.protocols import Run, Steering, class_per_row, left_broadcast
from fluvial.core.time import grid_pairs

MODELS = (
    "UNet2DModel",
    "UNet2DConditionModel",
    "DiTTransformer2DModel",
    "SD3Transformer2DModel",
)
SCHEDULERS = (
    "DDPMScheduler",
    "DDIMScheduler",
    "PNDMScheduler",
    "DPMSolverMultistepScheduler",
    "UniPCMultistepScheduler",
    "EulerDiscreteScheduler",
    "EulerAncestralDiscreteScheduler",
    "FlowMatchEulerDiscreteScheduler",
)
PREDICTIONS = {
    "epsilon": "noise",
    "sample": "clean",
    "v_prediction": "velocity",
    "flow_prediction": "velocity",
}
NAMES = {
    "label": "class_labels",
    "context": "encoder_hidden_states",
    "context_mask": "encoder_attention_mask",
    "vector": "pooled_projections",
}
"""Conditions by their names here; others are passed on by the names they have."""


class Pretrained(NamedTuple):
    """What `simulate` needs of a pretrained model.

    Attributes:
        field: the model.
        path: along which it was trained.
        grid: ``grid(steps)`` gives the scheduler's pairs of times, with its spacing, offset and
            shift; further arguments go to its ``set_timesteps``, such as ``mu``.
        steer: what the scheduler does to clean predictions: clips them, or nothing.
    """

    field: DiffusersField
    path: AlphaSigmaPath
    grid: Callable[..., Tensor]
    steer: Steering


def from_diffusers(model: Any, scheduler: Any = None, **load: Any) -> Pretrained:
    """A model of diffusers with the schedule it was trained along.

        field, path, grid, steer = from_diffusers("folder of a pipeline")
        pairs = grid(50)
        x = noise.normal(torch.empty(16, 3, 32, 32))
        x = simulate(x, pairs, DDIM(), path, field, noise, steer)

    Times: timestep n of T is t = (n + 1) / T on a discrete path, and t = sigma on the linear one. A
    shift of the timesteps is a matter of the grid alone. A run starts from N(0, I), the path's
    source. With clipped clean predictions diffusers' DDIM keeps the noise that was predicted; here
    it is that of the clipped prediction, their ``use_clipped_model_output=True``.

    Args:
        model: a UNet2DModel, UNet2DConditionModel, DiTTransformer2DModel or SD3Transformer2DModel,
            a pipeline with one of them, or the folder or hub name of either. It is put into
            evaluation mode. A folder is read without network access, weights from safetensors only;
            a hub name is downloaded.
        scheduler: one of diffusers, of a kind in `SCHEDULERS`, or a folder or hub name; that of the
            pipeline by default.
        **load: for ``from_pretrained``, where something is loaded, such as ``torch_dtype``.

    Raises:
        ImportError: diffusers is not installed: it comes with ``fluvial[vision]``.
        FileNotFoundError: no such folder.
        TypeError: a model or scheduler of another kind.
        ValueError: no scheduler, or one with options that no field and path can stand for.
    """
    _diffusers()
    if isinstance(model, (str, os.PathLike)):
        model, found = _load(model, scheduler is None, load)
        scheduler = found if scheduler is None else scheduler
    elif not isinstance(model, nn.Module):  # a pipeline
        scheduler = getattr(model, "scheduler", None) if scheduler is None else scheduler
        parts = (getattr(model, name, None) for name in ("unet", "transformer"))
        model = next((part for part in parts if part is not None), model)
    if not _is_a(model, MODELS):
        raise TypeError(
            f"model must be one of {', '.join(MODELS)} or a pipeline with one, "
            f"got {type(model).__name__}"
        )
    if scheduler is None:
        raise ValueError(f"scheduler must be given with a bare {type(model).__name__}, got None")
    if isinstance(scheduler, (str, os.PathLike)):
        scheduler = _load_scheduler(scheduler, "", load)
    if not _is_a(scheduler, SCHEDULERS):
        raise TypeError(
            f"scheduler must be one of {', '.join(SCHEDULERS)}, got {type(scheduler).__name__}"
        )
    config = scheduler.config
    flow = _is_a(scheduler, ("FlowMatchEulerDiscreteScheduler",))
    prediction = "flow_prediction" if flow else config.prediction_type
    if prediction not in PREDICTIONS:
        raise ValueError(
            f"prediction_type must be one of {', '.join(PREDICTIONS)}, got {prediction!r}"
        )
    for option, usual in (
        ("thresholding", False),
        ("invert_sigmas", False),
        ("timestep_type", "discrete"),
    ):
        if config.get(option, usual) != usual:
            raise ValueError(f"scheduler must have {option}={usual!r}, got {config[option]!r}")

    path: AlphaSigmaPath
    if prediction == "flow_prediction":
        path = Linear()
    else:
        table = scheduler.alphas_cumprod.detach().clone()
        if config.get("rescale_betas_zero_snr", False):
            table[-1] = 0.0  # some schedulers keep 2^-24 in its place, which others are below
        path = Tabulated(table)
    clips = config.get("clip_sample", False)
    return Pretrained(
        DiffusersField(model.eval(), path, prediction, config.num_train_timesteps),
        path,
        partial(_grid, scheduler, path),
        Clip(config.clip_sample_range) if clips else Steering(),
    )


@dataclass(frozen=True)
class DiffusersField:
    """A model of diffusers as a field; made by `from_diffusers`.

    Conditions by the names of `NAMES`, ``label`` () or (batch,), ``context`` (batch, n, d),
    ``context_mask`` and ``vector`` (batch, d); others by the model's own, such as
    ``added_cond_kwargs``. Without a label a DiTTransformer2DModel gets its extra class, "none".
    ``x`` may be of another dtype than the model, and comes back in its own.

    Raises:
        TypeError: in a call, a label that is not of integers.
        ValueError: in a call, x without the model's channels, or a label of another shape.
    """

    model: Any
    path: AlphaSigmaPath
    prediction: str
    timesteps: int

    @property
    def predicts(self) -> str:
        return PREDICTIONS[self.prediction]

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        channels = self.model.config.in_channels
        if x.ndim != 4 or x.shape[1] != channels:
            raise ValueError(
                f"x must have shape (batch, {channels}, height, width), got {tuple(x.shape)}"
            )
        label = cond.get("label")
        if label is not None:
            cond["label"] = class_per_row(label, x)
        elif _is_a(self.model, ("DiTTransformer2DModel",)):
            none = self.model.config.num_embeds_ada_norm
            cond["label"] = torch.full((len(x),), none, device=x.device)
        if isinstance(self.path, Tabulated):
            timestep = self.path.timestep(t)
        else:
            timestep = t * self.timesteps
        dtype = next(self.model.parameters()).dtype
        value = self.model(
            x.to(dtype),
            timestep=timestep.to(x.device, torch.float32).expand(len(x)),
            return_dict=False,
            **{NAMES.get(name, name): _cast(part, dtype) for name, part in cond.items()},
        )[0]
        value = value[:, :channels].to(x.dtype)  # what may follow are learned variances
        if self.prediction == "v_prediction":
            rate = self.path.angle_rate(t)  # type: ignore[attr-defined]
            return left_broadcast(rate.to(x) if rate.ndim else rate, x) * value
        return value


@dataclass
class Clip(Steering):
    """Clean predictions within [-limit, limit], as pixels are (Ho et al., NeurIPS 2020).

    Raises:
        ValueError: ``limit`` is not positive.
    """

    limit: float = 1.0

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise ValueError(f"limit must be positive, got {self.limit}")

    def clean(self, clean: Any, x: Any, aim: Any, run: Run) -> Tensor:
        return clean.clamp(-self.limit, self.limit)


def _grid(scheduler: Any, path: AlphaSigmaPath, steps: int, **options: Any) -> Tensor:
    """The scheduler's pairs of times (K, 2); K may be less than ``steps`` where two times are one.

    The model is called at the scheduler's timesteps, and each step ends where the next begins. In
    diffusers that is not so for DDIMScheduler where the timesteps are not evenly spaced.

    Raises:
        ValueError: ``steps`` < 1, or more than the scheduler allows.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if _is_a(scheduler, ("PNDMScheduler",)):  # whose timesteps repeat, as its solver needs
        same = ("num_train_timesteps", "timestep_spacing", "steps_offset", "set_alpha_to_one")
        config = {name: scheduler.config[name] for name in same}
        scheduler = _diffusers().DDIMScheduler(**config)
    scheduler = copy.deepcopy(scheduler)
    scheduler.set_timesteps(steps, **options)
    config = scheduler.config
    spaced = [f"use_{kind}_sigmas" for kind in ("karras", "exponential", "beta")]
    if isinstance(path, Linear):
        times = scheduler.sigmas.double()
    elif any(config.get(option) for option in (*spaced, "use_lu_lambdas")):
        times = time_of(path, scheduler.sigmas)
    else:
        clean = (
            config.get("set_alpha_to_one", True)
            and config.get("final_sigmas_type", "zero") == "zero"
        )
        last = torch.tensor([-1.0 if clean else 0.0])
        times = (torch.cat([scheduler.timesteps, last]).double() + 1) / config.num_train_timesteps
    falls = torch.cat([torch.ones(1, dtype=torch.bool), times.diff() < 0])
    return grid_pairs(times[falls])


def _load(source: str | os.PathLike[str], wanted: bool, load: dict[str, Any]) -> tuple[Any, Any]:
    """(model, scheduler or None) of a folder or a hub name."""
    diffusers, load = _diffusers(), _local(source, load)
    try:
        parts = diffusers.DiffusionPipeline.load_config(source, **load)
    except OSError:  # no pipeline, but perhaps a model
        parts, name = {}, ""
        kind = diffusers.UNet2DModel.load_config(source, **load)["_class_name"]
    else:
        name = "unet" if "unet" in parts else "transformer"
        kind = parts[name][1] if name in parts else parts["_class_name"]
    if kind not in MODELS:
        raise TypeError(f"{source} holds a model of kind {kind}, wanted {', '.join(MODELS)}")
    cls = getattr(diffusers, kind)
    model = cls.from_pretrained(source, subfolder=name, use_safetensors=True, **load)
    if not wanted or "scheduler" not in parts:
        return model, None
    return model, _load_scheduler(source, "scheduler", load)


def _load_scheduler(source: str | os.PathLike[str], subfolder: str, load: dict[str, Any]) -> Any:
    diffusers, load = _diffusers(), _local(source, load)
    config = diffusers.DDIMScheduler.load_config(source, subfolder=subfolder, **load)
    kind = config["_class_name"]
    if kind not in SCHEDULERS:
        raise TypeError(
            f"{source} holds a scheduler of kind {kind}, wanted {', '.join(SCHEDULERS)}"
        )
    return getattr(diffusers, kind).from_config(config)


def _local(source: str | os.PathLike[str], load: dict[str, Any]) -> dict[str, Any]:
    """``load``, and without network access if ``source`` is a folder."""
    if Path(source).is_dir():
        return {**load, "local_files_only": True}
    text = os.fspath(source)
    if not isinstance(source, str) or text.count("/") != 1 or text[0] in "./~":
        raise FileNotFoundError(f"no folder {text}, and not a name owner/model of the hub")
    return load


def _diffusers() -> Any:
    try:
        import diffusers
    except ImportError as error:
        raise ImportError(
            f"diffusers could not be imported ({error}); pip install 'fluvial[vision]'"
        ) from error
    return diffusers


def _is_a(thing: Any, names: tuple[str, ...]) -> bool:
    return any(base.__name__ in names for base in type(thing).__mro__)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating conditions in the dtype of the model, in nestings too."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _cast(part, dtype) for name, part in value.items()}
    return value
