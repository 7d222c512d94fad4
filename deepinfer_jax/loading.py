"""`load`: from a checkpoint folder to a model, one tensor at a time."""

import importlib.resources
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_jax.checkpoint.hf import open_checkpoint
from deepinfer_jax.config import Config
from deepinfer_jax.model import engram_tables
from deepinfer_jax.model.transformer import Transformer
from deepinfer_jax.numerics import Numerics

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


def load(path: str | Path, *, numerics: Numerics | None = None) -> Transformer:
    """A model from a folder with the released tensor names, or an embedded checkpoint.

    Names, shapes and dtypes are checked from the files' headers before any weight is read; then
    tensors are read one by one. Quantised weights stay quantised. A checkpoint without a drafter's
    tensors gives a model without a drafter. Those of the vision tower are checked but not read:
    this version does not compute with them.

    Args:
        path: "tiny", or a folder with config.json, safetensors files and (with Engram)
            tokenizer.json.
        numerics: rounding points. None: those of the release.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: a configuration, header or tensor that is not as it should be.
    """
    folder = folder_of(path)
    config = Config.read(folder)
    weights = open_checkpoint(folder).check(config)
    token_map = None
    if config.engram_layer_ids:
        token_map = engram_tables.checked_token_map(config, load_tokenizer(folder))
    return Transformer(
        config, numerics or Numerics(), weights.take, token_map, drafter="drafter" in weights.parts
    )


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
