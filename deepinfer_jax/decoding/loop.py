"""The loop behind `generate`: its state, and one round of it.

A round runs the next known tokens of each sequence (a chunk of its prompt, or the token chosen
last) and, where that reaches the end of the text, chooses one more. So prompts of different
lengths, prefill and decoding are the same round.

With a drafter a round begins with drafts for the sequences that wait for one token only. They stand
behind the known text and are run with it; those that the model would have chosen stay, with one
token more behind them. Taking back the others is to say how much of the text has been run.

In reproducible numerics one loop does both, since row tiles that hold no rows cost nothing.
Otherwise rows are computed whether they hold a token or not, so a loop of wide rounds runs while
prompts last and a loop of narrow rounds after it.

Letters: B sequences, S prompt width, N most new tokens, n drafts, R = n + 1 rows with a choice, V
vocabulary, L = S + N, T rows of a round.
"""

import dataclasses
from enum import IntEnum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.cache import Cache, init_cache
from deepinfer_jax.decoding.adjustments import Seen, adjust
from deepinfer_jax.decoding.distribution import GREEDY_BELOW, draw, log_softmax, process, top
from deepinfer_jax.decoding.drafting import Anchors, dspark
from deepinfer_jax.decoding.request import Request, Shape
from deepinfer_jax.decoding.schedule import allocate, small_capacity
from deepinfer_jax.decoding.speculative import Proposal, Verdict, judge_rejection, judge_shared
from deepinfer_jax.decoding.stats import Stats
from deepinfer_jax.model.transformer import Transformer, logits, step
from deepinfer_jax.rows import rectangle
from pallas_kernels.layouts import QuantizedTensor


class Finish(IntEnum):
    """Why a sequence ended."""

    LENGTH = 0  # its limit, or the capacity of the call
    STOP = 1  # end of sequence or a stop id; that token is the last one returned
    INVALID = 2  # no token can be chosen: scores that are not numbers, or everything banned


class Alternatives(NamedTuple):
    """The most likely tokens at each place, best first; -1 and 0 behind a sequence's length."""

    tokens: jax.Array  # int32 [B, N, top_logprobs], -1 where there is no further token
    logprobs: jax.Array  # float32 [B, N, top_logprobs], -inf where there is no further token


class Scores(NamedTuple):
    """What is reported of tokens, [B, N, ...] or, in a round, [B, R, ...]; see `Generation`."""

    logprobs: jax.Array
    processed_logprobs: jax.Array
    top: Alternatives
    processed_top: Alternatives


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What the loop carries.

    Attributes:
        cache: everything before `position`, and perhaps drafts that were taken back.
        text: int32 [B, S + N], prompt and new tokens of each sequence; what lies behind them means
            nothing.
        count: int32 [B], new tokens.
        position: int32 [B], how much of the text has been run.
        seen: tokens of the text, for penalties.
        scores: of the new tokens.
        finish: int32 [B].
        running: bool [B].
        survival: float32 [B, n], the last round's probabilities that drafts would become text.
        stats: counters.
        request: what was asked for.
    """

    cache: Cache
    text: jax.Array
    count: jax.Array
    position: jax.Array
    seen: Seen
    scores: Scores
    finish: jax.Array
    running: jax.Array
    survival: jax.Array
    stats: Stats
    request: Request

    @property
    def end(self) -> jax.Array:
        """int32 [B], length of the known text."""
        return self.request.lengths + self.count

    @property
    def ahead(self) -> jax.Array:
        """int32 [B], known tokens that have not been run."""
        return self.end - self.position


def unpacked(model: Transformer) -> Transformer:
    """On CPU, quantised matrices as floats for as long as the program runs.

    Unpacking 4-bit codes costs a CPU more than multiplying by them, so it is done once and not in
    every round. Engram tables are looked up row by row and stay as they are.
    """
    if jax.default_backend() != "cpu":
        return model

    def is_quantized(leaf):
        return isinstance(leaf, QuantizedTensor)

    def unpack(leaf):
        if not is_quantized(leaf) or leaf.format == "fp8_1x32":
            return leaf
        return leaf.dequantize(model.numerics.activation)

    return jax.tree.map(unpack, model, is_leaf=is_quantized)


def initial(model: Transformer, request: Request, shape: Shape) -> State:
    """The state before the first round."""
    B = request.tokens.shape[0]
    N, V = shape.max_new_tokens, model.config.vocab_size
    zeros = jnp.zeros(B, jnp.int32)

    def alternatives():
        return Alternatives(
            jnp.full((B, N, shape.top), -1, jnp.int32), jnp.zeros((B, N, shape.top), jnp.float32)
        )

    return State(
        cache=init_cache(
            model.config, B, shape.capacity, shape.rows, numerics=model.numerics,
            drafts=shape.drafts > 0,
        ),
        text=jnp.pad(request.tokens, ((0, 0), (0, N))),
        count=zeros,
        position=zeros,
        seen=Seen.of(request.tokens, request.lengths, V),
        scores=Scores(
            jnp.zeros((B, N), jnp.float32),
            jnp.zeros((B, N), jnp.float32),
            alternatives(),
            alternatives(),
        ),
        finish=zeros,
        running=jnp.ones(B, bool),
        survival=jnp.zeros((B, shape.drafts), jnp.float32),
        stats=Stats.zeros(B, N, shape.drafts),
        request=request,
    )  # fmt: skip


def run(model: Transformer, state: State, shape: Shape, rounds: jax.Array | None) -> State:
    """Rounds until nothing runs, or until so many of them have chosen a token for some sequence."""

    def loop(state, done, width, drafts, go_on):
        def condition(carry):
            done, state = carry
            within = True if rounds is None else done < rounds
            return within & go_on(state)

        def body(carry):
            done, state = carry
            after = one_round(model, state, shape, width, drafts)
            return done + (after.count > state.count).any(), after

        return lax.while_loop(condition, body, (done, state))

    done = jnp.int32(0)
    if not model.numerics.reproducible and shape.width > 1:
        done, state = loop(
            state, done, shape.width, 0, lambda s: (s.running & (s.ahead > 1)).any()
        )
        return loop(state, done, 1, shape.drafts, lambda s: s.running.any())[1]
    return loop(state, done, shape.width, shape.drafts, lambda s: s.running.any())[1]


def one_round(
    model: Transformer, state: State, shape: Shape, width: int, drafts: int,
    quota: jax.Array | None = None,
) -> State:  # fmt: skip
    """Draft, run the known text and the drafts, choose and keep.

    Args:
        model: the weights.
        state: of B sequences.
        shape: statics of the generation.
        width: most known tokens of a sequence to run.
        drafts: most drafts of a sequence; 0 or `shape.drafts`.
        quota: int32 [B], drafts to verify (where there are so many) whatever the schedule says.
    """
    known = jnp.where(state.running, jnp.minimum(state.ahead, width), 0)
    reached = state.running & (known == state.ahead)
    cache, proposal, survival = state.cache, None, state.survival
    text = state.text
    if drafts:
        cache, proposal, survival, quota = _draft(model, state, shape, known, quota)
        column = state.end[:, None] + jnp.arange(drafts)
        text = _put(text, column, proposal.tokens, jnp.arange(drafts) < quota[:, None])
    else:
        quota = jnp.zeros_like(known)
    scheduled = drafts > 0 and state.request.times is not None
    hidden, first, cache = _run_text(
        model, cache, text, state.position, known + quota, max(width, drafts + 1),
        small_capacity(known.shape[0], drafts) if scheduled else None,
    )  # fmt: skip
    row = jnp.arange(drafts + 1)
    chooses = reached[:, None] & (row <= quota[:, None])  # [B, R]
    index = jnp.clip(first[:, None] + known[:, None] - 1 + row, 0, hidden.shape[0] - 1)
    scores = logits(model, hidden[index.reshape(-1)], chooses.reshape(-1))
    verdict, reported = _choose(
        scores.reshape(*index.shape, -1), state, shape, proposal, quota, state.position + known
    )

    token = verdict.tokens
    stops = state.request.adjustments.stops
    stopping = (token[..., None] == stops[:, None]).any(axis=2)
    room = state.count[:, None] + row < state.request.limit[:, None]
    ends = stopping | (token < 0)
    before = jnp.cumsum(jnp.pad(ends[:, :-1], ((0, 0), (1, 0))), axis=1) == 0
    due = reached[:, None] & (row <= verdict.accepted[:, None]) & room & before
    kept = due & (token >= 0)  # a prefix of each sequence's rows
    new = kept.sum(axis=1, dtype=jnp.int32)
    count = state.count + new
    stopped, invalid = (kept & stopping).any(axis=1), (due & (token < 0)).any(axis=1)
    finish = jnp.where(stopped, Finish.STOP, jnp.where(invalid, Finish.INVALID, state.finish))

    place = state.count[:, None] + row
    confidence = jnp.zeros_like(survival) if proposal is None else proposal.acceptance
    stats = state.stats.add(reached, quota, verdict.accepted, new, confidence)
    number = jnp.broadcast_to(stats.steps[:, None], place.shape)
    return dataclasses.replace(
        state,
        cache=cache,
        text=_put(text, state.end[:, None] + row, token, kept),
        count=count,
        # The last new token has been chosen and not run; those before it were drafts.
        position=state.position + known + jnp.maximum(new - 1, 0),
        seen=state.seen.add(token, kept),
        scores=jax.tree.map(lambda a, b: _put(a, place, b, kept), state.scores, reported),
        finish=finish.astype(jnp.int32),
        running=state.running & ~stopped & ~invalid & (count < state.request.limit),
        survival=survival,
        stats=stats._replace(round_of=_put(stats.round_of, place, number, kept)),
    )


def _put(array, column, values, valid):
    """`array` [B, L, ...] with values [B, R, ...] at the columns int32 [B, R] that are valid."""
    column = jnp.where(valid, column, array.shape[1])
    return array.at[jnp.arange(array.shape[0])[:, None], column].set(values, mode="drop")


def _draft(model: Transformer, state: State, shape: Shape, known: jax.Array, quota):
    """Drafts for the sequences of which one token is known, and how many of them to verify."""
    request, n = state.request, shape.drafts
    anchors = Anchors(
        tokens=jnp.take_along_axis(state.text, state.position[:, None], axis=1)[:, 0],
        position=state.position,
        count=state.count,
        ready=state.running & (state.ahead == 1),
    )
    proposal, cache = dspark(
        model, state.cache, anchors, state.seen, request, n, shape.coupling
    )
    # The last token of a sequence needs no draft behind it.
    useful = jnp.where(anchors.ready, jnp.minimum(request.limit - state.count - 1, n), 0)
    there = (jnp.arange(n) < useful[:, None]) & (proposal.tokens >= 0)
    there = jnp.cumprod(there, axis=1) > 0
    survival = jnp.where(there, jnp.cumprod(proposal.acceptance, axis=1), 0)
    available = there.sum(axis=1, dtype=jnp.int32)
    if quota is not None:
        return cache, proposal, survival, jnp.minimum(quota, available)
    if request.times is None:
        return cache, proposal, survival, available
    shared = shape.coupling == "shared"
    reached = state.running & (known == state.ahead)
    earlier = survival if shared else state.survival
    quota = allocate(survival, earlier, reached, known.sum(), request.times)
    return cache, proposal, survival, quota


def _run_text(model, cache, text, start, count, width, capacity):
    """Run `count` [B] tokens of each text [B, L] from `start` [B] on, at most `width` each.

    Args:
        model: the weights.
        cache: of B slots.
        text: int32 [B, L].
        start: int32 [B].
        count: int32 [B].
        width: static.
        capacity: rows of a smaller program that will do if there are no more; None: there is none.

    Returns:
        Hidden states [T, D], int32 [B] with the row of each sequence's first token, the cache.
    """
    (B,) = count.shape
    column = jnp.minimum(start[:, None] + jnp.arange(width), text.shape[1] - 1)
    rows = rectangle(
        jnp.take_along_axis(text, column, axis=1),
        jnp.arange(B, dtype=jnp.int32),
        start,
        count,
        jnp.zeros((B, width), bool),
    )
    reproducible = model.numerics.reproducible
    if not reproducible and capacity is None:
        hidden, cache, _ = step(model, cache, rows)
        return hidden, jnp.arange(B) * width, cache
    rows = rows.compact()
    first = jnp.cumsum(count) - count

    def rows_of(size):
        def call(cache):
            part = jax.tree.map(lambda a: a[:size], rows)
            hidden, after, _ = step(model, cache, part)
            return jnp.pad(hidden, ((0, B * width - size), (0, 0))), after

        return call

    if reproducible or capacity >= B * width:
        hidden, cache = rows_of(B * width)(cache)
    else:
        hidden, cache = lax.cond(
            count.sum() <= capacity, rows_of(capacity), rows_of(B * width), cache
        )
    return hidden, first, cache


def _choose(
    scores: jax.Array,
    state: State,
    shape: Shape,
    proposal: Proposal | None,
    quota: jax.Array,
    position: jax.Array,
) -> tuple[Verdict, Scores]:
    """Choose at every row, and judge the drafts.

    Args:
        scores: float32 [B, R, V], the model's.
        state: before the round.
        shape: statics.
        proposal: drafts behind the rows.
        quota: int32 [B], how many of them were run.
        position: int32 [B], of the first row's choice.
    """
    request = state.request
    B, R, V = scores.shape
    drafts = jnp.zeros((B, 0), jnp.int32)
    if proposal is not None:
        drafts = jnp.where(jnp.arange(R - 1) < quota[:, None], proposal.tokens, -1)
    adjusted = adjust(
        scores, request.sampling, request.adjustments, state.seen, state.count, drafts
    )
    sampling, seeds, sample = jax.tree.map(
        lambda a: jnp.repeat(a, R, axis=0), (request.sampling, request.seeds, request.sample)
    )
    positions = position[:, None] + jnp.arange(R)
    raw = log_softmax(scores.reshape(B * R, V))
    processed = process(adjusted.reshape(B * R, V), sampling)
    choices = draw(
        processed, sampling.temperature < GREEDY_BELOW, seeds, positions.reshape(-1), sample
    ).reshape(B, R)
    if proposal is None:
        verdict = Verdict(choices, jnp.zeros(B, jnp.int32))
    elif proposal.log_probs is None:
        verdict = judge_shared(choices, drafts, quota)
    else:
        verdict = judge_rejection(
            choices, processed.reshape(B, R, V), proposal, quota,
            request.sampling.temperature < GREEDY_BELOW, request.seeds, positions, request.sample,
        )  # fmt: skip

    def of_token(log_probs):
        index = jnp.maximum(verdict.tokens, 0).reshape(B * R, 1)
        return jnp.take_along_axis(log_probs, index, axis=1).reshape(B, R)

    def alternatives(log_probs):
        if not shape.top:
            return Alternatives(jnp.zeros((B, R, 0), jnp.int32), jnp.zeros((B, R, 0)))
        return Alternatives(*(a.reshape(B, R, -1) for a in top(log_probs, shape.top)))

    reported = Scores(
        of_token(raw), of_token(processed), alternatives(raw), alternatives(processed)
    )
    return verdict, reported
