"""The runs of a folder while they train: their metrics files, of which each look reads what has been added.

Whatever lies in the folder may have been put there by anybody: it is read in bounded pieces, and links are passed over.
"""

import contextlib
import hashlib
import io
import math
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from common.wording import printable
from trainer.reporting.charts import LABELS, Chart, is_noisy, smooth, thin
from trainer.reporting.records import FIGURES, METRICS_SUFFIX, Records

# The latest ones of a folder and of the folders in it.
MOST_RUNS = 100
# That a look goes through, in all of them together.
MOST_ENTRIES = 10_000
# A line of a metrics file has some hundred bytes; that of a start some thousand.
MOST_LINE_BYTES = 1 << 20
BLOCK_BYTES = 1 << 20
# For all files, in one look. Where that is too little, the next one reads on.
SECONDS_OF_READING = 1.0
# Before the place where a look reads on: a line or more
BYTES_TO_COMPARE = 4096
# A run has some twenty. A curve that grows longer is thinned.
MOST_FIELDS = 200
MOST_POINTS = 20_000
MOST_CHARTS = 40
MOST_CURVES = 64
# On a page: half the points of a curve, and of its samples the latest
BUCKETS = 150
MOST_SAMPLES = 8
MOST_SAMPLE_CHARACTERS = 4_000
MOST_NAME_CHARACTERS = 200

Json = dict[str, Any]


class LiveRun(Records):
    """A metrics file that grows."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__()
        self.path = path
        self.name = name
        self.id = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        self.changed_at = 0.0
        self.is_read_whole = False
        # Which file it was, up to where it was read, and the bytes before that. A system gives the number of a file that is
        # gone to the next one. But lines hold measured times: no other file has the same ones in the same place.
        self._file: tuple[int, int] | None = None
        self._position = 0
        self._bytes_before = b""
        self._is_in_long_line = False
        self._restarts = 0

    @property
    def version(self) -> str:
        """Another one whenever there is something new."""
        return f"{self._restarts}.{self._position}"

    def refresh(self, until: float) -> None:
        """Read the lines that were added, or all anew where the file is another one. Errors: OSError.

        until: the time.monotonic() after which no further block is read.
        """
        # No link, and no waiting for the other end of a pipe. Windows has neither flag.
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        with open(os.open(self.path, flags), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError("not a regular file")
            self.changed_at = status.st_mtime
            is_same = (status.st_dev, status.st_ino) == self._file and self._has_bytes_before(file)
            if not is_same:
                self._start_anew((status.st_dev, status.st_ino))
            file.seek(self._position)
            while time.monotonic() < until:
                block = file.read(BLOCK_BYTES)
                self.is_read_whole = len(block) < BLOCK_BYTES
                self._take_block(block)
                if self.is_read_whole:
                    break
                file.seek(self._position)

    def _has_bytes_before(self, file: io.FileIO) -> bool:
        """Whether what was read last stands there still."""
        file.seek(self._position - len(self._bytes_before))
        return file.read(len(self._bytes_before)) == self._bytes_before

    def _start_anew(self, file: tuple[int, int]) -> None:
        """A resume writes the file anew, without the lines after its checkpoint."""
        self._file = file
        self._position = 0
        self._bytes_before = b""
        self._is_in_long_line = False
        self._restarts += 1
        self.samples = []
        self.starts = []
        self.columns = {}

    def _take_block(self, block: bytes) -> None:
        """Take over the whole lines of a block; what is behind them is half-written as yet, or too long to be ours."""
        end = block.rfind(b"\n") + 1
        for line in block[:end].splitlines(keepends=True):
            if self._is_in_long_line:
                self._is_in_long_line = False
            elif line.strip():
                self.take(line)
        if end == 0 and len(block) >= MOST_LINE_BYTES:
            self._is_in_long_line = True
            end = len(block)
        self._position += end
        self._bytes_before = (self._bytes_before + block[:end])[-BYTES_TO_COMPARE:]

    def take(self, line: str | bytes) -> None:
        super().take(line)
        # What the page shows.
        del self.samples[:-MOST_SAMPLES]
        del self.starts[:-1]

    def _add(self, field: str, tokens: float, value: Any) -> None:
        if field not in self.columns and (len(self.columns) >= MOST_FIELDS or len(field) > MOST_NAME_CHARACTERS):
            return
        super()._add(field, tokens, value)
        if field in self.columns and len(self.columns[field][0]) > MOST_POINTS:
            x, y = self.columns[field]
            for column, kept in zip((x, y), thin(np.array(x), np.array(y), MOST_POINTS // 8), strict=True):
                del column[:]
                column.frombytes(kept.tobytes())

    # ------------------------------------------------------------------------------------ for the page

    def summary(self) -> Json:
        """A line of the list of runs."""
        figures = []
        for label, field, write in FIGURES:
            value = self.last(field)
            if value is not None:
                figures.append([label, write(value)])
        return {
            "id": self.id,
            "name": for_page(self.name),
            "version": self.version,
            "changed_at": self.changed_at,
            "seconds_left": seconds_left(self.last("eta")),
            "is_read_whole": self.is_read_whole,
            "figures": figures,
        }

    def content(self) -> Json:
        """The curves and samples."""
        charts = []
        for chart in self.charts[:MOST_CHARTS]:
            curves = self._curves(chart)
            if curves:
                charts.append({"title": for_page(chart.title), "logarithmic": chart.logarithmic, "curves": curves})
        samples = []
        for sample in reversed(self.samples):
            text = sample["text"].removeprefix(sample["prompt"])
            samples.append([sample["update"], for_page(sample["prompt"]), for_page(text, MOST_SAMPLE_CHARACTERS)])
        return {**self.summary(), "charts": charts, "samples": samples}

    def _curves(self, chart: Chart) -> list[Json]:
        curves = []
        values_of_all = []
        for field in chart.fields_among(self.columns)[:MOST_CURVES]:
            x, y = (np.array(column) for column in self.columns[field])
            values_of_all.append(y)
            label = LABELS.get(field, field.split("/")[-1])
            curve: Json = {"label": for_page(label), "points": points(*thin(x, y, BUCKETS))}
            if is_noisy(field, x):
                curve["means"] = points(*smooth(x, y))
            curves.append(curve)
        if chart.unless_zero and not any(values.any() for values in values_of_all):
            return []
        return curves


def points(x: np.ndarray, y: np.ndarray) -> list[list[float]]:
    """[[tokens, value], ...]"""
    return [[float(f"{tokens:.7g}"), float(f"{value:.5g}")] for tokens, value in zip(x, y, strict=True)]


def seconds_left(minutes: float | None) -> float | None:
    """None where a run does not tell."""
    return None if minutes is None or not math.isfinite(minutes) else max(minutes, 0.0) * 60


def for_page(text: str, most: int = MOST_NAME_CHARACTERS) -> str:
    """A text of a file as the page shows it: of bounded length, without what a browser would obey."""
    return printable(text[:most]).encode(errors="backslashreplace").decode()


class RunFolder:
    """The runs in a folder and in the folders in it. Several threads may ask."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._runs: dict[Path, LiveRun] = {}

    def summaries(self) -> list[Json]:
        """A line for each run, the latest first."""
        with self._lock:
            self._look()
            found = [run for run in self._runs.values() if run.columns]
            found.sort(key=lambda run: run.changed_at, reverse=True)
            return [run.summary() for run in found]

    def content(self, run_id: str) -> Json | None:
        """The curves of a run that `summaries` has named; None for any other."""
        with self._lock:
            for run in self._runs.values():
                if run.id == run_id:
                    return run.content()
        return None

    def _look(self) -> None:
        runs: dict[Path, LiveRun] = {}
        until = time.monotonic() + SECONDS_OF_READING
        for path in latest(find_runs(self.folder)):
            name = str(path.relative_to(self.folder)).removesuffix(METRICS_SUFFIX)
            run = self._runs.get(path) or LiveRun(path, name)
            # Gone again, or not to be read.
            with contextlib.suppress(OSError):
                run.refresh(until)
                runs[path] = run
        self._runs = runs


def latest(found: Iterator[tuple[float, Path]]) -> list[Path]:
    newest = sorted(found, key=lambda item: item[0], reverse=True)[:MOST_RUNS]
    return [path for _, path in newest]


def find_runs(folder: Path) -> Iterator[tuple[float, Path]]:
    """(time of the last change, path) of the metrics files in a folder and in its folders; links are passed over."""
    # The folder itself comes first: however much lies in the folders in it, its own runs are found.
    folders = deque([folder])
    left = MOST_ENTRIES
    while folders and left > 0:
        place = folders.popleft()
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            for entry in islice(entries, left):
                left -= 1
                with contextlib.suppress(OSError):
                    if place == folder and entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
                    elif entry.name.endswith(METRICS_SUFFIX) and entry.is_file(follow_symlinks=False):
                        yield entry.stat(follow_symlinks=False).st_mtime, Path(entry.path)
