"""The model and its one step function (spec 2.2).

`step` is the whole forward pass over a flat list of rows. Prefill, decode, verification of drafts
and teacher forcing are calls of it with different rows.

Letters: T rows, M streams, D hidden, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from deepinfer_jax.cache import Cache, entries_in_order, write_ring
from deepinfer_jax.config import Config
from deepinfer_jax.model.attention import Choice
from deepinfer_jax.model.block import Block, initial_state
from deepinfer_jax.model.drafter import draft_stages, remember_context
from deepinfer_jax.model.engram import DEAD, hash_rows, recent_tokens
from deepinfer_jax.model.hyper_connections import collapse
from deepinfer_jax.model.linear import Linear
from deepinfer_jax.model.norms import RMSNorm
from deepinfer_jax.model.scope import Scope
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import Rows, over_rows, padded_total

CAPTURES = {
    "streams": "streams.N [T, M, D] and premix.N [T, M] entering layer N; the last N is the output",
    "mixes": "attn_mix.N.* and ffn_mix.N.* with pre [T, M], post [T, M], comb [T, M, M]",
    "attention": "attn_out.N [T, D], before it is written back",
    "weights": "attn_weights.N [T, H, W + K], the window first (oldest first), then the entries",
    "ffn": "ffn_out.N [T, D], before it is written back",
    "entries": "compressed_kv.N and index_keys.N [slots, entries, width] of key-value sources",
    "selection": "topk.N [T, K] of index sources, candidates.N [T, entries] of their source",
    "scores": "index_scores.N [T, entries], block_scores.N [T, blocks]",
    "router": "router_idx.N, router_w.N [T, K]",
    "engram": "engram_hash [T, layers, columns], engram_out.N [T, M, D]",
    "hidden": "final_hidden [T, D], after the last norm",
    "draft": "dspark.features [T, targets * D], dspark.main_hidden [T, D]: what the drafter reads",
}


class Embedding(nnx.Module):
    """Token vectors [V, D]."""

    def __init__(self, take):
        self.weight = nnx.Param(take("weight"))


class Transformer(nnx.Module):
    """The backbone as a pytree of arrays; `config` and `numerics` are static.

    Attributes:
        config: shapes and constants.
        numerics: rounding points.
        embed, layers, norm, head: modules under their released names.
        mtp: stages of the drafter (spec 9), or None.
        token_map: int32 [tokenizer length] compressed id of every token (spec 8.1), or None without
            Engram. Not a parameter.
    """

    def __init__(
        self, config: Config, numerics: Numerics, take, token_map=None, *, drafter: bool = True
    ):
        if config.engram_layer_ids and token_map is None:
            raise ValueError("Transformer: a model with Engram needs token_map (spec 8.1)")
        take = Scope(take)
        self.config = config
        self.numerics = numerics
        self.embed = Embedding(take / "embed")
        self.layers = nnx.List(
            [Block(take / "layers" / str(role.index), role) for role in config.layers]
        )
        self.norm = RMSNorm(take / "norm")
        self.head = Linear(take / "head")
        drafter = drafter and config.draft_layers
        self.mtp = nnx.data(draft_stages(take / "mtp", config) if drafter else None)
        self.token_map = nnx.data(None if token_map is None else jnp.asarray(token_map, jnp.int32))

    def with_numerics(self, numerics: Numerics) -> "Transformer":
        """The same arrays under other numerics."""
        leaves, structure = jax.tree.flatten(self)
        model = jax.tree.unflatten(structure, leaves)
        model.numerics = numerics
        return model


def step(
    model: Transformer,
    cache: Cache,
    rows: Rows,
    *,
    embeddings: jax.Array | None = None,
    show: frozenset[str] = frozenset(),
) -> tuple[jax.Array, Cache, dict[str, Any]]:
    """Run rows through the model.

    Args:
        model: the weights.
        cache: what the rows' sequences left behind; made by `init_cache` with `rows_per_slot` at
            least the number of rows a slot has here (checked where `rows.group` says it).
        rows: T of them. What lies beyond a slot's capacity is not kept.
        embeddings: [T, D], instead of the embedding of the tokens (which are still hashed).
        show: names of `CAPTURES`.

    Returns:
        The final normalised hidden state [T, D], the cache, captured arrays.

    Raises:
        ValueError: a cache in packed storage (which this version can size but not compute with), of
            another dtype or for fewer rows; an unknown capture.
    """
    if cache.storage != "values":
        raise ValueError(
            f"step: a cache with storage={cache.storage!r} can be sized but not computed with; "
            "use init_cache(..., storage='values')"
        )
    config, numerics = model.config, model.numerics
    unknown = sorted(set(show) - set(CAPTURES))
    if unknown:
        raise ValueError(f"step: unknown captures {unknown}; choose from {sorted(CAPTURES)}")
    held = cache.window[0].dtype
    if held != numerics.activation:
        raise ValueError(
            f"step: the cache holds {held} and the model computes in {numerics.activation}; make "
            "it with init_cache(..., numerics=model.numerics)"
        )
    if numerics.dtype == "float64" and not jax.config.jax_enable_x64:
        raise ValueError("step: dtype='float64' needs jax.config.update('jax_enable_x64', True)")
    most = cache.window[0].shape[1] - config.sliding_window + 1
    if rows.group > most:
        raise ValueError(
            f"step: a slot has {rows.group} rows in this call, but the cache was made with "
            f"rows_per_slot={most}"
        )
    total, tile = rows.tokens.shape[0], numerics.tile
    if tile is not None:
        padded = padded_total(total, tile)
        rows = rows.pad(padded)
        if embeddings is not None:
            embeddings = jnp.pad(embeddings, ((0, padded - total), (0, 0)))
    live = jnp.max(jnp.where(rows.valid, jnp.arange(1, rows.tokens.shape[0] + 1), 0))
    seen: dict[str, Any] = {}
    drafts = len(cache.window) > config.num_hidden_layers
    if model.mtp is None and (drafts or "draft" in show):
        raise ValueError(
            "step: the model has no drafter to keep or show anything for: make the cache without "
            "drafts=True, and do not ask for the capture 'draft'"
        )
    inside = show | {"draft"} if drafts else show

    if embeddings is None:
        embeddings = model.embed.weight.get_value()[rows.tokens]
    state, choice = initial_state(embeddings, config, numerics), Choice()

    hashed = None
    if config.engram_layer_ids:
        compressed = jnp.where(rows.image, DEAD, model.token_map[rows.tokens])
        history = write_ring(cache.history, rows.slot, rows.position, compressed)
        cache = cache.replace(history=history)
        pad = model.token_map[config.engram_pad_token_id]
        recent = recent_tokens(history, rows.slot, rows.position, pad, config)
        hashed = hash_rows(recent, config)
        if "engram" in show:
            seen["engram_hash"] = hashed

    for role, layer in zip(config.layers, model.layers, strict=True):
        if "streams" in show:
            seen |= {f"streams.{role.index}": state.streams, f"premix.{role.index}": state.premix}
        mine = None if role.engram is None else hashed[:, role.engram]
        state, choice, cache, shown = layer(
            state, choice, rows, live, cache, mine, role, config, numerics, inside
        )
        seen |= {k if "." in k else f"{k}.{role.index}": v for k, v in shown.items()}
    if "streams" in show:
        seen |= {f"streams.{len(model.layers)}": state.streams}
        seen |= {f"premix.{len(model.layers)}": state.premix}

    if "draft" in inside:
        features = [seen.pop(f"feature.{i}") for i in config.dspark_target_layer_ids]
        features = jnp.concatenate(features, axis=1)
        main, cache = remember_context(model, features, rows, live, cache)
        if "draft" in show:
            seen |= {"dspark.features": features, "dspark.main_hidden": main}

    def final(state):
        return model.norm(collapse(*state), config.rms_norm_eps, numerics.wide)

    hidden = over_rows(final, state, tile=tile, live=live)
    if "hidden" in show:
        seen["final_hidden"] = hidden
    seen = {name: array[:total] for name, array in seen.items()}
    if "entries" in show:
        for source, layer_id in enumerate(config.kv_source_layer_ids):
            for name, pools in (("compressed_kv", cache.entries), ("index_keys", cache.keys)):
                seen[f"{name}.{layer_id}"] = entries_in_order(pools[source], cache.pages)
    return hidden[:total], cache, seen


def logits(
    model: Transformer, hidden: jax.Array, wanted: jax.Array | None = None
) -> jax.Array:
    """Scores of the next token: [T, D] -> [T, V], float32 (spec 2.2 step 10).

    Args:
        model: the weights.
        hidden: [T, D].
        wanted: bool [T], rows whose scores will be used; those of others mean nothing, and in
            reproducible numerics tiles of them cost nothing. None: all.
    """
    numerics, tile = model.numerics, model.numerics.tile
    total = hidden.shape[0]
    packs = tile is not None and wanted is not None
    live = np.int32(total)
    if packs:
        order = jnp.argsort(~wanted, stable=True)
        hidden, live = hidden[order], wanted.sum(dtype=jnp.int32)
    padded = jnp.pad(hidden, ((0, padded_total(total, tile) - total), (0, 0)))
    result = over_rows(lambda x: model.head.wide(x, numerics), padded, tile=tile, live=live)
    return result[jnp.argsort(order)] if packs else result[:total]
