"""The constants behind Engram's hash (spec 8.1, 8.2): primes, offsets, multipliers, token map.

All are host NumPy, derived from the configuration and the tokenizer alone. L Engram layers,
N = engram_max_ngram_size, C = (N - 1) * engram_n_heads columns, by n-gram length, then by head.
A wrong constant moves every looked-up row without any other sign, so all are derived here, and
the size of the token map is checked.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from deepinfer_jax.config import Config

_SEED = 10007
_BLANK = "\ue000"  # stands for a lone space while white space is stripped (spec 8.1)
_PARTIAL = "\ufffd"  # what an incomplete UTF-8 sequence decodes to


def primes(config: Config) -> np.ndarray:
    """Hash modulus of every column, int64 [L, C].

    No prime occurs twice in the model; each n-gram length of a layer starts its search at
    `engram_vocab_size` again and takes the next unused ones.
    """
    layers = len(config.engram_layer_ids)
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    # Every search takes the smallest unused primes above one and the same start, so together
    # they take consecutive primes.
    return primes_from(config.engram_vocab_size, layers * columns).reshape(layers, columns)


@lru_cache(maxsize=64)
def primes_from(start: int, count: int) -> np.ndarray:
    """The `count` smallest primes >= start, int64 [count], by a segmented sieve."""
    found = np.zeros(0, np.int64)
    width = max(4096, 32 * count)
    while found.size < count:
        stop = start + width
        segment = np.arange(start, stop, dtype=np.int64)
        prime = segment >= 2
        for divisor in range(2, int(stop**0.5) + 1):
            first = max(divisor * divisor, -(-start // divisor) * divisor)
            prime[first - start :: divisor] = False
        found = np.concatenate([found, segment[prime]])
        start = stop
    found = found[:count]
    found.setflags(write=False)
    return found


def offsets(config: Config) -> np.ndarray:
    """First table row of every column, int64 [L, C]."""
    sizes = primes(config)
    return np.cumsum(sizes, axis=1) - sizes


def multipliers(config: Config) -> np.ndarray:
    """Odd factors of the hash, int64 [L, N]; column s belongs to the token s positions back."""
    bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
    rows = [
        np.random.default_rng(_SEED * layer).integers(
            0, bound, config.engram_max_ngram_size, dtype=np.int64
        )
        for layer in config.engram_layer_ids
    ]
    return 2 * np.array(rows, np.int64).reshape(-1, config.engram_max_ngram_size) + 1


def checked_token_map(config: Config, tokenizer: Tokenizer) -> np.ndarray:
    """The `token_map` of the model's own tokenizer, int32 [number of tokens].

    Raises:
      ValueError: the tokenizer does not fit the model. Every multiplier depends on the number of
        compressed ids, so another build of the tokenizer would look up wrong rows everywhere.
    """
    mapped = token_map(tokenizer)
    size = int(mapped.max(initial=-1)) + 1
    if size != config.engram_compressed_vocab_size:
        raise ValueError(
            f"the tokenizer has {size} compressed ids, engram_compressed_vocab_size is "
            f"{config.engram_compressed_vocab_size}: it is not this model's tokenizer "
            "(spec 1.4, rule 16)"
        )
    if config.engram_pad_token_id >= len(mapped):
        raise ValueError(
            f"engram_pad_token_id = {config.engram_pad_token_id} is not among the tokenizer's "
            f"{len(mapped)} tokens (spec 1.4, rule 16)"
        )
    return mapped


def token_map(tokenizer: Tokenizer) -> np.ndarray:
    """Compressed id of every token id, int32 [number of tokens].

    Tokens whose text differs only in case, accents, width or white space share an id. Ids are given
    in the order of first occurrence, so `token_map(t).max() + 1` is the compressed vocabulary size.

    Args:
      tokenizer: the model's tokenizer; its added tokens take part.
    """
    from tokenizers import Regex, normalizers

    fold = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _BLANK),
            normalizers.Strip(),
            normalizers.Replace(_BLANK, " "),
        ]
    )
    ids: dict[str, int] = {}
    compressed = np.empty(tokenizer.get_vocab_size(with_added_tokens=True), np.int32)
    for token in range(len(compressed)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if _PARTIAL in text:
            key = tokenizer.id_to_token(token)
        else:
            key = fold.normalize_str(text) or text
        compressed[token] = ids.setdefault(key, len(ids))
    return compressed
