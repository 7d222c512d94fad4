"""Linear layers y = x W^T (spec 2.1, 5.6) over float or quantised weights.

Dequantised weights and quantised activations are exact in bfloat16, so one bfloat16 product with
float32 accumulation equals the released blockwise sum up to its order.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from deepinfer_jax.numerics import Numerics
from pallas_kernels.grouped_matmul import grouped_linear, linear
from pallas_kernels.layouts import QuantizedTensor
from pallas_kernels.quantize import fp8_blocks


def product(x: jax.Array, weight: jax.Array, wide) -> jax.Array:
    """Product of x [..., K] and weight [N, K], accumulated and returned in `wide` [..., N]."""
    if x.dtype != jnp.bfloat16 or weight.dtype != jnp.bfloat16:
        x, weight = x.astype(wide), weight.astype(wide)
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(
        x, weight, contract, precision=lax.Precision.HIGHEST, preferred_element_type=wide
    )


def as_array(weight: jax.Array | QuantizedTensor, dtype) -> jax.Array:
    """The weight's values; a quantised weight is exact in `dtype`, a float one is rounded to it."""
    if isinstance(weight, QuantizedTensor):
        return weight.dequantize(dtype)
    return weight.astype(dtype)


class Linear(nnx.Module):
    """A weight [N, K], float or quantised."""

    def __init__(self, take):
        self.weight = nnx.Param(take("weight"))

    def plain(self, x: jax.Array) -> jax.Array:
        """`blinear` of spec 2.1: activation as it is, result rounded to its dtype."""
        return linear(x, self.weight.get_value())

    def grouped(self, x: jax.Array, groups: int) -> jax.Array:
        """`plain` for each group with its own rows of the weight: [T, G, K] to [T, G, N / G]."""
        return grouped_linear(x, self.weight.get_value(), groups=groups)

    def quantized(self, x: jax.Array, numerics: Numerics) -> jax.Array:
        """`qlinear` of spec 2.1: activation through e4m3 first."""
        if numerics.quantize_activations:
            x = fp8_blocks(x)
        return self.plain(x)

    def wide(self, x: jax.Array, numerics: Numerics) -> jax.Array:
        """Unrounded result, for logits, routers and compressors: weights keep their own dtype."""
        return product(x, self.weight.get_value(), numerics.wide)
