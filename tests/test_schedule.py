"""How many drafts are verified: where expected tokens per second are highest (spec 9.7).

Compared with trying every budget. Probabilities are multiples of 1/64 and times whole numbers, so
sums are exact in float32 and different ratios differ.
"""

import types

import jax
import numpy as np
import pytest

from deepinfer_jax import Numerics, Transformer, measure_step_times, testing
from deepinfer_jax.decoding import measuring, schedule
from deepinfer_jax.decoding.schedule import StepTimes, allocate, lots, small_capacity

B, n, POINTS = 3, 2, 4

allocate_jit = jax.jit(allocate)


def random_survival(rng):
    """Falling along n, with equal values and drafts that are not there."""
    values = rng.integers(0, 65, (B, n)) * (rng.random((B, n)) < 0.8) // rng.choice([1, 8]) / 64
    return -np.sort(-values, axis=1).astype(np.float32)


def random_times(rng):
    rows = np.sort(rng.choice(np.arange(1, B * (n + 1) + 4), POINTS, replace=False))
    return StepTimes.of(rows, np.sort(rng.integers(1, 30, POINTS)))


def random_case(rng):
    ready = rng.random(B) < 0.7
    rows = ready.sum() + rng.integers(0, 4)  # some sequences still read their prompt
    there = random_survival(rng) * ready[:, None]
    return there, random_survival(rng), ready, np.int32(rows), random_times(rng)


def seconds_of(times, rows):
    """By searching the points one by one, in float64."""
    points = list(zip(times.rows.tolist(), times.seconds.tolist(), strict=True))
    for most, seconds in points:
        if rows <= most:
            return seconds
    return points[-1][1] * rows / points[-1][0]


def by_trying(survival, earlier, ready, rows, times):
    """Every budget, then one draft after the other to the most probable one left."""
    falling = sorted((earlier * ready[:, None]).ravel().tolist(), reverse=True)
    rates = [
        (ready.sum() + sum(falling[:budget])) / seconds_of(times, rows + budget)
        for budget in range(B * n + 1)
    ]
    budget = rates.index(max(rates))
    left, given = survival.astype(np.float64).ravel(), np.zeros(B, int)
    for _ in range(budget):
        flat = int(left.argmax())  # the lowest of equal ones
        if left[flat] > 0:
            given[flat // n] += 1
            left[flat] = -1
    return given, budget


def test_allocation_equals_trying_every_budget():
    rng = np.random.default_rng(0)
    budgets = []
    for _ in range(400):
        case = random_case(rng)
        found = np.asarray(allocate_jit(*case))
        expected, budget = by_trying(*case)
        assert np.array_equal(found, expected), case
        survival = case[0]
        # Drafts that are not there get no row.
        assert (found <= (survival > 0).sum(axis=1)).all()
        assert found.sum() == min(budget, (survival > 0).sum())
        budgets.append(budget)
    assert set(budgets) == set(range(B * n + 1))


def test_drafts_of_a_sequence_are_verified_from_the_first_on():
    rng = np.random.default_rng(1)
    for _ in range(100):
        case = random_case(rng)
        found = np.asarray(allocate_jit(*case))
        verified = np.arange(n) < found[:, None]
        # None that was left out is more probable than one that was taken, in any sequence.
        assert case[0][verified].min(initial=2) >= case[0][~verified].max(initial=0)


def test_equal_probabilities_go_to_the_lower_sequence():
    survival = np.full((B, n), 0.5, np.float32)
    ready = np.ones(B, bool)
    for budget in range(B * n + 1):
        # Up to this budget rows cost nothing more, behind it they cost ten times as much.
        times = StepTimes.of([B + budget, 90, 91, 92], [1, 10, 11, 12])
        found = np.asarray(allocate_jit(survival, survival, ready, np.int32(B), times))
        assert list(found) == [min(n, max(budget - n * b, 0)) for b in range(B)]


def test_earlier_rounds_say_how_many_and_this_round_says_whose():
    high, low = [0.875, 0.75], [0.125, 0.0625]
    before = np.array([high, low, low], np.float32)
    now = np.array([low, high, low], np.float32)
    ready, rows = np.ones(B, bool), np.int32(B)
    times = StepTimes.of([B, B + 2, B + 4, B + 6], [10, 11, 12, 13])
    assert list(allocate_jit(before, before, ready, rows, times)) == [2, 0, 0]
    assert list(allocate_jit(now, before, ready, rows, times)) == [0, 2, 0]
    # Many probable drafts now do not raise the number that was decided by the round before.
    sure = np.ones((B, n), np.float32)
    assert list(allocate_jit(sure, before, ready, rows, times)) == [2, 0, 0]
    assert list(allocate_jit(now, 0 * sure, ready, rows, times)) == [0, 0, 0]
    assert list(allocate_jit(before, sure, ready, rows, times)) == [2, 2, 2]


def test_more_tokens_per_second_than_with_all_drafts_or_with_none():
    rng = np.random.default_rng(2)
    gains = []
    for _ in range(200):
        survival, _, ready, rows, times = random_case(rng)

        def rate(quota, survival=survival, ready=ready, rows=rows, times=times):
            verified = np.arange(n) < quota[:, None]
            expected = ready.sum() + survival[verified].sum(dtype=np.float64)
            return expected / seconds_of(times, rows + quota.sum())

        none, every = np.zeros(B, int), (survival > 0).sum(axis=1)
        best = max(rate(none), rate(every))
        found = rate(np.asarray(allocate_jit(survival, survival, ready, rows, times)))
        assert found >= best * (1 - 1e-12)
        gains.append(found / best if best else 1)
    # Often it is better than both.
    assert (np.array(gains) > 1.01).mean() > 0.1


def test_costs_and_probabilities_are_data(compile_counter):
    rng = np.random.default_rng(3)
    fresh = jax.jit(lambda *a: allocate(*a))
    cases = [random_case(rng) for _ in range(4)]
    before = compile_counter.count
    found = {tuple(np.asarray(fresh(*case)).tolist()) for case in cases}
    assert compile_counter.count == before + 1 and len(found) > 1


# --- Times ----------------------------------------------------------------------------------------


def test_times_are_a_staircase_and_proportional_behind_it():
    times = StepTimes.of([4, 8, 16], [1.0, 1.5, 4.0])
    rows = np.array([0, 1, 4, 5, 8, 9, 16, 17, 24, 64], np.int32)
    expected = [1, 1, 1, 1.5, 1.5, 4, 4, 4.25, 6, 16]
    assert list(times.at(rows)) == expected
    assert times.at(rows).dtype == np.float32


def test_a_larger_round_never_counts_as_faster():
    times = StepTimes.of([1, 2, 3, 4], [2.0, 1.0, 3.0, 2.5])
    assert times.seconds.tolist() == [2, 2, 3, 3]


@pytest.mark.parametrize(
    "rows, seconds",
    [
        ([], []),
        ([1, 2], [1.0]),
        ([[1, 2]], [[1.0, 2.0]]),
        (3, 1.0),
        ([1.0, 2.0], [1.0, 2.0]),
        ([0, 1], [1.0, 2.0]),
        ([2, 2], [1.0, 2.0]),
        ([2, 1], [1.0, 2.0]),
        ([1, 2**31], [1.0, 2.0]),
        ([1, 2], [0.0, 1.0]),
        ([1, 2], [1.0, -1.0]),
        ([1, 2], [1.0, float("nan")]),
        ([1, 2], [1.0, float("inf")]),
        ([1, 2], ["a", "b"]),
    ],
)
def test_points_that_cannot_be_meant_are_refused(rows, seconds):
    with pytest.raises(ValueError, match="^StepTimes"):
        StepTimes.of(rows, seconds)


def test_saved_times_are_loaded_bit_for_bit(tmp_path):
    times = StepTimes.of([1, 7, 300], np.array([1e-4, 1 / 3, 2 / 3], np.float32))
    times.save(tmp_path / "times.json")
    loaded = StepTimes.load(str(tmp_path / "times.json"))
    for name in ("rows", "seconds"):
        left, right = getattr(times, name), getattr(loaded, name)
        assert left.dtype == right.dtype and np.array_equal(left, right)
    assert [file.name for file in tmp_path.iterdir()] == ["times.json"]


def test_a_file_is_complete_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "times.json"
    old, new = StepTimes.of([1], [2.0]), StepTimes.of([3], [4.0])

    def full_disk(self, text):
        with open(self, "w") as file:
            file.write(text[: len(text) // 2])
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(schedule.Path, "write_text", full_disk)
        with pytest.raises(OSError, match="no space left"):
            old.save(path)
        assert not path.exists()
    old.save(path)
    with monkeypatch.context() as patch:
        patch.setattr(schedule.Path, "write_text", full_disk)
        with pytest.raises(OSError, match="no space left"):
            new.save(path)
    assert StepTimes.load(path).rows.tolist() == [1]
    new.save(path)
    assert StepTimes.load(path).rows.tolist() == [3]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "{}", '{"rows": [1]}', '{"rows": [1], "seconds": [0]}',
     '{"rows": 1, "seconds": null}'],
)  # fmt: skip
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(ValueError):
        StepTimes.load(path)
    with pytest.raises(FileNotFoundError):
        StepTimes.load(tmp_path / "nothing.json")


@pytest.mark.parametrize("tile", [1, 8, 64])
@pytest.mark.parametrize("batch, drafts", [(1, 1), (3, 2), (8, 5), (200, 5)])
def test_lots_of_tiles_hold_the_smallest_and_the_largest_round(batch, drafts, tile):
    sizes = lots(batch, drafts, tile)
    assert all(size % tile == 0 for size in sizes)
    assert sizes == sorted(set(sizes)) and len(sizes) <= schedule._POINTS
    most = batch * (drafts + 1)
    assert batch <= sizes[0] < batch + tile and most <= sizes[-1] < most + tile
    # Few tiles: every number of them; many: evenly spread.
    steps = np.diff(sizes) // tile
    assert steps.size == 0 or steps.max() - steps.min() <= 1


@pytest.mark.parametrize(
    "batch, drafts, expected",
    [(1, 1, [1, 2]), (3, 2, [6, 9]), (8, 5, [24, 48]), (4, 3, [8, 16])],
)
def test_lots_without_tiles_are_the_two_programs(batch, drafts, expected):
    assert lots(batch, drafts, None) == expected
    assert small_capacity(batch, drafts) == expected[0]


def test_assumed_times_rise_with_rows():
    tiled = StepTimes.assumed(8, 5, tile=8)
    assert tiled.rows.tolist() == [8, 16, 24, 32, 40, 48]
    assert tiled.seconds.tolist() == [2, 3, 4, 5, 6, 7]
    whole = StepTimes.assumed(8, 5, tile=None)
    assert whole.rows.tolist() == [24, 48]
    np.testing.assert_allclose(whole.seconds, [1.05, 1.1], rtol=1e-6)


# --- Measuring ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reproducible", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_measured_rounds_run_the_rows_that_they_stand_for(
    reproducible, monkeypatch, compile_counter
):
    batch, drafts = 3, 3
    config = testing.tiny_config(
        num_hidden_layers=1,
        num_nextn_predict_layers=1,
        dspark_block_size=drafts,
        dspark_target_layer_ids=(0,),
        compress_ratios=(0, 0),
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        candidate_source_layer_id=-1,
        engram_layer_ids=(),
        hc_mult=2,
    )
    numerics = Numerics("float32", reproducible=reproducible)
    model = Transformer(config, numerics, testing.random_weights(config, 9, quantized=False))
    clock = iter([0, 99, 0, 7, 0, 1, 0, 2] * 2)  # one to compile, then 7, 1 and 2 seconds
    verified, compiled, whole_round = [], [], measuring._round

    def recorded(model, state, *rest):
        before = int(np.asarray(state.stats.verified).sum())
        after = whole_round(model, state, *rest)
        compiled.append(compile_counter.count)
        verified.append(int(np.asarray(after.stats.verified).sum()) - before)
        return after

    with monkeypatch.context() as patch:
        patch.setattr(measuring, "_round", recorded)
        patch.setattr(measuring, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
        times = measure_step_times(model, batch, 10, repeats=3)
    assert times.rows.tolist() == lots(batch, drafts, numerics.tile)
    assert times.seconds.tolist() == [2, 2]  # the median
    # One round to compile and three to measure, always from the same state, by one program.
    small = 5 if reproducible else 3
    assert verified[-8:] == [small] * 4 + [batch * drafts] * 4
    assert len(set(compiled[-8:])) == 1

    before = compile_counter.count
    times = measure_step_times(model, batch, 10, repeats=2)
    assert compile_counter.count == before
    assert 0 < times.seconds[0] <= times.seconds[1]


def test_a_model_without_a_drafter_cannot_be_measured():
    with pytest.raises(ValueError, match="drafter"):
        measure_step_times(types.SimpleNamespace(mtp=None, config=None), 2, 10)
