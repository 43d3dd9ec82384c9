"""Undirected edges: noised and drawn as an upper triangle, symmetric for the network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fluvial.core.categorical.bounds import elbo
from fluvial.core.categorical.edges import pair_mask, symmetric, upper_triangle
from fluvial.core.categorical.paths import CategoricalPath
from fluvial.core.noise import KeyedNoise
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.time import uniform_grid

from .categorical_toys import SOURCES, time
from .toys import assert_shares

NOISE = KeyedNoise(2)


def graphs(rows: int, n: int) -> Tensor:
    """Symmetric edge types 0 .. 2 with an empty diagonal."""
    edges = (torch.arange(rows * n * n).reshape(rows, n, n) * 7919 % 13) % 3
    edges = edges.triu(1)
    return edges + edges.mT


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_there_and_back(n: int) -> None:
    edges = graphs(4, n)
    upper = upper_triangle(edges)
    assert upper.shape == (4, n * (n - 1) // 2)
    if n > 1:
        assert torch.equal(symmetric(upper), edges)
    square = symmetric(upper, 5)
    assert torch.equal(square, square.mT)
    assert bool((square.diagonal(dim1=1, dim2=2) == 5).all())
    logits = torch.randn(4, n, n, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(upper_triangle(logits)[:, :1], logits[:, :1, 1:2].squeeze(1))
    both = upper_triangle(logits + logits.transpose(1, 2))
    assert torch.equal(both, upper_triangle(logits) + upper_triangle(logits.transpose(1, 2)))


@pytest.mark.parametrize("source", SOURCES)
def test_graphs_stay_undirected_from_noise_to_samples(source: str) -> None:
    path, n = CategoricalPath(3, SOURCES[source]), 4
    edges = graphs(200, n)
    nodes = torch.arange(n) < 3 + torch.arange(200)[:, None] % 2
    mask, x0 = pair_mask(nodes), upper_triangle(edges)
    assert mask.shape == x0.shape and mask.sum(1).tolist() == [3, 6] * 100
    draw = path.sample(x0, time(0.6), NOISE, mask=mask)
    assert torch.equal(draw.x[~mask], x0[~mask]) and not torch.equal(draw.x, x0)

    class Network:
        """Sees squares, whose entries must agree; the truth with probability .9."""

        predicts = "clean"

        def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
            square = symmetric(x)
            assert torch.equal(square, square.mT)
            assert not bool(square.diagonal(dim1=1, dim2=2).any())
            p = torch.nn.functional.one_hot(edges, 3) * 0.85 + 0.05
            return upper_triangle(p.double())

    start = path.source(x0, NOISE, mask=mask)
    out = simulate(start, uniform_grid(5), Ancestral(), path, Network(), NOISE, mask=mask)
    assert torch.equal(symmetric(out), symmetric(out).mT)
    right = (out == x0)[mask]
    # a fraction of each path's posterior is exact for a prediction that stays as it is
    if path.absorbing:
        assert_shares(right.long(), torch.tensor([0.1, 0.9]).double())
    assert float(right.double().mean()) > 0.8
    bound = elbo(path, Network(), x0, NOISE, "discrete", steps=3, mask=mask)
    assert bound.tokens.tolist() == [3, 6] * 100 and bool(bound.nats.isfinite().all())


def test_bad_edges_are_refused() -> None:
    with pytest.raises(ValueError, match="must be symmetric"):
        upper_triangle(torch.arange(9).reshape(1, 3, 3))
    with pytest.raises(ValueError, match=r"\(batch, n, n"):
        upper_triangle(torch.zeros(2, 3, 4))
    for shape in ((2, 2), (2, 5), (3,)):
        with pytest.raises(ValueError, match="upper must have shape"):
            symmetric(torch.zeros(shape))
    with pytest.raises(ValueError, match="nodes must be bool"):
        pair_mask(torch.ones(2, 3))
