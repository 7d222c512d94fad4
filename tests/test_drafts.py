"""Drafts never change the text (spec 9.6, 3.5, 8.3): same tokens, same log-probabilities, `==`.

Random models do not like the drafts of random drafters, so most tests put an oracle in the
drafter's place: it knows the text that comes without drafts and errs where it is told to. So every
number of accepted drafts occurs at every residue of the compression ratios, and stops and limits
fall on every place of a block.
"""

import contextlib
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import deepinfer_jax as di
from deepinfer_jax import testing
from deepinfer_jax.cache import init_cache
from deepinfer_jax.decoding import loop
from deepinfer_jax.decoding.adjustments import Seen, adjust
from deepinfer_jax.decoding.distribution import GREEDY_BELOW, draw, process
from deepinfer_jax.decoding.generate import _result
from deepinfer_jax.decoding.noise import Purpose
from deepinfer_jax.decoding.request import prepare
from deepinfer_jax.decoding.speculative import Proposal, Verdict, draft_number
from deepinfer_jax.model.engram_tables import token_map
from deepinfer_jax.rows import Rows

B, S, N, BLOCK = 4, 24, 26, 5
LENGTHS = np.array([24, 1, 13, 6], np.int32)
SEEDS = np.array([7, 2**32 - 1, 40, 41], np.uint32)
# Greedy; hot, penalised; cut on all sides; greedy with penalties.
MIXED = di.Sampling(
    temperature=np.array([0.0, 1.3, 0.9, 0.0], np.float32),
    top_p=np.array([1.0, 1.0, 0.9, 1.0], np.float32),
    top_k=np.array([-1, -1, 30, -1], np.int32),
    min_p=np.array([0.0, 0.0, 0.02, 0.0], np.float32),
    repetition_penalty=np.array([1.0, 1.2, 1.0, 1.5], np.float32),
    presence_penalty=np.array([0.0, 0.4, 0.0, 0.0], np.float32),
    frequency_penalty=np.array([0.0, 0.3, 0.0, 0.7], np.float32),
)
FIELDS = ("tokens", "lengths", "logprobs", "processed_logprobs", "top", "processed_top", "finish")
SHAPES = {
    "ratio_2_and_engram": dict(
        compress_ratios=(2, 2, 0),
        kv_source_layer_ids=(0,),
        index_source_layer_ids=(0, 1),
        engram_layer_ids=(1,),
    ),
    "ratios_3_and_1": dict(
        compress_ratios=(3, 1, 0),
        kv_source_layer_ids=(0, 1),
        index_source_layer_ids=(0, 1),
        engram_layer_ids=(),
        hc_mult=2,
    ),
}
DEFAULT, FLOAT32 = di.Numerics(reproducible=True), di.Numerics("float32", reproducible=True)
FAST = di.Numerics("float32", False, False, reproducible=False)


@functools.cache
def model(name="ratio_2_and_engram", numerics=DEFAULT):
    config = testing.tiny_config(
        num_hidden_layers=2,
        num_nextn_predict_layers=1,
        dspark_block_size=BLOCK,
        dspark_target_layer_ids=(0, 1),
        candidate_source_layer_id=0,
        candidate_topk_blocks=2,
        candidate_block_size=2,
        sliding_window=5,
        index_topk=3,
        **SHAPES[name],
    )
    ids = token_map(testing.byte_tokenizer()) if config.engram_layer_ids else None
    weights = testing.random_weights(config, 9, quantized=numerics == DEFAULT)
    return di.Transformer(config, numerics, weights, ids)


def slow(*values):
    """A parameter whose program takes long to compile and shows little that others do not."""
    return pytest.param(*values, marks=pytest.mark.slow)


# Most programs here run once or twice: most of their time would go into optimising them.
QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0}


def prompts():
    """Few different tokens, so that penalties and n-grams meet them again."""
    tokens = np.random.default_rng(41).choice(np.arange(3, 60), (B, S)).astype(np.int32)
    return np.where(np.arange(S) < LENGTHS[:, None], tokens, 2)


def usual(**changes):
    return dict(
        seeds=SEEDS, max_new_tokens=N, sampling=MIXED, ignore_eos=True, top_logprobs=2
    ) | changes  # fmt: skip


@functools.partial(jax.jit, static_argnames="shape", compiler_options=QUICK_TO_COMPILE)
def run_plainly(model, request, *, shape):
    state = loop.run(model, loop.initial(model, request, shape), shape, None)
    return _result(state, model.config.pad_token_id)


def plain(name="ratio_2_and_engram", numerics=DEFAULT, **arguments):
    """`generate` without drafts, compiled like the programs with an oracle."""
    ready, request, shape = prepare(model(name, numerics), prompts(), LENGTHS, **usual(**arguments))
    return jax.tree.map(np.asarray, run_plainly(ready, request, shape=shape))


undrafted = functools.cache(plain)


def assert_same(found, expected, rows=slice(None)):
    for field in FIELDS:
        left, right = getattr(found, field), getattr(expected, field)
        for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
            assert np.array_equal(np.asarray(a)[rows], np.asarray(b)[rows]), field


def assert_cut(found, whole, lengths):
    """The first `lengths` tokens of `whole`, and padding behind them."""
    inside = np.arange(N) < np.asarray(lengths)[:, None]
    assert np.array_equal(found.lengths, lengths)
    assert np.array_equal(found.tokens, np.where(inside, whole.tokens, 2))
    assert np.array_equal(found.logprobs, np.where(inside, whole.logprobs, 0))


@contextlib.contextmanager
def in_place(**changes):
    with contextlib.ExitStack() as stack:
        for name, value in changes.items():
            stack.enter_context(mock.patch.object(loop, name, value))
        yield


def oracle(future, wrong, acceptance):
    """A drafter that knows the text, all [B, N]: the next tokens, where to err, what to expect."""

    def propose(model, cache, anchors, seen, request, n, coupling):
        column = jnp.minimum(anchors.count[:, None] + jnp.arange(n), future.shape[1] - 1)
        tokens, errs, expected = (
            jnp.take_along_axis(a, column, axis=1) for a in (future, wrong, acceptance)
        )
        tokens = jnp.where(errs, (tokens + 1) % model.config.vocab_size, tokens)
        return Proposal(jnp.where(anchors.ready[:, None], tokens, -1), expected, None), cache

    return propose


@functools.partial(
    jax.jit, static_argnames=("shape", "changes"), compiler_options=QUICK_TO_COMPILE
)
def run_with_oracle(model, request, future, wrong, acceptance, *, shape, changes=()):
    with in_place(dspark=oracle(future, wrong, acceptance), **dict(changes)):
        state = loop.run(model, loop.initial(model, request, shape), shape, None)
    return _result(state, model.config.pad_token_id)


def with_oracle(share_wrong=0.4, seed=0, name="ratio_2_and_engram", numerics=DEFAULT, changes=(),
                draft="fixed", num_drafts=None, step_times=None, future=None, wrong=None,
                **arguments):  # fmt: skip
    """`generate` with the oracle, which errs at random places."""
    ready, request, shape = prepare(
        model(name, numerics), prompts(), LENGTHS, draft=draft, num_drafts=num_drafts,
        step_times=step_times, **usual(**arguments),
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    future = undrafted(name, numerics).tokens if future is None else future
    wrong = rng.random((B, N)) < share_wrong if wrong is None else wrong
    acceptance = rng.random((B, N)).astype(np.float32)
    result = run_with_oracle(
        ready, request, future, wrong, acceptance, shape=shape, changes=changes
    )
    return jax.tree.map(np.asarray, result)


# --- The oracle's drafts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "numerics"),
    [
        ("ratio_2_and_engram", DEFAULT),
        ("ratios_3_and_1", FLOAT32),
        slow("ratios_3_and_1", DEFAULT),
        slow("ratio_2_and_engram", FLOAT32),
    ],
    ids=["ratio 2", "ratios 3 and 1, float32", "ratios 3 and 1", "ratio 2, float32"],
)
def test_any_number_of_accepted_drafts_gives_the_undrafted_text(name, numerics):
    accepted = np.zeros(BLOCK, int)
    for seed, share in enumerate((0.0, 0.1, 0.3, 0.5, 0.8, 1.0)):
        found = with_oracle(share, seed, name, numerics)
        assert_same(found, undrafted(name, numerics))
        assert np.array_equal(found.lengths, found.stats.steps + found.stats.accepted.sum(axis=1))
        accepted += found.stats.accepted.sum(axis=0)
        counted = found.stats.calibration
        assert np.array_equal(counted.judged.sum(axis=1), found.stats.judged.sum(axis=1))
        lower = np.arange(10) / 10 * counted.judged
        assert (counted.confidence >= lower - 1e-4).all()
        assert (counted.confidence <= lower + 0.1 * counted.judged + 1e-4).all()
        assert (counted.judged.sum(axis=0) > 0).sum() > 3  # the oracle's confidences are uniform
    assert (accepted > 10).all() and (np.diff(accepted) < 0).all()
    assert len({len(set(row)) > 6 for row in undrafted(name, numerics).tokens.tolist()}) == 1


def test_right_drafts_are_accepted_whole():
    found = with_oracle(share_wrong=0.0)
    # One token comes with the prompt, then drafts and one more; one token is drafted on at once.
    usually, at_once = 1 + -(-(N - 1) // (BLOCK + 1)), -(-N // (BLOCK + 1))
    assert np.array_equal(found.stats.steps, np.where(LENGTHS == 1, at_once, usually))
    assert (found.stats.accepted.sum(axis=1) == N - found.stats.steps).all()


@pytest.mark.parametrize("num_drafts", [1, slow(3)])
def test_fewer_drafts_than_the_block_give_the_same_text(num_drafts):
    for seed in range(3):
        found = with_oracle(0.3, seed, num_drafts=num_drafts)
        assert_same(found, undrafted())
        assert found.stats.accepted.shape == (B, num_drafts) and found.stats.accepted.any()


def test_a_schedule_gives_the_same_text():
    """Some drafts are verified and some not, in each of three schedules."""
    for seed, seconds in enumerate(((1.0, 1.1, 1.2), (1.0, 2.0, 3.0), (1.0, 1.001, 9.0))):
        times = di.StepTimes.of([8, 16, 24], seconds)
        found = with_oracle(0.3, seed, draft="scheduled", step_times=times)
        assert_same(found, undrafted())
        assert found.stats.accepted.any()
    assert (found.stats.verified.sum(axis=0)[-1] < found.stats.verified.sum(axis=0)[0]).all()


@pytest.mark.parametrize(
    ("draft", "times"), [slow("fixed", None), ("scheduled", di.StepTimes.of([12, 24], [1.0, 1.3]))]
)
def test_fast_numerics_give_the_same_tokens_in_either_capacity(draft, times):
    """Bits differ there: log-probabilities are close, and tokens equal unless two all but tie."""
    found = with_oracle(0.3, 1, numerics=FAST, draft=draft, step_times=times)
    expected = undrafted(numerics=FAST)
    assert np.array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4, rtol=0)
    assert found.stats.accepted.any()
    rows = found.stats.verified.sum() + found.stats.steps.sum()
    if draft == "scheduled":
        assert rows < 0.9 * found.stats.steps.sum() * (BLOCK + 1)


def test_a_stop_at_every_place_of_a_block_ends_the_sequence_there():
    whole = undrafted()
    ended_inside = 0
    for place in range(1, 9):
        stops = [[int(row[place])] for row in whole.tokens]
        lengths = [row.tolist().index(s[0]) + 1 for row, s in zip(whole.tokens, stops, strict=True)]
        found = with_oracle(0.2, place, stop_ids=stops)
        assert_cut(found, whole, lengths)
        assert (found.finish == di.Finish.STOP).all()
        ended_inside += (found.stats.steps < found.lengths).sum()
    assert ended_inside > 8


def test_a_limit_at_every_place_of_a_block_ends_the_sequence_there():
    for limit in range(1, 9):
        limits = np.array([limit, limit + 1, N, limit + 2], np.int32)
        found = with_oracle(0.2, limit, limits=limits)
        assert_cut(found, undrafted(), limits)
        assert (found.finish == di.Finish.LENGTH).all()


def test_a_stop_before_the_minimum_length_is_not_chosen_though_it_is_drafted():
    """The oracle proposes the stop; the row must refuse it at the same number of tokens."""
    stop = [[int(row[3])] for row in undrafted().tokens]
    expected = plain(stop_ids=stop, min_new_tokens=[9, 4, 0, 20])
    found = with_oracle(0.0, stop_ids=stop, min_new_tokens=[9, 4, 0, 20])
    assert_same(found, expected)
    assert not np.array_equal(expected.tokens, undrafted().tokens)


def test_biases_bans_and_forced_tokens_hold_on_every_row():
    often = np.bincount(undrafted().tokens.ravel()).argmax()
    changes = dict(
        logit_bias={int(often): -np.inf, 70: 2.5},
        forced=[[-1, 9, 9], [5, -1, -1], [-1, -1, -1], [-1, -1, 8]],
    )
    expected = plain(**changes)
    assert not (expected.tokens == often).any()
    assert expected.tokens[0, 1] == expected.tokens[0, 2] == 9 and expected.tokens[1, 0] == 5
    assert_same(with_oracle(0.3, **changes), expected)  # the oracle goes on proposing banned tokens
    assert_same(with_oracle(0.3, future=expected.tokens, **changes), expected)


def test_a_row_that_gives_no_token_ends_its_sequence_inside_a_block():
    """From its fourth token on everything is banned in one sequence: its drafts are not taken."""
    whole = undrafted()
    ban_all = np.arange(model().config.vocab_size)
    bias = np.full((B, ban_all.size), 0.0, np.float32)
    bias[1] = -np.inf
    forced = np.full((B, 3), -1)
    forced[1] = whole.tokens[1, :3]
    changes = dict(
        logit_bias=(np.broadcast_to(ban_all, bias.shape), bias), forced=forced
    )  # fmt: skip
    found = with_oracle(0.0, **changes)
    assert np.array_equal(found.lengths, [N, 3, N, N])
    assert found.finish[1] == di.Finish.INVALID
    assert np.array_equal(found.tokens[1, :3], whole.tokens[1, :3])
    assert_same(found, whole, [0, 2, 3])


# --- Mistakes that are made -----------------------------------------------------------------------


def draw_by_row(log_probs, greedy, seeds, positions, sample):
    """Noise keyed by the row of a round instead of the position."""
    rows = positions - positions[0]
    return draw(log_probs, greedy, seeds, rows, sample)


def judge_next_row(choices, drafts, quota):
    """Every draft compared with the row behind it."""
    return loop.Verdict(choices, _leading(choices[:, 1:] == drafts, quota))


def judge_one_more(choices, drafts, quota):
    """The first draft that is not the target's choice taken as well."""
    accepted = _leading(choices[:, :-1] == drafts, quota)
    more = jnp.minimum(accepted + 1, quota)
    tokens = jnp.where(jnp.arange(drafts.shape[1]) < more[:, None], drafts, choices[:, :-1])
    return Verdict(jnp.concatenate([tokens, choices[:, -1:]], axis=1), more)


def _leading(kept, quota):
    kept &= jnp.arange(kept.shape[1]) < quota[:, None]
    return jnp.cumprod(kept, axis=1).sum(axis=1)


def parts_that_do_not_roll_back(config, slots, capacity, rows, **options):
    """Room for one group of compressor parts, as if no row were ever taken back."""
    cache = init_cache(config, slots, capacity, rows, **options)
    ratios = [config.layers[i].ratio for i in config.kv_source_layer_ids]
    parts = [None if p is None else p[:, :r] for p, r in zip(cache.parts, ratios, strict=True)]
    return cache.replace(parts=tuple(parts))


def history_of_rejected_tokens(config, slots, capacity, rows, **options):
    """Room for one n-gram, as if no row were ever taken back."""
    cache = init_cache(config, slots, capacity, rows, **options)
    return cache.replace(history=cache.history[:, : config.engram_max_ngram_size])


def window_that_does_not_roll_back(config, slots, capacity, rows, **options):
    """A ring of just the window."""
    cache = init_cache(config, slots, capacity, rows, **options)
    return cache.replace(window=tuple(w[:, : config.sliding_window] for w in cache.window))


class CountsRejected(Seen):
    """Penalties that count every row's choice, kept or not."""

    def add(self, tokens, valid):
        return super().add(tokens, tokens >= 0)


jax.tree_util.register_dataclass(CountsRejected, ["prompt", "counts"], [])


MISTAKES = {
    "noise keyed by row": dict(draw=draw_by_row),
    "compared with the next row": dict(judge_shared=judge_next_row),
    "one draft too many": dict(judge_shared=judge_one_more),
    "compressor not rolled back": dict(init_cache=parts_that_do_not_roll_back),
    "n-grams of rejected tokens": dict(init_cache=history_of_rejected_tokens),
    "window without room": dict(init_cache=window_that_does_not_roll_back),
    "penalties for rejected tokens": dict(Seen=CountsRejected),
}


@pytest.mark.parametrize(
    "mistake", [slow(m) if m in ("compared with the next row", "window without room") else m
                for m in MISTAKES]
)  # fmt: skip
def test_a_planted_mistake_changes_the_text(mistake):
    changes = tuple(MISTAKES[mistake].items())
    found = with_oracle(0.4, 3, changes=changes)
    with pytest.raises(AssertionError):
        assert_same(found, undrafted())


# --- A drafter that is the target -----------------------------------------------------------------


def self_draft(model, cache, anchors, seen, request, n, coupling, flatter=1.0):
    """The target itself, run token by token; its rows are taken back as always."""
    batch = anchors.tokens.shape[0]
    slot = jnp.where(anchors.ready, jnp.arange(batch), -1)
    token, ahead, tokens, log_probs = anchors.tokens, cache, [], []
    greedy = request.sampling.temperature < GREEDY_BELOW
    purpose = Purpose.TARGET if coupling == "shared" else Purpose.DRAFT
    for k in range(n):
        rows = Rows(token, slot, anchors.position + k, jnp.zeros(batch, bool))
        hidden, ahead, _ = di.step(model, ahead, rows)
        scores = adjust(
            di.logits(model, hidden)[:, None], request.sampling, request.adjustments, seen,
            anchors.count + k, jnp.zeros((batch, 0), jnp.int32),
        )  # fmt: skip
        log_probs.append(process(scores[:, 0] / flatter, request.sampling))
        number = anchors.position + 1 + k
        if coupling == "rejection":
            number = draft_number(anchors.position, k, n)
        token = draw(log_probs[-1], greedy, request.seeds, number, request.sample, purpose)
        seen = seen.add(token[:, None], (token >= 0)[:, None])
        tokens.append(token)
    tokens = jnp.where(anchors.ready[:, None], jnp.stack(tokens, axis=1), -1)
    drawn_from = None if coupling == "shared" else jnp.stack(log_probs, axis=1)
    return Proposal(tokens, jnp.ones((batch, n), jnp.float32), drawn_from), cache


@pytest.mark.parametrize("coupling", [slow("shared"), "rejection"])
def test_a_drafter_that_is_the_target_is_always_right(coupling):
    ready, request, shape = prepare(
        model(), prompts(), LENGTHS, draft="fixed", coupling=coupling, num_drafts=2, **usual()
    )

    @functools.partial(jax.jit, compiler_options=QUICK_TO_COMPILE)
    def program(model, request):
        with in_place(dspark=self_draft):
            state = loop.run(model, loop.initial(model, request, shape), shape, None)
        return _result(state, model.config.pad_token_id)

    found = jax.tree.map(np.asarray, program(ready, request))
    assert np.array_equal(found.stats.accepted, found.stats.judged)
    assert np.array_equal(found.stats.accepted, found.stats.verified)
    usually, at_once = 1 + -(-(N - 1) // 3), -(-N // 3)
    assert np.array_equal(found.stats.steps, np.where(LENGTHS == 1, at_once, usually))
    if coupling == "shared":
        assert_same(found, undrafted())
    else:
        assert_same(found, undrafted(), [0, 3])  # greedy sequences know no chance


@pytest.mark.slow
def test_rejection_in_the_loop_gives_texts_as_often_as_plain_sampling():
    """Three new tokens of three likely ones each: how often each of the texts comes."""
    batch, calls = 512, 40
    tokens = np.repeat(prompts()[:1, :6], batch, axis=0)
    arguments = dict(max_new_tokens=3, sampling=di.Sampling(0.9, top_k=3), ignore_eos=True)

    def request_of(seeds, **drafting):
        return prepare(model(), tokens, None, seeds=seeds, **arguments, **drafting)

    _, _, shape = request_of(np.arange(batch), draft="fixed", coupling="rejection", num_drafts=2)

    @jax.jit
    def rejecting(model, request):
        with in_place(dspark=functools.partial(self_draft, flatter=2.0)):
            state = loop.run(model, loop.initial(model, request, shape), shape, None)
        return _result(state, 2)

    texts, accepted, judged = {"plain": [], "rejection": []}, 0, 0
    for call in range(calls):
        # Other seeds for each, so that the two samples are independent.
        seeds = np.arange(batch, dtype=np.uint32) + 2 * call * batch
        ready, request, _ = request_of(
            seeds, draft="fixed", coupling="rejection", num_drafts=2
        )
        found = rejecting(ready, request)
        accepted += int(found.stats.accepted.sum())
        judged += int(found.stats.judged.sum())
        texts["rejection"].append(np.asarray(found.tokens))
        plain = di.generate(model(), tokens, seeds=seeds + np.uint32(batch), **arguments)
        texts["plain"].append(np.asarray(plain.tokens))
    assert 0.5 < accepted / judged < 0.97  # some are accepted, some are not
    both = np.concatenate([*texts["plain"], *texts["rejection"]])
    _, kind = np.unique(both, axis=0, return_inverse=True)
    half = batch * calls
    table = [np.bincount(k, minlength=kind.max() + 1) for k in (kind[:half], kind[half:])]
    assert kind.max() > 8
    assert stats.chi2_contingency(table).pvalue > 1e-3


# --- The model's own drafter ----------------------------------------------------------------------


@functools.cache
def generated():
    """The reference of this section, compiled as users compile."""
    return jax.tree.map(np.asarray, di.generate(model(), prompts(), LENGTHS, **usual()))


@functools.cache
def drafted():
    result = di.generate(model(), prompts(), LENGTHS, draft="scheduled", **usual())
    return jax.tree.map(np.asarray, result)


def test_the_drafter_of_the_model_changes_nothing():
    assert_same(drafted(), generated())
    assert drafted().stats.verified.any()


def test_batch_mates_slots_and_padding_do_not_matter_with_drafts():
    order = np.array([2, 0, 3, 1])
    tokens = np.full((B, S + 3), 265, np.int32)
    tokens[:, :S] = prompts()[order]
    arguments = usual(seeds=SEEDS[order], sampling=jax.tree.map(lambda a: a[order], MIXED))
    found = di.generate(
        model(), tokens, LENGTHS[order], capacity=90, draft="scheduled", **arguments
    )
    found = jax.tree.map(np.asarray, found)
    for field in FIELDS:
        for a, b in zip(
            jax.tree.leaves(getattr(found, field)),
            jax.tree.leaves(getattr(generated(), field)),
            strict=True,
        ):
            assert np.array_equal(a, b[order]), field


def test_a_stream_with_drafts_ends_with_what_generate_returns():
    parts = list(di.stream(model(), prompts(), LENGTHS, burst=3, draft="scheduled", **usual()))
    assert_same(parts[-1], generated())
    before = np.zeros(B, int)
    for part in parts:
        assert (np.asarray(part.lengths) >= before).all()
        before = np.asarray(part.lengths)


def test_other_values_compile_nothing_with_drafts(compile_counter):
    drafted()
    times = di.StepTimes.of([8, 16, 24], [2.0, 5.0, 6.0])
    before = compile_counter.count
    for changes in (
        dict(seeds=SEEDS + np.uint32(1)),
        dict(sampling=di.Sampling(0.5, 0.7, 11, 0.1, 1.1, 0.2, 0.3)),
        dict(limits=5, min_new_tokens=[1, 2, 3, 4]),
        dict(stop_ids=[3, 4], logit_bias={5: 1.0, 6: -np.inf}, forced=[7, 8]),
        dict(sample=3, step_times=times),
    ):
        di.generate(model(), prompts(), LENGTHS, draft="scheduled", **usual(**changes))
    assert compile_counter.count == before


def test_the_program_with_drafts_calls_no_host():
    @jax.jit
    def program(model, tokens, lengths):
        return di.generate(model, tokens, lengths, draft="scheduled", **usual())

    text = program.lower(model(), prompts(), LENGTHS).as_text()
    assert "stablehlo.while" in text
    for word in ("callback", "infeed", "outfeed", "stablehlo.send", "stablehlo.recv"):
        assert word not in text, word


def test_samples_of_a_prompt_differ_and_do_not_depend_on_their_number():
    few = prompts()[:2]
    arguments = dict(seeds=SEEDS[:2], max_new_tokens=8, sampling=di.Sampling(1.5), ignore_eos=True)
    two = di.generate(model(), few, LENGTHS[:2], n=2, **arguments)
    tokens = np.asarray(two.tokens).reshape(2, 2, 8)
    assert (tokens[:, 0] != tokens[:, 1]).any(axis=1).all()
    for sample in range(2):
        one = di.generate(model(), few, LENGTHS[:2], sample=sample, **arguments)
        assert np.array_equal(one.tokens, tokens[:, sample])
