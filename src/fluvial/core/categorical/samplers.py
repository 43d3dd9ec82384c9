"""Samplers of any categorical path, for `fluvial.core.simulate.simulate`.

============================== ===========================================================
`simulate.Ancestral`           draws from the path's posterior: D3PM, MDLM, UDLM, DiGress; on a
                               `MixturePath`, the jump step of flow matching; where s > t, the
                               path's transition, so that pairs that fall, rise and fall again
                               are forward-backward corrections
`TauLeaping`                   rates held over a step; with a corrector in its rates
`Tweedie`                      the analytic step of SEDD, from a score
============================== ===========================================================

Samplers of absorbing paths are in `fluvial.core.categorical.masked`. All take a field of any kind
and convert its prediction, correct it by the steering, and return integer tokens. Those here use
the path's transition where s > t, and those of absorbing paths refuse such pairs.

Ancestral steps are exact at any step size for a prediction that stays as it is and tokens that are
independent given x_t; what is lost is the dependence between tokens that move in one step. An
absorbing path loses a share 1 / T of it in T equal steps of alpha.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor

from fluvial.core.categorical.draws import (
    Moves,
    at_class,
    double,
    move,
    real_number,
    real_tokens,
)
from fluvial.core.categorical.paths import CategoricalPath, MixturePath
from fluvial.core.categorical.predictions import (
    check_field,
    check_values,
    clean_of,
    tweedie_probs,
)
from fluvial.core.categorical.steering import Infilling
from fluvial.core.protocols import Run, Steering


def clean_at(x: Tensor, run: Run, t: Tensor | None = None) -> Tensor:
    """The clean prediction at (x, t), t that of the run by default, corrected by the steering.

    In the first step of a run the field is checked, and the values of what is to be converted.
    """
    time = run.t if t is None else t
    first = run.k == 0
    if first:
        check_field(run.field, cast(CategoricalPath, run.path))
    clean = clean_of(run.field, x, time, run.path, run.cond, check=first)
    return cast(Tensor, run.clean(clean, x))


class TauLeaping:
    """Rates are held over the step from t to s = t - h; a token jumps once at most.

        it leaves with probability 1 - exp(-h R),  R the sum of its rates, for y ∝ R_y

    with the rates of the path (Campbell et al., NeurIPS 2022; Euler's step of discrete flow
    matching). First order. Where alpha(t) = 0, at which rates may be infinite, and where s = 0 the
    step is the path's posterior.

    With a corrector a(t), rates to the data are multiplied by 1 + a and rates a times those of the
    noising are added: both together leave the law of x_t as it is, forget earlier errors, and need
    shorter steps (the corrector of discrete flow matching; to first order in h, the remasking of
    `fluvial.core.categorical.masked.Remasking` with sigma = a beta h). On a `MixturePath` with
    ``x1`` among the conditions the rates to the source are those to x_1.

    Args:
        form: "exponential" as above, or "linear": it leaves with probability min(h R, 1).
        corrector: a number c for a(t) = c alpha(t) drop(t), which vanishes at both ends, or a
            function of t, a number.

    Raises:
        ValueError: ``form`` is unknown, or a number is negative or not finite; in a step, a path
            without rates, a field made for another kind of path, or a corrector with ``x1`` on a
            path that is no `MixturePath`.
    """

    def __init__(
        self,
        form: Literal["exponential", "linear"] = "exponential",
        corrector: float | Callable[[float], float] = 0.0,
    ) -> None:
        if form not in ("exponential", "linear"):
            raise ValueError(f"form must be exponential or linear, got {form!r}")
        if isinstance(corrector, type) or not callable(corrector):
            real_number("corrector", corrector)
        if not callable(corrector) and not 0 <= corrector < math.inf:
            raise ValueError(f"corrector must be finite and not negative, got {corrector}")
        self.form, self.corrector = form, corrector

    def start(self, x: Tensor) -> None:
        return None

    def step(self, x: Tensor, memory: Any, run: Run) -> tuple[Tensor, Any, Tensor]:
        if not isinstance(run.path, CategoricalPath):
            raise ValueError(f"TauLeaping needs a CategoricalPath, got {run.path!r}")
        path = run.path
        clean = clean_at(x, run)
        if run.s > run.t:
            return path.transition(x, run.t, run.s, run.noise, **run.cond), memory, clean
        if run.s == 0 or float(path.alpha(run.t)) == 0:
            return path.posterior(x, clean, run.t, run.s, run.noise, **run.cond), memory, clean
        real = real_tokens(x, run.cond.get("mask"))
        moves = self.moves(real, clean, run.t, run.s, path, run.cond.get("x1"))
        return path.draw(x, moves, clean, run.noise, "leap", **run.cond), memory, clean

    def moves(
        self,
        x: Tensor,
        clean: Tensor,
        t: Tensor,
        s: Tensor,
        path: CategoricalPath,
        x1: Tensor | None = None,
    ) -> Moves:
        """What becomes of every token in the step; ``x1`` the end that a corrector jumps to."""
        moves = path.rates(x, clean, t)
        strength = self._strength(t, path)
        if strength:
            moves = _corrected(moves, x, clean, t, path, strength, x1)
        h = (t - s).to(x.device)
        leave = h * moves.leave
        leave = -torch.expm1(-leave) if self.form == "exponential" else leave.clamp(max=1)
        return Moves(leave, moves.on_clean, moves.on_source)

    def _strength(self, t: Tensor, path: CategoricalPath) -> float:
        if callable(self.corrector):
            strength = real_number("corrector(t)", self.corrector(float(t)))
            if not 0 <= strength < math.inf:
                raise ValueError(f"corrector(t) must be finite and not negative, got {strength}")
            return strength
        return self.corrector * float(path.alpha(t) * path.drop(t))


def _corrected(
    moves: Moves,
    x: Tensor,
    clean: Tensor,
    t: Tensor,
    path: CategoricalPath,
    strength: float,
    x1: Tensor | None,
) -> Moves:
    """(1 + a) rates to the data and a rates to the source, as one list of rates."""
    if x1 is not None and not isinstance(path, MixturePath):
        raise ValueError(f"a corrector towards x1 needs a MixturePath, got {path!r}")
    to_source = strength * path.noising(x, t)
    pi = path.source_at(x, x1) if isinstance(path, MixturePath) else path.source_at(x)
    leave = (1 + strength) * moves.leave + to_source * (1 - pi)
    # the parts of the weights must be in units of rates, where moves of a path only fix ratios
    one = torch.ones(x.shape, dtype=double(x), device=x.device)
    on_clean = one * 0.0 if moves.on_clean is None else one * moves.on_clean.to(one)
    on_source = one * 0.0 if moves.on_source is None else one * moves.on_source.to(one)
    total = on_clean * (1 - at_class(clean, x)) + on_source * (1 - pi)
    unit = (1 + strength) * moves.leave / torch.where(total > 0, total, 1.0)
    return Moves(leave, on_clean * unit, on_source * unit + to_source)


class Tweedie:
    """The analytic step of SEDD from a field that predicts a score (Lou et al., ICML 2024).

    With a score that belongs to a clean law it is the ancestral step; of a learned score that does
    not, the map of the step is inverted on the score itself. Where s = 0 too.

    Raises:
        ValueError: in a step, a field that does not predict a score, or was made for another kind
            of path, or, in the first, predicts numbers below 0; alpha(t) = 0; steering that
            corrects clean predictions, which are not used here (`Infilling` on absorbing paths is).
    """

    def start(self, x: Tensor) -> None:
        return None

    def step(self, x: Tensor, memory: Any, run: Run) -> tuple[Tensor, Any, Tensor | None]:
        if run.field.predicts != "score":
            raise ValueError(f"Tweedie needs a field of kind 'score', got {run.field.predicts!r}")
        if not isinstance(run.path, CategoricalPath):
            raise ValueError(f"Tweedie needs a CategoricalPath, got {run.path!r}")
        path = run.path
        if run.s > run.t:
            return path.transition(x, run.t, run.s, run.noise, **run.cond), memory, None
        score, mask = run.field(x, run.t, **run.cond), run.cond.get("mask")
        if run.k == 0:
            self._check_steering(run.steer, path)
            check_field(run.field, path)
            check_values(score, "score", x, path, mask)
        real = real_tokens(x, mask)
        probs = tweedie_probs(score, real, run.t, run.s, path)
        leave = 1 - probs.gather(-1, real.unsqueeze(-1)).squeeze(-1)
        moves = Moves(leave, torch.ones(()), None)
        x = move(x, moves, probs, path.pi, path.states, run.noise, "tweedie", mask)
        return x, memory, probs[..., : path.classes]

    @staticmethod
    def _check_steering(steer: Steering, path: CategoricalPath) -> None:
        if getattr(steer.clean, "__func__", None) is Steering.clean:
            return
        if not (path.absorbing and isinstance(steer, Infilling)):  # there it acts after each step
            raise ValueError(
                f"Tweedie steps the score, and would ignore what {type(steer).__name__} makes of "
                "clean predictions; take Ancestral or TauLeaping"
            )
