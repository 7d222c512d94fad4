"""Claims about quantised weights (spec 5.1 to 5.5): every code, every scale, every shape."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden_files import ROOT, read

from pallas_kernels.layouts import FORMATS, QuantizedTensor, codes_shape, quantize, scale_shape

FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def to_numpy(array) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def slow_dequantize(codes: np.ndarray, scale: np.ndarray, format: str) -> np.ndarray:
    """float64 weights of one matrix, element by element from the text of spec 5.5."""
    if format == "fp4_1x32":
        rows, columns = codes.shape[0], 2 * codes.shape[1]
    else:
        rows, columns = codes.shape
    weight = np.zeros((rows, columns))
    for i, k in itertools.product(range(rows), range(columns)):
        power = 2.0 ** (int(scale[i // 32 if format == "fp8_32x32" else i, k // 32]) - 127)
        if format == "fp4_1x32":
            code = int(codes[i, k // 2]) >> 4 if k % 2 else int(codes[i, k // 2]) & 15
            value = FP4_VALUES[code & 7] * (-1 if code & 8 else 1)
        else:
            value = float(codes[i, k])
        weight[i, k] = value * power
    return weight


def random_weight(shape, seed=0) -> jax.Array:
    """Values over many binary orders, with an all-zero block and a negative zero."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 6, (*shape[:-1], 1))
    weight[..., :32, :32] = 0
    weight[..., 0, 0] = -0.0
    return jnp.asarray(weight, jnp.float32)


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("fp4", "fp4_1x32"),
        ("fp8.dense", "fp8_32x32"),
        ("fp8.dense_exact", "fp8_32x32"),
        ("fp8.rowwise", "fp8_1x32"),
    ],
)
@pytest.mark.parametrize("jitted", [False, True])
def test_golden_weight_formats_are_exact(name, format, jitted):
    golden = read(ROOT / "components" / "weight_formats.safetensors")
    codes, scale = golden[f"{name}.weight"], golden[f"{name}.scale"].view(np.uint8)
    codes = codes.view(np.uint8) if codes.dtype == np.int8 else codes
    tensor = QuantizedTensor(jnp.asarray(codes), jnp.asarray(scale), format)
    dequantize = QuantizedTensor.dequantize
    if jitted:
        dequantize = jax.jit(dequantize, static_argnums=1)
    assert tensor.shape == golden[f"{name}.f32"].shape
    np.testing.assert_array_equal(to_numpy(dequantize(tensor, "float32")), golden[f"{name}.f32"])
    np.testing.assert_array_equal(
        to_numpy(dequantize(tensor, "bfloat16")), golden[f"{name}.bf16"].astype(float)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", ["fp8_1x32", "fp4_1x32"])
def test_every_code_times_every_scale_is_exact(format, dtype):
    byte = np.tile(np.arange(256, dtype=np.uint8), (255, 1))
    codes = byte.view(ml_dtypes.float8_e4m3fn) if format == "fp8_1x32" else byte
    columns = 256 if format == "fp8_1x32" else 512
    scale = np.repeat(np.arange(255, dtype=np.uint8)[:, None], columns // 32, axis=1)
    exact = slow_dequantize(codes, scale, format)
    tensor = QuantizedTensor(jnp.asarray(codes), jnp.asarray(scale), format)
    value = np.asarray(tensor.dequantize(dtype))
    with np.errstate(over="ignore"):
        expected = exact.astype(value.dtype)  # products above the range are infinite
    # bfloat16 drops bits below 2^-133; NaN codes are refused by loaders.
    checked = np.isinf(expected) | (expected.astype(float) == exact)
    assert checked.mean() > 0.98
    np.testing.assert_array_equal(value[checked], expected[checked])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(70, 100), (33, 2), (2, 40, 66)])
def test_quantised_values_are_the_nearest_under_the_smallest_scale(format, shape):
    weight = random_weight(shape)
    tensor = quantize(weight, format)
    assert tensor.shape == shape
    assert tensor.codes.shape == codes_shape(format, shape)
    assert tensor.scale.shape == scale_shape(format, shape)
    assert tensor.nbytes == tensor.codes.nbytes + tensor.scale.nbytes
    largest = 6 if format == "fp4_1x32" else 448
    grid = FP4_VALUES if largest == 6 else _fp8_grid()
    for index in np.ndindex(shape[:-2]):
        matrix = to_numpy(weight)[index]
        codes, scale = np.asarray(tensor.codes)[index], np.asarray(tensor.scale)[index]
        dequantized = slow_dequantize(codes, scale, format)
        np.testing.assert_array_equal(to_numpy(tensor.dequantize())[index], dequantized)
        height = 32 if format == "fp8_32x32" else 1
        for i, k in itertools.product(*map(range, scale.shape)):
            block = matrix[i * height : (i + 1) * height, k * 32 : (k + 1) * 32]
            power = 2.0 ** (float(scale[i, k]) - 127)
            amax = max(np.abs(block).max(), 448 * 2.0**-120 if largest == 448 else 6 * 2.0**-126)
            assert power * largest >= amax > power / 2 * largest * (1 - 1e-6)
            steps = np.abs(np.abs(block)[..., None] / power - grid).min(axis=-1)
            rows = slice(i * height, (i + 1) * height)
            chosen = dequantized[rows, k * 32 : (k + 1) * 32]
            np.testing.assert_array_equal(np.abs(block - chosen) / power, steps)


def _fp8_grid() -> np.ndarray:
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    return codes.astype(float)


@pytest.mark.parametrize("format", FORMATS)
def test_quantising_dequantised_weights_changes_nothing(format):
    first = quantize(random_weight((96, 70)), format)
    second = quantize(first.dequantize(jnp.float32), format)
    np.testing.assert_array_equal(to_numpy(second.dequantize()), to_numpy(first.dequantize()))


def test_scales_of_the_appendix():
    def power(amax, format):
        weight = jnp.zeros((32, 32)).at[3, 5].set(-amax)
        return float(quantize(weight, format).scale[3 if format == "fp4_1x32" else 0, 0]) - 127

    fp8 = {1e-6: -28, 0.5: -9, 1.0: -8, 3.5: -7, 447.9: 0, 448: 0, 449: 1}
    fp4 = {0: -126, 0.75: -3, 3: -1, 6: 0, 6.1: 1}
    assert {amax: power(amax, "fp8_32x32") for amax in fp8} == fp8
    assert {amax: power(amax, "fp4_1x32") for amax in fp4} == fp4


def test_fp4_ties_go_to_the_even_code_and_signs_are_kept():
    values = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    expected = [0, 1, 1, 2, 2, 4, 4, 6]
    row = jnp.array([values + [-value for value in values]], jnp.float32)
    tensor = quantize(row, "fp4_1x32")
    value = np.asarray(tensor.dequantize(jnp.float32))[0]
    np.testing.assert_array_equal(value, expected + [-value for value in expected])
    assert np.signbit(value[8])


def test_stacked_experts_quantise_like_single_ones():
    weight = random_weight((3, 64, 96))
    for format in ("fp4_1x32", "fp8_32x32"):
        stack = quantize(weight, format)
        for expert in range(3):
            single = quantize(weight[expert], format)
            taken = stack.take(expert)
            np.testing.assert_array_equal(np.asarray(taken.scale), np.asarray(single.scale))
            np.testing.assert_array_equal(
                to_numpy(taken.dequantize()), to_numpy(single.dequantize())
            )


def test_rows_of_a_table_are_taken_with_their_scales():
    table = quantize(random_weight((50, 64)), "fp8_1x32")
    rows = jnp.array([49, 0, 33, 33])
    taken = jax.jit(lambda table, rows: table.take(rows).dequantize())(table, rows)
    np.testing.assert_array_equal(to_numpy(taken), to_numpy(table.dequantize())[np.array(rows)])
    with pytest.raises(ValueError, match="share blocks"):
        quantize(random_weight((64, 64)), "fp8_32x32").take(rows)


def test_wrong_requests_are_sentences():
    weight = random_weight((64, 64))
    with pytest.raises(ValueError, match='format "fp8" is unknown'):
        quantize(weight, "fp8")
    with pytest.raises(ValueError, match="63 columns are odd"):
        quantize(weight[:, :63], "fp4_1x32")
    with pytest.raises(ValueError, match="NaN or infinite"):
        quantize(weight.at[1, 1].set(jnp.nan), "fp8_32x32")
    tensor = quantize(weight, "fp4_1x32")
    with pytest.raises(ValueError, match="not to float16"):
        tensor.dequantize(jnp.float16)
    with pytest.raises(ValueError, match='layout "tpu" is unknown: choose one of'):
        QuantizedTensor(tensor.codes, tensor.scale, tensor.format, "tpu").dequantize()


def test_gradients_pass_by_a_quantised_weight_and_never_into_it():
    tensor = quantize(random_weight((64, 32)), "fp8_32x32")
    x = jnp.arange(32.0)

    def loss(x, tensor):
        return (tensor.dequantize(jnp.float32) @ x).sum()

    expected = to_numpy(tensor.dequantize()).sum(axis=0)
    for function in (loss, jax.jit(loss), jax.checkpoint(loss)):
        np.testing.assert_allclose(jax.grad(function)(x, tensor), expected, rtol=1e-6)
    with pytest.raises(TypeError, match="di.trainable"):
        jax.grad(loss, argnums=1, allow_int=True)(x, tensor)


def test_a_quantised_tensor_is_a_pytree_of_two_arrays():
    tensor = quantize(random_weight((64, 32)), "fp8_32x32")
    leaves, structure = jax.tree.flatten(tensor)
    assert [leaf.dtype for leaf in leaves] == [jnp.float8_e4m3fn, jnp.uint8]
    assert jax.tree.unflatten(structure, leaves).format == "fp8_32x32"
    abstract = jax.eval_shape(lambda: quantize(jnp.zeros((5, 64, 32)), "fp4_1x32"))
    assert abstract.shape == (5, 64, 32)
    assert abstract.nbytes == 5 * 64 * 17
