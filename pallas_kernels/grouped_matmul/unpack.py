"""Codes in shared memory to bfloat16 in the matrix unit's registers, by each thread for itself.

A word costs four shifts and five masks for eight fp4 codes, and every scale one permutation and one
shift; the rest is a packed product. `gpu_layout` says why this is enough.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.gpu_layout import BLOCK, FORMS, ROWS

_PART = 2 * BLOCK


def unpack_columns(codes, scales, part: int, format: str) -> jax.Array:
    """64 columns of a chunk as bfloat16 [64, 64] times 2^-26, in the layout of a left operand.

    Args:
        codes: reference to the chunk's words in shared memory.
        scales: reference to its scale words.
        part: which quarter of its columns.
        format: a key of `FORMS`.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((ROWS, _PART), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def device_code(_, codes, scales):
        return _unpack(codes, scales, part, format)

    return device_code(codes, scales)


def _unpack(codes, scales, part, format):
    form = FORMS[format]
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.remui(mgpu.utils.thread_idx(), _constant(128))
    four = ir.VectorType.get((4,), i32)

    def load(ref, offset):
        """Four words at a word offset: one load of 16 bytes."""
        flat = mgpu.utils.memref_reshape(ref, (int(np.prod(ir.MemRefType(ref.type).shape)),))
        quad = vector.load(four, flat, [arith.index_cast(ir.IndexType.get(), offset)])
        return [vector.extract(quad, [], [j]) for j in range(4)]

    def multiplier(word, block):
        """Byte `block % 4` of a scale word as the exponents of two bfloat16."""
        return _asm(f"prmt.b32 $0, $1, 0, {0x4040 + block % 4 * 0x101}; shl.b32 $0, $0, 7;", word)

    warp = arith.divui(thread, _constant(32))
    if format == "fp4_1x32":
        group = arith.divui(arith.remui(thread, _constant(32)), _constant(4))
        row = arith.addi(arith.muli(warp, _constant(8)), group)
        scale = load(scales, arith.muli(row, _constant(4)))  # (h, b / 4)
    else:
        scale = load(scales, arith.muli(warp, _constant(8)))  # (b / 4), twice

    two = ir.VectorType.get((2,), ir.BF16Type.get())
    registers = np.empty((_PART // 8, 2), dtype=object)  # (8 columns, h)
    each = form.words // 16
    for i in range(each):
        line = part * each + i
        offset = arith.addi(_constant(line * 512), arith.muli(thread, _constant(4)))
        words = load(codes, offset)
        for v, word in enumerate(words):
            h = v % 2
            if format == "fp4_1x32":
                block, places = 2 * line + v // 2, range(4)  # (s, p)
                power = multiplier(scale[2 * h + block // 4], block)
            else:
                block, places = line, range(2 * (v // 2), 2 * (v // 2) + 2)
                power = multiplier(scale[block // 4], block)
            for place, pair in zip(places, _extract(word, power, form.pairs), strict=True):
                registers[block % 2 * 4 + place, h] = mgpu.utils.bitcast(pair, two)
    shape = mgpu.WGMMA_LAYOUT.registers_shape((ROWS, _PART))
    return mgpu.FragmentedArray(
        _registers=registers.reshape(shape), _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
    )


def _extract(word, power, pairs):
    """The pairs of a word, each times the power of two."""
    lines, outputs = ["{ .reg .b32 t;"], len(pairs)
    word_name, power_name = f"${outputs}", f"${outputs + 1}"

    def masked(target, by, mask):
        bits = f"0x{mask * 0x10001:08x}"
        if by == 0:
            return f"and.b32 {target}, {word_name}, {bits};"
        return f"shf.l.wrap.b32 t, {word_name}, {word_name}, {by}; and.b32 {target}, t, {bits};"

    for i, places in enumerate(pairs):
        lines.append(masked(f"${i}", *places[0]))
        for by, mask in places[1:]:
            lines.append(masked("t", by, mask))
            lines.append(f"or.b32 ${i}, ${i}, t;")
        lines.append(f"mul.rn.bf16x2 ${i}, ${i}, {power_name};")
    lines.append("}")
    i32 = ir.IntegerType.get_signless(32)
    return _asm("\n".join(lines), word, power, results=[i32] * outputs)


def _asm(text, *operands, results=None):
    """Device instructions without side effects on 32-bit registers."""
    i32 = ir.IntegerType.get_signless(32)
    outputs = 1 if results is None else len(results)
    constraints = ",".join(["=&r"] * outputs + ["r"] * len(operands))
    if results is None:
        return llvm.inline_asm(i32, list(operands), text, constraints)
    struct = llvm.StructType.get_literal(results)
    value = llvm.inline_asm(struct, list(operands), text, constraints)
    return [llvm.extractvalue(i32, value, [j]) for j in range(outputs)]


def _constant(value):
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value))
