"""Kernels of quantised weights against their floors, and against another library, in one run.

Sections, chosen with `--only`:

  ceilings     what this device can do: bytes of a large copy, operations of a bfloat16 matmul
  correctness  random shapes and group sizes, memory full of NaN, rows beside any other rows
  experts      the routed experts of a layer at released sizes, fp4; the peer is tokamax's
               `ragged_dot` on bfloat16 weights (`--tokamax`)
  dense        the fp8 linears of a layer

The floor of an operation is the larger of its bytes at copy bandwidth and its operations at matmul
rate; its share is floor / time, 1 is perfect. Ceilings are measured here and never taken below the
figures of `CEILINGS`, so a throttled device does not flatter a kernel.

Nothing is timed before it is checked. A time is that of one call among several in one compiled
program, launched until the clock is coarse no more; the calls use different rows and, where one
weight would stay in the cache, different weights. "dispatched" is the time of the same calls made
one by one from Python.

    python benchmarks/kernels.py --tokamax --json kernels.json
    JAX_PLATFORMS=cpu python benchmarks/kernels.py --small

Letters: T rows (tokens), K chosen experts, X experts, D hidden, F expert width, O and I rows and
columns of a weight, G groups of a weight.
"""

import argparse
import dataclasses
import functools
import json
import math
import statistics
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from operands import (
    LIMIT,
    exact_experts,
    exact_linear,
    random_experts,
    random_routing,
    random_rows,
    random_weight,
    weight_bytes,
)
from report import Report, WrongError, agree
from timing import Time, dispatched, on_device, timed
from tokamax_peer import Peer, compare

from pallas_kernels.grouped_matmul import grouped_linear, linear, routed_experts

SECTIONS = ("ceilings", "correctness", "experts", "dense")
CEILINGS = {"NVIDIA H200": (4.3e12, 704e12)}  # bytes/s, operations/s
CACHE = 50e6  # bytes of the second-level cache of an H200
# What experts have to reach: of the floor, and with many rows of the matmul rate.
SHARE, RATE = 0.5, 0.4


class Dense(NamedTuple):
    """A linear layer: `groups` weights of shape [outputs, inputs], `count` such layers."""

    name: str
    inputs: int
    outputs: int
    groups: int = 1
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured."""

    hidden: int
    width: int
    experts: int
    top: int
    tokens: tuple[int, ...]
    many: int
    calls: int
    dense: tuple[Dense, ...]
    rows: tuple[int, ...]
    copied: int
    matmul: int
    block: int
    rotated: float
    cases: int
    case_rows: int
    case_experts: int
    case_blocks: int
    repeats: int

    def calls_of(self, T: int) -> int:
        """Calls in one program, each with other rows; two where one takes milliseconds."""
        return 2 if T == self.many else self.calls


RELEASED = Sizes(
    hidden=5120,
    width=2304,
    experts=384,
    top=6,
    tokens=(8, 64, 256),
    many=8192,
    calls=4,
    dense=(
        Dense("wq_a", 5120, 1280),
        Dense("wq_b", 1280, 32768),
        Dense("wkv", 5120, 512),
        Dense("wo_a", 4096, 1024, groups=8),
        Dense("wo_b", 8192, 5120),
        Dense("shared gate, up", 5120, 2304, count=2),
        Dense("shared down", 2304, 5120),
    ),
    rows=(1, 8, 64),
    copied=1 << 31,
    matmul=8192,
    block=256,
    rotated=5 * CACHE,
    cases=9,
    case_rows=300,
    case_experts=40,
    case_blocks=5,
    repeats=9,
)

SMALL = Sizes(
    hidden=256,
    width=256,
    experts=8,
    top=2,
    tokens=(2,),
    many=8,
    calls=2,
    dense=(Dense("wq_a", 256, 64), Dense("wo_a", 256, 64, groups=2)),
    rows=(2,),
    copied=1 << 20,
    matmul=256,
    block=256,
    rotated=6e4,
    cases=3,
    case_rows=8,
    case_experts=6,
    case_blocks=1,
    repeats=3,
)


class Ceilings(NamedTuple):
    """Bytes and operations per second that floors are computed with, and the matmul measured."""

    bandwidth: float
    matmul: float
    measured_matmul: float

    def floor(self, moved: float, operations: float) -> float:
        """Seconds that nothing on this device can be faster than."""
        return max(moved / self.bandwidth, operations / self.matmul)


def ceilings(sizes: Sizes, report: Report) -> Ceilings:
    """Measure the device."""
    bits = jax.random.bits(jax.random.key(0), (sizes.copied // 4,), jnp.uint32)
    copy, _ = timed(jax.jit(lambda a: a + 1), [(bits,)], sizes.repeats)
    bandwidth = 2 * bits.nbytes / copy.median
    n, calls = sizes.matmul, 4
    keys = jax.random.split(jax.random.key(1), (calls, 2))
    pairs = [tuple(jax.random.normal(key, (n, n), jnp.bfloat16) for key in pair) for pair in keys]
    matmul, _ = timed(jax.jit(jnp.matmul), pairs, sizes.repeats)
    rate = 2 * n**3 / matmul.median
    kind = jax.devices()[0].device_kind
    known = CEILINGS.get(kind, (0.0, 0.0))
    report.claim(f"copy of {bits.nbytes >> 20} MiB, TB/s read and written", bandwidth / 1e12)
    report.claim(f"bfloat16 matmul {n}^3, TFLOP/s", rate / 1e12)
    used = Ceilings(max(bandwidth, known[0]), max(rate, known[1]), rate)
    print(
        f"  floors of {kind} use {used.bandwidth / 1e12:.2f} TB/s, {used.matmul / 1e12:.0f} TFLOP/s"
    )
    return used


def _poison(like) -> None:
    """Leave memory full of NaN behind, in pieces of every size that results will ask for."""
    shapes = [like.shape] * 8 + [(size,) for size in (1 << 16, 1 << 20, 1 << 24)]
    left = [jnp.full(shape, jnp.nan, like.dtype) for shape in shapes]
    jax.block_until_ready(left)
    for array in left:
        array.delete()


def _layout(format: str) -> str:
    return "plain" if format == "bfloat16" else "gpu"


def _linear_operation(groups: int, implementation):
    operation = linear if groups == 1 else functools.partial(grouped_linear, groups=groups)
    return jax.jit(functools.partial(operation, implementation=implementation))


def _experts_operation(implementation):
    return jax.jit(
        functools.partial(routed_experts, limit=LIMIT, quantize=True, implementation=implementation)
    )


def correctness(sizes: Sizes, report: Report, implementation) -> None:
    """Random shapes, sizes of groups and absent rows."""
    random = np.random.default_rng(0)
    operation = _experts_operation(implementation)
    for case in range(sizes.cases):
        format = ("fp4_1x32", "fp8_32x32", "bfloat16")[case % 3]
        D, F = (sizes.block * int(n) for n in random.integers(1, sizes.case_blocks + 1, 2))
        X = int(random.integers(2, sizes.case_experts + 1))
        T = int(random.integers(2, sizes.case_rows + 1))
        K = int(random.integers(1, min(X, 6) + 1))
        skew = (0.0, 2.0, 1e3)[case // 3 % 3]  # the last: all rows choose the same experts
        what = f"experts {format}, T={T} K={K} X={X} D={D} F={F}, skew {skew:g}"
        with report.attempt(what):
            keys = jax.random.split(jax.random.key(case), (X, 3))
            experts = random_experts(keys, format, (D, F), _layout(format))
            chosen, weight = random_routing(jax.random.key(100 + case), T, X, K, skew)
            x = random_rows(jax.random.key(200 + case), (T, D))
            valid = jnp.asarray(random.random(T) < 0.8).at[0].set(True)
            exact = exact_experts(x, chosen, weight, keys, format, (D, F))
            x, weight = (jnp.where(valid[:, None], a, jnp.nan) for a in (x, weight))
            first = operation(x, chosen, weight, valid, experts)
            _poison(first)
            result = operation(x, chosen, weight, valid, experts)
            agree(report, what, result[valid], exact[valid])
            if _different(result, first):
                raise WrongError("two calls differ")
            if bool((result[~valid] != 0).any()):
                raise WrongError("rows that are not there are not zero")
            order = jnp.asarray(random.permutation(T))
            changed = 0
            for rows in (order, jnp.arange(1), jnp.arange((T + 1) // 2)):
                part = operation(x[rows], chosen[rows], weight[rows], valid[rows], experts)
                changed += _different(part, result[rows])
            report.claim(f"{what}: rows that others change", changed, most=0)
    for case in range(sizes.cases):
        format = ("fp8_32x32", "fp4_1x32", "bfloat16")[case % 3]
        inputs, outputs = (
            sizes.block * int(n) for n in random.integers(1, sizes.case_blocks + 1, 2)
        )
        T, G = int(random.integers(1, sizes.case_rows + 1)), 1 + case % 2
        what = f"linear {format}, T={T} G={G} I={inputs} O={outputs}"
        with report.attempt(what):
            key, shape = jax.random.key(case), (G * outputs, inputs)
            operation = _linear_operation(G, implementation)
            weight = random_weight(key, format, shape, _layout(format))
            rows = (T, inputs) if G == 1 else (T, G, inputs)
            x = random_rows(jax.random.key(300 + case), rows)
            _poison(operation(x, weight))
            result = operation(x, weight)
            agree(report, what, result, exact_linear(x, random_weight(key, format, shape)))
            changed = 0
            for rows in (jnp.arange(1), jnp.arange(T)[::-1], jnp.arange(2 * T) % T):
                changed += _different(operation(x[rows], weight), result[rows])
            report.claim(f"{what}: rows that others change", changed, most=0)


def _different(a, b) -> int:
    """How many rows are not equal to the last bit."""
    a, b = (np.asarray(v.astype(jnp.float32)).view(np.uint32) for v in (a, b))
    return int((a != b).reshape(len(a), -1).any(axis=1).sum())


def experts(sizes: Sizes, report: Report, limits: Ceilings, implementation, peer) -> None:
    """The routed experts of a layer, whole: routing, both products, quantisation, combination."""
    D, F, X, K = sizes.hidden, sizes.width, sizes.experts, sizes.top
    format = "fp4_1x32"
    keys = jax.random.split(jax.random.key(2), (X, 3))
    one_expert = 2 * weight_bytes(format, (F, D)) + weight_bytes(format, (D, F))
    operation, ours = _experts_operation(implementation), {}
    weights = random_experts(keys, format, (D, F), "gpu")
    print(f"  {X} experts, {X * one_expert / 1e9:.2f} GB")

    def measure(T: int, what: str) -> Time:
        calls = []
        for key in jax.random.split(jax.random.key(T), sizes.calls_of(T)):
            chosen, weight = random_routing(key, T, X, K)
            x = random_rows(key, (T, D))
            calls.append((x, chosen, weight, jnp.ones(T, bool), weights))
        x, chosen, weight, *_ = calls[0]
        result = operation(*calls[0])
        rows = np.sort(np.random.default_rng(T).permutation(T)[:64])
        exact = exact_experts(x[rows], chosen[rows], weight[rows], keys, format, (D, F))
        agree(report, what, result[rows], exact)
        together, dispatched = timed(operation, calls, sizes.repeats)
        read = statistics.mean(len(np.unique(call[1])) for call in calls)
        moved = read * one_expert + x.nbytes + result.nbytes
        work = 2 * T * K * 3 * D * F
        floor = limits.floor(moved, work)
        report.time(what, together, dispatched, experts=read, **_done(moved, work, floor, together))
        if T == sizes.many:
            rate = work / together.median / limits.measured_matmul
            report.claim(f"{what}: of the matmul rate", rate, least=RATE)
        least = None if T == sizes.many else SHARE
        report.claim(f"{what}: share of floor", floor / together.median, least=least)
        return together

    for T in (*sizes.tokens, sizes.many):
        what = f"experts, {T * K} routed rows"
        with report.attempt(what):
            ours[T] = measure(T, what)
    _before(sizes, report, keys, ours)
    if peer is not None:
        compare(sizes, report, ours, peer)


def _done(moved: float, work: float, floor: float, took: Time) -> dict[str, float]:
    return {
        "TB/s": moved / took.median / 1e12,
        "TFLOP/s": work / took.median / 1e12,
        "floor us": 1e6 * floor,
    }


def _before(sizes, report, keys, ours) -> None:
    """The same through XLA alone, at the smallest size."""
    D, T = sizes.hidden, sizes.tokens[0]
    with report.attempt("experts through XLA"):
        weights = random_experts(keys, "fp4_1x32", (D, sizes.width), "plain")
        chosen, weight = random_routing(jax.random.key(T), T, sizes.experts, sizes.top)
        x = random_rows(jax.random.key(T), (T, D))
        call = (x, chosen, weight, jnp.ones(T, bool), weights)
        together, dispatched = timed(_experts_operation("tiles"), [call], sizes.repeats)
        what = f"experts, {T * sizes.top} routed rows, implementation='tiles'"
        report.time(what, together, dispatched)
        if T in ours:
            speedup = together.median / ours[T].median
            report.claim(f"experts, {T * sizes.top} routed rows: times faster than XLA", speedup)


def dense(sizes: Sizes, report: Report, limits: Ceilings, implementation) -> None:
    """The fp8 linears of a layer, one by one and together."""
    format, done = "fp8_32x32", {T: [] for T in sizes.rows}
    for index, layer in enumerate(sizes.dense):
        inputs, outputs, G = layer.inputs, layer.outputs, layer.groups
        shape = G * outputs, inputs
        size = weight_bytes(format, shape)
        keys = jax.random.split(jax.random.key(index), max(2, math.ceil(sizes.rotated / size)))
        weights = [random_weight(key, format, shape, "gpu") for key in keys]
        operation = _linear_operation(G, implementation)
        for T in sizes.rows:
            groups = f", {G} groups" if G > 1 else ""
            what = f"{layer.name} {inputs} -> {outputs}{groups}, {T} rows"
            with report.attempt(what):
                rows = (T, inputs) if G == 1 else (T, G, inputs)
                calls = [
                    (random_rows(key, rows), weight)
                    for key, weight in zip(keys, weights, strict=True)
                ]
                x, result = calls[0][0], operation(*calls[0])
                exact = exact_linear(x, random_weight(keys[0], format, shape))
                agree(report, what, result, exact)
                if jax.default_backend() == "gpu":
                    together = on_device(operation, calls, 3)
                    alone = dispatched(operation, calls, sizes.repeats)
                else:
                    together, alone = timed(operation, calls, sizes.repeats)
                moved = size + x.nbytes + result.nbytes
                work = 2 * T * math.prod(shape)
                floor = limits.floor(moved, work)
                numbers = _done(moved, work, floor, together)
                report.time(what, together, alone, weights=len(keys), **numbers)
                report.claim(f"{what}: share of floor", floor / together.median)
                done[T].append((layer.count * floor, layer.count * together.median))
    for T, measured in done.items():
        if len(measured) == len(sizes.dense):
            floor, seconds = map(sum, zip(*measured, strict=True))
            print(f"  all of a layer, {T} rows: {1e6 * seconds:.1f} us, floor {1e6 * floor:.1f} us")
            report.claim(f"dense linears of a layer, {T} rows: share of floor", floor / seconds)


def main() -> None:
    """Run the sections, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--repeats", type=int, help="of every time (default 9)")
    parser.add_argument("--cases", type=int, help="of correctness (default 9)")
    parser.add_argument(
        "--tokamax",
        nargs="?",
        const="default",
        choices=("default", "search"),
        help="time the peer, with its default tiles or the best of some more",
    )
    parser.add_argument(
        "--implementation", help='of our kernels (default: "gpu" on a GPU, else the plain one)'
    )
    parser.add_argument("--small", action="store_true", help="toy sizes, to test this script")
    parser.add_argument("--json", type=Path, help="write claims and times here")
    options = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and not options.small:
        raise SystemExit("released sizes need a GPU: use --small to try the script elsewhere")
    if options.small:
        # Compiling is all that takes time.
        jax.config.update("jax_disable_most_optimizations", True)
    implementation = options.implementation or ("gpu" if on_gpu else None)
    sizes = SMALL if options.small else RELEASED
    changed = dict(cases=options.cases, repeats=options.repeats)
    sizes = dataclasses.replace(sizes, **{k: v for k, v in changed.items() if v is not None})
    report, peer = Report(bars=not options.small), None
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    if options.tokamax:
        try:
            peer = Peer(options.tokamax == "search")
        except ImportError as error:
            print(f"tokamax cannot be imported, no peer: {error}", flush=True)
    limits = None
    for section in SECTIONS:
        measures = section == "ceilings" and {"experts", "dense"} & set(options.only)
        if section not in options.only and not measures:
            continue
        print(section, flush=True)
        with report.attempt(section):
            if section == "ceilings":
                limits = ceilings(sizes, report)
            elif section == "correctness":
                correctness(sizes, report, implementation)
            elif section == "experts":
                experts(sizes, report, limits, implementation, peer)
            else:
                dense(sizes, report, limits, implementation)
    report.table()
    if options.json:
        options.json.write_text(json.dumps(report.figures(), indent=1))
    if report.failed:
        raise SystemExit(f"{report.failed} claims do not hold")


if __name__ == "__main__":
    main()
