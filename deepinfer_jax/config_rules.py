"""The rules of a configuration (spec 1.4) and the values that cannot vary (spec 1.1, 1.2).

`check_raw` looks at what only the file can say (names, fixed values, the quantisation block),
`check` at the fields of a `Config`; `advice` returns sentences about settings that work here and
that the specification refuses. Every violation is a ValueError of one form: field, value, what is
expected, rule. Wider than the specification: float32 checkpoints, any positive compression ratio,
Engram tables with spare rows, and rule 17 only where draft layers exist.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import numpy as np

ARCHITECTURE = "DeepseekV41ForCausalLM"
MODEL_TYPE = "deepseek_v41"
TEXT_MODEL_TYPE = "deepseek_v41_text"
VISION_MODEL_TYPE = "deepseek_v41_vision"

# Keys of text_config with one supported value; absent means that value.
FIXED = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}
_FIXED_RULE = {"num_key_value_heads": 2, "n_shared_experts": 4}  # all others: rule 8

# Switches of DeepSeek's engine, accepted at their default only (spec 1.2, end).
_SWITCHES = {
    "hc_shifted": True,
    "use_fp4_sparse_kv": True,
    "dspark_target_attn_input": True,
    "gate_temp": 1.0,
}

QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": (32, 32),
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
    "fmt": "e4m3",
}

# Fields of Config that stand at the top level of config.json; text_config may repeat them.
TOP_LEVEL = (
    "dtype",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "image_token_id",
    "quantized",
)

# Keys that say nothing about the forward pass and are skipped in silence.
INFORMATIONAL = frozenset(
    {
        "architectures",
        "model_type",
        "transformers_version",
        "initializer_range",
        "use_cache",
        "attention_dropout",
        "text_config",
        "vision_config",
        "quantization_config",
        "rope_parameters",
        "index_k_source_layer_ids",
        "tie_word_embeddings",
        "_name_or_path",
    }
)

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "n_routed_experts",
    "num_experts_per_tok",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "hc_mult",
    "hc_sinkhorn_iters",
    "max_position_embeddings",
)
_POSITIVE_REAL = (
    "rms_norm_eps",
    "hc_eps",
    "rope_theta",
    "compress_rope_theta",
    "routed_scaling_factor",
)
_ID_LISTS = ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids")


def check_raw(raw: dict[str, Any], known: frozenset[str]) -> None:
    """Checks the parts of a parsed config.json that `Config` does not keep.

    Args:
      raw: the parsed file.
      known: names of the fields of `Config`.

    Raises:
      ValueError: another architecture, or a value that is not implemented.
    """
    _require(
        raw.get("model_type") == MODEL_TYPE,
        "model_type",
        raw.get("model_type"),
        f'must be "{MODEL_TYPE}"',
        "spec 1.1",
    )
    _require(
        raw.get("architectures") == [ARCHITECTURE],
        "architectures",
        raw.get("architectures"),
        f'must be ["{ARCHITECTURE}"]',
        "spec 1.1",
    )
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise ValueError("config.json lacks the object text_config (spec 1.1)")
    for name, part, model_type in (
        ("text_config", text, TEXT_MODEL_TYPE),
        ("vision_config", raw.get("vision_config") or {}, VISION_MODEL_TYPE),
    ):
        given = part.get("model_type", model_type)
        _require(
            given == model_type, f"{name}.model_type", given, f'must be "{model_type}"', "spec 1.1"
        )
    for key in (*TOP_LEVEL, "tie_word_embeddings"):
        if key in raw and key in text and raw[key] != text[key]:
            raise ValueError(
                f"config.json says {key} = {raw[key]!r} at the top level and {text[key]!r} in "
                "text_config: make them equal"
            )
    _check_fixed({**raw, **text})
    if raw.get("quantization_config") is not None:
        _check_quantization(raw["quantization_config"])
    unknown = sorted((set(raw) | set(text)) - known - INFORMATIONAL - set(FIXED) - set(_SWITCHES))
    if unknown:
        warnings.warn(
            f"config.json has keys that this library does not know and ignores: {unknown}",
            stacklevel=3,
        )


def _check_fixed(text: dict[str, Any]) -> None:
    for key, only in FIXED.items():
        value = text.get(key, only)
        rule = _FIXED_RULE.get(key, 8)
        _require(value == only and type(value) is type(only), key, value, f"must be {only!r}", rule)
    tied = text.get("tie_word_embeddings", False)
    _require(tied is False, "tie_word_embeddings", tied, "must be false", "spec 1.1")
    dropout = text.get("attention_dropout", 0.0)
    _require(_real(dropout) and 0 <= dropout < 1, "attention_dropout", dropout, "in [0, 1)", 6)
    for key, only in _SWITCHES.items():
        value = text.get(key, only)
        _require(value == only, key, value, f"only {only!r} is implemented", "spec 1.2")
    sources = text.get("kv_source_layer_ids")
    keys = text.get("index_k_source_layer_ids", sources)
    _require(
        keys == sources,
        "index_k_source_layer_ids",
        keys,
        f"must equal kv_source_layer_ids = {sources}",
        "spec 1.2",
    )


def _check_quantization(block: dict[str, Any]) -> None:
    for key, only in QUANTIZATION.items():
        value = block.get(key, only if key == "fmt" else None)
        value = tuple(value) if isinstance(value, list) else value
        _require(value == only, f"quantization_config.{key}", value, f"must be {only!r}", 9)
    for key in block:
        if key not in QUANTIZATION:
            _require(False, f"quantization_config.{key}", block[key], "is not a known setting", 9)


def check(config: Any) -> None:
    """Checks the fields of a `Config` against spec 1.4.

    Raises:
      ValueError: a field breaks a rule; the message names field, value and rule.
    """
    _check_dimensions(config)
    _check_schedule(config)
    _check_candidates(config)
    _check_engram(config)
    _check_drafter(config)
    _check_rope(config)
    _check_vision(config.vision_config)
    _check_tokens(config)


def advice(config: Any) -> list[str]:
    """Sentences about settings that work here and that the specification refuses (rules 15, 16)."""
    return _candidate_advice(config) + _engram_advice(config)


def _engram_advice(config: Any) -> list[str]:
    rows, needed = config.engram_num_embeddings, engram_rows(config)
    if tuple(rows) == needed:
        return []
    return [
        f"engram_num_embeddings = {rows} is more than the sums of the layers' primes {needed}: the "
        "last rows of the tables are never read (spec 1.4, rule 16)"
    ]


def _candidate_advice(config: Any) -> list[str]:
    if config.candidate_source_layer_id < 0:
        return []
    blocks, size = config.candidate_topk_blocks, config.candidate_block_size
    sentences = []
    if blocks % 8 or blocks > 4096:
        sentences.append(f"candidate_topk_blocks = {blocks} is not a multiple of 8 up to 4096")
    if size not in (8, 16):
        sentences.append(f"candidate_block_size = {size} is neither 8 nor 16")
    if blocks * size < config.index_topk:
        sentences.append(
            f"candidate_topk_blocks * candidate_block_size = {blocks * size} is less than "
            f"index_topk = {config.index_topk}"
        )
    return [
        f"{sentence}: DeepSeek's engine would refuse it (spec 1.4, rule 15)"
        for sentence in sentences
    ]


def _check_dimensions(config: Any) -> None:
    for name in _POSITIVE:
        _positive(name, getattr(config, name), 1)
    heads, groups = config.num_attention_heads, config.o_groups
    _require(heads % groups == 0, "o_groups", groups, f"must divide num_attention_heads {heads}", 2)
    rope = config.qk_rope_head_dim
    _positive("qk_rope_head_dim", rope, 3)
    _require(rope % 2 == 0, "qk_rope_head_dim", rope, "must be even", 3)
    for name in ("head_dim", "index_head_dim"):
        width = getattr(config, name)
        _require(rope <= width, "qk_rope_head_dim", rope, f"must not exceed {name} = {width}", 3)
    _at_most_experts(config, "num_experts_per_tok", "n_routed_experts")
    for name in _POSITIVE_REAL:
        value = getattr(config, name)
        _require(_real(value) and value > 0, name, value, "must be a finite number > 0", 5)
    limit = config.swiglu_limit
    _require(
        _real(limit) and limit >= 0,
        "swiglu_limit",
        limit,
        "must be a finite number >= 0",
        "spec 7.4",
    )
    for name in ("num_nextn_predict_layers", "dspark_block_size"):
        value = getattr(config, name)
        _require(_integer(value) and value >= 0, name, value, "must be an integer >= 0", 7)
    _require(
        config.dtype in ("bfloat16", "float32"),
        "dtype",
        config.dtype,
        'must be "bfloat16" or "float32"',
        8,
    )
    if config.quantized:
        for name in ("hidden_size", "moe_intermediate_size"):
            value = getattr(config, name)
            _require(value % 2 == 0, name, value, "must be even: fp4 packs two columns", "spec 5.5")


def _at_most_experts(config: Any, chosen: str, experts: str) -> None:
    value, bound = getattr(config, chosen), getattr(config, experts)
    _require(value <= bound, chosen, value, f"must not exceed {experts} = {bound}", 4)


def _scheduled(config: Any) -> int:
    """Number of leading entries of compress_ratios that belong to the backbone.

    The drafter's entries close the list. A truncated model keeps the list of the full one, and a
    model without the drafter's entries ends with its backbone.
    """
    length = len(config.compress_ratios)
    if length == config.num_hidden_layers:
        return length
    return length - config.num_nextn_predict_layers


def _check_schedule(config: Any) -> None:
    ratios, layers = config.compress_ratios, config.num_hidden_layers
    drafts = config.num_nextn_predict_layers
    length = len(ratios)
    _require(
        length == layers or length >= layers + drafts,
        "compress_ratios",
        f"{length} entries",
        f"need {layers} for the layers and {drafts} for the drafter, or only the former",
        10,
    )
    for ratio in ratios:
        _require(
            _integer(ratio) and ratio >= 0, "compress_ratios", ratio, "must be integers >= 0", 11
        )
    scheduled = _scheduled(config)
    _require(
        not any(ratios[scheduled:]),
        "compress_ratios",
        ratios[scheduled:],
        "the drafter's ratios must be 0",
        11,
    )
    for name in _ID_LISTS:
        ids = getattr(config, name)
        ok = all(_integer(i) and 0 <= i < scheduled for i in ids)
        _require(ok, name, ids, f"must be layer numbers in 0..{scheduled - 1}", 12)
        _require(list(ids) == sorted(set(ids)), name, ids, "must be strictly increasing", 12)
    sources, indexers = config.kv_source_layer_ids, config.index_source_layer_ids
    _require(
        set(sources) <= set(indexers),
        "kv_source_layer_ids",
        sources,
        f"must be a subset of index_source_layer_ids = {indexers}",
        12,
    )
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        for layer in getattr(config, name):
            _require(ratios[layer] > 0, name, layer, "that layer has compression ratio 0", 13)
    for layer, ratio in enumerate(ratios[:scheduled]):
        if ratio > 0:
            source = max((i for i in sources if i <= layer), default=None)
            _require(
                source is not None and ratios[source] == ratio,
                "kv_source_layer_ids",
                sources,
                f"layer {layer} has ratio {ratio} and needs a source of that ratio as the nearest "
                "one at or before it",
                14,
            )


def _check_candidates(config: Any) -> None:
    source = config.candidate_source_layer_id
    if _integer(source) and source == -1:
        return
    _require(
        _integer(source) and source in config.kv_source_layer_ids,
        "candidate_source_layer_id",
        source,
        f"must be -1 or one of kv_source_layer_ids = {config.kv_source_layer_ids}",
        15,
    )
    for name in ("candidate_topk_blocks", "candidate_block_size"):
        _positive(name, getattr(config, name), 15)


def _check_engram(config: Any) -> None:
    for name in (
        "engram_n_heads",
        "engram_head_dim",
        "engram_vocab_size",
        "engram_compressed_vocab_size",
    ):
        _positive(name, getattr(config, name), 16)
    size = config.engram_max_ngram_size
    _require(
        _integer(size) and size >= 2, "engram_max_ngram_size", size, "must be an integer >= 2", 16
    )
    _in_vocabulary(config, "engram_pad_token_id", 16)
    rows, layers = config.engram_num_embeddings, config.engram_layer_ids
    _require(
        len(rows) == len(layers),
        "engram_num_embeddings",
        rows,
        f"needs one entry per engram_layer_ids = {layers}",
        16,
    )
    for value in rows:
        _positive("engram_num_embeddings", value, 16)
    needed = engram_rows(config)
    # The device hash takes remainders byte by byte in uint32, and rows are int32.
    largest = int(_primes(config).max(initial=0))
    _require(
        largest < 2**24,
        "engram_vocab_size",
        config.engram_vocab_size,
        f"leads to the prime {largest}; the hash needs primes below 2^24",
        16,
    )
    _require(
        all(n < 2**31 for n in rows), "engram_num_embeddings", rows, "must be below 2^31", 16
    )
    _require(
        all(have >= need for have, need in zip(rows, needed, strict=True)),
        "engram_num_embeddings",
        rows,
        f"must be the sums of the layers' primes {needed}",
        16,
    )


def engram_rows(config: Any) -> tuple[int, ...]:
    """Rows that the hash of each Engram layer can address: the sum of its primes (spec 8.2)."""
    return tuple(int(total) for total in _primes(config).sum(axis=1))


def _primes(config: Any) -> np.ndarray:
    # Imported here because the package `model` imports this module's user, `config`.
    from deepinfer_jax.model import engram_tables

    return engram_tables.primes(config)


def _check_drafter(config: Any) -> None:
    if config.num_nextn_predict_layers == 0:
        return
    for name in ("dspark_markov_rank", "dspark_n_routed_experts", "dspark_num_experts_per_tok"):
        _positive(name, getattr(config, name), 4 if "experts" in name else "spec 1.2")
    _at_most_experts(config, "dspark_num_experts_per_tok", "dspark_n_routed_experts")
    _in_vocabulary(config, "dspark_noise_token_id", "spec 1.2")
    targets = config.dspark_target_layer_ids
    _require(
        len(targets) > 0 or config.dspark_block_size == 0,
        "dspark_target_layer_ids",
        targets,
        f"must not be empty with dspark_block_size = {config.dspark_block_size}",
        17,
    )
    _require(
        all(_integer(i) and 0 <= i < config.num_hidden_layers for i in targets),
        "dspark_target_layer_ids",
        targets,
        f"must be layer numbers in 0..{config.num_hidden_layers - 1}",
        17,
    )


def _check_rope(config: Any) -> None:
    rope = config.rope_scaling
    _require(rope.rope_type == "yarn", "rope_scaling.rope_type", rope.rope_type, 'not "yarn"', 18)
    for name in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"):
        value = getattr(rope, name)
        _require(
            _real(value) and value > 0, f"rope_scaling.{name}", value, "must be finite and > 0", 18
        )


def _check_vision(vision: Any) -> None:
    for field in dataclasses.fields(vision):
        value = getattr(vision, field.name)
        name = f"vision_config.{field.name}"
        if field.name == "num_hidden_layers":
            _require(_integer(value) and value >= 0, name, value, "must be an integer >= 0", 19)
        elif field.name == "rope_theta":
            _require(_real(value) and value > 0, name, value, "must be finite and > 0", 19)
        elif field.name == "max_wh_ratio":
            ok = value is None or (_real(value) and value >= 1)
            _require(ok, name, value, "must be null or finite and >= 1", 19)
        else:
            _positive(name, value, 19)
    hidden, heads = vision.hidden_size, vision.num_attention_heads
    name = "vision_config.num_attention_heads"
    _require(hidden % heads == 0, name, heads, f"must divide hidden_size {hidden}", 19)
    width = hidden // heads
    _require(width % 4 == 0, name, heads, f"head width {width} must be a multiple of 4", 19)


def _check_tokens(config: Any) -> None:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        _in_vocabulary(config, name, "spec 1.1")


def _in_vocabulary(config: Any, name: str, rule: int | str) -> None:
    value, size = getattr(config, name), config.vocab_size
    _require(
        _integer(value) and 0 <= value < size,
        name,
        value,
        f"must be a token id in 0..{size - 1}",
        rule,
    )


def _positive(name: str, value: Any, rule: int | str) -> None:
    _require(_integer(value) and value > 0, name, value, "must be a positive integer", rule)


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _real(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _require(ok: bool, field: str, value: Any, expected: str, rule: int | str) -> None:
    if not ok:
        source = f"spec 1.4, rule {rule}" if isinstance(rule, int) else rule
        raise ValueError(f"{field} = {value!r}: {expected} ({source})")
