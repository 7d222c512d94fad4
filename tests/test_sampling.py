"""Sampling equals sorting, is distributed as it says, and is the same in every batch (spec 9.6)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from deepinfer_jax.decoding import sampling as module
from deepinfer_jax.decoding.sampling import (
    Purpose,
    Sampling,
    SamplingParams,
    choose,
    noise,
    process,
)

process_jit = jax.jit(process)
choose_jit = jax.jit(choose)
noise_jit = jax.jit(noise, static_argnums=(2, 3))

# From a threefry in Python integers and math.log1p, seeds (123, 2**32 - 1), positions (7, 10**6).
PINNED = [[0.47155, 1.802044, 0.194927, 0.884131], [-0.57129, 0.994584, 1.560161, -0.612081]]


def random_logits(rng, T, V):
    """Rows of many kinds: smooth, peaked, full of ties, with forbidden tokens, with huge values."""
    logits = rng.normal(size=(T, V)) * rng.choice([0.1, 1.0, 4.0, 20.0], (T, 1))
    logits = np.where(rng.random((T, 1)) < 0.5, np.round(logits * 2) / 2, logits)
    forbidden = rng.random((T, V)) < rng.choice([0.0, 0.3], (T, 1))
    forbidden[:, 0] = False
    logits = np.where(forbidden, -np.inf, logits)
    logits = np.where(rng.random((T, 1)) < 0.05, logits * 1e30, logits)
    return np.where(rng.random((T, V)) < 0.02, -0.0, logits).astype(np.float32)


def random_sampling(rng, T):
    """Every switch on and off, row by row."""
    return Sampling(
        temperature=rng.choice([0.0, 1e-3, 0.3, 1.0, 2.5], T).astype(np.float32),
        top_p=np.where(rng.random(T) < 0.3, 1.0, rng.uniform(1e-4, 1, T)).astype(np.float32),
        top_k=rng.choice([-1, 0, 1, 2, 3, 7, 20, 10**6], T).astype(np.int32),
    )


def survivors_by_sorting(logits, mass, mass_limit, top_k):
    """The definition, token by token in order of rank; also the mass before each token."""
    ranking = sorted(range(len(logits)), key=lambda v: (-logits[v], v))
    kept, mass_before = np.zeros(len(logits), bool), np.zeros(len(logits), mass.dtype)
    total = mass.dtype.type(0)
    for rank, v in enumerate(ranking):
        mass_before[v] = total
        kept[v] = total <= mass_limit and rank < top_k and logits[v] > -np.inf
        total += mass[v]
    return kept, mass_before


def limits(s, row):
    """The (top_p, top_k) that one row means once switches and greed are written as limits."""
    if s.temperature[row] == 0:
        return np.inf, 1
    top_p = np.inf if s.top_p[row] == 1 else float(s.top_p[row])
    return top_p, s.top_k[row] if s.top_k[row] > 0 else np.inf


@pytest.mark.parametrize("V", [5, 64, 257])
def test_survivors_equal_those_of_a_sort_exactly(V):
    rng = np.random.default_rng(V)
    T = 2000
    logits, s = random_logits(rng, T, V), random_sampling(rng, T)
    kept = np.asarray(process_jit(logits, s)) > -np.inf
    temperature = np.where(s.temperature == 0, 1, s.temperature)[:, None]
    weights = jnp.exp((logits - logits.max(-1, keepdims=True)) / temperature)
    mass = np.rint(np.asarray(weights / module._total(weights)) * np.float32(2**31))
    mass = mass.astype(np.int64)
    for row in range(T):
        top_p, top_k = limits(s, row)
        mass_limit = np.rint(np.float32(top_p) * np.float32(2**31))
        expected, _ = survivors_by_sorting(logits[row], mass[row], mass_limit, top_k)
        assert (kept[row] == expected).all(), row
    assert kept.sum(-1).min() == 1 and kept.sum(-1).max() > V // 2


def test_distribution_equals_float64_sort_and_softmax():
    rng = np.random.default_rng(1)
    T, V = 2000, 100
    logits, s = random_logits(rng, T, V), random_sampling(rng, T)
    got = np.asarray(process_jit(logits, s))
    disagreements = 0
    for row in range(T):
        temperature = float(s.temperature[row]) or 1.0
        wide = logits[row].astype(np.float64)
        weights = np.exp((wide - wide.max()) / temperature)
        top_p, top_k = limits(s, row)
        share = weights / weights.sum()
        kept, before = survivors_by_sorting(logits[row], share, top_p, top_k)
        differ = kept != (got[row] > -np.inf)
        # Only rounding at the boundary itself may decide otherwise.
        assert (np.abs(before[differ] - top_p) < 1e-6).all(), row
        disagreements += differ.any()
        if not differ.any():
            expected = share[kept] / share[kept].sum()
            np.testing.assert_allclose(np.exp(got[row][kept]), expected, rtol=2e-5, atol=1e-9)
    assert disagreements <= 2


def test_ties_at_the_boundary_keep_lower_ids():
    level = jnp.zeros((1, 8))
    by_p = process_jit(level, Sampling(top_p=0.5))  # the mass before ids 0 to 4 is 0, 1/8, .., 4/8
    assert np.isfinite(by_p[0]).tolist() == [True] * 5 + [False] * 3
    by_k = process_jit(jnp.array([[1.0, 5.0, 3.0, 3.0, 3.0, 0.0]]), Sampling(top_k=3))
    assert np.isfinite(by_k[0]).tolist() == [False, True, True, True, False, False]
    signed_zero = process_jit(jnp.array([[-1.0, -0.0, 0.0]]), Sampling(top_k=1))
    assert np.isfinite(signed_zero[0]).tolist() == [False, True, False]


def test_first_token_stays_however_small_top_p():
    log_probs = process_jit(jnp.array([[0.0, 3.0, 1.0]]), Sampling(top_p=1e-30))
    assert log_probs.tolist() == [[-math.inf, 0.0, -math.inf]]


def test_total_is_the_exact_sum_in_any_order():
    rng = np.random.default_rng(2)
    x = np.exp(-rng.exponential(8, (4, 129280))).astype(np.float32)
    x[:, 7] = 1
    total = np.asarray(module._total(x))
    exact = [math.fsum(row.astype(np.float64)) for row in x]
    np.testing.assert_allclose(total[:, 0], exact, rtol=1.2e-7)
    assert (total == np.asarray(module._total(x[:, ::-1]))).all()
    assert (total == np.asarray(module._total(rng.permuted(x, axis=1)))).all()


def test_top_k_one_and_low_temperatures_equal_greedy():
    rng = np.random.default_rng(3)
    logits = random_logits(rng, 500, 33)
    seeds, positions = np.arange(500, dtype=np.uint32), np.zeros(500, np.int32)
    greedy, log_probs = choose_jit(logits, Sampling(temperature=0.0), seeds, positions)
    assert (greedy == logits.argmax(-1)).all()
    one, zero = choose_jit(logits, Sampling(top_k=1), seeds, positions)
    assert (greedy == one).all() and (np.asarray(zero) == 0).all()
    nearly, _ = choose_jit(logits, Sampling(temperature=9e-6), seeds, positions)
    assert (greedy == nearly).all()
    wide = logits.astype(np.float64)
    exact = -np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1))
    np.testing.assert_allclose(log_probs, exact, rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize("varying", ["positions", "seeds", "sample"])
def test_draws_follow_the_processed_distribution(varying):
    T, V = 60_000, 24
    logits = np.random.default_rng(4).normal(size=V).astype(np.float32) * 1.5
    s = Sampling(temperature=0.8, top_p=0.95, top_k=16)
    index = {name: np.full(T, 5, np.int32) for name in ("seeds", "positions", "sample")}
    index[varying] = np.arange(T, dtype=np.int32)
    tokens, log_probs = choose_jit(
        np.tile(logits, (T, 1)),
        s,
        index["seeds"].astype(np.uint32),
        index["positions"],
        index["sample"],
    )
    processed = np.asarray(process(logits[None], s))[0]
    assert (np.asarray(log_probs) == processed[tokens]).all()
    p = np.exp(processed.astype(np.float64))
    counts = np.bincount(tokens, minlength=V)
    assert counts[p == 0].sum() == 0 and 5 < (p > 0).sum() < 17
    expected = p[p > 0] / p[p > 0].sum() * T
    assert stats.chisquare(counts[p > 0], expected).pvalue > 0.001


@pytest.mark.parametrize("step", ["positions", "seeds"])
def test_neighbouring_draws_are_independent(step):
    T, V = 40_000, 6
    base = np.arange(T, dtype=np.int32) * 2
    zero = np.zeros(T, np.int32)
    draws = []
    for index in (base, base + 1):
        seeds, positions = (zero, index) if step == "positions" else (index, zero)
        draws.append(
            choose_jit(
                np.zeros((T, V), np.float32), Sampling(), seeds.astype(np.uint32), positions
            )[0]
        )
    table = np.zeros((V, V))
    np.add.at(table, (np.asarray(draws[0]), np.asarray(draws[1])), 1)
    assert stats.chi2_contingency(table).pvalue > 0.001
    assert abs((np.asarray(draws[0]) == np.asarray(draws[1])).mean() - 1 / V) < 0.01


def test_a_row_is_the_same_alone_and_in_any_batch():
    rng = np.random.default_rng(5)
    T, V = 13, 1003
    logits, s = random_logits(rng, T, V), random_sampling(rng, T)
    seeds = rng.integers(0, 2**32, T, dtype=np.uint32)
    positions = rng.integers(0, 2**20, T).astype(np.int32)
    processed = np.asarray(process_jit(logits, s))
    tokens, log_probs = map(np.asarray, choose_jit(logits, s, seeds, positions))
    assert len(set(tokens.tolist())) > 8
    for rows in ([3], [5, 4, 3], rng.permutation(T)[:8], rng.permutation(T)):
        part = jax.tree.map(lambda x, rows=rows: x[rows], s)
        assert (np.asarray(process_jit(logits[rows], part)) == processed[rows]).all()
        got = choose_jit(logits[rows], part, seeds[rows], positions[rows])
        assert (np.asarray(got[0]) == tokens[rows]).all()
        assert (np.asarray(got[1]) == log_probs[rows]).all()


def test_a_row_that_cannot_be_sampled_gives_minus_one():
    logits = np.random.default_rng(6).normal(size=(5, 50)).astype(np.float32)
    logits[0, 30] = np.nan
    logits[1, 30] = np.inf
    logits[2] = -np.inf
    logits[3] = np.nan
    seeds, positions = np.arange(5, dtype=np.uint32), np.arange(5, dtype=np.int32)
    for s in (Sampling(temperature=0.0), Sampling(top_p=0.9), Sampling(top_k=4), Sampling()):
        tokens, log_probs = map(np.asarray, choose_jit(logits, s, seeds, positions))
        assert tokens[:4].tolist() == [-1] * 4 and np.isnan(log_probs[:4]).all()
        alone = choose_jit(logits[4:], s, seeds[4:], positions[4:])
        assert tokens[4] == alone[0][0] >= 0 and log_probs[4] == alone[1][0]
        assert np.isnan(process_jit(logits, s)[:4]).all()


@pytest.mark.golden
@pytest.mark.parametrize(
    "key, counter, block",
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_published_vectors(key, counter, block):
    words = (jnp.array(word, jnp.uint32) for word in (*key, *counter))
    assert tuple(int(word) for word in module._threefry(*words)) == block


@pytest.mark.golden
def test_noise_never_changes_between_versions_and_settings():
    seeds, positions = np.array([123, 2**32 - 1], np.uint32), np.array([7, 1_000_000], np.int32)
    values = np.asarray(noise(seeds, positions, 4, Purpose.TARGET, 3))
    np.testing.assert_allclose(values, PINNED, rtol=1e-5)
    with jax.threefry_partitionable(False), jax.default_prng_impl("rbg"):
        assert (np.asarray(noise(seeds, positions, 4, Purpose.TARGET, 3)) == values).all()
    wider = np.asarray(noise_jit(seeds, positions, 1000, Purpose.TARGET, 3))
    np.testing.assert_allclose(wider[:, :4], values, rtol=1e-6)


def test_noise_is_gumbel_and_has_a_fine_tail():
    values = np.asarray(noise_jit(np.array([9, 10], np.uint32), np.zeros(2, np.int32), 2**21, 0))
    values = values.ravel()
    assert np.isfinite(values).all()
    assert stats.kstest(values[:300_000], stats.gumbel_r.cdf).pvalue > 0.001
    # A 23-bit uniform leaves about 200 ties among the thousand largest of four million.
    largest = np.sort(values)[-1000:]
    assert len(np.unique(largest)) > 990


def test_gradient_is_that_of_a_softmax_over_the_survivors():
    logits = jnp.array([[0.3, -1.0, 2.0, 0.9, 0.1]])
    s = Sampling(temperature=0.7, top_k=3)
    got = jax.grad(lambda z: process(z, s)[0, 3])(logits)[0]
    p = np.exp(np.asarray(process(logits, s), np.float64))[0]
    expected = (np.eye(5)[3] - p) / 0.7
    np.testing.assert_allclose(got, expected, atol=1e-6)
    assert got[1] == 0 and got[4] == 0


def test_full_vocabulary_without_sorting_it():
    T, V = 2, 129280
    rng = np.random.default_rng(7)
    logits = np.round(rng.normal(size=(T, V)) * 64).astype(np.float32) / 32
    seeds, positions = np.arange(T, dtype=np.uint32), np.arange(T, dtype=np.int32)
    lowered = choose_jit.lower(logits, Sampling().broadcast(T), seeds, positions)
    assert "stablehlo.sort" not in lowered.as_text() and "top_k" not in lowered.as_text()
    s = Sampling(temperature=[0.9, 1.0], top_p=[0.8, 1.0], top_k=[-1, 5000]).broadcast(T)
    kept = np.asarray(process_jit(logits, s)) > -np.inf
    order = np.argsort(-logits, axis=-1, kind="stable")
    assert kept[1, order[1, :5000]].all() and kept[1].sum() == 5000
    count = kept[0].sum()
    assert kept[0, order[0, :count]].all()
    p = np.exp(logits[0, order[0]].astype(np.float64) / 0.9)
    before = (np.cumsum(p) - p) / p.sum()
    assert abs(count - (before <= np.float32(0.8)).sum()) <= 1
    tokens, _ = choose_jit(logits, s, seeds, positions)
    assert kept[np.arange(T), tokens].all()


def test_values_are_data_and_never_recompile(compile_counter):
    fresh = jax.jit(lambda *a: choose(*a))
    rng = np.random.default_rng(8)
    logits, s = random_logits(rng, 4, 40), random_sampling(rng, 4)
    seeds, positions = np.arange(4, dtype=np.uint32), np.arange(4, dtype=np.int32)
    before = compile_counter.count
    fresh(logits, s, seeds, positions)
    assert compile_counter.count == before + 1
    for _ in range(3):
        fresh(random_logits(rng, 4, 40), random_sampling(rng, 4), seeds + 1, positions + 1)
    assert compile_counter.count == before + 1


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("top_p", 1.2, r"top_p must be in \(0, 1\], got 1.2"),
        ("top_p", 0.0, r"top_p must be in \(0, 1\], got 0.0"),
        ("top_p", [0.5, math.nan], r"top_p must be in \(0, 1\], got nan"),
        (
            "temperature",
            -0.1,
            "temperature must be a finite float32 number of at least 0, got -0.1",
        ),
        ("temperature", math.nan, "temperature must be .* got nan"),
        ("temperature", 1e39, "temperature must be .* got 1e[+]39"),
        ("top_k", 2.5, "top_k must be an int32 number, got 2.5"),
        ("top_k", 2**31, "top_k must be an int32 number, got 2147483648"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**{field: value}).validate()
    if not isinstance(value, list):
        with pytest.raises(ValueError, match=message):
            SamplingParams(**{field: value})


def test_traced_values_pass_validation_and_shapes_are_checked():
    assert jax.jit(lambda p: Sampling(top_p=p).validate().top_p)(1.2) == np.float32(1.2)
    with pytest.raises(
        ValueError, match=r"top_k must be a scalar or have shape \(2,\), got \(3,\)"
    ):
        Sampling(top_k=np.array([1, 2, 3])).broadcast(2)
    with pytest.raises(ValueError, match=r"logits must be float32 \[T, V\], got bfloat16 \(2, 3\)"):
        process(jnp.zeros((2, 3), jnp.bfloat16), Sampling())
    spread = Sampling(temperature=0.7).broadcast(3)
    assert [(x.shape, x.dtype.name) for x in jax.tree.leaves(spread)] == [
        ((3,), "float32"),
        ((3,), "float32"),
        ((3,), "int32"),
    ]


def test_params_become_a_row_of_sampling():
    params = SamplingParams(temperature=0.5, top_p=0.9, top_k=7, stop_token_ids=[3, 4], seed=1)
    assert params.row() == Sampling(0.5, 0.9, 7)
    assert params.stop_token_ids == (3, 4) and hash(params)
    for wrong, message in (
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"seed": -1}, r"seed must be in \[0, 2\*\*32\), got -1"),
        ({"stop_token_ids": (-2,)}, r"stop_token_ids must not be negative, got \(-2,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            SamplingParams(**wrong)
