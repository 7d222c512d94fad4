"""Checking what the caller passes, before any compute.

Values are checked where they are known; under a caller's own `jax.jit` only shapes and dtypes are.
"""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config import Config


def is_known(x: Any) -> bool:
    """Whether the values of x can be looked at now."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))


def whole_number(value: Any, name: str, least: int = 1) -> int:
    """A static count as an int.

    Raises:
        ValueError: not an integer, or below `least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def integers(value: Any, name: str) -> np.ndarray:
    """A known value as an array of integers; an empty list is one.

    Raises:
        ValueError: lists of different lengths, or anything but integers.
    """
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(
            f"{name} must be rectangular: pad its rows to one width (for prompts give lengths=)"
        ) from None
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must be integers, got {array.dtype}")
    return array


def _int32(x: Any) -> jax.Array:
    # Converted on the host: on the device, every other dtype and shape is a program to compile.
    return jnp.asarray(x if isinstance(x, jax.Array) else np.asarray(x, np.int32), jnp.int32)


def token_batch(tokens: Any, config: Config, name: str = "tokens") -> jax.Array:
    """Token ids as int32 [B, S].

    Raises:
        ValueError: not a two-dimensional array of integers, empty, or an id outside the vocabulary.
    """
    if not hasattr(tokens, "dtype"):
        tokens = integers(tokens, name)
    shape, dtype = tokens.shape, tokens.dtype
    if len(shape) != 2 or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"{name} must be integers of shape [batch, length], got {dtype} {list(shape)}"
        )
    if 0 in shape:
        raise ValueError(
            f"{name} must hold at least one sequence of at least one token, got {list(shape)}"
        )
    if is_known(tokens):
        values = np.asarray(tokens)
        wrong = (values < 0) | (values >= config.vocab_size)
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            raise ValueError(
                f"{name}[{row}, {column}] = {values[row, column]} is outside the vocabulary "
                f"[0, {config.vocab_size})"
            )
    return _int32(tokens)


def lengths_of(lengths: Any, batch: int, width: int) -> jax.Array:
    """Lengths as int32 [B]; None means that every sequence is full.

    Raises:
        ValueError: wrong shape, or a length outside [1, width].
    """
    if lengths is None:
        return jnp.full(batch, width, jnp.int32)
    if np.shape(lengths) != (batch,):
        raise ValueError(f"lengths must have shape [{batch}], got {list(np.shape(lengths))}")
    if is_known(lengths):
        values = integers(lengths, "lengths")
        if values.min() < 1:
            raise ValueError(f"lengths must be at least 1 (an empty prompt has no last token), "
                             f"got {values.min()} for sequence {values.argmin()}")  # fmt: skip
        if values.max() > width:
            raise ValueError(
                f"lengths must be at most {width}, the width of tokens, got {values.max()}"
            )
    return _int32(lengths)


def per_sequence(value: Any, batch: int, dtype, name: str) -> jax.Array:
    """A scalar or [B] array as [B] of dtype.

    Raises:
        ValueError: any other shape.
    """
    if np.shape(value) not in ((), (batch,)):
        raise ValueError(
            f"{name} must be a scalar or have shape [{batch}], got {list(np.shape(value))}"
        )
    if is_known(value) and jnp.issubdtype(dtype, jnp.integer):
        known, span = integers(value, name), jnp.iinfo(dtype)
        if known.min() < span.min or known.max() > span.max:
            raise ValueError(
                f"{name} must be between {span.min} and {span.max}, "
                f"got {known.min()} to {known.max()}"
            )
    if is_known(value):  # on the host, where no shape has to be compiled for
        value = np.broadcast_to(np.asarray(value, dtype), (batch,))
    return jnp.broadcast_to(jnp.asarray(value, dtype), (batch,))
