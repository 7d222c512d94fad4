"""What a generation counts about its drafts, and a report of it.

Letters: B sequences, n drafts of a sequence, N most new tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BINS = 10


class Calibration(NamedTuple):
    """Judged drafts by their confidence, in `BINS` bins of equal width over [0, 1]."""

    judged: jax.Array  # int32 [B, bins], drafts whose predecessors were all accepted
    accepted: jax.Array  # int32 [B, bins], those of them that were accepted
    confidence: jax.Array  # float32 [B, bins], sum of their confidences


class Stats(NamedTuple):
    """Counters of a generation, for each sequence.

    Attributes:
        steps: int32 [B], rounds that ended with a choice of this sequence.
        round_of: int32 [B, N], which of these rounds, from 1 on, gave each token; 0 for none.
        verified: int32 [B, n], rows that were run for the k-th draft of a round.
        judged: int32 [B, n], verified drafts whose predecessors had all been accepted.
        accepted: int32 [B, n], drafts that became text.
        calibration: how probable the drafter thought the judged ones.
    """

    steps: jax.Array
    round_of: jax.Array
    verified: jax.Array
    judged: jax.Array
    accepted: jax.Array
    calibration: Calibration

    @classmethod
    def zeros(cls, B: int, N: int, n: int) -> "Stats":
        """Before the first round."""

        def counts(*shape):
            return jnp.zeros((B, *shape), jnp.int32)

        calibration = Calibration(counts(BINS), counts(BINS), jnp.zeros((B, BINS), jnp.float32))
        return cls(counts(), counts(N), counts(n), counts(n), counts(n), calibration)

    def add(self, reached, quota, accepted, emitted, confidence) -> "Stats":
        """One more round.

        Args:
            reached: bool [B], sequences with a choice.
            quota: int32 [B], drafts verified.
            accepted: int32 [B], drafts accepted.
            emitted: int32 [B], tokens that became text.
            confidence: float32 [B, n].
        """
        place = jnp.arange(confidence.shape[1])
        verified = place < quota[:, None]
        judged = verified & (place <= accepted[:, None]) & (place < emitted[:, None])
        kept = judged & (place < accepted[:, None])
        bins = jnp.clip((confidence * BINS).astype(jnp.int32), 0, BINS - 1)
        sequence = jnp.arange(confidence.shape[0])[:, None]

        def by_bin(counts, values):
            return counts.at[sequence, bins].add(values.astype(counts.dtype))

        c = self.calibration
        return self._replace(
            steps=self.steps + reached,
            verified=self.verified + verified,
            judged=self.judged + judged,
            accepted=self.accepted + kept,
            calibration=Calibration(
                by_bin(c.judged, judged),
                by_bin(c.accepted, kept),
                by_bin(c.confidence, jnp.where(judged, confidence, 0)),
            ),
        )

    def report(self) -> "Report":
        """Sums over all sequences."""
        return Report.of(jax.tree.map(np.asarray, self))


class Report(NamedTuple):
    """What the drafts of a generation were worth; prints as a table.

    Attributes:
        tokens: new tokens.
        steps: rounds they took, over all sequences.
        verified: float64 [n], verified drafts in a round, by place.
        conditional: float64 [n], share accepted of those whose predecessors all were; NaN if none.
        cumulative: float64 [n], share of all rounds in which the draft became text.
        bins: judged drafts, accepted share and mean confidence, [BINS] each (NaN where none).
        calibration_error: mean distance of confidence and acceptance over the bins, weighted by
            their drafts; NaN without drafts.
    """

    tokens: int
    steps: int
    verified: np.ndarray
    conditional: np.ndarray
    cumulative: np.ndarray
    bins: tuple[np.ndarray, np.ndarray, np.ndarray]
    calibration_error: float

    @classmethod
    def of(cls, stats: Stats) -> "Report":
        """From the counters on the host."""

        def ratio(a, b):
            return np.divide(a, b, out=np.full(np.shape(a), np.nan), where=np.asarray(b) > 0)

        steps, judged = stats.steps.sum(), stats.judged.sum(axis=0).astype(float)
        accepted = stats.accepted.sum(axis=0).astype(float)
        count, kept, confidence = (a.sum(axis=0).astype(float) for a in stats.calibration)
        distance = np.abs(confidence - kept).sum()
        return cls(
            tokens=int((stats.round_of > 0).sum()),
            steps=int(steps),
            verified=ratio(stats.verified.sum(axis=0).astype(float), steps),
            conditional=ratio(accepted, judged),
            cumulative=ratio(accepted, steps),
            bins=(count, ratio(kept, count), ratio(confidence, count)),
            calibration_error=float(ratio(distance, count.sum())),
        )

    @property
    def tokens_per_step(self) -> float:
        """New tokens of a round; NaN without rounds."""
        return self.tokens / self.steps if self.steps else float("nan")

    def __str__(self) -> str:
        lines = [
            f"{self.tokens} tokens in {self.steps} steps: {self.tokens_per_step:.2f} tokens a step"
        ]
        if self.verified.size:
            lines.append("draft  verified  accepted if reached  became text")
        for k, row in enumerate(zip(self.verified, self.conditional, self.cumulative, strict=True)):
            lines.append("{:5d}  {:8.2f}  {:19.2f}  {:11.2f}".format(k + 1, *row))
        if self.verified.size:
            lines.append(f"expected calibration error {self.calibration_error:.3f}")
        return "\n".join(lines)
