"""How a request wants its tokens chosen: `Sampling` on the device, `SamplingParams` on the host.

What the values mean for logits is in `adjustments` (penalties, biases, forced tokens) and
`distribution` (temperature and cuts).

Letters: B sequences.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

# The most top log-probabilities that a request may ask for.
MAX_LOGPROBS = 20
_FLOAT32 = np.finfo(np.float32)


@jax.tree_util.register_dataclass
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
      min_p: float32 [B] in [0, 1]; a token stays if its probability is at least min_p times that
        of the most likely token. 0 switches it off.
      repetition_penalty: float32 [B], above 0; the logits of tokens of the prompt or the new text
        are divided by it if positive and multiplied by it if negative. 1 switches it off.
      presence_penalty: float32 [B] in [-2, 2]; subtracted from the logits of tokens of the new
        text. 0 switches it off.
      frequency_penalty: float32 [B] in [-2, 2]; subtracted once for each time that a token stands
        in the new text. 0 switches it off.
    """

    temperature: ArrayLike = 1.0
    top_p: ArrayLike = 1.0
    top_k: ArrayLike = -1
    min_p: ArrayLike = 0.0
    repetition_penalty: ArrayLike = 1.0
    presence_penalty: ArrayLike = 0.0
    frequency_penalty: ArrayLike = 0.0

    def validate(self) -> "Sampling":
        """Return self, or raise ValueError for a value that cannot be meant; traced values pass."""
        _check(
            "temperature",
            self.temperature,
            lambda x: (x >= 0) & (x <= _FLOAT32.max),
            "a finite float32 number of at least 0",
        )
        _check("top_p", self.top_p, lambda x: (x > 0) & (x <= 1), "in (0, 1]")
        _check(
            "top_k",
            self.top_k,
            lambda x: (x == np.floor(x)) & (np.abs(x) < 2**31),
            "an int32 number",
        )
        _check("min_p", self.min_p, lambda x: (x >= 0) & (x <= 1), "in [0, 1]")
        _check(
            "repetition_penalty",
            self.repetition_penalty,
            lambda x: (x >= _FLOAT32.tiny) & (x <= _FLOAT32.max),
            "a finite float32 number above 0",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _check(name, getattr(self, name), lambda x: (x >= -2) & (x <= 2), "in [-2, 2]")
        return self

    def broadcast(self, B: int) -> "Sampling":
        """The same sampling with one value per sequence, every field of shape [B].

        Raises:
          ValueError: a field is neither a scalar nor of shape [B].
        """

        def spread(name):
            value = getattr(self, name)
            dtype = np.int32 if name == "top_k" else np.float32
            # On the host, where no shape has to be compiled for.
            known = not isinstance(value, jax.core.Tracer)
            value = np.asarray(value, dtype) if known else value.astype(dtype)
            if value.shape not in ((), (B,)):
                raise ValueError(f"{name} must be a scalar or have shape ({B},), got {value.shape}")
            return jnp.asarray((np if known else jnp).broadcast_to(value, (B,)))

        return Sampling(**{field.name: spread(field.name) for field in dataclasses.fields(self)})


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
      min_p: see `Sampling`.
      repetition_penalty: see `Sampling`.
      presence_penalty: see `Sampling`.
      frequency_penalty: see `Sampling`.
      max_tokens: most tokens to generate, at least 1.
      min_tokens: fewest tokens to generate; until then nothing that ends the text is chosen.
      seed: number in [0, 2**32) that decides the text; None lets the caller draw one.
      stop_token_ids: tokens that end the text, besides the end-of-sequence token.
      ignore_eos: whether to go on after the end-of-sequence token.
      logit_bias: what to add to the logits of tokens; -inf bans one. Kept as a copy.
      banned_token_ids: tokens that are never chosen.
      forced_token_ids: by index of the new token, the token that must be chosen; -1 leaves the
        choice free, and so does the end of the tuple.
      logprobs: how many of the most likely tokens to report at each new token, up to 20; 0 reports
        the chosen token alone. None reports nothing.
      n: texts to generate for the prompt, at least 1.

    Raises:
      ValueError: a value outside these ranges.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    # A mapping has no hash; equal requests still have equal ones.
    logit_bias: Mapping[int, float] | None = dataclasses.field(default=None, hash=False)
    banned_token_ids: tuple[int, ...] = ()
    forced_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self):
        self.row().validate()
        _check_integer("max_tokens", self.max_tokens, lambda x: x >= 1, "at least 1")
        _check_integer(
            "min_tokens",
            self.min_tokens,
            lambda x: 0 <= x <= self.max_tokens,
            f"from 0 to max_tokens = {self.max_tokens}",
        )
        if self.seed is not None:
            _check_integer("seed", self.seed, lambda x: 0 <= x < 2**32, "in [0, 2**32)")
        if self.logprobs is not None:
            _check_integer(
                "logprobs",
                self.logprobs,
                lambda x: 0 <= x <= MAX_LOGPROBS,
                f"None or from 0 to {MAX_LOGPROBS}",
            )
        _check_integer("n", self.n, lambda x: x >= 1, "at least 1")
        self._check_tokens("stop_token_ids", lambda x: x >= 0, "not negative")
        self._check_tokens("banned_token_ids", lambda x: x >= 0, "not negative")
        self._check_tokens("forced_token_ids", lambda x: x >= -1, "at least -1")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
            for token, bias in self.logit_bias.items():
                _check_integer("a token of logit_bias", token, lambda x: x >= 0, "not negative")
                _check(
                    f"logit_bias[{token}]",
                    bias,
                    lambda x: (np.abs(x) <= _FLOAT32.max) | (x == -np.inf),
                    "a finite float32 number or -inf",
                )

    def _check_tokens(self, name, valid, expected):
        object.__setattr__(self, name, tuple(getattr(self, name)))
        for token in getattr(self, name):
            _check_integer(f"a token of {name}", token, valid, expected)

    def row(self) -> Sampling:
        """The device half of the request, as scalars."""
        return Sampling(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(Sampling)}
        )


def _check_integer(name, value, valid, expected):
    if not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if not valid(value):
        raise ValueError(f"{name} must be {expected}, got {value}")
