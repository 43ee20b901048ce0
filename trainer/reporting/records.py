"""Reading a metrics file back: curves, samples and what each start has noted about itself."""

import json
import math
import sys
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError

Floats = np.ndarray[Any, np.dtype[np.float64]]
# (tokens, values) of a curve that is being read.
Column = tuple["array[float]", "array[float]"]


def _gigabytes(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.2f} GB"


# The figures that sum a run up: label, field, how it is written.
FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("updates", "update", "{:,.0f}".format),
    ("tokens", "tokens", "{:,.0f}".format),
    ("training loss", "loss", "{:.4f}".format),
    ("validation loss", "val_loss", "{:.4f}".format),
    ("perplexity", "perplexity", "{:,.2f}".format),
    ("bits per byte", "bits_per_byte", "{:.4f}".format),
    ("tokens per second", "tokens_per_second", "{:,.0f}".format),
    ("share of the best matrix-product rate", "flops_utilisation", "{:.1%}".format),
    ("peak memory", "memory", _gigabytes),
)


# What the page takes from the line of a start and of a sample, and of which kind that is
START_FIELDS: dict[str, type] = {
    "started": str,
    "command": str,
    "settings": dict,
    "model": dict,
    "data": dict,
    "machine": dict,
    "versions": dict,
}
SAMPLE_FIELDS: dict[str, type] = {"update": int, "prompt": str, "text": str}


def is_number(value: object) -> bool:
    """Whether it is one that can be drawn; JSON's integers know no bound."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def has_fields(record: dict[str, Any], fields: dict[str, type]) -> bool:
    """Whether the record has each of the fields, and of its kind."""
    return all(isinstance(record.get(name), kind) for name, kind in fields.items())


class RunRecords:
    """What a metrics file holds. curves: {field: (tokens, values)}; samples and starts: lists of dicts."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.name = self.path.name.removesuffix(".metrics.jsonl")
        self.samples: list[dict[str, Any]] = []
        self.starts: list[dict[str, Any]] = []
        # {field: (tokens, values)} as they are read.
        columns: dict[str, Column] = {}
        try:
            with open(self.path, encoding="utf-8") as file:
                for line in file:
                    self._read(line, columns)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise UserError(
                f"{self.path}: no metrics can be read from there ({reason}); name a run's .metrics.jsonl"
            ) from error
        self.curves: dict[str, tuple[Floats, Floats]] = {}
        for field, (tokens, values) in columns.items():
            self.curves[field] = (np.array(tokens), np.array(values))
        if not self.curves:
            raise UserError(f"{self.path}: no metrics are in there; {{weight}}.metrics.jsonl of a run is wanted")

    def _read(self, line: str, columns: dict[str, Column]) -> None:
        """Take over what a line holds."""
        try:
            record = json.loads(line)
            tokens = float(record["tokens"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            # A line that a crash cut off, or none of ours.
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
    def _add(columns: dict[str, Column], field: str, tokens: float, value: Any) -> None:
        # Not the null of a loss that was not finite.
        if not is_number(value):
            return
        if field not in columns:
            columns[field] = (array("d"), array("d"))
        of_tokens, of_values = columns[field]
        of_tokens.append(tokens)
        of_values.append(value)

    def last(self, field: str) -> float | None:
        """The last value of a field; None: it has none."""
        if field not in self.curves:
            return None
        _, values = self.curves[field]
        return float(values[-1])

    @property
    def settings(self) -> dict[str, Any]:
        """Those of the last start."""
        return self.starts[-1]["settings"] if self.starts else {}


def find_metrics(paths: Iterable[str | Path]) -> list[Path]:
    """The metrics files that are named, or lie beside a named .pth or stem, or in a named folder."""
    found: list[Path] = []
    for path in map(Path, paths):
        candidates = sorted(path.glob("*.metrics.jsonl")) if path.is_dir() else [path]
        if path.suffix != ".jsonl" and not path.is_dir():
            candidates = [path.with_name(path.name.removesuffix(".pth") + ".metrics.jsonl")]
        if not candidates:
            raise UserError(f"{path}: no *.metrics.jsonl in this folder")
        found += candidates
    return found
