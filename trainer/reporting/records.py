"""Reading a metrics file back: curves, samples and what each start has noted about itself."""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from common.errors import UserError
from common.files import refuse_irregular
from trainer.reporting.charts import Chart, charts_of_record
from trainer.reporting.older_records import CHARTS_BEFORE

# No figure of a run comes near it. The axes of matplotlib overflow with numbers near the largest float.
LARGEST = 1e30
# A metrics file may have been written by anybody: more than this is passed over. A start has its command, which Linux allows 2 MB.
MOST_LINE_BYTES = 1 << 23
MOST_FIELDS = 1000
METRICS_SUFFIX = ".metrics.jsonl"
# What the data of a start is noted to train, where that is not all of its text
ANSWERS = "answers"

# How a figure is written.
Write = Callable[[float], str]


def of_memory(value: float) -> str:
    return f"{value / 1e9:.2f} GB"


# That sum a run up: label, field, how it is written.
FIGURES: tuple[tuple[str, str, Write], ...] = (
    ("updates", "update", "{:,.0f}".format),
    ("tokens", "tokens", "{:,.0f}".format),
    ("training loss", "loss", "{:.4f}".format),
    ("validation loss", "val_loss", "{:.4f}".format),
    ("perplexity", "perplexity", "{:,.2f}".format),
    ("bits per byte", "bits_per_byte", "{:.4f}".format),
    ("tokens per second", "tokens_per_second", "{:,.0f}".format),
    ("share of the best matrix-product rate", "flops_utilisation", "{:.1%}".format),
    ("peak memory", "memory", of_memory),
)


# What the page takes from the line of a start and of a sample, and of which kind that is
START_FIELDS = {
    "started": str, "command": str, "settings": dict, "model": dict, "data": dict, "machine": dict, "versions": dict,
}  # fmt: skip
SAMPLE_FIELDS = {"update": int, "prompt": str, "text": str}
TRAINED_FIELDS = {"source": str, "tokens": int, "share": float, "passes": float}

# {field: (tokens, values)} as lines come in: a Python number takes four times the memory of an array's.
Columns = dict[str, tuple[array, array]]
Curve = tuple[np.ndarray, np.ndarray]


def is_number(value: object) -> bool:
    """Whether it is one that can be drawn; JSON's integers know no bound."""
    return isinstance(value, int | float) and abs(value) <= LARGEST


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file, without those that are longer than MOST_LINE_BYTES."""
    is_rest = False
    while piece := file.readline(MOST_LINE_BYTES):
        is_end = piece.endswith(b"\n")
        if not is_rest and (is_end or len(piece) < MOST_LINE_BYTES):
            yield piece
        is_rest = not is_end


def has_fields(record: Mapping[str, object], fields: Mapping[str, type]) -> bool:
    """Whether the record has each of the fields, and of its kind."""
    return all(isinstance(record.get(name), kind) for name, kind in fields.items())


class Records:
    """What lines of a metrics file hold. samples and starts: lists of dicts; trained: what the run has noted of each source
    of its data at its last end."""

    def __init__(self) -> None:
        self.samples: list[dict[str, Any]] = []
        self.starts: list[dict[str, Any]] = []
        self.columns: Columns = {}
        self.trained: list[dict[str, Any]] = []

    def take(self, line: str | bytes) -> None:
        """Take over one line. One that a crash cut off, or that is none of ours, is passed over."""
        try:
            record = json.loads(line)
            tokens = float(record["tokens"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return
        if not is_number(tokens):
            return
        if "settings" in record:
            if has_fields(record, START_FIELDS):
                self.starts.append(record)
        elif "text" in record:
            if has_fields(record, SAMPLE_FIELDS):
                self.samples.append(record)
        elif "trained" in record:
            self._take_trained(record["trained"])
        else:
            for field, value in record.items():
                if isinstance(value, list):
                    # A curve for each number, as the trackers have it.
                    for i, item in enumerate(value):
                        self._add(f"{field}/{i}", tokens, item)
                else:
                    self._add(field, tokens, value)

    def _take_trained(self, sources: object) -> None:
        """Take over what was trained of each source, if it is that."""
        if not isinstance(sources, list):
            return
        found = []
        for source in sources:
            is_one = isinstance(source, dict) and has_fields(source, TRAINED_FIELDS)
            if not is_one or not all(map(is_number, (source["tokens"], source["share"], source["passes"]))):
                return
            found.append(source)
        self.trained = found

    def _add(self, field: str, tokens: float, value: Any) -> None:
        # Not the null of a loss that was not finite.
        if not is_number(value):
            return
        if field not in self.columns:
            if len(self.columns) == MOST_FIELDS:
                return
            self.columns[field] = (array("d"), array("d"))
        x, y = self.columns[field]
        x.append(tokens)
        y.append(value)

    def last(self, field: str) -> float | None:
        return self.columns[field][1][-1] if field in self.columns else None

    def is_in_last_line(self, field: str) -> bool:
        """Whether the last log line has it: some figures are only known for a part of a run."""
        if field not in self.columns or "loss" not in self.columns:
            return False
        return bool(self.columns[field][0][-1] == self.columns["loss"][0][-1])

    @property
    def settings(self) -> dict[str, Any]:
        """Those of the last start."""
        return self.starts[-1]["settings"] if self.starts else {}

    @property
    def charts(self) -> tuple[Chart, ...]:
        """Those that its job declared at the last start."""
        # The last start's: a resume by a newer version declares them although the first start did not.
        declared = charts_of_record(self.starts[-1].get("charts")) if self.starts else None
        return CHARTS_BEFORE if declared is None else declared


def trains_answers(run: Records) -> bool:
    """Whether the data of a run are conversations, of which the answers alone are trained."""
    return bool(run.starts) and run.starts[-1]["data"].get("trained") == ANSWERS


class RunRecords(Records):
    """What a metrics file holds. curves: {field: (tokens, values)}.

    Errors: UserError for a file that cannot be read, or that has no figures.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self.name = self.path.name.removesuffix(METRICS_SUFFIX)
        try:
            refuse_irregular(self.path)
            # A metrics file grows with the run, so it is read line by line. As bytes: a full disk may have cut a character, and
            # costs its line alone.
            with open(self.path, "rb") as file:
                for line in lines_of(file):
                    self.take(line)
        except OSError as error:
            raise UserError(
                f"{self.path}: no metrics can be read from there ({error.strerror}); name a run's .metrics.jsonl"
            ) from error
        self.curves: dict[str, Curve] = {}
        for field, (tokens, values) in self.columns.items():
            # Not copied.
            self.curves[field] = (np.frombuffer(tokens), np.frombuffer(values))
        if not self.curves:
            raise UserError(f"{self.path}: no metrics are in there; {{weight}}.metrics.jsonl of a run is wanted")


def find_metrics(paths: Iterable[str | Path]) -> list[Path]:
    """The metrics files that are named, or lie beside a named .pth or stem, or in a named folder.

    Errors: UserError for a folder without any.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            in_folder = sorted(path.glob("*.metrics.jsonl"))
            if not in_folder:
                raise UserError(f"{path}: no *.metrics.jsonl in this folder")
            found += in_folder
        elif path.suffix == ".jsonl":
            found.append(path)
        else:
            found.append(path.with_name(path.name.removesuffix(".pth") + ".metrics.jsonl"))
    return found
