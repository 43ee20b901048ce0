"""Beginning or continuing the records of a run. What is said at its end is in ending.py."""

import contextlib
import glob
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.settings_files import write_settings
from trainer.job import Job, Progress
from trainer.reporting.records import RunRecords
from trainer.reporting.reporter import Reporter
from trainer.reporting.trackers import open_tracker
from trainer.saving.checkpoint import Checkpoints


def open_records(
    job: Job[Any, Any, Any],
    reporter: Reporter,
    checkpoints: Checkpoints,
    tracker_ids: dict[str, str | None],
    progress: Progress,
    resumed: bool,
) -> None:
    """On rank 0: begin or continue the tracker's run, whose id is noted in `tracker_ids`, and the metrics file.

    A fresh run first moves an earlier one out of its way.
    """
    settings = job.settings
    stem = job.files.stem
    # The tracker comes first: if it refuses, nothing has been moved.
    if settings.tracker != "none":
        kind = settings.tracker
        reporter.tracker, tracker_ids[kind] = open_tracker(
            kind, settings.wandb_project, stem, vars(settings), tracker_ids.get(kind), progress.step
        )
    metrics = Path(f"{stem}.metrics.jsonl")
    settings_file = Path(f"{stem}.settings.yaml")
    begun = [metrics, settings_file, *job.files.begun]
    files = [*begun, Path(f"{stem}.report.html"), Path(f"{stem}.loss.png")]
    if resumed:
        names = [glob.escape(path.name) for path in (*files, *job.files.outputs.values())]
        checkpoints.bring_back([*names, *job.files.replaced])
    else:
        for pattern in job.files.replaced:
            files += sorted(stem.parent.glob(pattern))
        # A run that was killed before its first save has left nothing else. The curve of a finished one is kept in any case.
        unsaved = [] if is_finished(metrics) else begun
        checkpoints.set_aside(files, job.files.outputs.values(), reporter.say, unsaved)
    write_settings(job.files.settings, settings_file)
    for write in job.files.begun.values():
        write()
    # Parts of an evaluation that is to be done again
    again = {"val_loss", "text"} if progress.evaluation_due else set()

    def is_past(record: dict[str, Any]) -> bool:
        """Whether a line is of the time before the checkpoint. A run that was killed has written further ones."""
        at_checkpoint = record["step"] == progress.step and not again & record.keys()
        return bool(record["step"] < progress.step or at_checkpoint)

    reporter.open(metrics, is_past if resumed else None)


def is_finished(metrics: Path) -> bool:
    """Whether a metrics file is of a run that has come to its end."""
    with contextlib.suppress(UserError):
        return RunRecords(metrics).last("eta") == 0
    return False
