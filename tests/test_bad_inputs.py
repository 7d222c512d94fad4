"""Each bad input is refused before any compute, in a sentence that says what was given."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax import inputs, testing
from deepinfer_jax.checkpoint.hf import save

B, S = 2, 5
TOKENS = np.arange(3, 3 + B * S, dtype=np.int32).reshape(B, S)


@functools.cache
def config():
    return testing.tiny_config(
        num_hidden_layers=2,
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        compress_ratios=(2, 0),
        kv_source_layer_ids=(0,),
        index_source_layer_ids=(0,),
        candidate_source_layer_id=-1,
        engram_layer_ids=(),
        max_position_embeddings=100,
    )


@functools.cache
def model():
    return di.Transformer(config(), di.Numerics(), testing.random_weights(config(), 1, True))


def generate(tokens=TOKENS, lengths=None, **arguments):
    return di.generate(model(), tokens, lengths, **{"max_new_tokens": 4} | arguments)


def forward(tokens=TOKENS, **arguments):
    return di.forward(model(), tokens, **arguments)


def tokens_with(value):
    tokens = TOKENS.copy()
    tokens[1, 3] = value
    return tokens


PROMPTS = {
    "id above the vocabulary": (
        dict(tokens=tokens_with(266)),
        "tokens[1, 3] = 266 is outside the vocabulary [0, 266)",
    ),
    "negative id": (
        dict(tokens=tokens_with(-1)),
        "tokens[1, 3] = -1 is outside the vocabulary [0, 266)",
    ),
    "no column": (
        dict(tokens=TOKENS[:, :0]),
        "tokens must hold at least one sequence of at least one token, got [2, 0]",
    ),
    "no row": (
        dict(tokens=TOKENS[:0]),
        "tokens must hold at least one sequence of at least one token, got [0, 5]",
    ),
    "one prompt without a batch": (
        dict(tokens=TOKENS[0]),
        "tokens must be integers of shape [batch, length], got int32 [5]",
    ),
    "float tokens": (
        dict(tokens=TOKENS.astype(np.float32)),
        "tokens must be integers of shape [batch, length], got float32 [2, 5]",
    ),
    "bool tokens": (
        dict(tokens=TOKENS > 4),
        "tokens must be integers of shape [batch, length], got bool [2, 5]",
    ),
    "empty prompt": (
        dict(lengths=[5, 0]),
        "lengths must be at least 1 (an empty prompt has no last token), got 0 for sequence 1",
    ),
    "longer than the tokens": (
        dict(lengths=[5, 6]),
        "lengths must be at most 5, the width of tokens, got 6",
    ),
    "a length too few": (dict(lengths=[5]), "lengths must have shape [2], got [1]"),
    "float lengths": (dict(lengths=[5.0, 2.5]), "lengths must be integers, got float"),
}


@pytest.mark.parametrize("call", [generate, forward])
@pytest.mark.parametrize(("arguments", "message"), PROMPTS.values(), ids=PROMPTS)
def test_prompts(call, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(**arguments)


def test_lists_are_as_good_as_arrays():
    tokens = inputs.token_batch(TOKENS.tolist(), config())
    assert tokens.dtype == jnp.int32 and np.array_equal(tokens, TOKENS)
    assert inputs.lengths_of([5, 3], B, S).tolist() == [5, 3]


GENERATIONS = {
    "prompt longer than the cache": (
        dict(capacity=8),
        "capacity = 8 cannot hold prompts of 5 and 4 new tokens; it must be at least 9",
    ),
    "longer than the model's positions": (
        dict(max_new_tokens=96),
        "need a capacity of 101, beyond the model's max_position_embeddings = 100",
    ),
    "nothing to generate": (dict(max_new_tokens=0), "max_new_tokens must be at least 1, got 0"),
    "negative temperature": (
        dict(sampling=di.Sampling(temperature=-0.5)),
        "temperature must be a finite float32 number of at least 0, got -0.5",
    ),
    "temperature not a number": (
        dict(sampling=di.Sampling(temperature=np.array([1.0, np.nan]))),
        "temperature must be a finite float32 number of at least 0, got nan",
    ),
    "top_p above one": (
        dict(sampling=di.Sampling(top_p=1.2)),
        "top_p must be in (0, 1], got 1.2",
    ),
    "top_p of zero": (dict(sampling=di.Sampling(top_p=0.0)), "top_p must be in (0, 1], got 0.0"),
    "top_k of a half": (dict(sampling=di.Sampling(top_k=1.5)), "top_k must be an int32 number"),
    "a temperature too many": (
        dict(sampling=di.Sampling(temperature=np.ones(3))),
        "temperature must be a scalar or have shape (2,), got (3,)",
    ),
    "a seed too many": (
        dict(seeds=np.arange(3)),
        "seeds must be a scalar or have shape [2], got [3]",
    ),
    "seeds and key": (dict(seeds=1, key=jax.random.key(1)), "give seeds or key, not both"),
    "limit of zero": (
        dict(limits=[0, 3]),
        "limits must be between 1 and max_new_tokens = 4, got 0 to 3",
    ),
    "limit above the capacity": (
        dict(limits=[1, 5]),
        "limits must be between 1 and max_new_tokens = 4, got 1 to 5",
    ),
    "a limit too few": (dict(limits=[3]), "limits must be a scalar or have shape [2], got [1]"),
    "stop id outside the vocabulary": (
        dict(stop_ids=[7, 266]),
        "stop_ids must be token ids below 266 (or -1), got 7 to 266",
    ),
    "stop ids of three sequences": (
        dict(stop_ids=[[7], [8], [9]]),
        "stop_ids must have shape [K] or [2, K], got [3, 1]",
    ),
    "a stop id without a list": (
        dict(stop_ids=7),
        "stop_ids must have shape [K] or [2, K], got []",
    ),
    "drafts": (dict(draft="fixed"), "draft must be None in this version, got 'fixed'"),
}


@pytest.mark.parametrize(("arguments", "message"), GENERATIONS.values(), ids=GENERATIONS)
def test_generate(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(**arguments)


def test_stream():
    with pytest.raises(ValueError, match="burst must be at least 1, got 0"):
        next(di.stream(model(), TOKENS, burst=0))
    with pytest.raises(ValueError, match="temperature must be"):
        next(di.stream(model(), TOKENS, sampling=di.Sampling(temperature=-1)))


FORWARDS = {
    "unknown capture": (
        dict(capture=("streams", "stream")),
        "capture: unknown ['stream']; choose from ['attention', 'draft', ",
    ),
    "embeddings of another width": (
        dict(embeddings=np.zeros((B, S, 63), np.float32)),
        "embeddings must have shape [2, 5, 64], got [2, 5, 63]",
    ),
    "mask of another width": (
        dict(image_mask=np.zeros((B, S + 1), bool)),
        "image_mask must have shape [2, 5], got [2, 6]",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), FORWARDS.values(), ids=FORWARDS)
def test_forward(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        forward(**arguments)


def test_shapes_are_checked_inside_a_program_of_the_caller():
    """Values are not known there, shapes are."""
    with pytest.raises(ValueError, match=re.escape("lengths must have shape [2], got [3]")):
        jax.eval_shape(di.forward, model(), TOKENS, np.ones(3, np.int32))
    with pytest.raises(ValueError, match=re.escape("tokens must be integers of shape")):
        jax.eval_shape(di.generate, model(), TOKENS[0])


def test_the_gradient_of_a_quantised_model_names_trainable():
    def loss(model):
        return di.forward(model, TOKENS).logits.sum()

    with pytest.raises(TypeError, match=r"cannot be differentiated.*di\.trainable\(model"):
        jax.grad(loss, allow_int=True)(model())
    with pytest.raises(TypeError, match="got uint8"):  # JAX itself, before anything of ours runs
        jax.grad(loss)(model())


def test_the_gradient_of_8_bit_floats_names_trainable():
    """JAX would differentiate these, and round the gradients to 8 bits."""
    leaves, structure = jax.tree.flatten(model())
    at = next(i for i, leaf in enumerate(leaves) if leaf.dtype == jnp.float8_e4m3fn)

    def loss(codes):
        changed = jax.tree.unflatten(structure, [*leaves[:at], codes, *leaves[at + 1 :]])
        return di.forward(changed, TOKENS).logits.sum()

    with pytest.raises(TypeError, match=r"rounded to 8 bits: use di\.trainable\(model"):
        jax.grad(loss)(leaves[at])


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float8_e4m3fn])
def test_trainable(dtype):
    message = f"dtype must be a float of at least 16 bits, got {jnp.dtype(dtype)}"
    with pytest.raises(ValueError, match=message):
        di.trainable(model(), dtype)


def test_combine():
    params, rest = di.trainable(model())
    norm = "layers.1.attn.q_norm.weight"
    with pytest.raises(ValueError, match=re.escape(f"combine: missing weight '{norm}'")):
        di.combine({k: v for k, v in params.items() if k != norm}, rest)
    with pytest.raises(ValueError, match="combine: unknown weight 'new'"):
        di.combine(params | {"new": jnp.ones(3)}, rest)
    message = f"combine: weight '{norm}' must have shape [48], got [1]"
    with pytest.raises(ValueError, match=re.escape(message)):
        di.combine(params | {norm: jnp.ones(1)}, rest)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_numbers(tmp_path, value):
    good = testing.random_weights(config(), 1, False)

    def take(path):
        weight = good(path)
        return weight.at[2].set(value) if path == "layers.1.attn.wkv.weight" else weight

    save(tmp_path, config(), take)
    with pytest.raises(ValueError, match=r"layers\.1\.attn\.wkv\.weight"):
        di.load(tmp_path)


def test_load():
    with pytest.raises(FileNotFoundError, match="tinny is neither a checkpoint folder nor"):
        di.load("tinny")


def batch_rows():
    return di.rectangle(
        jnp.asarray(TOKENS), jnp.arange(B), jnp.zeros(B, jnp.int32), jnp.full(B, S),
        jnp.zeros((B, S), bool),
    )  # fmt: skip


def test_a_packed_cache_cannot_be_computed_with_yet():
    with pytest.raises(ValueError, match=re.escape("storage='packed' can be sized but not")):
        di.step(model(), di.init_cache(config(), B, S, S, storage="packed"), batch_rows())


def test_a_cache_for_fewer_rows_than_a_slot_has():
    """Its rings are too short: the first rows would be overwritten before they are read."""
    message = "a slot has 5 rows in this call, but the cache was made with rows_per_slot=4"
    with pytest.raises(ValueError, match=re.escape(message)):
        di.step(model(), di.init_cache(config(), B, S, S - 1), batch_rows())


CACHES = {
    "slots": (dict(slots=0), "init_cache: slots must be at least 1, got 0"),
    "capacity": (dict(capacity=0), "init_cache: capacity must be at least 1, got 0"),
    "rows": (dict(rows_per_slot=0), "init_cache: rows_per_slot must be at least 1, got 0"),
    "storage": (dict(storage="zip"), "init_cache: storage must be one of"),
    "page": (
        dict(page=7),
        "page must be a multiple of every compression ratio, got page=7 with ratio 2 in layer 0",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), CACHES.values(), ids=CACHES)
def test_init_cache(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        di.init_cache(config(), **dict(slots=2, capacity=9) | arguments)


def test_numerics():
    with pytest.raises(ValueError, match="Numerics.dtype must be one of .* got 'float16'"):
        di.Numerics(dtype="float16")
    with pytest.raises(ValueError, match="is for gradient checks: set quantize_activations=False"):
        di.Numerics(dtype="float64")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(seeds=[1.7, 2.2]), "seeds must be integers, got float64"),
        (dict(seeds=-1), "seeds must be between 0 and 4294967295, got -1 to -1"),
        (dict(limits=2.9), "limits must be integers, got float64"),
        (dict(stop_ids=[1.9]), "stop_ids must be integers, got float64"),
        (dict(max_new_tokens=4.0), "max_new_tokens must be an integer, got 4.0"),
        (dict(capacity=99.5), "capacity must be an integer, got 99.5"),
    ],
)
def test_counts_are_whole_numbers(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        di.generate(model(), [[1, 2], [3, 4]], **arguments)


def test_the_two_ways_to_sample_are_told_apart():
    with pytest.raises(TypeError, match="sampling must be a Sampling, got SamplingParams"):
        di.generate(model(), [[1, 2], [3, 4]], sampling=di.SamplingParams())


def test_a_cache_of_another_dtype_is_refused():
    cache = di.init_cache(model().config, 2, 64, 2, numerics=di.Numerics(dtype="float32"))
    rows = di.rectangle(jnp.ones((2, 2), jnp.int32), jnp.arange(2), jnp.zeros(2, jnp.int32),
                        jnp.full(2, 2), jnp.zeros((2, 2), bool))  # fmt: skip
    other = model().with_numerics(di.Numerics())
    with pytest.raises(ValueError, match="holds float32 and the model computes in bfloat16"):
        di.step(other, cache, rows)
