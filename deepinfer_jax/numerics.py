"""Which values are rounded, and to what (spec 5 and 13; one static object).

The default reproduces every rounding point of the released runtime. Each switch stands alone, so a
test or a training run can turn one off without touching the others. `Numerics` is hashable: it is
part of a model's static structure and a change recompiles, as it should.
"""

import dataclasses

import jax
import jax.numpy as jnp

_DTYPES = ("bfloat16", "float32", "float64")
_ROW_TILE = {"cpu": 8}
_ROW_TILE_ACCELERATOR = 64


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Static switches of the arithmetic.

    Attributes:
        dtype: activations and linear outputs, "bfloat16" or "float32" ("float64" is for gradient
            checks and needs `jax_enable_x64`; no quantiser runs in it).
        quantize_activations: e4m3 round trip of the input of every quantised linear (spec
            5.2, 5.6).
        quantize_cache: round trips of window KV (e4m3), entries (nvfp4), index keys and index
            queries (mxfp4) (spec 5.2 to 5.4).
        round_probabilities: attention weights to bfloat16 before the value product (spec 3.9).
            None follows `dtype`.
        round_index_scores: the three bfloat16 roundings of an index score (spec 3.6). None follows
            `dtype`.
        quantize_wo_a: quantise the input of `wo_a` too, as DeepInfer does (spec 13, row 1).
        reproducible: run every row operation over fixed tiles of rows, so that a row's bits do not
            depend on the other rows of the call. None lets the caller decide: `generate` on CPU
            turns it on, `forward` leaves it off.
    """

    dtype: str = "bfloat16"
    quantize_activations: bool = True
    quantize_cache: bool = True
    round_probabilities: bool | None = None
    round_index_scores: bool | None = None
    quantize_wo_a: bool = False
    reproducible: bool | None = None

    def __post_init__(self):
        if self.dtype not in _DTYPES:
            raise ValueError(f"Numerics.dtype must be one of {_DTYPES}, got {self.dtype!r}")
        if self.reproducible not in (None, True, False):
            raise ValueError(
                f"Numerics.reproducible must be None, True or False, got {self.reproducible!r}"
            )
        if self.dtype == "float64" and (self.quantize_activations or self.quantize_cache):
            raise ValueError(
                "Numerics(dtype='float64') is for gradient checks: set quantize_activations=False "
                "and quantize_cache=False"
            )

        if self.quantize_wo_a and not self.quantize_activations:
            raise ValueError(
                "Numerics.quantize_wo_a quantises one more activation: it needs "
                "quantize_activations=True"
            )

    @property
    def activation(self):
        """The dtype of activations."""
        return jnp.dtype(self.dtype)

    @property
    def wide(self):
        """The dtype of everything the spec keeps in float32."""
        return jnp.dtype("float64" if self.dtype == "float64" else "float32")

    @property
    def rounds_probabilities(self) -> bool:
        """`round_probabilities` with None resolved."""
        return _follow(self.round_probabilities, self.dtype)

    @property
    def rounds_index_scores(self) -> bool:
        """`round_index_scores` with None resolved."""
        return _follow(self.round_index_scores, self.dtype)

    @property
    def tile(self) -> int | None:
        """Rows per tile in reproducible mode, None in fast mode."""
        if not self.reproducible:
            return None
        return _ROW_TILE.get(jax.default_backend(), _ROW_TILE_ACCELERATOR)

    def resolve(self, *, reproducible: bool) -> "Numerics":
        """This object with `reproducible=None` replaced by the caller's default."""
        if self.reproducible is not None:
            return self
        return dataclasses.replace(self, reproducible=reproducible)


def _follow(switch: bool | None, dtype: str) -> bool:
    return dtype == "bfloat16" if switch is None else switch
