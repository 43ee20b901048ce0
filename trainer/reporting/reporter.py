"""Output for the user: log lines, the metrics file, an experiment tracker. Only global rank 0 reports."""

import contextlib
import io
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from common.errors import library_errors, optional_package
from common.files import atomic_file
from common.wording import announce, without_passwords
from trainer.calls import OnLog
from trainer.job import Progress
from trainer.machine.devices import switches_kept
from trainer.reporting.records import flat_numbers
from trainer.settings import RunSettings

# Reporter.say, or a replacement
Say = Callable[[str], None]
# {tracker: variables by which the user decides a run's project, name, resume, id and folder}; Trackio has none
VARIABLES = {
    "wandb": ("WANDB_PROJECT", "WANDB_NAME", "WANDB_RESUME", "WANDB_RUN_ID", "WANDB_DIR"),
    "swanlab": ("SWANLAB_PROJ_NAME", "SWANLAB_EXP_NAME", "SWANLAB_RESUME", "SWANLAB_RUN_ID", "SWANLAB_LOG_DIR"),
    "trackio": ("", "", ""),
}
# values of WANDB_MODE and SWANLAB_MODE that need no login
WITHOUT_LOGIN = ("offline", "disabled", "dryrun", "local")


def check_tracker(kind: str) -> None:
    """Ask for the package of a tracker, and for the login, before data is read. Errors: UserError."""
    module = optional_package(kind, f"for --tracker {kind}")
    if kind != "trackio" and os.environ.get(f"{kind.upper()}_MODE") not in WITHOUT_LOGIN:
        with library_errors(f"--tracker {kind}: {kind.upper()}_MODE=offline needs neither account nor network"):
            module.login()


class Reporter:
    """Prints and records. On ranks other than 0 nothing is opened, and the other methods are no-ops. on_log: gets each record."""

    def __init__(self, is_main: bool, on_log: OnLog = None) -> None:
        self.is_main = is_main
        self.on_log = on_log or (lambda record: None)
        # the module of the tracker
        self.tracker: Any = None
        self.file: io.FileIO | io.BytesIO | None = None
        # whether the last line in the file is incomplete
        self.is_cut = False
        # in a notebook, the handle of the log line on display
        self.display: Any = None

    def open(self, path: Path, resumed: Progress | None = None) -> None:
        """Open the metrics file: JSON lines, one object per log line, evaluation, sample or start.

        resumed: progress of the checkpoint from which the run resumes; lines written after it are dropped.
        """
        kept = []
        if resumed and path.exists():
            # fields of the end of the run and of an evaluation, which will be repeated
            again = {"trained", "val_loss", "text"} if resumed.evaluation_due else {"trained"}
            for line in path.read_bytes().splitlines(keepends=True):
                # A crash may have cut off the last line.
                with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                    record = json.loads(line)
                    at_checkpoint = record["step"] == resumed.step and not again & record.keys()
                    if record["step"] < resumed.step or at_checkpoint:
                        kept.append(line.rstrip() + b"\n")
        with atomic_file(path) as file:
            file.writelines(kept)
        try:
            # Unbuffered: each line is in the file at once, even if the process is killed.
            self.file = open(path, "a+b", buffering=0)  # noqa: SIM115 - close() does it
        except OSError as error:
            # In a mounted bucket a file is final once it is closed.
            self.say(f"note: {path} takes no further lines ({error.strerror}): each save writes it anew")
            self.file = io.BytesIO()
            self.file.name = path
            self.file.writelines(kept)

    def sync(self) -> None:
        """Bring the lines so far to the disk, before a save, which a resume needs; a file without appends is written anew."""
        if self.file:
            try:
                if isinstance(self.file, io.BytesIO):
                    with atomic_file(self.file.name) as file:
                        file.write(self.file.getvalue())
                else:
                    # A mounted bucket may upload lines only then.
                    os.fsync(self.file.fileno())
            except OSError as error:
                self.say(f"warning: {self.file.name}: {error.strerror}: lines are missing there; training continues")

    def open_tracker(self, settings: RunSettings, stem: Path, run_ids: dict[str, str | None]) -> None:
        """Start a run in Weights & Biases, or in SwanLab or Trackio, which have its interface, or continue that of `run_ids`.

        stem: of the run's files. run_ids: {tracker: id by which a resume finds its run}; set here.
        Errors: UserError if the package is missing or refuses.
        """
        kind = settings.tracker
        module = optional_package(kind, f"for --tracker {kind}")
        known = run_ids.get(kind)
        # Trackio knows a run by its name alone.
        name = stem.name if kind != "trackio" else known or f"{stem.name}-{secrets.token_hex(3)}"
        options = {"project": settings.wandb_project, "name": name, "resume": "allow", "id": known}
        options |= {"dir": str(stem.parent)} if kind == "wandb" else {"logdir": str(stem.parent / "swanlog")}
        pairs = zip(options.items(), VARIABLES[kind], strict=False)
        options = dict(option for option, variable in pairs if not os.environ.get(variable))
        if "wandb_project" in settings.user_set:
            options["project"] = settings.wandb_project
        with library_errors(f"--tracker {kind}"):
            run = module.init(**options, config=publishable(settings.values()))
        self.tracker, run_ids[kind] = module, name if kind == "trackio" else run.id

    def say(self, text: str) -> None:
        if self.is_main:
            announce(text)

    def log(self, progress: Progress, values: Mapping[str, Any], text: str) -> None:
        """Print `text`, and record `values` in the metrics file and the tracker."""
        # The kernel of a notebook has imported it.
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        if self.is_main and "loss" in values and hasattr(shell, "kernel"):
            from IPython.display import Pretty, display

            # in place of the last one
            if self.display is None:
                self.display = display(Pretty(text), display_id=True)
            else:
                self.display.update(Pretty(text))
        else:
            self.say(text)
        self.record(progress, values)
        # Without the step: it is the axis, and a reserved name in some trackers.
        numbers = flat_numbers({"update": progress.update, "tokens": progress.tokens, **values})
        self._to_tracker("log", numbers, step=progress.step)

    def record(self, progress: Progress, values: Mapping[str, Any]) -> None:
        """Append a line to the metrics file only. progress: its place on the axes that all lines share."""
        if self.file:
            axes = {"step": progress.step, "update": progress.update, "tokens": progress.tokens}
            record = publishable({**axes, **values})
            # A file name that is not UTF-8 holds lone surrogates, which only JSON's own escapes can spell.
            text = json.dumps(record, ensure_ascii=False)
            line = text.encode(errors="backslashreplace") + b"\n"
            if self.is_cut:
                # A full disk may have cut off the line before.
                line = b"\n" + line
            try:
                problem = "" if self.file.write(line) == len(line) else "not all of a line fits"
            except OSError as error:
                problem = str(error.strerror)
            if problem and not self.is_cut:
                self.say(f"warning: {self.file.name}: {problem}: lines are missing there; training continues")
            self.is_cut = bool(problem)
            with switches_kept():
                self.on_log(record)

    def close(self) -> None:
        self.sync()
        if self.file:
            self.file.close()
        self._to_tracker("finish")

    def _to_tracker(self, method: str, *arguments: object, **named: object) -> None:
        """Call a tracker's method, best effort: a failure (network, disk) must not end the run."""
        if self.tracker is None:
            return
        try:
            getattr(self.tracker, method)(*arguments, **named)
        except Exception as error:
            self.tracker = None
            self.say(
                f"warning: the tracker has failed, and is off now ({type(error).__name__}: {error}); training continues"
            )


def publishable(value: Any) -> Any:
    """`value` as JSON for others: without the passwords of web addresses, and None for NaN and infinity, which JSON lacks (the
    gradient norm of a skipped update may be NaN)."""
    if isinstance(value, Mapping):
        return {publishable(name): publishable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [publishable(item) for item in value]
    if isinstance(value, str):
        return without_passwords(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Stopwatch:
    """Seconds since the last log line, and the mean time of a micro-batch. Micro-batches are counted as in Progress.step."""

    def __init__(self, step: int, seconds_before: float) -> None:
        """step: the last before the start. seconds_before: since the last log line, in the run that is resumed."""
        self.start = time.perf_counter()
        self.lap_start = self.start - seconds_before
        self.step_before = step
        # (end of the first update, its last micro-batch)
        self.warm: tuple[float, int] | None = None

    def elapsed(self) -> float:
        """Seconds since the last lap."""
        return time.perf_counter() - self.lap_start

    def lap(self) -> float:
        """Seconds since the last lap; starts a new one."""
        elapsed = self.elapsed()
        self.lap_start += elapsed
        return elapsed

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of the block, such as a plan, an evaluation or samples."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.lap_start += seconds
        if self.warm is None:
            self.start += seconds

    def after_update(self, step: int) -> None:
        """step: the update's last micro-batch."""
        if self.warm is None:
            self.warm = time.perf_counter(), step

    def seconds_per_step(self, step: int) -> float:
        """Mean time of this process's micro-batches up to `step`, with the pauses between them.

        The first update, in which code is compiled, is left out once there are others.
        """
        start, step_before = self.start, self.step_before
        if self.warm is not None and step > self.warm[1]:
            start, step_before = self.warm
        return (time.perf_counter() - start) / (step - step_before)
