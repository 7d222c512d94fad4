"""RMSNorm (spec 2.1): float32 inside, one rounding at the end."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from pallas_kernels.rounding import round_to


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, wide) -> jax.Array:
    """Divide x [..., D] by its root mean square, multiply by weight [D]; keeps x's dtype."""
    v = x.astype(wide)
    scale = lax.rsqrt(jnp.mean(jnp.square(v), axis=-1, keepdims=True) + eps)
    return round_to(v * scale * weight.astype(wide), x.dtype)


class RMSNorm(nnx.Module):
    """The norm's weight [D]."""

    def __init__(self, take):
        self.weight = nnx.Param(take("weight"))

    def __call__(self, x, eps, wide):
        """See `rms_norm`."""
        return rms_norm(x, self.weight.get_value(), eps, wide)
