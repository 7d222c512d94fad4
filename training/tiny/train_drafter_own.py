"""Second stage of the drafter's training, on the model's own continuations.

`python training/tiny/train_drafter_own.py`, one H200, five minutes, after train_drafter.py. There
the drafter sees what the text says behind an anchor; in use a draft stands behind the model's own
choices. Here the text before an anchor, and the anchor, are still true, but the tokens behind it
are chosen by the frozen model: the best ones in half of the windows, drawn ones in the other half.
The rest is as in train_drafter.py, with three changes:

- on a best path the loss compares both distributions sharpened, for only their best tokens count;
- the confidence learns whether drafter and model agree, given the same noise as in `generate`;
- cross-entropy weighs less, and so do drafts behind a rejected one.

At the end the drafter's scores are multiplied by a constant, which leaves the best token as it is
and brings more agreement at temperature 1 (README.md).

Letters as in train_drafter.py.
"""

import functools
import time
from typing import NamedTuple

import einops
import jax
import jax.numpy as jnp
from train import HERE, rounded
from train_drafter import (
    Loss,
    Size,
    Weights,
    command_line,
    learn,
    objective,
    scores_of,
    train_as_asked,
    write,
)

import deepinfer_jax as di
from deepinfer_jax.checkpoint.tensor_names import parameter_specs
from deepinfer_jax.trainable import named_parameters, with_parameters

CHUNK = 16  # tokens of a window that the model reads at once


class OwnWeights(NamedTuple):
    """Of the terms of the loss."""

    terms: Weights = Weights(cross_entropy=0.2, distance=0.9, decay=1.0, unreached=0.3)
    temperature: float = 0.5  # of both distributions on a greedy path


def read(model: di.Transformer, tokens: jax.Array) -> tuple[jax.Array, jax.Array, di.Cache]:
    """What the model makes of windows.

    Args:
        model: with a drafter.
        tokens: int32 [B, S], S a multiple of CHUNK.

    Returns:
        Features [B, S, targets * D], hidden states [B, S, D] and a cache that can go on from any
        position.
    """
    (B, S), slots = tokens.shape, jnp.arange(len(tokens))

    def go(cache, chunk):
        text, start = chunk
        begin, count = jnp.full(B, start), jnp.full(B, CHUNK)
        rows = di.rectangle(text, slots, begin, count, jnp.zeros(text.shape, bool))
        hidden, cache, seen = di.step(model, cache, rows, show=frozenset({"draft"}))
        return cache, (seen["dspark.features"], hidden)

    cache = di.init_cache(model.config, B, S, S, numerics=model.numerics)
    chunks = einops.rearrange(tokens, "b (c s) -> c b s", s=CHUNK)
    cache, read = jax.lax.scan(go, cache, (chunks, CHUNK * jnp.arange(len(chunks))))
    features, hidden = (einops.rearrange(a, "c (b s) d -> b (c s) d", b=B) for a in read)
    return features, hidden, cache


def own_paths(
    model: di.Transformer,
    hidden: jax.Array,
    cache: di.Cache,
    anchors: jax.Array,
    greedy: jax.Array,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Go on from every anchor with the model's own choices.

    Args:
        model: any.
        hidden: [B, S, D], from `read`.
        cache: likewise. A path overwrites what is behind its anchor, so the last anchor goes first.
        anchors: int32 [B, A], ascending, at most S - n.
        greedy: bool [B], take the best token; otherwise draw one.
        key: of the draws.

    Returns:
        The model's choices int32 [B, A, n] and the hidden states [B, A, n, D] they were made from.
    """
    n, slots = model.config.dspark_block_size, jnp.arange(len(anchors))
    none = jnp.zeros((len(anchors), 1), bool)

    def choose(hidden, key):
        scores = di.logits(model, hidden)
        noise = jax.random.gumbel(key, scores.shape)
        return jnp.argmax(scores + jnp.where(greedy[:, None], 0, noise), axis=1).astype(jnp.int32)

    def path(cache, drawn):
        anchor, key = drawn

        def go(carry, drawn):
            hidden, cache = carry
            key, position = drawn
            token = choose(hidden, key)
            rows = di.rectangle(token[:, None], slots, position, jnp.ones_like(slots), none)
            after, cache, _ = di.step(model, cache, rows)
            return (after, cache), (token, hidden)

        keys, behind = jax.random.split(key, n), anchor + 1 + jnp.arange(n - 1)[:, None]
        (last, cache), (chosen, seen) = jax.lax.scan(
            go, (hidden[slots, anchor], cache), (keys[1:], behind)
        )
        chosen = jnp.concatenate([chosen, choose(last, keys[0])[None]])
        return cache, (chosen, jnp.concatenate([seen, last[None]]))

    keys = jax.random.split(key, anchors.shape[1])
    _, (chosen, seen) = jax.lax.scan(path, cache, (anchors.T, keys), reverse=True)
    return einops.rearrange(chosen, "a n b -> b a n"), einops.rearrange(seen, "a n b d -> b a n d")


def loss(
    params, model, specs, features, tokens, anchors, chosen, hidden, greedy, key, weights
) -> tuple[jax.Array, Loss]:
    """Of the drafter's weights `params`.

    Args:
        params: float32 weights of the drafter by name.
        model: all other weights.
        specs: of the parameters.
        features: [B, S, targets * D].
        tokens: int32 [B, S].
        anchors: int32 [B, A].
        chosen: int32 [B, A, n], the model's choices.
        hidden: [B, A, n, D], of the model.
        greedy: bool [B].
        key: of the noise that drafter and model share.
        weights: of the terms.

    Returns:
        The loss and its terms; `accepted` is [2, n], all drafts up to a position being accepted, at
        temperatures 0 and 1.
    """
    model = with_parameters(model, named_parameters(model) | rounded(params, specs))
    first = jnp.take_along_axis(tokens, anchors, axis=1)[..., None]
    previous = jnp.concatenate([first, chosen[..., :-1]], axis=-1)
    scores, confidence, load = scores_of(model, features, tokens, anchors, previous)
    target = di.logits(model, einops.rearrange(hidden, "b a n d -> (b a n) d"))
    target = target.reshape(scores.shape)
    greedy = jnp.repeat(greedy, anchors.shape[1])[:, None]
    noise = jnp.where(greedy[..., None], 0, jax.random.gumbel(key, scores.shape))
    agree = jnp.argmax(scores + noise, axis=-1) == jnp.argmax(target + noise, axis=-1)
    heat = jnp.where(greedy, weights.temperature, 1)[..., None]
    total, terms = objective(scores / heat, target / heat, confidence, weights.terms, agree)
    accepted = jnp.cumprod(agree, axis=1)
    rates = jnp.stack([jnp.mean(accepted, axis=0, where=kind) for kind in (greedy, ~greedy)])
    return total, terms._replace(accepted=rates, load=load)


def sharpened(model: di.Transformer, factor: float) -> di.Transformer:
    """The model with the scores of its drafter, but not the confidences, times a factor."""
    weights = named_parameters(model)
    last = f"mtp.{model.config.num_nextn_predict_layers - 1}"
    for name in (f"{last}.norm.weight", f"{last}.markov_head.head.weight"):
        old = weights[name]
        weights[name] = (old.astype(jnp.float32) * factor).astype(old.dtype)
    return with_parameters(model, weights)


@functools.partial(jax.jit, static_argnames="size", donate_argnames=("params", "state"))
def train_steps(params, state, model, corpus, key, rate, weights: OwnWeights, *, size: Size):
    """Choose paths in random windows of the corpus and learn from them, in `size.updates` parts.

    Returns:
        The drafter's weights, the optimiser's state, the mean terms of the updates.
    """
    config, (B, S, A, updates) = model.config, size
    specs = parameter_specs(config)
    windows, places, draws, noise = jax.random.split(key, 4)
    start = jax.random.randint(windows, (B, 1), 0, corpus.size - S)
    tokens = corpus[start + jnp.arange(S)].astype(jnp.int32)
    anchors = jax.random.randint(places, (B, A), 1, S - config.dspark_block_size + 1)
    anchors = jnp.sort(anchors, axis=1)
    greedy = jnp.arange(B) % 2 == 0
    features, hidden, cache = read(model, tokens)
    chosen, hidden = own_paths(model, hidden, cache, anchors, greedy, draws)

    def update(carry, part):
        part, key = part
        gradient_of = jax.grad(loss, has_aux=True)
        gradient, terms = gradient_of(carry[0], model, specs, *part, key, weights)
        return learn(carry, gradient, terms.load, rate, config), terms

    whole = features, tokens, anchors, chosen, hidden, greedy
    parts = jax.tree.map(lambda a: jnp.stack(jnp.split(a, updates)), whole)
    keys = jax.random.split(noise, updates)
    (params, state), terms = jax.lax.scan(update, (params, state), (parts, keys))
    return params, state, jax.tree.map(lambda a: a.mean(axis=0), terms)


def main() -> None:
    """Train and write the checkpoint."""
    parser = command_line(
        __doc__.split("\n")[0], checkpoint=HERE / "build" / "drafted", out=HERE / "build" / "own",
        seconds=205, learning_rate=1e-3, seed=1, windows=2048, length=256, anchors=32, updates=64,
    )  # fmt: skip
    parser.add_argument("--sharpen", type=float, default=1.2, help="factor of the scores")
    options = parser.parse_args()
    began = time.perf_counter()
    model = train_as_asked(options, OwnWeights(), train_steps)
    write(sharpened(model, options.sharpen), options, began)


if __name__ == "__main__":
    main()
