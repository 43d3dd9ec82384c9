"""What a step of CaDDi sees: which levels, in which order, and calls of a network that go on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fluvial.core.categorical.predictions import network_time
from fluvial.networks.causal import CausalTransformer, cache_length, cut, grow

if TYPE_CHECKING:
    from fluvial.language.caddi.model import CaDDi

Kept = Literal["last", "spread"]


def kept_levels(
    k: int, steps: int, keep: int | None = None, kept: Kept = "last"
) -> tuple[int, ...]:
    """The levels that level k sees, the noisiest first and k last.

    All of T, ..., k without ``keep``; else at most ``keep`` of them: the nearest ("last", latent
    truncation), or k, T and what lies evenly between ("spread", re-composition).
    """
    count = steps - k + 1
    if keep is None or count <= keep:
        return tuple(range(steps, k - 1, -1))
    if kept == "last" or keep == 1:
        return tuple(range(k + keep - 1, k - 1, -1))
    gaps = keep - 1
    return tuple(k + (2 * (steps - k) * j + gaps) // (2 * gaps) for j in range(gaps, -1, -1))


def block_mask(
    queries: Sequence[int],
    keys: Sequence[int],
    length: int,
    sees: Callable[[int], Collection[int]],
    device: torch.device | str = "cpu",
) -> Tensor:
    """(queries L, keys L) bool: a token sees all tokens of the levels that its own level sees."""
    rows = [[key in sees(query) for key in keys] for query in queries]
    if all(map(all, rows)):  # nothing to bring to the device
        shape = len(queries) * length, len(keys) * length
        return torch.ones(shape, dtype=torch.bool, device=device)
    table = torch.tensor(rows, device=device)
    return table.repeat_interleave(length, 0).repeat_interleave(length, 1)


class Calls:
    """Calls of a model's network that go on with rows of tokens: their cache, label and guidance.

    With guidance every row goes in twice, one after the other, with its label and with none, and

        ln p = ln p_none + scale (ln p_label - ln p_none), normalised

    as `fluvial.core.categorical.steering.TokenGuidance`.

    Args:
        model: whose network it is.
        label: (batch,) or None.
        guidance: the scale; 1 is the labelled network, called alone.
        keep: whether more calls follow, and keys and values are kept.
    """

    def __init__(
        self, model: CaDDi, label: Tensor | None, guidance: float = 1.0, *, keep: bool = True
    ) -> None:
        self.model, self.guidance, self.keep = model, guidance, keep
        self.twice = guidance != 1 and label is not None
        if label is not None and self.twice:
            none = torch.full_like(label, model.network.num_classes)
            label = torch.stack([label, none], 1).flatten()
        self.label = label
        self.cache: dict[str, Tensor] = {}
        self.place: int | None = None
        self.levels: tuple[int, ...] = ()
        """Of the blocks in the cache, in its order; what follows them is cut off before more."""

    def __call__(
        self,
        x: Tensor,
        levels: Tensor,
        positions: Tensor,
        *,
        allowed: Tensor | None = None,
        last: int | None = None,
    ) -> Tensor:
        """(batch, n or last, V) logarithms of the probabilities of clean tokens."""
        model = self.model
        if self.twice:
            x = x.repeat_interleave(2, 0)
            levels, positions = (
                value.repeat_interleave(2, 0) if value.ndim == 2 else value
                for value in (levels, positions)
            )
            if allowed is not None and allowed.ndim == 3:
                allowed = allowed.repeat_interleave(2, 0)
        options: dict[str, Any] = {}
        if self.label is not None:
            options["label"] = self.label
        if allowed is not None:
            options["allowed"] = allowed
        if last is not None:
            options["last"] = last
        if self.keep:
            options["cache"] = self.cache
        if self.place is not None:
            options["place"] = self.place
            self.place += x.shape[1]
        t = levels / model.steps
        t = network_time(model.network, t if t.ndim == 2 else t[None], x)
        out = model.network(x, t, levels=levels, positions=positions, **options)
        if self.keep:
            out, self.cache = out
        n = x.shape[1] if last is None else last
        if out.shape[:-1] != (len(x), n) or out.shape[-1] < model.classes:
            raise ValueError(
                f"the network must return {(len(x), n, model.classes)} or more logits, got "
                f"{tuple(out.shape)}"
            )
        out = out[..., : model.classes]  # the mask symbol is no clean token
        log_p = (out if out.dtype == torch.float64 else out.float()).log_softmax(-1)
        if not self.twice:
            return log_p
        one, none = log_p[0::2], log_p[1::2]
        return (none + self.guidance * (one - none)).log_softmax(-1)

    def blocks(self, x: Tensor, new: Sequence[int]) -> Tensor:
        """Whole levels at once, each seeing what `kept_levels` says, itself included.

        Args:
            x: (batch, blocks, L) tokens of the levels ``new``, which fall.

        Returns:
            (batch, blocks, L, V) log-probabilities of the clean tokens at the same positions.
        """
        model, length = self.model, self.model.length
        here = self.levels + tuple(new)
        allowed = block_mask(new, here, length, model.context, x.device)
        levels, positions = places(new, length, x.device)
        log_p = self(x.flatten(1), levels, positions, allowed=allowed)
        if self.keep:
            needed = {s for j in range(1, new[-1]) for s in model.context(j)}
            self._drop([s in needed for s in here])
            self.levels = tuple(s for s in here if s in needed)
        return log_p.unflatten(1, (len(new), length))

    def _drop(self, stays: list[bool]) -> None:
        """Takes levels that nothing will look at out of the cache."""
        length = self.model.length
        first = stays.index(True) if any(stays) else len(stays)
        if all(stays[first:]):  # the oldest go: nothing to copy
            self.cache = {name: leaf[:, first * length :] for name, leaf in self.cache.items()}
            return
        index = torch.tensor(stays).repeat_interleave(length).nonzero().squeeze(1)
        self.cache = {
            name: leaf.index_select(1, index.to(leaf.device)) for name, leaf in self.cache.items()
        }

    def tail(self, levels: Tensor, k: int, tokens: Tensor, at: int) -> Tensor:
        """The prompt x_{k:T}, as far as it is kept and not in the cache, and tokens after it.

        Args:
            levels: (batch, T, L), level k at index k - 1.
            tokens: (batch, n), which stand at the level ``at`` and the positions 0 .. n - 1.

        Returns:
            (batch, n + 1, V) log-probabilities of the tokens after the prompt, after each next.
        """
        model, length, n = self.model, self.model.length, tokens.shape[1]
        if model.plain:
            # T = 1: the prompt would be a constant, and one symbol stands for it
            start = torch.full_like(levels[:, 0, :1], model.start)
            x = torch.cat([start, tokens], 1)
            positions = torch.arange(n + 1, device=x.device)
            self.prompt = 1
            return self(x, torch.zeros_like(positions), positions)
        want = model.context(k)
        common = 0
        while common < min(len(want), len(self.levels)) and want[common] == self.levels[common]:
            common += 1
        self.cache = cut(self.cache, common * length)
        new = want[common:]
        x = torch.cat([*(levels[:, s - 1] for s in new), tokens], 1)
        level, positions = places(new, length, x.device, tail=(at, n))
        self.levels, self.prompt = want, len(want) * length
        return self(x, level, positions, last=n + 1)

    def grow(self, room: int) -> None:
        """Room for so many tokens in the cache, where the network can use it."""
        network = getattr(self.model.network, "_orig_mod", self.model.network)
        if isinstance(network, CausalTransformer):
            self.place = cache_length(self.cache)
            self.cache = grow(self.cache, room)

    def take(self, rows: Tensor | slice) -> None:
        """Goes on with these rows alone."""
        if self.twice:
            if isinstance(rows, slice):
                rows = slice(2 * rows.stop)
            else:
                rows = torch.stack([2 * rows, 2 * rows + 1], 1).flatten()
        self.cache = {name: leaf[rows] for name, leaf in self.cache.items()}
        self.label = None if self.label is None else self.label[rows]


def places(
    levels: Sequence[int],
    length: int,
    device: torch.device,
    tail: tuple[int, int] = (0, 0),
) -> tuple[Tensor, Tensor]:
    """(level, position) of every token of the blocks, and of a tail (level, count) after them."""
    at, count = tail
    numbers = [*levels, at] if count else [*levels]
    positions = torch.arange(length, device=device).repeat(len(numbers))
    level = torch.tensor(numbers, device=device).repeat_interleave(length)
    if count:
        level, positions = (v[: len(levels) * length + count] for v in (level, positions))
    return level, positions
