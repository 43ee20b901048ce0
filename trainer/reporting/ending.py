"""What is said and recorded of a run that has ended, and its report."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.wording import counted, one_line
from trainer.engine import Outcome
from trainer.job import UNLIMITED, JobPlan
from trainer.machine.collectives import on_main
from trainer.reporting.log_lines import position, risen_validation
from trainer.saving.checkpoint import snapshot

if TYPE_CHECKING:
    from trainer.loop import Trainer


def tell_end(trainer: "Trainer", exit_code: int) -> None:
    """Say and record how the run has ended, and close its records."""
    is_complete = exit_code == 0
    # To count it may take a while, and a run that is stopped must end soon.
    if is_complete and trainer.ranks.is_main:
        tell_closing(trainer)
    tell_skipped(trainer)
    if is_complete:
        progress = trainer.progress
        risen = risen_validation(progress.best_val_loss, progress.best_val_update, progress.val_loss)
        if risen:
            trainer.reporter.say(risen)
        trainer.reporter.say(written(trainer))
    trainer.reporter.close()
    if is_complete and trainer.settings.report and trainer.ranks.is_main:
        write_own_report(trainer.job.files.stem, trainer.reporter.say)


def tell_closing(trainer: "Trainer") -> None:
    """Say and record what the job shows of the finished run."""
    try:
        closing = trainer.job.closing(trainer.progress)
    except Exception as error:
        # Hours of training do not end with an error for want of this.
        trainer.reporter.say(f"warning: the run is done, but nothing can be shown of it: {one_line(error)}")
        return
    for line in closing.lines:
        trainer.reporter.say(line)
    if closing.record:
        trainer.reporter.record({**position(trainer.progress), **closing.record})


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


def tell_skipped(trainer: "Trainer") -> None:
    """Say how many updates were not applied, if there are any."""
    skipped = trainer.progress.skipped
    if skipped:
        updates = counted(trainer.progress.update, "update")
        trainer.reporter.say(
            f"warning: {skipped:,} of {updates} were not applied, since their loss or gradient was not finite"
        )


def written(trainer: "Trainer") -> str:
    """The line on what the run leaves."""
    return ", ".join(f"{what}: {path}" for what, path in trainer.job.files.outputs.items())


def say_that_all_is_done(trainer: "Trainer") -> None:
    """For a finished run that is asked to go on. Outputs that were moved away are written again."""
    job = trainer.job
    length = trainer.length
    done = counted(trainer.epochs, "epoch")
    if length.last_update < UNLIMITED:
        done = counted(trainer.progress.update, "update")
    further = f" (a higher {length.flag} goes on)" if length.flag else ""
    trainer.reporter.say(f"this run has already done its {done}: nothing to do{further}")
    # Rank 0 looks for all: another one would look while they are written, and all take part in that or none.
    all_there = on_main(trainer.ranks, lambda: all(path.exists() for path in job.files.outputs.values()))
    if not all_there:
        # A later run has moved them away, and this one was brought back by renaming its folder.
        weights = snapshot(trainer.engine.weights())
        on_main(trainer.ranks, lambda: job.save_weights(weights, trainer.progress.update, is_last=True))
    trainer.reporter.say(written(trainer))


def write_own_report(stem: Path, say: Callable[[str], None]) -> None:
    """The report page and the loss curve beside the files of a finished run. Nothing that happens here ends the run."""
    try:
        # Matplotlib takes a second to import.
        from trainer.reporting.html_report import write_report

        write_report([f"{stem}.metrics.jsonl"], f"{stem}.report.html", f"{stem}.loss.png")
        say(f"report: {stem}.report.html, loss curve: {stem}.loss.png")
    except ModuleNotFoundError as error:
        say(
            f"no report was written: the package {error.name} is not installed (pip install {error.name}); then "
            f"python scripts/report.py {stem}.metrics.jsonl makes it"
        )
    except Exception as error:
        say(f"warning: no report was written ({error}); python scripts/report.py {stem}.metrics.jsonl makes it")
