"""A model as float weights to differentiate and everything else, and back (spec 5.5).

Codes of 4 and 8 bits cannot be differentiated: JAX refuses the integers and would round gradients
to the 8-bit floats. So `trainable` takes the values out as floats, `combine` puts them back
without changing their dtype, and `quantize` returns to the released formats.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from deepinfer_jax.checkpoint.tensor_names import FORMATS, parameter_specs
from deepinfer_jax.model.linear import as_array
from deepinfer_jax.model.transformer import Transformer
from pallas_kernels import layouts
from pallas_kernels.layouts import QuantizedTensor


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rest:
    """A model without its float weights: a pytree of what is left, with named gaps.

    Attributes:
        model: the model, `None` in place of every weight.
        shapes: static, the weights' names and shapes in the order of the model's structure.
    """

    model: Any
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = dataclasses.field(metadata={"static": True})


def _is_parameter(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Param)


def _name(path: tuple) -> str:
    return ".".join(str(getattr(key, "name", getattr(key, "idx", key))) for key in path)


def named_parameters(model: Transformer) -> dict[str, jax.Array | QuantizedTensor]:
    """Every weight by its path, which is its released name (experts of a layer stacked)."""
    paths = jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_parameter)
    return {_name(path): leaf.get_value() for path, leaf in paths if _is_parameter(leaf)}


def trainable(model: Transformer, dtype=jnp.float32) -> tuple[dict[str, jax.Array], Rest]:
    """Float weights by name, and the rest.

    Args:
        model: from `load`, quantised or not, in any layout.
        dtype: of the float weights; quantised ones are exact in bfloat16 and float32.

    Returns:
        A dict that `jax.grad` and optimisers accept, and what `combine` needs to use it.
    """
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise ValueError(f"trainable: dtype must be a float of at least 16 bits, got {dtype}")
    exact = jnp.float32 if dtype.itemsize > 2 else dtype
    weights = {n: as_array(w, exact).astype(dtype) for n, w in named_parameters(model).items()}
    gaps = jax.tree.map(
        lambda leaf: nnx.Param(None) if _is_parameter(leaf) else leaf, model, is_leaf=_is_parameter
    )
    return weights, Rest(gaps, tuple((name, w.shape) for name, w in weights.items()))


def combine(params: dict[str, jax.Array], rest: Rest) -> Transformer:
    """The model with these weights, in the dtype they have.

    Raises:
        ValueError: a weight is missing, unknown or of another shape, named.
    """
    shapes = dict(rest.shapes)
    wrong = sorted(set(shapes) ^ set(params))
    if wrong:
        kind = "missing" if wrong[0] in shapes else "unknown"
        raise ValueError(f"combine: {kind} weight {wrong[0]!r} ({len(wrong)} do not fit)")
    for name, weight in params.items():
        if weight.shape != shapes[name]:
            raise ValueError(
                f"combine: weight {name!r} must have shape {list(shapes[name])}, "
                f"got {list(weight.shape)}"
            )
    return with_parameters(rest.model, params)


def with_parameters(model: Transformer, weights: dict[str, Any]) -> Transformer:
    """A copy of the model with other weights by name."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: nnx.Param(weights[_name(path)]) if _is_parameter(leaf) else leaf,
        model,
        is_leaf=_is_parameter,
    )


def quantize(model: Transformer) -> Transformer:
    """The model in the released storage: e4m3 linears and tables, e2m1 experts, bfloat16 rest.

    Weights that the release keeps in float32 stay so. Already quantised weights are left
    alone, in any layout; the others become plain (`to_layout` arranges them).
    """
    specs = parameter_specs(model.config)

    def store(name: str, weight: jax.Array | QuantizedTensor) -> jax.Array | QuantizedTensor:
        kind = specs[name].kind
        if isinstance(weight, QuantizedTensor):
            return weight
        if kind in FORMATS:
            return layouts.quantize(weight, FORMATS[kind])
        return weight.astype(jnp.float32 if kind == "float32" else jnp.bfloat16)

    return with_parameters(model, {n: store(n, w) for n, w in named_parameters(model).items()})
