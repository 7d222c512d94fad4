"""CSA2: shared-latent attention over a window and selected compressed entries (spec 3).

Three stages. `project` makes everything a row contributes or asks with; `remember` writes it to
the cache, pooling groups that are complete; `attend` reads only from the cache. So a prefill
chunk and a single token see the same memory.

Letters: T rows, H heads, E head width, R rotated width, G output groups, K selected entries,
N entries a slot can hold, D hidden.
"""

from typing import Any, NamedTuple

import einops
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from deepinfer_jax.cache import Cache, write_entry, write_ring
from deepinfer_jax.config import Config, LayerRole
from deepinfer_jax.model.compressor import Compressor
from deepinfer_jax.model.indexer import Indexer, IndexQuery
from deepinfer_jax.model.linear import Linear
from deepinfer_jax.model.norms import RMSNorm
from deepinfer_jax.model.rotary import frequencies, rotate
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import Rows, over_rows
from pallas_kernels.index_select import candidate_blocks, index_scores, top_entries
from pallas_kernels.quantize import fp8_blocks, nvfp4_blocks
from pallas_kernels.sparse_attention import sparse_attention


class Projected(NamedTuple):
    """What the attention input of a row turns into."""

    queries: jax.Array  # [T, H, E], rotated
    window: jax.Array  # [T, E], rotated and quantised
    parts: jax.Array | None  # [T, 2, E] wide, or [T, E] for ratio 1; key-value sources only
    index: IndexQuery | None  # index sources only


class Choice(NamedTuple):
    """What an index source decides for the layers after it."""

    selected: jax.Array | None = None  # int32 [T, K], entries, ascending, -1 for none
    candidates: jax.Array | None = None  # bool [T, blocks]


class Attention(nnx.Module):
    """One layer's attention weights, under their released names."""

    def __init__(self, take, role: LayerRole):
        self.wq_a = Linear(take / "wq_a")
        self.wq_b = Linear(take / "wq_b")
        self.wkv = Linear(take / "wkv")
        self.wo_a = Linear(take / "wo_a")
        self.wo_b = Linear(take / "wo_b")
        self.q_norm = RMSNorm(take / "q_norm")
        self.kv_norm = RMSNorm(take / "kv_norm")
        self.attn_sink = nnx.Param(take("attn_sink"))
        full = role.mode == "full"
        self.compressor = Compressor(take / "compressor", role.ratio) if full else None
        asks = role.mode in ("full", "reindex")
        self.indexer = Indexer(take / "indexer", with_keys=full) if asks else None

    def project(
        self, x, position, role: LayerRole, config: Config, numerics: Numerics
    ) -> Projected:
        """Row operation: queries, window KV, compressor parts, index query (spec 3.2, 3.5, 3.6).

        Args:
            x: [T, D], normalised.
            position: int32 [T].
            role: the layer's.
            config: the model's.
            numerics: the model's.
        """
        eps, wide = config.rms_norm_eps, numerics.wide
        frequency = frequencies(config, role.ratio > 0)
        latent = self.q_norm(self.wq_a.quantized(x, numerics), eps, wide)
        q = self.wq_b.quantized(latent, numerics)
        q = einops.rearrange(q, "t (h e) -> t h e", h=config.num_attention_heads)
        return Projected(
            queries=rotate(q, position, frequency),
            window=self.window_values(x, position, role, config, numerics),
            parts=self.compressor.parts(x, numerics) if self.compressor else None,
            index=self.indexer.query(x, latent, position, frequency, config, numerics)
            if self.indexer
            else None,
        )

    def window_values(self, x, position, role, config, numerics) -> jax.Array:
        """Row operation: what the layer's ring holds of a row, [T, D] to [T, E] (spec 3.2, 9.2)."""
        kv = self.kv_norm(self.wkv.quantized(x, numerics), config.rms_norm_eps, numerics.wide)
        kv = rotate(kv, position, frequencies(config, role.ratio > 0))
        return fp8_blocks(kv) if numerics.quantize_cache else kv

    def remember(
        self, projected: Projected, rows: Rows, live, cache: Cache, role, config, numerics
    ) -> Cache:
        """Write window KV and, in a key-value source, the entries now complete (spec 3.5)."""
        cache = remember_window(cache, role, rows, projected.window)
        if self.compressor is None:
            return cache

        source = config.kv_source_layer_ids.index(role.index)
        ratio = role.ratio
        ring = cache.parts[source]
        if ratio > 1:
            ring = write_ring(ring, rows.slot, rows.position, projected.parts)
            cache = cache.replace(parts=_put(cache.parts, source, ring))

        def compress(slot, position, parts):
            if ratio > 1:
                here = jnp.clip(slot, 0, ring.shape[0] - 1)[:, None]
                member = position[:, None] - jnp.arange(ratio - 1, -1, -1)
                parts = ring[here, member % ring.shape[1]]  # [T, r, 2, E]
            latent = self.compressor.latent(parts, config.rms_norm_eps, numerics)
            first = position // ratio * ratio
            frequency = frequencies(config, True)
            entry = rotate(latent, first, frequency)
            key = self.indexer.key(latent, first, frequency, config, numerics)
            return nvfp4_blocks(entry) if numerics.quantize_cache else entry, key

        entry, key = over_rows(
            compress,
            rows.slot,
            rows.position,
            projected.parts,
            tile=numerics.tile,
            live=live,
        )
        complete = (rows.position + 1) % ratio == 0
        number = jnp.where(complete, rows.position // ratio, -1)

        def write(pool, value):
            return write_entry(pool, cache.pages, rows.slot, number, value)

        return cache.replace(
            entries=_put(cache.entries, source, write(cache.entries[source], entry)),
            keys=_put(cache.keys, source, write(cache.keys[source], key)),
        )

    def choose(
        self, index: IndexQuery, slot, position, candidates, cache: Cache, role, config, numerics,
        group: int,
    ) -> tuple[Choice, dict[str, Any]]:
        """Row operation of index sources: score entries and select (spec 3.6 to 3.8).

        Returns:
            The choice and what `capture` may show of it.
        """
        source = config.kv_source_layer_ids.index(role.kv_source)
        visible = (position + 1) // role.ratio
        scores = index_scores(
            index.queries,
            index.gains,
            cache.keys[source],
            cache.pages,
            slot,
            visible,
            group=group,
            rounded=numerics.rounds_index_scores,
        )
        shown = {"index_scores": scores}
        block = config.candidate_block_size
        if role.candidate_source:
            best, candidates = candidate_blocks(
                scores, visible, block=block, keep=config.candidate_topk_blocks
            )
            inside = jnp.repeat(candidates, block, axis=1)[:, : scores.shape[1]]
            shown |= {"block_scores": best, "candidates": inside & (scores > -jnp.inf)}
        elif role.restricted:
            inside = jnp.repeat(candidates, block, axis=1)[:, : scores.shape[1]]
            scores = jnp.where(inside, scores, -jnp.inf)
            shown["index_scores"] = scores
        keep = config.index_topk
        # In reproducible mode the width, and with it the order of every sum, must not depend on the
        # capacity of the cache.
        width = keep if numerics.reproducible else min(keep, scores.shape[1])
        selected = top_entries(lax.stop_gradient(scores), keep=keep, width=width)
        return Choice(selected, candidates), shown | {"topk": selected}

    def attend(
        self, queries, slot, position, until, selected, cache: Cache, role, config, numerics,
        group: int, with_weights: bool,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Row operation: attention core and output projections (spec 3.9, 3.10).

        A row at `position` sees the ring up to position `until`.

        Returns:
            [T, D] and, if asked for, the attention weights [T, H, W + K].
        """
        sparse = {}
        if role.ratio:
            source = config.kv_source_layer_ids.index(role.kv_source)
            sparse = {
                "entries": cache.entries[source],
                "pages": cache.pages,
                "selected": selected,
            }
        o, weights = sparse_attention(
            queries,
            cache.window[role.index],
            self.attn_sink.get_value(),
            slot,
            until,
            width=role.window,
            scale=config.head_dim**-0.5,
            rounded=numerics.rounds_probabilities,
            group=group,
            with_weights=with_weights,
            **sparse,
        )
        o = rotate(o, position, frequencies(config, role.ratio > 0), inverse=True)
        o = einops.rearrange(o, "t (g h) e -> t g (h e)", g=config.o_groups)
        if numerics.quantize_wo_a:
            o = fp8_blocks(o)
        y = self.wo_a.grouped(o, config.o_groups)
        y = einops.rearrange(y, "t g r -> t (g r)")
        return self.wo_b.quantized(y, numerics), weights


def remember_window(cache: Cache, role: LayerRole, rows: Rows, values: jax.Array) -> Cache:
    """The cache with `values` [T, E] in the ring of a layer or drafter stage."""
    ring = write_ring(cache.window[role.index], rows.slot, rows.position, values)
    return cache.replace(window=_put(cache.window, role.index, ring))


def _put(items: tuple, index: int, value) -> tuple:
    return (*items[:index], value, *items[index + 1 :])
