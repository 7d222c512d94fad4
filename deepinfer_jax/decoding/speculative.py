"""Judging drafts: which are kept, and what stands where one is not (spec 9.6).

Two couplings. "shared": draft and target choose with the same noise, so a draft is kept while it is
the target's own choice, and the text is the one that would have come without drafts. "rejection":
draft and target draw independently, a draft is kept with probability min(1, p / q), and a rejected
one is replaced by a draw from what is left, max(p - q, 0). The text then depends on the drafts, its
distribution does not.

Letters: B sequences, n drafts of a sequence, R = n + 1 rows, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from deepinfer_jax.decoding.distribution import draw
from deepinfer_jax.decoding.noise import Purpose, uniform


class Proposal(NamedTuple):
    """Drafts of B sequences.

    Attributes:
        tokens: int32 [B, n]; -1 for none.
        acceptance: float32 [B, n], estimated probability that a draft is accepted if all before
            it are.
        log_probs: float32 [B, n, V] that they were drawn from; None under shared noise.
    """

    tokens: jax.Array
    acceptance: jax.Array
    log_probs: jax.Array | None


class Verdict(NamedTuple):
    """Result of a verification.

    Attributes:
        tokens: int32 [B, R]; entry i is meant for row i if i <= accepted. -1: no token.
        accepted: int32 [B], drafts kept.
    """

    tokens: jax.Array
    accepted: jax.Array


def draft_number(anchor: jax.Array, k: jax.Array, n: int) -> jax.Array:
    """What takes the position's place in the noise of a draft that is judged by rejection.

    After a rejection the next block covers the same positions again. With the same noise it would
    draw tokens that the last round's confidences have seen, and those decide how many are verified.

    Args:
        anchor: int32 [B], position of the anchor.
        k: int32 [], place in the block.
        n: drafts of a block.

    Returns:
        int32 [B], another number for every anchor and place.
    """
    return anchor * n + k


def judge_shared(choices: jax.Array, drafts: jax.Array, quota: jax.Array) -> Verdict:
    """Keep drafts while they are the target's choice.

    Args:
        choices: int32 [B, R], the target's choice at each row.
        drafts: int32 [B, n].
        quota: int32 [B], how many were verified.
    """
    return Verdict(choices, _leading((choices[:, :-1] == drafts) & _verified(drafts, quota)))


def judge_rejection(
    choices: jax.Array,
    log_probs: jax.Array,
    proposal: Proposal,
    quota: jax.Array,
    greedy: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    sample: jax.Array,
) -> Verdict:
    """Rejection sampling against the distributions that the drafts were drawn from.

    Args:
        choices: int32 [B, R], independent draws of the target.
        log_probs: float32 [B, R, V], the target's.
        proposal: the drafts and their distributions.
        quota: int32 [B], how many were verified.
        greedy: bool [B].
        seeds: uint32 [B].
        positions: int32 [B, R], the absolute position of each row's token.
        sample: int32 [B].
    """
    drafts, n = proposal.tokens, proposal.tokens.shape[1]

    def rows(a):
        return jnp.repeat(a, n)

    named = (rows(seeds), positions[:, :n].reshape(-1))
    index = jnp.maximum(drafts, 0)[..., None]
    target, drafted = (
        jnp.take_along_axis(a, index, axis=2)[..., 0]
        for a in (log_probs[:, :n], proposal.log_probs)
    )
    luck = uniform(*named, Purpose.ACCEPT, rows(sample)).reshape(drafts.shape)
    kept = luck < jnp.exp(jnp.minimum(target - drafted, 0))
    accepted = _leading(kept & _verified(drafts, quota))

    left = jnp.exp(log_probs[:, :n]) - jnp.exp(proposal.log_probs)
    # Where rounding leaves nothing the two distributions are one, and the target's will do.
    left = jnp.where((left > 0).any(axis=2, keepdims=True), jnp.log(left.clip(0)), log_probs[:, :n])
    replacements = draw(
        left.reshape(-1, left.shape[2]), rows(greedy), *named, rows(sample), Purpose.RESIDUAL
    ).reshape(drafts.shape)
    place = jnp.arange(n)
    # A -1 was drawn from no distribution: the target's own choice stands there.
    rejected = (place == accepted[:, None]) & _verified(drafts, quota)
    tokens = jnp.where(rejected, replacements, choices[:, :n])
    tokens = jnp.where(place < accepted[:, None], drafts, tokens)
    return Verdict(jnp.concatenate([tokens, choices[:, n:]], axis=1), accepted)


def _verified(drafts, quota):
    return (jnp.arange(drafts.shape[1]) < quota[:, None]) & (drafts >= 0)


def _leading(kept):
    """int32 [B], how many come before the first that is not kept."""
    return jnp.cumprod(kept.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
