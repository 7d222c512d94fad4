"""Claims about released checkpoints (spec 12): what round-trips and what is refused by name."""

import json
import struct
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden_files import CASES, ROOT, dequantize, read
from safetensors import safe_open

from deepinfer_jax.checkpoint.hf import open_checkpoint, save
from deepinfer_jax.checkpoint.tensor_names import parameter_specs, released_names
from deepinfer_jax.config import Config, VisionConfig
from deepinfer_jax.testing import random_weights, tiny_config, write_checkpoint
from pallas_kernels.layouts import QuantizedTensor

pytestmark = pytest.mark.filterwarnings("ignore:.*rule 1[56]")

BF16 = ml_dtypes.bfloat16
NAMES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(np.int32): "I32",
    np.dtype(np.int8): "I8",
    np.dtype(BF16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0",
}


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A plain safetensors writer, independent of the library's."""
    header, offset = {}, 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    head = json.dumps(header).encode()
    body = b"".join(array.tobytes() for array in tensors.values())
    path.write_bytes(struct.pack("<Q", len(head)) + head + body)


def leaves(weight) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(weight)]


def assert_same_bits(first, second):
    assert type(first) is type(second)
    for a, b in zip(leaves(first), leaves(second), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()


@pytest.fixture(scope="module")
def quantised() -> dict[str, np.ndarray]:
    """The tensors of a checkpoint in the released formats."""
    return read(ROOT / "quantised" / "model.safetensors")


@pytest.fixture
def checkpoint(tmp_path, quantised):
    """Writes a changed copy of the quantised golden checkpoint and opens it."""

    def change(**changes):
        tensors = {**quantised, **changes}
        write(
            tmp_path / "model.safetensors",
            {name: array for name, array in tensors.items() if array is not None},
        )
        return open_checkpoint(tmp_path)

    return change


@pytest.fixture(scope="module")
def config() -> Config:
    return Config.read(ROOT / "quantised")


def nan_in(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.reshape(-1)[array.size // 2] = np.nan
    return array


@pytest.mark.parametrize("case", CASES)
def test_golden_checkpoints_are_read_exactly(case):
    stored = read(ROOT / case / "model.safetensors")
    weights = open_checkpoint(ROOT / case).check(Config.read(ROOT / case))
    for path, spec in weights.specs.items():
        weight = weights.take(path)
        assert weight.shape == spec.shape
        names = released_names(path, spec)
        if isinstance(weight, QuantizedTensor):
            value = np.asarray(weight.dequantize(jnp.float32))
            expected = [
                dequantize(stored[name], stored[name.removesuffix("weight") + "scale"])
                for name in names
            ]
        else:
            value = np.asarray(weight)
            assert value.dtype == stored[names[0]].dtype
            expected = [stored[name] for name in names]
        np.testing.assert_array_equal(value, np.stack(expected).reshape(spec.shape))


@pytest.mark.parametrize("quantized", [False, True])
def test_a_saved_checkpoint_is_read_back_to_the_last_bit(tmp_path, quantized):
    config = tiny_config(
        quantized=quantized,
        vision_config=VisionConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2),
    )
    take = random_weights(config, seed=3)
    save(tmp_path, config, take)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert Config.read(tmp_path) == config
    weights = open_checkpoint(tmp_path).check(config)
    assert weights.parts == {"backbone", "engram_table", "drafter", "vision"}
    for path in parameter_specs(config):
        assert_same_bits(weights.take(path), take(path))


def test_saved_names_and_dtypes_are_the_released_ones(tmp_path):
    write_checkpoint(tmp_path, tiny_config(), seed=1, quantized=True)
    stored = read(tmp_path / "model.safetensors")
    kinds = {name: NAMES[array.dtype] for name, array in stored.items()}
    assert kinds["layers.0.attn.wq_a.weight"] == "F8_E4M3"
    assert kinds["layers.0.attn.wq_a.scale"] == "F8_E8M0"
    assert kinds["layers.6.ffn.experts.5.w2.weight"] == "I8"
    assert kinds["layers.1.engram.embed.weight"] == "F8_E4M3"
    assert stored["layers.1.engram.embed.scale"].shape[1] == 1
    assert kinds["layers.0.attn.attn_sink"] == "F32"
    assert kinds["embed.weight"] == "BF16"
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        assert set(file.keys()) == set(stored)
    assert Config.read(tmp_path).quantized


def test_every_tensor_lands_in_its_own_place(tmp_path):
    config = tiny_config(quantized=False)
    specs = parameter_specs(config)
    marks, tensors = {}, {}
    for path, spec in specs.items():
        for name in released_names(path, spec):
            shape = spec.shape if name == path else spec.shape[1:]
            marks[name] = len(marks) + 1.0
            tensors[name] = np.full(shape, marks[name], np.float32)
    write(tmp_path / "model.safetensors", tensors)
    weights = open_checkpoint(tmp_path).check(config)
    for path, spec in specs.items():
        names = released_names(path, spec)
        value = np.asarray(weights.take(path)).reshape(len(names), -1)
        assert (value == np.array([[marks[name]] for name in names])).all()


def shard(folder: Path, tensors: dict[str, np.ndarray], count: int = 3) -> dict:
    """Spreads tensors over files and returns the index, which is not written."""
    names, index = list(tensors), {}
    for number in range(count):
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        part = names[number::count]
        write(folder / file, {name: tensors[name] for name in part})
        index |= dict.fromkeys(part, file)
    return {"metadata": {}, "weight_map": index}


def write_index(folder: Path, index: dict) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_sharded_checkpoint_equals_a_single_file(tmp_path, quantised, config):
    write_index(tmp_path, shard(tmp_path, quantised))
    weights = open_checkpoint(tmp_path).check(config)
    single = open_checkpoint(ROOT / "quantised").check(config)
    for path in single.specs:
        assert_same_bits(weights.take(path), single.take(path))


def test_faults_of_the_index_are_named(tmp_path, quantised):
    index = shard(tmp_path, quantised)
    second = "model-00002-of-00003.safetensors"
    name = next(name for name, file in index["weight_map"].items() if file == second)

    write_index(tmp_path, {"metadata": {}})
    with pytest.raises(ValueError, match="has no weight_map"):
        open_checkpoint(tmp_path)

    write_index(tmp_path, {"weight_map": index["weight_map"] | {"ghost.weight": second}})
    with pytest.raises(ValueError, match="1 tensors that no shard holds: ghost.weight"):
        open_checkpoint(tmp_path)

    write_index(
        tmp_path, {"weight_map": {k: v for k, v in index["weight_map"].items() if k != name}}
    )
    with pytest.raises(ValueError, match=f"{second} holds {name}, but .* places it in None"):
        open_checkpoint(tmp_path)

    write_index(tmp_path, {"weight_map": index["weight_map"] | {"x": "../x.safetensors"}})
    with pytest.raises(ValueError, match="outside of its directory"):
        open_checkpoint(tmp_path)

    write_index(tmp_path, index)
    third = "model-00003-of-00003.safetensors"
    write(tmp_path / third, {**read(tmp_path / third), name: quantised[name]})
    with pytest.raises(ValueError, match=f"{name} occurs in {second} and in {third}"):
        open_checkpoint(tmp_path)

    (tmp_path / second).unlink()
    with pytest.raises(FileNotFoundError, match=f"names the shard {second}, which is missing"):
        open_checkpoint(tmp_path)


def test_a_directory_without_weights_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds neither model.safetensors nor"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("cut", [0, 5, 100, -1])
def test_a_truncated_file_is_named(tmp_path, quantised, cut):
    write(tmp_path / "model.safetensors", quantised)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:cut])
    with pytest.raises(ValueError, match=r"model.safetensors is truncated"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"{not json", "damaged header"),
        (b"[1, 2]", "not a JSON object"),
        (b'{"a": {"dtype": "F32"}}', "entry of a is not understood"),
        (b'{"a": {"dtype": "F12", "shape": [1], "data_offsets": [0, 4]}}', "not understood"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "a needs 8 bytes"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}', "a needs 4 bytes"),
        (b'{"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, "a": 1}', "a occurs twice"),
    ],
)  # fmt: skip
def test_a_damaged_header_is_explained(tmp_path, header, reason):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ValueError, match=f"model.safetensors.*{reason}"):
        open_checkpoint(tmp_path)


def test_missing_and_unexpected_tensors_are_both_listed(checkpoint, config):
    extra = {f"layers.0.extra{i}": np.zeros(1, np.float32) for i in range(6)}
    found = checkpoint(**extra, **{"layers.0.attn.attn_sink": None})
    with pytest.raises(ValueError) as caught:
        found.check(config)
    assert "1 tensors are missing: layers.0.attn.attn_sink" in str(caught.value)
    assert "6 tensors are unexpected: layers.0.extra0, layers.0.extra1" in str(caught.value)
    assert str(caught.value).endswith("and 2 more")


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.ffn.experts.3.w2.weight",
        "layers.2.ffn.experts.0.w1.scale",
        "layers.1.engram.embed.scale",
        "mtp.1.ffn.experts.2.w3.weight",
        "mtp.0.main_proj.scale",
        "norm.weight",
    ],
)
def test_one_missing_tensor_is_an_error(checkpoint, config, name):
    with pytest.raises(ValueError, match=f"1 tensors are missing: {name}"):
        checkpoint(**{name: None}).check(config)


def test_an_expert_beyond_the_last_one_is_unexpected(checkpoint, config, quantised):
    extra = {"layers.0.ffn.experts.4.w1.weight": quantised["layers.0.ffn.experts.3.w1.weight"]}
    with pytest.raises(ValueError, match=r"unexpected: layers.0.ffn.experts.4.w1.weight"):
        checkpoint(**extra).check(config)


def test_a_scale_of_an_unquantised_weight_is_unexpected(checkpoint, config, quantised):
    name = "layers.0.attn.wq_a.weight"
    bf16 = quantised[name].astype(BF16)
    with pytest.raises(ValueError, match=r"unexpected: layers.0.attn.wq_a.scale"):
        checkpoint(**{name: bf16}).check(config)
    plain = checkpoint(**{name: bf16, "layers.0.attn.wq_a.scale": None}).check(config)
    assert plain.take(name).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("embed", lambda a: a.astype(np.float16), "embed.weight is stored as F16"),
        ("layers.0.attn.attn_sink", lambda a: a.astype(BF16), "attn_sink is stored as BF16"),
        ("layers.0.attn.wkv", lambda a: a.view(np.int8), "wkv.weight is stored as I8"),
        ("layers.0.hc_attn_fn", lambda a: a.astype(np.int32), "hc_attn_fn is stored as I32"),
        ("norm", lambda a: a[:-1], r"norm.weight has shape \[63\], .* needs \[64\]"),
        ("layers.0.ffn.experts.1.w1", lambda a: a[:, :-1], r"\[64, 31\], .* \[64, 32\]"),
        ("layers.0.attn.wq_a.scale", lambda a: a[:2], r"shape \[2, 2\], .* \[3, 2\]"),
        ("layers.0.attn.wq_a.scale", lambda a: a.astype(np.float32), "F32, scales are F8_E8M0"),
        ("layers.1.engram.embed.scale", lambda a: a[:6], r"shape \[6, 2\], .* \[187, 2\]"),
    ],
)  # fmt: skip
def test_wrong_dtypes_and_shapes_are_found_before_any_data_is_read(
    checkpoint, config, quantised, monkeypatch, name, make, message
):
    name = name if name in quantised else f"{name}.weight"
    found = checkpoint(**{name: np.ascontiguousarray(make(quantised[name]))})
    monkeypatch.setattr(np, "memmap", None)
    with pytest.raises(ValueError, match=message):
        found.check(config)


def test_fp8_experts_are_refused_even_if_all_are(checkpoint, config, quantised):
    experts = {
        name: np.zeros((64, 64), ml_dtypes.float8_e4m3fn)
        for name in quantised
        if ".experts." in name and name.endswith(".weight")
    }
    with pytest.raises(ValueError, match=r"experts.0.w1.weight is stored as F8_E4M3; this weight"):
        checkpoint(**experts).check(config)


def test_experts_of_one_layer_have_one_dtype(checkpoint, config):
    name = "layers.0.ffn.experts.2.w1"
    float_expert = np.zeros((64, 64), BF16)
    with pytest.raises(ValueError, match=r"w1.weight: the experts .* \['BF16', 'I8'\]"):
        checkpoint(**{f"{name}.weight": float_expert, f"{name}.scale": None}).check(config)


@pytest.mark.parametrize(
    "name", ["embed.weight", "head.weight", "layers.0.attn.wq_a.weight", "layers.0.hc_ffn_fn"]
)
def test_nan_weights_are_refused_when_read(checkpoint, config, quantised, name):
    weights = checkpoint(**{name: nan_in(quantised[name])}).check(config)
    with pytest.raises(ValueError, match=f"{name} in .*model.safetensors holds NaN"):
        weights.take(name)


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_infinite_weights_are_refused_when_read(checkpoint, config, quantised, value):
    array = quantised["norm.weight"].copy()
    array[-1] = value
    with pytest.raises(ValueError, match="norm.weight in .* infinite"):
        checkpoint(**{"norm.weight": array}).check(config).take("norm.weight")


@pytest.mark.parametrize("path", ["layers.0.attn.wkv", "layers.3.ffn.experts.3.w2"])
def test_the_scale_byte_255_is_refused_when_read(checkpoint, config, quantised, path):
    scale = quantised[f"{path}.scale"].copy()
    scale.view(np.uint8)[-1, -1] = 255
    weights = checkpoint(**{f"{path}.scale": scale}).check(config)
    with pytest.raises(ValueError, match=f"{path}.scale in .* holds the scale byte 255"):
        weights.take(f"{path}.weight".replace("experts.3.", "experts."))


def test_the_drafter_may_be_absent_as_a_whole(checkpoint, config, quantised):
    weights = checkpoint(**{name: None for name in quantised if name.startswith("mtp.")})
    checked = weights.check(config)
    assert checked.parts == {"backbone", "engram_table"}
    assert not any(path.startswith("mtp.") for path in checked.specs)
    with pytest.raises(KeyError, match="mtp.0.main_norm.weight"):
        checked.take("mtp.0.main_norm.weight")


def test_the_drafter_may_not_be_there_in_part(checkpoint, config, quantised):
    second = {name: None for name in quantised if name.startswith("mtp.1.")}
    with pytest.raises(ValueError, match=r"tensors are missing: mtp.1.attn.attn_sink"):
        checkpoint(**second).check(config)


def test_vision_may_be_absent_as_a_whole_only(tmp_path):
    stored = read(ROOT / "vision_engram" / "model.safetensors")
    config = Config.read(ROOT / "vision_engram")
    parts = ("vision.", "aligner.", "image_")
    write(
        tmp_path / "model.safetensors",
        {name: array for name, array in stored.items() if not name.startswith(parts)},
    )
    assert "vision" not in open_checkpoint(tmp_path).check(config).parts
    write(
        tmp_path / "model.safetensors",
        {name: array for name, array in stored.items() if not name.startswith("aligner.")},
    )
    with pytest.raises(ValueError, match=r"4 tensors are missing: aligner.w1.bias"):
        open_checkpoint(tmp_path).check(config)


def test_a_part_that_the_configuration_lacks_is_unexpected(config):
    plain = tiny_config(num_nextn_predict_layers=0, compress_ratios=(0, 0, 2, 2, 1, 1, 1))
    with pytest.raises(ValueError, match="are unexpected: .*"):
        open_checkpoint(ROOT / "quantised").check(plain)


def test_the_prefix_model_is_tolerated(tmp_path, quantised, config):
    write(tmp_path / "model.safetensors", {f"model.{n}": array for n, array in quantised.items()})
    weights = open_checkpoint(tmp_path).check(config)
    np.testing.assert_array_equal(np.asarray(weights.take("norm.weight")), quantised["norm.weight"])
    both = {**quantised, "model.norm.weight": quantised["norm.weight"]}
    write(tmp_path / "model.safetensors", both)
    with pytest.raises(ValueError, match="norm.weight occurs twice, with and without"):
        open_checkpoint(tmp_path)


def test_reading_never_holds_the_whole_model(tmp_path):
    config = tiny_config(moe_intermediate_size=512, hidden_size=128, quantized=False)
    save(tmp_path, config, random_weights(config, seed=0), parts=("backbone", "engram_table"))
    weights = open_checkpoint(tmp_path).check(config)
    largest = max(2 * spec.size for spec in weights.specs.values())
    total = sum(2 * spec.size for spec in weights.specs.values())
    assert total > 12 * largest
    tracemalloc.start()
    for path in weights.specs:
        weights.take(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * largest  # JAX lets go of the previous weight's buffer only after the next


def test_a_failed_save_leaves_the_older_checkpoint(tmp_path):
    config = tiny_config()
    take = random_weights(config, seed=0)
    save(tmp_path, config, take)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def failing(path):
        if path == "head.weight":
            raise RuntimeError("disk on fire")
        return take(path)

    with pytest.raises(RuntimeError, match="disk on fire"):
        save(tmp_path, config, failing)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_saving_refuses_what_the_format_cannot_hold(tmp_path):
    config = tiny_config()
    take = random_weights(config, seed=0)
    quantized = random_weights(config, seed=0, quantized=True)

    def instead(path, weight):
        return lambda name: weight if name == path else take(name)

    with pytest.raises(ValueError, match=r"norm.weight has shape \(3,\)"):
        save(tmp_path, config, instead("norm.weight", jnp.zeros(3)))
    with pytest.raises(ValueError, match="norm.weight is float16"):
        save(tmp_path, config, instead("norm.weight", jnp.zeros(64, jnp.float16)))
    with pytest.raises(ValueError, match="attn_sink is bfloat16; a float32 weight"):
        save(tmp_path, config, instead("layers.0.attn.attn_sink", jnp.zeros(4, jnp.bfloat16)))
    codes = quantized("layers.0.attn.wkv.weight")
    other = QuantizedTensor(codes.codes, codes.scale, "fp8_1x32")
    with pytest.raises(ValueError, match="wkv.weight is fp8_1x32; a linear weight is saved"):
        save(tmp_path, config, instead("layers.0.attn.wkv.weight", other))
    assert list(tmp_path.iterdir()) == []


def test_random_weights_are_non_trivial_and_depend_on_seed_and_path_only():
    config = tiny_config()
    first, again, other = (random_weights(config, seed) for seed in (0, 0, 1))
    for path in reversed(parameter_specs(config)):
        values = np.asarray(first(path), np.float32)
        assert np.isfinite(values).all()
        assert values.size == 1 or values.std() > 0.01
        assert_same_bits(again(path), first(path))
        assert np.asarray(other(path), np.float32).tobytes() != values.tobytes()
    norms = np.asarray(first("layers.0.attn_norm.weight"), np.float32)
    assert abs(norms.mean() - 1) < 0.2
    bias, image_bias = (first(f"layers.0.ffn.gate.{name}") for name in ("bias", "bias_vl"))
    assert not np.array_equal(bias, image_bias)
