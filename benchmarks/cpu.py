"""How fast the library is on a CPU, beside another implementation in the same run.

The model is a miniature of the release with every kind of layer but Engram (12 layers, hidden 512,
32 experts): `forward` of 1 x 1024 tokens in float32 and bfloat16, and `generate` with the embedded
checkpoint. The peer, `nemo-automodel`, computes the same float32 forward with the same weights in a
process of its own; `--peer-python` names an interpreter that can import it.

Nothing is timed before it is checked. All forwards take turns, with fresh random tokens each time,
so a machine that is busy for a while is busy for all of them. Processor time is printed beside wall
time: on a shared machine it is the steadier of the two.

    python benchmarks/cpu.py --peer-python other-environment/bin/python
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors.numpy import load_file

import deepinfer_jax as di
from deepinfer_jax import testing

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))
import paper  # noqa: E402

LENGTH = 1024
COMPARED = 320  # more entries than are selected, yet seconds of float64
PROMPT, NEW_TOKENS, SEQUENCES = 64, 64, (1, 8)
# Without cache codes only the order of float32 sums is left.
EXACT = 1e-4
# With them, a code on an edge falls to either side with the order of a sum, and what reads it moves
# by a percent or more: two attention back ends of the peer differ by 6 percent from each other.
EDGES = 5e-2


def miniature(dtype: str) -> di.Config:
    """12 layers: 0 0 2F 2R 2R 2F 2R 1C 1R 1X 1R 1X.

    Digits are compression ratios; F makes entries and selects, C publishes candidates too, X
    selects again among them, R reuses a selection.
    """
    return testing.tiny_config(
        vocab_size=4096,
        hidden_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=12,
        num_attention_heads=8,
        head_dim=128,
        qk_rope_head_dim=64,
        q_lora_rank=256,
        o_lora_rank=128,
        o_groups=4,
        n_routed_experts=32,
        num_experts_per_tok=6,
        sliding_window=128,
        compress_ratios=(0, 0, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1),
        kv_source_layer_ids=(2, 5, 7),
        index_source_layer_ids=(2, 5, 7, 9, 11),
        index_n_heads=16,
        index_head_dim=128,
        index_topk=128,
        candidate_source_layer_id=7,
        candidate_topk_blocks=32,
        candidate_block_size=8,
        engram_layer_ids=(),
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        dtype=dtype,
    )


class Sample(NamedTuple):
    """Seconds of one call."""

    wall: float
    processor: float


class Peer:
    """The peer in its own process: one line asks for a forward, one line answers."""

    def __init__(self, python: str, folder: Path):
        self.answer_file = folder / "peer_logits.npy"
        self.process = subprocess.Popen(
            [python, str(Path(__file__).with_name("nemo_peer.py")), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.name = self._answer()["name"]

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the peer stopped with exit code {self.process.wait()}")
        return json.loads(line)

    def forward(self, tokens: np.ndarray) -> tuple[np.ndarray, Sample]:
        """Logits float32 [B, S, V] of tokens int [B, S], and the time the call took."""
        question = self.answer_file.with_name("peer_tokens.npy")
        np.save(question, tokens)
        print(
            json.dumps([str(question), str(self.answer_file)]), file=self.process.stdin, flush=True
        )
        answer = self._answer()
        return np.load(self.answer_file), Sample(answer["wall"], answer["processor"])

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.wait()


def peer_interpreter(asked: str | None) -> str | None:
    """The interpreter to run the peer with, or None where it is not installed."""
    if asked is not None:
        return asked
    return sys.executable if importlib.util.find_spec("nemo_automodel") else None


def timed(call: Callable[[], Any]) -> tuple[Any, Sample]:
    """The result of a call, waited for, and its times."""
    wall, processor = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(call())
    return result, Sample(time.perf_counter() - wall, time.process_time() - processor)


def agree(name: str, value: np.ndarray, reference: np.ndarray, most: float) -> None:
    """Print the relative errors of the first positions; stop if the median is above `most`."""
    value, reference = value[0, :COMPARED], reference[0, :COMPARED]
    apart = np.linalg.norm(value - reference, axis=-1) / np.linalg.norm(reference, axis=-1)
    middle = float(np.median(apart))
    print(f"  {name}: median {middle:.1e}, worst {apart.max():.1e}")
    if not middle <= most:
        raise SystemExit(f"{name}: the median is above {most}; nothing is timed")


def paper_logits(folder: Path, tokens: np.ndarray, numerics: di.Numerics) -> np.ndarray:
    """The executable paper on the first positions, which no later token can change."""
    config = json.loads((folder / "config.json").read_text())
    switches = dataclasses.asdict(numerics)
    del switches["reproducible"]
    weights = load_file(folder / "model.safetensors")
    tokens = tokens[:, :COMPARED]
    return paper.forward(config, weights, tokens, numerics=paper.Numerics(**switches))["logits"]


def take_turns(
    calls: Mapping[str, Callable[[np.ndarray], Sample]],
    draw: Callable[[], np.ndarray],
    rounds: int,
) -> dict[str, list[Sample]]:
    """Samples of every call, `rounds` each, in turns and on fresh inputs."""
    samples = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(call(draw()))
    return samples


def row(name: str, samples: list[Sample], compile_seconds: float | None = None, tokens: int = 0):
    """One line of the table."""
    walls = [s.wall for s in samples]
    middle = statistics.median(walls)
    compiled = "" if compile_seconds is None else f"{compile_seconds:.1f}"
    rate = f"{tokens / middle:.0f}" if tokens else ""
    processor = statistics.median(s.processor for s in samples)
    print(
        f"| {name} | {middle:.3f} | {min(walls):.3f} to {max(walls):.3f} | {processor:.3f} "
        f"| {compiled} | {rate} |"
    )


def forwards(python: str | None, rounds: int, random: np.random.Generator) -> None:
    """Check and time `forward` in three numerics, and the peer."""

    def draw() -> np.ndarray:
        return random.integers(0, 4096, (1, LENGTH), np.int32)

    variants = {
        "forward, float32": (
            "float32",
            False,
            di.Numerics(dtype="float32", quantize_activations=False),
        ),
        "forward, bfloat16": ("bfloat16", False, di.Numerics()),
        "forward, bfloat16, weights of 4 and 8 bits": ("bfloat16", True, di.Numerics()),
    }
    calls, compile_seconds, peer = {}, {}, None
    tokens = draw()
    with tempfile.TemporaryDirectory() as name:
        print(f"relative errors of `forward` at the first {COMPARED} of {LENGTH} positions")
        for variant, (dtype, quantized, numerics) in variants.items():
            folder = Path(name) / variant.replace(" ", "-")
            testing.write_checkpoint(folder, miniature(dtype), quantized=quantized)
            model = di.load(folder, numerics=numerics)
            result, first = timed(lambda model=model: di.forward(model, tokens))
            logits = np.asarray(result.logits)
            if not np.isfinite(logits).all():
                raise SystemExit(f"{variant}: logits are not finite; nothing is timed")
            compile_seconds[variant] = first.wall
            calls[variant] = lambda x, model=model: timed(lambda: di.forward(model, x))[1]
            if dtype == "float32":
                plain = dataclasses.replace(numerics, quantize_cache=False)
                value = np.asarray(di.forward(model.with_numerics(plain), tokens).logits)
                truth = paper_logits(folder, tokens, plain)
                agree("float32 and the paper, plain cache", value, truth, EXACT)
                truth = paper_logits(folder, tokens, numerics)
                agree("float32 and the paper", logits, truth, EDGES)
                if python is not None:
                    peer = Peer(python, folder)
                    theirs = peer.forward(tokens)[0]
                    agree(f"{peer.name} and the paper", theirs, truth, EDGES)
                    agree(f"float32 and {peer.name}", logits, theirs, EDGES)
        if peer is not None:
            calls[f"{peer.name}, float32"] = lambda x: peer.forward(x)[1]
        take_turns(calls, draw, 1)
        samples = take_turns(calls, draw, rounds)
        if peer is not None:
            peer.close()

    print("\n| what | median s | spread s | processor s | first call s | tokens/s |")
    print("|---|---|---|---|---|---|")
    for variant, measured in samples.items():
        row(variant, measured, compile_seconds.get(variant), LENGTH)
    if peer is None:
        print("| nemo-automodel, float32 | not installed here; see --peer-python | | | | |")
        return
    ours, theirs = samples["forward, float32"], samples[f"{peer.name}, float32"]
    for what in Sample._fields:
        ratio = statistics.median(getattr(s, what) for s in theirs) / statistics.median(
            getattr(s, what) for s in ours
        )
        print(f"| float32, {peer.name} / ours, {what} time | {ratio:.2f} | | | | |")


def generations(rounds: int, random: np.random.Generator) -> None:
    """Check and time `generate` with the embedded checkpoint, one sequence and several."""
    model = di.load("tiny")

    def generate(prompts: np.ndarray) -> di.Generation:
        return di.generate(model, prompts, seeds=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)

    def draw(count: int) -> np.ndarray:
        return random.integers(3, 259, (count, PROMPT), np.int32)

    prompts = draw(max(SEQUENCES))
    results, seconds = {}, {}
    for count in SEQUENCES:
        results[count], first = timed(lambda count=count: generate(prompts[:count]))
        seconds[count] = first.wall
    alone, batch = (np.asarray(results[count].tokens)[0] for count in SEQUENCES)
    if not np.array_equal(alone, batch):
        raise SystemExit("a sequence alone and in a batch differ; nothing is timed")
    for count in SEQUENCES:
        take = {"generate": lambda x: timed(lambda: generate(x))[1]}
        samples = take_turns(take, lambda count=count: draw(count), rounds)["generate"]
        name = f"generate on tiny, {count} x ({PROMPT} + {NEW_TOKENS}) tokens, bitwise reproducible"
        row(name, samples, seconds[count], count * NEW_TOKENS)


def main() -> None:
    """Parse arguments, print the machine and the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--peer-python", help="an interpreter in which nemo_automodel is importable"
    )
    parser.add_argument("--rounds", type=int, default=9, help="repeats of everything (default 9)")
    parser.add_argument("--seed", type=int, default=0, help="of the random tokens (default 0)")
    parser.add_argument("--skip-generate", action="store_true", help="only the forwards")
    arguments = parser.parse_args()
    if jax.default_backend() != "cpu":
        raise SystemExit("this benchmark is for the CPU: set JAX_PLATFORMS=cpu")
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"jax {jax.__version__}, {cores} cores, load {load:.1f} before the start")
    random = np.random.default_rng(arguments.seed)
    forwards(peer_interpreter(arguments.peer_python), arguments.rounds, random)
    if not arguments.skip_generate:
        generations(arguments.rounds, random)


if __name__ == "__main__":
    main()
