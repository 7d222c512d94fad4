"""Where the time of a step goes, by part of the model and by kernel, from a recorded trace."""

import collections
import math
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from timing import gpu_streams

SCOPES = ("engram", "attention", "router", "shared_expert", "experts", "remember", "head")
REST_OF_LAYER, OTHER, UNNAMED = "rest of layers", "other", "no name in the trace"
LARGEST = 25
TRACED = 5


class Kernel(NamedTuple):
    """One piece of device time: what ran, the part of the model it belongs to, seconds."""

    name: str
    part: str
    seconds: float


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
    lines = list(gpu_streams(file))
    on_gpu = bool(lines)
    if not on_gpu:
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        lines = [line for plane in planes for line in plane.lines]
    kernels = []
    for event, seconds in (timed for line in lines for timed in _own_times(line.events)):
        operation = dict(event.stats).get("hlo_op")
        if operation is None and not on_gpu:
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


def profile(stepper, program: jax.stages.Compiled, timed_ms: float) -> dict[str, Any]:
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
