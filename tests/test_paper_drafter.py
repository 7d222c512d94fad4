"""The drafter of the executable paper against the golden data, and mistakes planted in it.

The golden package drafts at A anchors of each sequence and feeds its Markov head the true tokens;
`proposal` lays our blocks out in the same way, under the recorded names.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import paper
import paper_drafter
import pytest
from einops import rearrange
from golden_files import case, component, component_notes, read, relative_error

FLOAT32 = paper.Numerics(dtype="float32", quantize_activations=False)
FLOAT32_NO_QUANTISATION = replace(FLOAT32, quantize_cache=False)
BFLOAT16 = paper.Numerics(quantize_activations=False, round_probabilities=False)
CASES = ("dspark", "flash_mini", "quantised")
IDS = ("draft_input_ids", "previous_token_ids", "position_ids", "visible", "greedy_ids")


@cache
def target(name, kind, numerics):
    golden = case(name)
    return paper.forward(golden.config, golden.weights, numerics=numerics, **golden.inputs(kind))


def recorded(name, kind):
    """What a golden file holds of the drafter, floats as float64."""
    tensors = case(name).files[kind]
    tensors = {k.removeprefix("dspark."): v for k, v in tensors.items() if k.startswith("dspark.")}
    return {k: v if v.dtype.kind in "iu" else v.astype(float) for k, v in tensors.items()}


def is_integer(key):
    return key in IDS or key.startswith("router_idx")


def true_tokens(name, kind):
    """The tokens from each anchor on, [B, A, J]; the last one again beyond the end."""
    golden = case(name).files[kind]
    tokens, anchors = golden["input_ids"], golden["dspark.anchors"]
    at = anchors[..., None] + np.arange(case(name).config["text_config"]["dspark_block_size"])
    at = np.minimum(at, tokens.shape[1] - 1)
    return np.take_along_axis(tokens[:, None], at, axis=-1)


def proposal(name, kind, numerics, config=None, weights=None, outputs=None):
    """All that the golden file `kind` may hold of the drafter, under its names without prefix."""
    config, weights = config or case(name).config, weights or case(name).weights
    outputs = outputs or target(name, kind, numerics)
    c, previous = config["text_config"], true_tokens(name, kind)
    anchors, (B, A, _) = case(name).files[kind]["dspark.anchors"], previous.shape
    features = paper_drafter.target_features(config, outputs, numerics)
    S = features.shape[1]

    blocks, chains = [], []
    for a in range(A):
        tokens = previous[:, a, 0]
        blocks.append(
            paper_drafter.draft(config, weights, features, tokens, anchors[:, a], numerics=numerics)
        )
        chains.append(paper_drafter.greedy(config, weights, blocks[-1], tokens, numerics=numerics))
    seen = {key: np.concatenate([b[key] for b in blocks], axis=1) for key in blocks[0]}
    seen["position_ids"] = np.concatenate([np.tile(np.arange(S), (B, 1)), seen["position_ids"]], 1)
    seen["visible"] = beside_each_other([b["visible"] for b in blocks], S)

    w, previous = paper_drafter.last_stage(weights, c), rearrange(previous, "b a j -> b (a j)")
    em, bias = paper_drafter.markov(previous, w, numerics)
    two = np.sort(np.stack([chain["logits"] for chain in chains]), axis=-1)
    return seen | {
        "features": features,
        "main_hidden": paper_drafter.context(features, weights, c, numerics),
        "previous_token_ids": previous,
        "markov_logits": bias,
        "confidence_prenorm": paper_drafter.confidence(seen["hidden_prenorm"], em, w),
        "confidence_postnorm": paper_drafter.confidence(seen["hidden"], em, w),
        "greedy_ids": np.stack([chain["ids"] for chain in chains], 1),
        "greedy_confidence_prenorm": np.stack([chain["confidence"] for chain in chains], 1),
        "greedy_min_gap": np.array([(two[..., -1] - two[..., -2]).min()]),
    }


def beside_each_other(masks, S):
    """Masks [B, J, S + J] of A blocks as one [B, A J, S + A J]: no block sees another."""
    J = masks[0].shape[1]
    rows = []
    for a, mask in enumerate(masks):
        own = np.zeros((*mask.shape[:2], len(masks) * J), bool)
        own[..., a * J : (a + 1) * J] = mask[..., S:]
        rows.append(np.concatenate([mask[..., :S], own], -1))
    return np.concatenate(rows, 1)


def pairs(name, kind, outputs, prefix="dspark."):
    """(key, output, golden) of every recorded key but the anchors; padded positions left out."""
    for full, golden in case(name).files[kind].items():
        key = full.removeprefix(prefix)
        if full.startswith(prefix) and key != "anchors":
            real = case(name).real if key in ("features", "main_hidden") else ...
            yield key, outputs[key][real], golden[real]


# --- Golden data ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_float32_drafter_equals_golden_with_the_same_tokens(name):
    """The golden data allows 1e-4 of the logits and 1e-3 of the confidence; we need 1e-5."""
    outputs, compared = proposal(name, "f32", FLOAT32), set()
    for key, value, golden in pairs(name, "f32", outputs):
        compared.add(key)
        assert value.shape == golden.shape, key
        if is_integer(key):
            np.testing.assert_array_equal(value, golden, err_msg=key)
        elif key == "greedy_min_gap":  # of two logits, each good to 1e-6 of its size
            np.testing.assert_allclose(value, golden, rtol=0, atol=2e-5)
        else:
            assert relative_error(value, golden) < 1e-5, key
    assert recorded(name, "f32").keys() - compared == {"anchors"}  # an input
    assert {"base_logits", "confidence_prenorm", "greedy_ids", "hidden_prenorm"} <= compared


@pytest.mark.parametrize("name", CASES)
def test_float32_drafter_without_cache_round_trips_equals_golden(name):
    outputs, compared = proposal(name, "f32", FLOAT32_NO_QUANTISATION), set()
    for key, value, golden in pairs(name, "f32", outputs, "noquant.dspark."):
        compared.add(key)
        assert relative_error(value, golden) < 1e-5, key
        np.testing.assert_allclose(value, golden, rtol=0, atol=2e-4, err_msg=key)
    assert compared == {"base_logits", "confidence_prenorm"}


def stages_alone(name, kind, numerics):
    """Every stage on the recorded output of the one before it, at every anchor."""
    g, weights, c = recorded(name, kind), case(name).weights, case(name).config["text_config"]
    J, M = c["dspark_block_size"], c["hc_mult"]
    streams = np.repeat(weights["embed.weight"][g["draft_input_ids"]][:, :, None], M, axis=2)
    pre, seen = np.broadcast_to(np.eye(M)[0], streams.shape[:3]), {}
    for i in range(c["num_nextn_predict_layers"]):
        found = []
        for a, anchor in enumerate(g["anchors"][0]):
            x, mix = (part[:, a * J : (a + 1) * J] for part in (streams, pre))
            found.append(
                paper_drafter.stage(weights, i, x, mix, g["main_hidden"], anchor, c, numerics)[-1]
            )
        seen |= {key: np.concatenate([f[key] for f in found], axis=1) for key in found[0]}
        streams, pre = g[f"streams.{i}"], g[f"premix.{i}"]
    return seen | {"hidden_prenorm": paper.collapse(streams, pre, numerics)}


def heads_alone(name, kind, numerics):
    """Logits, confidences and greedy chains of the recorded `hidden_prenorm`."""
    g, weights, c = recorded(name, kind), case(name).weights, case(name).config["text_config"]
    w, J = paper_drafter.last_stage(weights, c), c["dspark_block_size"]
    hidden, logits = paper_drafter.base_logits(g["hidden_prenorm"], weights, c, numerics)
    em, bias = paper_drafter.markov(g["previous_token_ids"], w, numerics)
    state, chains = {"base_logits": logits, "hidden_prenorm": g["hidden_prenorm"]}, []
    for start in range(0, logits.shape[1], J):
        block = {key: value[:, start : start + J] for key, value in state.items()}
        tokens = g["draft_input_ids"][:, start]
        chains.append(
            paper_drafter.greedy(case(name).config, weights, block, tokens, numerics=numerics)
        )
    return {
        "hidden": hidden,
        "base_logits": logits,
        "markov_logits": bias,
        "confidence_prenorm": paper_drafter.confidence(g["hidden_prenorm"], em, w),
        "confidence_postnorm": paper_drafter.confidence(hidden, em, w),
        "greedy_ids": np.stack([chain["ids"] for chain in chains], 1),
        "greedy_confidence_prenorm": np.stack([chain["confidence"] for chain in chains], 1),
    }


def test_bfloat16_drafter_equals_golden_one_step_at_a_time():
    """Rounding points: each step gets the recorded input and must agree to the last bit, but for
    two more roundings of the golden package, of the routed experts' sum and of the Markov bias."""
    name, kind = "flash_mini", "bf16"
    g, config, weights = recorded(name, kind), case(name).config, case(name).weights
    streams = {k: v.astype(float) for k, v in case(name).files[kind].items() if "streams." in k}
    outputs = proposal(name, kind, BFLOAT16)  # for what depends on positions and tokens only
    outputs |= {"features": paper_drafter.target_features(config, streams, BFLOAT16)}
    mx = paper_drafter.context(g["features"], weights, config["text_config"], BFLOAT16)
    outputs |= {"main_hidden": mx} | stages_alone(name, kind, BFLOAT16)
    outputs |= heads_alone(name, kind, BFLOAT16)
    compared = set()
    for key, value, golden in pairs(name, kind, outputs):
        if key == "greedy_min_gap":  # of logits with the package's rounded bias
            continue
        compared.add(key)
        if is_integer(key):
            np.testing.assert_array_equal(value, golden, err_msg=key)
        else:
            twice = key.startswith(("streams", "markov"))
            assert relative_error(value, golden) < (2e-3 if twice else 1e-6), key
    assert g.keys() - compared == {"anchors", "greedy_min_gap"}


def test_bfloat16_heads_equal_golden_with_the_same_tokens():
    g, outputs = recorded("quantised", "bf16"), heads_alone("quantised", "bf16", BFLOAT16)
    for key in ("base_logits", "confidence_prenorm"):
        assert relative_error(outputs[key], g[key]) < 1e-6, key
    np.testing.assert_array_equal(outputs["greedy_ids"], g["greedy_ids"])


@pytest.mark.parametrize("name", ["flash_mini", "quantised"])
def test_bfloat16_drafter_is_close_to_golden_from_end_to_end(name):
    """The limit of whole models in bfloat16: the target's features are no closer."""
    outputs, g = proposal(name, "bf16", BFLOAT16), recorded(name, "bf16")
    for key in ("hidden_prenorm", "base_logits"):
        assert relative_error(outputs[key], g[key]) < 0.2, key
    np.testing.assert_array_equal(outputs["greedy_ids"], g["greedy_ids"])


@pytest.mark.parametrize("name", ["w8b5", "w128b5", "w4b3"])
def test_positions_and_visibility(name):
    """An anchor that training dropped sees its own block only, like one at position 0."""
    notes, tensors = component_notes("dspark_layout")[name], component("dspark_layout")
    g = {k.removeprefix(name + "."): v for k, v in tensors.items() if k.startswith(name + ".")}
    S, J, W = notes["context"], notes["block_size"], notes["sliding_window"]
    assert g["keep"].any() and not g["keep"].all()
    for row, anchors in enumerate(g["anchors"]):
        blocks = [paper_drafter.block_positions(a, J) for a in anchors]
        positions = np.concatenate([np.arange(S), *blocks])
        np.testing.assert_array_equal(positions, g["position_ids"][row])
        seeing = anchors * g["keep"][row]
        masks = [paper_drafter.visible_slots(S, a, W, J)[None] for a in seeing]
        np.testing.assert_array_equal(beside_each_other(masks, S)[0], g["visible"][row])


# --- What the spec says in words ------------------------------------------------------------------


def test_visibility_of_appendix_a6():
    for row in paper_drafter.visible_slots(300, 200, 128, 5):
        np.testing.assert_array_equal(np.flatnonzero(row), [*range(72, 200), *range(300, 305)])
    np.testing.assert_array_equal(paper_drafter.block_positions(200, 5), range(200, 205))


def some_draft(numerics, features=None, **fields):
    """A block for each row of the `dspark` case, at anchors with a full window."""
    config, weights = deepcopy(case("dspark").config), case("dspark").weights
    config["text_config"] |= fields
    if features is None:
        features = recorded("dspark", "f32")["features"]
    tokens, anchors = np.array([167, 228]), np.array([41, 29])
    return paper_drafter.draft(config, weights, features, tokens, anchors, numerics=numerics)


def test_a_draft_depends_on_the_window_before_its_anchor_and_on_nothing_else():
    features, right = recorded("dspark", "f32")["features"], some_draft(FLOAT32)["base_logits"]
    noise = np.random.default_rng(0).normal(size=features.shape)
    at = np.arange(features.shape[1])
    for row, anchor in enumerate((41, 29)):
        inside = (at >= anchor - 16) & (at < anchor)
        outside = np.where(inside[:, None], features, noise)
        same = some_draft(FLOAT32, outside)["base_logits"][row]
        np.testing.assert_array_equal(same, right[row])
        for edge in (anchor - 16, anchor - 1):
            moved = np.where(at[:, None] == edge, noise, features)
            moved = some_draft(FLOAT32, moved)["base_logits"][row]
            assert np.all(np.abs(moved - right[row]).max(-1) > 1e-3)  # every slot


def test_expert_counts_are_those_of_the_drafter():
    """The counts per token are equal in all cases, so the golden data cannot tell them apart."""
    right = some_draft(FLOAT32)
    other = some_draft(FLOAT32, n_routed_experts=2, num_experts_per_tok=1)
    np.testing.assert_array_equal(other["base_logits"], right["base_logits"])
    fewer = some_draft(FLOAT32, dspark_num_experts_per_tok=1)
    assert fewer["router_idx.0"].shape[-1] == 1
    assert relative_error(fewer["base_logits"], right["base_logits"]) > 1e-2


def test_inputs_are_quantised_for_the_weights_released_in_8_or_4_bits_except_wo_a(monkeypatch):
    golden, seen = case("quantised"), set()
    names, right = {id(w): name for name, w in golden.weights.items()}, paper.quantized_linear

    def watched(x, weight, numerics):
        seen.add(names[id(weight)])
        return right(x, weight, numerics)

    monkeypatch.setattr(paper, "quantized_linear", watched)
    features = recorded("quantised", "f32")["features"]
    paper_drafter.draft(
        golden.config, golden.weights, features, np.array([7]), [40], numerics=paper.Numerics()
    )
    scales = {n for n in read(golden.folder / "model.safetensors") if n.endswith(".scale")}
    stored = {n.removesuffix("scale") + "weight" for n in scales if n.startswith("mtp.")}
    assert seen == {n for n in stored if not n.endswith("wo_a.weight")}
    assert "mtp.0.main_proj.weight" in seen and len(seen) == 33


def test_heads_are_not_rounded():
    block, tokens, numerics = some_draft(paper.Numerics()), np.array([167, 228]), paper.Numerics()
    model = case("dspark").config, case("dspark").weights
    chain = paper_drafter.greedy(*model, block, tokens, numerics=numerics)
    w = paper_drafter.last_stage(model[1], model[0]["text_config"])
    _, bias = paper_drafter.markov(chain["ids"], w, numerics)
    for value in (block["base_logits"], bias, chain["confidence"]):
        assert np.mean(paper.round_to(value, "bfloat16") != value) > 0.9
    state = block["hidden_prenorm"]
    np.testing.assert_array_equal(paper.round_to(state, "bfloat16"), state)


@pytest.mark.parametrize(
    "switch, matters",
    [
        ({"dtype": "float32"}, True),
        ({"quantize_activations": False}, True),
        ({"quantize_cache": False}, True),
        ({"round_probabilities": False}, True),
        ({"round_index_scores": False}, False),  # there is no indexer
        ({"quantize_wo_a": True}, True),
    ],
    ids=str,
)
def test_every_switch_of_what_the_drafter_has_changes_the_draft(switch, matters):
    default, changed = some_draft(paper.Numerics()), some_draft(paper.Numerics(**switch))
    error = relative_error(changed["base_logits"], default["base_logits"])
    assert 1e-3 < error < 1 if matters else error == 0


def test_an_anchor_beyond_the_features_is_refused():
    features = recorded("dspark", "f32")["features"][:, :40]
    with pytest.raises(ValueError, match=r"anchors \[41 29\] need features .* there are 40"):
        some_draft(FLOAT32, features)


# --- Planted mistakes -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Mistake:
    """One wrong reading of the spec; the target, and so its streams, stay right.

    `config`, `weights` and `numerics` work for any implementation. `patch` replaces functions of
    paper_drafter.py or, where it has none of that name, of paper.py.
    """

    name: str
    config: Callable[[dict], dict] | None = None  # text_config -> the fields that are wrong
    weights: Callable[[dict], dict] | None = None  # released names -> the tensors that are wrong
    numerics: dict | None = None  # fields of Numerics that are wrong
    patch: Callable[[], dict] | None = None  # functions that are wrong, by name


def drafter(weights, suffix):
    return {n: w for n, w in weights.items() if n.startswith("mtp.") and n.endswith(suffix)}


def from_other_streams(change):
    """The features of outputs that were changed by `change`."""
    right = paper_drafter.target_features
    return {
        "target_features": lambda config, outputs, numerics: right(
            config, outputs | change(outputs), numerics
        )
    }


def before_engram(outputs):
    return {f"engram_out.{i}": outputs[f"streams.{i}"] for i in range(3)}


def after_the_layer(outputs):
    wrong = {f"streams.{i}": outputs[f"streams.{i + 1}"] for i in range(3)}
    return wrong | {"engram_out.1": outputs["streams.2"]}


def first_stream(outputs):
    return {k: v[..., :1, :] for k, v in outputs.items() if k.startswith(("streams", "engram_out"))}


def collapsed_by_the_carried_pre(outputs):
    wrong = {}
    for i in range(3):
        streams = outputs.get(f"engram_out.{i}", outputs[f"streams.{i}"])
        collapsed = paper.collapse(streams, outputs[f"premix.{i}"], FLOAT32)
        wrong[f"engram_out.{i}"] = collapsed[:, :, None]
    return wrong


def other_visibility(sees):
    """`sees(ago, j, other, window)` of context that is `ago` before the anchor, or of a slot."""

    def visible_slots(S, anchor, window, J):
        j, other = np.arange(J)[:, None], np.arange(J)
        past = sees(anchor - np.arange(S), j, None, window) + np.zeros((J, 1), bool)
        return np.concatenate([past, sees(None, j, other, window) + np.zeros((J, J), bool)], -1)

    return {"visible_slots": visible_slots}


def in_window(ago, window):
    return (ago >= 1) & (ago <= window)


def causal(ago, j, other, window):
    return other <= j if ago is None else in_window(ago, window)


def only_itself(ago, j, other, window):
    return other == j if ago is None else in_window(ago, window)


def moving_window(ago, j, other, window):
    return True if ago is None else in_window(ago, window) & (ago + j < window)


def anchor_in_the_context(ago, j, other, window):
    return True if ago is None else (ago >= 0) & (ago < window)


def context_through_attn_norm():
    right = paper_drafter.stage

    def stage(weights, i, streams, pre, mx, anchor, c, numerics):
        norm = weights[f"mtp.{i}.attn_norm.weight"]
        mx = paper.rms_norm(mx, norm, c["rms_norm_eps"], numerics)
        return right(weights, i, streams, pre, mx, anchor, c, numerics)

    return {"stage": stage}


def context_keys_one_position_late():
    def context_keys(mx, w, f, eps, numerics):
        return paper.window_keys(mx, w, np.arange(mx.shape[1]) + 1, f, eps, numerics)

    return {"context_keys": context_keys}


def context_keys_not_quantised():
    right = paper_drafter.context_keys

    def context_keys(mx, w, f, eps, numerics):
        return right(mx, w, f, eps, replace(numerics, quantize_cache=False))

    return {"context_keys": context_keys}


def yarn_on():
    right = paper.frequencies
    return {"frequencies": lambda c, _: right(c | {"compress_rope_theta": c["rope_theta"]}, 1)}


def confidence_of_the_normalised_state():
    right = paper_drafter.confidence

    def confidence(xr, em, w):
        return right(paper.rms_norm(xr, w["norm.weight"], 1e-20, FLOAT32), em, w)

    return {"confidence": confidence}


def every_slot_follows_the_anchor():
    """The Markov bias of every slot is that of the anchor's token."""
    right = paper_drafter.greedy

    def greedy(config, weights, drafted, tokens, numerics):
        slots = []
        for j in range(drafted["base_logits"].shape[1]):
            slot = {k: drafted[k][:, j : j + 1] for k in ("base_logits", "hidden_prenorm")}
            slots.append(right(config, weights, slot, tokens, numerics=numerics))
        return {k: np.concatenate([slot[k] for slot in slots], axis=1) for k in slots[0]}

    return {"greedy": greedy}


def no_sinks(weights):
    return {n: np.full_like(w, -np.inf) for n, w in drafter(weights, "attn_sink").items()}


def no_markov_bias(weights):
    return {n: np.zeros_like(w) for n, w in drafter(weights, "markov_head.head.weight").items()}


def images_bias(weights):
    return {n.removesuffix("_vl"): w for n, w in drafter(weights, "gate.bias_vl").items()}


def keys_of_the_first_stage(weights):
    return {f"mtp.{i}.attn.wkv.weight": weights["mtp.0.attn.wkv.weight"] for i in range(3)}


MISTAKES = (
    Mistake("features before Engram", patch=lambda: from_other_streams(before_engram)),
    Mistake("features after the layer", patch=lambda: from_other_streams(after_the_layer)),
    Mistake("features of the first stream", patch=lambda: from_other_streams(first_stream)),
    Mistake(
        "features collapsed by pre", patch=lambda: from_other_streams(collapsed_by_the_carried_pre)
    ),
    Mistake("target layers reversed", lambda c: {"dspark_target_layer_ids": [2, 1, 0]}),
    Mistake("main_norm left out", weights=lambda w: {"mtp.0.main_norm.weight": np.ones(32)}),
    Mistake("attn_norm on the context", patch=context_through_attn_norm),
    Mistake("window one too narrow", lambda c: {"sliding_window": c["sliding_window"] - 1}),
    Mistake("window one too wide", lambda c: {"sliding_window": c["sliding_window"] + 1}),
    Mistake("window moves with the slot", patch=lambda: other_visibility(moving_window)),
    Mistake("anchor in the context", patch=lambda: other_visibility(anchor_in_the_context)),
    Mistake("causal block", patch=lambda: other_visibility(causal)),
    Mistake("slots see only themselves", patch=lambda: other_visibility(only_itself)),
    Mistake(
        "slots all at the anchor", patch=lambda: {"block_positions": lambda a, J: np.full(J, a)}
    ),
    Mistake(
        "slots one too far", patch=lambda: {"block_positions": lambda a, J: a + 1 + np.arange(J)}
    ),
    Mistake("context one position late", patch=context_keys_one_position_late),
    Mistake("YaRN on", patch=yarn_on),
    Mistake("theta of the compressed layers", lambda c: {"rope_theta": c["compress_rope_theta"]}),
    Mistake("context keys not quantised", patch=context_keys_not_quantised),
    Mistake("no key quantised", numerics={"quantize_cache": False}),
    Mistake("keys of the first stage", weights=keys_of_the_first_stage),
    Mistake("sink left out", weights=no_sinks),
    Mistake("another noise token", lambda c: {"dspark_noise_token_id": c["pad_token_id"]}),
    Mistake("drafts routed like images", weights=images_bias),
    Mistake("one expert too few", lambda c: {"dspark_num_experts_per_tok": 1}),
    Mistake("the target's output norm", weights=lambda w: {"mtp.2.norm.weight": w["norm.weight"]}),
    Mistake("no Markov bias", weights=no_markov_bias),
    Mistake("every slot follows the anchor", patch=every_slot_follows_the_anchor),
    Mistake("confidence of the normalised state", patch=confidence_of_the_normalised_state),
)  # fmt: skip
SHOWN = ("base_logits", "confidence_prenorm", "greedy_confidence_prenorm")


def drafting_error(config, weights, numerics):
    """The largest relative error of what the drafter hands out, from the right target."""
    outputs = target("dspark", "f32", FLOAT32)
    outputs = proposal("dspark", "f32", numerics, config, weights, outputs)
    return max(relative_error(v, g) for k, v, g in pairs("dspark", "f32", outputs) if k in SHOWN)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.name)
def test_a_mistake_moves_the_draft_far_beyond_the_golden_limit(mistake, monkeypatch):
    config, weights = deepcopy(case("dspark").config), dict(case("dspark").weights)
    assert drafting_error(config, weights, FLOAT32) < 1e-5
    if mistake.config:
        wrong = mistake.config(config["text_config"])
        assert wrong.keys() <= config["text_config"].keys()
        config["text_config"] |= wrong
    if mistake.weights:
        wrong = mistake.weights(weights)
        assert wrong and wrong.keys() <= weights.keys()
        weights |= wrong
    if mistake.patch:
        for function, wrong in mistake.patch().items():
            module = paper_drafter if hasattr(paper_drafter, function) else paper
            monkeypatch.setattr(module, function, wrong)
    assert drafting_error(config, weights, replace(FLOAT32, **(mistake.numerics or {}))) > 1e-2
