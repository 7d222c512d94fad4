"""Generation as one XLA program: `generate` and `stream`.

Both check their arguments (`request`), then run rounds (`loop`) until every sequence has ended.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import inputs
from deepinfer_jax.decoding.loop import Alternatives, State, initial, run, unpacked
from deepinfer_jax.decoding.request import Request, Shape, prepare
from deepinfer_jax.decoding.sampling import Sampling
from deepinfer_jax.decoding.schedule import StepTimes
from deepinfer_jax.decoding.stats import Stats
from deepinfer_jax.model.transformer import Transformer


class Generation(NamedTuple):
    """Result of `generate`; B is prompts times samples, the samples of a prompt side by side.

    Attributes:
        tokens: int32 [B, N]; the pad id behind a sequence's length.
        lengths: int32 [B], new tokens of each sequence, a stop token included.
        logprobs: float32 [B, N], of the chosen tokens by the model alone: before temperature,
            penalties, biases and cuts. 0 behind the length.
        processed_logprobs: float32 [B, N], in the distribution that tokens were drawn from, which
            for greedy sequences is certain of one token.
        top: the most likely tokens by the model alone, `top_logprobs` of them.
        processed_top: the same of the distribution that tokens were drawn from.
        finish: int32 [B], a `Finish`.
        stats: counters; `stats.report()` sums them up.
    """

    tokens: jax.Array
    lengths: jax.Array
    logprobs: jax.Array
    processed_logprobs: jax.Array
    top: Alternatives
    processed_top: Alternatives
    finish: jax.Array
    stats: Stats


def generate(
    model: Transformer,
    tokens: jax.Array,
    lengths: jax.Array | None = None,
    *,
    seeds: jax.Array | None = None,
    key: jax.Array | None = None,
    n: int = 1,
    sample: jax.Array | int = 0,
    max_new_tokens: int = 64,
    limits: jax.Array | None = None,
    min_new_tokens: jax.Array | int = 0,
    sampling: Sampling | None = None,
    logit_bias: Mapping[int, float] | tuple[jax.Array, jax.Array] | None = None,
    forced: jax.Array | None = None,
    stop_ids: Sequence[int] | Sequence[Sequence[int]] | jax.Array = (),
    ignore_eos: bool = False,
    top_logprobs: int = 0,
    capacity: int | None = None,
    draft: str | None = None,
    num_drafts: int | None = None,
    coupling: str | None = None,
    step_times: StepTimes | str | None = None,
) -> Generation:
    """Continue prompts.

    Pure and jitted: compiles once for each shape and static argument, and may be called inside a
    larger jitted program. Batch sequences here rather than with `vmap`, which would select between
    whole caches every step.

    The same seed gives the same tokens whatever else is in the batch and however they are drafted,
    in reproducible numerics (the default on CPU); only `coupling="rejection"` ties them to the
    drafts.

    Args:
        model: from `load`.
        tokens: int32 [P, S], prompts padded on the right.
        lengths: int32 [P], tokens of each prompt. None: S.
        seeds: uint32 [P] or scalar, one stream of noise for each prompt. None: 0, 1, ...
        key: a JAX key from which seeds are derived, instead of `seeds`.
        n: samples of each prompt, static; B = P n. They differ in their noise only. Each runs the
            prompt for itself.
        sample: int32 [P] or scalar, number of the first of these samples: with n=4, sample 6 is the
            third of the samples from 4 on.
        max_new_tokens: N, static.
        limits: int32 [P] or scalar, new tokens of each sequence, 1 to N (clipped where the values
            are not known yet). None: N.
        min_new_tokens: int32 [P] or scalar, how many tokens come before a stop id may.
        sampling: how tokens are chosen, scalars or [P] each. None: greedy.
        logit_bias: numbers that are added to scores, -inf to ban a token: a dict by token id for
            all prompts, or ids ([K] or [P, K], -1 for none) and numbers of the same shape.
        forced: token ids that new tokens must be, [F] for all or [P, F]; -1 leaves one free.
        stop_ids: token ids that end a sequence, [K] for all or [P, K] (-1 for none).
        ignore_eos: do not stop at the end-of-sequence token.
        top_logprobs: how many of the most likely tokens to report at each place, static.
        capacity: tokens that each sequence's cache can hold, static. None: S + N.
        draft: None, "fixed" (verify all drafts in every round) or "scheduled" (verify those that
            pay, by the drafter's confidences and `step_times`), static.
        num_drafts: n, most drafts of a sequence in a round, static. None: the drafter's block.
        coupling: "shared" (None means it) or "rejection", static; see `decoding.speculative`.
            "rejection" under a schedule needs seeds that differ.
        step_times: what a round costs, for draft="scheduled": from `measure_step_times`, or the
            path of a saved one. None: `StepTimes.assumed`.

    Raises:
        ValueError: arguments of wrong shape or range, a prompt that is empty or does not fit,
            drafts from a model without a drafter.
    """
    model, request, shape = prepare(
        model, tokens, lengths, seeds=seeds, key=key, n=n, sample=sample,
        max_new_tokens=max_new_tokens, limits=limits, min_new_tokens=min_new_tokens,
        sampling=sampling, logit_bias=logit_bias, forced=forced, stop_ids=stop_ids,
        ignore_eos=ignore_eos, top_logprobs=top_logprobs, capacity=capacity, draft=draft,
        num_drafts=num_drafts, coupling=coupling, step_times=step_times,
    )  # fmt: skip
    return _generate(model, request, shape)


def stream(
    model: Transformer, tokens: jax.Array, lengths: jax.Array | None = None, *, burst: int = 8,
    **arguments: Any,
) -> Iterator[Generation]:
    """Like `generate`, handing out what there is after every `burst` rounds.

    Args:
        model: from `load`.
        tokens: int32 [P, S].
        lengths: int32 [P].
        burst: rounds between looks at the device; 1 is smoothest, 8 costs little.
        **arguments: of `generate`.

    Yields:
        The generation so far; the last one is what `generate` would return.
    """
    burst = inputs.whole_number(burst, "burst")
    model, request, shape = prepare(model, tokens, lengths, **arguments)
    model, state = begin(model, request, shape)
    running = True
    while running:
        state, result = _advance(model, state, np.int32(burst), shape)
        running = bool(state.running.any())
        yield result


@functools.partial(jax.jit, static_argnames="shape")
def _generate(model: Transformer, request: Request, shape: Shape) -> Generation:
    state = run(unpacked(model), initial(model, request, shape), shape, None)
    return _result(state, model.config.pad_token_id)


@functools.partial(jax.jit, static_argnames="shape")
def begin(model: Transformer, request: Request, shape: Shape) -> tuple[Transformer, State]:
    """The model as rounds want it, and the state before the first."""
    return unpacked(model), initial(model, request, shape)


@functools.partial(jax.jit, static_argnames="shape", donate_argnames="state")
def _advance(model: Transformer, state: State, rounds: jax.Array, shape: Shape):
    """The state after so many rounds with a choice, and what has been generated by then."""
    state = run(model, state, shape, rounds)
    return state, _result(state, model.config.pad_token_id)


def _result(state: State, pad_id: int) -> Generation:
    """What has been generated so far."""
    new = jnp.arange(state.scores.logprobs.shape[1])
    tokens = jnp.take_along_axis(state.text, state.request.lengths[:, None] + new, axis=1)
    tokens = jnp.where(new < state.count[:, None], tokens, pad_id)
    return Generation(
        tokens, state.count, *state.scores, finish=state.finish, stats=state.stats
    )


