"""Models that were trained elsewhere, as fields of ours.

`from_diffusers` takes models, pipelines and schedulers of diffusers, `from_edm` networks that are
called as those of EDM, and `Latent` puts any model behind an autoencoder. Each field says what it
predicts and comes with its path, so that every sampler, guidance and solver of the core takes it.
"""

from __future__ import annotations

from fluvial.adapters.diffusers import from_diffusers
from fluvial.adapters.edm import from_edm
from fluvial.adapters.latents import Latent

__all__ = ["Latent", "from_diffusers", "from_edm"]
