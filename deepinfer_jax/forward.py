"""Teacher forcing: logits of whole sequences in one call, differentiable.

Letters: B sequences, S positions, D hidden, V vocabulary.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import inputs
from deepinfer_jax.cache import init_cache
from deepinfer_jax.model.transformer import CAPTURES, Transformer, logits, step
from deepinfer_jax.rows import rectangle

_PER_SLOT = ("compressed_kv", "index_keys")


class Forward(NamedTuple):
    """Result of `forward`.

    Attributes:
        logits: float32 [B, S, V]; row s scores the token at position s + 1. Rows past a sequence's
            length mean nothing.
        captured: arrays by name, with leading axes [B, S], or [B] for stored entries (see
            `deepinfer_jax.CAPTURES`).
    """

    logits: jax.Array
    captured: dict[str, jax.Array]


def forward(
    model: Transformer,
    tokens: jax.Array,
    lengths: jax.Array | None = None,
    embeddings: jax.Array | None = None,
    image_mask: jax.Array | None = None,
    capture: Sequence[str] = (),
) -> Forward:
    """Logits at every position.

    Pure: works under `jax.jit`, and `jax.grad` with a model from `combine` (see `trainable`; not in
    reproducible numerics, whose loops have no reverse mode).

    Args:
        model: from `load` or `combine`.
        tokens: int32 [B, S].
        lengths: int32 [B], the rest of each row is padding. None: no padding.
        embeddings: [B, S, D], used instead of the token embeddings. Tokens still say what Engram
            hashes.
        image_mask: bool [B, S], positions inside an image span: they use the image bias of the
            router and block Engram (spec 10.6). None: text only.
        capture: names of `deepinfer_jax.CAPTURES`, for looking inside.

    Raises:
        ValueError: an id outside the vocabulary, lengths or shapes that do not fit, an unknown
            capture.
    """
    tokens = inputs.token_batch(tokens, model.config)
    B, S = tokens.shape
    lengths = inputs.lengths_of(lengths, B, S)
    capture = (capture,) if isinstance(capture, str) else capture
    unknown = sorted(set(capture) - set(CAPTURES))
    if unknown:
        raise ValueError(f"capture: unknown {unknown}; choose from {sorted(CAPTURES)}")
    if embeddings is not None:
        embeddings = jnp.asarray(embeddings)
    expected = (B, S, model.config.hidden_size)
    if embeddings is not None and np.shape(embeddings) != expected:
        raise ValueError(
            f"embeddings must have shape {list(expected)}, got {list(np.shape(embeddings))}"
        )
    if image_mask is None:
        image_mask = jnp.zeros((B, S), bool)
    elif np.shape(image_mask) != (B, S):
        raise ValueError(f"image_mask must have shape {[B, S]}, got {list(np.shape(image_mask))}")
    image_mask = jnp.asarray(image_mask, bool)
    return _forward(model, tokens, lengths, embeddings, image_mask, frozenset(capture))


@functools.partial(jax.jit, static_argnames="show")
def _forward(model, tokens, lengths, embeddings, image_mask, show) -> Forward:
    model = model.with_numerics(model.numerics.resolve(reproducible=False))
    B, S = tokens.shape
    cache = init_cache(model.config, B, S, S, numerics=model.numerics)
    slots = jnp.arange(B, dtype=jnp.int32)
    rows = rectangle(tokens, slots, jnp.zeros_like(slots), lengths, image_mask)
    if embeddings is not None:
        embeddings = embeddings.reshape(B * S, -1)
    hidden, _, seen = step(model, cache, rows, embeddings=embeddings, show=show)

    def batched(name: str, array: Any) -> jax.Array:
        if name.startswith(_PER_SLOT):
            return array
        return array.reshape(B, S, *array.shape[1:])

    captured = {name: batched(name, array) for name, array in seen.items()}
    return Forward(batched("logits", logits(model, hidden)), captured)
