"""The JAX model against the executable paper on random models, layer by layer.

The golden data covers other numerics than the default (spec 5), so here the paper is the oracle. It
runs in float64 with the same rounding points; every layer of the JAX model is fed what the paper
fed to its own. One step of bfloat16 may fall the other way where a sum is taken in another order,
and a selection may follow: a differing entry must score as the last one chosen, as closely as the
scores themselves agree.
"""

import functools

import jax.numpy as jnp
import numpy as np
import paper
import pytest
from golden_files import Case, relative_error
from test_model_goldens import layers_alone, without_room

import deepinfer_jax as di
from deepinfer_jax import testing

QUICK = (3, 13, 26)
SEEDS = QUICK + (0, 1, 2, 4, 5, 7, 8, 10, 32)
MARKED = [pytest.param(seed, marks=() if seed in QUICK else pytest.mark.slow) for seed in SEEDS]
LENGTH = 24
SHOW = frozenset({"selection", "scores", "router", "entries", "engram"})

pytestmark = pytest.mark.filterwarnings("ignore:.*DeepSeek's engine would refuse it")


@functools.cache
def folder_of(seed, make):
    """A random checkpoint in the released format; every third one is quantised."""
    path = make(f"random_{seed}")
    config = testing.random_config(np.random.default_rng(seed))
    testing.write_checkpoint(path, config, seed=seed, quantized=seed % 3 == 0)
    return path


class Loaded(Case):
    """A checkpoint folder of our own, read as the golden ones are."""

    @property
    def folder(self):
        return self.name


def compare(seed, make, numerics, paper_numerics):
    """What the paper did and what JAX did with each layer's input, for two sequences."""
    files = Loaded(folder_of(seed, make))
    model = di.load(files.folder, numerics=numerics)
    rng = np.random.default_rng([seed, 1])
    tokens = rng.integers(0, model.config.vocab_size, (2, LENGTH))
    image_mask = np.zeros(tokens.shape, bool)
    image_mask[1, 5:9] = True
    expected = paper.forward(
        files.config,
        files.weights,
        tokens,
        numerics=paper_numerics,
        image_mask=image_mask,
        embeddings=files.weights["embed.weight"][tokens],
        token_map=paper.token_map(files.tokenizer),
    )
    states = [
        tuple(expected[f"{kind}.{i}"].astype(np.float32) for kind in ("streams", "premix"))
        for i in range(files.layers)
    ]
    lengths = np.full(2, LENGTH, np.int32)
    results, seen = layers_alone(model, tokens, lengths, image_mask, states, SHOW)
    return model.config, expected, results, without_room(seen, model.config, LENGTH)


def check_selection(ours, theirs, our_scores, their_scores, key):
    """Rows of entry lists [T, K] that differ, each only by entries at the boundary."""
    different = 0
    for mine, other, a, b in zip(ours, theirs, our_scores, their_scores, strict=True):
        mine, other = set(mine.tolist()) - {-1}, set(other.tolist()) - {-1}
        if mine != other:
            different += 1
            noise = np.max(np.abs(np.where(b > -np.inf, a - b, 0)))
            assert len(mine) == len(other) and noise > 0, key  # equal scores: the lower index wins
            boundary = min(b[list(other)])
            assert np.all(np.abs(b[list(mine ^ other)] - boundary) <= 2 * noise), key
    return different


def check_selections(config, expected, seen, most_rows):
    for role in config.layers:
        if role.mode in ("full", "reindex"):
            key, scores = f"topk.{role.index}", f"index_scores.{role.index}"
            rows = 2 * LENGTH
            lists = [a[key].reshape(rows, -1) for a in (seen, expected)]
            values = [a[scores].reshape(rows, -1).astype(float) for a in (seen, expected)]
            assert check_selection(*lists, *values, key) <= most_rows * rows, key
        key = f"router_idx.{role.index}"
        same = np.all(seen[key] == expected[key], axis=-1)
        assert np.mean(same) >= 1 - most_rows, key


@pytest.fixture
def make(tmp_path_factory):
    return tmp_path_factory.getbasetemp().joinpath


def test_the_seeds_cover_what_models_differ_in():
    configs = [testing.random_config(np.random.default_rng(seed)) for seed in SEEDS]
    roles = [role for config in configs for role in config.layers]
    assert {r.mode for r in roles} == {"window", "full", "reindex", "reuse"}
    assert {r.ratio for r in roles} >= {0, 1, 2, 3, 4}
    assert any(r.restricted for r in roles) and any(r.candidate_source for r in roles)
    assert any(c.engram_layer_ids for c in configs) and {c.hc_mult for c in configs} >= {1, 2, 4}
    assert 0.0 in {c.swiglu_limit for c in configs}
    for field in ("hidden_size", "q_lora_rank", "head_dim", "moe_intermediate_size"):
        assert any(getattr(c, field) % 32 for c in configs), field  # partial blocks


@pytest.mark.parametrize("seed", MARKED)
def test_float32_layers_equal_the_paper(seed, make):
    """Without round trips: a code that lies on a boundary in float32 need not in float64."""
    switches = {"dtype": "float32", "quantize_activations": False, "quantize_cache": False}
    config, expected, results, seen = compare(
        seed, make, di.Numerics(**switches), paper.Numerics(**switches)
    )
    for i, (streams, premix) in enumerate(results, start=1):
        assert relative_error(streams, expected[f"streams.{i}"]) < 1e-5, i
        assert relative_error(premix, expected[f"premix.{i}"]) < 1e-5, i
    check_selections(config, expected, seen, most_rows=0)


@pytest.mark.parametrize("seed", MARKED)
def test_default_layers_equal_the_paper(seed, make):
    config, expected, results, seen = compare(seed, make, di.Numerics(), paper.Numerics())
    for i, (streams, premix) in enumerate(results, start=1):
        assert streams.dtype == jnp.bfloat16
        golden = expected[f"streams.{i}"]
        assert relative_error(streams, golden) < 2e-2, i
        assert relative_error(premix, expected[f"premix.{i}"]) < 2e-2, i
        # Where no sum fell the other way, nothing differs by more than a few last bits.
        by_position = np.sqrt(np.mean((np.asarray(streams, float) - golden) ** 2, axis=(-1, -2)))
        assert np.median(by_position) < 2e-3 * np.sqrt(np.mean(golden**2)), i
    check_selections(config, expected, seen, most_rows=0.1)
