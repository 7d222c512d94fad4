"""How products are cut: a small table by device, and a rule for what is not in it.

The table holds what was fastest at the released sizes; benchmarks/tune.py measures candidates. The
rule fills a multiprocessor's shared memory.
"""

import dataclasses
import functools

from pallas_kernels.gpu_layout import COLUMNS, FORMS, ROWS


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a product is cut; all but `split` changes no bit of the result.

    Attributes:
        rows: N, activation rows of a tile, a multiple of 8 up to 256.
        warpgroups: multiplying warpgroups of a block.
        stages: chunks in flight.
        blocks: blocks that one multiprocessor holds.
        split: all warpgroups take the same 64 rows of weights and share the columns, for weights
            with too few rows to keep every multiprocessor busy. The partial sums are added in a
            fixed order: this alone changes bits, so it may depend on nothing but the weight.
    """

    rows: int
    warpgroups: int
    stages: int
    blocks: int
    split: bool = False


# Of a multiprocessor, for all its blocks.
SHARED_BYTES = 226 * 1024
# Fewer blocks of 64 weight rows than this leave multiprocessors idle: columns are shared then.
_FEW_BLOCKS = 132

# (device, products, format, rows of a tile), for weights that are not split.
_MEASURED: dict[tuple[str, int, str, int], Tiling] = {
    ("NVIDIA H200", 2, "fp4_1x32", 8): Tiling(8, 2, 2, 2),
    ("NVIDIA H200", 1, "fp4_1x32", 8): Tiling(8, 4, 5, 1),
    ("NVIDIA H200", 2, "fp4_1x32", 72): Tiling(72, 3, 2, 1),
    ("NVIDIA H200", 1, "fp4_1x32", 72): Tiling(72, 4, 2, 1),
    ("NVIDIA H200", 1, "fp8_32x32", 64): Tiling(64, 2, 3, 1),
}


def tile_rows(rows: int) -> int:
    """Rows of a tile for a dense weight and this many rows."""
    return next((n for n in (8, 16, 32) if rows <= n), 64)


def expert_tile_rows(pairs: int, experts: int) -> int:
    """Rows of a tile for experts that are chosen this often in all.

    A tile holds most of the experts' rows in a few pieces: a bit more than the mean, or, with many
    rows, 72, of which two hold 144, the rows of nearly all experts whose mean is 128.
    """
    likely = int(1.6 * pairs / experts)
    return next((n for n in (8, 16, 32) if likely <= n), 72)


def splits(blocks: int, columns: int) -> bool:
    """Whether two warpgroups share the columns of a dense weight of this many blocks of 64 rows.

    It depends on the weight alone, since it decides the order of sums.
    """
    return blocks < _FEW_BLOCKS and columns // COLUMNS % 2 == 0


@functools.cache
def choose(
    device: str, products: int, format: str, blocks: int, rows: int, split: bool = False
) -> Tiling:
    """A tiling.

    Args:
        device: `device_kind`.
        products: 1, or 2 for gate and up.
        format: of the weights.
        blocks: of 64 weight rows, in all weights that a call is likely to read.
        rows: rows of a tile that are wished for; a split product may get fewer.
        split: from `splits`; never for experts.
    """
    if split:
        while shared_bytes(Tiling(rows, 2, 2, 1, True), products, format) > SHARED_BYTES:
            rows //= 2
        return _fill(Tiling(rows, 2, 2, 1, True), products, format)
    if blocks < 2 * _FEW_BLOCKS:
        return _fill(Tiling(rows, 1, 2, 1), products, format)
    measured = _MEASURED.get((device, products, format, rows))
    if measured and blocks % measured.warpgroups == 0:
        return measured
    for warpgroups in (4, 3, 2, 1) if rows >= 32 else (2, 1):
        tiling = Tiling(rows, warpgroups, 2, 1)
        if blocks % warpgroups == 0 and shared_bytes(tiling, products, format) <= SHARED_BYTES:
            return _fill(tiling, products, format)
    raise ValueError(f"no tiling of {rows} rows fits {products} products of {format}")


def _fill(tiling: Tiling, products: int, format: str) -> Tiling:
    """As many blocks to a multiprocessor as fit, up to three, then as many stages up to six."""
    blocks = 1
    if tiling.rows < 64 and not tiling.split:
        blocks = min(3, SHARED_BYTES // shared_bytes(tiling, products, format))
    best = dataclasses.replace(tiling, blocks=blocks)
    for stages in range(3, 7):
        more = dataclasses.replace(best, stages=stages)
        if blocks * shared_bytes(more, products, format) > SHARED_BYTES:
            break
        best = more
    return best


def shared_bytes(tiling: Tiling, products: int, format: str) -> int:
    """Shared memory of a block, with a kilobyte for barriers and alignment."""
    N, W = tiling.rows, tiling.warpgroups
    across, along = (1, W) if tiling.split else (W, 1)
    if format in FORMS:
        columns, chunk = COLUMNS, 512 * FORMS[format].words + 4 * FORMS[format].scales
    else:
        columns, chunk = 128, ROWS * 128 * 2
    stage = along * N * columns * 2 + W * products * chunk
    partial = products * (W - 1) * ROWS * N * 4 if tiling.split else 0
    return tiling.stages * stage + across * N * ROWS * 2 + partial + 1024
