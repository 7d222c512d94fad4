"""Measures tilings of the grouped product and prints the rows of `tilings.py` that win.

    python benchmarks/tune.py                       # on an NVIDIA Hopper GPU
    python benchmarks/tune.py --only experts --rows 8

For each weight of a layer at released sizes and each number of rows in a tile, every tiling that
fits shared memory is timed over rotating weights, so that they come from memory and not from a
cache. Split tilings are not searched beyond their stages and blocks: splitting decides the order of
sums, so it follows from the weight alone.
"""

import argparse
import itertools
import statistics
import time

import jax
import jax.numpy as jnp

from pallas_kernels import gpu_layout
from pallas_kernels.grouped_matmul import tilings
from pallas_kernels.grouped_matmul.gpu import grouped_product
from pallas_kernels.grouped_matmul.tilings import Tiling
from pallas_kernels.layouts import QuantizedTensor

# name: (products, format, weights in the stack, rows and columns of one)
OPERATIONS = {
    "experts gate, up": (2, "fp4_1x32", 256, (2304, 5120)),
    "experts down": (1, "fp4_1x32", 256, (5120, 2304)),
    "wq_a": (1, "fp8_32x32", 40, (1280, 5120)),
    "wq_b": (1, "fp8_32x32", 8, (32768, 1280)),
    "wkv": (1, "fp8_32x32", 96, (512, 5120)),
    "wo_a": (1, "fp8_32x32", 64, (1024, 4096)),
    "wo_b": (1, "fp8_32x32", 8, (5120, 8192)),
    "shared gate, up": (2, "fp8_32x32", 12, (2304, 5120)),
    "shared down": (1, "fp8_32x32", 24, (5120, 2304)),
}
# Tiles of one call: experts are many at once; wo_a has eight groups.
TILES = {"experts gate, up": 64, "experts down": 64, "wo_a": 8}


def random_weight(key, format, count, shape) -> QuantizedTensor:
    """Random words: every bit pattern is a code, and scales are near one over the width."""
    codes, scales = gpu_layout.chunks(format, (count, *shape))
    bias = gpu_layout.FORMS[format].bias
    return QuantizedTensor(
        jax.jit(lambda k: jax.random.bits(k, codes, jnp.uint32))(key),
        jnp.full(scales, 0x01010101 * (116 + bias), jnp.uint32),
        format,
        "gpu",
    )


def candidates(products, format, shape, rows, split):
    """Every tiling that fits."""
    for warpgroups, stages, blocks in itertools.product((1, 2, 3, 4), range(2, 9), (1, 2, 3, 4)):
        tiling = Tiling(rows, warpgroups, stages, blocks, split)
        across = 1 if split else warpgroups
        if split and warpgroups != 2 or shape[0] // gpu_layout.ROWS % across:
            continue
        if blocks > 1 and (rows >= 64 or blocks * (warpgroups + 1) > 10):
            continue
        room = tilings.SHARED_BYTES // tilings.shared_bytes(tiling, products, format)
        more = Tiling(rows, warpgroups, stages + 1, blocks, split)
        fuller = tilings.SHARED_BYTES // tilings.shared_bytes(more, products, format)
        # With fewer stages than fit, only half of them is worth a try.
        if room >= blocks and (fuller < blocks or stages in (2, 4)):
            yield tiling


def seconds(name, tiling, weights, repeats=5) -> float:
    """Median time of one call; each call takes the next weights of the stack."""
    count, _, columns = weights[0].shape
    tiles = TILES.get(name, 1)
    key = jax.random.key(1)
    x = jax.random.normal(key, (tiles * tiling.rows, columns), jnp.bfloat16)
    share = jnp.ones(len(x)) if len(weights) == 2 else None
    calls = max(4, min(24, count // tiles))

    @jax.jit
    def program(x, weights):
        for i in range(calls):
            group = (jnp.arange(tiles, dtype=jnp.int32) + i * tiles) % count
            y = grouped_product(
                x, weights, group, jnp.full(1, tiles, jnp.int32), share, tiling=tiling, limit=10.0
            )
            x = x.at[0, 0].add(y[0, 0] * 0)
        return x

    jax.block_until_ready(program(x, weights))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready([program(x, weights) for _ in range(3)])
        times.append((time.perf_counter() - began) / 3 / calls)
    return statistics.median(times)


def main():
    """Print a table row for the fastest tiling of every operation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="parts of operation names")
    parser.add_argument("--rows", nargs="*", type=int, default=[8, 16, 32, 64])
    parser.add_argument("--all", action="store_true", help="print every tiling, not only the best")
    options = parser.parse_args()
    device = jax.devices()[0].device_kind
    for name, (products, format, count, shape) in OPERATIONS.items():
        if not any(part in name for part in options.only):
            continue
        keys = jax.random.split(jax.random.key(0), products)
        weights = tuple(random_weight(k, format, count, shape) for k in keys)
        moved = sum(w.nbytes for w in weights) / count * TILES.get(name, 1)
        split = TILES.get(name, 1) == 1 and tilings.splits(shape[0] // gpu_layout.ROWS, shape[1])
        for rows in options.rows:
            found = []
            for tiling in candidates(products, format, shape, rows, split):
                try:
                    found.append((seconds(name, tiling, weights), tiling))
                except ValueError as error:
                    print(f"  {tiling}: {str(error).splitlines()[0][:90]}", flush=True)
            found.sort(key=lambda pair: pair[0])
            for took, tiling in found if options.all else found[:2]:
                print(
                    f'{name}: ("{device}", {products}, "{format}", {rows}): {tiling}  '
                    f"{took * 1e6:.1f} us, {moved / took / 1e12:.2f} TB/s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
