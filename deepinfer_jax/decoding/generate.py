"""Generation as one XLA program: a `lax.while_loop` over the step function.

The loop's state holds, for every sequence, its text so far and how much of it has been run. A
round runs the next known tokens of each sequence (a chunk of its prompt, or the token chosen
last) and, where that reaches the end of the text, chooses one more. So prompts of different
lengths, prefill and decoding are the same round, and taking tokens back would be setting a
length; drafts have their place behind the known text.

In reproducible numerics one loop does both, since row tiles that hold no rows cost nothing.
Otherwise rows are computed whether they hold a token or not, so a loop of wide rounds runs while
prompts last and a loop of one-row rounds after it.

Letters: B sequences, S prompt width, N most new tokens, K stop ids, T rows of a round.
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

# Rows of a round over all sequences while prompts last: enough to fill the device's matrix units,
# few enough that a CPU's buffers stay in its caches when only one row of them is in use.
_ROUND_ROWS = {"cpu": 64}
_ROUND_ROWS_ACCELERATOR = 4096
# Index scores of a round, rows times the capacity they are held for.
_SCORES = 1 << 28
# Stop ids are padded to a multiple of this, so that their number does not recompile.
_STOP_WIDTH = 8


class Finish(IntEnum):
    """Why a sequence ended."""

    LENGTH = 0  # its limit, or the capacity of the call
    STOP = 1  # end of sequence or a stop id; that token is the last one returned
    INVALID = 2  # the model gave scores that are not numbers; no token is returned for them


class Stats(NamedTuple):
    """Counters of a generation."""

    steps: jax.Array  # int32 [B], rounds that ended with a choice of this sequence


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What the loop carries.

    Attributes:
        cache: everything before `position`.
        text: int32 [B, S + N], prompt and new tokens of each sequence.
        start: int32 [B], length of the prompt.
        count: int32 [B], new tokens.
        position: int32 [B], how much of the text has been run.
        logprobs: float32 [B, N].
        limit: int32 [B], how many new tokens there may be.
        finish: int32 [B].
        running: bool [B].
        steps: int32 [B].
        seeds: uint32 [B].
        stops: int32 [B, K], -1 for none.
        sampling: parameters of each sequence.
    """

    cache: Cache
    text: jax.Array
    start: jax.Array
    count: jax.Array
    position: jax.Array
    logprobs: jax.Array
    limit: jax.Array
    finish: jax.Array
    running: jax.Array
    steps: jax.Array
    seeds: jax.Array
    stops: jax.Array
    sampling: Sampling

    @property
    def ahead(self) -> jax.Array:
        """int32 [B], known tokens that have not been run."""
        return self.start + self.count - self.position


def _result(state: State, pad_id: int) -> Generation:
    """What has been generated so far."""
    new = jnp.arange(state.logprobs.shape[1])
    tokens = jnp.take_along_axis(state.text, state.start[:, None] + new, axis=1)
    tokens = jnp.where(new < state.count[:, None], tokens, pad_id)
    return Generation(tokens, state.count, state.logprobs, state.finish, Stats(state.steps))


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
    width: int  # rows of a sequence in a round while its prompt lasts


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

    Pure and jitted: compiles once for each shape of `tokens`, `max_new_tokens` and `capacity`,
    and may be called inside a larger jitted program. Batch sequences here rather than with
    `vmap`, which would select between whole caches every step.

    The same seed gives the same tokens whatever else is in the batch, in reproducible numerics (the
    default on CPU).

    Args:
        model: from `load`.
        tokens: int32 [B, S], prompts padded on the right.
        lengths: int32 [B], tokens of each prompt. None: S.
        seeds: uint32 [B] or scalar, one stream of noise for each sequence. None: 0, 1, ...
        key: a JAX key from which seeds are derived, instead of `seeds`.
        max_new_tokens: N, static.
        limits: int32 [B] or scalar, new tokens of each sequence, 1 to N (clipped where the values
            are not known yet). None: N.
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
    model, state = _begin(model, prompts, shape)
    running = True
    while running:
        state, result = _advance(model, state, np.int32(burst), shape)
        running = bool(state.running.any())
        yield result


def _prepare(
    model: Transformer, tokens, lengths, *, seeds=None, key=None, max_new_tokens=64, limits=None,
    sampling=None, stop_ids=(), ignore_eos=False, capacity=None,
) -> tuple[Transformer, Prompts, Shape]:  # fmt: skip
    config = model.config
    tokens = inputs.token_batch(tokens, config)
    B, S = tokens.shape
    lengths = inputs.lengths_of(lengths, B, S)
    max_new_tokens = inputs.whole_number(max_new_tokens, "max_new_tokens")
    capacity = inputs.whole_number(S + max_new_tokens if capacity is None else capacity, "capacity")
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
    if not isinstance(sampling, Sampling):
        raise TypeError(
            f"sampling must be a Sampling, got {type(sampling).__name__} "
            "(SamplingParams is for LLM; its row() is a Sampling)"
        )
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
    rows = _ROUND_ROWS["cpu"] if on_cpu else min(_ROUND_ROWS_ACCELERATOR, _SCORES // capacity)
    width = max(1, min(S, rows // B))
    model = model.with_numerics(model.numerics.resolve(reproducible=on_cpu))
    return model, prompts, Shape(max_new_tokens, capacity, width)


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
        inputs.integers(limits, "limits")
        values = np.asarray(limits)
        if values.min() < 1 or values.max() > most:
            raise ValueError(
                f"limits must be between 1 and max_new_tokens = {most}, "
                f"got {values.min()} to {values.max()}"
            )
    return jnp.clip(inputs.per_sequence(limits, batch, jnp.int32, "limits"), 1, most)


def _stops(stop_ids, ignore_eos: bool, config: Config, batch: int) -> jax.Array:
    on_host = inputs.is_known(stop_ids)  # where no shape has to be compiled for
    if on_host:
        stop_ids = inputs.integers(stop_ids, "stop_ids").astype(np.int32)
        if stop_ids.size and (stop_ids.min() < -1 or stop_ids.max() >= config.vocab_size):
            raise ValueError(
                f"stop_ids must be token ids below {config.vocab_size} (or -1), "
                f"got {stop_ids.min()} to {stop_ids.max()}"
            )
    array = np if on_host else jnp
    if np.ndim(stop_ids) == 1:
        stop_ids = array.broadcast_to(stop_ids, (batch, np.shape(stop_ids)[0]))
    if np.ndim(stop_ids) != 2 or np.shape(stop_ids)[0] != batch:
        raise ValueError(
            f"stop_ids must have shape [K] or [{batch}, K], got {list(np.shape(stop_ids))}"
        )
    eos = np.full((batch, 1), -1 if ignore_eos else config.eos_token_id, np.int32)
    stops = array.concatenate([eos, stop_ids.astype(np.int32)], axis=1)
    missing = -stops.shape[1] % _STOP_WIDTH
    return jnp.asarray(array.pad(stops, ((0, 0), (0, missing)), constant_values=-1))


@functools.partial(jax.jit, static_argnames="shape")
def _generate(model: Transformer, prompts: Prompts, shape: Shape) -> Generation:
    state = _run(_unpacked(model), _initial(model, prompts, shape), shape, None)
    return _result(state, model.config.pad_token_id)


@functools.partial(jax.jit, static_argnames="shape")
def _begin(model: Transformer, prompts: Prompts, shape: Shape) -> tuple[Transformer, State]:
    return _unpacked(model), _initial(model, prompts, shape)


@functools.partial(jax.jit, static_argnames="shape", donate_argnames="state")
def _advance(model: Transformer, state: State, rounds: jax.Array, shape: Shape):
    """The state after so many rounds with a choice, and what has been generated by then."""
    state = _run(model, state, shape, rounds)
    return state, _result(state, model.config.pad_token_id)


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


def _initial(model: Transformer, prompts: Prompts, shape: Shape) -> State:
    B = prompts.tokens.shape[0]
    N = shape.max_new_tokens
    zeros = jnp.zeros(B, jnp.int32)
    return State(
        cache=init_cache(
            model.config, B, shape.capacity, shape.width, numerics=model.numerics
        ),
        text=jnp.pad(prompts.tokens, ((0, 0), (0, N))),
        start=prompts.lengths,
        count=zeros,
        position=zeros,
        logprobs=jnp.zeros((B, N), jnp.float32),
        limit=prompts.limit,
        finish=zeros,
        running=jnp.ones(B, bool),
        steps=zeros,
        seeds=prompts.seeds,
        stops=prompts.stops,
        sampling=prompts.sampling,
    )


def _run(model: Transformer, state: State, shape: Shape, rounds: jax.Array | None) -> State:
    """Rounds until nothing runs, or until so many of them have chosen a token for some sequence."""

    def loop(state, done, width, go_on):
        def condition(carry):
            done, state = carry
            within = True if rounds is None else done < rounds
            return within & go_on(state)

        def body(carry):
            done, state = carry
            after = _round(model, state, width)
            return done + (after.count > state.count).any(), after

        return lax.while_loop(condition, body, (done, state))

    done = jnp.int32(0)
    if not model.numerics.reproducible and shape.width > 1:
        done, state = loop(
            state, done, shape.width, lambda s: (s.running & (s.ahead > 1)).any()
        )
        return loop(state, done, 1, lambda s: s.running.any())[1]
    return loop(state, done, shape.width, lambda s: s.running.any())[1]


def _round(model: Transformer, state: State, width: int) -> State:
    """Run up to `width` known tokens of every running sequence; choose where they reach the end."""
    B = state.position.shape[0]
    slots = jnp.arange(B, dtype=jnp.int32)
    taken = jnp.where(state.running, jnp.minimum(state.ahead, width), 0)
    column = jnp.minimum(
        state.position[:, None] + jnp.arange(width), state.text.shape[1] - 1
    )
    rows = rectangle(
        jnp.take_along_axis(state.text, column, axis=1),
        slots,
        state.position,
        taken,
        jnp.zeros((B, width), bool),
    )
    if model.numerics.reproducible:
        rows = rows.compact()
    hidden, cache, _ = step(model, state.cache, rows)
    last = jnp.zeros(B, jnp.int32).at[jnp.where(rows.valid, rows.slot, B)].max(
        jnp.arange(rows.slot.shape[0], dtype=jnp.int32), mode="drop"
    )
    position = state.position + taken
    token, logprob = choose(logits(model, hidden[last]), state.sampling, state.seeds, position)

    reached = state.running & (taken == state.ahead)
    valid = reached & (token >= 0)

    def put(array, column, value):
        return array.at[slots, jnp.where(valid, column, array.shape[1])].set(value, mode="drop")

    count = state.count + valid
    stopped = valid & (token[:, None] == state.stops).any(axis=1)
    invalid = reached & ~valid
    finish = jnp.where(stopped, Finish.STOP, jnp.where(invalid, Finish.INVALID, state.finish))
    return dataclasses.replace(
        state,
        cache=cache,
        text=put(state.text, state.start + state.count, token),
        count=count,
        position=position,
        logprobs=put(state.logprobs, state.count, logprob),
        finish=finish.astype(jnp.int32),
        running=state.running & ~stopped & ~invalid & (count < state.limit),
        steps=state.steps + reached,
    )
