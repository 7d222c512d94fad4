"""DSpark: a drafter that proposes a block of tokens in one pass (spec 9).

It reads the streams that enter a few layers of the model, averaged: `remember_context` turns them
into one key per position and stage. A draft block is an anchor, the last known token, followed by
noise tokens. Its rows see the window of keys before the anchor and each other, without a causal
order; a low-rank Markov head then makes each token depend on the one before it.

The keys of a block lie in the stages' rings behind the anchor, where the next call of the model
writes the real ones before anybody reads them.

Letters: T rows, B blocks of n rows, M streams, D hidden, V vocabulary.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from deepinfer_jax.cache import Cache
from deepinfer_jax.config import Config, LayerRole
from deepinfer_jax.model.attention import Choice, remember_window
from deepinfer_jax.model.block import Block, initial_state
from deepinfer_jax.model.hyper_connections import collapse
from deepinfer_jax.model.linear import Linear
from deepinfer_jax.model.norms import RMSNorm
from deepinfer_jax.model.scope import Scope
from deepinfer_jax.rows import Rows, over_rows, padded_total

if TYPE_CHECKING:
    from deepinfer_jax.model.transformer import Transformer


class MarkovHead(nnx.Module):
    """Low-rank scores of a token after another: embed [V, rank] times head [V, rank]."""

    def __init__(self, take):
        self.embed = Linear(take / "embed")
        self.head = Linear(take / "head")


class ConfidenceHead(nnx.Module):
    """proj [1, D + rank]: will this draft be accepted?"""

    def __init__(self, take):
        self.proj = Linear(take / "proj")


class DraftStage(Block):
    """A block of the drafter; the first has the way in, the last the heads."""

    def __init__(self, take, role: LayerRole, *, first: bool, last: bool):
        super().__init__(take, role)
        self.main_proj = Linear(take / "main_proj") if first else None
        self.main_norm = RMSNorm(take / "main_norm") if first else None
        self.norm = RMSNorm(take / "norm") if last else None
        self.markov_head = MarkovHead(take / "markov_head") if last else None
        self.confidence_head = ConfidenceHead(take / "confidence_head") if last else None


def draft_stages(take: Scope, config: Config) -> nnx.List:
    """The stages `mtp.0`, `mtp.1`, ... of a model."""
    roles = config.draft_layers
    return nnx.List(
        [
            DraftStage(take / str(i), role, first=i == 0, last=i == len(roles) - 1)
            for i, role in enumerate(roles)
        ]
    )


def remember_context(
    model: "Transformer", features: jax.Array, rows: Rows, live: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Write the stages' context keys of rows that the model has run (spec 9.2).

    Args:
        model: with a drafter.
        features: [T, targets * D], stream means at the target layers.
        rows: the rows, T of them.
        live: int32 [], rows up to the last valid one.
        cache: written if it was made with `drafts`.

    Returns:
        The features projected and normalised [T, D], and the cache.
    """
    config, numerics = model.config, model.numerics
    roles = config.draft_layers if len(cache.window) > config.num_hidden_layers else ()

    def keys(features, position):
        first = model.mtp[0]
        main = first.main_norm(
            first.main_proj.quantized(features, numerics), config.rms_norm_eps, numerics.wide
        )
        return main, [
            stage.attn.window_values(main, position, role, config, numerics)
            for role, stage in zip(roles, model.mtp, strict=False)
        ]

    with jax.named_scope("draft_context"):
        main, values = over_rows(keys, features, rows.position, tile=numerics.tile, live=live)
        for role, value in zip(roles, values, strict=True):
            cache = remember_window(cache, role, rows, value)
    return main, cache


class DraftBlock(NamedTuple):
    """What the stages say of B blocks before any token of them is chosen."""

    hidden: jax.Array  # [B, n, D], collapsed and not normalised
    logits: jax.Array  # float32 [B, n, V], without the Markov head's part


def draft_block(
    model: "Transformer",
    cache: Cache,
    tokens: jax.Array,
    slot: jax.Array,
    position: jax.Array,
    *,
    show: frozenset[str] = frozenset(),
) -> tuple[DraftBlock, Cache, dict[str, Any]]:
    """Run the stages on one block for each anchor (spec 9.3, 9.5).

    Args:
        model: with a drafter.
        cache: made with `drafts`; its slots have been run up to the anchors.
        tokens: int32 [B], the anchors: last known tokens.
        slot: int32 [B], -1 for a block that is not there.
        position: int32 [B], of the anchors; the model has run everything before them.
        show: "streams", "attention", "router": arrays [B * n, ...] named as in `CAPTURES`, where a
            stage's number is that of the layer it would be.

    Returns:
        The block, the cache with the block's own keys in it, captured arrays.

    Raises:
        ValueError: a model without a drafter, or a cache made without `drafts`.
    """
    config, numerics = model.config, model.numerics
    if model.mtp is None:
        raise ValueError("draft_block: the model has no drafter")
    if len(cache.window) == config.num_hidden_layers:
        raise ValueError("draft_block: make the cache with init_cache(..., drafts=True)")
    (B,), n = tokens.shape, config.dspark_block_size
    ids = jnp.full((B, n), config.dspark_noise_token_id, jnp.int32).at[:, 0].set(tokens)
    rows = Rows(
        tokens=ids.reshape(B * n),
        slot=jnp.repeat(slot, n),
        position=(position[:, None] + jnp.arange(n)).reshape(B * n),
        image=jnp.zeros(B * n, bool),
        until=jnp.repeat(position + n - 1, n),
    ).pad(padded_total(B * n, numerics.tile))
    live = jnp.max(jnp.where(rows.valid, jnp.arange(1, rows.slot.shape[0] + 1), 0))
    state = initial_state(model.embed.weight.get_value()[rows.tokens], config, numerics)
    choice, seen = Choice(), {}
    for role, stage in zip(config.draft_layers, model.mtp, strict=True):
        state, choice, cache, shown = stage(
            state, choice, rows, live, cache, None, role, config, numerics, show
        )
        if "streams" in show:
            shown |= {"streams": state.streams, "premix": state.premix}
        seen |= {f"{name}.{role.index}": value[: B * n] for name, value in shown.items()}

    def head(state):
        hidden = collapse(*state)
        normed = model.mtp[-1].norm(hidden, config.rms_norm_eps, numerics.wide)
        return hidden, model.head.wide(normed, numerics)

    with jax.named_scope("draft_head"):
        hidden, logits = over_rows(head, state, tile=numerics.tile, live=live)

    def blocks(a):
        return a[: B * n].reshape(B, n, -1)

    return DraftBlock(blocks(hidden), blocks(logits)), cache, seen


def markov_step(
    model: "Transformer", hidden: jax.Array, logits: jax.Array, previous: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One row of every block, given the token before it (spec 9.5).

    Args:
        model: with a drafter.
        hidden: [B, D], from `draft_block`.
        logits: float32 [B, V], from `draft_block`.
        previous: int32 [B], the anchor or the draft before.

    Returns:
        float32 [B, V], scores of the draft, and float32 [B], the logit of its being accepted if all
        before it are.
    """
    numerics, heads = model.numerics, model.mtp[-1]
    B, total = previous.shape[0], padded_total(previous.shape[0], numerics.tile)

    def score(hidden, logits, previous):
        memory = heads.markov_head.embed.weight.get_value()[previous].astype(numerics.activation)
        logits = logits + heads.markov_head.head.wide(memory, numerics)
        both = jnp.concatenate([hidden.astype(numerics.wide), memory.astype(numerics.wide)], axis=1)
        return logits, heads.confidence_head.proj.wide(both, numerics)[:, 0]

    inputs = jax.tree.map(
        lambda a: jnp.pad(a, [(0, total - B)] + [(0, 0)] * (a.ndim - 1)),
        (hidden, logits, previous),
    )
    scores = over_rows(score, *inputs, tile=numerics.tile, live=jnp.int32(B))
    return jax.tree.map(lambda a: a[:B], scores)


def acceptance(confidence: jax.Array) -> jax.Array:
    """Probabilities from the confidence head's logits, which are limited to +-60 (spec 9.5)."""
    return jax.nn.sigmoid(jnp.clip(confidence, -60.0, 60.0))
