"""Counters of drafts equal a plain loop over rounds, and their report says what it defines."""

import jax
import numpy as np
import pytest

from deepinfer_jax.decoding.stats import BINS, Report, Stats

B, n, N = 5, 3, 12

add_jit = jax.jit(Stats.add)


def random_round(rng):
    """What one round may look like: few reach, few are verified, a stop may cut the new tokens."""
    reached = rng.random(B) < 0.8
    quota = np.where(reached, rng.integers(0, n + 1, B), 0).astype(np.int32)
    accepted = rng.integers(0, quota + 1).astype(np.int32)
    emitted = np.where(reached, accepted + 1, 0)
    emitted = np.where(rng.random(B) < 0.3, rng.integers(0, emitted + 1), emitted)
    confidence = rng.random((B, n), np.float32)
    edges = rng.integers(0, BINS + 1, (B, n)).astype(np.float32) / BINS
    confidence = np.where(rng.random((B, n)) < 0.3, edges, confidence)
    return reached, quota, accepted, emitted.astype(np.int32), confidence


def by_loop(rounds):
    """All judged drafts as (sequence, place, accepted, confidence), and rows that were run."""
    judged, verified = [], np.zeros((B, n), int)
    for _, quota, accepted, emitted, confidence in rounds:
        for b in range(B):
            for k in range(quota[b]):
                verified[b, k] += 1
                # Behind the first rejected draft, and behind the end of the text, none is judged.
                if k <= accepted[b] and k < emitted[b]:
                    judged.append((b, k, k < accepted[b], confidence[b, k]))
    return judged, verified


def of_rounds(rounds, round_of=None):
    stats = Stats.zeros(B, N, n)
    for round_ in rounds:
        stats = add_jit(stats, *round_)
    return stats if round_of is None else stats._replace(round_of=round_of)


def test_counters_equal_a_loop_over_rounds():
    rng = np.random.default_rng(0)
    rounds = [random_round(rng) for _ in range(40)]
    found = jax.tree.map(np.asarray, of_rounds(rounds))
    judged, verified = by_loop(rounds)
    expected = jax.tree.map(lambda a: np.zeros(a.shape, np.float64), Stats.zeros(B, N, n))
    for b, k, accepted, confidence in judged:
        index = min(int(np.float32(confidence) * np.float32(BINS)), BINS - 1)
        expected.judged[b, k] += 1
        expected.accepted[b, k] += accepted
        expected.calibration.judged[b, index] += 1
        expected.calibration.accepted[b, index] += accepted
        expected.calibration.confidence[b, index] += confidence
    assert np.array_equal(found.steps, sum(reached.astype(int) for reached, *_ in rounds))
    assert np.array_equal(found.verified, verified)
    for name in ("judged", "accepted"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
        assert np.array_equal(
            getattr(found.calibration, name), getattr(expected.calibration, name)
        ), name
    # At most 120 numbers below 1 in float32.
    np.testing.assert_allclose(
        found.calibration.confidence, expected.calibration.confidence, rtol=1e-5
    )
    assert not found.round_of.any()
    # Some drafts were verified in vain, some accepted ones did not become text.
    assert found.judged.sum() < verified.sum()
    assert found.accepted.sum() < sum(accepted.sum() for _, _, accepted, _, _ in rounds)
    assert (found.calibration.judged.sum(axis=0) > 0).all()


def test_report_follows_its_definitions():
    rng = np.random.default_rng(1)
    rounds = [random_round(rng) for _ in range(40)]
    round_of = rng.integers(0, 3, (B, N)).astype(np.int32)
    report = of_rounds(rounds, round_of).report()
    judged, verified = by_loop(rounds)
    steps = sum(int(reached.sum()) for reached, *_ in rounds)
    place, accepted, confidence = (np.array(a) for a in list(zip(*judged, strict=True))[1:])
    assert report.tokens == (round_of > 0).sum() and report.steps == steps
    assert report.tokens_per_step == report.tokens / steps
    assert np.array_equal(report.verified, verified.sum(axis=0) / steps)
    for k in range(n):
        assert report.conditional[k] == accepted[place == k].mean()
        assert report.cumulative[k] == accepted[place == k].sum() / steps
    bins = np.minimum((confidence * np.float32(BINS)).astype(int), BINS - 1)
    error = 0.0
    for index in range(BINS):
        members = bins == index
        mean = confidence[members].astype(np.float64).mean()
        assert report.bins[0][index] == members.sum()
        assert report.bins[1][index] == pytest.approx(accepted[members].mean(), rel=1e-12)
        assert report.bins[2][index] == pytest.approx(mean, rel=1e-5)
        error += members.mean() * abs(mean - accepted[members].mean())
    # The mean of distances, not the distance of means.
    assert report.calibration_error == pytest.approx(error, abs=1e-5)
    assert abs(confidence.mean() - accepted.mean()) < error - 0.01


def by_hand():
    """Two sequences with two drafts.

    First round: the first sequence keeps both drafts, the second rejects its first. Second round:
    the first verifies one and stops with it, the second is not there.
    """
    stats = Stats.zeros(2, 6, 2)
    confidence = np.array([[0.95, 0.75], [0.25, 0.5]], np.float32)
    stats = stats.add(
        np.array([True, True]), np.array([2, 2]), np.array([2, 0]), np.array([3, 1]), confidence
    )
    stats = stats.add(
        np.array([True, False]), np.array([1, 0]), np.array([1, 0]), np.array([1, 0]), confidence
    )
    return stats._replace(round_of=np.array([[1, 1, 1, 2, 0, 0], [1, 0, 0, 0, 0, 0]], np.int32))


def test_report_of_three_rounds_by_hand():
    report = by_hand().report()
    assert report.tokens == 5 and report.steps == 3
    assert list(report.verified) == [1, 2 / 3]
    assert list(report.conditional) == [2 / 3, 1]
    assert list(report.cumulative) == [2 / 3, 1 / 3]
    count, kept, confidence = report.bins
    assert list(count) == [0, 0, 1, 0, 0, 0, 0, 1, 0, 2]
    assert list(kept[[2, 7, 9]]) == [0, 1, 1] and np.isnan(kept[count == 0]).all()
    np.testing.assert_allclose(confidence[[2, 7, 9]], [0.25, 0.75, 0.95], rtol=1e-6)
    # |0.25 - 0|, |0.75 - 1| and twice |0.95 - 1|, over four drafts.
    assert report.calibration_error == pytest.approx(0.15, rel=1e-5)
    assert str(report) == (
        "5 tokens in 3 steps: 1.67 tokens a step\n"
        "draft  verified  accepted if reached  became text\n"
        "    1      1.00                 0.67         0.67\n"
        "    2      0.67                 1.00         0.33\n"
        "expected calibration error 0.150"
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("drafts", [0, 2])
def test_a_report_of_nothing_divides_by_nothing(drafts):
    report = Stats.zeros(3, 4, drafts).report()
    assert isinstance(report, Report)
    assert report.tokens == report.steps == 0 and np.isnan(report.tokens_per_step)
    for shares in (report.verified, report.conditional, report.cumulative):
        assert shares.shape == (drafts,) and np.isnan(shares).all()
    assert np.isnan(report.calibration_error)
    lines = str(report).splitlines()
    assert lines[0] == "0 tokens in 0 steps: nan tokens a step"
    assert len(lines) == (1 if drafts == 0 else 5)


@pytest.mark.filterwarnings("error")
def test_rounds_without_verified_drafts_have_no_acceptance():
    nothing = np.zeros(B, np.int32)
    everyone = np.ones(B, bool)
    confidence = np.full((B, n), 0.5, np.float32)
    report = of_rounds([(everyone, nothing, nothing, nothing + 1, confidence)]).report()
    assert report.steps == B
    assert not report.verified.any() and not report.cumulative.any()
    assert np.isnan(report.conditional).all() and np.isnan(report.calibration_error)
