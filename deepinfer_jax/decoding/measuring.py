"""Timing rounds, for a schedule of drafts (engine spec 3.5).

Letters: B sequences, n drafts of a sequence.
"""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import inputs
from deepinfer_jax.decoding.generate import begin
from deepinfer_jax.decoding.loop import State, one_round, run
from deepinfer_jax.decoding.request import Shape, prepare
from deepinfer_jax.decoding.sampling import Sampling
from deepinfer_jax.decoding.schedule import StepTimes, lots
from deepinfer_jax.model.transformer import Transformer


def measure_step_times(
    model: Transformer,
    batch: int,
    context: int,
    *,
    num_drafts: int | None = None,
    repeats: int = 5,
) -> StepTimes:
    """Time whole rounds (drafting, running, choosing) over growing numbers of rows.

    Args:
        model: with a drafter.
        batch: B, sequences that will be generated together.
        context: tokens that each of them has behind it, typically.
        num_drafts: n, as for `generate`.
        repeats: rounds timed at each number of rows; the median counts.

    Returns:
        What `generate(draft="scheduled", step_times=...)` takes; `save` keeps it.

    Raises:
        ValueError: a count below one, a context too long to go on from, a model without a drafter,
            more drafts than its block.
    """
    batch = inputs.whole_number(batch, "batch")
    context = inputs.whole_number(context, "context")
    repeats = inputs.whole_number(repeats, "repeats")
    if model.mtp is None:
        raise ValueError("measure_step_times: the model has no drafter, so there is no choice")
    vocab, block = model.config.vocab_size, model.config.dspark_block_size
    longest = model.config.max_position_embeddings - block - 3
    if context > longest:
        raise ValueError(
            f"context must be at most {longest}, to go on within the model's "
            f"max_position_embeddings, got {context}"
        )
    tokens = np.random.default_rng(0).integers(0, vocab, (batch, context), dtype=np.int32)
    model, request, shape = prepare(
        model, tokens, None, max_new_tokens=block + 3, ignore_eos=True, draft="scheduled",
        num_drafts=num_drafts, sampling=Sampling(),
    )  # fmt: skip
    model, state = begin(model, request, shape)
    nothing = np.zeros(batch, np.int32)
    if not model.numerics.reproducible:
        state = _prefilled(model, state, shape)
    while (state.ahead > 1).any():
        state = _round(model, state, nothing, False, shape)
    sizes = lots(batch, shape.drafts, model.numerics.tile)
    seconds = []
    for size in sizes:
        drafts = min(size, batch * (shape.drafts + 1)) - batch
        quota = np.full(batch, drafts // batch, np.int32)
        quota[: drafts % batch] += 1
        times = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            state = jax.block_until_ready(_round(model, state, quota, True, shape))
            times.append(time.perf_counter() - began)
        seconds.append(np.median(times[1:]))  # the first may have compiled
    return StepTimes.of(sizes, seconds)


@functools.partial(jax.jit, static_argnames="shape")
def _prefilled(model: Transformer, state: State, shape: Shape) -> State:
    """The state in which every sequence has its first new token, by rounds as wide as they come."""
    return run(model, state, shape, np.int32(1))


@functools.partial(jax.jit, static_argnames="shape", donate_argnames="state")
def _round(model: Transformer, state: State, quota, again, shape: Shape) -> State:
    """The state after a round; if `again`, one from which the same rows can be run once more."""
    width = shape.width if model.numerics.reproducible else 1
    after = one_round(model, state, shape, width, shape.drafts, quota)
    kept = {
        name: jnp.where(again, getattr(state, name), getattr(after, name))
        for name in ("count", "position", "running", "finish")
    }
    return dataclasses.replace(after, **kept)
