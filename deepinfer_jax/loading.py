"""`load`: from a checkpoint folder to a model, one tensor at a time."""

import importlib.resources
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_jax.checkpoint.hf import open_checkpoint
from deepinfer_jax.config import Config
from deepinfer_jax.layout import arranged, default_layout
from deepinfer_jax.model import engram_tables
from deepinfer_jax.model.transformer import Transformer
from deepinfer_jax.numerics import Numerics
from pallas_kernels.layouts import LAYOUTS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EMBEDDED = ("tiny",)


def folder_of(name: str | Path) -> Path:
    """The folder of a checkpoint: an embedded one by name, or any path.

    Raises:
        FileNotFoundError: neither, saying what is embedded.
    """
    if name in EMBEDDED:
        return Path(str(importlib.resources.files("deepinfer_jax") / "assets" / str(name)))
    if not Path(name).is_dir():
        raise FileNotFoundError(
            f"{name!s} is neither a checkpoint folder nor an embedded checkpoint {EMBEDDED}"
        )
    return Path(name)


def load(
    path: str | Path, *, numerics: Numerics | None = None, layout: str | None = None
) -> Transformer:
    """A model from a folder with the released tensor names, or an embedded checkpoint.

    Names, shapes and dtypes are checked from the files' headers before any weight is read; then
    tensors are read one by one. Quantised weights stay quantised and are arranged as they are read:
    the device never holds more than the model and one tensor. A checkpoint without a drafter's
    tensors gives a model without a drafter. Those of the vision tower are checked but not read:
    this version does not compute with them.

    Args:
        path: "tiny", or a folder with config.json, safetensors files and (with Engram)
            tokenizer.json.
        numerics: rounding points. None: those of the release.
        layout: of quantised weights in memory, see `to_layout`. None: "gpu" on an NVIDIA Hopper GPU
            with bfloat16 activations, else "plain".

    Warns:
        UserWarning: a weight stays plain because "gpu" cannot hold its scales, named.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: an unknown layout; a configuration, header or tensor that is not as it should
            be.
    """
    if layout not in (None, *LAYOUTS):
        raise ValueError(f"load: layout must be None or one of {LAYOUTS}, got {layout!r}")
    numerics = numerics or Numerics()
    layout = layout or default_layout(numerics)
    folder = folder_of(path)
    config = Config.read(folder)
    weights = open_checkpoint(folder).check(config)
    token_map = None
    if config.engram_layer_ids:
        token_map = engram_tables.checked_token_map(config, load_tokenizer(folder))

    def take(name):
        return arranged(name, weights.take(name), layout)

    return Transformer(config, numerics, take, token_map, drafter="drafter" in weights.parts)


def load_tokenizer(path: str | Path) -> "Tokenizer":
    """The `tokenizers.Tokenizer` of a checkpoint.

    Raises:
        FileNotFoundError: the folder has no tokenizer.json.
    """
    from tokenizers import Tokenizer

    file = folder_of(path) / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: the checkpoint has no tokenizer")
    return Tokenizer.from_file(str(file))
