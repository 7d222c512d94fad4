"""The embedded checkpoint: what it says, what it scores, and that every mechanism is at work in it.

Another CPU rounds sums in another order. How much that matters was measured once with two sets of
kernels on one CPU (fast against reproducible numerics, 512 greedy positions of 16 prompts): half of
all margins between the two best logits moved by more than 0.05, one in ten by more than 0.18, one
in a hundred by more than 0.41, because a value that falls into the next 4 or 8 bit code makes a
large step. The largest margin that was overturned was 0.165.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from make_tiny_greedy import GREEDY, HELDOUT, NEW_TOKENS, PROMPTS, bits, greedy, padded

import deepinfer_jax as di

MARGIN_BOUND = 0.25
FEWEST_COMPARED = 10
# The same two sets of kernels disagree by 0.2 % about the cost of these documents.
BITS_TOLERANCE = 0.01
LARGEST_CHECKPOINT = 12_000_000
ASSETS = Path(di.__file__).parent / "assets" / "tiny"
DOCUMENTS = json.loads(HELDOUT.read_text())


@pytest.fixture(scope="module")
def llm() -> di.LLM:
    return di.LLM("tiny")


@pytest.fixture(scope="module")
def scored(llm):
    """The held-out documents, their lengths, logits and captured arrays."""
    tokens, lengths = padded(llm, [d["text"] for d in DOCUMENTS])
    capture = ("selection", "router", "engram", "streams")
    out = di.forward(llm.model, tokens, lengths, capture=capture)
    return tokens, lengths, out.logits, {k: np.asarray(v) for k, v in out.captured.items()}


def rows(array: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The rows [T, ...] of an array [B, S, ...] that are no padding."""
    return np.concatenate([a[:n] for a, n in zip(array, lengths, strict=True)])


def test_greedy_text_is_the_stored_one_as_far_as_margins_allow(llm):
    stored = json.loads(GREEDY.read_text())
    assert [s["prompt"] for s in stored] == list(PROMPTS)
    for completion, expected in zip(greedy(llm), stored, strict=True):
        assert expected["smallest_margin"] == min(expected["margins"])
        narrow = [m < MARGIN_BOUND for m in expected["margins"]] + [True]
        compared = narrow.index(True)
        assert compared >= FEWEST_COMPARED
        assert len(completion.token_ids) == NEW_TOKENS
        assert completion.token_ids[:compared] == expected["tokens"][:compared]


def test_held_out_documents_cost_the_stored_bits(scored):
    tokens, lengths, logits, _ = scored
    cost = bits(logits, tokens, lengths)
    for document, found in zip(DOCUMENTS, cost, strict=True):
        assert found == pytest.approx(document["bits"], rel=BITS_TOLERANCE)


def test_held_out_documents_cost_less_than_any_baseline(scored):
    tokens, lengths, logits, _ = scored
    size = sum(len(d["text"].encode()) for d in DOCUMENTS)
    # 1.698 is what a Kneser-Ney model of 7 bytes, the best baseline, needs on all held-out files.
    assert bits(logits, tokens, lengths).sum() / size < 1.698


def test_checkpoint_is_small():
    sizes = {file.name: file.stat().st_size for file in ASSETS.iterdir()}
    assert set(sizes) == {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert sum(sizes.values()) <= LARGEST_CHECKPOINT


def test_configuration_has_every_mechanism(llm):
    config = llm.model.config
    assert {role.mode for role in config.layers} == {"window", "full", "reindex", "reuse"}
    assert {role.ratio for role in config.layers} == {0, 1, 2}
    assert any(role.candidate_source for role in config.layers)
    assert any(role.restricted for role in config.layers)
    assert len(config.engram_layer_ids) == 2 and config.num_nextn_predict_layers > 0
    assert config.quantized and config.hc_mult > 1 and config.n_routed_experts > 1


def test_queries_select_entries_from_beyond_their_window(llm, scored):
    _, lengths, _, captured = scored
    config = llm.model.config
    position = rows(np.broadcast_to(np.arange(512), (2, 512)), lengths)
    for layer in config.index_source_layer_ids:
        selected = rows(captured[f"topk.{layer}"], lengths)  # [T, K]
        ratio = config.layers[layer].ratio
        last = selected * ratio + ratio - 1
        assert (last <= position[:, None])[selected >= 0].all()
        beyond = (selected >= 0) & (last <= position[:, None] - config.sliding_window)
        late = position >= 4 * config.sliding_window
        assert beyond[late].any(axis=1).mean() > 0.95 and beyond[late].mean() > 0.1


def test_candidates_leave_out_visible_entries_and_bind_the_restricted_layer(llm, scored):
    _, lengths, _, captured = scored
    config = llm.model.config
    source = config.candidate_source_layer_id
    (restricted,) = (role.index for role in config.layers if role.restricted)
    most = config.candidate_topk_blocks * config.candidate_block_size
    for document, length in enumerate(lengths):
        inside = captured[f"candidates.{source}"][document]  # [S, entries]
        for query in (most - 1, most, length - 1):
            visible = query + 1
            expected = min(visible, most)
            # The newest block counts in full although it may be only partly filled.
            assert expected - config.candidate_block_size < inside[query].sum() <= expected
            assert not inside[query, visible:].any()
        chosen = captured[f"topk.{restricted}"][document, :length]
        assert all(inside[q, c[c >= 0]].all() for q, c in enumerate(chosen))
        free = captured[f"topk.{source}"][document, length - 1]
        assert set(free) != set(chosen[-1]), "the restricted layer has an index of its own"


def test_engram_answers_and_matters(llm, scored):
    _, lengths, _, captured = scored
    hashed = rows(captured["engram_hash"], lengths)
    assert len(np.unique(hashed[:, 0, 0])) > 50
    for layer in llm.model.config.engram_layer_ids:
        answer = rows(captured[f"engram_out.{layer}"], lengths).astype(np.float64)
        streams = rows(captured[f"streams.{layer}"], lengths).astype(np.float64)
        assert np.sqrt((answer**2).mean() / (streams**2).mean()) > 0.02


def test_every_expert_works_and_none_does_most_of_it(llm, scored):
    _, lengths, _, captured = scored
    experts = llm.model.config.n_routed_experts
    for role in llm.model.config.layers:
        chosen = rows(captured[f"router_idx.{role.index}"], lengths)
        load = np.bincount(chosen.ravel(), minlength=experts) * experts / chosen.size
        assert load.min() > 0 and load.max() < 4
