"""Causal language models of the transformers library, called as ours are.

What is added to a pretrained model touches none of its weights: a vector for the mask symbol, and
the noise level of a token as a second place beside its position.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

ROTARY = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose rotary module gives (cos, sin) of pairs (x_j, x_{j + d/2}). SmolLM2 is a llama."""
LEARNED = ("gpt2",)
"""Families with a learned vector a position."""


def from_pretrained_causal(
    model: Any, *, gguf_file: str | os.PathLike[str] | None = None, **load: Any
) -> CausalLanguageModel:
    """A causal language model of transformers as a network for `fluvial.language.CaDDi`.

        network = from_pretrained_causal("HuggingFaceTB/SmolLM2-135M")
        model = CaDDi(network, classes=network.vocabulary - 1, length=64, steps=8, variant="ar")

    Args:
        model: one that is loaded, of a family in `ROTARY` or `LEARNED`; or the folder of one, or
            its name on the hub.
        gguf_file: a GGUF file inside that folder or repository, or the path of one with ``model``
            None; its weights are expanded to floating point.
        **load: further arguments of ``AutoModelForCausalLM.from_pretrained``, such as ``dtype``.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        FileNotFoundError: there is no such GGUF file.
        ValueError: a model of another family.
        TypeError: arguments to load with and a loaded model.
    """
    if isinstance(model, nn.Module):
        if load or gguf_file is not None:
            raise TypeError("a loaded model takes no arguments to load with")
        return CausalLanguageModel(model)
    if gguf_file is not None:
        file = os.fspath(gguf_file)
        if model is None:
            if not os.path.isfile(file):
                raise FileNotFoundError(f"gguf_file: there is no file {file}")
            model, file = os.path.split(os.path.abspath(file))
        load = {**load, "gguf_file": file}
    if model is None:
        raise TypeError("model must be a model, a folder or a name, got None")
    loaded = _transformers().AutoModelForCausalLM.from_pretrained(os.fspath(model), **load)
    return CausalLanguageModel(loaded)


class CausalLanguageModel(nn.Module):
    """Logits of the next token, called as `fluvial.networks.CausalTransformer` is.

    The input has one symbol more than the model, V; there are no logits of it. Its vector starts as
    the mean of the model's. Without levels, and with none but 0, the model computes what it did.

    A level k acts on rotary models as `CausalTransformer` with ``levels="additive"``: pairs of odd
    index are turned by the position i + k, those of even index by i, so that within a level
    attention is the pretrained one. On models with learned positions a linear map of sines of k,
    which starts at zero, is added to the tokens' vectors. The model's own sliding window, if it has
    one, does not act where a mask is given, as `CaDDi` does.

    Args:
        model: a causal language model of transformers, of a family in `ROTARY` or `LEARNED`.

    Attributes:
        vocabulary: V + 1, symbols of the input.
        start: the model's token for the start of a text, V if it has none.

    Raises:
        ValueError: a model of another family; in a call, tokens out of range.
    """

    num_classes = 0

    def __init__(self, model: Any) -> None:
        super().__init__()
        config = getattr(model, "config", None)
        family = getattr(config, "model_type", type(model).__name__)
        if family not in ROTARY + LEARNED:
            raise ValueError(
                f"model must be of a family in {', '.join(ROTARY + LEARNED)}, got {family!r}"
            )
        self.model: Any = model
        table: Tensor = self.model.get_input_embeddings().weight
        self.classes = table.shape[0]
        self.vocabulary = self.classes + 1
        start = getattr(config, "bos_token_id", None)
        self.start = start if isinstance(start, int) and start < self.classes else self.classes
        self.mask = nn.Parameter(table.detach().float().mean(0).to(table))
        self.rotary: _LevelRotary | None = None
        self.level: nn.Linear | None = None
        if family in ROTARY:
            decoder = self.model.get_decoder()
            if not isinstance(decoder.rotary_emb, _LevelRotary):
                decoder.rotary_emb = _LevelRotary(decoder.rotary_emb)
            object.__setattr__(self, "rotary", decoder.rotary_emb)  # it has one home, the decoder
        else:
            self.level = nn.Linear(64, table.shape[1], bias=False).to(table)
            nn.init.zeros_(self.level.weight)

    @property
    def args(self) -> dict[str, Any]:
        """What `rebuild` needs, as JSON holds it."""
        return {"config": json.loads(self.model.config.to_json_string(use_diff=False))}

    @classmethod
    def rebuild(cls, args: Mapping[str, Any]) -> CausalLanguageModel:
        """The network of these `args`, with weights that are still to be loaded."""
        library = _transformers()
        content = dict(args["config"])
        config = library.AutoConfig.for_model(content.pop("model_type"), **content)
        return cls(library.AutoModelForCausalLM.from_config(config))

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        result = super().load_state_dict(*args, **options)
        self.model.tie_weights()
        return result

    def forward(
        self,
        x: Tensor,
        t: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        levels: Tensor | None = None,
        allowed: Tensor | None = None,
        cache: Mapping[str, Tensor] | None = None,
        last: int | None = None,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """As `fluvial.networks.CausalTransformer.forward`; ``t`` is not used.

        Returns:
            (batch, n, V) logits, with a cache (logits, cache) of the same form as there.
        """
        if x.device.type == "cpu" and x.numel() and int(x.max()) > self.classes:
            raise ValueError(f"x must lie in 0 .. {self.classes}, got {int(x.max())}")
        table = self.model.get_input_embeddings()
        z = table(x.clamp(max=self.classes - 1))
        z = torch.where((x == self.classes).unsqueeze(-1), self.mask.to(z), z)
        past = cache or {}
        length = past["keys.0"].shape[1] if past else 0
        n = x.shape[1]
        plain = positions is None and not length
        if positions is None:
            positions = torch.arange(length, length + n, device=x.device)
        positions = positions.to(x.device).expand(x.shape)
        if self.level is not None and levels is not None:
            z = z + self.level(_waves(levels.to(x.device).expand(x.shape), z))
        if allowed is None and not plain:
            # of positions that begin anew transformers would make rows of their own
            column = torch.arange(length + n, device=x.device)
            allowed = column <= column[length:, None]
        options: dict[str, Any] = {"use_cache": cache is not None}
        if allowed is not None:
            allowed = allowed.expand(len(x), n, length + n)[:, None]
            # numbers, which every implementation of attention takes
            options["attention_mask"] = torch.zeros(
                allowed.shape, dtype=z.dtype, device=z.device
            ).masked_fill(~allowed, torch.finfo(z.dtype).min)
        if last is not None:
            options["logits_to_keep"] = last
        name = _cache_name(self.model)
        if cache is not None:
            options[name] = _as_theirs(past)
        if self.rotary is not None and levels is not None:
            self.rotary.levels = levels.to(x.device).expand(x.shape)
        try:
            out = self.model(inputs_embeds=z, position_ids=positions, **options)
        finally:
            if self.rotary is not None:
                self.rotary.levels = None
        if cache is None:
            return out.logits
        return out.logits, _as_ours(getattr(out, name))


class _LevelRotary(nn.Module):
    """The model's rotary module, pairs of odd index turned by position + level."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.levels: Tensor | None = None  # of the call that is under way

    def forward(self, x: Tensor, position_ids: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        plain = self.inner(x, position_ids, **options)
        if self.levels is None:
            return plain
        moved = self.inner(x, position_ids + self.levels, **options)
        dim = plain[0].shape[-1]
        odd = torch.arange(dim, device=x.device) % (dim // 2) % 2 == 1
        return torch.where(odd, moved[0], plain[0]), torch.where(odd, moved[1], plain[1])


def _waves(levels: Tensor, like: Tensor) -> Tensor:
    """(batch, n, 64) cosines and sines of the levels."""
    rates = 1000.0 ** (-torch.arange(32, device=like.device, dtype=torch.float32) / 32)
    angles = levels.unsqueeze(-1).float() * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(like)


def _transformers() -> Any:
    try:
        return import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModuleNotFoundError(
            "pretrained language models need the package transformers; install it with "
            "`pip install 'fluvial[language]'`",
            name="transformers",
        ) from error


def _cache_name(model: nn.Module) -> str:
    """The argument for the cache, which transformers 5.24 renamed."""
    code = type(model).forward
    while hasattr(code, "__wrapped__"):
        code = code.__wrapped__
    return "cache" if "cache" in code.__code__.co_varnames else "past_key_values"


def _as_theirs(cache: Mapping[str, Tensor]) -> Any:
    """A cache of transformers, (batch, heads, tokens, dim) a layer."""
    library = _transformers()
    layers = len(cache) // 2
    return library.DynamicCache(
        [
            (cache[f"keys.{i}"].transpose(1, 2), cache[f"values.{i}"].transpose(1, 2))
            for i in range(layers)
        ]
    )


def _as_ours(cache: Any) -> dict[str, Tensor]:
    ours: dict[str, Tensor] = {}
    for i, layer in enumerate(cache.layers):
        ours |= {
            f"keys.{i}": layer.keys.transpose(1, 2),
            f"values.{i}": layer.values.transpose(1, 2),
        }
    return ours
