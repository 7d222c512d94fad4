"""Heads, weights and real sizes of the drafter (spec 9.5, 12)."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import paper
import paper_drafter
import pytest
from golden_files import case, read
from test_checkpoint import write

import deepinfer_jax as di
from deepinfer_jax import testing
from deepinfer_jax.checkpoint.tensor_names import FORMATS, parameter_specs
from deepinfer_jax.model.drafter import acceptance, draft_block, markov_step
from deepinfer_jax.model.linear import as_array
from deepinfer_jax.trainable import combine, named_parameters, quantize, trainable
from pallas_kernels import layouts

pytestmark = pytest.mark.filterwarnings("ignore:.*DeepSeek's engine would refuse it")

# --- Heads ----------------------------------------------------------------------------------------


@functools.cache
def small_model():
    """In the storage of the release, default numerics."""
    config = testing.tiny_config(
        num_hidden_layers=1,
        compress_ratios=(0, 0, 0),
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        candidate_source_layer_id=-1,
        engram_layer_ids=(),
        dspark_target_layer_ids=(0,),
    )
    return di.Transformer(config, di.Numerics(), testing.random_weights(config, 81, quantized=True))


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_markov_step_equals_the_paper_in_both_storages(stored):
    """Weights under training have more bits than a row of the embedding keeps."""
    model, rng, B = small_model(), np.random.default_rng(82), 9
    weights, rest = trainable(model, stored)
    if stored == "float32":
        weights = {k: w + 1e-3 * rng.standard_normal(w.shape, np.float32)
                   for k, w in weights.items()}  # fmt: skip
    model = combine(weights, rest)
    assert model.mtp[-1].markov_head.embed.weight.get_value().dtype == stored
    hidden = rng.standard_normal((B, model.config.hidden_size)).astype(jnp.bfloat16)
    logits = rng.standard_normal((B, model.config.vocab_size)).astype(np.float32)
    previous = np.append(rng.integers(0, model.config.vocab_size, B - 2), [0, 265]).astype(np.int32)
    scores, confidence = markov_step(model, hidden, logits, previous)

    w = {k.removeprefix("mtp.1."): np.asarray(v, float) for k, v in weights.items()}
    em, bias = paper_drafter.markov(previous, w, paper.Numerics())
    np.testing.assert_allclose(scores, logits.astype(float) + bias, rtol=0, atol=2e-6)
    expected = paper_drafter.confidence(hidden.astype(float), em, w)
    np.testing.assert_allclose(confidence, expected, rtol=0, atol=2e-6)


def test_acceptance_is_the_logistic_function_of_limited_logits():
    found = np.asarray(acceptance(jnp.array([-1e9, -60, -1, 0, 2, 60, np.inf], jnp.float32)))
    expected = 1 / (1 + np.exp(-np.array([-60, -60, -1, 0, 2, 60, 60.0])))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found[0] > 0


# --- Loading and weights --------------------------------------------------------------------------


def test_a_checkpoint_without_drafter_loads_and_refuses_drafts(tmp_path):
    folder = case("dspark").folder
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(folder / name, tmp_path)
    tensors = read(folder / "model.safetensors")
    write(tmp_path / "model.safetensors", {k: v for k, v in tensors.items() if k[:4] != "mtp."})
    model = di.load(tmp_path)
    assert model.mtp is None
    whole = named_parameters(di.load(folder))
    assert {k for k in whole if k[:4] != "mtp."} == named_parameters(model).keys() < whole.keys()
    for draft in ("fixed", "scheduled"):
        with pytest.raises(ValueError, match=f"draft = '{draft}' needs a drafter"):
            di.generate(model, np.ones((2, 3), np.int32), draft=draft)
    with pytest.raises(ValueError, match="the model has no drafter"):
        di.forward(model, np.ones((2, 3), np.int32), capture=("draft",))


def test_weights_of_the_drafter_round_trip_by_their_names():
    model = small_model()
    stored, specs = named_parameters(model), parameter_specs(model.config)
    drafter = {name for name, spec in specs.items() if spec.part == "drafter"}
    assert drafter == {name for name in stored if name[:4] == "mtp."}
    assert {"mtp.1.markov_head.embed.weight", "mtp.0.main_proj.weight"} < drafter
    kinds = {specs[name].kind for name in drafter if "_head." in name}
    assert kinds <= {"bf16", "float32"}  # never in 8 bits

    weights, rest = trainable(model)
    assert all(weights[name].dtype == jnp.float32 for name in drafter)
    for name, weight in named_parameters(quantize(combine(weights, rest))).items():
        assert type(weight) is type(stored[name]), name  # codes and scales may trade factors of two
        same = as_array(weight, jnp.float32) == as_array(stored[name], jnp.float32)
        assert same.all(), name
        if name in drafter and specs[name].kind not in FORMATS:
            assert weight.dtype == stored[name].dtype, name
    for i, stage in enumerate(combine(weights, rest).mtp):
        assert stage.attn.wkv.weight.get_value() is weights[f"mtp.{i}.attn.wkv.weight"]


# --- Real sizes -----------------------------------------------------------------------------------


def abstract(config):
    """A model in the release's storage of which only shapes and dtypes are there."""
    specs = parameter_specs(config)

    def take(path):
        spec = specs[path]
        if spec.kind not in FORMATS:
            return jnp.zeros(spec.shape, jnp.float32 if spec.kind == "float32" else jnp.bfloat16)
        return layouts.quantize(jnp.zeros(spec.shape, jnp.bfloat16), FORMATS[spec.kind])

    ids = jnp.zeros(config.vocab_size, jnp.int32)
    return jax.eval_shape(lambda: di.Transformer(config, di.Numerics(), take, ids))


def test_a_block_of_the_released_model():
    config, B, show = di.Config.flash(), 3, frozenset({"streams", "router"})
    model, ints = abstract(config), jax.ShapeDtypeStruct((B,), jnp.int32)

    def draft(model, tokens, slot, position):
        cache = di.init_cache(config, B, 1, 6, numerics=model.numerics, drafts=True)
        return draft_block(model, cache, tokens, slot, position, show=show), cache

    (block, cache, seen), before = jax.eval_shape(draft, model, ints, ints, ints)
    assert block.hidden.shape == (B, 5, 5120) and block.hidden.dtype == jnp.bfloat16
    assert block.logits.shape == (B, 5, 129_280) and block.logits.dtype == jnp.float32
    assert cache == before and [ring.shape for ring in cache.window[40:]] == 3 * [(B, 133, 512)]
    assert seen["streams.42"].shape == (5 * B, 4, 5120)
    assert seen["router_idx.40"].shape == (5 * B, config.dspark_num_experts_per_tok)
    rows = (jax.ShapeDtypeStruct((B, *a.shape[2:]), a.dtype) for a in block)
    scores, confidence = jax.eval_shape(markov_step, model, *rows, ints)
    assert scores.shape == (B, 129_280) and confidence.shape == (B,)
    assert scores.dtype == confidence.dtype == jnp.float32


@pytest.mark.slow
def test_a_generation_of_the_released_model_with_drafts():
    tokens = jax.ShapeDtypeStruct((3, 20), jnp.int32)
    found = jax.eval_shape(
        lambda model, tokens: di.generate(model, tokens, max_new_tokens=9, draft="scheduled"),
        abstract(di.Config.flash()),
        tokens,
    )
    assert found.tokens.shape == (3, 9) and found.tokens.dtype == jnp.int32
    assert found.logprobs.shape == (3, 9) and found.logprobs.dtype == jnp.float32
    assert found.stats.accepted.shape == (3, 5)
