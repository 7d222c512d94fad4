"""Rows: the flat list of tokens that one step processes, and how row operations are run.

Prefill chunk, single-token decode, draft verification and teacher forcing are the same call on T
rows. A row knows its slot (which sequence of the cache) and its absolute position; nothing else
about the call may influence it. `over_rows` is where reproducibility comes from: XLA picks a
kernel by shape, so a row's bits depend on how many rows are computed together, unless every
operation always sees the same number of rows.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "slot", "position", "image", "until"],
    meta_fields=["group"],
)
@dataclasses.dataclass(frozen=True)
class Rows:
    """The tokens of one step.

    Attributes:
        tokens: int32 [T].
        slot: int32 [T], the sequence of each row; -1 marks a row that is not there: it writes
            nothing and its results mean nothing.
        position: int32 [T], absolute. Rows of a slot are adjacent and ordered.
        image: bool [T], inside an image span.
        group: static; every aligned run of `group` rows belongs to one slot, has consecutive
            positions and starts with a valid row or holds none. Fast mode shares keys within it.
        until: int32 [T], the last position that a row sees; None: its own. Rows of a draft block
            see all of it.
    """

    tokens: jax.Array
    slot: jax.Array
    position: jax.Array
    image: jax.Array
    group: int = 1
    until: jax.Array | None = None

    @property
    def valid(self) -> jax.Array:
        """Which rows are there, bool [T]."""
        return self.slot >= 0

    def pad(self, total: int) -> "Rows":
        """The same rows followed by invalid ones; the promise of groups is dropped."""
        missing = total - self.tokens.shape[0]
        empty = Rows(0, -1, 0, False, until=None if self.until is None else 0)
        return jax.tree.map(
            lambda a, value: jnp.pad(a, (0, missing), constant_values=value), self._alone(), empty
        )

    def compact(self) -> "Rows":
        """The same rows with the valid ones in front, in their order; groups are dropped."""
        order = jnp.argsort(~self.valid, stable=True)
        return jax.tree.map(lambda a: a[order], self._alone())

    def _alone(self) -> "Rows":
        return dataclasses.replace(self, group=1)


def rectangle(tokens, slot, start, count, image) -> Rows:
    """Rows of B sequences side by side, S positions each.

    Args:
        tokens: int32 [B, S].
        slot: int32 [B].
        start: int32 [B], position of the first column.
        count: int32 [B], valid rows of each sequence; the rest is padding.
        image: bool [B, S].
    """
    batch, width = tokens.shape
    column = jnp.arange(width, dtype=jnp.int32)
    slots = jnp.where(column < count[:, None], slot[:, None], -1)
    positions = start[:, None] + column
    return Rows(
        tokens.reshape(batch * width),
        slots.reshape(batch * width).astype(jnp.int32),
        positions.reshape(batch * width).astype(jnp.int32),
        image.reshape(batch * width),
        group=width,
    )


def padded_total(total: int, tile: int | None) -> int:
    """Rows to pad to, so that `over_rows` may cut them into tiles.

    At least two tiles: XLA sees through the slice of a single one and then compiles its body
    differently from that of every other row count.
    """
    return total if tile is None else max(2 * tile, -(-total // tile) * tile)


def over_rows(function: Callable[..., Any], *inputs, tile: int | None, live: jax.Array) -> Any:
    """Apply a row operation to all rows, in fixed tiles if `tile` is given.

    The number of tiles is data: tiles past the last valid row are skipped (their results are
    zero), and XLA can neither unroll the loop nor fuse it with its surroundings, so the body is
    compiled the same way whatever the number of rows.

    Args:
        function: pytrees with leading axis `rows` -> pytree with leading axis `rows`; a row's
            result may depend on that row only.
        *inputs: pytrees with leading axis T, a row count of `padded_total`.
        tile: rows per tile, or None for one call on all rows.
        live: int32 [], rows up to and including the last valid one.
    """
    if tile is None:
        return function(*inputs)

    def tile_of(i):
        return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, i * tile, tile), inputs)

    total = jax.tree.leaves(inputs)[0].shape[0]
    shapes = jax.eval_shape(lambda: function(*tile_of(0)))
    empty = jax.tree.map(lambda s: jnp.zeros((total, *s.shape[1:]), s.dtype), shapes)

    def body(i, results):
        return jax.tree.map(
            lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, i * tile, 0),
            results,
            function(*tile_of(i)),
        )

    return lax.fori_loop(0, (live + tile - 1) // tile, body, empty)
