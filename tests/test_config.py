"""Claims about `Config`: what it reads, what it refuses (spec 1.4), and the role of every layer."""

import copy
import dataclasses
import warnings

import numpy as np
import pytest
from golden_files import CASES, ROOT

from deepinfer_jax.config import Config, RopeScaling, VisionConfig
from deepinfer_jax.testing import random_config, tiny_config

pytestmark = pytest.mark.filterwarnings("ignore:.*rule 1[56]")


def released() -> dict:
    return copy.deepcopy(Config.flash().to_hf())


def read(case: str) -> Config:
    return Config.read(ROOT / case)


BROKEN_FIELDS = [
    (1, "hidden_size", 0),
    (1, "hidden_size", True),
    (1, "sliding_window", 128.0),
    (1, "hc_sinkhorn_iters", -1),
    (1, "max_position_embeddings", 0),
    (2, "o_groups", 7),
    (3, "qk_rope_head_dim", 63),
    (3, "qk_rope_head_dim", 130),
    (3, "qk_rope_head_dim", 0),
    (4, "num_experts_per_tok", 385),
    (4, "dspark_num_experts_per_tok", 129),
    (5, "rms_norm_eps", 0.0),
    (5, "hc_eps", float("nan")),
    (5, "rope_theta", -1.0),
    (5, "compress_rope_theta", float("inf")),
    (5, "routed_scaling_factor", True),
    (7, "num_nextn_predict_layers", -1),
    (7, "dspark_block_size", -1),
    (8, "dtype", "float16"),
    (10, "compress_ratios", (0, 0) + (2,) * 18 + (1,) * 19),
    (10, "compress_ratios", (0, 0) + (2,) * 18 + (1,) * 20 + (0,)),
    (11, "compress_ratios", (0, 0) + (2,) * 18 + (1,) * 20 + (0, 0, 1)),
    (11, "compress_ratios", (0, -1) + (2,) * 18 + (1,) * 20 + (0, 0, 0)),
    (11, "compress_ratios", (0, True) + (2,) * 18 + (1,) * 20 + (0, 0, 0)),
    (12, "kv_source_layer_ids", (2, 14, 8, 20)),
    (12, "index_source_layer_ids", (2, 8, 14, 20, 24, 28, 32, 40)),
    (12, "engram_layer_ids", (-1, 14)),
    (12, "engram_layer_ids", (14, 14)),
    (12, "kv_source_layer_ids", (2, 8, 14, 20, 21)),
    (13, "index_source_layer_ids", (1, 2, 8, 14, 20, 24, 28, 32, 36)),
    (14, "kv_source_layer_ids", (8, 14, 20)),
    (14, "kv_source_layer_ids", (2, 8, 14)),
    (15, "candidate_source_layer_id", 24),
    (15, "candidate_source_layer_id", -2),
    (15, "candidate_topk_blocks", 0),
    (15, "candidate_block_size", 0),
    (16, "engram_num_embeddings", (384006168,)),
    (16, "engram_num_embeddings", (384006167, 384016682)),
    (16, "engram_max_ngram_size", 1),
    (16, "engram_n_heads", 0),
    (16, "engram_pad_token_id", 129280),
    (17, "dspark_target_layer_ids", ()),
    (17, "dspark_target_layer_ids", (37, 38, 40)),
]


@pytest.mark.parametrize(("rule", "field", "value"), BROKEN_FIELDS)
def test_a_broken_field_is_named_with_its_value_and_rule(rule, field, value):
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(Config.flash(), **{field: value})
    message = str(caught.value)
    assert message.startswith(f"{field} = ")
    assert message.endswith(f"(spec 1.4, rule {rule})")
    # Lists of ratios and ids may be reported by the offending entry alone.
    assert isinstance(value, tuple) or repr(value) in message


BROKEN_KEYS = [
    (2, "num_key_value_heads", 8),
    (4, "n_shared_experts", 2),
    (6, "attention_dropout", 1.0),
    (6, "attention_dropout", -0.5),
    (8, "hidden_act", "gelu"),
    (8, "attention_bias", True),
    (8, "norm_topk_prob", False),
    (8, "scoring_func", "sigmoid"),
    (8, "topk_method", "greedy"),
]


@pytest.mark.parametrize(("rule", "key", "value"), BROKEN_KEYS)
def test_a_fixed_key_has_one_value(rule, key, value):
    raw = released()
    raw["text_config"][key] = value
    with pytest.raises(ValueError, match=rf"^{key} = {value!r}: .*\(spec 1.4, rule {rule}\)$"):
        Config.from_hf(raw)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quant_method", "bitsandbytes"),
        ("activation_scheme", "static"),
        ("weight_block_size", [128, 128]),
        ("scale_fmt", "float"),
        ("expert_dtype", "fp8"),
        ("fmt", "e5m2"),
        ("modules_to_not_convert", ["head"]),
    ],
)
def test_another_quantisation_is_refused(key, value):
    raw = released()
    raw["quantization_config"][key] = value
    with pytest.raises(ValueError, match=rf"^quantization_config.{key} = .*rule 9"):
        Config.from_hf(raw)
    del raw["quantization_config"]
    assert not Config.from_hf(raw).quantized


@pytest.mark.parametrize(
    ("field", "value"),
    [("rope_type", "linear"), ("factor", 0), ("factor", float("inf")), ("beta_fast", -1)],
)
def test_rope_scaling_rule(field, value):
    scaling = dataclasses.replace(RopeScaling(), **{field: value})
    with pytest.raises(ValueError, match=rf"^rope_scaling.{field} = {value!r}: .*rule 18"):
        dataclasses.replace(Config.flash(), rope_scaling=scaling)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", -1),
        ("hidden_size", 0),
        ("patch_size", 1.5),
        ("num_attention_heads", 3),
        ("num_attention_heads", 512),
        ("rope_theta", 0),
        ("max_wh_ratio", 0.5),
    ],
)
def test_vision_rule(field, value):
    vision = dataclasses.replace(VisionConfig(), **{field: value})
    with pytest.raises(ValueError, match=rf"^vision_config.{field} = {value!r}: .*rule 19"):
        dataclasses.replace(Config.flash(), vision_config=vision)


def test_rules_that_are_wider_than_the_specification():
    tiny_config(dtype="float32")
    assert tiny_config(compress_ratios=(0, 0, 5, 5, 1, 1, 1, 0, 0)).layers[3].ratio == 5
    tiny_config(
        num_nextn_predict_layers=0,
        compress_ratios=(0, 0, 2, 2, 1, 1, 1),
        dspark_target_layer_ids=(),
        dspark_num_experts_per_tok=99,
    )


def test_settings_that_only_the_original_engine_refuses_are_warnings():
    raw = read("hier").to_hf()
    with pytest.warns(UserWarning) as caught:
        Config.from_hf(raw)
    said = [str(warning.message) for warning in caught]
    assert [sentence.split(" = ")[0] for sentence in said] == [
        "candidate_topk_blocks",
        "candidate_block_size",
    ]
    assert all("rule 15" in sentence for sentence in said)


def test_spare_rows_of_an_engram_table_are_a_warning():
    with pytest.warns(UserWarning, match=r"\(309, 467\) is more than .* \(304, 462\)"):
        read("vision_engram")


@pytest.mark.parametrize("name", ["deepseek_v4", "deepseek_v42", "deepseek_v41_text", None])
def test_another_model_type_is_refused(name):
    raw = released()
    raw["model_type"] = name
    with pytest.raises(ValueError, match="^model_type = "):
        Config.from_hf(raw)


@pytest.mark.parametrize(
    "names", [["DeepseekV4ForCausalLM"], [], None, ["DeepseekV41ForCausalLM"] * 2]
)
def test_another_architecture_is_refused(names):
    raw = released()
    raw["architectures"] = names
    with pytest.raises(ValueError, match="^architectures = "):
        Config.from_hf(raw)


@pytest.mark.parametrize("part", ["text_config", "vision_config"])
def test_another_inner_model_type_is_refused(part):
    raw = released()
    raw[part]["model_type"] = "deepseek_v4_text"
    with pytest.raises(ValueError, match=rf"^{part}.model_type = 'deepseek_v4_text'"):
        Config.from_hf(raw)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hc_shifted", False),
        ("use_fp4_sparse_kv", False),
        ("dspark_target_attn_input", False),
        ("gate_temp", 2.0),
        ("index_k_source_layer_ids", [2, 8, 14]),
    ],
)
def test_switches_of_the_original_engine_are_accepted_at_their_default_only(key, value):
    raw = released()
    raw["text_config"][key] = value
    with pytest.raises(ValueError, match=f"^{key} = "):
        Config.from_hf(raw)
    default = [2, 8, 14, 20] if key == "index_k_source_layer_ids" else 1.0 if value == 2.0 else True
    raw["text_config"][key] = default
    assert Config.from_hf(raw) == Config.flash()


@pytest.mark.parametrize("place", ["top", "text_config"])
def test_tied_embeddings_are_refused_in_both_places(place):
    raw = released()
    del raw["tie_word_embeddings"]
    assert Config.from_hf(raw) == Config.flash()
    (raw if place == "top" else raw["text_config"])["tie_word_embeddings"] = True
    with pytest.raises(ValueError, match="^tie_word_embeddings = True"):
        Config.from_hf(raw)


def test_unknown_keys_are_named_in_one_warning():
    raw = released()
    raw["text_config"]["n_hash_layers"] = 3
    raw["surprise"] = 1
    with pytest.warns(UserWarning, match=r"\['n_hash_layers', 'surprise'\]") as caught:
        Config.from_hf(raw)
    assert len(caught) == 1
    raw = released() | {"transformers_version": "5.6.0"}
    raw["text_config"] |= {"initializer_range": 0.02, "use_cache": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Config.from_hf(raw)


def test_contradictory_repeats_are_refused():
    raw = released()
    raw["text_config"]["pad_token_id"] = 3
    with pytest.raises(ValueError, match="pad_token_id = 2 at the top level and 3 in text_config"):
        Config.from_hf(raw)


@pytest.mark.parametrize("key", ["hidden_size", "compress_ratios", "dspark_markov_rank"])
def test_a_missing_key_is_named(key):
    raw = released()
    del raw["text_config"][key]
    with pytest.raises(ValueError, match=f"lacks '{key}'"):
        Config.from_hf(raw)


def test_both_layouts_of_the_rotary_settings_give_the_same_configuration():
    scaling = released()["text_config"]["rope_scaling"]
    flat, keyed = released(), released()
    for raw in (flat, keyed):
        del raw["text_config"]["rope_scaling"]
    flat["text_config"]["rope_parameters"] = scaling
    for base in ("rope_theta", "compress_rope_theta"):
        del keyed["text_config"][base]
    keyed["text_config"]["rope_parameters"] = {
        "main": {"rope_type": "default", "rope_theta": 10000},
        "compress": scaling | {"rope_theta": 160000},
    }
    assert Config.from_hf(flat) == Config.from_hf(keyed) == Config.flash()
    keyed["text_config"]["rope_theta"] = 500000
    with pytest.raises(ValueError, match="rope_theta = 500000 but rope_parameters says 10000"):
        Config.from_hf(keyed)


def test_no_rotary_settings_at_all_is_an_error_not_plain_rope():
    raw = released()
    del raw["text_config"]["rope_scaling"]
    with pytest.raises(ValueError, match="neither text_config.rope_scaling nor"):
        Config.from_hf(raw)
    raw["text_config"]["rope_scaling"] = {"rope_type": "yarn", "factor": 16}
    with pytest.raises(ValueError, match="lacks rope_scaling.beta_fast"):
        Config.from_hf(raw)
    raw["text_config"]["rope_scaling"] = {"rope_type": "yarn", "mscale": 0.7}
    with pytest.raises(ValueError, match=r"not implemented: \['mscale'\]"):
        Config.from_hf(raw)


@pytest.mark.parametrize("case", CASES)
def test_golden_configurations_round_trip(case):
    config = read(case)
    again = Config.from_hf(config.to_hf())
    assert again == config
    assert hash(again) == hash(config)
    assert config.quantized == (case == "quantised")


def test_random_configurations_are_valid_and_cover_the_modes():
    configs = [random_config(np.random.default_rng(seed)) for seed in range(60)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert all(Config.from_hf(config.to_hf()) == config for config in configs)
    roles = [role for config in configs for role in config.layers]
    assert {role.mode for role in roles} == {"window", "full", "reindex", "reuse"}
    assert {role.ratio for role in roles} == {0, 1, 2, 3, 4}
    assert {role.restricted for role in roles} == {True, False}
    assert {config.hc_mult for config in configs} == {1, 2, 3, 4}
    assert any(config.engram_layer_ids for config in configs)
    assert any(not config.engram_layer_ids for config in configs)


def test_released_roles():
    roles = Config.flash().layers
    assert [role.index for role in roles if role.mode == "window"] == [0, 1]
    assert [role.index for role in roles if role.mode == "full"] == [2, 8, 14, 20]
    assert [role.index for role in roles if role.mode == "reindex"] == [24, 28, 32, 36]
    assert sum(role.mode == "reuse" for role in roles) == 30
    assert [role.index for role in roles if role.restricted] == [24, 28, 32, 36]
    assert [role.index for role in roles if role.candidate_source] == [20]
    assert [(role.index, role.engram) for role in roles if role.engram is not None] == [
        (1, 0),
        (14, 1),
    ]
    assert [role.index for role in roles if role.draft_target] == [37, 38, 39]
    assert (roles[13].kv_source, roles[13].index_source, roles[13].ratio) == (8, 8, 2)
    assert (roles[39].kv_source, roles[39].index_source, roles[39].ratio) == (20, 36, 1)


def test_roles_in_a_segment_that_a_window_layer_interrupts():
    roles = read("ratio2").layers
    assert [role.mode for role in roles] == ["window", "full", "reuse", "window", "reindex", "full"]
    assert [role.kv_source for role in roles] == [None, 1, 1, None, 1, 5]
    assert [role.index_source for role in roles] == [None, 1, 1, None, 4, 5]
    assert not any(role.restricted for role in roles)


def test_only_reindex_layers_of_the_candidate_source_are_restricted():
    assert [role.restricted for role in read("hier").layers] == [False] * 3 + [True, False, True]
    assert [role.index for role in read("flash_mini").layers if role.restricted] == [6]


def test_reading_a_file_that_is_not_there_or_not_json(tmp_path):
    with pytest.raises(FileNotFoundError, match="no config.json at"):
        Config.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not valid JSON"):
        Config.read(tmp_path)


def test_engram_primes_must_fit_the_device_hash():
    with pytest.raises(ValueError, match=r"engram_vocab_size = 20000000.*below 2\^24.*rule 16"):
        tiny_config(engram_vocab_size=20_000_000)
