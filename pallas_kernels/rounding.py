"""Rounding that is meant: where the specification rounds, a value must really lose its bits.

XLA may keep excess precision: on GPUs it drops a conversion to bfloat16 that is followed by one
back. It never drops a `reduce_precision`.
"""

import jax
import jax.numpy as jnp
from jax import lax


def round_to(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """X in another float dtype, rounded to nearest even if that is bfloat16."""
    if jnp.dtype(dtype) == jnp.bfloat16 and x.dtype != jnp.bfloat16:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)
