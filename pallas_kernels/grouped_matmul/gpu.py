"""Grouped matmul on Hopper: quantised weights at the speed of memory (Pallas Mosaic GPU, wgmma).

The product is taken transposed, y^T = W x^T: 64 rows of weights are the M side of the matrix unit
and a tile of a few activation rows its N side, so a single activation row wastes nothing but
arithmetic. Weights travel from memory to shared memory as they are stored, and are unpacked by each
thread straight into the registers the matrix unit reads (`gpu_layout`). One warpgroup only copies;
the others multiply, each its own 64 rows of weights, all against the same activations.

Every row of results is the same sequence of operations whatever else is computed beside it: a fixed
order over columns, no atomics, and partial sums (`Tiling.split`) only as the weight alone decides.
So rows are equal to the last bit for any number of other rows and any tile.

Letters: T tiles, N activation rows of a tile, G weights in the stack, M weight rows, C columns.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu_layout import COLUMNS, FORMS, RESTORE, ROWS
from pallas_kernels.grouped_matmul.tilings import Tiling
from pallas_kernels.grouped_matmul.unpack import unpack_columns
from pallas_kernels.layouts import QuantizedTensor

_PART = 64  # columns that a matrix instruction group takes from 128 swizzled bytes of bfloat16
_COPY_REGISTERS = 40
_SWIZZLED = (plgpu.TilingTransform((8, _PART)), plgpu.SwizzleTransform(128))


# A model calls it for every layer: as a program of its own it is traced and lowered once.
@functools.partial(jax.jit, static_argnames=("tiling", "limit", "interpret"))
def grouped_product(
    x: jax.Array,
    weights: tuple[QuantizedTensor | jax.Array, ...],
    group: jax.Array,
    live: jax.Array,
    share: jax.Array | None = None,
    *,
    tiling: Tiling,
    limit: float = 0.0,
    interpret=False,
) -> jax.Array:
    """Tiles of rows, each times the weight of its group.

    With two weights (gate, up) the result is the clamped SwiGLU of both products, times `share`
    (spec 7.3), with every rounding point: products and result in bfloat16, the rest in float32.

    Args:
        x: bfloat16 [T * N, C].
        weights: one or two of shape [G, M, C], in layout "gpu" or bfloat16.
        group: int32 [T], which weight a tile takes; tiles from `live` on are not computed.
        live: int32 [1].
        share: float32 [T * N] routing weights, or None; two weights only.
        tiling: how to cut.
        limit: clamp of gate and up; 0 means none.
        interpret: `plgpu.InterpretGPUParams` to run on a CPU.

    Returns:
        bfloat16 [T * N, M]; rows of tiles from `live` on are undefined.
    """
    form = _Form.of(weights[0])
    _, M, C = weights[0].shape
    N, W, S = tiling.rows, tiling.warpgroups, tiling.stages
    across, along = (1, W) if tiling.split else (W, 1)
    blocks, steps = M // (ROWS * across), C // (form.columns * along)
    chunk = functools.partial(form.chunk, rows=M // ROWS, steps=steps * along)
    operands = [array for weight in weights for array in form.operands(weight)]
    each = len(operands) // len(weights)
    has_share = share is not None
    grid = min(_multiprocessors() * tiling.blocks, group.shape[0] * blocks)
    alone = tiling.blocks == 1

    def kernel(*refs):
        x_g, group_g, live_g, *refs = list(refs)
        share_g = refs.pop(0) if has_share else None
        stacks, refs = refs[: len(operands)], refs[len(operands) :]
        left_s = refs.pop() if interpret else None
        if tiling.split:
            *refs, partial_s, ready, taken = refs
        y_g, x_s, *stage, y_s, full, empty = refs
        first, me = lax.axis_index("block"), lax.axis_index("warpgroup")
        items = live_g[0] * blocks
        mine = lax.div(items - first + grid - 1, grid)

        def place(i):
            """Tile and first block of 64 weight rows of the i-th item of this block of threads."""
            item = first + i * grid
            return lax.div(item, blocks), lax.rem(item, blocks) * across

        def finish(sums, tile, row, held):
            """Round, apply SwiGLU to two products, and write 64 columns of results."""
            sums = [(s * form.restore).astype(jnp.bfloat16) for s in sums]
            if len(sums) == 2:
                columns = None
                if has_share:
                    columns = plgpu.load(
                        share_g.at[pl.ds(tile * N, N)],
                        layout=plgpu.Layout.WGMMA.reduce(0),
                        optimized=False,
                    )
                y = _swiglu(*sums, columns, limit)
            else:
                (y,) = sums
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            held.T[...] = plgpu.layout_cast(y, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(held, y_g.at[pl.ds(tile * N, N), pl.ds(row * ROWS, ROWS)])

        @pl.when(me == W)
        def copy():
            if alone:
                plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")

            def item(i, count):
                tile, row = place(i)
                g = group_g[tile]

                def step(k, count):
                    slot = lax.rem(count, S)

                    @pl.when(count >= S)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    for w in range(along):
                        columns = pl.ds((k * along + w) * form.columns, form.columns)
                        plgpu.copy_gmem_to_smem(
                            x_g.at[pl.ds(tile * N, N), columns], x_s.at[slot, w], full.at[slot]
                        )
                    for w in range(W):
                        r, c = (0, k * W + w) if tiling.split else (w, k)
                        for source, target in zip(stacks, stage, strict=True):
                            plgpu.copy_gmem_to_smem(
                                chunk(source, g, row + r, c),
                                target.at[slot, w],
                                full.at[slot],
                            )
                    return count + 1

                return lax.fori_loop(0, steps, step, count)

            lax.fori_loop(0, mine, item, jnp.int32(0))

        @pl.when(me < W)
        def multiply():
            if alone:
                plgpu.set_max_registers(_registers(W), action="increase")

            turn = me if tiling.split else 0

            def item(i, count):
                tile, row = place(i)

                def products(*sums):
                    def step(k, count):
                        slot = lax.rem(count, S)
                        plgpu.barrier_wait(full.at[slot])
                        for part in range(form.columns // _PART):
                            columns = pl.ds(part * _PART, _PART)
                            right = x_s.at[slot, turn, :, columns].T
                            for j, total in enumerate(sums):
                                held = [a.at[slot, me] for a in stage[j * each : (j + 1) * each]]
                                left = form.left(held, part, left_s and left_s.at[me])
                                # Unpacking went on beside the product before this one.
                                plgpu.wgmma_wait(0)
                                plgpu.wgmma(total, left, right)
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(empty.at[slot])
                        return count + 1

                    lax.fori_loop(0, steps, step, count)
                    return [total[...] for total in sums]

                sums = [plgpu.ACC((ROWS, N), jnp.float32)] * len(weights)
                sums = pl.run_scoped(products, *sums)
                if not tiling.split:
                    finish(sums, tile, row + me, y_s.at[me])
                    return count + steps

                @pl.when(me > 0)
                def _():
                    @pl.when(i > 0)
                    def _():
                        plgpu.barrier_wait(taken)

                    for j, s in enumerate(sums):
                        partial_s[j, me - 1] = s
                    plgpu.barrier_arrive(ready)

                @pl.when(me == 0)
                def _():
                    plgpu.barrier_wait(ready)
                    totals = list(sums)
                    for j in range(len(sums)):
                        for w in range(W - 1):
                            totals[j] = totals[j] + plgpu.load(
                                partial_s.at[j, w], layout=plgpu.Layout.WGMMA
                            )
                    plgpu.barrier_arrive(taken)
                    finish(totals, tile, row, y_s.at[0])

                return count + steps

            lax.fori_loop(0, mine, item, jnp.int32(0))
            if tiling.split:

                @pl.when((me > 0) & (mine > 0))
                def _():
                    plgpu.barrier_wait(taken)

            plgpu.wait_smem_to_gmem(0)

    bf16 = jnp.bfloat16
    scratch = [
        plgpu.SMEM((S, along, N, form.columns), bf16, transforms=_SWIZZLED),
        *(form.scratch((S, W))) * len(weights),
        plgpu.SMEM((across, N, ROWS), bf16, transforms=_SWIZZLED),
        plgpu.Barrier(num_arrivals=along + W * len(operands), num_barriers=S),
        plgpu.Barrier(num_arrivals=W, num_barriers=S),
    ]
    if tiling.split:
        swizzle = min(4 * N, 128)
        tiled = plgpu.TilingTransform((8, swizzle // 4)), plgpu.SwizzleTransform(swizzle)
        shape = (len(weights), W - 1, ROWS, N)
        scratch += [
            plgpu.SMEM(shape, jnp.float32, transforms=tiled),
            plgpu.Barrier(num_arrivals=W - 1),
            plgpu.Barrier(),
        ]
    if interpret:
        scratch.append(plgpu.SMEM((W, ROWS, _PART), bf16, transforms=_SWIZZLED))
    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((x.shape[0], M), bf16),
        grid=(grid,),
        grid_names=("block",),
        num_threads=W + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # No thread reads what it wrote itself: the barriers above are all that is needed.
            unsafe_no_auto_barriers=True,
        ),
    )
    shares = (share,) if has_share else ()
    return call(x, group, live, *shares, *operands)


def _swiglu(gate, up, share, limit):
    """Clamped SwiGLU of bfloat16 products, computed in float32, rounded once (spec 7.3)."""
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    if limit:
        gate = jnp.minimum(gate, limit)
        up = jnp.minimum(jnp.maximum(up, -limit), limit)
    hidden = gate / (1 + jnp.exp(-gate)) * up
    if share is not None:
        hidden = hidden * lax.broadcast_in_dim(share, hidden.shape, (1,))
    return hidden.astype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class _Form:
    """What differs between weight formats: their arrays, chunks, and the left side of a product."""

    format: str

    @classmethod
    def of(cls, weight) -> "_Form":
        return cls(weight.format if isinstance(weight, QuantizedTensor) else "bfloat16")

    @property
    def columns(self) -> int:
        return COLUMNS if self.format in FORMS else 2 * _PART

    @property
    def restore(self) -> float:
        return RESTORE if self.format in FORMS else 1.0

    def operands(self, weight):
        if self.format not in FORMS:
            return [weight.reshape(-1, weight.shape[-1])]
        form = FORMS[self.format]
        return [
            weight.codes.reshape(-1, *form.codes_shape),
            weight.scale.reshape(-1, form.scales),
        ]

    def chunk(self, source, group, row, step, *, rows, steps):
        """What one copy moves: 64 rows from block `row` of a group's weight, columns of `step`."""
        row = group * rows + row
        if self.format not in FORMS:
            return source.at[pl.ds(row * ROWS, ROWS), pl.ds(step * self.columns, self.columns)]
        return source.at[row * steps + step]

    def left(self, held, part, spare):
        """64 columns of a chunk in shared memory as the left operand of a product.

        The interpreter neither runs device code nor multiplies from registers: there, the operand
        is computed in jnp and put into the spare buffer.
        """
        if self.format not in FORMS:
            return held[0].at[:, pl.ds(part * _PART, _PART)]
        if spare is None:
            return unpack_columns(*held, part, self.format)
        chunk = QuantizedTensor(*(a[...][None, None] for a in held), self.format, "gpu")
        columns = chunk.dequantize(jnp.float32)[:, part * _PART : (part + 1) * _PART]
        spare[...] = (columns / self.restore).astype(jnp.bfloat16)
        plgpu.commit_smem()
        return spare

    def scratch(self, lead):
        if self.format not in FORMS:
            shape = (*lead, ROWS, self.columns)
            return [plgpu.SMEM(shape, jnp.bfloat16, transforms=_SWIZZLED)]
        form = FORMS[self.format]
        return [
            plgpu.SMEM((*lead, *form.codes_shape), jnp.uint32),
            plgpu.SMEM((*lead, form.scales), jnp.uint32),
        ]


def _registers(warpgroups: int) -> int:
    """Registers of a multiplying thread when one block owns a multiprocessor's 65,536.

    The block starts with an equal share for every thread, in units of eight. The copying threads
    give theirs up, and asking for more than that waits forever.
    """
    start = min(65536 // (128 * (warpgroups + 1)), 255) // 8 * 8
    given = start - _COPY_REGISTERS
    return min(start + given // warpgroups, 240) // 8 * 8


def _multiprocessors() -> int:
    """Multiprocessors of the GPU in use; those of an H200 when there is none to ask."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else 132
