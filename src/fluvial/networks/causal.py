"""The decoder-only transformer of language models, with a key-value cache that is a value.

Pre-norm blocks with RMSNorm (Zhang and Sennrich, 2019), rotary positions (Su et al., 2021), SwiGLU
(Shazeer, 2020) and, as an option, grouped-query attention (Ainslie et al., EMNLP 2023), as in
Touvron et al., "LLaMA", 2023. For sequences of sequences, such as the noise levels of a diffusion,
a token may have a second place beside its position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import skip_init

from fluvial.networks.layers import (
    LabelEmbedding,
    RMSNorm,
    ScalarEmbedding,
    check_heads,
    initialise,
    linear,
    look_up,
    recompute,
    rotate,
)


class CausalTransformer(nn.Module):
    """Logits of the next token, called as ``network(x, t, label=, mask=, cache=)``.

        z <- z + W attend(norm(z));  z <- z + W2 (silu(W1 norm(z)) * W3 norm(z))

    in every block, without biases. With ``time`` or ``num_classes`` every norm is modulated and
    every branch gated by linear maps of SiLU(emb(t) + emb(label)) that start at zero, as in
    `fluvial.networks.DiT`.

    With ``levels`` a token stands at a position i of a level k, and pair j of a head is turned by

        split:     i theta_j (j even), k theta_j (j odd),    theta_j = base^(-2 j / d)
        additive:  i theta_j (j even), (i + k) theta_j (j odd)

    so that scores depend on the differences of i and of k alone; "additive" is the plain network
    within a level.

    Args:
        vocabulary: number of tokens.
        width, depth, heads: of the transformer; width / heads is even.
        kv_heads: heads of keys and values, each shared by heads / kv_heads queries; ``heads`` by
            default.
        mlp_ratio: hidden width of the gated MLP over ``width``.
        time: conditioned on a time or noise level, for diffusion of tokens.
        num_classes: of labels; a label of ``num_classes``, or none, is "no label".
        levels: how the level of a token turns it; None for positions alone.
        tied: the output layer is the table of the tokens.
        base: of the rotary positions; pair i of d / 2 turns by position base^(-2 i / d).
        checkpoint: compute the blocks again in the backward pass instead of keeping their
            activations; the attribute of this name may be set at any time. Gradients are the same.
        seed: of the initial weights.

    Raises:
        ValueError: ``width`` does not split into heads of an even size (with ``levels`` a multiple
            of 4), or these into ``kv_heads``, a count is not positive; in a call, tokens, a time, a
            mask, places or a cache of another shape, a label out of range.
        TypeError: in a call, tokens that are not integers.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        width: int,
        depth: int,
        heads: int,
        kv_heads: int | None = None,
        mlp_ratio: float = 8 / 3,
        time: bool = False,
        num_classes: int = 0,
        levels: Literal["split", "additive"] | None = None,
        tied: bool = False,
        base: float = 10_000.0,
        checkpoint: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_heads(width, heads)
        if levels not in (None, "split", "additive"):
            raise ValueError(f"levels must be 'split', 'additive' or None, got {levels!r}")
        kv_heads = heads if kv_heads is None else kv_heads
        if (width // heads) % 2:
            raise ValueError(
                f"rotary positions need width / heads even, got width={width}, heads={heads}"
            )
        if levels is not None and (width // heads) % 4:
            raise ValueError(
                f"levels need width / heads a multiple of 4, got width={width}, heads={heads}"
            )
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"kv_heads must divide heads, got kv_heads={kv_heads}, heads={heads}")
        hidden = int(mlp_ratio * width)
        if min(vocabulary, depth, hidden) < 1 or base <= 1 or num_classes < 0:
            raise ValueError(
                "need vocabulary, depth and mlp_ratio * width >= 1, num_classes >= 0 and base > 1, "
                f"got vocabulary={vocabulary}, depth={depth}, mlp_ratio={mlp_ratio}, "
                f"num_classes={num_classes}, base={base}"
            )
        self.args = {
            "vocabulary": vocabulary,
            "width": width,
            "depth": depth,
            "heads": heads,
            "kv_heads": kv_heads,
            "mlp_ratio": mlp_ratio,
            "time": time,
            "num_classes": num_classes,
            "levels": levels,
            "tied": tied,
            "base": base,
        }
        self.checkpoint = checkpoint
        self.vocabulary, self.dim, self.base = vocabulary, width // heads, base
        self.num_classes, self.levels = num_classes, levels
        self.embed = skip_init(nn.Embedding, vocabulary, width)
        self.time = ScalarEmbedding(width) if time else None
        self.label = LabelEmbedding(num_classes, width) if num_classes else None
        conditioned = time or num_classes > 0
        self.blocks = nn.ModuleList(
            _Block(width, heads, kv_heads, hidden, conditioned) for _ in range(depth)
        )
        self.norm = RMSNorm(width)
        self.modulation = linear(width, 2 * width, start="zero") if conditioned else None
        self.out = None if tied else linear(width, vocabulary, start="small", bias=False)
        initialise(self, seed)

    def forward(
        self,
        x: Tensor,
        t: Tensor | None = None,
        *,
        label: Tensor | None = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        levels: Tensor | None = None,
        allowed: Tensor | None = None,
        cache: Mapping[str, Tensor] | None = None,
        place: int | None = None,
        last: int | None = None,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Logits of the tokens that follow.

        Args:
            x: (batch, n) tokens.
            t: (), (batch,) or, one a token, (batch, n) or (1, n), in [0, 1]; not used without
                ``time``.
            label: () or (batch,) integers; none by default.
            mask: (batch, n) bool, False for padding, which no token sees; all real by default. Only
                distances count, so that prompts of different lengths are padded on the left.
            positions: (n,) or (batch, n) places of the tokens of ``x``; by default they go on from
                those of the cache.
            levels: (n,) or (batch, n), the level of each; 0 by default. Not used without
                ``levels``.
            allowed: (n, m) or (batch, n, m) bool, which of the m tokens so far, those of the cache
                first, each token of ``x`` sees, one at least; in place of ``mask`` and of the
                causal rule.
            cache: what the tokens before ``x`` left, as an earlier call returned it; {} before the
                first.
            place: how many tokens of the cache there are, if there is room in it after them, made
                by `grow`: keys and values of ``x`` are then written there, into the cache itself,
                which saves a copy of it. Not with gradients.
            last: of how many tokens at the end logits are wanted; of all by default.

        Returns:
            (batch, n, vocabulary) logits of the token after each; those after padding mean nothing.
            With a cache (logits, cache), the new cache being that of the tokens so far: a mapping
            of tensors (batch, tokens, ...). `cut` takes it back to fewer tokens,
            `fluvial.core.protocols.take` to other rows.
        """
        if x.is_floating_point() or x.dtype == torch.bool:
            raise TypeError(f"x must be integer tokens, got {x.dtype}")
        if x.ndim != 2:
            raise ValueError(f"x must have shape (batch, n), got {tuple(x.shape)}")
        past = cache or {}
        length = cache_length(past) if place is None else place
        if place is not None and not 0 <= place <= cache_length(past) - x.shape[-1]:
            raise ValueError(
                f"place must leave room for {x.shape[-1]} of the {cache_length(past)} tokens of "
                f"the cache, got {place}"
            )
        if past and len(past["keys.0"]) != len(x):
            raise ValueError(f"x has {len(x)} rows, the cache {len(past['keys.0'])}")
        z = look_up("x", self.embed, x)
        real = _real(x, mask, length, past.get("mask"))
        cos, sin = self._angles(x, length, positions, levels, z)
        c = self._condition(x, t, label, z)
        allowed = _allowed(x, length, real) if allowed is None else _given(allowed, x, length, real)

        now: dict[str, Tensor] = {}
        for i, block in enumerate(self.blocks):
            keys, values = past.get(f"keys.{i}"), past.get(f"values.{i}")
            call: Callable[..., tuple[Tensor, Tensor, Tensor]] = block
            if place is not None and keys is not None and values is not None:
                end = place + x.shape[1]
                keys, values = keys[:, :end], values[:, :end]
                call = partial(block, fill=True)
            inputs = z, c, cos, sin, allowed, keys, values
            z, keys, values = recompute(call, *inputs) if self.checkpoint else call(*inputs)
            if cache is not None and place is None:
                now |= {f"keys.{i}": keys, f"values.{i}": values}
        if last is not None:
            z = z[:, x.shape[1] - last :]
            c = c if c is None or c.shape[1] == 1 else c[:, x.shape[1] - last :]
        z = self.norm(z)
        if self.modulation is not None:
            shift, scale = self.modulation(c).chunk(2, dim=-1)
            z = z * (1 + scale) + shift
        logits = functional.linear(z, self.embed.weight) if self.out is None else self.out(z)
        if cache is None:
            return logits
        if place is not None:
            return logits, dict(cache)
        return logits, now if real is None else now | {"mask": real}

    def _angles(
        self, x: Tensor, start: int, positions: Tensor | None, levels: Tensor | None, like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """cos and sin, (n, 1, dim / 2) or (batch, n, 1, dim / 2), of the tokens of ``x``."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        if positions is None:
            positions = torch.arange(start, start + x.shape[1], device=like.device)
        places = {"positions": positions}
        if self.levels is not None and levels is not None:
            places["levels"] = levels
        for name, value in places.items():
            if value.shape not in (x.shape[1:], x.shape):
                raise ValueError(
                    f"{name} must have shape {tuple(x.shape[1:])} or {tuple(x.shape)}, got "
                    f"{tuple(value.shape)}"
                )
            places[name] = value.to(like.device, dtype)
        mode = self.levels if "levels" in places else None
        if mode is None and self.levels == "split":
            places["levels"], mode = torch.zeros_like(places["positions"]), "split"
        angles = rotary_angles(**places, dim=self.dim, base=self.base, mode=mode)
        return angles.cos(), angles.sin()

    def _condition(
        self, x: Tensor, t: Tensor | None, label: Tensor | None, like: Tensor
    ) -> Tensor | None:
        """SiLU(emb(t) + emb(label)): (batch or 1, n or 1, width)."""
        c: Tensor | None = None
        if self.time is not None:
            batch, per_token = len(x), (1, x.shape[1])
            if t is None or t.shape not in ((), (batch,), x.shape, per_token):
                shape = None if t is None else tuple(t.shape)
                raise ValueError(
                    f"t must have shape (), ({batch},) or {tuple(x.shape)}, got {shape}"
                )
            t = t.to(like.device, like.dtype)
            t = t if t.ndim == 2 else t.expand(batch)[:, None]
            c = self.time(t.flatten()).unflatten(0, t.shape)
        if self.label is not None:
            vector = self.label(label, like)[:, None]
            c = vector if c is None else c + vector
        elif label is not None:
            raise ValueError("label given to a network with num_classes=0")
        return None if c is None else functional.silu(c)


class _Block(nn.Module):
    def __init__(
        self, width: int, heads: int, kv_heads: int, hidden: int, conditioned: bool
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.qkv = linear(width, width + 2 * kv_heads * self.dim, bias=False)
        self.mix = linear(width, width, bias=False)
        self.expand = linear(width, 2 * hidden, bias=False)
        self.contract = linear(hidden, width, bias=False)
        self.modulation = linear(width, 6 * width, start="zero") if conditioned else None

    def forward(
        self,
        z: Tensor,
        c: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        allowed: Tensor | None,
        keys: Tensor | None,
        values: Tensor | None,
        fill: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(z, keys, values), the last two of all tokens so far, (batch, tokens, kv_heads, dim).

        With ``fill`` the last ones of ``keys`` and ``values`` are places for those of ``z``.
        """
        if self.modulation is None:
            mixed, keys, values = self._attend(self.norm1(z), cos, sin, allowed, keys, values, fill)
            z = z + mixed
            return z + self._gated(self.norm2(z)), keys, values
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=-1)
        inner = self.norm1(z) * (1 + scale1) + shift1
        mixed, keys, values = self._attend(inner, cos, sin, allowed, keys, values, fill)
        z = z + gate1 * mixed
        return z + gate2 * self._gated(self.norm2(z) * (1 + scale2) + shift2), keys, values

    def _gated(self, z: Tensor) -> Tensor:
        gate, value = self.expand(z).chunk(2, dim=-1)
        return self.contract(functional.silu(gate) * value)

    def _attend(
        self,
        z: Tensor,
        cos: Tensor,
        sin: Tensor,
        allowed: Tensor | None,
        keys: Tensor | None,
        values: Tensor | None,
        fill: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, tokens, width = z.shape
        q, k, v = self.qkv(z).split([width, *2 * (self.kv_heads * self.dim,)], dim=-1)
        q = q.reshape(batch, tokens, self.heads, self.dim)
        k, v = (part.reshape(batch, tokens, self.kv_heads, self.dim) for part in (k, v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if fill and keys is not None and values is not None:
            keys[:, -tokens:], values[:, -tokens:] = k, v
            k, v = keys, values
        else:
            k = k if keys is None else torch.cat([keys, k], dim=1)
            v = v if values is None else torch.cat([values, v], dim=1)
        mixed = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=allowed,
            is_causal=allowed is None and tokens > 1,
            enable_gqa=self.kv_heads != self.heads,
        )
        return self.mix(mixed.transpose(1, 2).reshape(batch, tokens, width)), k, v


def rotary_angles(
    positions: Tensor,
    levels: Tensor | None = None,
    *,
    dim: int,
    base: float = 10_000.0,
    mode: str | None = None,
) -> Tensor:
    """Angles by which the pairs of a head are turned; see `CausalTransformer`.

    Args:
        positions: (..., n) floating.
        levels: (..., n) floating; used with a ``mode``.
        dim: of a head.
        base: theta_j = base^(-2 j / dim).
        mode: "split", "additive", or None for positions alone.

    Returns:
        (..., n, 1, dim / 2).
    """
    index = torch.arange(0, dim, 2, device=positions.device, dtype=positions.dtype)
    rates = base ** (-index / dim)
    places = positions[..., None, None]
    if mode is None or levels is None:
        return places * rates
    levels = levels[..., None, None]
    odd = index % 4 == 2
    if mode == "split":
        return torch.where(odd, levels, places) * rates
    return places * rates + levels * (rates * odd)


def cache_length(cache: Mapping[str, Tensor]) -> int:
    """Tokens in a cache of a `CausalTransformer`."""
    return cache["keys.0"].shape[1] if cache else 0


def cut(cache: Mapping[str, Tensor], length: int) -> dict[str, Tensor]:
    """The cache of the first ``length`` tokens: drafts that were refused, a prompt to start from.

    Raises:
        ValueError: ``length`` is negative or more than there are.
    """
    if not 0 <= length <= cache_length(cache):
        raise ValueError(f"length must lie in 0 .. {cache_length(cache)}, got {length}")
    return {name: leaf[:, :length] for name, leaf in cache.items()} if length else {}


def grow(cache: Mapping[str, Tensor], room: int) -> dict[str, Tensor]:
    """A copy of the cache with places for ``room`` more tokens, to be written to with ``place=``.

    Raises:
        ValueError: the cache holds padding, or nothing.
    """
    if "mask" in cache or not cache:
        raise ValueError("only a cache that holds tokens, and no padding, can grow")
    grown = {}
    for name, leaf in cache.items():
        grown[name] = leaf.new_empty(len(leaf), leaf.shape[1] + room, *leaf.shape[2:])
        grown[name][:, : leaf.shape[1]] = leaf
    return grown


def _given(allowed: Tensor, x: Tensor, length: int, real: Tensor | None) -> Tensor:
    """``allowed`` as attention takes it."""
    wanted = (x.shape[1], length + x.shape[1])
    if allowed.dtype != torch.bool or tuple(allowed.shape) not in (wanted, (len(x), *wanted)):
        raise ValueError(
            f"allowed must be bool of shape {wanted} or {(len(x), *wanted)}, got {allowed.dtype} "
            f"of {tuple(allowed.shape)}"
        )
    if real is not None:
        raise ValueError("allowed stands in place of mask: give one of them")
    return allowed[:, None] if allowed.ndim == 3 else allowed


def _real(x: Tensor, mask: Tensor | None, length: int, before: Tensor | None) -> Tensor | None:
    """(batch, length + n) bool, or None where there never was a mask."""
    if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape):
        raise ValueError(
            f"mask must be bool of shape {tuple(x.shape)}, got {mask.dtype} of {tuple(mask.shape)}"
        )
    if mask is None and before is None:
        return None
    before = x.new_ones(len(x), length, dtype=torch.bool) if before is None else before
    mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
    return torch.cat([before, mask], dim=1)


def _allowed(x: Tensor, length: int, real: Tensor | None) -> Tensor | None:
    """Which token may look at which, (n, length + n) or (batch, 1, n, length + n).

    None where the kernels know: causal, from the first token on, or one token that sees all.
    """
    n = x.shape[1]
    if real is None and (length == 0 or n == 1):
        return None
    column = torch.arange(length + n, device=x.device)
    row = column[length:, None]
    if real is None:
        return column <= row
    # padding looks at itself, lest it be an average over nothing
    return ((column <= row) & real[:, None, None]) | (column == row)
