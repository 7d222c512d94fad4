"""The plain forms of kernels: recorded values, slow obvious implementations, arithmetic.

Component goldens come from an independent implementation (tests/golden/README.md). Where they
record bfloat16 with one rounding point, agreement is exact.
"""

import jax
import jax.numpy as jnp
import numpy as np
import paper
import pytest
from golden_files import component, component_notes, part, relative_error

import deepinfer_jax as di
import pallas_kernels.sparse_attention.reference as attention_reference
from deepinfer_jax.model.experts import route
from pallas_kernels import layouts
from pallas_kernels.grouped_matmul import Experts, expert_mlp, routed_experts
from pallas_kernels.index_select import candidate_blocks, index_scores, top_entries
from pallas_kernels.quantize import fp8_blocks, mxfp4_blocks, nvfp4_blocks
from pallas_kernels.sparse_attention import sparse_attention

QUANTISERS = {"fp8": fp8_blocks, "mxfp4": mxfp4_blocks, "nvfp4": nvfp4_blocks}
NUMERICS = {
    "f32": di.Numerics(dtype="float32", quantize_activations=False),
    "bf16": di.Numerics(quantize_activations=False),
}
DTYPES = tuple(NUMERICS)


def rows_of(array):
    """[B, S, ...] as rows [B S, ...]."""
    return jnp.asarray(array).reshape(-1, *array.shape[2:])


# --- Round trips ----------------------------------------------------------------------------------


@pytest.mark.golden
@pytest.mark.parametrize("form", QUANTISERS)
def test_round_trips_are_exact(form):
    tensors, function = component("quant_cache"), jax.jit(QUANTISERS[form])
    sets = [k.removesuffix("." + form) for k in tensors if k.endswith("." + form)]
    assert len(sets) >= 16
    for name in sets:
        value, golden = np.asarray(function(tensors[name + ".x"])), tensors[f"{name}.{form}"]
        assert value.dtype == golden.dtype
        np.testing.assert_array_equal(value.astype(float), golden.astype(float), err_msg=name)
        np.testing.assert_array_equal(np.signbit(value), np.signbit(golden), err_msg=name)


def test_nvfp4_divides_as_the_spec_says():
    """A product with a rounded reciprocal, which XLA prefers, decides ties wrongly."""
    rng = np.random.default_rng(0)
    scale = np.arange(8, 16)[:, None] / 8 * 2.0 ** np.arange(-5, 5)  # e4m3 values
    tie = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], (80, 16))
    x = (tie * scale.reshape(80, 1)).astype(np.float32)
    x[:, 0] = 6 * scale.reshape(80)
    np.testing.assert_array_equal(jax.jit(nvfp4_blocks)(x), paper.nvfp4(x))

    middle = np.arange(17, 32, 2) / 16  # amax / 6 lies between two scales
    x = rng.uniform(-1, 1, (8, 16)).astype(np.float32)
    x[:, 0] = 6 * middle
    np.testing.assert_array_equal(jax.jit(nvfp4_blocks)(x), paper.nvfp4(x))


@pytest.mark.parametrize("form, block", [("fp8", 32), ("mxfp4", 32), ("nvfp4", 16)])
@pytest.mark.parametrize("width", [1, 15, 40, 70])
def test_a_partial_block_is_a_block_padded_with_zeros(form, block, width):
    x = np.random.default_rng(width).standard_normal((3, width)).astype(np.float32)
    padded = np.pad(x, ((0, 0), (0, -width % block)))
    value, whole = QUANTISERS[form](x), QUANTISERS[form](padded)
    np.testing.assert_array_equal(value, whole[:, :width])
    assert 0 < relative_error(value, x) < {"fp8": 0.05, "mxfp4": 0.3, "nvfp4": 0.3}[form]
    # A block knows nothing of its neighbours, however large they are.
    if width > block:
        louder = QUANTISERS[form](np.concatenate([x[:, :block] * 1000, x[:, block:]], axis=1))
        np.testing.assert_array_equal(louder[:, block:], value[:, block:])


@pytest.mark.parametrize("form", QUANTISERS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_gradient_passes_a_round_trip_unchanged(form, dtype):
    rng = np.random.default_rng(1)
    x, weight = (jnp.asarray(rng.standard_normal((2, 3, 40)), dtype) for _ in range(2))

    def loss(x):
        return jnp.sum((QUANTISERS[form](x) * weight).astype(jnp.float32))

    gradient = jax.jit(jax.grad(loss))(x)
    assert gradient.dtype == dtype
    np.testing.assert_array_equal(gradient, weight)


# --- Experts --------------------------------------------------------------------------------------


@pytest.mark.golden
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["e12k3", "e7k2"])
def test_mixture_of_experts(name, dtype):
    notes, g = component_notes("moe")[name], part(component("moe"), f"{name}.{dtype}.")
    g = {k: jnp.asarray(v) for k, v in g.items()}
    x, padding, limit = rows_of(g["x"]), rows_of(g["padding_mask"]) > 0, notes["swiglu_limit"]
    assert 0 < padding.sum() < padding.size
    chosen, weight = route(
        x,
        g["gate.weight"],
        g["gate.bias"],
        g["gate.bias_vl"],
        rows_of(g["image_mask"]) > 0,
        top_k=notes["topk"],
        scale=notes["routed_scaling_factor"],
        wide=jnp.float32,
    )
    np.testing.assert_array_equal(chosen, rows_of(g["router_idx"]))
    assert relative_error(weight, rows_of(g["router_w"])) < 1e-6

    routed, shared = (Experts(*(g[f"{k}.w{i}"] for i in (1, 3, 2))) for k in ("experts", "shared"))
    common = expert_mlp(x, None, shared, limit=limit, quantize=False).astype(jnp.float32)
    # In bfloat16 the package rounds the routed sum before it adds the shared expert; spec 7.2 not.
    allowed = 1e-6 if dtype == "f32" else 4e-3
    for implementation in ("tiles", "dense"):
        y = routed_experts(
            x, chosen, weight, ~padding, routed, limit=limit, quantize=False,
            implementation=implementation,
        )  # fmt: skip
        assert y.dtype == jnp.float32
        y = jnp.where(padding[:, None], 0, y)  # padded tokens get the shared expert only
        value = (y + common).astype(x.dtype)
        assert relative_error(value, rows_of(g["out"])) < allowed, implementation


run_experts = jax.jit(
    routed_experts, static_argnames=("limit", "quantize", "tile", "implementation")
)


class Crowd:
    """Random experts and rows, and the obvious loop over rows and choices in float64."""

    def __init__(self, rows, chosen, seed=0, X=6, D=40, F=24):
        rng = np.random.default_rng(seed)

        def normal(*shape):
            return jnp.asarray(rng.standard_normal(shape), jnp.float32) * shape[-1] ** -0.5

        self.experts = Experts(normal(X, F, D), normal(X, F, D), normal(X, D, F))
        self.x = jnp.asarray(rng.standard_normal((rows, D)), jnp.float32)
        self.chosen = jnp.asarray(chosen, jnp.int32)
        self.weight = jnp.asarray(rng.uniform(0.1, 1, self.chosen.shape), jnp.float32)
        self.valid = jnp.ones(rows, bool)

    def run(self, implementation, tile=None, limit=0.8, **changed):
        arrays = {k: getattr(self, k) for k in ("x", "chosen", "weight", "valid", "experts")}
        return run_experts(
            **arrays | changed,
            limit=limit,
            quantize=False,
            tile=tile,
            implementation=implementation,
        )

    def slowly(self, limit=0.8):
        gate, up, down = (np.asarray(w, float) for w in self.experts)
        total = np.zeros(self.x.shape)
        for t, row in enumerate(np.asarray(self.x, float)):
            for e, share in zip(self.chosen[t], np.asarray(self.weight[t], float), strict=True):
                a, b = np.minimum(gate[e] @ row, limit), np.clip(up[e] @ row, -limit, limit)
                total[t] += down[e] @ (a / (1 + np.exp(-a)) * b * share)
        return total


def random_choices(rows, X=6, K=2, seed=0):
    rng = np.random.default_rng([rows, seed])
    return np.sort([rng.permutation(X)[:K] for _ in range(rows)], axis=1)


@pytest.mark.parametrize("rows", range(1, 18))
def test_experts_for_every_small_number_of_rows(rows):
    crowd = Crowd(rows, random_choices(rows), seed=rows)
    expected = crowd.slowly()
    assert relative_error(crowd.run("tiles", tile=4), expected) < 1e-6
    assert relative_error(crowd.run("dense"), expected) < 1e-6


@pytest.mark.parametrize(
    "chosen",
    [[[3, 5]] * 13, [[0, 1]] * 13, [[4, 5]] * 13, [[0, 5]] * 12 + [[2, 3]], [[5]] * 17],
    ids=["two take all", "first two", "last two", "one row elsewhere", "one takes all"],
)
@pytest.mark.parametrize("tile", [None, 1, 4, 8, 32])
def test_experts_that_stay_empty_or_take_all_rows(chosen, tile):
    crowd = Crowd(len(chosen), chosen)
    expected = crowd.slowly()
    assert relative_error(crowd.run("tiles", tile), expected) < 1e-6
    if tile is None:
        assert relative_error(crowd.run("dense"), expected) < 1e-6


def test_tiles_and_dense_agree_on_quantised_experts_and_activations():
    crowd = Crowd(11, random_choices(11, K=3))
    stored = Experts(*(layouts.quantize(w, "fp4_1x32") for w in crowd.experts))
    values = Experts(*(w.dequantize(jnp.float32) for w in stored))
    x = fp8_blocks(crowd.x)
    results = [
        run_experts(
            x, crowd.chosen, crowd.weight, crowd.valid, experts, limit=0.8, quantize=True,
            implementation=implementation,
        )
        for experts in (stored, values)
        for implementation in ("tiles", "dense")
    ]  # fmt: skip
    np.testing.assert_array_equal(results[0], results[2])
    for other in results[1:]:
        assert relative_error(other, results[0]) < 1e-6
    assert relative_error(results[0], crowd.slowly()) > 1e-2  # the formats do something


@pytest.mark.parametrize("implementation", ["tiles", "dense"])
def test_rows_that_are_not_there_change_no_other_row(implementation):
    rows = 12
    crowd, absent = Crowd(rows, random_choices(rows)), np.array([0, 3, 4, 11])
    crowd.valid = crowd.valid.at[absent].set(False)
    clean = crowd.run(implementation, tile=4)
    for number, index in ((np.nan, 10**9), (np.inf, -(10**9)), (-1e30, 6)):
        poisoned = crowd.run(
            implementation,
            tile=4,
            x=crowd.x.at[absent].set(number),
            weight=crowd.weight.at[absent].set(number),
            chosen=crowd.chosen.at[absent].set(index),
        )
        there = np.setdiff1d(np.arange(rows), absent)
        np.testing.assert_array_equal(poisoned[there], clean[there])
        if implementation == "tiles":
            np.testing.assert_array_equal(poisoned[absent], 0)
    assert relative_error(clean[there], crowd.slowly()[there]) < 1e-6


def test_experts_have_the_gradient_of_the_dense_form_for_rows_that_are_there():
    rows = 9
    crowd, absent = Crowd(rows, random_choices(rows)), np.array([2, 8])
    crowd.valid = crowd.valid.at[absent].set(False)
    pull = jnp.asarray(np.random.default_rng(5).standard_normal(crowd.x.shape), jnp.float32)

    def loss(arrays, implementation, pull):
        x, weight, experts = arrays
        return jnp.sum(crowd.run(implementation, 4, x=x, weight=weight, experts=experts) * pull)

    arrays = (crowd.x, crowd.weight, crowd.experts)
    by_tiles = jax.grad(loss)(arrays, "tiles", pull)
    by_all = jax.grad(loss)(arrays, "dense", pull.at[absent].set(0))
    for value, expected in zip(*map(jax.tree.leaves, (by_tiles, by_all)), strict=True):
        assert relative_error(value, expected) < 1e-6
    np.testing.assert_array_equal(by_tiles[0][absent], 0)


# --- Index scores and selection -------------------------------------------------------------------


run_scores = jax.jit(index_scores, static_argnames=("group", "rounded"))


def index_inputs(dtype, group=4, groups=5, slots=3, J=3, C=32, pages=4, per_page=8):
    """Rows of `groups` groups; pages of the slots are interleaved at random."""
    rng = np.random.default_rng(3)
    table = rng.permutation(slots * pages).reshape(slots, pages).astype(np.int32)
    T = group * groups
    slot = np.repeat([0, 2, -1, 2, 1], group).astype(np.int32)
    slot[-1] = -1  # the last group is not full
    return {
        "queries": mxfp4_blocks(jnp.asarray(rng.standard_normal((T, J, C)), dtype)),
        "gains": jnp.asarray(rng.standard_normal((T, J)), dtype),
        "keys": mxfp4_blocks(jnp.asarray(rng.standard_normal((slots * pages, per_page, C)), dtype)),
        "pages": table,
        "slot": slot,
        "visible": rng.integers(0, pages * per_page + 1, T).astype(np.int32),
    }


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_index_scores_equal_the_obvious_sum(dtype, rounded, group):
    def bf16(x):
        return np.asarray(x, np.float32).astype(jnp.bfloat16).astype(float) if rounded else x

    inputs = index_inputs(dtype)
    scores = np.asarray(run_scores(**inputs, group=group, rounded=rounded))
    arrays = {k: np.asarray(v).astype(float) for k, v in inputs.items() if k[0] in "qgk"}
    assert scores.shape == (20, 32) and scores.dtype == np.float32
    for t in np.flatnonzero(inputs["slot"] >= 0):
        keys = arrays["keys"][inputs["pages"][inputs["slot"][t]]].reshape(32, -1)
        dots = bf16(np.maximum(bf16(arrays["queries"][t] @ keys.T), 0))
        total = bf16(bf16(dots * arrays["gains"][t][:, None]).sum(0))
        seen = inputs["visible"][t]
        # Products of e2m1 values are exact in float32; only sums of gained votes may differ.
        np.testing.assert_allclose(scores[t, :seen], total[:seen], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(scores[t, seen:], -np.inf)


@pytest.mark.parametrize("rounded", [False, True])
def test_index_scores_by_groups_equal_row_by_row(rounded):
    inputs = index_inputs(jnp.bfloat16)
    there = inputs["slot"] >= 0
    rows, groups = (run_scores(**inputs, group=g, rounded=rounded) for g in (1, 4))
    np.testing.assert_allclose(groups[there], rows[there], rtol=1e-6, atol=1e-6)
    assert np.isfinite(rows[there]).any()


@pytest.mark.parametrize("group", [1, 4])
def test_index_scores_of_rows_that_are_not_there_change_no_other_row(group):
    inputs = index_inputs(jnp.float32)
    absent = np.flatnonzero(inputs["slot"] < 0)
    there = np.flatnonzero(inputs["slot"] >= 0)
    clean = run_scores(**inputs, group=group, rounded=False)
    poison = {
        "queries": inputs["queries"].at[absent].set(np.nan),
        "gains": inputs["gains"].at[absent].set(np.nan),
        "visible": np.where(inputs["slot"] < 0, 10**3, inputs["visible"]).astype(np.int32),
    }
    poisoned = run_scores(**inputs | poison, group=group, rounded=False)
    np.testing.assert_array_equal(poisoned[there], clean[there])


@pytest.mark.golden
@pytest.mark.parametrize("name", ["b1", "b4", "b8", "b8_all"])
def test_candidate_blocks(name):
    notes, g = component_notes("candidates")[name], part(component("candidates"), name + ".")
    size, N = notes["block_size"], g["scores"].shape[-1]
    visible = rows_of(g["visible_lengths"])
    shown = np.arange(N) < np.asarray(visible)[:, None]
    scores = jnp.where(shown, rows_of(g["scores"]), -jnp.inf)
    best, kept = candidate_blocks(scores, visible, block=size, keep=notes["topk_blocks"])
    value = np.repeat(kept, size, axis=1)[:, :N] & shown
    np.testing.assert_array_equal(value, rows_of(g["candidates"]))
    newest = (np.asarray(visible) - 1) // size
    seen = np.asarray(visible) > 0
    assert np.all(np.asarray(best)[seen, newest[seen]] == np.inf)


def test_candidate_blocks_break_ties_towards_the_lower_block():
    scores = jnp.asarray([[0.0] * 12, [3, 1, 1, 1, 3, 1, 0, 0, 3, 1, -np.inf, -np.inf]])
    _, kept = candidate_blocks(scores, jnp.array([12, 10]), block=2, keep=3)
    listed = [list(np.flatnonzero(row)) for row in kept]
    assert listed == [[0, 1, 5], [0, 2, 4]]  # the newest block is forced, the lowest win the rest


@pytest.mark.parametrize("keep, width", [(1, 1), (3, 3), (3, 5), (9, 7), (9, 9)])
def test_top_entries_are_the_highest_and_the_lower_index_wins(keep, width):
    rng = np.random.default_rng(keep)
    scores = rng.integers(0, 3, (40, 7)).astype(np.float32)  # ties everywhere
    scores[rng.random(scores.shape) < 0.3] = -np.inf
    scores[0] = -np.inf
    chosen = top_entries(scores, keep=keep, width=width)
    assert chosen.shape == (40, width) and chosen.dtype == jnp.int32
    for row, value in zip(scores, np.asarray(chosen), strict=True):
        order = sorted(np.flatnonzero(row > -np.inf), key=lambda e: (-row[e], e))[:keep]
        assert list(value) == sorted(order) + [-1] * (width - len(order))


# --- Attention ------------------------------------------------------------------------------------


class Gathering:
    """Random inputs of `sparse_attention` and the obvious loop over rows in float64."""

    def __init__(self, rows=11, slots=3, H=3, E=16, width=5, ring=9, per_page=4, pages=3, K=4):
        rng = np.random.default_rng(rows)
        self.slot = rng.integers(0, slots, rows).astype(np.int32)
        self.slot[-2] = -1
        self.position = rng.integers(0, 12, rows).astype(np.int32)
        self.position[:3] = 0, 1, width - 1
        N = per_page * pages
        chosen = [sorted(rng.permutation(N)[: rng.integers(0, K + 1)]) for _ in range(rows)]
        self.selected = np.array([[*c, *[-1] * (K - len(c))] for c in chosen], np.int32)
        self.pages = rng.permutation(slots * pages).reshape(slots, pages).astype(np.int32)
        self.queries = rng.standard_normal((rows, H, E)).astype(np.float32)
        self.window = rng.standard_normal((slots, ring, E)).astype(np.float32)
        self.entries = rng.standard_normal((slots * pages, per_page, E)).astype(np.float32)
        self.sink = np.array([0.5, -1, 3], np.float32)
        self.width = width

    def run(self, sparse=True, with_weights=False, **changed):
        names = ["queries", "window", "sink", "slot", "position"]
        names += ["entries", "pages", "selected"] if sparse else []
        arrays = {k: jnp.asarray(getattr(self, k)) for k in names}
        options = {"width": self.width, "scale": 0.3, "rounded": False} | changed
        return sparse_attention(**arrays | options, with_weights=with_weights)

    def slowly(self, t, sparse=True, rounded=False):
        """Row t: result [H, E] and weights [H, W + K]."""
        slot, ring = self.slot[t], self.window.shape[1]
        past = self.position[t] - np.arange(self.width)[::-1]
        kv, valid = self.window[slot, past % ring], past >= 0
        if sparse:
            pool = self.entries[self.pages[slot]].reshape(-1, kv.shape[1])
            kv = np.concatenate([kv, pool[self.selected[t]]])
            valid = np.concatenate([valid, self.selected[t] >= 0])
        logits = self.queries[t].astype(float) @ kv.T.astype(float) * 0.3
        logits = np.where(valid, logits, -np.inf)
        top = logits.max(1, keepdims=True)
        e = np.exp(logits - top)
        total = e.sum(1, keepdims=True) + np.exp(self.sink[:, None] - top)
        used = e.astype(np.float32).astype(jnp.bfloat16).astype(float) if rounded else e
        return used @ kv / total, e / total


@pytest.mark.parametrize("sparse", [True, False])
def test_attention_equals_the_obvious_sum(sparse):
    g = Gathering()
    value, weights = g.run(sparse, with_weights=True)
    for t in np.flatnonzero(g.slot >= 0):
        expected, shares = g.slowly(t, sparse)
        assert relative_error(value[t], expected) < 1e-6
        np.testing.assert_allclose(weights[t], shares, rtol=1e-5, atol=1e-7)
    assert g.run(sparse)[1] is None


def test_attention_rounds_its_weights_before_the_product_and_not_before_the_sum():
    """Spec 3.9: the denominator sums what the value product rounds."""
    g = Gathering()
    g.window, g.entries = (a.astype(jnp.bfloat16).astype(np.float32) for a in (g.window, g.entries))
    value, exact = g.run(rounded=True)[0], g.run()[0]
    there = np.flatnonzero(g.slot >= 0)
    expected = np.stack([g.slowly(t, rounded=True)[0] for t in there])
    assert relative_error(value[there], expected) < 2e-4  # a weight may sit on a rounding boundary
    assert relative_error(exact[there], expected) > 5e-4


def test_attention_in_pieces_equals_one_call(monkeypatch):
    g = Gathering(rows=29)

    def loss(window, entries):
        value, weights = g.run(with_weights=True, window=window, entries=entries)
        return jnp.sum(value[there] * jnp.cos(jnp.arange(16))), (value, weights)

    there = np.flatnonzero(g.slot >= 0)
    arrays = g.window, g.entries
    run = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (_, whole), slope = run(*arrays)
    vector_bytes = 9 * 16 * 4  # (width + K) vectors of E floats
    monkeypatch.setattr(attention_reference, "_PIECE_BYTES", {"cpu": 3 * vector_bytes})
    monkeypatch.setattr(attention_reference, "_PIECE_BYTES_ACCELERATOR", 3 * vector_bytes)
    assert "scan" in str(jax.make_jaxpr(run)(*arrays)), "the pieces were not cut"
    (_, pieces), slope_of_pieces = run(*arrays)
    for value, expected in zip(pieces, whole, strict=True):
        np.testing.assert_allclose(value[there], expected[there], rtol=1e-5, atol=1e-6)
    for value, expected in zip(slope_of_pieces, slope, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)


def test_attention_of_rows_that_are_not_there_changes_no_other_row():
    g = Gathering()
    there, absent = np.flatnonzero(g.slot >= 0), np.flatnonzero(g.slot < 0)
    clean = g.run()[0]
    g.queries[absent], g.position[absent], g.selected[absent] = np.nan, 10**9, 10**9
    np.testing.assert_array_equal(g.run()[0][there], clean[there])
