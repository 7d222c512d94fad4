"""Rotary position embedding on the last R channels, adjacent pairs (spec 3.3).

One table per layer kind: window-only layers use the plain base, layers with compressed entries a
larger base with YaRN on the frequencies only. Phases are float32 whatever the activations are.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config import Config
from pallas_kernels.rounding import round_to


@functools.cache
def frequencies(config: Config, compressed: bool) -> np.ndarray:
    """float32 [R / 2], radians per position.

    Args:
        config: the model's.
        compressed: the layer has a compression ratio above zero.
    """
    width = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    pair = np.arange(width // 2, dtype=np.float64)
    plain = theta ** (-2 * pair / width)
    if not compressed:
        return plain.astype(np.float32)

    scaling = config.rope_scaling
    original = scaling.original_max_position_embeddings

    def corrected(rotations):
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(corrected(scaling.beta_fast)), 0)
    high = min(math.ceil(corrected(scaling.beta_slow)), width - 1)
    ramp = np.clip((pair - low) / max(high - low, 0.001), 0, 1)
    return (plain / scaling.factor * ramp + plain * (1 - ramp)).astype(np.float32)


def rotate(x: jax.Array, position: jax.Array, frequency: np.ndarray, *, inverse=False) -> jax.Array:
    """Rotate the tail of every vector by its position.

    Args:
        x: [T, ..., C]; the last 2 * len(frequency) channels are rotated.
        position: int32 [T].
        frequency: float32 [R / 2].
        inverse: rotate back.

    Returns:
        [T, ..., C] in x's dtype, rounded once.
    """
    tail = 2 * len(frequency)
    keep, turned = x[..., :-tail], x[..., -tail:]
    angle = position.astype(jnp.float32)[:, None] * frequency
    angle = jnp.expand_dims(angle, tuple(range(1, x.ndim - 1)))  # [T, 1.., R/2]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    cos, sin = jnp.cos(angle).astype(wide), jnp.sin(angle).astype(wide)
    if inverse:
        sin = -sin
    pairs = turned.astype(wide).reshape(*turned.shape[:-1], tail // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    rotated = round_to(rotated.reshape(turned.shape), x.dtype)
    return jnp.concatenate([keep, rotated], axis=-1)
