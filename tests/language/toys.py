"""A network that knows the law of the data, and sees what attention lets it see."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fluvial.core.noise import KeyedNoise
from fluvial.language import CaDDi
from fluvial.language.caddi import IndependentLevels
from fluvial.networks import CausalTransformer

NOISE = KeyedNoise(7)


def sequences(symbols: int, length: int) -> Tensor:
    """All of them, (symbols^length, length)."""
    return torch.tensor(list(itertools.product(range(symbols), repeat=length)))


def law(classes: int, length: int, seed: int = 0) -> Tensor:
    """A law of all sequences with every probability positive, and tokens that depend."""
    u = KeyedNoise(seed).uniform(torch.empty(1, classes**length, dtype=torch.float64))
    p = (0.05 + u[0]) ** 3
    return p / p.sum()


class Exact(nn.Module):
    """ln q(x_0^i | the tokens that are seen), by the sum over all sequences.

    Of a block the i is the token's own position, of others that of the next.
    """

    num_classes = 0

    def __init__(self, p: Tensor, process: IndependentLevels, length: int, variant: str) -> None:
        super().__init__()
        self.p, self.process, self.variant = p, process, variant
        self.vocabulary = process.classes + 1
        self.sequences = sequences(process.classes, length)
        self.one_hot = functional.one_hot(self.sequences, process.classes).double()
        # where T = 1 the first symbol is the start, and tokens are one place on
        self.shift = int(variant == "ar" and process.steps == 1)

    def forward(
        self,
        x: Tensor,
        t: Tensor | None = None,
        *,
        levels: Tensor,
        positions: Tensor,
        allowed: Tensor | None = None,
        cache: dict[str, Tensor] | None = None,
        last: int | None = None,
    ) -> Any:
        n, m = x.shape
        now = torch.stack([x, levels.expand(n, m), positions.expand(n, m)], -1)[:, :, None]
        past = (cache or {}).get("keys.0", now[:, :0])
        seen = torch.cat([past, now], 1)
        if allowed is None:
            column = torch.arange(seen.shape[1])
            allowed = column <= column[past.shape[1] :, None]
        likelihood = self._log_likelihood(*seen.squeeze(2).unbind(-1))
        allowed = allowed.expand(n, m, -1).unsqueeze(-1)
        score = self.p.log() + torch.where(allowed, likelihood[:, None], 0.0).sum(2)
        post = score.softmax(-1)
        place = positions.expand(n, m) - self.shift
        if self.variant != "block":
            place = (place + 1).clamp(max=self.sequences.shape[1] - 1)
            if last is not None:
                post, place = post[:, m - last :], torch.arange(last).expand(n, last)
        out = torch.einsum("nqs,nqsv->nqv", post, self.one_hot.transpose(0, 1)[place]).log()
        return out if cache is None else (out, {"keys.0": seen})

    def _log_likelihood(self, x: Tensor, level: Tensor, position: Tensor) -> Tensor:
        """(batch, tokens, sequences): ln q of each token given each sequence."""
        process, place = self.process, position - self.shift
        data = self.sequences.T[place.clamp(min=0)]
        same = (x.unsqueeze(-1) == data).double()
        alpha = process.alphas[level].unsqueeze(-1)
        if process.source == "absorbing":
            q = torch.where((x == process.classes).unsqueeze(-1), 1 - alpha, alpha * same)
        else:
            q = alpha * same + (1 - alpha) / process.classes
        q = torch.where(level.unsqueeze(-1) == 0, same, q)
        return torch.where((place < 0).unsqueeze(-1), 1.0, q).log()


def exact(
    p: Tensor, classes: int, length: int, steps: int, source: Any = "absorbing", **options: Any
) -> CaDDi:
    """The model whose network is `Exact`."""
    process = IndependentLevels(classes, steps=steps, source=source, alphas=options.get("alphas"))
    variant = "augmented" if options.get("augmented") else options.get("variant", "block")
    network = Exact(p, process, length, variant)
    return CaDDi(
        network, classes=classes, length=length, steps=steps, source=source, **options
    ).eval()


def trajectories(process: IndependentLevels, length: int) -> Iterator[Tensor]:
    """All levels x_1 .. x_T there are: (T, length)."""
    for flat in itertools.product(range(process.states), repeat=process.steps * length):
        yield torch.tensor(flat).reshape(process.steps, length)


def chances(process: IndependentLevels, x0: Tensor, levels: Tensor) -> Tensor:
    """q(x_{1:T} | x_0) of each row."""
    same = (levels == x0[:, None]).double()
    alpha = process.alphas[1:, None]
    if process.source == "absorbing":
        q = torch.where(levels == process.classes, 1 - alpha, alpha * same)
    else:
        q = alpha * same + (1 - alpha) / process.classes
    return q.flatten(1).prod(1)


def expected_bound(model: CaDDi, p: Tensor) -> tuple[float, float]:
    """(the bound, the sum of alpha_{k-1} times cross-entropies), means over data and levels."""
    data = sequences(model.classes, model.length)
    paths = torch.stack(list(trajectories(model.levels, model.length)))
    rows, index = (
        v.flatten()
        for v in torch.meshgrid(torch.arange(len(data)), torch.arange(len(paths)), indexing="ij")
    )
    weight = p[rows] * chances(model.levels, data[rows], paths[index])
    some = weight > 0
    x0, levels, weight = data[rows][some], paths[index][some], weight[some]
    bound = (weight * (model.nats(x0, levels).sum(1) + model.levels.prior(x0))).sum()
    plain = model.cross_entropies(x0, levels).sum(2) @ model.levels.alphas[:-1]
    return float(bound), float((weight * plain).sum())


def random_network(**changes: Any) -> CausalTransformer:
    """With every weight moved away from its start, in double precision."""
    options = {"vocabulary": 6, "width": 16, "depth": 2, "heads": 2, "levels": "split"}
    network = CausalTransformer(**(options | changes)).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter += 0.3 * NOISE.normal(parameter.reshape(1, -1), name).view_as(parameter)
    return network


def random_model(**options: Any) -> CaDDi:
    """Five classes, rows of six, four levels."""
    changes = options.pop("network", {})
    options = {"classes": 5, "length": 6, "steps": 4} | options
    return CaDDi(random_network(**changes), **options).eval()


def tokens(rows: int = 5, length: int = 6, classes: int = 5, tag: str = "x") -> Tensor:
    return (NOISE.uniform(torch.empty(rows, length), tag) * classes).long()
