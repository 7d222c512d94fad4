"""The drafter in the executable paper: DSpark of DeepSeek-V4.1, in NumPy (spec 9).

Start at the bottom: `draft` and `greedy` are one proposal. A block is drafted for one anchor of
one sequence at a time, on the keys of the whole sequence under a mask; there is no ring. Functions
and rounding points that the target has too are those of paper.py, as are the letters. In addition:
J slots of a draft block, L target layers that the drafter sees, P Markov rank.

The anchor of a block is the position of its first token, the newest one: the target has processed
the positions before it. Slot j proposes the token at anchor + 1 + j.
"""

import numpy as np
import paper
from einops import repeat
from paper import under

# --- What the target shows: spec 9.2 --------------------------------------------------------------


def target_features(config, outputs, numerics):
    """The mean stream at the input of each target layer, [B, S, L D] (spec 2.2, step 7b).

    outputs is what `paper.forward` returned. A layer's Engram comes before its attention, so the
    mean is that of the streams after it.
    """
    layers = config["text_config"]["dspark_target_layer_ids"]
    inputs = [outputs.get(f"engram_out.{i}", outputs[f"streams.{i}"]) for i in layers]
    return numerics.round(np.concatenate([streams.mean(-2) for streams in inputs], -1))


def context(features, weights, c, numerics):
    """What all stages read of the target, [B, S, D], from features [B, S, L D]."""
    x = paper.quantized_linear(features, weights["mtp.0.main_proj.weight"], numerics)
    return paper.rms_norm(x, weights["mtp.0.main_norm.weight"], c["rms_norm_eps"], numerics)


# --- The draft block: spec 9.3 --------------------------------------------------------------------


def block_positions(anchor, J):
    """Where the slots of a block stand, [J]."""
    return anchor + np.arange(J)


def visible_slots(S, anchor, window, J):
    """Which of S context positions, then J slots of the block, every slot sees: [J, S + J].

    The window ends before the anchor and does not move with the slots; inside the block there is
    no order.
    """
    ago = anchor - np.arange(S)
    return np.tile(np.concatenate([(ago >= 1) & (ago <= window), np.ones(J, bool)]), (J, 1))


def context_keys(mx, w, f, eps, numerics):
    """Keys of the context, [1, S, E]: no attn_norm, only wkv and what follows it (spec 9.2)."""
    return paper.window_keys(mx, w, np.arange(mx.shape[1]), f, eps, numerics)


def attention(x, mx, w, anchor, c, numerics):
    """Attention of a block's normalised input x [1, J, D] to itself and to context mx [1, S, D]."""
    S, J = mx.shape[1], x.shape[1]
    at, f, eps = block_positions(anchor, J), paper.frequencies(c, 0), c["rms_norm_eps"]
    q, _ = paper.queries(x, w, at, f, c, numerics)
    own = paper.window_keys(x, w, at, f, eps, numerics)
    slots = np.concatenate([context_keys(mx, w, f, eps, numerics), own], 1)
    mask = visible_slots(S, anchor, c["sliding_window"], J)[None]
    o = paper.attend(q, slots, mask, w["attn_sink"], numerics)
    o = paper.rope(o, at, f, numerics, inverse=True)
    return paper.project_output(o, w, c["o_groups"], numerics)


def mixture(x, w, c, numerics):
    """The target's mixture with the drafter's counts; a draft is always text (spec 7.5)."""
    counts = {
        "n_routed_experts": c["dspark_n_routed_experts"],
        "num_experts_per_tok": c["dspark_num_experts_per_tok"],
    }
    return paper.mixture(x, w, np.zeros(x.shape[:2], bool), c | counts, numerics)


def stage(weights, i, streams, pre, mx, anchor, c, numerics):
    """Stage i on a block, built like a layer of the target (spec 2.3): (streams, pre, captures)."""
    w, eps = under(weights, f"mtp.{i}."), c["rms_norm_eps"]

    attn_mix = paper.mixes(streams, under(w, "hc_attn_"), c)
    x = paper.collapse(streams, pre, numerics)
    x = paper.rms_norm(x, w["attn_norm.weight"], eps, numerics)
    out = attention(x, mx, under(w, "attn."), anchor, c, numerics)
    streams = paper.expand(streams, out, attn_mix, numerics)
    seen = {"attn_out": out}

    ffn_mix = paper.mixes(streams, under(w, "hc_ffn_"), c)
    x = paper.collapse(streams, attn_mix.pre, numerics)
    x = paper.rms_norm(x, w["ffn_norm.weight"], eps, numerics)
    out, found = mixture(x, under(w, "ffn."), c, numerics)
    streams = paper.expand(streams, out, ffn_mix, numerics)
    seen |= found | {"streams": streams, "premix": ffn_mix.pre}
    return streams, ffn_mix.pre, {f"{name}.{i}": value for name, value in seen.items()}


# --- Heads: spec 9.5 ------------------------------------------------------------------------------


def last_stage(weights, c):
    """Weights of the last stage, which holds the output norm and the heads."""
    return under(weights, f"mtp.{c['num_nextn_predict_layers'] - 1}.")


def base_logits(xr, weights, c, numerics):
    """(normalised state [1, J, D], logits [1, J, V]) of the collapsed streams xr [1, J, D]."""
    norm = last_stage(weights, c)["norm.weight"]
    hidden = paper.rms_norm(xr, norm, c["rms_norm_eps"], numerics)
    return hidden, hidden @ weights["head.weight"].T


def markov(previous, w, numerics):
    """(embedding [..., P], bias of the logits [..., V]) of the token before a slot, int [...]."""
    em = numerics.round(w["markov_head.embed.weight"][previous])
    return em, em @ w["markov_head.head.weight"].T


def confidence(xr, em, w):
    """Logit of the acceptance of a slot, [...], from its collapsed streams before the norm."""
    return np.concatenate([xr, em], -1) @ w["confidence_head.proj.weight"][0]


# --- One proposal ---------------------------------------------------------------------------------


def draft_block(weights, mx, token, anchor, c, numerics):
    """Everything that happens in the block of one token at one anchor, on context mx [1, S, D]."""
    ids = np.array([token] + [c["dspark_noise_token_id"]] * (c["dspark_block_size"] - 1))
    h = numerics.round(weights["embed.weight"][ids])[None]
    J, M = len(ids), c["hc_mult"]
    streams = repeat(h, "b j d -> b j m d", m=M)
    pre = np.broadcast_to(np.eye(M)[0], (1, J, M))  # a chain of its own
    seen = {
        "draft_input_ids": ids[None],
        "position_ids": block_positions(anchor, J)[None],
        "visible": visible_slots(mx.shape[1], anchor, c["sliding_window"], J)[None],
    }
    for i in range(c["num_nextn_predict_layers"]):
        streams, pre, found = stage(weights, i, streams, pre, mx, anchor, c, numerics)
        seen |= found
    xr = paper.collapse(streams, pre, numerics)
    hidden, base = base_logits(xr, weights, c, numerics)
    return seen | {"hidden_prenorm": xr, "hidden": hidden, "base_logits": base}


def draft(config, weights, features, tokens, anchors, *, numerics):
    """The draft block of every sequence, before its Markov chain (spec 9.3).

    Args:
        config, weights, numerics: as in `paper.forward`.
        features: [B, S, L D] as `target_features` gives them.
        tokens: int [B], the newest token of each sequence.
        anchors: int [B], its position; features before it are read, others are not.

    Returns:
        `base_logits` [B, J, V], `hidden_prenorm` [B, J, D] and captures by stage such as
        `streams.0` [B, J, M, D] or `router_idx.2`, each as it leaves the stage.

    Raises:
        ValueError: an anchor lies beyond the features.
    """
    c = config["text_config"]
    if np.max(anchors) > features.shape[1]:
        raise ValueError(
            f"the anchors {anchors} need features of all positions before them, "
            f"but there are {features.shape[1]}"
        )
    mx = context(features, weights, c, numerics)
    blocks = [
        draft_block(weights, mx[b : b + 1], tokens[b], anchors[b], c, numerics)
        for b in range(len(mx))
    ]
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def greedy(config, weights, drafted, tokens, *, numerics):
    """The likeliest chain, left to right: slot j is biased by the token of slot j - 1 (spec 9.5).

    Args:
        config, weights, numerics, tokens: as in `draft`.
        drafted: what `draft` returned.

    Returns:
        `ids` int [B, J], `logits` [B, J, V] and `confidence` [B, J], the latter a logit as well.
    """
    w = last_stage(weights, config["text_config"])
    ids, logits, confidences, previous = [], [], [], np.asarray(tokens)
    for j in range(drafted["base_logits"].shape[1]):
        em, bias = markov(previous, w, numerics)
        logits.append(drafted["base_logits"][:, j] + bias)
        confidences.append(confidence(drafted["hidden_prenorm"][:, j], em, w))
        previous = logits[-1].argmax(-1)
        ids.append(previous)
    chain = {"ids": ids, "logits": logits, "confidence": confidences}
    return {name: np.stack(values, axis=1) for name, values in chain.items()}
