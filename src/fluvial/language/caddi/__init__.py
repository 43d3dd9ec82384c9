"""CaDDi: discrete diffusion whose steps see the whole noisy trajectory, by a causal transformer.

Zhang, He et al., "Non-Markovian Discrete Diffusion with Causal Language Models", NeurIPS 2025,
arXiv 2502.09767.
"""

from __future__ import annotations

from fluvial.adapters.transformers import from_pretrained_causal
from fluvial.language.caddi.levels import IndependentLevels
from fluvial.language.caddi.model import CaDDi
from fluvial.language.caddi.sampling import Trace

__all__ = ["CaDDi", "IndependentLevels", "Trace", "from_pretrained_causal"]
