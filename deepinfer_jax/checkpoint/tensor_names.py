"""Names, shapes and kinds of every weight (spec 12), and how ours map to the released ones.

A path is the name of a tensor in the model and, with one exception, in the released files: the
experts of a layer are one stacked array here, `layers.3.ffn.experts.w1.weight` [X, F, D], and the
tensors `layers.3.ffn.experts.{e}.w1.weight` [F, D] there. Letters: D hidden, F expert width,
X experts.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from deepinfer_jax.config import Config

Kind = Literal["linear", "expert", "table", "bf16", "float32"]
Part = Literal["backbone", "engram_table", "drafter", "vision"]

# The quantised storage of each kind (spec 5.5); the other kinds are never quantised.
FORMATS = {"linear": "fp8_32x32", "expert": "fp4_1x32", "table": "fp8_1x32"}

_EXPERTS = ".ffn.experts."


@dataclasses.dataclass(frozen=True)
class ParameterSpec:
    """What a weight looks like.

    Attributes:
      shape: logical shape (an fp4 weight counts its columns, not its bytes).
      kind: "linear", "expert" and "table" may be stored in bfloat16, float32 or in their quantised
        format; "bf16" in bfloat16 or float32; "float32" only in float32.
      part: which part of the model holds it; "drafter" and "vision" may be absent as a whole.
    """

    shape: tuple[int, ...]
    kind: Kind
    part: Part

    @property
    def size(self) -> int:
        """Number of logical weights."""
        return math.prod(self.shape)


def parameter_specs(config: Config) -> dict[str, ParameterSpec]:
    """The spec of every weight of the model, by path, in the order of the layers."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[tuple[int, ...], Kind]] = {"embed.weight": ((vocab, hidden), "bf16")}
    for role in config.layers:
        prefix = f"layers.{role.index}."
        if role.engram is not None:
            shapes |= _engram(config, prefix + "engram.", role.engram)
        if role.mode == "full":
            shapes |= _compressor(config, prefix + "attn.", role.ratio)
        if role.mode in ("full", "reindex"):
            shapes |= _indexer(config, prefix + "attn.")
        shapes |= _block(config, prefix, config.n_routed_experts)
    shapes |= {"norm.weight": ((hidden,), "bf16"), "head.weight": ((vocab, hidden), "bf16")}
    if config.num_nextn_predict_layers:
        shapes |= _drafter(config)
    if config.vision_config.num_hidden_layers:
        shapes |= _vision(config)
    return {path: ParameterSpec(shape, kind, _part(path)) for path, (shape, kind) in shapes.items()}


def released_names(path: str, spec: ParameterSpec) -> tuple[str, ...]:
    """Names of the tensors in a released file that make up one weight, in stacking order."""
    if _EXPERTS not in path:
        return (path,)
    prefix, _, rest = path.partition(_EXPERTS)
    return tuple(f"{prefix}{_EXPERTS}{expert}.{rest}" for expert in range(spec.shape[0]))


def scale_name(name: str) -> str:
    """Name of the scale that belongs to a quantised weight."""
    return name.removesuffix(".weight") + ".scale"


def _part(path: str) -> Part:
    if path.startswith("mtp."):
        return "drafter"
    if path.startswith(("vision.", "aligner.", "image_")):
        return "vision"
    return "engram_table" if path.endswith("engram.embed.weight") else "backbone"


def _block(config: Config, prefix: str, experts: int) -> dict:
    """Weights of every layer and drafter stage (spec 12.2)."""
    hidden, width = config.hidden_size, config.moe_intermediate_size
    heads, head_dim = config.num_attention_heads, config.head_dim
    groups, rank = config.o_groups, config.o_lora_rank
    streams = config.hc_mult
    mixes = streams * (2 + streams)
    attn, ffn = prefix + "attn.", prefix + "ffn."
    shapes = {
        attn + "wq_a.weight": ((config.q_lora_rank, hidden), "linear"),
        attn + "wq_b.weight": ((heads * head_dim, config.q_lora_rank), "linear"),
        attn + "wkv.weight": ((head_dim, hidden), "linear"),
        attn + "wo_a.weight": ((groups * rank, heads // groups * head_dim), "linear"),
        attn + "wo_b.weight": ((hidden, groups * rank), "linear"),
        attn + "q_norm.weight": ((config.q_lora_rank,), "bf16"),
        attn + "kv_norm.weight": ((head_dim,), "bf16"),
        attn + "attn_sink": ((heads,), "float32"),
        prefix + "attn_norm.weight": ((hidden,), "bf16"),
        prefix + "ffn_norm.weight": ((hidden,), "bf16"),
    }
    for sublayer in ("attn", "ffn"):
        shapes |= {
            f"{prefix}hc_{sublayer}_fn": ((mixes, streams * hidden), "float32"),
            f"{prefix}hc_{sublayer}_base": ((mixes,), "float32"),
            f"{prefix}hc_{sublayer}_scale": ((3,), "float32"),
        }
    return shapes | {
        ffn + "gate.weight": ((experts, hidden), "bf16"),
        ffn + "gate.bias": ((experts,), "float32"),
        ffn + "gate.bias_vl": ((experts,), "float32"),
        ffn + "experts.w1.weight": ((experts, width, hidden), "expert"),
        ffn + "experts.w2.weight": ((experts, hidden, width), "expert"),
        ffn + "experts.w3.weight": ((experts, width, hidden), "expert"),
        ffn + "shared_experts.w1.weight": ((width, hidden), "linear"),
        ffn + "shared_experts.w2.weight": ((hidden, width), "linear"),
        ffn + "shared_experts.w3.weight": ((width, hidden), "linear"),
    }


def _compressor(config: Config, prefix: str, ratio: int) -> dict:
    """Weights of a KV source (spec 12.3); groups of one token have nothing to gate."""
    head_dim, hidden = config.head_dim, config.hidden_size
    gate = {prefix + "compressor.wgate.weight": ((head_dim, hidden), "bf16")} if ratio > 1 else {}
    return {
        prefix + "compressor.wkv.weight": ((head_dim, hidden), "bf16"),
        **gate,
        prefix + "compressor.norm.weight": ((head_dim,), "bf16"),
        prefix + "indexer.wk.weight": ((config.index_head_dim, head_dim), "bf16"),
        prefix + "indexer.k_norm.weight": ((config.index_head_dim,), "bf16"),
    }


def _indexer(config: Config, prefix: str) -> dict:
    """Weights of an index source (spec 12.4)."""
    heads = config.index_n_heads
    queries = (heads * config.index_head_dim, config.q_lora_rank)
    return {
        prefix + "indexer.wq_b.weight": (queries, "linear"),
        prefix + "indexer.weights_proj.weight": ((heads, config.hidden_size), "bf16"),
    }


def _engram(config: Config, prefix: str, position: int) -> dict:
    """Weights of an Engram layer (spec 12.5)."""
    streams, hidden = config.hc_mult, config.hidden_size
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    rows, width = config.engram_num_embeddings[position], config.engram_head_dim
    return {
        prefix + "embed.weight": ((rows, width), "table"),
        prefix + "wkv.weight": (((streams + 1) * hidden, columns * width), "linear"),
        prefix + "q_weight": ((streams, hidden), "bf16"),
        prefix + "k_weight": ((streams, hidden), "bf16"),
    }


def _drafter(config: Config) -> dict:
    """Weights of the DSpark stages (spec 12.6)."""
    hidden, vocab, rank = config.hidden_size, config.vocab_size, config.dspark_markov_rank
    stages = config.num_nextn_predict_layers
    features = len(config.dspark_target_layer_ids) * hidden
    shapes = {
        "mtp.0.main_proj.weight": ((hidden, features), "linear"),
        "mtp.0.main_norm.weight": ((hidden,), "bf16"),
    }
    for stage in range(stages):
        shapes |= _block(config, f"mtp.{stage}.", config.dspark_n_routed_experts)
    last = f"mtp.{stages - 1}."
    return shapes | {
        last + "norm.weight": ((hidden,), "bf16"),
        last + "markov_head.embed.weight": ((vocab, rank), "bf16"),
        last + "markov_head.head.weight": ((vocab, rank), "bf16"),
        last + "confidence_head.proj.weight": ((1, hidden + rank), "bf16"),
    }


def _vision(config: Config) -> dict:
    """Weights of the image tower, the aligner and the delimiters (spec 12.1, 12.7)."""
    vision, hidden = config.vision_config, config.hidden_size
    width, inner = vision.hidden_size, vision.intermediate_size
    cell = vision.downsample_ratio**2 * width
    shapes = {
        "vision.patch_embed.proj.weight": (width, 3 * vision.patch_size**2),
        "vision.patch_embed.proj.bias": (width,),
    }
    for block in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{block}."
        shapes |= {
            prefix + "norm1.weight": (width,),
            prefix + "attn.wqkv.weight": (3 * width, width),
            prefix + "attn.wqkv.bias": (3 * width,),
            prefix + "attn.wo.weight": (width, width),
            prefix + "attn.wo.bias": (width,),
            prefix + "norm2.weight": (width,),
            prefix + "mlp.w1.weight": (2 * inner, width),
            prefix + "mlp.w2.weight": (width, inner),
        }
    shapes |= {
        "vision.norm.weight": (width,),
        "aligner.w1.weight": (hidden, cell),
        "aligner.w1.bias": (hidden,),
        "aligner.w2.weight": (hidden, hidden),
        "aligner.w2.bias": (hidden,),
        "image_start": (hidden,),
        "image_end": (hidden,),
        "image_newline": (hidden,),
    }
    return {path: (shape, "bf16") for path, shape in shapes.items()}
