"""What a report draws of a run, and curves with few enough points for a page.

Each job declares its charts; the start record of its metrics file carries them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

# (tokens, values)
Curve = tuple[np.ndarray, np.ndarray]

# field: its name in a legend, where that is not the end of the field's own name
LABELS = {"loss": "training", "val_loss": "validation", "expected_loss": "expected"}
# Fields whose curve of many points is drawn faintly, behind its means
NOISY = ("loss", "grad_norm", "tokens_per_second")
# Parts of a thinned curve, with two points each
BUCKETS = 300


@dataclass(frozen=True)
class Chart:
    """Some fields of the metrics over the tokens trained. A field `name/*` is each number of the list `name`.

    unless_zero: drawn only where some value is not 0.
    """

    title: str
    fields: tuple[str, ...]
    logarithmic: bool = False
    unless_zero: bool = False

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> "Chart":
        """The Chart of what `asdict` gave, as JSON holds it."""
        return cls(**{**record, "fields": tuple(record["fields"])})

    @property
    def shows_list(self) -> bool:
        """Whether it has a curve for each number of a list: nobody could tell those of several runs apart."""
        return any(field.endswith("/*") for field in self.fields)

    def fields_among(self, known: Iterable[str]) -> list[str]:
        """Those of the known fields that it shows, with the numbers of a list for its name."""
        names = list(known)
        shown: list[str] = []
        for field in self.fields:
            shown += [name for name in names if name == field or (field.endswith("/*") and name.startswith(field[:-1]))]
        return shown


# The Trainer itself logs what these show, whatever the job.
LOSS = Chart("Loss", ("loss", "val_loss", "expected_loss"), logarithmic=True)
SPEED = (
    Chart("Learning rate", ("lr",)),
    Chart("Gradient norm, before clipping", ("grad_norm",), logarithmic=True),
    Chart("Tokens per second", ("tokens_per_second",)),
    Chart("Share of the best matrix-product rate", ("flops_utilisation",)),
)
SKIPPED = Chart("Updates not applied", ("skipped_updates",), unless_zero=True)
# Charts of a job that declares none of its own
COMMON = (LOSS, *SPEED, SKIPPED)
# Title of the chart of how good a model is at its task. The page's table has its fields too.
METRICS = "Metrics on the development data"


def is_noisy(field: str, x: np.ndarray) -> bool:
    """Whether the curve of a field is drawn faintly, behind its means."""
    return field in NOISY and len(x) > 100


def thin(x: np.ndarray, y: np.ndarray, buckets: int = BUCKETS) -> Curve:
    """At most 2 * buckets + 2 points of a curve: the smallest and largest of each bucket, the first and the last."""
    if len(x) <= 2 * buckets + 2:
        return x, y
    # Every n-th point would lose the spikes, which are what one looks for in a long run.
    edges = np.linspace(0, len(x), buckets + 1).astype(int)
    kept = {0, len(x) - 1}
    for lo, hi in pairwise(edges):
        kept.add(lo + int(np.argmin(y[lo:hi])))
        kept.add(lo + int(np.argmax(y[lo:hi])))
    indices = np.array(sorted(kept))
    return x[indices], y[indices]


def smooth(x: np.ndarray, y: np.ndarray, buckets: int = BUCKETS // 3) -> Curve:
    """Means over buckets of equal numbers of points."""
    edges = np.linspace(0, len(x), min(buckets, len(x)) + 1).astype(int)
    # Tokens and values alike, so that a mean stands in the middle of what it is of.
    sizes = np.diff(edges)
    return np.add.reduceat(x, edges[:-1]) / sizes, np.add.reduceat(y, edges[:-1]) / sizes
