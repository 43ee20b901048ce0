"""Reading a metrics file back: curves, samples and what each start has noted about itself."""

import json
import math
import sys
from array import array
from pathlib import Path

import numpy as np

from common.errors import UserError

# That sum a run up: label, field, how it is written.
FIGURES = (
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


# What the page takes from the line of a start and of a sample, and of which kind that is
START_FIELDS = {
    "started": str, "command": str, "settings": dict, "model": dict, "data": dict, "machine": dict, "versions": dict,
}  # fmt: skip
SAMPLE_FIELDS = {"update": int, "prompt": str, "text": str}


def is_number(value: object) -> bool:
    """Whether it is one that can be drawn; JSON's integers know no bound."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def has_fields(record: dict, fields: dict[str, type]) -> bool:
    """Whether the record has each of the fields, and of its kind."""
    return all(isinstance(record.get(name), kind) for name, kind in fields.items())


class RunRecords:
    """What a metrics file holds. curves: {field: (tokens, values)}; samples and starts: lists of dicts."""

    def __init__(self, path) -> None:
        self.path = Path(path)
        self.name = self.path.name.removesuffix(".metrics.jsonl")
        self.samples, self.starts, columns = [], [], {}
        try:
            with open(self.path, encoding="utf-8") as file:
                for line in file:
                    self._read(line, columns)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise UserError(
                f"{self.path}: no metrics can be read from there ({reason}); name a run's .metrics.jsonl"
            ) from error
        self.curves = {field: (np.array(x), np.array(y)) for field, (x, y) in columns.items()}
        if not self.curves:
            raise UserError(f"{self.path}: no metrics are in there; {{weight}}.metrics.jsonl of a run is wanted")

    def _read(self, line, columns) -> None:
        try:
            record = json.loads(line)
            tokens = float(record["tokens"])
        except (
            ValueError,
            TypeError,
            KeyError,
            OverflowError,
            RecursionError,
        ):  # a line that a crash cut off, or none of ours
            return
        if not math.isfinite(tokens):
            return
        if "settings" in record:
            if has_fields(record, START_FIELDS):
                self.starts.append(record)
        elif "text" in record:
            if has_fields(record, SAMPLE_FIELDS):
                self.samples.append(record)
        else:
            for field, value in record.items():
                if isinstance(value, list):
                    for i, item in enumerate(value):
                        self._add(columns, f"{field}/{i}", tokens, item)
                else:
                    self._add(columns, field, tokens, value)

    @staticmethod
    def _add(columns, field, tokens, value) -> None:
        # Not the null of a loss that was not finite.
        if is_number(value):
            if field not in columns:
                columns[field] = array("d"), array("d")
            columns[field][0].append(tokens)
            columns[field][1].append(value)

    def last(self, field):
        return self.curves[field][1][-1] if field in self.curves else None

    @property
    def settings(self):
        return self.starts[-1]["settings"] if self.starts else {}


def find_metrics(paths):
    """The metrics files that are named, or lie beside a named .pth or stem, or in a named folder."""
    found = []
    for path in map(Path, paths):
        candidates = sorted(path.glob("*.metrics.jsonl")) if path.is_dir() else [path]
        if path.suffix != ".jsonl" and not path.is_dir():
            candidates = [path.with_name(path.name.removesuffix(".pth") + ".metrics.jsonl")]
        if not candidates:
            raise UserError(f"{path}: no *.metrics.jsonl in this folder")
        found += candidates
    return found
