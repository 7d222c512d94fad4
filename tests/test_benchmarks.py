"""The slice that speed is claimed on has the roles it says, and its floor counts real bytes."""

import json
import sys
from pathlib import Path

import jax
import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import slice as slices  # noqa: E402

ROLES = [
    ("window", 0),
    ("full", 2),
    ("reuse", 2),
    ("reuse", 2),
    ("full", 1),
    ("reuse", 1),
    ("reindex", 1),
    ("reuse", 1),
]


@pytest.fixture(scope="module")
def quick_compiler():
    """Programs of which each runs a few times."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def model(quick_compiler):
    return slices.random_model(slices.slice_config(small=True), "plain")


def nbytes(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("small", [False, True])
def test_slice_has_a_layer_of_every_role(small):
    config = slices.slice_config(small=small)
    assert [(role.mode, role.ratio) for role in config.layers] == ROLES
    assert [role.index for role in config.layers if role.candidate_source] == [4]
    assert [role.index for role in config.layers if role.restricted] == [6]
    assert not config.draft_layers


def test_floor_counts_the_bytes_of_the_arrays(model):
    config = model.config
    moved = slices.moved_bytes(config, rows=3, position=63, experts=10)
    routed = sum(nbytes(layer.ffn.experts) for layer in model.layers)
    tokens = 3 * config.hidden_size * 2
    assert moved.dense == nbytes(model) - routed - nbytes(model.embed) + tokens
    assert moved.experts == 10 * routed / (8 * 8)
    # 8 windows of 16; 8 entries selected by each of 7 layers; keys of 64 positions at ratio 2 and
    # 1, and those of 4 blocks of 4.
    assert moved.cache == 3 * 2 * (128 * (8 * 16 + 7 * 8) + 32 * (32 + 64 + 4 * 4))


def test_released_expert_has_the_published_size():
    config = slices.slice_config()
    one = slices.moved_bytes(config, 1, 4096, 1).experts
    assert one == 35_389_440 * (1 / 2 + 1 / 32)


@pytest.mark.filterwarnings("ignore:builtin type event_stats")
def test_script_runs_and_finds_the_parts_of_a_step(tmp_path, model, monkeypatch):
    monkeypatch.setattr(slices, "random_model", lambda *_: model)
    file = tmp_path / "slice.json"
    short = "--small --batches 2 --repeats 1 --streak 2 --profile --json"
    slices.main([*short.split(), str(file)])
    (row,) = json.loads(file.read_text())["batches"]
    assert 0 < row["ms_floor"] and 0 < row["share_of_floor"]
    assert 2 <= row["experts_per_layer"] <= 4
    assert {"attention", "experts", "router", "head"} <= row["profile"]["ms_by_part"].keys()
