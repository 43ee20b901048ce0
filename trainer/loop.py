"""The training loop of every trainer: epochs of updates, and around them logging, evaluation and saving.

What differs between trainers comes in as the functions of a `Run`; what makes an update is in engine.py.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.errors import UserError
from common.wording import counted
from dataset.loader import Loader, UpdateSchedule
from dataset.loader_workers import LoaderError
from dataset.store.check import TokenCheck
from trainer.machine.measure import peak_memory
from trainer.reporting.reporter import Stopwatch, log_line, position
from trainer.saving.resume import finish_saving, save

CHECK_BEFORE_SAVE_S = 5.0  # a stop signal must not wait for longer
# Asks the other ranks to stop in the place of a signal's number. With some ranks' signals the mean stays above them.
LOADER_FAILED = 1 << 16
LARGEST_SIGNAL = 64


@dataclass
class Progress:
    """Where a run stands. `row` is the global row of `epoch` that comes next, whatever the world size."""

    epoch: int = 0
    row: int = 0
    update: int = 0
    step: int = -1  # the last micro-batch, counted over all epochs and resumes
    tokens: int = 0  # targets seen so far by all ranks, those of skipped updates included
    skipped: int = 0  # updates that were not applied, as far as they are reported
    grad_norm: float | None = None  # of the last update whose outcome is known
    best_val_loss: float = float("inf")
    evaluation_due: bool = False  # a stop signal came before or in an evaluation


@dataclass
class Run:
    """A training run. The functions are what a trainer decides; the rest is the same for all.

    A plan says what an epoch trains: `n_rows`, and for rows [lo, hi) `totals(lo, hi)` (whose `targets` are the tokens
    trained), `documents_of(lo, hi)` and `recipe(rows)`, which `assembler` turns into a batch.
    """

    args: Any
    ranks: Any
    signals: Any
    reporter: Any
    engine: Any
    checkpoints: Any
    plan: Callable  # epoch -> plan
    assembler: Any
    learning_rate: Callable  # (epoch, rows of the epoch, first_row, end_row of an update) -> its rate
    metrics: Callable  # the engine's sums -> (dict of what to log, tokens)
    save_weights: Callable  # (model state dict, on the CPU; updates done) -> None
    identity: dict  # what a checkpoint must agree with: {what: value}
    command: str = ""  # that started it, for the report
    token_check: TokenCheck | None = None  # of the stores, on one rank of a machine
    validate: Callable | None = None  # () -> (dict with val_loss, number of a stop signal that came or 0)
    sample: Callable | None = None  # () -> ([(prompt, text)] on rank 0, number of a stop signal that came or 0)
    epochs: int = 1
    max_updates: float = float("inf")  # the run ends there, though it be in the middle of an epoch
    save_at: frozenset = frozenset()  # updates after which it is saved, beside those of --save_interval
    shown: tuple = ("grad_norm",)  # fields of a log line beside loss and rate
    progress: Progress = field(default_factory=Progress)
    flops_per_token: float = 0.0
    product_rate: float = 0.0  # FLOP/s of this rank's best matrix product; 0: not measured
    tracker_ids: dict = field(default_factory=dict)  # {tracker: id of the run in it}
    all_updates: int = 0  # of the whole run, as the epoch that is under way expects
    saved_update: int = -1
    loader: Loader | None = None  # made for the first epoch and kept for the next ones
    watch: Stopwatch | None = None
    seconds_before: float = 0.0  # of the log interval in which the resumed run was stopped

    @property
    def finished(self):
        """By updates where they are limited (`epochs` is an estimate then), by epochs otherwise."""
        if self.max_updates < float("inf"):
            return self.progress.update >= self.max_updates
        return self.progress.epoch >= self.epochs


def train_epoch(run, epoch):
    """Train from row `run.progress.row` to the end of `epoch`. Returns the number of the stop signal that ended it, or 0.

    Errors: LoaderError between two updates, where no other rank waits for this one's part of an update.
    """
    args, engine, progress, ranks = run.args, run.engine, run.progress, run.ranks
    plan = run.plan(epoch)
    schedule = UpdateSchedule(plan.n_rows, args.batch_size, args.accumulation_steps, ranks.world_size, progress.row)
    if run.loader is None:
        run.loader = Loader(run.assembler, ranks.rank, args.num_workers, pin_memory=engine.device.type == "cuda")
    later_epochs = UpdateSchedule(plan.n_rows, *schedule[1:4]).n_updates * (run.epochs - epoch - 1)
    run.all_updates = progress.update + schedule.n_updates - schedule.first_update + later_epochs
    if run.max_updates < float("inf"):
        run.all_updates = run.max_updates
    run.reporter.advance(progress.update, run.all_updates)
    run.watch = Stopwatch(schedule.first_update * args.accumulation_steps, run.seconds_before)
    run.seconds_before = 0.0
    run.signals.arm()
    for update, micro, batch in run.loader.epoch(plan, schedule):
        step = update * args.accumulation_steps + micro
        if micro == 0:  # of a new update: the global rows [first_row, end_row)
            steps_before = progress.step + 1
            first_row, end_row = schedule.rows(update)
            totals = plan.totals(first_row, end_row)
            lr = run.learning_rate(epoch, plan.n_rows, first_row, end_row)
        if batch is not None:  # None: this rank has no rows left in the last update
            engine.micro_batch(batch.to(engine.device), totals, last=micro == schedule.micro_batches(update) - 1)
        progress.step += 1
        log_is_due = step % args.log_interval == 0 or step == schedule.n_steps - 1
        if micro < schedule.micro_batches(update) - 1:
            if log_is_due:
                log_step(run, epoch, step, schedule.n_steps, lr)
            continue

        stop_request = run.signals.signum or (LOADER_FAILED if run.loader.failure else 0)
        engine.update(lr, stop_request, run.signals.take_save_request())
        if run.token_check:
            run.token_check.raise_if_damaged()
        progress.update, progress.tokens = progress.update + 1, progress.tokens + totals.targets
        progress.epoch, progress.row = (epoch, end_row) if end_row < plan.n_rows else (epoch + 1, 0)
        run.reporter.advance(progress.update, run.all_updates)
        outcomes = engine.poll((progress.update, step, first_row, end_row))
        saving = (
            run.finished or progress.update in run.save_at or crosses(args.save_interval, steps_before, progress.step)
        )
        saving = saving or any(outcome.stop_signal or outcome.save for outcome in outcomes)
        if saving or progress.row == 0:  # nothing may be under way at a save, nor when the plan changes
            outcomes += engine.drain()
        stop_signal = max((int(outcome.stop_signal) for outcome in outcomes), default=0)
        for outcome in outcomes:
            progress.grad_norm = outcome.grad_norm
            if outcome.skipped > progress.skipped:
                report_skipped(run, outcome, plan)
        if log_is_due or run.finished:
            log_step(run, epoch, step, schedule.n_steps, lr)

        if run.validate and (run.finished or crosses(args.eval_interval, steps_before, progress.step)):
            progress.evaluation_due = True
        if run.sample and run.finished:
            progress.evaluation_due = True
        if progress.evaluation_due and not stop_signal:
            with run.watch.paused():
                stop_signal = validate(run)
        if saving or stop_signal:
            if run.token_check:  # by now it has long ended, unless this is the beginning or the data is huge
                run.token_check.raise_if_damaged(wait_s=CHECK_BEFORE_SAVE_S)
            save(run)
        if stop_signal:
            return run.signals.signum or stop_signal  # its own; a rank that got none ends with the others'
        if run.finished:
            break
    return 0


def crosses(interval, first_step, last_step):
    """Whether a multiple of `interval` steps is completed within first_step ... last_step (0-based, over all epochs)."""
    return interval > 0 and (last_step + 1) // interval > first_step // interval


def fit(run):
    """Train to the end or to a stop signal; everything is on disk afterwards. Returns the exit code.

    Errors: LoaderError where the batches could not go on; the updates before are saved. UserError("") where that
    happened to another rank, which says it.
    """
    stop_signal, failure = 0, None
    try:
        stop_signal = train(run)
        failure = run.loader and run.loader.failure
    except LoaderError as error:
        failure = error
        stop_signal = LOADER_FAILED
        if run.ranks.world_size > 1:
            # A save needs all ranks, and the others are in an update, where they wait for this one.
            with contextlib.suppress(OSError):
                run.checkpoints.wait()
            raise
        if run.progress.update:
            save(run)
    finally:
        if run.loader is not None:
            run.loader.close()
    finish_saving(run)
    if not stop_signal:
        return 0
    because = f"by signal {stop_signal}" if stop_signal <= LARGEST_SIGNAL else "for want of batches"
    run.reporter.say(
        f"stopped {because} after update {run.progress.update}; everything is saved, and the same "
        "command with --from_resume 1 goes on from here"
    )
    if stop_signal > LARGEST_SIGNAL:
        raise failure or UserError("")  # another rank's, which says it
    return 128 + stop_signal


def train(run):
    """Epoch after epoch. Returns the number of the stop signal that ended it or LOADER_FAILED, 0 at the end."""
    progress, stop_signal = run.progress, 0
    if progress.evaluation_due:  # a signal broke it off
        stop_signal = validate(run)
        if run.finished and not stop_signal:
            run.saved_update = -1  # no update comes that would be saved, and the evaluation is not to be done again
            save(run)
    while not run.finished and not stop_signal:
        stop_signal = train_epoch(run, progress.epoch)
    return stop_signal


def log_step(run, epoch, step, steps, lr):
    """One log line: means over the tokens since the last one, over all ranks."""
    sums, progress = run.engine.collect(), run.progress
    if not run.ranks.is_main:
        return
    metrics, tokens = run.metrics(sums)
    tokens_per_second = tokens / run.watch.lap()
    step_seconds = run.watch.seconds_per_step(step)
    steps_left = (run.all_updates - progress.update) * run.args.accumulation_steps
    record = {
        **position(run),
        "epoch": epoch + 1,
        **metrics,
        "lr": lr,
        "grad_norm": progress.grad_norm,
        "skipped_updates": progress.skipped,
        "tokens_per_second": tokens_per_second,
        "updates_per_second": 1 / (step_seconds * run.args.accumulation_steps),
        "memory": peak_memory(run.engine.device),
        "epoch_Time": step_seconds * (steps - step - 1) / 60,
        "eta": step_seconds * steps_left / 60,
    }
    if run.product_rate:
        rate = run.product_rate * run.ranks.world_size
        record["flops_utilisation"] = tokens_per_second * run.flops_per_token / rate
    run.reporter.log(record, log_line(record, f"Epoch:[{epoch + 1}/{run.epochs}]({step}/{steps})", run.shown))


def report_skipped(run, outcome, plan):
    """Say which update was not applied; UserError after `--max_bad_updates` in a row."""
    update, step, first_row, end_row = outcome.where
    run.progress.skipped = int(outcome.skipped)
    documents = [str(number) for number in plan.documents_of(first_row, end_row)]
    more = f" and {len(documents) - 8} more" if len(documents) > 8 else ""
    run.reporter.say(
        f"step {step}: non-finite loss or gradient: update {update} is not applied ({run.progress.skipped} so far); its "
        f"documents (counted from 0) are {', '.join(documents[:8])}{more}"
    )
    if outcome.skipped_in_a_row >= run.args.max_bad_updates:
        finish_saving(run)
        if not run.ranks.is_main:
            raise UserError("")  # all ranks are here; one says why
        raise UserError(
            f"{counted(int(outcome.skipped_in_a_row), 'update')} in a row had a non-finite loss or gradient (up to step {step}); "
            "nothing of them is saved: lower --learning_rate or look at the documents named above"
        )


def validate(run):
    """Evaluate, sample and record; returns the number of a stop signal that came meanwhile (nothing is recorded then)."""
    values, stop_signal = run.validate() if run.validate else ({}, 0)
    samples, progress = [], run.progress
    if run.sample and not stop_signal:
        samples, stop_signal = run.sample()
    if stop_signal:
        return stop_signal
    progress.evaluation_due = False
    if values:
        progress.best_val_loss = min(progress.best_val_loss, values["val_loss"])
        text = " ".join(f"{name}:{value:.4f}" for name, value in values.items())
        run.reporter.log({**position(run), **values}, f"Validation after update {progress.update}: {text}")
    record_samples(run, samples)
    return 0


def record_samples(run, samples):
    for prompt, text in samples:
        run.reporter.say(f"--- sample from {prompt!r}\n{text}\n---")
        run.reporter.record({**position(run), "prompt": prompt, "text": text})
