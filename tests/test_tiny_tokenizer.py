"""The tokenizer shipped with the `tiny` checkpoint (spec recipe 1.1 and 1.2).

It must carry the special tokens of the released tokenizer with their flags, split text by the
same rules, add nothing, and give back every text exactly.
"""

from importlib import resources

import pytest
from tokenizers import Tokenizer

VOCABULARY = 4096
FIRST = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
LAST = (
    ["<｜System｜>", "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"]
    + ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>"]
    + ["<｜action｜>", "<｜query｜>", "<｜authority｜>"]
    + ["<｜domain｜>", "<｜title｜>", "<｜read_url｜>", "<｜deepseek_image｜>"]
    + ["<｜/polygon｜>", "<｜polygon｜>", "<｜/point｜>", "<｜point｜>"]
    + ["<｜/box｜>", "<｜box｜>", "<｜/ref｜>", "<｜ref｜>"]
)
TRICKY = {
    "empty": "",
    "blank": " ",
    "control characters": "".join(map(chr, range(32))) + "\x7f",
    "latin-1": "".join(map(chr, range(32, 256))),
    "tabs": "\tif x:\n\t\treturn 1\n\t \t# mixed\n",
    "carriage returns": "a\r\nb\r\n\r\nc\rd\n\re",
    "indentation": "def f(n):\n    if n:\n            return n\n\n\n    return 0\n",
    "outer spaces": "   leading and trailing  \n\n\n",
    "digits": "1234567890 12 3 3.14159 0x7f 1_000_000 ٣٤٥",
    "Chinese": "毕老师！你好，世界。1+1=2",
    "Japanese": "日本語のテキスト、カタカナ",
    "Korean and Thai": "안녕하세요 สวัสดีครับ",
    "right to left": "שלום עולם مرحبا بالعالم",
    "emoji": "👩‍👩‍👧‍👦 🧪 🇫🇷 👍🏽",
    "not normalised": "e\u0301 é ﬁ ﬀ 𝔘 Å Å \u00a0\u2003\u200b\ufeff",
    "outside the BMP": "\U00010348\U0010ffff",
    "replacement character": "a\ufffdb",
    "code": "x = {'a': [1, 2], **kw}  # ok -> `y`\nassert f(x)[::-1] != \"\\n\"\n",
    "apostrophes": "don't can't WE'LL it’s",
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    text = resources.files("deepinfer_jax").joinpath("assets/tiny/tokenizer.json").read_text("utf8")
    return Tokenizer.from_str(text)


def test_vocabulary_has_4096_ids_without_gaps(tokenizer):
    assert sorted(tokenizer.get_vocab().values()) == list(range(VOCABULARY))


def test_special_tokens_stand_at_both_ends_in_released_order(tokenizer):
    ends = [*range(3), *range(VOCABULARY - len(LAST), VOCABULARY)]
    assert [tokenizer.id_to_token(i) for i in ends] == FIRST + LAST
    assert tokenizer.token_to_id("<｜System｜>") == 4071


@pytest.mark.parametrize("text", FIRST + LAST)
def test_special_token_is_one_id_inside_text(tokenizer, text):
    token = tokenizer.token_to_id(text)
    ids = tokenizer.encode(f"a {text}b").ids
    assert ids.count(token) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"a {text}b"


def test_only_document_marks_and_grounding_tokens_are_hidden(tokenizer):
    hidden = {t for t in FIRST + LAST if tokenizer.decode([tokenizer.token_to_id(t)]) == ""}
    assert hidden == set(FIRST + LAST[-8:])


def test_flags_are_those_of_the_released_file(tokenizer):
    added = tokenizer.get_added_tokens_decoder()
    assert len(added) == len(FIRST + LAST)
    as_written = {t.content for t in added.values() if not t.normalized}
    assert as_written == set(FIRST + LAST[-8:] + ["<｜deepseek_image｜>"])
    assert not any(t.lstrip or t.rstrip or t.single_word for t in added.values())


@pytest.mark.parametrize("text", TRICKY.values(), ids=TRICKY.keys())
def test_text_survives_encoding(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_every_character_of_the_first_plane_survives(tokenizer):
    text = "".join(chr(c) for c in range(0x10000) if not 0xD800 <= c < 0xE000)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_nothing_is_added_to_a_text(tokenizer):
    assert tokenizer.encode("").ids == []
    assert tokenizer.encode("import").tokens == ["import"]
    assert tokenizer.normalizer is None and tokenizer.post_processor is None


def test_each_byte_has_an_id_of_its_own(tokenizer):
    # A lead byte alone is never valid UTF-8: it decodes to the replacement character.
    single = [i for i in range(3, VOCABULARY - len(LAST)) if len(tokenizer.id_to_token(i)) == 1]
    assert len(single) == 256


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("1234567", ["123", "456", "7"]),
        ("self.name", ["self", ".name"]),
        ("x 12", ["x", " ", "12"]),
        ("    return", ["   ", " return"]),
        ("):\n        return", ["):\n", "       ", " return"]),
        ("a\n\nb", ["a", "\n\n", "b"]),
    ],
)
def test_splits_as_the_released_tokenizer_does(tokenizer, text, pieces):
    split = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[a:b] for _, (a, b) in split] == pieces


def test_indentation_and_line_ends_are_single_tokens(tokenizer):
    for run in ("   ", " " * 7, " " * 11, "\n", "\n\n", ":\n", "):\n"):
        assert len(tokenizer.encode(run).ids) == 1, run


def test_code_and_prose_take_few_tokens(tokenizer):
    code = "def add(self, value):\n    if value is None:\n        return self\n"
    prose = "The function returns the number of items that are in the list.\n"
    assert len(tokenizer.encode(code).ids) <= 20
    assert len(tokenizer.encode(prose).ids) <= 15
