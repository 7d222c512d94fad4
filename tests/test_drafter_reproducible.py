"""A block is the same bits whatever is beside it, was there before, or comes after (spec 9.3, 9.4).

`arrive` brings sequences up to their anchors in calls of random sizes at random places; what it
leaves in the cache beside the truth must not matter to the blocks that are drafted then.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax import testing
from deepinfer_jax.model.drafter import DraftBlock, draft_block, markov_step

ROWS, FEW, S = 16, 7, 40
WINDOW, BLOCK, STAGES = 5, 3, 2
DEFAULT = di.Numerics(reproducible=True)
FLOAT32 = di.Numerics(dtype="float32", quantize_activations=False, reproducible=True)
# No window yet, part of one, a full one, rings written several times over.
NUMERICS = [DEFAULT, pytest.param(FLOAT32, marks=pytest.mark.slow)]  # two more programs
each_numerics = pytest.mark.parametrize("numerics", NUMERICS, ids=("bfloat16", "float32"))
ANCHORS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 22, S - BLOCK)


@functools.cache
def model_of(numerics, stages=STAGES, block=BLOCK) -> di.Transformer:
    config = testing.tiny_config(
        num_hidden_layers=2,
        num_nextn_predict_layers=stages,
        compress_ratios=(0, 0) + (0,) * stages,
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        candidate_source_layer_id=-1,
        sliding_window=WINDOW,
        dspark_block_size=block,
        dspark_target_layer_ids=(0, 1),
        engram_layer_ids=(),
    )
    weights = testing.random_weights(config, 71, quantized=numerics == DEFAULT)
    return di.Transformer(config, numerics, weights)


def sequence_of(number):
    return np.random.default_rng([72, number]).integers(0, 266, S, np.int32)


@jax.jit
def run(model, cache, tokens, slot, position):
    return di.step(model, cache, di.Rows(tokens, slot, position, jnp.zeros(ROWS, bool)))[1]


@jax.jit
def draft(model, cache, tokens, slot, position):
    block, cache, _ = draft_block(model, cache, tokens, slot, position)
    return block, cache


def empty_cache(numerics, slots=3, per_slot=ROWS, capacity=S + ROWS):
    config = model_of(numerics).config
    return di.init_cache(config, slots, capacity, per_slot, numerics=numerics, drafts=True)


def arrive(model, cache, goals, rng, most, *, wrong=0, drafting=False):
    """The cache in which each slot's sequence has been run up to its anchor.

    Args:
        model, cache: to run.
        goals: {slot: (number of its sequence, anchor)}.
        rng: decides sizes, order and gaps of everything.
        most: rows of a slot in a call.
        wrong: most rows of them that hold other tokens and are taken back.
        drafting: draft a block in every slot before every call.
    """
    done = dict.fromkeys(goals, 0)
    while waiting := [slot for slot, (_, anchor) in goals.items() if done[slot] < anchor]:
        if drafting:
            slots = np.arange(cache.slots, dtype=np.int32)
            at = np.array([done.get(slot, 0) for slot in slots], np.int32)
            cache = draft(model, cache, rng.integers(0, 266, len(slots), np.int32), slots, at)[1]
        tokens, position = rng.integers(0, 266, ROWS, np.int32), rng.integers(0, S, ROWS, np.int32)
        at, free = np.full(ROWS, -1, np.int32), 0
        rng.shuffle(waiting)
        for slot in waiting:
            number, anchor = goals[slot]
            stay = min(int(rng.integers(1, most + 1)), anchor - done[slot])
            back = int(rng.integers(0, min(wrong, most - stay) + 1))
            if free + stay + back > ROWS:
                continue
            free += int(rng.integers(0, ROWS - free - stay - back + 1))
            here = slice(free, free + stay + back)
            tokens[free : free + stay] = sequence_of(number)[done[slot] : done[slot] + stay]
            at[here], position[here] = slot, done[slot] + np.arange(stay + back)
            done[slot] += stay
            free += stay + back
        cache = run(model, cache, tokens, at, position)
    return cache


def blocks_at(model, cache, goals):
    """The block of each slot in `goals`, alone in its slot's place of a call for all slots."""
    slots = np.arange(cache.slots, dtype=np.int32)
    there = np.isin(slots, list(goals))
    tokens, position = np.zeros((2, cache.slots), np.int32)
    for slot, (number, anchor) in goals.items():
        tokens[slot], position[slot] = sequence_of(number)[anchor], anchor
    block, _ = draft(model, cache, tokens, np.where(there, slots, -1), position)
    return {slot: jax.tree.map(lambda a, s=slot: np.asarray(a[s]), block) for slot in goals}


@functools.cache
def reference(numerics, number, anchor) -> DraftBlock:
    """The block of a sequence that came alone, in a cache of one slot with short rings."""
    model, goals = model_of(numerics), {0: (number, anchor)}
    cache = empty_cache(numerics, slots=1, per_slot=FEW)
    rows = np.arange(ROWS, dtype=np.int32)
    for start in range(0, anchor, FEW):
        there = (rows < FEW) & (start + rows < anchor)
        tokens = np.resize(sequence_of(number)[start:], ROWS)
        cache = run(model, cache, tokens, there.astype(np.int32) - 1, start + rows)
    block = blocks_at(model, cache, goals)[0]
    assert np.isfinite(block.logits).all() and block.logits.std() > 0.1
    assert (block.logits[0] != block.logits[1]).mean() > 0.9
    return block


def assert_same(found, numerics, goals):
    for slot, goal in goals.items():
        for mine, alone in zip(found[slot], reference(numerics, *goal), strict=True):
            assert mine.dtype == alone.dtype
            assert np.array_equal(mine, alone), (slot, goal)


def all_goals():
    """Every anchor in two sequences, three at a time and in other slots each time."""
    pairs = [(number, anchor) for anchor in ANCHORS for number in (0, 1)]
    for first in range(0, len(pairs), 3):
        yield {(slot + first) % 3: pair for slot, pair in enumerate(pairs[first : first + 3])}
    yield {2: (0, 22)}
    yield {1: (1, WINDOW)}


SITUATIONS = {
    "random_cuts": dict(most=13),
    "one_by_one": dict(most=1),
    "rows_taken_back": dict(most=16, wrong=15),
    "blocks_drafted_on_the_way": dict(most=4, wrong=3, drafting=True),
}


@each_numerics
@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_block_does_not_depend_on_how_its_context_came_or_what_is_beside_it(situation, numerics):
    model, rng = model_of(numerics), np.random.default_rng(73)
    cache = empty_cache(numerics)
    for goals in all_goals():  # in slots that hold what was there before
        cache = arrive(model, cache, goals, rng, **SITUATIONS[situation])
        assert_same(blocks_at(model, cache, goals), numerics, goals)


def test_rings_that_only_just_hold_the_block_will_do():
    """Of calls of one row; those above have rings for calls of 7 and 16 rows."""
    model, rng = model_of(DEFAULT), np.random.default_rng(74)
    cache = empty_cache(DEFAULT, per_slot=1)
    assert cache.window[-1].shape[1] == WINDOW + BLOCK
    for goals in all_goals():
        cache = arrive(model, cache, goals, rng, 1, drafting=True)
        assert_same(blocks_at(model, cache, goals), DEFAULT, goals)


def test_a_block_does_not_depend_on_leftovers_that_are_not_numbers():
    model, rng = model_of(DEFAULT), np.random.default_rng(75)
    cache = empty_cache(DEFAULT)
    rings = tuple(jnp.full_like(ring, jnp.nan) for ring in cache.window)
    for goals in list(all_goals())[:2]:
        assert min(anchor for _, anchor in goals.values()) < WINDOW  # part of a window is NaN
        found = arrive(model, cache.replace(window=rings), goals, rng, 9)
        assert_same(blocks_at(model, found, goals), DEFAULT, goals)


def test_a_block_of_one_row_does_not_depend_on_what_is_beside_it():
    """Where one row is all that there is, XLA multiplies by other means."""
    model, rng, slots = model_of(DEFAULT, 1, 1), np.random.default_rng(80), 5
    cache = di.init_cache(model.config, slots, 1, numerics=DEFAULT, drafts=True)
    rings = tuple(jnp.asarray(rng.standard_normal(r.shape), r.dtype) for r in cache.window)
    cache, every = cache.replace(window=rings), np.arange(slots, dtype=np.int32)
    together, _ = draft(model, cache, 9 * every, every, 4 * every)
    for slot in (1, 3):
        here = slice(slot, slot + 1)
        alone, _ = draft(model, cache, 9 * every[here], every[here], 4 * every[here])
        assert np.array_equal(alone.logits[0], together.logits[slot])
        assert np.array_equal(alone.hidden[0], together.hidden[slot])


def test_a_block_that_is_not_there_writes_nothing():
    model, rng = model_of(DEFAULT), np.random.default_rng(76)
    goals = {0: (0, 22), 1: (1, 9), 2: (0, WINDOW)}
    cache = arrive(model, empty_cache(DEFAULT), goals, rng, 9)
    slots, position = np.array([-1, 1, -1], np.int32), np.array([22, 9, WINDOW], np.int32)
    _, after = draft(model, cache, np.zeros(3, np.int32), slots, position)
    for before, now in zip(cache.window[:-STAGES], after.window[:-STAGES], strict=True):
        assert np.array_equal(before, now)  # the model's own layers
    for before, now in zip(cache.window[-STAGES:], after.window[-STAGES:], strict=True):
        ring = before.shape[1]
        changed = np.zeros(before.shape[:2], bool)
        changed[1, (9 + np.arange(BLOCK)) % ring] = True
        assert np.array_equal((np.asarray(before) != np.asarray(now)).any(-1), changed)


@pytest.mark.parametrize("anchor", [0, 2, WINDOW, 19])
def test_a_block_sees_the_window_before_its_anchor_and_nothing_else(anchor):
    """Every place of every stage's ring is poked, with a number where it is seen."""
    model, rng = model_of(DEFAULT), np.random.default_rng([77, anchor])
    cache = empty_cache(DEFAULT)
    slots, ring, E = cache.window[-1].shape
    seen = {p % ring for p in range(max(0, anchor - WINDOW), anchor)}
    keys = np.tile(rng.standard_normal((STAGES, 1, ring, E)), (1, slots, 1, 1))
    every = np.arange(slots, dtype=np.int32)

    def logits(keys):
        rings = tuple(jnp.asarray(ring, jnp.bfloat16) for ring in keys)
        poked = cache.replace(window=cache.window[:-STAGES] + rings)
        return np.asarray(draft(model, poked, 0 * every + 7, every, 0 * every + anchor)[0].logits)

    clean = logits(keys)
    assert (clean == clean[0]).all()
    for stage, place in itertools.product(range(STAGES), range(ring)):
        poked = keys.copy()
        poked[stage, 1, place] += 1 if place in seen else np.nan
        found = logits(poked)
        assert (found[::2] == clean[::2]).all(), place  # slots beside it
        moved = (found[1] != clean[1]).any(axis=1)
        assert (moved == (place in seen)).all(), (stage, place)  # in every row of the block


def test_every_row_of_a_block_depends_on_the_anchor_and_its_position():
    model, goals = model_of(DEFAULT), dict.fromkeys(range(3), (0, 22))
    cache = arrive(model, empty_cache(DEFAULT), goals, np.random.default_rng(78), 5)
    slots, position = np.arange(3, dtype=np.int32), np.array([22, 22, 21], np.int32)
    token = sequence_of(0)[22]
    block, _ = draft(model, cache, np.array([token, token + 1, token]), slots, position)
    for other in (1, 2):
        assert (block.logits[other] != block.logits[0]).any(axis=1).all()


@each_numerics
def test_a_markov_step_does_not_depend_on_what_is_beside_it(numerics):
    model, rng = model_of(numerics), np.random.default_rng(79)
    config, B = model.config, 19
    hidden = rng.standard_normal((B, config.hidden_size)).astype(numerics.activation)
    logits = rng.standard_normal((B, config.vocab_size)).astype(np.float32)
    inputs = hidden, logits, rng.integers(0, 266, B, np.int32)
    step = jax.jit(markov_step)
    whole = step(model, *inputs)
    order = rng.permutation(B)
    turned = step(model, *(a[order] for a in inputs))
    for part, all_of_it in zip(turned, whole, strict=True):
        assert np.array_equal(part, np.asarray(all_of_it)[order])
    for size in (1, 3):
        few = step(model, *(a[5 : 5 + size] for a in inputs))
        for part, all_of_it in zip(few, whole, strict=True):
            assert np.array_equal(part, all_of_it[5 : 5 + size])
