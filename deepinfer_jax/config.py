"""The model's configuration (spec 1, 3.1): every number that decides a shape or a constant.

`Config` is frozen and hashable, so it may be a static argument of `jax.jit`. Attributes carry the
key names of the released `config.json`, flattened: what stands there at the top level or in
`text_config` is a field of `Config`; `vision_config` and `rope_scaling` are small dataclasses. The
defaults are the released values. The rules that a configuration must obey are in `config_rules`.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from deepinfer_jax import config_rules


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters, used only by layers with a compression ratio > 0 (spec 3.3)."""

    rope_type: str = "yarn"
    factor: float = 16.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 65536


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The image tower and aligner (spec 1.3, 10). `num_hidden_layers` 0 means: no tower."""

    num_hidden_layers: int = 32
    hidden_size: int = 1024
    num_attention_heads: int = 16
    intermediate_size: int = 2816
    patch_size: int = 14
    rope_theta: float = 10000.0
    downsample_ratio: int = 3
    max_image_tokens: int = 1024
    min_pixels: int = 544 * 544
    max_wh_ratio: float | None = None


@dataclasses.dataclass(frozen=True)
class LayerRole:
    """What one layer or drafter stage does (spec 3.1, 3.8, 9.3).

    Attributes:
      index: the layer's number; the drafter's stages follow the backbone.
      ratio: tokens per compressed entry; 0 for a layer that sees only its window.
      mode: "window", "full" (compressor and indexer), "reindex" (indexer that reads the keys of its
        source), "reuse" (takes the selection of its index source) or "draft" (a drafter stage: its
        rows see their whole block and the window before it).
      window: how many positions a row sees in the layer's ring, up to its own or, in a drafter
        stage, up to the last of its block.
      top_k: experts of a token.
      kv_source: layer whose compressed entries and index keys are read; None for "window".
      index_source: layer whose selection is used; None for "window".
      candidate_source: this layer publishes candidate blocks.
      restricted: this "reindex" layer selects only inside the published candidates.
      engram: position of this layer in `engram_layer_ids`, or None.
      draft_target: the drafter reads the streams that enter this layer.
    """

    index: int
    ratio: int
    mode: Literal["window", "full", "reindex", "reuse", "draft"]
    window: int
    top_k: int
    kv_source: int | None = None
    index_source: int | None = None
    candidate_source: bool = False
    restricted: bool = False
    engram: int | None = None
    draft_target: bool = False


@dataclasses.dataclass(frozen=True)
class Config:
    """Configuration of a DeepSeek-V4.1-Flash model; the defaults are the released values.

    Raises:
      ValueError: a field breaks a rule of spec 1.4. The message names the field, its value and the
        rule.
    """

    vocab_size: int = 129280
    hidden_size: int = 5120
    moe_intermediate_size: int = 2304
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1280
    o_lora_rank: int = 1024
    o_groups: int = 8
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-20
    max_position_embeddings: int = 1048576

    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling = RopeScaling()

    n_routed_experts: int = 384
    num_experts_per_tok: int = 6
    routed_scaling_factor: float = 1.5

    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = (0, 0) + (2,) * 18 + (1,) * 20 + (0, 0, 0)
    kv_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20)
    index_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20, 24, 28, 32, 36)
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    candidate_source_layer_id: int = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8

    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6

    engram_layer_ids: tuple[int, ...] = (1, 14)
    engram_num_embeddings: tuple[int, ...] = (384006168, 384016682)
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 16000000
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 99092

    num_nextn_predict_layers: int = 3
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 128799
    dspark_target_layer_ids: tuple[int, ...] = (37, 38, 39)
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3

    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int = 129264
    dtype: str = "bfloat16"
    quantized: bool = True
    vision_config: VisionConfig = VisionConfig()

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                object.__setattr__(self, field.name, tuple(value))
        config_rules.check(self)

    @classmethod
    def flash(cls) -> Config:
        """The released DeepSeek-V4.1-Flash (spec 1.1 to 1.3)."""
        return cls()

    @classmethod
    def read(cls, path: str | Path) -> Config:
        """Reads `config.json`, given as the file itself or as the directory that holds it."""
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        if not file.is_file():
            raise FileNotFoundError(f"no config.json at {file}: give a checkpoint directory")
        try:
            raw = json.loads(file.read_text())
        except ValueError as error:
            raise ValueError(f"{file} is not valid JSON: {error}") from error
        return cls.from_hf(raw)

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Config:
        """Builds a configuration from the nested dictionary of a released `config.json`.

        Args:
          raw: the parsed file, with `text_config` and perhaps `vision_config` and
            `quantization_config`.

        Raises:
          ValueError: a key is missing, has a value that this library does not implement, or breaks
            a rule of spec 1.4.
        """
        config_rules.check_raw(raw, frozenset(field.name for field in dataclasses.fields(cls)))
        text = _with_nested_rope({**raw, **raw["text_config"]})
        fields: dict[str, Any] = {"rope_scaling": text["rope_scaling"]}
        for field in dataclasses.fields(cls):
            if field.name in ("rope_scaling", "quantized", "vision_config"):
                continue
            if field.name not in text:
                raise ValueError(f"config.json lacks {field.name!r} (spec 1.1 and 1.2)")
            fields[field.name] = _plain(field.type, text[field.name])
        vision = raw.get("vision_config")
        config = cls(
            **fields,
            quantized=raw.get("quantization_config") is not None,
            vision_config=_vision(vision) if vision else VisionConfig(num_hidden_layers=0),
        )
        for sentence in config_rules.advice(config):
            warnings.warn(sentence, stacklevel=2)
        return config

    def to_hf(self) -> dict[str, Any]:
        """The nested dictionary of `config.json`; `Config.from_hf` gives this object back."""
        text: dict[str, Any] = {"model_type": config_rules.TEXT_MODEL_TYPE}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in config_rules.TOP_LEVEL and field.name != "vision_config":
                text[field.name] = list(value) if isinstance(value, tuple) else value
        text["rope_scaling"] = dataclasses.asdict(self.rope_scaling)
        text |= config_rules.FIXED | {"attention_dropout": 0.0}
        raw = {
            "architectures": [config_rules.ARCHITECTURE],
            "model_type": config_rules.MODEL_TYPE,
            "dtype": self.dtype,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "image_token_id": self.image_token_id,
            "tie_word_embeddings": False,
            "text_config": text,
            "vision_config": {
                "model_type": config_rules.VISION_MODEL_TYPE,
                **dataclasses.asdict(self.vision_config),
            },
        }
        if self.quantized:
            raw["quantization_config"] = {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in config_rules.QUANTIZATION.items()
            }
        return raw

    @cached_property
    def layers(self) -> tuple[LayerRole, ...]:
        """The role of every backbone layer, in order (spec 3.1)."""
        return tuple(_role(self, index) for index in range(self.num_hidden_layers))

    @cached_property
    def draft_layers(self) -> tuple[LayerRole, ...]:
        """The role of every drafter stage, in order (spec 9.3); empty if there is no drafter."""
        if self.dspark_block_size == 0:
            return ()
        return tuple(
            LayerRole(
                index=self.num_hidden_layers + stage,
                ratio=0,
                mode="draft",
                window=self.sliding_window + self.dspark_block_size,
                top_k=self.dspark_num_experts_per_tok,
            )
            for stage in range(self.num_nextn_predict_layers)
        )


def _role(config: Config, index: int) -> LayerRole:
    ratio = config.compress_ratios[index]
    kv_source = index_source = None
    mode = "window"
    if ratio > 0:
        kv_source = max(i for i in config.kv_source_layer_ids if i <= index)
        index_source = max(i for i in config.index_source_layer_ids if i <= index)
        mode = "reuse"
        if index == index_source:
            mode = "full" if index == kv_source else "reindex"
    engrams = config.engram_layer_ids
    return LayerRole(
        index=index,
        ratio=ratio,
        mode=mode,
        window=config.sliding_window,
        top_k=config.num_experts_per_tok,
        kv_source=kv_source,
        index_source=index_source,
        candidate_source=index == config.candidate_source_layer_id,
        restricted=mode == "reindex" and kv_source == config.candidate_source_layer_id,
        engram=engrams.index(index) if index in engrams else None,
        draft_target=(
            config.num_nextn_predict_layers > 0 and index in config.dspark_target_layer_ids
        ),
    )


def _plain(annotation: str, value: Any) -> Any:
    """Lists become tuples and whole numbers in float fields become floats, so that equals hash."""
    if isinstance(value, list):
        return tuple(value)
    if annotation.startswith("float") and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _dataclass_from(cls: type, where: str, raw: dict[str, Any]) -> Any:
    fields = {}
    for field in dataclasses.fields(cls):
        if field.name not in raw:
            raise ValueError(f"config.json lacks {where}.{field.name}")
        fields[field.name] = _plain(field.type, raw[field.name])
    return cls(**fields)


def _vision(raw: dict[str, Any]) -> VisionConfig:
    return _dataclass_from(VisionConfig, "vision_config", {"max_wh_ratio": None, **raw})


def _with_nested_rope(text: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings from either layout: `rope_scaling`, or a nested `rope_parameters`.

    The nested block is either flat or keyed by "main" and "compress", and may hold the two bases. A
    file with neither layout is refused: reading "no scaling" into a missing block ruins long
    contexts without any error.
    """
    nested = text.get("rope_parameters") or {}
    compress = nested.get("compress", nested)
    bases = {"rope_theta": nested.get("main", nested).get("rope_theta")}
    if "compress" in nested:
        bases["compress_rope_theta"] = compress.get("rope_theta")
    for key, base in bases.items():
        if base is not None and text.setdefault(key, base) != base:
            raise ValueError(
                f"config.json says {key} = {text[key]} but rope_parameters says {base}: make them "
                "equal"
            )
    found = [_rope(raw) for raw in (text.get("rope_scaling"), compress) if raw]
    if not found:
        raise ValueError(
            "config.json has neither text_config.rope_scaling nor text_config.rope_parameters: the "
            "compressed layers need the YaRN parameters (spec 3.3)"
        )
    if found[0] != found[-1]:
        raise ValueError(f"rope_scaling says {found[0]} but rope_parameters says {found[-1]}")
    return {**text, "rope_scaling": found[0]}


def _rope(raw: dict[str, Any]) -> RopeScaling:
    known = {field.name for field in dataclasses.fields(RopeScaling)}
    unknown = sorted(set(raw) - known - {"rope_theta", "type"})
    if unknown:
        raise ValueError(f"rope_scaling has settings that are not implemented: {unknown}")
    return _dataclass_from(RopeScaling, "rope_scaling", raw)
