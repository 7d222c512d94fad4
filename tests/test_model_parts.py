"""Parts of the model that are no kernels: rotation, hyper-connections, compressor, Engram.

Recorded values and arithmetic; the component goldens are those of tests/golden/README.md. Where
they record bfloat16 with one rounding point, agreement is exact.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import component, component_notes, part, relative_error

import deepinfer_jax as di
from deepinfer_jax.config import RopeScaling
from deepinfer_jax.model.compressor import Compressor, pool
from deepinfer_jax.model.engram import DEAD, Engram, hash_rows, recent_tokens
from deepinfer_jax.model.hyper_connections import Mixes, collapse, expand, mixes, sinkhorn
from deepinfer_jax.model.norms import rms_norm
from deepinfer_jax.model.rotary import frequencies, rotate
from deepinfer_jax.model.scope import Scope
from deepinfer_jax.testing import tiny_config

NUMERICS = {
    "f32": di.Numerics(dtype="float32", quantize_activations=False),
    "bf16": di.Numerics(quantize_activations=False),
}
DTYPES = tuple(NUMERICS)


def rows_of(array):
    """[B, S, ...] as rows [B S, ...]."""
    return jnp.asarray(array).reshape(-1, *array.shape[2:])


# --- Rotary embedding -----------------------------------------------------------------------------


def rope_config(name):
    notes = component_notes("rope")[name]
    scaling = {k: v for k, v in notes["rope_scaling"].items() if k != "rope_type"}
    return tiny_config(
        head_dim=2 * notes["qk_rope_head_dim"],
        index_head_dim=2 * notes["qk_rope_head_dim"],
        qk_rope_head_dim=notes["qk_rope_head_dim"],
        rope_theta=notes["rope_theta"],
        compress_rope_theta=notes["compress_rope_theta"],
        rope_scaling=RopeScaling(**scaling),
        max_position_embeddings=1 << 20,
    )


@pytest.mark.golden
@pytest.mark.parametrize("compressed, table", [(False, "plain"), (True, "compressed")])
@pytest.mark.parametrize("name", ["released", "tiny"])
def test_rope(name, compressed, table):
    tensors = component("rope")
    positions, golden = tensors["positions"], part(tensors, f"{name}.{table}.")
    f = frequencies(rope_config(name), compressed)
    np.testing.assert_allclose(positions.astype(np.float32)[:, None] * f, golden["angles"], 3e-7)

    one = np.tile([1.0, 0.0], len(f)).astype(np.float32)  # rotated, it shows its cos and sin
    shown = np.asarray(rotate(np.tile(one, (len(positions), 1)), positions, f))
    slack = 1e-6 + 3e-7 * golden["angles"].astype(float)
    assert np.all(np.abs(shown[:, 0::2] - golden["cos"]) <= slack)
    assert np.all(np.abs(shown[:, 1::2] - golden["sin"]) <= slack)

    for dtype in DTYPES:
        x, R = golden[f"{dtype}.x"][0], 2 * len(f)  # [18, 1, width]
        wide = x.astype(float)
        size = np.hypot(wide[..., -R::2], wide[..., 1 - R :: 2])
        last_bit = 2.0**-7 if dtype == "bf16" else 2.0**-23
        allowed = np.repeat((slack[:18, None] + last_bit) * size, 2, axis=-1)
        for direction, inverse in (("rotated", False), ("inverse", True)):
            turned = rotate(jnp.asarray(x), positions[:18], f, inverse=inverse)
            assert turned.dtype == x.dtype
            turned = np.asarray(turned).astype(float)
            expected = golden[f"{dtype}.{direction}"][0].astype(float)
            np.testing.assert_array_equal(turned[..., :-R], expected[..., :-R])
            assert np.all(np.abs(turned - expected)[..., -R:] <= allowed), (dtype, direction)


@pytest.mark.parametrize("compressed", [False, True])
def test_rope_is_exact_for_its_float32_angle_up_to_a_million(compressed):
    f = frequencies(di.Config.flash(), compressed)
    positions = np.unique(np.geomspace(1e3, 2**20 - 1, 400).astype(np.int32))
    x = np.random.default_rng(0).standard_normal((len(positions), 64)).astype(np.float32)
    angle = (positions.astype(np.float32)[:, None] * f).astype(float)
    turned = (x[:, 0::2] + 1j * x[:, 1::2]) * np.exp(1j * angle)
    value = np.asarray(jax.jit(rotate)(x, positions, f))
    np.testing.assert_allclose(value[:, 0::2], turned.real, rtol=0, atol=1e-4)
    np.testing.assert_allclose(value[:, 1::2], turned.imag, rtol=0, atol=1e-4)
    back = rotate(value, positions, f, inverse=True)
    np.testing.assert_allclose(back, x, rtol=0, atol=1e-5)


# --- Hyper-connections, norm ----------------------------------------------------------------------


@pytest.mark.golden
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["hc4", "hc4_extreme", "hc3", "hc2"])
def test_hyper_connections(name, dtype):
    notes, tensors = component_notes("mhc")[name], component("mhc")
    config = tiny_config(
        hc_mult=notes["streams"],
        hc_sinkhorn_iters=notes["iterations"],
        hc_eps=notes["hc_eps"],
        rms_norm_eps=notes["rms_norm_eps"],
    )
    g = part(tensors, f"{name}.{dtype}.")
    streams = rows_of(g["streams"])
    w = (jnp.asarray(tensors[f"{name}.{k}"]) for k in ("fn", "base", "scale"))
    mix = mixes(streams, *w, config, jnp.float32)
    for key, value in mix._asdict().items():
        assert value.dtype == jnp.float32
        assert relative_error(value, rows_of(g[key])) < 1e-5, key

    collapsed = collapse(streams, rows_of(g["carried_pre"]))
    recorded = Mixes(*(rows_of(g[k]) for k in Mixes._fields))
    expanded = expand(streams, rows_of(g["sublayer_output"]), recorded)
    limit = 0 if dtype == "bf16" else 1e-6
    for value, key in ((collapsed, "collapsed"), (expanded, "expanded")):
        assert value.dtype == g[key].dtype
        assert relative_error(value, rows_of(g[key])) <= limit, key


@pytest.mark.golden
@pytest.mark.parametrize("name", ["sinkhorn.n4_it20", "sinkhorn.n4_it1", "sinkhorn.n2_it5"])
def test_sinkhorn(name):
    notes, g = component_notes("mhc")[name], part(component("mhc"), name + ".")
    comb = sinkhorn(np.moveaxis(g["logits"], 0, -1), notes["iterations"], notes["eps"])
    assert relative_error(np.moveaxis(comb, -1, 0), g["out"]) < 1e-6


@pytest.mark.golden
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", ["1e-20", "1e-6"])
def test_rms_norm(eps, dtype):
    g = part(component("rms_norm"), f"eps{eps}.{dtype}.")
    value = rms_norm(jnp.asarray(g["x"]), jnp.asarray(g["weight"]), float(eps), jnp.float32)
    assert value.dtype == g["out"].dtype
    # A row of its own scale each: the errors are relative to the element.
    limit = 0 if dtype == "bf16" else 1e-6
    value, golden = np.asarray(value).astype(float), g["out"].astype(float)
    np.testing.assert_allclose(value, golden, rtol=limit, atol=0)


# --- Compressor -----------------------------------------------------------------------------------


@pytest.mark.golden
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_compressor_pools_complete_groups(ratio, dtype):
    g, numerics = part(component("compressor"), f"ratio{ratio}.{dtype}."), NUMERICS[dtype]
    names = {"wkv.weight": "wkv", "wgate.weight": "wgate", "norm.weight": "norm"}
    compressor = Compressor(Scope(lambda name: jnp.asarray(g[names[name]])), ratio)
    B, S, D = g["x"].shape
    whole = jnp.asarray(g["x"][:, : S // ratio * ratio]).reshape(-1, D)
    parts = compressor.parts(whole, numerics)
    if ratio > 1:
        assert S % ratio
        parts = parts.reshape(-1, ratio, *parts.shape[1:])
    latent = compressor.latent(parts, 1e-20, numerics).reshape(B, S // ratio, -1)
    assert latent.dtype == g["out"].dtype
    assert relative_error(latent, g["out"]) <= (0 if dtype == "bf16" else 1e-6)


def test_pool_is_a_softmax_mean_for_each_channel_and_survives_large_gates():
    rng = np.random.default_rng(2)
    parts = rng.standard_normal((5, 3, 2, 8)).astype(np.float32)
    values, gates = parts[:, :, 0].astype(float), parts[:, :, 1].astype(float)
    share = np.exp(gates) / np.exp(gates).sum(1, keepdims=True)
    assert relative_error(pool(parts), (share * values).sum(1)) < 1e-6
    parts[:, :, 1] += 300  # e^300 is no float32
    assert relative_error(pool(parts), (share * values).sum(1)) < 1e-4


# --- Engram ---------------------------------------------------------------------------------------


def engram_config(name):
    notes = component_notes("engram")[name]
    if name == "released":
        return di.Config.flash(), notes
    config = tiny_config(
        engram_layer_ids=tuple(notes["layer_ids"]),
        engram_max_ngram_size=notes["max_ngram_size"],
        engram_vocab_size=notes["engram_vocab_size"],
        engram_n_heads=notes["n_heads"],
        engram_pad_token_id=notes["pad_token_id"],
        engram_compressed_vocab_size=notes["compressed_vocab_size"],
    )
    return config, notes


@pytest.mark.golden
@pytest.mark.parametrize("name", ["released", "small"])
def test_engram_rows(name):
    config, notes = engram_config(name)
    g = part(component("engram"), name + ".")
    token_map = np.arange(notes["vocab_size"]) * 7919 % notes["compressed_vocab_size"]
    ids, pad = token_map[g["input_ids"]].astype(np.int32), token_map[notes["pad_token_id"]]
    B, S = ids.shape

    @jax.jit
    def rows(history):
        slot, position = np.repeat(np.arange(B), S), np.tile(np.arange(S), B)
        return hash_rows(recent_tokens(history, slot, position, pad, config), config)

    np.testing.assert_array_equal(rows(ids), rows_of(g["hash"]))
    dead = g["token_mask"] == 0
    assert dead.any()
    np.testing.assert_array_equal(rows(np.where(dead, DEAD, ids)), rows_of(g["hash_masked"]))

    # A packed document reads like a sequence of its own: it gets a slot of its own.
    history, slot, position, documents = [], [], [], g["sequence_ids"]
    for row, document in {(b, d) for b in range(B) for d in set(documents[b]) - {0}}:
        where = documents[row] == document
        history.append(np.resize(ids[row, where], S))
        slot += [len(history) - 1] * where.sum()
        position += list(range(where.sum()))
        expected = g["hash_documents"][row, where]
        recent = recent_tokens(
            np.array(history), *(np.array(a)[-len(expected) :] for a in (slot, position)), pad,
            config,
        )  # fmt: skip
        np.testing.assert_array_equal(hash_rows(recent, config), expected)
    assert len(history) > B


@pytest.mark.golden
@pytest.mark.parametrize("dtype", DTYPES)
def test_engram_gate(dtype):
    g = part(component("engram"), f"gate.{dtype}.")
    module = Engram(Scope(lambda name: jnp.asarray(g[name])))
    config = tiny_config(rms_norm_eps=1e-20)
    for key, closed in (("out", np.zeros((2, 7), bool)), ("out_masked", g["token_mask"] == 0)):
        streams = rows_of(g["streams"])
        image = closed.reshape(-1)
        value = module(streams, rows_of(g["hash"]), image, config, NUMERICS[dtype])
        assert value.dtype == g[key].dtype
        assert relative_error(value, rows_of(g[key])) <= (0 if dtype == "bf16" else 1e-6), key
        np.testing.assert_array_equal(value[image], streams[image])
