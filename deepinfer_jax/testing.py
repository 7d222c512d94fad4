"""Small models for tests and experiments: configurations, random checkpoints, a byte tokenizer.

Nothing here is trained. Random weights are non-trivial everywhere (sinks, both router biases,
norms, mixing coefficients, hash tables), so a part that is left out or swapped changes the result;
they are scaled by their fan-in, so that activations stay near 1 however deep the model is.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from deepinfer_jax.checkpoint.hf import Weight, save
from deepinfer_jax.checkpoint.tensor_names import FORMATS, ParameterSpec, parameter_specs
from deepinfer_jax.config import Config, RopeScaling, VisionConfig
from deepinfer_jax.model.engram_tables import primes_from
from pallas_kernels.layouts import quantize

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FIRST_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
_LAST_TOKENS = (
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜deepseek_image｜>",
)
# In the released tokenizer only these are hidden by skip_special_tokens.
_HIDDEN_TOKENS = (*_FIRST_TOKENS, "<｜User｜>", "<｜Assistant｜>", "<｜deepseek_image｜>")

_BYTE_VOCABULARY = len(_FIRST_TOKENS) + 256 + len(_LAST_TOKENS)
_BYTE_COMPRESSED = 237  # ids left when the tokens of `byte_tokenizer` are folded (spec 8.1)


def byte_tokenizer() -> Tokenizer:
    """A real `tokenizers.Tokenizer` with one token per byte and the control tokens of the release.

    Ids 0, 1, 2 are begin, end and padding, then come the 256 bytes, then system, user, assistant,
    think, end of think, DSML and image. Any text round-trips.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = (*_FIRST_TOKENS, *letters, *_LAST_TOKENS)
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name in (*_FIRST_TOKENS, *_LAST_TOKENS):
        token = AddedToken(name, normalized=False, special=name in _HIDDEN_TOKENS)
        add = tokenizer.add_special_tokens if token.special else tokenizer.add_tokens
        add([token])
    return tokenizer


def tiny_config(**overrides: Any) -> Config:
    """A configuration of less than a million weights with a layer of every kind.

    Layers: two that see only their window, a ratio-2 source and its reuse, a ratio-1 candidate
    source, its reuse and a restricted reindex. Engram at layers 1 and 3, two DSpark stages, no
    vision tower, the vocabulary of `byte_tokenizer`. One rank is no multiple of 32, so partial
    blocks occur.

    Args:
      **overrides: fields of `Config`. `engram_num_embeddings` follows the other Engram fields
        unless it is given.
    """
    fields: dict[str, Any] = dict(
        vocab_size=_BYTE_VOCABULARY,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=7,
        num_attention_heads=4,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=48,
        o_lora_rank=32,
        o_groups=2,
        max_position_embeddings=4096,
        rope_scaling=RopeScaling(original_max_position_embeddings=256),
        n_routed_experts=6,
        num_experts_per_tok=2,
        sliding_window=16,
        compress_ratios=(0, 0, 2, 2, 1, 1, 1, 0, 0),
        kv_source_layer_ids=(2, 4),
        index_source_layer_ids=(2, 4, 6),
        index_n_heads=4,
        index_head_dim=32,
        index_topk=8,
        candidate_source_layer_id=4,
        candidate_topk_blocks=5,
        candidate_block_size=4,
        engram_layer_ids=(1, 3),
        engram_max_ngram_size=3,
        engram_vocab_size=61,
        engram_n_heads=2,
        engram_head_dim=32,
        engram_compressed_vocab_size=_BYTE_COMPRESSED,
        num_nextn_predict_layers=2,
        dspark_block_size=4,
        dspark_noise_token_id=_token("<｜System｜>"),
        dspark_target_layer_ids=(4, 5, 6),
        dspark_markov_rank=16,
        dspark_n_routed_experts=4,
        dspark_num_experts_per_tok=2,
        image_token_id=_token("<｜deepseek_image｜>"),
        quantized=False,
        vision_config=VisionConfig(num_hidden_layers=0),
    )
    return _with_engram_rows(fields | overrides)


def random_config(rng: np.random.Generator) -> Config:
    """A random valid configuration: widths, schedule, ratios, selection sizes, optional parts.

    Args:
      rng: the source of randomness; equal generators give equal configurations.
    """

    def pick(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    ratios, sources, indexers, candidate = _random_schedule(rng)
    layers, stages = len(ratios), pick(0, 0, 1, 2, 3)
    groups, rope, experts = pick(1, 2, 3), pick(4, 8, 16), pick(1, 3, 6)
    engrams = tuple(int(i) for i in range(layers) if rng.random() < 0.3)
    targets = rng.permutation(layers)[: pick(1, 2)]
    return tiny_config(
        hidden_size=pick(32, 40, 64),
        moe_intermediate_size=pick(16, 32, 48),
        num_hidden_layers=layers,
        num_attention_heads=groups * pick(1, 2),
        o_groups=groups,
        head_dim=pick(16, 32, 48),
        qk_rope_head_dim=rope,
        q_lora_rank=pick(24, 32, 40),
        o_lora_rank=pick(8, 16, 32),
        swiglu_limit=pick(0.0, 1.0, 10.0),
        rms_norm_eps=pick(1e-20, 1e-6),
        n_routed_experts=experts,
        num_experts_per_tok=int(rng.integers(1, min(experts, 3) + 1)),
        routed_scaling_factor=pick(1.0, 1.5, 2.5),
        sliding_window=pick(1, 5, 16),
        compress_ratios=ratios + (0,) * stages,
        kv_source_layer_ids=sources,
        index_source_layer_ids=indexers,
        index_n_heads=pick(1, 2, 4),
        index_head_dim=pick(16, 32),
        index_topk=pick(1, 4, 7),
        candidate_source_layer_id=candidate,
        candidate_topk_blocks=pick(1, 2, 4),
        candidate_block_size=pick(1, 4, 8),
        hc_mult=pick(1, 2, 3, 4),
        hc_sinkhorn_iters=pick(1, 5, 20),
        hc_eps=pick(1e-6, 1e-4),
        engram_layer_ids=engrams,
        engram_max_ngram_size=pick(2, 3, 4),
        engram_vocab_size=pick(31, 61),
        engram_n_heads=pick(1, 2, 3),
        engram_head_dim=pick(16, 32),
        num_nextn_predict_layers=stages,
        dspark_block_size=pick(1, 3, 5),
        dspark_target_layer_ids=tuple(sorted(int(i) for i in targets)),
        dspark_markov_rank=pick(8, 16),
    )


def random_weights(config: Config, seed: int, quantized: bool | None = None) -> Callable:
    """A function `take(path)` that makes the weight of a path; equal arguments, equal weights.

    Args:
      config: the model's configuration.
      seed: chooses the weights; each depends on the seed and its own path only.
      quantized: store matrices in the released 4 and 8 bit formats; default `config.quantized`.

    Returns:
      A function from a key of `parameter_specs` to a float array or a `QuantizedTensor`.
    """
    specs = parameter_specs(config)
    quantized = config.quantized if quantized is None else quantized
    stored = jnp.float32 if config.dtype == "float32" else jnp.bfloat16

    def take(path: str) -> Weight:
        spec = specs[path]
        values = jnp.asarray(_random_values(path, spec, seed))
        if quantized and spec.kind in FORMATS:
            return quantize(values, FORMATS[spec.kind])
        return values if spec.kind == "float32" else values.astype(stored)

    return take


def write_checkpoint(
    path: str | os.PathLike[str], config: Config, seed: int = 0, quantized: bool | None = None
) -> None:
    """Writes a random checkpoint in the released format, with the tokenizer of `byte_tokenizer`.

    Args:
      path: directory, made if needed.
      config: the model's configuration.
      seed: chooses the weights.
      quantized: store matrices in 4 and 8 bits; default `config.quantized`.
    """
    save(path, config, random_weights(config, seed, quantized))
    byte_tokenizer().save(os.path.join(path, "tokenizer.json"))


def _token(name: str) -> int:
    return len(_FIRST_TOKENS) + 256 + _LAST_TOKENS.index(name)


def _with_engram_rows(fields: dict[str, Any]) -> Config:
    if "engram_num_embeddings" not in fields:
        layers = len(fields["engram_layer_ids"])
        columns = (fields["engram_max_ngram_size"] - 1) * fields["engram_n_heads"]
        primes = primes_from(fields["engram_vocab_size"], layers * columns)
        rows = primes.reshape(layers, columns).sum(axis=1)
        fields["engram_num_embeddings"] = tuple(int(count) for count in rows)
    return Config(**fields)


def _random_schedule(rng: np.random.Generator) -> tuple[tuple[int, ...], ...]:
    """Ratios, KV sources, index sources and a candidate source that satisfy rules 12 to 15."""
    ratios: list[int] = []
    sources: list[int] = []
    indexers: list[int] = []
    for _ in range(rng.integers(2, 7)):
        layer, kind = len(ratios), rng.random()
        # A source may start with any ratio; the layers that follow it must keep its ratio.
        if kind < 0.25 or (not sources and kind < 0.5):
            ratios.append(0)
        elif not sources or kind < 0.6:
            ratios.append(int(rng.integers(1, 5)))
            sources.append(layer)
            indexers.append(layer)
        else:
            ratios.append(ratios[sources[-1]])
            if rng.random() < 0.5:
                indexers.append(layer)
    candidate = int(rng.choice(sources)) if sources and rng.random() < 0.6 else -1
    return tuple(ratios), tuple(sources), tuple(indexers), candidate


def _random_values(path: str, spec: ParameterSpec, seed: int) -> np.ndarray:
    """float32 values of one weight; the distribution follows from what the weight is."""
    rng = np.random.default_rng([seed, zlib.crc32(path.encode())])
    noise = rng.standard_normal(spec.shape, np.float32)
    name = path.removesuffix(".weight")
    if name.endswith("norm") or "norm1" in name or "norm2" in name:
        return 1 + 0.2 * noise
    if name.endswith(("q_weight", "k_weight")):
        return 1 + 0.3 * noise
    if name.endswith("_scale"):
        return 1 + 0.3 * np.tanh(noise)
    if name.endswith(("_base", "bias", "bias_vl")):
        return 0.3 * noise
    if len(spec.shape) == 1 or name.endswith("embed"):
        return noise
    return noise * np.float32(spec.shape[-1] ** -0.5)
