"""From logits to a distribution and from a distribution to a token (spec 9.6).

`process` turns logits into the distribution that is sampled, verified and reported; `draw` adds
Gumbel noise to it and takes the largest; `log_softmax` and `top` serve reports.

Nothing here depends on the order of an addition: probabilities are summed as integers, and top-p
and top-k find their boundary by bisecting the bits of the logits instead of sorting the vocabulary.
Equal logits are ranked by token id, the lower one first.

Letters: T rows, V vocabulary, K reported tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from deepinfer_jax.decoding.noise import Purpose, noise
from deepinfer_jax.decoding.sampling import Sampling

# Below this a division by the temperature can overflow; the engine calls it greedy as well.
GREEDY_BELOW = 1e-5
# Probabilities as integers: their sum stays below 2**32 for any vocabulary below 2**31.
MASS_ONE = 2.0**31
NO_LIMIT = np.uint32(2**32 - 1)


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


def _check_logits(logits):
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"logits must be float32 [T, V], got {logits.dtype} {logits.shape}")


def _softmax(logits, temperature):
    """What any distribution over logits is made of.

    Args:
      logits: float32 [T, V].
      temperature: float32 [T, 1].

    Returns:
      scaled: float32 [T, V], logits over temperature, the largest of a row 0.
      weights: float32 [T, V], their exponentials.
      total: float32 [T, 1], the sum of the weights.
      valid: bool [T, 1], whether the row has neither NaN nor +inf, and not only -inf.
    """
    largest = lax.stop_gradient(logits.max(axis=-1, keepdims=True))  # [T, 1]
    # Subtracting first keeps the quotient finite at low temperatures.
    # The barrier keeps XLA from rounding the quotient and a later difference at once, which it may
    # do in some programs and not in others.
    scaled = lax.optimization_barrier((logits - largest) / temperature)
    weights = jnp.exp(scaled)
    return scaled, weights, _total(weights), jnp.isfinite(largest)


def process(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """The log-probabilities that tokens are drawn from.

    After temperature, the tokens that stay are those that top-p, top-k and min-p would each keep of
    the whole vocabulary: three prefixes of one ranking, so the shortest decides. The most likely
    token always stays. Then a log-softmax over the survivors. The gradient takes the set of
    survivors as constant.

    Args:
      logits: float32 [T, V]; -inf forbids a token.
      sampling: one value for all rows or one per row; its penalties are not looked at, see
        `adjustments.adjust`.

    Returns:
      float32 [T, V], -inf where a token was pruned. Greedy rows have all mass on the most likely
      token. A row that has a NaN or +inf, or nothing but -inf, is NaN throughout.

    Raises:
      ValueError: logits of another type, or a field of `sampling` that is neither a scalar nor [T].
    """
    _check_logits(logits)
    T, V = logits.shape
    sampling = jax.tree.map(lambda x: x[:, None], sampling.broadcast(T))  # [T, 1]
    greedy = sampling.temperature < GREEDY_BELOW
    by_p = ~greedy & (sampling.top_p < 1)
    by_k = ~greedy & (sampling.top_k > 0) & (sampling.top_k < V)
    by_min = ~greedy & (sampling.min_p > 0)
    scaled, weights, total, valid = _softmax(logits, jnp.where(greedy, 1, sampling.temperature))

    def search():
        return _survivors(
            _rank_keys(logits),
            jnp.rint(weights / total * MASS_ONE).astype(jnp.uint32),
            jnp.where(by_p, jnp.rint(sampling.top_p * MASS_ONE).astype(jnp.uint32), NO_LIMIT),
            jnp.where(by_k, (sampling.top_k - 1).astype(jnp.uint32), NO_LIMIT),
        )

    # The search reads all logits 32 times, so it runs only if some row asks for it.
    kept = lax.cond((by_p | by_k).any(), search, lambda: jnp.ones(logits.shape, bool))
    # Compared before the exponential, which need not be monotone to the last bit.
    kept &= ~by_min | (scaled >= jnp.log(sampling.min_p))
    kept_total = lax.cond(
        (by_p | by_k | by_min).any(), lambda: _total(jnp.where(kept, weights, 0)), lambda: total
    )
    log_probs = jnp.where(kept, scaled - jnp.log(kept_total), -jnp.inf)
    best = jnp.arange(V) == jnp.argmax(logits, axis=-1, keepdims=True)
    log_probs = jnp.where(greedy, jnp.where(best, 0.0, -jnp.inf), log_probs)
    return jnp.where(valid, log_probs, jnp.nan)


def log_softmax(logits: jax.Array) -> jax.Array:
    """The log-probabilities before temperature and any cut, the same in every batch.

    Args:
      logits: float32 [T, V]; -inf forbids a token.

    Returns:
      float32 [T, V]. A row that has a NaN or +inf, or nothing but -inf, is NaN throughout.

    Raises:
      ValueError: logits of another type.
    """
    _check_logits(logits)
    scaled, _, total, valid = _softmax(logits, jnp.float32(1))
    return jnp.where(valid, scaled - jnp.log(total), jnp.nan)


def draw(
    log_probs: jax.Array,
    greedy: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    sample: ArrayLike = 0,
    purpose: Purpose = Purpose.TARGET,
) -> jax.Array:
    """Choose one token for each row: argmax(log p + noise), where greedy rows have no noise.

    Args:
      log_probs: float32 [T, V], of `process` or any others; they need not be normalised.
      greedy: bool [T].
      seeds: uint32 [T].
      positions: int32 [T], the absolute position that the chosen token will have.
      sample: int32 scalar or [T], which of several samples of one prompt.
      purpose: what the choice is for.

    Returns:
      int32 [T]; -1 if the row has a NaN or nothing but -inf.
    """
    gumbel = lax.cond(
        greedy.all(),
        lambda: jnp.zeros(log_probs.shape, jnp.float32),
        lambda: noise(seeds, positions, log_probs.shape[1], purpose, sample),
    )
    # Without the barrier XLA recomputes the noise inside the scalar loop of argmax: 8 times slower.
    scores = lax.optimization_barrier(log_probs + jnp.where(greedy[:, None], 0, gumbel))
    tokens = jnp.argmax(scores, axis=-1, keepdims=True)  # [T, 1]
    # The argmax of a row of NaN or -inf is an ordinary id: it must not pass for a choice.
    possible = jnp.take_along_axis(log_probs, tokens, axis=-1) > -jnp.inf
    return jnp.where(possible, tokens, -1)[:, 0].astype(jnp.int32)


def top(log_probs: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k most likely tokens of each row, best first, of equal ones the lower id first.

    Args:
      log_probs: float32 [T, V], of `process` or `log_softmax`.
      k: K, static, at most V.

    Returns:
      tokens: int32 [T, K]; -1 where the row has no further token of positive probability.
      values: float32 [T, K]; -inf where the token is -1. NaN if the row has a NaN.
    """
    values, tokens = lax.top_k(log_probs, k)
    valid = ~jnp.isnan(log_probs).any(axis=-1, keepdims=True)
    tokens = jnp.where(valid & (values > -jnp.inf), tokens, -1)
    return tokens, jnp.where(valid, values, jnp.nan)
