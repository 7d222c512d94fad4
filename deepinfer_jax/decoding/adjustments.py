"""What is done to logits before they become a distribution: biases, penalties, forced tokens.

A verification runs R rows of a sequence at once. Row r chooses a token behind r drafts that may yet
be rejected, so what has been said so far differs from row to row: `Seen` counts the text that is
certain and `adjust` adds the drafts before each row.

The order is that of vLLM: bias, minimum length, repetition penalty, frequency and presence penalty,
and then forced tokens, which nothing overrules.

Letters: B sequences, R rows of a sequence, S prompt width, V vocabulary, K tokens in a list.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.decoding.sampling import Sampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adjustments:
    """Lists of tokens that are treated differently; K may be 0 and may differ from list to list.

    Attributes:
      bias_ids: int32 [B, K], tokens with a bias; -1 for none. A token that stands there twice gets
        both biases.
      bias: float32 [B, K], finite or -inf, which bans the token.
      stops: int32 [B, K], tokens that may not be chosen before the minimum length; -1 for none.
      min_new: int32 [B], how many new tokens come before a stop may.
      forced: int32 [B, K], the token that new token number k must be; -1, and every number from K
        on, is free.
    """

    bias_ids: jax.Array
    bias: jax.Array
    stops: jax.Array
    min_new: jax.Array
    forced: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Seen:
    """Which tokens a text holds, as penalties need it.

    Attributes:
      prompt: bool [B, V], whether the prompt has the token.
      counts: int32 [B, V], how many times the new text has it.
    """

    prompt: jax.Array
    counts: jax.Array

    @classmethod
    def of(cls, tokens: jax.Array, lengths: jax.Array, vocab: int) -> "Seen":
        """What prompts hold, before any new token.

        Args:
          tokens: int32 [B, S], padded on the right.
          lengths: int32 [B].
          vocab: V.
        """
        B, S = tokens.shape
        known = jnp.arange(S) < lengths[:, None]
        prompt = _where_tokens(jnp.zeros((B, vocab), bool), tokens, known).set(True, mode="drop")
        return cls(prompt, jnp.zeros((B, vocab), jnp.int32))

    def add(self, tokens: jax.Array, valid: jax.Array) -> "Seen":
        """The same with new tokens counted.

        Args:
          tokens: int32 [B, R]; one that stands there twice counts twice.
          valid: bool [B, R], which of them to count.
        """
        counts = _where_tokens(self.counts, tokens, valid).add(1, mode="drop")
        return dataclasses.replace(self, counts=counts)


def _where_tokens(array, tokens, valid):
    """`array.at` at some tokens [B, K] of its last axis, to be written with mode="drop".

    For an array [B, V] what is written has shape [B, K], for [B, R, V] it is [B, K, R].
    """
    B, V = array.shape[0], array.shape[-1]
    # A negative index would count from the end.
    tokens = jnp.where(valid & (tokens >= 0), tokens, V)
    return array.at[(jnp.arange(B)[:, None], *(slice(None),) * (array.ndim - 2), tokens)]


def adjust(
    logits: jax.Array,
    sampling: Sampling,
    adjustments: Adjustments,
    seen: Seen,
    done: jax.Array,
    before: jax.Array,
) -> jax.Array:
    """Logits as the request wants them.

    Row r of sequence b chooses new token number done[b] + r, behind the drafts before[b, :r]. It
    gets the same bits as it would if these drafts were part of the text, whatever stands in other
    rows.

    Args:
      logits: float32 [B, R, V].
      sampling: penalties, one value for all sequences or one per sequence.
      adjustments: lists of tokens.
      seen: the text without the drafts.
      done: int32 [B], new tokens in that text.
      before: int32 [B, R - 1], drafts; -1 for none.

    Returns:
      float32 [B, R, V], -inf for a token that must not be chosen. Where that is every token,
      `distribution.process` gives NaN and `draw` -1. A row with a NaN or +inf keeps one.
    """
    number = done[:, None] + jnp.arange(logits.shape[1])  # [B, R]
    logits = _biased(logits, adjustments, number)
    sampling = sampling.broadcast(logits.shape[0])
    neutral = (
        (sampling.repetition_penalty == 1)
        & (sampling.frequency_penalty == 0)
        & (sampling.presence_penalty == 0)
    )
    # The counts of every row are as large as the logits, so they exist only if some row asks.
    logits = lax.cond(
        neutral.all(), lambda x: x, lambda x: _penalised(x, sampling, seen, before), logits
    )
    return _forced(logits, adjustments.forced, number)


def _biased(logits, adjustments, number):
    """Biases added, and stops banned in rows below the minimum length."""
    early = number[:, None] < adjustments.min_new[:, None, None]  # [B, 1, R]
    for tokens, bias in (
        (adjustments.bias_ids, adjustments.bias[:, :, None]),
        (adjustments.stops, jnp.where(early, -jnp.inf, 0.0)),
    ):
        logits = _where_tokens(logits, tokens, True).add(bias, mode="drop")
    return logits


def _penalised(logits, sampling, seen, before):
    """Penalties of the tokens that stand before each row."""
    R = logits.shape[1]
    counts = jnp.broadcast_to(seen.counts[:, None], logits.shape)  # [B, R, V]
    later = jnp.arange(R) > jnp.arange(R - 1)[:, None]  # [R - 1, R], rows behind each draft
    counts = _where_tokens(counts, before, True).add(later.astype(jnp.int32), mode="drop")
    said = counts > 0

    repetition, frequency, presence = (
        x[:, None, None]
        for x in (
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
    )
    # Divided by multiplying, which is what XLA makes of some divisions and not of others. Without
    # the barrier it rounds a product and a difference at once, for some shapes and not for others.
    repeated, frequent = lax.optimization_barrier(
        (logits * jnp.where(logits > 0, 1 / repetition, repetition), frequency * counts)
    )
    logits = jnp.where(said | seen.prompt[:, None], repeated, logits)
    return logits - frequent - jnp.where(said, presence, 0)


def _forced(logits, forced, number):
    """Everything but the forced token banned, where there is one."""
    free_after = jnp.pad(forced, ((0, 0), (0, 1)), constant_values=-1)
    number = jnp.minimum(number, forced.shape[1])
    token = jnp.take_along_axis(free_after, number, axis=1)[..., None]  # [B, R, 1]
    itself = jnp.where(logits == -jnp.inf, 0.0, logits)
    # Subtracting, unlike overwriting, keeps a NaN or +inf of the model visible.
    alone = jnp.where(jnp.arange(logits.shape[-1]) == token, itself, logits - jnp.inf)
    return jnp.where(token >= 0, alone, logits)
