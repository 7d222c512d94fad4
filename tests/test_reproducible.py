"""However a sequence is cut, placed and accompanied, its logits are the same bits (spec 2.2, 4).

A `plan` cuts a sequence into calls: each item is (rows that stay, rows that are taken back). `play`
runs one plan per slot, several slots in one call where they fit, at random places among the rows.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax import testing
from deepinfer_jax.model.engram_tables import token_map

S, PAGE = 46, 12
SHAPES = {
    "csa2": dict(
        compress_ratios=(0, 2, 2, 2),
        kv_source_layer_ids=(1,),
        index_source_layer_ids=(1, 2),
        candidate_source_layer_id=1,
        candidate_topk_blocks=3,
        candidate_block_size=2,
        sliding_window=6,
        index_topk=4,
        engram_layer_ids=(1,),
    ),
    "uncompressed": dict(
        compress_ratios=(1, 1, 0),
        kv_source_layer_ids=(0,),
        index_source_layer_ids=(0, 1),
        candidate_source_layer_id=0,
        candidate_topk_blocks=3,
        candidate_block_size=4,
        sliding_window=4,
        index_topk=7,
        engram_layer_ids=(),
        hc_mult=2,
    ),
    "two_sources": dict(
        compress_ratios=(4, 1, 1),
        kv_source_layer_ids=(0, 1),
        index_source_layer_ids=(0, 1, 2),
        candidate_source_layer_id=1,
        candidate_topk_blocks=2,
        candidate_block_size=5,
        sliding_window=5,
        index_topk=5,
        engram_layer_ids=(0, 2),
        engram_max_ngram_size=4,
    ),
    "window_of_one": dict(
        compress_ratios=(3, 3),
        kv_source_layer_ids=(0,),
        index_source_layer_ids=(0,),
        candidate_source_layer_id=-1,
        sliding_window=1,
        index_topk=3,
        engram_layer_ids=(1,),
        hc_mult=1,
    ),
}
DEFAULT = di.Numerics(reproducible=True)
FLOAT32 = di.Numerics(dtype="float32", reproducible=True)
EXACT = dataclasses.replace(FLOAT32, quantize_activations=False, quantize_cache=False)
CASES = [
    ("csa2", DEFAULT),
    ("csa2", EXACT),
    ("uncompressed", DEFAULT),
    ("uncompressed", FLOAT32),
    ("two_sources", DEFAULT),
    ("two_sources", FLOAT32),
    ("window_of_one", DEFAULT),
]


def label(case):
    name, numerics = case
    return f"{name}-{numerics.dtype}{'' if numerics.quantize_cache else '-exact'}"


each_case = pytest.mark.parametrize("case", CASES, ids=label)


@dataclasses.dataclass(frozen=True)
class Place:
    """What a call of `step` compiles for."""

    rows: int = 16
    slots: int = 3
    capacity: int = 4 * PAGE
    per_slot: int = 16


USUAL = Place()


@functools.cache
def config_of(name):
    shape = SHAPES[name]
    return testing.tiny_config(
        num_hidden_layers=len(shape["compress_ratios"]),
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        **shape,
    )


@functools.cache
def model_of(name, numerics):
    config = config_of(name)
    ids = token_map(testing.byte_tokenizer()) if config.engram_layer_ids else None
    quantized = numerics == DEFAULT
    return di.Transformer(config, numerics, testing.random_weights(config, 3, quantized), ids)


def sequence_of(number):
    """Text-like tokens: few different ones, so that n-grams and keys repeat."""
    rng = np.random.default_rng([11, number])
    return rng.choice(rng.integers(0, 266, 24), S).astype(np.int32)


@jax.jit
def run(model, cache, tokens, slot, position):
    rows = di.Rows(tokens, slot, position, jnp.zeros(tokens.shape, bool))
    hidden, cache, _ = di.step(model, cache, rows)
    return di.logits(model, hidden), cache


def empty_cache(model, place):
    return di.init_cache(
        model.config, place.slots, place.capacity, place.per_slot, numerics=model.numerics,
        page=PAGE,
    )  # fmt: skip


def play(model, cache, plans, rng=None, place=USUAL):
    """Run {slot: (tokens, plan)} to the end; logits {slot: [S, V]} and the cache.

    With `rng`, slots come in random order with gaps between them, rows that are taken back hold
    random tokens, and so do rows that are not there.
    """
    todo = {slot: list(plan) for slot, (_, plan) in plans.items()}
    done = dict.fromkeys(plans, 0)
    found = {slot: [] for slot in plans}
    T = place.rows
    while any(todo.values()):
        tokens, position = np.zeros((2, T), np.int32)
        at = np.full(T, -1, np.int32)
        if rng is not None:
            tokens, position = rng.integers(0, 266, T, np.int32), rng.integers(0, S, T, np.int32)
        waiting = [slot for slot in todo if todo[slot]]
        if rng is not None:
            rng.shuffle(waiting)
        free, kept = 0, []
        for slot in waiting:
            stay, back = todo[slot][0]
            room = T - free - stay - back
            if room < 0:
                continue
            free += 0 if rng is None else int(rng.integers(0, room + 1))
            start = done[slot]
            tokens[free : free + stay] = plans[slot][0][start : start + stay]
            at[free : free + stay + back] = slot
            position[free : free + stay + back] = np.arange(start, start + stay + back)
            kept.append((slot, free, stay))
            free += stay + back
            todo[slot].pop(0)
        result, cache = run(model, cache, tokens, at, position)
        for slot, first, stay in kept:
            found[slot].append(np.asarray(result[first : first + stay]))
            done[slot] += stay
    return {slot: np.concatenate(parts) for slot, parts in found.items()}, cache


def pieces(*cuts, most=16):
    """The plan that cuts before each of these positions, and wherever `most` rows are reached."""
    edges = [0, *sorted(set(cuts) - {0, S}), S]
    return [
        (min(most, end - start), 0)
        for first, end in itertools.pairwise(edges)
        for start in range(first, end, most)
    ]


def random_plan(rng, most, *, taken_back=0):
    plan, left = [], S
    while left:
        stay = int(rng.integers(1, min(most, left) + 1))
        back = int(rng.integers(0, min(taken_back, most - stay) + 1)) if taken_back else 0
        plan.append((stay, back))
        left -= stay
    return plan


def boundaries(config):
    """Positions at which a window, group, block, selection or candidate set becomes full."""
    full = {config.sliding_window}
    for ratio in {role.ratio for role in config.layers if role.ratio}:
        block = ratio * config.candidate_block_size
        full |= {ratio, ratio * config.index_topk}
        if config.candidate_source_layer_id >= 0:
            full |= {block, block * config.candidate_topk_blocks}
    return full


def boundary_cuts(config):
    near = {edge + off for edge in boundaries(config) for off in (-2, -1, 0, 1)}
    return sorted(cut for cut in near if 0 < cut < S)


@functools.cache
def reference(name, numerics, number):
    """The sequence alone in slot 0, in calls of sixteen rows."""
    model, tokens = model_of(name, numerics), sequence_of(number)
    result = play(model, empty_cache(model, USUAL), {0: (tokens, pieces())})[0][0]
    assert np.isfinite(result).all() and result.std() > 0.1
    assert len(np.unique(result.argmax(-1))) > S // 4  # positions differ
    return result


def assert_same(found, case, numbers):
    for slot, number in numbers.items():
        assert np.array_equal(found[slot], reference(*case, number)), (slot, number)


def test_cuts_cover_every_residue_around_every_boundary():
    for name in SHAPES:
        config = config_of(name)
        cuts = set(boundary_cuts(config))
        for edge in boundaries(config):
            assert edge + 1 < S
            near = {c % 4 for c in cuts if edge - 2 <= c <= edge + 1}
            assert near == {0, 1, 2, 3} or edge <= 2, (name, edge)
    total = sum(2 * len(boundary_cuts(config_of(name))) for name, _ in CASES)
    assert total >= 100


@each_case
def test_any_single_cut_gives_the_same_logits(case):
    """One cut at every residue modulo 4 around every boundary, two sequences each, three at a time.

    Slots are a data axis of the same program, so three cuts advance together; that they do so at
    random places, next to one another, is part of the claim.
    """
    model, rng = model_of(*case), np.random.default_rng(5)
    jobs = [(number, cut) for number in (0, 1) for cut in boundary_cuts(model.config)]
    for group in itertools.batched(jobs, 3):
        plans = {
            slot: (sequence_of(number), pieces(cut, most=9))
            for slot, (number, cut) in enumerate(group)
        }
        found, _ = play(model, empty_cache(model, USUAL), plans, rng)
        assert_same(found, case, {slot: number for slot, (number, _) in enumerate(group)})


@each_case
def test_token_by_token_gives_the_same_logits(case):
    model, one = model_of(*case), [(1, 0)] * S
    found, _ = play(model, empty_cache(model, USUAL), {0: (sequence_of(0), one)})
    assert_same(found, case, {0: 0})


@each_case
def test_random_cuts_slots_and_batch_mates_give_the_same_logits(case):
    model, rng = model_of(*case), np.random.default_rng(6)
    for _ in range(6):
        numbers = {int(slot): int(slot) % 2 for slot in rng.permutation(3)[: rng.integers(1, 4)]}
        plans = {s: (sequence_of(n), random_plan(rng, 13)) for s, n in numbers.items()}
        found, _ = play(model, empty_cache(model, USUAL), plans, rng)
        assert_same(found, case, numbers)


@each_case
def test_page_order_does_not_matter(case):
    model, rng = model_of(*case), np.random.default_rng(7)
    cache = empty_cache(model, USUAL)
    shuffled = rng.permutation(cache.pages.size).reshape(cache.pages.shape)
    cache = cache.replace(pages=jnp.asarray(shuffled, jnp.int32))
    numbers = {0: 1, 1: 0, 2: 1}
    plans = {s: (sequence_of(n), random_plan(rng, 11)) for s, n in numbers.items()}
    assert_same(play(model, cache, plans, rng)[0], case, numbers)


@each_case
def test_rows_taken_back_leave_no_trace(case):
    """Rejected drafts: up to 15 wrong rows behind the right ones, in the same call."""
    model, rng = model_of(*case), np.random.default_rng(8)
    for numbers in ({0: 0, 2: 1}, {1: 1}, {0: 1, 1: 1, 2: 0}):
        plans = {
            s: (sequence_of(n), random_plan(rng, 16, taken_back=15)) for s, n in numbers.items()
        }
        assert sum(back for _, plan in plans.values() for _, back in plan) > S / 4
        assert_same(play(model, empty_cache(model, USUAL), plans, rng)[0], case, numbers)


@each_case
def test_what_a_slot_held_before_does_not_matter(case):
    """Another sequence's rings, parts, history and entries, shorter and longer than the next."""
    model, rng = model_of(*case), np.random.default_rng(9)
    cache = empty_cache(model, USUAL)
    for numbers in ({0: 2, 1: 3, 2: 4}, {0: 0, 1: 1, 2: 0}):
        plans = {s: (sequence_of(n), random_plan(rng, 14)) for s, n in numbers.items()}
        found, cache = play(model, cache, plans, rng)
    assert_same(found, case, numbers)


def test_a_slot_recovers_from_values_that_are_not_numbers():
    """A sequence that went wrong must not spoil the next one in its slot."""
    case = CASES[0]
    model, rng = model_of(*case), np.random.default_rng(10)
    cache = jax.tree.map(
        lambda a: jnp.full_like(a, jnp.nan) if jnp.issubdtype(a.dtype, jnp.floating) else a,
        empty_cache(model, USUAL),
    )
    plans = {1: (sequence_of(0), random_plan(rng, 9))}
    assert_same(play(model, cache, plans, rng)[0], case, {1: 0})


PLACES = {
    "one_slot_8_rows_tight_rings": Place(rows=8, slots=1, per_slot=3),
    "24_rows_more_capacity": Place(rows=24, slots=3, capacity=11 * PAGE, per_slot=24),
}


# Each of these is one more program to compile.
QUICK = [
    (("csa2", DEFAULT), "one_slot_8_rows_tight_rings"),
    (("uncompressed", FLOAT32), "24_rows_more_capacity"),
]
placed = [
    pytest.param(case, place, id=f"{label(case)}-{name}", marks=[] if quick else pytest.mark.slow)
    for case in CASES
    for name, place in PLACES.items()
    for quick in [(case, name) in QUICK]
]


@pytest.mark.parametrize(("case", "place"), placed)
def test_rows_slots_capacity_and_ring_size_do_not_matter(case, place):
    model, rng = model_of(*case), np.random.default_rng(12)
    numbers = dict(enumerate((0, 1, 0)[: place.slots]))
    for taken_back in (0, place.per_slot - 1):
        plans = {
            s: (sequence_of(n), random_plan(rng, place.per_slot, taken_back=taken_back))
            for s, n in numbers.items()
        }
        found, _ = play(model, empty_cache(model, place), plans, rng, place)
        assert_same(found, case, numbers)


def test_forward_of_a_padded_batch_equals_steps():
    case = ("uncompressed", DEFAULT)
    tokens = np.stack([sequence_of(0), sequence_of(1)])
    lengths = np.array([S, S - 7])
    tokens[1, S - 7 :] = 265
    found = np.asarray(di.forward(model_of(*case), tokens, lengths).logits)
    assert np.array_equal(found[0], reference(*case, 0))
    assert np.array_equal(found[1, : S - 7], reference(*case, 1)[: S - 7])


@pytest.mark.parametrize("number", [0, 1])
def test_fast_mode_without_quantisers_is_close(number):
    exact = reference("csa2", EXACT, number)
    model = model_of("csa2", EXACT)
    model = model.with_numerics(dataclasses.replace(EXACT, reproducible=False))
    rng = np.random.default_rng(13)
    for plan in (pieces(), random_plan(rng, 9)):
        plans = {1: (sequence_of(number), plan)}
        found = play(model, empty_cache(model, USUAL), plans, rng)[0][1]
        relative = np.abs(found - exact).max() / np.abs(exact).max()
        assert relative <= 1e-5
