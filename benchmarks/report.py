"""Claims of a benchmark: a figure, the bar it has to reach, and whether it does."""

import contextlib
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from timing import Time

MOST_APART = 1e-2  # relative error of bfloat16 results


class Report:
    """Claims, printed as they come and again in a table."""

    def __init__(self, bars: bool) -> None:
        self.claims, self.times, self.bars = [], [], bars

    def claim(self, what: str, figure: float, *, least=None, most=None) -> None:
        """A figure; the bar of speed it has to reach, or of error it has to stay below, if any."""
        least, holds = least if self.bars else None, None
        if least is not None or most is not None:
            holds = (least is None or figure >= least) and (most is None or figure <= most)
        self.claims.append(dict(claim=what, figure=figure, least=least, most=most, holds=holds))
        print(f"  {self._line(self.claims[-1])}", flush=True)

    def time(self, what: str, together: Time, dispatched: Time, **details: float) -> None:
        """Seconds of an operation, and what it had to do in them."""
        numbers = "".join(f"; {name} {value:.4g}" for name, value in details.items())
        print(f"  {what}: {together}, dispatched {dispatched}{numbers}", flush=True)
        times = dict(together=together._asdict(), dispatched=dispatched._asdict())
        self.times.append(dict(what=what) | times | details)

    def fail(self, what: str, error: Exception) -> None:
        """An operation that could not be measured; the others still are."""
        text = str(error) if isinstance(error, WrongError) else traceback.format_exc()
        print(f"  {what}: {text}", flush=True)
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        self.claims.append(
            dict(claim=what, figure=None, least=None, most=None, holds=False, error=reason[:200])
        )

    @contextlib.contextmanager
    def attempt(self, what: str):
        """A `with` block whose exception becomes a failed claim, so that the rest still runs."""
        try:
            yield
        except Exception as error:
            self.fail(what, error)

    def table(self) -> None:
        """All claims."""
        print("\n| claim | figure | bar | holds |\n|---|---|---|---|")
        for row in self.claims:
            print(self._line(row))

    def figures(self) -> dict[str, Any]:
        """Everything measured, and on what."""
        device = jax.devices()[0].device_kind
        return dict(device=device, jax=jax.__version__, claims=self.claims, times=self.times)

    @property
    def failed(self) -> int:
        """How many claims do not hold."""
        return sum(row["holds"] is False for row in self.claims)

    @staticmethod
    def _line(row) -> str:
        bars = [("at least", row["least"]), ("at most", row["most"])]
        bar = ", ".join(f"{word} {value:g}" for word, value in bars if value is not None)
        figure = row.get("error") or f"{row['figure']:.4g}"
        holds = {True: "yes", False: "NO", None: ""}[row["holds"]]
        return f"| {row['claim']} | {figure} | {bar} | {holds} |"


class WrongError(Exception):
    """A result that is not what it should be."""


def apart(result, exact) -> float:
    """Relative error |result - exact| / |exact| over all elements."""
    result, exact = (np.asarray(a.astype(jnp.float32), np.float64) for a in (result, exact))
    return float(np.linalg.norm(result - exact) / np.linalg.norm(exact))


def agree(report: Report, what: str, result, exact) -> None:
    """Claim the error; refuse to go on when it is above the bar, or not a number."""
    error = apart(result, exact)
    report.claim(f"{what}: relative error", error, most=MOST_APART)
    if not error <= MOST_APART:
        raise WrongError(f"the relative error {error:.2g} is above {MOST_APART}: not timed")
