"""How long an operation takes: among others in one program, dispatched, or by the profiler."""

import functools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

ROUND = 0.05  # seconds of launches between two looks at the clock


class Time(NamedTuple):
    """Seconds of one call: median, least and most."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{1e6 * self.median:.1f} us ({1e6 * self.low:.1f} to {1e6 * self.high:.1f})"


@functools.partial(jax.jit, static_argnums=0)
def _all_calls(operation: Callable, calls: list[tuple]) -> list:
    return [operation(*arguments) for arguments in calls]


def timed(operation: Callable, calls: list[tuple], repeats: int) -> tuple[Time, Time]:
    """Times of a call of a jitted operation: in one program with the others, and dispatched."""

    def together(count: int):
        for _ in range(count):
            results = _all_calls(operation, calls)
        return results

    return _clock(together, len(calls), repeats), dispatched(operation, calls, repeats)


def dispatched(operation: Callable, calls: list[tuple], repeats: int) -> Time:
    """Time of a call when calls are made one by one from Python."""
    return _clock(
        lambda count: [operation(*calls[i % len(calls)]) for i in range(count)], 1, repeats
    )


def on_device(operation: Callable, calls: list[tuple], repeats: int) -> Time:
    """Time of a call's kernels on the GPU, from the profiler: no gaps between launches.

    The linears of a layer take a few microseconds each, less than launching one from Python.
    """
    program = jax.jit(operation)
    jax.block_until_ready([program(*call) for call in calls])
    seconds = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready([program(*call) for call in calls])
            (file,) = Path(folder).rglob("*.xplane.pb")
            lengths = [event.duration_ns for line in gpu_streams(file) for event in line.events]
        seconds.append(1e-9 * sum(lengths) / len(calls))
    return Time(statistics.median(seconds), min(seconds), max(seconds))


def gpu_streams(file: Path) -> Iterator[Any]:
    """Lines of a recorded trace that hold the kernels of a GPU; other lines sum them up again."""
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        if plane.name.startswith("/device:GPU"):
            yield from (line for line in plane.lines if line.name.startswith("Stream"))


def _clock(launch: Callable[[int], Any], calls: int, repeats: int) -> Time:
    def seconds(count: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready(launch(count))
        return (time.perf_counter() - began) / (count * calls)

    seconds(1)
    count = min(50, math.ceil(ROUND / (seconds(1) * calls)))
    samples = [seconds(count) for _ in range(repeats)]
    return Time(statistics.median(samples), min(samples), max(samples))
