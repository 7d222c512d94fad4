"""tokamax's `ragged_dot` on bfloat16 weights, over the same groups as our experts."""

import functools
import importlib.util
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from operands import exact_linear, random_routing, random_rows, random_weight
from report import MOST_APART, Report, WrongError, apart
from timing import Time, timed

SPEEDUP = 3.0  # times that we have to be faster with few rows


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


def compare(sizes, report: Report, ours: dict[int, Time], peer: Peer) -> None:
    """The peer's two products over the same groups.

    In its favour: gate and up are one product, and sorting, SwiGLU, quantisation and combination,
    which our time includes, are left out.
    """
    D, F, X, K = sizes.hidden, sizes.width, sizes.experts, sizes.top
    keys = jax.random.split(jax.random.key(3), (2, X))
    first, second = _bf16_stack(keys[0], (D, 2 * F)), _bf16_stack(keys[1], (F, D))
    for T in ours:
        calls = []
        for key in jax.random.split(jax.random.key(T), sizes.calls_of(T)):
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
                raise WrongError(f"relative error {error:.2g} in group {e}")
