"""What comes later changes nothing before it, to the last bit (spec 3.4, 3.5, 8.3)."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax import testing
from deepinfer_jax.model.engram_tables import token_map

B, S = 2, 45
# The last visible positions: around the window of 6, the groups of 2, blocks of 2 x 2 tokens,
# the selections of 4 entries and the candidate set of 3 blocks, at every residue modulo 4.
LAST = (0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 22, 37, S - 2)
NUMERICS = {
    "default": di.Numerics(),
    "default-reproducible": di.Numerics(reproducible=True),
    "float32": di.Numerics(dtype="float32"),
}


@functools.cache
def model_of(numerics):
    config = testing.tiny_config(
        num_hidden_layers=3,
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        compress_ratios=(2, 2, 1),
        kv_source_layer_ids=(0, 2),
        index_source_layer_ids=(0, 1, 2),
        candidate_source_layer_id=0,
        candidate_topk_blocks=3,
        candidate_block_size=2,
        sliding_window=6,
        index_topk=4,
        engram_layer_ids=(0, 2),
    )
    ids = token_map(testing.byte_tokenizer())
    return di.Transformer(config, NUMERICS[numerics], testing.random_weights(config, 4), ids)


@functools.cache
def tokens_and_logits(numerics):
    tokens = np.random.default_rng(21).integers(0, 266, (B, S), np.int32)
    return tokens, np.asarray(di.forward(model_of(numerics), tokens).logits)


@pytest.mark.parametrize("numerics", NUMERICS)
def test_later_tokens_change_no_earlier_logits(numerics):
    rng = np.random.default_rng(22)
    tokens, logits = tokens_and_logits(numerics)
    for first, second in zip(LAST, LAST[::-1], strict=True):
        last = np.array([first, second])  # each sequence is cut elsewhere
        later = np.arange(S) > last[:, None]
        other = np.where(later, rng.integers(0, 266, tokens.shape), tokens)
        changed = np.asarray(di.forward(model_of(numerics), other).logits)
        assert np.array_equal(changed[~later], logits[~later]), last
        follows = np.arange(B), last + 1
        assert (changed[follows] != logits[follows]).any(axis=-1).all(), last


@pytest.mark.parametrize("numerics", NUMERICS)
def test_padding_changes_nothing(numerics):
    tokens, logits = tokens_and_logits(numerics)
    for lengths in ([1, S], [S - 1, 7], [18, 30]):
        inside = np.arange(S) < np.array(lengths)[:, None]
        padded = np.where(inside, tokens, 2)
        found = np.asarray(di.forward(model_of(numerics), padded, np.array(lengths)).logits)
        assert np.array_equal(found[inside], logits[inside]), lengths


def test_later_values_that_are_not_numbers_change_no_earlier_logits():
    """Zero times NaN is NaN: a mask that only multiplies by zero would show here."""
    model = model_of("default")
    tokens, _ = tokens_and_logits("default")
    vectors = np.asarray(model.embed.weight.get_value().astype(jnp.float32))[tokens]
    clean = np.asarray(di.forward(model, tokens, embeddings=vectors).logits)
    for last in LAST:
        poisoned = np.where((np.arange(S) > last)[:, None], np.float32(np.nan), vectors)
        found = np.asarray(di.forward(model, tokens, embeddings=poisoned).logits)
        assert np.array_equal(found[:, : last + 1], clean[:, : last + 1]), last
        assert np.isnan(found[:, last + 1 :]).all()


def test_embeddings_of_the_tokens_give_the_logits_of_the_tokens():
    model = model_of("default")
    tokens, logits = tokens_and_logits("default")
    vectors = np.asarray(model.embed.weight.get_value().astype(jnp.float32))[tokens]
    assert np.array_equal(np.asarray(di.forward(model, tokens, embeddings=vectors).logits), logits)
