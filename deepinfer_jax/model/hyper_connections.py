"""Manifold-constrained hyper-connections: how M residual streams are read and written (spec 6).

A sublayer computes three sets of coefficients from the streams: `post` and `comb`, with which its
own output is written back, and `pre`, with which the NEXT sublayer reads (the chain starts at
stream 0).

Letters: T rows, M streams (m source, n destination), D hidden.
"""

from typing import NamedTuple

import einops
import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.config import Config
from deepinfer_jax.model.linear import product
from pallas_kernels.rounding import round_to


class Mixes(NamedTuple):
    """Coefficients of one sublayer, in the wide dtype."""

    pre: jax.Array  # [T, M], for the next sublayer
    post: jax.Array  # [T, M]
    comb: jax.Array  # [T, M, M], source stream, destination stream


def _in_order(terms):
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def sinkhorn(z: jax.Array, iterations: int, eps: float) -> jax.Array:
    """Alternate row and column normalisation of exp(z), columns last (spec 6.2).

    The rows T are the last axis here and sums are written out, so that each half-step is one fused
    elementwise loop.

    Args:
        z: [M, M, T], source, destination, row.
        iterations: at least 1; the first one normalises rows by a softmax.
        eps: added to every entry once and to every sum.
    """
    streams = z.shape[0]

    def rows(c):
        return _in_order([c[:, n] for n in range(streams)])[:, None] + eps

    def columns(c):
        return _in_order([c[m] for m in range(streams)])[None] + eps

    e = jnp.exp(z - jnp.max(z, axis=1, keepdims=True))
    c = e / _in_order([e[:, n] for n in range(streams)])[:, None] + eps
    c = c / columns(c)

    def both(c, _):
        c = c / rows(c)
        return c / columns(c), None

    return lax.scan(both, c, length=iterations - 1)[0]


def mixes(streams, fn, base, scale, config: Config, wide) -> Mixes:
    """Coefficients from the streams (spec 6.2).

    Args:
        streams: [T, M, D].
        fn: float32 [(2 + M) M, M D], stream-major columns.
        base: float32 [(2 + M) M].
        scale: float32 [3], for pre, post and comb.
        config: the model's.
        wide: float32 (float64 in gradient checks).
    """
    M = config.hc_mult
    v = einops.rearrange(streams, "t m d -> t (m d)").astype(wide)
    r = lax.rsqrt(jnp.mean(jnp.square(v), axis=-1, keepdims=True) + config.rms_norm_eps)
    z = product(v, fn, wide) * r
    gain = jnp.repeat(scale.astype(wide), jnp.array([M, M, M * M]), total_repeat_length=(2 + M) * M)
    z = z * gain + base.astype(wide)
    pre = jax.nn.sigmoid(z[:, :M]) + config.hc_eps
    post = 2 * jax.nn.sigmoid(z[:, M : 2 * M])
    square = einops.rearrange(z[:, 2 * M :], "t (m n) -> m n t", m=M)
    comb = sinkhorn(square, config.hc_sinkhorn_iters, config.hc_eps)
    return Mixes(pre, post, einops.rearrange(comb, "m n t -> t m n"))


def collapse(streams: jax.Array, pre: jax.Array) -> jax.Array:
    """sum_m pre[m] X[m], rounded once (spec 6.3): [T, M, D], [T, M] -> [T, D]."""
    wide = streams.astype(pre.dtype)
    terms = [pre[:, m, None] * wide[:, m] for m in range(streams.shape[1])]
    return round_to(_in_order(terms), streams.dtype)


def stream_mean(streams: jax.Array, wide) -> jax.Array:
    """Mean over the streams, rounded once (spec 2.2 step 7b): [T, M, D] -> [T, D]."""
    total = _in_order([streams[:, m].astype(wide) for m in range(streams.shape[1])])
    return round_to(total / streams.shape[1], streams.dtype)


def expand(streams: jax.Array, output: jax.Array, mix: Mixes) -> jax.Array:
    """post[n] out + sum_m comb[m, n] X[m], rounded once (spec 6.3): [T, M, D]."""
    wide = streams.astype(mix.post.dtype)
    terms = [mix.post[:, :, None] * output.astype(wide.dtype)[:, None]]
    terms += [mix.comb[:, m, :, None] * wide[:, m, None] for m in range(streams.shape[1])]
    return round_to(_in_order(terms), streams.dtype)
