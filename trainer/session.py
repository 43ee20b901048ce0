"""What every trainer does around its training loop: join the ranks, go on or begin, and end with a report."""

import contextlib
from pathlib import Path

import torch.distributed as dist

from common.errors import UserError
from common.wording import counted
from trainer.loop import Run, fit
from trainer.machine.command_line import launch_line
from trainer.machine.ranks import init_distributed_mode, on_main
from trainer.machine.signals import StopSignals
from trainer.reporting.reporter import Reporter
from trainer.reporting.trackers import open_tracker
from trainer.saving.checkpoint import Checkpoints, remove_temporaries
from trainer.saving.places import check_space, check_writable
from trainer.saving.resume import is_past, never_saved, resume
from trainer.saving.run_lock import hold, release_all


def launch(train, script, args, argv, ddp=False):
    """train(args, ranks, device, signals, command) -> exit code, with the ranks joined and stop signals caught."""
    with StopSignals() as signals, contextlib.ExitStack() as at_end:
        at_end.callback(release_all)
        ranks, device = init_distributed_mode(args.device, args.dist_timeout, ddp)
        exit_code = train(args, ranks, device, signals, launch_line(script, argv))
        if dist.is_initialized():  # not after an error: the other ranks are not where they could take part
            dist.barrier()  # a launcher that sees a rank gone ends the others, perhaps rank 0 before its tracker is done
            dist.destroy_process_group()
        return exit_code


def new_run(stem, args, ranks, signals, engine, command, **fields):
    """A Run with its checkpoints and reporter; what a killed one left half written is deleted.

    stem: path of the run's files without their endings. fields: what the trainer decides.
    """
    checkpoints = Checkpoints(f"{stem}_resume", args.keep_checkpoints)
    if ranks.is_main:
        remove_temporaries(stem, checkpoints.folder)
    common = {"args": args, "ranks": ranks, "signals": signals, "engine": engine, "command": command}
    return Run(**common, checkpoints=checkpoints, reporter=Reporter(ranks.is_main), **fields)


def carry_out(run, stem, outputs, prepare, replaced=(), begun=()):
    """Train a Run to its end or to a stop signal; returns the exit code.

    stem: path of the run's files without their endings. outputs: {what: path} that `run.save_weights` leaves there.
    replaced: what else an earlier run may have left there; a fresh one moves it away with that run. begun: that of it
    which a run leaves before it has saved anything.
    prepare(): says what the run will do and makes it fast; called when it is certain that there is something to do.
    """
    args, say = run.args, run.reporter.say
    resumed = args.from_resume and resume(run)
    written = ", ".join(f"{what}: {path}" for what, path in outputs.items())
    if run.finished and not run.progress.evaluation_due:
        goal = (
            counted(run.max_updates, "update")
            if run.progress.update >= run.max_updates
            else counted(run.epochs, "epoch")
        )
        flag = "--max_steps" if run.progress.update >= run.max_updates else "--epochs"
        say(f"this run has already done its {goal}: nothing to do (a higher {flag} goes on)")
        if not all(Path(path).exists() for path in outputs.values()):  # they were moved away
            on_main(run.ranks, lambda: run.save_weights(run.engine.model.state_dict(), run.progress.update))
        say(written)
        return 0
    start_reporting(run, stem, outputs.values(), replaced, begun, resumed)
    prepare()
    exit_code = fit(run)
    if exit_code == 0:
        say(written)
    run.reporter.close()
    if exit_code == 0 and args.report and run.ranks.is_main:
        write_own_report(stem, say)
    return exit_code


def start_reporting(run, stem, outputs, replaced, begun, resumed):
    """Begin or continue the tracker's run and the metrics file. A fresh run first moves an earlier one out of its way."""
    args, reporter = run.args, run.reporter

    def begin():
        check_space(stem.parent, run.engine)
        if args.tracker != "none":  # first: if it refuses, nothing has been moved
            ids, step = run.tracker_ids, run.progress.step
            options = (args.wandb_project, stem.name, vars(args), stem.parent, ids.get(args.tracker), step)
            reporter.tracker = open_tracker(args.tracker, *options)
            ids[args.tracker] = reporter.tracker.id
        metrics = f"{stem}.metrics.jsonl"
        files = [metrics, f"{stem}.report.html", f"{stem}.loss.png", *replaced, *begun]
        if resumed:
            run.checkpoints.bring_back()
        else:
            unsaved = [metrics, *begun] if never_saved(Path(metrics)) else []
            run.checkpoints.set_aside(files, outputs, reporter.say, unsaved)
        reporter.open(metrics, is_past(run) if resumed else None)

    on_main(run.ranks, begin)


def write_own_report(stem, say):
    try:
        from trainer.reporting.html_report import write_report  # matplotlib takes a second to import

        write_report([f"{stem}.metrics.jsonl"], f"{stem}.report.html", f"{stem}.loss.png")
        say(f"report: {stem}.report.html, loss curve: {stem}.loss.png")
    except Exception as error:  # the run itself is complete
        say(f"warning: no report was written ({error}); python scripts/report.py {stem}.metrics.jsonl makes it")


def claim(ranks, *stems):
    """Make the folders of the runs' files, and keep other runs from writing them until this command ends.

    stems: paths of the files without their endings. Errors: UserError that names the run that is writing them, or says
    why none can.
    """

    def claim_all():
        for stem in stems:
            make_folder(stem.parent)
            check_writable(stem)
            hold(stem)

    on_main(ranks, claim_all)


def make_folder(folder, flag="--out_dir"):
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{flag}: {folder} cannot be made ({error.strerror}): name another folder") from error
