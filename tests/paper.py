"""The executable paper: one forward pass of DeepSeek-V4.1, in NumPy (spec sections 2 to 8).

Start at the bottom: `forward` is spec 2.2, `layer` is spec 2.3, and every function above them is
one idea of the paper. There is no cache, no paging and no chunk. A query attends to a set of
slots; here that is attention to every slot under a mask, which selects the same set.

Arithmetic is float64. `Numerics.round` stands exactly where the spec rounds to the model's dtype;
whatever the spec keeps in float32 stays in float64. The drafter (spec 9) is in paper_drafter.py;
the vision tower (spec 10) is not here: image rows enter as `embeddings`.

Letters: B sequences, S positions, D hidden, H heads, E head width, R rotary width, G output
groups, O group rank, Q query rank, N compressed entries, K selected entries, I index heads,
C index width, M streams, X experts, F expert width, V vocabulary, A columns of an n-gram table.
"""

from dataclasses import dataclass, replace
from math import ceil, floor, log, pi
from typing import NamedTuple

import ml_dtypes
import numpy as np
from einops import rearrange, repeat

BFLOAT16, E4M3, E2M1 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn


# --- Numbers: spec 2.1, 5, 13 ---------------------------------------------------------------------


@dataclass(frozen=True)
class Numerics:
    """Which rounding points are live. The defaults are those of the spec."""

    dtype: str = "bfloat16"  # "bfloat16", "float32" or "float64": what activations are stored in
    quantize_activations: bool = True  # fp8 inputs of the quantised linears (spec 5.6)
    quantize_cache: bool = True  # fp8 window, nvfp4 entries, mxfp4 index keys and queries
    round_probabilities: bool | None = None  # to bfloat16 (spec 3.9); None: if dtype is bfloat16
    round_index_scores: bool | None = None  # to bfloat16 (spec 3.6); None: if dtype is bfloat16
    quantize_wo_a: bool = False  # fp8 input of wo_a too (spec 13, row 1)

    def __post_init__(self):
        if self.dtype not in ("bfloat16", "float32", "float64"):
            raise ValueError(f"dtype must be bfloat16, float32 or float64, got {self.dtype!r}")
        for name in ("round_probabilities", "round_index_scores"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.dtype == "bfloat16")

    def round(self, x):
        """Store x as an activation: one rounding to `dtype`."""
        return round_to(x, self.dtype)


def round_to(x, dtype):
    """Nearest value of dtype, ties to even, as float64. bfloat16 is reached through float32,
    because what gets rounded there is always a float32 accumulator."""
    if dtype == "float64":
        return np.asarray(x, np.float64)
    x = np.asarray(x, np.float32)
    return (x.astype(BFLOAT16) if dtype == "bfloat16" else x).astype(np.float64)


def next_power_of_two(x):
    """Smallest power of two >= x, from the bits of a positive normal float32 (spec 5.1)."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFFFF)) & np.uint32(0x7F800000)).view(np.float32)


def round_trip(x, code, group, smallest, scale_of):
    """scale * code(x / scale), with one scale for each `group` channels of the last axis.

    Everything here is float32, also when the model runs in float64: a scale or a code that is
    decided one bit away from the boundary is a different number, not a slightly different one.
    """
    channels, largest = x.shape[-1], np.float32(ml_dtypes.finfo(code).max)
    widths = [(0, 0)] * (x.ndim - 1) + [(0, -channels % group)]
    x = rearrange(np.pad(x.astype(np.float32), widths), "... (g c) -> ... g c", c=group)
    scale = scale_of(np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(smallest)))
    codes = np.clip(x / scale, -largest, largest).astype(code)
    return rearrange(codes.astype(float) * scale, "... g c -> ... (g c)")[..., :channels]


def fp8(x):
    """e4m3 codes, power-of-two scales, groups of 32 (spec 5.2): activations and window."""
    return round_trip(x, E4M3, 32, 1e-4, lambda amax: next_power_of_two(amax * np.float32(1 / 448)))


def mxfp4(x):
    """e2m1 codes, power-of-two scales, groups of 32 (spec 5.3): index keys and queries."""
    least = 6 * 2.0**-126
    return round_trip(x, E2M1, 32, least, lambda amax: next_power_of_two(amax * np.float32(1 / 6)))


def nvfp4(x):
    """e2m1 codes, e4m3 scales, groups of 16 (spec 5.4): compressed entries."""

    def scale_of(amax):
        return np.minimum(amax / np.float32(6), np.float32(448)).astype(E4M3).astype(np.float32)

    return round_trip(x, E2M1, 16, 6 * 2.0**-9, scale_of)


def rms_norm(x, weight, eps, numerics):
    """x / rms(x) * weight over the last axis, rounded once (spec 2.1)."""
    return numerics.round(x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * weight)


def linear(x, weight, numerics):
    """x [..., in] @ weight [out, in]^T: weights and result in the model's dtype (spec 2.1)."""
    return numerics.round(x @ numerics.round(weight).T)


def quantized_linear(x, weight, numerics):
    """A linear whose weight is released in fp8 or fp4: its input is fp8 as well (spec 5.6)."""
    return linear(fp8(x) if numerics.quantize_activations else x, weight, numerics)


def sigmoid(x):
    return np.exp(-np.logaddexp(0, -x))


def softmax(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def highest(scores, k):
    """Mask of the k highest scores along the last axis.

    Among equals the lower index wins, everywhere in the model; -inf is never chosen.
    """
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, order, True, axis=-1)
    return mask & (scores > -np.inf)


def indices(mask, k):
    """The chosen indices [..., k] of a mask [..., N], ascending, then -1 for unused slots."""
    N = mask.shape[-1]
    listed = np.sort(np.where(mask, np.arange(N), N), axis=-1)[..., :k]
    return np.where(listed < N, listed, -1)


# --- Rotary embedding: spec 3.3 -------------------------------------------------------------------


def frequencies(c, ratio):
    """Angle per position of each rotated pair, float32 [R / 2].

    Layers that see compressed entries have a theta of their own and YaRN, on frequencies only.
    """
    R, pair = c["qk_rope_head_dim"], np.arange(c["qk_rope_head_dim"] // 2)
    theta = c["compress_rope_theta"] if ratio else c["rope_theta"]
    f = theta ** (-2 * pair / R)
    if ratio:
        yarn = c["rope_scaling"]

        def pair_with(turns):  # the pair that turns this often over the original context
            length = yarn["original_max_position_embeddings"]
            return R * log(length / (turns * 2 * pi)) / (2 * log(theta))

        low = max(floor(pair_with(yarn["beta_fast"])), 0)
        high = min(ceil(pair_with(yarn["beta_slow"])), R - 1)
        ramp = np.clip((pair - low) / max(high - low, 0.001), 0, 1)
        f = f / yarn["factor"] * ramp + f * (1 - ramp)
    return f.astype(np.float32)


def rope(x, positions, f, numerics, inverse=False):
    """Turn the last R channels of x [B, S, ..., E]: channels (2i, 2i+1) are one complex number."""
    R = 2 * len(f)
    angle = (positions.astype(np.float32)[:, None] * f).astype(float)  # the product is float32
    turn = np.exp(-1j * angle if inverse else 1j * angle)  # [S, R / 2]
    still, pairs = x[..., :-R], x[..., -R::2] + 1j * x[..., 1 - R :: 2]
    pairs = np.einsum("bs...r,sr->bs...r", pairs, turn)
    turned = rearrange(np.stack([pairs.real, pairs.imag], -1), "... r two -> ... (r two)")
    return np.concatenate([still, numerics.round(turned)], -1)


# --- Hyper-connections: spec 6 --------------------------------------------------------------------


def sinkhorn(logits, iterations, eps):
    """Almost doubly stochastic comb [..., M, M]: from stream m (rows) to stream n (columns)."""
    comb = softmax(logits, -1) + eps
    comb = comb / (comb.sum(-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdims=True) + eps)
        comb = comb / (comb.sum(-2, keepdims=True) + eps)
    return comb


class Mix(NamedTuple):
    """What one sublayer does with the streams, except that its pre is used by the NEXT one."""

    pre: np.ndarray  # [B, S, M]
    post: np.ndarray  # [B, S, M]
    comb: np.ndarray  # [B, S, M, M]


def mixes(streams, w, c):
    """The coefficients that streams [B, S, M, D] ask for (spec 6.2)."""
    M = streams.shape[-2]
    v = rearrange(streams, "b s m d -> b s (m d)")
    z = v @ w["fn"].T / np.sqrt(np.mean(v**2, -1, keepdims=True) + c["rms_norm_eps"])
    z = z * np.repeat(w["scale"], [M, M, M * M]) + w["base"]
    pre, post, comb = np.split(z, [M, 2 * M], axis=-1)
    comb = sinkhorn(
        rearrange(comb, "b s (m n) -> b s m n", m=M), c["hc_sinkhorn_iters"], c["hc_eps"]
    )
    return Mix(sigmoid(pre) + c["hc_eps"], 2 * sigmoid(post), comb)


def collapse(streams, pre, numerics):
    """The input of a sublayer, [B, S, D], by the pre of the sublayer before it (spec 6.3, 6.4)."""
    return numerics.round(np.einsum("bsm,bsmd->bsd", pre, streams))


def expand(streams, out, mix, numerics):
    """The streams after a sublayer whose output is out [B, S, D] (spec 6.3)."""
    kept = np.einsum("bsmn,bsmd->bsnd", mix.comb, streams)
    return numerics.round(np.einsum("bsn,bsd->bsnd", mix.post, out) + kept)


# --- Attention: spec 3 ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """What one layer leaves to the layers above: always that of the latest source."""

    entries: np.ndarray | None = None  # [B, N, E] compressed keys, which are the values too
    index_keys: np.ndarray | None = None  # [B, N, C]
    selected: np.ndarray | None = None  # [B, S, N] bool
    candidates: np.ndarray | None = None  # [B, S, N] bool, if the source of entries published some


def window_mask(S, window):
    """Query t sees window positions t - window + 1 .. t: [S, S] (spec 3.4)."""
    ago = np.arange(S)[:, None] - np.arange(S)
    return (ago >= 0) & (ago < window)


def visible_entries(S, ratio):
    """How many entries query t sees: those whose group is complete, [S] (spec 3.5)."""
    return (np.arange(S) + 1) // ratio


def entry_positions(N, ratio):
    """Entry j is rotated as if it stood at the first token of its group, [N] (spec 3.5)."""
    return np.arange(N) * ratio


def pool(x, w, ratio, eps, numerics):
    """One latent for each complete group of `ratio` tokens, [B, N, E], not rotated (spec 3.5)."""
    if ratio == 1:
        z = linear(x, w["compressor.wkv.weight"], numerics)
    else:
        x = rearrange(x[:, : x.shape[1] // ratio * ratio], "b (n k) d -> b n k d", k=ratio)
        share = softmax(x @ w["compressor.wgate.weight"].T, axis=-2)  # a choice per channel
        z = numerics.round((share * (x @ w["compressor.wkv.weight"].T)).sum(-2))
    return rms_norm(z, w["compressor.norm.weight"], eps, numerics)


def compress(x, w, ratio, f, eps, numerics):
    """Entries [B, N, E] and index keys [B, N, C] of a KV source (spec 3.5, 3.6)."""
    latent = pool(x, w, ratio, eps, numerics)
    at = entry_positions(latent.shape[1], ratio)
    keys = linear(latent, w["indexer.wk.weight"], numerics)
    keys = rope(rms_norm(keys, w["indexer.k_norm.weight"], eps, numerics), at, f, numerics)
    entries = rope(latent, at, f, numerics)
    return (nvfp4(entries), mxfp4(keys)) if numerics.quantize_cache else (entries, keys)


def index_scores(x, qr, w, keys, f, c, numerics):
    """How much query t wants entry j, before any mask: [B, S, N] (spec 3.6)."""
    heads, width = c["index_n_heads"], c["index_head_dim"]
    q = quantized_linear(qr, w["indexer.wq_b.weight"], numerics)
    q = rearrange(q, "b s (i c) -> b s i c", i=heads)
    q = rope(q, np.arange(q.shape[1]), f, numerics)
    q = mxfp4(q) if numerics.quantize_cache else q
    gate = linear(x, w["indexer.weights_proj.weight"], numerics)
    gate = numerics.round(gate * (width**-0.5 * heads**-0.5))
    cast = "bfloat16" if numerics.round_index_scores else "float64"
    dots = round_to(np.einsum("bsic,bnc->bsin", q, keys), cast)
    votes = round_to(np.maximum(dots, 0) * gate[..., None], cast)
    return round_to(votes.sum(-2), cast)


def block_scores(scores, visible, size):
    """Best score of each block of `size` entries, [B, S, ceil(N / size)] (spec 3.8).

    The newest visible block is worth +inf, so it is always kept.
    """
    widths = [(0, 0), (0, 0), (0, -scores.shape[-1] % size)]
    padded = np.pad(scores, widths, constant_values=-np.inf)
    best = rearrange(padded, "b s (n j) -> b s n j", j=size).max(-1)
    newest = np.arange(best.shape[-1]) == (visible[..., None] - 1) // size
    return np.where(newest & (visible[..., None] > 0), np.inf, best)


def candidate_entries(blocks, kept, size, shown):
    """Entries [B, S, N] inside the `kept` best blocks, of those that are shown (spec 3.8)."""
    inside = repeat(highest(blocks, kept), "b s n -> b s (n j)", j=size)
    return inside[..., : shown.shape[-1]] & shown


def select(x, qr, w, i, memory, f, c, numerics):
    """Run the indexer of layer i: (memory, captures) with a new selection (spec 3.6 to 3.8)."""
    visible = visible_entries(x.shape[1], c["compress_ratios"][i])
    shown = np.arange(memory.index_keys.shape[1]) < visible[:, None]  # [S, N]
    scores = index_scores(x, qr, w, memory.index_keys, f, c, numerics)
    scores = np.where(shown, scores, -np.inf)
    seen = {}
    if i == c["candidate_source_layer_id"]:  # its own selection is not restricted
        size, kept = c["candidate_block_size"], c["candidate_topk_blocks"]
        blocks = block_scores(scores, visible, size)
        memory = replace(memory, candidates=candidate_entries(blocks, kept, size, shown))
        seen |= {"block_scores": blocks, "candidates": memory.candidates}
    elif memory.candidates is not None:
        scores = np.where(memory.candidates, scores, -np.inf)
    selected = highest(scores, c["index_topk"])
    seen |= {"index_scores": scores, "topk": indices(selected, c["index_topk"])}
    return replace(memory, selected=selected), seen


def attend(q, slots, mask, sink, numerics):
    """Softmax attention with a sink, [B, S, H, E] (spec 3.9).

    q [B, S, H, E]; slots [B, N, E] are keys and values of every head; mask [B, S, N]; sink [H] is
    a logit without a value. The denominator sums what the value product rounds.
    """
    logits = np.einsum("bshe,bne->bshn", q, slots) * q.shape[-1] ** -0.5
    logits = np.where(mask[:, :, None], logits, -np.inf)
    top = logits.max(-1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(-1, keepdims=True) + np.exp(sink[:, None] - top)
    weights = round_to(weights, "bfloat16") if numerics.round_probabilities else weights
    return numerics.round(np.einsum("bshn,bne->bshe", weights, slots) / total)


def project_output(o, w, groups, numerics):
    """Heads [B, S, H, E] to [B, S, D] through one low-rank matrix for each group (spec 3.10)."""
    o = rearrange(o, "b s (g h) e -> b s g (h e)", g=groups)
    o = fp8(o) if numerics.quantize_wo_a else o
    wo_a = rearrange(numerics.round(w["wo_a.weight"]), "(g o) e -> g o e", g=groups)
    y = numerics.round(np.einsum("bsge,goe->bsgo", o, wo_a))
    return quantized_linear(rearrange(y, "b s g o -> b s (g o)"), w["wo_b.weight"], numerics)


def queries(x, w, positions, f, c, numerics):
    """Rotated queries [B, S, H, E] and the latent [B, S, Q] that they come from (spec 3.2)."""
    qr = quantized_linear(x, w["wq_a.weight"], numerics)
    qr = rms_norm(qr, w["q_norm.weight"], c["rms_norm_eps"], numerics)
    q = quantized_linear(qr, w["wq_b.weight"], numerics)
    q = rearrange(q, "b s (h e) -> b s h e", h=c["num_attention_heads"])
    return rope(q, positions, f, numerics), qr


def window_keys(x, w, positions, f, eps, numerics):
    """What the window holds of x [B, S, D]: rotated keys, the values too, [B, S, E] (spec 3.2)."""
    kv = quantized_linear(x, w["wkv.weight"], numerics)
    kv = rope(rms_norm(kv, w["kv_norm.weight"], eps, numerics), positions, f, numerics)
    return fp8(kv) if numerics.quantize_cache else kv


def attention(x, w, i, memory, c, numerics):
    """Attention of layer i on its normalised input x [B, S, D]: (out, memory, captures)."""
    B, S, _ = x.shape
    ratio, eps, t = c["compress_ratios"][i], c["rms_norm_eps"], np.arange(S)
    f = frequencies(c, ratio)

    q, qr = queries(x, w, t, f, c, numerics)
    slots = window_keys(x, w, t, f, eps, numerics)
    mask = repeat(window_mask(S, c["sliding_window"]), "s n -> b s n", b=B)

    seen = {}
    if ratio and i in c["kv_source_layer_ids"]:
        memory = Memory(*compress(x, w, ratio, f, eps, numerics))
        seen |= {"compressed_kv": memory.entries, "index_keys": memory.index_keys}
    if ratio and i in c["index_source_layer_ids"]:
        memory, found = select(x, qr, w, i, memory, f, c, numerics)
        seen |= found
    if ratio:  # an entry and a window position may cover the same token: both count
        slots = np.concatenate([slots, memory.entries], 1)
        mask = np.concatenate([mask, memory.selected], -1)

    o = attend(q, slots, mask, w["attn_sink"], numerics)
    o = rope(o, t, f, numerics, inverse=True)  # values carry the rotation of their own position
    return project_output(o, w, c["o_groups"], numerics), memory, seen


# --- Mixture of experts: spec 7 -------------------------------------------------------------------


def router(x, w, image_mask, c):
    """Weight of every expert, [B, S, X], and the mask of the chosen ones (spec 7.1).

    The bias takes part in the choice and never in the weight.
    """
    a = x @ w["gate.weight"].T
    score = np.sqrt(np.where(a > 20, a, np.logaddexp(0, a)))
    bias = np.where(image_mask[..., None], w["gate.bias_vl"], w["gate.bias"])
    chosen = highest(score + bias, c["num_experts_per_tok"])
    score = np.where(chosen, score, 0)
    total = score.sum(-1, keepdims=True) + 1e-20
    return score / total * c["routed_scaling_factor"], chosen


def expert(x, w, limit, numerics, weight=None):
    """SwiGLU with clamped branches, [..., D] (spec 7.3); weight [...] enters before w2."""
    gate = quantized_linear(x, w["w1.weight"], numerics)
    up = quantized_linear(x, w["w3.weight"], numerics)
    if limit > 0:  # a limit of 0 means no clamp
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    a = gate * sigmoid(gate) * up
    a = a if weight is None else a * weight[..., None]
    return quantized_linear(numerics.round(a), w["w2.weight"], numerics)


def mixture(x, w, image_mask, c, numerics):
    """Routed experts and the shared one, [B, S, D]: (out, captures) (spec 7.2).

    Every expert runs on every token: an expert that was not chosen has weight 0 and adds 0.
    """
    weights, chosen = router(x, w, image_mask, c)
    limit, y = c["swiglu_limit"], np.zeros(x.shape)
    for e in range(c["n_routed_experts"]):
        y = y + expert(x, under(w, f"experts.{e}."), limit, numerics, weights[..., e])
    y = y + expert(x, under(w, "shared_experts."), limit, numerics)
    listed = indices(chosen, c["num_experts_per_tok"])
    return numerics.round(y), {
        "router_idx": listed,
        "router_w": np.take_along_axis(weights, listed, -1),
    }


# --- Engram: spec 8 -------------------------------------------------------------------------------


def token_map(tokenizer):
    """Compressed id of every token of a `tokenizers.Tokenizer`, int64 [V] (spec 8.1).

    Tokens that read the same after normalisation share an id.
    """
    from tokenizers import Regex
    from tokenizers import normalizers as n

    space = "\ue000"  # keeps a lone space alive while the ends are stripped
    normal = n.Sequence(
        [n.NFKC(), n.NFD(), n.StripAccents(), n.Lowercase()]
        + [n.Replace(Regex(r"[ \t\r\n]+"), " "), n.Replace(Regex(r"^ $"), space)]
        + [n.Strip(), n.Replace(space, " ")]
    )
    ids, compressed = {}, []
    for i in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([i], skip_special_tokens=False)
        broken = "\ufffd" in text  # a piece of a multi-byte character: no text of its own
        key = tokenizer.id_to_token(i) if broken else normal.normalize_str(text) or text
        compressed.append(ids.setdefault(key, len(ids)))
    return np.array(compressed)


def engram_primes(c):
    """Rows of each sub-table: int64 [engram layers, A], columns n-gram-major (spec 8.2).

    Distinct primes over all layers; every n starts again at engram_vocab_size.
    """

    def is_prime(p):
        return p > 1 and all(p % d for d in range(2, int(p**0.5) + 1))

    used, table = set(), []
    for _ in c["engram_layer_ids"]:
        row = []
        for _ in range(2, c["engram_max_ngram_size"] + 1):
            p = c["engram_vocab_size"] - 1
            for _ in range(c["engram_n_heads"]):
                p += 1
                while p in used or not is_prime(p):
                    p += 1
                used.add(p)
                row.append(p)
        table.append(row)
    return np.array(table)


def engram_offsets(primes):
    """First row of each sub-table, [engram layers, A] (spec 8.2)."""
    return np.cumsum(primes, axis=-1) - primes


def engram_multipliers(c):
    """Odd factors of the look-back positions, int64 [engram layers, longest n-gram] (spec 8.2)."""
    bound = max(1, (2**63 - 1) // c["engram_compressed_vocab_size"] // 2)
    size = c["engram_max_ngram_size"]
    generators = [np.random.default_rng(10007 * i) for i in c["engram_layer_ids"]]
    return np.array([g.integers(0, bound, size, np.int64) for g in generators]) * 2 + 1


def look_back(ids, dead, longest, pad):
    """The token s places ago, [B, S, longest] for s = 0, 1, ... (spec 8.3).

    Sequence start and dead positions (image spans) block the view: pad, there and beyond.
    """
    tokens, blocked = [], np.zeros(ids.shape, bool)
    for s in range(longest):
        before = np.arange(ids.shape[1]) < s
        blocked = blocked | before | np.roll(dead, s, axis=1)
        tokens.append(np.where(blocked, pad, np.roll(ids, s, axis=1)))
    return np.stack(tokens, -1)


def ngram_rows(ids, dead, pad, c):
    """Table rows of every token: compressed ids [B, S] to [B, S, engram layers, A] (spec 8.3)."""
    primes, multipliers = engram_primes(c), engram_multipliers(c)
    tokens = look_back(ids, dead, c["engram_max_ngram_size"], pad)
    factors = tokens[:, :, None] * multipliers  # [B, S, layers, longest]
    grams = np.bitwise_xor.accumulate(factors, axis=-1)[..., 1:]  # 2-grams, 3-grams, ...
    return np.repeat(grams, c["engram_n_heads"], axis=-1) % primes + engram_offsets(primes)


def engram(streams, rows, w, image_mask, eps, numerics):
    """Add what the n-grams recall to streams [B, S, M, D]; rows [B, S, A] (spec 8.4)."""
    M, D = streams.shape[-2:]
    e = rearrange(numerics.round(w["embed.weight"][rows]), "b s a e -> b s (a e)")
    kv = quantized_linear(e, w["wkv.weight"], numerics)
    key, value = rearrange(kv[..., : M * D], "b s (m d) -> b s m d", m=M), kv[..., M * D :]

    def inverse_rms(x):
        return 1 / np.sqrt(np.mean(x**2, -1) + eps)

    dot = np.einsum("bsmd,md,bsmd->bsm", streams, w["q_weight"] * w["k_weight"], key)
    dot = dot * inverse_rms(streams) * inverse_rms(key) * D**-0.5
    gate = sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(dot), 1e-6)), dot))
    gate = np.where(image_mask[..., None], 0, gate)
    return numerics.round(streams + np.einsum("bsm,bsd->bsmd", gate, value))


# --- The whole model: spec 2 ----------------------------------------------------------------------


def under(weights, prefix):
    """The weights whose name starts with prefix, by the rest of their name."""
    return {name[len(prefix) :]: w for name, w in weights.items() if name.startswith(prefix)}


def layer(config, weights, i, streams, pre, memory, *, image_mask, rows, numerics):
    """Layer i: (streams, pre, memory, captures) (spec 2.3).

    streams [B, S, M, D] and pre [B, S, M] enter the layer; memory is what the layers below left;
    image_mask [B, S] is true inside image spans; rows [B, S, A] is None without an Engram.
    """
    c, w = config["text_config"], under(weights, f"layers.{i}.")
    eps, seen = c["rms_norm_eps"], {}

    if rows is not None:
        streams = engram(streams, rows, under(w, "engram."), image_mask, eps, numerics)
        seen["engram_out"] = streams

    attn_mix = mixes(streams, under(w, "hc_attn_"), c)
    x = rms_norm(collapse(streams, pre, numerics), w["attn_norm.weight"], eps, numerics)
    out, memory, found = attention(x, under(w, "attn."), i, memory, c, numerics)
    streams = expand(streams, out, attn_mix, numerics)
    seen |= found | {"attn_out": out}

    ffn_mix = mixes(streams, under(w, "hc_ffn_"), c)
    x = rms_norm(collapse(streams, attn_mix.pre, numerics), w["ffn_norm.weight"], eps, numerics)
    out, found = mixture(x, under(w, "ffn."), image_mask, c, numerics)
    streams = expand(streams, out, ffn_mix, numerics)
    seen |= found | {"ffn_out": out}

    seen |= {f"attn_mix.{name}": value for name, value in attn_mix._asdict().items()}
    seen |= {f"ffn_mix.{name}": value for name, value in ffn_mix._asdict().items()}
    return streams, ffn_mix.pre, memory, {numbered(name, i): v for name, v in seen.items()}


def numbered(name, i):
    """The name of a capture of layer i: topk -> topk.3, attn_mix.pre -> attn_mix.3.pre."""
    first, dot, rest = name.partition(".")
    return f"{first}.{i}{dot}{rest}"


def forward(
    config,
    weights,
    tokens,
    *,
    numerics,
    image_mask=None,
    token_map=None,
    embeddings=None,
    streams_in=None,
):
    """Logits of every position and everything that happened on the way (spec 2.2).

    Args:
        config: the released config.json as nested dicts.
        weights: dequantised float arrays by their released names.
        tokens: int [B, S]; position s is the absolute position.
        numerics: the rounding points.
        image_mask: bool [B, S], true at every position of an image span; None if all is text.
        token_map: int [V], the compressed id of each token; needed by models with an Engram.
        embeddings: [B, S, D], read instead of the table where image_mask is true.
        streams_in: {i: (streams [B, S, M, D], pre [B, S, M])} replaces what enters layer i, so
            that every layer can be tested alone on recorded inputs.

    Returns:
        `logits` [B, S, V] and captures such as `streams.0`, `topk.2` or `attn_mix.1.post`.
        `streams.i` is what the layers below computed, also where `streams_in` replaces it.

    Raises:
        ValueError: the model has an Engram and there is no token_map.
    """
    c, (B, S) = config["text_config"], tokens.shape
    M, L, eps = c["hc_mult"], c["num_hidden_layers"], c["rms_norm_eps"]
    image_mask = np.zeros((B, S), bool) if image_mask is None else np.asarray(image_mask, bool)
    seen, rows = {}, {}

    if c["engram_layer_ids"]:
        if token_map is None:
            raise ValueError(
                f"layers {c['engram_layer_ids']} hold an Engram, which hashes compressed ids: "
                "give token_map, for example paper.token_map(tokenizer)"
            )
        pad = token_map[c["engram_pad_token_id"]]
        seen["engram_hash"] = ngram_rows(token_map[tokens], image_mask, pad, c)
        rows = dict(zip(c["engram_layer_ids"], np.moveaxis(seen["engram_hash"], 2, 0), strict=True))

    h = numerics.round(weights["embed.weight"][tokens])
    if embeddings is not None:
        h = np.where(image_mask[..., None], numerics.round(embeddings), h)
    streams = repeat(h, "b s d -> b s m d", m=M)
    pre = np.broadcast_to(np.eye(M)[0], (B, S, M))  # the first sublayer reads stream 0
    memory = Memory()

    for i in range(L):
        seen |= {f"streams.{i}": streams, f"premix.{i}": pre}
        streams, pre = (streams_in or {}).get(i, (streams, pre))
        streams, pre, memory, found = layer(
            config, weights, i, streams, pre, memory,
            image_mask=image_mask, rows=rows.get(i), numerics=numerics,
        )  # fmt: skip
        seen |= found
    seen |= {f"streams.{L}": streams, f"premix.{L}": pre}

    x = rms_norm(collapse(streams, pre, numerics), weights["norm.weight"], eps, numerics)
    return seen | {"final_hidden": x, "logits": x @ weights["head.weight"].T}
