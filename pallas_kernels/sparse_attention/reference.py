"""Sparse attention in plain jnp, two ways with one meaning.

Letters: T rows, G groups of R rows, H heads, E head width, W window, K selected entries, N
entries a slot can hold, S attended vectors (W + K for a row on its own).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged import entry_address
from pallas_kernels.rounding import round_to

# Gathered vectors are worked on in pieces of about this size, so that they stay in the cache of a
# CPU core (measured: 16 rows of 256 x 128 float32) or in a fraction of an accelerator's memory.
_PIECE_BYTES = {"cpu": 2 << 20}
_PIECE_BYTES_ACCELERATOR = 1 << 30
# Up to this many keys of a group, an accelerator multiplies by all of them rather than gathering.
_DENSE_KEYS = 4096
# Rows that share one stretch of the window in the dense form.
_WINDOW_BLOCK = 64


def sparse_attention(
    queries: jax.Array,
    window: jax.Array,
    sink: jax.Array,
    slot: jax.Array,
    position: jax.Array,
    *,
    width: int,
    scale: float,
    rounded: bool,
    entries: jax.Array | None = None,
    pages: jax.Array | None = None,
    selected: jax.Array | None = None,
    group: int = 1,
    with_weights: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Softmax attention with a sink over window positions and selected entries (spec 3.4, 3.9).

    Args:
        queries: [T, H, E].
        window: [slots, ring, E]; position p lives at p % ring. Keys and values in one.
        sink: float32 [H], a logit that takes part in the denominator only, not scaled.
        slot: int32 [T]; rows at -1 mean nothing.
        position: int32 [T].
        width: a row at position t sees the window positions t - width + 1 .. t.
        scale: multiplies the scores.
        rounded: round the unnormalised weights to bfloat16 before the value product.
        entries: [pages, P, E], the pool of compressed entries, if the layer has one.
        pages: int32 [slots, pages per slot].
        selected: int32 [T, K], entry numbers, -1 for none.
        group: rows of each aligned group share a slot and have consecutive positions.
        with_weights: also return the normalised weights.
        implementation: "gather", "dense" (needs group > 1) or None: dense on accelerators while a
            group has few keys.

    Returns:
        [T, H, E] in the dtype of the queries, and float32 [T, H, S] (window first, oldest position
        first; entries after it) or None.
    """
    if implementation not in (None, "gather", "dense"):
        raise ValueError(
            f"sparse_attention: implementation={implementation!r} does not exist; "
            "choose None, 'gather' or 'dense'"
        )
    if implementation == "dense" and group == 1:
        raise ValueError("sparse_attention: implementation='dense' needs rows in groups, got 1")
    T, _, E = queries.shape
    stored = 0 if selected is None else pages.shape[1] * entries.shape[1]
    if implementation is None:
        few = stored <= _DENSE_KEYS
        prefer = group > 1 and few and jax.default_backend() != "cpu"
        implementation = "dense" if prefer else "gather"

    options = (window, entries, pages, sink, width, scale, rounded, with_weights)
    if implementation == "gather":
        vectors = width + (0 if selected is None else selected.shape[1])
        unit, size, attend = 1, vectors * E, _gather
    else:
        block = min(group, _WINDOW_BLOCK)
        unit, size, attend = group, queries.shape[1] * group * (width + block + stored), _dense
    limit = _PIECE_BYTES.get(jax.default_backend(), _PIECE_BYTES_ACCELERATOR)
    piece = unit * max(1, limit // (size * 4))
    inputs = (queries, slot, position, selected)

    def run(rows):
        if implementation == "dense":
            rows = jax.tree.map(lambda a: a.reshape(-1, group, *a.shape[1:]), rows)
        return attend(*rows, *options)

    if T <= 2 * piece:
        return run(inputs)
    missing = -T % piece
    split = jax.tree.map(
        lambda a: jnp.pad(a, [(0, missing)] + [(0, 0)] * (a.ndim - 1)).reshape(
            (T + missing) // piece, piece, *a.shape[1:]
        ),
        inputs,
    )
    joined = lax.map(jax.checkpoint(run), split)
    return jax.tree.map(lambda a: a.reshape(T + missing, *a.shape[2:])[:T], joined)


def _dot(equation, a, b, wide):
    return jnp.einsum(
        equation, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=wide
    )


def _attend(parts, sink, rounded, wide):
    """One softmax over several sets of keys that the same rows see.

    Args:
        parts: (logits [..., R, H, S], valid [..., R, 1, S], values, equation) of each set; the
            equation multiplies weights by values to [..., R, H, E].
        sink: [H].
        rounded: round the unnormalised weights to bfloat16.
        wide: dtype of the sums.

    Returns:
        Outputs [..., R, H, E], and the normalised weights of each set as a list.
    """
    logits = [jnp.where(valid, x, -jnp.inf) for x, valid, _, _ in parts]
    top = functools.reduce(jnp.maximum, [jnp.max(x, axis=-1, keepdims=True) for x in logits])
    top = lax.stop_gradient(top)
    shares = [jnp.exp(x - top) for x in logits]
    total = sum(jnp.sum(e, axis=-1, keepdims=True) for e in shares)
    total = total + jnp.exp(sink.astype(wide)[:, None] - top)
    output = 0
    for e, (_, _, values, equation) in zip(shares, parts, strict=True):
        e = round_to(e, jnp.bfloat16) if rounded else e
        both = jnp.promote_types(e.dtype, values.dtype)
        output = output + _dot(equation, e.astype(both), values.astype(both), wide)
    return output / total, [e / total for e in shares]


def _silence(vectors, seen):
    """Zeros for what nobody sees: a zero weight times a leftover that is not a number is none."""
    return jnp.where(seen[..., None], vectors, 0)


def _gather(
    queries, slot, position, selected, window, entries, pages, sink, width, scale, rounded, weights
):
    """Every row reads its own vectors: the least arithmetic."""
    wide = jnp.promote_types(queries.dtype, jnp.float32)
    here = jnp.clip(slot, 0, window.shape[0] - 1)[:, None]
    seen = position[:, None] - jnp.arange(width - 1, -1, -1)  # [T, W]
    kv, valid = window[here, seen % window.shape[1]], seen >= 0
    if selected is not None:
        address = entry_address(pages, here, selected, entries.shape[1])
        kv = jnp.concatenate([kv, entries[address]], axis=1)  # [T, S, E]
        valid = jnp.concatenate([valid, selected >= 0], axis=1)
    kv = _silence(kv, valid)
    logits = _dot("the,tse->ths", queries, kv, wide) * scale
    one_row = (logits[:, None], valid[:, None, None], kv, "trhs,tse->trhe")
    output, (share,) = _attend([one_row], sink, rounded, wide)
    return round_to(output[:, 0], queries.dtype), (share[:, 0] if weights else None)


def _dense(
    queries, slot, position, selected, window, entries, pages, sink, width, scale, rounded, weights
):
    """Multiply by everything a group can see.

    A group's rows meet all of its entries, masked, and blocks of rows against the window they
    share: nothing is gathered per row, so the gradient scatters next to nothing. Inputs are
    grouped, [G, R, ...]; L rows make a block.
    """
    wide = jnp.promote_types(queries.dtype, jnp.float32)
    G, R, H, _ = queries.shape
    block = _WINDOW_BLOCK if R % _WINDOW_BLOCK == 0 else R
    here = jnp.clip(slot[:, :1], 0, window.shape[0] - 1)
    near = jnp.arange(width + block - 1)
    back = position[:, ::block, None] - (width - 1) + near  # [G, R / L, W + L - 1]
    kv = window[here[..., None], back % window.shape[1]]
    row = jnp.arange(block)[:, None]
    valid = (near >= row) & (near < row + width) & (back >= 0)[:, :, None]  # [G, R/L, L, W+L-1]
    kv = _silence(kv, valid.any(axis=2))
    blocks = queries.reshape(G, R // block, block, H, -1)
    logits = _dot("gbrhe,gbse->gbrhs", blocks, kv, wide) * scale
    parts = [(logits, valid[:, :, :, None], kv, "gbrhs,gbse->gbrhe")]
    if selected is not None:
        pool = entries[pages[here[:, 0]]].reshape(G, -1, entries.shape[2])  # [G, N, E]
        N = pool.shape[1]
        chosen = jnp.zeros((G, R, N), bool)
        index = (jnp.arange(G)[:, None, None], jnp.arange(R)[:, None])
        chosen = chosen.at[*index, jnp.where(selected < 0, N, selected)].set(True, mode="drop")
        pool = _silence(pool, chosen.any(axis=1))
        logits = _dot("grhe,gse->grhs", queries, pool, wide) * scale
        shape = (G, R // block, block)
        logits, chosen = logits.reshape(*shape, H, N), chosen.reshape(*shape, 1, N)
        parts += [(logits, chosen, pool, "gbrhs,gse->gbrhe")]
    output, shares = _attend(parts, sink, rounded, wide)
    output = round_to(output, queries.dtype).reshape(G * R, H, -1)
    if not weights:
        return output, None
    column = (row + jnp.arange(width))[None, None, :, None]
    picked = jnp.take_along_axis(shares[0], column, axis=-1)
    picked = picked.reshape(G * R, H, width)
    if selected is not None:
        chosen = selected.reshape(G * R, 1, -1)
        far = jnp.take_along_axis(shares[1].reshape(G * R, H, N), jnp.maximum(chosen, 0), axis=-1)
        picked = jnp.concatenate([picked, jnp.where(chosen < 0, 0, far)], axis=-1)
    return output, picked
