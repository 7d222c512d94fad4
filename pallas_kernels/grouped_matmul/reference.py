"""Routed experts in plain jnp, two ways with one meaning.

`tiles` sorts the (row, choice) pairs by expert and walks over fixed tiles of rows that share an
expert: only chosen experts are read, and the shapes of a tile depend on nothing else. `dense` runs
every expert over all rows and weights most results with zero: the better form where a device is
limited by launches rather than by arithmetic, and the one that is differentiated.

Letters: T rows, K chosen experts, X experts, D hidden, F expert width.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts import QuantizedTensor
from pallas_kernels.quantize import fp8_blocks
from pallas_kernels.rounding import round_to

# Up to this ratio of experts to choices, a device with cheap arithmetic and dear launches runs all.
_DENSE_RATIO = 8


class Experts(NamedTuple):
    """Gate [X, F, D], up [X, F, D] and down [X, D, F] weights, float or quantised."""

    gate: Any
    up: Any
    down: Any

    def take(self, index: jax.Array) -> "Experts":
        """The weights of one expert, without the leading axis."""
        return Experts(*jax.tree.map(lambda a: a[index], tuple(self)))

    @property
    def count(self) -> int:
        """X."""
        return jax.tree.leaves(self.gate)[0].shape[0]


def linear(x: jax.Array, weight) -> jax.Array:
    """X [..., C] times a weight [M, C], accumulated wide and rounded once (spec 5.6): [..., M]."""
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return _product(lax.dot_general, x, _values(weight, x.dtype), contract)


def grouped_linear(x: jax.Array, weight, groups: int) -> jax.Array:
    """`linear` of x [T, G, C] with a weight [G * M, C], each group with its own rows: [T, G, M]."""
    w = _values(weight, x.dtype)
    w = w.reshape(groups, -1, w.shape[-1])
    return _product(functools.partial(jnp.einsum, "tgc,gmc->tgm"), x, w)


def _values(weight, dtype) -> jax.Array:
    return weight.dequantize(dtype) if isinstance(weight, QuantizedTensor) else weight.astype(dtype)


def _product(product, x, *operands) -> jax.Array:
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = product(x, *operands, precision=lax.Precision.HIGHEST, preferred_element_type=wide)
    return round_to(y, x.dtype)


def expert_mlp(x, weight, experts: Experts, *, limit: float, quantize: bool) -> jax.Array:
    """One expert on rows (spec 7.3).

    Args:
        x: [T, D]; already through e4m3 if activations are quantised.
        weight: float32 [T], the routing weight, or None for the shared expert.
        experts: weights without the expert axis: [F, D], [F, D], [D, F].
        limit: clamp of gate (above) and up (both sides); 0 means none (spec 7.4).
        quantize: send the input of the down projection through e4m3.

    Returns:
        [T, D] in x's dtype.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    gate = linear(x, experts.gate).astype(wide)
    up = linear(x, experts.up).astype(wide)
    if limit:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    hidden = gate * jax.nn.sigmoid(gate) * up
    if weight is not None:
        hidden = hidden * weight[:, None]
    hidden = round_to(hidden, x.dtype)
    return linear(fp8_blocks(hidden) if quantize else hidden, experts.down)


def routed_experts(
    x: jax.Array,
    chosen: jax.Array,
    weight: jax.Array,
    valid: jax.Array,
    experts: Experts,
    *,
    limit: float,
    quantize: bool,
    tile: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """What `api.routed_experts` means and runs where the kernel does not; arguments as there.

    `implementation` None takes tiles on CPU or when `tile` is given, else dense while the experts
    are few for each choice. Rows that are not there cost nothing under "tiles".
    """
    if implementation is None:
        few = experts.count <= _DENSE_RATIO * chosen.shape[1]
        prefer_tiles = tile is not None or jax.default_backend() == "cpu" or not few
        implementation = "tiles" if prefer_tiles else "dense"
    if implementation == "dense":
        return _dense(x, chosen, weight, experts, limit, quantize)
    if tile is None:
        rows_each = chosen.size // experts.count
        tile = 8 if rows_each < 32 else 64
    return _tiles(x, weight, experts, chosen, valid, limit, quantize, tile)


def _dense(x, chosen, weight, experts, limit, quantize):
    wide = jnp.promote_types(x.dtype, jnp.float32)

    @jax.checkpoint
    def add_expert(total, item):
        index, one = item
        share = jnp.sum(jnp.where(chosen == index, weight, 0), axis=1)
        y = expert_mlp(x, share, one, limit=limit, quantize=quantize)
        # A row that did not choose the expert has hidden values of zero, hence y = 0 exactly.
        return total + y.astype(wide), None

    start = jnp.zeros(x.shape, wide)
    return lax.scan(add_expert, start, (jnp.arange(experts.count), experts))[0]


def _tiles_forward(x, chosen, weight, valid, experts, limit, quantize, tile):
    (T, K), X = chosen.shape, experts.count
    pairs = T * K
    wide = jnp.promote_types(x.dtype, jnp.float32)
    expert = jnp.where(valid[:, None], chosen, X).reshape(pairs)
    order = jnp.argsort(expert, stable=True)  # pairs by expert, absent rows last
    size = jnp.zeros(X + 1, jnp.int32).at[expert].add(1)
    first = jnp.cumsum(size) - size  # [X + 1], where an expert's pairs start in `order`
    tiles = (size[:X] + tile - 1) // tile
    last_tile = jnp.cumsum(tiles)  # [X], tiles of experts 0..x
    first_tile = last_tile - tiles

    def body(i, results):
        e = jnp.sum(last_tile <= i)  # the first expert whose tiles end behind this one
        place = first[e] + (i - first_tile[e]) * tile + jnp.arange(tile)
        pair = order[jnp.minimum(place, pairs - 1)]
        y = expert_mlp(
            x[pair // K],
            weight.reshape(pairs)[pair],
            experts.take(e),
            limit=limit,
            quantize=quantize,
        )
        return lax.dynamic_update_slice_in_dim(results, y, i * tile, 0)

    most = min(pairs, pairs // tile + X)
    results = lax.fori_loop(0, last_tile[-1], body, jnp.zeros((most * tile, x.shape[1]), x.dtype))

    rank = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32))
    e = jnp.minimum(expert, X - 1)
    address = (first_tile[e] * tile + rank - first[e]).reshape(T, K)
    address = jnp.where(valid[:, None], address, 0)
    total = jnp.zeros(x.shape, wide)
    for k in range(K):
        total = total + results[address[:, k]].astype(wide)
    return jnp.where(valid[:, None], total, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _tiles(x, weight, experts, chosen, valid, limit, quantize, tile):
    """Forward by tiles (a loop with a data-dependent length), backward through the dense form."""
    return _tiles_forward(x, chosen, weight, valid, experts, limit, quantize, tile)


def _tiles_save(x, weight, experts, chosen, valid, limit, quantize, tile):
    y = _tiles_forward(x, chosen, weight, valid, experts, limit, quantize, tile)
    return y, (x, weight, experts, chosen, valid)


def differentiable(x, weight, experts, chosen, valid, limit, quantize):
    """What the fast forms compute, in the form that is differentiated."""
    x, weight = (jnp.where(valid[:, None], a, 0) for a in (x, weight))  # 0 * NaN would not be 0
    total = _dense(x, chosen, weight, experts, limit, quantize)
    return jnp.where(valid[:, None], total, 0)


def _tiles_pull(limit, quantize, tile, saved, cotangent):
    plain = functools.partial(differentiable, limit=limit, quantize=quantize)
    return jax.vjp(plain, *saved)[1](cotangent)


_tiles.defvjp(_tiles_save, _tiles_pull)
