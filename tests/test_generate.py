"""`generate` says what a plain loop over `forward` says, and is one program (spec 9.6).

All comparisons are of bits: both sides run in reproducible numerics.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax import testing
from deepinfer_jax.decoding.distribution import process
from deepinfer_jax.decoding.noise import noise
from deepinfer_jax.model.engram_tables import token_map

B, S, N = 3, 40, 12
LENGTHS = np.array([40, 1, 21], np.int32)
SEEDS = np.array([7, 2**32 - 1, 40], np.uint32)
# Sequence by sequence: greedy, hot, and cut on both sides.
MIXED = di.Sampling(
    temperature=np.array([0.0, 1.5, 0.8], np.float32),
    top_p=np.array([1.0, 1.0, 0.9], np.float32),
    top_k=np.array([-1, -1, 20], np.int32),
)
HOT = di.Sampling(temperature=30.0)  # nearly uniform over the vocabulary
PAD, EOS = 2, 1


@functools.cache
def model():
    config = testing.tiny_config(
        num_hidden_layers=2,
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        compress_ratios=(2, 2),
        kv_source_layer_ids=(0,),
        index_source_layer_ids=(0, 1),
        candidate_source_layer_id=0,
        candidate_topk_blocks=2,
        candidate_block_size=2,
        sliding_window=5,
        index_topk=3,
        engram_layer_ids=(1,),
    )
    ids = token_map(testing.byte_tokenizer())
    weights = testing.random_weights(config, 9, quantized=True)
    return di.Transformer(config, di.Numerics(reproducible=True), weights, ids)


def prompts():
    tokens = np.random.default_rng(41).integers(3, 266, (B, S), np.int32)
    return np.where(np.arange(S) < LENGTHS[:, None], tokens, PAD)


def generate(**arguments):
    given = dict(seeds=SEEDS, max_new_tokens=N, sampling=MIXED, ignore_eos=True)
    result = di.generate(model(), prompts(), LENGTHS, **given | arguments)
    return jax.tree.map(np.asarray, result)


@functools.cache
def usual():
    return generate()


def assert_same(found, expected, rows=slice(None), expected_rows=slice(None)):
    for field in ("tokens", "lengths", "logprobs", "finish"):
        left = np.asarray(getattr(found, field))[rows]
        right = np.asarray(getattr(expected, field))[expected_rows]
        assert np.array_equal(left, right), field


def with_weight(change, **paths):
    """The model with `change(array)` in place of some weights (`head=..` is head.weight)."""
    leaves, structure = jax.tree.flatten(model())
    copy = jax.tree.unflatten(structure, leaves)
    for name in paths:
        part = getattr(copy, name)
        fresh = jax.tree.unflatten(*reversed(jax.tree.flatten(part)))
        fresh.weight = type(part.weight)(change(part.weight.get_value()))
        setattr(copy, name, fresh)
    return copy


@functools.cache
def plain_loop():
    """New tokens and both log-probabilities, one `forward` of everything for each token."""
    tokens = np.full((B, S + N), PAD, np.int32)
    tokens[:, :S] = prompts()
    lengths = LENGTHS.copy()
    chosen, scores, everyone = [], ([], []), np.arange(B)
    for _ in range(N):
        logits = di.forward(model(), tokens, lengths).logits[everyone, lengths - 1]
        kept = np.asarray(process(logits, MIXED))
        luck = np.asarray(noise(SEEDS, lengths, logits.shape[1]))
        greedy = np.asarray(MIXED.temperature == 0)[:, None]
        token = np.where(greedy, kept, kept + luck).argmax(axis=-1)
        wide = np.asarray(logits, np.float64)
        softmax = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
        for kind, values in zip(scores, (softmax, kept), strict=True):
            kind.append(values[everyone, token])
        chosen.append(token)
        tokens[everyone, lengths] = token
        lengths = lengths + 1
    return np.stack(chosen, axis=1), *(np.stack(kind, axis=1) for kind in scores)


def test_tokens_are_those_of_a_plain_loop_over_forward():
    tokens, *_ = plain_loop()
    assert np.array_equal(usual().tokens, tokens)
    assert all(len(set(row)) > 3 for row in tokens.tolist())  # not one token again and again
    assert (usual().lengths == N).all() and (usual().finish == di.Finish.LENGTH).all()


def test_logprobs_are_the_log_softmax_of_forward():
    _, raw, processed = plain_loop()
    np.testing.assert_allclose(usual().logprobs, raw, atol=2e-6, rtol=0)
    np.testing.assert_allclose(usual().processed_logprobs, processed, atol=2e-6, rtol=0)


def test_steps_are_counted():
    assert (usual().stats.steps == N).all()


def test_batch_mates_and_order_do_not_matter():
    order = np.array([2, 0, 1])
    sampling = jax.tree.map(lambda a: a[order], MIXED.broadcast(B))
    found = di.generate(
        model(), prompts()[order], LENGTHS[order], seeds=SEEDS[order], max_new_tokens=N,
        sampling=sampling, ignore_eos=True,
    )  # fmt: skip
    assert_same(found, usual(), expected_rows=order)
    others = prompts()
    others[1:] = 77
    found = di.generate(
        model(), others, [40, 5, 2], seeds=[7, 1, 2], max_new_tokens=N, sampling=MIXED,
        ignore_eos=True,
    )  # fmt: skip
    assert_same(found, usual(), [0], [0])
    assert (found.tokens[1:] != usual().tokens[1:]).any(axis=1).all()


def test_padding_capacity_and_prefill_chunks_do_not_matter():
    """Sixteen sequences are prefilled in chunks of sixteen, three of them in one chunk of forty."""
    rows = np.arange(16) % B
    tokens = np.full((16, S + 4), 265, np.int32)
    tokens[:, :S] = prompts()[rows]
    found = di.generate(
        model(), tokens, LENGTHS[rows], seeds=SEEDS[rows], max_new_tokens=N, capacity=130,
        sampling=jax.tree.map(lambda a: a[rows], MIXED.broadcast(B)), ignore_eos=True,
    )  # fmt: skip
    assert_same(found, usual(), expected_rows=rows)


def test_seeds_decide_sampled_tokens_and_nothing_else():
    other = generate(seeds=SEEDS + np.uint32(5))
    assert np.array_equal(other.tokens[0], usual().tokens[0])  # greedy
    assert (other.tokens[1:] != usual().tokens[1:]).any(axis=1).all()
    same = generate(seeds=np.uint32(9), sampling=HOT)
    twin = generate(seeds=np.array([9, 9, 9], np.uint32), sampling=HOT)
    assert_same(same, twin)
    assert_same(generate(seeds=None), generate(seeds=np.arange(B, dtype=np.uint32)))


def test_a_key_is_short_for_seeds():
    key = jax.random.key(3)
    seeds = jax.random.bits(key, (B,), jnp.uint32)
    assert_same(generate(key=key, seeds=None), generate(seeds=seeds))
    other = generate(key=jax.random.key(4), seeds=None)
    assert (other.tokens[1:] != generate(seeds=seeds).tokens[1:]).any(axis=1).all()


def assert_cut(found, whole, lengths):
    """The first `lengths` tokens of `whole`, and padding behind them."""
    assert np.array_equal(found.lengths, lengths)
    inside = np.arange(N) < np.asarray(lengths)[:, None]
    assert np.array_equal(found.tokens, np.where(inside, whole.tokens, PAD))
    assert np.array_equal(found.logprobs, np.where(inside, whole.logprobs, 0))


def test_each_sequence_has_its_own_limit():
    limits = np.array([1, N, 5])
    found = generate(limits=limits)
    assert_cut(found, usual(), limits)
    assert (found.finish == di.Finish.LENGTH).all()
    assert np.array_equal(found.stats.steps, limits)
    assert_cut(generate(limits=4), usual(), [4, 4, 4])


def test_stop_ids_end_a_sequence_and_are_returned():
    tokens = usual().tokens
    stop = int(tokens[1, 4])
    first = [int((row == stop).argmax()) + 1 if stop in row else N for row in tokens]
    found = generate(stop_ids=[stop, 265])
    assert_cut(found, usual(), first)
    expected = [di.Finish.STOP if stop in row else di.Finish.LENGTH for row in tokens]
    assert np.array_equal(found.finish, expected)
    # Of its own for each sequence: another one's stop id is an ordinary token.
    own = [[int(tokens[0, 2]), -1], [-1, -1], [int(tokens[2, 0]), -1]]
    first = [tokens[0].tolist().index(own[0][0]) + 1, N, 1]
    found = generate(stop_ids=own)
    assert_cut(found, usual(), first)
    assert np.array_equal(found.finish, [di.Finish.STOP, di.Finish.LENGTH, di.Finish.STOP])


def test_a_stop_at_the_limit_is_a_stop():
    tokens = usual().tokens
    where = tokens[2].tolist().index(int(tokens[2, 3])) + 1
    found = generate(stop_ids=[int(tokens[2, 3])], limits=where)
    assert found.lengths[2] == where and found.finish[2] == di.Finish.STOP


def test_the_end_of_sequence_token_stops_unless_ignored():
    for start in range(0, 3000, B):
        seeds = np.arange(start, start + B, dtype=np.uint32)
        whole = generate(seeds=seeds, sampling=HOT)
        if (whole.tokens == EOS).any():
            break
    has = (whole.tokens == EOS).any(axis=1)
    lengths = np.where(has, (whole.tokens == EOS).argmax(axis=1) + 1, N)
    assert (lengths < N).any() and not has.all()
    found = generate(seeds=seeds, sampling=HOT, ignore_eos=False)
    assert_cut(found, whole, lengths)
    assert np.array_equal(found.finish, np.where(has, di.Finish.STOP, di.Finish.LENGTH))


def test_a_model_whose_weights_are_not_numbers_gives_no_token():
    broken = with_weight(lambda w: w.at[100].set(jnp.nan), head=True)
    found = di.generate(broken, prompts(), LENGTHS, max_new_tokens=N, sampling=MIXED)
    assert (found.finish == di.Finish.INVALID).all() and (found.lengths == 0).all()
    assert (found.tokens == PAD).all() and (found.logprobs == 0).all()


def test_only_the_sequence_that_goes_wrong_ends():
    """The embedding of a token that one sequence generates: it keeps what it has until then."""
    tokens = usual().tokens
    elsewhere = set(prompts().ravel()) | set(tokens[[0, 2]].ravel())
    at, bad = next((i, t) for i, t in enumerate(tokens[1]) if int(t) not in elsewhere)
    assert at < N - 1
    broken = with_weight(lambda w: w.at[bad].set(jnp.nan), embed=True)
    found = di.generate(
        broken, prompts(), LENGTHS, seeds=SEEDS, max_new_tokens=N, sampling=MIXED, ignore_eos=True
    )
    assert_cut(jax.tree.map(np.asarray, found), usual(), [N, at + 1, N])
    length, invalid = di.Finish.LENGTH, di.Finish.INVALID
    assert np.array_equal(found.finish, [length, invalid, length])


@pytest.mark.parametrize("burst", [1, 5, 100])
def test_a_stream_ends_with_what_generate_returns(burst):
    arguments = dict(seeds=SEEDS, max_new_tokens=N, sampling=MIXED, limits=[N, 3, 9],
                     ignore_eos=True)  # fmt: skip
    parts = list(di.stream(model(), prompts(), LENGTHS, burst=burst, **arguments))
    assert_same(parts[-1], generate(limits=[N, 3, 9]))
    # Sequences whose prompts last longer begin a round or more after the others.
    assert -(-N // burst) <= len(parts) <= -(-(N + S) // burst)
    before = np.zeros(3, int)
    for round_, part in enumerate(parts[:-1], 1):
        count = np.asarray(part.lengths)
        assert (count >= before).all() and (count <= np.minimum(round_ * burst, [N, 3, 9])).all()
        assert count.max() > before.max() or count.sum() > before.sum()
        assert_cut(part, usual(), count)
        before = count


@functools.cache
def program():
    """`generate` inside a caller's own program, compiled once for the tests below."""

    @jax.jit
    def answer(model, tokens, lengths, seeds, sampling):
        result = di.generate(
            model, tokens * 1, lengths, seeds=seeds, max_new_tokens=N, sampling=sampling,
            ignore_eos=True,
        )  # fmt: skip
        return result, result.logprobs.sum(axis=1)

    arguments = model(), prompts(), LENGTHS, SEEDS, MIXED.broadcast(B)
    return answer.lower(*arguments).compile(), arguments


def test_generate_inside_a_program_of_the_caller():
    compiled, arguments = program()
    result, total = compiled(*arguments)
    assert_same(result, usual())
    np.testing.assert_allclose(total, usual().logprobs.sum(axis=1), rtol=1e-6)


def test_other_values_compile_nothing(compile_counter):
    tokens = prompts()
    generate()
    before = compile_counter.count
    generate(seeds=SEEDS + np.uint32(1), sampling=HOT)
    generate(seeds=np.uint32(3), sampling=di.Sampling(0.5, 0.7, 11))
    generate(limits=3)
    generate(limits=np.array([1, 2, 3]), ignore_eos=False)
    generate(stop_ids=(5,))
    generate(stop_ids=[4, 9, 77])
    generate(stop_ids=[[4], [9], [77]])
    changed = np.random.default_rng(1).integers(0, 266, tokens.shape)
    di.generate(model(), changed, [2, 3, 4], seeds=SEEDS, max_new_tokens=N, sampling=MIXED)
    assert compile_counter.count == before
    generate(max_new_tokens=N - 1)  # another shape: the counter does count
    assert compile_counter.count > before


def computations(text):
    """Bodies of an HLO module's computations by name, and which ones each mentions."""
    found = re.findall(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    bodies = dict(found)
    return bodies, {
        name: set(re.findall(r"%?([\w.\-]+)", body)) & bodies.keys() for name, body in found
    }


def inside_loops(text):
    """All instructions that run in the body or condition of a loop, nested calls included."""
    bodies, mentions = computations(text)
    todo = re.findall(r"(?:body|condition)=%?([\w.\-]+)", text)
    assert todo
    reached = set()
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += mentions[name]
    return "\n".join(bodies[name] for name in reached)


def test_the_loop_calls_no_host():
    text = program()[0].as_text()
    assert "while(" in text
    for word in ("callback", "infeed", "outfeed", "send(", "recv("):
        assert word not in text, word


def test_the_loop_copies_no_weight_and_no_cache():
    """Only arrays of two axes or more: a copied norm weight costs nothing."""
    compiled, (given, *_) = program()
    config, numerics = given.config, given.numerics
    cache = di.init_cache(config, B, S + N, S, numerics=numerics)
    values = di.trainable(given)[0]  # on CPU the program unpacks quantised weights first
    shapes = {a.shape for a in jax.tree.leaves((given, values, cache)) if a.ndim > 1}
    assert len(shapes) > 20
    copies = re.findall(
        r"= \(?\w+\[([\d,]+)\][^\n=]*? (?:copy|copy-start)\(%?([\w.\-]+)",
        inside_loops(compiled.as_text()),
    )
    assert copies
    # Results of row tiles start as copies of one array of zeros, which may have a weight's shape.
    copied = {tuple(map(int, s.split(","))) for s, operand in copies if "broadcast" not in operand}
    assert not copied & shapes


def test_default_numerics_are_reproducible_on_cpu():
    if jax.default_backend() != "cpu":
        pytest.skip("a claim about CPU")
    loose = dataclasses.replace(model().numerics, reproducible=None)
    found = di.generate(
        model().with_numerics(loose), prompts(), LENGTHS, seeds=SEEDS, max_new_tokens=N,
        sampling=MIXED, ignore_eos=True,
    )  # fmt: skip
    assert_same(found, usual())
