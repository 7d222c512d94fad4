"""Compression of `ratio` tokens into one entry, in key-value source layers (spec 3.5).

Ratio 1 projects and rounds; a larger ratio pools each group per channel with a softmax over its own
gates, in float32. A group completes at its last token; its parts wait in a ring of absolute
positions, so tokens that are taken back need no clean-up.

Letters: T rows, E head width, r ratio.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from deepinfer_jax.model.linear import Linear
from deepinfer_jax.model.norms import RMSNorm
from deepinfer_jax.numerics import Numerics
from pallas_kernels.rounding import round_to


def pool(parts: jax.Array) -> jax.Array:
    """Softmax-weighted mean of a group, per channel.

    Args:
        parts: [T, r, 2, E]; values and gates of the tokens of a group, in order.

    Returns:
        [T, E] in the dtype of the parts.
    """
    values, gates = parts[:, :, 0], parts[:, :, 1]
    e = jnp.exp(gates - jnp.max(gates, axis=1, keepdims=True))
    share = e / jnp.sum(e, axis=1, keepdims=True)
    return jnp.sum(share * values, axis=1)


class Compressor(nnx.Module):
    """Weights wkv [E, D], wgate [E, D] (ratio above 1) and norm [E]."""

    def __init__(self, take, ratio: int):
        self.wkv = Linear(take / "wkv")
        self.wgate = Linear(take / "wgate") if ratio > 1 else None
        self.norm = RMSNorm(take / "norm")

    def parts(self, x: jax.Array, numerics: Numerics) -> jax.Array:
        """What a token contributes: [T, 2, E] values and gates, wide; [T, E] latent for ratio 1."""
        if self.wgate is None:
            return self.wkv.plain(x)
        return jnp.stack([self.wkv.wide(x, numerics), self.wgate.wide(x, numerics)], axis=1)

    def latent(self, parts: jax.Array, eps: float, numerics: Numerics) -> jax.Array:
        """The normalised latent [T, E] of ratio 1's [T, E] or of a group's [T, r, 2, E]."""
        if self.wgate is not None:
            parts = round_to(pool(parts), numerics.activation)
        return self.norm(parts, eps, numerics.wide)
