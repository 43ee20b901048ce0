"""What is said and recorded of a run that has ended, and its report."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from common.wording import counted
from trainer.machine.collectives import on_main
from trainer.reporting.log_lines import position, risen_validation
from trainer.saving.checkpoint import snapshot

if TYPE_CHECKING:
    from trainer.loop import Trainer


def tell_end(trainer: "Trainer", exit_code: int) -> None:
    """Say and record how the run has ended, and close its records."""
    is_complete = exit_code == 0
    # To count it may take a while, and a run that is stopped must end soon.
    if is_complete:
        tell_trained(trainer)
    tell_skipped(trainer)
    if is_complete:
        progress = trainer.progress
        risen = risen_validation(progress.best_val_loss, progress.best_val_update, progress.val_loss)
        if risen:
            trainer.reporter.say(risen)
        for line in (*trainer.job.lines_at_the_end(trainer.progress), written(trainer)):
            trainer.reporter.say(line)
    trainer.reporter.close()
    if is_complete and trainer.settings.report and trainer.ranks.is_main:
        write_own_report(trainer.job.stem, trainer.reporter.say)


def tell_trained(trainer: "Trainer") -> None:
    """Say and record what was trained of each source of the data."""
    if not trainer.ranks.is_main:
        return
    trained = trainer.job.trained(trainer.progress)
    if not trained:
        return
    total = max(sum(tokens for _, tokens, _ in trained), 1)
    sources = []
    for name, tokens, passes in trained:
        share = tokens / total
        sources.append({"source": name, "tokens": tokens, "share": share, "passes": passes})
        trainer.reporter.say(f"trained of {name}: {counted(tokens, 'token')} ({share:.1%}), {passes:.2f} passes")
    trainer.reporter.record({**position(trainer.progress), "trained": sources})


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
    return ", ".join(f"{what}: {path}" for what, path in trainer.job.outputs.items())


def say_that_all_is_done(trainer: "Trainer") -> None:
    """For a finished run that is asked to go on. Outputs that were moved away are written again."""
    job = trainer.job
    goal, flag = job.goal(trainer.progress, trainer.epochs)
    further = f" (a higher {flag} goes on)" if flag else ""
    trainer.reporter.say(f"this run has already done its {goal}: nothing to do{further}")
    # Rank 0 looks for all: another one would look while they are written, and all take part in that or none.
    all_there = on_main(trainer.ranks, lambda: all(path.exists() for path in job.outputs.values()))
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
