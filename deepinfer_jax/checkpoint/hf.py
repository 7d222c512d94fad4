"""Released checkpoints: reading and writing safetensors files (spec 12).

`open_checkpoint` reads only the headers, `Checkpoint.check` compares them with a configuration
(every expected tensor once, nothing else, right shapes and formats) before any weight is read, and
`Weights.take` then reads one weight at a time through a memory map. The most host memory in use
is about two weights: the stacked experts of a layer, or an Engram table. `save` writes the same
format.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from deepinfer_jax.checkpoint.tensor_names import (
    FORMATS,
    ParameterSpec,
    Part,
    parameter_specs,
    released_names,
    scale_name,
)
from deepinfer_jax.config import Config
from pallas_kernels.layouts import QuantizedTensor, codes_shape, scale_shape

Weight = jax.Array | QuantizedTensor
Take = Callable[[str], Weight]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Parts that a checkpoint may leave out, each only as a whole (spec 12.8).
OPTIONAL_PARTS: tuple[Part, ...] = ("drafter", "vision")

# How tensors of a dtype lie in memory here; fp4 pairs and scales are plain bytes.
_DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),
    "I8": np.dtype(np.uint8),
}
# Byte widths of dtypes that are legal in the file format and never right for a weight.
_OTHER_WIDTHS = {"F64": 8, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "U8": 1, "BOOL": 1, "F8_E5M2": 1}
_WIDTHS = _OTHER_WIDTHS | {name: dtype.itemsize for name, dtype in _DTYPES.items()}

_FLOATS = ("BF16", "F32")
_ALLOWED = {
    "linear": (*_FLOATS, "F8_E4M3"),
    "expert": (*_FLOATS, "I8"),
    "table": (*_FLOATS, "F8_E4M3"),
    "bf16": _FLOATS,
    "float32": ("F32",),
}
_QUANTISED = ("F8_E4M3", "I8")
_CHUNK = 1 << 18  # elements looked at together when searching for NaN


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Where a tensor lies: bytes [start, stop) of a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The headers of a checkpoint, not yet compared with a configuration.

    Attributes:
      path: the directory.
      entries: place of every tensor, by released name.
    """

    path: Path
    entries: dict[str, _Entry]

    def check(self, config: Config) -> Weights:
        """Compares names, shapes and formats with the configuration; reads no weight.

        Raises:
          ValueError: tensors are missing or unexpected, a part is incomplete, or a shape or dtype
            is wrong. The message lists the first few names.
        """
        specs = parameter_specs(config)
        absent = {part for part in OPTIONAL_PARTS if self._lacks(specs, part)}
        specs = {path: spec for path, spec in specs.items() if spec.part not in absent}
        self._check_coverage(specs)
        for path, spec in specs.items():
            self._check_weight(path, spec)
        return Weights(self, specs)

    def _lacks(self, specs: dict[str, ParameterSpec], part: Part) -> bool:
        names = (
            name
            for path, spec in specs.items()
            if spec.part == part
            for name in released_names(path, spec)
        )
        return not any(name in self.entries or scale_name(name) in self.entries for name in names)

    def _check_coverage(self, specs: dict[str, ParameterSpec]) -> None:
        expected = set()
        for path, spec in specs.items():
            for name in released_names(path, spec):
                expected.add(name)
                entry = self.entries.get(name)
                if spec.kind in FORMATS and entry is not None and entry.dtype in _QUANTISED:
                    expected.add(scale_name(name))
        missing = [name for name in sorted(expected) if name not in self.entries]
        unexpected = [name for name in sorted(self.entries) if name not in expected]
        problems = [
            f"{len(names)} tensors {what}: {_first(names)}"
            for names, what in ((missing, "are missing"), (unexpected, "are unexpected"))
            if names
        ]
        if problems:
            raise ValueError(f"{self.path} does not fit its config.json: {'; '.join(problems)}")

    def _check_weight(self, path: str, spec: ParameterSpec) -> None:
        names = released_names(path, spec)
        dtypes = sorted({self.entries[name].dtype for name in names})
        if len(dtypes) > 1:
            raise ValueError(f"{path}: the experts of one layer have different dtypes {dtypes}")
        dtype = dtypes[0]
        if dtype not in _ALLOWED[spec.kind]:
            raise ValueError(
                f"{names[0]} is stored as {dtype}; this weight may be one of "
                f"{_ALLOWED[spec.kind]} (spec 5.5)"
            )
        quantised = FORMATS[spec.kind] if dtype in _QUANTISED else None
        logical = spec.shape[1:] if len(names) > 1 or names[0] != path else spec.shape
        stored = codes_shape(quantised, logical) if quantised else logical
        for name in names:
            self._check_shape(name, stored)
            if quantised:
                scale = scale_name(name)
                if self.entries[scale].dtype != "F8_E8M0":
                    raise ValueError(
                        f"{scale} is stored as {self.entries[scale].dtype}, scales are F8_E8M0 "
                        "(spec 5.5)"
                    )
                self._check_shape(scale, scale_shape(quantised, logical))

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        given = self.entries[name].shape
        if given != expected:
            raise ValueError(
                f"{name} has shape {list(given)}, the configuration needs {list(expected)}"
            )


@dataclasses.dataclass(frozen=True)
class Weights:
    """A checked checkpoint, ready to be read weight by weight.

    Attributes:
      checkpoint: the headers.
      specs: the weights that are there, by path.
    """

    checkpoint: Checkpoint
    specs: dict[str, ParameterSpec]

    @property
    def parts(self) -> frozenset[Part]:
        """Parts of the model that the checkpoint holds."""
        return frozenset(spec.part for spec in self.specs.values())

    def take(self, path: str) -> Weight:
        """Reads one weight as it is stored: bfloat16, float32 or a `QuantizedTensor`.

        Args:
          path: a key of `parameter_specs`.

        Raises:
          KeyError: no such weight.
          ValueError: the weight holds NaN or infinite values, or a scale byte 255.
        """
        if path not in self.specs:
            raise KeyError(f"{self.checkpoint.path} has no weight {path!r}")
        spec = self.specs[path]
        names = released_names(path, spec)
        stacked = names[0] != path
        weight = jnp.asarray(self._read(names, stacked))
        if self.checkpoint.entries[names[0]].dtype not in _QUANTISED:
            return weight
        scale = jnp.asarray(self._read([scale_name(name) for name in names], stacked))
        return QuantizedTensor(weight, scale, FORMATS[spec.kind])

    def _read(self, names: Iterable[str], stacked: bool) -> np.ndarray:
        entries = [self.checkpoint.entries[name] for name in names]
        shape = (len(entries), *entries[0].shape) if stacked else entries[0].shape
        whole = np.empty(shape, _DTYPES[entries[0].dtype])
        rows = whole if stacked else whole[None]
        for row, name, entry in zip(rows, names, entries, strict=True):
            if row.size:
                row[...] = np.memmap(entry.file, whole.dtype, "r", entry.start, entry.shape)
            _refuse_nan(row, name, entry)
        return whole


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Reads the headers of a checkpoint directory.

    Args:
      path: directory with `model.safetensors`, or with `model.safetensors.index.json` and the
        shards it names.

    Raises:
      FileNotFoundError: there is neither, or a shard is missing.
      ValueError: a file is damaged, or a tensor occurs twice.
    """
    path = Path(path)
    if (path / SINGLE).is_file():
        return Checkpoint(path, _without_prefix(_header(path / SINGLE)))
    if not (path / INDEX).is_file():
        raise FileNotFoundError(f"{path} holds neither {SINGLE} nor {INDEX}")
    index = _parse((path / INDEX).read_bytes(), path / INDEX)
    shards = index.get("weight_map")
    if not isinstance(shards, dict):
        raise ValueError(f"{path / INDEX} has no weight_map")
    entries: dict[str, _Entry] = {}
    for shard in sorted(set(shards.values())):
        file = path / shard
        if Path(shard).name != shard:
            raise ValueError(f"{path / INDEX} names a shard outside of its directory: {shard!r}")
        if not file.is_file():
            raise FileNotFoundError(f"{path / INDEX} names the shard {shard}, which is missing")
        for name, entry in _header(file).items():
            if name in entries:
                raise ValueError(f"{name} occurs in {entries[name].file.name} and in {shard}")
            if shards.get(name) != shard:
                raise ValueError(
                    f"{shard} holds {name}, but {INDEX} places it in {shards.get(name)}"
                )
            entries[name] = entry
    lost = sorted(set(shards) - set(entries))
    if lost:
        raise ValueError(f"{INDEX} lists {len(lost)} tensors that no shard holds: {_first(lost)}")
    return Checkpoint(path, _without_prefix(entries))


def _header(file: Path) -> dict[str, _Entry]:
    """Places of the tensors of one safetensors file; reads only its header."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = stream.read(8)
        count = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
        if count < 2 or count > size - 8:
            raise ValueError(f"{file} is truncated or not a safetensors file: {size} bytes")
        raw = _parse(stream.read(count), file)
    raw.pop("__metadata__", None)
    return {name: _entry(file, name, meta, 8 + count, size) for name, meta in raw.items()}


def _entry(file: Path, name: str, meta: Any, base: int, size: int) -> _Entry:
    try:
        dtype, shape = meta["dtype"], tuple(meta["shape"])
        start, stop = (base + offset for offset in meta["data_offsets"])
        length = math.prod(shape) * _WIDTHS[dtype]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: the header entry of {name} is not understood: {meta}") from error
    if stop - start != length or start < base:
        raise ValueError(f"{file}: {name} needs {length} bytes, its header gives {stop - start}")
    if stop > size:
        raise ValueError(f"{file} is truncated: {name} ends at byte {stop}, the file at {size}")
    return _Entry(file, dtype, shape, start, stop)


def _parse(raw: bytes, file: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"{key} occurs twice")
            found[key] = value
        return found

    try:
        parsed = json.loads(raw, object_pairs_hook=unique)
    except ValueError as error:
        raise ValueError(f"{file}: damaged header: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{file}: damaged header: not a JSON object")
    return parsed


def _without_prefix(entries: dict[str, _Entry]) -> dict[str, _Entry]:
    """Some tools save the same names under "model."."""
    plain: dict[str, _Entry] = {}
    for name, entry in entries.items():
        short = name.removeprefix("model.")
        if short in plain:
            raise ValueError(f"{short} occurs twice, with and without the prefix model.")
        plain[short] = entry
    return plain


def _refuse_nan(values: np.ndarray, name: str, entry: _Entry) -> None:
    flat = values.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK]
        if entry.dtype == "F8_E8M0":
            if (chunk == 255).any():
                raise ValueError(f"{name} in {entry.file} holds the scale byte 255, which is NaN")
            continue
        if entry.dtype == "F32":
            bad = ~np.isfinite(chunk)
        elif entry.dtype == "BF16":
            bad = (chunk.view(np.uint16) & 0x7F80) == 0x7F80
        elif entry.dtype == "F8_E4M3":
            bad = (chunk.view(np.uint8) & 0x7F) == 0x7F
        else:
            return
        if bad.any():
            raise ValueError(f"{name} in {entry.file} holds NaN or infinite values")


def _first(names: list[str], count: int = 4) -> str:
    shown = ", ".join(names[:count])
    return shown if len(names) <= count else f"{shown} and {len(names) - count} more"


def save(
    path: str | os.PathLike[str],
    config: Config,
    take: Take,
    parts: Iterable[Part] | None = None,
) -> None:
    """Writes a checkpoint in the released format: `config.json` and one `model.safetensors`.

    The weights are written one after another into a temporary file that takes its place at the end,
    so an interrupted save leaves an older checkpoint as it was.

    Args:
      path: directory, made if needed.
      config: the configuration; its `quantized` is set to what `take` returns.
      take: returns the weight of a path, bfloat16, float32 or a `QuantizedTensor` in any layout.
        All layouts give the same bytes, but "gpu" has forgotten the scale bytes of blocks that are
        all zero: 127 is written for them.
      parts: which parts to write; default all that the configuration has.

    Raises:
      ValueError: a weight has a wrong shape or a dtype that the format does not allow.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    if (path / INDEX).exists():
        raise ValueError(f"{path} holds a sharded checkpoint: save to another directory")
    specs = {
        name: spec
        for name, spec in parameter_specs(config).items()
        if parts is None or spec.part in parts
    }
    # Wider numbers first keeps every tensor aligned to its own width, since the file has no gaps.
    order = ("float32", "bf16", "linear", "table", "expert")
    names = sorted(specs, key=lambda name: order.index(specs[name].kind))
    quantized = False
    with _replacing(path / SINGLE) as stream:
        room = _header_room(specs)
        stream.write(bytes(8 + room))
        header: dict[str, Any] = {}
        for name in names:
            weight = take(name)
            quantized |= isinstance(weight, QuantizedTensor)
            for tensor, dtype, values in _released_tensors(name, specs[name], weight):
                start = stream.tell() - 8 - room
                stream.write(np.ascontiguousarray(values).view(np.uint8).data)
                header[tensor] = {
                    "dtype": dtype,
                    "shape": list(values.shape),
                    "data_offsets": [start, stream.tell() - 8 - room],
                }
        stream.seek(0)
        stream.write(struct.pack("<Q", room) + json.dumps(header).encode().ljust(room))
    config = dataclasses.replace(config, quantized=quantized)
    with _replacing(path / "config.json") as stream:
        stream.write(json.dumps(config.to_hf(), indent=2).encode() + b"\n")


def _released_tensors(
    path: str, spec: ParameterSpec, weight: Weight
) -> Iterator[tuple[str, str, np.ndarray]]:
    """The (name, dtype, values) of every tensor that one weight becomes in the file."""
    if tuple(weight.shape) != spec.shape:
        raise ValueError(f"{path} has shape {weight.shape}, the configuration needs {spec.shape}")
    names = released_names(path, spec)
    scales = tuple(scale_name(name) for name in names)
    if isinstance(weight, QuantizedTensor):
        if FORMATS.get(spec.kind) != weight.format:
            raise ValueError(
                f"{path} is {weight.format}; a {spec.kind} weight is saved as "
                f"{FORMATS.get(spec.kind, 'a float')}"
            )
        weight = weight.to_layout("plain")
        dtype = "I8" if weight.format == "fp4_1x32" else "F8_E4M3"
        tensors = ((names, dtype, weight.codes), (scales, "F8_E8M0", weight.scale))
    else:
        tensors = ((names, _float_name(path, spec, weight), weight),)
    for group, dtype, array in tensors:
        host = np.asarray(array)
        rows = host if names[0] != path else host[None]
        yield from zip(group, [dtype] * len(group), rows, strict=True)


def _float_name(path: str, spec: ParameterSpec, weight: jax.Array) -> str:
    for name in _FLOATS:
        if weight.dtype == _DTYPES[name] and name in _ALLOWED[spec.kind]:
            return name
    raise ValueError(
        f"{path} is {weight.dtype}; a {spec.kind} weight is saved as one of {_ALLOWED[spec.kind]}"
    )


def _header_room(specs: dict[str, ParameterSpec]) -> int:
    """Bytes that hold any header of these weights: offsets of 20 digits, a scale for each."""
    longest = {"dtype": "F8_E4M3", "shape": [10**20] * 3, "data_offsets": [10**20] * 2}
    entries = {
        name: longest
        for path, spec in specs.items()
        for released in released_names(path, spec)
        for name in (released, scale_name(released))
    }
    return -(-len(json.dumps(entries)) // 64) * 64


@contextlib.contextmanager
def _replacing(file: Path) -> Iterator[BinaryIO]:
    """Opens a temporary neighbour of `file` that takes its place if the block succeeds."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
