"""A slice of the released model: eight layers at real widths, random weights, a full cache."""

import functools
import sys
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from operands import random_weight
from tqdm import tqdm

import deepinfer_jax as di
from deepinfer_jax import testing
from deepinfer_jax.checkpoint.tensor_names import FORMATS, parameter_specs
from deepinfer_jax.config import VisionConfig
from pallas_kernels.layouts import LAYOUTS

SCHEDULE = dict(
    num_hidden_layers=8,
    compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1),
    kv_source_layer_ids=(1, 4),
    index_source_layer_ids=(1, 4, 6),
    candidate_source_layer_id=4,
    engram_layer_ids=(),
    engram_num_embeddings=(),
    num_nextn_predict_layers=0,
    dspark_target_layer_ids=(),
    vision_config=VisionConfig(num_hidden_layers=0),
)
# Toy widths that layout "gpu" can hold as well.
SMALL = dict(
    vocab_size=512,
    hidden_size=256,
    moe_intermediate_size=256,
    num_attention_heads=4,
    head_dim=128,
    qk_rope_head_dim=16,
    q_lora_rank=256,
    o_lora_rank=128,
    o_groups=2,
    n_routed_experts=8,
    num_experts_per_tok=2,
    sliding_window=16,
    index_n_heads=4,
    index_head_dim=32,
    index_topk=8,
    candidate_topk_blocks=4,
    candidate_block_size=4,
    hc_sinkhorn_iters=2,
    dspark_noise_token_id=3,
    image_token_id=4,
)
BIAS_SIZE = 0.1  # of router biases, relative to those of `testing.random_weights`
ON_DEVICE = 1 << 24  # weights from this size on are never on the host


def slice_config(*, small: bool = False) -> di.Config:
    """The released configuration with 8 layers; `small` shrinks its widths, not its roles."""
    return di.Config(**SCHEDULE | (SMALL if small else {}))


def random_model(config: di.Config, layout: str, seed: int = 0) -> di.Transformer:
    """A model of random weights, the large ones made where they stay.

    Args:
        config: of the slice.
        layout: of the quantised weights, one of `pallas_kernels.layouts.LAYOUTS`.
        seed: chooses the weights.

    Raises:
        ValueError: an unknown layout, or a weight that does not fit it.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    specs, small = parameter_specs(config), testing.random_weights(config, seed, quantized=False)
    progress = tqdm(total=len(specs), desc="weights", file=sys.stderr)

    def take(path: str) -> Any:
        spec = specs[path]
        progress.update()
        key = jax.random.key(zlib.crc32(f"{seed} {path}".encode()))
        if spec.kind in FORMATS:
            weight = _random_quantized(key, FORMATS[spec.kind], spec.shape, layout)
            # One at a time: makers queued together would hold their temporaries together.
            return jax.block_until_ready(weight)
        if spec.size >= ON_DEVICE:
            size = 1.0 if path == "embed.weight" else spec.shape[-1] ** -0.5
            return _random_array(key, spec.shape, size)
        weight = small(path)
        return BIAS_SIZE * weight if ".gate.bias" in path else weight

    with progress:
        return di.Transformer(config, di.Numerics(reproducible=False), take)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _random_quantized(key, format: str, shape: tuple[int, ...], layout: str):
    """One matrix after another: the plain codes of a stack never exist all at once."""
    if len(shape) == 2:
        return random_weight(key, format, shape, layout)
    keys = jax.random.split(key, shape[0])
    return lax.map(lambda key: random_weight(key, format, shape[1:], layout), keys)


@functools.partial(jax.jit, static_argnums=1)
def _random_array(key, shape: tuple[int, ...], size: float) -> jax.Array:
    return (size * jax.random.normal(key, shape, jnp.float32)).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_cache(key, config: di.Config, slots: int, capacity: int) -> di.Cache:
    """A cache whose every position holds normal values."""
    cache = di.init_cache(config, slots, capacity)

    def fill(salt: int, arrays):
        leaves, structure = jax.tree.flatten(arrays)
        keys = jax.random.split(jax.random.fold_in(key, salt), len(leaves))
        values = [jax.random.normal(k, a.shape, a.dtype) for k, a in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(structure, values)

    fields = ("window", "entries", "keys", "parts")
    return cache.replace(**{name: fill(i, getattr(cache, name)) for i, name in enumerate(fields)})
