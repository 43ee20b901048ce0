"""Lines and records of a run: at its start, in its log lines, and at its end."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.start import next_command
from common.wording import counted
from trainer.engine import Outcome, Update
from trainer.job import UNLIMITED, Job, JobPlan, Progress, RunContext, RunOverview
from trainer.machine.measure import describe_machine, versions
from trainer.machine.ranks import on_main
from trainer.reporting.records import RunRecords, risen_validation
from trainer.reporting.reporter import Reporter

# {field of the metrics: its name in a log line, if another}
LOG_NAMES = {"updates_per_second": "updates/s"}


def describe(job: Job, overview: RunOverview, run_context: RunContext, updates: int) -> tuple[str, dict[str, Any]]:
    """Returns (line on what a run derives from its flags, record of its start). updates: of the run."""
    ranks, device = run_context.ranks, run_context.device
    plan = overview.plan
    batching = job.batching
    micro_batches = counted(batching.micro_batches, "micro-batch", "micro-batches")
    line = (
        f"run: {counted(updates, 'update')} in {counted(job.length.epochs, 'epoch')}, {counted(batching.rows, 'row')} = {batching.rows * plan.T:,} tokens "
        f"each ({batching.batch_size} x {micro_batches} x {counted(ranks.batches_at_once, 'rank')}), {device}, "
        f"{str(job.engine.dtype).removeprefix('torch.')}"
    )
    # If a flag is given twice, the last one counts.
    again = run_context.command.removesuffix(" --from_resume 1") + " --from_resume 1"
    data = {"documents": overview.n_documents, "rows": plan.n_rows, "fill": plan.fill}
    record = {
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": run_context.command,
        "settings": {name: value for name, value in job.settings.values().items() if value is not None},
        "model": overview.model_fields,
        "data": {
            **data,
            "fingerprint": job.identity.entries.get("data"),
            "validation": job.evaluation.data,
            **overview.data_fields,
        },
        "machine": {**describe_machine(device, ranks.world_size), "dtype": str(job.engine.dtype)},
        "versions": versions(),
        "next_commands": [("continue after a stop", again), *overview.next_commands],
    }
    return line, record


def log_line(record: Mapping[str, Any], head: str, shown: Sequence[str]) -> str:
    """MiniMind's log line from a record of metrics, with the `shown` fields that have a value."""
    line = f"{head} loss:{record['loss']:.3f} lr:{record['lr']:.12f} epoch_Time:{record['epoch_Time']:.1f}min:"
    for name in shown:
        # A gradient norm not known yet is None; an accuracy of 0 is shown.
        if record.get(name) is not None:
            line += f" {LOG_NAMES.get(name, name)}:{record[name]:.4g}"
    line += f" tokens/s:{record['tokens_per_second']:,.0f}"
    if record["skipped_updates"]:
        line += f" skipped_updates:{record['skipped_updates']}"
    return line


def report_end(job: Job, progress: Progress, reporter: Reporter, is_complete: bool) -> None:
    """On rank 0: print and record how the run ended, close its records, and write its report."""
    # Counting what was trained may take a while, and a stopped run must exit soon.
    trained = job.trained(progress) if is_complete else []
    total = max(sum(tokens for _, tokens, _ in trained), 1)
    sources = []
    for name, tokens, passes in trained:
        share = tokens / total
        sources.append({"source": name, "tokens": tokens, "share": share, "passes": passes})
        reporter.say(f"trained on {name}: {counted(tokens, 'token')} ({share:.1%}), {passes:.2f} passes")
    if is_complete:
        reporter.record(progress, {"trained": sources})
    if progress.skipped:
        updates = counted(progress.update, "update")
        reporter.say(f"warning: {progress.skipped:,} of {updates} not applied: their loss or gradient was not finite")
    if is_complete:
        reporter.sync()
        # A full disk may have left no line in the file.
        with contextlib.suppress(UserError):
            if risen := risen_validation(RunRecords.read(f"{job.files.stem}.metrics.jsonl")):
                reporter.say(risen)
        reporter.say(", ".join(f"{what}: {path}" for what, path in job.files.outputs.items()))
    reporter.close()
    if not (is_complete and job.settings.report):
        return
    stem = job.files.stem
    try:
        # Matplotlib takes a second to import.
        from trainer.reporting.html_report import write_report

        picture = write_report([f"{stem}.metrics.jsonl"], Path(f"{stem}.report.html"))
        reporter.say(f"report: {stem}.report.html, loss curve: {picture}")
    # Best effort: it must not end the run.
    except Exception as error:
        first = f"pip install {error.name}, then " if isinstance(error, ModuleNotFoundError) else ""
        _, command = next_command("report", "scripts/report.py", f"{stem}.metrics.jsonl")
        reporter.say(f"warning: no report ({error}): {first}{command}")


def skipped_line(outcome: Outcome, update: Update, plan: JobPlan) -> str:
    """Line about an update that was not applied. plan: of its epoch."""
    so_far = f"update {update.number} is not applied ({int(outcome.skipped)} so far)"
    if outcome.overflow:
        # No document is to blame: overflows are how the scaler finds its scale.
        return f"step {update.last_step}: float16: the gradients overflowed at their scale, which is halved: {so_far}"
    documents = [str(document) for document in plan.documents_of(update.first_row, update.end_row)]
    more = f" and {len(documents) - 8} more" if len(documents) > 8 else ""
    return (
        f"step {update.last_step}: non-finite loss or gradient: {so_far}; its documents (counted from 0) are "
        f"{', '.join(documents[:8])}{more}"
    )


def report_already_done(job: Job, progress: Progress, reporter: Reporter) -> None:
    """For the resume of a finished run: say so, and open the records for the report, whose end a kill after the last save may have
    lost."""
    length = job.length
    done = counted(length.epochs, "epoch") if length.last_update == UNLIMITED else counted(progress.update, "update")
    further = f" (raise {length.flag} to continue)" if length.flag else ""
    reporter.say(f"this run has already done its {done}: nothing to do{further}")
    on_main(job.engine.ranks, lambda: reporter.open(Path(f"{job.files.stem}.metrics.jsonl"), progress))
