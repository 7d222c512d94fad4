"""The "gpu" arrangement of quantised weights: a warpgroup unpacks it without exchanging a bit.

A weight [O, I] is cut into chunks of 64 rows by 256 columns. A chunk is one contiguous piece of
memory (one asynchronous copy) that holds, for each of the 128 threads of a warpgroup, the codes of
exactly those elements which the matrix unit wants that thread to own. With

  row    = 64 * O + 16 * warp + 8 * h + g                    warp < 4, h < 2, g < 8
  column = 256 * I + 32 * b + 16 * s + 8 * p + 2 * c + e     b < 8, s, p, e < 2, c < 4

thread 32 * warp + 4 * g + c owns all elements (h, b, s, p, e). A word holds pairs e = 0, 1 that end
up in the two halves of one bfloat16 register:

  fp4_1x32    word (b, h),    pairs (s, p)     16 words a thread
  fp8_32x32   word (b, s, h), pairs p          32 words a thread

Word w of thread t is word 512 * (w // 4) + 4 * t + w % 4 of the chunk: four of a thread together.
Scale bytes stand four to a word: for fp4 in the order (warp, g, h, b), for fp8 (warp, b), each
warp's eight bytes four times, since a copy moves at least 128 bytes.

Within a half, the bits of a pair's code sit where one rotation and one mask (`Form.pairs`) put them
at the sign, exponent and mantissa of a bfloat16. The result is the code's value times a constant
power of two. The stored scale bytes take it into account (`Form.bias`): they are exponents of
bfloat16, and an unpacked weight is W * 2^-26. The product is multiplied by 2^26 (`RESTORE`).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

ROWS, COLUMNS, BLOCK = 64, 256, 32
RESTORE = 2.0**26
# Scale bytes outside could overflow the multiplier or round the smallest products.
SMALLEST_SCALE, LARGEST_SCALE = 40, 150


@dataclasses.dataclass(frozen=True)
class Form:
    """How the words of one format are made.

    Attributes:
        pairs: for each pair of a word, the (rotation to the left, mask of a half) that extract it.
        bias: added to a scale byte to make it the exponent of the multiplier.
        words: words of a thread in a chunk.
        scales: scale words of a chunk.
    """

    pairs: tuple[tuple[tuple[int, int], ...], ...]
    bias: int
    words: int
    scales: int

    @property
    def codes_shape(self) -> tuple[int, int]:
        """Words of a chunk, as an array that one asynchronous copy can move."""
        return self.words // 2, 256


FORMS = {
    # A code s ee m becomes s 000000ee m000000, a bfloat16 that is 2^-126 times its value.
    "fp4_1x32": Form(
        pairs=(
            ((0, 0x81C0),),
            ((4, 0x81C0),),
            ((10, 0x81C0),),
            ((14, 0x8180), (6, 0x0040)),
        ),
        bias=126 - 26,
        words=16,
        scales=128,
    ),
    # A code s eeee mmm becomes s 0000eeee mmm0000, 2^-120 times its value.
    "fp8_32x32": Form(
        pairs=(((0, 0x87F0),), ((4, 0x8080), (8, 0x0770))),
        bias=120 - 26,
        words=32,
        scales=32,
    ),
}


def fits(format: str, shape: tuple[int, ...]) -> bool:
    """Whether a weight of logical shape [..., O, I] can be arranged this way."""
    return format in FORMS and shape[-2] % ROWS == 0 and shape[-1] % COLUMNS == 0


def chunks(format: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of codes and scales, both uint32, of a weight of logical shape [..., O, I]."""
    *lead, rows, columns = shape
    form, grid = FORMS[format], (*lead, rows // ROWS, columns // COLUMNS)
    return (*grid, *form.codes_shape), (*grid, form.scales)


def pack(codes: jax.Array, scale: jax.Array, format: str) -> tuple[jax.Array, jax.Array]:
    """Plain codes and scale bytes to chunks, one matrix after the other.

    Args:
        codes: uint8, bits of the plain codes [..., O, I] or [..., O, I/2].
        scale: uint8, plain scale bytes. Those of blocks without a non-zero code are ignored.
        format: a key of `FORMS`.

    Returns:
        Codes and scales as `chunks` says.
    """
    return _each(lambda c, s: _pack_matrix(c, s, format), codes, scale)


def unpack(codes: jax.Array, scale: jax.Array, format: str) -> tuple[jax.Array, jax.Array]:
    """The inverse of `pack`; bytes of blocks without a non-zero code become 127."""
    lead = codes.ndim - 4
    return _each(lambda c, s: _unpack_matrix(c, s, format), codes, scale, lead=lead)


def scales_fit(codes: jax.Array, scale: jax.Array, format: str) -> jax.Array:
    """Whether every block with a non-zero code has a scale byte that the arrangement can hold."""
    used = _used(codes, format)
    inside = (scale >= SMALLEST_SCALE) & (scale <= LARGEST_SCALE)
    return jnp.all(inside | ~used)


def _each(function, codes, scale, lead: int | None = None):
    """Map over the leading axes one matrix at a time: a stack of experts is far too large."""
    lead = codes.ndim - 2 if lead is None else lead
    if lead == 0:
        return function(codes, scale)
    flat = tuple(a.reshape(-1, *a.shape[lead:]) for a in (codes, scale))
    results = lax.map(lambda pair: function(*pair), flat)
    return tuple(a.reshape(*codes.shape[:lead], *a.shape[1:]) for a in results)


def _rotate(word: jax.Array, by: int) -> jax.Array:
    """Rotate uint32 to the left."""
    by %= 32
    return word if by == 0 else (word << by) | (word >> (32 - by))


def _extract(words: jax.Array, pair) -> jax.Array:
    """The two halves of a pair as uint16 [..., 2]."""
    bits = sum(_rotate(words, by) & jnp.uint32(mask * 0x10001) for by, mask in pair)
    return lax.bitcast_convert_type(bits, jnp.uint16)


def _pack_matrix(codes, scale, format):
    form = FORMS[format]
    if format == "fp4_1x32":
        nibbles = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1)
        bits = (nibbles & 8).astype(jnp.uint32) << 12 | (nibbles & 7).astype(jnp.uint32) << 6
    else:
        bits = (codes & 0x80).astype(jnp.uint32) << 8 | (codes & 0x7F).astype(jnp.uint32) << 4
    rows, columns = bits.shape
    grid = rows // ROWS, columns // COLUMNS
    bits = bits.reshape(grid[0], 4, 2, 8, grid[1], 8, 2, 2, 4, 2)  # O warp h g I b s p c e
    pair = bits[..., 0] | bits[..., 1] << 16
    if format == "fp4_1x32":
        pair = pair.transpose(0, 4, 5, 2, 1, 3, 8, 6, 7)  # O I b h warp g c (s p)
        pair = pair.reshape(*grid, 4, 4, 128, 4)  # b/2, (b%2 h), thread, pair
    else:
        pair = pair.transpose(0, 4, 5, 6, 2, 1, 3, 8, 7)  # O I b s h warp g c (p)
        pair = pair.reshape(*grid, 8, 4, 128, 2)  # b, (s h), thread, pair
    word = sum(
        _rotate(pair[..., i] & jnp.uint32(mask * 0x10001), -by)
        for i, places in enumerate(form.pairs)
        for by, mask in places
    )
    word = word.swapaxes(-1, -2).reshape(*grid, *form.codes_shape)

    byte = jnp.where(_used(codes, format), scale, 127) + jnp.uint8(form.bias)
    if format == "fp4_1x32":
        byte = byte.reshape(grid[0], 4, 2, 8, grid[1], 2, 4)  # O warp h g I b/4 b%4
        byte = byte.transpose(0, 4, 1, 3, 2, 5, 6)
    else:
        byte = byte.reshape(grid[0], 2, grid[1], 8).transpose(0, 2, 1, 3)
        byte = jnp.broadcast_to(byte[:, :, :, None, None], (*grid, 2, 2, 4, 8))  # O I warp copy b
    return word, lax.bitcast_convert_type(byte.reshape(*grid, form.scales, 4), jnp.uint32)


def _unpack_matrix(codes, scale, format):
    form = FORMS[format]
    grid = codes.shape[:2]
    words = codes.reshape(*grid, -1, 128, 4)
    halves = jnp.stack([_extract(words, pair) for pair in form.pairs], axis=-2)
    byte = lax.bitcast_convert_type(scale, jnp.uint8) - jnp.uint8(form.bias)
    if format == "fp4_1x32":
        halves = halves.reshape(*grid, 4, 4, 8, 4, 2, 2, 2, 2, 2)  # O I b/2 w g c b%2 h s p e
        halves = halves.transpose(0, 3, 7, 4, 1, 2, 6, 8, 9, 5, 10)
        byte = byte.reshape(*grid, 4, 8, 2, 8).transpose(0, 2, 4, 3, 1, 5)
        byte = byte.reshape(grid[0] * ROWS, -1)
    else:
        halves = halves.reshape(*grid, 8, 4, 8, 4, 2, 2, 2, 2)  # O I b w g c s h p e
        halves = halves.transpose(0, 3, 7, 4, 1, 2, 6, 8, 5, 9)
        byte = byte.reshape(*grid, 2, 2, 4, 8)[:, :, :, 0, 0]
        byte = byte.transpose(0, 2, 1, 3).reshape(grid[0] * 2, -1)
    halves = halves.reshape(grid[0] * ROWS, grid[1] * COLUMNS)
    if format == "fp4_1x32":
        code = (halves >> 12 & 8 | halves >> 6 & 7).astype(jnp.uint8)
        return code[:, 0::2] | code[:, 1::2] << 4, byte
    return (halves >> 8 & 0x80 | halves >> 4 & 0x7F).astype(jnp.uint8), byte


def _used(codes, format):
    """Which scale blocks have a code other than zero (of either sign)."""
    if format == "fp4_1x32":
        return ((codes & 0x77) != 0).reshape(*codes.shape[:-1], -1, BLOCK // 2).any(-1)
    *lead, rows, columns = codes.shape
    blocks = ((codes & 0x7F) != 0).reshape(*lead, rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    return blocks.any((-3, -1))
