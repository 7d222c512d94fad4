"""The embedded checkpoint's drafter over hundreds of prompts: same text, fewer steps.

Half of the prompts are greedy, the others sampled with every kind of cut and penalty; some end at a
stop inside a block. The prompts are pieces of this repository's sources.
"""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest

import deepinfer_jax as di

COUNT, BATCH, PROMPT, N = 208, 52, 20, 20
FIELDS = ("tokens", "lengths", "logprobs", "processed_logprobs", "finish")
SOURCES = Path(di.__file__).parent
NUMERICS = {
    "default": di.Numerics(reproducible=True),
    "float32": di.Numerics("float32", reproducible=True),
}


@functools.cache
def llm(numerics):
    return di.LLM("tiny", numerics=NUMERICS[numerics])


@functools.cache
def prompts():
    """Tokens [COUNT, PROMPT] and lengths, from 3 tokens up."""
    text = "\n".join(p.read_text() for p in sorted(SOURCES.glob("model/*.py")))
    ids = np.array(llm("default").encode(text), np.int32)
    places = np.linspace(1, len(ids) - PROMPT, COUNT).astype(int)
    tokens = ids[places[:, None] + np.arange(PROMPT)]
    tokens[:, 0] = ids[0]
    return tokens, np.random.default_rng(0).integers(3, PROMPT + 1, COUNT).astype(np.int32)


@functools.cache
def sampling():
    rng = np.random.default_rng(1)
    sampled = np.arange(COUNT) % 2 == 1

    def some(share, values, off):
        use = sampled & (rng.random(COUNT) < share)
        return np.where(use, values, off).astype(np.float32)

    return di.Sampling(
        temperature=some(1, rng.choice([0.3, 0.7, 1.0, 1.5], COUNT), 0),
        top_p=some(0.4, rng.uniform(0.5, 1, COUNT), 1),
        top_k=np.where(rng.random(COUNT) < 0.3, 20, -1).astype(np.int32),
        min_p=some(0.2, 0.05, 0),
        repetition_penalty=np.where(rng.random(COUNT) < 0.3, 1.3, 1).astype(np.float32),
        presence_penalty=some(0.3, 0.6, 0),
        frequency_penalty=np.where(rng.random(COUNT) < 0.3, 0.4, 0).astype(np.float32),
    )


@functools.cache
def texts(numerics, draft, num_drafts=None):
    """Fields of `Generation` over all prompts, and the stats of each batch."""
    model, (tokens, lengths) = llm(numerics).model, prompts()
    newline = llm(numerics).encode("\n")[1:2]
    parts = []
    for first in range(0, COUNT, BATCH):
        some = slice(first, first + BATCH)
        result = di.generate(
            model, tokens[some], lengths[some], seeds=np.arange(COUNT, dtype=np.uint32)[some],
            max_new_tokens=N, sampling=jax.tree.map(lambda a, s=some: a[s], sampling()),
            stop_ids=newline, draft=draft, num_drafts=num_drafts,
        )  # fmt: skip
        parts.append(jax.tree.map(np.asarray, result))
    return {f: np.concatenate([getattr(p, f) for p in parts]) for f in FIELDS}, parts


def assert_same_as_undrafted(numerics, draft, num_drafts=None):
    expected, _ = texts(numerics, None)
    found, parts = texts(numerics, draft, num_drafts)
    for field in FIELDS:
        assert np.array_equal(found[field], expected[field]), field
    steps = sum(p.stats.steps.sum() for p in parts)
    assert steps < 0.9 * found["lengths"].sum()
    return found, parts


@pytest.mark.parametrize("draft", [pytest.param("fixed", marks=pytest.mark.slow), "scheduled"])
def test_drafts_change_no_text_of_208(draft):
    found, parts = assert_same_as_undrafted("default", draft)
    ended = found["finish"] == di.Finish.STOP
    assert ended.sum() > 20 and (~ended).sum() > 20
    # Stops fell inside blocks: sequences ended with more tokens than steps.
    steps = np.concatenate([p.stats.steps for p in parts])
    assert (ended & (steps < found["lengths"])).sum() > 10


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4])
def test_no_number_of_drafts_changes_a_text_of_208(num_drafts):
    assert_same_as_undrafted("default", "fixed", num_drafts)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["fixed", "scheduled"])
def test_drafts_change_no_text_of_208_in_float32(draft):
    assert_same_as_undrafted("float32", draft)
