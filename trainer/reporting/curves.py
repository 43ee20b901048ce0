"""Curves with fewer points, as a page can draw them."""

import numpy as np

from trainer.reporting.records import Curve

# Of a thinned curve: two points each.
BUCKETS = 300
# What fields are called in a legend, where that is not the end of their name.
LABELS = {"loss": "training", "val_loss": "validation", "expected_loss": "expected"}
# Fields whose curve of many points is drawn faintly, behind its means.
NOISY = ("loss", "grad_norm", "tokens_per_second")


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
    for lo, hi in zip(edges[:-1], edges[1:], strict=True):
        kept.add(lo + int(np.argmin(y[lo:hi])))
        kept.add(lo + int(np.argmax(y[lo:hi])))
    indices = np.array(sorted(kept))
    return x[indices], y[indices]


def smooth(x: np.ndarray, y: np.ndarray, buckets: int = BUCKETS // 3) -> Curve:
    """Means over buckets of equal numbers of points."""
    edges = np.linspace(0, len(x), min(buckets, len(x)) + 1).astype(int)
    # Of tokens and values alike, so that a mean stands in the middle of what it is of.
    sizes = np.diff(edges)
    return np.add.reduceat(x, edges[:-1]) / sizes, np.add.reduceat(y, edges[:-1]) / sizes
