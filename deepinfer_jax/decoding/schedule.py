"""How many drafts each sequence verifies: as many as pay (spec 9.7, engine spec 3.5).

A round over more rows takes longer and yields more tokens. The drafter says how probable it is that
a draft is reached and accepted; `StepTimes` says what a round costs. The budget of rows is where
expected tokens per second are highest, and the drafts most likely to be used get it.

Letters: B sequences, n drafts of a sequence, M measured points.
"""

import dataclasses
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

_POINTS = 12


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Time of a round by its number of rows; a staircase, as rows are computed in lots.

    Attributes:
        rows: int32 [M], ascending.
        seconds: float32 [M], of a round with at most so many rows. Rows beyond the last point
            cost what the last point does, in proportion.
    """

    rows: jax.Array
    seconds: jax.Array

    @classmethod
    def of(cls, rows, seconds) -> "StepTimes":
        """Measured points, checked; a larger round that was timed faster counts as equal.

        Raises:
            ValueError: not two lists of one length, rows that do not ascend, times not above 0.
        """
        try:
            rows, seconds = np.asarray(rows), np.asarray(seconds, np.float32)
        except (TypeError, ValueError):
            raise ValueError(
                f"StepTimes needs two lists of numbers, got {rows} and {seconds}"
            ) from None
        if rows.ndim != 1 or rows.shape != seconds.shape or not rows.size:
            raise ValueError(
                "StepTimes needs rows and seconds of one length, at least 1, got "
                f"{list(rows.shape)} and {list(seconds.shape)}"
            )
        ascending = np.issubdtype(rows.dtype, np.integer) and (np.diff(rows) > 0).all()
        if not ascending or rows[0] < 1 or rows[-1] >= 2**31:
            raise ValueError(
                f"StepTimes.rows must be ascending integers from 1 to 2**31 - 1, got {rows}"
            )
        if not (np.isfinite(seconds) & (seconds > 0)).all():
            raise ValueError(f"StepTimes.seconds must be finite and above 0, got {seconds}")
        return cls(jnp.asarray(rows, jnp.int32), jnp.asarray(np.maximum.accumulate(seconds)))

    @classmethod
    def assumed(cls, batch: int, drafts: int, tile: int | None) -> "StepTimes":
        """Points for a machine that has not been measured.

        Rows in tiles cost time in proportion, on top of a fixed part as large as one tile's.
        Without tiles a round reads all weights whatever it does; the larger of its two programs is
        taken to cost a twentieth more. Measure (`measure_step_times`) where it matters.

        Args:
            batch: B.
            drafts: n.
            tile: rows of a tile, or None.
        """
        sizes = lots(batch, drafts, tile)
        if tile is None:
            return cls.of(sizes, [1 + 0.1 * size / sizes[-1] for size in sizes])
        return cls.of(sizes, [1 + size / tile for size in sizes])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "StepTimes":
        """What `save` wrote.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not such a file.
        """
        try:
            raw = json.loads(Path(path).read_text())
            return cls.of(raw["rows"], raw["seconds"])
        except FileNotFoundError:
            raise FileNotFoundError(
                f"no step times at {path}: write some with measure_step_times(...).save(path)"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} does not hold step times: {error!r}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the points as JSON; the file is complete or not there."""
        points = {"rows": self.rows.tolist(), "seconds": self.seconds.tolist()}
        part = Path(f"{os.fspath(path)}.part")
        part.write_text(json.dumps(points))
        part.replace(path)

    def at(self, rows: jax.Array) -> jax.Array:
        """Seconds of rounds of so many rows, float32 of the same shape."""
        place = jnp.searchsorted(self.rows, rows)
        beyond = jnp.maximum(rows / self.rows[-1], 1)
        return self.seconds[jnp.minimum(place, self.rows.shape[0] - 1)] * beyond


def lots(batch: int, drafts: int, tile: int | None) -> list[int]:
    """Row counts in which rounds are computed: tiles (at most `_POINTS` of them) or capacities."""
    most = batch * (drafts + 1)
    if tile is None:
        return sorted({small_capacity(batch, drafts), most})
    tiles = np.linspace(-(-batch // tile), -(-most // tile), _POINTS).round().astype(int)
    return (np.unique(tiles) * tile).tolist()


def small_capacity(batch: int, drafts: int) -> int:
    """Rows of the smaller of the two programs a scheduled round may run."""
    return batch * (1 + drafts // 2)


def allocate(
    survival: jax.Array, earlier: jax.Array, ready: jax.Array, rows: jax.Array, times: StepTimes
) -> jax.Array:
    """How many drafts each sequence verifies.

    Args:
        survival: float32 [B, n], probability that a draft is reached and accepted, falling along n;
            0 for a draft that is not there.
        earlier: float32 [B, n], the same of the round before or of this one; it decides how many
            drafts are verified in all. Exact rejection sampling needs the round before: how many
            are verified must not depend on tokens that are judged.
        ready: bool [B], sequences that will yield a token.
        rows: int32 [], rows that the round runs in any case.
        times: cost of a round.

    Returns:
        int32 [B]. Equal probabilities: the lower sequence first.
    """
    gains = jnp.sort(jnp.where(ready[:, None], earlier, 0).reshape(-1), descending=True)
    expected = ready.sum() + jnp.concatenate([jnp.zeros(1), jnp.cumsum(gains)])
    budget = jnp.argmax(expected / times.at(rows + jnp.arange(gains.shape[0] + 1)))
    order = jnp.argsort(survival.reshape(-1), descending=True, stable=True)
    chosen = jnp.zeros(order.shape, bool).at[order].set(jnp.arange(order.shape[0]) < budget)
    chosen = chosen.reshape(survival.shape) & (survival > 0)
    return chosen.sum(axis=1, dtype=jnp.int32)
