"""The training loop of every trainer.

    Trainer.run          resume or start, train, end with a report
      Trainer.fit        epoch after epoch, until the run is finished or stopped
        train_epoch      the two loops: updates of an epoch, micro-batches of an update
          after_update   after each update: count, log, evaluate, save, stop

The differences between trainers are in a Job (trainer/job.py), an update in engine.py, the lines at start and end in
reporting/lines.py, and the content of a checkpoint in saving/saver.py.
"""

import contextlib
import gc
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import LoaderError, PrintedByAnotherRank
from common.settings import write_settings
from common.wording import counted
from dataset.batches import UpdateSchedule
from dataset.loader import Loader
from trainer.advice import OUT_OF_MEMORY_ADVICE
from trainer.engine import LOADER_FAILED, Idle, Outcome, Update
from trainer.forecast import Forecast, end_line, told_end
from trainer.job import SHORT_RUN_FLOPS, UNLIMITED, Job, JobPlan, Progress, RunContext
from trainer.machine.command_line import signal_name
from trainer.machine.compiling import keep_freed_memory
from trainer.machine.measure import out_of_memory_as_user_error, peak_memory, product_rate
from trainer.machine.ranks import fail_all_ranks, min_over_ranks, on_main, wait_for_all_ranks
from trainer.reporting import lines
from trainer.reporting.alarm import Alarm
from trainer.reporting.reporter import Reporter, Stopwatch
from trainer.saving.run_folder import check_space
from trainer.saving.saver import Saver, SaveTimer
from trainer.verify import Verifier

# Updates until all long-lived objects exist: the first ones compile and fill caches
UPDATES_BEFORE_FREEZE = 3


class Trainer:
    """Trains a Job, and owns the state that changes during a run."""

    # set by `prepare` and `fit`
    loader: Loader
    stopwatch: Stopwatch
    alarm: Alarm
    # Of the current epoch: its rows, how they are distributed over updates and ranks, and the updates of the run before it
    plan: JobPlan | None = None
    schedule: UpdateSchedule
    updates_before: int

    def __init__(self, job: Job, run_context: RunContext) -> None:
        self.job = job
        self.run_context = run_context
        self.ranks = run_context.ranks
        self.settings = job.settings
        self.device = run_context.device
        self.signals = run_context.signals
        self.engine = job.engine
        self.batching = job.batching
        self.reporter = Reporter(self.ranks.is_main, run_context.caller.on_log if run_context.caller else None)
        self.saver = Saver(job, self.reporter)
        self.verifier = Verifier(
            self.engine, self.settings.verify_every, lambda: (vars(job), self.plan, self.saver.best_weights)
        )
        self.save_timer = SaveTimer(self.settings, self.device.type)
        # updates of this process
        self.updates_here = 0
        # `after_update` has called gc.freeze.
        self.has_frozen = False
        self.progress = Progress()
        self.length = job.length
        # For the log lines: fields besides loss and rate, and the FLOPs utilisation of one token per second, relative to the measured
        # peak of all ranks (0: not measured); for evaluations: what the run is expected to reach
        self.shown: Sequence[str] = ()
        self.forecast: Forecast | None = None
        self.utilisation_per_token = 0.0
        # The last update that was evaluated, and its figures
        self.evaluated: tuple[int, dict[str, float]] = (-1, {})

    @property
    def finished(self) -> bool:
        if self.length.last_update < UNLIMITED:
            return self.progress.update >= self.length.last_update
        return self.progress.epoch >= self.length.epochs

    # ------------------------------------------------------------------------------------------- the whole run

    def run(self) -> int:
        """Resume or start, train to the end or to a stop signal, and write the report. Returns the exit code.

        Errors: UserError, in one line, if an allocation failed on this rank.
        """

        def advice_on_memory() -> str:
            # A save in progress may be the newest checkpoint. If it fails, an older one is named.
            with contextlib.suppress(Exception):
                self.saver.checkpoints.wait()
            return f"{OUT_OF_MEMORY_ADVICE}; {self.saver.how_to_resume()}"

        with out_of_memory_as_user_error(self.device, advice_on_memory):
            # files of a run that was killed during a save
            on_main(self.ranks, self.saver.checkpoints.remove_leftovers)
            resumed = self.saver.resume() if self.settings.from_resume else None
            if resumed is not None:
                self.progress = resumed
                self.verifier.updates = resumed.update
            if self.finished and not self.progress.evaluation_due:
                lines.report_already_done(self.job, self.progress, self.reporter)
                self.saver.write_outputs(self.progress)
                exit_code = 0
            else:
                # Only rank 0 writes, and an error there ends all ranks.
                on_main(self.ranks, lambda: self.open_files(is_resumed=resumed is not None))
                self.prepare()
                try:
                    exit_code = self.fit()
                except BaseException:
                    # The program that called goes on, and may resume at once: no save may be in progress.
                    with contextlib.suppress(Exception):
                        self.saver.checkpoints.wait()
                    self.reporter.close()
                    self.engine.close()
                    raise
                finally:
                    if self.has_frozen:
                        gc.unfreeze()
            # The report may take a while.
            with wait_for_all_ranks(self.ranks):
                if self.ranks.is_main:
                    lines.report_end(self.job, self.progress, self.reporter, exit_code == 0)
        self.engine.close()
        return exit_code

    def open_files(self, is_resumed: bool) -> None:
        """On rank 0: create or continue the run's files. A fresh run first moves an earlier one out of its way."""
        files = self.job.files
        check_space(files.stem.parent, self.engine.model)
        self.saver.checkpoints.start_thread()
        # The tracker comes before the files: if it fails, nothing has been moved.
        if self.settings.tracker != "none":
            self.reporter.open_tracker(self.settings, files.stem, self.progress.tracker_ids)
        if not is_resumed:
            self.saver.set_aside_earlier_run()
        write_settings(files.settings, Path(f"{files.stem}.settings.yaml"))
        for write in files.write_at_start.values():
            write()
        self.reporter.open(Path(f"{files.stem}.metrics.jsonl"), self.progress if is_resumed else None)

    def prepare(self) -> None:
        """Describe the run, compile the model and create the loader."""
        # Rank 0 reads the data for the report.
        with wait_for_all_ranks(self.ranks):
            overview = self.job.overview(self.progress)
            notices = [*self.run_context.notices, *overview.notices, *self.job.compile_model(overview)]
        if self.engine.is_sharded:
            notices.append(f"{self.ranks.world_size} ranks share the weights, gradients and optimiser states")
        updates_of_epoch = self.batching.schedule(overview.plan.n_rows).n_updates
        updates = updates_of_epoch * self.length.epochs
        if self.length.last_update < UNLIMITED:
            updates = int(self.length.last_update)
            self.length.epochs = math.ceil(updates / updates_of_epoch)
        line, start = lines.describe(self.job, overview, self.run_context, updates)
        for text in (*overview.lines, line):
            self.reporter.say(text)
        self.reporter.record(self.progress, start)
        for notice in notices:
            self.reporter.say(notice)
        # Do not keep the overview itself: its plan may be large.
        self.shown, self.forecast = overview.shown, overview.forecast
        self.alarm = Alarm(*overview.guesses, self.warn, self.progress.alarm)
        if self.length.clock is not None:
            self.length.clock.forecast = self.forecast
        # Short runs do not wait for a measurement of the machine.
        if overview.flops >= SHORT_RUN_FLOPS:
            best_rate = product_rate(self.device, self.engine.dtype) * self.ranks.world_size
            self.utilisation_per_token = overview.flops_per_token / best_rate
        if self.device.type == "cpu":
            # Again, before the loader forks
            keep_freed_memory()
        pin_memory = self.device.type == "cuda"
        self.loader = Loader(self.job.assembler, self.ranks.rank, self.settings.num_workers, pin_memory)

    # ------------------------------------------------------------------------------------------------ the loop

    def fit(self) -> int:
        """Train to the end or to a stop signal; everything is on disk afterwards. Returns the exit code.

        Errors: LoaderError if the loader failed; the updates before are saved. PrintedByAnotherRank if that happened on
        another rank, which reports it.
        """
        stop_request = 0
        self.save_timer.restart()
        self.stopwatch = Stopwatch(self.progress.step, self.progress.log_seconds)
        try:
            if self.progress.evaluation_due:
                # interrupted by a signal before the resume
                stop_request = self.run_evaluation()
                if self.finished and not stop_request:
                    # No later save would record that this evaluation is done.
                    self.save()
            while not self.finished and not stop_request:
                stop_request = self.train_epoch()
        except LoaderError:
            stop_request = LOADER_FAILED
            if self.progress.update:
                self.save()
        except RuntimeError:
            # Ctrl-C also ends the compiler processes of the first update. (Several ranks would wait for each other below.)
            if self.updates_here or not self.signals.signum or self.ranks.world_size > 1:
                raise
            stop_request = self.signals.signum
        finally:
            self.loader.close()
        self.saver.finish()
        if not stop_request:
            return 0
        because = "because the loader failed" if stop_request == LOADER_FAILED else f"by {signal_name(stop_request)}"
        saved = "everything is saved, and the same command with --from_resume 1 continues from here"
        if not self.progress.update:
            # The loader failed before there was anything to save.
            saved = self.saver.how_to_resume()
        self.reporter.say(f"stopped {because} after update {self.progress.update}; {saved}")
        if stop_request == LOADER_FAILED:
            raise self.loader.failure or PrintedByAnotherRank
        # the shell's exit code for a process ended by a signal
        return 128 + stop_request

    def train_epoch(self) -> int:
        """Train from row `progress.row` to the end of the epoch.

        Returns the stop request on which it ended (one of engine.STOP_REQUESTS), or 0.
        Errors: LoaderError before the first update, on all ranks, or when no batches are left.
        """
        progress = self.progress
        # A plan may be large: free the last one before making the next.
        self.plan = None
        # The clock of a budget may extend a run beyond the planned epochs.
        self.length.epochs = max(self.length.epochs, progress.epoch + 1)
        with self.stopwatch.paused(), wait_for_all_ranks(self.ranks):
            self.plan = plan = self.job.plan(progress.epoch)
            self.schedule = schedule = self.batching.schedule(plan.n_rows, progress.row)
        self.updates_before = progress.update - schedule.first_update
        # From here on a stop signal waits for the end of the update.
        self.signals.arm()
        updates = self.loader.updates(plan.recipe, schedule)
        # A later failure is reported with an update. A rank without a first batch cannot take part in one, so the ranks ask each other.
        if min_over_ranks(self.ranks, float(self.loader.failure is None)) == 0:
            raise LoaderError("no first batch, on this rank or another: `fit` raises the loader's own error")
        for number_in_epoch, batches in updates:
            first_row, end_row = schedule.rows(number_in_epoch)
            first_step = number_in_epoch * self.batching.micro_batches
            totals = plan.totals(first_row, end_row)
            if self.engine.is_sharded and None in batches:
                # A sharded model needs all ranks: without rows this one computes the first row of the update, which does not count.
                idle = Idle(self.job.assembler[plan.recipe(range(first_row, first_row + 1))])
                batches = [idle if batch is None else batch for batch in batches]
            update = Update(
                number=progress.update + 1,
                epoch=progress.epoch,
                n_rows=plan.n_rows,
                first_row=first_row,
                end_row=end_row,
                first_step=first_step,
                last_step=first_step + len(batches) - 1,
                targets=totals.targets,
            )
            rate = self.job.learning_rate(update, progress)
            if not self.updates_here:
                self.tell_raised_rate(rate)
            # Engine.train, within the checks of --verify_every; ends after the optimiser's step
            for step, _ in enumerate(self.verifier.train(batches, totals, rate, self.requests), start=first_step):
                progress.step += 1
                if step < update.last_step:
                    self.log(update, step, rate)
            stop_request = self.after_update(update, rate)
            if stop_request:
                # this rank's own signal if it received one, else that of another rank
                return stop_request if stop_request == LOADER_FAILED else self.signals.stop_request or stop_request
            if self.finished:
                break
        return 0

    def tell_raised_rate(self, rate: float) -> None:
        """A line if a resume begins with more than twice the rate of the save, as no warm-up does behind its first updates."""
        group = min(self.engine.groups, key=lambda group: "lr_scale" in group)
        before = float(group["lr"]) / group.get("lr_scale", 1.0)
        if self.progress.update and rate > 2.01 * before > 0:
            self.reporter.say(f"note: the learning rate was {before:.2g} at the save, this start makes it {rate:.2g}")

    def requests(self) -> tuple[int, bool]:
        """This rank's requests to all ranks, sent with the update's one message: (stop, save).

        Stop: the number of a signal received, LOADER_FAILED if the loader failed, or 0. Save: on a signal or, on rank 0, by its
        timer, but not while a save is being written: a disk may take longer than the timer's interval, and training would wait for it.
        """
        stop_request = self.signals.stop_request or (LOADER_FAILED if self.loader.failure else 0)
        is_free = self.ranks.is_main and not self.saver.checkpoints.is_writing()
        timer_is_due = is_free and self.save_timer.take_request()
        return stop_request, self.signals.take_save_request() or timer_is_due

    # ------------------------------------------------------------------------------------------ after an update

    def after_update(self, update: Update, rate: float) -> int:
        """Count, log, evaluate, sample and save, in this order. Returns the stop request of any rank (STOP_REQUESTS), or 0."""
        progress, evaluation = self.progress, self.job.evaluation
        progress.update = update.number
        progress.tokens += update.targets
        progress.rows += update.end_row - update.first_row
        progress.row = update.end_row
        if update.end_row == update.n_rows:
            # on to the first row of the next epoch
            progress.epoch = update.epoch + 1
            progress.row = 0
        self.stopwatch.after_update(progress.step)
        if self.length.clock is not None:
            self.length.clock.after_update(progress.update)

        # On CUDA an update's outcome arrives with the next one. Wait for it before a save, and at the end of an epoch, since the
        # documents of a skipped update are looked up in the epoch's plan.
        outcomes = self.engine.poll(update)
        save_is_due = self.finished or progress.update in self.job.files.save_at
        save_is_due = save_is_due or self.is_due(self.save_timer.interval, update)
        # On a stop request the run is saved too.
        if save_is_due or progress.row == 0 or any(outcome.save or outcome.stop_request for outcome in outcomes):
            outcomes += self.engine.drain()
        save_is_due = save_is_due or any(outcome.save for outcome in outcomes)
        stop_request = max((int(outcome.stop_request) for outcome in outcomes), default=0)
        self.record_outcomes(outcomes)

        self.log(update, update.last_step, rate)
        if self.finished or (evaluation.evaluate is not None and self.is_due(evaluation.eval_interval, update)):
            # If a stop signal comes first, the resume does it.
            progress.evaluation_due = True
        # After a stop signal a resume makes up for an evaluation, but not for samples at their own interval, which are short.
        if stop_request != LOADER_FAILED and not (stop_request and progress.evaluation_due):
            if self.finished and (evaluation.evaluate or evaluation.samples):
                # If these fail, perhaps out of memory, no updates are lost: a resume only evaluates.
                self.save()
            stop_request = self.run_evaluation() or stop_request
        if save_is_due or stop_request:
            self.save()
        self.updates_here += 1
        # What the program that calls has frozen stays so.
        may_freeze = self.device.type == "cuda" and not gc.get_freeze_count()
        if self.updates_here == UPDATES_BEFORE_FREEZE and may_freeze:
            # torch, transformers and the compiler leave millions of objects that live as long as the process. Now and then Python's
            # collector would scan all of them, half a second in which the GPU gets no work.
            gc.collect()
            gc.freeze()
            self.has_frozen = True
        return stop_request

    def is_due(self, interval: int, update: Update) -> bool:
        """True if the update just done completes a multiple of the interval; never for an interval of 0.

        An interval counts updates or, as in MiniMind, micro-batches, over all epochs. It may end some micro-batches late: an
        interval of 100 ends with the update that contains the 100th.
        """
        if self.job.evaluation.counts_updates:
            return interval > 0 and self.progress.update % interval == 0
        end = self.progress.step + 1
        return self.batching.completes(interval, end - (update.last_step + 1 - update.first_step), end)

    def record_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        """Record and report the outcomes of updates of the current epoch.

        Errors: UserError on rank 0 after --max_bad_updates skipped updates in a row, once the last save is on disk.
        """
        for outcome in outcomes:
            self.progress.grad_norm = outcome.grad_norm
            if outcome.skipped <= self.progress.skipped:
                continue
            self.progress.skipped = int(outcome.skipped)
            assert outcome.update is not None and self.plan is not None
            self.reporter.say(lines.skipped_line(outcome, outcome.update, self.plan))
            if not outcome.overflow and outcome.skipped_in_a_row >= self.settings.max_bad_updates:
                self.saver.finish()
                fail_all_ranks(
                    self.ranks,
                    f"{counted(int(outcome.skipped_in_a_row), 'update')} in a row had a non-finite loss or gradient (up to step "
                    f"{outcome.update.last_step}); none of them is saved: lower the learning rates (--learning_rate, Muon: --muon_lr) "
                    "or look at the documents named above",
                )

    def log(self, update: Update, step: int, rate: float) -> None:
        """Log after the first micro-batch (or update) of each interval, and after the last one: means over the tokens of all ranks
        since the last line. step: within the epoch, from 0.
        """
        progress, interval, schedule = self.progress, self.settings.log_interval, self.schedule
        micro_batches = self.batching.micro_batches
        is_due = self.batching.completes(interval, step - 1, step)
        if self.job.evaluation.counts_updates:
            update_number, micro_batch = divmod(step, micro_batches)
            # A line covers whole updates.
            is_due = update_number % interval == 0 and micro_batch == micro_batches - 1
        if not (is_due or step == schedule.n_steps - 1 or self.finished):
            return
        # a collective, though only rank 0 logs
        sums = self.engine.collect()
        if not self.ranks.is_main:
            return
        # Updates of the run: if only epochs limit it, assume that all have as many rows as this one. n_steps: micro-batches of this
        # epoch, within which the run may end.
        all_updates = self.length.last_update
        if all_updates == UNLIMITED:
            all_updates = self.updates_before + schedule.n_updates * (self.length.epochs - update.epoch)
        n_steps = int(min(schedule.n_steps, (all_updates - self.updates_before) * micro_batches))
        metrics, tokens = self.job.metrics(sums)
        tokens_per_second = tokens / self.stopwatch.lap()
        step_seconds = self.stopwatch.seconds_per_step(progress.step)
        # The last update of an epoch, perhaps its only one, may have fewer micro-batches.
        steps_per_update = schedule.n_steps / schedule.n_updates
        steps_left = (all_updates - progress.update) * steps_per_update
        values: dict[str, Any] = {
            "epoch": update.epoch + 1,
            **metrics,
            "lr": rate,
            "grad_norm": progress.grad_norm,
            "skipped_updates": progress.skipped,
            "tokens_per_second": tokens_per_second,
            "updates_per_second": 1 / (step_seconds * steps_per_update),
            "memory": peak_memory(self.device),
            # as in MiniMind, for this epoch only
            "epoch_Time": step_seconds * min(n_steps - step - 1, steps_left) / 60,
            "eta": step_seconds * steps_left / 60,
        }
        if self.utilisation_per_token:
            values["flops_utilisation"] = tokens_per_second * self.utilisation_per_token
        head = f"Epoch:[{update.epoch + 1}/{self.length.epochs}]({step}/{n_steps})"
        self.reporter.log(progress, values, lines.log_line(values, head, self.shown))
        self.alarm.after_log(update.number, values["loss"], progress.is_warm)

    # ----------------------------------------------------------------------------------- evaluation and saving

    def run_evaluation(self) -> int:
        """Evaluate, sample and record what is due. Returns the number of a stop signal received meanwhile, in which case nothing
        is recorded, or 0.
        """
        progress, evaluation, clock = self.progress, self.job.evaluation, self.length.clock
        # Samples come with each evaluation, or at their own interval.
        samples_are_due = progress.evaluation_due
        if evaluation.sample_interval:
            samples_are_due = self.finished or progress.update % evaluation.sample_interval == 0
        if not (progress.evaluation_due or samples_are_due):
            return 0
        values: dict[str, float] = {}
        samples: list[tuple[str, str]] = []
        stop_request = 0
        given = self.engine, self.signals
        with self.stopwatch.paused(), clock.evaluating() if clock else contextlib.nullcontext():
            if progress.evaluation_due and evaluation.evaluate is not None:
                compute = partial(evaluation.evaluate, *given, progress.update)
                values, stop_request = self.verifier.at_rest(compute)
            if samples_are_due and evaluation.samples is not None and not stop_request:
                samples, stop_request = self.verifier.at_rest(partial(evaluation.samples, *given))
            if stop_request:
                return stop_request
            progress.evaluation_due = False
            if values:
                self.evaluated = (progress.update, values)
                progress.val_loss = values["val_loss"]
                if progress.val_data not in ("", evaluation.data):
                    # Losses on other documents are not comparable.
                    progress.best_val_loss = math.inf
                progress.val_data = evaluation.data
                if progress.val_loss < progress.best_val_loss:
                    progress.best_val_loss = progress.val_loss
                    self.saver.keep_best()
                self.report_evaluation(values)
            for prompt, text in samples:
                self.reporter.say(f"--- sample from {prompt!r}\n{text}\n---")
                self.reporter.record(progress, {"prompt": prompt, "text": text})
        return 0

    def report_evaluation(self, values: Mapping[str, float]) -> None:
        """Print and record the figures of an evaluation, beside what the run is expected to reach."""
        progress = self.progress
        text = " ".join(f"{name}:{value:.4f}" for name, value in values.items())
        text = f"Validation after update {progress.update}: {text}"
        if not self.finished:
            text += told_end(self.forecast, self.length.last_update)
        expected = self.forecast(self.length.last_update) if self.forecast else None
        self.reporter.log(progress, {**values, **({"expected": expected._asdict()} if expected else {})}, text)
        if progress.is_warm:
            self.alarm.after_evaluation(values["val_loss"])
        if self.finished and self.forecast:
            self.reporter.say(end_line(self.forecast, progress.val_loss, progress.update, self.length.max_updates))

    def warn(self, line: str) -> None:
        """Print and record a line about a run that goes wrong."""
        self.reporter.say(f"warning: {line}")
        self.reporter.record(self.progress, {"alarm": line})

    def save(self) -> None:
        """Start writing a checkpoint and the weights, in a thread."""
        self.verifier.check_at_rest()
        # A checkpoint includes the outcome of its last update.
        self.record_outcomes(self.engine.drain())
        self.save_timer.restart()
        self.progress.log_seconds = self.stopwatch.elapsed()
        self.saver.save(self.progress, is_last=self.finished)


def train_epoch(trainer: Trainer) -> int:
    """`Trainer.train_epoch` by its name in MiniMind."""
    return trainer.train_epoch()
