"""Biases, penalties and forced tokens equal a slow loop, whatever is drafted or beside them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.decoding.adjustments import Adjustments, Seen, adjust
from deepinfer_jax.decoding.distribution import draw, process
from deepinfer_jax.decoding.sampling import Sampling

B, R, V, S = 16, 4, 300, 12

adjust_jit = jax.jit(adjust)
seen_of = jax.jit(Seen.of, static_argnums=2)
add = jax.jit(Seen.add)


@dataclasses.dataclass
class Case:
    """A batch in the middle of its text, on the host."""

    logits: np.ndarray
    sampling: Sampling
    adjustments: Adjustments
    prompts: np.ndarray
    lengths: np.ndarray
    new: np.ndarray
    done: np.ndarray
    before: np.ndarray

    @property
    def seen(self):
        """The certain text."""
        valid = np.arange(self.new.shape[1]) < self.done[:, None]
        return add(seen_of(self.prompts, self.lengths, V), self.new, valid)

    def adjusted(self):
        """What the library makes of it."""
        return np.asarray(
            adjust_jit(
                self.logits, self.sampling, self.adjustments, self.seen, self.done, self.before
            )
        )

    def rows(self, chosen):
        """The same with some sequences, in this order."""
        parts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Case(**jax.tree.map(lambda x: x[chosen], parts))


def random_case(seed, neutral=False):
    """Texts over few tokens, so that they repeat, and lists with holes."""
    rng = np.random.default_rng(seed)

    def tokens(*shape, missing=0.0):
        ids = np.where(
            rng.random(shape) < 0.7, rng.integers(0, 8, shape), rng.integers(0, V, shape)
        )
        ids = np.where(rng.random(shape) < 0.1, V - 1, ids)  # where a wrapped -1 would land
        return np.where(rng.random(shape) < missing, -1, ids).astype(np.int32)

    def values(off, choices):
        active = penalised & (rng.random(B) < 0.6)
        return np.where(active, rng.choice(choices, B), off).astype(np.float32)

    penalised = (rng.random(B) < 0.8) & (not neutral)
    logits = (rng.normal(size=(B, R, V)) * 3).astype(np.float32)
    logits[rng.random(logits.shape) < 0.02] = -np.inf
    bias = rng.normal(size=(B, 5)).astype(np.float32)
    bias[rng.random(bias.shape) < 0.3] = -np.inf
    # Distinct tokens in each row: the order of two finite biases of one token would matter.
    bias_ids = np.stack([rng.permutation(20)[:5] for _ in range(B)]).astype(np.int32)
    bias_ids = np.where(rng.random(bias_ids.shape) < 0.3, -1, bias_ids)
    return Case(
        logits=logits,
        sampling=Sampling(
            repetition_penalty=values(1.0, [0.7, 1.1, 1.9]),
            frequency_penalty=values(0.0, [-1.3, 0.1, 1.7]),
            presence_penalty=values(0.0, [-1.9, 0.3, 1.1]),
        ).broadcast(B),
        adjustments=Adjustments(
            bias_ids=bias_ids,
            bias=bias,
            stops=tokens(B, 3, missing=0.3),
            min_new=rng.integers(0, 8, B).astype(np.int32),
            forced=tokens(B, 6, missing=0.7),
        ),
        prompts=tokens(B, S),
        lengths=rng.integers(1, S + 1, B).astype(np.int32),
        new=tokens(B, 6),
        done=rng.integers(0, 7, B).astype(np.int32),
        before=tokens(B, R - 1, missing=0.2),
    )


def adjusted_slowly(case):
    """The definition, token by token in float32."""
    result, one = case.logits.copy(), np.float32(1)
    sampling, lists = jax.tree.map(np.asarray, (case.sampling, case.adjustments))
    for b in range(len(case.logits)):
        prompt = set(case.prompts[b, : case.lengths[b]].tolist())
        for r in range(case.logits.shape[1]):
            number, row = case.done[b] + r, result[b, r]
            said = case.new[b, : case.done[b]].tolist()
            said += [token for token in case.before[b, :r].tolist() if token >= 0]
            for token, bias in zip(lists.bias_ids[b], lists.bias[b], strict=True):
                if token >= 0:
                    row[token] += bias
            for token in lists.stops[b]:
                if token >= 0 and number < lists.min_new[b]:
                    row[token] = -np.inf
            for token in prompt | set(said):
                penalty = sampling.repetition_penalty[b]
                row[token] *= one / penalty if row[token] > 0 else penalty
            for token in set(said):
                row[token] -= sampling.frequency_penalty[b] * np.float32(said.count(token))
                row[token] -= sampling.presence_penalty[b]
            if number < lists.forced.shape[1] and lists.forced[b, number] >= 0:
                token = lists.forced[b, number]
                own = row[token]
                row[:] = -np.inf
                row[token] = 0 if own == -np.inf else own
    return result


@pytest.mark.parametrize("neutral", [False, True])
def test_adjusted_logits_equal_a_slow_loop(neutral):
    for seed in range(8):
        case = random_case(seed, neutral)
        assert (case.adjusted() == adjusted_slowly(case)).all()


@pytest.mark.parametrize(
    "field",
    [
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "bias",
        "stops",
        "forced",
        "before",
    ],
)
def test_every_parameter_has_an_effect_of_its_own(field):
    case = random_case(20)
    if field == "bias":
        other = {
            "adjustments": dataclasses.replace(case.adjustments, bias_ids=jnp.full((B, 5), -1))
        }
    elif field in ("stops", "forced"):
        none = jnp.full_like(getattr(case.adjustments, field), -1)
        other = {"adjustments": dataclasses.replace(case.adjustments, **{field: none})}
    elif field == "before":
        other = {"before": np.full_like(case.before, -1)}
    else:
        off = {field: np.full(B, field == "repetition_penalty", np.float32)}
        other = {"sampling": dataclasses.replace(case.sampling, **off)}
    other = dataclasses.replace(case, **other)
    assert (case.adjusted() != other.adjusted()).any()
    assert (other.adjusted() == adjusted_slowly(other)).all()


@pytest.mark.parametrize(
    "name, value",
    [("repetition_penalty", 1.5), ("frequency_penalty", 0.5), ("presence_penalty", -0.5)],
)
def test_one_penalty_alone_works(name, value):
    case = random_case(23)
    case.sampling = Sampling(**{name: value}).broadcast(B)
    expected = adjusted_slowly(case)
    assert (case.adjusted() == expected).all()
    case.sampling = Sampling().broadcast(B)
    assert (expected != adjusted_slowly(case)).any()


def test_drafts_before_a_row_count_like_text():
    case = random_case(21)
    case.before = np.abs(case.before)  # every draft is there
    drafted = case.adjusted()
    for r in range(R):
        appended = add(case.seen, case.before[:, :r], np.ones((B, r), bool))
        alone = adjust_jit(
            case.logits[:, r : r + 1],
            case.sampling,
            case.adjustments,
            appended,
            case.done + r,
            np.zeros((B, 0), np.int32),
        )
        assert (np.asarray(alone)[:, 0] == drafted[:, r]).all()


def test_a_row_is_the_same_alone_and_in_any_batch():
    case = random_case(22)
    # Neutral neighbours, so that alone some sequences go without penalties altogether.
    neutral = jax.tree.leaves(
        jax.tree.map(lambda x, y: np.asarray(x) == y, case.sampling, Sampling())
    )
    assert 0 < np.all(neutral, axis=0).sum() < B
    whole = case.adjusted()
    for chosen in ([0], [5], [9, 3], np.random.default_rng(0).permutation(B)):
        assert (case.rows(np.array(chosen)).adjusted() == whole[chosen]).all()
    for neutral_row in np.flatnonzero(np.all(neutral, axis=0)):
        assert (case.rows(np.array([neutral_row])).adjusted() == whole[[neutral_row]]).all()


def test_repeated_tokens_count_each_time_and_masked_ones_never():
    seen = seen_of(np.array([[3, 5, 7], [6, 6, 1]], np.int32), np.array([2, 3], np.int32), 8)
    assert np.flatnonzero(seen.prompt[0]).tolist() == [3, 5]
    assert np.flatnonzero(seen.prompt[1]).tolist() == [1, 6]
    assert not seen.counts.any()
    tokens = np.array([[4, 4, 2, 4], [-1, 0, 7, 9]], np.int32)
    valid = np.array([[True, True, True, False], [True, True, False, True]])
    twice = add(add(seen, tokens, valid), tokens[:, ::-1], valid[:, ::-1])
    assert twice.counts.tolist() == [[0, 0, 2, 0, 4, 0, 0, 0], [2, 0, 0, 0, 0, 0, 0, 0]]
    assert (twice.prompt == seen.prompt).all()


def no_adjustments(rows, **changes):
    """Lists of width 0 with some replaced."""
    fields = dict(
        bias_ids=np.zeros((rows, 0), np.int32),
        bias=np.zeros((rows, 0), np.float32),
        stops=np.zeros((rows, 0), np.int32),
        min_new=np.zeros(rows, np.int32),
        forced=np.zeros((rows, 0), np.int32),
    )
    return Adjustments(**fields | changes)


def plain(logits, adjustments):
    """One row of each sequence at its first new token."""
    rows = len(logits)
    seen = Seen.of(jnp.zeros((rows, 1), jnp.int32), jnp.ones(rows, jnp.int32), logits.shape[-1])
    before = np.zeros((rows, 0), np.int32)
    return adjust_jit(
        logits[:, None], Sampling(), adjustments, seen, np.zeros(rows, np.int32), before
    )[:, 0]


def chosen(logits, temperature):
    """What is drawn from adjusted logits."""
    T = len(logits)
    log_probs = process(logits, Sampling(temperature=temperature))
    greedy = jnp.full(T, temperature == 0)
    return draw(log_probs, greedy, jnp.arange(T, dtype=jnp.uint32), jnp.zeros(T, jnp.int32))


def test_without_lists_logits_keep_their_bits():
    logits = np.random.default_rng(1).normal(size=(3, 40)).astype(np.float32)
    assert (np.asarray(plain(logits, no_adjustments(3))) == logits).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_forced_token_is_certain_even_if_banned(temperature):
    logits = np.random.default_rng(2).normal(size=(4, 40)).astype(np.float32)
    logits[2, 39] = -np.inf
    logits[3, 8] = np.nan  # the model is broken: that must not hide behind a forced token
    lists = no_adjustments(
        4,
        bias_ids=np.array([[5], [5], [39], [5]], np.int32),
        bias=np.full((4, 1), -np.inf, np.float32),
        forced=np.array([[5, 1], [-1, 1], [39, 1], [5, 1]], np.int32),
    )
    tokens = np.asarray(chosen(plain(logits, lists), temperature))
    assert tokens[[0, 2, 3]].tolist() == [5, 39, -1] and tokens[1] not in (-1, 5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_everything_banned_gives_minus_one(temperature):
    logits = np.random.default_rng(3).normal(size=(2, 6)).astype(np.float32)
    bias_ids = np.stack([np.arange(6), np.full(6, -1)]).astype(np.int32)
    lists = no_adjustments(2, bias_ids=bias_ids, bias=np.full((2, 6), -np.inf, np.float32))
    tokens = chosen(plain(logits, lists), temperature)
    assert tokens[0] == -1 and tokens[1] >= 0


def test_values_are_data_and_never_recompile(compile_counter):
    fresh = jax.jit(lambda *a: adjust(*a))

    def call(case):
        return fresh(
            case.logits, case.sampling, case.adjustments, case.seen, case.done, case.before
        )

    cases = [random_case(seed, neutral=seed % 2 == 0) for seed in range(30, 34)]
    call(cases[0])
    before = compile_counter.count
    for case in cases:
        call(case)
    assert compile_counter.count == before
