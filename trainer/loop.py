"""The training loop of every trainer: epochs of updates, and around them logging, evaluation, saving and resuming.

What differs between trainers comes in as the functions of a `Run`; what makes an update is in engine.py.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dataset.loader import UpdateSchedule, make_loader
from trainer.checkpoint import load_checkpoint
from trainer.machine import peak_memory, versions
from trainer.optim import learning_rate
from trainer.report import Stopwatch, log_line
from trainer.runtime import UserError, rng_state, set_rng_state


class Totals(NamedTuple):
    """What an update trains, over all micro-batches and ranks."""

    targets: int
    documents: int


@dataclass
class Progress:
    """Where a run stands. `row` is the global row of `epoch` that comes next, whatever the world size."""

    epoch: int = 0
    row: int = 0
    update: int = 0
    step: int = -1  # the last micro-batch, counted over all epochs and resumes
    tokens: int = 0  # targets trained so far, all ranks
    skipped: int = 0  # updates that were not applied, as far as they are reported
    grad_norm: float = 0.0  # of the last update
    best_val_loss: float = float("inf")
    evaluation_due: bool = False  # a stop signal came before or in an evaluation


@dataclass
class Run:
    """A training run. The functions are what a trainer decides; the rest is the same for all."""

    args: Any
    ranks: Any
    signals: Any
    reporter: Any
    engine: Any
    checkpoints: Any
    store: Any  # the tokens that the plans are about
    plan: Callable  # epoch -> EpochPlan
    metrics: Callable  # the engine's sums -> dict of what to log
    save_weights: Callable  # model state dict (on the CPU) -> None
    identity: dict  # what a checkpoint must agree with: {what: value}
    command: str = ""  # that started it, for the report
    validate: Callable | None = None  # signals -> (dict with val_loss, number of a stop signal that came or 0)
    pad_id: int = 0
    progress: Progress = field(default_factory=Progress)
    flops_per_token: float = 0.0
    product_rate: float = 0.0  # FLOP/s of this rank's best matrix product; 0: not measured
    tracker_ids: dict = field(default_factory=dict)  # {tracker: id of the run in it}
    saved_update: int = -1


def train_epoch(run, epoch):
    """Train from row `run.progress.row` to the end of `epoch`. Returns the number of the stop signal that ended it, or 0."""
    args, engine, progress, ranks = run.args, run.engine, run.progress, run.ranks
    plan = run.plan(epoch)
    schedule = UpdateSchedule(plan.n_rows, args.batch_size, args.accumulation_steps, ranks.world_size, progress.row)
    pin = engine.device.type == "cuda"
    loader = make_loader(run.store, plan, schedule, ranks.rank, args.num_workers, pin, run.pad_id)
    warmup_rows = args.warmup_iters * args.batch_size * ranks.world_size
    later_epochs = UpdateSchedule(plan.n_rows, *schedule[1:4]).n_updates * (args.epochs - epoch - 1)
    all_updates = progress.update + schedule.n_updates - schedule.first_update + later_epochs
    run.reporter.advance(progress.update, all_updates)
    watch = Stopwatch()
    run.signals.arm()
    for update, micro, batch in loader:
        step = update * args.accumulation_steps + micro
        if micro == 0:  # of a new update: the global rows [first_row, end_row)
            steps_before = progress.step + 1
            first_row, end_row = schedule.rows(update)
            totals = Totals(plan.row_targets(first_row, end_row), plan.row_documents(first_row, end_row))
            lr = learning_rate(
                (epoch + first_row / plan.n_rows) / args.epochs,
                (epoch * plan.n_rows + end_row) / max(warmup_rows, 1),
                args.learning_rate,
                args.lr_schedule,
            )
        if batch is not None:  # None: this rank has no rows left in the last update
            engine.micro_batch(batch.to(engine.device), totals)
        progress.step += 1
        if step % args.log_interval == 0 or step == schedule.n_steps - 1:
            log_step(run, epoch, step, schedule.n_steps, lr, watch)
        if micro < schedule.micro_batches(update) - 1:
            continue

        engine.update(lr, run.signals.signum, run.signals.take_save_request())
        progress.update, progress.tokens = progress.update + 1, progress.tokens + totals.targets
        progress.epoch, progress.row = (epoch, end_row) if end_row < plan.n_rows else (epoch + 1, 0)
        run.reporter.advance(progress.update, all_updates)
        outcomes = engine.poll((progress.update, step, first_row, end_row))
        finished = progress.epoch == args.epochs
        saving = finished or crosses(args.save_interval, steps_before, progress.step)
        saving = saving or any(outcome.stop_signal or outcome.save for outcome in outcomes)
        if saving or progress.row == 0:  # nothing may be under way at a save, nor when the plan changes
            outcomes += engine.drain()
        stop_signal = max((int(outcome.stop_signal) for outcome in outcomes), default=0)
        for outcome in outcomes:
            progress.grad_norm = outcome.grad_norm
            if outcome.skipped > progress.skipped:
                report_skipped(run, outcome, plan)

        if run.validate and (finished or crosses(args.eval_interval, steps_before, progress.step)):
            progress.evaluation_due = True
        if run.validate and progress.evaluation_due and not stop_signal:
            with watch.paused():
                stop_signal = validate(run)
        if saving or stop_signal:
            save(run)
        if stop_signal:
            return run.signals.signum or stop_signal  # its own; a rank that got none ends with the others'
    return 0


def crosses(interval, first_step, last_step):
    """Whether a multiple of `interval` steps is completed within first_step ... last_step (0-based, over all epochs)."""
    return interval > 0 and (last_step + 1) // interval > first_step // interval


def fit(run):
    """Train to the end or to a stop signal; everything is on disk afterwards. Returns the exit code."""
    args, progress, say = run.args, run.progress, run.reporter.say
    if run.validate and progress.evaluation_due:  # a signal broke it off; if one comes again, nothing is lost
        validate(run)
    elif progress.epoch >= args.epochs:
        say(f"this run has already done its {args.epochs} epochs: nothing to do (a higher --epochs goes on)")
        if run.ranks.is_main:
            run.save_weights(run.engine.model.state_dict())  # perhaps they were moved away, or could not be written
    while progress.epoch < args.epochs:
        stop_signal = train_epoch(run, progress.epoch)
        if stop_signal:
            finish_saving(run)
            say(
                f"stopped by signal {stop_signal} after update {progress.update}; everything is saved, and the same "
                "command with --from_resume 1 goes on from here"
            )
            return 128 + stop_signal
    finish_saving(run)
    return 0


def position(run):
    """Where a line of the metrics file stands: the axis that all of them share."""
    return {"step": run.progress.step, "update": run.progress.update, "tokens": run.progress.tokens}


def log_step(run, epoch, step, steps, lr, watch):
    """One log line: means over the tokens since the last one, over all ranks."""
    sums, progress = run.engine.collect(), run.progress
    if not run.ranks.is_main:
        return
    metrics, tokens = run.metrics(sums)
    tokens_per_second = tokens / watch.lap()
    record = {
        **position(run),
        "epoch": epoch + 1,
        **metrics,
        "lr": lr,
        "grad_norm": progress.grad_norm,
        "skipped_updates": progress.skipped,
        "tokens_per_second": tokens_per_second,
        "memory": peak_memory(run.engine.device),
        "epoch_Time": watch.remaining_minutes(step, steps),
    }
    if run.product_rate:
        rate = run.product_rate * run.ranks.world_size
        record["flops_utilisation"] = tokens_per_second * run.flops_per_token / rate
    run.reporter.log(record, log_line(record, f"Epoch:[{epoch + 1}/{run.args.epochs}]({step}/{steps})"))


def report_skipped(run, outcome, plan):
    """Say which update was not applied; UserError after `--max_bad_updates` in a row."""
    update, step, first_row, end_row = outcome.where
    run.progress.skipped = int(outcome.skipped)
    pieces = (piece for row in range(first_row, end_row) for piece in plan.pieces_of_row(row))
    documents = [str(number) for number in dict.fromkeys(document for document, _, _ in pieces)]
    more = f" and {len(documents) - 8} more" if len(documents) > 8 else ""
    run.reporter.say(
        f"step {step}: non-finite loss or gradient: update {update} is not applied ({run.progress.skipped} so far); its "
        f"documents (counted from 0) are {', '.join(documents[:8])}{more}"
    )
    if outcome.skipped_in_a_row >= run.args.max_bad_updates:
        finish_saving(run)
        raise UserError(
            f"{int(outcome.skipped_in_a_row)} updates in a row had a non-finite loss or gradient (up to step {step}); "
            "nothing of them is saved: lower --learning_rate or look at the documents named above"
        )


def validate(run):
    """Evaluate and record; returns the number of a stop signal that came meanwhile (nothing is recorded then)."""
    values, stop_signal = run.validate(run.signals)
    progress = run.progress
    if not stop_signal:
        progress.evaluation_due = False
        progress.best_val_loss = min(progress.best_val_loss, values["val_loss"])
        text = " ".join(f"{name}:{value:.4f}" for name, value in values.items())
        run.reporter.log({**position(run), **values}, f"Validation after update {progress.update}: {text}")
    return stop_signal


# ---------------------------------------------------------------------------------------- saving, resuming


FORMAT = 1  # of a checkpoint; raised when an older trainer's cannot be continued


def state_dict(run):
    """Everything that a resume needs, as tensors and plain containers. A collective: all ranks must call it."""
    # The sums stay apart for each rank: added up in another order they would differ in the last bit.
    ranks = [{"rng": rng_state(run.engine.device), "sums": run.engine.sums.tolist()}]
    if run.ranks.world_size > 1:
        own, ranks = ranks[0], [None] * run.ranks.world_size if run.ranks.is_main else None
        dist.gather_object(own, ranks, dst=0)
    return {
        "format": FORMAT,
        "model": run.engine.model.state_dict(),
        "engine": run.engine.state_dict(),
        "progress": asdict(run.progress),
        "ranks": ranks,
        "identity": run.identity,
        "settings": {name: value for name, value in vars(run.args).items() if value is not None},
        "versions": versions(),
        "tracker_ids": run.tracker_ids,
    }


def save(run):
    """Begin to write a checkpoint and the half-precision weights. A disk that is full is reported, and training goes on."""
    if run.saved_update == run.progress.update:
        return
    run.saved_update = run.progress.update
    state = state_dict(run)
    if run.ranks.is_main:
        try:
            run.checkpoints.wait()
        except OSError as error:
            run.reporter.say(
                f"warning: the save before this one failed ({error}); the checkpoint before it is intact, training goes on"
            )
        # Weights first: a run that was killed between the two does its last updates again, and finds nothing missing.
        run.checkpoints.save(state, run.progress.update, before=lambda copy: run.save_weights(copy["model"]))


def finish_saving(run):
    """Wait for the last save; UserError if it failed, since nothing comes after it.

    All ranks wait for it: a launcher that sees one of them gone ends the others at once.
    """
    try:
        run.checkpoints.wait()
    except OSError as error:
        raise UserError(
            f"the last save failed ({error}): free some space; the checkpoint before it is intact"
        ) from error
    if run.ranks.world_size > 1:
        dist.barrier()


def resume(run):
    """Continue from the newest good checkpoint, if there is one.

    Errors: UserError where data, tokenizer, model or row layout differ from the checkpoint's, naming the difference.
    """
    say, path = run.reporter.say, [None]
    if run.ranks.is_main:
        found = run.checkpoints.newest(say)
        path = [found and str(found[1])]
    if run.ranks.world_size > 1:  # all ranks follow the choice of rank 0; the folder is one that all of them see
        dist.broadcast_object_list(path, src=0)
    if path[0] is None:
        say("--from_resume 1: there is no checkpoint yet, starting afresh")
        return
    state = found[0] if run.ranks.is_main else load_checkpoint(path[0])
    if state.get("format") != FORMAT:
        raise UserError(
            f"{path[0]}: written by another version of this trainer; go on from its .pth with --from_weight"
        )
    for what, value in run.identity.items():
        if state["identity"].get(what) != value:
            raise UserError(f"{path[0]}: {difference(what, state['identity'].get(what), value)}")
    run.engine.model.load_state_dict(state["model"])
    run.engine.load_state_dict(state["engine"])
    run.progress, run.tracker_ids = Progress(**state["progress"]), state["tracker_ids"]
    run.saved_update = run.progress.update
    restore_rank(run, state["ranks"])
    announce_changes(run, state)
    say(f"resumed from {path[0]}: epoch {run.progress.epoch + 1}, row {run.progress.row}, update {run.progress.update}")


def restore_rank(run, before):
    """Give this rank its random state and its sums for the log. On another world size rank 0 takes all sums."""
    rank, sums = run.ranks.rank, run.engine.sums
    if rank < len(before):
        set_rng_state(before[rank]["rng"], run.engine.device)
    if len(before) == run.ranks.world_size:
        sums.copy_(torch.tensor(before[rank]["sums"], dtype=sums.dtype))
    elif rank == 0:
        sums.copy_(torch.tensor([of_rank["sums"] for of_rank in before], dtype=sums.dtype).sum(0))


def is_past(run):
    """A function that tells whether a line of the metrics file is of the time before this run goes on.

    Lines after it are of a run that was killed later than its last checkpoint; without them each stands there once.
    """
    step, due = run.progress.step, run.progress.evaluation_due
    again = {"val_loss", "text"} if due else set()  # an evaluation and its samples
    return lambda record: record["step"] < step or record["step"] == step and not again & record.keys()


SCHEDULE_FLAGS = (
    "epochs",
    "learning_rate",
    "muon_lr",
    "lr_schedule",
    "warmup_iters",
    "batch_size",
    "accumulation_steps",
    "grad_clip",
    "weight_decay",
)


def announce_changes(run, state):
    """Name the settings that may differ from the checkpoint's and do."""
    before, now = state["settings"], vars(run.args)
    for name in SCHEDULE_FLAGS:
        if before[name] != now[name]:
            run.reporter.say(f"--{name} is {now[name]}, was {before[name]} before the resume")
    batches = [
        settings["batch_size"] * settings["accumulation_steps"] * world_size
        for settings, world_size in ((before, len(state["ranks"])), (now, run.ranks.world_size))
    ]
    if batches[0] != batches[1]:
        run.reporter.say(
            f"warning: an update now covers {batches[1]} rows, before the resume it covered {batches[0]}; "
            "no document is seen twice, but the curve will differ"
        )


def difference(what, before, now):
    """One line on what does not agree; of two dicts, their differing entries."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
        before, now = ({name: side.get(name) for name in names} for side in (before, now))
    return (
        f"made with another {what}: {before} there, {now} in this run; use the same one, or start without --from_resume"
    )
