"""The lines of a run: what it is before it starts, how it goes on, and the records of the same for the metrics file."""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from common.wording import counted
from trainer.machine.measure import describe_machine, peak_memory, versions
from trainer.updates import schedule_of

if TYPE_CHECKING:
    from trainer.job import Outlook, Progress
    from trainer.loop import Trainer


def position(progress: "Progress") -> dict[str, int]:
    """Where a line of the metrics file stands: the axis that all of them share."""
    return {"step": progress.step, "update": progress.update, "tokens": progress.tokens}


def log_record(
    trainer: "Trainer", sums: Sequence[float], epoch: int, step: int, steps: int, rate: float
) -> dict[str, Any]:
    """What a log line records, from the sums of the job's loss since the last one.

    step: of the `steps` micro-batches that are trained of the epoch, counted from 0. rate: the learning rate.
    """
    progress = trainer.progress
    accumulation_steps = trainer.settings.accumulation_steps
    assert trainer.watch is not None
    metrics, tokens = trainer.job.metrics(sums)
    tokens_per_second = tokens / trainer.watch.lap()
    step_seconds = trainer.watch.seconds_per_step(step)
    steps_left = (trainer.all_updates - progress.update) * accumulation_steps
    # epoch_Time, as in the public trainer, is of this epoch alone.
    steps_left_of_epoch = min(steps - step - 1, steps_left)
    record = {
        **position(progress),
        "epoch": epoch + 1,
        **metrics,
        "lr": rate,
        "grad_norm": progress.grad_norm,
        "skipped_updates": progress.skipped,
        "tokens_per_second": tokens_per_second,
        "updates_per_second": 1 / (step_seconds * accumulation_steps),
        "memory": peak_memory(trainer.device),
        "epoch_Time": step_seconds * steps_left_of_epoch / 60,
        "eta": step_seconds * steps_left / 60,
    }
    # Short runs do not wait for a measurement of the machine.
    if trainer.product_rate and trainer.outlook:
        best_rate = trainer.product_rate * trainer.ranks.world_size
        record["flops_utilisation"] = tokens_per_second * trainer.outlook.flops_per_token / best_rate
    return record


# By how much a validation loss rises where it is no chance any more
OVERFITTED = 1.01
# What fields are called in a log line, where that is not their name in the metrics.
LOG_NAMES = {"updates_per_second": "updates/s", "expected_loss": "expected"}


def log_line(record: Mapping[str, Any], head: str, shown: Sequence[str] = ()) -> str:
    """MiniMind's log line and further fields, from a record of metrics; of the `shown` ones those that have a value."""
    line = f"{head} loss:{record['loss']:.3f} lr:{record['lr']:.12f} epoch_Time:{record['epoch_Time']:.1f}min:"
    more = {}
    for name in shown:
        # A gradient norm that is not known yet is None; an accuracy of 0 is a finding.
        if record.get(name) is not None:
            more[LOG_NAMES.get(name, name)] = f"{record[name]:.4g}"
    more["tokens/s"] = f"{record['tokens_per_second']:,.0f}"
    if record["skipped_updates"]:
        more["skipped_updates"] = str(record["skipped_updates"])
    return line + "".join(f" {name}:{value}" for name, value in more.items())


def expectation(record: Mapping[str, Any]) -> str:
    """What stands behind a loss where it is known which one is to be expected."""
    if record.get("expected_loss") is None:
        return ""
    return f" ({record['expected_loss']:.2f} expected)"


def risen_validation(lowest: float, update: int, last: float) -> str | None:
    """A sentence for a run whose validation loss was lower, after `update`, than it is at the end; None: it was not."""
    if not lowest < last:
        return None
    line = (
        f"the validation loss was lowest after update {update:,}: {lowest:.3f}; that of the saved weights is {last:.3f}"
    )
    if last > OVERFITTED * lowest:
        line += ", so the model has begun to learn its training data by heart (fewer epochs or more data help)"
    return line


def bar_line(record: Mapping[str, Any]) -> str:
    """What stands behind the bar: the figures of the last log line."""
    parts = [
        f"{record['tokens'] / 1e6:,.2f}M tokens",
        f"{record['tokens_per_second']:,.0f}/s",
        f"loss {record['loss']:.3f}{expectation(record)}",
        f"lr {record['lr']:.2g}",
        f"{record['memory'] / 1e9:.1f} GB",
    ]
    if record["skipped_updates"]:
        parts.append(f"{record['skipped_updates']} skipped")
    return ", ".join(parts)


def describe(trainer: "Trainer", outlook: "Outlook") -> None:
    """Print what the run derives from its flags, once, before it starts; record it for the report."""
    settings = trainer.settings
    plan = outlook.plan
    schedule = schedule_of(settings, trainer.ranks, plan.n_rows)
    # Unlimited updates are an infinite float, which is never the smaller one.
    updates = int(min(schedule.n_updates * trainer.epochs, trainer.length.last_update))
    micro_batches = counted(settings.accumulation_steps, "micro-batch", "micro-batches")
    dtype = trainer.engine.dtype
    line = (
        f"run: {counted(updates, 'update')} in {counted(trainer.epochs, 'epoch')}, "
        f"{counted(schedule.rows_of_update, 'row')} = {schedule.rows_of_update * plan.T:,} tokens each "
        f"({settings.batch_size} x {micro_batches} x {counted(trainer.ranks.micro_batches_at_once, 'rank')}), {trainer.device}, "
        f"{str(dtype).removeprefix('torch.')}"
    )
    for text in (*outlook.lines, line):
        trainer.reporter.say(text)
    trainer.reporter.record(
        {
            **position(trainer.progress),
            "started": time.strftime("%Y-%m-%d %H:%M:%S"),
            "command": trainer.command,
            # What the intervals of the settings count; else micro-batches.
            "counts_updates": trainer.job.looks.counts_updates,
            "settings": {name: value for name, value in vars(settings).items() if value is not None},
            "model": outlook.model_fields,
            "data": {
                "documents": outlook.n_documents,
                "rows": plan.n_rows,
                "fill": plan.fill,
                "fingerprint": trainer.job.identity.entries.get("data"),
                **outlook.data_fields,
            },
            "machine": {**describe_machine(trainer.device, trainer.ranks.world_size), "dtype": str(dtype)},
            "versions": versions(),
            "charts": [chart.as_record() for chart in outlook.charts],
            "next_commands": [command.as_record() for command in outlook.next_commands],
        }
    )
