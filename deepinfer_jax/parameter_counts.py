"""How many weights a model has, and how many a token uses (spec 2.5).

Counts are logical: an fp4 byte is two weights, scales are none. Active weights leave out what is
looked up (embedding row, Engram rows), vectors, and the index keys' small projections.
"""

from __future__ import annotations

import dataclasses
import math

from deepinfer_jax.checkpoint.tensor_names import (
    FORMATS,
    ParameterSpec,
    parameter_specs,
    released_names,
)
from deepinfer_jax.config import Config
from pallas_kernels.layouts import codes_shape, scale_shape

_ATTENTION = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")
_INDEX_QUERIES = ("wq_b", "weights_proj")


@dataclasses.dataclass(frozen=True)
class ParameterCounts:
    """Sizes of a model.

    Attributes:
      backbone: weights of the layers, embedding, head and vision tower ("552B" in the release).
      engram_tables: weights of the n-gram tables ("196B").
      drafter: weights of the DSpark stages.
      active_input: weights used for a prompt token, whose decoder layers need not run ("8B").
      active_output: weights used for a generated token ("16B").
      tensors: number of tensors in a checkpoint, scales included.
      nbytes: bytes of those tensors, in the storage that `config.quantized` and `dtype` name.
    """

    backbone: int
    engram_tables: int
    drafter: int
    active_input: int
    active_output: int
    tensors: int
    nbytes: int

    @property
    def total(self) -> int:
        """All weights."""
        return self.backbone + self.engram_tables + self.drafter


def parameter_counts(config: Config) -> ParameterCounts:
    """Counts the weights of a configuration, from the shapes of its tensors."""
    specs = parameter_specs(config)
    parts = {"backbone": 0, "vision": 0, "engram_table": 0, "drafter": 0}
    tensors = nbytes = 0
    for path, spec in specs.items():
        parts[spec.part] += spec.size
        scales = config.quantized and spec.kind in FORMATS
        tensors += len(released_names(path, spec)) * (2 if scales else 1)
        nbytes += _stored_bytes(config, spec)
    # Prompt tokens pass the layers before the last KV source; its compressor reads their output.
    encoder = max(config.kv_source_layer_ids, default=config.num_hidden_layers)
    shared = _compressors_and_engram(config, specs)
    return ParameterCounts(
        backbone=parts["backbone"] + parts["vision"],
        engram_tables=parts["engram_table"],
        drafter=parts["drafter"],
        active_input=_active_layers(config, specs, encoder) + shared,
        active_output=(
            _active_layers(config, specs, config.num_hidden_layers)
            + shared
            + specs["head.weight"].size
        ),
        tensors=tensors,
        nbytes=nbytes,
    )


def _stored_bytes(config: Config, spec: ParameterSpec) -> int:
    if config.quantized and spec.kind in FORMATS:
        format = FORMATS[spec.kind]
        return math.prod(codes_shape(format, spec.shape)) + math.prod(
            scale_shape(format, spec.shape)
        )
    return (4 if "float32" in (spec.kind, config.dtype) else 2) * spec.size


def _active_layers(config: Config, specs: dict[str, ParameterSpec], count: int) -> int:
    """Matrices that a token meets in the first `count` layers."""
    active = 0
    for role in config.layers[:count]:
        attn, ffn = f"layers.{role.index}.attn.", f"layers.{role.index}.ffn."
        active += sum(specs[f"{attn}{name}.weight"].size for name in _ATTENTION)
        if role.mode in ("full", "reindex"):
            active += sum(specs[f"{attn}indexer.{name}.weight"].size for name in _INDEX_QUERIES)
        active += specs[ffn + "gate.weight"].size
        for name in ("w1", "w2", "w3"):
            expert = specs[f"{ffn}shared_experts.{name}.weight"].size
            active += (config.num_experts_per_tok + 1) * expert
        for name in ("attn", "ffn"):
            active += specs[f"layers.{role.index}.hc_{name}_fn"].size
    return active


def _compressors_and_engram(config: Config, specs: dict[str, ParameterSpec]) -> int:
    names = ("attn.compressor.wkv", "attn.compressor.wgate", "engram.wkv")
    paths = (f"layers.{role.index}.{name}.weight" for role in config.layers for name in names)
    return sum(specs[path].size for path in paths if path in specs)
