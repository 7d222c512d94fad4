"""Sampling equals sorting, is distributed as it says, and is the same in every batch (spec 9.6)."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from deepinfer_jax.decoding import distribution
from deepinfer_jax.decoding.distribution import GREEDY_BELOW, draw, log_softmax, process, top
from deepinfer_jax.decoding.noise import Purpose, _threefry, noise, uniform
from deepinfer_jax.decoding.sampling import Sampling, SamplingParams


def choose(logits, s, seeds, positions):
    """What a round does: tokens, and log-probabilities (greedy ones of the untouched softmax)."""
    greedy = s.broadcast(len(logits)).temperature < GREEDY_BELOW
    processed = process(logits, s)
    tokens = draw(processed, greedy, seeds, positions)
    reported = jnp.where(greedy[:, None], log_softmax(logits), processed)
    return tokens, jnp.take_along_axis(reported, jnp.maximum(tokens, 0)[:, None], axis=-1)[:, 0]


softmax_jit = jax.jit(distribution._softmax)
process_jit = jax.jit(process)
choose_jit = jax.jit(choose)
draw_jit = jax.jit(draw, static_argnums=5)
log_softmax_jit = jax.jit(log_softmax)
top_jit = jax.jit(top, static_argnums=1)
noise_jit = jax.jit(noise, static_argnums=(2, 3))
uniform_jit = jax.jit(uniform, static_argnums=2)

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
    sampling = Sampling(
        temperature=rng.choice([0.0, 1e-3, 0.3, 1.0, 2.5], T).astype(np.float32),
        top_p=np.where(rng.random(T) < 0.3, 1.0, rng.uniform(1e-4, 1, T)).astype(np.float32),
        top_k=rng.choice([-1, 0, 1, 2, 3, 7, 20, 10**6], T).astype(np.int32),
        min_p=np.where(rng.random(T) < 0.5, 0.0, rng.uniform(0, 1, T) ** 4).astype(np.float32),
    )
    return jax.tree.map(np.asarray, sampling.broadcast(T))


def survivors_by_sorting(logits, mass, scaled, limits):
    """The definition, token by token in order of rank; also the mass before each token."""
    mass_limit, count_limit, floor = limits
    ranking = sorted(range(len(logits)), key=lambda v: (-logits[v], v))
    kept, mass_before = np.zeros(len(logits), bool), np.zeros(len(logits), mass.dtype)
    total = mass.dtype.type(0)
    for rank, v in enumerate(ranking):
        mass_before[v] = total
        within = total <= mass_limit and rank < count_limit and scaled[v] >= floor
        kept[v] = within and logits[v] > -np.inf
        total += mass[v]
    return kept, mass_before


def limits_of(s, row):
    """Most mass before a token, most tokens, least scaled logit, once switches are limits."""
    if s.temperature[row] == 0:
        return np.inf, 1, -np.inf
    top_p = np.inf if s.top_p[row] == 1 else float(s.top_p[row])
    floor = np.log(np.float64(s.min_p[row])) if s.min_p[row] > 0 else -np.inf
    return top_p, s.top_k[row] if s.top_k[row] > 0 else np.inf, floor


@pytest.mark.parametrize("V", [5, 300])
def test_survivors_equal_those_of_a_sort_exactly(V):
    rng = np.random.default_rng(V)
    T = 1000
    logits, s = random_logits(rng, T, V), random_sampling(rng, T)
    kept = np.asarray(process_jit(logits, s)) > -np.inf
    temperature = np.where(s.temperature == 0, 1, s.temperature)[:, None]
    scaled, weights, total, _ = map(np.asarray, softmax_jit(logits, temperature))
    mass = np.rint(weights / total * np.float32(2**31)).astype(np.int64)
    floors = np.asarray(jnp.log(s.min_p))
    for row in range(T):
        top_p, top_k, floor = limits_of(s, row)
        mass_limit = np.rint(np.float32(top_p) * np.float32(2**31))
        floor = floors[row] if floor > -np.inf else floor
        expected, _ = survivors_by_sorting(
            logits[row], mass[row], scaled[row], (mass_limit, top_k, floor)
        )
        assert (kept[row] == expected).all(), row
    assert kept.sum(-1).min() == 1 and kept.sum(-1).max() > V // 2


def test_distribution_equals_float64_sort_and_softmax():
    rng = np.random.default_rng(1)
    T, V = 1000, 300
    logits, s = random_logits(rng, T, V), random_sampling(rng, T)
    got = np.asarray(process_jit(logits, s))
    disagreements, decided = 0, np.zeros(3, int)
    for row in range(T):
        temperature = float(s.temperature[row]) or 1.0
        wide = logits[row].astype(np.float64)
        scaled = (wide - wide.max()) / temperature
        share = np.exp(scaled) / np.exp(scaled).sum()
        limits = limits_of(s, row)
        kept, before = survivors_by_sorting(logits[row], share, scaled, limits)
        differ = kept != (got[row] > -np.inf)
        # Only rounding at the boundary itself may decide otherwise.
        with np.errstate(invalid="ignore"):
            at_floor = np.abs(scaled - limits[2]) < 1e-5
        at_boundary = (np.abs(before - limits[0]) < 1e-6) | at_floor
        assert at_boundary[differ].all(), row
        disagreements += differ.any()
        if not differ.any():
            expected = share[kept] / share[kept].sum()
            np.testing.assert_allclose(np.exp(got[row][kept]), expected, rtol=2e-5, atol=1e-9)
        for cut, off in enumerate((np.inf, np.inf, -np.inf)):
            without = tuple(off if i == cut else limit for i, limit in enumerate(limits))
            loose, _ = survivors_by_sorting(logits[row], share, scaled, without)
            decided[cut] += (loose != kept).any()
    assert disagreements <= 2
    assert decided.min() > 50  # each of the cuts is the shortest in many rows


def test_min_p_keeps_the_best_and_its_equals():
    logits = jnp.array([[0.0, 2.0, 2.0, 2.0 + math.log(0.5), 2.0 + math.log(0.49)]])
    for min_p, kept in ((1.0, [0, 1, 1, 0, 0]), (0.495, [0, 1, 1, 1, 0]), (1e-30, [1, 1, 1, 1, 1])):
        log_probs = process_jit(logits, Sampling(min_p=min_p))
        assert np.isfinite(log_probs[0]).astype(int).tolist() == kept
        assert abs(np.exp(log_probs).sum() - 1) < 1e-6
    # The ratio is that after temperature: 0.5 is 0.25 at temperature 0.5.
    cold = process_jit(logits, Sampling(temperature=0.5, min_p=0.3))
    assert np.isfinite(cold[0]).tolist() == [False, True, True, False, False]


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
    total = np.asarray(distribution._total(x))
    exact = [math.fsum(row.astype(np.float64)) for row in x]
    np.testing.assert_allclose(total[:, 0], exact, rtol=1.2e-7)
    assert (total == np.asarray(distribution._total(x[:, ::-1]))).all()
    assert (total == np.asarray(distribution._total(rng.permuted(x, axis=1)))).all()


def test_top_k_one_and_low_temperatures_equal_greedy():
    rng = np.random.default_rng(3)
    logits = random_logits(rng, 500, 33)
    seeds, positions = np.arange(500, dtype=np.uint32), np.zeros(500, np.int32)
    greedy, log_probs = choose_jit(logits, Sampling(temperature=0.0), seeds, positions)
    assert (greedy == logits.argmax(-1)).all()
    best, _ = choose_jit(logits, Sampling(min_p=1.0), seeds, positions)
    assert (np.take_along_axis(logits, best[:, None], 1)[:, 0] == logits.max(-1)).all()
    one, zero = choose_jit(logits, Sampling(top_k=1), seeds, positions)
    assert (greedy == one).all() and (np.asarray(zero) == 0).all()
    nearly, _ = choose_jit(logits, Sampling(temperature=9e-6), seeds, positions)
    assert (greedy == nearly).all()
    wide = logits.astype(np.float64)
    exact = -np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1))
    np.testing.assert_allclose(log_probs, exact, rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize(
    "varying, purpose",
    [
        ("positions", Purpose.TARGET),
        ("seeds", Purpose.DRAFT),
        ("sample", Purpose.RESIDUAL),
    ],
)
def test_draws_follow_the_processed_distribution(varying, purpose):
    T, V = 60_000, 24
    logits = np.random.default_rng(4).normal(size=V).astype(np.float32) * 1.5
    s = Sampling(temperature=0.8, top_p=0.95, top_k=16)
    index = {name: np.full(T, 5, np.int32) for name in ("seeds", "positions", "sample")}
    index[varying] = np.arange(T, dtype=np.int32)
    processed = np.asarray(process_jit(logits[None], s))[0]
    tokens = draw_jit(
        np.tile(processed, (T, 1)),
        np.zeros(T, bool),
        index["seeds"].astype(np.uint32),
        index["positions"],
        index["sample"],
        purpose,
    )
    p = np.exp(processed.astype(np.float64))
    counts = np.bincount(tokens, minlength=V)
    assert counts[p == 0].sum() == 0 and 5 < (p > 0).sum() < 17
    expected = p[p > 0] / p[p > 0].sum() * T
    assert stats.chisquare(counts[p > 0], expected).pvalue > 0.001


INDEPENDENT = {
    "positions": lambda i: (0 * i, 2 * i, 0, Purpose.TARGET, 0 * i, 2 * i + 1, 0, Purpose.TARGET),
    "seeds": lambda i: (2 * i, 0 * i, 0, Purpose.TARGET, 2 * i + 1, 0 * i, 0, Purpose.TARGET),
    "samples": lambda i: (i, i, 0, Purpose.TARGET, i, i, 1, Purpose.TARGET),
    "target and draft": lambda i: (i, i, 0, Purpose.TARGET, i, i, 0, Purpose.DRAFT),
    "target and residual": lambda i: (i, i, 0, Purpose.TARGET, i, i, 0, Purpose.RESIDUAL),
    "draft and sample 1": lambda i: (i, i, 0, Purpose.DRAFT, i, i, 1, Purpose.TARGET),
}


@pytest.mark.parametrize("which", INDEPENDENT)
def test_neighbouring_draws_are_independent(which):
    T, V = 40_000, 6
    arguments = INDEPENDENT[which](np.arange(T, dtype=np.int32))
    draws = []
    for seeds, positions, sample, purpose in (arguments[:4], arguments[4:]):
        flat, sampled = np.zeros((T, V), np.float32), np.zeros(T, bool)
        draws.append(draw_jit(flat, sampled, seeds.astype(np.uint32), positions, sample, purpose))
    first, second = map(np.asarray, draws)
    table = np.zeros((V, V))
    np.add.at(table, (first, second), 1)
    assert stats.chi2_contingency(table).pvalue > 0.001
    assert abs((first == second).mean() - 1 / V) < 0.01


def test_uniform_numbers_are_uniform_and_independent_of_everything_else():
    T = 200_000
    seeds, positions = np.arange(T, dtype=np.uint32), np.full(T, 9, np.int32)
    u = {
        purpose: np.asarray(uniform_jit(seeds, positions, purpose, 0)).astype(np.float64)
        for purpose in Purpose
    }
    accept = u[Purpose.ACCEPT]
    assert accept.min() >= 0 and accept.max() < 1
    assert stats.kstest(accept, "uniform").pvalue > 0.001
    # Finer than 24 bits near 0: with 24 alone all of these would be multiples of 2**-24.
    assert (accept[accept < 2**-8] * 2**24 % 1 != 0).mean() > 0.9
    others = [u[purpose] for purpose in Purpose if purpose != Purpose.ACCEPT]
    others.append(np.asarray(uniform_jit(seeds, positions, Purpose.ACCEPT, 1)))
    others.append(np.asarray(uniform_jit(seeds, positions + 1, Purpose.ACCEPT, 0)))
    for purpose in Purpose:
        gumbel = np.asarray(noise_jit(seeds, positions, 2, purpose, 0)).astype(np.float64)
        others.extend(np.exp(-np.exp(-gumbel)).T)
    for other in others:
        # Six standard errors of a correlation of independent numbers.
        assert abs(np.corrcoef(accept, other)[0, 1]) < 6 / math.sqrt(T)


def test_uniform_stays_below_one_for_any_word():
    words = jnp.array([0, 1, 2**31, 2**32 - 200, 2**32 - 1], jnp.uint32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepinfer_jax.decoding.noise._threefry", lambda *_: (words, words))
        u = uniform(words, words, Purpose.ACCEPT)
    assert u.tolist() == [0, 2.0**-32, 0.5, 1 - 2.0**-24, 1 - 2.0**-24]


def test_a_row_is_the_same_alone_and_in_any_batch():
    rng = np.random.default_rng(5)
    T, V = 13, 1003
    logits, s = random_logits(rng, T, V), random_sampling(rng, T)
    greedy = np.asarray(s.temperature) == 0
    seeds = rng.integers(0, 2**32, T, dtype=np.uint32)
    positions = rng.integers(0, 2**20, T).astype(np.int32)

    @jax.jit
    def everything(logits, s, greedy, seeds, positions):
        processed, raw = process(logits, s), log_softmax(logits)
        return (
            processed,
            raw,
            draw(processed, greedy, seeds, positions, 2, Purpose.DRAFT),
            *top(raw, 5),
            *choose(logits, s, seeds, positions),
            uniform(seeds, positions, Purpose.ACCEPT),
        )

    arguments = (logits, s, greedy, seeds, positions)
    whole = [np.asarray(x) for x in everything(*arguments)]
    assert len(set(whole[2].tolist())) > 8
    for rows in ([3], [5, 4, 3], rng.permutation(T)[:8], rng.permutation(T)):
        part = jax.tree.map(lambda x, rows=rows: x[rows], arguments)
        for all_rows, some in zip(whole, everything(*part), strict=True):
            assert (np.asarray(some) == all_rows[rows]).all()


def test_log_softmax_is_that_of_float64():
    logits = random_logits(np.random.default_rng(11), 40, 300)
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    exact = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    np.testing.assert_allclose(log_softmax_jit(logits), exact, rtol=1e-6, atol=1e-6)


def test_top_lists_the_best_and_never_a_pruned_token():
    log_probs = np.array(
        [
            [-1.0, -3.0, -1.0, -2.0, -3.0],
            [-np.inf, -0.5, -np.inf, -1.0, -np.inf],
            [np.nan] * 5,
            [-np.inf] * 5,
        ],
        np.float32,
    )
    tokens, values = top_jit(log_probs, 4)
    assert tokens.tolist() == [[0, 2, 3, 1], [1, 3, -1, -1], [-1] * 4, [-1] * 4]
    assert values[:2].tolist() == [[-1, -1, -2, -3], [-0.5, -1, -math.inf, -math.inf]]
    assert np.isnan(values[2]).all() and (values[3] == -np.inf).all()


def test_top_equals_a_stable_sort_with_many_ties():
    values = np.round(np.random.default_rng(12).normal(size=(16, 300)) * 4).astype(np.float32)
    tokens, log_probs = top_jit(values, 20)
    order = np.argsort(-values, axis=-1, kind="stable")[:, :20]
    assert (tokens == order).all()
    assert (log_probs == np.take_along_axis(values, order, -1)).all()


def test_a_row_that_cannot_be_sampled_gives_minus_one():
    logits = np.random.default_rng(6).normal(size=(5, 50)).astype(np.float32)
    logits[0, 30] = np.nan
    logits[1, 30] = np.inf
    logits[2] = -np.inf
    logits[3] = np.nan
    seeds, positions = np.arange(5, dtype=np.uint32), np.arange(5, dtype=np.int32)
    for s in (
        Sampling(temperature=0.0),
        Sampling(top_p=0.9),
        Sampling(top_k=4),
        Sampling(min_p=0.2),
        Sampling(),
    ):
        tokens, log_probs = map(np.asarray, choose_jit(logits, s, seeds, positions))
        assert tokens[:4].tolist() == [-1] * 4 and np.isnan(log_probs[:4]).all()
        alone = choose_jit(logits[4:], s, seeds[4:], positions[4:])
        assert tokens[4] == alone[0][0] >= 0 and log_probs[4] == alone[1][0]
        assert np.isnan(process_jit(logits, s)[:4]).all()
    assert np.isnan(log_softmax_jit(logits)[:4]).all()
    assert np.isfinite(log_softmax_jit(logits)[4]).all()


def test_greedy_rows_take_the_best_beside_sampled_ones():
    rng = np.random.default_rng(13)
    T, V = 200, 50
    log_probs = rng.normal(size=(T, V)).astype(np.float32)
    greedy = rng.random(T) < 0.5
    seeds, positions = np.arange(T, dtype=np.uint32), np.zeros(T, np.int32)
    tokens = np.asarray(draw_jit(log_probs, greedy, seeds, positions, 0))
    best = log_probs.argmax(-1)
    assert (tokens == best)[greedy].all() and (tokens == best)[~greedy].mean() < 0.5


@pytest.mark.parametrize("greedy", [False, True])
def test_draw_from_nothing_gives_minus_one(greedy):
    log_probs = np.full((3, 8), -np.inf, np.float32)
    log_probs[1, 6] = -50
    log_probs[2, 6] = np.nan
    seeds = np.arange(3, dtype=np.uint32)
    tokens = draw_jit(log_probs, np.full(3, greedy), seeds, np.zeros(3, np.int32), 0)
    assert tokens.tolist() == [-1, 6, -1]


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
    assert tuple(int(word) for word in _threefry(*words)) == block


@pytest.mark.golden
def test_noise_never_changes_between_versions_and_settings():
    seeds, positions = np.array([123, 2**32 - 1], np.uint32), np.array([7, 1_000_000], np.int32)
    values = np.asarray(noise(seeds, positions, 4, Purpose.TARGET, 3))
    np.testing.assert_allclose(values, PINNED, rtol=1e-5)
    with jax.threefry_partitionable(False), jax.default_prng_impl("rbg"):
        assert (np.asarray(noise(seeds, positions, 4, Purpose.TARGET, 3)) == values).all()
    wider = np.asarray(noise_jit(seeds, positions, 1000, Purpose.TARGET, 3))
    np.testing.assert_allclose(wider[:, :4], values, rtol=1e-6)


@pytest.mark.golden
def test_uniform_numbers_never_change_between_versions():
    seeds, positions = np.array([123, 2**32 - 1], np.uint32), np.array([7, 1_000_000], np.int32)
    # From a threefry in Python integers.
    expected = [0.9652413954026997, 0.6194405425339937]
    u = uniform(seeds, positions, Purpose.ACCEPT, 3)
    np.testing.assert_allclose(u, expected, rtol=6e-8)


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
    processed = np.asarray(process_jit(logits, s))
    kept = processed > -np.inf
    order = np.argsort(-logits, axis=-1, kind="stable")
    assert kept[1, order[1, :5000]].all() and kept[1].sum() == 5000
    count = kept[0].sum()
    assert kept[0, order[0, :count]].all()
    p = np.exp(logits[0, order[0]].astype(np.float64) / 0.9)
    before = (np.cumsum(p) - p) / p.sum()
    assert abs(count - (before <= np.float32(0.8)).sum()) <= 1
    np.testing.assert_allclose(np.exp(processed.astype(np.float64)).sum(-1), 1, rtol=1e-5)

    sampled = np.zeros(T, bool)
    tokens = np.asarray(draw_jit(processed, sampled, seeds, positions, 0))
    assert kept[np.arange(T), tokens].all()
    swapped = process_jit(logits[::-1], jax.tree.map(lambda x: np.asarray(x)[::-1], s))
    assert (np.asarray(swapped)[::-1] == processed).all()
    again = draw_jit(swapped, sampled, seeds[::-1], positions[::-1], 0)
    assert (np.asarray(again)[::-1] == tokens).all()


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
        ("min_p", -0.1, r"min_p must be in \[0, 1\], got -0.1"),
        ("min_p", [0.5, math.nan], r"min_p must be in \[0, 1\], got nan"),
        ("repetition_penalty", 0, "repetition_penalty must be a finite float32 number above 0"),
        # 0 in float32.
        ("repetition_penalty", 1e-50, "repetition_penalty must be .* got 1e-50"),
        ("repetition_penalty", math.inf, "repetition_penalty must be .* got inf"),
        ("presence_penalty", 2.5, r"presence_penalty must be in \[-2, 2\], got 2.5"),
        ("frequency_penalty", math.nan, r"frequency_penalty must be in \[-2, 2\], got nan"),
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
    with pytest.raises(ValueError, match=r"got float32 \(1, 2, 3\)"):
        log_softmax(jnp.zeros((1, 2, 3)))
    spread = Sampling(temperature=0.7).broadcast(3)
    assert {x.shape for x in jax.tree.leaves(spread)} == {(3,)}
    assert [x.dtype.name for x in jax.tree.leaves(spread)] == ["float32"] * 2 + ["int32"] + [
        "float32"
    ] * 4


def test_params_become_a_row_of_sampling():
    values = dict(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1,
        repetition_penalty=1.2, presence_penalty=-0.5, frequency_penalty=2.0,
    )  # fmt: skip
    assert SamplingParams(**values, stop_token_ids=[3, 4], seed=1).row() == Sampling(**values)
    assert SamplingParams().row() == Sampling()


def test_params_are_frozen_and_hashable():
    bias = {5: -1.5, 6: -math.inf}
    params = SamplingParams(
        stop_token_ids=[3, 4], banned_token_ids=[7], forced_token_ids=[-1, 2], logit_bias=bias,
        min_tokens=16, logprobs=20, n=3,
    )  # fmt: skip
    assert params.stop_token_ids == (3, 4) and params.banned_token_ids == (7,)
    assert params.forced_token_ids == (-1, 2)
    same = dataclasses.replace(params)
    assert params == same and hash(params) == hash(same)
    assert params != dataclasses.replace(params, logit_bias=None)
    bias[8] = 1.0
    assert params.logit_bias == {5: -1.5, 6: -math.inf}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer, got 1.5"),
        ({"min_tokens": -1}, "min_tokens must be from 0 to max_tokens = 16, got -1"),
        ({"min_tokens": 17}, "min_tokens must be from 0 to max_tokens = 16, got 17"),
        ({"seed": -1}, r"seed must be in \[0, 2\*\*32\), got -1"),
        ({"seed": 2**32}, r"seed must be in \[0, 2\*\*32\), got 4294967296"),
        ({"logprobs": 21}, "logprobs must be None or from 0 to 20, got 21"),
        ({"logprobs": -1}, "logprobs must be None or from 0 to 20, got -1"),
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"stop_token_ids": (-2,)}, "a token of stop_token_ids must be not negative, got -2"),
        ({"stop_token_ids": (2.0,)}, "a token of stop_token_ids must be an integer, got 2.0"),
        ({"banned_token_ids": (-1,)}, "a token of banned_token_ids must be not negative, got -1"),
        ({"forced_token_ids": (-2,)}, "a token of forced_token_ids must be at least -1, got -2"),
        ({"logit_bias": {-1: 1.0}}, "a token of logit_bias must be not negative, got -1"),
        ({"logit_bias": {"a": 1.0}}, "a token of logit_bias must be an integer, got 'a'"),
        ({"logit_bias": {4: math.nan}}, r"logit_bias\[4\] must be .* or -inf, got nan"),
        ({"logit_bias": {4: math.inf}}, r"logit_bias\[4\] must be .* or -inf, got inf"),
        ({"logit_bias": {4: 1e39}}, r"logit_bias\[4\] must be .* or -inf, got 1e[+]39"),
    ],
)
def test_requests_that_cannot_be_meant_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**wrong)
