"""Sparse attention by gathering, in plain jnp: the meaning of the operation.

Letters: T rows, H heads, E head width, W window, K selected entries, S = W + K attended vectors.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged import entry_address

# Gathered vectors are worked on in pieces of about this size, so that they stay in the cache of a
# CPU core (measured: 16 rows of 256 x 128 float32) or in a fraction of an accelerator's memory.
_PIECE_BYTES = {"cpu": 2 << 20}
_PIECE_BYTES_ACCELERATOR = 1 << 30


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
    with_weights: bool = False,
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
        with_weights: also return the normalised weights.

    Returns:
        [T, H, E] in the dtype of the queries, and float32 [T, H, S] (window first, oldest position
        first; entries after it) or None.
    """

    def attend(rows):
        return _attend(
            *rows, window, entries, pages, sink, width, scale, rounded, with_weights
        )

    inputs = (queries, slot, position, selected)
    T, _, E = queries.shape
    vectors = width + (0 if selected is None else selected.shape[1])
    limit = _PIECE_BYTES.get(jax.default_backend(), _PIECE_BYTES_ACCELERATOR)
    piece = max(1, limit // (vectors * E * 4))
    if T <= 2 * piece:
        return attend(inputs)
    missing = -T % piece
    split = jax.tree.map(
        lambda a: jnp.pad(a, [(0, missing)] + [(0, 0)] * (a.ndim - 1)).reshape(
            (T + missing) // piece, piece, *a.shape[1:]
        ),
        inputs,
    )
    joined = lax.map(jax.checkpoint(attend), split)
    return jax.tree.map(lambda a: a.reshape(T + missing, *a.shape[2:])[:T], joined)


def _attend(
    queries, slot, position, selected, window, entries, pages, sink, width, scale, rounded, weights
):
    wide = jnp.promote_types(queries.dtype, jnp.float32)
    here = jnp.clip(slot, 0, window.shape[0] - 1)[:, None]
    seen = position[:, None] - jnp.arange(width - 1, -1, -1)  # [T, W]
    kv, valid = window[here, seen % window.shape[1]], seen >= 0
    if selected is not None:
        address = entry_address(pages, here, selected, entries.shape[1])
        kv = jnp.concatenate([kv, entries[address]], axis=1)  # [T, S, E]
        valid = jnp.concatenate([valid, selected >= 0], axis=1)

    def dot(equation, a, b):
        return jnp.einsum(
            equation, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=wide
        )

    logits = dot("the,tse->ths", queries, kv) * scale
    logits = jnp.where(valid[:, None], logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True)
    e = jnp.exp(logits - lax.stop_gradient(top))
    sink = jnp.exp(sink.astype(wide)[:, None] - lax.stop_gradient(top))
    total = jnp.sum(e, axis=-1, keepdims=True) + sink
    e_value = e.astype(jnp.bfloat16) if rounded else e.astype(wide)
    output = (dot("ths,tse->the", e_value, kv.astype(e_value.dtype)) / total).astype(queries.dtype)
    return output, (e / total if weights else None)
