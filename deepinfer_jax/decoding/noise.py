"""Random numbers that are pure functions of what they are for (spec 9.6).

A number depends on (seed, position, purpose, sample, token) and on nothing else, so the same seed
gives the same text alone or in any batch, drafted or not.

Letters: T rows, V vocabulary.
"""

import enum

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

# The largest float32 below 1.
BELOW_ONE = 1 - 2.0**-24


class Purpose(enum.IntEnum):
    """What a number is for; no two purposes share a number. Values decide texts: keep them."""

    TARGET = 0  # choosing from the model's distribution
    DRAFT = 1  # choosing from the drafter's distribution, where it must not share TARGET's noise
    ACCEPT = 2  # whether a draft is accepted
    RESIDUAL = 3  # choosing what replaces a rejected draft


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


def _key(seeds, positions, purpose, sample):
    """Two uint32 [T] words that name one use of randomness in each row."""

    def words(x):
        return jnp.broadcast_to(jnp.asarray(x).astype(jnp.uint32), seeds.shape)

    return _threefry(words(seeds), words(positions), words(int(purpose)), words(sample))


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
    k0, k1 = (k[:, None] for k in _key(seeds, positions, purpose, sample))  # [T, 1]
    tokens = jnp.arange(vocab, dtype=jnp.uint32)[None]  # [1, V]
    bits, _ = _threefry(k0, k1, tokens, jnp.zeros_like(tokens))  # [T, V]
    # Large noise comes from a small uniform, where float32 is fine-grained: with the usual
    # -log(-log(u)) a vocabulary of 129280 sees ties in the tail that decides.
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, BELOW_ONE)
    return -jnp.log(-jnp.log1p(-uniform))


def uniform(
    seeds: jax.Array, positions: jax.Array, purpose: Purpose, sample: ArrayLike = 0
) -> jax.Array:
    """One uniform number for each row, independent of the noise of the same purpose.

    Args:
      seeds: uint32 [T].
      positions: int32 [T], the absolute position of the token that is decided on.
      purpose: what the number is for.
      sample: int32 scalar or [T], which of several samples of one prompt.

    Returns:
      float32 [T] in [0, 1), multiples of 2**-32 as far as float32 can hold them.
    """
    # Without the barriers XLA:CPU may repeat the generator's rounds at each use of a number, and
    # then takes minutes to compile.
    k0, k1 = lax.optimization_barrier(_key(seeds, positions, purpose, sample))
    # The noise has counters (token, 0).
    bits, _ = _threefry(k0, k1, jnp.zeros_like(k0), jnp.ones_like(k0))
    bits = lax.optimization_barrier(bits)
    return jnp.minimum(bits.astype(jnp.float32) * 2.0**-32, BELOW_ONE)
