"""What is said and recorded of a run that has ended, and its report."""

from pathlib import Path
from typing import Any

from common.wording import counted, one_line
from trainer.engine import Outcome
from trainer.job import UNLIMITED, Job, JobPlan, Progress
from trainer.machine.collectives import on_main
from trainer.reporting.log_lines import position
from trainer.reporting.quality import risen_validation
from trainer.reporting.reporter import Reporter, Say
from trainer.saving.checkpoint import snapshot


def tell_end(job: Job[Any, Any, Any], progress: Progress, reporter: Reporter, is_complete: bool) -> None:
    """On rank 0: say and record how the run has ended, close its records, and write its report."""
    # To count what was trained may take a while, and a run that is stopped must end soon.
    if is_complete:
        tell_closing(job, progress, reporter)
    if progress.skipped:
        updates = counted(progress.update, "update")
        reporter.say(
            f"warning: {progress.skipped:,} of {updates} were not applied, since their loss or gradient was not finite"
        )
    if is_complete:
        risen = risen_validation(progress.best_val_loss, progress.best_val_update, progress.val_loss)
        for line in (*([risen] if risen else []), left_by(job)):
            reporter.say(line)
    reporter.close()
    if is_complete and job.settings.report:
        write_own_report(job.files.stem, reporter.say)


def tell_closing(job: Job[Any, Any, Any], progress: Progress, reporter: Reporter) -> None:
    """Say and record what the job shows of the finished run."""
    try:
        closing = job.closing(progress)
    except Exception as error:
        # Hours of training do not end with an error for want of this.
        reporter.say(f"warning: the run is done, but nothing can be shown of it: {one_line(error)}")
        return
    for line in closing.lines:
        reporter.say(line)
    if closing.record:
        reporter.record({**position(progress), **closing.record})


def skipped_line(outcome: Outcome, plan: JobPlan[Any, Any]) -> str:
    """What to say of an update that was not applied. plan: that its rows are of."""
    assert outcome.where is not None
    number, step, first_row, end_row = outcome.where
    so_far = f"update {number} is not applied ({int(outcome.skipped)} so far)"
    if outcome.overflow:
        # No document is to blame: the scaler finds its scale by that.
        return f"step {step}: float16: the gradients overflowed at their scale, which is halved: {so_far}"
    documents = [str(document) for document in plan.documents_of(first_row, end_row)]
    more = f" and {len(documents) - 8} more" if len(documents) > 8 else ""
    return (
        f"step {step}: non-finite loss or gradient: {so_far}; its documents (counted from 0) are "
        f"{', '.join(documents[:8])}{more}"
    )


def left_by(job: Job[Any, Any, Any]) -> str:
    """The line on what the run leaves."""
    return ", ".join(f"{what}: {path}" for what, path in job.files.outputs.items())


def say_that_all_is_done(job: Job[Any, Any, Any], progress: Progress, epochs: int, reporter: Reporter) -> None:
    """For a finished run that is asked to go on. Outputs that were moved away are written again."""
    length = job.length
    done = counted(epochs, "epoch") if length.last_update == UNLIMITED else counted(progress.update, "update")
    further = f" (a higher {length.flag} goes on)" if length.flag else ""
    reporter.say(f"this run has already done its {done}: nothing to do{further}")
    engine = job.engine
    # Rank 0 looks for all: another one would look while they are written, and all take part in that or none.
    all_there = on_main(engine.ranks, lambda: all(path.exists() for path in job.files.outputs.values()))
    if not all_there:
        # A later run has moved them away, and this one was brought back by renaming its folder.
        weights = snapshot(engine.weights())
        on_main(engine.ranks, lambda: job.save_weights(weights, progress.update, is_last=True))
    reporter.say(left_by(job))


def write_own_report(stem: Path, say: Say) -> None:
    """The report page and the loss curve beside the files of a finished run. Nothing that happens here ends the run."""
    again = f"python scripts/report.py {stem}.metrics.jsonl makes it"
    try:
        # Matplotlib takes a second to import.
        from trainer.reporting.html_report import write_report

        write_report([f"{stem}.metrics.jsonl"], f"{stem}.report.html", f"{stem}.loss.png")
        say(f"report: {stem}.report.html, loss curve: {stem}.loss.png")
    except ModuleNotFoundError as error:
        say(f"no report was written: pip install {error.name}, then {again}")
    except Exception as error:
        say(f"warning: no report was written ({error}); {again}")
