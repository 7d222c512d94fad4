"""Engram: memory rows addressed by hashes of the last tokens (spec 8).

Row numbers depend on token ids only. The 64-bit products of the hash are built from 16-bit limbs in
uint32, so no x64 mode is needed; primes are below 2^24, so the remainder can be taken byte by byte.

Letters: T rows, M streams, D hidden, L Engram layers, n longest n-gram.
"""

from typing import NamedTuple

import einops
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from deepinfer_jax.config import Config
from deepinfer_jax.model import engram_tables
from deepinfer_jax.model.linear import Linear
from deepinfer_jax.numerics import Numerics
from pallas_kernels.layouts import QuantizedTensor
from pallas_kernels.rounding import round_to

DEAD = -1  # in the token history: inside an image span


class _U64(NamedTuple):
    high: jax.Array  # uint32
    low: jax.Array  # uint32


def _multiply(token: jax.Array, multiplier: int) -> _U64:
    """Product of a token (uint32) and a constant below 2^63, modulo 2^64."""
    mask = jnp.uint32(0xFFFF)
    limbs = [jnp.uint32((multiplier >> (16 * i)) & 0xFFFF) for i in range(4)]
    halves = (token & mask, token >> 16)
    total = [jnp.zeros_like(token) for _ in range(5)]
    for i, limb in enumerate(limbs):
        for j, half in enumerate(halves):
            if i + j < 4:
                part = limb * half
                total[i + j] += part & mask
                total[i + j + 1] += part >> 16
    for i in range(4):
        total[i + 1] += total[i] >> 16
        total[i] &= mask
    return _U64((total[3] << 16) | total[2], (total[1] << 16) | total[0])


def _remainder(value: _U64, prime: int) -> jax.Array:
    """The value modulo a prime below 2^24."""
    prime = jnp.uint32(prime)
    rest = value.high % prime
    for shift in (24, 16, 8, 0):
        rest = ((rest << 8) | ((value.low >> shift) & 0xFF)) % prime
    return rest


def hash_rows(recent: jax.Array, config: Config) -> jax.Array:
    """Table rows of the n-grams that end at a token (spec 8.3).

    Args:
        recent: int32 [T, n], compressed ids, current token first, blocked positions already padded.
        config: the model's.

    Returns:
        int32 [T, L, (n - 1) * heads].
    """
    tokens = recent.astype(jnp.uint32)
    layers = []
    for primes, offsets, multipliers in zip(
        engram_tables.primes(config),
        engram_tables.offsets(config),
        engram_tables.multipliers(config),
        strict=True,
    ):
        primes = np.reshape(primes, (config.engram_max_ngram_size - 1, config.engram_n_heads))
        flat = np.reshape(offsets, primes.shape)
        mixed = _multiply(tokens[:, 0], int(multipliers[0]))
        columns = []
        for i in range(1, config.engram_max_ngram_size):
            term = _multiply(tokens[:, i], int(multipliers[i]))
            mixed = _U64(mixed.high ^ term.high, mixed.low ^ term.low)
            columns += [
                _remainder(mixed, int(p)) + jnp.uint32(int(o))
                for p, o in zip(primes[i - 1], flat[i - 1], strict=True)
            ]
        layers.append(jnp.stack(columns, axis=1))
    return jnp.stack(layers, axis=1).astype(jnp.int32)


def recent_tokens(history, slot, position, pad, config: Config) -> jax.Array:
    """The last n compressed ids of each row, current first; blocked ones replaced (spec 8.3).

    Args:
        history: int32 [slots, ring]; the compressed id of position p at p % ring, or `DEAD`.
        slot: int32 [T].
        position: int32 [T].
        pad: int32 [], compressed id that stands for blocked positions.
        config: the model's.

    Returns:
        int32 [T, n].
    """
    here = jnp.clip(slot, 0, history.shape[0] - 1)
    blocked = jnp.zeros(slot.shape, bool)
    columns = []
    for back in range(config.engram_max_ngram_size):
        past = position - back
        token = history[here, past % history.shape[1]]
        blocked = blocked | (past < 0) | (token == DEAD)
        columns.append(jnp.where(blocked, pad, token))
    return jnp.stack(columns, axis=1)


def _lookup(table: jax.Array | QuantizedTensor, rows: jax.Array, dtype) -> jax.Array:
    if isinstance(table, QuantizedTensor):
        return table.take(rows).dequantize(dtype)
    return table[rows].astype(dtype)


class Table(nnx.Module):
    """The memory itself, [rows, width]."""

    def __init__(self, take):
        self.weight = nnx.Param(take("weight"))


class Engram(nnx.Module):
    """A layer's table, its key and value projection and the gate's weights [M, D]."""

    def __init__(self, take):
        self.embed = Table(take / "embed")
        self.wkv = Linear(take / "wkv")
        self.q_weight = nnx.Param(take("q_weight"))
        self.k_weight = nnx.Param(take("k_weight"))

    def __call__(self, streams, rows, image, config: Config, numerics: Numerics) -> jax.Array:
        """Add what was looked up to every stream, behind a gate (spec 8.4).

        Args:
            streams: [T, M, D].
            rows: int32 [T, columns], from `hash_rows`.
            image: bool [T]; the gate is shut inside image spans.
            config: the model's.
            numerics: the model's.

        Returns:
            [T, M, D].
        """
        wide, eps = numerics.wide, config.rms_norm_eps
        M, D = streams.shape[1:]
        e = _lookup(self.embed.weight.get_value(), rows, numerics.activation)
        kv = self.wkv.quantized(einops.rearrange(e, "t c w -> t (c w)"), numerics).astype(wide)
        key = einops.rearrange(kv[:, : M * D], "t (m d) -> t m d", m=M)
        value = kv[:, M * D :]
        h = streams.astype(wide)
        weight = self.q_weight.get_value().astype(wide) * self.k_weight.get_value().astype(wide)

        def inverse_rms(v):
            return lax.rsqrt(jnp.mean(jnp.square(v), axis=-1) + eps)

        dot = jnp.sum(h * weight * key, axis=-1) * inverse_rms(h) * inverse_rms(key) * D**-0.5
        strength = jnp.copysign(jnp.sqrt(jnp.maximum(jnp.abs(dot), 1e-6)), dot)
        gate = jnp.where(image[:, None], 0, jax.nn.sigmoid(strength))
        return round_to(h + gate[..., None] * value[:, None], streams.dtype)
