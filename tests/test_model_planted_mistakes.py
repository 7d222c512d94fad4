"""The paper's mistakes planted into the JAX model: each must move the logits far beyond the limit.

What a config, a tensor or a numerics switch can express comes from the shared list; functions that
are wrong are written here for the JAX model, under the names of that list. A mistake in code needs
a program of its own, so it is traced through a new function: `jax.jit` would return the old one.
"""

import functools
from copy import deepcopy
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import case, relative_error
from test_model_goldens import FLOAT32, QUICK_TO_COMPILE, forward_inputs, model_of
from test_planted_mistakes import MISTAKES

import deepinfer_jax as di
from deepinfer_jax.forward import _forward
from deepinfer_jax.model import attention, block, experts, indexer, transformer
from deepinfer_jax.model.transformer import Transformer
from deepinfer_jax.trainable import named_parameters, with_parameters

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*DeepSeek's engine would refuse it"),
    pytest.mark.filterwarnings("ignore:.*the last rows of the tables are never read"),
]


# --- Wrong versions of functions of the model -----------------------------------------------------


def unshifted_pre():
    """Every sublayer collapses the streams with its own pre."""
    own, mixes, collapse = [], block.Block.mixes, block.collapse

    def remember(self, *args):
        own.append(mixes(self, *args))
        return own[-1]

    return {
        (block.Block, "mixes"): remember,
        (block, "collapse"): lambda s, _: collapse(s, own[-1].pre),
    }


def post_without_factor_two():
    mixes = block.Block.mixes

    def halved(self, *args):
        mix = mixes(self, *args)
        return mix._replace(post=mix.post / 2)

    return {(block.Block, "mixes"): halved}


def bias_in_the_router_weights():
    right = experts.route

    def route(x, gate, bias, bias_vl, image, *, scale, **named):
        chosen, _ = right(x, gate, bias, bias_vl, image, scale=scale, **named)
        score = jnp.sqrt(jax.nn.softplus(x @ gate.T)) + bias
        picked = jnp.take_along_axis(score, chosen, axis=1)
        return chosen, picked / picked.sum(1, keepdims=True) * scale

    return {(experts, "route"): route}


def half_split_rope():
    """Channel i pairs with i + R / 2, as in many other models."""
    right = attention.rotate

    def rotate(x, position, frequency, *, inverse=False):
        R = 2 * len(frequency)
        order = np.arange(R).reshape(2, R // 2).T.reshape(-1)  # 0, R / 2, 1, R / 2 + 1, ...
        order = np.concatenate([np.arange(x.shape[-1] - R), x.shape[-1] - R + order])
        turned = right(x[..., order], position, frequency, inverse=inverse)
        return turned[..., np.argsort(order)]

    return {(attention, "rotate"): rotate, (indexer, "rotate"): rotate}


def output_not_rotated_back():
    right = attention.rotate

    def rotate(x, position, frequency, *, inverse=False):
        return x if inverse else right(x, position, frequency)

    return {(attention, "rotate"): rotate}


def group_rotated_at_its_last_token():
    """Inside `remember` only entries and index keys are rotated, by the first of their group."""
    remember = attention.Attention.remember
    right = attention.rotate

    def late(x, position, frequency, *, inverse=False):
        return right(x, position + 1, frequency, inverse=inverse)  # groups of two

    def remember_late(self, *args):
        attention.rotate = indexer.rotate = late
        try:
            return remember(self, *args)
        finally:
            attention.rotate = indexer.rotate = right

    return {(attention.Attention, "remember"): remember_late}


def visible(number):
    """An index source sees `number(position, ratio)` entries."""
    right = attention.Attention.choose

    def choose(self, index, slot, position, candidates, cache, role, *rest):
        # From its position, `choose` derives nothing but (position + 1) // ratio visible entries.
        position = number(position, role.ratio) * role.ratio - 1
        return right(self, index, slot, position, candidates, cache, role, *rest)

    return {(attention.Attention, "choose"): choose}


def newest_block_not_forced():
    right = attention.candidate_blocks
    return {
        (attention, "candidate_blocks"): lambda scores, visible, **named: right(
            scores, 0 * visible, **named
        )
    }


def ngrams_cross_images():
    right = transformer.recent_tokens

    def recent(history, slot, position, pad, config):
        seen = []
        for back in range(config.engram_max_ngram_size):
            past = history[jnp.maximum(slot, 0), (position - back) % history.shape[1]]
            seen.append(jnp.where(position < back, pad, jnp.where(past < 0, 0, past)))
        assert len(seen) == right(history, slot, position, pad, config).shape[1]
        return jnp.stack(seen, axis=1)

    return {(transformer, "recent_tokens"): recent}


def ngrams_wrap_around_the_start():
    """Nothing blocks the view before the first token: the ring's last places are read."""

    def recent(history, slot, position, pad, config):
        back = jnp.arange(config.engram_max_ngram_size)
        return history[jnp.maximum(slot, 0)[:, None], (position[:, None] - back) % history.shape[1]]

    return {(transformer, "recent_tokens"): recent}


def raw_pad_id_in_blocked_slots():
    right = transformer.recent_tokens
    return {
        (transformer, "recent_tokens"): lambda history, slot, position, pad, config: right(
            history, slot, position, 0, config
        )
    }


def engram_open_in_images():
    right = block.Engram.__call__
    return {
        (block.Engram, "__call__"): lambda self, streams, rows, image, *rest: right(
            self, streams, rows, jnp.zeros_like(image), *rest
        )
    }


PATCHES = {
    "unshifted pre-mix": unshifted_pre,
    "post without its factor 2": post_without_factor_two,
    "router bias in the weights": bias_in_the_router_weights,
    "half-split RoPE": half_split_rope,
    "output not rotated back": output_not_rotated_back,
    "group rotated at its last token": group_rotated_at_its_last_token,
    "entry visible too early": lambda: visible(lambda t, ratio: t // ratio + 1),
    "entry visible too late": lambda: visible(lambda t, ratio: t // ratio),
    "newest block not forced": newest_block_not_forced,
    "n-grams cross images": ngrams_cross_images,
    "n-grams wrap around the start": ngrams_wrap_around_the_start,
    "raw id 0 as pad": raw_pad_id_in_blocked_slots,
    "Engram open inside images": engram_open_in_images,
}
# A program is compiled for each of these, in the case named by the shared list.
QUICK = (
    "window one too wide", "window one too narrow", "expert clamp missing",
    "one Sinkhorn iteration", "unshifted pre-mix", "post without its factor 2",
    "router bias in the weights",
    "half-split RoPE", "output not rotated back", "window not quantised",
)  # fmt: skip


def planted():
    """The mistakes that this file can plant; those that need a larger program are slow."""
    for mistake in MISTAKES:
        if mistake.patch and mistake.name not in PATCHES:
            continue
        quick = mistake.weights or mistake.name in QUICK
        marks = () if quick else pytest.mark.slow
        yield pytest.param(mistake, id=f"{mistake.name} ({mistake.case})", marks=marks)


# --- Planting -------------------------------------------------------------------------------------


def compiled():
    """A program that shares nothing with those compiled before."""

    def run(model, tokens, lengths, embeddings, image_mask):
        return _forward.__wrapped__(model, tokens, lengths, embeddings, image_mask, frozenset())

    return jax.jit(run, compiler_options=QUICK_TO_COMPILE)


right_program = compiled()


def logits_error(name, model, program):
    inputs = forward_inputs(name, "f32")
    if inputs["image_mask"] is None:
        inputs["image_mask"] = np.zeros(inputs["tokens"].shape, bool)
    outputs = {"logits": np.asarray(program(model, **inputs).logits)}
    ((_, value, golden),) = [p for p in case(name).pairs("f32", outputs) if p[0] == "logits"]
    return relative_error(value, golden)


@functools.cache
def error_without_mistake(name):
    return logits_error(name, model_of(name), right_program)


@pytest.mark.parametrize("mistake", list(planted()))
def test_a_mistake_moves_the_logits_far_beyond_the_golden_limit(mistake, monkeypatch):
    assert error_without_mistake(mistake.case) < 1e-5

    model, program = model_of(mistake.case), compiled()
    parameters = named_parameters(model)
    if mistake.config:
        config = deepcopy(case(mistake.case).config)
        config["text_config"] |= mistake.config(config["text_config"])
        wrong = di.Config.from_hf(config)
        assert wrong != model.config
        model = Transformer(wrong, FLOAT32, parameters.__getitem__, model.token_map)
    if mistake.weights:
        wrong = mistake.weights(case(mistake.case).weights)
        wrong = {
            k: jnp.asarray(w, parameters[k].dtype) for k, w in wrong.items() if k in parameters
        }
        assert wrong
        model, program = with_parameters(model, parameters | wrong), right_program
    if mistake.numerics:
        model = model.with_numerics(replace(FLOAT32, **mistake.numerics))
    if mistake.patch:
        for (owner, name), function in PATCHES[mistake.name]().items():
            monkeypatch.setattr(owner, name, function)
    assert logits_error(mistake.case, model, program) > 1e-2


def test_enough_mistakes_are_planted():
    names = {parameter.values[0].name for parameter in planted()}
    assert names >= PATCHES.keys() and len(names) >= 30
    assert len([p for p in planted() if not p.marks]) >= 15
