"""The JAX model against the golden data, through the real loader.

Whole models run through `di.load` and `di.forward`. Where one flipped code of a narrow format
would spread through a model of this size, every layer is fed the recorded streams instead
(`layers_alone`). Limits are those of tests/golden/README.md; selections are compared as sets.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import CASES, SELECTIONS, case, relative_error

import deepinfer_jax as di
from deepinfer_jax.cache import write_ring
from deepinfer_jax.model.attention import Choice
from deepinfer_jax.model.block import Residual
from deepinfer_jax.model.engram import DEAD, hash_rows, recent_tokens

pytestmark = [
    pytest.mark.golden,
    # The cases are smaller than DeepSeek's engine accepts, on purpose.
    pytest.mark.filterwarnings("ignore:.*DeepSeek's engine would refuse it"),
    pytest.mark.filterwarnings("ignore:.*the last rows of the tables are never read"),
]

FLOAT32 = di.Numerics(dtype="float32", quantize_activations=False)
FLOAT32_NO_QUANTISATION = di.Numerics(
    dtype="float32", quantize_activations=False, quantize_cache=False
)
FLOAT32_QUANTIZED_ACTIVATIONS = di.Numerics(dtype="float32")
BFLOAT16 = di.Numerics(quantize_activations=False, round_probabilities=False)


def slow_except(*quick, names=CASES):
    """Parameters of which the others are slow: a program is compiled for each."""
    return [pytest.param(n, marks=() if n in quick else pytest.mark.slow) for n in names]


# Goldens hold no attention weights; the drafter has a file of its own.
EVERYTHING = tuple(sorted(set(di.CAPTURES) - {"weights", "draft"}))
# The programs of tests run once: most of their time would go into optimising them.
QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0}


@functools.cache
def model_of(name):
    return di.load(case(name).folder, numerics=FLOAT32)


def forward_inputs(name, kind):
    """Arguments of `di.forward`: rows of an image span enter as embeddings, text rows as tokens."""
    golden = case(name)
    inputs = golden.inputs(kind)
    tokens, image_mask, embeddings = inputs["tokens"], inputs["image_mask"], inputs["embeddings"]
    if image_mask is not None:
        text = golden.weights["embed.weight"][tokens]
        embeddings = np.where(image_mask[..., None], embeddings, text).astype(np.float32)
    return {
        "tokens": tokens,
        "lengths": golden.real.sum(1),
        "embeddings": embeddings,
        "image_mask": image_mask,
    }


def without_room(captured, config, length):
    """Captures of `length` positions, without the entries that the cache has room for but not."""
    trimmed = {}
    for key, value in captured.items():
        head, _, layer = key.partition(".")
        value = np.asarray(value)
        if head in ("compressed_kv", "index_keys"):
            value = value[:, : length // config.compress_ratios[int(layer)]]
        elif head in ("index_scores", "candidates", "block_scores"):
            kept = length // config.compress_ratios[int(layer)]
            if head == "block_scores":
                kept = -(-kept // config.candidate_block_size)
            assert np.all(value[..., kept:] == (0 if head == "candidates" else -np.inf)), key
            value = value[..., :kept]
        trimmed[key] = value
    return trimmed


quick_forward = jax.jit(di.forward, static_argnames="capture", compiler_options=QUICK_TO_COMPILE)


def run(name, kind, numerics, capture, forward=quick_forward):
    """Everything that a golden file may hold, by its names, from one call of `di.forward`."""
    model, inputs = model_of(name).with_numerics(numerics), forward_inputs(name, kind)
    out = forward(model, **inputs, capture=capture)
    captured = without_room(out.captured, model.config, inputs["tokens"].shape[1])
    return captured | {"logits": np.asarray(out.logits)}


@functools.partial(jax.jit, static_argnames="show", compiler_options=QUICK_TO_COMPILE)
def layers_alone(model, tokens, lengths, image_mask, states, show):
    """Every layer on its own given input; only cache and selections go on from layer to layer.

    Args:
        model: L layers.
        tokens, lengths, image_mask: as in `di.forward`.
        states: L pairs of streams [B, S, M, D] and premix [B, S, M].
        show: names of `di.CAPTURES`.

    Returns:
        L pairs as `states`, leaving the layers, and captures with axes [B, S].
    """
    config, numerics, (B, S) = model.config, model.numerics, tokens.shape
    cache = di.init_cache(config, B, S, S, numerics=numerics)
    slots = jnp.arange(B, dtype=jnp.int32)
    rows = di.rectangle(tokens, slots, jnp.zeros_like(slots), lengths, image_mask)

    def flat(array):
        return array.reshape(B * S, *array.shape[2:])

    def batched(array):
        return array.reshape(B, S, *array.shape[1:])

    hashed = None
    if config.engram_layer_ids:
        ids = jnp.where(rows.image, DEAD, model.token_map[rows.tokens])
        history = write_ring(cache.history, rows.slot, rows.position, ids)
        pad = model.token_map[config.engram_pad_token_id]
        hashed = hash_rows(recent_tokens(history, rows.slot, rows.position, pad, config), config)

    choice, results, seen = Choice(), [], {}
    for role, layer, (streams, premix) in zip(config.layers, model.layers, states, strict=True):
        state = Residual(
            flat(streams).astype(numerics.activation), flat(premix).astype(numerics.wide)
        )
        mine = None if role.engram is None else hashed[:, role.engram]
        state, choice, cache, shown = layer(
            state, choice, rows, jnp.int32(B * S), cache, mine, role, config, numerics, show
        )
        results.append(tuple(batched(a) for a in state))
        seen |= {k if "." in k else f"{k}.{role.index}": batched(v) for k, v in shown.items()}
    return results, seen


def run_layers_alone(name, kind, numerics, show):
    """`layers_alone` on the recorded inputs of a golden file that holds all positions."""
    golden, model = case(name), model_of(name).with_numerics(numerics)
    tokens = golden.files[kind]["input_ids"]
    np.testing.assert_array_equal(tokens, golden.files["f32"]["input_ids"])
    recorded = golden.streams_in(kind)
    states = [tuple(a.astype(np.float32) for a in recorded[i]) for i in range(golden.layers)]
    results, seen = layers_alone(
        model,
        tokens,
        golden.real.sum(1),
        np.zeros(tokens.shape, bool),
        states,
        frozenset(show),
    )
    return results, without_room(seen, model.config, tokens.shape[1])


# --- float32, whole models ------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_float32_model_equals_golden_with_the_same_selections(name):
    outputs, compared = run(name, "f32", FLOAT32, EVERYTHING, di.forward), set()
    for key, value, golden in case(name).pairs("f32", outputs):
        compared.add(key)
        if key.split(".")[0] in SELECTIONS:
            np.testing.assert_array_equal(value, golden, err_msg=key)
        else:
            assert relative_error(value, golden) < 1e-5, key
            if key == "logits":
                np.testing.assert_allclose(value, golden, rtol=0, atol=5e-4)

    # Nothing recorded about the trunk may stay uncompared: drafter, tower and tables are elsewhere.
    elsewhere = ("noquant.", "dspark.", "vision.", "engram.")
    inputs = {
        "input_ids", "position_ids", "attention_mask", "probe_positions", "stream_rms",
        "pixel_values", "image_grid_hws", "vision_token_types",
    }  # fmt: skip
    recorded = {k for k in case(name).files["f32"] if not k.startswith(elsewhere)}
    assert recorded - inputs == compared

    streams = np.stack([outputs[f"streams.{i}"] for i in range(case(name).layers + 1)])
    rms = np.sqrt(np.mean(np.square(streams), axis=(-1, -2)))
    golden, real = case(name).files["f32"]["stream_rms"], case(name).real
    assert relative_error(rms[:, real], golden[:, real]) < 1e-5


@pytest.mark.parametrize("name", slow_except("swa", "hier", "quantised"))
def test_float32_model_without_cache_round_trips_equals_golden(name):
    outputs = run(name, "f32", FLOAT32_NO_QUANTISATION, ("selection", "router"))
    compared = set()
    for key, value, golden in case(name).pairs("f32", outputs, prefix="noquant."):
        compared.add("noquant." + key)
        if key.split(".")[0] in SELECTIONS:
            np.testing.assert_array_equal(value, golden, err_msg=key)
        else:
            assert relative_error(value, golden) < 1e-5, key
            np.testing.assert_allclose(value, golden, rtol=0, atol=2e-4, err_msg=key)
    recorded = {k for k in case(name).files["f32"] if k.startswith("noquant.")}
    assert {k for k in recorded if ".dspark." not in k} == compared
    assert "noquant.logits" in compared


# --- Quantised activations, layer by layer --------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    slow_except("swa", "flash_mini", "quantised", names=[n for n in CASES if n != "vision_engram"]),
)
def test_quantized_activations_equal_golden_layer_by_layer(name):
    golden = case(name)
    recorded, real = golden.files["f32_actquant"], golden.real
    results, seen = run_layers_alone(
        name, "f32_actquant", FLOAT32_QUANTIZED_ACTIVATIONS, ("selection", "router")
    )
    for i, (streams, premix) in enumerate(results, start=1):
        value, expected = np.asarray(streams)[real], recorded[f"streams.{i}"][real]
        error = np.sqrt(np.mean(np.square(value - expected), axis=(-1, -2)))
        rms = np.sqrt(np.mean(np.square(expected)))
        assert np.mean(error < 1e-3 * rms) >= 0.95, i
        assert relative_error(value, expected) < 5e-2, i
        assert relative_error(np.asarray(premix)[real], recorded[f"premix.{i}"][real]) < 5e-2, i

    selections = [k for k in recorded if k.startswith(("topk", "router_idx"))]
    assert len(selections) >= golden.layers
    for key in selections:
        value, expected = np.sort(seen[key], -1)[real], np.sort(recorded[key], -1)[real]
        assert np.mean(np.all(value == expected, axis=-1)) >= 0.99, key


def test_quantized_activations_equal_golden_from_end_to_end_in_swa():
    outputs = run("swa", "f32_actquant", FLOAT32_QUANTIZED_ACTIVATIONS, ())
    assert relative_error(outputs["logits"], case("swa").files["f32_actquant"]["logits"]) < 1e-5


# --- bfloat16 -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bfloat16_layers():
    show = ("selection", "scores", "router", "attention", "ffn")
    return run_layers_alone("flash_mini", "bf16", BFLOAT16, show)


def test_bfloat16_layers_equal_golden_one_at_a_time(bfloat16_layers):
    """The golden data allows 0.1; with rounding points in the same places a tenth is enough."""
    recorded, (results, seen) = case("flash_mini").files["bf16"], bfloat16_layers
    for i, (streams, premix) in enumerate(results):
        assert streams.dtype == jnp.bfloat16 and premix.dtype == jnp.float32
        assert relative_error(streams, recorded[f"streams.{i + 1}"]) < 1e-2, i
        assert relative_error(premix, recorded[f"premix.{i + 1}"]) < 1e-2, i
        for key in (f"attn_out.{i}", f"ffn_out.{i}"):
            assert relative_error(seen[key], recorded[key]) < 5e-2, key
        value, expected = np.sort(seen[f"router_idx.{i}"]), np.sort(recorded[f"router_idx.{i}"])
        assert np.mean(np.all(value == expected, axis=-1)) >= 0.98, i


def test_bfloat16_selections_differ_from_golden_only_inside_ties(bfloat16_layers):
    """Where scores are tied, the lower index is ours; the golden package took the higher."""
    golden, (_, seen) = case("flash_mini"), bfloat16_layers
    recorded = golden.files["bf16"]
    size = golden.config["text_config"]["candidate_block_size"]

    def blocks(mask):
        return [set(np.flatnonzero(row) // size) for row in mask[0]]

    def entries(listed):
        return [set(row.astype(int)) - {-1} for row in listed[0]]

    def swaps(ours, theirs, scores):
        """Rows that differ, each checked to differ by equals of the lowest score chosen."""
        found = []
        for t, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            if mine != other:
                our_scores = seen[scores][0, t].astype(float)
                their_scores = recorded[scores][0, t].astype(float)
                chosen = mine ^ other
                np.testing.assert_array_equal(our_scores[list(chosen)], min(our_scores[list(mine)]))
                np.testing.assert_array_equal(their_scores[list(chosen)], our_scores[list(chosen)])
                assert max(mine - other) < min(other - mine), (scores, t)
                found.append(t)
        return found

    for key in ("index_scores.2", "index_scores.4", "block_scores.4"):
        assert relative_error(seen[key], recorded[key]) < 1e-3, key
    for layer in (2, 4):
        scores = f"index_scores.{layer}"
        assert not swaps(entries(seen[f"topk.{layer}"]), entries(recorded[f"topk.{layer}"]), scores)

    ours, theirs = blocks(seen["candidates.4"]), blocks(recorded["candidates.4"])
    swapped = swaps(ours, theirs, "block_scores.4")
    assert len(swapped) == 3
    ours, theirs = entries(seen["topk.6"]), entries(recorded["topk.6"])
    for t in swapped:  # other candidates, other choices
        ours[t] = theirs[t]
    assert len(swaps(ours, theirs, "index_scores.6")) == 1


@pytest.mark.parametrize(
    "name", slow_except("quantised", names=("flash_mini", "vision_engram", "quantised"))
)
def test_bfloat16_model_is_close_to_golden_from_end_to_end(name):
    outputs = run(name, "bf16", BFLOAT16, ())
    ((_, value, golden),) = [p for p in case(name).pairs("bf16", outputs) if p[0] == "logits"]
    assert relative_error(value, golden) < 0.2
    assert np.mean(value.argmax(-1) == golden.argmax(-1)) >= 0.75
