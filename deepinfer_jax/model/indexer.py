"""The indexer: small queries and keys that decide which entries a token attends (spec 3.6).

Its inputs are cut off from the gradient. Choosing is not differentiable, so only a loss on captured
index scores reaches these weights, and such a loss never moves the trunk.

Letters: T rows, J index heads, C index width, R rotated width.
"""

from typing import NamedTuple

import einops
import jax
from flax import nnx
from jax import lax

from deepinfer_jax.config import Config
from deepinfer_jax.model.linear import Linear
from deepinfer_jax.model.norms import RMSNorm
from deepinfer_jax.model.rotary import rotate
from deepinfer_jax.numerics import Numerics
from pallas_kernels.quantize import mxfp4_blocks
from pallas_kernels.rounding import round_to


class IndexQuery(NamedTuple):
    """What a row asks with."""

    queries: jax.Array  # [T, J, C]
    gains: jax.Array  # [T, J]


class Indexer(nnx.Module):
    """Query side wq_b, weights_proj; key side wk, k_norm in key-value sources only."""

    def __init__(self, take, with_keys: bool):
        self.wq_b = Linear(take / "wq_b")
        self.weights_proj = Linear(take / "weights_proj")
        self.wk = Linear(take / "wk") if with_keys else None
        self.k_norm = RMSNorm(take / "k_norm") if with_keys else None

    def query(self, x, latent, position, frequency, config: Config, numerics: Numerics):
        """Queries and gains of rows.

        Args:
            x: [T, D], the normalised attention input.
            latent: [T, q rank], the normalised query latent.
            position: int32 [T].
            frequency: float32 [R / 2].
            config: the model's.
            numerics: the model's.
        """
        x, latent = lax.stop_gradient(x), lax.stop_gradient(latent)
        q = self.wq_b.quantized(latent, numerics)
        q = einops.rearrange(q, "t (j c) -> t j c", j=config.index_n_heads)
        q = rotate(q, position, frequency)
        scale = (config.index_head_dim * config.index_n_heads) ** -0.5
        gains = self.weights_proj.plain(x)
        gains = round_to(gains.astype(numerics.wide) * scale, numerics.activation)
        return IndexQuery(mxfp4_blocks(q) if numerics.quantize_cache else q, gains)

    def key(self, latent, position, frequency, config: Config, numerics: Numerics) -> jax.Array:
        """Keys [T, C] of compressed latents [T, E], rotated at their group's first position."""
        k = self.wk.plain(lax.stop_gradient(latent))
        k = self.k_norm(k, config.rms_norm_eps, numerics.wide)
        k = rotate(k, position, frequency)
        return mxfp4_blocks(k) if numerics.quantize_cache else k
