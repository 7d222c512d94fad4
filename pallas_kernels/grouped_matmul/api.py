"""Linears and routed experts: which implementation runs.

"gpu" is the Mosaic GPU kernel: an NVIDIA Hopper GPU, bfloat16 rows, weights in layout "gpu". All
else is plain JAX (`reference`). Naming an implementation that cannot run is an error.

Letters: T rows, K chosen experts, X experts, D hidden, F expert width, G groups, M and C rows and
columns of a weight.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.gpu_layout import ROWS
from pallas_kernels.grouped_matmul import reference, tilings
from pallas_kernels.grouped_matmul.reference import Experts
from pallas_kernels.layouts import QuantizedTensor
from pallas_kernels.quantize import fp8_blocks

# With more rows a dense weight pays to be unpacked once for XLA's own matmul.
_MOST_DENSE_ROWS = 512
# Up to this many pairs, comparing all with all is faster than sorting them.
_MOST_COMPARED = 2048


def linear(x: jax.Array, weight, *, implementation: str | None = None) -> jax.Array:
    """X W^T accumulated in float32 and rounded once (spec 5.6).

    Args:
        x: [..., C]; already through e4m3 if activations are quantised.
        weight: [M, C], `QuantizedTensor` or float.
        implementation: "gpu", "xla" or None for the best that can run.

    Returns:
        [..., M] in x's dtype.
    """
    *lead, C = x.shape
    few = math.prod(lead) <= _MOST_DENSE_ROWS
    if not _use_gpu("linear", implementation, ("xla",), x, (weight,), few):
        return reference.linear(x, weight)
    return _kernel(_dense_linear, reference.linear)(x.reshape(-1, C), weight).reshape(*lead, -1)


def grouped_linear(x: jax.Array, weight, *, groups: int, implementation=None) -> jax.Array:
    """As `linear` for each group with its own rows of the weight (spec 3.10).

    Args:
        x: [T, G, C].
        weight: [G * M, C].
        groups: G.
        implementation: see `linear`.

    Returns:
        [T, G, M].
    """
    fits = len(x) <= _MOST_DENSE_ROWS and weight.shape[0] % (64 * groups) == 0
    plain = functools.partial(reference.grouped_linear, groups=groups)
    if not _use_gpu("grouped_linear", implementation, ("xla",), x, (weight,), fits):
        return plain(x, weight)
    return _kernel(lambda x, weight: _dense_product(x, (weight,), groups), plain)(x, weight)


def expert_mlp(
    x, weight, experts: Experts, *, limit: float, quantize: bool, implementation=None
) -> jax.Array:
    """One expert on rows (spec 7.3); see `reference.expert_mlp`.

    `implementation` is "gpu", "xla" or None for the best that can run.
    """
    few = len(x) <= _MOST_DENSE_ROWS
    options = dict(limit=limit, quantize=quantize)
    plain = functools.partial(reference.expert_mlp, **options)
    if not _use_gpu("expert_mlp", implementation, ("xla",), x, experts, few):
        return plain(x, weight, experts)
    return _kernel(functools.partial(_dense_expert, **options), plain)(x, weight, experts)


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
    """Sum over the chosen experts, in ascending expert order (spec 7.2).

    Args:
        x: [T, D]; already through e4m3 if activations are quantised.
        chosen: int32 [T, K], ascending.
        weight: float32 [T, K].
        valid: bool [T]; rows that are not there give zero.
        experts: stacked weights.
        limit: clamp of gate and up; 0 means none.
        quantize: send the input of the down projection through e4m3.
        tile: rows in a tile of "tiles"; bits under "gpu" do not depend on its tiles.
        implementation: "gpu", "tiles", "dense" or None for the best that can run.

    Returns:
        float32 [T, D] (float64 for float64 inputs), not yet rounded.
    """
    options = dict(limit=limit, quantize=quantize)
    if not _use_gpu("routed_experts", implementation, ("tiles", "dense"), x, experts, True):
        return reference.routed_experts(
            x, chosen, weight, valid, experts,
            tile=tile, implementation=implementation, **options,
        )  # fmt: skip
    kernel, plain = (
        functools.partial(f, **options) for f in (_grouped_experts, reference.differentiable)
    )
    return _kernel(kernel, plain)(x, weight, experts, chosen, valid)


def _use_gpu(name, implementation, others, x, weights, worthwhile) -> bool:
    """Whether the kernel runs; raises if it was asked for and cannot."""
    if implementation not in (None, "gpu", *others):
        raise ValueError(
            f"{name}: implementation={implementation!r} does not exist; "
            f"choose None, {', '.join(map(repr, ('gpu', *others)))}"
        )
    if implementation in others:
        return False
    obstacle = next(filter(None, (_obstacle(x, weight) for weight in weights)), None)
    if implementation == "gpu":
        if obstacle:
            raise ValueError(f"{name}: implementation='gpu' cannot run: {obstacle}")
        return True
    quantized = all(isinstance(weight, QuantizedTensor) for weight in weights)
    return quantized and worthwhile and not obstacle


def _obstacle(x, weight) -> str | None:
    """Why the kernel cannot multiply these."""
    if not runs_here():
        return f"it needs an NVIDIA Hopper GPU, this is {jax.devices()[0].device_kind}"
    if x.dtype != jnp.bfloat16:
        return f"it needs bfloat16 rows, these are {x.dtype}"
    if isinstance(weight, QuantizedTensor):
        if weight.layout != "gpu":
            return f"it needs weights in layout 'gpu' (to_layout), these are {weight.layout}"
    elif weight.dtype != jnp.bfloat16 or weight.shape[-1] % 128 or weight.shape[-2] % 64:
        return (
            "it needs bfloat16 weights with rows in multiples of 64 and columns of 128, these are "
            f"{weight.dtype} {list(weight.shape)}"
        )
    return None


def runs_here() -> bool:
    """Whether the default device is one that the kernel was written for."""
    device = jax.devices()[0]
    return device.platform == "gpu" and device.compute_capability.startswith("9.")


def grouped_product(*arguments, **options) -> jax.Array:
    """The kernel, imported where it runs: it needs parts of jaxlib that not all builds have."""
    from pallas_kernels.grouped_matmul import gpu

    return gpu.grouped_product(*arguments, **options)


def _kernel(function, plain):
    """The function with the gradient of `plain`, which means the same."""
    call = jax.custom_vjp(function)
    call.defvjp(
        lambda *given: (function(*given), given),
        lambda given, cotangent: jax.vjp(plain, *given)[1](cotangent),
    )
    return call


def _tiling(products, weight, blocks, rows, split=False):
    format = weight.format if isinstance(weight, QuantizedTensor) else "bfloat16"
    device = jax.devices()[0].device_kind
    return tilings.choose(device, products, format, blocks, rows, split)


def _stack(weight, groups: int):
    """A weight [G * M, C] as G weights [G, M, C], for nothing."""
    return jax.tree.map(lambda a: a.reshape(groups, a.shape[0] // groups, *a.shape[1:]), weight)


def _dense_product(x, weights, groups, share=None, limit=0.0):
    """X [T, G, C] times each group's weights [G * M, C]: [T, G, M]."""
    T = x.shape[0]
    stacks = tuple(_stack(w, groups) for w in weights)
    _, M, C = stacks[0].shape
    blocks = groups * M // ROWS
    split = tilings.splits(blocks, C)
    tiling = _tiling(len(weights), stacks[0], blocks, tilings.tile_rows(T), split)
    N = tiling.rows
    tiles = -(-T // N)
    rows = jnp.pad(x, ((0, tiles * N - T), (0, 0), (0, 0))).swapaxes(0, 1)
    group = jnp.repeat(jnp.arange(groups, dtype=jnp.int32), tiles)
    if share is not None:
        share = jnp.pad(share, (0, tiles * N - T))
    y = grouped_product(
        rows.reshape(-1, C), stacks, group, jnp.full(1, groups * tiles, jnp.int32), share,
        tiling=tiling, limit=limit,
    )  # fmt: skip
    return y.reshape(groups, tiles * N, M)[:, :T].swapaxes(0, 1)


def _dense_linear(x, weight):
    return _dense_product(x[:, None], (weight,), 1)[:, 0]


def _dense_expert(x, weight, experts, limit, quantize):
    hidden = _dense_product(x[:, None], (experts.gate, experts.up), 1, weight, limit)
    hidden = fp8_blocks(hidden) if quantize else hidden
    return _dense_product(hidden, (experts.down,), 1)[:, 0]


def _grouped_experts(x, weight, experts, chosen, valid, limit, quantize):
    (T, K), X = chosen.shape, experts.count
    rows = tilings.expert_tile_rows(T * K, X)
    up, down = (
        _tiling(products, weight, X * weight.shape[-2] // ROWS, rows)
        for products, weight in ((2, experts.gate), (1, experts.down))
    )
    tiles = arrange_tiles(jnp.where(valid[:, None], chosen, X).reshape(T * K), X, rows)
    hidden = grouped_product(
        x[tiles.source // K], (experts.gate, experts.up), tiles.group, tiles.live,
        weight.reshape(T * K)[tiles.source], tiling=up, limit=limit,
    )  # fmt: skip
    hidden = fp8_blocks(hidden) if quantize else hidden
    results = grouped_product(hidden, (experts.down,), tiles.group, tiles.live, tiling=down)

    address = jnp.where(valid[:, None], tiles.address.reshape(T, K), 0)
    total = jnp.zeros(x.shape, jnp.float32)
    for k in range(K):
        total = total + results[address[:, k]].astype(jnp.float32)
    return jnp.where(valid[:, None], total, 0)


class Tiles(NamedTuple):
    """Pairs of a row and an expert, laid out in tiles of pairs that share the expert.

    Attributes:
        group: int32 [tiles], expert of each tile; tiles that are not live name none.
        live: int32 [1], tiles that hold pairs; they come first.
        source: int32 [tiles * rows], the pair at each place; 0 where there is none.
        address: int32 [pairs], the place of each pair; out of range if it has no expert.
    """

    group: jax.Array
    live: jax.Array
    source: jax.Array
    address: jax.Array


def arrange_tiles(expert: jax.Array, count: int, rows: int) -> Tiles:
    """Tiles of `rows` places for pairs with these experts, int32 [pairs]; `count` means none."""
    pairs = expert.shape[0]
    rank, size = _ranks(expert, count)
    tiles = (size + rows - 1) // rows
    last = jnp.cumsum(tiles)
    most = min(pairs, pairs // rows + count)
    group = jnp.sum(last[:, None] <= jnp.arange(most), axis=0, dtype=jnp.int32)
    first_row = (last - tiles) * rows
    address = first_row[jnp.minimum(expert, count - 1)] + rank
    address = jnp.where(expert < count, address, most * rows)
    source = jnp.zeros(most * rows, jnp.int32).at[address].set(
        jnp.arange(pairs, dtype=jnp.int32), mode="drop"
    )
    return Tiles(group, last[-1:].astype(jnp.int32), source, address)


def _ranks(expert, count):
    """For each pair, how many before it chose the same expert; and the pairs of every expert."""
    pairs = expert.shape[0]
    size = jnp.sum(expert == jnp.arange(count)[:, None], axis=1, dtype=jnp.int32)
    if pairs <= _MOST_COMPARED:
        place = jnp.arange(pairs)
        same = (expert[:, None] == expert) & (place[:, None] > place)
        return jnp.sum(same, axis=1, dtype=jnp.int32), size
    order = jnp.argsort(expert, stable=True)
    first = jnp.concatenate([jnp.cumsum(size) - size, jnp.sum(size, keepdims=True)])
    place = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32))
    return place - first[expert], size
