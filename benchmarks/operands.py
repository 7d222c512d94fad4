"""Random weights, rows and routing of the released kinds, and exact results to compare with.

Letters: T rows (tokens), K chosen experts, X experts, D hidden, F expert width, O and I rows and
columns of a weight, G groups of a weight.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul import Experts
from pallas_kernels.layouts import QuantizedTensor, codes_shape, scale_shape
from pallas_kernels.quantize import fp8_blocks
from pallas_kernels.rounding import round_to

LIMIT = 10.0
# Root mean square of codes drawn uniformly; with it, products have a variance near 1.
CODE_SIZE = {"fp4_1x32": 2.9, "fp8_32x32": 100.0}


@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def random_weight(key, format: str, shape: tuple[int, int], layout: str = "plain"):
    """A weight [O, I] of random codes and scales; in format "bfloat16" an array."""
    codes_key, scale_key = jax.random.split(key)
    if format == "bfloat16":
        return (jax.random.normal(codes_key, shape) / math.sqrt(shape[1])).astype(jnp.bfloat16)
    codes = jax.random.bits(codes_key, codes_shape(format, shape), jnp.uint8)
    if format != "fp4_1x32":
        codes = jnp.where(codes & 0x7F == 0x7F, codes & 0x80, codes)  # no NaN
        codes = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    middle = round(127 - math.log2(CODE_SIZE[format] * math.sqrt(shape[1])))
    scale = jax.random.randint(scale_key, scale_shape(format, shape), middle - 1, middle + 2)
    return QuantizedTensor(codes, scale.astype(jnp.uint8), format).to_layout(layout)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_experts(keys, format: str, sizes: tuple[int, int], layout: str) -> Experts:
    """Experts of keys [X, 3], one after another: their plain codes never exist all at once."""
    D, F = sizes

    def stack(keys, shape):
        return lax.map(lambda key: random_weight(key, format, shape, layout), keys)

    return Experts(stack(keys[:, 0], (F, D)), stack(keys[:, 1], (F, D)), stack(keys[:, 2], (D, F)))


@functools.partial(jax.jit, static_argnums=1)
def random_rows(key, shape: tuple[int, ...]):
    """Normal rows that went through e4m3, bfloat16."""
    return fp8_blocks(jax.random.normal(key, shape, jnp.bfloat16))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_routing(key, rows: int, experts: int, top: int, skew: float = 0.0):
    """Chosen experts, ascending, and weights [T, K]; `skew` makes some experts popular."""
    keys = jax.random.split(key, 3)
    scores = jax.random.gumbel(keys[0], (rows, experts))
    scores += skew * jax.random.normal(keys[1], (experts,))
    chosen = jnp.sort(lax.top_k(scores, top)[1], axis=-1).astype(jnp.int32)
    return chosen, jax.random.uniform(keys[2], (rows, top), minval=0.1, maxval=0.6)


def weight_bytes(format: str, shape: tuple[int, ...]) -> int:
    """Bytes of a weight as released; a layout may store more, which is no excuse."""
    if format == "bfloat16":
        return 2 * math.prod(shape)
    return math.prod(codes_shape(format, shape)) + math.prod(scale_shape(format, shape))


def _values(weight, dtype=jnp.float32):
    return weight.dequantize(dtype) if isinstance(weight, QuantizedTensor) else weight.astype(dtype)


@functools.partial(jax.jit, static_argnums=(4, 5))
def exact_experts(x, chosen, weight, keys, format: str, sizes: tuple[int, int]):
    """Every expert of `random_experts` over all rows, in float32, rounded where spec 7.3 rounds."""
    D, F = sizes
    product = functools.partial(jnp.einsum, "ti,oi->to", precision=lax.Precision.HIGHEST)

    def bf16(v):
        return round_to(v, jnp.bfloat16).astype(jnp.float32)

    def add(total, item):
        index, (gate, up, down) = item
        share = jnp.sum(jnp.where(chosen == index, weight, 0), axis=1)[:, None]
        g = bf16(product(x, _values(random_weight(gate, format, (F, D)))))
        u = bf16(product(x, _values(random_weight(up, format, (F, D)))))
        g, u = jnp.minimum(g, LIMIT), jnp.clip(u, -LIMIT, LIMIT)
        hidden = fp8_blocks(bf16(g * jax.nn.sigmoid(g) * u * share))
        return total + bf16(product(hidden, _values(random_weight(down, format, (D, F))))), None

    x = x.astype(jnp.float32)
    items = jnp.arange(keys.shape[0]), (keys[:, 0], keys[:, 1], keys[:, 2])
    return lax.scan(add, jnp.zeros(x.shape, jnp.float32), items)[0]


@jax.jit
def exact_linear(x, weight):
    """Products [T, O] of rows [T, I], or [T, G, O] of rows [T, G, I], in float32."""
    w = _values(weight)
    x = x.astype(jnp.float32)
    precision = lax.Precision.HIGHEST
    if x.ndim == 2:
        return jnp.einsum("ti,oi->to", x, w, precision=precision)
    w = w.reshape(x.shape[1], -1, w.shape[-1])  # [G, O, I]
    return jnp.einsum("tgi,goi->tgo", x, w, precision=precision)
