"""Judged drafts: the text of rejection is distributed as the target's, that of sharing is its own.

Spec 9.6. No model: targets and drafters are random tables of logits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from deepinfer_jax.decoding import speculative
from deepinfer_jax.decoding.distribution import draw, process
from deepinfer_jax.decoding.noise import Purpose, noise, uniform
from deepinfer_jax.decoding.sampling import Sampling
from deepinfer_jax.decoding.schedule import StepTimes, allocate
from deepinfer_jax.decoding.speculative import (
    Proposal,
    draft_number,
    judge_rejection,
    judge_shared,
)

V, B, n = 40, 256, 3  # vocabulary, sequences, drafts of a sequence
ROUNDS, CHUNK = 200_000, 20_000
SEEDS = np.arange(CHUNK, dtype=np.uint32)
SETTINGS = {
    "hot": Sampling(temperature=1.3),
    "top-p": Sampling(temperature=0.7, top_p=0.9),
    "top-k": Sampling(temperature=1.0, top_k=12),
    "both and min-p": Sampling(temperature=1.6, top_p=0.85, top_k=25, min_p=0.02),
}

process_jit, shared_jit, rejection_jit = map(jax.jit, (process, judge_shared, judge_rejection))
draw_jit = jax.jit(draw, static_argnums=5)
noise_jit = jax.jit(noise, static_argnums=(2, 3))
uniform_jit = jax.jit(uniform, static_argnums=2)


def tables(setting):
    """Log-probabilities [row, parity of the token before, V] of a target and a drafter unlike it.

    The drafter likes token 0 more than the target does.
    """
    rng = np.random.default_rng(1)
    target = rng.normal(size=(n + 1, 2, V)) * 1.5
    drafter = 0.6 * target[:n] + rng.normal(size=(n, 2, V))
    target[..., 0], drafter[..., 0] = 0.0, 2.5
    return tuple(
        np.asarray(process_jit(x.astype(np.float32).reshape(-1, V), SETTINGS[setting])).reshape(
            x.shape
        )
        for x in (target, drafter)
    )


@functools.partial(jax.jit, static_argnames="judge")
def play(judge, target, drafter, seeds):
    """One round of `CHUNK` sequences: parity before each row, the verdict."""
    sampled, sample = jnp.zeros(CHUNK, bool), jnp.zeros(CHUNK, jnp.int32)
    positions = jnp.broadcast_to(7 + jnp.arange(n + 1), (CHUNK, n + 1))
    parity, drafts, drafted = [jnp.zeros(CHUNK, jnp.int32)], [], []
    for k in range(n):
        drafted.append(drafter[k][parity[k]])
        token = draw(drafted[k], sampled, seeds, positions[:, k], sample, Purpose.DRAFT)
        drafts.append(token)
        parity.append(token % 2)
    parity, drafts, drafted = (jnp.stack(a, axis=1) for a in (parity, drafts, drafted))
    log_probs = target[jnp.arange(n + 1), parity]
    choices = draw(
        log_probs.reshape(-1, V), jnp.repeat(sampled, n + 1), jnp.repeat(seeds, n + 1),
        positions.reshape(-1),
    ).reshape(CHUNK, n + 1)  # fmt: skip
    proposal = Proposal(drafts, jnp.ones(drafts.shape), drafted)
    quota = jnp.full(CHUNK, n)
    return parity, judge(choices, log_probs, proposal, quota, sampled, seeds, positions, sample)


def p_values(judge, setting, rounds=ROUNDS):
    """Of chi-square tests of the tokens that each row gives, and the share that reaches it.

    A row is tested for the rounds whose drafts before it were all accepted, apart for either
    parity, as its distribution differs.
    """
    target, drafter = tables(setting)
    found = []
    for start in range(0, rounds, CHUNK):
        parity, verdict = play(judge, target, drafter, np.uint32(start) + SEEDS)
        found.append((parity, verdict.tokens, verdict.accepted))
    parity, tokens, accepted = (np.concatenate(a) for a in zip(*found, strict=True))
    results, shares = [], []
    for row in range(n + 1):
        statistic = freedom = 0
        for side in (0, 1):
            reached = (accepted >= row) & (parity[:, row] == side)
            p = np.exp(target[row, side].astype(np.float64))
            counts = np.bincount(tokens[reached, row], minlength=V)
            assert counts[p == 0].sum() == 0
            expected = p / p.sum() * reached.sum()
            rare = expected < 5
            counts = np.append(counts[~rare], counts[rare].sum())
            expected = np.append(expected[~rare], expected[rare].sum())
            cells = expected > 0
            statistic += ((counts - expected)[cells] ** 2 / expected[cells]).sum()
            freedom += max(cells.sum() - 1, 0)
        results.append(stats.chi2.sf(statistic, freedom))
        shares.append((accepted >= row).mean())
    return results, shares


@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_after_rejection_follow_the_target_at_every_row(setting):
    results, shares = p_values(judge_rejection, setting)
    assert min(results) > 0.001, results
    # Drafts are accepted and rejected often, so every branch is in what was tested.
    assert 0.9 > shares[1] > 1.1 * shares[2] > 1.2 * shares[3] > 0.01, shares


def without_subtraction(choices, log_probs, *rest):
    with pytest.MonkeyPatch.context() as patch:
        target = log_probs[:, :n].reshape(-1, V)
        patch.setattr(speculative, "draw", lambda _, *others: draw(target, *others))
        return judge_rejection(choices, log_probs, *rest)


def drafts_noise_for_acceptance(*arguments):
    """The uniform number has the bits that token 0's noise was made from."""

    def luck(seeds, positions, _, sample):
        gumbel = noise(seeds, positions, 1, Purpose.DRAFT, sample)[:, 0]
        return -jnp.expm1(-jnp.exp(-gumbel))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculative, "uniform", luck)
        return judge_rejection(*arguments)


def drafts_noise_for_replacements(*arguments):
    def replace(*others):
        return draw(*others[:-1], Purpose.DRAFT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculative, "draw", replace)
        return judge_rejection(*arguments)


@pytest.mark.parametrize(
    "mistake",
    [without_subtraction, drafts_noise_for_acceptance, drafts_noise_for_replacements],
)
def test_a_planted_mistake_changes_the_distribution(mistake):
    results, _ = p_values(mistake, "hot", ROUNDS // 5)
    assert min(results) < 1e-9, results


# --- Rejection, row by row ------------------------------------------------------------------------


def log_probs_of(logits, sampling):
    flat = jax.tree.map(lambda x: np.repeat(x, logits.shape[1]), sampling)
    processed = process_jit(logits.astype(np.float32).reshape(-1, V), flat)
    return np.asarray(processed).reshape(logits.shape)


def random_case(seed=2, greedy_share=0.3, closeness=0.8):
    """Arguments of `judge_rejection` of every kind: greedy, cut, few verified."""
    rng = np.random.default_rng(seed)
    greedy = rng.random(B) < greedy_share
    sampling = Sampling(
        temperature=np.where(greedy, 0, rng.uniform(0.5, 2, B)).astype(np.float32),
        top_p=rng.choice([1.0, 0.9], B).astype(np.float32),
        top_k=rng.choice([-1, 6], B).astype(np.int32),
    )
    sampling = jax.tree.map(np.asarray, sampling.broadcast(B))
    target = rng.normal(size=(B, n + 1, V)) * 2
    drafter = target[:, :n] + (1 - closeness) * 4 * rng.normal(size=(B, n, V))
    target, drafter = log_probs_of(target, sampling), log_probs_of(drafter, sampling)
    seeds, sample = rng.integers(0, 2**32, B, np.uint32), rng.integers(0, 4, B, np.int32)
    positions = rng.integers(0, 10**6, (B, 1), np.int32) + np.arange(n + 1, dtype=np.int32)
    quota = rng.integers(0, n + 1, B, np.int32)
    return drawn(target, drafter, quota, greedy, seeds, positions, sample)


def drawn(target, drafter, quota, greedy, seeds, positions, sample):
    """The arguments with drafts and choices drawn from their distributions."""

    def tokens(log_probs, purpose):
        rows = log_probs.shape[1]
        named = (np.repeat(a, rows) for a in (greedy, seeds))
        found = draw_jit(
            log_probs.reshape(-1, V), *named, positions[:, :rows].reshape(-1),
            np.repeat(sample, rows), purpose,
        )  # fmt: skip
        return np.array(found).reshape(-1, rows)

    drafts, choices = tokens(drafter, Purpose.DRAFT), tokens(target, Purpose.TARGET)
    proposal = Proposal(drafts, np.ones(drafts.shape, np.float32), drafter)
    return dict(
        choices=choices, log_probs=target, proposal=proposal, quota=quota, greedy=greedy,
        seeds=seeds, positions=positions, sample=sample,
    )  # fmt: skip


def judged(case):
    return jax.tree.map(np.asarray, rejection_jit(**case))


def by_loop(case):
    """Tokens of each sequence, draft by draft, in float64."""
    repeated = (np.repeat(case["seeds"], n), case["positions"][:, :n].reshape(-1))
    sample = np.repeat(case["sample"], n)
    luck = np.asarray(uniform_jit(*repeated, Purpose.ACCEPT, sample)).reshape(B, n)
    gumbel = np.asarray(noise_jit(*repeated, V, Purpose.RESIDUAL, sample)).reshape(B, n, V)
    with np.errstate(invalid="ignore", divide="ignore"):
        p, q = (np.exp(a.astype(np.float64)) for a in (case["log_probs"], case["proposal"][2]))
        texts = []
        for b in range(B):
            text = []
            for i in range(case["quota"][b]):
                draft = case["proposal"].tokens[b, i]
                if draft < 0 or np.isnan(p[b, i]).any():
                    break
                if luck[b, i] >= p[b, i, draft] / q[b, i, draft]:
                    left = np.log(np.maximum(p[b, i] - q[b, i], 0))
                    text.append(np.argmax(left + (0 if case["greedy"][b] else gumbel[b, i])))
                    break
                text.append(draft)
            else:
                i = case["quota"][b]
            complete = len(text) > i
            texts.append(text if complete else text + [case["choices"][b, i]])
    return texts


def test_equals_a_loop_over_drafts():
    case = random_case()
    rng = np.random.default_rng(3)
    broken = rng.random((B, n + 1)) < 0.1
    case["log_probs"] = np.where(broken[..., None], np.nan, case["log_probs"])
    case["choices"] = np.where(broken, -1, case["choices"])
    missing = rng.random((B, n)) < 0.1
    drafts = np.where(missing, -1, case["proposal"].tokens)
    nowhere = missing & (rng.random((B, n)) < 0.5)
    drafter = np.where(nowhere[..., None], np.nan, case["proposal"].log_probs)
    case["proposal"] = Proposal(drafts, case["proposal"].acceptance, drafter)
    found = judged(case)
    expected = by_loop(case)
    assert [list(found.tokens[b, : found.accepted[b] + 1]) for b in range(B)] == expected
    assert [len(text) - 1 for text in expected] == list(found.accepted)
    # All numbers of accepted drafts occur, and rejections beside choices behind the last draft.
    assert set(found.accepted) == set(range(n + 1))
    replaced = found.accepted < case["quota"]
    assert 0.1 < replaced.mean() < 0.9


def test_drafts_from_the_targets_distribution_are_always_accepted():
    case = random_case(closeness=1)
    assert np.array_equal(case["log_probs"][:, :n], case["proposal"].log_probs)
    found = judged(case)
    assert np.array_equal(found.accepted, case["quota"])
    assert set(case["quota"]) == set(range(n + 1))
    for b, quota in enumerate(case["quota"]):
        assert list(found.tokens[b, :quota]) == list(case["proposal"].tokens[b, :quota])
        assert found.tokens[b, quota] == case["choices"][b, quota]


def test_drafts_that_the_target_cannot_say_are_replaced_by_draws_of_the_target():
    rng = np.random.default_rng(4)
    logits = rng.normal(size=V).astype(np.float32)
    even = np.arange(V) % 2 == 0
    target, drafter = (
        np.asarray(process_jit(np.where(side, logits, -np.inf)[None], Sampling()))
        for side in (even, ~even)
    )
    case = drawn(
        np.broadcast_to(target, (CHUNK, n + 1, V)), np.broadcast_to(drafter, (CHUNK, n, V)),
        np.full(CHUNK, n, np.int32), np.zeros(CHUNK, bool), SEEDS,
        np.broadcast_to(np.arange(n + 1, dtype=np.int32), (CHUNK, n + 1)),
        np.zeros(CHUNK, np.int32),
    )  # fmt: skip
    found = judged(case)
    assert (found.accepted == 0).all() and (found.tokens[:, 0] % 2 == 0).all()
    p = np.exp(target[0, even].astype(np.float64))
    counts = np.bincount(found.tokens[:, 0], minlength=V)[even]
    assert stats.chisquare(counts, p / p.sum() * CHUNK).pvalue > 0.001
    # They are new draws, not the choices that the target would have made without drafts.
    assert (found.tokens[:, 0] != case["choices"][:, 0]).mean() > 0.5


def test_a_draft_rejected_by_rounding_alone_is_replaced_by_a_draw_of_the_target():
    case = random_case(greedy_share=0, closeness=1)
    case["quota"] = np.full(B, n, np.int32)
    # Rounding, exaggerated: no token is more likely for the target than for the drafter.
    case["log_probs"] = case["log_probs"] - np.float32(0.5)
    found = judged(case)
    rejected = np.flatnonzero(found.accepted < n)
    place = found.accepted[rejected]
    expected = draw_jit(
        case["log_probs"][rejected, place], np.zeros(rejected.size, bool), case["seeds"][rejected],
        case["positions"][rejected, place], case["sample"][rejected], Purpose.RESIDUAL,
    )  # fmt: skip
    assert rejected.size > B / 3
    assert np.array_equal(found.tokens[rejected, place], expected)


def test_greedy_drafts_are_kept_while_they_are_the_targets_best():
    case = random_case(greedy_share=1, closeness=0.7)
    case["quota"] = np.full(B, n, np.int32)
    found = judged(case)
    best = case["log_probs"].argmax(axis=2)
    equal = case["proposal"].tokens == best[:, :n]
    assert np.array_equal(found.accepted, np.cumprod(equal, axis=1).sum(axis=1))
    assert set(found.accepted) == set(range(n + 1))
    for b, accepted in enumerate(found.accepted):
        assert list(found.tokens[b, : accepted + 1]) == list(best[b, : accepted + 1])


def test_no_draft_is_never_accepted_and_leaves_the_targets_choice():
    case = random_case()
    case["proposal"] = case["proposal"]._replace(tokens=np.full((B, n), -1, np.int32))
    found = judged(case)
    assert (found.accepted == 0).all() and case["quota"].max() == n
    assert np.array_equal(found.tokens[:, 0], case["choices"][:, 0])


def test_a_row_of_nan_gives_no_token_at_its_place():
    case = random_case(closeness=1)
    case["quota"] = np.full(B, n, np.int32)
    place = np.arange(B) % (n + 1)
    broken = np.arange(n + 1) == place[:, None]
    case["log_probs"] = np.where(broken[..., None], np.nan, case["log_probs"])
    case["choices"] = np.where(broken, -1, case["choices"])
    found = judged(case)
    assert np.array_equal(found.accepted, place)
    assert (found.tokens[np.arange(B), place] == -1).all()


def test_forced_tokens_stand_whatever_was_drafted():
    case = random_case(closeness=0.9)
    case["quota"] = np.full(B, n, np.int32)
    # Half of the sequences were drafted as they are forced.
    forced = np.random.default_rng(5).integers(0, V, (B, n + 1))
    forced[::2, :n] = case["proposal"].tokens[::2]
    only = np.where(np.arange(V) == forced[..., None], 0, -np.inf).astype(np.float32)
    case["log_probs"], case["choices"] = only, forced.astype(np.int32)
    found = judged(case)
    assert (found.accepted[::2] == n).all() and (found.accepted[1::2] < n).all()
    for b, accepted in enumerate(found.accepted):
        assert list(found.tokens[b, : accepted + 1]) == list(forced[b, : accepted + 1])


# --- Shared noise ---------------------------------------------------------------------------------


def test_shared_noise_keeps_leading_matches_and_says_what_the_target_chose():
    rng = np.random.default_rng(6)
    choices = rng.integers(-1, 2, (B, n + 1), np.int32)
    drafts = rng.integers(-1, 2, (B, n), np.int32)
    quota = rng.integers(0, n + 1, B, np.int32)
    found = jax.tree.map(np.asarray, shared_jit(choices, drafts, quota))
    expected = []
    for b in range(B):
        count = 0
        while count < quota[b] and drafts[b, count] == choices[b, count] != -1:
            count += 1
        expected.append(count)
    assert list(found.accepted) == expected and set(expected) == set(range(n + 1))
    assert np.array_equal(found.tokens, choices)


@pytest.mark.parametrize("setting", SETTINGS)
def test_shared_noise_accepts_between_its_bound_and_the_most_possible(setting):
    logits = np.random.default_rng(7).normal(size=(2, V)).astype(np.float32)
    logits[1] = 0.8 * logits[0] + 0.5 * logits[1]
    target, drafter = np.asarray(process_jit(logits, SETTINGS[setting]))
    overlap = np.minimum(np.exp(target), np.exp(drafter)).sum()
    sampled, positions = np.zeros(CHUNK, bool), np.full(CHUNK, 3, np.int32)

    def tokens(log_probs, purpose):
        rows = np.broadcast_to(log_probs, (CHUNK, V))
        return np.asarray(draw_jit(rows, sampled, SEEDS, positions, 0, purpose))[:, None]

    def accepted(purpose):
        choices = np.repeat(tokens(target, Purpose.TARGET), 2, axis=1)
        verdict = shared_jit(choices, tokens(drafter, purpose), np.ones(CHUNK, np.int32))
        return float(verdict.accepted.mean())

    margin = 4 * 0.5 / CHUNK**0.5  # four standard errors
    least = overlap / (2 - overlap)
    assert least - margin < accepted(Purpose.TARGET) < overlap + margin < 1
    # Draws with noise of their own agree less, so the bound says something.
    assert accepted(Purpose.DRAFT) < least - margin


@functools.partial(jax.jit, static_argnames=("n", "numbered"))
def four_rounds(seeds, n, numbered):
    """Texts int32 [B, 16] from four scheduled rounds; drafts are drawn as `drafting.dspark` does.

    Target and drafter do not depend on the text, confidences do: the last says what it thinks of
    the second draft. `numbered` False reuses a position's noise in every round.
    """
    (B,), V = seeds.shape, 4
    target, drafter = jnp.log(jnp.full(V, 0.25)), jnp.log(jnp.array([0.55, 0.15, 0.15, 0.15]))
    times = StepTimes.of([1, 4], [1.0, 2.2])
    sampled, sample = jnp.zeros(B, bool), jnp.zeros(B, jnp.int32)
    text, anchor, earlier = jnp.full((B, 16), -1), jnp.full(B, 10), None
    row = jnp.arange(n + 1)
    for _ in range(4):
        positions = anchor[:, None] + 1 + row
        drafts = []
        for k in range(n):
            number = draft_number(anchor, k, n) if numbered else positions[:, k]
            log_q = jnp.broadcast_to(drafter, (B, V))
            drafts.append(draw(log_q, sampled, seeds, number, sample, Purpose.DRAFT))
        drafts = jnp.stack(drafts, axis=1)
        confidence = jnp.stack(
            [jnp.full(B, 0.6), jnp.full(B, 0.9), jnp.where(drafts[:, 1] == 0, 0.9, 0.1)], axis=1
        )
        survival = jnp.cumprod(confidence, axis=1)
        quota = jnp.full(B, n)
        if earlier is not None:
            one = jnp.ones(1, bool), jnp.int32(1), times
            quota = jax.vmap(lambda s, e, one=one: allocate(s[None], e[None], *one)[0])(
                survival, earlier
            )
        log_p = jnp.broadcast_to(target, (B, n + 1, V))
        choices = draw(
            log_p.reshape(-1, V), jnp.repeat(sampled, n + 1), jnp.repeat(seeds, n + 1),
            positions.reshape(-1),
        ).reshape(B, n + 1)  # fmt: skip
        proposal = Proposal(drafts, confidence, jnp.broadcast_to(drafter, (B, n, V)))
        verdict = judge_rejection(
            choices, log_p, proposal, quota, sampled, seeds, positions, sample
        )
        place = jnp.where(row <= verdict.accepted[:, None], anchor[:, None] - 10 + row, 99)
        text = text.at[jnp.arange(B)[:, None], place].set(verdict.tokens, mode="drop")
        anchor, earlier = anchor + verdict.accepted + 1, survival
    return text


@pytest.mark.parametrize("numbered", [True, False])
def test_scheduled_rejection_is_unbiased_because_no_block_reuses_noise(numbered):
    texts = [
        np.asarray(four_rounds(np.arange(i, i + 50_000, dtype=np.uint32), 3, numbered))
        for i in range(0, 400_000, 50_000)
    ]
    counts = [np.bincount(np.concatenate(texts)[:, k], minlength=4) for k in range(4)]
    p = min(stats.chisquare(count).pvalue for count in counts)
    assert p > 1e-3 if numbered else p < 1e-9
