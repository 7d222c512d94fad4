"""What must also hold on a GPU, with its larger row tiles. Run with `-m gpu` on such a machine."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import case, relative_error
from test_generate import inside_loops

import deepinfer_jax as di
from pallas_kernels.gpu_layout import LARGEST_SCALE, SMALLEST_SCALE
from pallas_kernels.grouped_matmul import linear, runs_here
from pallas_kernels.layouts import QuantizedTensor, quantize

pytestmark = pytest.mark.gpu
LENGTH, ROWS = 200, 160


@pytest.fixture(autouse=True)
def needs_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU")


@pytest.mark.parametrize("name", ["flash_mini", "hier", "quantised"])
def test_goldens_in_float32(name):
    numerics = di.Numerics(dtype="float32", quantize_activations=False)
    model, golden = di.load(case(name).folder, numerics=numerics), case(name).files["f32"]
    lengths = case(name).real.sum(axis=1)
    logits = np.asarray(di.forward(model, golden["input_ids"], lengths).logits)
    assert relative_error(logits[case(name).real], golden["logits"][case(name).real]) < 1e-5


@jax.jit
def run(model, cache, tokens, slot, position):
    rows = di.Rows(tokens, slot, position, jnp.zeros(tokens.shape, bool))
    hidden, cache, _ = di.step(model, cache, rows)
    return di.logits(model, hidden), cache


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_cut_gives_the_same_bits(dtype):
    round_trips = dtype == "bfloat16"
    numerics = di.Numerics(dtype, round_trips, round_trips, reproducible=True)
    model = di.load("tiny", numerics=numerics)
    rng = np.random.default_rng(0)
    text = rng.integers(3, 4000, LENGTH, dtype=np.int32)

    def in_pieces(cut, slot):
        cache = di.init_cache(model.config, 3, 256, ROWS, numerics=numerics)
        logits, start = [], 0
        for count in cut:
            tokens, slots, position = np.zeros((3, ROWS), np.int32)
            tokens[:count] = text[start : start + count]
            slots[:] = -1
            slots[:count] = slot
            position[:count] = np.arange(start, start + count)
            out, cache = run(model, cache, tokens, slots, position)
            logits.append(np.asarray(out)[:count])
            start += count
        return np.concatenate(logits)

    expected = in_pieces([150, 50], slot=1)
    for slot in (0, 2):
        ends = np.sort(rng.choice(np.arange(1, LENGTH), 6, replace=False))
        cut = np.diff([0, *ends, LENGTH])
        cut = [c for size in cut for c in ([size] if size <= ROWS else [ROWS, size - ROWS])]
        np.testing.assert_array_equal(in_pieces(cut, slot), expected)
    np.testing.assert_array_equal(in_pieces([1] * LENGTH, slot=1), expected)
    fast = model.with_numerics(dataclasses.replace(numerics, reproducible=False))
    error = relative_error(np.asarray(di.forward(fast, text[None]).logits)[0], expected)
    assert error < (1e-5 if dtype == "float32" else 0.2)


def prompts(model, batch, length=24):
    """Pieces of Python, as the model likes them, so that drafts are accepted."""
    text = (Path(di.__file__).parent / "decoding" / "loop.py").read_text()
    ids = np.array(di.load_tokenizer("tiny").encode(text).ids, np.int32)
    return ids[np.linspace(1, len(ids) - length, batch).astype(int)[:, None] + np.arange(length)]


@pytest.mark.parametrize("draft", ["fixed", "scheduled"])
def test_drafts_give_the_undrafted_text_to_the_bit(draft):
    model = di.load("tiny", numerics=di.Numerics(reproducible=True))
    temperature = np.array([0, 0.8] * 4, np.float32)
    arguments = dict(max_new_tokens=24, sampling=di.Sampling(temperature), ignore_eos=True)
    plain = di.generate(model, prompts(model, 8), **arguments)
    found = di.generate(model, prompts(model, 8), draft=draft, **arguments)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    np.testing.assert_array_equal(found.logprobs, plain.logprobs)
    assert found.stats.steps.sum() < 0.9 * found.lengths.sum()


def test_drafts_give_the_undrafted_tokens_in_fast_float32():
    """Two programs for two numbers of rows; neither copies a cache inside the loop."""
    numerics = di.Numerics("float32", False, False, reproducible=False)
    model = di.load("tiny", numerics=numerics)
    arguments = dict(max_new_tokens=24, ignore_eos=True)
    times = di.StepTimes.of([8 * 3, 8 * 6], [1.0, 1.4])
    plain = di.generate(model, prompts(model, 8), **arguments)
    program = jax.jit(
        lambda model, tokens: di.generate(
            model, tokens, draft="scheduled", step_times=times, **arguments
        )
    )
    compiled = program.lower(model, prompts(model, 8)).compile()
    found = compiled(model, prompts(model, 8))
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    assert found.stats.steps.sum() < 0.9 * found.lengths.sum()
    pools = {f"f32[{','.join(map(str, pool.shape))}]" for pool in jax.tree.leaves(
        jax.eval_shape(lambda: di.init_cache(model.config, 8, 48, 24, numerics=numerics).entries)
    )}  # fmt: skip
    inside = inside_loops(compiled.as_text()).splitlines()
    copies = [line for line in inside if re.search(r" copy(-start)?\(", line)]
    assert not [line for line in copies if any(pool in line for pool in pools)]


def hopper_only():
    if not runs_here():
        pytest.skip("no Hopper GPU")


@pytest.mark.parametrize("format", ["fp4_1x32", "fp8_32x32"])
def test_every_code_and_scale_is_unpacked_exactly(format):
    """Rows of the identity read single columns of a weight: the product is the weight itself."""
    hopper_only()
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (128, 256 if format == "fp4_1x32" else 512), dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] -= 1 if format == "fp8_32x32" else 0
    rows = 128 if format == "fp4_1x32" else 4
    scale = rng.integers(SMALLEST_SCALE, LARGEST_SCALE + 1, (rows, 16))
    codes = jnp.asarray(codes)
    if format == "fp8_32x32":
        codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    weight = QuantizedTensor(codes, jnp.asarray(scale, jnp.uint8), format)
    identity = jnp.eye(512, dtype=jnp.bfloat16)
    product = linear(identity, weight.to_layout("gpu"), implementation="gpu")
    expected = np.asarray(weight.dequantize().T.astype(jnp.float32))
    np.testing.assert_array_equal(np.asarray(product.astype(jnp.float32)), expected)


def test_rows_keep_their_bits_beside_any_others():
    hopper_only()
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((1280, 1024)).astype(np.float32)
    weight = quantize(jnp.asarray(weight), "fp8_32x32").to_layout("gpu")
    x = jnp.asarray(rng.standard_normal((300, 1024)), jnp.bfloat16)
    every = np.asarray(linear(x, weight, implementation="gpu").astype(jnp.float32))
    for first, count in ((0, 1), (7, 9), (31, 33), (100, 200)):
        some = linear(x[first : first + count], weight, implementation="gpu")
        np.testing.assert_array_equal(
            np.asarray(some.astype(jnp.float32)), every[first : first + count]
        )
