"""The cache: everything a sequence leaves behind for its next rows (spec 4).

What grows with the sequence (compressed entries, index keys) lives in paged pools; what does not
(window KV, compressor parts, token history) lives in one ring per slot, indexed by absolute
position. The cache holds no length: a row's position decides what it sees, so taking tokens back
is going on from an earlier position. Rings are longer than the look-back by the rows that one
call may add, so nothing an earlier position needs is overwritten.

A page holds the entries of `page` consecutive tokens of one slot, whatever the compression ratio.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from deepinfer_jax.config import Config
from deepinfer_jax.numerics import Numerics
from pallas_kernels.paged import entry_address

_DEFAULT_PAGE = 64
STORAGES = ("values", "packed")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["window", "entries", "keys", "parts", "history", "pages"],
    meta_fields=["page", "storage"],
)
@dataclasses.dataclass(frozen=True)
class Cache:
    """Arrays of `slots` sequences. V: float values, P: packed storage.

    Attributes:
        window: per layer, then per drafter stage if the cache was made with `drafts`; V [slots,
            ring, E]; P uint8 [slots, ring, E + E/32].
        entries: per key-value source, V [pages, page / ratio, E]; P uint8 [.., E/2 + E/16].
        keys: per key-value source, V [pages, page / ratio, C]; P uint8 [.., C/2 + C/32].
        parts: per key-value source, float32 [slots, ring, 2, E], or None for ratio 1.
        history: int32 [slots, ring] compressed token ids, or None without Engram.
        pages: int32 [slots, pages per slot], rows of the pools.
        page: static, tokens in a page.
        storage: static, "values" or "packed".
    """

    window: tuple[jax.Array, ...]
    entries: tuple[jax.Array, ...]
    keys: tuple[jax.Array, ...]
    parts: tuple[jax.Array | None, ...]
    history: jax.Array | None
    pages: jax.Array
    page: int
    storage: str

    @property
    def slots(self) -> int:
        """Number of sequences."""
        return self.pages.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens a slot can hold."""
        return self.pages.shape[1] * self.page

    def replace(self, **fields) -> "Cache":
        """A copy with other fields."""
        return dataclasses.replace(self, **fields)


def default_page(config: Config) -> int:
    """Tokens in a page: the first multiple of every ratio from 64 on."""
    together = math.lcm(*(r.ratio for r in config.layers if r.ratio))
    return -(-_DEFAULT_PAGE // together) * together


def init_cache(
    config: Config,
    slots: int,
    capacity: int,
    rows_per_slot: int = 1,
    *,
    numerics: Numerics | None = None,
    storage: str = "values",
    page: int | None = None,
    drafts: bool = False,
) -> Cache:
    """An empty cache in which every slot owns its pages.

    Args:
        config: the model's.
        slots: number of sequences.
        capacity: tokens each can hold; rounded up to whole pages.
        rows_per_slot: the most rows of one slot in a call; also how far a sequence may be rolled
            back, plus one.
        numerics: decides the dtype of stored values; None is the default numerics.
        storage: "values" keeps floats (`forward`, training); "packed" has the released formats'
            bytes.
        page: tokens in a page, a multiple of every compression ratio. None picks one.
        drafts: also keep what the drafter reads (spec 9.4).

    Raises:
        ValueError: a count below one, an unknown storage, a page that a ratio does not divide,
            drafts for a configuration without a drafter.
    """
    page = default_page(config) if page is None else page
    counts = {"slots": slots, "capacity": capacity, "rows_per_slot": rows_per_slot, "page": page}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"init_cache: {name} must be at least 1, got {value}")
    if storage not in STORAGES:
        raise ValueError(f"init_cache: storage must be one of {STORAGES}, got {storage!r}")
    for role in config.layers:
        if role.ratio and page % role.ratio:
            raise ValueError(
                f"init_cache: page must be a multiple of every compression ratio, got page={page} "
                f"with ratio {role.ratio} in layer {role.index}"
            )
    if drafts and not config.draft_layers:
        raise ValueError("init_cache: drafts=True, but the configuration has no drafter")
    numerics = numerics or Numerics()
    E, C = config.head_dim, config.index_head_dim
    sources = [config.layers[i] for i in config.kv_source_layer_ids]
    per_slot = -(-capacity // page)

    def vectors(lead, width, code_bits, group):
        if storage == "packed":
            return jnp.zeros((*lead, -(-width * code_bits // 8) + -(-width // group)), jnp.uint8)
        return jnp.zeros((*lead, width), numerics.activation)

    def pool(role, width, group):
        return vectors((slots * per_slot, page // role.ratio), width, 4, group)

    def ring(after):
        return vectors((slots, config.sliding_window + after), E, 8, 32)

    draft_ring = max(rows_per_slot - 1, config.dspark_block_size)
    return Cache(
        window=tuple(
            [ring(rows_per_slot - 1) for _ in config.layers]
            + [ring(draft_ring) for _ in config.draft_layers if drafts]
        ),
        entries=tuple(pool(role, E, 16) for role in sources),
        keys=tuple(pool(role, C, 32) for role in sources),
        parts=tuple(
            jnp.zeros((slots, role.ratio + rows_per_slot - 1, 2, E), numerics.wide)
            if role.ratio > 1
            else None
            for role in sources
        ),
        history=jnp.zeros((slots, config.engram_max_ngram_size + rows_per_slot - 1), jnp.int32)
        if config.engram_layer_ids
        else None,
        pages=jnp.arange(slots * per_slot, dtype=jnp.int32).reshape(slots, per_slot),
        page=page,
        storage=storage,
    )


def bytes_per_token(config: Config) -> float:
    """Bytes that a token adds to a packed cache for as long as its sequence lives (spec 4.2)."""
    page = default_page(config)
    cache = jax.eval_shape(lambda: init_cache(config, 1, page, storage="packed"))
    return sum(a.size * a.dtype.itemsize for a in cache.entries + cache.keys) / page


def bytes_per_slot(config: Config, rows_per_slot: int = 1) -> int:
    """Bytes of a packed cache that a sequence takes whatever its length: rings and history."""
    cache = jax.eval_shape(lambda: init_cache(config, 1, 1, rows_per_slot, storage="packed"))
    rings = jax.tree.leaves((cache.window, cache.parts, cache.history))
    return sum(a.size * a.dtype.itemsize for a in rings)


def write_ring(ring: jax.Array, slot, position, value) -> jax.Array:
    """The ring [slots, n, ...] with `value` [T, ...] at the rows' positions; -1 writes nothing."""
    slot = jnp.where(slot < 0, ring.shape[0], slot)
    return ring.at[slot, position % ring.shape[1]].set(value.astype(ring.dtype), mode="drop")


def write_entry(pool: jax.Array, pages: jax.Array, slot, entry, value) -> jax.Array:
    """The pool [pages, P, ...] with `value` [T, ...] as each row's entry; -1 writes nothing."""
    page, offset = entry_address(pages, slot, entry, pool.shape[1])
    beyond = entry >= pages.shape[1] * pool.shape[1]
    page = jnp.where((slot < 0) | (entry < 0) | beyond, pool.shape[0], page)
    return pool.at[page, offset].set(value.astype(pool.dtype), mode="drop")


def entries_in_order(pool: jax.Array, pages: jax.Array) -> jax.Array:
    """All entries a slot can hold, [slots, N, ...]."""
    return pool[pages].reshape(pages.shape[0], -1, *pool.shape[2:])
