"""The decoder-only transformer of language models, with a key-value cache that is a value.

Pre-norm blocks with RMSNorm (Zhang and Sennrich, 2019), rotary positions (Su et al., 2021), SwiGLU
(Shazeer, 2020) and, as an option, grouped-query attention (Ainslie et al., EMNLP 2023), as in
Touvron et al., "LLaMA", 2023.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import skip_init

from fluvial.networks.layers import (
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
    """Logits of the next token, called as ``network(x, t, mask=, cache=)``.

        z <- z + W attend(norm(z));  z <- z + W2 (silu(W1 norm(z)) * W3 norm(z))

    in every block, without biases. With ``time`` every norm is modulated and every branch gated by
    linear maps of SiLU(emb(t)) that start at zero, as in `fluvial.networks.DiT`.

    Args:
        vocabulary: number of tokens.
        width, depth, heads: of the transformer; width / heads is even.
        kv_heads: heads of keys and values, each shared by heads / kv_heads queries; ``heads`` by
            default.
        mlp_ratio: hidden width of the gated MLP over ``width``.
        time: conditioned on a time or noise level, for diffusion of tokens.
        tied: the output layer is the table of the tokens.
        base: of the rotary positions; pair i of d / 2 turns by position base^(-2 i / d).
        checkpoint: compute the blocks again in the backward pass instead of keeping their
            activations; the attribute of this name may be set at any time. Gradients are the same.
        seed: of the initial weights.

    Raises:
        ValueError: ``width`` does not split into heads of an even size, or these into ``kv_heads``,
            a count is not positive; in a call, tokens, a time, a mask or a cache of another shape.
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
        tied: bool = False,
        base: float = 10_000.0,
        checkpoint: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_heads(width, heads)
        kv_heads = heads if kv_heads is None else kv_heads
        if (width // heads) % 2:
            raise ValueError(
                f"rotary positions need width / heads even, got width={width}, heads={heads}"
            )
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"kv_heads must divide heads, got kv_heads={kv_heads}, heads={heads}")
        hidden = int(mlp_ratio * width)
        if min(vocabulary, depth, hidden) < 1 or base <= 1:
            raise ValueError(
                "need vocabulary, depth and mlp_ratio * width >= 1 and base > 1, got "
                f"vocabulary={vocabulary}, depth={depth}, mlp_ratio={mlp_ratio}, base={base}"
            )
        self.args = {
            "vocabulary": vocabulary,
            "width": width,
            "depth": depth,
            "heads": heads,
            "kv_heads": kv_heads,
            "mlp_ratio": mlp_ratio,
            "time": time,
            "tied": tied,
            "base": base,
        }
        self.checkpoint = checkpoint
        self.vocabulary, self.dim, self.base = vocabulary, width // heads, base
        self.embed = skip_init(nn.Embedding, vocabulary, width)
        self.time = ScalarEmbedding(width) if time else None
        self.blocks = nn.ModuleList(
            _Block(width, heads, kv_heads, hidden, time) for _ in range(depth)
        )
        self.norm = RMSNorm(width)
        self.modulation = linear(width, 2 * width, start="zero") if time else None
        self.out = None if tied else linear(width, vocabulary, start="small", bias=False)
        initialise(self, seed)

    def forward(
        self,
        x: Tensor,
        t: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        cache: Mapping[str, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Logits of the tokens that follow.

        Args:
            x: (batch, n) tokens.
            t: (), (batch,) or (batch, n), one a token, in [0, 1]; not used without ``time``.
            mask: (batch, n) bool, False for padding, which no token sees; all real by default. Only
                distances count, so that prompts of different lengths are padded on the left.
            cache: what the tokens before ``x`` left, as an earlier call returned it; {} before the
                first.

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
        length = cache_length(past)
        if past and len(past["keys.0"]) != len(x):
            raise ValueError(f"x has {len(x)} rows, the cache {len(past['keys.0'])}")
        z = look_up("x", self.embed, x)
        real = _real(x, mask, length, past.get("mask"))
        cos, sin = self._angles(length, x.shape[1], z)
        c, allowed = self._level(x, t, z), _allowed(x, length, real)

        now: dict[str, Tensor] = {}
        for i, block in enumerate(self.blocks):
            before = past.get(f"keys.{i}"), past.get(f"values.{i}")
            inputs = z, c, cos, sin, allowed, *before
            z, keys, values = recompute(block, *inputs) if self.checkpoint else block(*inputs)
            if cache is not None:
                now |= {f"keys.{i}": keys, f"values.{i}": values}
        z = self.norm(z)
        if self.modulation is not None:
            shift, scale = self.modulation(c).chunk(2, dim=-1)
            z = z * (1 + scale) + shift
        logits = functional.linear(z, self.embed.weight) if self.out is None else self.out(z)
        if cache is None:
            return logits
        return logits, now if real is None else now | {"mask": real}

    def _angles(self, start: int, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, (count, 1, dim / 2), of the positions from ``start`` on."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        index = torch.arange(0, self.dim, 2, device=like.device, dtype=dtype)
        positions = torch.arange(start, start + count, device=like.device, dtype=dtype)
        angles = positions[:, None, None] * self.base ** (-index / self.dim)
        return angles.cos(), angles.sin()

    def _level(self, x: Tensor, t: Tensor | None, like: Tensor) -> Tensor | None:
        """SiLU(emb(t)): (batch, 1 or n, width)."""
        if self.time is None:
            return None
        batch = len(x)
        if t is None or t.shape not in ((), (batch,), x.shape):
            shape = None if t is None else tuple(t.shape)
            raise ValueError(f"t must have shape (), ({batch},) or {tuple(x.shape)}, got {shape}")
        t = t.to(like.device, like.dtype)
        t = t if t.ndim == 2 else t.expand(batch)[:, None]
        return functional.silu(self.time(t.flatten()).unflatten(0, t.shape))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int, time: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.qkv = linear(width, width + 2 * kv_heads * self.dim, bias=False)
        self.mix = linear(width, width, bias=False)
        self.expand = linear(width, 2 * hidden, bias=False)
        self.contract = linear(hidden, width, bias=False)
        self.modulation = linear(width, 6 * width, start="zero") if time else None

    def forward(
        self,
        z: Tensor,
        c: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        allowed: Tensor | None,
        keys: Tensor | None,
        values: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(z, keys, values), the last two of all tokens so far, (batch, tokens, kv_heads, dim)."""
        if self.modulation is None:
            mixed, keys, values = self._attend(self.norm1(z), cos, sin, allowed, keys, values)
            z = z + mixed
            return z + self._gated(self.norm2(z)), keys, values
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=-1)
        inner = self.norm1(z) * (1 + scale1) + shift1
        mixed, keys, values = self._attend(inner, cos, sin, allowed, keys, values)
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, tokens, width = z.shape
        q, k, v = self.qkv(z).split([width, *2 * (self.kv_heads * self.dim,)], dim=-1)
        q = q.reshape(batch, tokens, self.heads, self.dim)
        k, v = (part.reshape(batch, tokens, self.kv_heads, self.dim) for part in (k, v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
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
