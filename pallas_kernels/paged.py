"""Addresses of compressed entries in paged pools.

A page holds the entries of `page` consecutive tokens, so one page table serves every compression
ratio: the pool of ratio r is [pages, page // r, width].
"""

import jax
import jax.numpy as jnp


def entry_address(
    pages: jax.Array, slot: jax.Array, entry: jax.Array, per_page: int
) -> tuple[jax.Array, jax.Array]:
    """Where entries live.

    Args:
        pages: int32 [slots, pages per slot].
        slot: int32 [...], any value for rows that are not there (clamped).
        entry: int32 [...], same shape; clamped to the slot's capacity.
        per_page: entries in a page of this pool.

    Returns:
        Page and offset within it, int32 [...].
    """
    slot = jnp.clip(slot, 0, pages.shape[0] - 1)
    entry = jnp.clip(entry, 0, pages.shape[1] * per_page - 1)
    return pages[slot, entry // per_page], entry % per_page
