"""Arguments of a generation, checked and made into arrays, before anything is computed.

Values are checked where they are known; under a caller's own `jax.jit` only shapes and dtypes are.
Lists of tokens are padded to few widths, so that their lengths do not recompile.

Letters: B sequences (prompts times samples), S prompt width, N most new tokens, K tokens in a list.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import inputs
from deepinfer_jax.config import Config
from deepinfer_jax.decoding.adjustments import Adjustments
from deepinfer_jax.decoding.sampling import Sampling
from deepinfer_jax.decoding.schedule import StepTimes
from deepinfer_jax.model.transformer import Transformer

DRAFTS = (None, "fixed", "scheduled")
COUPLINGS = ("shared", "rejection")
# Rows of a round over all sequences while prompts last: enough to fill the device's matrix units,
# few enough that a CPU's buffers stay in its caches when only one row of them is in use.
_ROUND_ROWS = {"cpu": 64}
_ROUND_ROWS_ACCELERATOR = 4096
# Index scores of a round, rows times the capacity they are held for.
_SCORES = 1 << 28
# Lists of tokens are padded to a multiple of this, and to this if they are empty.
_LIST_WIDTH = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for, as arrays.

    Attributes:
        tokens: int32 [B, S].
        lengths: int32 [B].
        seeds: uint32 [B].
        sample: int32 [B], which of several samples of its prompt a sequence is.
        limit: int32 [B], how many new tokens there may be.
        sampling: [B] each.
        adjustments: biases, stop ids, minimum lengths and forced tokens.
        times: what a round costs, for a schedule.
    """

    tokens: jax.Array
    lengths: jax.Array
    seeds: jax.Array
    sample: jax.Array
    limit: jax.Array
    sampling: Sampling
    adjustments: Adjustments
    times: StepTimes | None


class Shape(NamedTuple):
    """What a generation compiles for, beside the arrays' shapes."""

    max_new_tokens: int
    capacity: int
    width: int  # rows of a sequence in a round while its prompt lasts
    drafts: int  # most drafts of a sequence in a round; 0: no drafting
    coupling: str  # of COUPLINGS
    top: int  # alternatives to report for each token

    @property
    def rows(self) -> int:
        """Most rows of a sequence in a round."""
        return max(self.width, self.drafts + 1)


def prepare(
    model: Transformer, tokens, lengths, *, seeds=None, key=None, n=1, sample=0,
    max_new_tokens=64, limits=None, min_new_tokens=0, sampling=None, logit_bias=None, forced=None,
    stop_ids=(), ignore_eos=False, top_logprobs=0, capacity=None, draft=None, num_drafts=None,
    coupling=None, step_times=None,
) -> tuple[Transformer, Request, Shape]:  # fmt: skip
    """The arguments of `generate` as the model with its numerics settled, arrays, and statics."""
    config = model.config
    tokens = inputs.token_batch(tokens, config)
    prompts, S = tokens.shape
    lengths = inputs.lengths_of(lengths, prompts, S)
    n = inputs.whole_number(n, "n")
    B = prompts * n
    N = inputs.whole_number(max_new_tokens, "max_new_tokens")
    top_logprobs = inputs.whole_number(top_logprobs, "top_logprobs", least=0)
    if top_logprobs > config.vocab_size:
        raise ValueError(
            f"top_logprobs must be at most {config.vocab_size}, the vocabulary, got {top_logprobs}"
        )
    capacity = _capacity(capacity, S, N, config)
    sampling = Sampling(temperature=0.0) if sampling is None else sampling
    if not isinstance(sampling, Sampling):
        raise TypeError(
            f"sampling must be a Sampling, got {type(sampling).__name__} "
            "(SamplingParams is for LLM; its row() is a Sampling)"
        )
    sampling.validate()
    drafts, coupling = check_drafting(
        model, draft, num_drafts=num_drafts, coupling=coupling, step_times=step_times
    )
    bias_ids, bias = _bias(logit_bias, config, prompts)
    stops = _stops(stop_ids, ignore_eos, config, prompts)
    limit = _count(limits, 1, N, prompts, "limits", N)
    min_new = _count(min_new_tokens, 0, N, prompts, "min_new_tokens", 0)
    if inputs.is_known((limit, min_new)) and (np.asarray(min_new) > np.asarray(limit)).any():
        raise ValueError(
            f"min_new_tokens must not exceed limits, got {np.asarray(min_new)} for "
            f"{np.asarray(limit)}"
        )
    forced = _forced(forced, config, prompts, N)
    seeds = _seeds(seeds, key, prompts)
    sample = _first_samples(sample, n, prompts)
    per_prompt = (tokens, lengths, seeds, sample, limit, sampling.broadcast(prompts))
    per_prompt += (Adjustments(bias_ids, bias, stops, min_new, forced),)
    if n > 1:
        per_prompt = jax.tree.map(lambda a: jnp.repeat(a, n, axis=0), per_prompt)
    tokens, lengths, seeds, sample, limit, sampling, adjustments = per_prompt
    if n > 1:
        sample = sample + np.tile(np.arange(n, dtype=np.int32), prompts)
    if draft == "scheduled" and coupling == "rejection":
        _check_streams(seeds, sample)
    on_cpu = jax.default_backend() == "cpu"
    model = model.with_numerics(model.numerics.resolve(reproducible=on_cpu))
    request = Request(
        tokens=tokens,
        lengths=lengths,
        seeds=seeds,
        sample=sample,
        limit=limit,
        sampling=sampling,
        adjustments=adjustments,
        times=_times(model, draft, drafts, step_times, B),
    )
    rows = _ROUND_ROWS["cpu"] if on_cpu else min(_ROUND_ROWS_ACCELERATOR, _SCORES // capacity)
    width = max(1, min(S, rows // B))
    return model, request, Shape(N, capacity, width, drafts, coupling, top_logprobs)


def _capacity(capacity, S: int, N: int, config: Config) -> int:
    capacity = inputs.whole_number(S + N if capacity is None else capacity, "capacity")
    if capacity < S + N:
        raise ValueError(
            f"capacity = {capacity} cannot hold prompts of {S} and {N} new tokens; "
            f"it must be at least {S + N}"
        )
    if capacity > config.max_position_embeddings:
        raise ValueError(
            f"prompts of {S} and {N} new tokens need a capacity of {capacity}, beyond "
            f"the model's max_position_embeddings = {config.max_position_embeddings}"
        )
    return capacity


def check_drafting(
    model: Transformer, draft, *, num_drafts=None, coupling=None, step_times=None
) -> tuple[int, str]:
    """How many drafts a round verifies at most, and how they are judged.

    Raises:
        ValueError: arguments that do not exist or do not go together, a model without a drafter.
    """
    if draft not in DRAFTS:
        raise ValueError(f"draft must be one of {DRAFTS}, got {draft!r}")
    if draft is None:
        given = dict(num_drafts=num_drafts, coupling=coupling, step_times=step_times)
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} means nothing without drafts: give draft, or leave it")
        return 0, COUPLINGS[0]
    if model.mtp is None:
        raise ValueError(f"draft = {draft!r} needs a drafter, and the model has none; use None")
    if draft != "scheduled" and step_times is not None:
        raise ValueError(f"step_times is for draft='scheduled', got draft={draft!r}")
    coupling = COUPLINGS[0] if coupling is None else coupling
    if coupling not in COUPLINGS:
        raise ValueError(f"coupling must be one of {COUPLINGS}, got {coupling!r}")
    block = model.config.dspark_block_size
    num_drafts = inputs.whole_number(block if num_drafts is None else num_drafts, "num_drafts")
    if num_drafts > block:
        raise ValueError(
            f"num_drafts must be at most {block}, the block that the drafter was trained for "
            f"(dspark_block_size), got {num_drafts}"
        )
    return num_drafts, coupling


def _times(model: Transformer, draft, drafts: int, step_times, B: int) -> StepTimes | None:
    if draft != "scheduled":
        return None
    if step_times is None:
        return StepTimes.assumed(B, drafts, tile=model.numerics.tile)
    if isinstance(step_times, (str, os.PathLike)):
        return StepTimes.load(step_times)
    if not isinstance(step_times, StepTimes):
        raise TypeError(
            f"step_times must be a StepTimes or the path of a saved one, got "
            f"{type(step_times).__name__}"
        )
    if not inputs.is_known(step_times):
        return step_times
    return StepTimes.of(step_times.rows, step_times.seconds)


def _seeds(seeds, key, prompts: int) -> jax.Array:
    if seeds is not None and key is not None:
        raise ValueError("give seeds or key, not both")
    if key is not None:
        return jax.random.bits(key, (prompts,), jnp.uint32)
    if seeds is None:
        return jnp.arange(prompts, dtype=jnp.uint32)
    return inputs.per_sequence(seeds, prompts, jnp.uint32, "seeds")


def _check_streams(seeds, sample) -> None:
    """Refuse a stream of noise that two sequences share, [B] each, where that can be seen.

    How much of one sequence a schedule verifies depends on the drafts of the others. Drafts are
    judged exactly only if they know nothing of each other's noise.
    """
    if not inputs.is_known((seeds, sample)):
        return
    streams = np.stack([np.asarray(seeds, np.int64), np.asarray(sample, np.int64)])
    if np.unique(streams, axis=1).shape[1] < streams.shape[1]:
        raise ValueError(
            "draft='scheduled' with coupling='rejection' needs a seed, or a sample of it, of its "
            f"own for each sequence, got seeds {streams[0]} and samples {streams[1]}"
        )


def _first_samples(sample, n: int, prompts: int) -> jax.Array:
    """Number of each prompt's first sample."""
    numbers = inputs.per_sequence(sample, prompts, jnp.int32, "sample")
    if inputs.is_known(sample):
        known, most = np.asarray(sample), 2**31 - n
        if known.min() < 0 or known.max() > most:
            raise ValueError(
                f"sample must be between 0 and {most}, got {known.min()} to {known.max()}"
            )
    return numbers


def _count(values, least: int, most: int, prompts: int, name: str, default: int) -> jax.Array:
    """A number of tokens for each sequence; clipped where the values are not known yet."""
    if values is None:
        return jnp.full(prompts, default, jnp.int32)
    counts = inputs.per_sequence(values, prompts, jnp.int32, name)
    if inputs.is_known(values):
        known = np.asarray(values)
        if known.min() < least or known.max() > most:
            raise ValueError(
                f"{name} must be between {least} and max_new_tokens = {most}, "
                f"got {known.min()} to {known.max()}"
            )
    return jnp.clip(counts, least, most)


def _stops(stop_ids, ignore_eos: bool, config: Config, prompts: int) -> jax.Array:
    stop_ids = _token_lists(stop_ids, "stop_ids", "K", config, prompts)
    array = _array_module(stop_ids)
    eos = np.full((prompts, 1), -1 if ignore_eos else config.eos_token_id, np.int32)
    return _padded(array.concatenate([eos, stop_ids], axis=1))


def _bias(logit_bias, config: Config, prompts: int) -> tuple[jax.Array, jax.Array]:
    """Token ids and biases, [B, K] each."""
    if isinstance(logit_bias, Mapping):
        logit_bias = (list(logit_bias), list(logit_bias.values()))
    logit_bias = ((), ()) if logit_bias is None else logit_bias
    if not isinstance(logit_bias, (tuple, list)) or len(logit_bias) != 2:
        raise TypeError(
            "logit_bias must be a dict of numbers by token id, or the pair (ids, numbers), got "
            f"{type(logit_bias).__name__}"
        )
    ids, bias = logit_bias
    ids = _token_lists(ids, "logit_bias", "K", config, prompts)
    array, known = _array_module(bias), inputs.is_known(bias)
    if known:
        bias = _known_biases(bias)
    bias = array.asarray(bias, np.float32)
    if bias.shape not in (ids.shape, ids.shape[1:]):
        raise ValueError(
            f"logit_bias must have a number for each of its token ids {list(ids.shape)}, got "
            f"{list(bias.shape)}"
        )
    bias = array.broadcast_to(bias, ids.shape)
    return _padded(ids), _padded(bias, fill=0)


def _known_biases(bias) -> np.ndarray:
    try:
        bias = np.asarray(bias, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias must have rectangular lists of numbers, got {bias}") from None
    wrong = bias[~((np.abs(bias) <= np.finfo(np.float32).max) | (bias == -np.inf))]
    if wrong.size:
        raise ValueError(
            "a number of logit_bias must be finite in float32, or -inf to ban a token, got "
            f"{wrong[0]}"
        )
    return bias


def _forced(forced, config: Config, prompts: int, N: int) -> jax.Array:
    forced = _token_lists(() if forced is None else forced, "forced", "F", config, prompts)
    if forced.shape[1] > N:
        raise ValueError(
            f"forced has {forced.shape[1]} tokens, but there are at most max_new_tokens = {N}"
        )
    # As wide as the text, so that no other list compiles anything.
    return _padded(forced, width=N)


def _token_lists(ids, name: str, letter: str, config: Config, prompts: int):
    """Token ids [K] or [B, K] as int32 [B, K], on the host where they are known."""
    known = inputs.is_known(ids)
    if known:
        ids = inputs.integers(ids, name).astype(np.int32)
        if ids.size and (ids.min() < -1 or ids.max() >= config.vocab_size):
            raise ValueError(
                f"{name} must be token ids below {config.vocab_size} (or -1), "
                f"got {ids.min()} to {ids.max()}"
            )
    array = np if known else jnp
    if np.ndim(ids) == 1:
        ids = array.broadcast_to(ids, (prompts, np.shape(ids)[0]))
    if np.ndim(ids) != 2 or np.shape(ids)[0] != prompts:
        raise ValueError(
            f"{name} must have shape [{letter}] or [{prompts}, {letter}], "
            f"got {list(np.shape(ids))}"
        )
    return ids.astype(np.int32)


def _array_module(values):
    return np if inputs.is_known(values) else jnp


def _padded(lists, fill=-1, width: int | None = None) -> jax.Array:
    """Lists [B, K] with K a multiple of few widths, on the device."""
    K = lists.shape[1]
    width = max(1, -(-K // _LIST_WIDTH)) * _LIST_WIDTH if width is None else width
    array = _array_module(lists)
    return jnp.asarray(array.pad(lists, ((0, 0), (0, width - K)), constant_values=fill))
