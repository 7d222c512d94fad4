"""Index scores and selection in plain jnp: the meaning of the operation.

Letters: T rows, G groups of R rows of one slot, J index heads, C index width, N entries a slot can
hold, P entries in a page, K selected entries.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rounding import round_to


def _bf16(x, on):
    return round_to(x, jnp.bfloat16).astype(x.dtype) if on else x


def _dot(equation, a, b, wide):
    return jnp.einsum(
        equation, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=wide
    )


def index_scores(
    queries: jax.Array,
    gains: jax.Array,
    keys: jax.Array,
    pages: jax.Array,
    slot: jax.Array,
    visible: jax.Array,
    *,
    group: int,
    rounded: bool,
) -> jax.Array:
    """Scores of every entry of a row's slot, -inf where it is not visible (spec 3.6).

    Args:
        queries: [T, J, C].
        gains: [T, J], may be negative.
        keys: [pages, P, C], the pool.
        pages: int32 [slots, pages per slot].
        slot: int32 [T]; rows at -1 read slot 0 and mean nothing.
        visible: int32 [T], number of visible entries.
        group: rows of each aligned group share a slot, so they share one read of the keys. 1 makes
            no such promise and computes row by row, page by page, with shapes that depend neither
            on the capacity nor on the other rows.
        rounded: round to bfloat16 after the dot, after the gain and after the sum.

    Returns:
        float32 [T, N] (float64 for float64 inputs).
    """
    wide = jnp.promote_types(queries.dtype, jnp.float32)
    per_page, count = keys.shape[1], pages.shape[1]
    entries = count * per_page
    gains = gains.astype(wide)

    if group > 1:
        first = jnp.clip(slot[::group], 0, pages.shape[0] - 1)
        k = keys[pages[first]].reshape(-1, entries, keys.shape[2])  # [G, N, C]
        heads = queries.reshape(-1, group, *queries.shape[1:]).transpose(2, 0, 1, 3)  # [J, G, R, C]

        @jax.checkpoint
        def add_head(total, head):
            q, gain = head
            d = _bf16(_dot("grc,gnc->grn", q, k, wide), rounded)
            return total + _bf16(jax.nn.relu(d) * gain[..., None], rounded), None

        gain = gains.reshape(-1, group, gains.shape[1]).transpose(2, 0, 1)
        start = jnp.zeros((*heads.shape[1:3], entries), wide)
        scores = lax.scan(add_head, start, (heads, gain))[0].reshape(-1, entries)
    else:
        row_pages = pages[jnp.clip(slot, 0, pages.shape[0] - 1)]  # [T, pages per slot]

        def add_page(i, scores):
            k = keys[lax.dynamic_index_in_dim(row_pages, i, 1, keepdims=False)]  # [T, P, C]
            d = _bf16(_dot("tjc,tpc->tjp", queries, k, wide), rounded)
            part = jnp.sum(_bf16(jax.nn.relu(d) * gains[..., None], rounded), axis=1)
            return lax.dynamic_update_slice_in_dim(scores, part, i * per_page, 1)

        most = jnp.max(jnp.where(slot < 0, 0, visible))
        needed = jnp.minimum((most + per_page - 1) // per_page, count)
        start = jnp.zeros((queries.shape[0], entries), wide)
        scores = lax.fori_loop(0, needed, add_page, start)

    hidden = jnp.arange(entries) >= visible[:, None]
    return jnp.where(hidden, -jnp.inf, _bf16(scores, rounded))


def candidate_blocks(
    scores: jax.Array, visible: jax.Array, *, block: int, keep: int
) -> tuple[jax.Array, jax.Array]:
    """The blocks of entries that later layers may choose from (spec 3.8).

    Args:
        scores: [T, N], -inf where hidden.
        visible: int32 [T].
        block: entries in a block.
        keep: blocks kept; the newest visible block always is. Ties: the lower block.

    Returns:
        Block scores [T, ceil(N / block)] (+inf at the newest block) and kept bool, same shape.
    """
    missing = -scores.shape[1] % block
    padded = jnp.pad(scores, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    best = jnp.max(padded.reshape(padded.shape[0], -1, block), axis=-1)
    column = jnp.arange(best.shape[1])
    best = jnp.where(column == (visible[:, None] - 1) // block, jnp.inf, best)
    if keep >= best.shape[1]:
        return best, best > -jnp.inf
    value, index = lax.top_k(best, keep)
    row = jnp.arange(best.shape[0])[:, None]
    return best, jnp.zeros(best.shape, bool).at[row, index].set(value > -jnp.inf)


def top_entries(scores: jax.Array, *, keep: int, width: int) -> jax.Array:
    """The entries with the highest scores; among equals the lower entry (spec 3.7).

    Args:
        scores: [T, N], -inf where an entry may not be chosen.
        keep: entries kept at most.
        width: columns of the result, at least min(keep, N).

    Returns:
        int32 [T, width], ascending, -1 behind the last one.
    """
    entries = scores.shape[1]
    value, index = lax.top_k(scores, min(keep, entries))
    chosen = jnp.sort(jnp.where(value > -jnp.inf, index, entries), axis=1)
    chosen = jnp.pad(chosen, ((0, 0), (0, width - chosen.shape[1])), constant_values=entries)
    return jnp.where(chosen < entries, chosen, -1).astype(jnp.int32)


