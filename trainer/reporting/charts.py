"""The fields of a metrics file that reports draw, and curves with few enough points for a page."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import NamedTuple

import numpy as np

# field: its name in a legend, where that is not the end of the field's own name
LABELS = {"loss": "training", "val_loss": "validation", "expected_loss": "expected"}
# Fields whose curve of many points is drawn faintly, behind its means; of others one looks for the last value
NOISY = ("loss", "grad_norm", "tokens_per_second")
# Parts of a thinned curve, with two points each
BUCKETS = 300


class Chart(NamedTuple):
    """Some fields over the tokens trained, by patterns: `name/*` is each number of the list `name`."""

    title: str
    fields: tuple[str, ...]
    logarithmic: bool = False

    def fields_among(self, known: Iterable[str]) -> list[str]:
        """Those of the known fields that it shows."""
        names = list(known)
        return [name for pattern in self.fields for name in names if fnmatchcase(name, pattern)]


LOSS = Chart("Loss", ("loss", "val_loss", "expected_loss"), logarithmic=True)
# How good a model is at its task, with a suffix for each further file. The table of figures has these too.
METRICS = Chart(
    "Metrics on the development data", ("accuracy*", "f1*", "macro_f1*", "matthews*", "pearson*", "spearman*")
)
# All that any trainer logs for a chart. A page has those of which a run has logged something, in this order.
CHARTS = (
    LOSS,
    METRICS,
    Chart("Losses of generator and discriminator", ("mlm_loss", "disc_loss", "val_mlm_loss", "val_disc_loss"), True),
    Chart("Discriminator: precision, recall, AUC", ("disc_precision", "disc_recall", "disc_auc", "val_disc_auc")),
    Chart("Validation: bits per byte", ("bits_per_byte",)),
    Chart("Learning rate", ("lr",)),
    Chart("Gradient norm, before clipping", ("grad_norm",), logarithmic=True),
    Chart("Tokens per second", ("tokens_per_second",)),
    Chart("Share of the best matrix-product rate", ("flops_utilisation",)),
    Chart("Auxiliary loss", ("aux_loss",)),
    Chart("Expert load: largest share in a layer", ("expert_load_max",)),
    Chart("Updates not applied", ("skipped_updates",)),
    Chart("Expert load: mean over the layers", ("expert_load/*",)),
)


class Curve(NamedTuple):
    """A field over the tokens trained."""

    field: str
    x: np.ndarray
    y: np.ndarray

    @property
    def label(self) -> str:
        return LABELS.get(self.field, self.field.split("/")[-1])

    @property
    def is_noisy(self) -> bool:
        """Whether it is drawn faintly, behind its means."""
        return self.field in NOISY and len(self.x) > 100


def thin(x: np.ndarray, y: np.ndarray, buckets: int = BUCKETS) -> tuple[np.ndarray, np.ndarray]:
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


def smooth(x: np.ndarray, y: np.ndarray, buckets: int = BUCKETS // 3) -> tuple[np.ndarray, np.ndarray]:
    """Means over buckets of equal numbers of points."""
    edges = np.linspace(0, len(x), min(buckets, len(x)) + 1).astype(int)
    # Tokens and values alike, so that a mean stands in the middle of what it is of.
    sizes = np.diff(edges)
    return np.add.reduceat(x, edges[:-1]) / sizes, np.add.reduceat(y, edges[:-1]) / sizes
