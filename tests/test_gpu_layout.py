"""Claims about layout "gpu": where every bit lies, and that nothing but speed depends on it."""

import functools
import gc
import itertools
import math
import struct
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.checkpoint.hf import Weights, save
from deepinfer_jax.checkpoint.tensor_names import FORMATS as FORMAT_OF_KIND
from deepinfer_jax.checkpoint.tensor_names import parameter_specs
from deepinfer_jax.decoding.loop import unpacked
from deepinfer_jax.layout import default_layout
from deepinfer_jax.testing import byte_tokenizer, random_weights, tiny_config, write_checkpoint
from deepinfer_jax.trainable import named_parameters
from pallas_kernels import gpu_layout
from pallas_kernels.gpu_layout import LARGEST_SCALE, SMALLEST_SCALE
from pallas_kernels.layouts import QuantizedTensor, codes_shape, quantize, scale_shape

FORMATS = tuple(gpu_layout.FORMS)
FP4_VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
HELD = np.arange(SMALLEST_SCALE, LARGEST_SCALE + 1, dtype=np.uint8)


def tensor_of(codes: np.ndarray, scale: np.ndarray, format: str) -> QuantizedTensor:
    """A plain weight from the bytes of its codes and scales."""
    codes = codes if format == "fp4_1x32" else codes.view(ml_dtypes.float8_e4m3fn)
    return QuantizedTensor(jnp.asarray(codes), jnp.asarray(scale), format)


def random_tensor(format: str, shape: tuple[int, ...], seed: int = 0) -> QuantizedTensor:
    """Every code but NaN, both zeros among them, under every scale byte that the layout holds."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, codes_shape(format, shape), np.uint8)
    if format == "fp8_32x32":
        codes[codes & 0x7F == 0x7F] &= 0x80
    scale = rng.permutation(np.resize(HELD, math.prod(scale_shape(format, shape))))
    return tensor_of(codes, scale.reshape(scale_shape(format, shape)), format)


def zeros(format: str, shape: tuple[int, ...], scale: np.ndarray) -> QuantizedTensor:
    """Zeros of both signs under any scale bytes."""
    signs = 0x88 if format == "fp4_1x32" else 0x80
    codes = np.random.default_rng(1).integers(0, 256, codes_shape(format, shape), np.uint8) & signs
    return tensor_of(codes, np.resize(scale, scale_shape(format, shape)), format)


def bits(array) -> np.ndarray:
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def assert_same_bits(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(bits(a), bits(b))


# The arrangement itself


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("lead", [(), (3,), (2, 2)])
def test_codes_and_scales_come_back_to_the_bit(format, lead):
    shape = (*lead, 128, 1024)
    plain = random_tensor(format, shape)
    assert len(np.unique(bits(plain.codes))) == (256 if format == "fp4_1x32" else 254)
    assert set(np.unique(plain.scale)) == set(HELD)
    gpu = plain.to_layout("gpu")
    assert (gpu.layout, gpu.shape, gpu.ndim) == ("gpu", shape, len(shape))
    assert (gpu.codes.shape, gpu.scale.shape) == gpu_layout.chunks(format, shape)
    assert gpu.codes.dtype == gpu.scale.dtype == jnp.uint32
    assert gpu.to_layout("gpu") is gpu
    assert_same_bits(gpu.to_layout("plain"), plain)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_values_do_not_depend_on_the_layout(format, dtype):
    plain = random_tensor(format, (2, 64, 512), seed=2)
    assert_same_bits(plain.to_layout("gpu").dequantize(dtype), plain.dequantize(dtype))


@pytest.mark.parametrize("format", FORMATS)
def test_blocks_of_zeros_may_have_any_scale(format):
    plain = zeros(format, (512, 512), np.arange(255, dtype=np.uint8))
    gpu = plain.to_layout("gpu")
    assert_same_bits(gpu.dequantize(jnp.float32), plain.dequantize(jnp.float32))
    back = gpu.to_layout("plain")
    np.testing.assert_array_equal(bits(back.codes), bits(plain.codes))
    np.testing.assert_array_equal(back.scale, 127)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("place", [(0, 0), (63, 31), (70, 290), (127, 511)])
def test_scales_of_the_smallest_code_are_held_or_refused(format, place):
    empty = zeros(format, (128, 512), HELD)
    row, column = place
    codes, scale = bits(empty.codes).copy(), np.array(empty.scale)
    codes[row, column // 2 if format == "fp4_1x32" else column] |= 1
    block = (row if format == "fp4_1x32" else row // 32, column // 32)
    for byte in (SMALLEST_SCALE, LARGEST_SCALE):
        scale[block] = byte
        plain = tensor_of(codes, scale, format)
        assert_same_bits(plain.to_layout("gpu").dequantize("float32"), plain.dequantize("float32"))
        assert plain.to_layout("gpu").to_layout("plain").scale[block] == byte
    for byte in (0, SMALLEST_SCALE - 1, LARGEST_SCALE + 1, 254):
        scale[block] = byte
        with pytest.raises(ValueError, match=rf"scale bytes from 40 to 150; this {format} weight"):
            tensor_of(codes, scale, format).to_layout("gpu")


@pytest.mark.parametrize(
    ("format", "shape"),
    [
        ("fp4_1x32", (32, 256)),
        ("fp4_1x32", (64, 128)),
        ("fp8_32x32", (96, 256)),
        ("fp8_32x32", (2, 64, 320)),
        ("fp8_1x32", (64, 256)),
    ],
)
def test_other_shapes_and_formats_are_refused(format, shape):
    tensor = quantize(jnp.ones(shape), format)
    assert tensor.fits("plain")
    assert not tensor.fits("gpu")
    with pytest.raises(ValueError, match=rf"multiples of 64 .* of 256, not {format} \[{shape[0]},"):
        tensor.to_layout("gpu")


def test_unknown_layouts_are_refused():
    tensor = random_tensor("fp4_1x32", (64, 256))
    assert not tensor.fits("tpu")
    with pytest.raises(ValueError, match='layout "tpu" is unknown: choose one of'):
        tensor.to_layout("tpu")


@pytest.mark.parametrize("format", FORMATS)
def test_experts_are_taken_from_a_stack(format):
    plain = random_tensor(format, (4, 64, 256))
    gpu = plain.to_layout("gpu")
    for index in (3, slice(1, 3), np.array([2, 0])):
        taken = gpu.take(index)
        assert taken.shape == plain.take(index).shape
        assert_same_bits(taken.to_layout("plain"), plain.take(index))
    with pytest.raises(ValueError, match=f"{format} weight in layout gpu share blocks"):
        gpu.take(0).take(0)


def test_memory_is_that_of_the_released_files():
    fp4, fp8 = (random_tensor(format, (128, 512)) for format in ("fp4_1x32", "fp8_32x32"))
    assert fp4.to_layout("gpu").nbytes == fp4.nbytes
    assert fp8.nbytes < fp8.to_layout("gpu").nbytes < 1.01 * fp8.nbytes


def test_gradients_pass_by_a_rearranged_weight():
    x = jnp.arange(256.0)
    plain = quantize(jax.random.normal(jax.random.key(0), (2, 64, 256)), "fp8_32x32")

    def loss(x, tensor):
        return (tensor.dequantize(jnp.float32) @ x).sum()

    expected = np.asarray(plain.dequantize(jnp.float32)).sum((0, 1))
    gradient = jax.jit(jax.grad(loss))(x, plain.to_layout("gpu"))
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


# The arrangement, bit by bit from the text at the head of gpu_layout.py


def rotate(word: int, by: int) -> int:
    return (word << by | word >> (32 - by)) & 0xFFFFFFFF


@functools.cache
def float_of(half: int) -> tuple[float, float]:
    """A bfloat16 pattern's value and sign."""
    (value,) = struct.unpack("<f", struct.pack("<I", half << 16))
    return value, math.copysign(1, value)


def code_values(tensor: QuantizedTensor) -> np.ndarray:
    """float64 values of the codes [O, I], without scales."""
    if tensor.format == "fp8_32x32":
        return np.asarray(tensor.codes).astype(float)
    byte = np.asarray(tensor.codes)
    codes = np.stack([byte & 15, byte >> 4], axis=-1).reshape(len(byte), -1)
    return np.copysign(np.array(FP4_VALUES)[codes & 7], np.where(codes & 8, -1.0, 1.0))


@pytest.mark.parametrize("format", FORMATS)
def test_every_bit_lies_where_the_text_says(format):
    plain = random_tensor(format, (128, 512), seed=3)
    gpu = plain.to_layout("gpu")
    form, fp4 = gpu_layout.FORMS[format], format == "fp4_1x32"
    rows, columns = slice(64, 128), slice(256, 512)  # those of chunk [1, 1]
    value = code_values(plain)[rows, columns]
    scale = np.asarray(plain.scale).astype(int)
    scale = (scale[rows] if fp4 else scale[2:])[:, 8:]
    words = np.asarray(gpu.codes)[1, 1].reshape(-1).tolist()
    bytes_ = np.asarray(gpu.scale)[1, 1].astype("<u4").view(np.uint8).tolist()
    powers = {"fp4_1x32": -126, "fp8_32x32": -120}

    for warp, g, c, h, b, s, p, e in itertools.product(
        range(4), range(8), range(4), range(2), range(8), range(2), range(2), range(2)
    ):
        row, column = 16 * warp + 8 * h + g, 32 * b + 16 * s + 8 * p + 2 * c + e
        thread = 32 * warp + 4 * g + c
        w, pair = (2 * b + h, 2 * s + p) if fp4 else (4 * b + 2 * s + h, p)
        word = words[512 * (w // 4) + 4 * thread + w % 4]
        extracted = 0
        for by, mask in form.pairs[pair]:
            extracted |= rotate(word, by) & (mask << 16 | mask)
        found, code = float_of(extracted >> 16 * e & 0xFFFF), value[row, column]
        assert found == (code * 2.0 ** powers[format], math.copysign(1, code))

        exponent = scale[row, b] if fp4 else scale[row // 32, b]
        if fp4:
            places = [8 * (2 * (8 * warp + g) + h) + b]
        else:
            places = [8 * (4 * warp + copy) + b for copy in range(4)]
        for place in places:
            weight = found[0] * 2.0 ** (bytes_[place] - 127)
            assert weight * gpu_layout.RESTORE == code * 2.0 ** (exponent - 127)
            assert bytes_[place] == exponent - powers[format] - 26


@pytest.mark.parametrize("format", FORMATS)
def test_pairs_share_a_word_without_overlap_or_gap(format):
    form = gpu_layout.FORMS[format]
    places = [
        rotate(mask << 16 | mask, 32 - by if by else 0) for pair in form.pairs for by, mask in pair
    ]
    assert sum(places) == functools.reduce(int.__or__, places) == 0xFFFFFFFF
    width = 4 if format == "fp4_1x32" else 8
    assert all(sum(mask.bit_count() for _, mask in pair) == width for pair in form.pairs)


@pytest.mark.parametrize("format", FORMATS)
def test_multipliers_are_normal_bfloat16_numbers(format):
    bias = gpu_layout.FORMS[format].bias
    assert SMALLEST_SCALE + bias > 0
    assert LARGEST_SCALE + bias < 255


# Models


@pytest.fixture(scope="module")
def config():
    """One layer whose experts and query projection fit, and whose other weights do not."""
    return tiny_config(
        hidden_size=256,
        moe_intermediate_size=256,
        q_lora_rank=64,
        n_routed_experts=3,
        num_hidden_layers=1,
        compress_ratios=(0,),
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        candidate_source_layer_id=-1,
        engram_layer_ids=(0,),
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        quantized=True,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, config, seed=4)
    return path


@pytest.fixture(scope="module")
def plain(folder):
    return di.load(folder)


@pytest.fixture(scope="module")
def gpu(folder):
    return di.load(folder, layout="gpu")


def layouts(model) -> dict[str, str]:
    weights = named_parameters(model)
    return {n: w.layout for n, w in weights.items() if isinstance(w, QuantizedTensor)}


def test_load_rearranges_what_fits(plain, gpu, config):
    quantized = {n: s for n, s in parameter_specs(config).items() if s.kind in FORMAT_OF_KIND}
    fitting = {
        name
        for name, spec in quantized.items()
        if spec.kind != "table" and spec.shape[-2] % 64 == 0 and spec.shape[-1] % 256 == 0
    }
    assert {n.split(".", 2)[2] for n in fitting} == {
        "attn.wq_a.weight",
        *(f"ffn.{e}.w{i}.weight" for e in ("experts", "shared_experts") for i in (1, 2, 3)),
    }
    assert layouts(gpu) == {name: "gpu" if name in fitting else "plain" for name in quantized}
    assert layouts(plain) == dict.fromkeys(quantized, "plain")


def test_to_layout_there_and_back(plain, gpu):
    assert_same_bits(di.to_layout(plain, "gpu"), gpu)
    assert_same_bits(di.to_layout(gpu, "plain"), plain)
    assert_same_bits(di.to_layout(gpu, "gpu"), gpu)


def test_loading_holds_no_second_copy(folder, monkeypatch):
    read, take = [], Weights.take

    def live():
        return sum(array.nbytes for array in jax.live_arrays())

    gc.collect()
    before = live()

    def watched(weights, path):
        assert live() - before <= 1.01 * sum(read) + 1000
        weight = take(weights, path)
        read.append(sum(leaf.nbytes for leaf in jax.tree.leaves(weight)))
        return weight

    monkeypatch.setattr(Weights, "take", watched)
    model = di.load(folder, layout="gpu")
    assert len(read) == len(named_parameters(model))


def test_saving_writes_the_bytes_that_were_read(gpu, folder, config, tmp_path):
    save(tmp_path, config, named_parameters(gpu).__getitem__)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_float_weights_are_the_same(plain, gpu):
    (expected, _), (weights, rest) = di.trainable(plain), di.trainable(gpu)
    assert_same_bits(weights, expected)
    assert_same_bits(di.trainable(di.combine(weights, rest))[0], expected)
    assert_same_bits(di.quantize(gpu), gpu)
    assert_same_bits(unpacked(gpu), unpacked(plain))


def test_the_plain_program_computes_with_rearranged_weights(plain, gpu):
    numerics = di.Numerics("float32", quantize_activations=False, quantize_cache=False)
    tokens = np.random.default_rng(0).integers(3, 250, (2, 9))
    expected, logits = (
        di.forward(model.with_numerics(numerics), tokens).logits for model in (plain, gpu)
    )
    np.testing.assert_allclose(logits, expected, atol=1e-4 * float(jnp.std(expected)))


def test_a_weight_with_other_scales_stays_plain_and_is_named(config, tmp_path):
    name, good = "layers.0.ffn.experts.w2.weight", random_weights(config, 4)

    def take(path):
        weight = good(path)
        if path != name:
            return weight
        return QuantizedTensor(weight.codes, weight.scale.at[1, 255, 7].set(30), weight.format)

    save(tmp_path, config, take)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    message = rf"{name} stays in layout plain: .* from 40 to 150"
    with pytest.warns(UserWarning, match=message) as warned:
        model = di.load(tmp_path, layout="gpu")
    assert len(warned) == 1
    assert layouts(model)[name] == "plain"
    assert layouts(model)[name.replace("w2", "w1")] == "gpu"
    with pytest.warns(UserWarning, match=message):
        again = di.to_layout(di.load(tmp_path, layout="plain"), "gpu")
    assert_same_bits(again, model)


def test_wrong_layouts_of_models_are_sentences(plain):
    with pytest.raises(ValueError, match=r"load: layout must be None or one of .* got 'tpu'"):
        di.load("no such folder", layout="tpu")
    with pytest.raises(ValueError, match=r"to_layout: layout must be one of .* got None"):
        di.to_layout(plain, None)


@pytest.mark.parametrize(
    ("platform", "capability", "dtype", "layout"),
    [
        ("gpu", "9.0", "bfloat16", "gpu"),
        ("gpu", "9.0", "float32", "plain"),
        ("gpu", "8.9", "bfloat16", "plain"),
        ("gpu", "10.0", "bfloat16", "plain"),
        ("gpu", "gfx942", "bfloat16", "plain"),
        ("cpu", None, "bfloat16", "plain"),
    ],
)
def test_the_default_layout_is_gpu_where_its_kernels_run(
    monkeypatch, platform, capability, dtype, layout
):
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert default_layout(di.Numerics(dtype=dtype)) == layout
