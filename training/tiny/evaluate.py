"""Bits per byte of a checkpoint on the held-out files: `python training/tiny/evaluate.py`.

Every file starts afresh. Its tokens are scored in windows of 512 that overlap by half, so that each
token but the first ones sees at least 256 before it; the end-of-sequence token is not counted. The
probabilities are those of the model as it is served: quantised weights, activations and caches.
"""

import argparse
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import deepinfer_jax as di

HERE = Path(__file__).parent
WINDOW, STRIDE = 512, 256


def windows(tokens: np.ndarray, document: int) -> list[tuple[np.ndarray, int, int]]:
    """(tokens, first position that counts, document) covering a document's tokens once."""
    result, start = [], 0
    while True:
        part = tokens[start : start + WINDOW]
        result.append((part, 1 if start == 0 else WINDOW - STRIDE, document))
        if start + WINDOW >= len(tokens):
            return result
        start += STRIDE


@jax.jit
def log_probabilities(model, tokens, lengths):
    """float32 [B, S]: of each token given those before it; 0 at the first."""
    scores = jax.nn.log_softmax(di.forward(model, tokens, lengths).logits[:, :-1])
    picked = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(picked, ((0, 0), (1, 0)))


def bits_by_document(model, tokens, offsets, batch: int) -> np.ndarray:
    """float64 [documents]: cost of each document's text in bits."""
    pieces = []
    for document, (begin, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        pieces += windows(tokens[begin : end - 1].astype(np.int32), document)
    bits = np.zeros(len(offsets) - 1)
    for first in tqdm(range(0, len(pieces), batch), unit="batch"):
        some = pieces[first : first + batch]
        padded = np.zeros((batch, WINDOW), np.int32)
        lengths = np.ones(batch, np.int32)
        for row, (part, _, _) in enumerate(some):
            padded[row, : len(part)], lengths[row] = part, len(part)
        scores = np.asarray(log_probabilities(model, padded, lengths), np.float64)
        for row, (part, counted, document) in enumerate(some):
            bits[document] -= scores[row, counted : len(part)].sum() / math.log(2)
    return bits


def main() -> None:
    """Print a table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", default="tiny")
    parser.add_argument("--heldout", type=Path, default=HERE / "build" / "heldout")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--documents", type=int, help="only the first so many")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    model = di.load(options.checkpoint)
    offsets = np.load(options.heldout / "offsets.npy")[: (options.documents or 10**9) + 1]
    size = np.load(options.heldout / "bytes.npy")[: len(offsets) - 1]
    kinds = json.loads((options.heldout / "documents.json").read_text())
    kind = np.array([d["kind"] for d in kinds])[: len(size)]
    bits = bits_by_document(model, np.load(options.heldout / "tokens.npy"), offsets, options.batch)
    figures = {"all": bits.sum() / size.sum()}
    for name in sorted(set(kind)):
        figures[name] = bits[kind == name].sum() / size[kind == name].sum()
    for name, value in figures.items():
        print(f"{name:6s} {value:.4f} bits per byte")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
