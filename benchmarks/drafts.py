"""What drafts are worth: tokens per second and per step, with drafts and without, in one run.

The embedded checkpoint continues pieces of this repository: source files, and prose from its
documents. Programs take turns, so a machine that is busy for a while is busy for all of them. In
reproducible numerics (the default on a CPU) it is checked first that all write the same tokens;
elsewhere the share of equal tokens is printed.

    python benchmarks/drafts.py
    JAX_PLATFORMS=cuda python benchmarks/drafts.py --batches 1 8 64 256
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import jax
import numpy as np

import deepinfer_jax as di

ROOT = Path(__file__).parents[1]
KINDS = {"code": "deepinfer_jax/**/*.py", "prose": "**/*.md"}
DRAFTS = ["none", "fixed", "scheduled"]
PROMPT, NEW_TOKENS = 64, 96


def prompts(llm: di.LLM, kind: str, count: int) -> np.ndarray:
    """int32 [count, PROMPT] from different places of the repository's files."""
    files = sorted(p for p in ROOT.glob(KINDS[kind]) if not p.relative_to(ROOT).parts[0][0] == ".")
    ids = np.concatenate([llm.encode(path.read_text())[1:] for path in files])
    places = np.linspace(0, len(ids) - PROMPT, count).astype(int)
    tokens = np.stack([ids[place : place + PROMPT] for place in places])
    tokens[:, 0] = llm.model.config.bos_token_id
    return tokens.astype(np.int32)


def programs(model: di.Transformer, batch: int, names: list[str], measured: bool) -> dict:
    """Arguments of `generate` by name, the schedule with times measured for it."""
    arguments = {name: dict(draft=None if name == "none" else name) for name in names}
    if "scheduled" in names and measured:
        times = di.measure_step_times(model, batch, PROMPT + NEW_TOKENS // 2)
        points = zip(times.rows.tolist(), (1e3 * times.seconds).round(2).tolist(), strict=True)
        print(f"batch {batch}: milliseconds of a round by rows {dict(points)}", flush=True)
        arguments["scheduled"]["step_times"] = times
    return arguments


def measure(model, tokens, temperature: float, arguments: dict[str, dict], repeats: int) -> dict:
    """Seconds of the first and of later calls, tokens per step, of every program."""

    def call(options):
        began = time.perf_counter()
        result = di.generate(
            model, tokens, max_new_tokens=NEW_TOKENS, ignore_eos=True,
            sampling=di.Sampling(temperature=temperature), **options,
        )  # fmt: skip
        return jax.block_until_ready(result), time.perf_counter() - began

    first = {name: call(options) for name, options in arguments.items()}
    plain = np.asarray(next(iter(first.values()))[0].tokens)
    seconds = {name: [] for name in arguments}
    for _ in range(repeats):
        for name, options in arguments.items():
            seconds[name].append(call(options)[1])
    figures = {}
    for name, (result, compiled) in first.items():
        same = float((np.asarray(result.tokens) == plain).mean())
        if jax.default_backend() == "cpu":
            assert same == 1, f"{name} changes the text"
        times = seconds[name] or [compiled]
        figures[name] = dict(
            first_call_s=compiled,
            tokens_per_s=plain.size / statistics.median(times),
            spread=(max(times) - min(times)) / statistics.median(times),
            tokens_per_step=result.stats.report().tokens_per_step,
            same=same,
        )
    return figures


def main() -> None:
    """Print a table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--drafts", nargs="+", choices=DRAFTS, default=DRAFTS)
    parser.add_argument("--repeats", type=int, default=5, help="0: only compile")
    parser.add_argument(
        "--assumed-times", action="store_true", help="schedule without measuring rounds first"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    llm = di.LLM("tiny")
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    rows = []
    for batch in options.batches:
        arguments = programs(llm.model, batch, options.drafts, not options.assumed_times)
        for kind in options.kinds:
            for temperature in options.temperatures:
                tokens = prompts(llm, kind, batch)
                figures = measure(llm.model, tokens, temperature, arguments, options.repeats)
                plain = next(iter(figures.values()))["tokens_per_s"]
                for name, row in figures.items():
                    rows.append(dict(batch=batch, kind=kind, temperature=temperature, draft=name)
                                | row)  # fmt: skip
                    print(
                        f"batch {batch:3d}  {kind:5s}  temperature {temperature:.1f}  {name:9s} "
                        f"{row['tokens_per_s']:9.0f} tokens/s ({row['tokens_per_s'] / plain:.2f}x "
                        f"{options.drafts[0]}, spread {row['spread']:.0%})  "
                        f"{row['tokens_per_step']:.2f} tokens a step  "
                        f"first call {row['first_call_s']:.1f} s  same tokens {row['same']:.3f}",
                        flush=True,
                    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
