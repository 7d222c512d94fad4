"""Quantise-dequantise along the last axis: what cache and activation formats mean (spec 5).

All arithmetic is float32 and exact but for the intended roundings: scales of `fp8` and `mxfp4`
are powers of two, so dividing by them loses nothing. A last block that is not full is padded with
zeros. The gradient is the identity (straight-through): rounding has no useful derivative of its
own.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

_E4M3 = (3, -6)  # mantissa bits, exponent of the smallest normal number
_E2M1 = (1, 0)
_E4M3_MAX = 448.0
_E2M1_MAX = 6.0


def _straight_through(function):
    wrapped = jax.custom_jvp(function)
    wrapped.defjvp(lambda primals, tangents: (wrapped(*primals), tangents[0]))
    return functools.wraps(function)(wrapped)


def _round_to_grid(x, mantissa_bits, min_exponent):
    """Round to nearest, ties to even, on a float grid; the caller clamps to its largest value."""
    exponent = (lax.bitcast_convert_type(jnp.abs(x), jnp.int32) >> 23) - 127
    quantum = jnp.maximum(exponent, min_exponent) - mantissa_bits
    step = lax.bitcast_convert_type((quantum + 127) << 23, jnp.float32)
    return jnp.round(x / step) * step


def _power_of_two_ceil(x):
    """The smallest power of two >= x, for positive normal float32 (spec 5.1)."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)


def _divide(a, b):
    """Divide with one rounding: XLA would multiply by the reciprocal of a broadcast divisor."""
    return a / lax.optimization_barrier(jnp.broadcast_to(b, a.shape))


def _by_blocks(round_trip, x, block):
    """Apply `round_trip` [..., n, block] float32 along the last axis of x."""
    width = x.shape[-1]
    missing = -width % block
    wide = x.astype(jnp.float32)
    if missing:
        wide = jnp.pad(wide, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    blocks = wide.reshape(*x.shape[:-1], (width + missing) // block, block)
    flat = round_trip(blocks).reshape(wide.shape)
    return flat[..., :width].astype(x.dtype)


def _largest(blocks, floor):
    return jnp.maximum(jnp.max(jnp.abs(blocks), axis=-1, keepdims=True), jnp.float32(floor))


def _fp8(blocks):
    scale = _power_of_two_ceil(_largest(blocks, 1e-4) * jnp.float32(1 / _E4M3_MAX))
    return _round_to_grid(jnp.clip(blocks / scale, -_E4M3_MAX, _E4M3_MAX), *_E4M3) * scale


def _mxfp4(blocks):
    scale = _power_of_two_ceil(_largest(blocks, 6 * 2.0**-126) * jnp.float32(1 / _E2M1_MAX))
    return _round_to_grid(jnp.clip(blocks / scale, -_E2M1_MAX, _E2M1_MAX), *_E2M1) * scale


def _nvfp4(blocks):
    largest = _largest(blocks, 6 * 2.0**-9)
    scale = _divide(largest, jnp.float32(_E2M1_MAX))
    scale = _round_to_grid(jnp.minimum(scale, _E4M3_MAX), *_E4M3)
    codes = jnp.clip(_divide(blocks, scale), -_E2M1_MAX, _E2M1_MAX)
    return _round_to_grid(codes, *_E2M1) * scale


@_straight_through
def fp8_blocks(x: jax.Array) -> jax.Array:
    """Round trip through e4m3 codes with one power-of-two scale per 32 channels (spec 5.2).

    Args:
        x: [..., channels], float32 or bfloat16.

    Returns:
        The round trip, same shape and dtype (exact in bfloat16).
    """
    return _by_blocks(_fp8, x, 32)


@_straight_through
def mxfp4_blocks(x: jax.Array) -> jax.Array:
    """Like `fp8_blocks` with e2m1 codes and one power-of-two scale per 32 channels (spec 5.3)."""
    return _by_blocks(_mxfp4, x, 32)


@_straight_through
def nvfp4_blocks(x: jax.Array) -> jax.Array:
    """Like `fp8_blocks` with e2m1 codes and one e4m3 scale per 16 channels (spec 5.4)."""
    return _by_blocks(_nvfp4, x, 16)
