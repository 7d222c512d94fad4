"""`to_layout`: quantised weights of a model as the release stores them, or as kernels read them.

`pallas_kernels.layouts` says what an arrangement is; here is which weights of a model get it. Those
that cannot have it stay in layout "plain", where everything works without the kernels.
"""

import warnings

import jax
import jax.numpy as jnp

from deepinfer_jax.model.transformer import Transformer
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.trainable import named_parameters, with_parameters
from pallas_kernels.grouped_matmul import runs_here
from pallas_kernels.layouts import LAYOUTS, QuantizedTensor


def to_layout(model: Transformer, layout: str) -> Transformer:
    """The same model with its quantised weights in another arrangement. Values are unchanged.

    "gpu" is for the kernels on NVIDIA Hopper GPUs; "plain" is that of the released files, and the
    way back. The codes come back to the bit; scale bytes of blocks that are all zero, which mean
    nothing, become 127. Engram tables, and weights whose rows are no multiple of 64 or columns no
    multiple of 256, stay plain.

    Weights are rearranged one after the other, each by a program compiled once for its shape. "gpu"
    takes the same memory, up to one byte in a hundred for e4m3 weights. The given model keeps its
    own arrays, so until it is let go there are two copies; `load(layout=...)` never has both.

    Args:
        model: quantised or not. Not inside `jax.jit`, where nobody can look at the scales.
        layout: "plain" or "gpu".

    Warns:
        UserWarning: a weight stays plain because "gpu" cannot hold its scales, named.

    Raises:
        ValueError: an unknown layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"to_layout: layout must be one of {LAYOUTS}, got {layout!r}")
    weights = named_parameters(model)
    return with_parameters(model, {n: arranged(n, w, layout) for n, w in weights.items()})


def arranged(
    name: str, weight: jax.Array | QuantizedTensor, layout: str
) -> jax.Array | QuantizedTensor:
    """One weight in a layout, or as it is if it is a float or cannot be arranged so."""
    if not isinstance(weight, QuantizedTensor) or not weight.fits(layout):
        return weight
    try:
        # Waiting lets the caller free the old arrays before it makes room for the next ones.
        return jax.block_until_ready(weight.to_layout(layout))
    except ValueError as error:
        warnings.warn(f"{name} stays in layout {weight.layout}: {error}", stacklevel=3)
        return weight


def default_layout(numerics: Numerics) -> str:
    """The layout that is fastest here: "gpu" where its kernels run, on Hopper and in bfloat16."""
    return "gpu" if runs_here() and numerics.activation == jnp.bfloat16 else "plain"
