"""Generation as one XLA program: prefill in chunks, then a `lax.while_loop` over the step function.

The loop's state holds each sequence's last token, which is not in the cache yet. A round runs it
through the step, chooses the next token from its logits, and commits by adding one to a length. The
prompt's last token is the first one the loop runs, so prefill needs no logits.

Letters: B sequences, S prompt width, N most new tokens, K stop ids, D pending drafts.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax import inputs
from deepinfer_jax.cache import Cache, init_cache
from deepinfer_jax.config import Config
from deepinfer_jax.decoding.sampling import Sampling, choose
from deepinfer_jax.model.transformer import Transformer, logits, step
from deepinfer_jax.rows import rectangle
from pallas_kernels.layouts import QuantizedTensor

# Rows of a prefill chunk over all sequences: enough to fill the device's matrix units.
_PREFILL_ROWS = {"cpu": 256}
_PREFILL_ROWS_ACCELERATOR = 4096
# Stop ids are padded to a multiple of this, so that their number does not recompile.
_STOP_WIDTH = 8


class Finish(IntEnum):
    """Why a sequence ended."""

    LENGTH = 0  # its limit, or the capacity of the call
    STOP = 1  # end of sequence or a stop id; that token is the last one returned
    INVALID = 2  # the model gave scores that are not numbers; no token is returned for them


class Stats(NamedTuple):
    """Counters of a generation."""

    steps: jax.Array  # int32 [B], rounds in which the sequence took part


class Generation(NamedTuple):
    """Result of `generate`.

    Attributes:
        tokens: int32 [B, N]; the pad id behind a sequence's length.
        lengths: int32 [B], new tokens of each sequence, a stop token included.
        logprobs: float32 [B, N], of the chosen tokens (see `sampling.choose`); 0 behind the length.
        finish: int32 [B], a `Finish`.
        stats: counters.
    """

    tokens: jax.Array
    lengths: jax.Array
    logprobs: jax.Array
    finish: jax.Array
    stats: Stats


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "cache", "last", "position", "pending", "tokens", "logprobs", "count", "limit", "finish",
        "running", "steps", "seeds", "stops", "sampling",
    ],
    meta_fields=[],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class State:
    """What the loop carries.

    Attributes:
        cache: everything before `position`.
        last: int32 [B], the token at `position`, not in the cache yet.
        position: int32 [B].
        pending: int32 [B, D], drafts for the positions after it; D is 0 without a drafter.
        tokens: int32 [B, N], new tokens so far.
        logprobs: float32 [B, N].
        count: int32 [B], how many there are.
        limit: int32 [B], how many there may be.
        finish: int32 [B].
        running: bool [B].
        steps: int32 [B].
        seeds: uint32 [B].
        stops: int32 [B, K], -1 for none.
        sampling: parameters of each sequence.
    """

    cache: Cache
    last: jax.Array
    position: jax.Array
    pending: jax.Array
    tokens: jax.Array
    logprobs: jax.Array
    count: jax.Array
    limit: jax.Array
    finish: jax.Array
    running: jax.Array
    steps: jax.Array
    seeds: jax.Array
    stops: jax.Array
    sampling: Sampling

    @property
    def result(self) -> Generation:
        """What has been generated so far."""
        return Generation(
            self.tokens, self.count, self.logprobs, self.finish, Stats(self.steps)
        )


class Prompts(NamedTuple):
    """Checked arguments of a generation, as arrays."""

    tokens: jax.Array  # int32 [B, S]
    lengths: jax.Array  # int32 [B]
    seeds: jax.Array  # uint32 [B]
    limit: jax.Array  # int32 [B]
    stops: jax.Array  # int32 [B, K]
    sampling: Sampling  # [B] each


class Shape(NamedTuple):
    """What a generation compiles for, beside the arrays' shapes."""

    max_new_tokens: int
    capacity: int
    chunk: int


def generate(
    model: Transformer,
    tokens: jax.Array,
    lengths: jax.Array | None = None,
    *,
    seeds: jax.Array | None = None,
    key: jax.Array | None = None,
    max_new_tokens: int = 64,
    limits: jax.Array | None = None,
    sampling: Sampling | None = None,
    stop_ids: Sequence[int] | Sequence[Sequence[int]] | jax.Array = (),
    ignore_eos: bool = False,
    capacity: int | None = None,
    draft: None = None,
) -> Generation:
    """Continue prompts.

    Pure and jitted: compiles once for each shape of `tokens`, `max_new_tokens` and `capacity`, and
    may be called inside a larger jitted program. Batch sequences here rather than with `vmap`, which
    would select between whole caches every step.

    The same seed gives the same tokens whatever else is in the batch, in reproducible numerics (the
    default on CPU).

    Args:
        model: from `load`.
        tokens: int32 [B, S], prompts padded on the right.
        lengths: int32 [B], tokens of each prompt. None: S.
        seeds: uint32 [B] or scalar, one stream of noise for each sequence. None: 0, 1, ...
        key: a JAX key from which seeds are derived, instead of `seeds`.
        max_new_tokens: N, static.
        limits: int32 [B] or scalar, new tokens of each sequence, at most N. None: N.
        sampling: how tokens are chosen, scalars or [B] each. None: greedy.
        stop_ids: token ids that end a sequence, [K] for all or [B, K] (-1 for none).
        ignore_eos: do not stop at the end-of-sequence token.
        capacity: tokens that each sequence's cache can hold, static. None: S + N.
        draft: drafts are not available in this version; only None.

    Raises:
        ValueError: arguments of wrong shape or range, a prompt that is empty or does not fit.
    """
    if draft is not None:
        raise ValueError(f"draft must be None in this version, got {draft!r}")
    model, prompts, shape = _prepare(
        model, tokens, lengths, seeds=seeds, key=key, max_new_tokens=max_new_tokens, limits=limits,
        sampling=sampling, stop_ids=stop_ids, ignore_eos=ignore_eos, capacity=capacity,
    )  # fmt: skip
    return _generate(model, prompts, shape)


def stream(
    model: Transformer, tokens: jax.Array, lengths: jax.Array | None = None, *, burst: int = 8,
    **arguments: Any,
) -> Iterator[Generation]:
    """Like `generate`, handing out what there is after every `burst` rounds.

    Args:
        model: from `load`.
        tokens: int32 [B, S].
        lengths: int32 [B].
        burst: rounds between looks at the device; 1 is smoothest, 8 costs little.
        **arguments: of `generate`.

    Yields:
        The generation so far; the last one is what `generate` would return.
    """
    if burst < 1:
        raise ValueError(f"burst must be at least 1, got {burst}")
    model, prompts, shape = _prepare(model, tokens, lengths, **arguments)
    state = _begin(model, prompts, shape)
    running = True
    while running:
        state = _advance(model, state, np.int32(burst))
        running = bool(state.running.any())
        yield jax.tree.map(jnp.copy, state.result) if running else state.result


def _prepare(
    model: Transformer, tokens, lengths, *, seeds=None, key=None, max_new_tokens=64, limits=None,
    sampling=None, stop_ids=(), ignore_eos=False, capacity=None,
) -> tuple[Transformer, Prompts, Shape]:  # fmt: skip
    config = model.config
    tokens = inputs.token_batch(tokens, config)
    B, S = tokens.shape
    lengths = inputs.lengths_of(lengths, B, S)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    capacity = S + max_new_tokens if capacity is None else capacity
    if capacity < S + max_new_tokens:
        raise ValueError(
            f"capacity = {capacity} cannot hold prompts of {S} and {max_new_tokens} new tokens; "
            f"it must be at least {S + max_new_tokens}"
        )
    if capacity > config.max_position_embeddings:
        raise ValueError(
            f"prompts of {S} and {max_new_tokens} new tokens need a capacity of {capacity}, beyond "
            f"the model's max_position_embeddings = {config.max_position_embeddings}"
        )
    sampling = Sampling(temperature=0.0) if sampling is None else sampling
    sampling.validate()
    prompts = Prompts(
        tokens=tokens,
        lengths=lengths,
        seeds=_seeds(seeds, key, B),
        limit=_limit(limits, max_new_tokens, B),
        stops=_stops(stop_ids, ignore_eos, config, B),
        sampling=sampling.broadcast(B),
    )
    on_cpu = jax.default_backend() == "cpu"
    rows = _PREFILL_ROWS["cpu"] if on_cpu else _PREFILL_ROWS_ACCELERATOR
    chunk = max(1, min(S, rows // B))
    model = model.with_numerics(model.numerics.resolve(reproducible=on_cpu))
    return model, prompts, Shape(max_new_tokens, capacity, chunk)


def _seeds(seeds, key, batch: int) -> jax.Array:
    if seeds is not None and key is not None:
        raise ValueError("give seeds or key, not both")
    if key is not None:
        return jax.random.bits(key, (batch,), jnp.uint32)
    if seeds is None:
        return jnp.arange(batch, dtype=jnp.uint32)
    return inputs.per_sequence(seeds, batch, jnp.uint32, "seeds")


def _limit(limits, most: int, batch: int) -> jax.Array:
    if limits is None:
        return jnp.full(batch, most, jnp.int32)
    if inputs.is_known(limits):
        values = np.asarray(limits)
        if values.min() < 1 or values.max() > most:
            raise ValueError(
                f"limits must be between 1 and max_new_tokens = {most}, "
                f"got {values.min()} to {values.max()}"
            )
    return inputs.per_sequence(limits, batch, jnp.int32, "limits")


def _stops(stop_ids, ignore_eos: bool, config: Config, batch: int) -> jax.Array:
    if inputs.is_known(stop_ids):
        stop_ids = np.asarray(stop_ids, np.int32)
        if stop_ids.size and (stop_ids.min() < -1 or stop_ids.max() >= config.vocab_size):
            raise ValueError(
                f"stop_ids must be token ids below {config.vocab_size} (or -1), "
                f"got {stop_ids.min()} to {stop_ids.max()}"
            )
    if np.ndim(stop_ids) == 1:
        stop_ids = jnp.broadcast_to(stop_ids, (batch, np.shape(stop_ids)[0]))
    if np.ndim(stop_ids) != 2 or np.shape(stop_ids)[0] != batch:
        raise ValueError(
            f"stop_ids must have shape [K] or [{batch}, K], got {list(np.shape(stop_ids))}"
        )
    eos = jnp.full((batch, 1), -1 if ignore_eos else config.eos_token_id, jnp.int32)
    stops = jnp.concatenate([eos, jnp.asarray(stop_ids, jnp.int32)], axis=1)
    missing = -stops.shape[1] % _STOP_WIDTH
    return jnp.pad(stops, ((0, 0), (0, missing)), constant_values=-1)


@functools.partial(jax.jit, static_argnames="shape")
def _generate(model: Transformer, prompts: Prompts, shape: Shape) -> Generation:
    model = _unpacked(model)
    state = _prefill(model, prompts, shape)
    return lax.while_loop(
        lambda s: s.running.any(), functools.partial(_round, model), state
    ).result


@functools.partial(jax.jit, static_argnames="shape")
def _begin(model: Transformer, prompts: Prompts, shape: Shape) -> State:
    return _prefill(_unpacked(model), prompts, shape)


@functools.partial(jax.jit, donate_argnames="state")
def _advance(model: Transformer, state: State, rounds: jax.Array) -> State:
    model = _unpacked(model)

    def go_on(carry):
        done, state = carry
        return (done < rounds) & state.running.any()

    def body(carry):
        done, state = carry
        return done + 1, _round(model, state)

    return lax.while_loop(go_on, body, (jnp.int32(0), state))[1]


def _unpacked(model: Transformer) -> Transformer:
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


def _prefill(model: Transformer, prompts: Prompts, shape: Shape) -> State:
    """Run all but the last token of each prompt, chunk by chunk."""
    B, S = prompts.tokens.shape
    N, chunk = shape.max_new_tokens, shape.chunk
    slots = jnp.arange(B, dtype=jnp.int32)
    before = prompts.lengths - 1
    tokens = jnp.pad(prompts.tokens, ((0, 0), (0, chunk)))
    text = jnp.zeros((B, chunk), bool)

    def run_chunk(i, cache):
        start = i * chunk
        part = lax.dynamic_slice_in_dim(tokens, start, chunk, axis=1)
        count = jnp.clip(before - start, 0, chunk)
        starts = jnp.full(B, start, jnp.int32)
        return step(model, cache, rectangle(part, slots, starts, count, text))[1]

    cache = init_cache(model.config, B, shape.capacity, chunk, numerics=model.numerics)
    chunks = (jnp.max(before) + chunk - 1) // chunk
    cache = lax.fori_loop(0, chunks, run_chunk, cache)
    zeros = jnp.zeros(B, jnp.int32)
    return State(
        cache=cache,
        last=jnp.take_along_axis(prompts.tokens, before[:, None], axis=1)[:, 0],
        position=before,
        pending=jnp.zeros((B, 0), jnp.int32),
        tokens=jnp.full((B, N), model.config.pad_token_id, jnp.int32),
        logprobs=jnp.zeros((B, N), jnp.float32),
        count=zeros,
        limit=prompts.limit,
        finish=zeros,
        running=jnp.ones(B, bool),
        steps=zeros,
        seeds=prompts.seeds,
        stops=prompts.stops,
        sampling=prompts.sampling,
    )


def _round(model: Transformer, state: State) -> State:
    """One step of all running sequences, one token each."""
    B = state.last.shape[0]
    slots = jnp.arange(B, dtype=jnp.int32)
    rows = rectangle(
        state.last[:, None], slots, state.position, state.running.astype(jnp.int32),
        jnp.zeros((B, 1), bool),
    )  # fmt: skip
    hidden, cache, _ = step(model, state.cache, rows)
    token, logprob = choose(
        logits(model, hidden), state.sampling, state.seeds, state.position + 1
    )
    valid = state.running & (token >= 0)
    column = jnp.where(valid, state.count, state.tokens.shape[1])

    def put(array, value):
        return array.at[slots, column].set(value, mode="drop")

    count = state.count + valid
    stopped = valid & (token[:, None] == state.stops).any(axis=1)
    running = valid & ~stopped & (count < state.limit)
    invalid = state.running & ~valid
    finish = jnp.where(stopped, Finish.STOP, jnp.where(invalid, Finish.INVALID, state.finish))
    return dataclasses.replace(
        state,
        cache=cache,
        last=jnp.where(valid, token, state.last),
        position=state.position + valid,
        tokens=put(state.tokens, token),
        logprobs=put(state.logprobs, logprob),
        count=count,
        finish=finish.astype(jnp.int32),
        running=running,
        steps=state.steps + state.running,
    )
