"""The drafter in JAX against the golden data and the executable paper (spec 9).

Sequences are drafted for at A anchors each. An anchor has a slot of its own, which was run up to
it, so all of them are blocks of one call; `propose` lays them out as the golden package does.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import paper
import paper_drafter
import pytest
from einops import rearrange
from golden_files import case, relative_error
from test_default_numerics import Loaded, folder_of
from test_model_goldens import (
    FLOAT32,
    FLOAT32_NO_QUANTISATION,
    QUICK_TO_COMPILE,
    model_of,
    slow_except,
)

import deepinfer_jax as di
from deepinfer_jax import testing
from deepinfer_jax.model.drafter import draft_block, markov_step, remember_context

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*DeepSeek's engine would refuse it"),
    pytest.mark.filterwarnings("ignore:.*the last rows of the tables are never read"),
]

CASES = ("dspark", "flash_mini", "quantised")
SHOW = frozenset({"streams", "attention", "router"})
quick_jit = functools.partial(jax.jit, compiler_options=QUICK_TO_COMPILE)


def rectangle_of(tokens, counts):
    slots = jnp.arange(counts.size, dtype=jnp.int32)
    return di.rectangle(tokens, slots, 0 * slots, counts.reshape(-1), jnp.zeros(tokens.shape, bool))


@quick_jit
def read(model, tokens, lengths, anchors):
    """Caches of sequences cut at their anchors and uncut, and what the drafter reads of the latter.

    Args:
        model: with a drafter.
        tokens: int32 [B, S].
        lengths: int32 [B].
        anchors: int32 [B, A].

    Returns:
        A cache, int32 [B, A] with the anchors' slots in it, captures [B, S, ...].
    """
    (B, S), A = tokens.shape, anchors.shape[1]
    counts = jnp.concatenate([anchors, lengths[:, None]], axis=1)
    rows = rectangle_of(jnp.repeat(tokens, A + 1, axis=0), counts)
    cache = di.init_cache(model.config, B * (A + 1), S, S, numerics=model.numerics, drafts=True)
    _, cache, seen = di.step(model, cache, rows, show=frozenset({"draft"}))
    slots = jnp.arange(B * (A + 1), dtype=jnp.int32).reshape(B, A + 1)
    return cache, slots[:, :-1], {k: v.reshape(B, A + 1, S, -1)[:, -1] for k, v in seen.items()}


@quick_jit
def remember(model, features, anchors):
    """A cache with a slot for every anchor [B, A], from features [B, S, F] in place of a text's."""
    (B, S, _), A = features.shape, anchors.shape[1]
    rows = rectangle_of(jnp.zeros((B * A, S), jnp.int32), anchors)
    cache = di.init_cache(model.config, B * A, S, S, numerics=model.numerics, drafts=True)
    features = rearrange(jnp.repeat(features, A, axis=0), "b s f -> (b s) f")
    return remember_context(model, features, rows, jnp.int32(B * A * S), cache)[1]


@quick_jit
def propose(model, cache, slots, anchors, previous):
    """All that the drafter says at anchors, under the golden names.

    Args:
        model: with a drafter.
        cache: run up to the anchors.
        slots: int32 [B, A].
        anchors: int32 [B, A].
        previous: int32 [B, A, n], the tokens from each anchor on, fed to the Markov head.

    Returns:
        Arrays [B, A * n, ...]; greedy chains [B, A, n, ...].
    """
    (B, A, n), layers = previous.shape, model.config.num_hidden_layers
    block, _, seen = draft_block(
        model, cache, previous[..., 0].reshape(-1), slots.reshape(-1), anchors.reshape(-1),
        show=SHOW,
    )  # fmt: skip
    found = {}
    for key, value in seen.items():
        head, _, layer = key.partition(".")
        found[f"{head}.{int(layer) - layers}"] = value

    hidden, logits = (rearrange(a, "b n d -> (b n) d") for a in block)
    normed = model.mtp[-1].norm(hidden, model.config.rms_norm_eps, model.numerics.wide)
    bias, confidence = markov_step(model, hidden, 0 * logits, previous.reshape(-1))
    _, of_normed = markov_step(model, normed, logits, previous.reshape(-1))
    found |= {"hidden_prenorm": hidden, "base_logits": logits, "markov_logits": bias}
    found |= {"hidden": normed, "confidence_prenorm": confidence, "confidence_postnorm": of_normed}
    found = {k: v.reshape(B, A * n, *v.shape[1:]) for k, v in found.items()}

    def chain(last, row):
        scores, confidence = markov_step(model, *row, last)
        token = jnp.argmax(scores, axis=1).astype(jnp.int32)
        return token, (token, scores, confidence)

    rows = tuple(jnp.moveaxis(a, 1, 0) for a in block)
    _, chains = jax.lax.scan(chain, previous[..., 0].reshape(-1), rows)
    ids, scores, confidence = (jnp.moveaxis(a, 0, 1).reshape(B, A, n, *a.shape[2:]) for a in chains)
    best = jax.lax.top_k(scores, 2)[0]
    return found | {
        "greedy_ids": ids,
        "greedy_logits": scores,
        "greedy_confidence_prenorm": confidence,
        "greedy_min_gap": jnp.min(best[..., 0] - best[..., 1]).reshape(1),
    }


# --- Golden data ----------------------------------------------------------------------------------


def golden_proposal(name, numerics):
    golden, model = case(name), model_of(name).with_numerics(numerics)
    g = golden.files["f32"]
    anchors, tokens = g["dspark.anchors"], g["input_ids"]
    previous = g["dspark.previous_token_ids"].reshape(*anchors.shape, -1)
    lengths = golden.real.sum(1).astype(np.int32)
    cache, slots, seen = read(model, tokens, lengths, anchors)
    seen = {key.removeprefix("dspark."): value for key, value in seen.items()}
    return seen | propose(model, cache, slots, anchors, previous)


@pytest.mark.golden
@pytest.mark.parametrize("name", CASES)
def test_float32_drafter_equals_golden_with_the_same_tokens(name):
    found, compared = golden_proposal(name, FLOAT32), set()
    recorded = case(name).files["f32"]
    for key in (k.removeprefix("dspark.") for k in recorded if k.startswith("dspark.")):
        if key not in found:
            continue
        golden, value = recorded["dspark." + key], np.asarray(found[key])
        compared.add(key)
        if key in ("features", "main_hidden"):
            value, golden = value[case(name).real], golden[case(name).real]
        assert value.shape == golden.shape, key
        if golden.dtype.kind == "i":
            np.testing.assert_array_equal(value, golden, err_msg=key)
        elif key == "greedy_min_gap":  # of two logits, each good to 1e-6 of its size
            np.testing.assert_allclose(value, golden, rtol=0, atol=2e-5)
        else:  # the limits of the data are wider: 1e-4 of the logits, 1e-3 of the confidences
            assert relative_error(value, golden) < 1e-5, key
    recorded = {key.removeprefix("dspark.") for key in recorded if key.startswith("dspark.")}
    # The first two are inputs, the others are tested by their effects.
    elsewhere = {"anchors", "previous_token_ids", "draft_input_ids", "position_ids", "visible"}
    assert recorded - elsewhere == compared


@pytest.mark.golden
@pytest.mark.parametrize("name", slow_except("dspark", names=CASES))
def test_float32_drafter_without_cache_round_trips_equals_golden(name):
    found, prefix = golden_proposal(name, FLOAT32_NO_QUANTISATION), "noquant.dspark."
    recorded = {k: v for k, v in case(name).files["f32"].items() if k.startswith(prefix)}
    assert recorded.keys() == {prefix + "base_logits", prefix + "confidence_prenorm"}
    for key, golden in recorded.items():
        value = found[key.removeprefix(prefix)]
        assert relative_error(value, golden) < 1e-5, key
        np.testing.assert_allclose(value, golden, rtol=0, atol=2e-4, err_msg=key)


# --- The executable paper -------------------------------------------------------------------------

LENGTH = 24
SEEDS = (1, 13, 15, 18)


def paper_proposal(files, features, anchors, tokens, numerics):
    """What the paper says at anchors [B, A], as `propose` lays it out."""
    blocks, chains = [], []
    for a in range(anchors.shape[1]):
        at = features, tokens[:, a], anchors[:, a]
        blocks.append(paper_drafter.draft(files.config, files.weights, *at, numerics=numerics))
        chains.append(
            paper_drafter.greedy(
                files.config, files.weights, blocks[-1], tokens[:, a], numerics=numerics
            )
        )
    found = {key: np.concatenate([b[key] for b in blocks], axis=1) for key in blocks[0]}
    for key, name in (("ids", "ids"), ("logits", "logits"), ("confidence", "confidence_prenorm")):
        found[f"greedy_{name}"] = np.stack([chain[key] for chain in chains], axis=1)
    return found


def compare(seed, make, numerics, paper_numerics):
    """What JAX and the paper draft on the same random features, at every kind of anchor."""
    files = Loaded(folder_of(seed, make))
    model = di.load(files.folder, numerics=numerics)
    config, rng = model.config, np.random.default_rng([seed, 2])
    W, width = config.sliding_window, config.hidden_size * len(config.dspark_target_layer_ids)
    features = rng.standard_normal((2, LENGTH, width)).astype(numerics.activation)
    anchors = np.array([(0, W - 1, W + 1), (1, W, W + 7)], np.int32)
    tokens = rng.integers(0, config.vocab_size, (*anchors.shape, config.dspark_block_size))
    tokens = tokens.astype(np.int32)
    slots = np.arange(anchors.size, dtype=np.int32).reshape(anchors.shape)
    found = propose(model, remember(model, features, anchors), slots, anchors, tokens)
    expected = paper_proposal(
        files, features.astype(float), anchors, tokens[..., 0], paper_numerics
    )
    return config, {k: np.asarray(v, float) for k, v in found.items()}, expected


@pytest.fixture
def make(tmp_path_factory):
    return tmp_path_factory.getbasetemp().joinpath


def test_the_seeds_cover_what_drafters_differ_in():
    configs = [testing.random_config(np.random.default_rng(seed)) for seed in SEEDS]
    assert {c.num_nextn_predict_layers for c in configs} == {1, 2, 3}
    assert {c.dspark_block_size for c in configs} == {1, 3, 5}
    assert {c.sliding_window for c in configs} == {1, 5, 16}
    assert {c.hc_mult for c in configs} == {1, 3, 4}
    assert {len(c.dspark_target_layer_ids) for c in configs} == {1, 2}


@pytest.mark.parametrize("seed", SEEDS)
def test_default_drafter_equals_the_paper(seed, make):
    config, found, expected = compare(seed, make, di.Numerics(), paper.Numerics())
    stages = range(config.num_nextn_predict_layers)
    by_stage = ("attn_out", "streams", "premix", "router_w")
    shown = [f"{kind}.{i}" for kind in by_stage for i in stages]
    for key in (*shown, "hidden_prenorm", "hidden", "base_logits", "greedy_confidence_prenorm"):
        assert relative_error(found[key], expected[key]) < 2e-2, key
    for key in ("hidden_prenorm", "base_logits"):
        # Where no sum fell the other way, nothing differs by more than a few last bits.
        by_row = np.sqrt(np.mean((found[key] - expected[key]) ** 2, axis=-1))
        assert np.median(by_row) < 1e-3 * np.sqrt(np.mean(expected[key] ** 2)), key
    for key in (*(f"router_idx.{i}" for i in stages), "greedy_ids"):
        assert np.mean(found[key] == expected[key]) >= 0.9, key


@pytest.mark.parametrize("seed", [pytest.param(s, marks=pytest.mark.slow) for s in SEEDS])
def test_float32_drafter_equals_the_paper(seed, make):
    """Without round trips: a code that lies on a boundary in float32 need not in float64."""
    switches = {"dtype": "float32", "quantize_activations": False, "quantize_cache": False}
    config, found, expected = compare(
        seed, make, di.Numerics(**switches), paper.Numerics(**switches)
    )
    compared = found.keys() & expected.keys()
    assert len(compared) == 6 + 5 * config.num_nextn_predict_layers
    for key in compared:
        if "_id" in key:
            np.testing.assert_array_equal(found[key], expected[key], err_msg=key)
        else:
            assert relative_error(found[key], expected[key]) < 2e-6, key
