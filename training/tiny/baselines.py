"""Bits per byte of general compressors and of byte n-gram models on the held-out documents.

`xz` (level 9, extreme) sees the held-out text alone: once as one stream, its best case, and once
file by file. The n-gram models see the training text, predict each byte from the n - 1 before
it, and start every document afresh. They use interpolated Kneser-Ney smoothing with three
discounts per order (Chen and Goodman, 1999), so that no probability mass is wasted.

    python training/tiny/baselines.py     ->  build/baselines.json
"""

import json
import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

BUILD = Path(__file__).parent / "build"
ORDERS = (5, 7)  # a key of n bytes must fit the 64 bits of its integer


def documents(name: str) -> list[dict]:
    """Reads one split written by corpus.py."""
    with (BUILD / f"{name}.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def as_bytes(texts: list[str], order: int) -> tuple[np.ndarray, np.ndarray]:
    """Joins texts, each after order - 1 zero bytes.

    Returns the bytes, uint8 [N], and bool [N] that is False on the zero bytes put in.
    """
    start = b"\0" * (order - 1)
    joined = np.frombuffer(b"".join(start + t.encode() for t in texts), np.uint8)
    lengths = np.array([len(t.encode()) for t in texts])
    real = np.ones(len(joined), bool)
    begins = np.cumsum(lengths + order - 1) - lengths - order + 1
    for shift in range(order - 1):
        real[begins + shift] = False
    return joined, real


def keys(text: np.ndarray, real: np.ndarray, order: int) -> np.ndarray:
    """The n-gram that ends at each real byte, first byte highest; uint64 [real bytes]."""
    key = np.zeros(len(text), np.uint64)
    for back in range(order):
        key[back:] |= text[: len(text) - back].astype(np.uint64) << np.uint64(8 * back)
    return key[real]


@dataclass(frozen=True)
class Level:
    """Discounted counts of one order: G distinct n-grams in C distinct contexts, both sorted."""

    grams: np.ndarray  # uint64 [G]
    probability: np.ndarray  # float64 [G], discounted count over the total of its context
    contexts: np.ndarray  # uint64 [C]
    backoff: np.ndarray  # float64 [C], the mass left to the order below


def level(grams: np.ndarray, counts: np.ndarray) -> Level:
    """Applies the three discounts of modified Kneser-Ney to one order's counts."""
    n1, n2, n3, n4 = (max(1, np.count_nonzero(counts == k)) for k in (1, 2, 3, 4))
    y = n1 / (n1 + 2 * n2)
    discounts = np.clip([0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3], 0, None)
    discounts = np.minimum(discounts, [0, 1, 2, 3])
    discount = discounts[np.minimum(counts, 3)]  # [G]
    contexts, first = np.unique(grams >> np.uint64(8), return_index=True)
    totals = np.add.reduceat(counts.astype(np.float64), first)  # [C]
    sizes = np.diff([*first, len(grams)])
    return Level(
        grams=grams,
        probability=(counts - discount) / np.repeat(totals, sizes),
        contexts=contexts,
        backoff=np.add.reduceat(discount, first) / totals,
    )


def train(texts: list[str], order: int) -> list[Level]:
    """Levels of orders 1 .. order; below the highest, counts are of distinct preceding bytes."""
    key = keys(*as_bytes(texts, order), order)
    key.sort()
    first = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
    grams, counts = key[first], np.diff([*first, len(key)])
    levels = [level(grams, counts)]
    for n in range(order - 1, 0, -1):
        grams, counts = np.unique(grams & np.uint64(2 ** (8 * n) - 1), return_counts=True)
        levels.insert(0, level(grams, counts))
    return levels


def find(table: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Index of each wanted value in a sorted table, and whether it is there."""
    index = np.minimum(np.searchsorted(table, wanted), len(table) - 1)
    return index, table[index] == wanted


def probabilities(levels: list[Level], key: np.ndarray) -> np.ndarray:
    """Probability of the last byte of each n-gram after the bytes before it; float64 [N]."""
    result = np.full(len(key), 1 / 256)
    for n, table in enumerate(levels, start=1):
        gram = key & np.uint64(2 ** (8 * n) - 1)
        context, known = find(table.contexts, gram >> np.uint64(8))
        result *= np.where(known, table.backoff[context], 1.0)
        place, seen = find(table.grams, gram)
        result += np.where(seen, table.probability[place], 0.0)
    return result


def ngram_bits(train_texts: list[str], heldout: list[str], order: int) -> np.ndarray:
    """Bits that an n-gram model spends on each held-out text; float64 [documents]."""
    levels = train(train_texts, order)
    bits = -np.log2(probabilities(levels, keys(*as_bytes(heldout, order), order)))
    lengths = [len(t.encode()) for t in heldout]
    return np.add.reduceat(bits, np.cumsum([0, *lengths[:-1]]))


def xz_bits(data: bytes) -> int:
    """Size in bits of an xz stream of the data."""
    return 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))


def main() -> None:
    """Prints the table and writes it."""
    heldout = documents("heldout")
    texts = [d["text"] for d in heldout]
    train_texts = [d["text"] for d in documents("train")]
    size = np.array([len(t.encode()) for t in texts])
    kinds = {
        "all": np.ones(len(texts), bool),
        **{kind: np.array([d["kind"] == kind for d in heldout]) for kind in ("code", "prose")},
    }
    table = {
        "xz -9e, one stream": {
            name: xz_bits(b"".join(t.encode() for t, c in zip(texts, chosen, strict=True) if c))
            / size[chosen].sum()
            for name, chosen in kinds.items()
        }
    }
    per_document = {"xz -9e, each file": np.array([xz_bits(t.encode()) for t in texts])}
    for order in tqdm(ORDERS, desc="n-gram orders"):
        per_document[f"byte {order}-gram, Kneser-Ney"] = ngram_bits(train_texts, texts, order)
    for row, bits in per_document.items():
        table[row] = {name: bits[c].sum() / size[c].sum() for name, c in kinds.items()}

    print(f"{'bits per byte':28s}" + "".join(f"{name:>8s}" for name in kinds))
    for row, values in table.items():
        print(f"{row:28s}" + "".join(f"{values[name]:8.3f}" for name in kinds))
    report = {"heldout_bytes": int(size.sum()), "documents": len(texts), "bits_per_byte": table}
    (BUILD / "baselines.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
