"""The executable paper against the golden data and the spec's test vectors.

Golden values come from an independent implementation (tests/golden/README.md), so agreement here
says that the spec was read the same way twice. Limits are those of the golden data, or tighter
where double precision gives us more.
"""

import golden_files
import numpy as np
import paper
import pytest
from golden_files import CASES, SELECTIONS, case, component, component_notes, relative_error

FLOAT32 = paper.Numerics(dtype="float32", quantize_activations=False)
FLOAT32_NO_QUANTISATION = paper.Numerics(
    dtype="float32", quantize_activations=False, quantize_cache=False
)
FLOAT32_QUANTIZED_ACTIVATIONS = paper.Numerics(dtype="float32")
BFLOAT16 = paper.Numerics(quantize_activations=False, round_probabilities=False)
BY_DTYPE = [("f32", FLOAT32), ("bf16", BFLOAT16)]


def run(name, kind, numerics, **more):
    golden = case(name)
    with np.errstate(all="raise", under="ignore"):
        return paper.forward(
            golden.config, golden.weights, numerics=numerics, **golden.inputs(kind), **more
        )


def part(tensors, prefix):
    """Tensors of one set of a component file, floats as float64."""
    return {
        name.removeprefix(prefix): value.astype(float) if value.dtype.kind in "fV" else value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


# --- Whole models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_float32_model_equals_golden_with_the_same_selections(name):
    outputs, compared = run(name, "f32", FLOAT32), set()
    for key, value, golden in case(name).pairs("f32", outputs):
        compared.add(key)
        if key.split(".")[0] in SELECTIONS:
            np.testing.assert_array_equal(value, golden, err_msg=key)
        else:
            assert relative_error(value, golden) < 1e-5, key
            if key == "logits":
                np.testing.assert_allclose(value, golden, rtol=0, atol=5e-4)

    elsewhere = ("noquant.", "dspark.", "vision.", "engram.")  # drafter, tower, tables
    inputs = {
        "input_ids", "position_ids", "attention_mask", "probe_positions", "stream_rms",
        "pixel_values", "image_grid_hws", "vision_token_types",
    }  # fmt: skip
    recorded = {k for k in case(name).files["f32"] if not k.startswith(elsewhere)}
    assert recorded - inputs == compared

    streams = [outputs[f"streams.{i}"] for i in range(case(name).layers + 1)]
    rms = np.sqrt(np.mean(np.square(streams), axis=(-1, -2)))
    golden = case(name).files["f32"]["stream_rms"]
    assert relative_error(rms[:, case(name).real], golden[:, case(name).real]) < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_float32_model_without_cache_round_trips_equals_golden(name):
    outputs, compared = run(name, "f32", FLOAT32_NO_QUANTISATION), set()
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


@pytest.mark.parametrize("name", [n for n in CASES if n != "vision_engram"])
def test_quantized_activations_equal_golden_layer_by_layer(name):
    """Each layer gets the recorded streams, because one flipped fp8 code would spread."""
    golden, kind = case(name), "f32_actquant"
    recorded = golden.files[kind]
    streams_in = golden.streams_in(kind)
    outputs = run(name, kind, FLOAT32_QUANTIZED_ACTIVATIONS, streams_in=streams_in)
    for i in range(1, golden.layers + 1):
        value = outputs[f"streams.{i}"][golden.real]
        expected = recorded[f"streams.{i}"].astype(float)[golden.real]
        error = np.sqrt(np.mean((value - expected) ** 2, axis=(-1, -2)))
        assert np.mean(error < 1e-3 * np.sqrt(np.mean(expected**2))) >= 0.95, i
        assert relative_error(value, expected) < 5e-3, i
        pre = outputs[f"premix.{i}"][golden.real], recorded[f"premix.{i}"][golden.real]
        assert relative_error(*pre) < 1e-3, i
    for key in recorded:
        if key.startswith(("topk", "router_idx")):
            value, expected = np.sort(outputs[key], -1), np.sort(recorded[key], -1)
            np.testing.assert_array_equal(value[golden.real], expected[golden.real], err_msg=key)


def test_quantized_activations_equal_golden_from_end_to_end_in_swa():
    outputs = run("swa", "f32_actquant", FLOAT32_QUANTIZED_ACTIVATIONS)
    assert relative_error(outputs["logits"], case("swa").files["f32_actquant"]["logits"]) < 1e-5


def test_bfloat16_layers_equal_golden_one_at_a_time():
    """The golden data allows 0.1; with our rounding points in the same places we need 0.01."""
    golden = case("flash_mini")
    outputs = run("flash_mini", "bf16", BFLOAT16, streams_in=golden.streams_in("bf16"))
    for i in range(1, golden.layers + 1):
        recorded = golden.files["bf16"][f"streams.{i}"]
        assert relative_error(outputs[f"streams.{i}"], recorded) < 1e-2, i
    for key in ("router_idx.0", "router_idx.6", "topk.2", "topk.4", "engram_hash"):
        value, recorded = outputs[key], golden.files["bf16"][key]
        np.testing.assert_array_equal(np.sort(value, -1), np.sort(recorded, -1), err_msg=key)


def test_bfloat16_selections_differ_from_golden_only_inside_ties():
    """Scores are equal to the last bit. Where some are tied, the lower index is ours; which one
    the golden package took was left to its top-k."""
    golden = case("flash_mini")
    ours = run("flash_mini", "bf16", BFLOAT16, streams_in=golden.streams_in("bf16"))
    theirs = {k: v[0].astype(float) for k, v in golden.files["bf16"].items() if v.ndim == 3}
    for key in ("index_scores.2", "index_scores.4", "block_scores.4"):
        np.testing.assert_array_equal(ours[key][0], theirs[key], err_msg=key)

    size = golden.config["text_config"]["candidate_block_size"]
    same_candidates, swaps = [], []
    for t, blocks in enumerate(theirs["block_scores.4"]):
        kept = set(np.flatnonzero(theirs["candidates.4"][t]) // size)
        swap = (set(np.flatnonzero(ours["candidates.4"][0, t]) // size), kept)
        swaps += [(blocks, *swap)] if swap[0] != swap[1] else []
        same_candidates += [t] if swap[0] == swap[1] else []
    for t in same_candidates:
        scores = theirs["index_scores.6"][t]
        np.testing.assert_array_equal(ours["index_scores.6"][0, t], scores)
        swap = (set(ours["topk.6"][0, t]), set(theirs["topk.6"][t].astype(int)))
        swaps += [(scores, *swap)] if swap[0] != swap[1] else []

    assert len(swaps) == 4 and len(same_candidates) == len(theirs["topk.6"]) - 3
    for scores, mine, other in swaps:
        assert len(set(scores[list(mine ^ other)])) == 1
        assert scores[list(mine ^ other)][0] == scores[list(other)].min()
        assert max(mine - other) < min(other - mine)


@pytest.mark.parametrize("name", ["flash_mini", "vision_engram", "quantised"])
def test_bfloat16_model_is_close_to_golden_from_end_to_end(name):
    ((_, value, golden),) = [
        p for p in case(name).pairs("bf16", run(name, "bf16", BFLOAT16)) if p[0] == "logits"
    ]
    assert relative_error(value, golden) < 0.2
    assert np.mean(value.argmax(-1) == golden.argmax(-1)) >= 0.75


def test_a_prefix_gives_the_rows_of_the_whole():
    """Nothing looks ahead: not the window, a group, the selection or an n-gram."""
    golden, numerics = case("flash_mini"), paper.Numerics("float64", quantize_activations=False)
    inputs = golden.inputs("f32")
    whole = paper.forward(golden.config, golden.weights, numerics=numerics, **inputs)
    for length in (1, 2, 17, 40, 41):
        inputs["tokens"] = golden.inputs("f32")["tokens"][:, :length]
        rows = paper.forward(golden.config, golden.weights, numerics=numerics, **inputs)
        np.testing.assert_allclose(rows["logits"], whole["logits"][:, :length], atol=1e-9)


@pytest.mark.parametrize(
    "switch",
    [
        {"dtype": "float32"},
        {"quantize_activations": False},
        {"quantize_cache": False},
        {"round_probabilities": False},
        {"round_index_scores": False},
        {"quantize_wo_a": True},
    ],
    ids=str,
)
def test_every_switch_changes_the_logits(switch):
    default = run("quantised", "f32", paper.Numerics())["logits"]
    changed = run("quantised", "f32", paper.Numerics(**switch))["logits"]
    assert 1e-3 < relative_error(changed, default) < 1


def test_switches_that_follow_the_dtype():
    assert paper.Numerics().round_probabilities and paper.Numerics().round_index_scores
    assert not FLOAT32.round_probabilities and not FLOAT32.round_index_scores
    assert not BFLOAT16.round_probabilities and BFLOAT16.round_index_scores


def test_refusals_say_what_to_give():
    with pytest.raises(ValueError, match="dtype must be bfloat16, float32 or float64, got 'fp16'"):
        paper.Numerics(dtype="fp16")
    inputs = case("dspark").inputs("f32") | {"token_map": None}
    with pytest.raises(ValueError, match=r"layers \[1\] hold an Engram.*give token_map"):
        paper.forward(case("dspark").config, case("dspark").weights, numerics=FLOAT32, **inputs)


# --- Single functions -----------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["fp8", "mxfp4", "nvfp4"])
def test_cache_round_trips_are_exact(form):
    tensors = component("quant_cache")
    sets = [k.removesuffix("." + form) for k in tensors if k.endswith("." + form)]
    assert len(sets) >= 16
    for name in sets:
        value, golden = getattr(paper, form)(tensors[name + ".x"]), tensors[f"{name}.{form}"]
        np.testing.assert_array_equal(value, golden.astype(float), err_msg=name)
        np.testing.assert_array_equal(np.signbit(value), np.signbit(golden), err_msg=name)


@pytest.mark.parametrize("ratio, table", [(0, "plain"), (2, "compressed")])
@pytest.mark.parametrize("name", ["released", "tiny"])
def test_rope(name, ratio, table):
    tensors, positions = component("rope"), component("rope")["positions"]
    f = paper.frequencies(component_notes("rope")[name], ratio)
    golden = part(tensors, f"{name}.{table}.")
    angles = positions.astype(np.float32)[:, None] * f
    np.testing.assert_allclose(angles, golden["angles"], rtol=3e-7)
    # A float32 angle near a million is only good to 0.03 rad, whoever computes it.
    slack = 1e-6 + 3e-7 * angles.astype(float)
    assert np.all(np.abs(np.cos(angles.astype(float)) - golden["cos"]) <= slack)
    assert np.all(np.abs(np.sin(angles.astype(float)) - golden["sin"]) <= slack)

    for dtype, numerics in BY_DTYPE:
        x, R = golden[f"{dtype}.x"], 2 * len(f)
        size = np.hypot(x[..., -R::2], x[..., 1 - R :: 2])  # [1, 18, 1, R / 2]
        last_bit = 2.0**-7 if dtype == "bf16" else 2.0**-23
        allowed = np.repeat((slack[:18, None] + last_bit) * size, 2, axis=-1)
        for direction, inverse in (("rotated", False), ("inverse", True)):
            turned = paper.rope(x, positions[:18], f, numerics, inverse=inverse)
            expected = golden[f"{dtype}.{direction}"]
            np.testing.assert_array_equal(turned[..., :-R], expected[..., :-R])
            assert np.all(np.abs(turned - expected)[..., -R:] <= allowed), (dtype, direction)


@pytest.mark.parametrize("name", ["hc4", "hc4_extreme", "hc3", "hc2"])
def test_hyper_connections(name):
    notes, tensors = component_notes("mhc")[name], component("mhc")
    w = {k: tensors[f"{name}.{k}"].astype(float) for k in ("fn", "base", "scale")}
    c = {
        "hc_sinkhorn_iters": notes["iterations"],
        "hc_eps": notes["hc_eps"],
        "rms_norm_eps": notes["rms_norm_eps"],
    }
    for dtype, numerics in BY_DTYPE:
        g = part(tensors, f"{name}.{dtype}.")
        mix = paper.mixes(g["streams"], w, c)
        for key, value in mix._asdict().items():
            assert relative_error(value, g[key]) < 1e-6, key
        collapsed = paper.collapse(g["streams"], g["carried_pre"], numerics)
        golden_mix = paper.Mix(g["pre"], g["post"], g["comb"])
        expanded = paper.expand(g["streams"], g["sublayer_output"], golden_mix, numerics)
        limit = 0 if dtype == "bf16" else 1e-6  # one rounding point: bfloat16 agrees exactly
        assert relative_error(collapsed, g["collapsed"]) <= limit
        assert relative_error(expanded, g["expanded"]) <= limit


@pytest.mark.parametrize("name", ["sinkhorn.n4_it20", "sinkhorn.n4_it1", "sinkhorn.n2_it5"])
def test_sinkhorn(name):
    notes, g = component_notes("mhc")[name], part(component("mhc"), name + ".")
    comb = paper.sinkhorn(g["logits"], notes["iterations"], notes["eps"])
    assert relative_error(comb, g["out"]) < 1e-6


@pytest.mark.parametrize("eps", ["1e-20", "1e-6"])
def test_rms_norm(eps):
    for dtype, numerics in BY_DTYPE:
        g = part(component("rms_norm"), f"eps{eps}.{dtype}.")
        value = paper.rms_norm(g["x"], g["weight"], float(eps), numerics)
        # A row of its own scale each: the errors are relative to the element.
        limit = 0 if dtype == "bf16" else 1e-6
        np.testing.assert_allclose(value, g["out"], rtol=limit, atol=0)


@pytest.mark.parametrize("dtype, numerics", BY_DTYPE)
@pytest.mark.parametrize("name", ["e12k3", "e7k2"])
def test_mixture_of_experts(name, dtype, numerics):
    notes, g = component_notes("moe")[name], part(component("moe"), f"{name}.{dtype}.")
    w = {k: g[k] for k in ("gate.weight", "gate.bias", "gate.bias_vl")}
    for k in ("w1", "w2", "w3"):
        w[f"shared_experts.{k}.weight"] = g[f"shared.{k}"]
        w |= {f"experts.{e}.{k}.weight": g[f"experts.{k}"][e] for e in range(notes["experts"])}
    c = {
        "num_experts_per_tok": notes["topk"],
        "routed_scaling_factor": notes["routed_scaling_factor"],
        "swiglu_limit": notes["swiglu_limit"],
        "n_routed_experts": notes["experts"],
    }
    out, seen = paper.mixture(g["x"], w, g["image_mask"] > 0, c, numerics)
    np.testing.assert_array_equal(seen["router_idx"], g["router_idx"])
    assert relative_error(seen["router_w"], g["router_w"]) < 1e-6

    # The golden package gives padded tokens the shared expert only.
    padding = g["padding_mask"][..., None] > 0
    shared = paper.expert(g["x"], paper.under(w, "shared_experts."), c["swiglu_limit"], numerics)
    assert padding.any() and not padding.all()
    value = np.where(padding, shared, out)
    # In bfloat16 it rounds the routed sum once before it adds the shared expert; spec 7.2 doesn't.
    assert relative_error(value, g["out"]) < (1e-6 if dtype == "f32" else 4e-3)


@pytest.mark.parametrize("dtype, numerics", BY_DTYPE)
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_compressor_pools_complete_groups(ratio, dtype, numerics):
    g = part(component("compressor"), f"ratio{ratio}.{dtype}.")
    w = {"compressor.wkv.weight": g["wkv"], "compressor.norm.weight": g["norm"]}
    if ratio > 1:
        assert g["x"].shape[1] % ratio
        w["compressor.wgate.weight"] = g["wgate"]
    latent = paper.pool(g["x"], w, ratio, 1e-20, numerics)
    assert latent.shape == (2, g["x"].shape[1] // ratio, 32)
    assert relative_error(latent, g["out"]) <= (0 if dtype == "bf16" else 1e-6)


@pytest.mark.parametrize("name", ["b1", "b4", "b8", "b8_all"])
def test_candidate_blocks(name):
    notes, g = component_notes("candidates")[name], part(component("candidates"), name + ".")
    N, size = g["scores"].shape[-1], notes["block_size"]
    shown = np.arange(N) < g["visible_lengths"][..., None]
    scores = np.where(shown, g["scores"], -np.inf)
    blocks = paper.block_scores(scores, g["visible_lengths"], size)
    value = paper.candidate_entries(blocks, notes["topk_blocks"], size, shown)
    np.testing.assert_array_equal(value, g["candidates"])


@pytest.mark.parametrize("name", ["released", "small"])
def test_engram_tables_and_rows(name):
    notes, g = component_notes("engram")[name], part(component("engram"), name + ".")
    c = {
        "engram_layer_ids": notes["layer_ids"],
        "engram_max_ngram_size": notes["max_ngram_size"],
        "engram_vocab_size": notes["engram_vocab_size"],
        "engram_n_heads": notes["n_heads"],
        "engram_compressed_vocab_size": notes["compressed_vocab_size"],
    }
    primes = paper.engram_primes(c)
    np.testing.assert_array_equal(primes, g["primes"])
    np.testing.assert_array_equal(primes.sum(-1), notes["rows_needed"])
    np.testing.assert_array_equal(paper.engram_offsets(primes), g["offsets"])
    np.testing.assert_array_equal(paper.engram_multipliers(c), g["multipliers"])

    token_map = np.arange(notes["vocab_size"]) * 7919 % notes["compressed_vocab_size"]
    ids, pad = token_map[g["input_ids"]], token_map[notes["pad_token_id"]]
    alive = np.zeros(ids.shape, bool)
    np.testing.assert_array_equal(paper.ngram_rows(ids, alive, pad, c), g["hash"])
    dead = g["token_mask"] == 0
    assert dead.any()
    np.testing.assert_array_equal(paper.ngram_rows(ids, dead, pad, c), g["hash_masked"])

    # A packed document reads like a sequence of its own.
    for row, documents in enumerate(g["sequence_ids"]):
        for document in set(documents) - {0}:
            where = documents == document
            rows = paper.ngram_rows(ids[row, where][None], alive[:1, : where.sum()], pad, c)
            np.testing.assert_array_equal(rows[0], g["hash_documents"][row, where])


@pytest.mark.parametrize("dtype, numerics", BY_DTYPE)
def test_engram_gate(dtype, numerics):
    g = part(component("engram"), f"gate.{dtype}.")
    for key, closed in (("out", np.zeros((2, 7), bool)), ("out_masked", g["token_mask"] == 0)):
        value = paper.engram(g["streams"], g["hash"], g, closed, 1e-20, numerics)
        assert relative_error(value, g[key]) <= (0 if dtype == "bf16" else 1e-6), key
        np.testing.assert_array_equal(value[closed], g["streams"][closed])


@pytest.mark.parametrize("name", ["flash_mini", "vision_engram", "dspark", "quantised"])
def test_engram_token_map_comes_from_the_tokenizer(name):
    golden, c = case(name).files["f32"], case(name).config["text_config"]
    token_map = paper.token_map(case(name).tokenizer)
    np.testing.assert_array_equal(token_map, golden["engram.token_map"])
    assert token_map.max() + 1 == c["engram_compressed_vocab_size"] < len(token_map)
    primes = paper.engram_primes(c)
    np.testing.assert_array_equal(primes, golden["engram.primes"])
    assert np.all(primes.sum(-1) <= c["engram_num_embeddings"])  # two cases have unused rows
    np.testing.assert_array_equal(paper.engram_offsets(primes), golden["engram.offsets"])
    np.testing.assert_array_equal(paper.engram_multipliers(c), golden["engram.multipliers"])


@pytest.mark.parametrize("name", ["fp4", "fp8.dense", "fp8.dense_exact", "fp8.rowwise"])
def test_released_weights_dequantise_exactly(name):
    g = component("weight_formats")
    value = golden_files.dequantize(g[name + ".weight"], g[name + ".scale"])
    for dtype in ("f32", "bf16"):
        np.testing.assert_array_equal(value, g[f"{name}.{dtype}"].astype(float))
    # Every code occurs: 256 bytes less the two NaNs of e4m3, or all 256 pairs of e2m1.
    if name != "fp8.rowwise":
        codes = np.unique(g[name + ".weight"].view(np.uint8))
        assert len(codes) >= 254


# --- Arithmetic that the spec states --------------------------------------------------------------


def test_lower_index_wins_a_tie():
    scores = np.array([[1.0, 3, 3, 3, 0], [2, 2, 2, 2, 2], [-np.inf, -1, -np.inf, -np.inf, -1]])
    listed = paper.indices(paper.highest(scores, 2), 2)
    np.testing.assert_array_equal(listed, [[1, 2], [0, 1], [1, 4]])
    listed = paper.indices(paper.highest(scores, 3), 3)
    np.testing.assert_array_equal(listed, [[1, 2, 3], [0, 1, 2], [1, 4, -1]])


def test_tiny_router_scores_keep_their_proportion_next_to_a_large_bias():
    """Weights come from the score itself, not from (score + bias) - bias."""
    w = {"gate.weight": np.array([[-40.0], [-41], [-39]]), "gate.bias_vl": np.zeros(3)}
    w["gate.bias"] = np.array([12.0, 12, -12])
    c = {"num_experts_per_tok": 2, "routed_scaling_factor": 1.5}
    weights, chosen = paper.router(np.ones((1, 1, 1)), w, np.zeros((1, 1), bool), c)
    np.testing.assert_array_equal(chosen, [[[True, True, False]]])
    share = 1 / (1 + np.exp(-0.5))  # sqrt(softplus(a)) is e^(a / 2) far below zero
    expected = [[[1.5 * share, 1.5 * (1 - share), 0]]]
    np.testing.assert_allclose(weights, expected, rtol=1e-9)


def test_visibility_of_appendix_a6():
    np.testing.assert_array_equal(paper.visible_entries(5, 2), [0, 1, 1, 2, 2])
    np.testing.assert_array_equal(paper.visible_entries(5, 1), [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(np.flatnonzero(paper.window_mask(201, 128)[200]), range(73, 201))


@pytest.mark.parametrize(
    "form, step, scales",
    [
        (
            "fp8",
            2.0**-9,
            {1e-6: 2**-22, 0.5: 2**-9, 1: 2**-8, 3.5: 2**-7, 447.9: 1, 448: 1, 449: 2},
        ),
        ("mxfp4", 0.5, {0.75: 0.125, 3: 0.5, 6: 1, 6.1: 2}),
        ("nvfp4", 0.5, {0.75: 0.125, 3: 0.5, 6: 1, 6.1: 1, 5000: 448}),
    ],
)
def test_scales_of_appendix_a4(form, step, scales):
    """A value of 0.6 steps becomes one step of the group's scale, so it shows the scale."""
    for amax, scale in scales.items():
        x = np.array([0.6 * step * scale, amax])
        assert getattr(paper, form)(x)[0] == step * scale, amax


def test_codes_of_appendix_a4():
    x = np.array([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -5])  # the 6 makes the scale 1
    np.testing.assert_array_equal(paper.nvfp4(x), [6, 0, 1, 1, 2, 2, 4, 4, 0, -4])
    np.testing.assert_array_equal(paper.nvfp4(np.array([6.1, 0]))[0], 6)
    np.testing.assert_array_equal(paper.nvfp4(np.array([5000.0, 0]))[0], 2688)


def test_hyper_connections_of_appendix_a3():
    z = np.array([0.5, -1, 2, 0, 1, -0.5, 0.25, 3, *((7 * np.arange(16)) % 5 - 2)])
    w = {"fn": z[:, None] * np.ones(16) / 16, "scale": np.array([0.5, 1, 2])}
    w["base"] = np.linspace(-0.3, 0.3, 24)
    c = {"rms_norm_eps": 1e-20, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20}
    mix = paper.mixes(np.ones((1, 1, 4, 4)), w, c)
    np.testing.assert_allclose(mix.pre[0, 0], [0.487504, 0.315634, 0.679653, 0.444792], atol=1e-6)
    np.testing.assert_allclose(mix.post[0, 0], [1.381808, 0.677188, 1.053211, 1.893960], atol=1e-6)
    comb = [
        [0.000507, 0.072491, 0.917633, 0.005964],
        [0.077825, 0.000508, 0.006414, 0.917788],
        [0.006424, 0.921039, 0.000530, 0.075755],
        [0.915243, 0.005961, 0.075423, 0.000492],
    ]
    np.testing.assert_allclose(mix.comb[0, 0], comb, atol=1e-6)


def test_yarn_frequencies_of_appendix_a2():
    c = component_notes("rope")["released"]
    f, plain = paper.frequencies(c, 1), 160000.0 ** (-2 * np.arange(32) / 64)
    np.testing.assert_allclose(f[:16], plain[:16], rtol=1e-7)
    np.testing.assert_allclose(f[25:], plain[25:] / 16, rtol=1e-7)
    expected = [0.002265625, 0.001396801, 0.00084969, 0.000508082, 0.000296978]
    np.testing.assert_allclose(f[16:21], expected, rtol=1e-5)


def test_engram_rows_of_appendix_a1():
    c = {
        "engram_layer_ids": [1, 14], "engram_max_ngram_size": 4, "engram_vocab_size": 16000000,
        "engram_n_heads": 8, "engram_compressed_vocab_size": 99092,
    }  # fmt: skip
    ids = np.array([[40, 30, 20, 10]])  # the newest is the last
    rows = paper.ngram_rows(ids, np.zeros((1, 4), bool), 0, c)[0, 3]
    first = [10250667, 16051853, 42761335, 48437066, 64953759, 91793642, 97213675, 124972355]
    np.testing.assert_array_equal(rows[0, :8], first)
    last = [260141385, 283855289, 300526134, 319101158, 333879786, 349356468, 360884307, 370522085]
    np.testing.assert_array_equal(rows[1, 16:], last)
    np.testing.assert_array_equal(rows[0, 8:10], [130904169, 147647512])
