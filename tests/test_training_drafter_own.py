"""The second stage of the drafter's training: paths of the model's own choices."""

import functools
import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax import testing
from deepinfer_jax.checkpoint.tensor_names import parameter_specs
from deepinfer_jax.model.linear import as_array
from deepinfer_jax.trainable import named_parameters

sys.path.append(str(Path(__file__).parent.parent / "training" / "tiny"))
train_drafter = importlib.import_module("train_drafter")
own = importlib.import_module("train_drafter_own")

B, S, BLOCK = 2, 32, 3
EXACT = di.Numerics("float32", quantize_activations=False, quantize_cache=False)
TOKENS = np.random.default_rng(70).integers(3, 259, (B, S), np.int32)
# Paths that overlap, that start at one place, and that end with the window.
ANCHORS = np.array([[1, 2, 4, 29], [6, 17, 17, 19]], np.int32)
# Sums over another number of rows are taken in another order.
CLOSE = dict(rtol=0, atol=2e-5)


@functools.cache
def model(numerics=EXACT) -> di.Transformer:
    config = testing.tiny_config(
        num_hidden_layers=1,
        num_nextn_predict_layers=1,
        compress_ratios=(2, 0),
        kv_source_layer_ids=(0,),
        index_source_layer_ids=(0,),
        candidate_source_layer_id=-1,
        index_topk=3,
        sliding_window=5,
        dspark_block_size=BLOCK,
        dspark_target_layer_ids=(0,),
        engram_layer_ids=(),
    )
    weights = testing.random_weights(config, 71, quantized=numerics.quantize_activations)
    return di.Transformer(config, numerics, weights)


@functools.cache
def walked():
    """Features, the choices of the model and the hidden states; the first window is greedy."""

    @jax.jit
    def walk(model, tokens, anchors):
        features, hidden, cache = own.read(model, tokens)
        greedy = jnp.array([True, False])
        key = jax.random.key(0)
        return features, *own.own_paths(model, hidden, cache, anchors, greedy, key)

    return jax.tree.map(np.asarray, walk(model(), TOKENS, ANCHORS))


def test_paths_are_those_of_the_model_after_the_true_text():
    features, chosen, hidden = walked()
    out = di.forward(model(), TOKENS, capture=("draft",))
    np.testing.assert_allclose(features, out.captured["dspark.features"], **CLOSE)
    scores = jax.jit(di.logits)(model(), hidden.reshape(-1, hidden.shape[-1]))
    scores = scores.reshape(*chosen.shape, -1)
    for column, anchor in enumerate(ANCHORS.T):
        text = TOKENS.copy()
        for k in range(BLOCK - 1):
            text[np.arange(B), anchor + 1 + k] = chosen[:, column, k]
        place = anchor[:, None] + np.arange(BLOCK)
        expected = di.forward(model(), text, capture=("draft",)).logits
        expected = np.take_along_axis(np.asarray(expected), place[..., None], axis=1)
        np.testing.assert_allclose(scores[:, column], expected, **CLOSE)
    np.testing.assert_array_equal(chosen[0], scores[0].argmax(axis=-1))
    assert (chosen[1] != scores[1].argmax(axis=-1)).any()
    assert (chosen[1, 1] != chosen[1, 2]).any()


def test_rows_of_a_block_meet_the_choices_of_its_path(monkeypatch):
    def objective(drafted, target, confidence, weights, agree):
        return jnp.float32(0), train_drafter.Loss(drafted, target, agree, None, None)

    monkeypatch.setattr(own, "objective", objective)
    features, chosen, hidden = walked()
    greedy = np.array([True, False])
    weights = own.OwnWeights(temperature=0.25)
    specs = parameter_specs(model().config)
    _, seen = jax.jit(lambda model, *a: own.loss({}, model, specs, *a, jax.random.key(3), weights))(
        model(), features, TOKENS, ANCHORS, chosen, hidden, greedy
    )
    first = np.take_along_axis(TOKENS, ANCHORS, axis=1)[..., None]
    previous = np.concatenate([first, chosen[..., :-1]], axis=-1)
    scores, _, _ = jax.jit(train_drafter.scores_of)(model(), features, TOKENS, ANCHORS, previous)
    target = jax.jit(di.logits)(model(), hidden.reshape(-1, hidden.shape[-1]))
    target = np.asarray(target).reshape(scores.shape)
    heat = np.repeat([0.25, 1.0], ANCHORS.shape[1])[:, None, None].astype(np.float32)
    np.testing.assert_allclose(seen.cross_entropy, scores / heat, rtol=0, atol=1e-4)
    np.testing.assert_allclose(seen.distance, target / heat, rtol=0, atol=1e-4)
    agree, best = np.asarray(seen.confidence), np.asarray(scores).argmax(-1) == target.argmax(-1)
    half = len(agree) // 2
    np.testing.assert_array_equal(agree[:half], best[:half])
    rates = np.stack([np.cumprod(a, axis=1).mean(axis=0) for a in (agree[:half], agree[half:])])
    np.testing.assert_allclose(seen.accepted, rates, rtol=1e-6)


def test_drafts_behind_a_rejected_one_weigh_less():
    rng = np.random.default_rng(72)
    drafted, target = (rng.standard_normal((2, 4, 11)).astype(np.float32) for _ in range(2))
    logit = rng.standard_normal((2, 4)).astype(np.float32)
    agree = np.array([[True, False, True, True], [True, True, True, False]])
    weights = train_drafter.Weights(0.3, 0.8, 0.5, 0.1)
    total, terms = train_drafter.objective(drafted, target, logit, weights, agree)
    weight = np.array([[1, 0.5, 0.025, 0.0125], [1, 0.5, 0.25, 0.125]])
    weight *= 8 / weight.sum()
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (target, drafted))
    token, distance = -(p * np.log(q)).sum(-1), np.abs(p - q).sum(-1)
    surprise = np.log1p(np.exp(np.where(agree, -logit, logit)))
    expected = [(weight * x).mean() for x in (token, distance, surprise)]
    np.testing.assert_allclose(terms[:3], expected, rtol=1e-5)
    np.testing.assert_allclose(total, np.dot([0.3, 0.8, 1], expected), rtol=1e-5)


def test_sharpening_multiplies_the_scores_and_leaves_the_confidence():
    features, chosen, _ = walked()
    scores = jax.jit(train_drafter.scores_of)
    previous = chosen  # any tokens will do
    before = scores(model(), features, TOKENS, ANCHORS, previous)
    after = scores(own.sharpened(model(), 2.0), features, TOKENS, ANCHORS, previous)
    np.testing.assert_array_equal(after[0], 2 * before[0])
    np.testing.assert_array_equal(after[1], before[1])


@pytest.mark.slow
def test_training_changes_the_drafter_and_nothing_else(monkeypatch):
    monkeypatch.setattr(train_drafter, "rate_at", lambda progress, peak: peak)
    served = model(di.Numerics())
    before = named_parameters(served)
    size = train_drafter.Size(windows=4, length=S, anchors=2, updates=2)
    corpus = np.tile(TOKENS.reshape(-1), 2).astype(np.uint16)
    trained = train_drafter.train(
        served, corpus, 1e-9, 0.02, 0, size, own.OwnWeights(), own.train_steps
    )
    after = named_parameters(trained)
    assert list(after) == list(before)
    for name, weight in after.items():
        new, old = (as_array(w, jnp.float32) for w in (weight, before[name]))
        assert np.isfinite(new).all(), name
        assert bool((new != old).any()) == name.startswith("mtp."), name
