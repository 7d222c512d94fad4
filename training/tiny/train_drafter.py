"""Trains the drafter of a checkpoint: `python training/tiny/train_drafter.py`, one H200, 8 minutes.

The model is frozen and quantised as it is served; only the tensors `mtp.*` move, through every
rounding point and in their released formats, as in train.py. Windows of text are run through the
model once. Blocks are then drafted at random anchors of each window; a block sees the context keys
of the positions before its anchor and itself, and its Markov head is fed the true tokens. The loss
has the three terms of spec 9.8: cross-entropy, L1 distance between the drafter's and the model's
probabilities, and cross-entropy of the confidence against the probability 1 - L1/2 with which such
a draft is accepted. In three ways the loss is not that of spec 9.8, each better in short trials
(README.md): the first term is that of the model's distribution, not of the true token; it weighs 1,
not 0.1; and each draft of a block weighs less than the one before it, without which it is in vain.

Reads build/train.npy. The other tensors are written as they were read. This is the first stage;
train_drafter_own.py is the second.

Letters: B windows, S positions, A anchors, n rows of a block, L rows of all blocks, D hidden, E
head width, V vocabulary, X experts.
"""

import argparse
import functools
import json
import shutil
import time
from pathlib import Path
from typing import NamedTuple

import einops
import jax
import jax.numpy as jnp
import numpy as np
import optax
from train import HERE, balanced, load_of, make_optimizer, rate_at, rounded

import deepinfer_jax as di
from deepinfer_jax.checkpoint.hf import save
from deepinfer_jax.checkpoint.tensor_names import parameter_specs
from deepinfer_jax.loading import folder_of
from deepinfer_jax.model.drafter import DraftBlock, draft_block, markov_step, remember_context
from deepinfer_jax.model.linear import as_array
from deepinfer_jax.trainable import named_parameters, with_parameters

STEPS_A_CALL = 10
CALLS_BETWEEN_LINES = 10


class Size(NamedTuple):
    """A training step's: windows go through the model together and are learned from in parts."""

    windows: int
    length: int
    anchors: int  # of a window
    updates: int = 1


class Weights(NamedTuple):
    """Of the terms of the loss; the confidence's is 1."""

    cross_entropy: float = 1.0
    distance: float = 0.9
    decay: float = 0.8  # of a draft's terms, relative to the draft before it
    unreached: float = 1.0  # of a draft's terms, where one before it was rejected


class Loss(NamedTuple):
    """Means of the terms and what the drafter did."""

    cross_entropy: jax.Array  # nats per token
    distance: jax.Array  # L1 between the distributions
    confidence: jax.Array  # nats per draft
    accepted: jax.Array  # [n], rate by position, all tokens before being right
    load: jax.Array  # [stages, X], share of the choices each expert got


def context_keys(model: di.Transformer, features: jax.Array) -> list[jax.Array]:
    """What each stage keeps of every position: features [B, S, targets * D] to [B, S, E]."""
    config, (B, S, _) = model.config, features.shape
    none = jnp.zeros((B, S), jnp.int32)
    start = jnp.zeros(B, jnp.int32)
    rows = di.rectangle(none, jnp.arange(B), start, jnp.full(B, S), none.astype(bool))
    cache = di.init_cache(config, B, S, S, numerics=model.numerics, drafts=True)
    features = einops.rearrange(features, "b s f -> (b s) f")
    _, cache = remember_context(model, features, rows, jnp.int32(B * S), cache)
    return [cache.window[role.index][:, :S] for role in config.draft_layers]


def cache_of_blocks(model: di.Transformer, keys: list[jax.Array], anchors: jax.Array) -> di.Cache:
    """A cache with a slot for each of the anchors [B, A], holding the keys before it."""
    config, (B, A) = model.config, anchors.shape
    cache = di.init_cache(config, B * A, 1, numerics=model.numerics, drafts=True)
    window = list(cache.window)
    for role, key in zip(config.draft_layers, keys, strict=True):
        ring = window[role.index].shape[1]
        last = anchors[..., None] - 1
        held = last - (last - jnp.arange(ring)) % ring  # [B, A, ring], a position each
        # Gathered as float32, because the gradients of all blocks that see a key are added there.
        wide = key.astype(model.numerics.wide)
        picked = wide[jnp.arange(B)[:, None, None], jnp.maximum(held, 0)]
        window[role.index] = einops.rearrange(picked, "b a r e -> (b a) r e").astype(key.dtype)
    return cache.replace(window=tuple(window))


def draft(
    model: di.Transformer, features: jax.Array, tokens: jax.Array, anchors: jax.Array
) -> tuple[DraftBlock, jax.Array]:
    """Blocks at anchors of windows.

    Args:
        model: with a drafter.
        features: [B, S, targets * D], what the drafter reads.
        tokens: int32 [B, S].
        anchors: int32 [B, A], positions of the last known tokens.

    Returns:
        The blocks, B * A of them, and the experts' load [stages, X].
    """
    config = model.config
    cache = cache_of_blocks(model, context_keys(model, features), anchors)
    first = jnp.take_along_axis(tokens, anchors, axis=1).reshape(-1)
    slots = jnp.arange(first.size)
    show = frozenset({"router"})
    block, _, seen = draft_block(model, cache, first, slots, anchors.reshape(-1), show=show)
    chosen = [seen[f"router_idx.{role.index}"] for role in config.draft_layers]
    return block, jnp.stack([load_of(c, config.dspark_n_routed_experts) for c in chosen])


def scores_of(
    model: di.Transformer,
    features: jax.Array,
    tokens: jax.Array,
    anchors: jax.Array,
    previous: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What the heads say of blocks whose tokens are given.

    Args:
        model: with a drafter.
        features: [B, S, targets * D].
        tokens: int32 [B, S].
        anchors: int32 [B, A].
        previous: int32 [B, A, n], the token before each draft.

    Returns:
        Scores float32 [B * A, n, V], logits of the confidence [B * A, n], load [stages, X].
    """
    block, load = draft(model, features, tokens, anchors)
    hidden, logits = (einops.rearrange(a, "c n d -> (c n) d") for a in block)
    scores, confidence = markov_step(model, hidden, logits, previous.reshape(-1))
    n = previous.shape[-1]
    return scores.reshape(-1, n, scores.shape[-1]), confidence.reshape(-1, n), load


def objective(drafted, target, confidence, weights: Weights, agree=None) -> tuple[jax.Array, Loss]:
    """The loss of drafts and its terms, the load left out (spec 9.8).

    Args:
        drafted: float32 [N, n, V], the drafter's scores of N blocks.
        target: float32 [N, n, V], the model's.
        confidence: float32 [N, n], logits.
        weights: of the terms.
        agree: bool [N, n], was a draft accepted when it was tried? The confidence learns this.
            None: it learns the probability, and every draft counts as reached.
    """
    wanted = jax.nn.softmax(target)
    token = optax.softmax_cross_entropy(drafted, wanted)
    distance = jnp.abs(jax.nn.softmax(drafted) - wanted).sum(axis=-1)
    share = weights.decay ** jnp.arange(target.shape[1])
    if agree is None:
        accepted = jax.lax.stop_gradient(1 - distance / 2)
    else:
        accepted = agree.astype(jnp.float32)
        rejected = jnp.cumsum(~agree, axis=1) - ~agree  # before this draft
        share = share * jnp.where(rejected == 0, 1, weights.unreached)
    surprise = optax.sigmoid_binary_cross_entropy(confidence, accepted)
    share = share / share.mean()
    token, distance, surprise = ((share * x).mean() for x in (token, distance, surprise))
    total = weights.cross_entropy * token + weights.distance * distance + surprise
    return total, Loss(token, distance, surprise, accepted.mean(axis=0), None)


def loss(
    params, model, specs, features, target, tokens, anchors, weights
) -> tuple[jax.Array, Loss]:
    """Of the drafter's weights `params`: `objective` with the load.

    Args:
        params: float32 weights of the drafter by name.
        model: all other weights.
        specs: of the parameters.
        features: [B, S, targets * D].
        target: float32 [B, S, V], the model's scores.
        tokens: int32 [B, S].
        anchors: int32 [B, A], at most S - n.
        weights: of the terms.
    """
    model = with_parameters(model, named_parameters(model) | rounded(params, specs))
    place = anchors[..., None] + jnp.arange(model.config.dspark_block_size)  # [B, A, n]
    window = jnp.arange(len(tokens))[:, None, None]
    previous = tokens[window, place]
    scores, confidence, load = scores_of(model, features, tokens, anchors, previous)
    wanted = einops.rearrange(target[window, place], "b a n v -> (b a) n v")
    total, terms = objective(scores, wanted, confidence, weights)
    return total, terms._replace(load=load)


def learn(carry, gradient, load, rate, config: di.Config):
    """The drafter's weights and the optimiser's state, (params, state), after one update."""
    params, state = carry
    update, state = make_optimizer().update(gradient, state, params)
    params = {name: params[name] + rate * update[name] for name in params}
    for stage in range(config.num_nextn_predict_layers):
        params = balanced(params, f"mtp.{stage}.ffn.gate", load[stage])
    return params, state


@functools.partial(jax.jit, static_argnames="size", donate_argnames=("params", "state"))
def train_steps(params, state, model, corpus, key, rate, weights: Weights, *, size: Size):
    """`STEPS_A_CALL` steps on random windows of the corpus, an array of token ids.

    Returns:
        The drafter's weights, the optimiser's state, the mean terms of the steps.
    """
    config = model.config
    specs = parameter_specs(config)

    def update(carry, part):
        gradient, terms = jax.grad(loss, has_aux=True)(carry[0], model, specs, *part, weights)
        return learn(carry, gradient, terms.load, rate, config), terms

    def step(carry, key):
        windows, places = jax.random.split(key)
        S, n = size.length, config.dspark_block_size
        start = jax.random.randint(windows, (size.windows, 1), 0, corpus.size - S)
        tokens = corpus[start + jnp.arange(S)].astype(jnp.int32)
        anchors = jax.random.randint(places, (size.windows, size.anchors), 1, S - n + 1)
        out = di.forward(model, tokens, capture=("draft",))
        whole = out.captured["dspark.features"], out.logits, tokens, anchors
        parts = jax.tree.map(lambda a: jnp.stack(jnp.split(a, size.updates)), whole)
        carry, terms = jax.lax.scan(update, carry, parts)
        return carry, jax.tree.map(lambda a: a.mean(axis=0), terms)

    keys = jax.random.split(key, STEPS_A_CALL)
    (params, state), terms = jax.lax.scan(step, (params, state), keys)
    return params, state, jax.tree.map(lambda a: a.mean(axis=0), terms)


def drafter_weights(model: di.Transformer) -> dict[str, jax.Array]:
    """Float32 copies of the drafter's weights by name."""
    weights = {n: w for n, w in named_parameters(model).items() if n.startswith("mtp.")}
    return {n: jnp.array(as_array(w, jnp.float32), copy=True) for n, w in weights.items()}


def train(
    model: di.Transformer, corpus: np.ndarray, seconds: float, peak: float, seed: int, size: Size,
    weights: Weights, steps=train_steps,
) -> di.Transformer:  # fmt: skip
    """The model with its drafter after so many seconds of training, compilation not counted.

    `steps` is `train_steps` or something that is called like it.
    """
    params = drafter_weights(model)
    state = make_optimizer().init(params)
    corpus = jnp.asarray(corpus)
    keys = jax.random.key(seed)
    fixed = functools.partial(steps, model=model, corpus=corpus, weights=weights, size=size)
    params, state, _ = fixed(params, state, key=keys, rate=0.0)
    jax.block_until_ready(params)
    spent, calls = 0.0, 0
    while spent < seconds:
        began = time.perf_counter()
        calls += 1
        key, rate = jax.random.fold_in(keys, calls), rate_at(spent / seconds, peak)
        params, state, terms = fixed(params, state, key=key, rate=rate)
        jax.block_until_ready(params)
        spent += time.perf_counter() - began
        if calls % CALLS_BETWEEN_LINES == 0 or spent >= seconds:
            report(spent, calls, terms)
    return di.quantize(with_parameters(model, named_parameters(model) | params))


def report(spent: float, calls: int, terms: Loss) -> None:
    """One line about the last of some calls."""
    fullest = float(terms.load.max()) * terms.load.shape[1]
    accepted = " ".join(f"{x:.3f}" for x in terms.accepted.reshape(-1))
    print(
        f"{spent:.0f} s  call {calls}  cross-entropy {float(terms.cross_entropy):.4f}  "
        f"L1 {float(terms.distance):.4f}  confidence {float(terms.confidence):.4f}  "
        f"accepted {accepted}  fullest expert {fullest:.2f}x  {calls / spent:.2f} calls/s",
        flush=True,
    )


def command_line(description: str, **defaults) -> argparse.ArgumentParser:
    """The options that both stages have, with the defaults of one."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--checkpoint", help="whose drafter to train")
    parser.add_argument("--data", type=Path, default=HERE / "build" / "train.npy")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--windows", type=int, help="of text, in a step")
    parser.add_argument("--length", type=int, help="of a window, in tokens")
    parser.add_argument("--anchors", type=int, help="of a window")
    parser.add_argument("--updates", type=int, help="of the weights, in a step")
    parser.set_defaults(**defaults)
    return parser


def train_as_asked(options: argparse.Namespace, weights, steps=train_steps) -> di.Transformer:
    """`train` with the options of a command line."""
    size = Size(options.windows, options.length, options.anchors, options.updates)
    return train(
        di.load(options.checkpoint), np.load(options.data), options.seconds,
        options.learning_rate, options.seed, size, weights, steps,
    )  # fmt: skip


def write(model: di.Transformer, options: argparse.Namespace, began: float) -> None:
    """Write the checkpoint, and print how long it took since `began` and its size."""
    save(options.out, model.config, named_parameters(model).__getitem__)
    shutil.copy(folder_of(options.checkpoint) / "tokenizer.json", options.out)
    total = sum(f.stat().st_size for f in options.out.iterdir())
    print(json.dumps({"seconds": round(time.perf_counter() - began), "bytes": total}))


def main() -> None:
    """Train and write the checkpoint."""
    options = command_line(
        __doc__.split("\n")[0], checkpoint="tiny", out=HERE / "build" / "drafted", seconds=400,
        learning_rate=3e-3, seed=0, windows=32, length=512, anchors=128, updates=4,
    ).parse_args()  # fmt: skip
    began = time.perf_counter()
    write(train_as_asked(options, Weights()), options, began)


if __name__ == "__main__":
    main()
