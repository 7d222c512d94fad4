"""Gradients are right without quantisers, and good enough to train with them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax import testing
from deepinfer_jax.model.engram_tables import token_map
from deepinfer_jax.model.experts import route

B, S = 2, 21
# Weights that only decide which entries and experts are chosen.
CHOOSING = ("indexer.", "gate.bias")
# Short enough that the clamp of an expert or the sign in Engram's gate is not crossed on the way,
# where there is no derivative: the seeds are chosen for that.
STEP = 5e-6


def tokens_of(seed):
    return np.random.default_rng(seed).integers(0, 266, (B, S), np.int32)


def build(config, numerics, quantized):
    ids = token_map(testing.byte_tokenizer())
    return di.Transformer(config, numerics, testing.random_weights(config, 6, quantized), ids)


def directions(params):
    """A random direction for each weight, of the weight's own size."""
    rng = np.random.default_rng(33)
    return {
        name: rng.standard_normal(p.shape) * (np.std(p) + 0.1) for name, p in params.items()
    }


@pytest.fixture(scope="module")
def exact():
    """A float64 model that selects everything, its losses and their gradients.

    The losses are a random combination of logits and one of index scores. Both go through one
    compiled function: it takes their weights as data.
    """
    with jax.enable_x64(True):
        config = testing.tiny_config(
            num_hidden_layers=3,
            num_nextn_predict_layers=0,
            dspark_target_layer_ids=(),
            compress_ratios=(3, 1, 1),
            kv_source_layer_ids=(0, 1),
            index_source_layer_ids=(0, 1, 2),
            candidate_source_layer_id=1,
            index_topk=S,
            candidate_topk_blocks=S,
            engram_layer_ids=(0, 2),
            n_routed_experts=3,
            num_experts_per_tok=3,
            swiglu_limit=1.0,  # reached by many values
            sliding_window=5,
        )
        numerics = di.Numerics(dtype="float64", quantize_activations=False, quantize_cache=False)
        params, rest = di.trainable(build(config, numerics, False), jnp.float64)
        tokens = tokens_of(0)
        lengths = np.array([S, S - 4])
        rng = np.random.default_rng(32)
        real = (np.arange(S) < lengths[:, None])[..., None]
        cotangent = rng.standard_normal((B, S, config.vocab_size)) * real

        def losses(params, share):
            out = di.forward(di.combine(params, rest), tokens, lengths, capture=("scores",))
            assert out.logits.dtype == jnp.float64
            score = sum(
                jnp.sum(jnp.where(real & (array > -jnp.inf), array, 0))
                for name, array in out.captured.items()
                if name.startswith("index_scores")
            )
            return share[0] * jnp.sum(out.logits * cotangent) + share[1] * score

        both = jax.jit(jax.value_and_grad(losses))
        shares = {"logits": jnp.array([1.0, 0.0]), "scores": jnp.array([0.0, 1.0])}
        gradients = {name: both(params, share)[1] for name, share in shares.items()}

        def finite_difference(direction, loss):
            """Five points, so that the curvature along a weight does not count."""

            def at(steps):
                moved = {name: params[name] + steps * STEP * d for name, d in direction.items()}
                return float(both(params | moved, shares[loss])[0])

            return (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * STEP)

        yield params, gradients, finite_difference


def test_every_weight_has_the_derivative_of_finite_differences(exact):
    params, gradients, finite_difference = exact
    checked = 0
    with jax.enable_x64(True):
        for name, direction in directions(params).items():
            derivative = float(jnp.vdot(gradients["logits"][name], direction))
            expected = finite_difference({name: direction}, "logits")
            if any(part in name for part in CHOOSING):
                assert derivative == expected == 0, name
                continue
            assert abs(expected) > 1e-3, name
            assert abs(derivative - expected) <= 1e-6 * abs(expected), name
            checked += 1
    assert checked > 60


def test_all_weights_together_have_the_derivative_of_finite_differences(exact):
    params, gradients, finite_difference = exact
    with jax.enable_x64(True):
        direction = {name: 0.1 * d for name, d in directions(params).items()}
        assert all(g.dtype == jnp.float64 for g in gradients["logits"].values())
        derivative = sum(float(jnp.vdot(gradients["logits"][n], d)) for n, d in direction.items())
        expected = finite_difference(direction, "logits")
        assert abs(derivative - expected) <= 1e-6 * abs(expected)


def test_a_loss_on_index_scores_reaches_the_indexer_and_nothing_else(exact):
    params, gradients, finite_difference = exact
    reached = set()
    with jax.enable_x64(True):
        for name, direction in directions(params).items():
            derivative = float(jnp.vdot(gradients["scores"][name], direction))
            if "indexer." not in name:
                assert not gradients["scores"][name].any(), name
                continue
            expected = finite_difference({name: direction}, "scores")
            assert abs(derivative - expected) <= 1e-6 * abs(expected), name
            assert derivative != 0, name
            reached.add(name.split("indexer.")[1])
    assert reached == {"wq_b.weight", "weights_proj.weight", "wk.weight", "k_norm.weight"}


@functools.cache
def trained():
    """Losses of a few steps of plain gradient descent on one batch of a quantised model."""
    config = testing.tiny_config(
        num_hidden_layers=2,
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        compress_ratios=(2, 2),
        kv_source_layer_ids=(0,),
        index_source_layer_ids=(0, 1),
        candidate_source_layer_id=0,
        engram_layer_ids=(1,),
        sliding_window=5,
        index_topk=4,
    )
    model = build(config, di.Numerics(), quantized=True)
    params, rest = di.trainable(model)
    tokens = tokens_of(1)

    def loss(params):
        logits = di.forward(di.combine(params, rest), tokens).logits
        picked = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.mean(jnp.take_along_axis(picked, tokens[:, 1:, None], axis=-1))

    step = jax.jit(jax.value_and_grad(loss))
    first = step(params)[1]
    losses, start = [], params
    for _ in range(9):
        value, gradient = step(params)
        losses.append(float(value))
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, gradient)
    return model, tokens, start, params, rest, first, losses


def test_training_through_quantisers_lowers_the_loss_at_every_step():
    losses = trained()[-1]
    assert all(after < before for before, after in zip(losses, losses[1:], strict=False)), losses
    assert losses[-1] < 0.8 * losses[0]


def test_training_through_quantisers_moves_every_weight_but_the_choosing_ones():
    gradient = trained()[-2]
    for name, g in gradient.items():
        assert jnp.isfinite(g).all(), name
        assert g.dtype == jnp.float32, name
        assert bool(g.any()) != any(part in name for part in CHOOSING), name


def test_a_trained_model_goes_back_to_the_released_formats():
    model, tokens, start, params, rest, _, losses = trained()
    same, after = di.quantize(di.combine(start, rest)), di.quantize(di.combine(params, rest))
    assert jax.tree.structure(after) == jax.tree.structure(model)
    before = di.forward(model, tokens).logits
    assert np.array_equal(di.forward(same, tokens).logits, before)

    def loss(logits):
        picked = jax.nn.log_softmax(logits[:, :-1])
        return -float(jnp.take_along_axis(picked, tokens[:, 1:, None], axis=-1).mean())

    assert abs(loss(before) - losses[0]) < 1e-3
    assert loss(di.forward(after, tokens).logits) < losses[0]


@pytest.mark.parametrize("logit", [-80.0, -90.0, -104.0, -200.0])
def test_experts_far_below_zero_have_finite_gradients(logit):
    x = jnp.ones((3, 4), jnp.float32)
    gate = jnp.linspace(-1, 1, 24, dtype=jnp.float32).reshape(6, 4).at[2].set(logit / 4)
    bias, image = jnp.zeros(6), jnp.zeros(3, bool)

    def total(gate):
        weight = route(x, gate, bias, bias, image, top_k=2, scale=1.5, wide=jnp.float32)[1]
        return weight[:, 0].sum()

    gradient = np.asarray(jax.grad(total)(gate))
    assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0
