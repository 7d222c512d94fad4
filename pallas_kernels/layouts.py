"""Memory layouts of quantised weights (spec 5.1, 5.5): what a code and a scale byte mean.

A `QuantizedTensor` is a pytree of two arrays. Letters: O output rows, I input columns; any number
of leading axes (stacked experts) may stand in front.

  format       codes                      scale (ue8m0 byte b = 2^(b - 127))
  "fp8_32x32"  float8_e4m3fn [O, I]       uint8 [ceil(O/32), ceil(I/32)]
  "fp4_1x32"   uint8 [O, I/2], low nibble uint8 [O, ceil(I/32)]
               is the even column
  "fp8_1x32"   float8_e4m3fn [O, I]       uint8 [O, ceil(I/32)]

Only this module and `gpu_layout` know how the arrays are arranged; others ask for shape, rows and
values. Layout "plain" is the arrangement of the released files, given above; "gpu" is that of
`gpu_layout`, for the kernels on NVIDIA GPUs.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import gpu_layout

FORMATS = ("fp8_32x32", "fp4_1x32", "fp8_1x32")

LAYOUTS = ("plain", "gpu")

_BLOCK = 32
_FP8_MAX, _FP8_FLOOR = 448.0, 448 * 2.0**-120
_FP4_MAX, _FP4_FLOOR = 6.0, 6 * 2.0**-126


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A weight stored as 4 or 8 bit codes with power-of-two block scales.

    Attributes:
      codes: float8_e4m3fn [..., O, I], or uint8 [..., O, I/2] for fp4; uint32 chunks in "gpu".
      scale: uint8, one ue8m0 byte per block; uint32 chunks in "gpu".
      format: one of `FORMATS`.
      layout: arrangement in memory, one of `LAYOUTS`.
    """

    codes: jax.Array
    scale: jax.Array
    format: str = dataclasses.field(metadata={"static": True})
    layout: str = dataclasses.field(default="plain", metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., O, I]."""
        if self.layout == "gpu":
            *lead, rows, columns = self.codes.shape[:-2]
            return (*lead, rows * gpu_layout.ROWS, columns * gpu_layout.COLUMNS)
        *rows, columns = self.codes.shape
        return (*rows, columns * 2 if self.format == "fp4_1x32" else columns)

    @property
    def ndim(self) -> int:
        """Number of logical axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together."""
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in (self.codes, self.scale))

    def take(self, index: jax.Array | int | slice) -> QuantizedTensor:
        """The entries `index` of the first axis: experts of a stack, or rows of a 1x32 weight.

        Raises:
          ValueError: the rows of a 2-D weight in format "fp8_32x32" or layout "gpu" cannot be
            taken apart.
        """
        self._check_layout()
        if self.ndim == 2 and (self.format == "fp8_32x32" or self.layout == "gpu"):
            raise ValueError(
                f"rows of an {self.format} weight in layout {self.layout} share blocks in memory: "
                "dequantize it first"
            )
        return dataclasses.replace(self, codes=self.codes[index], scale=self.scale[index])

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.Array:
        """The weights [..., O, I] in bfloat16 or float32, exact.

        Exact means: every finite product code * scale that the dtype can represent, subnormal ones
        included; bfloat16 drops bits below 2^-133 and too large products are infinite. The codes
        0x7F and 0xFF and the scale byte 255 (NaN) have no meaning here; loaders refuse them.

        Raises:
          ValueError: another dtype.
          TypeError: the codes are being differentiated.
        """
        self._check_layout()
        dtype = jnp.dtype(dtype)
        if dtype not in (jnp.bfloat16, jnp.float32):
            raise ValueError(f"dequantize to bfloat16 or float32, not to {dtype}")
        return _dequantize(self.to_layout("plain"), dtype)

    def fits(self, layout: str) -> bool:
        """Whether `to_layout` can arrange a weight of this format and shape so."""
        if layout in (self.layout, "plain"):
            return True
        return layout == "gpu" and gpu_layout.fits(self.format, self.shape)

    def to_layout(self, layout: str) -> QuantizedTensor:
        """The same weight in another arrangement. Values are kept, and plain codes to the bit.

        "gpu" needs O to be a multiple of 64, I of 256, and the scale bytes of blocks that are not
        zero between 40 and 150 (2^-87 to 2^23).

        Raises:
          ValueError: an unknown layout, a weight that does not fit, or (outside of a trace) a scale
            out of range.
        """
        self._check_layout()
        if layout not in LAYOUTS:
            raise ValueError(f'layout "{layout}" is unknown: choose one of {LAYOUTS}')
        if layout == self.layout:
            return self
        if layout == "plain":
            return _to_plain(self)
        if not self.fits("gpu"):
            raise ValueError(
                f"layout gpu holds {tuple(gpu_layout.FORMS)} weights with rows in multiples of "
                f"{gpu_layout.ROWS} and columns in multiples of {gpu_layout.COLUMNS}, not "
                f"{self.format} {list(self.shape)}"
            )
        if not isinstance(self.codes, jax.core.Tracer) and not bool(_scales_fit(self)):
            raise ValueError(
                f"layout gpu holds scale bytes from {gpu_layout.SMALLEST_SCALE} to "
                f"{gpu_layout.LARGEST_SCALE}; this {self.format} weight {list(self.shape)} has "
                "others: keep it in layout plain"
            )
        return _to_gpu(self)

    def _check_layout(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f'layout "{self.layout}" is unknown: choose one of {LAYOUTS}')


def codes_shape(format: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the codes of a weight of logical shape [..., O, I]."""
    *rows, columns = shape
    if format == "fp4_1x32":
        if columns % 2:
            raise ValueError(f"fp4 packs two columns in a byte: {columns} columns are odd")
        columns //= 2
    return (*rows, columns)


def scale_shape(format: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight of logical shape [..., O, I]."""
    *lead, rows, columns = shape
    rows = -(-rows // _BLOCK) if _check_format(format) == "fp8_32x32" else rows
    return (*lead, rows, -(-columns // _BLOCK))


def quantize(weight: jax.Array, format: str) -> QuantizedTensor:
    """Quantises a weight [..., O, I] to the nearest codes under the smallest safe block scales.

    The scale of a block is the smallest power of two that keeps its largest magnitude inside the
    range of the codes (spec 5.2, 5.3, without the floor of 1e-4 that activations have). Weights
    that came from `dequantize` keep their values.

    Args:
      weight: float array [..., O, I].
      format: one of `FORMATS`.

    Raises:
      ValueError: unknown format, odd I for fp4, or (outside of a trace) a non-finite weight.
    """
    _check_format(format)
    codes_shape(format, weight.shape)
    if not isinstance(weight, jax.core.Tracer) and not bool(jnp.isfinite(weight).all()):
        raise ValueError(f"cannot quantise a weight {weight.shape} with NaN or infinite values")
    return _quantize(weight, format)


# Each is one program: in eager use its few dozen operations would compile one by one.


@partial(jax.jit, static_argnums=1, inline=True)
def _quantize(weight: jax.Array, format: str) -> QuantizedTensor:
    weight = weight.astype(jnp.float32)
    largest, floor = (_FP4_MAX, _FP4_FLOOR) if format == "fp4_1x32" else (_FP8_MAX, _FP8_FLOOR)
    amax = _block_max(jnp.abs(weight), square=format == "fp8_32x32")
    power = _power_of_two_above(jnp.maximum(amax, floor) * jnp.float32(1 / largest))
    *_, rows, columns = weight.shape
    divisor = jnp.repeat(power, _BLOCK, axis=-1)[..., :columns]
    if format == "fp8_32x32":
        divisor = jnp.repeat(divisor, _BLOCK, axis=-2)[..., :rows, :]
    value = jnp.clip(weight / divisor, -largest, largest)
    codes = _pack_fp4(value) if format == "fp4_1x32" else value.astype(jnp.float8_e4m3fn)
    scale = (lax.bitcast_convert_type(power, jnp.uint32) >> 23).astype(jnp.uint8)
    return QuantizedTensor(codes, scale, format)


@partial(jax.jit, static_argnums=1, inline=True)
def _dequantize(tensor: QuantizedTensor, dtype: jnp.dtype) -> jax.Array:
    unpack = _unpack_fp4 if tensor.format == "fp4_1x32" else _unpack_fp8
    magnitude, sign = unpack(tensor.codes)
    *_, rows, columns = tensor.shape
    scale = jnp.repeat(tensor.scale, _BLOCK, axis=-1)[..., :columns]
    if tensor.format == "fp8_32x32":
        scale = jnp.repeat(scale, _BLOCK, axis=-2)[..., :rows, :]
    return _apply_scale(magnitude, sign, scale, dtype)


@partial(jax.jit, inline=True)
def _to_gpu(tensor: QuantizedTensor) -> QuantizedTensor:
    codes, scale = gpu_layout.pack(_code_bytes(tensor.codes), tensor.scale, tensor.format)
    return QuantizedTensor(codes, scale, tensor.format, "gpu")


@partial(jax.jit, inline=True)
def _to_plain(tensor: QuantizedTensor) -> QuantizedTensor:
    codes, scale = gpu_layout.unpack(tensor.codes, tensor.scale, tensor.format)
    if tensor.format != "fp4_1x32":
        codes = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    return QuantizedTensor(codes, scale, tensor.format)


@jax.jit
def _scales_fit(tensor: QuantizedTensor) -> jax.Array:
    return gpu_layout.scales_fit(_code_bytes(tensor.codes), tensor.scale, tensor.format)


def _check_format(format: str) -> str:
    if format not in FORMATS:
        raise ValueError(f'format "{format}" is unknown: choose one of {FORMATS}')
    return format


def _block_max(magnitude: jax.Array, square: bool) -> jax.Array:
    """Largest entry of every block, [..., ceil(O/32) or O, ceil(I/32)]."""
    *lead, rows, columns = magnitude.shape
    pad = [(0, 0)] * len(lead) + [(0, -rows % _BLOCK if square else 0), (0, -columns % _BLOCK)]
    magnitude = jnp.pad(magnitude, pad)
    height = _BLOCK if square else 1
    blocks = magnitude.reshape(*lead, -1, height, magnitude.shape[-1] // _BLOCK, _BLOCK)
    return blocks.max(axis=(-3, -1))


def _power_of_two_above(value: jax.Array) -> jax.Array:
    """Smallest power of two >= a positive normal float32, by carrying into the exponent bits."""
    bits = lax.bitcast_convert_type(value, jnp.uint32)
    return lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)


def _pack_fp4(value: jax.Array) -> jax.Array:
    """Nearest e2m1 codes, ties to the even code, two columns to a byte: uint8 [..., I/2]."""
    size = jnp.abs(value)
    code = sum(
        (size >= bound if even else size > bound).astype(jnp.uint8)
        for bound, even in (
            (0.25, False),
            (0.75, True),
            (1.25, False),
            (1.75, True),
            (2.5, False),
            (3.5, True),
            (5.0, False),
        )
    )
    code |= jnp.signbit(value).astype(jnp.uint8) << 3
    return code[..., 0::2] | code[..., 1::2] << 4


# Dequantisation works on bits, for two reasons. It is exact: XLA's CPU back end flushes subnormal
# floats, so 2^-127 (scale byte 0) could not even be multiplied. And it is three times faster there
# than a bf16 product, which is emulated. A magnitude travels as one uint16, "exponent and three
# mantissa bits" (bias 127); adding 8 * byte to it multiplies by the scale.


@jax.custom_jvp
def _code_bytes(codes: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(codes, jnp.uint8)


@_code_bytes.defjvp
def _refuse_gradient(primals, tangents):
    raise TypeError(
        "a quantised weight cannot be differentiated, its gradient would be rounded to 8 bits: use "
        "di.trainable(model, jnp.float32) to get float weights"
    )


def _unpack_fp8(codes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Magnitudes and signs of e4m3 codes, uint16 like the codes; zero has magnitude 0."""
    byte = _code_bytes(codes).astype(jnp.uint16)
    size = byte & 0x7F
    tiny = jnp.where(size >= 2, (119 << 3) + ((size & 1) << 2), size * (118 << 3))
    tiny = jnp.where(size >= 4, (120 << 3) + ((size & 3) << 1), tiny)
    return jnp.where(size < 8, tiny, size + (120 << 3)), byte & 0x80


def _unpack_fp4(codes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Magnitudes and signs of packed e2m1 codes, uint16 [..., I]; zero has magnitude 0."""
    nibbles = codes.astype(jnp.uint16)[..., None] >> jnp.array([0, 4], jnp.uint16)
    nibbles = nibbles.reshape(*codes.shape[:-1], -1)
    size = nibbles & 7
    return jnp.where(size >= 2, (size << 2) + (126 << 3), size * (126 << 3)), (nibbles & 8) << 4


def _apply_scale(
    magnitude: jax.Array, sign: jax.Array, scale: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    word, mantissa = (jnp.uint16, 7) if dtype == jnp.bfloat16 else (jnp.uint32, 23)
    widen = mantissa - 3
    total = magnitude + (scale.astype(jnp.uint16) << 3)  # exponent now biased by 2 * 127
    normal = (total - (127 << 3)).astype(word) << widen
    shift = (128 - (total >> 3)).astype(word)
    subnormal = (((total & 7) | 8).astype(word) << widen) >> jnp.minimum(shift, word(15))
    bits = jnp.where(total < 128 << 3, subnormal, jnp.minimum(normal, word(255 << mantissa)))
    bits = jnp.where(magnitude == 0, word(0), bits)
    return lax.bitcast_convert_type(bits | sign.astype(word) << (mantissa + 1), dtype)
