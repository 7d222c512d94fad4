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
import collections
import functools
import json
import math
import re
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from kernels import CEILINGS, random_weight, timed, weight_bytes
from tqdm import tqdm

import deepinfer_jax as di
from deepinfer_jax import testing
from deepinfer_jax.checkpoint.tensor_names import FORMATS, ParameterSpec, parameter_specs
from deepinfer_jax.config import VisionConfig
from pallas_kernels.layouts import LAYOUTS

SCHEDULE = dict(
    num_hidden_layers=8,
    compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1),
    kv_source_layer_ids=(1, 4),
    index_source_layer_ids=(1, 4, 6),
    candidate_source_layer_id=4,
    engram_layer_ids=(),
    engram_num_embeddings=(),
    num_nextn_predict_layers=0,
    dspark_target_layer_ids=(),
    vision_config=VisionConfig(num_hidden_layers=0),
)
# Toy widths that layout "gpu" can hold as well.
SMALL = dict(
    vocab_size=512,
    hidden_size=256,
    moe_intermediate_size=256,
    num_attention_heads=4,
    head_dim=128,
    qk_rope_head_dim=16,
    q_lora_rank=256,
    o_lora_rank=128,
    o_groups=2,
    n_routed_experts=8,
    num_experts_per_tok=2,
    sliding_window=16,
    index_n_heads=4,
    index_head_dim=32,
    index_topk=8,
    candidate_topk_blocks=4,
    candidate_block_size=4,
    hc_sinkhorn_iters=2,
    dspark_noise_token_id=3,
    image_token_id=4,
)
BIAS_SIZE = 0.1  # of router biases, relative to those of `testing.random_weights`
ON_DEVICE = 1 << 24  # weights from this size on are never on the host

SCOPES = ("engram", "attention", "router", "shared_expert", "experts", "remember", "head")
REST_OF_LAYER, OTHER, UNNAMED = "rest of layers", "other", "no name in the trace"
LARGEST = 25
TRACED = 5
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


class Kernel(NamedTuple):
    """One piece of device time: what ran, the part of the model it belongs to, seconds."""

    name: str
    part: str
    seconds: float


# The model


def slice_config(*, small: bool = False) -> di.Config:
    """The released configuration with 8 layers; `small` shrinks its widths, not its roles."""
    return di.Config(**SCHEDULE | (SMALL if small else {}))


def random_model(config: di.Config, layout: str, seed: int = 0) -> di.Transformer:
    """A model of random weights, the large ones made where they stay.

    Args:
        config: of the slice.
        layout: of the quantised weights, one of `pallas_kernels.layouts.LAYOUTS`.
        seed: chooses the weights.

    Raises:
        ValueError: an unknown layout, or a weight that does not fit it.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    specs, small = parameter_specs(config), testing.random_weights(config, seed, quantized=False)
    progress = tqdm(total=len(specs), desc="weights", file=sys.stderr)

    def take(path: str) -> Any:
        spec = specs[path]
        progress.update()
        key = jax.random.key(zlib.crc32(f"{seed} {path}".encode()))
        if spec.kind in FORMATS:
            weight = _random_quantized(key, FORMATS[spec.kind], spec.shape, layout)
            # One at a time: makers queued together would hold their temporaries together.
            return jax.block_until_ready(weight)
        if spec.size >= ON_DEVICE:
            size = 1.0 if path == "embed.weight" else spec.shape[-1] ** -0.5
            return _random_array(key, spec.shape, size)
        weight = small(path)
        return BIAS_SIZE * weight if ".gate.bias" in path else weight

    with progress:
        return di.Transformer(config, di.Numerics(reproducible=False), take)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _random_quantized(key, format: str, shape: tuple[int, ...], layout: str):
    """One matrix after another: the plain codes of a stack never exist all at once."""
    if len(shape) == 2:
        return random_weight(key, format, shape, layout)
    keys = jax.random.split(key, shape[0])
    return lax.map(lambda key: random_weight(key, format, shape[1:], layout), keys)


@functools.partial(jax.jit, static_argnums=1)
def _random_array(key, shape: tuple[int, ...], size: float) -> jax.Array:
    return (size * jax.random.normal(key, shape, jnp.float32)).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_cache(key, config: di.Config, slots: int, capacity: int) -> di.Cache:
    """A cache whose every position holds normal values."""
    cache = di.init_cache(config, slots, capacity)

    def fill(salt: int, arrays):
        leaves, structure = jax.tree.flatten(arrays)
        keys = jax.random.split(jax.random.fold_in(key, salt), len(leaves))
        values = [jax.random.normal(k, a.shape, a.dtype) for k, a in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(structure, values)

    fields = ("window", "entries", "keys", "parts")
    return cache.replace(**{name: fill(i, getattr(cache, name)) for i, name in enumerate(fields)})


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


# Where the time goes


def operation_names(text: str) -> dict[str, str]:
    """From instructions of compiled HLO, in both spellings of kernels, to the names JAX gave."""
    names = {}
    found = re.finditer(
        r'^\s*(?:ROOT )?%?([\w.\-]+) = .*metadata=\{[^}]*op_name="([^"]*)"', text, re.MULTILINE
    )
    for instruction, name in (match.groups() for match in found):
        names[instruction] = names[_kernel_name(instruction)] = name
    return names


def _kernel_name(instruction: str) -> str:
    return re.sub(r"[.\-]", "_", instruction)


def part_of(name: str | None) -> str:
    """The part of the model that an operation's name belongs to."""
    if name is None:
        return UNNAMED
    pieces = name.split("/")
    named = [piece for piece in pieces if piece in SCOPES]
    if named:
        return named[0]
    return REST_OF_LAYER if any(re.fullmatch(r"layer_\d+", p) for p in pieces) else OTHER


def traced_kernels(file: Path, names: dict[str, str]) -> list[Kernel]:
    """Device time in a recorded trace; without a GPU, time of operations on any thread."""
    planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    kernels = []
    for plane in devices or planes:
        for line in plane.lines:
            # Other lines of a GPU sum up the same kernels once more.
            if devices and not line.name.startswith("Stream"):
                continue
            for event, seconds in _own_times(line.events):
                operation = dict(event.stats).get("hlo_op")
                if operation is None and not devices:
                    continue
                known = (names.get(key) for key in (operation, event.name))
                name = next((name for name in known if name is not None), None)
                kernels.append(Kernel(event.name, part_of(name), seconds))
    return kernels


def _own_times(events: Iterable[Any]) -> Iterator[tuple[Any, float]]:
    """Events of a line with the seconds that no event inside them takes."""
    inside: list[list[Any]] = []  # event, nanoseconds of its own
    for event in sorted(events, key=lambda e: (e.start_ns, -e.duration_ns)):
        while inside and inside[-1][0].start_ns + inside[-1][0].duration_ns <= event.start_ns:
            done, own = inside.pop()
            yield done, own / 1e9
        if inside:
            # On a GPU a copy may begin inside a kernel and outlast it.
            around = inside[-1][0]
            left = around.start_ns + around.duration_ns - event.start_ns
            inside[-1][1] -= min(event.duration_ns, left)
        inside.append([event, event.duration_ns])
    for done, own in inside:
        yield done, own / 1e9


def profile(stepper: Stepper, program: jax.stages.Compiled, timed_ms: float) -> dict[str, Any]:
    """Trace some steps and print device time by part and by kernel, per step.

    Args:
        stepper: of the batch.
        program: the step, compiled so that kernels carry the names of their operations.
        timed_ms: what a step took untraced.
    """
    stepper.start(program)
    stepper(1)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            stepper(TRACED)
        files = list(Path(folder).rglob("*.xplane.pb"))
        if files:
            kernels = traced_kernels(files[0], operation_names(program.as_text()))
    if not files or not kernels:
        print(f"batch {stepper.batch}: the profiler recorded no kernels", flush=True)
        return {}
    parts, largest, launches = (collections.Counter() for _ in range(3))
    for kernel in kernels:
        parts[kernel.part] += 1e3 * kernel.seconds / TRACED
        largest[kernel.part, kernel.name] += 1e3 * kernel.seconds / TRACED
        launches[kernel.part, kernel.name] += 1
    total = math.fsum(parts.values())
    print(
        f"\nbatch {stepper.batch}: device time of a step, traced, {total:.3f} ms; the step took "
        f"{timed_ms:.3f} ms untraced"
    )
    print("| part | ms/step | share |\n|---|---|---|")
    for part, spent in parts.most_common():
        print(f"| {part} | {spent:.3f} | {spent / total:.3f} |")
    print("\n| kernel | part | launches/step | ms/step | share |\n|---|---|---|---|---|")
    rows = [
        dict(kernel=name, part=part, launches=launches[part, name] / TRACED, ms=spent)
        for (part, name), spent in largest.most_common(LARGEST)
    ]
    for row in rows:
        print(
            f"| {row['kernel'][:80]} | {row['part']} | {row['launches']:.1f} | {row['ms']:.3f} "
            f"| {row['ms'] / total:.3f} |"
        )
    print(flush=True)
    return {"ms_traced": total, "ms_by_part": dict(parts), "largest_kernels": rows}


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
