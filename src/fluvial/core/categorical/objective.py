"""Learning a network of tokens along a categorical path: D3PM, MDLM, SEDD, UDLM, flow matching."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from fluvial.core.arguments import kind_of, whole_number
from fluvial.core.categorical.draws import check_noise, real_number, real_tokens
from fluvial.core.categorical.losses import (
    continuous_terms,
    discrete_terms,
    flow_terms,
    negative_log,
    score_entropy_terms,
)
from fluvial.core.categorical.matrices import MatrixPath, TokenPath
from fluvial.core.categorical.paths import CategoricalPath, MixturePath
from fluvial.core.categorical.predictions import TokenField, log_clean, log_score, logits_of
from fluvial.core.protocols import Noise, Objective, left_broadcast
from fluvial.core.time import Times, Uniform

Loss = Literal["elbo", "flow", "cross_entropy"]


class TokenMatching(Objective):
    """Learns what the tokens of data are from noised ones, by a bound or by cross-entropy.

        loss = mean over rows of sum_i terms_i(x_t, t) / (tokens of the row * density of t)

    ================ ============== ========= ======================================
    method           loss           predicts  other
    ================ ============== ========= ======================================
    D3PM             elbo           cavity    steps=T; aux=.001 images, .01 text
    MDLM, MD4        elbo           clean     absorbing
    SEDD             elbo           score
    UDLM             elbo           cavity    uniform
    flow matching    flow           clean     or cross_entropy
    DiGress          cross_entropy  clean     marginal
    ================ ============== ========= ======================================

    All are least at the exact posterior, so that one network serves every sampler; they weigh times
    differently. Padding and tokens that are certain cost nothing.

    Batches hold ``"x"``, tokens (batch, *event); ``"mask"``, bool, False for padding, which goes to
    the network too (padding holds any symbol that the network takes); ``"x1"``, if the source end
    is given; and conditions, which go to the network.

    Args:
        network: called as ``network(x, t, **conditions)``, t (batch,), returns (batch, *event, V or
            more) logits; those beyond V are not used.
        path: how tokens are noised; of a `MatrixPath`, ``steps`` must divide its own.
        loss: "elbo", the discrete bound if ``steps`` is given and the continuous one if not;
            "flow", that of the mixture path; or "cross_entropy", unweighted, of all tokens that are
            not visible on an absorbing path.
        predicts: what the logits are of: "clean", "cavity" or, with "elbo" in continuous time,
            "score".
        steps: T of discrete time: t = k / T with k uniform.
        aux: weight of the cross-entropy of the network's own prediction at all tokens, added to the
            loss (the hybrid loss of D3PM).
        times: law of t; for the bounds one with a density, such as `Uniform`, ``Stratified()``,
            `UniformDrop` or `LogDrop`.
        drop: the chance that a row's conditions are replaced by ``null``, for guidance.
        null: the condition that stands for none, by name; by default, for a network with
            ``num_classes``, ``{"label": num_classes}``.

    Raises:
        ValueError: an argument is none of these, or two do not go together; in a call, what
            `forward` says.
        TypeError: an argument is of another type, or a class in the place of an instance.
    """

    def __init__(
        self,
        network: nn.Module,
        path: TokenPath,
        *,
        loss: Loss = "elbo",
        predicts: str = "clean",
        steps: int | None = None,
        aux: float = 0.0,
        times: Times | None = None,
        drop: float = 0.0,
        null: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(network, nn.Module):
            raise TypeError(f"network must be a module, got {kind_of(network)}")
        if steps is not None:
            steps = whole_number("steps", steps)
        real_number("aux", aux)
        real_number("drop", drop)
        if times is not None and (isinstance(times, type) or not callable(times)):
            raise TypeError(
                f"times must be a law of times, such as Stratified(), got {kind_of(times)}"
            )
        if null is not None and not isinstance(null, Mapping):
            raise TypeError(f"null must map names to conditions, got {kind_of(null)}")
        if not isinstance(path, CategoricalPath | MatrixPath):
            raise TypeError(f"path must be a CategoricalPath or a MatrixPath, got {path!r}")
        if loss not in ("elbo", "flow", "cross_entropy"):
            raise ValueError(f"loss must be elbo, flow or cross_entropy, got {loss!r}")
        if predicts not in ("clean", "cavity", "score"):
            raise ValueError(f"predicts must be clean, cavity or score, got {predicts!r}")
        if predicts == "score" and (loss != "elbo" or steps is not None or aux):
            raise ValueError(
                "a score is learned by loss='elbo' in continuous time, without aux; got "
                f"loss={loss!r}, steps={steps}, aux={aux}"
            )
        if isinstance(path, MatrixPath) and (loss != "elbo" or not steps or path.steps % steps):
            raise ValueError(
                f"{path} goes with loss='elbo' and steps that divide its own, got loss={loss!r} "
                f"and steps={steps}"
            )
        jumps = isinstance(path, MixturePath) and not path.absorbing
        if predicts == "score" and jumps:
            raise ValueError(
                f"predicts='score' goes with the bound of a diffusion, got the jumps of {path}"
            )
        if steps is not None and (steps < 1 or loss != "elbo"):
            raise ValueError(f"steps >= 1 goes with loss='elbo', got {steps} and {loss!r}")
        if not 0 <= aux < float("inf"):
            raise ValueError(f"aux must be finite and not negative, got {aux}")
        if null is None:
            count = getattr(network, "num_classes", 0)
            null = {"label": count} if count else {}
        if not 0 <= drop < 1 or (drop > 0 and not null):
            raise ValueError(f"need 0 <= drop < 1, and null if drop > 0, got {drop} and {null}")
        self.network, self.path, self.predicts = network, path, predicts
        self.loss, self.steps, self.aux = loss, steps, aux
        self.times = Uniform() if times is None else times
        law = getattr(self.times, "law", self.times)  # of Stratified
        self._density = getattr(law, "density", None)
        if self._density is None and (loss != "cross_entropy" or steps is not None):
            raise ValueError(f"times of a bound need a density(t), got {type(law).__name__}")
        if steps is not None and law != Uniform():
            raise ValueError(f"discrete steps are drawn uniformly: times must be so, got {law}")
        self.drop, self.null = drop, dict(null)
        if loss == "cross_entropy":
            self.name: str = loss
        elif loss == "flow" or jumps:
            self.name = "elbo_flow" if steps is None else f"elbo_flow_T{steps}"
        else:
            self.name = "elbo_continuous" if steps is None else f"elbo_T{steps}"

    @property
    def field(self) -> TokenField:
        """What was learned, as clean probabilities."""
        return TokenField(self.network, self.path, self.predicts)

    def forward(self, batch: Mapping[str, Tensor], noise: Noise) -> dict[str, Tensor]:
        """The loss of one batch.

        Returns:
            ``loss``, (); the bound's own name ("elbo_continuous", "elbo_T1000"; of a mixture path
            "elbo_flow", "elbo_flow_T1000"; or "cross_entropy") with nats a token of every row,
            without ``aux`` and the prior's term; ``t``, the times of the rows.

        Raises:
            ValueError: no ``"x"``, no tokens in it or some out of range; a condition to drop that
                the batch does not have; logits of another shape.
            TypeError: ``batch`` is no mapping, ``"x"`` are no int64 tokens.
        """
        if not isinstance(batch, Mapping):
            raise TypeError(f"batch must map names to tensors, got {kind_of(batch)}")
        check_noise(noise)
        if "x" not in batch:
            raise ValueError(f"batch must hold 'x', got {', '.join(batch) or 'nothing'}")
        x0, mask, path = batch["x"], batch.get("mask"), self.path
        path.check_data(x0, mask)
        if not x0.numel():
            raise ValueError(f"x must hold tokens, got shape {tuple(x0.shape)}")
        cond = {name: value for name, value in batch.items() if name not in ("x", "x1")}
        t = self.times(torch.empty(len(x0), dtype=torch.float64, device=x0.device), noise)
        s = t
        if self.steps is not None:
            k = (t * self.steps).floor().clamp(max=self.steps - 1)
            t, s = (k + 1) / self.steps, k / self.steps
        cond = self._dropped(cond, t, noise)
        x = cast(Tensor, path.sample(x0, t, noise, batch.get("x1"), mask=mask).x)
        logits = logits_of(self.network, x, t, path, cond)
        x, x0 = real_tokens(x, mask), real_tokens(x0, mask)
        terms = self._terms(logits, x, x0, t, s)
        nats = _per_token(terms, mask)
        if self.steps is not None:
            nats = nats * self.steps
        elif self.loss != "cross_entropy":
            assert self._density is not None
            nats = nats / self._density(t).to(nats)
        loss = nats
        if self.aux:
            own = log_clean(logits, "clean", x, t, path)
            loss = loss + self.aux * _per_token(negative_log(own, x0), mask)
        return {"loss": loss.mean(), self.name: nats.detach(), "t": t}

    def _terms(self, logits: Tensor, x: Tensor, x0: Tensor, t: Tensor, s: Tensor) -> Tensor:
        if self.predicts == "score":
            score = log_score(logits, x, t, cast(CategoricalPath, self.path))
            return score_entropy_terms(cast(CategoricalPath, self.path), score, x, x0, t)
        log_p = log_clean(logits, self.predicts, x, t, self.path)
        if self.steps is not None:
            return discrete_terms(self.path, log_p, x, x0, t, s)
        path = cast(CategoricalPath, self.path)
        match self.loss:
            case "elbo":
                return continuous_terms(path, log_p, x, x0, t)
            case "flow":
                return flow_terms(path, log_p, x, x0, t)
        terms = negative_log(log_p, x0)
        return torch.where(path.masked(x), terms, 0) if path.absorbing else terms

    def _dropped(self, cond: dict[str, Tensor], t: Tensor, noise: Noise) -> dict[str, Tensor]:
        if self.drop == 0:
            return cond
        missing = sorted(set(self.null) - set(cond))
        if missing:
            raise ValueError(f"batch lacks the conditions to drop: {', '.join(missing)}")
        rows = noise.uniform(t, "drop") < self.drop
        for name, none in self.null.items():
            value = cond[name]
            none = torch.as_tensor(none).to(value)
            cond[name] = torch.where(left_broadcast(rows, value), none, value)
        return cond


def _per_token(terms: Tensor, mask: Tensor | None) -> Tensor:
    """(batch,) means over the tokens that are not padding."""
    if mask is None:
        return terms.flatten(1).mean(1)
    real = mask.flatten(1)
    return torch.where(real, terms.flatten(1), 0).sum(1) / real.sum(1).clamp(min=1)
