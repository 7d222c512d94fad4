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
def config(stages=0):
    return testing.tiny_config(
        num_hidden_layers=2,
        num_nextn_predict_layers=stages,
        dspark_target_layer_ids=(1,) * stages,
        dspark_block_size=3,
        compress_ratios=(2, 0, *(0,) * stages),
        kv_source_layer_ids=(0,),
        index_source_layer_ids=(0,),
        candidate_source_layer_id=-1,
        engram_layer_ids=(),
        max_position_embeddings=100,
    )


@functools.cache
def model(stages=0):
    weights = testing.random_weights(config(stages), 1, True)
    return di.Transformer(config(stages), di.Numerics(), weights)


def generate(tokens=TOKENS, lengths=None, stages=0, **arguments):
    return di.generate(model(stages), tokens, lengths, **{"max_new_tokens": 4} | arguments)


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
    "no sample": (dict(n=0), "n must be at least 1, got 0"),
    "half a sample": (dict(n=1.5), "n must be an integer, got 1.5"),
    "negative sample": (
        dict(sample=[0, -1], n=2),
        "sample must be between 0 and 2147483646, got -1 to 0",
    ),
    "sample of three sequences": (
        dict(sample=[0, 1, 2]),
        "sample must be a scalar or have shape [2], got [3]",
    ),
    "minimum above the capacity": (
        dict(min_new_tokens=[0, 5]),
        "min_new_tokens must be between 0 and max_new_tokens = 4, got 0 to 5",
    ),
    "negative minimum": (
        dict(min_new_tokens=-1),
        "min_new_tokens must be between 0 and max_new_tokens = 4, got -1 to -1",
    ),
    "minimum above the limit": (
        dict(min_new_tokens=[2, 3], limits=[4, 2]),
        "min_new_tokens must not exceed limits, got [2 3] for [4 2]",
    ),
    "no limits": (dict(limits=[]), "limits must be a scalar or have shape [2], got [0]"),
    "min_p above one": (dict(sampling=di.Sampling(min_p=1.5)), "min_p must be in [0, 1], got 1.5"),
    "repetition penalty of zero": (
        dict(sampling=di.Sampling(repetition_penalty=0)),
        "repetition_penalty must be a finite float32 number above 0, got 0",
    ),
    "presence penalty": (
        dict(sampling=di.Sampling(presence_penalty=[0, 3])),
        "presence_penalty must be in [-2, 2], got 3",
    ),
    "frequency penalty": (
        dict(sampling=di.Sampling(frequency_penalty=-2.5)),
        "frequency_penalty must be in [-2, 2], got -2.5",
    ),
    "bias outside the vocabulary": (
        dict(logit_bias={7: 1.0, 266: 1.0}),
        "logit_bias must be token ids below 266 (or -1), got 7 to 266",
    ),
    "bias of no token": (dict(logit_bias={"a": 1.0}), "logit_bias must be integers, got <U1"),
    "bias not a number": (
        dict(logit_bias={7: np.nan}),
        "a number of logit_bias must be finite in float32, or -inf to ban a token, got nan",
    ),
    "infinite bias": (
        dict(logit_bias=([[7], [8]], [[0.0], [np.inf]])),
        "a number of logit_bias must be finite in float32, or -inf to ban a token, got inf",
    ),
    "bias beyond float32": (
        dict(logit_bias={7: 1e39}),
        "finite in float32, or -inf to ban a token, got 1e+39",
    ),
    "bias of text": (
        dict(logit_bias={7: "a"}),
        "logit_bias must have rectangular lists of numbers, got ['a']",
    ),
    "a bias too few": (
        dict(logit_bias=([7, 8], [1.0])),
        "logit_bias must have a number for each of its token ids [2, 2], got [1]",
    ),
    "biases of three sequences": (
        dict(logit_bias=([[7], [8], [9]], [1.0])),
        "logit_bias must have shape [K] or [2, K], got [3, 1]",
    ),
    "biases of two lengths": (
        dict(logit_bias=([[7], [8, 9]], [1.0])),
        "logit_bias must be rectangular: pad its rows to one width",
    ),
    "forced beyond the capacity": (
        dict(forced=[7] * 5),
        "forced has 5 tokens, but there are at most max_new_tokens = 4",
    ),
    "forced outside the vocabulary": (
        dict(forced=[7, -1, 266]),
        "forced must be token ids below 266 (or -1), got -1 to 266",
    ),
    "forced negative": (dict(forced=[-2]), "forced must be token ids below 266 (or -1), got -2"),
    "forced without a list": (dict(forced=7), "forced must have shape [F] or [2, F], got []"),
    "negative alternatives": (dict(top_logprobs=-1), "top_logprobs must be at least 0, got -1"),
    "more alternatives than tokens": (
        dict(top_logprobs=267),
        "top_logprobs must be at most 266, the vocabulary, got 267",
    ),
    "unknown draft": (
        dict(draft="always", stages=1),
        "draft must be one of (None, 'fixed', 'scheduled'), got 'always'",
    ),
    "no drafter": (dict(draft="fixed"), "draft = 'fixed' needs a drafter, and the model has none"),
    "no drafts": (
        dict(draft="fixed", num_drafts=0, stages=1),
        "num_drafts must be at least 1, got 0",
    ),
    "more drafts than the block": (
        dict(draft="scheduled", num_drafts=4, stages=1),
        "num_drafts must be at most 3, the block that the drafter was trained for "
        "(dspark_block_size), got 4",
    ),
    "unknown coupling": (
        dict(draft="fixed", coupling="loose", stages=1),
        "coupling must be one of ('shared', 'rejection'), got 'loose'",
    ),
    **{
        f"{name} without drafts": (
            dict(stages=1, **{name: value}),
            f"{name} means nothing without drafts: give draft, or leave it",
        )
        for name, value in dict(num_drafts=2, coupling="shared", step_times="times").items()
    },
    "step times without a schedule": (
        dict(draft="fixed", step_times="times", stages=1),
        "step_times is for draft='scheduled', got draft='fixed'",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), GENERATIONS.values(), ids=GENERATIONS)
def test_generate(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(**arguments)


@pytest.mark.parametrize("logit_bias", [7, ([7], [1.0], [2.0]), np.ones((2, 3))])
def test_biases_of_another_type(logit_bias):
    message = r"logit_bias must be a dict of numbers by token id, or the pair \(ids, numbers\), got"
    with pytest.raises(TypeError, match=message):
        generate(logit_bias=logit_bias)


FILES = {
    "garbage": ("{", "does not hold step times: JSONDecodeError"),
    "another file": ('{"rows": [1]}', "does not hold step times: KeyError('seconds')"),
    "a list": ("[1, 2]", "does not hold step times: TypeError"),
    "falling rows": ('{"rows": [2, 1], "seconds": [1, 2]}', "rows must be ascending integers"),
    "text": ('{"rows": [1], "seconds": ["a"]}', "StepTimes needs two lists of numbers"),
}


@pytest.mark.parametrize(("content", "message"), FILES.values(), ids=FILES)
def test_files_that_hold_no_step_times(tmp_path, content, message):
    path = tmp_path / "times.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"times.json .*{re.escape(message)}"):
        generate(draft="scheduled", step_times=path, stages=1)


def test_step_times_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="no step times at .*none.json: write some with"):
        generate(draft="scheduled", step_times=str(tmp_path / "none.json"), stages=1)
    with pytest.raises(TypeError, match="step_times must be a StepTimes or the path .* got float"):
        generate(draft="scheduled", step_times=0.5, stages=1)


POINTS = {
    "none": ([], [], "rows and seconds of one length, at least 1, got [0] and [0]"),
    "a time too few": ([1, 2], [1.0], "of one length, at least 1, got [2] and [1]"),
    "no lists": (3, 4.0, "of one length, at least 1, got [] and []"),
    "falling rows": ([2, 1], [1.0, 1.0], "rows must be ascending integers from 1 to"),
    "the same rows twice": ([2, 2], [1.0, 1.0], "rows must be ascending integers from 1 to"),
    "no rows": ([0, 1], [1.0, 1.0], "ascending integers from 1 to 2**31 - 1, got [0 1]"),
    "half a row": ([1.5], [1.0], "ascending integers from 1 to 2**31 - 1, got [1.5]"),
    "more rows than int32": ([2**31], [1.0], "2**31 - 1, got [2147483648]"),
    "no time": ([1, 2], [0.0, 1.0], "seconds must be finite and above 0, got [0. 1.]"),
    "not a number": ([1], [np.nan], "seconds must be finite and above 0, got [nan]"),
    "for ever": ([1], [np.inf], "seconds must be finite and above 0, got [inf]"),
    "text": ([1], ["a"], "StepTimes needs two lists of numbers, got [1] and ['a']"),
}


@pytest.mark.parametrize(("rows", "seconds", "message"), POINTS.values(), ids=POINTS)
def test_points_of_step_times(rows, seconds, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        di.StepTimes.of(rows, seconds)


MEASUREMENTS = {
    "no sequence": (dict(batch=0), "batch must be at least 1, got 0"),
    "no context": (dict(context=0), "context must be at least 1, got 0"),
    "half a token": (dict(context=4.5), "context must be an integer, got 4.5"),
    "context too long": (dict(context=95), "context must be at most 94, to go on within"),
    "no round": (dict(repeats=0), "repeats must be at least 1, got 0"),
    "no drafts": (dict(num_drafts=0), "num_drafts must be at least 1, got 0"),
    "more drafts than the block": (dict(num_drafts=4), "num_drafts must be at most 3"),
    "no drafter": (dict(stages=0), "measure_step_times: the model has no drafter"),
}


@pytest.mark.parametrize(("arguments", "message"), MEASUREMENTS.values(), ids=MEASUREMENTS)
def test_measure_step_times(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        given = dict(stages=1, batch=2, context=4) | arguments
        di.measure_step_times(model(given.pop("stages")), **given)


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


def test_a_cache_for_drafts_and_a_model_that_makes_none():
    cache = di.init_cache(config(1), B, S, S, drafts=True)
    with pytest.raises(ValueError, match="step: the model has no drafter"):
        di.step(model(), cache, batch_rows())


CACHES = {
    "slots": (dict(slots=0), "init_cache: slots must be at least 1, got 0"),
    "capacity": (dict(capacity=0), "init_cache: capacity must be at least 1, got 0"),
    "rows": (dict(rows_per_slot=0), "init_cache: rows_per_slot must be at least 1, got 0"),
    "storage": (dict(storage="zip"), "init_cache: storage must be one of"),
    "drafts": (dict(drafts=True), "init_cache: drafts=True, but the configuration has no drafter"),
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
