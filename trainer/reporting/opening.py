"""Beginning or continuing the records of a run. What is said at its end is in ending.py."""

import glob
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.settings_files import write_settings
from trainer.reporting.trackers import open_tracker
from trainer.saving.places import check_space
from trainer.saving.save_clock import by_time_alone

if TYPE_CHECKING:
    from trainer.loop import Trainer


def open_records(trainer: "Trainer", resumed: bool) -> None:
    """On rank 0: begin or continue the tracker's run and the metrics file.

    A fresh run first moves an earlier one out of its way.
    """
    job = trainer.job
    settings = trainer.settings
    stem = job.files.stem
    check_space(stem.parent, trainer.engine)
    # The tracker comes first: if it refuses, nothing has been moved.
    if settings.tracker != "none":
        run_id = trainer.tracker_ids.get(settings.tracker)
        tracker = open_tracker(
            settings.tracker,
            settings.wandb_project,
            stem.name,
            vars(settings),
            stem.parent,
            run_id,
            trainer.progress.step,
        )
        trainer.reporter.tracker = tracker
        trainer.tracker_ids[settings.tracker] = tracker.id
    metrics = Path(f"{stem}.metrics.jsonl")
    settings_file = Path(f"{stem}.settings.yaml")
    report = [Path(f"{stem}.report.html"), Path(f"{stem}.loss.png")]
    files = [metrics, settings_file, *report, *job.files.begun]
    if resumed:
        names = [glob.escape(path.name) for path in (*files, *job.files.outputs.values())]
        trainer.checkpoints.bring_back([*names, *job.files.replaced])
    else:
        for pattern in job.files.replaced:
            files += sorted(stem.parent.glob(pattern))
        unsaved = [metrics, settings_file, *job.files.begun] if never_saved(metrics) else []
        trainer.checkpoints.set_aside(files, job.files.outputs.values(), trainer.reporter.say, unsaved)
    write_settings(job.files.settings, settings_file)
    for write in job.files.begun.values():
        write()
    trainer.reporter.open(metrics, is_past(trainer) if resumed else None)


def is_past(trainer: "Trainer") -> Callable[[dict[str, Any]], bool]:
    """A function that tells whether a line of the metrics file is of the time before this run goes on.

    Lines after it are of a run that was killed later than its last checkpoint; without them each stands there once.
    """
    step = trainer.progress.step
    # An evaluation that is to be done again, and its samples.
    again = {"val_loss", "text"} if trainer.progress.evaluation_due else set()

    def before_the_resume(record: dict[str, Any]) -> bool:
        if record["step"] == step:
            return not again & record.keys()
        return record["step"] < step

    return before_the_resume


def never_saved(metrics: Path) -> bool:
    """Whether a metrics file is of a run that ended before its first save, or of none: nobody can go on from that."""
    save_intervals = []
    # Micro-batches or updates, as the intervals count.
    done = 0
    counts_updates = False
    updates_left = True
    try:
        for line in metrics.read_bytes().splitlines():
            record = json.loads(line)
            if "settings" in record:
                save_intervals.append(save_interval_of(record))
                counts_updates = record.get("counts_updates", False)
            elif "eta" in record:
                done = record["update"] if counts_updates else record["step"] + 1
                updates_left = record["eta"] > 0
        # More than one start means a resume, which needs a checkpoint; the end of a run is saved too.
        return len(save_intervals) <= 1 and updates_left and done < min(save_intervals, default=1)
    except FileNotFoundError:
        return True
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        # No file of ours, or cut off: it is kept.
        return False


def save_interval_of(start: dict[str, Any]) -> float:
    """The micro-batches, or updates where intervals count these, between two saves of the run that began with this line of its metrics file.

    Infinity: it is not saved by their number. One that was saved by time has a checkpoint.
    """
    settings = start["settings"]
    device_type = start["machine"]["device"].split(":")[0]
    if by_time_alone(settings["save_minutes"], device_type):
        return math.inf
    return settings["save_interval"] or math.inf
