"""A bidirectional transformer of tokens: the denoiser of masked and uniform diffusion.

The blocks of Peebles and Xie (ICCV 2023), as MDLM and SEDD use them, with RMSNorm, rotary positions
and SwiGLU: every token sees every other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import skip_init

from fluvial.core.protocols import per_row
from fluvial.networks.layers import (
    LabelEmbedding,
    RMSNorm,
    ScalarEmbedding,
    check_heads,
    initialise,
    linear,
    look_up,
    rotate,
    through,
)


class TokenTransformer(nn.Module):
    """Logits of every token given all, called as ``network(x, t, label=, mask=)``.

        z <- z + g1 W attend(m1(z));  z <- z + g2 W2 (silu(W1 m2(z)) * W3 m2(z))

    with m a norm, modulated and gated by linear maps of SiLU(emb(t) + emb(label)) that start at 0;
    without time and labels, plain norms and no gates.

    Args:
        vocabulary: number of input tokens: V, and V + 1 where there is a mask symbol.
        outputs: number of logits; ``vocabulary`` by default. V, for a categorical path.
        width, depth, heads: of the transformer; width / heads is even.
        length: most tokens of a row; each place then has a learned vector. By default only
            distances count, as in a window on a long text: of a row that is all masks, the first
            token and the last are told the same.
        mlp_ratio: hidden width of the gated MLP over ``width``.
        time: conditioned on the time. A network of masked tokens needs none.
        num_classes: of labels; a label of ``num_classes``, or none, is "no label".
        base: of the rotary positions; pair i of d / 2 turns by position base^(-2 i / d).
        checkpoint: compute the blocks again in the backward pass instead of keeping their
            activations; the attribute of this name may be set at any time.
        seed: of the initial weights.

    Raises:
        ValueError: ``width`` does not split into heads of an even size, a count is not positive; in
            a call, tokens, a label or a mask out of range or of another shape.
        TypeError: in a call, tokens that are not integers.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        outputs: int | None = None,
        width: int,
        depth: int,
        heads: int,
        length: int | None = None,
        mlp_ratio: float = 8 / 3,
        time: bool = False,
        num_classes: int = 0,
        base: float = 10_000.0,
        checkpoint: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_heads(width, heads)
        outputs = vocabulary if outputs is None else outputs
        hidden = int(mlp_ratio * width)
        if (width // heads) % 2:
            raise ValueError(
                f"rotary positions need width / heads even, got width={width}, heads={heads}"
            )
        if (
            min(vocabulary, outputs, depth, hidden, 1 if length is None else length) < 1
            or num_classes < 0
            or base <= 1
        ):
            raise ValueError(
                "need vocabulary, outputs, depth and mlp_ratio * width >= 1, num_classes >= 0 and "
                f"base > 1, got vocabulary={vocabulary}, outputs={outputs}, depth={depth}, "
                f"mlp_ratio={mlp_ratio}, num_classes={num_classes}, base={base}, length={length}"
            )
        self.args = {
            "vocabulary": vocabulary,
            "outputs": outputs,
            "width": width,
            "depth": depth,
            "heads": heads,
            "length": length,
            "mlp_ratio": mlp_ratio,
            "time": time,
            "num_classes": num_classes,
            "base": base,
        }
        self.checkpoint = checkpoint
        self.dim, self.base, self.num_classes = width // heads, base, num_classes
        self.embed = skip_init(nn.Embedding, vocabulary, width)
        self.places = None if length is None else skip_init(nn.Embedding, length, width)
        self.time = ScalarEmbedding(width) if time else None
        self.label = LabelEmbedding(num_classes, width) if num_classes else None
        conditioned = time or num_classes > 0
        self.blocks = nn.ModuleList(_Block(width, heads, hidden, conditioned) for _ in range(depth))
        self.norm = RMSNorm(width)
        self.modulation = linear(width, 2 * width, start="zero") if conditioned else None
        self.out = linear(width, outputs, start="small")
        initialise(self, seed)

    def forward(
        self,
        x: Tensor,
        t: Tensor | None = None,
        *,
        label: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """(batch, n, outputs) logits.

        Args:
            x: (batch, n) tokens.
            t: () or (batch,) in [0, 1]; not used without ``time``.
            label: () or (batch,) integers; none by default.
            mask: (batch, n) bool, False for padding, which no token sees; all real by default.
        """
        if x.is_floating_point() or x.dtype == torch.bool:
            raise TypeError(f"x must be integer tokens, got {x.dtype}")
        if x.ndim != 2:
            raise ValueError(f"x must have shape (batch, n), got {tuple(x.shape)}")
        if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape):
            raise ValueError(
                f"mask must be bool of shape {tuple(x.shape)}, got {mask.dtype} of "
                f"{tuple(mask.shape)}"
            )
        if self.places is not None and x.shape[1] > self.places.num_embeddings:
            raise ValueError(
                f"x must have at most {self.places.num_embeddings} tokens, got {x.shape[1]}"
            )
        z = look_up("x", self.embed, x)
        if self.places is not None:
            z = z + self.places.weight[: x.shape[1]]
        cos, sin = self._angles(x.shape[1], z)
        allowed = None
        if mask is not None:
            # padding looks at itself, lest it be an average over nothing
            itself = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
            allowed = mask[:, None, None] | itself
        c = self._condition(t, label, z)
        z = through(self.blocks, z, c, cos, sin, allowed, checkpoint=self.checkpoint)
        z = self.norm(z)
        if self.modulation is not None:
            shift, scale = self.modulation(c).chunk(2, dim=-1)
            z = z * (1 + scale) + shift
        return self.out(z)

    def _condition(self, t: Tensor | None, label: Tensor | None, z: Tensor) -> Tensor | None:
        """SiLU of the sum of the embeddings, (batch, 1, width)."""
        if label is not None and self.label is None:
            raise ValueError("label given to a network with num_classes=0")
        c: Tensor | None = None
        if self.time is not None:
            if t is None:
                raise ValueError("t must be given to a network with time=True")
            c = self.time(per_row(t, z))
        if self.label is not None:
            vector = self.label(label, z)
            c = vector if c is None else c + vector
        return None if c is None else functional.silu(c)[:, None]

    def _angles(self, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, (count, 1, dim / 2), of the positions."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        index = torch.arange(0, self.dim, 2, device=like.device, dtype=dtype)
        positions = torch.arange(count, device=like.device, dtype=dtype)
        angles = positions[:, None, None] * self.base ** (-index / self.dim)
        return angles.cos(), angles.sin()


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, conditioned: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.qkv = linear(width, 3 * width, bias=False)
        self.mix = linear(width, width, bias=False)
        self.expand = linear(width, 2 * hidden, bias=False)
        self.contract = linear(hidden, width, bias=False)
        self.modulation = linear(width, 6 * width, start="zero") if conditioned else None

    def forward(
        self, z: Tensor, c: Tensor | None, cos: Tensor, sin: Tensor, allowed: Tensor | None
    ) -> Tensor:
        if self.modulation is None:
            z = z + self._attend(self.norm1(z), cos, sin, allowed)
            return z + self._gated(self.norm2(z))
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=-1)
        inner = self.norm1(z) * (1 + scale1) + shift1
        z = z + gate1 * self._attend(inner, cos, sin, allowed)
        return z + gate2 * self._gated(self.norm2(z) * (1 + scale2) + shift2)

    def _gated(self, z: Tensor) -> Tensor:
        gate, value = self.expand(z).chunk(2, dim=-1)
        return self.contract(functional.silu(gate) * value)

    def _attend(self, z: Tensor, cos: Tensor, sin: Tensor, allowed: Tensor | None) -> Tensor:
        batch, tokens, width = z.shape
        q, k, v = self.qkv(z).reshape(batch, tokens, 3, self.heads, width // self.heads).unbind(2)
        mixed = functional.scaled_dot_product_attention(
            rotate(q, cos, sin).transpose(1, 2),
            rotate(k, cos, sin).transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=allowed,
        )
        return self.mix(mixed.transpose(1, 2).reshape(batch, tokens, width))
