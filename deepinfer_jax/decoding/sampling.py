"""How a token is chosen from logits: temperature, top-p, top-k and reproducible noise (spec 9.6).

`process` turns logits into the distribution that is sampled and reported; `choose` adds Gumbel
noise to it and takes the largest. The noise is a pure function of (seed, position, purpose, sample,
token), so the same seed gives the same token alone or in any batch, drafted or not.

Nothing here depends on the order of an addition: probabilities are summed as integers, and top-p
and top-k find their boundary by bisecting the bits of the logits instead of sorting the vocabulary.
Equal logits are ranked by token id, the lower one first.

Letters: T rows, V vocabulary, B sequences.
"""

import dataclasses
import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

# Below this a division by the temperature can overflow; the engine calls it greedy as well.
GREEDY_BELOW = 1e-5
# Probabilities as integers: their sum stays below 2**32 for any vocabulary below 2**31.
MASS_ONE = 2.0**31
NO_LIMIT = np.uint32(2**32 - 1)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature", "top_p", "top_k"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to sample, as a pytree of arrays: changing a value never recompiles.

    Each field is a scalar or one value per sequence.

    Attributes:
      temperature: float32 [B], at least 0; below 1e-5 the most likely token is always taken.
      top_p: float32 [B] in (0, 1]; a token stays if the probability of all more likely tokens
        together is at most top_p. 1 switches it off.
      top_k: int32 [B]; only the k most likely tokens stay. 0, a negative number, or one not below
        the size of the vocabulary switches it off.
    """

    temperature: ArrayLike = 1.0
    top_p: ArrayLike = 1.0
    top_k: ArrayLike = -1

    def validate(self) -> "Sampling":
        """Return self, or raise ValueError for a value that cannot be meant; traced values pass."""
        _check(
            "temperature",
            self.temperature,
            lambda x: (x >= 0) & (x <= np.finfo(np.float32).max),
            "a finite float32 number of at least 0",
        )
        _check("top_p", self.top_p, lambda x: (x > 0) & (x <= 1), "in (0, 1]")
        _check(
            "top_k",
            self.top_k,
            lambda x: (x == np.floor(x)) & (np.abs(x) < 2**31),
            "an int32 number",
        )
        return self

    def broadcast(self, B: int) -> "Sampling":
        """The same sampling with one value per sequence, every field of shape [B].

        Raises:
          ValueError: a field is neither a scalar nor of shape [B].
        """

        def spread(name, dtype):
            value = getattr(self, name)
            # On the host, where no shape has to be compiled for.
            known = not isinstance(value, jax.core.Tracer)
            value = np.asarray(value, dtype) if known else value.astype(dtype)
            if value.shape not in ((), (B,)):
                raise ValueError(f"{name} must be a scalar or have shape ({B},), got {value.shape}")
            return jnp.asarray((np if known else jnp).broadcast_to(value, (B,)))

        return Sampling(
            temperature=spread("temperature", jnp.float32),
            top_p=spread("top_p", jnp.float32),
            top_k=spread("top_k", jnp.int32),
        )


def _check(name, value, valid, expected):
    if isinstance(value, jax.core.Tracer):
        return
    value = np.asarray(value)
    wrong = value[~valid(value)]
    if wrong.size:
        raise ValueError(f"{name} must be {expected}, got {wrong.flat[0]}")


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """One request as a host describes it, with the names vLLM uses.

    Attributes:
      temperature: see `Sampling`.
      top_p: see `Sampling`.
      top_k: see `Sampling`.
      max_tokens: most tokens to generate, at least 1.
      seed: number in [0, 2**32) that decides the text; None lets the caller draw one.
      stop_token_ids: tokens that end the text, besides the end-of-sequence token.
      ignore_eos: whether to go on after the end-of-sequence token.

    Raises:
      ValueError: a value outside these ranges.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 16
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self.row().validate()
        for name in ("max_tokens", "seed"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (int, np.integer)):
                raise ValueError(f"{name} must be an integer, got {value!r}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be in [0, 2**32), got {self.seed}")
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must not be negative, got {self.stop_token_ids}")

    def row(self) -> Sampling:
        """The device half of the request, as scalars."""
        return Sampling(self.temperature, self.top_p, self.top_k)


class Purpose(enum.IntEnum):
    """What noise is for; no two purposes share a number. Values decide texts: keep them."""

    TARGET = 0


def _threefry(k0, k1, c0, c1):
    """The threefry-2x32 block with 20 rounds, on broadcast uint32 arrays.

    Written out because a number that jax.random draws depends on the setting
    `jax_threefry_partitionable`, and because JAX loops over the rounds on CPU, which makes its own
    block 6 to 20 times slower.
    """
    k2 = k0 ^ k1 ^ jnp.uint32(0x1BD11BDA)
    keys = (k0, k1, k2)
    x, y = c0 + k0, c1 + k1
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x = x + y
            y = x ^ ((y << turn) | (y >> (32 - turn)))
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def noise(
    seeds: jax.Array,
    positions: jax.Array,
    vocab: int,
    purpose: Purpose = Purpose.TARGET,
    sample: ArrayLike = 0,
) -> jax.Array:
    """Standard Gumbel noise for each row and token.

    A value depends on its own seed, position, purpose, sample and token id and on nothing else: not
    on the other rows, the size of the vocabulary, or any JAX setting.

    Args:
      seeds: uint32 [T].
      positions: int32 [T], the absolute position that the chosen token will have.
      vocab: V.
      purpose: what the noise is for.
      sample: int32 scalar or [T], which of several samples of one prompt.

    Returns:
      float32 [T, V], finite.
    """

    def words(x):
        return jnp.broadcast_to(jnp.asarray(x).astype(jnp.uint32), seeds.shape)

    key = _threefry(words(seeds), words(positions), words(int(purpose)), words(sample))
    k0, k1 = (k[:, None] for k in key)  # [T, 1]
    tokens = jnp.arange(vocab, dtype=jnp.uint32)[None]  # [1, V]
    bits, _ = _threefry(k0, k1, tokens, jnp.zeros_like(tokens))  # [T, V]
    # Large noise comes from a small uniform, where float32 is fine-grained: with the usual
    # -log(-log(u)) a vocabulary of 129280 sees ties in the tail that decides.
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


@jax.custom_jvp
def _total(x):
    """Sum over the last axis of values in [0, 1], the same for every shape, order and back end.

    Three limbs of fixed point, each an exact integer sum, keep 45 bits for V = 129280.
    """
    bits = 32 - x.shape[-1].bit_length()
    scale = 2.0**bits
    limbs, rest = [], x
    for _ in range(3):
        limb = jnp.floor(rest * scale)
        limbs.append(jnp.sum(limb.astype(jnp.uint32), axis=-1, keepdims=True, dtype=jnp.uint32))
        rest = rest * scale - limb
    high, middle, low = (limb.astype(jnp.float32) for limb in limbs)
    return (high + (middle + low / scale) / scale) / scale


@_total.defjvp
def _total_jvp(primals, tangents):
    return _total(*primals), jnp.sum(*tangents, axis=-1, keepdims=True)


def _rank_keys(logits):
    """uint32 keys in the order of the logits; -0.0 and 0.0 are equal."""
    bits = lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _survivors(keys, mass, mass_limit, count_limit):
    """Where both the mass and the number of all better tokens are at most their limits.

    Args:
      keys: uint32 [T, V], larger is better; equal keys have equal mass and rank by token id.
      mass: uint32 [T, V], the sum of a row below 2**32.
      mass_limit: uint32 [T, 1].
      count_limit: uint32 [T, 1].

    Returns:
      bool [T, V], a prefix of each row's ranking.
    """

    def sums(members):  # [T, 1] each
        return (
            jnp.sum(jnp.where(members, mass, 0), axis=-1, keepdims=True, dtype=jnp.uint32),
            jnp.sum(members, axis=-1, keepdims=True, dtype=jnp.uint32),
        )

    # The boundary is the largest key such that the tokens from it upwards exceed a limit.
    def next_bit(i, boundary):
        candidate = boundary | jnp.uint32(1 << 31) >> i.astype(jnp.uint32)
        mass_from, count_from = sums(keys >= candidate)
        exceeded = (mass_from > mass_limit) | (count_from > count_limit)
        return jnp.where(exceeded, candidate, boundary)

    boundary = lax.fori_loop(0, 32, next_bit, jnp.zeros_like(count_limit))  # [T, 1]
    better, tied = keys > boundary, keys == boundary
    mass_better, count_better = sums(better)
    tied_before = jnp.cumsum(tied, axis=-1, dtype=jnp.uint32) - 1  # [T, V], read only where tied
    return better | (
        tied
        & (mass_better + tied_before * mass <= mass_limit)
        & (count_better + tied_before <= count_limit)
    )


def _distribution(logits, sampling):
    """`process`, and beside it the log-probability [T, 1] of each row's best token before any cut.

    For greedy rows, which have no temperature, the latter is that of the untouched softmax.
    """
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"logits must be float32 [T, V], got {logits.dtype} {logits.shape}")
    T, V = logits.shape
    sampling = jax.tree.map(lambda x: x[:, None], sampling.broadcast(T))  # [T, 1]
    greedy = sampling.temperature < GREEDY_BELOW
    by_p = ~greedy & (sampling.top_p < 1)
    by_k = ~greedy & (sampling.top_k > 0) & (sampling.top_k < V)

    largest = lax.stop_gradient(logits.max(axis=-1, keepdims=True))  # [T, 1]
    # Subtracting first keeps the quotient finite at low temperatures.
    scaled = (logits - largest) / jnp.where(greedy, 1, sampling.temperature)
    weights = jnp.exp(scaled)  # [T, V]
    total = _total(weights)

    # Both cut the same ranking, so top-k of the top-p survivors is the shorter of the two prefixes.
    def search():
        mass = jnp.rint(weights / total * MASS_ONE).astype(jnp.uint32)
        mass_limit = jnp.rint(sampling.top_p * MASS_ONE).astype(jnp.uint32)
        count_limit = (sampling.top_k - 1).astype(jnp.uint32)
        kept = _survivors(
            _rank_keys(logits),
            mass,
            jnp.where(by_p, mass_limit, NO_LIMIT),
            jnp.where(by_k, count_limit, NO_LIMIT),
        )
        return kept, _total(jnp.where(kept, weights, 0))

    # The search reads all logits 32 times, so it runs only if some row asks for it.
    kept, kept_total = lax.cond(
        (by_p | by_k).any(), search, lambda: (jnp.ones(logits.shape, bool), total)
    )
    log_probs = jnp.where(kept, scaled - jnp.log(kept_total), -jnp.inf)
    best = jnp.arange(V) == jnp.argmax(logits, axis=-1, keepdims=True)
    log_probs = jnp.where(greedy, jnp.where(best, 0.0, -jnp.inf), log_probs)
    valid = jnp.isfinite(largest)
    return jnp.where(valid, log_probs, jnp.nan), jnp.where(valid, -jnp.log(total), jnp.nan)


def process(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """The log-probabilities that tokens are drawn from.

    Temperature, then top-p, then top-k on what top-p left, then a log-softmax over the survivors.
    The gradient takes the set of survivors as constant.

    Args:
      logits: float32 [T, V]; -inf forbids a token.
      sampling: one value for all rows or one per row.

    Returns:
      float32 [T, V], -inf where a token was pruned. Greedy rows have all mass on the most likely
      token. A row that has a NaN or +inf, or nothing but -inf, is NaN throughout.

    Raises:
      ValueError: logits of another type, or a field of `sampling` that is neither a scalar nor [T].
    """
    return _distribution(logits, sampling)[0]


def choose(
    logits: jax.Array,
    sampling: Sampling,
    seeds: jax.Array,
    positions: jax.Array,
    sample: ArrayLike = 0,
) -> tuple[jax.Array, jax.Array]:
    """Choose one token for each row: argmax(log p + noise), where greedy rows have no noise.

    Args:
      logits: float32 [T, V]; -inf forbids a token.
      sampling: one value for all rows or one per row.
      seeds: uint32 [T].
      positions: int32 [T], the absolute position that the chosen token will have.
      sample: int32 scalar or [T], which of several samples of one prompt.

    Returns:
      tokens: int32 [T]; -1 if the row has a NaN or +inf, or nothing but -inf.
      log_probs: float32 [T] of the chosen tokens: for sampled rows of the distribution of
        `process`, for greedy rows of the untouched softmax (the processed one would always say 0).
        NaN where the token is -1.

    Raises:
      ValueError: logits of another type, or a field of `sampling` that is neither a scalar nor [T].
    """
    processed, best = _distribution(logits, sampling)  # [T, V], [T, 1]
    T, V = logits.shape
    greedy = sampling.broadcast(T).temperature[:, None] < GREEDY_BELOW  # [T, 1]
    gumbel = lax.cond(
        greedy.all(),
        lambda: jnp.zeros(logits.shape, jnp.float32),
        lambda: noise(seeds, positions, V, Purpose.TARGET, sample),
    )
    # Without the barrier XLA recomputes the noise inside the scalar loop of argmax: 8 times slower.
    scores = lax.optimization_barrier(processed + jnp.where(greedy, 0, gumbel))
    tokens = jnp.argmax(scores, axis=-1, keepdims=True)  # [T, 1]
    log_probs = jnp.where(greedy, best, jnp.take_along_axis(processed, tokens, axis=-1))
    # The argmax of a row of NaN is an ordinary id: it must not pass for a choice.
    tokens = jnp.where(jnp.isnan(log_probs), -1, tokens)
    return tokens[:, 0].astype(jnp.int32), log_probs[:, 0]
