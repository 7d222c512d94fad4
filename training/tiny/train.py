"""Trains the embedded checkpoint `tiny`: `python training/tiny/train.py` on one H200, ten minutes.

The model is trained with the library's own `forward`, through every rounding point of the
release, and with its weights rounded to the released formats in every step (straight-through), so
that what is saved is what was trained. Three things are learned beside the next token:

- the indexer, by the divergence of its softmax from the attention mass over the selected entries;
  its inputs are stopped inside the model, so this moves nothing else. A first stage on short
  sequences selects every entry, a second one on long sequences selects as the model will;
- the router bias, moved by a fixed step towards an even load, not by gradients;
- nothing for the drafter, whose tensors are written as they were initialised: train_drafter.py
  trains them against the finished model.

Reads build/train.npy (see tokenizer.py), writes a checkpoint in the released quantised format.
"""

import argparse
import dataclasses
import json
import math
import shutil
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer

import deepinfer_jax as di
from deepinfer_jax.checkpoint.hf import save
from deepinfer_jax.checkpoint.tensor_names import FORMATS, ParameterSpec, parameter_specs
from deepinfer_jax.config import RopeScaling, VisionConfig
from deepinfer_jax.model import engram_tables
from deepinfer_jax.trainable import named_parameters
from pallas_kernels import layouts

HERE = Path(__file__).parent
BIAS_STEP = 2e-3
BIASES = ("bias", "bias_vl")
WEIGHT_DECAY = 0.05
WARM_UP = 0.04
STEPS_BETWEEN_LOOKS = 10


class Stage(NamedTuple):
    """A part of the schedule."""

    share: float  # of the time
    length: int  # tokens of a sequence
    batch: int
    index_topk: int | None  # entries selected; None: as the model will


STAGES = (Stage(0.2, 256, 64, 256), Stage(0.8, 512, 32, None))


def make_config() -> di.Config:
    """The released architecture, small: every layer mode, Engram twice, restricting candidates."""
    tokenizer = Tokenizer.from_file(str(HERE / "build" / "tokenizer.json"))
    fields = dict(
        vocab_size=4096,
        hidden_size=224,
        moe_intermediate_size=64,
        num_hidden_layers=7,
        num_attention_heads=8,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=128,
        o_lora_rank=64,
        o_groups=2,
        n_routed_experts=16,
        num_experts_per_tok=4,
        sliding_window=64,
        max_position_embeddings=8192,
        rope_scaling=RopeScaling(original_max_position_embeddings=1024),
        compress_ratios=(0, 0, 2, 2, 1, 1, 1, 0),
        kv_source_layer_ids=(2, 4),
        index_source_layer_ids=(2, 4, 6),
        index_n_heads=4,
        index_head_dim=64,
        index_topk=32,
        candidate_source_layer_id=4,
        candidate_topk_blocks=16,
        candidate_block_size=8,
        engram_layer_ids=(1, 3),
        engram_max_ngram_size=3,
        engram_vocab_size=1000,
        engram_n_heads=2,
        engram_head_dim=64,
        engram_pad_token_id=2,
        engram_compressed_vocab_size=int(engram_tables.token_map(tokenizer).max()) + 1,
        num_nextn_predict_layers=1,
        dspark_block_size=5,
        dspark_noise_token_id=tokenizer.token_to_id("<｜System｜>"),
        dspark_target_layer_ids=(4, 5, 6),
        dspark_markov_rank=32,
        dspark_n_routed_experts=4,
        dspark_num_experts_per_tok=2,
        image_token_id=tokenizer.token_to_id("<｜deepseek_image｜>"),
        vision_config=VisionConfig(num_hidden_layers=0),
    )

    class Search:
        engram_layer_ids = fields["engram_layer_ids"]
        engram_max_ngram_size = fields["engram_max_ngram_size"]
        engram_n_heads = fields["engram_n_heads"]
        engram_vocab_size = fields["engram_vocab_size"]

    rows = tuple(int(n) for n in engram_tables.primes(Search).sum(axis=1))
    return di.Config(**fields, engram_num_embeddings=rows)


def initial(path: str, spec: ParameterSpec, config: di.Config, rng: np.random.Generator):
    """float32 starting values of a weight."""
    noise = rng.standard_normal(spec.shape, dtype=np.float32)
    name = path.rsplit(".", 1)[-1]
    if "norm" in path or name in ("q_weight", "k_weight"):
        return np.ones_like(noise)
    if name in BIASES:
        return np.zeros_like(noise)
    if name == "attn_sink":
        return np.zeros_like(noise)
    if name.startswith("hc_"):
        return _initial_mixing(name, noise, config)
    if path == "embed.weight" or path.endswith("engram.embed.weight"):
        return 0.5 * noise
    gain = 1.0
    if path.endswith(("wo_b.weight", "w2.weight", "engram.wkv.weight")):
        gain = 1 / math.sqrt(2 * config.num_hidden_layers)
    if path == "head.weight":
        gain = 0.5
    return gain * noise / math.sqrt(spec.shape[-1])


def _initial_mixing(name: str, noise: np.ndarray, config: di.Config) -> np.ndarray:
    """Streams that start as a plain residual network and may drift apart."""
    streams = config.hc_mult
    if name.endswith("_fn"):
        return noise / math.sqrt(noise.shape[-1])
    if name.endswith("_scale"):
        return np.full_like(noise, 0.1)
    pre = np.full(streams, math.log(1 / (streams - 1))) + 0.3 * noise[:streams]
    post = 0.3 * noise[streams : 2 * streams]
    comb = 3.0 * np.eye(streams).ravel() + 0.1 * noise[2 * streams :]
    return np.concatenate([pre, post, comb]).astype(np.float32)


class Loss(NamedTuple):
    """Terms of a step and what the router did."""

    token: jax.Array  # nats per token
    index: jax.Array  # divergence of the indexers, mean over index sources
    load: jax.Array  # [layers, X], share of the choices each expert got


def rounded(params: dict, specs: dict[str, ParameterSpec]) -> dict:
    """Weights in their released formats, with the gradient of the unrounded ones."""

    def through(name, weight):
        kind = specs[name].kind
        if kind not in FORMATS:
            return weight
        frozen = jax.lax.stop_gradient(weight)
        stored = layouts.quantize(frozen, FORMATS[kind]).dequantize(jnp.float32)
        return weight + (stored - frozen)

    return {name: through(name, weight) for name, weight in params.items()}


def index_loss(config: di.Config, captured: dict[str, jax.Array]) -> jax.Array:
    """KL(attention mass || softmax of index scores) over the selected entries of each source."""
    terms = []
    for source in config.index_source_layer_ids:
        users = [r.index for r in config.layers if r.index_source == source]
        chosen = captured[f"topk.{source}"]
        mass = sum(
            captured[f"attn_weights.{i}"][..., config.sliding_window :].sum(axis=2) for i in users
        )
        mass = jax.lax.stop_gradient(mass)
        target = mass / (mass.sum(axis=-1, keepdims=True) + 1e-9)
        scores = captured[f"index_scores.{source}"]
        picked = jnp.take_along_axis(scores, jnp.maximum(chosen, 0), axis=-1)
        picked = jnp.where((chosen >= 0) & jnp.isfinite(picked), picked, -1e9)
        predicted = jax.nn.log_softmax(picked, axis=-1)
        divergence = target * (jnp.log(target + 1e-9) - predicted)
        terms.append(jnp.where(chosen >= 0, divergence, 0).sum(axis=-1).mean())
    return sum(terms) / len(terms)


def load_of(chosen: jax.Array, experts: int) -> jax.Array:
    """Share of the choices that each expert got, float32 [X]."""
    return jnp.zeros(experts).at[chosen.reshape(-1)].add(1 / chosen.size)


def balanced(params: dict, gate: str, load: jax.Array) -> dict:
    """The weights with the biases of a gate moved by a fixed step towards an even load."""
    move = BIAS_STEP * jnp.sign(1 / load.size - load)
    return params | {f"{gate}.{bias}": params[f"{gate}.{bias}"] + move for bias in BIASES}


def loss(params, rest, specs, tokens) -> tuple[jax.Array, Loss]:
    """Mean loss of tokens [B, S + 1]."""
    model = di.combine(rounded(params, specs), rest)
    config = model.config
    out = di.forward(
        model, tokens[:, :-1], capture=("router", "scores", "selection", "weights")
    )
    token = optax.softmax_cross_entropy_with_integer_labels(out.logits, tokens[:, 1:]).mean()
    index = index_loss(config, out.captured)
    choices = [out.captured[f"router_idx.{role.index}"] for role in config.layers]
    load = jnp.stack([load_of(chosen, config.n_routed_experts) for chosen in choices])
    return token + index, Loss(token, index, load)


def make_step(config: di.Config, optimizer):
    """The jitted training step for this configuration."""
    specs = parameter_specs(config)

    def step(params, state, rest, tokens, rate):
        gradient_of = jax.value_and_grad(loss, has_aux=True)
        (_, terms), gradient = gradient_of(params, rest, specs, tokens)
        update, state = optimizer.update(gradient, state, params)
        params = {name: params[name] + rate * update[name] for name in params}
        for layer in range(config.num_hidden_layers):
            params = balanced(params, f"layers.{layer}.ffn.gate", terms.load[layer])
        return params, state, terms

    return jax.jit(step, donate_argnums=(0, 1))


def make_optimizer() -> optax.GradientTransformation:
    """AdamW for a rate of 1; matrices decay. Router biases have no gradient, so they stay."""

    def decays(params):
        return {n: p.ndim >= 2 and not n.startswith("embed") for n, p in params.items()}

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(1.0, b1=0.9, b2=0.95, eps=1e-10, weight_decay=WEIGHT_DECAY, mask=decays),
    )


def rate_at(progress: float, peak: float) -> float:
    """Learning rate: linear warm-up, then half a cosine to a fiftieth."""
    if progress < WARM_UP:
        return peak * progress / WARM_UP
    fall = (progress - WARM_UP) / (1 - WARM_UP)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(fall, 1))))


def batches(tokens: np.ndarray, stage: Stage, rng: np.random.Generator):
    """Random windows [batch, length + 1] for ever."""
    offsets = np.arange(stage.length + 1)
    while True:
        start = rng.integers(0, len(tokens) - stage.length - 1, stage.batch)
        yield tokens[start[:, None] + offsets].astype(np.int32)


def train(config, tokens, seconds: float, peak: float, seed: int) -> di.Transformer:
    """The model after so many seconds of training, compilation not counted, in released formats."""
    rng = np.random.default_rng(seed)
    specs = parameter_specs(config)
    tokenizer = Tokenizer.from_file(str(HERE / "build" / "tokenizer.json"))

    def take(path):
        return jnp.asarray(initial(path, specs[path], config, rng))

    token_map = engram_tables.checked_token_map(config, tokenizer)
    model = di.Transformer(config, di.Numerics(), take, token_map, drafter=False)
    params, rest = di.trainable(model, jnp.float32)
    optimizer = make_optimizer()
    state = optimizer.init(params)
    spent, done, seen, until = 0.0, 0, 0, 0.0
    for stage in STAGES:
        here = dataclasses.replace(config, index_topk=stage.index_topk or config.index_topk)
        rest.model.config = here
        step = make_step(here, optimizer)
        until += stage.share * seconds
        stream = batches(tokens, stage, rng)
        params, state, terms = step(params, state, rest, next(stream), 0.0)  # compiles
        jax.block_until_ready(params)
        while spent < until:
            began = time.perf_counter()
            for _ in range(STEPS_BETWEEN_LOOKS):
                rate = rate_at(spent / seconds, peak)
                params, state, terms = step(params, state, rest, next(stream), rate)
            jax.block_until_ready(params)
            spent += time.perf_counter() - began
            done += STEPS_BETWEEN_LOOKS
            seen += STEPS_BETWEEN_LOOKS * stage.batch * stage.length
            if done % (10 * STEPS_BETWEEN_LOOKS) == 0:
                most = float(terms.load.max()) * config.n_routed_experts
                print(
                    f"{spent:.0f} s  step {done}  token {float(terms.token):.4f} nats  "
                    f"index {float(terms.index):.4f}  fullest expert {most:.2f}x  "
                    f"{seen / spent / 1e3:.0f}k tokens/s",
                    flush=True,
                )
    rest.model.config = config
    return di.quantize(di.combine(params, rest))


def main() -> None:
    """Train and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=HERE / "build" / "train.npy")
    parser.add_argument("--out", type=Path, default=HERE / "build" / "checkpoint")
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    config = make_config()
    began = time.perf_counter()
    model = train(
        config, np.load(options.data, mmap_mode="r"), options.seconds, options.learning_rate,
        options.seed,
    )  # fmt: skip
    weights = named_parameters(model)
    rng = np.random.default_rng(options.seed + 1)
    specs = parameter_specs(config)

    def take(path):
        if path in weights:
            return weights[path]
        spec = specs[path]
        value = jnp.asarray(initial(path, spec, config, rng))
        if spec.kind in FORMATS:
            return layouts.quantize(value, FORMATS[spec.kind])
        return value.astype(jnp.float32 if spec.kind == "float32" else jnp.bfloat16)

    save(options.out, config, take)
    shutil.copy(HERE / "build" / "tokenizer.json", options.out)
    size = sum(f.stat().st_size for f in options.out.iterdir())
    print(json.dumps({"seconds": round(time.perf_counter() - began), "bytes": size}))


if __name__ == "__main__":
    main()
