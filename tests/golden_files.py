"""The golden data: how its files are read, what a case feeds to a model, and how to compare.

tests/golden/README.md says what the files hold. The reader knows the 8-bit types that
`safetensors.numpy` refuses, and `dequantize` is spec 5.5. Nothing here knows an implementation:
a model is tested by handing the dict of its outputs to `Case.pairs`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import ml_dtypes
import numpy as np

ROOT = Path(__file__).parent / "golden"
CASES = (
    "swa", "ratio2", "hier", "flash_mini", "vision_engram", "dspark", "quantised", "hc2_ratio4",
)  # fmt: skip
DTYPES = {
    "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu, "F32": np.float32, "I8": np.int8, "I16": np.int16,
    "I32": np.int32, "I64": np.int64, "U8": np.uint8,
}  # fmt: skip
SELECTIONS = ("topk", "candidates", "router_idx", "engram_hash")
AT_PROBES = (
    "streams", "premix", "engram_out", "attn_mix", "ffn_mix", "attn_out", "ffn_out",
    "final_hidden", "index_scores", "block_scores",
)  # fmt: skip


def read(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a safetensors file, in its stored dtype."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), memoryview(data)[8 + length :]
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(body[slice(*t["data_offsets"])], DTYPES[t["dtype"]]).reshape(t["shape"])
        for name, t in header.items()
    }


def dequantize(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float64 [out, in] of a released weight and its scale (spec 5.5).

    int8 bytes hold two e2m1 codes, the low nibble first. A scale serves 1 x 32 elements if it has
    a row for each row of the weight, otherwise 32 x 32.
    """
    if weight.dtype == np.int8:
        byte = weight.view(np.uint8)
        codes = np.stack([byte & 15, byte >> 4], axis=-1)
        weight = codes.reshape(len(weight), -1).view(ml_dtypes.float4_e2m1fn)
    rows, columns = weight.shape
    height = 1 if len(scale) == rows else 32
    scale = np.repeat(np.repeat(scale.astype(float), height, axis=0), 32, axis=1)
    return weight.astype(float) * scale[:rows, :columns]


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """A checkpoint as float64 arrays by released names, with the scales multiplied in."""
    stored = read(path)

    def value(name):
        scale = stored.get(name.removesuffix("weight") + "scale")
        return stored[name].astype(float) if scale is None else dequantize(stored[name], scale)

    return {name: value(name) for name in stored if not name.endswith(".scale")}


def relative_error(value: np.ndarray, golden: np.ndarray) -> float:
    """RMS(difference) / RMS(golden); infinite where the two disagree about an infinity."""
    value, golden = np.asarray(value, float), np.asarray(golden, float)
    finite = np.isfinite(golden)
    if not np.array_equal(value[~finite], golden[~finite]):
        return np.inf
    difference = value[finite] - golden[finite]
    return float(np.sqrt(np.mean(difference**2) / np.mean(golden[finite] ** 2)))


@dataclass(frozen=True)
class Case:
    """One small model with its recorded outputs; files are read when they are first asked for."""

    name: str

    @property
    def folder(self) -> Path:
        return ROOT / self.name

    @cached_property
    def config(self) -> dict:
        return json.loads((self.folder / "config.json").read_text())

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        return read_weights(self.folder / "model.safetensors")

    @cached_property
    def files(self) -> dict[str, dict[str, np.ndarray]]:
        paths = self.folder.glob("golden_*.safetensors")
        return {path.stem.removeprefix("golden_"): read(path) for path in sorted(paths)}

    @cached_property
    def tokenizer(self):
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @cached_property
    def real(self) -> np.ndarray:
        """bool [B, S]: positions that are not padding."""
        f32 = self.files["f32"]
        return f32.get("attention_mask", np.ones_like(f32["input_ids"])).astype(bool)

    @property
    def layers(self) -> int:
        return self.config["text_config"]["num_hidden_layers"]

    def inputs(self, kind: str) -> dict[str, np.ndarray | None]:
        """What a model is given: tokens, token_map, and image_mask with embeddings of images.

        kind is "f32", "bf16" or "f32_actquant", the golden file in question.
        """
        golden = self.files[kind]
        token_map, types = golden.get("engram.token_map"), golden.get("vision_token_types")
        if token_map is None:  # the actquant files leave it out
            token_map = self.files["f32"].get("engram.token_map")
        embeddings = None
        if types is not None:
            embeddings = np.zeros((*types.shape, self.config["text_config"]["hidden_size"]))
            images = range(len(golden["image_grid_hws"]))
            aligned = [golden[f"vision.aligned.{i}"].astype(float) for i in images]
            embeddings[types == 1] = np.concatenate(aligned)
            for kind_of_token, name in {0: "start", 2: "newline", 3: "end"}.items():
                embeddings[types == kind_of_token] = self.weights[f"image_{name}"]
        return {
            "tokens": golden["input_ids"],
            "token_map": token_map,
            "image_mask": None if types is None else types >= 0,
            "embeddings": embeddings,
        }

    def streams_in(self, kind: str) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """The recorded input (streams, pre) of every layer; the file must hold all positions."""
        golden = self.files[kind]
        return {
            i: (golden[f"streams.{i}"].astype(float), golden[f"premix.{i}"].astype(float))
            for i in range(self.layers)
        }

    def pairs(
        self, kind: str, outputs: dict, prefix: str = ""
    ) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """(key, output, golden) on real tokens, for every golden key that outputs holds.

        Selections come sorted, so that they compare as sets. prefix "noquant." takes the values
        that were recorded without the round trips of the caches.
        """
        for name, golden in self.files[kind].items():
            key = name.removeprefix(prefix)
            if not name.startswith(prefix) or key not in outputs:
                continue
            value, real, head = np.asarray(outputs[key]), self.real, key.split(".")[0]
            if head in ("compressed_kv", "index_keys"):
                ratio = self.config["text_config"]["compress_ratios"][int(key.split(".")[1])]
                real = real[:, ratio - 1 :: ratio]  # an entry is real if its last token is
            elif head in AT_PROBES or (prefix and head == "logits"):
                probes = self.files[kind]["probe_positions"]
                value, real = value[:, probes], real[:, probes]
            if head == "topk":
                value, golden = np.sort(value, -1), np.sort(golden, -1)
            yield key, value[real], golden[real]


@cache
def case(name: str) -> Case:
    """The case of this name; what it has read stays read."""
    return Case(name)


@cache
def component(name: str) -> dict[str, np.ndarray]:
    """Recorded inputs and outputs of single functions."""
    return read(ROOT / "components" / f"{name}.safetensors")


def part(tensors, prefix):
    """Tensors of one set of a component file."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


@cache
def component_notes(name: str) -> dict[str, dict]:
    """Sizes and constants of the sets of a component file."""
    return json.loads((ROOT / "components" / "notes.json").read_text())[name]
