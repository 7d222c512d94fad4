"""The GPU kernel on a CPU: interpreted with race detection, and lowered for CUDA at real sizes.

The interpreter runs the copies, barriers and products of `grouped_product` as they are written; but
the unpacking of codes, which is device code, is computed in jnp there. `test_gpu.py` checks that.
A race is an error of the interpreter: every interpreted test fails at one. So is a barrier that
went on twice before anyone looked.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import gpu_layout, layouts
from pallas_kernels.grouped_matmul import (
    Experts,
    api,
    expert_mlp,
    gpu,
    grouped_linear,
    linear,
    reference,
    routed_experts,
    tilings,
)
from pallas_kernels.grouped_matmul.gpu import grouped_product
from pallas_kernels.grouped_matmul.tilings import Tiling
from pallas_kernels.layouts import QuantizedTensor

# Copies that share one of the interpreter's copying threads are ordered, which hides their races.
INTERPRET = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=64)
# That of 0.11 refuses a barrier whose last phase nobody waited for, which is no fault on a device.
interpreted = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="the interpreter of jax 0.11 asks for idle waits"
)
FORMATS = ("fp4_1x32", "fp8_32x32", "bfloat16")
H200 = "NVIDIA H200"


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def stack(rng, format, *shape):
    """A random weight of variance one over its columns, and its values."""
    weight = normal(rng, *shape) / shape[-1] ** 0.5
    if format == "bfloat16":
        weight = weight.astype(jnp.bfloat16)
        return weight, np.asarray(weight.astype(jnp.float32), np.float64)
    plain = layouts.quantize(weight, format)
    return plain.to_layout("gpu"), np.asarray(plain.dequantize(jnp.float32), np.float64)


def rounded(values):
    return np.asarray(jnp.asarray(values, jnp.float32).astype(jnp.bfloat16), np.float64)


def apart(result, exact):
    result = np.asarray(result.astype(jnp.float32), np.float64)
    return np.linalg.norm(result - exact) / np.linalg.norm(exact)


@pytest.fixture(autouse=True)
def fresh_interpreter():
    """Every test starts and ends without another's buffers; programs are traced anew."""
    jax.clear_caches()
    yield
    interpret_pallas_call.gpu_callbacks.reset_gpu_interpret_mode_state()
    jax.clear_caches()


@pytest.fixture
def one_multiprocessor(monkeypatch):
    """One block of threads computes everything, so it uses each of its buffers again."""
    monkeypatch.setattr(gpu, "_multiprocessors", lambda: 1)


class Case:
    """Three tiles over two used groups of three, the last tile not live."""

    def __init__(self, format, rows, columns, seed=0):
        rng = np.random.default_rng(seed)
        self.rows = rows
        self.gate, self.gate_values = stack(rng, format, 3, 128, columns)
        self.up, self.up_values = stack(rng, format, 3, 128, columns)
        self.x = normal(rng, 3 * rows, columns).astype(jnp.bfloat16)
        self.share = jnp.asarray(rng.random(3 * rows), jnp.float32)
        self.group, self.live = jnp.array([2, 0, 1], jnp.int32), jnp.array([2], jnp.int32)

    def run(self, tiling, weights, share=None, limit=0.0):
        return grouped_product(
            self.x, weights, self.group, self.live, share,
            tiling=tiling, limit=limit, interpret=INTERPRET,
        )[: 2 * self.rows]  # fmt: skip

    def exact(self, values):
        x = np.asarray(self.x.astype(jnp.float32), np.float64)
        tiles = [x[i * self.rows : (i + 1) * self.rows] @ values[g].T for i, g in ((0, 2), (1, 0))]
        return np.concatenate(tiles)


@interpreted
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_one_product(format, split):
    case = Case(format, rows=8, columns=1536)  # more chunks than stages: slots are used again
    y = case.run(Tiling(8, 2, 2, 1, split), (case.gate,))
    assert apart(y, case.exact(case.gate_values)) < 3e-3


@interpreted
@pytest.mark.parametrize(
    ("format", "split"), [("fp4_1x32", False), ("fp8_32x32", True), ("bfloat16", False)]
)
def test_swiglu(format, split):
    case, limit = Case(format, rows=16, columns=1024), 0.7
    y = case.run(Tiling(16, 2, 2, 2, split), (case.gate, case.up), case.share, limit)
    gate, up = (rounded(case.exact(v)) for v in (case.gate_values, case.up_values))
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    exact = gate / (1 + np.exp(-gate)) * up * np.asarray(case.share, np.float64)[:32, None]
    assert apart(y, exact) < 4e-3


@interpreted
@pytest.mark.usefixtures("one_multiprocessor")
def test_order_of_sums_depends_on_no_tile():
    """Chunks of 256 columns: large, small, the first one's opposite, small; sums of each are exact.

    One after the other, the first small sum is rounded as the large one is, and the opposite takes
    only the large one away. Split, even and odd chunks are added apart and nothing is lost. That
    the order shows in the results is asserted too.
    """
    rng = np.random.default_rng(7)
    size = rng.permutation([0, *rng.integers(1, 18, 2)])
    w = normal(rng, 3, 128, 1024) / 32
    plain = layouts.quantize(w.at[:, :, 512:768].set(w[:, :, :256]), "fp4_1x32")
    weight, values = plain.to_layout("gpu"), np.asarray(plain.dequantize(jnp.float32), np.float64)
    x = rng.integers(-8, 9, (size.sum(), 1024)).astype(np.float64)
    x[:, :256] *= 2**24
    x[:, 512:768] = -x[:, :256]
    x = jnp.asarray(x, jnp.bfloat16)

    def in_tiles(tiling):
        N = tiling.rows
        tiles = -(-size // N)
        first = (np.cumsum(tiles) - tiles) * N
        address = np.concatenate([f + np.arange(n) for f, n in zip(first, size, strict=True)])
        live = tiles.sum()
        rows = jnp.full(((live + 1) * N, 1024), jnp.nan, jnp.bfloat16).at[address].set(x)
        group = np.append(np.repeat(np.arange(3), tiles), 10**6)  # nobody reads the last tile's
        y = grouped_product(
            rows, (weight,), jnp.asarray(group, jnp.int32), jnp.full(1, live, jnp.int32),
            tiling=tiling, interpret=INTERPRET,
        )  # fmt: skip
        return y[address]

    owner = np.repeat(np.arange(3), size)
    exact = np.einsum("tc,tmc->tm", np.asarray(x.astype(jnp.float32), np.float64), values[owner])
    whole, split = (in_tiles(Tiling(8, 2, 2, 1, split)) for split in (False, True))
    for y, other in ((whole, Tiling(16, 1, 3, 1)), (split, Tiling(16, 2, 3, 1, True))):
        np.testing.assert_array_equal(in_tiles(other).view(jnp.uint16), y.view(jnp.uint16))
    assert apart(split, exact) < 3e-3 < 0.1 < apart(whole, exact)


def skip_wait(monkeypatch, name, number):
    """Leave out one wait of the kernel's text, counted from its top."""
    count, wait = 0, getattr(plgpu, name)

    def sometimes(*arguments, **options):
        nonlocal count
        count += 1
        if count != number:
            wait(*arguments, **options)

    monkeypatch.setattr(gpu.plgpu, name, sometimes)
    return lambda: count


# The kernel is traced from top to bottom: the copying warpgroup waits for a free slot, the
# multiplying ones for data; in split tilings then for the place of partial sums, for the sums, and
# idly at the end. The split product has no more steps than stages: with more, slots that become
# free order the partial sums too.
@interpreted
@pytest.mark.usefixtures("one_multiprocessor")
@pytest.mark.parametrize(
    ("name", "number", "split", "what"),
    [
        ("barrier_wait", 1, False, "a free slot"),
        ("barrier_wait", 2, False, "copied data"),
        ("barrier_wait", 3, True, "the place of partial sums"),
        ("barrier_wait", 4, True, "partial sums"),
        ("wait_smem_to_gmem", 1, False, "results on their way out"),
    ],
)
def test_missing_wait_is_caught(monkeypatch, name, number, split, what):
    seen = skip_wait(monkeypatch, name, number)
    case = Case("bfloat16", rows=8, columns=512)
    # Which of the two it is depends on how threads meet.
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED|no threads observed"):
        jax.block_until_ready(case.run(Tiling(8, 2, 2, 1, split), (case.gate,)))
        pytest.fail(f"nobody noticed the missing wait for {what}")
    assert seen() == (5 if split else 2), "the kernel has other waits than this test knows"


def quantized_shape(format, *shape):
    codes, scale = gpu_layout.chunks(format, shape)
    words = (jax.ShapeDtypeStruct(s, jnp.uint32) for s in (codes, scale))
    return QuantizedTensor(*words, format, "gpu")


def lowered(tiling, weights, tiles):
    """Bytes of the program for an H200 that is not there."""
    columns = weights[0].shape[-1]
    rows = tiles * tiling.rows

    def call(x, weights, group, live, share):
        share = share if len(weights) == 2 else None
        return grouped_product(x, weights, group, live, share, tiling=tiling, limit=10.0)

    device = jax.sharding.AbstractDevice(device_kind=H200, platform="gpu", num_cores=132)
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
        return jax.export.export(jax.jit(call), platforms=["cuda"], disabled_checks=[check])(
            jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16),
            weights,
            jax.ShapeDtypeStruct((tiles,), jnp.int32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ).mlir_module()


RELEASED_DENSE = {  # products, and rows and columns of a weight
    "wq_a": (1, 1280, 5120),
    "wq_b": (1, 32768, 1280),
    "wkv": (1, 512, 5120),
    "wo_b": (1, 5120, 8192),
    "shared gate and up": (2, 2304, 5120),
    "shared down": (1, 5120, 2304),
}


@pytest.mark.parametrize("rows", [8, 16, 32, 72])
def test_released_experts_lower_for_cuda(rows):
    up = (quantized_shape("fp4_1x32", 384, 2304, 5120),) * 2
    down = (quantized_shape("fp4_1x32", 384, 5120, 2304),)
    for weights in (up, down):
        blocks = 384 * weights[0].shape[1] // 64
        tiling = tilings.choose(H200, len(weights), "fp4_1x32", blocks, rows)
        assert "mosaic_gpu" in lowered(tiling, weights, 48)


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("name", RELEASED_DENSE)
def test_released_linears_lower_for_cuda(name, rows):
    products, M, C = RELEASED_DENSE[name]
    split = tilings.splits(M // 64, C)
    tiling = tilings.choose(H200, products, "fp8_32x32", M // 64, rows, split)
    weights = (quantized_shape("fp8_32x32", 1, M, C),) * products
    assert "mosaic_gpu" in lowered(tiling, weights, 1)


@interpreted
def test_live_tiles_are_data():
    case = Case("fp8_32x32", rows=8, columns=512)
    case.run(Tiling(8, 1, 2, 1), (case.gate,))
    case.live, case.group = case.live - 1, case.group[::-1]
    y = case.run(Tiling(8, 1, 2, 1), (case.gate,))
    case.live = case.live - 1
    jax.block_until_ready(case.run(Tiling(8, 1, 2, 1), (case.gate,)))  # none at all
    assert grouped_product._cache_size() == 1
    x = np.asarray(case.x[:8].astype(jnp.float32), np.float64)
    assert apart(y[:8], x @ case.gate_values[1].T) < 3e-3


@interpreted
class TestEntries:
    """The public functions around the kernel, interpreted, against plain JAX."""

    @pytest.fixture(autouse=True)
    def pretend(self, monkeypatch):
        monkeypatch.setattr(api, "runs_here", lambda: True)
        interpreted = functools.partial(grouped_product, interpret=INTERPRET)
        monkeypatch.setattr(api, "grouped_product", interpreted)

    def test_routed_experts(self):
        rng, (D, F, X, T, K) = np.random.default_rng(1), (256, 256, 4, 4, 2)
        shapes = ((X, F, D), (X, F, D), (X, D, F))
        plain = Experts(*(layouts.quantize(normal(rng, *s) / 16, "fp4_1x32") for s in shapes))
        arranged = Experts(*(w.to_layout("gpu") for w in plain))
        x = normal(rng, T, D).astype(jnp.bfloat16).at[2].set(jnp.nan)
        chosen = np.sort([rng.choice(X - 1, K, replace=False) for _ in range(T)], axis=1)
        weight = jnp.asarray(rng.random((T, K)), jnp.float32)
        given = x, jnp.asarray(chosen, jnp.int32), weight, jnp.arange(T) != 2
        y = routed_experts(*given, arranged, limit=10.0, quantize=True, implementation="gpu")
        exact = reference.routed_experts(
            *given, plain, limit=10.0, quantize=True, implementation="tiles"
        )
        assert (np.asarray(y[2]) == 0).all()
        assert apart(y, np.asarray(exact, np.float64)) < 3e-3

    def test_linears_and_shared_expert(self):
        rng = np.random.default_rng(2)
        w = layouts.quantize(normal(rng, 256, 256) / 16, "fp8_32x32")
        x = normal(rng, 3, 4, 256).astype(jnp.bfloat16)
        for run in (
            lambda w, how: linear(x[:, 0], w, implementation=how),
            lambda w, how: grouped_linear(x, w, groups=4, implementation=how),
            lambda w, how: expert_mlp(
                x[:, 0], None, Experts(w, w, w), limit=10.0, quantize=True, implementation=how
            ),
        ):
            exact = np.asarray(run(w, "xla").astype(jnp.float32), np.float64)
            assert apart(run(w.to_layout("gpu"), "gpu"), exact) < 3e-3

    def test_gradient_of_the_rows(self):
        rng = np.random.default_rng(3)
        w = layouts.quantize(normal(rng, 256, 256) / 16, "fp8_32x32")
        x, y = (normal(rng, 3, 256).astype(jnp.bfloat16) for _ in range(2))

        def loss(x, w, how):
            return jnp.sum((linear(x, w, implementation=how) * y).astype(jnp.float32))

        ours = jax.grad(loss)(x, w.to_layout("gpu"), "gpu")
        assert apart(ours, np.asarray(jax.grad(loss)(x, w, "xla"), np.float64)) < 3e-3

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda x, w: (x.astype(jnp.float32), w), "bfloat16 rows"),
            (lambda x, w: (x, w.to_layout("plain")), "layout 'gpu'"),
        ],
    )
    def test_what_cannot_run_says_why(self, change, message):
        rng = np.random.default_rng(4)
        w = layouts.quantize(normal(rng, 64, 256), "fp8_32x32").to_layout("gpu")
        x, w = change(normal(rng, 2, 256).astype(jnp.bfloat16), w)
        with pytest.raises(ValueError, match=message):
            linear(x, w, implementation="gpu")


def test_another_device_says_why():
    w = layouts.quantize(jnp.ones((64, 256)), "fp8_32x32").to_layout("gpu")
    with pytest.raises(ValueError, match="Hopper"):
        linear(jnp.ones((1, 256), jnp.bfloat16), w, implementation="gpu")
    with pytest.raises(ValueError, match="does not exist"):
        linear(jnp.ones((1, 256), jnp.bfloat16), w, implementation="fast")


@pytest.mark.parametrize(("pairs", "rows"), [(48, 8), (1536, 8), (3072, 16), (49152, 72)])
def test_expert_tiles_follow_the_mean(pairs, rows):
    assert tilings.expert_tile_rows(pairs, 384) == rows


@pytest.mark.parametrize("compared", [0, 10**6])
@pytest.mark.parametrize("rows", [8, 16])
def test_tiles_hold_every_pair_once(monkeypatch, compared, rows):
    """By sorting and by comparing; experts with none, with exactly full tiles; pairs with none."""
    monkeypatch.setattr(api, "_MOST_COMPARED", compared)
    rng, X = np.random.default_rng(5), 5
    expert = rng.permutation(np.repeat([0, 1, 3, 4, X], [16, 1, 33, 7, 6]))
    tiles = jax.tree.map(np.asarray, api.arrange_tiles(jnp.asarray(expert, jnp.int32), X, rows))
    group, place = [], {}
    for e in range(X):
        pairs = np.flatnonzero(expert == e)
        for first in range(0, len(pairs), rows):
            for i, pair in enumerate(pairs[first : first + rows]):
                place[pair] = len(group) * rows + i
            group.append(e)
    assert tiles.live == len(group) <= len(tiles.group)
    np.testing.assert_array_equal(tiles.group[: len(group)], group)
    assert (tiles.group[len(group) :] == X).all()
    for pair, e in enumerate(expert):
        assert tiles.address[pair] == place.get(pair, len(tiles.source))
        assert e == X or tiles.source[place[pair]] == pair
