"""Trains the tokenizer of the embedded `tiny` checkpoint and encodes its corpus.

A byte-level BPE of 4,096 ids with the pre-tokenisation and the special tokens of the released
tokenizer (spec recipe 1.1 and 1.2): BOS, EOS and PAD are ids 0, 1 and 2, the other special
tokens keep their order at the end of the vocabulary. There is no normaliser, nothing is added
to a text, and every text decodes to itself.

    python training/tiny/tokenizer.py     ->  build/tokenizer.json
        build/train.npy             uint16 [tokens], documents one after the other
        build/heldout/tokens.npy    uint16 [tokens], the same
        build/heldout/offsets.npy   int64 [documents + 1], where each document starts
        build/heldout/bytes.npy     int64 [documents], length of each text
        build/heldout/documents.json  path, package and kind of each document
"""

import json
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

BUILD = Path(__file__).parent / "build"
VOCABULARY = 4096
TRAINING_SAMPLE = 30_000_000  # characters
LARGEST_TOKEN_BYTES = 24

FIRST = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
LAST = tuple(
    """
    <｜System｜> <｜fim▁hole｜> <｜fim▁begin｜> <｜fim▁end｜> <｜User｜> <｜Assistant｜>
    <think> </think> ｜DSML｜ <｜latest_reminder｜>
    <｜action｜> <｜query｜> <｜authority｜> <｜domain｜> <｜title｜> <｜read_url｜>
    <｜deepseek_image｜>
    <｜/polygon｜> <｜polygon｜> <｜/point｜> <｜point｜> <｜/box｜> <｜box｜> <｜/ref｜> <｜ref｜>
    """.split()
)
GROUNDING = LAST[-8:]
BOS, EOS = 0, 1

# Runs of one to three digits; runs of Chinese characters and kana; then a letter run with the
# character before it, a symbol run with its line ends, and blank space up to the next word.
DIGITS = r"\p{N}{1,3}"
CHINESE = r"[一-龥぀-ゟ゠-ヿ]+"
WORDS = (
    r"[!-/:-@\[-`{-~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def special_token(text: str) -> AddedToken:
    """The flags of the released file: only the document marks and grounding tokens are special."""
    special = text in FIRST or text in GROUNDING
    as_written = special or text == "<｜deepseek_image｜>"
    return AddedToken(text, special=special, normalized=not as_written)


def splitter() -> pre_tokenizers.PreTokenizer:
    """Pre-tokenisation: three isolating splits, then bytes."""
    rules = [pre_tokenizers.Split(Regex(r), "isolated") for r in (DIGITS, CHINESE, WORDS)]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*rules, byte_level])


def train(texts: list[str]) -> Tokenizer:
    """Learns the merges from a sample of the corpus and lays out the vocabulary."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = splitter()
    learner.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY - len(FIRST) - len(LAST),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            max_token_length=LARGEST_TOKEN_BYTES,
            show_progress=True,
        ),
    )
    model = json.loads(learner.to_str())["model"]
    learned = sorted(model["vocab"], key=model["vocab"].get)
    vocabulary = {token: i for i, token in enumerate((*FIRST, *learned, *LAST))}
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = splitter()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([special_token(text) for text in (*FIRST, *LAST)])
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise RuntimeError(
            f"the vocabulary has {tokenizer.get_vocab_size()} ids, expected {VOCABULARY}; "
            "the training sample is too small"
        )
    return tokenizer


def documents(name: str) -> list[dict]:
    """Reads one split written by corpus.py."""
    with (BUILD / f"{name}.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def sample(texts: list[str]) -> list[str]:
    """Every n-th text, so that the sample is spread over all sources."""
    step = max(1, round(sum(map(len, texts)) / TRAINING_SAMPLE))
    return texts[::step]


def encode(tokenizer: Tokenizer, texts: list[str], name: str) -> list[np.ndarray]:
    """Encodes texts as documents: BOS, tokens, EOS; each uint16 [length].

    A special token written out inside a text is text, so the encoder here knows none of them.
    """
    plain = Tokenizer(tokenizer.model)
    plain.pre_tokenizer, plain.decoder = tokenizer.pre_tokenizer, tokenizer.decoder
    arrays = []
    for start in tqdm(range(0, len(texts), 256), desc=name, unit="batch"):
        batch = texts[start : start + 256]
        for text, encoding in zip(batch, plain.encode_batch_fast(batch), strict=True):
            if plain.decode(encoding.ids, skip_special_tokens=False) != text:
                raise RuntimeError(f"a text does not survive encoding: {text[:80]!r}")
            arrays.append(np.array([BOS, *encoding.ids, EOS], np.uint16))
    return arrays


def main() -> None:
    """Trains, encodes both splits and prints the sizes."""
    splits = {name: documents(name) for name in ("train", "heldout")}
    texts = {name: [d["text"] for d in ds] for name, ds in splits.items()}
    tokenizer = train(sample(texts["train"]))
    tokenizer.save(str(BUILD / "tokenizer.json"), pretty=False)

    arrays = {name: encode(tokenizer, ts, name) for name, ts in texts.items()}
    np.save(BUILD / "train.npy", np.concatenate(arrays["train"]))
    heldout = BUILD / "heldout"
    heldout.mkdir(exist_ok=True)
    lengths = [len(a) for a in arrays["heldout"]]
    np.save(heldout / "tokens.npy", np.concatenate(arrays["heldout"]))
    np.save(heldout / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    np.save(heldout / "bytes.npy", np.array([len(t.encode()) for t in texts["heldout"]], np.int64))
    facts = [{key: d[key] for key in ("path", "package", "kind")} for d in splits["heldout"]]
    (heldout / "documents.json").write_text(json.dumps(facts, indent=0) + "\n")

    for name, ds in splits.items():
        for kind in ("code", "prose"):
            chosen = [i for i, d in enumerate(ds) if d["kind"] == kind]
            size = sum(len(texts[name][i].encode()) for i in chosen)
            count = sum(len(arrays[name][i]) - 2 for i in chosen)
            print(
                f"{name} {kind}: {len(chosen)} documents, {size:,} bytes, {count:,} tokens, "
                f"{size / count:.3f} bytes per token"
            )


if __name__ == "__main__":
    main()
