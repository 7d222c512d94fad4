"""Decode steps of an 8-layer slice of the released model at its real widths, against their floor.

Layers: window only, Full of ratio 2, Reuse, Reuse, Full of ratio 1 (candidate source), Reuse,
Reindex, Reuse. Everything else is as released, except that there is no Engram, no drafter and no
image tower; no rule of the configuration asks for one. Weights are random codes and scales made on
the device, sized so that activations stay near 1; router biases are small, so experts are chosen
about evenly, as in a trained model. The cache is full of random values up to `--context`, and every
step reads fresh random tokens at the next position.

The floor of a step is the time to read once, at copy bandwidth, what it has to read: all dense
weights, the experts that its rows really chose, and of the cache the windows, selected entries and
scored index keys. Bytes of weights are those of the released formats, bytes of the cache those of
its values. Copy bandwidth is measured in the same run and never taken below the figure that
`kernels.py` knows for the device. Share of floor = floor / time, 1 is perfect.

A time is that of one step among several dispatched in a row and waited for together, as in a
decoding loop; "waited" is the time of steps that are waited for one by one. Nothing is timed before
the final hidden state was seen to be finite and to vary.

    python benchmarks/slice.py --layout gpu --profile 64 --json slice.json
    JAX_PLATFORMS=cpu python benchmarks/slice.py --small --batches 2 --profile

Letters: B rows, one of each sequence; D hidden, K chosen experts, X experts, V vocabulary.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from kernels import CEILINGS
from operands import weight_bytes
from parts import TRACED, profile
from slice_model import random_cache, random_model, slice_config
from timing import timed
from tqdm import tqdm

import deepinfer_jax as di
from deepinfer_jax.checkpoint.tensor_names import FORMATS, ParameterSpec, parameter_specs
from pallas_kernels.layouts import LAYOUTS

# A graph of launches hides which operation a kernel belongs to; no program is as large as this.
NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 1 << 30}


class Outcome(NamedTuple):
    """What a step leaves besides the cache."""

    tokens: jax.Array  # int32 [B], the most likely next ones
    hidden: jax.Array  # [B, D], after the last norm
    experts: tuple[jax.Array, ...]  # per layer int32 [B, K]


class Moved(NamedTuple):
    """Bytes that a step has to read."""

    dense: float
    experts: float
    cache: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def decode(structure, leaves, cache: di.Cache, tokens, position) -> tuple[di.Cache, Outcome]:
    """One token for every sequence.

    The model comes in pieces (`jax.tree.flatten`): taking a module apart at every step would cost
    more than the step.

    Args:
        structure: static, of the model.
        leaves: arrays of the model.
        cache: of B sequences, given up.
        tokens: int32 [B].
        position: int32 [].
    """
    model = jax.tree.unflatten(structure, leaves)
    slots = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    rows = di.Rows(tokens, slots, jnp.full_like(slots, position), jnp.zeros(slots.shape, bool))
    hidden, cache, seen = di.step(model, cache, rows, show=frozenset({"router"}))
    with jax.named_scope("head"):
        best = jnp.argmax(di.logits(model, hidden), axis=-1).astype(jnp.int32)
    experts = tuple(seen[f"router_idx.{role.index}"] for role in model.config.layers)
    return cache, Outcome(best, hidden, experts)


# Floors


def stored_bytes(spec: ParameterSpec) -> int:
    """Bytes of a weight as released; a layout may store more, which is no excuse."""
    if spec.kind == "float32":
        return 4 * spec.size
    return weight_bytes(FORMATS.get(spec.kind, "bfloat16"), spec.shape)


def moved_bytes(config: di.Config, rows: int, position: float, experts: float) -> Moved:
    """What a step has to read.

    Args:
        config: the model's.
        rows: B.
        position: of the rows.
        experts: different ones chosen by the rows, summed over the layers.
    """
    specs = parameter_specs(config)
    routed = {path for path, spec in specs.items() if spec.kind == "expert"}
    dense = sum(stored_bytes(specs[path]) for path in specs.keys() - routed - {"embed.weight"})
    dense += rows * stored_bytes(specs["embed.weight"]) / config.vocab_size
    per_layer = config.num_hidden_layers * config.n_routed_experts
    one_expert = sum(stored_bytes(specs[path]) for path in routed) / per_layer
    held = di.Numerics().activation.itemsize
    vectors = keys = 0.0
    for role in config.layers:
        vectors += min(position + 1, role.window)
        if role.ratio == 0:
            continue
        visible = (position + 1) // role.ratio
        vectors += min(visible, config.index_topk)
        if role.mode in ("full", "reindex"):
            offered = config.candidate_topk_blocks * config.candidate_block_size
            keys += min(visible, offered) if role.restricted else visible
    cache = rows * held * (vectors * config.head_dim + keys * config.index_head_dim)
    return Moved(dense, experts * one_expert, cache)


def copy_bandwidth(size: int) -> tuple[float, float]:
    """Bytes per second read and written by a large copy: measured here, and used for floors."""
    bits = jax.random.bits(jax.random.key(0), (size // 4,), jnp.uint32)
    copy, _ = timed(jax.jit(lambda a: a + 1), [(bits,)], 9)
    measured = 2 * bits.nbytes / copy.median
    known, _ = CEILINGS.get(jax.devices()[0].device_kind, (0.0, 0.0))
    return measured, max(measured, known)


def distinct_experts(outcomes: Iterable[Outcome]) -> float:
    """Different experts of a step, summed over its layers; the mean of the steps."""
    return statistics.mean(
        sum(len(np.unique(layer)) for layer in jax.device_get(outcome.experts))
        for outcome in outcomes
    )


# Timing


class Stepper:
    """Steps of one batch, each with fresh tokens at the next position.

    Args:
        model: the weights.
        batch: B.
        context: positions already in the cache.
        steps: how many will be made.
        random: source of tokens.
    """

    def __init__(self, model: di.Transformer, batch: int, context: int, steps: int, random) -> None:
        self.config, self.batch = model.config, batch
        self.leaves, structure = jax.tree.flatten(model)
        draws = random.integers(0, model.config.vocab_size, (steps, batch), np.int32)
        self.inputs = [
            (jax.device_put(tokens), jax.device_put(np.int32(context + i)))
            for i, tokens in enumerate(draws)
        ]
        self.made, self.capacity, self.cache = 0, context + steps, None
        cache = jax.eval_shape(lambda: di.init_cache(self.config, batch, self.capacity))
        self.lowered = decode.lower(structure, self.leaves, cache, *self.inputs[0])
        self.program = None

    @property
    def position(self) -> int:
        """Of the next step."""
        return int(self.inputs[self.made][1])

    def start(self, program: jax.stages.Compiled) -> None:
        """Go on with this program; the first one finds a cache of random values."""
        self.program = program
        if self.cache is None:
            key = jax.random.key(self.batch)
            self.cache = random_cache(key, self.config, self.batch, self.capacity)

    def __call__(self, count: int) -> tuple[float, list[Outcome]]:
        """Seconds of a step when `count` are waited for together, and what they left."""
        inputs = self.inputs[self.made : self.made + count]
        jax.block_until_ready((inputs, self.cache))
        outcomes, began = [], time.perf_counter()
        for tokens, position in inputs:
            self.cache, outcome = self.program(self.leaves, self.cache, tokens, position)
            outcomes.append(outcome)
        jax.block_until_ready((outcomes, self.cache))
        self.made += count
        return (time.perf_counter() - began) / count, outcomes


def check(outcome: Outcome) -> None:
    """Stop unless every row of the hidden state is finite, varies and differs from the others."""
    hidden = np.asarray(outcome.hidden.astype(jnp.float32))
    if not np.isfinite(hidden).all():
        raise SystemExit("the final hidden state is not finite; nothing is timed")
    if not (hidden.std(axis=1) > 1e-3).all():
        raise SystemExit("a row of the final hidden state is constant; nothing is timed")
    if len(np.unique(hidden, axis=0)) < len(hidden):
        raise SystemExit("rows of different tokens have equal hidden states; nothing is timed")


def measure(stepper: Stepper, repeats: int, streak: int, bandwidth: float) -> dict[str, Any]:
    """Times of a batch and their floor."""
    config, batch = stepper.config, stepper.batch
    check(stepper(1)[1][0])
    stepper(streak)
    first = stepper.position
    waited = [stepper(1) for _ in range(repeats)]
    streaks = [stepper(streak) for _ in range(repeats)]
    outcomes = [outcome for _, results in waited + streaks for outcome in results]
    experts = distinct_experts(outcomes)
    moved = moved_bytes(config, batch, first + (len(outcomes) - 1) / 2, experts)
    seconds, alone = ([s for s, _ in samples] for samples in (streaks, waited))
    middle, floor = statistics.median(seconds), moved.total / bandwidth
    return {
        "batch": batch,
        "ms_per_step": 1e3 * middle,
        "ms_per_step_low": 1e3 * min(seconds),
        "ms_per_step_high": 1e3 * max(seconds),
        "ms_per_step_waited": 1e3 * statistics.median(alone),
        "ms_per_step_waited_low": 1e3 * min(alone),
        "ms_per_step_waited_high": 1e3 * max(alone),
        "ms_floor": 1e3 * floor,
        "share_of_floor": floor / middle,
        "share_of_floor_waited": floor / statistics.median(alone),
        "tokens_per_second": batch / middle,
        "experts_per_layer": experts / config.num_hidden_layers,
        "bytes": moved._asdict() | {"total": moved.total},
    }


def say(row: dict[str, Any]) -> None:
    """One batch in words."""
    size = {name: f"{value / 1e9:.3f} GB" for name, value in row["bytes"].items()}
    print(
        f"batch {row['batch']}: {row['ms_per_step']:.3f} ms/step in a row "
        f"({row['ms_per_step_low']:.3f} to {row['ms_per_step_high']:.3f}), "
        f"{row['ms_per_step_waited']:.3f} ms/step waited "
        f"({row['ms_per_step_waited_low']:.3f} to {row['ms_per_step_waited_high']:.3f}); "
        f"{row['experts_per_layer']:.1f} experts chosen a layer; reads dense {size['dense']}, "
        f"experts {size['experts']}, cache {size['cache']}, together {size['total']}; "
        f"floor {row['ms_floor']:.3f} ms; share of floor {row['share_of_floor']:.3f}",
        flush=True,
    )


def table(rows: list[dict[str, Any]]) -> None:
    """All batches."""
    print("\n| batch | ms/step | spread | waited ms/step | floor ms | share of floor | tokens/s |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        spread = f"{row['ms_per_step_low']:.3f} to {row['ms_per_step_high']:.3f}"
        print(
            f"| {row['batch']} | {row['ms_per_step']:.3f} | {spread} "
            f"| {row['ms_per_step_waited']:.3f} | {row['ms_floor']:.3f} "
            f"| {row['share_of_floor']:.3f} | {row['tokens_per_second']:.0f} |"
        )


# The script


def arguments(given: list[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--context", type=int, help="positions in the cache (default 4096)")
    parser.add_argument("--layout", choices=LAYOUTS, default="plain", help="of quantised weights")
    parser.add_argument("--repeats", type=int, default=10, help="samples of every time")
    parser.add_argument("--streak", type=int, default=4, help="steps dispatched in a row")
    parser.add_argument(
        "--profile", type=int, nargs="*", metavar="BATCH", help="trace these batches, or all"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens")
    parser.add_argument("--small", action="store_true", help="toy widths, to test this script")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(given)
    if options.context is None:
        options.context = 64 if options.small else 4096
    for name in ("context", "repeats", "streak"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    if min(options.batches) < 1:
        parser.error(f"--batches must be at least 1, got {min(options.batches)}")
    if options.profile is None:
        options.profile = []
    elif not options.profile:
        options.profile = options.batches
    unknown = sorted(set(options.profile) - set(options.batches))
    if unknown:
        parser.error(f"--profile {unknown} must be among --batches {options.batches}")
    return options


def main(given: list[str] | None = None) -> None:
    """Build, compile, measure, print."""
    options = arguments(given)
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and not options.small:
        raise SystemExit("real widths need a GPU with room for 62 GB of weights: use --small")
    if options.small:
        # Compiling is all that takes time.
        jax.config.update("jax_disable_most_optimizations", True)
    config, random = slice_config(small=options.small), np.random.default_rng(options.seed)
    kind = jax.devices()[0].device_kind
    roles = " ".join(f"{role.mode}:{role.ratio}" for role in config.layers)
    print(f"{kind}, jax {jax.__version__}; layers {roles}; layout {options.layout}", flush=True)
    measured, bandwidth = copy_bandwidth(1 << 20 if options.small else 1 << 31)
    print(
        f"copy bandwidth measured {measured / 1e12:.3f} TB/s, used for floors "
        f"{bandwidth / 1e12:.3f} TB/s",
        flush=True,
    )
    began = time.perf_counter()
    model = random_model(config, options.layout, options.seed)
    print(f"weights made in {time.perf_counter() - began:.1f} s", flush=True)

    needed = 1 + options.streak + options.repeats * (1 + options.streak) + 1 + TRACED
    began = time.perf_counter()
    steppers = {
        batch: Stepper(model, batch, options.context, needed, random)
        for batch in tqdm(dict.fromkeys(options.batches), desc="tracing", file=sys.stderr)
    }
    # Tracing is Python and goes one by one; the compiler works beside itself.
    with ThreadPoolExecutor() as pool:
        programs = {b: pool.submit(s.lowered.compile) for b, s in steppers.items()}
        traced = {
            batch: pool.submit(steppers[batch].lowered.compile, NO_GRAPHS) if on_gpu else program
            for batch, program in programs.items()
            if batch in options.profile
        }
        waiting = dict.fromkeys((*programs.values(), *traced.values()))
        for program in tqdm(waiting, desc="compiling", file=sys.stderr):
            program.result()
    print(f"{len(waiting)} programs compiled in {time.perf_counter() - began:.1f} s", flush=True)

    rows = []
    for batch, stepper in steppers.items():
        stepper.start(programs[batch].result())
        row = measure(stepper, options.repeats, options.streak, bandwidth)
        say(row)
        if batch in traced:
            row["profile"] = profile(stepper, traced[batch].result(), row["ms_per_step"])
        stepper.cache = None  # room for the next batch's
        rows.append(row)
    table(rows)
    if options.json:
        figures = dict(
            device=kind,
            jax=jax.__version__,
            layout=options.layout,
            context=options.context,
            small=options.small,
            copy_bandwidth_measured=measured,
            copy_bandwidth_used=bandwidth,
            batches=rows,
        )
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
