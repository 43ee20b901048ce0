"""What a fine-tuned model gives: its outputs for the files of a task, their metrics and predictions."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from common.files import atomic_file
from dataset.glue.glue_dataset import Batch, GlueAssembler, Totals
from dataset.glue.glue_tasks import Task
from trainer.engine import Engine
from trainer.evaluation import rows_of_batches
from trainer.glue.loss import forward, loss_sum, metrics_of, predicted
from trainer.machine.signals import StopSignals


def evaluate(
    engine: Engine[Batch, Totals],
    task: Task,
    dev: Mapping[str, GlueAssembler],
    batch_size: int,
    signals: StopSignals,
) -> tuple[dict[str, float], int]:
    """({metric: value} over the development files, with the first's val_loss; number of a stop signal or 0)."""
    found: dict[str, float] = {}
    for suffix, assembler in dev.items():
        logits, stop_signal = outputs(engine, task, assembler, batch_size, signals)
        if stop_signal:
            return {}, stop_signal
        labels = assembler.features.labels
        # MNLI has two development files. The first one's loss is the one to follow.
        found.setdefault("val_loss", float(loss_sum(task, logits, torch.from_numpy(labels))) / len(labels))
        for name, value in metrics_of(task, logits, labels).items():
            found[name + suffix] = value
    return found, 0


def outputs(
    engine: Engine[Batch, Totals], task: Task, assembler: GlueAssembler, batch_size: int, signals: StopSignals
) -> tuple[torch.Tensor, int]:
    """(logits of all examples of an assembler, float32 [N, outputs] on the CPU, the same on every world size; number of a stop
    signal or 0)."""
    # Examples of like length stand together, so that little is padding.
    order = np.argsort(assembler.features.lengths, kind="stable")
    batches = [order[lo : lo + batch_size] for lo in range(0, len(order), batch_size)]

    def compute(number: int) -> torch.Tensor:
        with engine.autocast():
            return forward(engine.model, assembler[batches[number]].to(engine.device))

    logits, stop_signal = rows_of_batches(engine, batches, compute, (len(order), task.outputs), signals)
    return logits.float(), stop_signal


def write_predictions(path: Path, task: Task, logits: torch.Tensor) -> None:
    """Write a TSV of the words of classes, or of scores, as the leaderboard wants it."""
    found = predicted(task, logits)
    # The leaderboard's scores have bounds.
    words = [f"{x:.3f}" for x in found.clip(*task.bounds)] if task.is_regression else [task.labels[i] for i in found]
    lines = ["index\tprediction", *(f"{i}\t{word}" for i, word in enumerate(words))]
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(("\n".join(lines) + "\n").encode())
