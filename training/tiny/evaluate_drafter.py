"""Accepted drafts of a checkpoint on held-out text: `python training/tiny/evaluate_drafter.py`.

Every file is cut into pieces of 512 tokens that start afresh. Along a piece stands an anchor every
16 tokens, with the true text before it: a block is drafted there and compared with what the model
itself chooses after the anchor and the drafts, as far as it agrees. Drafter and model share their
noise, as they do in `generate`. Then the true text goes on from the anchor; the cache is addressed
by position, so nothing has to be taken back. The end-of-sequence token is no part of a text.

Letters: B pieces, C anchors of a piece, n drafts of a block, N blocks.
"""

import argparse
import json
from pathlib import Path

import einops
import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import deepinfer_jax as di
from deepinfer_jax.decoding.distribution import GREEDY_BELOW, draw, process
from deepinfer_jax.model.drafter import acceptance, draft_block, markov_step

HERE = Path(__file__).parent
PIECE, STRIDE = 512, 16
TEMPERATURES = (0.0, 1.0)
BINS = 10


def choose(scores, sampling, seeds, positions):
    """int32 [T], the token that `generate` would choose for the absolute positions [T]."""
    greedy = sampling.broadcast(len(scores)).temperature < GREEDY_BELOW
    return draw(process(scores, sampling), greedy, seeds, positions)


def draft(model, cache, anchor, slot, position, sampling, seeds):
    """Drafts int32 [B, n] and their confidences [B, n] after anchors [B], and the cache."""
    block, cache, _ = draft_block(model, cache, anchor, slot, position)

    def go(previous, row):
        hidden, logits, k = row
        scores, confidence = markov_step(model, hidden, logits, previous)
        token = choose(scores, sampling, seeds, position + k + 1)
        return token, (token, acceptance(confidence))

    rows = (*(jnp.swapaxes(a, 0, 1) for a in block), jnp.arange(block.logits.shape[1]))
    _, (drafts, confidence) = jax.lax.scan(go, anchor, rows)
    return drafts.T, confidence.T, cache


def verify(model, cache, anchor, drafts, slot, position, sampling, seeds):
    """The model's own choice, int32 [B, n], in place of each draft, and the cache."""
    B, n = drafts.shape
    tokens = jnp.concatenate([anchor[:, None], drafts[:, :-1]], axis=1)
    count = jnp.where(slot < 0, 0, n)
    rows = di.rectangle(tokens, slot, position, count, jnp.zeros((B, n), bool))
    hidden, cache, _ = di.step(model, cache, rows)
    seeds = jnp.repeat(seeds, n)
    choice = choose(di.logits(model, hidden), sampling, seeds, rows.position + 1)
    return choice.reshape(B, n), cache


@jax.jit
def draft_along(model, tokens, lengths, sampling, seeds):
    """Draft and verify at every anchor of texts.

    Args:
        model: with a drafter.
        tokens: int32 [B, S], S a multiple of STRIDE.
        lengths: int32 [B].
        sampling: scalars.
        seeds: uint32 [B].

    Returns:
        Drafts and choices int32 [B, C, n], confidences float32 [B, C, n], and bool [B, C]: is the
        anchor inside the text? Anchors are the tokens STRIDE, 2 STRIDE, ... of a text.
    """
    (B, S), n = tokens.shape, model.config.dspark_block_size
    slots, at_once = jnp.arange(B), max(STRIDE, n + 1)
    cache = di.init_cache(model.config, B, S, at_once, numerics=model.numerics, drafts=True)

    def go(cache, chunk):
        text, anchor, start = chunk
        begin = jnp.full(B, start)
        count = jnp.clip(lengths - start, 0, STRIDE)
        rows = di.rectangle(text, slots, begin, count, jnp.zeros((B, STRIDE), bool))
        _, cache, _ = di.step(model, cache, rows)
        position = begin + STRIDE
        there = position < lengths
        slot = jnp.where(there, slots, -1)
        drafts, confidence, cache = draft(model, cache, anchor, slot, position, sampling, seeds)
        choice, cache = verify(model, cache, anchor, drafts, slot, position, sampling, seeds)
        return cache, (drafts, choice, confidence, there)

    chunks = einops.rearrange(tokens, "b (c s) -> c b s", s=STRIDE)
    starts = STRIDE * jnp.arange(len(chunks) - 1)
    _, results = jax.lax.scan(go, cache, (chunks[:-1], chunks[1:, :, 0], starts))
    return jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), results)


def pieces(tokens: np.ndarray, offsets: np.ndarray, chosen: np.ndarray):
    """Every piece with an anchor in it, and the document it is of."""
    result = []
    for document in chosen:
        text = tokens[offsets[document] : offsets[document + 1] - 1].astype(np.int32)
        parts = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
        result += [(part, document) for part in parts if len(part) > STRIDE]
    return result


def blocks(model, parts, sampling, batch: int, progress):
    """Of all anchors of texts: which drafts agree bool [N, n], confidences [N, n], text int [N]."""
    agree, confidence, text = [], [], []
    batch = min(batch, len(parts))
    for first in range(0, len(parts), batch):
        some = parts[first : first + batch]
        padded, lengths = np.zeros((batch, PIECE), np.int32), np.zeros(batch, np.int32)
        for row, part in enumerate(some):
            padded[row, : len(part)], lengths[row] = part, len(part)
        seeds = np.arange(first, first + batch, dtype=np.uint32)
        results = draft_along(model, padded, lengths, sampling, seeds)
        drafts, choice, sure, there = (np.asarray(a) for a in results)
        agree.append((drafts == choice)[there])
        confidence.append(sure[there])
        text.append(first + np.nonzero(there)[0])
        progress.update(len(some))
    return np.concatenate(agree), np.concatenate(confidence), np.concatenate(text)


def calibration_error(probability: np.ndarray, happened: np.ndarray) -> float:
    """Expected calibration error: |mean probability - rate| over equal bins, weighted by count."""
    place = np.minimum((probability * BINS).astype(int), BINS - 1)
    excess = np.bincount(place, weights=probability - happened, minlength=BINS)
    return float(np.abs(excess).sum() / len(probability))


def figures(agree: np.ndarray, confidence: np.ndarray) -> dict:
    """What blocks amount to; a draft is reached if all before it in its block were accepted."""
    accepted = np.logical_and.accumulate(agree, axis=1)
    reached = np.concatenate([np.ones((len(agree), 1), bool), accepted[:, :-1]], axis=1)
    counts = accepted.sum(axis=0).tolist(), reached.sum(axis=0).tolist()
    return {
        "blocks": len(agree),
        "tokens_per_step": float(1 + accepted.sum(axis=1).mean()),
        "cumulative": accepted.mean(axis=0).tolist(),
        "reached": counts[1],
        "conditional": [a / r if r else None for a, r in zip(*counts, strict=True)],
        "confidence": float(confidence[reached].mean()),
        "acceptance": float(agree[reached].mean()),
        "calibration_error": calibration_error(confidence[reached], agree[reached]),
    }


def report(temperature: float, kind: str, f: dict) -> None:
    """Two lines about the blocks of a kind at a temperature."""
    print(
        f"temperature {temperature:g}  {kind:5s}  {f['tokens_per_step']:.3f} tokens per step  "
        f"({f['blocks']} blocks)  drafts reached {sum(f['reached'])}, accepted "
        f"{f['acceptance']:.3f}, confidence {f['confidence']:.3f}, calibration error "
        f"{f['calibration_error']:.3f}"
    )
    for name in ("conditional", "cumulative"):
        print(
            f"    accepted, {name:12s}"
            + " ".join("  -  " if x is None else f"{x:.3f}" for x in f[name])
        )


def main() -> None:
    """Print a table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", default="tiny")
    parser.add_argument("--heldout", type=Path, default=HERE / "build" / "heldout")
    parser.add_argument("--batch", type=int, default=128, help="pieces at a time")
    parser.add_argument("--documents", type=int, help="only so many, spread over all")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    model = di.load(options.checkpoint)
    kinds = json.loads((options.heldout / "documents.json").read_text())
    kinds = np.array([d["kind"] for d in kinds])
    many = min(options.documents or len(kinds), len(kinds))
    chosen = np.linspace(0, len(kinds) - 1, many).round().astype(int)
    tokens, offsets = (np.load(options.heldout / f"{n}.npy") for n in ("tokens", "offsets"))
    parts, document = zip(*pieces(tokens, offsets, chosen), strict=True)
    kind_of_text, result = kinds[list(document)], {}
    with tqdm(total=len(parts) * len(TEMPERATURES), unit="piece") as progress:
        for temperature in TEMPERATURES:
            sampling = di.Sampling(temperature=jnp.float32(temperature))
            agree, confidence, text = blocks(model, parts, sampling, options.batch, progress)
            kind = kind_of_text[text]
            of_kind = {"all": kind == kind} | {k: kind == k for k in sorted(set(kind))}
            result[f"{temperature:g}"] = {
                name: figures(agree[mask], confidence[mask]) for name, mask in of_kind.items()
            }
    for temperature, by_kind in result.items():
        for kind, f in by_kind.items():
            report(float(temperature), kind, f)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
