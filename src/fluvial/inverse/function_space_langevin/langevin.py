"""The class: a prior of functions, a measurement, and chains of the posterior."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from fluvial.core.gaussian.losses import Matching
from fluvial.core.protocols import Field, Noise
from fluvial.core.simulate import simulate
from fluvial.core.time import LogitNormal
from fluvial.inverse.function_space_langevin.chain import (
    PosteriorDrift,
    PreconditionedLangevin,
    Recorder,
    effective_samples,
    r_hat,
)
from fluvial.inverse.function_space_langevin.forward import (
    Forward,
    Measurement,
    OnFunctions,
    forward_map,
)
from fluvial.inverse.function_space_langevin.modes import Modes, power_law
from fluvial.inverse.function_space_langevin.networks import describe, rebuild
from fluvial.inverse.function_space_langevin.priors import (
    GaussianPrior,
    LearnedDrift,
    LearnedPrior,
    Potential,
    ProductPrior,
    coloured_path,
)
from fluvial.inverse.function_space_langevin.theory import (
    Gaussian,
    Preset,
    Principal,
    check_covariance,
    check_obs_noise,
    check_positive,
    is_trace_class,
    preconditioner,
    principal,
    stationary,
)
from fluvial.training.files import load_model, put_weights, save_model
from fluvial.training.loop import train
from fluvial.training.stage import Stage, Training
from fluvial.training.use import IntendedUse, read_use

SYSTEM = "function-space-langevin"
CHUNK = 1 << 24
"""Numbers transformed at once."""


@dataclass(frozen=True, eq=False)
class Chains:
    """What a run of chains leaves.

    Attributes:
        modes: in which the coefficients are.
        draws: (chains, kept, J) states; None if only moments were kept.
        mean, variance: (J,), over chains and kept states, float64.
        autocorrelation: (J,), of one kept state and the next, ``thin`` steps later.
        acceptance: share of accepted steps, () or (J,); None without Metropolis' test.
    """

    modes: Modes
    draws: Tensor | None
    mean: Tensor
    variance: Tensor
    autocorrelation: Tensor
    acceptance: Tensor | None

    def functions(self) -> Tensor:
        """The draws on the grid, (chains * kept, *shape), chain by chain.

        Raises:
            ValueError: only moments were kept.
        """
        return self.modes.functions(self._draws().flatten(0, 1))

    def mean_function(self) -> Tensor:
        """The posterior mean on the grid, (*shape)."""
        return self.modes.functions(self.mean[None])[0]

    def std_function(self) -> Tensor:
        """The posterior standard deviation at every point, (*shape), from the draws.

        Raises:
            ValueError: only moments were kept.
        """
        return self.functions().std(0)

    def r_hat(self) -> Tensor:
        """See `fluvial.inverse.function_space_langevin.chain.r_hat`; (J,)."""
        return r_hat(self._draws())

    def effective_samples(self) -> Tensor:
        """See `fluvial.inverse.function_space_langevin.chain.effective_samples`; (J,)."""
        return effective_samples(self._draws())

    def _draws(self) -> Tensor:
        if self.draws is None:
            raise ValueError("draws were not kept: sample with states=True")
        return self.draws


class FunctionSpaceLangevin(nn.Module):
    """Posterior draws of an unknown function from a linear measurement y = A X_0 + n.

    The chain is the Langevin equation in function space, with a score prior S and a preconditioner
    C that is also the covariance of the noise that defines S,

        X <- X + h [S(X, t) + C A^T (y - A X) / obs_noise^2] + sqrt(2 h) C^(1/2) xi,

    or the exact step of its linear part (`PreconditionedLangevin`). With C of the posterior all
    modes forget at the rate 1, observed or not: neither step nor number of steps changes as the
    grid is refined. With C = 1 rates grow as 1 / variance, or, at t > 0, white noise is added.

    ``fit`` takes functions, estimates the variances of their modes and, with a network, trains it
    to predict the white noise in X_t = sqrt(1 - t) X_0 + sqrt(t) C^(1/2) Z with the C of the chain.

    Args:
        modes: basis and grid of the functions.
        forward: A: a spectrum (N,) of the first N modes, the others are not observed; a matrix
            (M, N) on their coefficients; or an operator with ``A`` and ``A_adjoint`` on functions
            (batch, *modes.shape), of which only the diagonal of A^T A enters C.
        obs_noise: standard deviation of n.
        prior: None for a Gaussian; a network such as `ModeNetwork` or `OperatorNetwork`; or a
            potential phi, the prior having the density exp(-sum phi_j) against the Gaussian
            (`ProductPrior`).
        preconditioner: a preset of `preconditioner`, or C itself, (J,), or (J, J) for a Gaussian.
            With a matrix A and a Gaussian the posterior's C is a matrix.
        score_error, curvature: see `preconditioner`.
        t: at which the score is taken, tau = -log(1 - t) of the paper. Its smoothing changes the
            prior covariance to (1 - t) diag(variance) + t C.
        decay: ``"power"`` fits variance = scale |k|^(-2 decay) to the functions, which a few
            determine; ``"free"`` takes the variance of every mode.
        centre: fit a mean function too; else functions are taken to be about 0.
        variance, mean: (J,), in the place of a fit. A mean without is 0.
        times: law of t in training. By default the logit of t is N(-2, 2.5^2): tau in [1e-3, 3] for
            95 % of the draws.
        progress: show a bar while an operator is applied to every mode.

    Raises:
        TypeError, ValueError: of an argument; a C given that is not trace-class warns.

    Citation: Baldassari, Garnier, Solna and de Hoop, NeurIPS 2025, arXiv 2505.18276.
    """

    intended: tuple[str, ...] = ("drawing functions that a linear measurement leaves possible",)
    out_of_scope: tuple[dict[str, str], ...] = ()
    variance: Tensor | None
    mean: Tensor | None
    cov_noise: Tensor | None
    score_error: Tensor
    curvature: Tensor

    def __init__(
        self,
        modes: Modes,
        forward: Measurement,
        obs_noise: float,
        *,
        prior: nn.Module | Potential | None = None,
        preconditioner: Preset | Tensor = "posterior",
        score_error: Tensor | float = 0.0,
        curvature: Tensor | float = 0.0,
        t: float = 1e-3,
        decay: Literal["power", "free"] = "power",
        centre: bool = True,
        variance: Tensor | None = None,
        mean: Tensor | None = None,
        times: LogitNormal = LogitNormal(-2.0, 2.5),  # noqa: B008 (frozen)
        progress: bool = False,
    ) -> None:
        super().__init__()
        if not 0 <= t < 1:
            raise ValueError(f"t must lie in [0, 1), got {t}")
        if decay not in ("power", "free"):
            raise ValueError(f"decay must be power or free, got {decay!r}")
        if isinstance(preconditioner, str) and preconditioner not in get_args(Preset):
            raise ValueError(
                f"preconditioner must be one of {', '.join(get_args(Preset))} or a tensor, got "
                f"{preconditioner!r}"
            )
        if mean is not None and variance is None:
            raise ValueError("mean is given without variance: give both, or fit")
        self.modes, self.obs_noise = modes, check_obs_noise(obs_noise)
        self.observed: Forward = forward_map(forward, modes, progress=progress)
        self.network = prior if isinstance(prior, nn.Module) else None
        self.potential: Callable[[Tensor], Tensor] | None = (
            None if prior is None or isinstance(prior, nn.Module) else prior
        )
        self.preset = preconditioner if isinstance(preconditioner, str) else None
        self.t, self.decay, self.centre, self.times = t, decay, centre, times
        for name, value in (("score_error", score_error), ("curvature", curvature)):
            self.register_buffer(name, torch.as_tensor(value, dtype=torch.float64))
        for name in ("variance", "mean", "cov_noise"):
            self.register_buffer(name, None)
        if self.preset is None:
            self.cov_noise = check_covariance(preconditioner, len(modes))  # type: ignore[arg-type]
            self._check_independent(self.cov_noise)
            if self.cov_noise.ndim == 1 and not is_trace_class(self.cov_noise):
                warnings.warn(
                    "preconditioner: its eigenvalues do not fall faster than 1 / j, it is not "
                    "trace-class, and on finer grids the chain becomes white noise",
                    stacklevel=2,
                )
        if variance is not None:
            self._set_prior(variance, torch.zeros(()) if mean is None else mean)
        self.use: IntendedUse | None = IntendedUse(intended=self.intended)

    # Prior

    def _set_prior(self, variance: Tensor, mean: Tensor) -> None:
        size = len(self.modes)
        variance = check_positive("variance", variance)
        if tuple(variance.shape) != (size,):
            raise ValueError(f"variance must be ({size},), got {tuple(variance.shape)}")
        if tuple(mean.shape) not in ((), (size,)) or not bool(mean.isfinite().all()):
            raise ValueError(f"mean must be ({size},), finite, got {tuple(mean.shape)}")
        if not is_trace_class(variance):
            warnings.warn(
                "variance: the modes' variances do not fall faster than 1 / j: on finer grids "
                "these functions become white noise",
                stacklevel=3,
            )
        if self.preset is not None:
            self.cov_noise = preconditioner(
                self.preset,
                variance,
                self.gram,
                self.obs_noise,
                t=self.t if self.preset == "optimal" else 0.0,
                score_error=self.score_error,
                curvature=self.curvature,
            )
        self.variance, self.mean = variance, mean.double().expand(size).clone()

    @property
    def gram(self) -> Tensor:
        """A^T A, (N,), or (N, N) where the chain takes account of all of it."""
        gaussian = self.network is None and self.potential is None
        return self.observed.gram if gaussian else self.observed.gram_diagonal

    def _check_independent(self, cov: Tensor) -> None:
        if cov.ndim == 2 and (self.network is not None or self.potential is not None):
            raise ValueError("preconditioner: a matrix is for a Gaussian prior, got another prior")

    def _fitted(self) -> tuple[Tensor, Tensor, Tensor]:
        """(variance, mean, cov_noise)."""
        if self.variance is None or self.mean is None or self.cov_noise is None:
            raise ValueError("the prior is not known yet: fit functions, or give variance=")
        return self.variance, self.mean, self.cov_noise

    @property
    def prior(self) -> Field:
        """S, a field of coefficients about the mean."""
        variance, _, cov = self._fitted()
        if self.network is not None:
            return LearnedDrift(LearnedPrior(self.network, variance, cov))
        if self.potential is not None:
            return ProductPrior(variance, cov, self.potential)
        return GaussianPrior(variance, cov)

    # Training

    def matching(self) -> Matching:
        """The objective of the network: the squared error of the white noise in x_t.

        Raises:
            ValueError: the prior has no network, or its variances are not known yet.
        """
        if self.network is None:
            raise ValueError("the prior has no network to train")
        variance, _, cov = self._fitted()
        return Matching(
            LearnedPrior(self.network, variance, cov),
            coloured_path(cov),
            predicts="noise",
            times=self.times,
        )

    def loss(self, functions: Tensor, *, noise: Noise) -> dict[str, Tensor]:
        """The objective on functions (batch, *shape): see `Matching`."""
        objective = self.matching()
        dtype = next(objective.parameters()).dtype
        return objective({"x": self._coefficients(functions).to(dtype)}, noise)

    def fit(
        self,
        functions: Tensor,
        *,
        steps: int | None = None,
        validation: Tensor | None = None,
        out: str | Path | None = None,
        resume: bool = True,
        progress: bool = True,
        **training: Any,
    ) -> Self:
        """Fit the prior to functions: mean and variances, then the network, if there is one.

        Args:
            functions: (rows, *shape), values on the grid.
            steps: optimiser steps, for a network.
            validation: functions that are not trained on.
            out: folder of the training; see `fluvial.training.loop.train`.
            resume: go on from the latest checkpoint in ``out``.
            progress: show a progress bar.
            **training: other fields of `fluvial.training.stage.Training`.

        Raises:
            TypeError: functions that are not floating.
            ValueError: functions on another grid, fewer than two, not finite, or constant in a
                mode; ``steps`` missing for a network, or given without.
        """
        if (steps is None) != (self.network is None):
            wanted = "a network is trained for" if steps is None else "there is no network for"
            raise ValueError(f"steps={steps}: {wanted} steps")
        if len(functions) < 2:
            raise ValueError(f"functions must be two or more, got {len(functions)}")
        x = self._raw_coefficients(functions)
        mean = x.double().mean(0) if self.centre else x.new_zeros(x.shape[1]).double()
        self._set_prior(self._variances(x - mean.to(x)), mean)
        if self.network is None or steps is None:
            return self
        dtype = next(self.network.parameters()).dtype
        held = None if validation is None else {"x": self._coefficients(validation).to(dtype)}
        objective = self.matching()
        config = {"network": describe(self.network), **self._options()}
        train(
            Stage(
                objective,
                {"x": (x - mean.to(x)).to(dtype)},
                Training(steps=steps, **training),
                held,
            ),
            out=None if out is None else Path(out),
            resume=resume,
            progress=progress,
            config=config,
        )
        self.network.eval()
        return self

    def _variances(self, x: Tensor) -> Tensor:
        power = x.double().square().mean(0)
        if self.decay == "free":
            return check_positive("variance of the functions' modes", power)
        scale, decay = power_law(x, self.modes)
        square = self.modes.frequencies.double().square().sum(1).to(power)
        fitted = scale * square.clamp(min=1) ** -decay
        # the constant mode of a cosine basis has no frequency, and a variance of its own
        return torch.where(square > 0, fitted, torch.maximum(power, fitted))

    def _raw_coefficients(self, functions: Tensor) -> Tensor:
        size = max(1, CHUNK // len(self.modes))
        parts = [self.modes.coefficients(part) for part in functions.split(size)]
        x = torch.cat(parts)
        if not bool(x.isfinite().all()):
            row = int(x.isfinite().all(1).logical_not().nonzero()[0])
            raise ValueError(f"functions hold values that are not finite, in row {row} first")
        return x

    def _coefficients(self, functions: Tensor) -> Tensor:
        """About the mean."""
        _, mean, _ = self._fitted()
        x = self._raw_coefficients(functions)
        return x - mean.to(x)

    # The posterior

    def principal(self) -> Principal:
        """Frame and rates of the chain if the prior is Gaussian; else those of its Gaussian."""
        variance, _, cov = self._fitted()
        return principal(variance, cov, self.gram, self.obs_noise, self.t)

    def measure(self, functions: Tensor, *, noise: Noise) -> Tensor:
        """y = A f + obs_noise n for functions (batch, *shape): a measurement to try things on."""
        x = self._raw_coefficients(functions)
        y = self.observed.like(x).A(x)
        return y + self.obs_noise * noise.normal(y, "measurement")

    def posterior(
        self,
        y: Tensor,
        *,
        t: float = 0.0,
        slope: Tensor | float = 0.0,
        bias: Tensor | float = 0.0,
    ) -> Gaussian:
        """The exact posterior of a Gaussian prior, or at ``t`` the law its chain tends to.

        Args:
            y: one measurement.
            t, slope, bias: see `stationary`.

        Raises:
            ValueError: a prior that is not Gaussian.
        """
        if self.network is not None or self.potential is not None:
            raise ValueError("posterior: there is no closed form for a prior that is not Gaussian")
        variance, mean, cov = self._fitted()
        residual = self._measurement(y).to(mean) - self.observed.like(mean).A(mean[None])
        count = len(self.gram)
        projected = self.observed.like(mean).A_adjoint(residual)[0, :count]
        law = stationary(variance, cov, self.gram, self.obs_noise, projected, t, slope, bias)
        return Gaussian(mean + law.mean, law.cov)

    def drift(self, y: Tensor, prior: Field | None = None) -> PosteriorDrift:
        """The drift of the chain for a measurement: a field of coefficients about the mean.

        Args:
            y: one measurement, or one a chain.
            prior: a field that predicts S in the place of the model's.
        """
        _, mean, cov = self._fitted()
        y = self._measurement(y)
        forward = self.observed.like(y)
        residual = y - forward.A(mean.to(y)[None])
        gain = (cov / self.obs_noise**2).to(y)
        return PosteriorDrift(self.prior if prior is None else prior, gain, forward, residual)

    def _measurement(self, y: Tensor) -> Tensor:
        """``y`` with a batch dimension."""
        if not isinstance(y, Tensor) or not y.is_floating_point():
            raise TypeError(f"y must be a floating tensor, got {getattr(y, 'dtype', type(y))}")
        wanted = self.observed.like(y).A(y.new_zeros(1, len(self.modes)))
        if y.ndim == wanted.ndim - 1:
            y = y[None]
        if y.shape[1:] != wanted.shape[1:] or len(y) < 1:
            raise ValueError(
                f"y must have shape {tuple(wanted.shape[1:])}, with or without a batch dimension, "
                f"got {tuple(y.shape)}"
            )
        if not bool(y.isfinite().all()):
            raise ValueError("y holds values that are not finite")
        return y

    @torch.no_grad()
    def sample(
        self,
        y: Tensor,
        num: int = 64,
        *,
        noise: Noise,
        steps: int = 2_000,
        h: float = 0.1,
        exact: bool = True,
        metropolis: bool = False,
        burn: int | None = None,
        thin: int = 10,
        x0: Tensor | None = None,
        prior: Field | None = None,
        states: bool = True,
        progress: bool = False,
    ) -> Chains:
        """Chains of the posterior, side by side.

        Args:
            y: the measurement; one, or one a chain. The chains have its dtype: float64 where
                variances fall below 1e-30.
            num: chains.
            noise: keyed noise; chain i depends on row i of it only, and its modes on themselves.
            steps: Langevin steps of each chain.
            h: step. With C of the posterior the rate is 1: about 1 / h steps forget. The paper's
                0.5 with Euler's method makes variances 4/3 of the right ones; keep h max(rates)
                below 0.02 there, or take the exact step.
            exact: the exact step of the linear part; else Euler's method.
            metropolis: accept or reject every step, so that h leaves no bias.
            burn: steps before states are kept; a quarter by default.
            thin: every how many steps one is.
            x0: (num, *shape) functions to start from; by default draws of the Gaussian prior.
            prior: a field that predicts S in the place of the model's, `ScoreError` for instance.
            states: keep the states; without, their moments only.
            progress: show a bar over steps.

        Raises:
            TypeError: ``y`` is not floating.
            ValueError: ``y`` of another shape or not finite; a count not positive; nothing left
                after ``burn``; a step too large for Euler's method.
        """
        variance, mean, cov = self._fitted()
        y = self._measurement(y)
        burn = steps // 4 if burn is None else burn
        if min(num, steps, thin) < 1 or not 0 <= burn <= steps - thin:
            raise ValueError(
                "need num, steps and thin of at least 1 and 0 <= burn <= steps - thin, got "
                f"num={num}, steps={steps}, thin={thin}, burn={burn}"
            )
        if len(y) not in (1, num):
            raise ValueError(f"y must be one measurement or {num}, one a chain, got {len(y)}")
        drift = self.drift(y, prior)
        sampler = PreconditionedLangevin(h, self.principal(), exact=exact, metropolis=metropolis)
        like = y.new_zeros(num, len(self.modes))
        if x0 is None:
            x = variance.sqrt().to(like) * noise.normal(like, "start")
        else:
            x = self._coefficients(x0).to(like)
            if x.shape != like.shape:
                raise ValueError(f"x0 must hold {num} functions, got {len(x)}")
        record = Recorder(steps, burn, thin, states=states, progress=progress)
        pairs = torch.full((steps, 2), self.t, dtype=torch.float64)
        # a chain stays at one time, and asks nothing of the path
        path = coloured_path(cov if cov.ndim == 1 else cov.diagonal())
        simulate(x, pairs, sampler, path, drift, noise, record)
        draws = torch.stack(record.kept, 1) + mean.to(like) if states else None
        return Chains(
            self.modes,
            draws,
            record.mean + mean,
            record.variance,
            record.autocorrelation,
            sampler.acceptance,
        )

    # Files

    def _options(self) -> dict[str, Any]:
        return {
            "modes": {"shape": list(self.modes.shape), "kind": self.modes.kind},
            "obs_noise": self.obs_noise,
            "preconditioner": self.preset,
            "t": self.t,
            "decay": self.decay,
            "centre": self.centre,
            "times": [self.times.mean, self.times.std],
        }

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """One safetensors file: prior, network, C and A, and the statement of use.

        An operator is not saved: `load` wants it again.

        Raises:
            ValueError: nothing was fitted, or the prior is a potential, which is code.
        """
        self._fitted()
        if self.potential is not None:
            raise ValueError("a prior that is a potential is code, and cannot be saved")
        weights = {**self.state_dict(), "forward": self.observed.stored}
        header = {
            "system": SYSTEM,
            "network": None if self.network is None else describe(self.network),
            "operator": isinstance(self.observed, OnFunctions),
            "options": self._options(),
        }
        use = self.use and self.use.for_system(SYSTEM, self.out_of_scope)
        save_model(path, weights, header, use=use, overwrite=overwrite)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        network: nn.Module | None = None,
        forward: Any = None,
    ) -> Self:
        """The model that `save` wrote, on the CPU.

        Args:
            path: of the file.
            network: built as it was; needed only for a class that is not fluvial's.
            forward: the operator, if the model had one.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a model of this system, the weights do not fit, or an operator is
                missing.
        """
        weights, header = load_model(path, SYSTEM)
        options = dict(header["options"])
        modes = Modes(**options.pop("modes"))
        preset, times = options.pop("preconditioner"), LogitNormal(*options.pop("times"))
        diagonal = weights.pop("forward")
        if header["operator"] and forward is None:
            raise ValueError(f"{path} is of an operator, which is not in the file: pass forward=")
        if header["network"] is not None:
            network = rebuild(header["network"], modes) if network is None else network
        with warnings.catch_warnings():  # which were given when it was built
            warnings.simplefilter("ignore")
            model = cls(
                modes,
                forward if header["operator"] else diagonal,
                prior=network,
                preconditioner=weights["cov_noise"] if preset is None else preset,
                score_error=weights["score_error"],
                curvature=weights["curvature"],
                variance=weights["variance"],
                mean=weights["mean"],
                times=times,
                **options,
            )
        put_weights(model, weights, path)
        model.use = read_use(path)
        return model.eval()
