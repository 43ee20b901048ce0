"""Reading a metrics file: curves for reports, samples and the record of each start."""

import contextlib
import json
import math
from array import array
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.errors import UserError, user_errors
from common.files import check_regular_file
from trainer.forecast import Expectation
from trainer.reporting.alarm import RISEN

METRICS_SUFFIX = ".metrics.jsonl"
# Longer lines are skipped. The line of a start has its command, up to 2 MB on Linux.
MOST_LINE_BYTES = 1 << 23
# value of `trained` in the record of a start, for conversations of which only the answers are trained
ANSWERS = "answers"


# {field: its name in a legend}; default: the part of the field behind the last "/"
LABELS = {"loss": "training", "val_loss": "validation"}
# Fields whose long curves are drawn faintly, behind their means. In other fields the last value matters.
NOISY = ("loss", "grad_norm", "tokens_per_second")
# Buckets of a thinned curve, of two points each
BUCKETS = 300


class Chart(NamedTuple):
    """Fields over the tokens trained, as patterns: `name/*` is each number of the list `name`."""

    title: str
    fields: tuple[str, ...]
    logarithmic: bool = False

    def fields_among(self, known: Collection[str]) -> list[str]:
        """The known fields that this chart shows."""
        return [name for pattern in self.fields for name in known if fnmatchcase(name, pattern)]


LOSS = Chart("Loss", ("loss", "val_loss"), logarithmic=True)
# Scores of a model at its task, with a suffix for each further file; the table of figures has them too
METRICS = Chart(
    "Metrics on the development data", ("accuracy*", "f1*", "macro_f1*", "matthews*", "pearson*", "spearman*")
)
# The charts of all trainers. A page shows those for which a run has logged something, in this order.
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
        """True: it is drawn faintly, behind its means."""
        return self.field in NOISY and len(self.x) > 100


def downsample(x: np.ndarray, y: np.ndarray, buckets: int = BUCKETS) -> tuple[np.ndarray, np.ndarray]:
    """At most 2 * buckets + 2 points of a curve: the smallest and largest of each bucket, the first and the last."""
    if len(x) <= 2 * buckets + 2:
        return x, y
    # Every n-th point alone would lose the spikes, which matter most in a long run.
    edges = np.linspace(0, len(x), buckets + 1).astype(int)
    kept = {0, len(x) - 1}
    for lo, hi in pairwise(edges):
        kept.add(lo + int(np.argmin(y[lo:hi])))
        kept.add(lo + int(np.argmax(y[lo:hi])))
    indices = np.array(sorted(kept))
    return x[indices], y[indices]


def smooth(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means over buckets of equal numbers of points."""
    edges = np.linspace(0, len(x), min(BUCKETS // 3, len(x)) + 1).astype(int)
    # Both tokens and values, so that a mean is drawn in the middle of its bucket
    sizes = np.diff(edges)
    return np.add.reduceat(x, edges[:-1]) / sizes, np.add.reduceat(y, edges[:-1]) / sizes


# Figures that summarise a run: label, field, format of a value
FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("updates", "update", "{:,.0f}".format),
    ("tokens", "tokens", "{:,.0f}".format),
    ("training loss", "loss", "{:.4f}".format),
    ("validation loss", "val_loss", "{:.4f}".format),
    ("perplexity", "perplexity", "{:,.2f}".format),
    ("bits per byte", "bits_per_byte", "{:.4f}".format),
    ("tokens per second", "tokens_per_second", "{:,.0f}".format),
    ("share of the best matrix-product rate", "flops_utilisation", "{:.1%}".format),
    ("peak memory", "memory", lambda value: f"{value / 1e9:.2f} GB"),
)


def flat_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """{name: number} of a record, those of a list as name/0, name/1 ...: for trackers and reports."""
    values: dict[str, Any] = {}
    for name, value in record.items():
        items = {f"{name}/{i}": item for i, item in enumerate(value)} if isinstance(value, list) else {name: value}
        values.update(items)
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


class RunRecords:
    """Content of a metrics file, as far as it was read.

    starts: list of dicts. alarms: lines of alarm.py. expected_end: what the last evaluation told. samples: [(update, prompt,
    continuation)]. trained: tokens and passes of each source, recorded at the end of the run; None before it. columns: {field: (tokens,
    values)}, as arrays: Python numbers take four times the memory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name.removesuffix(METRICS_SUFFIX)
        # Bytes read, up to the end of the last whole line
        self.position = 0
        self.samples: list[tuple[int, str, str]] = []
        self.starts: list[dict[str, Any]] = []
        self.alarms: list[str] = []
        self.expected_end: Expectation | None = None
        self.trained: list[dict[str, Any]] | None = None
        self.columns: dict[str, tuple[array, array]] = {}

    @classmethod
    def read(cls, path: str | Path) -> "RunRecords":
        """Read a whole file. Errors: UserError if it cannot be read or has no figures."""
        run = cls(Path(path))
        with user_errors():
            check_regular_file(run.path)
            run.read_new_lines()
        if not run.columns:
            raise UserError(f"{path}: no metrics in this file; expected {{weight}}.metrics.jsonl of a run")
        return run

    def read_new_lines(self) -> None:
        """Read the lines added since the last call. Errors: OSError."""
        # As bytes: a character that a full disk cut off costs only its line.
        with open(self.path, "rb") as file:
            file.seek(self.position)
            # A longer line comes in pieces, none of which is a JSON object.
            while piece := file.readline(MOST_LINE_BYTES):
                if not piece.endswith(b"\n") and len(piece) < MOST_LINE_BYTES:
                    # still being written
                    break
                self.position += len(piece)
                # Lines that a crash cut off, or that are not ours, are skipped.
                with contextlib.suppress(
                    ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError
                ):
                    self._take(json.loads(piece))

    def _take(self, record: dict[str, Any]) -> None:
        tokens = float(record["tokens"])
        if "settings" in record:
            # An odd one, of another program or version, raises here.
            record |= {part: {**record.get(part, {})} for part in ("settings", "model", "data", "machine", "versions")}
            record["next_commands"] = [(purpose, command) for purpose, command in record.get("next_commands", ())]
            *earlier, now = (start.get("data", {}).get("validation") for start in (*self.starts, record))
            if now and next(filter(None, reversed(earlier)), now) != now:
                # The losses of other documents do not compare.
                for field in ("val_loss", "perplexity", "bits_per_byte"):
                    self.columns.pop(field, None)
            self.starts.append(record)
            # A finished run may be extended.
            self.trained = None
        elif "text" in record:
            prompt = record["prompt"]
            self.samples.append((int(record["update"]), prompt, record["text"].removeprefix(prompt)))
        elif "trained" in record:
            self.trained = record["trained"]
        elif "alarm" in record:
            self.alarms.append(str(record["alarm"]))
        else:
            if "val_loss" in record:
                told = record.get("expected")
                self.expected_end = Expectation(*(float(told[name]) for name in Expectation._fields)) if told else None
            for field, value in flat_numbers(record).items():
                number = float(value)
                # In a file of others also NaN, which no chart can show, or what overflows in a mean
                if abs(number) + abs(tokens) < 1e100:
                    x, y = self.columns.setdefault(field, (array("d"), array("d")))
                    x.append(tokens)
                    y.append(number)

    def curves(self, chart: Chart) -> list[Curve]:
        """The logged curves of a chart. Those of zeros alone, such as the auxiliary loss of a dense model, are left out."""
        columns = [(field, *self.columns[field]) for field in chart.fields_among(self.columns)]
        return [Curve(field, np.array(x), np.array(y)) for field, x, y in columns if any(y)]

    def last(self, field: str) -> float | None:
        return self.columns[field][1][-1] if field in self.columns else None

    def figures(self) -> list[tuple[str, str]]:
        """[(label, text)] of the last logged FIGURES, and of the scores at the run's task."""
        of_task = [(field, field, "{:.4f}".format) for field in METRICS.fields_among(self.columns)]
        values = [(label, self.last(field), write) for label, field, write in (*FIGURES, *of_task)]
        figures = [(label, write(value)) for label, value, write in values if value is not None]
        passes = ", ".join(f"{source['passes']:.2f}" for source in self.trained or ())
        return [*figures, ("passes over the text", passes)] if passes else figures

    def ends_of_passes(self) -> list[float]:
        """Tokens trained at the end of each pass over the text, of a finished run with one source and at most 50 passes."""
        passes = self.trained[0]["passes"] if self.trained and len(self.trained) == 1 else 0.0
        tokens = self.last("tokens") or 0.0
        # Whole passes of several: rounding must not lose the last one.
        return [tokens * n / passes for n in range(1, int(passes + 1e-6) + 1)] if passes <= 50 else []

    def start_record(self, part: str) -> dict[str, Any]:
        """A part of the last start's record: settings, model, data, machine, versions."""
        return self.starts[-1].get(part, {}) if self.starts else {}

    @property
    def trains_answers(self) -> bool:
        """True if the data are conversations, of which only answers are trained."""
        return bool(self.start_record("data").get("trained") == ANSWERS)


def quality(run: RunRecords) -> list[tuple[str, float]]:
    """[(whose, bits per byte)], the model first; empty if it was not evaluated on text."""
    bits = run.last("bits_per_byte")
    if bits is None:
        return []
    bars = [("this model", bits)]
    expected, loss = run.expected_end, run.last("val_loss")
    if expected and loss:
        # From nats per token to bits per byte, by the evaluation's ratio
        bars.append(("expected", expected.loss * bits / loss))
    if isinstance(of_gzip := run.start_record("data").get("gzip"), float | int) and of_gzip > 0:
        bars.append(("gzip", of_gzip))
    return bars


def notes(run: RunRecords) -> list[str]:
    """Sentences about what went wrong in a run."""
    risen = risen_validation(run)
    return [*run.alarms, *([risen] if risen else [])]


def risen_validation(run: RunRecords) -> str | None:
    """A sentence for a run whose validation loss was lower before than at the end; None: it was not."""
    tokens, values = run.columns.get("val_loss", ((0,), (math.inf,)))
    lowest, last = min(values), values[-1]
    if not lowest < last:
        return None
    # Every line has its update, and lines with the same number of tokens have the same one.
    line_tokens, updates = run.columns["update"]
    update = int(updates[line_tokens.index(tokens[values.index(lowest)])])
    stem = run.path.with_name(run.name)
    best = Path(f"{stem}.best.pth")
    of_best, of_last = (f" ({best})", f" ({stem}.pth)") if best.is_file() else ("", "")
    line = (
        f"the validation loss was lowest after update {update:,}: {lowest:.3f}{of_best}; that of the last update is "
        f"{last:.3f}{of_last}"
    )
    if last > RISEN * lowest:
        line += ", so the model has started to memorise its training data (fewer epochs or more data help)"
    return line
