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
import contextlib
import dataclasses
import functools
import importlib.util
import json
import math
import statistics
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.grouped_matmul import Experts, grouped_linear, linear, routed_experts
from pallas_kernels.layouts import QuantizedTensor, codes_shape, scale_shape
from pallas_kernels.quantize import fp8_blocks
from pallas_kernels.rounding import round_to

SECTIONS = ("ceilings", "correctness", "experts", "dense")
CEILINGS = {"NVIDIA H200": (4.3e12, 704e12)}  # bytes/s, operations/s
LIMIT = 10.0
MOST_APART = 1e-2  # relative error of bfloat16 results
CACHE = 50e6  # bytes of the second-level cache of an H200
ROUND = 0.05  # seconds of launches between two looks at the clock
# Root mean square of codes drawn uniformly; with it, products have a variance near 1.
CODE_SIZE = {"fp4_1x32": 2.9, "fp8_32x32": 100.0}
# What experts have to reach: of the floor, times the peer with few rows, of the matmul rate.
SHARE, SPEEDUP, RATE = 0.5, 3.0, 0.4


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


class Time(NamedTuple):
    """Seconds of one call: median, least and most."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{1e6 * self.median:.1f} us ({1e6 * self.low:.1f} to {1e6 * self.high:.1f})"


class Report:
    """Claims, printed as they come and again in a table."""

    def __init__(self, bars: bool) -> None:
        self.claims, self.times, self.bars = [], [], bars

    def claim(self, what: str, figure: float, *, least=None, most=None) -> None:
        """A figure; the bar of speed it has to reach, or of error it has to stay below, if any."""
        least, holds = least if self.bars else None, None
        if least is not None or most is not None:
            holds = (least is None or figure >= least) and (most is None or figure <= most)
        self.claims.append(dict(claim=what, figure=figure, least=least, most=most, holds=holds))
        print(f"  {self._line(self.claims[-1])}", flush=True)

    def time(self, what: str, together: Time, dispatched: Time, **details: float) -> None:
        """Seconds of an operation, and what it had to do in them."""
        numbers = "".join(f"; {name} {value:.4g}" for name, value in details.items())
        print(f"  {what}: {together}, dispatched {dispatched}{numbers}", flush=True)
        times = dict(together=together._asdict(), dispatched=dispatched._asdict())
        self.times.append(dict(what=what) | times | details)

    def fail(self, what: str, error: Exception) -> None:
        """An operation that could not be measured; the others still are."""
        text = str(error) if isinstance(error, _WrongError) else traceback.format_exc()
        print(f"  {what}: {text}", flush=True)
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        self.claims.append(
            dict(claim=what, figure=None, least=None, most=None, holds=False, error=reason[:200])
        )

    @contextlib.contextmanager
    def attempt(self, what: str):
        """A `with` block whose exception becomes a failed claim, so that the rest still runs."""
        try:
            yield
        except Exception as error:
            self.fail(what, error)

    def table(self) -> None:
        """All claims."""
        print("\n| claim | figure | bar | holds |\n|---|---|---|---|")
        for row in self.claims:
            print(self._line(row))

    def figures(self) -> dict[str, Any]:
        """Everything measured, and on what."""
        device = jax.devices()[0].device_kind
        return dict(device=device, jax=jax.__version__, claims=self.claims, times=self.times)

    @property
    def failed(self) -> int:
        """How many claims do not hold."""
        return sum(row["holds"] is False for row in self.claims)

    @staticmethod
    def _line(row) -> str:
        bars = [("at least", row["least"]), ("at most", row["most"])]
        bar = ", ".join(f"{word} {value:g}" for word, value in bars if value is not None)
        figure = row.get("error") or f"{row['figure']:.4g}"
        holds = {True: "yes", False: "NO", None: ""}[row["holds"]]
        return f"| {row['claim']} | {figure} | {bar} | {holds} |"


class _WrongError(Exception):
    """A result that is not what it should be."""


# Timing


@functools.partial(jax.jit, static_argnums=0)
def _all_calls(operation: Callable, calls: list[tuple]) -> list:
    return [operation(*arguments) for arguments in calls]


def timed(operation: Callable, calls: list[tuple], repeats: int) -> tuple[Time, Time]:
    """Times of a call of a jitted operation: in one program with the others, and dispatched."""

    def together(count: int):
        for _ in range(count):
            results = _all_calls(operation, calls)
        return results

    def dispatched(count: int):
        for _ in range(count):
            results = [operation(*arguments) for arguments in calls]
        return results

    return tuple(_clock(launch, len(calls), repeats) for launch in (together, dispatched))


def on_device(operation: Callable, calls: list[tuple], repeats: int) -> Time:
    """Time of a call's kernels on the device, from the profiler: no gaps between launches.

    The linears of a layer take a few microseconds each, less than launching one from Python.
    """
    program = jax.jit(operation)
    jax.block_until_ready([program(*call) for call in calls])
    seconds = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready([program(*call) for call in calls])
            (file,) = Path(folder).rglob("*.xplane.pb")
            planes = jax.profiler.ProfileData.from_file(str(file)).planes
            lengths = [
                event.duration_ns
                for plane in planes
                if plane.name.startswith("/device:GPU")
                for line in plane.lines
                if line.name.startswith("Stream")
                for event in line.events
            ]
        seconds.append(1e-9 * sum(lengths) / len(calls))
    return Time(statistics.median(seconds), min(seconds), max(seconds))


def _dispatch(operation: Callable, calls: list[tuple], count: int) -> list:
    return [operation(*calls[i % len(calls)]) for i in range(count)]


def _clock(launch: Callable[[int], Any], calls: int, repeats: int) -> Time:
    def seconds(count: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready(launch(count))
        return (time.perf_counter() - began) / (count * calls)

    seconds(1)
    count = min(50, math.ceil(ROUND / (seconds(1) * calls)))
    samples = [seconds(count) for _ in range(repeats)]
    return Time(statistics.median(samples), min(samples), max(samples))


# Random operands


@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def random_weight(key, format: str, shape: tuple[int, int], layout: str = "plain"):
    """A weight [O, I] of random codes and scales; in format "bfloat16" an array."""
    codes_key, scale_key = jax.random.split(key)
    if format == "bfloat16":
        return (jax.random.normal(codes_key, shape) / math.sqrt(shape[1])).astype(jnp.bfloat16)
    codes = jax.random.bits(codes_key, codes_shape(format, shape), jnp.uint8)
    if format != "fp4_1x32":
        codes = jnp.where(codes & 0x7F == 0x7F, codes & 0x80, codes)  # no NaN
        codes = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    middle = round(127 - math.log2(CODE_SIZE[format] * math.sqrt(shape[1])))
    scale = jax.random.randint(scale_key, scale_shape(format, shape), middle - 1, middle + 2)
    return QuantizedTensor(codes, scale.astype(jnp.uint8), format).to_layout(layout)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_experts(keys, format: str, sizes: tuple[int, int], layout: str) -> Experts:
    """Experts of keys [X, 3], one after another: their plain codes never exist all at once."""
    D, F = sizes

    def stack(keys, shape):
        return lax.map(lambda key: random_weight(key, format, shape, layout), keys)

    return Experts(stack(keys[:, 0], (F, D)), stack(keys[:, 1], (F, D)), stack(keys[:, 2], (D, F)))


@functools.partial(jax.jit, static_argnums=1)
def random_rows(key, shape: tuple[int, ...]):
    """Normal rows that went through e4m3, bfloat16."""
    return fp8_blocks(jax.random.normal(key, shape, jnp.bfloat16))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_routing(key, rows: int, experts: int, top: int, skew: float = 0.0):
    """Chosen experts, ascending, and weights [T, K]; `skew` makes some experts popular."""
    keys = jax.random.split(key, 3)
    scores = jax.random.gumbel(keys[0], (rows, experts))
    scores += skew * jax.random.normal(keys[1], (experts,))
    chosen = jnp.sort(lax.top_k(scores, top)[1], axis=-1).astype(jnp.int32)
    return chosen, jax.random.uniform(keys[2], (rows, top), minval=0.1, maxval=0.6)


def weight_bytes(format: str, shape: tuple[int, ...]) -> int:
    """Bytes of a weight as released; a layout may store more, which is no excuse."""
    if format == "bfloat16":
        return 2 * math.prod(shape)
    return math.prod(codes_shape(format, shape)) + math.prod(scale_shape(format, shape))


# Exact results


def _values(weight, dtype=jnp.float32):
    return weight.dequantize(dtype) if isinstance(weight, QuantizedTensor) else weight.astype(dtype)


@functools.partial(jax.jit, static_argnums=(4, 5))
def exact_experts(x, chosen, weight, keys, format: str, sizes: tuple[int, int]):
    """Every expert of `random_experts` over all rows, in float32, rounded where spec 7.3 rounds."""
    D, F = sizes
    product = functools.partial(jnp.einsum, "ti,oi->to", precision=lax.Precision.HIGHEST)

    def bf16(v):
        return round_to(v, jnp.bfloat16).astype(jnp.float32)

    def add(total, item):
        index, (gate, up, down) = item
        share = jnp.sum(jnp.where(chosen == index, weight, 0), axis=1)[:, None]
        g = bf16(product(x, _values(random_weight(gate, format, (F, D)))))
        u = bf16(product(x, _values(random_weight(up, format, (F, D)))))
        g, u = jnp.minimum(g, LIMIT), jnp.clip(u, -LIMIT, LIMIT)
        hidden = fp8_blocks(bf16(g * jax.nn.sigmoid(g) * u * share))
        return total + bf16(product(hidden, _values(random_weight(down, format, (D, F))))), None

    x = x.astype(jnp.float32)
    items = jnp.arange(keys.shape[0]), (keys[:, 0], keys[:, 1], keys[:, 2])
    return lax.scan(add, jnp.zeros(x.shape, jnp.float32), items)[0]


@jax.jit
def exact_linear(x, weight):
    """Products [T, O] of rows [T, I], or [T, G, O] of rows [T, G, I], in float32."""
    w = _values(weight)
    x = x.astype(jnp.float32)
    precision = lax.Precision.HIGHEST
    if x.ndim == 2:
        return jnp.einsum("ti,oi->to", x, w, precision=precision)
    w = w.reshape(x.shape[1], -1, w.shape[-1])  # [G, O, I]
    return jnp.einsum("tgi,goi->tgo", x, w, precision=precision)


def apart(result, exact) -> float:
    """Relative error |result - exact| / |exact| over all elements."""
    result, exact = (np.asarray(a.astype(jnp.float32), np.float64) for a in (result, exact))
    return float(np.linalg.norm(result - exact) / np.linalg.norm(exact))


def agree(report: Report, what: str, result, exact) -> None:
    """Claim the error; refuse to go on when it is above the bar, or not a number."""
    error = apart(result, exact)
    report.claim(f"{what}: relative error", error, most=MOST_APART)
    if not error <= MOST_APART:
        raise _WrongError(f"the relative error {error:.2g} is above {MOST_APART}: not timed")


# Sections


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
                raise _WrongError("two calls differ")
            if bool((result[~valid] != 0).any()):
                raise _WrongError("rows that are not there are not zero")
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
        for key in jax.random.split(jax.random.key(T), _calls(T, sizes)):
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
        _compare(sizes, report, ours, peer)


def _done(moved: float, work: float, floor: float, took: Time) -> dict[str, float]:
    return {
        "TB/s": moved / took.median / 1e12,
        "TFLOP/s": work / took.median / 1e12,
        "floor us": 1e6 * floor,
    }


def _calls(T: int, sizes: Sizes) -> int:
    return 2 if T == sizes.many else sizes.calls


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


# The peer


class Peer:
    """`ragged_dot` of tokamax with the tiles it chooses itself, or the best of some others too."""

    # Rows, columns and contracted elements of a tile, stages.
    TILES = ((64, 128, 128, 4), (128, 128, 64, 4))

    def __init__(self, search: bool):
        # Its benchmarking module wants a tool of xprof that ragged_dot never uses; where xprof is
        # not installed, an empty module in its place lets the import pass.
        if importlib.util.find_spec("xprof") is None:
            for name in ("xprof", "xprof.cli", "xprof.cli.tools"):
                sys.modules[name] = types.ModuleType(name)
            sys.modules["xprof.cli.tools"].get_kernel_stats_tool = None
        import tokamax

        self.version = tokamax.__version__
        self.programs = {}
        names = ("mosaic_gpu", "triton", "xla") if jax.default_backend() == "gpu" else ("xla",)
        for name in names:
            self.programs[name] = self._program(tokamax, name)
        if search:
            from tokamax._src.ops.ragged_dot import pallas_mosaic_gpu as mosaic

            for m, n, k, stages in self.TILES:
                tiles = mosaic.Config(
                    block_m=m, block_n=n, block_k=k, num_stages=stages, split_k=1, persistent=False
                )
                chosen = mosaic.PallasMosaicGpuRaggedDot(config=tiles)
                name = f"mosaic_gpu {m}x{n}x{k}, {stages} stages"
                self.programs[name] = self._program(tokamax, (chosen,))

    @staticmethod
    def _program(tokamax, implementation):
        dot = functools.partial(
            tokamax.ragged_dot,
            preferred_element_type=jnp.bfloat16,
            implementation=implementation,
        )
        return jax.jit(lambda x, hidden, group, first, second: (
            dot(x, first, group), dot(hidden, second, group)
        ))  # fmt: skip


@functools.partial(jax.jit, static_argnums=1)
def _bf16_stack(keys, shape: tuple[int, int]):
    return lax.map(lambda key: random_weight(key, "bfloat16", shape), keys)


def _compare(sizes: Sizes, report: Report, ours: dict[int, Time], peer: Peer) -> None:
    """The peer's two products over the same groups.

    In its favour: gate and up are one product, and sorting, SwiGLU, quantisation and combination,
    which our time includes, are left out.
    """
    D, F, X, K = sizes.hidden, sizes.width, sizes.experts, sizes.top
    keys = jax.random.split(jax.random.key(3), (2, X))
    first, second = _bf16_stack(keys[0], (D, 2 * F)), _bf16_stack(keys[1], (F, D))
    for T in ours:
        calls = []
        for key in jax.random.split(jax.random.key(T), _calls(T, sizes)):
            chosen, _ = random_routing(key, T, X, K)
            group = jnp.zeros(X, jnp.int32).at[chosen.ravel()].add(1)
            rows, hidden = random_rows(key, (T * K, D)), random_rows(key, (T * K, F))
            calls.append((rows, hidden, group, first, second))
        best = None
        for name, program in peer.programs.items():
            what = f"tokamax {peer.version} {name}, {T * K} routed rows"
            if best is not None and name in ("triton", "xla"):
                continue
            try:
                _check_peer(program(*calls[0]), calls[0])
                together, dispatched = timed(program, calls, sizes.repeats)
            except Exception as error:  # a peer that does not run is a line, not a failure of ours
                print(f"  {what}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            report.time(what, together, dispatched)
            best = min(filter(None, (best, together)), key=lambda t: t.median)
        if best is not None:
            least = 1.0 if T == sizes.many else SPEEDUP
            speedup = best.median / ours[T].median
            report.claim(f"experts, {T * K} routed rows: times faster than tokamax", speedup,
                         least=least)  # fmt: skip


def _check_peer(results, call) -> None:
    rows, hidden, group, *weights = call
    ends = np.cumsum(np.asarray(group))
    for e in np.flatnonzero(np.asarray(group))[::-1][:3]:
        part = slice(int(ends[e] - group[e]), int(ends[e]))
        for x, weight, result in zip((rows, hidden), weights, results, strict=True):
            error = apart(result[part], exact_linear(x[part], weight[e].T))
            if not error <= MOST_APART:
                raise _WrongError(f"relative error {error:.2g} in group {e}")


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
                    dispatched = _clock(
                        functools.partial(_dispatch, operation, calls), 1, sizes.repeats
                    )
                else:
                    together, dispatched = timed(operation, calls, sizes.repeats)
                moved = size + x.nbytes + result.nbytes
                work = 2 * T * math.prod(shape)
                floor = limits.floor(moved, work)
                numbers = _done(moved, work, floor, together)
                report.time(what, together, dispatched, weights=len(keys), **numbers)
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
        jax.config.update(
            "jax_disable_most_optimizations", True
        )  # compiling is all that takes time
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
