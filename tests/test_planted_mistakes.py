"""Typical mistakes, planted one at a time: each must move the logits far beyond the golden limit.

`MISTAKES` is a list for any implementation. A mistake is planted by editing what a model is built
from (`config`, `weights`, `numerics`: these work everywhere), or, where no input can express it,
by replacing functions of the executable paper (`patch`); another implementation brings its own
patch for the same name. `golden_files` says what a case is.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import paper
import pytest
from einops import rearrange
from golden_files import case, relative_error


@dataclass(frozen=True)
class Mistake:
    """One wrong reading of the spec, and the case whose float32 logits show it."""

    name: str
    case: str
    config: Callable[[dict], dict] | None = None  # text_config -> the fields that are wrong
    weights: Callable[[dict], dict] | None = None  # released names -> the tensors that are wrong
    numerics: dict | None = None  # fields of Numerics that are wrong
    patch: Callable[[], dict] | None = None  # functions of paper.py that are wrong, by name


# --- Mistakes in weights: what a loader or a forgotten term does ----------------------------------


def ending(weights, suffix):
    return {name: w for name, w in weights.items() if name.endswith(suffix)}


def no_sinks(weights):
    return {name: np.full_like(w, -np.inf) for name, w in ending(weights, "attn_sink").items()}


def transposed_comb(weights):
    """comb[n, m] where comb[m, n] is meant: the projection's rows in the other order."""
    wrong = {}
    for part in ("fn", "base"):
        for sublayer in ("attn", "ffn"):
            for name, w in ending(weights, f"hc_{sublayer}_{part}").items():
                comb = rearrange(w[8:], "(m n) ... -> (n m) ...", m=4)
                wrong[name] = np.concatenate([w[:8], comb])
    return wrong


def text_bias_for_images(weights):
    return {name + "_vl": w for name, w in ending(weights, "gate.bias").items()}


def no_selection_bias(weights):
    return {name: np.zeros_like(w) for name, w in ending(weights, "gate.bias").items()}


def equal_shares_in_a_group(weights):
    return {name: np.zeros_like(w) for name, w in ending(weights, "wgate.weight").items()}


def engram_without_key_weight(weights):
    return {name: np.ones_like(w) for name, w in ending(weights, "engram.k_weight").items()}


# --- Mistakes in code: wrong versions of functions of paper.py ------------------------------------


def unshifted_pre():
    """Every sublayer collapses the streams with its own pre."""
    own, mixes, collapse = [], paper.mixes, paper.collapse

    def remember(streams, w, c):
        own.append(mixes(streams, w, c))
        return own[-1]

    return {
        "mixes": remember,
        "collapse": lambda streams, pre, numerics: collapse(streams, own[-1].pre, numerics),
    }


def ffn_takes_the_pre_that_attention_took():
    """The pre that enters a layer serves both of its sublayers."""
    layer, collapse = paper.layer, paper.collapse
    entering = []

    def layer_that_notes(config, weights, i, streams, pre, *rest, **named):
        entering.append(pre)
        return layer(config, weights, i, streams, pre, *rest, **named)

    calls = []

    def first_pre(streams, pre, numerics):
        calls.append(pre)
        is_ffn = len(calls) % 2 == 0
        return collapse(streams, entering[-1] if is_ffn else pre, numerics)

    return {"layer": layer_that_notes, "collapse": first_pre}


def newest_block_not_forced():
    right = paper.block_scores
    return {"block_scores": lambda scores, visible, size: right(scores, 0 * visible, size)}


def group_rotated_at_its_last_token():
    return {"entry_positions": lambda N, ratio: np.arange(N) * ratio + ratio - 1}


def entry_visible_with_its_first_token():
    return {"visible_entries": lambda S, ratio: np.arange(S) // ratio + 1}


def entry_visible_after_its_last_token():
    return {"visible_entries": lambda S, ratio: np.arange(S) // ratio}


def half_split_rope():
    """Channel i pairs with i + R / 2, as in many other models."""
    right = paper.rope

    def rope(x, positions, f, numerics, inverse=False):
        R = 2 * len(f)
        order = np.arange(R).reshape(2, R // 2).T.reshape(-1)  # 0, R / 2, 1, R / 2 + 1, ...
        order = np.concatenate([np.arange(x.shape[-1] - R), x.shape[-1] - R + order])
        return right(x[..., order], positions, f, numerics, inverse)[..., np.argsort(order)]

    return {"rope": rope}


def output_not_rotated_back():
    right = paper.rope

    def rope(x, positions, f, numerics, inverse=False):
        return x if inverse else right(x, positions, f, numerics)

    return {"rope": rope}


def index_keys_from_rotated_latents():
    """The index-key projection reads the entry, not the latent before rotation."""
    right, pool, linear, rope = paper.compress, paper.pool, paper.linear, paper.rope

    def compress(x, w, ratio, f, eps, numerics):
        entries, _ = right(x, w, ratio, f, eps, numerics)
        at = np.arange(x.shape[1] // ratio) * ratio
        latent = rope(pool(x, w, ratio, eps, numerics), at, f, numerics)
        keys = linear(latent, w["indexer.wk.weight"], numerics)
        keys = paper.rms_norm(keys, w["indexer.k_norm.weight"], eps, numerics)
        return entries, paper.mxfp4(rope(keys, at, f, numerics))

    return {"compress": compress}


def bias_in_the_router_weights():
    right = paper.router

    def router(x, w, image_mask, c):
        _, chosen = right(x, w, image_mask, c)
        score = np.sqrt(np.logaddexp(0, x @ w["gate.weight"].T)) + w["gate.bias"]
        score = np.where(chosen, score, 0)
        return score / score.sum(-1, keepdims=True) * c["routed_scaling_factor"], chosen

    return {"router": router}


def shared_expert_not_clamped():
    right = paper.expert

    def expert(x, w, limit, numerics, weight=None):
        return right(x, w, 0 if weight is None else limit, numerics, weight)

    return {"expert": expert}


def post_without_factor_two():
    right = paper.mixes

    def mixes(streams, w, c):
        mix = right(streams, w, c)
        return mix._replace(post=mix.post / 2)

    return {"mixes": mixes}


def ngrams_cross_images():
    right = paper.look_back
    return {
        "look_back": lambda ids, dead, longest, pad: right(ids, np.zeros_like(dead), longest, pad)
    }


def ngrams_wrap_around_the_start():
    """Nothing blocks the view before the first token."""
    return {
        "look_back": lambda ids, dead, longest, pad: np.stack(
            [np.roll(ids, s, axis=1) for s in range(longest)], axis=-1
        )
    }


def raw_pad_id_in_blocked_slots():
    right = paper.look_back
    return {"look_back": lambda ids, dead, longest, pad: right(ids, dead, longest, 0)}


def engram_open_in_images():
    right = paper.engram

    def engram(streams, rows, w, image_mask, eps, numerics):
        return right(streams, rows, w, np.zeros_like(image_mask), eps, numerics)

    return {"engram": engram}


MISTAKES = (
    Mistake("sink left out", "swa", weights=no_sinks),
    Mistake("window one too wide", "swa", lambda c: {"sliding_window": c["sliding_window"] + 1}),
    Mistake("window one too narrow", "swa", lambda c: {"sliding_window": c["sliding_window"] - 1}),
    Mistake("expert clamp missing", "swa", lambda c: {"swiglu_limit": 0}),
    Mistake("shared expert not clamped", "swa", patch=shared_expert_not_clamped),
    Mistake("comb transposed", "swa", weights=transposed_comb),
    Mistake("one Sinkhorn iteration", "swa", lambda c: {"hc_sinkhorn_iters": 1}),
    Mistake("unshifted pre-mix", "swa", patch=unshifted_pre),
    Mistake("FFN takes attention's pre", "swa", patch=ffn_takes_the_pre_that_attention_took),
    Mistake("post without its factor 2", "swa", patch=post_without_factor_two),
    Mistake("router bias in the weights", "swa", patch=bias_in_the_router_weights),
    Mistake("router bias ignored", "swa", weights=no_selection_bias),
    Mistake("routed scaling left out", "swa", lambda c: {"routed_scaling_factor": 1.0}),
    Mistake("half-split RoPE", "swa", patch=half_split_rope),
    Mistake("output not rotated back", "swa", patch=output_not_rotated_back),
    Mistake("window not quantised", "swa", numerics={"quantize_cache": False}),
    Mistake("YaRN off", "ratio2", lambda c: {"rope_scaling": c["rope_scaling"] | {"factor": 1}}),
    Mistake("one theta", "ratio2", lambda c: {"compress_rope_theta": c["rope_theta"]}),
    Mistake("equal shares in a group", "ratio2", weights=equal_shares_in_a_group),
    Mistake("group rotated at its last token", "ratio2", patch=group_rotated_at_its_last_token),
    Mistake("entry visible too early", "ratio2", patch=entry_visible_with_its_first_token),
    Mistake("entry visible too late", "ratio2", patch=entry_visible_after_its_last_token),
    Mistake("own ratio-1 entry hidden", "hier", patch=entry_visible_after_its_last_token),
    Mistake("one entry too few", "hier", lambda c: {"index_topk": c["index_topk"] - 1}),
    Mistake("candidates ignored", "hier", lambda c: {"candidate_source_layer_id": -1}),
    Mistake("newest block not forced", "hier", patch=newest_block_not_forced),
    Mistake("index keys from rotated latents", "hier", patch=index_keys_from_rotated_latents),
    Mistake("caches not quantised", "hier", numerics={"quantize_cache": False}),
    Mistake("image tokens use the text bias", "vision_engram", weights=text_bias_for_images),
    Mistake("n-grams cross images", "vision_engram", patch=ngrams_cross_images),
    Mistake("n-grams wrap around the start", "dspark", patch=ngrams_wrap_around_the_start),
    Mistake("raw id 0 as pad", "dspark", patch=raw_pad_id_in_blocked_slots),
    Mistake("Engram open inside images", "vision_engram", patch=engram_open_in_images),
    Mistake("Engram key weight left out", "flash_mini", weights=engram_without_key_weight),
)
NUMERICS = paper.Numerics(dtype="float32", quantize_activations=False)


def logits_error(name, config, weights, numerics):
    golden = case(name)
    outputs = paper.forward(config, weights, numerics=numerics, **golden.inputs("f32"))
    ((_, value, expected),) = [p for p in golden.pairs("f32", outputs) if p[0] == "logits"]
    return relative_error(value, expected)


@cache
def error_without_mistake(name):
    return logits_error(name, case(name).config, case(name).weights, NUMERICS)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: f"{m.name} ({m.case})")
def test_a_mistake_moves_the_logits_far_beyond_the_golden_limit(mistake, monkeypatch):
    assert error_without_mistake(mistake.case) < 1e-5

    config, weights = deepcopy(case(mistake.case).config), dict(case(mistake.case).weights)
    if mistake.config:
        config["text_config"] |= mistake.config(config["text_config"])
    if mistake.weights:
        wrong = mistake.weights(weights)
        assert wrong and wrong.keys() <= weights.keys()
        weights |= wrong
    if mistake.patch:
        for function, wrong in mistake.patch().items():
            monkeypatch.setattr(paper, function, wrong)
    numerics = replace(NUMERICS, **(mistake.numerics or {}))
    assert logits_error(mistake.case, config, weights, numerics) > 1e-2


def test_a_wrong_tie_changes_the_selection(monkeypatch):
    """No float32 score of the golden data ties, so a tie is built here: equal blocks of equal
    entries, of which the lowest must win."""
    scores = np.zeros((1, 1, 8))
    shown = np.ones((1, 8), bool)

    def candidates():
        blocks = paper.block_scores(scores, np.array([8]), 2)
        return np.flatnonzero(paper.candidate_entries(blocks, 2, 2, shown))

    np.testing.assert_array_equal(candidates(), [0, 1, 6, 7])  # block 3 is forced, 0 wins the tie
    right = paper.highest
    monkeypatch.setattr(paper, "highest", lambda s, k: right(s[..., ::-1], k)[..., ::-1])
    np.testing.assert_array_equal(candidates(), [4, 5, 6, 7])
