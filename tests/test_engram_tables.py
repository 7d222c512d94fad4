"""Claims about Engram's constants (spec 8.1, 8.2, Appendix A.1)."""

import dataclasses

import numpy as np
import pytest
from golden_files import ROOT, Case, read
from tokenizers import AddedToken

from deepinfer_jax.config import Config
from deepinfer_jax.model.engram_tables import (
    checked_token_map,
    multipliers,
    offsets,
    primes,
    primes_from,
    token_map,
)
from deepinfer_jax.testing import byte_tokenizer, tiny_config

pytestmark = pytest.mark.filterwarnings("ignore:.*rule 1[56]")

TOKENS = (10, 20, 30, 40)  # compressed ids, current first (Appendix A.1)
ROWS = {
    1: [
        10250667, 16051853, 42761335, 48437066, 64953759, 91793642, 97213675, 124972355,
        130904169, 147647512, 174479789, 176217609, 193213014, 209711443, 226459680, 248375762,
        266647502, 284737834, 292200621, 319934002, 327756510, 339491046, 365830131, 381142068,
    ],
    14: [
        13402985, 31185432, 33324312, 50751051, 67464774, 94528317, 100959033, 120176944,
        128818944, 152218109, 160998468, 191796781, 195587060, 214176773, 229162919, 250160180,
        260141385, 283855289, 300526134, 319101158, 333879786, 349356468, 360884307, 370522085,
    ],
}  # fmt: skip


def small_config() -> Config:
    """The configuration of the "small" set of golden/components/engram."""
    return tiny_config(
        vocab_size=300,
        engram_layer_ids=(0, 2, 5),
        engram_vocab_size=97,
        engram_n_heads=3,
        engram_max_ngram_size=3,
        engram_pad_token_id=5,
        engram_compressed_vocab_size=211,
    )


@pytest.mark.parametrize(("name", "make"), [("released", Config.flash), ("small", small_config)])
def test_constants_equal_the_golden_ones(name, make):
    golden = read(ROOT / "components" / "engram.safetensors")
    config = make()
    np.testing.assert_array_equal(primes(config), golden[f"{name}.primes"])
    np.testing.assert_array_equal(offsets(config), golden[f"{name}.offsets"])
    np.testing.assert_array_equal(multipliers(config), golden[f"{name}.multipliers"])


def test_constants_give_the_rows_of_the_appendix():
    config = Config.flash()
    for position, layer in enumerate(config.engram_layer_ids):
        rows, hashed = [], 0
        for back, token in enumerate(TOKENS):
            hashed ^= token * int(multipliers(config)[position, back])
            if back:
                columns = slice(8 * (back - 1), 8 * back)
                rows += [
                    hashed % int(prime) + int(offset)
                    for prime, offset in zip(
                        primes(config)[position, columns],
                        offsets(config)[position, columns],
                        strict=True,
                    )
                ]
        assert rows == ROWS[layer]


def test_products_never_leave_signed_64_bits():
    config = Config.flash()
    largest = int(multipliers(config).max()) * (config.engram_compressed_vocab_size - 1)
    assert largest < 2**63


def test_primes_equal_trial_division():
    def is_prime(number):
        return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))

    for start, count in ((0, 30), (2, 1), (41, 500), (16_000_000, 3)):
        expected, number = [], start
        while len(expected) < count:
            if is_prime(number):
                expected.append(number)
            number += 1
        assert primes_from(start, count).tolist() == expected


def test_no_engram_layers_mean_empty_tables():
    config = tiny_config(engram_layer_ids=())
    assert primes(config).shape == (0, 4)
    assert multipliers(config).shape == (0, 3)


@pytest.mark.parametrize("case", ["flash_mini", "vision_engram", "dspark", "quantised"])
def test_token_map_equals_the_golden_one(case):
    golden = Case(case).files["f32"]["engram.token_map"]
    config = Config.read(ROOT / case)
    mapped = checked_token_map(config, Case(case).tokenizer)
    assert mapped.dtype == np.int32
    np.testing.assert_array_equal(mapped, golden)


def test_tokens_that_look_alike_share_an_id():
    tokenizer = byte_tokenizer()
    mapped = token_map(tokenizer)
    ids = {text: tokenizer.token_to_id(text) for text in ("A", "a", "b", "Ġ", "Ċ", "ĉ")}
    assert mapped[ids["A"]] == mapped[ids["a"]] != mapped[ids["b"]]
    assert mapped[ids["Ġ"]] == mapped[ids["Ċ"]] == mapped[ids["ĉ"]]  # space, line feed, tab
    partial = [index for index in range(266) if "\ufffd" in tokenizer.decode([index])]
    assert len(partial) == 128
    assert len(set(mapped[partial].tolist())) == 128  # incomplete UTF-8 stays apart
    assert mapped[:3].tolist() == [0, 1, 2]


def test_another_tokenizer_is_refused():
    config = tiny_config()
    checked_token_map(config, byte_tokenizer())
    other = byte_tokenizer()
    other.add_tokens([AddedToken("extra", normalized=False)])
    with pytest.raises(ValueError, match="238 compressed ids, .* is 237"):
        checked_token_map(config, other)
    with pytest.raises(ValueError, match="engram_pad_token_id = 290 is not among .* 266 tokens"):
        checked_token_map(
            dataclasses.replace(config, vocab_size=300, engram_pad_token_id=290), byte_tokenizer()
        )
