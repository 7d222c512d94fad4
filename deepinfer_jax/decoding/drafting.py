"""Drafts of DSpark: a block from one pass, then token by token through the Markov head (spec 9.5).

Each draft is chosen as its row will be: the same sampling parameters, the same adjustments behind
the same text and, under shared noise, the same noise.

Letters: B sequences, n drafts of a sequence, D hidden, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.cache import Cache
from deepinfer_jax.decoding.adjustments import Seen, adjust
from deepinfer_jax.decoding.distribution import GREEDY_BELOW, draw, process
from deepinfer_jax.decoding.noise import Purpose
from deepinfer_jax.decoding.request import Request
from deepinfer_jax.decoding.speculative import Proposal, draft_number
from deepinfer_jax.model.drafter import acceptance, draft_block, markov_step
from deepinfer_jax.model.transformer import Transformer


class Anchors(NamedTuple):
    """Where drafts begin.

    Attributes:
        tokens: int32 [B], the last known token of each sequence, which has not been run.
        position: int32 [B], of these tokens.
        count: int32 [B], new tokens so far, that one included.
        ready: bool [B], sequences to draft for.
    """

    tokens: jax.Array
    position: jax.Array
    count: jax.Array
    ready: jax.Array


def dspark(
    model: Transformer,
    cache: Cache,
    anchors: Anchors,
    seen: Seen,
    request: Request,
    n: int,
    coupling: str,
) -> tuple[Proposal, Cache]:
    """Draft n tokens behind every anchor.

    Args:
        model: with a drafter.
        cache: made with `drafts`, run up to the anchors.
        anchors: where to begin.
        seen: the text with the anchors.
        request: what is asked for.
        n: static, drafts of a sequence; at most the drafter's block.
        coupling: static, of `request.COUPLINGS`.

    Returns:
        The drafts (-1 where a sequence is not ready) and the cache with the blocks' keys.
    """
    (B,) = anchors.tokens.shape
    sequence = jnp.arange(B, dtype=jnp.int32)
    block, cache, _ = draft_block(
        model, cache, anchors.tokens, jnp.where(anchors.ready, sequence, -1), anchors.position
    )
    shared = coupling == "shared"
    greedy = request.sampling.temperature < GREEDY_BELOW

    def one(carry, row):
        previous, seen = carry
        k, hidden, base = row
        scores, confidence = markov_step(model, hidden, base, previous)
        scores = adjust(
            scores[:, None], request.sampling, request.adjustments, seen, anchors.count + k,
            jnp.zeros((B, 0), jnp.int32),
        )  # fmt: skip
        log_probs = process(scores[:, 0], request.sampling)
        if shared:
            number, purpose = anchors.position + 1 + k, Purpose.TARGET
        else:
            number, purpose = draft_number(anchors.position, k, n), Purpose.DRAFT
        token = draw(log_probs, greedy, request.seeds, number, request.sample, purpose)
        # A draft that is no token is never accepted, and nor is any behind it.
        seen = seen.add(token[:, None], (token >= 0)[:, None])
        result = token, acceptance(confidence), None if shared else log_probs
        return (jnp.maximum(token, 0), seen), result

    rows = (
        jnp.arange(n, dtype=jnp.int32),
        *(jnp.moveaxis(a[:, :n], 1, 0) for a in (block.hidden, block.logits)),
    )
    with jax.named_scope("draft_tokens"):
        _, drafted = lax.scan(one, (anchors.tokens, seen), rows)
    tokens, confident, log_probs = jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1), drafted)
    return Proposal(jnp.where(anchors.ready[:, None], tokens, -1), confident, log_probs), cache
