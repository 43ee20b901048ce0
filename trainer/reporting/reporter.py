"""What the user sees: progress bar or log lines, the metrics file, an experiment tracker. Only global rank 0 reports."""

import contextlib
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from common.files import atomic_file
from common.terminal import for_terminal, nowhere
from trainer.reporting.log_lines import bar_line
from trainer.reporting.trackers import Experiment

# Reporter.say, or what takes its place.
Say = Callable[[str], None]
# A line of the metrics file.
Record = Mapping[str, Any]


class Reporter:
    """Prints and records. On the other ranks every method does nothing."""

    def __init__(self, is_main: bool) -> None:
        self.is_main = is_main
        self.tracker: Experiment | None = None
        self.file: io.FileIO | None = None
        self.bar: tqdm | None = None
        self.has_terminal = is_main and sys.stdout.isatty() and columns(sys.stdout) > 0
        # Lines that a full disk did not take; they are tried again with the next one.
        self._unwritten = b""

    def open(self, metrics_path: str | Path, is_past: Callable[[dict[str, Any]], bool] | None = None) -> None:
        """Begin the metrics file: JSON lines, one object per log line, evaluation, sample or start.

        is_past: tells of a line (as a dict) that is there already whether to keep it; default: of none.
        """
        if not self.is_main:
            return
        path = Path(metrics_path)
        kept = []
        if is_past and path.exists():
            for line in path.read_bytes().splitlines(keepends=True):
                if is_past(_record(line)):
                    kept.append(line)
        with atomic_file(path) as file:
            file.writelines(kept)
        # Without a buffer each line is in the file at once, also if the process is killed.
        self.file = open(path, "a+b", buffering=0)  # noqa: SIM115 - close() does it

    def say(self, text: str) -> None:
        if not self.is_main:
            return
        # File names and samples may hold what a terminal would obey.
        text = for_terminal(text, sys.stdout)
        with self._terminal():
            if self.bar is None:
                print(text, flush=True)
            else:
                self.bar.write(text, file=sys.stdout)

    def advance(self, done: int, total: float) -> None:
        """Move the bar, where there is a terminal, to `done` updates of `total`."""
        if not self.has_terminal:
            return
        with self._terminal():
            if self.bar is None:
                # tqdm would start a thread that looks after bars that move slowly.
                tqdm.monitor_interval = 0
                layout = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} updates [{elapsed}<{remaining}]{postfix}"
                self.bar = tqdm(total=total, initial=done, file=sys.stdout, bar_format=layout, dynamic_ncols=True)
            self.bar.total = total
            self.bar.update(done - self.bar.n)

    def log(self, record: Record, text: str | None = None) -> None:
        """Record one dict (`step` and `update` are its axis); print `text`, or show a log line's figures in the bar."""
        if not self.is_main:
            return
        if self.bar is not None and "lr" in record:
            with self._terminal():
                self.bar.set_postfix_str(bar_line(record))
        elif text:
            self.say(text)
        self.record(record)
        numbers = flat_numbers(record)
        # It is the axis, and a name that some trackers keep for themselves.
        del numbers["step"]
        self._to_tracker("log", numbers, record["step"])

    def record(self, record: Record) -> None:
        """Put a dict into the metrics file alone."""
        if self.file:
            self._write(_json_line(record))

    def _to_tracker(self, method: str, *arguments: object) -> None:
        """Call a tracker's method: whatever happens to it (a network, a disk) is no reason to end the run."""
        if self.tracker is None:
            return
        try:
            getattr(self.tracker, method)(*arguments)
        except Exception as error:
            self.tracker = None
            self.say(
                f"warning: the tracker has failed and gets no more ({type(error).__name__}: {error}); training goes on"
            )

    @contextlib.contextmanager
    def _terminal(self) -> Iterator[None]:
        """Around what writes to stdout: if the terminal was closed or the reader has gone, training goes on without it."""
        try:
            yield
        except OSError:
            sys.stdout = nowhere()
            if self.bar is not None:
                # It would write once more when it is taken down.
                self.bar.disable = True
            self.bar = None
            self.has_terminal = False

    def _write(self, line: bytes) -> None:
        """Append to the metrics file what an earlier write has left, and the line."""
        assert self.file is not None
        is_first_failure = not self._unwritten
        if not os.path.exists(self.file.name):
            self._bring_back()
        self._unwritten += line
        try:
            written = self.file.write(self._unwritten)
            # A disk that becomes full takes a part.
            self._unwritten = self._unwritten[written:]
        except OSError as error:
            if is_first_failure:
                self.say(f"warning: {self.file.name}: {error.strerror}; the line is kept and tried again")

    def _bring_back(self) -> None:
        """Write the metrics file anew that somebody has deleted, perhaps with its folder: as long as it is open it can be read."""
        assert self.file is not None
        self.file.seek(0)
        lines = self.file.read()
        path = Path(self.file.name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "a+b", buffering=0)  # noqa: SIM115 - close() does it
        except OSError:
            # A later line tries it again.
            return
        self.file.close()
        self.file = file
        self._unwritten = lines + self._unwritten
        self.say(f"warning: {path} was deleted while the run goes on; it is written again")

    def close(self) -> None:
        with self._terminal():
            if self.bar is not None:
                self.bar.close()
        self.bar = None
        if self.file:
            # The disk may have room again by now.
            if self._unwritten:
                self._write(b"")
            self.file.close()
        self._to_tracker("finish")


def columns(terminal: TextIO) -> int:
    """Its width in characters: some pseudo-terminals say 0, and a bar would not show."""
    try:
        return os.get_terminal_size(terminal.fileno()).columns
    except (OSError, ValueError):
        # It does not tell.
        return 80


def finite(value: Any) -> Any:
    """`value` with None for NaN and infinity, which JSON does not have; a skipped update's gradient norm is one."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _json_line(record: Record) -> bytes:
    """A record as a line of the metrics file. A file name that is not UTF-8 holds lone surrogates, which only JSON's
    own escapes can spell."""
    return json.dumps(finite(record), ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def flat_numbers(record: Record) -> dict[str, float]:
    """The numbers of a record by name, those of a list as name/0, name/1 ...: what trackers draw."""
    values: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, list):
            for i, item in enumerate(value):
                values[f"{name}/{i}"] = item
        else:
            values[name] = value
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _record(line: bytes) -> dict[str, Any]:
    """The dict of a metrics line; for one that a crash left damaged, or no run wrote, a dict that is never of the past."""
    damaged = {"step": math.inf}
    try:
        record = {**damaged, **json.loads(line)}
    except (ValueError, TypeError, RecursionError):
        return damaged
    return record if isinstance(record["step"], int | float) else damaged


class Stopwatch:
    """Seconds since the last log line, and an estimate of what is left of an epoch."""

    def __init__(self, first_step: int = 0, seconds_before: float = 0.0) -> None:
        """first_step: of the epoch's micro-batches the one that comes first now. seconds_before: see `elapsed`."""
        self.start = time.perf_counter()
        # As if the interval that a stop broke off had begun so long ago.
        self.last = self.start - seconds_before
        self.first_step = first_step
        # (when the first update was done, the micro-batch behind it)
        self.warm: tuple[float, int] | None = None

    def elapsed(self) -> float:
        """Seconds since the last lap: a resumed run hands them in again, with the sums of that interval."""
        return time.perf_counter() - self.last

    def lap(self) -> float:
        """Seconds since the last lap, and the beginning of a new one."""
        now = time.perf_counter()
        elapsed = now - self.last
        self.last = now
        return elapsed

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What the block takes does not count for the next lap: evaluations are no training."""
        start = time.perf_counter()
        yield
        # Moving the lap's beginning leaves out just the pause.
        self.last += time.perf_counter() - start

    def after_update(self, last_step: int) -> None:
        """last_step: the update's last micro-batch, counted from 0."""
        if self.warm is None:
            self.warm = time.perf_counter(), last_step + 1

    def seconds_per_step(self, step: int) -> float:
        """Mean time of the epoch's micro-batches so far, when `step` (0-based) is done.

        The first update, in which code is compiled, is left out once there are others.
        """
        start, first_step = self.start, self.first_step
        if self.warm is not None and step >= self.warm[1]:
            start, first_step = self.warm
        return (time.perf_counter() - start) / (step - first_step + 1)
