"""Writes what `tiny` says and scores: `python tests/make_tiny_greedy.py` -> data/tiny_*.json.

For each prompt the greedy tokens and, for each of them, the margin: how far its logit lies above
the second best. A comparison on another machine ends at the first margin that rounding could
overturn. For each held-out document its cost in bits.

The margins are those of `forward` in reproducible numerics, which are the bits that `generate` saw.
Beside them it prints how far the margins move under other kernels (fast numerics), the yardstick
for the bounds in test_tiny.py.
"""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import deepinfer_jax as di

DATA = Path(__file__).parent / "data"
GREEDY, HELDOUT = DATA / "tiny_greedy.json", DATA / "tiny_heldout.json"
PROMPTS = (
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.",
    "Yahweh spoke to Moses, saying,",
    "SELECT * FROM t1 WHERE",
)
NEW_TOKENS = 32
WIDTH = 512


def greedy(llm: di.LLM) -> list[di.Completion]:
    """The likeliest continuations, end of sequence ignored."""
    params = di.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return llm.generate(PROMPTS, params, progress=False)


def margins(llm: di.LLM, completions: list[di.Completion], reproducible: bool) -> np.ndarray:
    """float32 [prompts, NEW_TOKENS]: best logit minus the second best, where each was chosen."""
    prompts = [llm.encode(c.prompt) for c in completions]
    texts = [p + c.token_ids for p, c in zip(prompts, completions, strict=True)]
    tokens = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    model = llm.model.with_numerics(di.Numerics(reproducible=reproducible))
    logits = di.forward(model, tokens, np.array([len(t) for t in texts])).logits
    two = np.asarray(jax.lax.top_k(logits, 2)[0])  # [prompts, S, 2]
    gaps = two[..., 0] - two[..., 1]
    return np.stack(
        [gaps[i, len(p) - 1 : len(p) - 1 + NEW_TOKENS] for i, p in enumerate(prompts)]
    )


def padded(llm: di.LLM, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Encoded documents as int32 [B, WIDTH] and their lengths."""
    encoded = [llm.encode(text)[:WIDTH] for text in texts]
    tokens = np.zeros((len(texts), WIDTH), np.int32)
    for row, ids in enumerate(encoded):
        tokens[row, : len(ids)] = ids
    return tokens, np.array([len(ids) for ids in encoded], np.int32)


def bits(logits: jax.Array, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """float64 [B]: the cost of each document after its first token."""
    scores = jax.nn.log_softmax(logits[:, :-1])
    picked = jnp.take_along_axis(scores, jnp.asarray(tokens)[:, 1:, None], axis=-1)[..., 0]
    counted = np.arange(1, tokens.shape[1]) < lengths[:, None]
    return np.where(counted, -np.asarray(picked, np.float64), 0).sum(axis=1) / math.log(2)


def main() -> None:
    """Write both files."""
    llm = di.LLM("tiny")
    completions = greedy(llm)
    gaps = margins(llm, completions, reproducible=True)
    moved = np.abs(margins(llm, completions, reproducible=False) - gaps)
    print(f"margins move by up to {moved.max():.4f}, median {np.median(moved):.4f}")
    print(f"smallest margins {gaps.min(axis=1)}")
    stored = [
        {"prompt": c.prompt, "tokens": c.token_ids, "smallest_margin": round(float(g.min()), 5),
         "margins": [round(float(x), 5) for x in g]}
        for c, g in zip(completions, gaps, strict=True)
    ]  # fmt: skip
    GREEDY.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")

    documents = json.loads(HELDOUT.read_text())
    tokens, lengths = padded(llm, [d["text"] for d in documents])
    for reproducible in (True, False):
        model = llm.model.with_numerics(di.Numerics(reproducible=reproducible))
        cost = bits(di.forward(model, tokens, lengths).logits, tokens, lengths)
        print("reproducible" if reproducible else "fast", "numerics:", cost, "bits")
    for document, value in zip(documents, cost, strict=True):
        document["bits"] = round(float(value), 3)
    HELDOUT.write_text(json.dumps(documents, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
