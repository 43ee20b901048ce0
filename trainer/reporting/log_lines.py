"""The lines of a run in MiniMind's form, and the record of its start."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from common.wording import counted
from trainer.job import Job, Outlook, Progress
from trainer.machine.measure import describe_machine, versions
from trainer.machine.ranks import Ranks
from trainer.reporting.next_commands import filled
from trainer.updates import rows_of_update

# What fields are called in a log line, where that is not their name in the metrics.
LOG_NAMES = {"updates_per_second": "updates/s", "expected_loss": "expected"}


def position(progress: Progress) -> dict[str, int]:
    """Where a line of the metrics file stands: the axis that all of them share."""
    return {"step": progress.step, "update": progress.update, "tokens": progress.tokens}


def log_line(record: Mapping[str, Any], head: str, shown: Sequence[str] = ()) -> str:
    """MiniMind's log line and further fields, from a record of metrics; of the `shown` ones those that have a value."""
    line = f"{head} loss:{record['loss']:.3f} lr:{record['lr']:.12f} epoch_Time:{record['epoch_Time']:.1f}min:"
    for name in shown:
        # A gradient norm that is not known yet is None; an accuracy of 0 is a finding.
        if record.get(name) is not None:
            line += f" {LOG_NAMES.get(name, name)}:{record[name]:.4g}"
    line += f" tokens/s:{record['tokens_per_second']:,.0f}"
    if record["skipped_updates"]:
        line += f" skipped_updates:{record['skipped_updates']}"
    return line


def bar_line(record: Mapping[str, Any]) -> str:
    """What stands behind the bar: the figures of the last log line."""
    expected = record.get("expected_loss")
    parts = [
        f"{record['tokens'] / 1e6:,.2f}M tokens",
        f"{record['tokens_per_second']:,.0f}/s",
        f"loss {record['loss']:.3f}" + (f" ({expected:.2f} expected)" if expected is not None else ""),
        f"lr {record['lr']:.2g}",
        f"{record['memory'] / 1e9:.1f} GB",
    ]
    if record["skipped_updates"]:
        parts.append(f"{record['skipped_updates']} skipped")
    return ", ".join(parts)


def describe(
    job: Job[Any, Any, Any],
    outlook: Outlook,
    progress: Progress,
    ranks: Ranks,
    device: torch.device,
    updates: int,
    epochs: int,
    command: str,
) -> tuple[str, dict[str, Any]]:
    """(the line on what a run derives from its flags, the record of its start)."""
    settings = job.settings
    plan = outlook.plan
    rows = rows_of_update(settings, ranks)
    micro_batches = counted(settings.accumulation_steps, "micro-batch", "micro-batches")
    line = (
        f"run: {counted(updates, 'update')} in {counted(epochs, 'epoch')}, {counted(rows, 'row')} = {rows * plan.T:,} tokens "
        f"each ({settings.batch_size} x {micro_batches} x {counted(ranks.micro_batches_at_once, 'rank')}), {device}, "
        f"{str(job.engine.dtype).removeprefix('torch.')}"
    )
    data = {"documents": outlook.n_documents, "rows": plan.n_rows, "fill": plan.fill}
    record = {
        **position(progress),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": command,
        "settings": {name: value for name, value in vars(settings).items() if value is not None},
        "model": outlook.model_fields,
        "data": {**data, "fingerprint": job.identity.entries.get("data"), **outlook.data_fields},
        "machine": {**describe_machine(device, ranks.world_size), "dtype": str(job.engine.dtype)},
        "versions": versions(),
        "charts": [chart.as_record() for chart in outlook.charts],
        "next_commands": filled(outlook.next_commands, command, job.files.stem),
    }
    return line, record
