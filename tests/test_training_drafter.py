"""The scripts that train and measure the drafter of `tiny`, on a random model (spec 9.3, 9.8)."""

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
from deepinfer_jax.model.drafter import DraftBlock, draft_block, markov_step
from deepinfer_jax.model.linear import as_array
from deepinfer_jax.trainable import named_parameters

sys.path.append(str(Path(__file__).parent.parent / "training" / "tiny"))
train_drafter = importlib.import_module("train_drafter")
evaluate_drafter = importlib.import_module("evaluate_drafter")

B, S = 2, 48
WINDOW, BLOCK = 5, 4
# Fewer positions than the window, a ring that is just full, and rings written several times over.
ANCHORS = np.array([[1, 5, 30], [3, 9, 43]], np.int32)
EXACT = di.Numerics("float32", quantize_activations=False, quantize_cache=False)
TOKENS = np.random.default_rng(60).integers(3, 259, (B, S + 1), np.int32)
TEXT = TOKENS[:, :-1]
# Sums over another number of rows are taken in another order.
CLOSE = dict(rtol=0, atol=2e-5)


@functools.cache
def model(numerics=EXACT, stages=2) -> di.Transformer:
    config = testing.tiny_config(
        num_hidden_layers=1,
        num_nextn_predict_layers=stages,
        compress_ratios=(2,) + (0,) * stages,
        kv_source_layer_ids=(0,),
        index_source_layer_ids=(0,),
        candidate_source_layer_id=-1,
        index_topk=3,
        sliding_window=WINDOW,
        dspark_block_size=BLOCK,
        dspark_target_layer_ids=(0,),
        engram_layer_ids=(),
    )
    weights = testing.random_weights(config, 61, quantized=numerics.quantize_activations)
    return di.Transformer(config, numerics, weights)


@functools.cache
def read() -> di.Forward:
    """What the model says of the text."""
    return di.forward(model(), TEXT, capture=("draft",))


def features() -> jax.Array:
    return read().captured["dspark.features"]


@jax.jit
def blocks(features, tokens, anchors) -> DraftBlock:
    """Blocks of the training form, [B, A, n, ...]."""
    block, _ = train_drafter.draft(model(), features, tokens, anchors)
    return jax.tree.map(lambda a: a.reshape(*anchors.shape, BLOCK, -1), block)


# --- Training -------------------------------------------------------------------------------------


def test_blocks_are_those_of_a_cache_that_the_model_has_filled():
    cache = di.init_cache(model().config, B, S, S, numerics=EXACT, drafts=True)
    slots = jnp.arange(B)
    rows = di.rectangle(TEXT, slots, 0 * slots, jnp.full(B, S), jnp.zeros((B, S), bool))
    _, cache, _ = jax.jit(di.step)(model(), cache, rows)
    drafts = jax.jit(draft_block)
    trained = blocks(features(), TEXT, ANCHORS)
    for column, anchor in enumerate(ANCHORS.T):
        block, _, _ = drafts(model(), cache, TEXT[slots, anchor], slots, anchor)
        np.testing.assert_allclose(trained.hidden[:, column], block.hidden, **CLOSE)
        np.testing.assert_allclose(trained.logits[:, column], block.logits, **CLOSE)


def test_a_block_sees_its_window_and_no_other_block():
    trained = blocks(features(), TEXT, ANCHORS).hidden
    moved = ANCHORS.copy()
    moved[:, [0, 2]] = [[4, 7], [8, 10]]
    np.testing.assert_array_equal(blocks(features(), TEXT, moved).hidden[:, 1], trained[:, 1])
    for column, anchor in enumerate(ANCHORS[0]):
        position = np.arange(S)[:, None]
        inside = (position >= anchor - WINDOW) & (position < anchor)
        changed = blocks(jnp.where(inside, features(), 9.0), TEXT, ANCHORS).hidden
        np.testing.assert_array_equal(changed[0, column], trained[0, column])
    for seen in (25, 29):  # the ends of the window of anchor 30
        changed = blocks(features().at[0, seen].multiply(-1), TEXT, ANCHORS).hidden
        assert (np.abs(changed[0, 2] - trained[0, 2]).max(axis=1) > 1e-3).all()


def test_loss_is_the_one_written_out():
    rng = np.random.default_rng(62)
    drafted, target = (rng.standard_normal((6, BLOCK, 11)).astype(np.float32) for _ in range(2))
    logit = rng.standard_normal((6, BLOCK)).astype(np.float32)
    total, terms = train_drafter.objective(
        drafted, target, logit, train_drafter.Weights(0.3, 0.8, 0.7)
    )
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (target, drafted))
    overlap, sure = np.minimum(p, q).sum(-1), 1 / (1 + np.exp(-logit))
    token = -(p * np.log(q)).sum(-1)
    surprise = -overlap * np.log(sure) - (1 - overlap) * np.log(1 - sure)
    distance = 2 * (1 - overlap)
    weight = np.array([1, 0.7, 0.49, 0.343])
    weight *= BLOCK / weight.sum()
    expected = [(weight * x).mean() for x in (token, distance, surprise)]
    np.testing.assert_allclose(terms[:3], expected, rtol=1e-5)
    np.testing.assert_allclose(terms.accepted, overlap.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(total, np.dot([0.3, 0.8, 1], expected), rtol=1e-5)


def test_rows_of_a_block_meet_the_scores_and_tokens_of_their_positions(monkeypatch):
    def objective(drafted, target, confidence, weights):
        return jnp.float32(0), train_drafter.Loss(drafted, target, confidence, None, None)

    monkeypatch.setattr(train_drafter, "objective", objective)
    specs, target = parameter_specs(model().config), read().logits
    _, seen = jax.jit(
        lambda *a: train_drafter.loss({}, model(), specs, features(), *a, weights=None)
    )(target, TEXT, ANCHORS)
    drafted, given, confidence = seen[:3]
    sequence = np.repeat(np.arange(B), ANCHORS.shape[1])[:, None]
    row = (ANCHORS[..., None] + np.arange(BLOCK)).reshape(-1, BLOCK)
    np.testing.assert_array_equal(given, target[sequence, row])
    block = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), blocks(features(), TEXT, ANCHORS))
    scores, logit = jax.jit(markov_step)(model(), *block, TEXT[sequence, row].reshape(-1))
    np.testing.assert_allclose(drafted.reshape(scores.shape), scores, **CLOSE)
    np.testing.assert_allclose(confidence.reshape(-1), logit, **CLOSE)


@pytest.mark.slow
def test_every_weight_of_the_drafter_learns_and_no_other_changes(monkeypatch):
    """Without decay, and but for the router's biases, only a gradient moves a weight."""
    monkeypatch.setattr(train_drafter, "STEPS_A_CALL", 2)
    monkeypatch.setattr(train_drafter, "rate_at", lambda progress, peak: peak)
    monkeypatch.setattr(sys.modules["train"], "WEIGHT_DECAY", 0.0)
    served = model(di.Numerics(), stages=1)
    before = named_parameters(served)
    size = train_drafter.Size(windows=2, length=24, anchors=4, updates=2)
    corpus = TOKENS.reshape(-1).astype(np.uint16)
    trained = train_drafter.train(served, corpus, 1e-9, 0.02, 0, size, train_drafter.Weights())
    after = named_parameters(trained)
    assert list(after) == list(before)
    for name, weight in after.items():
        new, old = (as_array(w, jnp.float32) for w in (weight, before[name]))
        same = [
            a.dtype == b.dtype and bool((a == b).all())
            for a, b in zip(jax.tree.leaves(weight), jax.tree.leaves(before[name]), strict=True)
        ]
        assert np.isfinite(new).all(), name
        if not name.startswith("mtp."):
            assert all(same), name
        elif ".experts." in name:
            assert (new != old).any(axis=(1, 2)).all(), name
        else:
            assert (new != old).any(), name


# --- Measuring ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_choices_are_those_of_the_model_after_the_text_and_the_drafts(temperature):
    lengths, seeds = np.array([48, 30], np.int32), np.array([3, 4], np.uint32)
    sampling = di.Sampling(temperature=jnp.float32(temperature))
    drafts, choice, confidence, there = map(
        np.asarray, evaluate_drafter.draft_along(model(), TEXT, lengths, sampling, seeds)
    )
    np.testing.assert_array_equal(there, [[True, True], [True, False]])
    anchors = np.array([[16, 32, 0]] * B)
    block = blocks(features(), TEXT, anchors)
    pick = jax.jit(evaluate_drafter.choose)
    for b, c in np.argwhere(there):
        anchor = anchors[b, c]
        position, seed = anchor + 1 + np.arange(BLOCK), np.repeat(seeds[b], BLOCK)
        with_drafts = TEXT.copy()
        with_drafts[b, position] = drafts[b, c]
        scores = di.forward(model(), with_drafts, capture=("draft",)).logits[b, position - 1]
        np.testing.assert_array_equal(choice[b, c], pick(scores, sampling, seed, position))

        hidden, logits = block.hidden[b, c], block.logits[b, c]
        scores, logit = jax.jit(markov_step)(model(), hidden, logits, with_drafts[b, position - 1])
        np.testing.assert_array_equal(drafts[b, c], pick(scores, sampling, seed, position))
        np.testing.assert_allclose(confidence[b, c], jax.nn.sigmoid(logit), **CLOSE)


def test_figures_are_those_counted_by_hand():
    agree = np.array([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]], bool)
    confidence = np.full((4, 4), 0.75, np.float32)
    confidence[:, 0] = [1.0, 0.25, 1.0, 1.0]
    f = evaluate_drafter.figures(agree, confidence)
    assert f["blocks"] == 4
    assert f["tokens_per_step"] == 1 + (2 + 0 + 4 + 1) / 4
    assert f["cumulative"] == [3 / 4, 2 / 4, 1 / 4, 1 / 4]
    assert f["reached"] == [4, 3, 2, 1]
    assert f["conditional"] == [3 / 4, 2 / 3, 1 / 2, 1.0]
    # Reached at 0.75: six drafts, four accepted; at 1: three, all accepted; at 0.25: one, rejected.
    assert f["acceptance"] == 0.7
    assert f["confidence"] == pytest.approx((6 * 0.75 + 3 + 0.25) / 10)
    assert f["calibration_error"] == pytest.approx((6 * 0.75 - 4 + 0.25) / 10)


def test_pieces_cover_texts_without_their_last_token():
    tokens, offsets = np.arange(1200, dtype=np.uint16), np.array([0, 10, 1100, 1200])
    parts = evaluate_drafter.pieces(tokens, offsets, np.array([0, 1, 2]))
    assert [(part[0], len(part), document) for part, document in parts] == [
        (10, 512, 1), (522, 512, 1), (1034, 65, 1), (1100, 99, 2)
    ]  # fmt: skip
